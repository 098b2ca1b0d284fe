"""Training that is killed at a chosen moment inside a save, or that may write no more: what children of tests run."""

from __future__ import annotations

import builtins
import contextlib
import io
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
    """Every moment just before and just after something changes on the disk under `checkpoints/`, or anywhere in a run.

    Args:
        kill_at: number of the moment at which this process kills itself; None: it only writes them down.
        log: where.
        under: a part of the paths that count; where it is not `checkpoints/`, files that are opened to be written count
            as well.
    """

    def __init__(self, kill_at: int | None, log: Path, under: str = "/checkpoints"):
        self.kill_at, self.log, self.under, self.seen, self.process = kill_at, log, under, [], os.getpid()
        self.open = io.open
        if under != "/checkpoints":
            io.open = builtins.open = self.opened
        for name in EFFECTS:
            setattr(os, name, self.wrap(name, getattr(os, name)))
        self.parts = shards._parts
        shards._parts = self.write

    def wrap(self, name, real):
        def effect(target, *rest, **more):
            place = self.place(target, more.get("dir_fd"))
            if self.under not in place:
                return real(target, *rest, **more)
            self.at(f"before {name} {place.partition(self.under)[2]}")
            out = real(target, *rest, **more)
            self.at(f"after {name} {place.partition(self.under)[2]}")
            return out

        return effect

    def opened(self, file, mode="r", *rest, **more):
        if self.under not in str(file) or not set(mode) & set("wax+"):
            return self.open(file, mode, *rest, **more)
        self.at(f"before open {str(file).partition(self.under)[2]}")
        out = self.open(file, mode, *rest, **more)
        self.at(f"after open {str(file).partition(self.under)[2]}")
        return out

    def place(self, target, folder) -> str:
        if isinstance(target, int):
            return os.readlink(f"/proc/self/fd/{target}")
        return f"{os.readlink(f'/proc/self/fd/{folder}')}/{target}" if folder is not None else str(target)

    def write(self, head, tensors):
        for number, part in enumerate(self.parts(head, tensors)):
            self.at(f"before write {number}")
            yield part

    def at(self, moment: str) -> None:
        if os.getpid() != self.process:  # one that loads samples
            return
        if len(self.seen) == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.seen.append(moment)
        if self.kill_at is None:
            with self.open(self.log, "w") as file:
                json.dump(self.seen, file)


def run_killed(out: str, words: list[str], kill_at: int | None) -> None:
    """A run in a process of its own, as the only rank."""
    Moments(kill_at, Path(f"{out}.moments"))
    train_run(settings("model.path=builtin:tiny", f"output={out}", *words), start_ranks())


def run_killed_anywhere(out: str, words: list[str], kill_at: int | None) -> None:
    """The same, killed at any moment in which something changes in the run's folder."""
    Moments(kill_at, Path(out).parent / f"moments-{Path(out).name}", f"/{Path(out).name}/")
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
