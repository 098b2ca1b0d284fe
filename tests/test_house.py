"""The rules of the house, checked by reading the source: which way imports go, how files are named, what READMEs say.

Nothing here imports torch.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "litchi"
MODULES = sorted(SOURCE.rglob("*.py"))
READMES = [ROOT / "README.md", ROOT / "README.zh.md"]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))

# A module imports from lower levels and from its own package only; packages of one level do not know each other.
LEVELS = [
    {"litchi"},  # __init__.py: the version, nothing else
    {"types", "errors"},
    {"config", "dist"},
    {"data"},
    {"batch"},
    {"model"},
    {"parallel"},
    {"evaluate"},
    {"train"},
    {"serve", "prepare", "scale"},
    {"cli"},
    {"__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
MAX_LINES = 450
VAGUE = {"utils", "util", "common", "helpers", "helper", "base", "core", "manager", "misc"}
# Written so that a pattern does not match itself.
UNFINISHED = re.compile(r"\b(T[O]DO|F[I]XME|X[X]X|H[A]CK)\b|NotImplemented[E]rror")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def room_of(module: str) -> str:
    """`litchi.data.jsonl` lives in `data`, `litchi.cli` in `cli`, `litchi` in `litchi`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "litchi"


def imports_of(path: Path) -> list[tuple[int, str]]:
    """Read every import of a file as (line, absolute module), also those inside functions or for types only."""
    package = ["litchi", *path.relative_to(SOURCE).parent.parts]
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join(start + ([node.module] if node.module else []))
            found += [(node.lineno, module)]
            found += [(node.lineno, f"{module}.{a.name}") for a in node.names if is_module(f"{module}.{a.name}")]
    return found


def is_module(name: str) -> bool:
    """Is `litchi.a.b` a module (and not a function inside one)? Names of other libraries count as modules."""
    parts = name.split(".")
    if parts[0] != "litchi":
        return True
    target = SOURCE.joinpath(*parts[1:])
    return target.is_dir() or target.with_suffix(".py").is_file()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_down(path):
    parts = path.relative_to(SOURCE).with_suffix("").parts
    here = "litchi" if parts == ("__init__",) else parts[0]
    assert here in LEVEL, f"{name_of(path)}: give '{here}' a level in {name_of(Path(__file__))}"
    for line, module in imports_of(path):
        if module.split(".")[0] != "litchi":
            continue
        there = room_of(module)
        down = there == here or LEVEL.get(there, len(LEVELS)) < LEVEL[here]
        assert down, f"{name_of(path)}:{line}: {here} must not import {there} (imports go down only)"


def circle_in(imports: dict[str, set[str]]) -> list[str] | None:
    """A way from a module back to itself, or None."""
    done: set[str] = set()

    def walk(module: str, way: list[str]) -> list[str] | None:
        if module in way:
            return [*way[way.index(module) :], module]
        if module in done:
            return None
        found = next(filter(None, (walk(to, [*way, module]) for to in sorted(imports.get(module, ())))), None)
        done.add(module)
        return found

    return next(filter(None, (walk(module, []) for module in sorted(imports))), None)


def test_imports_go_in_no_circle():
    """Neither inside functions nor for types only: what two modules need of each other belongs into a third."""
    imports: dict[str, set[str]] = {}
    for path in MODULES:
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(("litchi", *parts)).removesuffix(".__init__")
        imports[name] = {to for _, to in imports_of(path) if to.startswith("litchi") and is_file(to) and to != name}
    assert sum(map(len, imports.values())) > 500
    found = circle_in(imports)
    assert found is None, " > ".join(found)
    assert circle_in({"a": {"b", "d"}, "b": {"c"}, "c": {"d", "b"}}) == ["b", "c", "b"]


def is_file(module: str) -> bool:
    """Is it a module with content? An empty package imports nothing."""
    target = SOURCE.joinpath(*module.split(".")[1:])
    return target.with_suffix(".py").is_file() or bool((target / "__init__.py").read_text(encoding="utf-8").strip())


RANK_FREE = [path for path in MODULES if path.relative_to(SOURCE).parts[0] in ("data", "batch")]


@pytest.mark.parametrize("path", RANK_FREE, ids=name_of)
def test_data_and_batch_know_ranks_as_integers_only(path):
    for line, module in imports_of(path):
        assert not module.startswith("torch.distributed"), f"{name_of(path)}:{line}: takes rank and world as integers"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            assert ast.unparse(node) != "torch.distributed", f"{name_of(path)}:{node.lineno}: uses torch.distributed"


