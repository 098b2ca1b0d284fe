"""`litchi data sample`: some rows of a file, drawn with a seed, on request in the shares of a field's values.

In: a JSONL file. Out: a new one with n of its rows, letter for letter and in their order.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from litchi.data.jsonl import Lines, read_offsets
from litchi.data.values import RowError, load_object
from litchi.errors import DataError, UsageError
from litchi.prepare.lines import write_rows


def sample_file(path: str, out: str, n: int, *, seed: int = 0, stratify: str | None = None) -> dict[str, Any]:
    """Draw n rows.

    Args:
        n: how many, from 1 to the number of rows.
        stratify: a field of the rows; `a.b` is b within a. Its values keep their shares, to a row.

    Returns:
        The JSON answer: rows, of, out, and with `stratify` counts by value.

    Raises:
        UsageError: n is out of range, or `out` exists. DataError: a row lacks the field.
    """
    lines = read_offsets(path)
    if not 1 <= n <= len(lines):
        raise UsageError(f"-n is {n}", where=path, why=f"the file has {len(lines):,} rows")
    strata: dict[str, list[int]] = defaultdict(list)
    for row in range(len(lines)):
        strata[_value(lines, row, stratify) if stratify else ""].append(row)
    shares = share_out({value: len(rows) for value, rows in strata.items()}, n)
    rng = random.Random(f"sample {seed}")
    chosen = sorted(row for value, rows in strata.items() for row in rng.sample(rows, shares[value]))
    _, moved = write_rows(lines, chosen, Path(out), media_root=None)
    answer = {"rows": n, "of": len(lines), "out": out, "moved": moved}
    counts = {value: {"rows": shares[value], "of": len(rows)} for value, rows in sorted(strata.items())}
    return answer | ({"strata": counts} if stratify else {})


def share_out(sizes: Mapping[str, int], n: int) -> dict[str, int]:
    """n in the proportions of sizes, by largest remainders; of equal ones the first in order of name.

    No share exceeds its size as long as n does not exceed their sum.
    """
    total = sum(sizes.values())
    shares = {value: n * size // total for value, size in sizes.items()}
    rest = sorted(sizes, key=lambda value: (-(n * sizes[value] % total), value))
    for value in rest[: n - sum(shares.values())]:
        shares[value] += 1
    return shares


def _value(lines: Lines, row: int, name: str) -> str:
    try:
        value: Any = load_object(lines.read(row))
    except RowError as error:
        raise DataError(error.message, where=lines.source(row)) from None
    for key in name.split("."):
        if not isinstance(value, dict) or key not in value:
            raise DataError(f"the row has no field {name}", where=lines.source(row), why="--stratify needs it in all")
        value = value[key]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)


def format_answer(answer: dict[str, Any]) -> str:
    """The same for people."""
    lines = [f"{answer['rows']:,} of {answer['of']:,} rows written to {answer['out']}" + moved_note(answer["moved"])]
    lines += [f"  {value}: {c['rows']:,} of {c['of']:,}" for value, c in answer.get("strata", {}).items()]
    return "\n".join(lines)


def moved_note(moved: int) -> str:
    """What is said of rows whose paths were rewritten."""
    return (
        f"; in {moved:,} of them the paths of media were rewritten, because it lies in another folder" if moved else ""
    )
