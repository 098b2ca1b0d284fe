"""`score` and `generate` killed at a chosen moment: what children of tests run."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from pathlib import Path

from litchi.dist import Ranks, start_ranks
from litchi.train import parts
from litchi.train.writing import write_lines


class Moments:
    """This process kills itself just before or after something happens: `after a batch` is kept, for the second time;
    `before scores.jsonl` has its name, for the first."""

    def __init__(self, moment: str, times: int):
        self.moment, self.times = moment, times
        self.write, self.replace = parts.Parts.write, os.replace
        os.replace = self.replace_watched
        parts.Parts.write = lambda *asked: self.write_watched(*asked)

    def replace_watched(self, old, new):
        self.at(f"before {Path(new).name}")
        self.replace(old, new)
        self.at(f"after {Path(new).name}")

    @contextmanager
    def write_watched(self, *asked):
        with self.write(*asked) as keep:

            def watched(records):
                self.at("before a batch")
                keep(records)
                self.at("after a batch")

            yield watched

    def at(self, moment: str) -> None:
        self.times -= moment == self.moment
        if not self.times:
            os.kill(os.getpid(), signal.SIGKILL)


def write_killed(moment: str, times: int, data: str, words: list[str], out: str, more: dict) -> None:
    """In a process of its own, as the only rank."""
    Moments(moment, times)
    write_lines("builtin:tiny", data, words, Path(out), start_ranks(), **more)


def write_on_ranks(ranks: Ranks, data: str, words: list[str], out: str, more: dict, moment=None, times=0) -> int:
    """On several ranks, of which the last kills itself where a moment is given."""
    if moment is not None and ranks.rank == ranks.world - 1:
        Moments(moment, times)
    return write_lines("builtin:tiny", data, words, Path(out), ranks, **more).lines
