"""Answers that are to be JSON: found in what a model says, held against a schema, and compared field by field.

    text -> check_answer -> Checked(value, problem);   answers, references -> json_metrics -> figures

**What counts as the answer.** The first of these that is JSON: the whole text; what stands in the code fence, where
there is exactly one; the text from its first `{` or `[` to its last `}` or `]`. So words around an answer do not
matter, while one that is cut off, or two of them, are none. Keys given twice, NaN and Infinity are not JSON.

**Fields.** A field is a value that is no object and no list (or is an empty one), under its keys: `spec.weight`. Items
of lists are paired whatever their order, those with the most equal fields first. A field is right when its counterpart
is equal: a text after NFC and without white space around it, a number within the tolerance, and nothing else by
kind: 500 is not "500", null is not a missing field.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from litchi.data.values import is_number
from litchi.errors import DataError, UsageError

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

WHOLE = "(whole)"  # the field of an answer that is no object
LONG = 200  # characters of a problem
DEEP = 100  # levels of an answer, which recursion has to stand


@dataclass(frozen=True)
class Checked:
    """What an answer holds. `bare`: the whole text is JSON. `problem`: why it is no JSON, or the first place where it
    breaks the schema; None: neither."""

    value: Any
    is_json: bool
    bare: bool
    problem: str | None


def load_schema(path: str | Path) -> Validator:
    """Read a JSON schema, of the draft its `$schema` names (else 2020-12). `format` is not checked.

    Raises:
        UsageError: the file is no JSON, or no schema.
    """
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for
    from jsonschema_specifications import REGISTRY

    try:
        schema = _parse(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError("cannot read the schema", where=path, why=error.strerror) from None
    except ValueError as error:
        raise UsageError("the schema is not JSON", where=path, why=str(error)) from None
    if not isinstance(schema, dict | bool):
        raise UsageError("the schema is not a JSON schema", where=path, why="an object is needed")
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise UsageError("the schema is not a JSON schema", where=path, why=_cut(error)) from None
    return kind(schema, registry=REGISTRY)  # a registry of its own: nothing is fetched from the network


def check_answer(text: str, schema: Validator | None = None) -> Checked:
    """Find the JSON in an answer, as said above, and hold it against a schema of `load_schema`.

    Raises:
        UsageError: the schema refers to what is not in it.
    """
    try:
        value, bare = _find(text)
    except ValueError as error:
        return Checked(None, False, False, f"no JSON: {error}")
    if schema is None:
        return Checked(value, True, bare, None)
    from jsonschema.exceptions import best_match
    from referencing.exceptions import Unresolvable

    try:
        broken = best_match(schema.iter_errors(value))
    except Unresolvable as missing:
        raise UsageError(
            "the schema refers to what is not in it", why=str(missing), remedy="Put it under $defs; nothing is fetched"
        ) from None
    return Checked(value, True, bare, None if broken is None else _cut(broken))


def _find(text: str) -> tuple[Any, bool]:
    try:
        return _parse(text), True
    except ValueError as error:
        first = error
    fences = _fences(text)
    begin = min((at for at in map(text.find, "{[") if at >= 0), default=0)
    for part in (*(fences if len(fences) == 1 else ()), text[begin : max(map(text.rfind, "}]")) + 1]):
        if part:
            try:
                return _parse(part), False
            except ValueError as error:
                first = error
    raise first


def _fences(text: str) -> list[str]:
    """What stands in code fences that are closed."""
    found: list[str] = []
    inside: list[str] | None = None
    for line in text.splitlines(keepends=True):
        mark = line.strip()
        if inside is None:
            inside = [] if mark.startswith("```") and "`" not in mark[3:] else None
        elif mark == "```":
            found.append("".join(inside))
            inside = None
        else:
            inside.append(line)
    return found


def _parse(text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            raise ValueError(f"the key {twice!r} is given twice")
        return found

    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a number of JSON")

    def finite(number: str) -> float:
        if math.isinf(float(number)):
            raise ValueError(f"{number} is too large")
        return float(number)

    too_deep = f"it is nested deeper than {DEEP} levels"
    try:
        value = json.loads(text, object_pairs_hook=unique, parse_constant=constant, parse_float=finite)
    except RecursionError:
        raise ValueError(too_deep) from None
    level = [value]
    for _ in range(DEEP):
        level = [part for whole in level for part in _parts_of(whole)]
    if level:
        raise ValueError(too_deep)
    return value


def _parts_of(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _cut(error: Any) -> str:
    text = f"{error.json_path}: {error.message}"
    return text if len(text) <= LONG else text[: LONG - 3] + "..."


# ---------------------------------------------------------------------------------------------------------- fields


@dataclass
class Fields:
    """Counts of one answer or of many: fields of the references (`wanted`) and of the answers (`given`), and how many
    are `right`; `wrong` have a counterpart with another value, `missing` and `extra` have none."""

    wanted: int = 0
    given: int = 0
    right: int = 0
    wrong: int = 0

    @property
    def missing(self) -> int:
        return self.wanted - self.right - self.wrong

    @property
    def extra(self) -> int:
        return self.given - self.right - self.wrong

    def add(self, other: Fields) -> None:
        self.wanted, self.given = self.wanted + other.wanted, self.given + other.given
        self.right, self.wrong = self.right + other.right, self.wrong + other.wrong

    @property
    def precision(self) -> float:
        return self.right / self.given if self.given else 0.0

    @property
    def recall(self) -> float:
        return self.right / self.wanted if self.wanted else 0.0

    @property
    def f1(self) -> float:
        return 2 * self.right / (self.given + self.wanted) if self.given + self.wanted else 0.0


def compare_fields(answer: Any, reference: Any, *, tolerance: float = 0.0) -> Fields:
    """Count the fields of an answer against those of its reference.

    Args:
        tolerance: how far a number may be off, as a share of the reference's.
    """
    if isinstance(answer, dict) and isinstance(reference, dict) and answer and reference:
        counts = Fields()
        for key in dict.fromkeys((*reference, *answer)):
            if key in answer and key in reference:
                counts.add(compare_fields(answer[key], reference[key], tolerance=tolerance))
            else:
                counts.add(Fields(wanted=_size(reference, key), given=_size(answer, key)))
        return counts
    if isinstance(answer, list) and isinstance(reference, list) and answer and reference:
        return _compare_items(answer, reference, tolerance)
    if _is_field(answer) and _is_field(reference):
        right = _equal(answer, reference, tolerance)
        return Fields(1, 1, int(right), int(not right))
    return Fields(wanted=count_fields(reference), given=count_fields(answer))


def _compare_items(answer: list[Any], reference: list[Any], tolerance: float) -> Fields:
    pairs = [
        (compare_fields(a, r, tolerance=tolerance), i, j) for j, r in enumerate(reference) for i, a in enumerate(answer)
    ]
    pairs.sort(key=lambda pair: (-pair[0].right, pair[0].wanted + pair[0].given, pair[2], pair[1]))
    counts = Fields()
    answers, references = set(range(len(answer))), set(range(len(reference)))
    for found, i, j in pairs:
        if i in answers and j in references:
            counts.add(found)
            answers.remove(i)
            references.remove(j)
    counts.add(Fields(wanted=sum(count_fields(reference[j]) for j in references)))
    counts.add(Fields(given=sum(count_fields(answer[i]) for i in answers)))
    return counts


def count_fields(value: Any) -> int:
    """How many fields a value has."""
    if _is_field(value):
        return 1
    return sum(map(count_fields, _parts_of(value)))


def _size(value: dict[str, Any], key: str) -> int:
    return count_fields(value[key]) if key in value else 0


def _is_field(value: Any) -> bool:
    return not isinstance(value, dict | list) or not value


def _equal(answer: Any, reference: Any, tolerance: float) -> bool:
    if is_number(answer) and is_number(reference):
        try:
            return bool(answer == reference or abs(answer - reference) <= tolerance * abs(reference))
        except OverflowError:  # an integer of hundreds of digits
            return False
    if isinstance(answer, str) and isinstance(reference, str):
        return unicodedata.normalize("NFC", answer).strip() == unicodedata.normalize("NFC", reference).strip()
    return type(answer) is type(reference) and answer == reference


# --------------------------------------------------------------------------------------------------------- figures


@dataclass(frozen=True)
class JsonRules:
    """How answers are judged: against a schema, numbers within a share of the reference's."""

    schema: Validator | None = None
    tolerance: float = 0.0


