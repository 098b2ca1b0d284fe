"""Runs in which numbers go wrong or memory runs out in chosen steps, on chosen ranks: what children of tests run."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any

from runs import settings

from litchi.dist import Ranks, start_ranks
from litchi.errors import UserError
from litchi.scale.inject import injected
from litchi.train import loop, rollback
from litchi.train.loop import train_run


def run_wrong(ranks: Ranks, out: str, words: list[str], injections: list[list[Any]]) -> list:
    """A run with an injection (or none); returns status and line of its error."""
    try:
        with injected(ranks, injections):
            train_run(settings("model.path=builtin:tiny", f"output={out}", *words), ranks)
    except UserError as error:
        return [error.status, error.line()]
    return [0, ""]


def run_all(ranks: Ranks, jobs: dict[str, list[Any]]) -> dict[str, list]:
    """Jobs by their folder: (words, injections)."""
    return {out: run_wrong(ranks, out, words, injections) for out, (words, injections) in jobs.items()}


def run_alone(out: str, words: list[str], injections: list[list[Any]], kill_in_rollback: bool = False) -> None:
    """A run in a process of its own, as the only rank; killed between the journal's word and what follows, if so."""
    if kill_in_rollback:
        rollback.remove_undone = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
    status, line = run_wrong(start_ranks(), out, words, injections)
    print(line, flush=True)
    os._exit(status)


def run_or_end(ranks: Ranks, out: str, words: list[str], injections: list[list[Any]]) -> None:
    """A run on one of several ranks, which ends as a rank of `litchi train` does."""
    status, line = run_wrong(ranks, out, words, injections)
    Path(f"{out}.rank{ranks.rank}").write_text(line, encoding="utf-8")
    os._exit(status)


def run_in_space(out: str, words: list[str], room_bytes: int) -> None:
    """A run in a process that may take so much more address space than it has when its model is there."""
    ranks = start_ranks()
    real = loop.prepare_run

    def prepare(*given, **named):
        run = real(*given, **named)
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        held = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmSize:"))
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        if soft == resource.RLIM_INFINITY:
            resource.setrlimit(resource.RLIMIT_AS, (held + room_bytes, hard))
        return run

    loop.prepare_run = prepare
    try:
        train_run(settings("model.path=builtin:tiny", f"output={out}", *words), ranks)
    except UserError as error:
        print(error.line(), flush=True)
        os._exit(error.status)
    os._exit(0)
