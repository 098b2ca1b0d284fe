"""Which layout: sizes of the data axes, checked against the ranks there are. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from litchi.errors import UsageError

if TYPE_CHECKING:
    from litchi.config import Parallel


@dataclass(frozen=True)
class Layout:
    """`dp_replicate` copies of the weights, each sharded over `dp_shard` ranks; all of them see different data."""

    dp_replicate: int
    dp_shard: int

    @property
    def wrapper(self) -> str:
        """What the model is wrapped in."""
        if self.dp_shard > 1:
            return "HSDP" if self.dp_replicate > 1 else "FSDP2"
        return "DDP" if self.dp_replicate > 1 else "none"


def choose_layout(parallel: Parallel, world: int, *, fits_whole: bool) -> Layout:
    """Sizes of the axes.

    Args:
        parallel: the settings; null axes are chosen.
        world: ranks there are.
        fits_whole: whether weights, gradients and optimizer state of the whole model fit on one device twice over.

    The rule of `auto`: copies (DDP) when the whole training state takes at most half of a device's memory, else
    shards over all ranks (FSDP2).

    Raises:
        UsageError: the axes' product is not the number of ranks, with both numbers.
    """
    replicate, shard = parallel.dp_replicate, parallel.dp_shard
    if replicate is None and shard is None:
        return Layout(world, 1) if fits_whole or world == 1 else Layout(1, world)
    if replicate is None or shard is None:
        given = replicate or shard or 1
        if world % given:
            raise UsageError(
                f"parallel.{'dp_replicate' if shard is None else 'dp_shard'}={given} does not divide {world} ranks",
                remedy=f"Start a multiple of {given} ranks (--procs)",
            )
        return Layout(given, world // given) if shard is None else Layout(world // given, given)
    if replicate * shard != world:
        raise UsageError(
            f"dp_replicate {replicate} x dp_shard {shard} = {replicate * shard}, but there are {world} ranks",
            remedy=f"Start {replicate * shard} ranks (--procs) or change parallel",
        )
    return Layout(replicate, shard)
