"""Parallelism applied from outside, axis by axis. Nothing in the model knows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from litchi.dist import Ranks
from litchi.model.family import has_part, part
from litchi.model.forward import LitchiModel, Output
from litchi.model.leaves import compile_blocks
from litchi.model.precision import COMPUTE, HELD
from litchi.model.quantize import count_weights
from litchi.parallel.collectives import Group
from litchi.parallel.encoder import Encoder, RemotePictures, keep_part, list_receivers
from litchi.parallel.mesh import Layout, gradients_wait
from litchi.parallel.pictures import SharedPictures
from litchi.parallel.pipeline import Pipeline, cut_stage, first_trained
from litchi.parallel.sequence import SequenceCut
from litchi.parallel.tensor import TensorCut, cut_linears
from litchi.types import Batch


@dataclass
class Wrapped:
    """The owner as it is called (`model`) and as it is (`owner`), and how its ranks work together."""

    model: nn.Module
    owner: LitchiModel
    layout: Layout
    rank: int
    precision: str
    tensor: TensorCut | None = None
    pipeline: Pipeline | None = None
    encoder: Encoder | None = None  # of a vision rank, which learns nothing
    learners: dist.ProcessGroup | None = None  # all ranks but those; None: all ranks
    waits: bool = True  # gradients of sharded ranks, for the last micro-batch
    weights: tuple[int, int] = (0, 0)  # of the whole model: how many train, how many there are

    @property
    def data_rank(self) -> int:
        return self.layout.data_rank(self.rank)

    @property
    def data_ranks(self) -> int:
        return self.layout.data_ranks

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its batch: its counts and scores are those of the ranks that share it."""
        return self.layout.leads(self.rank)

    @property
    def pictures(self) -> tuple[int, int]:
        """The share of a batch's pictures that is decoded here: which of how many; (0, 0) is none."""
        shares = self.owner.shares
        if not shares.first:
            return 0, 0
        return (0, 1) if shares.pictures is None else shares.pictures.share

    @property
    def sharded(self) -> bool:
        return isinstance(self.model, FSDPModule)

    @property
    def wrapper(self) -> str:
        """The wrapper really taken, read off the object."""
        if isinstance(self.model, DistributedDataParallel):
            return "DDP"
        return self.layout.wrapper if self.sharded else "none"

    def compute(self) -> AbstractContextManager:
        """The precision of a forward. FSDP2 casts by itself."""
        if self.precision in HELD or self.sharded:
            return nullcontext()
        return torch.autocast(self.owner.device.type, COMPUTE[self.precision])

    def run(
        self,
        batches: Sequence[Batch],
        forward: Callable[[int, Tensor | None], Tensor],
        backward: Callable[[Tensor, Tensor | None], None],
    ) -> None:
        """Take the micro-batches of a step forwards and backwards; gradients are reduced over ranks in the last one.
        A vision rank sends off the features of some others' micro-batches, and nothing goes backwards.

        Args:
            forward: (number, hidden states from the stage before) -> the loss, or hidden states for the next stage.
            backward: (what `forward` gave, its gradient where the next stage says it).
        """

        def back(number: int, out: Tensor, grad: Tensor | None) -> None:
            with self._synchronise(last=number == len(batches) - 1):
                backward(out, grad)

        if self.encoder is not None:
            with self.compute():
                self.encoder.take_step(batches)
            return
        if self.pipeline is not None:
            self.pipeline.run([self.owner.part(b).tokens for b in batches], forward, back)
            return
        for number in range(len(batches)):
            with self._synchronise(last=number == len(batches) - 1):  # DDP looks at it in the forward too
                backward(forward(number, None), None)

    def evaluate(self, batch: Batch) -> Output | None:
        """A forward without gradients; None on stages of the pipeline and on vision ranks, which have no outcome."""
        with self.compute():
            if self.encoder is not None:
                self.encoder.serve(batch)
                return None
            if self.pipeline is None:
                return self.model(batch)
            tokens = self.owner.part(batch).tokens
            return self.pipeline.forward_only(tokens, lambda came: self.model(batch, came))

    def finish_gradients(self) -> None:
        """Sum what ranks have parts of: once a step, behind the last backward."""
        if self.tensor is not None:
            self.tensor.sum_partial()
        if self.pipeline is not None:
            self.pipeline.sum_tied()

    def copies(self, parameter: Tensor) -> int:
        """How many ranks hold the same piece of a parameter."""
        copies = self.layout.stage_ranks
        if isinstance(parameter, DTensor):
            mesh, places = parameter.device_mesh, parameter.placements
            copies //= math.prod(mesh.size(axis) for axis, place in enumerate(places) if not place.is_replicate())
        tied = None if self.pipeline is None or self.pipeline.tied is None else self.pipeline.tied.weight
        return copies * 2 if parameter is tied else copies  # on the first stage and on the last

    @contextmanager
    def _synchronise(self, *, last: bool) -> Iterator[None]:
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last or not self.waits)
            self.model.set_is_last_backward(last)
            yield
        elif isinstance(self.model, DistributedDataParallel) and not last:
            with self.model.no_sync():
                yield
        else:
            yield

    def vision_modules(self) -> tuple[nn.Module, ...]:
        """The vision tower, its merger included; none where it is left to other ranks."""
        hf, family = self.owner.hf, self.owner.family
        return (part(hf, family.vision),) if has_part(hf, family.vision) else ()


