"""Which layout: sizes of the axes, checked against the ranks there are or offered for them, and where a rank stands.

Pure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from litchi.errors import UsageError
from litchi.model.sizes import allowed_sizes

if TYPE_CHECKING:
    from litchi.config import Parallel

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # the last changes fastest: its ranks are neighbours


@dataclass(frozen=True)
class Place:
    """Where a rank stands on each axis."""

    pp: int = 0
    dp_replicate: int = 0
    dp_shard: int = 0
    cp: int = 0
    tp: int = 0


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes.

    Args:
        dp_replicate: copies of the weights that see different data.
        dp_shard: ranks that share the weights of a copy and see different data.
        tp: ranks that cut every layer between them.
        cp: ranks that cut the token stream between them.
        pp: ranks that each hold some of the layers.
        pp_schedule: order in which they work.
        vision_ranks: ranks behind all of these that run nothing but the vision tower.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    pp_schedule: str = "1f1b"
    vision_ranks: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """In the order of `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def ranks(self) -> int:
        """Those that stand on the axes; the vision ranks come behind them."""
        return math.prod(self.sizes)

    @property
    def data_ranks(self) -> int:
        """How many batches are under way at a time: ranks of tp, cp and pp work on the same one."""
        return self.dp_replicate * self.dp_shard

    @property
    def gradient_ranks(self) -> int:
        """Ranks whose gradients the wrapper averages. Those of cp hold different tokens, so they are among them."""
        return self.data_ranks * self.cp

    @property
    def stage_ranks(self) -> int:
        """Ranks that hold the same layers, whole or in part."""
        return self.ranks // self.pp

    @property
    def wrapper(self) -> str:
        """What the model is wrapped in. DDP takes no cut tensors and no stages, so FSDP2 averages for these."""
        if self.dp_shard > 1:
            return "HSDP" if self.dp_replicate > 1 else "FSDP2"
        if self.gradient_ranks == 1:
            return "none"
        return "DDP" if self.tp == self.pp == 1 else "FSDP2"

    def place(self, rank: int) -> Place:
        """Where a rank stands."""
        at = {}
        for axis in reversed(AXES):
            rank, at[axis] = divmod(rank, getattr(self, axis))
        return Place(**at)

    def encodes(self, rank: int) -> bool:
        """Whether it is a vision rank, which stands on no axis."""
        return rank >= self.ranks

    def data_rank(self, rank: int) -> int:
        """Which batch a rank works on: 0 to data_ranks - 1. Vision ranks are numbered on behind them."""
        if self.encodes(rank):
            return rank - self.ranks + self.data_ranks
        place = self.place(rank)
        return place.dp_replicate * self.dp_shard + place.dp_shard

    def leads(self, rank: int) -> bool:
        """Whether a rank speaks for its batch: the one of its tp, cp and pp ranks that has the scores."""
        if self.encodes(rank):
            return False
        place = self.place(rank)
        return place.tp == 0 and place.cp == 0 and place.pp == self.pp - 1

    def dropout_rank(self, rank: int) -> int:
        """Ranks of tp compute the same activations, or parts of one layer's, so they drop alike; all others not."""
        return rank // self.tp

    def __str__(self) -> str:
        named = [f"{axis} {size}" for axis, size in zip(AXES, self.sizes, strict=True) if size > 1]
        vision = f" + vision_ranks {self.vision_ranks}" if self.vision_ranks else ""
        return (" x ".join(named) or "one process") + vision


def gradients_wait(trained: float, memory_bytes: float) -> bool:
    """Whether sharded ranks keep whole gradients until the last micro-batch of a step, or reduce them in each.

    Waiting sends them once a step and takes 4 bytes a trained parameter, so it is done while that is at most an eighth
    of a device's memory.
    """
    return 4 * trained <= memory_bytes / 8


def choose_layout(parallel: Parallel, world: int, *, fits_whole: bool) -> Layout:
    """Sizes of the axes.

    Args:
        parallel: the settings; axes that are None are chosen.
        world: ranks there are.
        fits_whole: whether weights, gradients and optimizer state of the whole model fit on one device twice over.

    The rule of `auto`: copies (DDP) when the whole training state takes at most half of a device's memory, else
    shards over all ranks (FSDP2). tp, cp and pp are taken when they are given.

    Raises:
        UsageError: the axes' product and the vision ranks are not the number of ranks, with both numbers.
    """
    vision, there = parallel.vision_ranks, str(world)
    if vision >= world:
        raise UsageError(
            f"parallel.vision_ranks={vision} of {world} ranks",
            why="none is left for the language model",
            remedy=f"Start at least {vision + 1} ranks (--procs), or lower parallel.vision_ranks",
        )
    if vision:
        world -= vision
        there = f"{world} besides parallel.vision_ranks={vision}"
    given = Layout(
        tp=parallel.tp, cp=parallel.cp, pp=parallel.pp, pp_schedule=parallel.pp_schedule, vision_ranks=vision
    )
    if world % given.ranks:
        raise UsageError(
            f"parallel: {_axes(given)} needs a multiple of {given.ranks} ranks, but there are {there}",
            remedy=f"Start {given.ranks + vision} or {2 * given.ranks + vision} ranks (--procs), or change parallel",
        )
    free = world // given.ranks
    replicate, shard = parallel.dp_replicate, parallel.dp_shard
    if replicate is None and shard is None:
        return replace(given, dp_replicate=free) if fits_whole else replace(given, dp_shard=free)
    if replicate is None or shard is None:
        size = replicate or shard or 1
        if free % size:
            raise UsageError(
                f"parallel.{'dp_replicate' if shard is None else 'dp_shard'}={size} does not divide {free} ranks"
                + (f" ({there} / {_axes(given)})" if given.ranks > 1 else f", {there}" if vision else ""),
                remedy=f"Start a multiple of {size * given.ranks} ranks (--procs)"
                + (f", and {vision} for vision" if vision else ""),
            )
        replicate, shard = (size, free // size) if shard is None else (free // size, size)
    found = replace(given, dp_replicate=replicate, dp_shard=shard)
    if found.ranks != world:
        parts = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, found.sizes, strict=True) if _shown(axis, size))
        raise UsageError(
            f"{parts} = {found.ranks}, but there are {there if vision else f'{world} ranks'}",
            remedy=f"Start {found.ranks + vision} ranks (--procs) or change parallel",
        )
    return found


def offer_layouts(config: Mapping[str, Any], ranks: int, *, machine: int = 8) -> list[Layout]:
    """Layouts of a number of ranks that a model can be cut in. Pure.

    tp stays inside a machine, cp and pp are at most 8; what is left are data ranks: all shards where these are at most
    128, and shards of a machine or of 64 ranks with copies. Copies alone are offered inside a machine.

    Args:
        config: config.json.
        machine: ranks of a machine.
    """
    found = []
    for tp, cp, pp in itertools.product(*(_sizes(config, axis, min(ranks, machine)) for axis in ("tp", "cp", "pp"))):
        if ranks % (tp * cp * pp) or cp not in allowed_sizes(config, "cp", tp=tp):
            continue
        free = ranks // (tp * cp * pp)
        shards = {free} if free <= 128 else set()
        shards |= {n for n in (machine, 64) if free % n == 0 and free > n}
        shards |= {1} if ranks <= machine else set()
        found += [Layout(dp_replicate=free // n, dp_shard=n, tp=tp, cp=cp, pp=pp) for n in sorted(shards)]
    return found


def _sizes(config: Mapping[str, Any], axis: str, most: int) -> list[int]:
    return [n for n in allowed_sizes(config, axis, limit=most) if n & (n - 1) == 0]


def _axes(layout: Layout) -> str:
    """The axes alone."""
    return str(replace(layout, vision_ranks=0))


def _shown(axis: str, size: int) -> bool:
    return size > 1 or axis.startswith("dp_")
