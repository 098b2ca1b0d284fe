"""Read settings strictly: a YAML file, then `key=value` from the command line. Knows nothing of what the keys mean.

    x.yaml, ["optim.lr=1e-4"] -> Reading(tree, place of every key, problems)

Problems are collected, not raised, so that a user sees all of them at once. YAML is read as version 1.2 has it where
1.1 surprises: only true and false are booleans (`off` and `no` are words), 1e-4 is a number, 010 and 1:30 are not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import yaml

from litchi.errors import UsageError

BUILTIN = "builtin:"
Key = tuple[str | int, ...]  # ("data", "train", 0, "path")

COMMAND_LINE = "command line"
_AFTER_THE_FILE = 1_000_000_000  # problems of the command line are listed after those of the file


@dataclass(frozen=True)
class Place:
    """Where a key was given. `text` is the `key=value` of the command line, empty in a file."""

    at: Key
    order: int
    label: str
    text: str = ""


@dataclass
class Reading:
    """What was read and what is wrong with it."""

    label: str  # the file, or the command line where there is none
    tree: dict[str, Any] = field(default_factory=dict)
    places: dict[Key, Place] = field(default_factory=dict)
    problems: list[tuple[int, str]] = field(default_factory=list)

    def place(self, at: Key) -> Place:
        """Find the place of a key, or of the nearest one above it that was written down."""
        known = (self.places[at[:n]] for n in range(len(at), 0, -1) if at[:n] in self.places)
        return next(known, Place((), 0, self.label))

    def report(self, at: Key, text: str) -> None:
        """Add a problem with the setting at a key."""
        place = self.place(at)
        self.problems.append((place.order, f"{place.label}: {text}"))

    def raise_problems(self) -> None:
        """Raise one UsageError that has a line for each problem, in the order of the file."""
        lines = dict.fromkeys(line for _, line in sorted(self.problems, key=lambda p: p[0]))
        if lines:
            raise UsageError("\n".join(lines))


def read_settings(path: str | Path | None, overrides: Sequence[str], expand: Callable[[Key, Any], Any]) -> Reading:
    """Read a settings file and lay `key=value` over it; a value takes the place of what the file has under its key.

    Args:
        path: the YAML file, or `builtin:NAME` for one that comes with the package; None: the command line only.
        overrides: `dotted.key=value`, the value in YAML.
        expand: writes out the short form of the setting at a key (`loss: bce`), so that `loss.weight=2` can join it.

    Raises:
        UsageError: the file cannot be read as a mapping. Everything smaller is a problem of the reading.
    """
    reading = Reading(COMMAND_LINE if path is None else str(path))
    if path is not None:
        _read_file(find_file(path), reading)
    for number, text in enumerate(overrides):
        _override(text, _AFTER_THE_FILE + number, reading, expand)
    return reading


def find_file(path: str | Path) -> Path:
    """The YAML file that is meant by a path or by `builtin:NAME`.

    Raises:
        UsageError: no such file comes with the package.
    """
    if not str(path).startswith(BUILTIN):
        return Path(path)
    package = Path(__file__).parents[1]
    folders = package / "configs", package.parents[1] / "configs"  # of an installed package, and of a clone
    folder = next((folder for folder in folders if folder.is_dir()), folders[0])
    known = {file.stem: file for file in sorted(folder.glob("*.yaml"))}
    name = str(path).removeprefix(BUILTIN)
    if name not in known:
        listed = ", ".join(f"{BUILTIN}{stem}" for stem in known)
        raise UsageError(f"no settings named {path} come with Litchi", remedy=f"There are {listed}")
    return known[name]


def dump_settings(tree: dict[str, Any]) -> str:
    """Write settings as YAML that `read_settings`, and any other reader, takes back as they are."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)


# ---------------------------------------------------------------------------------------------------------- YAML


