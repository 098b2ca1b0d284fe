"""Training that is killed at a chosen moment inside a save, or that may write no more: what children of tests run."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import time
from pathlib import Path

from runs import settings

from litchi.dist import Ranks, barrier, start_ranks
from litchi.errors import UserError
from litchi.train import loop, shards
from litchi.train.durable import FolderLock
from litchi.train.loop import train_run

EFFECTS = ("mkdir", "fsync", "replace", "rename", "unlink", "rmdir")


class Cut(Exception):
    """The run ends here as if its machine had."""


class Moments:
    """Every moment just before and just after something changes on the disk under `checkpoints/`.

    Args:
        kill_at: number of the moment at which this process kills itself; None: it only writes them down.
        log: where.
    """

    def __init__(self, kill_at: int | None, log: Path):
        self.kill_at, self.log, self.seen = kill_at, log, []
        for name in EFFECTS:
            setattr(os, name, self.wrap(name, getattr(os, name)))
        self.parts = shards._parts
        shards._parts = self.write

    def wrap(self, name, real):
        def effect(target, *rest, **more):
            place = self.place(target, more.get("dir_fd"))
            if "/checkpoints" not in place:
                return real(target, *rest, **more)
            self.at(f"before {name} {place.partition('/checkpoints')[2]}")
            out = real(target, *rest, **more)
            self.at(f"after {name} {place.partition('/checkpoints')[2]}")
            return out

        return effect

    def place(self, target, folder) -> str:
        if isinstance(target, int):
            return os.readlink(f"/proc/self/fd/{target}")
        return f"{os.readlink(f'/proc/self/fd/{folder}')}/{target}" if folder is not None else str(target)

    def write(self, head, tensors):
        for number, part in enumerate(self.parts(head, tensors)):
            self.at(f"before write {number}")
            yield part

    def at(self, moment: str) -> None:
        if len(self.seen) == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.seen.append(moment)
        if self.kill_at is None:
            self.log.write_text(json.dumps(self.seen))


def run_killed(out: str, words: list[str], kill_at: int | None) -> None:
    """A run in a process of its own, as the only rank."""
    Moments(kill_at, Path(f"{out}.moments"))
    train_run(settings("model.path=builtin:tiny", f"output={out}", *words), start_ranks())


def run_killed_rank(ranks: Ranks, out: str, words: list[str], rank: int, kill_at: int) -> None:
    """The same with several ranks, of which one is killed."""
    if ranks.rank == rank:
        Moments(kill_at, Path(f"{out}.moments"))
    train_run(settings("model.path=builtin:tiny", f"output={out}", *words), ranks)


def run_plainly(ranks: Ranks, out: str, words: list[str]) -> list:
    """A run; returns status and line of its error."""
    try:
        train_run(settings("model.path=builtin:tiny", f"output={out}", *words), ranks)
    except UserError as error:
        return [error.status, error.line()]
    return [0, ""]


def run_until(ranks: Ranks, out: str, words: list[str], last: int | None) -> list[list]:
    """A run that ends behind a step as if its machine had; returns (step, this rank's samples) of those taken."""
    real, taken = loop.train_step, []

    def step(trainer, number, batches, *rest, **how):
        if last is not None and number > last:
            raise Cut
        taken.append([number, [name for batch in batches for name in batch.samples]])
        return real(trainer, number, batches, *rest, **how)

    loop.train_step = step
    try:
        with contextlib.suppress(Cut):
            train_run(settings("model.path=builtin:tiny", f"output={out}", *words), ranks)
    finally:
        loop.train_step = real
    return taken


def run_limited(ranks: Ranks, out: str, words: list[str], rank: int, limit_bytes: int) -> list:
    """A run that ends in step 3, goes on while files of one rank may have so many bytes, and again when they may grow.

    Returns:
        Status, line and seconds of the second part, hidden files and checkpoints it left, status of the third.
    """
    real = loop.train_step

    def cut(trainer, step, *rest, **how):
        if step == 3:
            raise Cut
        return real(trainer, step, *rest, **how)

    loop.train_step = cut
    with contextlib.suppress(Cut):
        run_plainly(ranks, out, words)
    loop.train_step = real
    barrier()
    if ranks.rank == rank:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    start = time.monotonic()
    status, line = run_plainly(ranks, out, words)
    seconds = time.monotonic() - start
    if ranks.rank == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    barrier()
    names = sorted(p.name for p in Path(out, "checkpoints").iterdir())
    barrier()
    return [status, line, seconds, names, *run_plainly(ranks, out, words)]


def hold_lock(out: str) -> None:
    """Take a folder's lock and keep it."""
    with FolderLock(Path(out)):
        print("held", flush=True)
        time.sleep(60)
