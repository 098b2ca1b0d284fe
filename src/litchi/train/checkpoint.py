"""Which checkpoints of a run count, what is in one, and how it comes back: whole or not at all.

A checkpoint is a folder `checkpoints/step-00000100` whose manifest is sound (`shards.py` has its files, `saver.py`
writes them). Damaged ones are found before they are used and set aside under another name, never deleted. Loader
state is the step; dropout seeds are computed from it.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from litchi.dist import Ranks, gather_objects
from litchi.errors import UserError
from litchi.train.durable import on_main
from litchi.train.offload import OffloadedOptimizer, make_state, state_like
from litchi.train.shards import MANIFEST, ShardReader, find_changed, find_missing, hidden, read_manifest

NAME = re.compile(r"step-(\d{8,})")
LEFT_OVER = re.compile(r"\.step-\d{8,}\.(part|gone)")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest is sound and whose files are there, in full length."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.manifest["step"])


def place_of(run: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return run / "checkpoints" / f"step-{step:08d}"


# --------------------------------------------------------------------------------------------------- which ones count


def list_checkpoints(run: Path) -> list[Checkpoint]:
    """Complete checkpoints of a run, oldest first."""
    return [found for found in map(read_checkpoint, _folders(run)) if found is not None]


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """A checkpoint folder, or None when it is none or not complete."""
    found = _inspect(folder)
    return found if isinstance(found, Checkpoint) else None


def _folders(run: Path) -> list[Path]:
    """Folders with the name of a checkpoint, oldest first."""
    named = [p for p in (run / "checkpoints").glob("step-*") if NAME.fullmatch(p.name)]
    return sorted(named, key=lambda p: int(p.name[5:]))


def _inspect(folder: Path) -> Checkpoint | str:
    """A checkpoint, or what is wrong with it by names and sizes."""
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return str(error)
    return find_missing(folder, manifest["files"]) or Checkpoint(folder, manifest)


def find_damage(checkpoint: Checkpoint) -> str | None:
    """What is wrong with the content of a checkpoint, every byte of it read by one of the ranks. Collective."""
    files = checkpoint.manifest["files"]
    mine = sorted(files)[dist.get_rank() :: dist.get_world_size()]
    return next(filter(None, gather_objects(find_changed(checkpoint.folder, files, mine))), None)


def settle_checkpoints(run: Path, ranks: Ranks) -> Checkpoint | None:
    """Find what to resume from: the newest checkpoint that is whole to the last byte. Collective, under the run's lock.

    Damaged ones on the way are renamed and named; what a killed run left half-written or half-removed goes.

    Returns:
        None: the run has never had one.

    Raises:
        UserError: it has had some, and all are damaged.
    """
    while True:
        newest, lost = on_main(ranks, lambda: _newest(run), what="the run's folder cannot be read", place=run)
        if newest is None and lost:
            raise UserError(
                f"none of the {len(lost)} checkpoints is sound",
                where=run / "checkpoints",
                why=f"the newest is {lost[-1]}; nothing was deleted",
                remedy="Put a sound copy there under its old name, or start over with --fresh",
            )
        damage = None if newest is None else find_damage(newest)
        if damage is None:
            return newest
        assert newest is not None
        refuse_checkpoint(newest, damage, ranks)


def _newest(run: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that seems whole, and the names of damaged ones."""
    for left in (run / "checkpoints").glob(".step-*"):
        if LEFT_OVER.fullmatch(left.name):
            shutil.rmtree(left)
    sound = []
    for folder in _folders(run):
        found = _inspect(folder)
        if isinstance(found, Checkpoint):
            sound.append(found)
        else:
            _set_aside(folder, found)
    return (sound[-1] if sound else None), sorted(p.name for p in (run / "checkpoints").glob("step-*.corrupt*"))


def refuse_checkpoint(checkpoint: Checkpoint, damage: str, ranks: Ranks) -> None:
    """Set a damaged checkpoint aside and say so. Collective."""
    what = f"{checkpoint.folder.name} is damaged and cannot be renamed"
    on_main(ranks, lambda: _set_aside(checkpoint.folder, damage), what=what, place=checkpoint.folder)


def _set_aside(folder: Path, damage: str) -> None:
    names = (folder.with_name(f"{folder.name}.corrupt{n or ''}") for n in range(10_000))
    name = next(name for name in names if not name.exists())
    os.rename(folder, name)
    print(f"checkpoint {folder.name} is damaged: {damage}. It is now {name.name}", file=sys.stderr, flush=True)


def rotate_checkpoints(run: Path, *, keep: int, best: int | None, written: int | None = None) -> None:
    """Remove all but the newest `keep` and the best.

    A checkpoint goes from its name first, then its manifest, then the rest: half a removal is no checkpoint. One of a
    later step than was just written is no part of this run's past: it does not count and stays.

    Args:
        written: the step just saved; None: the newest.
    """
    assert keep > 0  # the one just written stays
    past = [c for c in list_checkpoints(run) if written is None or c.step <= written]
    for checkpoint in past[:-keep]:
        if checkpoint.step != best:
            remove_checkpoint(checkpoint)


