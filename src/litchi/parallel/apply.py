"""Parallelism applied from outside: checkpointing, then DDP or FSDP2. Nothing in the model knows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from litchi.dist import Ranks
from litchi.model.family import part
from litchi.model.forward import LitchiModel
from litchi.parallel.mesh import Layout

COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Wrapped:
    """The owner as it is called (`model`) and as it is (`owner`)."""

    model: nn.Module
    owner: LitchiModel
    layout: Layout
    data_ranks: int
    precision: str

    @property
    def sharded(self) -> bool:
        return self.layout.dp_shard > 1

    @property
    def wrapper(self) -> str:
        """The wrapper really taken, read off the object."""
        if isinstance(self.model, DistributedDataParallel):
            return "DDP"
        return self.layout.wrapper if isinstance(self.model, FSDPModule) else "none"

    def compute(self) -> AbstractContextManager:
        """The precision of a forward. FSDP2 casts by itself."""
        if self.precision == "fp32" or self.sharded:
            return nullcontext()
        return torch.autocast(self.owner.device.type, COMPUTE[self.precision])

    @contextmanager
    def synchronise(self, *, last: bool) -> Iterator[None]:
        """Reduce gradients over ranks in the last micro-batch of a step only."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
            yield
        elif isinstance(self.model, DistributedDataParallel) and not last:
            with self.model.no_sync():
                yield
        else:
            yield

    def vision_modules(self) -> tuple[nn.Module, ...]:
        """The vision tower, its merger included."""
        return (part(self.owner.hf, self.owner.family.vision),)


def apply_parallel(owner: LitchiModel, layout: Layout, ranks: Ranks, *, precision: str, checkpoint: bool) -> Wrapped:
    """Wrap the owner. Its trainable parts are set and adapters are in place.

    Args:
        owner: on the CPU or the rank's device.
        layout: sizes of the axes.
        ranks: this process.
        precision: fp32, bf16 or fp16 compute.
        checkpoint: compute activations twice instead of keeping them.
    """
    if checkpoint:
        owner.hf.activation_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    owner.always_vision = _always_vision(owner, layout, ranks)
    model: nn.Module = owner
    if layout.dp_shard > 1:
        _shard(owner, layout, ranks, precision)
    else:
        owner.to(ranks.device)
        if layout.dp_replicate > 1 and any(p.requires_grad for p in owner.parameters()):
            devices = [ranks.device.index] if ranks.device.type == "cuda" else None
            model = DistributedDataParallel(owner, device_ids=devices, forward_sync_buffers=False)
    return Wrapped(model, owner, layout, layout.dp_replicate * layout.dp_shard, precision)


def _always_vision(owner: LitchiModel, layout: Layout, ranks: Ranks) -> bool:
    """Whether a batch without a picture calls the vision tower all the same, with weight zero.

    Ranks must run the same collectives, those of the tower's gradients and of its shards; and where nothing else
    trains, a loss without the tower would have no gradient at all.
    """
    trained = {n for n, p in owner.hf.named_parameters() if p.requires_grad}
    vision = {n for n in trained if n.startswith(f"{owner.family.vision}.")}
    return trained == vision or (ranks.world > 1 and (bool(vision) or layout.dp_shard > 1))


def _shard(owner: LitchiModel, layout: Layout, ranks: Ranks, precision: str) -> None:
    """FSDP2 groups: every block and layer, the patch embedding, the merger, embedding and head, then the owner."""
    family, hf = owner.family, owner.hf
    sizes, names = (layout.dp_replicate, layout.dp_shard), ("dp_replicate", "dp_shard")
    mesh = init_device_mesh(ranks.device.type, sizes, mesh_dim_names=names)
    if layout.dp_replicate == 1:
        mesh = mesh["dp_shard"]
    policy = MixedPrecisionPolicy(
        param_dtype=None if precision == "fp32" else COMPUTE[precision],
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # positions and rope's cos and sin must stay as they are
    )

    def shard(module: nn.Module | list[nn.Module], **kwargs) -> None:
        fully_shard(module, mesh=mesh, mp_policy=policy, **kwargs)  # type: ignore[arg-type]

    for block in part(hf, family.vision_blocks).children():
        shard(block)
    shard(part(hf, family.patch_embedding))
    shard(part(hf, family.merger))
    for layer in part(hf, family.language_layers).children():
        shard(layer)
    embedding, head = part(hf, family.embedding), part(hf, family.head)
    if embedding.weight is head.weight:  # two groups would hold one tensor
        shard([embedding, head], reshard_after_forward=False)
    else:
        shard(embedding)
        shard(head, reshard_after_forward=False)  # it is called once per chunk of the loss
    shard(owner)
    for method in ("hidden", "next_hidden"):
        register_fsdp_forward_method(owner, method)
