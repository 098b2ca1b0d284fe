"""The planned figures of docs/claims.md, brought up to date: `python benchmarks/claims.py`.

Each `litchi plan` command of a row is worked out and its figures are put in their places, in the same order. Words and
ratios stay as they are: the rows that have changed are printed, to be read again.
"""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

from litchi.scale.plan import plan_run

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "claims.md"
FIGURE = re.compile(r"\*\*does not fit\*\*|\*\*[\d.]+ GB\*\*, [\d.]+ s")


@cache
def plan(command: str) -> str:
    words = shlex.split(command)
    size, gpu, gpus = (words[words.index(name) + 1] for name in ("--model-size", "--gpu", "--gpus"))
    settings = [word for word in words if re.match(r"[a-z_.]+=", word)]
    report = plan_run(str(ROOT / words[2]), settings, size=size, gpu=gpu, gpus=int(gpus), nodes=1, price=None)
    best = report["layouts"][0]
    return f"**{best['peak_bytes'] / 1e9:.1f} GB**, {best['step_s']:.2f} s" if report["fits"] else "**does not fit**"


def update(row: str) -> str:
    if "| planned for the real size |" not in row:
        return row
    figures = [plan(command) for command in re.findall(r"`(litchi plan [^`]+)`", row)]
    assert len(figures) == len(FIGURE.findall(row)), row
    return FIGURE.sub(lambda _: figures.pop(0), row)


def main() -> None:
    rows = PAGE.read_text(encoding="utf-8").splitlines()
    found = [update(row) for row in rows]
    PAGE.write_text("\n".join(found) + "\n", encoding="utf-8")
    print("\n".join(new for old, new in zip(rows, found, strict=True) if old != new) or "nothing has changed")


if __name__ == "__main__":
    main()
