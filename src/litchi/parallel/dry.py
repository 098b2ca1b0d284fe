"""A layout without its machines: the model on the meta device, the ranks pretended, one rank's share looked at.

The same `apply_parallel` cuts and shards as in a run, over torch's fake process group, so that what is reported is what
a rank of a real one would hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from litchi.dist import Ranks
from litchi.model.family import find_family, part
from litchi.model.forward import LitchiModel
from litchi.model.sizes import read_shape
from litchi.model.weights import own_part
from litchi.parallel.apply import Wrapped, apply_parallel
from litchi.parallel.mesh import Layout
from litchi.types import VisionSpec


@contextmanager
def pretend_ranks(rank: int, world: int) -> Iterator[Ranks]:
    """This process as one of many that do not exist. No other process group may be there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield Ranks(rank, world, 0, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def build_dry(owner: LitchiModel, layout: Layout, ranks: Ranks, *, tied: bool) -> Wrapped:
    """Cut and shard a model on the meta device as a rank would; its weights stay without values."""
    return apply_parallel(owner, layout, ranks, precision="bf16", checkpoint=True, tied=tied, fill=lambda: None)


@dataclass(frozen=True)
class Held:
    """What a rank holds, in bytes: all weights, and of those that train."""

    weights_bytes: int
    trained_bytes: int
    tensors: int


def measure_held(model: nn.Module) -> Held:
    """Bytes of this rank's own shards."""
    weights = trained = count = 0
    for parameter in model.parameters():
        local = own_part(parameter)
        size = local.numel() * local.element_size()
        weights, trained, count = weights + size, trained + size * parameter.requires_grad, count + 1
    return Held(weights, trained, count)


def make_dry(config: Mapping[str, Any]) -> tuple[LitchiModel, bool]:
    """A model of a config.json on the meta device, all of which trains, and whether its head is tied."""
    import transformers

    family = find_family(dict(config), "config.json")
    kind = getattr(transformers, family.architecture)
    with torch.device("meta"):
        hf = kind._from_config(kind.config_class(**config), dtype=torch.bfloat16)
    shape = read_shape(config)
    spec = VisionSpec(shape.patch, shape.merge, shape.temporal, None, 0, 0, (0.0,) * 3, (1.0,) * 3)
    return LitchiModel(hf, family, spec), part(hf, family.head).weight is part(hf, family.embedding).weight
