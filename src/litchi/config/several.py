"""Several values for a key on the command line, each of which makes a run: `optim.lr=1e-5,2e-5 train.seed=0,1`.

    overrides -> split_runs -> the overrides of every combination

Commas part values only where they are outside brackets and quotes, and only of settings whose value is a number, a
word of a few, or a group with a short form. Texts, paths and lists are taken as they stand.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

from litchi.config.words import fields, section_of
from litchi.errors import UsageError

OPEN, CLOSE, QUOTES = "[{", "]}", "\"'"


def split_runs(overrides: Sequence[str]) -> list[list[str]]:
    """List the overrides of each run, the last key going round first; a single run where no key has several values.

    Raises:
        UsageError: a value is given twice, or is empty.
    """
    words = [_split_word(word) for word in overrides]
    return [list(run) for run in itertools.product(*words)]


def varied(overrides: Sequence[str], run: Sequence[str]) -> list[str]:
    """Those overrides of a run that are one of several."""
    return [word for given, word in zip(overrides, run, strict=True) if word != given]


def _split_word(word: str) -> list[str]:
    key, equals, value = word.partition("=")
    values = list(_cut(value))
    if not equals or len(values) == 1 or not _takes_several(key.strip()):
        return [word]
    if not all(values):
        raise UsageError(f"{word}: a value is empty", remedy=f"Write {key}=first,second")
    if len(set(values)) < len(values):
        raise UsageError(f"{word}: a value is given twice", why="each value makes a run")
    return [f"{key}={one}" for one in values]


def _cut(value: str) -> Iterator[str]:
    start, depth, quote = 0, 0, ""
    for at, character in enumerate(value):
        if quote:
            quote = "" if character == quote else quote
        elif character in QUOTES:
            quote = character
        elif character == "," and depth == 0:
            yield value[start:at].strip()
            start = at + 1
        else:
            depth += (character in OPEN) - (character in CLOSE)
    yield value[start:].strip()


def _takes_several(key: str) -> bool:
    if key not in fields():
        return False
    kind = fields()[key].annotation
    section = section_of(kind)
    return not {str, tuple} & set(_kinds(kind)) and (section is None or section.short is not None)


def _kinds(kind: Any) -> Iterator[Any]:
    """The plain types in a type; the words of a Literal are none."""
    origin = get_origin(kind)
    yield origin or kind
    if origin is not Literal:
        for part in get_args(kind):
            yield from _kinds(part)
