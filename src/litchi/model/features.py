"""Features of a frozen vision tower, computed once: what they depend on, and a batch's features from what is kept.

Batch -> features of a rank's pictures in their order: those that came along with the batch, and those of the others,
which are encoded here and kept (`data/features.py`) for whoever meets the picture again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from litchi.data.features import FeatureStore, PictureName
from litchi.model.family import part
from litchi.model.forward import LitchiModel
from litchi.model.vision import Grid, encode_pictures
from litchi.types import Batch


@dataclass(frozen=True)
class TowerFeatures:
    """How the owner gets features of a tower that does not train.

    Args:
        store: where they are kept.
        alone: encode pictures one by one, so that a picture's features do not depend on which others it is met with,
            not even in their last bit: products of other sizes are summed in another order.
        cast: weights are brought to this for the tower's call; None: it runs as it is.
    """

    store: FeatureStore
    alone: bool
    cast: torch.dtype | None = None

    def complete(self, owner: LitchiModel, batch: Batch, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Features of the pictures this rank encodes, in their order. [N, hidden]

        Args:
            pixels: of those that are not kept.
            grids: of all of them.
        """
        came = None if batch.features is None else batch.features.to(owner.device)
        if all(batch.kept):
            assert came is not None
            return came
        rest = [grid for grid, kept in zip(grids, batch.kept, strict=True) if not kept]
        fresh = iter(self.encode(owner, pixels, rest, batch.names))
        if came is None:
            return torch.cat(list(fresh))
        counts = [_area(grid) // owner.spec.merge**2 for grid, kept in zip(grids, batch.kept, strict=True) if kept]
        old = iter(came.split(counts))
        return torch.cat([next(old) if kept else next(fresh) for kept in batch.kept])

    def encode(
        self, owner: LitchiModel, pixels: Tensor, grids: Sequence[Grid], names: Sequence[PictureName]
    ) -> list[Tensor]:
        """Features of each picture: kept since its batch was prepared, else computed and kept."""
        found: dict[int, Tensor] = {}
        known = {n: entry for n, name in enumerate(names) if (entry := self.store.find(name)) is not None}
        if known:
            features, bad = self.store.read(list(known.values()))
            split = features.to(owner.device).split([entry.rows for entry in known.values()])
            found = {n: part for at, (n, part) in enumerate(zip(known, split, strict=True)) if at not in bad}
        missing = [n for n in range(len(names)) if n not in found]
        patches = pixels.split([_area(grid) for grid in grids])
        for job in [[n] for n in missing] if self.alone else [missing] * bool(missing):
            chosen = [grids[n] for n in job]
            features = self.run_tower(owner, torch.cat([patches[n] for n in job]), chosen)
            counts = [_area(grid) // owner.spec.merge**2 for grid in chosen]
            found |= dict(zip(job, features.split(counts), strict=True))
        self.store.keep([names[n] for n in missing], [found[n] for n in missing])
        return [found[n] for n in range(len(names))]

    @torch.no_grad()
    def run_tower(self, owner: LitchiModel, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """One call of the tower, without gradients and without dropout. [N, hidden]"""
        tower = part(owner.hf, owner.family.vision)
        if next(tower.parameters()).device.type != owner.device.type:
            tower.to(owner.device)  # it waited in the machine's memory
        training = tower.training
        tower.eval()
        try:
            call = _cast_call(tower, self.cast) if self.cast is not None else None
            return encode_pictures(
                tower, pixels.to(owner.device), grids, owner.spec, attention=owner.attention, call=call
            )
        finally:
            tower.train(training)


def _cast_call(tower: nn.Module, dtype: torch.dtype) -> Callable[..., Any]:
    """Call the tower with its weights in another precision, as FSDP2 does with those it gathers."""
    weights = {name: p.to(dtype) for name, p in tower.named_parameters() if p.is_floating_point()}
    return lambda *args, **named: functional_call(tower, weights, args, named)


def identify_tower(owner: LitchiModel, facts: Mapping[str, Any]) -> str:
    """Hash all that features depend on besides the picture and its grid.

    Args:
        owner: with its weights, the tower's whole.
        facts: how pictures are decoded and what is computed in.
    """
    tower = part(owner.hf, owner.family.vision)
    kinds = [f"{type(module).__module__}.{type(module).__name__}" for module in tower.modules()]
    total = hashlib.sha256(json.dumps([facts, kinds], sort_keys=True).encode())
    for name, parameter in sorted(tower.named_parameters()):
        total.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        total.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    return total.hexdigest()[:32]


def _area(grid: Grid) -> int:
    t, h, w = grid
    return t * h * w