def apply_parallel(
    owner: LitchiModel,
    layout: Layout,
    ranks: Ranks,
    *,
    precision: str,
    checkpoint: bool,
    tied: bool = False,
    offload: bool = False,
    whole_tower: bool = False,
    compiled: bool = False,
    fill: Callable[[], None] | None = None,
) -> Wrapped:
    """Wrap the owner. Its trainable parts are set and adapters are in place.

    Args:
        owner: on the meta device, or with its weights.
        layout: sizes of the axes.
        ranks: this process.
        precision: of compute, by its name in `COMPUTE`.
        checkpoint: compute activations twice instead of keeping them.
        tied: whether the head is the embedding.
        offload: keep shards, gradients and optimizer state in the machine's memory (FSDP2).
        whole_tower: keep the vision tower, which is frozen, whole on each rank: it is called where features are not
            kept yet, which may be on one rank alone.
        compiled: fuse what lies around attention (`model/leaves.py`).
        fill: gives the parameters that are left their values, on this rank's device.
    """
    wrapped = Wrapped(owner, owner, layout, ranks.rank, precision, weights=count_weights(owner.hf))
    if checkpoint:
        owner.hf.activation_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        # transformers makes the embeddings' outputs require gradients, for the reentrant kind: a frozen tower would
        # pay a whole backward for nothing
        owner.hf.disable_input_require_grads()  # type: ignore[operator]
    owner.always_vision = not (layout.vision_ranks or whole_tower) and _always_vision(owner, layout)
    if layout.vision_ranks:
        _part_vision(wrapped, ranks)
    if compiled:
        compile_blocks(owner.hf, owner.family)
    if layout.ranks > 1:
        mesh = find_mesh(layout, ranks.device.type)  # made by all ranks, also by vision ranks, which are not in it
        if wrapped.encoder is None:
            _share_batch(wrapped, mesh, ranks, tied=tied)
            if layout.wrapper in ("FSDP2", "HSDP"):
                _shard(wrapped, mesh, ranks, offload=offload, whole_tower=whole_tower)
    if fill is not None:
        fill()
    else:
        owner.to(ranks.device)
    if layout.wrapper == "DDP" and any(p.requires_grad and not p.is_meta for p in owner.parameters()):
        devices = [ranks.device.index] if ranks.device.type == "cuda" else None
        wrapped.model = DistributedDataParallel(
            owner, device_ids=devices, forward_sync_buffers=False, process_group=wrapped.learners
        )
    return wrapped


def _whole_gradient(parameter: Tensor) -> int:
    """Elements of a gradient before it is reduced: of what tp cuts, this rank's part."""
    if not isinstance(parameter, DTensor):
        return parameter.numel()
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    return parameter.numel() // (mesh.size(names.index("tp")) if "tp" in names else 1)


def _always_vision(owner: LitchiModel, layout: Layout) -> bool:
    """Whether a batch without a picture calls the vision tower all the same, on a blank.

    Ranks must run the same collectives, those of the tower's gradients and of its shards; and where nothing else
    trains, a loss without the tower would have no gradient at all.
    """
    trained = {n for n, p in owner.hf.named_parameters() if p.requires_grad}
    vision = {n for n in trained if n.startswith(f"{owner.family.vision}.")}
    return trained == vision or layout.wrapper in ("FSDP2", "HSDP") or (layout.wrapper == "DDP" and bool(vision))


