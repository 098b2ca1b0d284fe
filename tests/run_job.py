"""What the ranks of `test_axis_runs.py` do: whole runs, and measuring what came out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from litchi.config import load_config
from litchi.dist import Ranks
from litchi.errors import UserError
from litchi.train.loop import train_run
from litchi.train.measure import measure_one
from litchi.train.writing import write_lines

SETTINGS = (
    "model.path=builtin:tiny",
    "data.workers=0",
    "track=[]",
    "optim.name=sgd",
    "optim.lr=0.002",
    "optim.clip=null",
)


def run_all(ranks: Ranks, jobs: list[list[Any]]) -> list[Any]:
    """Each job is (kind, arguments...); returns what each gave, or the one line of its error."""
    out = []
    for kind, *arguments in jobs:
        try:
            out.append(KINDS[kind](ranks, *arguments))
        except UserError as error:
            out.append(error.line())
    return out


def train(ranks: Ranks, *words: str) -> str:
    return str(train_run(load_config(None, [*SETTINGS, *words]), ranks))


def measure(ranks: Ranks, target: str, data: str, *words: str) -> dict[str, float]:
    return measure_one(target, data, words, ranks).metrics


def generate(ranks: Ranks, target: str, data: str, out: str, *words: str) -> int:
    return write_lines(target, data, words, Path(out), ranks, task="chat").lines


KINDS = {"train": train, "measure": measure, "generate": generate}
