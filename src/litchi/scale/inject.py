"""What goes wrong on purpose: numbers and memory in chosen steps of a run, the files of a checkpoint.

Settings and injections in, a training run with them out, as one rank of several; a checkpoint's folder in, the same
damaged out. For `litchi selfcheck --chaos` and the tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from litchi.config import load_config
from litchi.dist import Ranks
from litchi.model.family import part
from litchi.train import loop

REAL: dict[str, Any] = {"prepare_run": loop.prepare_run, "train_step": loop.train_step}
LAYER = 1
FULL = "CUDA out of memory. Tried to allocate 20.00 MiB"
Injected = Sequence[Sequence[Any]]  # what `Injection` is given, behind the ranks

# ----------------------------------------------------------------------------------------------- numbers and memory


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

    def __init__(self, ranks: Ranks, kind: str, steps: Sequence[int], rank: int | None = None, above: int = 0):
        self.kind, self.steps, self.above = kind, steps, above
        self.here = rank in (None, ranks.rank)
        self.active = False
        vars(loop).update(prepare_run=self.prepare, train_step=self.step)

    def prepare(self, *given: Any, **named: Any) -> Any:
        """`prepare_run`, with hooks in the model and the optimizer it makes."""
        run = REAL["prepare_run"](*given, **named)
        owner = run.wrapped.owner
        part(owner.hf, owner.family.language_layers)[LAYER].mlp.register_forward_hook(self.hook)  # type: ignore[index]
        run.trainer.optimizer.register_step_pre_hook(self.before_update)
        return run

    def step(self, trainer: Any, step: int, batches: Sequence[Any], rate: float, *, leave_out: bool = False) -> Any:
        """`train_step`, wrong in the steps that are to be."""
        wrong = step in self.steps
        self.active = wrong and self.here and max(b.tokens for b in batches) > self.above
        try:
            out = wrong and self.kind == "left out"
            result = REAL["train_step"](trainer, step, batches, rate, leave_out=leave_out or out)
            return replace(result, loss=result.loss + 1000) if wrong and self.kind == "spike" else result
        finally:
            self.active = False

    def hook(self, module: torch.nn.Module, given: Any, out: torch.Tensor) -> torch.Tensor | None:
        """In the forward of a layer: what it gives, spoilt, or no memory."""
        if not self.active or out.shape[-2] <= self.above:
            return None
        if self.kind == "forward" and torch.is_grad_enabled():
            raise torch.OutOfMemoryError(FULL)
        if self.kind == "loss":
            return out * float("nan")
        if self.kind in ("gradient", "backward") and out.requires_grad:
            out = out.clone()
            out.register_hook(self.come_back)
        return out

    def come_back(self, grad: torch.Tensor) -> torch.Tensor:
        if self.kind == "backward":
            raise torch.OutOfMemoryError(FULL)
        return grad * float("nan")

    def before_update(self, *_: Any) -> None:
        if self.active and self.kind == "optimizer":
            raise MemoryError


@contextlib.contextmanager
def injected(ranks: Ranks, injections: Injected) -> Iterator[None]:
    """What runs in here goes wrong so."""
    vars(loop).update(REAL)
    try:
        for injection in injections:
            Injection(ranks, *injection)
        yield
    finally:
        vars(loop).update(REAL)


def run_injected(ranks: Ranks, job: Mapping[str, Any]) -> None:
    """What `litchi train` does in a rank, with injections: `words` are its settings, `inject` what goes wrong."""
    with injected(ranks, job["inject"]):
        loop.train_run(load_config(None, job["words"]), ranks)


# ----------------------------------------------------------------------------------------------- files of a checkpoint


def shard(folder: Path) -> Path:
    """The first file of a checkpoint's tensors."""
    return folder / "shard-00000.safetensors"


def flip(path: Path, at: float) -> None:
    """Change one bit, at this share of a file."""
    body = bytearray(path.read_bytes())
    body[int(len(body) * at)] ^= 1
    path.write_bytes(bytes(body))


def swap(folder: Path) -> None:
    """Take the shard of the checkpoint before, of the same size, which then goes."""
    older = sorted(folder.parent.glob("step-????????"))[-2]
    assert shard(older).stat().st_size == shard(folder).stat().st_size
    shutil.copy(shard(older), shard(folder))
    shutil.rmtree(older)


def lie(folder: Path, **changes: Any) -> None:
    """Edit the manifest by hand."""
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


def empty(folder: Path) -> None:
    """Remove the files of a folder."""
    for path in folder.iterdir():
        path.unlink()


def hide(path: Path) -> None:
    """Put a folder where a file was."""
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {  # what is done, and what is said of it
    "a shard is missing": (lambda f: shard(f).unlink(), "shard-00000.safetensors is missing"),
    "a shard is cut off": (lambda f: os.truncate(shard(f), 1000), "has 1,000 bytes and had"),
    "a shard is empty": (lambda f: os.truncate(shard(f), 0), "has 0 bytes and had"),
    "a bit of a tensor flipped": (lambda f: flip(shard(f), 0.75), r"shard.* is not what was written \(sha256"),
    "a bit of a shard's header flipped": (lambda f: flip(shard(f), 0.001), r"shard.* is not what was written"),
    "a shard is that of another step": (swap, "shard.* is not what was written"),
    "a file too many": (lambda f: (f / "shard-00007.safetensors").touch(), "shard-00007.* does not belong there"),
    "the table is damaged": (lambda f: flip(f / "tensors.json", 0.5), "tensors.json is not what was written"),
    "the manifest is missing": (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
    "the manifest is cut off": (lambda f: os.truncate(f / "manifest.json", 99), "cut off or damaged"),
    "the manifest was edited": (lambda f: lie(f, step=1), r"manifest.json is not what was written \(sha256"),
    "the folder is another step's": (lambda f: f.rename(f.with_name("step-00000019")), "manifest.json is of step"),
    "the folder is empty": (empty, "manifest.json is missing"),
    "a shard cannot be read": (lambda f: hide(shard(f)), "shard-00000.safetensors is not a file"),
    "the manifest cannot be read": (lambda f: hide(f / "manifest.json"), "manifest.json cannot be read"),
}