def test_import_rules_are_not_vacuous():
    """The walk sees imports inside functions, relative ones and submodules, and `types` is really imported."""
    seen = {room_of(module) for path in MODULES for _, module in imports_of(path) if module.startswith("litchi.")}
    assert {"types", "errors"} <= seen
    lazy = ast.parse("def f():\n    from litchi.train import loop")
    assert any(isinstance(node, ast.ImportFrom) for node in ast.walk(lazy))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_file_is_named_for_what_it_holds_says_what_it_is_and_is_short(path):
    assert path.stem not in VAGUE, f"{name_of(path)}: name the file for what it holds"
    text = path.read_text(encoding="utf-8")
    lines = text.count("\n")
    assert lines <= MAX_LINES, f"{name_of(path)}: {lines} lines; a second concept may want a room of its own"
    if text.strip():  # an empty __init__.py says nothing and needs not
        assert ast.get_docstring(ast.parse(text)), f"{name_of(path)}: the module docstring says what flows in and out"


SHORT = 3  # lines that say themselves what they do


def unexplained(path: Path) -> list[str]:
    """Public classes, and public functions longer than a few lines, that have no docstring."""
    lost = []

    def walk(node: ast.AST, above: str) -> None:
        for one in ast.iter_child_nodes(node):
            if isinstance(one, ast.ClassDef):
                if not one.name.startswith("_"):
                    lost.extend([above + one.name] if not ast.get_docstring(one) else [])
                    walk(one, f"{above}{one.name}.")
            elif isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
                of_torch = one.name in ("forward", "backward")  # the class says what they do
                lines = one.body[-1].end_lineno - one.body[0].lineno + 1
                if not (one.name.startswith("_") or of_torch or lines <= SHORT or ast.get_docstring(one)):
                    lost.append(above + one.name)

    walk(ast.parse(path.read_text(encoding="utf-8")), "")
    return lost


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_what_others_use_says_what_it_is(path):
    assert not unexplained(path), f"{name_of(path)}: without a docstring: {unexplained(path)}"


def test_what_is_not_explained_is_found(tmp_path):
    lines = "\n    ".join(["x = 1"] * 4)
    text = f"def f():\n    {lines}\n\n\nclass A:\n    def g(self):\n        {lines.replace('    ', ' ' * 8)}\n"
    (tmp_path / "a.py").write_text(text + "\n\ndef short():\n    return 1\n\n\ndef _own():\n    " + lines + "\n")
    assert unexplained(tmp_path / "a.py") == ["f", "A", "A.g"]


