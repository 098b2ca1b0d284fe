"""`litchi data split`: a file in parts that share no query, no product and no picture; folds of such parts.

    rows -> numbers of what they contain -> components -> parts -> DIR/<part>.jsonl

Rows that share anything are one component, and a component is never cut. Content counts, not paths (`data/content.py`).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from litchi.data.jsonl import Lines, parse_sample, read_offsets
from litchi.data.values import RowError
from litchi.errors import DataError, UsageError
from litchi.prepare.lines import write_rows
from litchi.prepare.sample import moved_note, share_out
from litchi.prepare.scan import product_keys
from litchi.train.progress import count_progress
from litchi.types import Source

TOLERANCE = 0.02  # of all rows: a part further off than this is said to be


def split_file(
    path: str,
    out: str,
    *,
    task: Literal["chat", "rerank"],
    parts: Mapping[str, float],
    folds: int | None = None,
    seed: int = 0,
    share_negatives: bool = False,
    media_root: str | None = None,
) -> dict[str, Any]:
    """Split a file.

    Args:
        out: a folder (made when missing) that gets `<part>.jsonl`, or with `folds` `fold-<i>.train.jsonl` and
            `fold-<i>.eval.jsonl`, each row in one eval file.
        parts: name -> share; they add up to 1.
        share_negatives: negatives may stand in several parts: rows drawn from one catalogue are not tied by them.

    Returns:
        The JSON answer: rows, components, largest_component, parts {name: {rows, asked}}, notes.

    Raises:
        UsageError: a share is wrong, or a file exists. DataError: a row cannot be parsed, or a part would be empty.
    """
    shares = {f"fold-{i}": 1 / folds for i in range(folds)} if folds else _checked(parts)
    lines = read_offsets(path)
    root = media_root or str(Path(path).absolute().parent)
    components = find_components(_contents(lines, task, root, not share_negatives))
    asked = share_out({name: round(share * 10**9) for name, share in shares.items()}, len(lines))
    sides = assign_components(components, asked, seed)
    counts = {name: len(rows) for name, rows in sides.items()}
    largest = max(map(len, components))
    facts = f"{len(lines):,} rows are {len(components):,} components, the largest of {largest:,}"
    _refuse_empty(path, counts, facts, share_negatives)
    moved = _write(lines, sides, Path(out), folds is not None, media_root)
    notes = [
        f"{name} has {counts[name]:,} rows instead of {asked[name]:,}: {facts}"
        for name in shares
        if abs(counts[name] - asked[name]) > TOLERANCE * len(lines)
    ]
    return {
        "rows": len(lines),
        "components": len(components),
        "largest_component": largest,
        "parts": {name: {"rows": counts[name], "asked": asked[name]} for name in shares},
        "notes": notes,
        "moved": moved,
        "out": out,
    }


def parse_parts(text: str) -> dict[str, float]:
    """`train=0.9,eval=0.1` as name -> share. Raises UsageError."""
    parts: dict[str, float] = {}
    for word in text.split(","):
        name, _, share = word.strip().partition("=")
        try:
            value = float(share)
        except ValueError:
            value = -1.0
        if not name or name in parts or "/" in name or not 0 < value < 1:
            raise UsageError(
                f"--parts has {word!r}", why="name=share is needed, each name once, a share between 0 and 1"
            )
        parts[name] = value
    return parts


def _checked(parts: Mapping[str, float]) -> dict[str, float]:
    if abs(sum(parts.values()) - 1) > 1e-6 or len(parts) < 2:
        total = sum(parts.values())
        raise UsageError(f"{len(parts)} parts add up to {total:g}", why="two or more are needed, of 1 together")
    return dict(parts)


def _refuse_empty(path: str, counts: Mapping[str, int], facts: str, share_negatives: bool) -> None:
    empty = [name for name, n in counts.items() if not n]
    if empty:
        remedy = "Ask for other shares" if share_negatives else "With --share-negatives they are not tied by negatives"
        raise DataError(f"no rows are left for {', '.join(empty)}", where=path, why=facts, remedy=remedy)


def _contents(
    lines: Lines, task: Literal["chat", "rerank"], media_root: str, negatives: bool
) -> Iterable[set[tuple[str, int]]]:
    """What each row contains. Raises DataError: a row that cannot be parsed belongs nowhere."""
    progress = count_progress(f"reading {Path(lines.path).name}")
    for row in range(len(lines)):
        source = Source(lines.path, int(lines.numbers[row]))
        try:
            sample, _ = parse_sample(
                lines.read(row),
                task=task,
                source=source,
                media_root=media_root,
                require_labels=False,  # type: ignore
            )
        except RowError as error:
            remedy = "See `litchi data check`; its --write-clean leaves such rows out"
            raise DataError(error.message, where=source, remedy=remedy) from None
        yield product_keys(sample, negatives=negatives)
        if progress is not None and (row % 1000 == 999 or row + 1 == len(lines)):
            progress(row + 1, len(lines))


def find_components(contents: Iterable[set[Any]]) -> list[list[int]]:
    """Rows that share content, directly or over others, in the order of their first rows."""
    parent: list[int] = []
    owner: dict[Any, int] = {}

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = row = parent[parent[row]]
        return row

    for row, keys in enumerate(contents):
        parent.append(row)
        for key in keys:
            first, last = sorted((root(owner.setdefault(key, row)), root(row)))
            parent[last] = first
    components: dict[int, list[int]] = {}
    for row in range(len(parent)):
        components.setdefault(root(row), []).append(row)
    return list(components.values())


def assign_components(components: Sequence[Sequence[int]], asked: Mapping[str, int], seed: int) -> dict[str, list[int]]:
    """Give components to parts: in an order drawn with the seed, large ones first, each to the part that lacks most.

    `asked` are rows per part; where all components are single rows, each part gets exactly as many.
    """
    order = list(components)
    random.Random(f"split {seed}").shuffle(order)
    order.sort(key=len, reverse=True)
    lacking = dict(asked)
    sides: dict[str, list[int]] = {name: [] for name in asked}
    for component in order:
        part = max(lacking, key=lambda name: lacking[name])
        lacking[part] -= len(component)
        sides[part] += component
    return {name: sorted(rows) for name, rows in sides.items()}


def _write(lines: Lines, sides: Mapping[str, list[int]], out: Path, folds: bool, media_root: str | None) -> int:
    files: dict[str, list[int]] = {}
    for name, rows in sides.items():
        if folds:
            files[f"{name}.train.jsonl"] = sorted(row for other, rest in sides.items() if other != name for row in rest)
        files[f"{name}.eval.jsonl" if folds else f"{name}.jsonl"] = rows
    for file in files:
        if (out / file).exists():
            raise UsageError(f"{out / file} exists", why="nothing is overwritten", remedy="Name another folder")
    out.mkdir(parents=True, exist_ok=True)
    return sum(write_rows(lines, rows, out / file, media_root=media_root)[1] for file, rows in files.items())


def format_answer(answer: dict[str, Any]) -> str:
    """The same for people."""
    lines = [f"{answer['rows']:,} rows in {answer['components']:,} components written to {answer['out']}"]
    lines[0] += moved_note(answer["moved"])
    lines += [f"  {name}: {p['rows']:,} rows, {p['asked']:,} asked" for name, p in answer["parts"].items()]
    return "\n".join([*lines, *(f"  note: {note}" for note in answer["notes"])])
