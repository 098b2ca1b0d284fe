"""What stands twice that should stand once: rows in a file, answers that differ, contents that two files share.

In: `Facts` of files. Out: findings, each at the later of the two rows and naming the earlier one. Only sorted arrays of
numbers are compared, so a million rows take seconds.
"""

from __future__ import annotations

import numpy as np

from litchi.data.jsonl import Lines
from litchi.prepare.scan import SHARED, Facts
from litchi.types import Finding

WORDS = {
    "query": "the same query as",  # text, in any spelling of case and width, and pictures
    "text": "a positive document with the text of one in",
    "picture": "a picture that is byte for byte in",
}


def _firsts(keys: np.ndarray) -> np.ndarray:
    """For each place the first place with the same key."""
    _, first, group = np.unique(keys, return_index=True, return_inverse=True)
    return first[group]


def find_repeats(lines: Lines, facts: Facts) -> list[Finding]:
    """Rows that stand twice, and rows that contradict an earlier one."""
    first = _firsts(facts.content)
    again = first < np.arange(len(first))
    found = [
        _finding(lines, facts.row[i], "duplicate_row", f"the same content as line {_line(lines, facts.row[first[i]])}")
        for i in np.flatnonzero(again)
    ]
    pairs = len(facts.pair) > 0
    return found + (_contradicted_pairs(lines, facts) if pairs else _contradicted_answers(lines, facts, again))


def _contradicted_answers(lines: Lines, facts: Facts, again: np.ndarray) -> list[Finding]:
    first = _firsts(facts.asked)
    wrong = np.flatnonzero((facts.told != facts.told[first]) & ~again) if len(first) else first
    return [
        _finding(
            lines,
            facts.row[i],
            "contradicting_row",
            f"asks what line {_line(lines, facts.row[first[i]])} asks, and answers otherwise",
        )
        for i in wrong
    ]


def _contradicted_pairs(lines: Lines, facts: Facts) -> list[Finding]:
    """One finding a row, however many of its documents another row labels otherwise."""
    first = _firsts(facts.pair)
    wrong = np.flatnonzero((facts.label != facts.label[first]) & (facts.pair_row != facts.pair_row[first]))
    said: dict[int, str] = {}
    for i in wrong:
        line = _line(lines, facts.pair_row[first[i]])
        labels = f"{facts.label[i]:g}, there {facts.label[first[i]]:g}"
        said.setdefault(int(facts.pair_row[i]), f"a document has the label {labels} for the same query at line {line}")
    return [_finding(lines, row, "contradicting_row", text) for row, text in said.items()]


def find_leaks(lines: Lines, facts: Facts, other: Lines, others: Facts) -> list[Finding]:
    """Rows that share a query, a positive text or a picture with a row of another file: one finding a row and kind."""
    found = []
    for number, kind in enumerate(SHARED):
        here, there = facts.kind == number, others.kind == number
        keys, rows = facts.key[here], facts.key_row[here]
        known, first = np.unique(others.key[there], return_index=True)
        at = np.searchsorted(known, keys)
        at[at == len(known)] = 0
        hits = np.flatnonzero(known[at] == keys) if len(known) else np.empty(0, int)
        _, once = np.unique(rows[hits], return_index=True)
        for i in hits[once]:
            place = f"{other.path}:{_line(other, others.key_row[there][first[at[i]]])}"
            found.append(_finding(lines, rows[i], f"leaked_{kind}", f"{WORDS[kind]} {place}"))
    return found


def _line(lines: Lines, row: int) -> int:
    return int(lines.numbers[row])


def _finding(lines: Lines, row: int, code: str, message: str) -> Finding:
    return Finding(lines.path, _line(lines, row), "warning", code, message)