def test_no_unfinished_places():
    """What is not there yet is refused by name and stands in the README, not in a comment."""
    files = [*MODULES, *CONFIGS, *sorted((ROOT / "tests").rglob("*.py")), *ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    for path in files:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            found = UNFINISHED.search(line)
            assert not found, f"{name_of(path)}:{number}: {found and found.group()}"


# ---- READMEs and configs


def blocks_of(path: Path) -> list[str]:
    """The fenced blocks of a Markdown file, with their language line."""
    return re.findall(r"^```(.*?)^```", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def commands_of(text: str) -> list[list[str]]:
    """The words after `litchi` in every command of a text; backslash-newlines are joined."""
    text = re.sub(r"\\\n\s*#?", " ", text)
    found = re.findall(r"(?:^|[\s`/#])litchi[ ]+([a-z]+(?: [^\n`|;&#]*)?)", text, flags=re.MULTILINE)
    return [words.split() for words in found]


def command_texts() -> list[tuple[str, str]]:
    """Where commands stand: in code of the READMEs and in the comment that begins each config."""
    texts = []
    for path in READMES:
        source = path.read_text(encoding="utf-8")
        inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", source, flags=re.DOTALL | re.MULTILINE))
        texts += [(name_of(path), block.partition("\n")[2]) for block in blocks_of(path) if block.startswith("bash")]
        texts += [(name_of(path), code) for code in inline]
    for path in CONFIGS:
        head = [line for line in path.read_text(encoding="utf-8").splitlines()[:12] if line.startswith("#")]
        texts.append((name_of(path), "\n".join(head)))
    return texts


def words_of_cli() -> set[str]:
    """Every function name and string in cli/: a verb is one of them however it is registered."""
    words = set()
    text = "\n".join(path.read_text(encoding="utf-8") for path in (SOURCE / "cli").glob("*.py"))
    for node in ast.walk(ast.parse(text.replace("from __future__ import annotations", ""))):
        if isinstance(node, ast.FunctionDef):
            words.add(node.name.strip("_").replace("_", "-"))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words.add(node.value)
    return words


def test_commands_in_readmes_and_configs_use_verbs_that_exist():
    known, seen = words_of_cli(), set()
    for where, text in command_texts():
        for words in commands_of(text):
            verbs = words[:2] if words[0] == "data" else words[:1]
            for verb in verbs:
                assert verb in known, f"{where}: 'litchi {' '.join(words)}': the command line has no '{verb}'"
                seen.add(verb)
    assert {"data", "check", "train", "evaluate", "score", "generate", "export", "demo"} <= seen


@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_config_begins_with_the_command_that_runs_it(path):
    head = "\n".join(path.read_text(encoding="utf-8").splitlines()[:12])
    assert head.startswith("#"), f"{name_of(path)}: begin with a comment"
    assert f"litchi train {name_of(path)}" in head, f"{name_of(path)}: the comment names the command that runs it"


def test_both_readmes_hold_the_same_code_blocks():
    english, chinese = (blocks_of(path) for path in READMES)
    assert len(english) >= 5
    for number, (one, other) in enumerate(zip(english, chinese, strict=False), 1):
        assert one == other, f"block {number} differs between README.md and README.zh.md:\n{one}\n---\n{other}"
    assert len(english) == len(chinese)


def paths_of(readme: Path) -> list[str]:
    """First cells of table rows that are a path of the repository: | `src/litchi/cli.py` | ... |"""
    row = re.compile(r"^\| `((?:src|configs|tests|docs|recipes)/[^`]*)` \|", re.MULTILINE)
    return row.findall(readme.read_text(encoding="utf-8"))


def test_file_tables_of_the_readmes_are_true():
    english, chinese = (paths_of(path) for path in READMES)
    assert english == chinese
    missing = [path for path in english if not (ROOT / path).exists()]
    assert not missing, f"README.md lists files that do not exist: {missing}"
    modules = {name_of(path) for path in MODULES if not path.stem.startswith("__")}
    unlisted = sorted(modules - set(english))
    assert not unlisted, f"README.md does not list: {unlisted}"


DOCUMENTS = [*READMES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_files_and_tests_a_document_names_exist(document):
    text = document.read_text(encoding="utf-8")
    for file, test in sorted(set(re.findall(r"`((?:src|tests|configs|recipes|docs)/[\w./-]+)(?:::(\w+))?`", text))):
        assert (ROOT / file).exists(), f"{name_of(document)}: {file} does not exist"
        assert not test or f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file} has no {test}"
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (document.parent / link).exists(), f"{name_of(document)}: the link to {link} leads nowhere"


# ---- the ways of docs/architecture.md


def gives(file: str, function: str) -> str:
    """What a function, or a method by `Class.method`, is annotated to return."""
    node: ast.AST = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    for name in function.split("."):
        node = next(n for n in ast.iter_child_nodes(node) if getattr(n, "name", None) == name)
    return ast.unparse(node.returns)


def test_hops_hand_over_what_the_page_says():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| file \| function \| gives \|\n.*\n((?:\|.*\n)+)", text, re.M)
    assert len(tables) == 3
    for row in "".join(tables).splitlines():
        file, function, kind = re.findall(r"`([\w./]+)`", row)[:3]
        assert re.search(rf"\b{kind}\b", gives(file, function)), f"{file}: {function} gives {gives(file, function)}"


# ---- a quick start


def heavy_after(code: str) -> str:
    """Run code in a new interpreter; name the heavy libraries it has imported."""
    tail = "\nimport sys\nprint([m for m in ('torch', 'transformers', 'peft', 'pyarrow') if m in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", code + tail]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_importing_litchi_does_not_import_torch():
    assert heavy_after("import litchi") == "[]"


def test_help_does_not_import_torch():
    code = "import sys\nsys.argv = ['litchi', '--help']\nimport litchi.cli\ntry:\n    litchi.cli.main()\n"
    assert heavy_after(code + "except SystemExit as stop:\n    assert not stop.code, stop.code") == "[]"
