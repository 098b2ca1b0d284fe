"""Resumable state on disk: trainable tensors and optimizer state as DCP shards, with a manifest that is written last.

A checkpoint is a folder `checkpoints/step-00000100` with `manifest.json`; without the manifest it does not exist. It
is written beside its place and renamed into it. Loader state is the step; dropout seeds are computed from it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from litchi import __version__
from litchi.dist import Ranks, barrier, gather_objects
from litchi.errors import UserError
from litchi.train.offload import OffloadedOptimizer, state_like

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.manifest["step"])


def list_checkpoints(run: Path) -> list[Checkpoint]:
    """Complete checkpoints of a run, oldest first."""
    found = []
    for folder in (run / "checkpoints").glob("step-*"):
        checkpoint = read_checkpoint(folder)
        if checkpoint is not None:
            found.append(checkpoint)
    return sorted(found, key=lambda c: c.step)


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """A checkpoint folder, or None when it is none or not complete."""
    try:
        return Checkpoint(folder, json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, json.JSONDecodeError):
        return None


def trainable_state(model: nn.Module) -> dict[str, Tensor]:
    """Trainable tensors by the owner's names (the wrapper's prefix left out), each once."""
    return {
        "model." + name.removeprefix("module."): p.detach() for name, p in model.named_parameters() if p.requires_grad
    }


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """State tensors of the optimizer by parameter name."""
    state = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"optim.{key}.{name.removeprefix('module.')}"] = value
    return state


def save_checkpoint(
    run: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks, facts: Mapping[str, Any]
) -> Checkpoint:
    """Write a checkpoint from all ranks.

    Args:
        facts: what travels with it: settings, pixel limits, template, layout.
    """
    place = run / "checkpoints" / f"step-{step:08d}"
    part = place.with_name(f".{place.name}.part")
    if ranks.is_main:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    barrier()
    state = trainable_state(model) | optimizer_state(model, optimizer)
    dcp.save(state, checkpoint_id=part)
    manifest = {
        "step": step,
        "litchi": __version__,
        "torch": torch.__version__,
        "ranks": ranks.world,
        "tensors": _shapes(state),
        **facts,
    }
    if ranks.is_main:
        with (part / MANIFEST).open("w", encoding="utf-8") as file:
            json.dump(manifest, file, ensure_ascii=False, indent=1)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(place, ignore_errors=True)
        part.replace(place)
    barrier()
    return Checkpoint(place, manifest)


def _shapes(state: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Name -> shape of the tensors of all ranks: a stage of a pipeline has some of them."""
    own = {name: list(tensor.shape) for name, tensor in state.items()}
    return dict(sorted(pair for shapes in gather_objects(own) for pair in shapes.items()))


def load_checkpoint(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Restore every tensor, or refuse.

    Raises:
        UserError: the checkpoint's tensors are not exactly the trainable tensors of this run, with counts.
    """
    saved = checkpoint.manifest["tensors"]
    state = trainable_state(model)
    want = {name: shape for name, shape in saved.items() if name.startswith("model.")}
    have = _shapes(state)
    odd = sorted(name for name in want.keys() | have.keys() if want.get(name) != have.get(name))
    if odd:
        raise UserError(
            f"{len(odd)} of {len(want | have)} tensors differ between checkpoint and run, the first {odd[0]}",
            where=checkpoint.folder,
            why="a resume restores every tensor or none",
            remedy="Resume with the settings the run was started with, or start over with --fresh",
        )
    if optimizer is not None:
        state |= _make_optimizer_state(model, optimizer, saved)
    with torch.no_grad():
        dcp.load(state, checkpoint_id=checkpoint.folder)
    if isinstance(optimizer, OffloadedOptimizer):
        optimizer.read_weights()


def _make_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, list[int]]
) -> dict[str, Tensor]:
    """Give the optimizer the state tensors a checkpoint has, in place and empty, to be filled."""
    parameters = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    counts = {
        p: _counts_on(group, state_like(optimizer, p)) for group in optimizer.param_groups for p in group["params"]
    }
    out = {}
    for full, shape in saved.items():
        if not full.startswith("optim."):
            continue
        _, key, name = full.split(".", 2)
        if name not in parameters:
            continue  # another stage's
        parameter = parameters[name]
        device = counts[parameter]
        like = state_like(optimizer, parameter)
        tensor = torch.zeros_like(like) if shape else torch.zeros((), dtype=torch.float32, device=device)
        optimizer.state[parameter][key] = out[full] = tensor
    return out


def _counts_on(group: Mapping[str, Any], parameter: Tensor) -> torch.device:
    """Where an optimizer keeps its count of steps: beside the parameter if one kernel does it all."""
    return parameter.device if group.get("fused") or group.get("capturable") else torch.device("cpu")


def rotate_checkpoints(run: Path, *, keep: int, best: int | None) -> None:
    """Remove all but the newest `keep` and the best; the manifest goes first, so half a removal is no checkpoint."""
    assert keep > 0  # the one just written stays
    for checkpoint in list_checkpoints(run)[:-keep]:
        if checkpoint.step != best:
            (checkpoint.folder / MANIFEST).unlink()
            shutil.rmtree(checkpoint.folder)