MESHES: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Layout, str], Mesh]] = WeakKeyDictionary()


def find_mesh(layout: Layout, device_type: str) -> Mesh:
    """The mesh of a layout over the ranks there are; made once, for each of its groups holds threads and sockets."""
    world = dist.group.WORLD
    assert world is not None
    known = MESHES.setdefault(world, {})
    if (layout, device_type) not in known:
        known[layout, device_type] = Mesh(layout, device_type)
    return known[layout, device_type]


class Mesh:
    """The mesh of a layout. FSDP2 shards over `shards`, dp_shard and cp in one: ranks of cp hold other tokens, as
    ranks of data do. Axes of one rank are left out, for each makes a process group."""

    def __init__(self, layout: Layout, device_type: str):
        self.layout = layout
        sizes = {"pp": layout.pp, "dp_replicate": layout.dp_replicate, "shards": layout.dp_shard * layout.cp}
        sizes = {axis: n for axis, n in {**sizes, "tp": layout.tp}.items() if n > 1 or axis == "shards"}
        ranks = torch.arange(layout.ranks).view(*sizes.values())
        self.joined = DeviceMesh(device_type, ranks, mesh_dim_names=tuple(sizes))
        both = layout.dp_shard > 1 and layout.cp > 1
        parts = (layout.dp_shard, layout.cp), ("dp_shard", "cp")
        self.axes = self.joined._unflatten("shards", *parts) if both else self.joined

    @cached_property
    def sharding(self) -> DeviceMesh:
        if self.layout.dp_replicate == 1:
            return self.joined["shards"]
        return self.joined["dp_replicate", "shards"]

    def group(self, *axes: str) -> Group:
        """The ranks of an axis, or of neighbouring axes in one. Collective."""
        some = tuple(axis for axis in axes if getattr(self.layout, axis) > 1)
        names = tuple("shards" if axis == "cp" and self.axes is self.joined else axis for axis in some)
        mesh = self.axes[names[0]] if len(names) == 1 else self.axes[names]._flatten("_".join(names))
        return Group(mesh.get_group(), mesh.get_local_rank(), mesh.size())


def _part_vision(wrapped: Wrapped, ranks: Ranks) -> None:
    """Leave the vision ranks the tower and the others the rest, and say how features get across."""
    owner, layout = wrapped.owner, wrapped.layout
    embedding = part(owner.hf, owner.family.embedding)
    cast = layout.wrapper in ("FSDP2", "HSDP") and wrapped.precision not in HELD  # then so are the embedded tokens
    dtype = COMPUTE[wrapped.precision] if cast else embedding.weight.dtype
    wrapped.learners = dist.new_group(list(range(layout.ranks)))
    keep_part(owner, encodes=layout.encodes(ranks.rank))
    if layout.encodes(ranks.rank):
        wrapped.encoder = Encoder(owner, list_receivers(layout), dtype)  # type: ignore[arg-type]
    else:
        width = int(embedding.embedding_dim)  # type: ignore[arg-type]
        owner.shares.pictures = RemotePictures(layout.ranks, owner.spec.merge, width, dtype, ranks.device)  # type: ignore[arg-type]


def _share_batch(wrapped: Wrapped, mesh: Mesh, ranks: Ranks, *, tied: bool) -> None:
    """The axes whose ranks work on one batch: pp cuts the layers, tp each layer, cp the token stream."""
    owner, layout, shares = wrapped.owner, wrapped.layout, wrapped.owner.shares
    place = layout.place(ranks.rank)
    vision_trains = any(p.requires_grad for module in wrapped.vision_modules() for p in module.parameters())
    shares.speaks = place.tp == place.cp == 0
    if layout.pp > 1:
        wrapped.pipeline = _make_pipeline(wrapped, mesh, ranks, tied=tied)
        shares.first, shares.last = wrapped.pipeline.first, wrapped.pipeline.last
    if layout.tp > 1:
        wrapped.tensor = cut = TensorCut(mesh.group("tp"), mesh.joined["tp"])
        cut_linears(owner.hf, owner.family, cut, vision=vision_trains and shares.first)
        shares.tensor = cut.group
        shares.silent_embedding = tied and place.tp > 0
        _know_partial(owner, cut, tied=tied)
    if layout.cp > 1:
        shares.sequence = SequenceCut(mesh.group("cp"))
    same_pictures = ("cp",) if vision_trains else ("cp", "tp")
    if not layout.vision_ranks and any(getattr(layout, axis) > 1 for axis in same_pictures):
        group = mesh.group(*same_pictures)  # made by all ranks, also by those of stages without a tower
        shares.pictures = SharedPictures(group, owner.spec.merge) if shares.first else None


