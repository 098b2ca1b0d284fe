"""Runs in which numbers go wrong or memory runs out in chosen steps, on chosen ranks: what children of tests run."""

from __future__ import annotations

import os
import resource
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from runs import settings

from litchi.dist import Ranks, start_ranks
from litchi.errors import UserError
from litchi.model.family import part
from litchi.train import loop, rollback
from litchi.train.loop import train_run

REAL = loop.prepare_run, loop.train_step


class Injection:
    """Makes steps go wrong: from here on `litchi.train.loop` builds models that do.

    Args:
        kind: "loss" (a NaN out of the MLP of layer 1), "gradient" (a NaN comes back into it), "forward", "backward"
            or "optimizer" (memory runs out there), "left out" (the step's update is left out), or "spike" (its loss
            is told as 1000 more).
        steps: in which.
        rank: where; None: on all ranks.
        above: memory only runs out in micro-batches of more tokens than this.
    """

    def __init__(self, ranks: Ranks, kind: str, steps: list[int], rank: int | None = None, above: int = 0):
        self.kind, self.steps, self.above = kind, steps, above
        self.here = rank in (None, ranks.rank)
        self.active = False
        loop.prepare_run, loop.train_step = self.prepare, self.step

    def prepare(self, *given, **named):
        run = REAL[0](*given, **named)
        owner = run.wrapped.owner
        part(owner.hf, owner.family.language_layers)[1].mlp.register_forward_hook(self.hook)
        run.trainer.optimizer.register_step_pre_hook(self.before_update)
        return run

    def step(self, trainer, step, batches, rate, *, leave_out=False):
        wrong = step in self.steps
        tokens = max(b.tokens for b in batches)
        self.active = wrong and self.here and tokens > self.above
        try:
            out = wrong and self.kind == "left out"
            result = REAL[1](trainer, step, batches, rate, leave_out=leave_out or out)
            return replace(result, loss=result.loss + 1000) if wrong and self.kind == "spike" else result
        finally:
            self.active = False

    def hook(self, module, given, out):
        if not self.active or out.shape[-2] <= self.above:
            return None
        if self.kind == "forward" and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        if self.kind == "loss":
            return out * float("nan")
        if self.kind in ("gradient", "backward") and out.requires_grad:
            out = out.clone()
            out.register_hook(self.come_back)
        return out

    def come_back(self, grad):
        if self.kind == "backward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return grad * float("nan")

    def before_update(self, *_):
        if self.active and self.kind == "optimizer":
            raise MemoryError


def run_wrong(ranks: Ranks, out: str, words: list[str], injections: list[list[Any]]) -> list:
    """A run with an injection (or none); returns status and line of its error."""
    loop.prepare_run, loop.train_step = REAL
    for injection in injections:
        Injection(ranks, *injection)
    try:
        train_run(settings("model.path=builtin:tiny", f"output={out}", *words), ranks)
    except UserError as error:
        return [error.status, error.line()]
    finally:
        loop.prepare_run, loop.train_step = REAL
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