def remove_checkpoint(checkpoint: Checkpoint) -> None:
    """Its name goes first, then its manifest, then the rest."""
    gone = hidden(checkpoint.folder, "gone")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(checkpoint.folder, gone)
    (gone / MANIFEST).unlink()
    shutil.rmtree(gone)


# ---------------------------------------------------------------------------------------------------- what is in one


def trainable_state(model: nn.Module) -> dict[str, Tensor]:
    """Trainable tensors by the owner's names (the wrapper's prefix left out), each once."""
    _shard_again(model)
    return {
        "model." + name.removeprefix("module."): p.detach() for name, p in model.named_parameters() if p.requires_grad
    }


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """State tensors of the optimizer by parameter name, all of them."""
    _shard_again(model)
    state = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"optim.{key}.{name.removeprefix('module.')}"] = value
    assert len(state) == sum(len(values) for values in optimizer.state.values()), "state of unknown parameters"
    return state


def _shard_again(model: nn.Module) -> None:
    """FSDP2 leaves what is gathered once a step, as embedding and head are, gathered behind a forward without
    gradients: the module then shows copies, which are neither what the optimizer knows nor what a load has to fill."""
    for module in reversed(list(model.modules())):
        if isinstance(module, FSDPModule):
            module.reshard()
            if any(not isinstance(p, DTensor) for p in module.parameters()):  # it believes itself within a forward
                module.set_reshard_after_forward(True, recurse=False)
                module.reshard()
                module.set_reshard_after_forward(False, recurse=False)


def load_checkpoint(
    checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer | None, *, checked: bool = False
) -> int:
    """Restore every tensor, or refuse.

    Args:
        optimizer: None: weights alone.
        checked: its content has been compared with its hashes already.

    Returns:
        How many tensors were restored, on all ranks together.

    Raises:
        UserError: the checkpoint is damaged, or its tensors are not exactly those of this run, with counts.
    """
    damage = None if checked else find_damage(checkpoint)
    if damage:
        raise UserError(
            "the checkpoint is damaged", where=checkpoint.folder, why=damage, remedy="Take another one of the run"
        )
    saved = checkpoint.manifest["tensors"]
    state = trainable_state(model)
    want = {name: entry for name, entry in saved.items() if name.startswith("model.")}
    have = _describe_all(state)
    exact = optimizer is not None  # weights alone may be wanted in another type
    odd = sorted(
        name
        for name in want.keys() | have.keys()
        if name not in want or name not in have or not _same(want[name], have[name], exact)
    )
    if odd:
        raise UserError(
            f"{len(odd)} of {len(want | have)} tensors differ between checkpoint and run, the first {odd[0]}",
            where=checkpoint.folder,
            why="a resume restores every tensor or none",
            remedy="Resume with the settings the run was started with, or start over with --fresh",
        )
    if optimizer is not None:
        if checkpoint.manifest["weights_only"]:
            raise UserError(
                "the checkpoint has weights alone, and a run cannot go on from it",
                where=checkpoint.folder,
                why="it was saved with train.save=weights",
                remedy="Evaluate or export it, or start over with --fresh",
            )
        state |= _make_optimizer_state(model, optimizer, saved)
    restored = set().union(*gather_objects(set(state)))
    assert restored == (want.keys() if optimizer is None else saved.keys()), sorted(saved.keys() - restored)
    with torch.no_grad():
        dcp.load(
            state,
            storage_reader=ShardReader(checkpoint.folder),
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        )
    if isinstance(optimizer, OffloadedOptimizer):
        optimizer.read_weights()
    return len(restored)


def _same(one: Mapping[str, Any], other: Mapping[str, Any], exact: bool) -> bool:
    return one["shape"] == other["shape"] and (not exact or one["dtype"] == other["dtype"])


def _describe_all(state: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Shape and type of the tensors of all ranks: a stage of a pipeline has some of them. Collective."""
    own = {
        name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        for name, tensor in state.items()
    }
    every: Iterable[dict[str, Any]] = gather_objects(own)
    return {name: entry for rank in every for name, entry in rank.items()}


def _make_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Mapping[str, Any]]
) -> dict[str, Tensor]:
    """Give the optimizer the state tensors a checkpoint has, in place and empty, to be filled."""
    parameters = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    counts = {
        p: _counts_on(group, state_like(optimizer, p)) for group in optimizer.param_groups for p in group["params"]
    }
    made = {p: make_state(optimizer, p) for p in counts}
    out = {}
    for full, entry in saved.items():
        if not full.startswith("optim."):
            continue
        _, key, name = full.split(".", 2)
        if name not in parameters:
            continue  # another stage's
        parameter = parameters[name]
        device = counts[parameter]
        like = state_like(optimizer, parameter)
        tensor = torch.zeros_like(like) if entry["shape"] else torch.zeros((), dtype=torch.float32, device=device)
        tensor = made[parameter].get(key, tensor)
        optimizer.state[parameter][key] = out[full] = tensor
    return out


def _counts_on(group: Mapping[str, Any], parameter: Tensor) -> torch.device:
    """Where an optimizer keeps its count of steps: beside the parameter if one kernel does it all."""
    return parameter.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