def _know_partial(owner: LitchiModel, cut: TensorCut, *, tied: bool) -> None:
    """Rows of the head are shared out over tp, so its gradient is a part; a tied embedding's is then too."""
    if owner.shares.last:
        cut.partial += list(part(owner.hf, owner.family.head).modules())
    elif tied and owner.shares.first:
        cut.partial.append(part(owner.hf, owner.family.embedding))


def _make_pipeline(wrapped: Wrapped, mesh: Mesh, ranks: Ranks, *, tied: bool) -> Pipeline:
    """Leave this stage its layers, and say where gradients go back to."""
    owner, group = wrapped.owner, mesh.group("pp")
    layers, embedding = part(owner.hf, owner.family.language_layers), part(owner.hf, owner.family.embedding)
    norm = next(p for p in layers.parameters() if p.ndim == 1 and p.is_floating_point())
    cast = wrapped.layout.wrapper != "none" and wrapped.precision not in HELD  # by FSDP2
    trains_from = first_trained(owner.hf, owner.family, group.size)
    cut_stage(owner.hf, owner.family, group.rank, group.size, tied=tied)
    return Pipeline(
        group,
        wrapped.layout.pp_schedule,
        width=int(embedding.embedding_dim),  # type: ignore[arg-type]
        dtype=COMPUTE[wrapped.precision] if cast else norm.dtype,
        device=ranks.device,
        trains_from=trains_from,
        tied=embedding if tied else None,
    )


def _shard(wrapped: Wrapped, mesh: Mesh, ranks: Ranks, *, offload: bool, whole_tower: bool) -> None:
    """FSDP2 groups: every block and layer, the patch embedding, the merger, embedding and head, then the owner."""
    owner, layout, precision = wrapped.owner, wrapped.layout, wrapped.precision
    family, hf = owner.family, owner.hf
    policy = MixedPrecisionPolicy(
        param_dtype=None if precision in HELD else COMPUTE[precision],
        reduce_dtype=torch.float64 if precision == "fp64" else torch.float32,
        cast_forward_inputs=False,  # positions and rope's cos and sin must stay as they are
    )
    owner.computes_on = ranks.device if offload else None
    kept = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda") if offload else OffloadPolicy()

    def shard(module: nn.Module | list[nn.Module], *, gather_once: bool = False) -> None:
        # a stage calls its layers many times a step: gathering them each time would cost more than they weigh
        again = not gather_once and layout.pp == 1
        fully_shard(module, mesh=mesh.sharding, mp_policy=policy, reshard_after_forward=again, offload_policy=kept)  # type: ignore[arg-type]

    apart = {p for module in wrapped.vision_modules() for p in module.parameters()} if whole_tower else set()
    if has_part(hf, family.vision) and not whole_tower:
        for block in part(hf, family.vision_blocks).children():
            shard(block)
        shard(part(hf, family.patch_embedding))
        shard(part(hf, family.merger))
    for layer in part(hf, family.language_layers).children():
        shard(layer)
    ends = [part(hf, name) for name in (family.embedding, family.head) if has_part(hf, name)]
    if len(ends) == 2 and ends[0].weight is ends[1].weight:  # two groups would hold one tensor
        shard(ends, gather_once=True)
    else:
        for end in ends:
            shard(end, gather_once=True)  # a head with LoRA is called once for each piece of the loss
    fully_shard(owner, mesh=mesh.sharding, mp_policy=policy, offload_policy=kept, ignored_params=apart)
    for method in ("hidden", "next_hidden"):
        register_fsdp_forward_method(owner, method)
    if ranks.device.type == "cuda":
        whole = sum(_whole_gradient(p) for p in owner.parameters() if p.requires_grad)
        wrapped.waits = gradients_wait(whole, torch.cuda.get_device_properties(ranks.device).total_memory)
    wrapped.model = owner