@dataclass
class JsonReport:
    """Counts over answers: `rows` of them, `valid` hold JSON, `bare` are nothing else, `conforming` keep to the schema
    and `equal` are right as a whole. `parts`: of each first-level field of the references, how often it is there and
    how often right as a whole. `problems`: the first few answers' (row from 0, what is wrong)."""

    rows: int = 0
    valid: int = 0
    bare: int = 0
    conforming: int = 0
    equal: int = 0
    fields: Fields = field(default_factory=Fields)
    parts: dict[str, list[int]] = field(default_factory=dict)
    problems: list[tuple[int, str]] = field(default_factory=list)

    def to_json(self, ids: Sequence[str]) -> dict[str, Any]:
        """Part of the answer of `litchi evaluate`; `ids` of the rows."""
        counts = ("wanted", "given", "right", "wrong", "missing", "extra")
        return {
            "valid": self.valid,
            "bare": self.bare,
            "fields": {name: getattr(self.fields, name) for name in counts},
            "accuracy": {name: right / there for name, (there, right) in self.parts.items()},
            "problems": [{"id": ids[row], "problem": problem} for row, problem in self.problems],
        }


SHOWN = 10  # problems in a report


def judge_answers(answers: Sequence[str], references: Sequence[str], rules: JsonRules) -> JsonReport:
    """Judge answers by their references, which have to be JSON as a whole.

    Raises:
        DataError: a reference is not JSON.
    """
    report = JsonReport()
    for row, (text, expected) in enumerate(zip(answers, references, strict=True)):
        try:
            reference = _parse(expected)
        except ValueError as error:
            raise DataError(
                f"reference {row + 1} is not JSON",
                why=str(error),
                remedy="Metrics that begin with json_ need references that are JSON",
            ) from None
        checked = check_answer(text, rules.schema)
        report.rows += 1
        report.valid += checked.is_json
        report.bare += checked.bare
        report.conforming += checked.problem is None
        if checked.problem is not None and len(report.problems) < SHOWN:
            report.problems.append((row, checked.problem))
        if checked.is_json:
            counts = compare_fields(checked.value, reference, tolerance=rules.tolerance)
        else:
            counts = Fields(wanted=count_fields(reference))
        report.fields.add(counts)
        report.equal += counts.right == counts.wanted == counts.given
        for name, right in _parts(checked, reference, rules.tolerance):
            there = report.parts.setdefault(name, [0, 0])
            there[0] += 1
            there[1] += right
    return report


def _parts(checked: Checked, reference: Any, tolerance: float) -> Iterator[tuple[str, bool]]:
    """First-level fields of a reference, and whether they are right as a whole."""
    whole = not isinstance(reference, dict)
    parts = {WHOLE: reference} if whole else reference
    answers = {WHOLE: checked.value} if whole else checked.value if isinstance(checked.value, dict) else {}
    for name, wanted in parts.items():
        counts = compare_fields(answers.get(name), wanted, tolerance=tolerance)
        there = checked.is_json and name in answers
        yield name, there and counts.right == counts.wanted == counts.given


def _accuracy(report: JsonReport) -> float:
    there = sum(there for there, _ in report.parts.values())
    return sum(right for _, right in report.parts.values()) / there if there else 0.0


JSON_METRICS: dict[str, Callable[[JsonReport], float]] = {
    "json_valid": lambda report: report.valid / report.rows,
    "json_schema": lambda report: report.conforming / report.rows,
    "json_exact": lambda report: report.equal / report.rows,
    "json_accuracy": _accuracy,
    "json_precision": lambda report: report.fields.precision,
    "json_recall": lambda report: report.fields.recall,
    "json_f1": lambda report: report.fields.f1,
}