class _Loader(yaml.SafeLoader):
    """Plain data only. Aliases are refused: a setting is read where it stands."""

    yaml_implicit_resolvers: ClassVar = {}  # type: ignore[misc]  # the stubs call PyYAML's class attribute an instance's

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not read in settings", problem_mark=mark)
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Quotes texts that YAML 1.1 or `_Loader` would read as something else. Short groups stand on one line."""

    def represent_mapping(self, tag, mapping, flow_style=None):
        node = super().represent_mapping(tag, mapping, flow_style)
        node.flow_style = node.flow_style and len(mapping) <= 4
        return node


_NULL = ("null", "Null", "NULL", "~")
_WHOLE = r"[-+]?(0|[1-9][0-9_]*)"  # not 010: octal to some readers, ten to others; it stays a text and is refused
_FLOAT = re.compile(rf"({_WHOLE}(\.[0-9_]*)?|[-+]?\.[0-9]+)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$")
_PLAIN = (
    ("null", re.compile(rf"({'|'.join(_NULL)}|)$"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"(true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("int", re.compile(_WHOLE + "$"), list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
)
for _tag, _pattern, _first in _PLAIN:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, _first)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def _read_file(path: Path, reading: Reading) -> None:
    try:
        text = path.read_text(encoding="utf-8")
    except IsADirectoryError:
        raise UsageError("the settings are a folder", where=path, why="a YAML file is needed") from None
    except UnicodeDecodeError as error:
        raise UsageError("the settings are not UTF-8", where=path, why=f"byte {error.start} cannot be read") from None
    except OSError as error:
        raise UsageError(
            "cannot read the settings", where=path, why=error.strerror, remedy="Check the path of the YAML file."
        ) from None
    try:
        tree = _Walk(reading, str(path)).read(text)
    except yaml.YAMLError as error:
        line, why = _yaml_problem(error)
        where = f"{path}:{line}" if line else path
        raise UsageError("the settings are not valid YAML", where=where, why=why) from None
    if tree is None:
        raise UsageError("the settings are empty", where=path, remedy="Give at least `task: chat` or `task: rerank`.")
    if not isinstance(tree, dict):
        kind = "a list" if isinstance(tree, list) else "a single value"
        raise UsageError(f"the settings are {kind}", where=path, why="a mapping of keys to values is needed")
    reading.tree = tree


def _yaml_problem(error: yaml.YAMLError) -> tuple[int | None, str]:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return error.problem_mark.line + 1, error.problem or "cannot be read"
    return None, " ".join(str(error).split())


@dataclass
class _Walk:
    """Turn YAML nodes into plain data and note the line of every key. A key given twice is a problem."""

    reading: Reading
    file: str

    def read(self, text: str) -> Any:
        self.loader = _Loader(text)
        try:
            node = self.loader.get_single_node()
            return None if node is None else self.plain(node, ())
        except ValueError as error:  # a tag that does not fit its value, such as !!int x
            raise yaml.YAMLError(str(error)) from None
        finally:
            self.loader.dispose()

    def plain(self, node: yaml.Node, at: Key) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, at)
        if isinstance(node, yaml.SequenceNode):
            return [self.item(child, (*at, n)) for n, child in enumerate(node.value)]
        return self.loader.construct_object(node)

    def item(self, node: yaml.Node, at: Key) -> Any:
        self.reading.places[at] = self.place(node, at)
        return self.plain(node, at)

    def mapping(self, node: yaml.MappingNode, at: Key) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self.loader.construct_object(key_node, deep=True)
            place = self.place(key_node, (*at, str(key)))
            if not isinstance(key, str):
                self.problem(place, f"the key {key!r} is not a word")
            elif key in out:
                first = self.reading.places[place.at].order
                self.problem(place, f"{dotted(place.at)}: given twice (first on line {first})")
            else:
                self.reading.places[place.at] = place
                out[key] = self.plain(value_node, place.at)
        return out

    def place(self, node: yaml.Node, at: Key) -> Place:
        line = node.start_mark.line + 1
        return Place(at, line, f"{self.file}:{line}")

    def problem(self, place: Place, text: str) -> None:
        self.reading.problems.append((place.order, f"{place.label}: {text}"))


# -------------------------------------------------------------------------------------------------- command line


def _override(text: str, order: int, reading: Reading, expand: Callable[[Key, Any], Any]) -> None:
    name, equals, value_text = text.partition("=")
    at = tuple(name.strip().split("."))

    def refuse(why: str) -> None:
        reading.problems.append((order, f"{COMMAND_LINE}: {text}: {why}"))

    if not equals or not all(at):
        return refuse("expected key=value, as in optim.lr=1e-4")
    inner = Reading(COMMAND_LINE)
    try:
        value = _Walk(inner, COMMAND_LINE).read(value_text)
    except yaml.YAMLError as error:
        return refuse(f"the value is not valid YAML ({_yaml_problem(error)[1]}). Put it in quotes")
    if value is None and value_text.strip() not in _NULL:
        return refuse("no value. Write null to unset it")
    for _, problem in inner.problems:
        return refuse(problem.partition(": ")[2])
    node = reading.tree
    for n, key in enumerate(at[:-1], 1):
        child = expand(at[:n], node.get(key))
        if not isinstance(child, dict):
            return refuse(f"{dotted(at[:n])} is {show(child)} and is set as a whole")
        node[key] = child = dict(child)
        node = child
    node[at[-1]] = value
    for stale in [known for known in reading.places if known[: len(at)] == at]:
        del reading.places[stale]
    reading.places[at] = Place(at, order, COMMAND_LINE, text)


# --------------------------------------------------------------------------------------------------------- words


def dotted(at: Key) -> str:
    """Write a key as a user does: data.train[0].path."""
    return "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in at).lstrip(".")


def show(value: Any) -> str:
    """Write a value as it stands in YAML, texts in quotes, long ones cut."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
