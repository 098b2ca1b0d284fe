"""Tensor parallel: every layer cut over the ranks of the axis `tp`, which all work on the same tokens.

In attention and in the MLP the first linears are cut by output features (a rank has some heads, some of the
intermediate features), the last by input features, so that one sum over the ranks ends each (Megatron-LM, arXiv
1909.08053). Weights are DTensors on the mesh, so FSDP2 shards them further and checkpoints know them whole; the
forwards use the local part. Whatever is not cut is held by every rank. Where ranks compute only a part with such a
weight, its gradient is a part too: these are listed, and summed once a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from litchi.model.family import Cuts, Family, part
from litchi.model.weights import own_part
from litchi.parallel.collectives import Group

COLUMNS, ROWS = Shard(0), Shard(1)


@dataclass
class TensorCut:
    """What is cut over which ranks, and the weights each rank has a part of the gradient of."""

    group: Group
    mesh: DeviceMesh
    partial: list[nn.Module] = field(default_factory=list)  # with what weights of their own they have, uncut

    def sum_partial(self) -> None:
        """Sum the gradients that ranks have parts of. Once a step, behind the last backward."""
        own = (p for module in self.partial for p in module.parameters(recurse=False))
        grads = [p.grad for p in own if p.grad is not None and not _is_cut(p, self.mesh)]
        self.group.sum_([own_part(g) for g in grads])


class ColumnLinear(nn.Linear):
    """A linear layer of which a rank computes some output features. The weight is cut by rows of its matrix."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, own_part(self.weight), None if self.bias is None else own_part(self.bias))


class RowLinear(nn.Linear):
    """A linear layer of which a rank has some input features: its output is a part of a sum."""

    adds_bias: float  # 1 on one rank, 0 on the others

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, own_part(self.weight))
        return out if self.bias is None else out + self.bias * self.adds_bias


class FusedLinear(nn.Linear):
    """Queries, keys and values of all heads in one weight, of which a rank computes those of its heads.

    The weight stays whole on every rank: cut by heads it would be three runs of rows, which no checkpoint can name.
    """

    cut: tuple[int, int]  # rank, ranks

    def forward(self, x: Tensor) -> Tensor:
        rank, ranks = self.cut

        def own(t: Tensor) -> Tensor:
            return t.unflatten(0, (3, ranks, -1))[:, rank].flatten(0, 1)

        return F.linear(x, own(self.weight), None if self.bias is None else own(self.bias))


def cut_linears(hf: nn.Module, family: Family, cut: TensorCut, *, vision: bool) -> None:
    """Cut the layers a model has (a pipeline stage has some), in place; adapters are in place already.

    Args:
        vision: cut the vision tower and its merger too.
    """
    layers = part(hf, family.language_layers).children()
    for layer in layers:
        _cut_layer(layer, family.language_cuts, cut)
    if vision:
        for block in part(hf, family.vision_blocks).children():
            _cut_layer(block, family.vision_cuts, cut)
        _cut_layer(part(hf, family.merger), family.merger_cuts, cut)


def _cut_layer(layer: nn.Module, cuts: Cuts, cut: TensorCut) -> None:
    for names in cuts:
        module = layer.get_submodule(names.module)
        for linear in names.columns:
            _cut_columns(module.get_submodule(linear), cut)
        if names.fused is not None:
            _cut_fused(module, module.get_submodule(names.fused), cut)
        for linear in names.rows:
            _cut_rows(module.get_submodule(linear), cut)
        module.register_forward_pre_hook(_copies_input(cut.group), with_kwargs=True)


def _copies_input(group: Group):
    """The hidden states a module is called with, by position or by name, are what its ranks hold in common."""

    def hook(module, args, kwargs):
        if args:
            return (group.copy(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": group.copy(kwargs["hidden_states"])}

    return hook


def _plain(linear: nn.Module) -> nn.Linear:
    """The linear itself, or the one under LoRA."""
    return getattr(linear, "base_layer", linear)


def _adapters(linear: nn.Module) -> Iterable[tuple[nn.Linear, nn.Linear]]:
    """LoRA's (A, B) of a linear."""
    if hasattr(linear, "base_layer"):
        for name in linear.lora_A:  # type: ignore[union-attr]
            yield linear.lora_A[name], linear.lora_B[name]  # type: ignore[index]


def _become(linear: nn.Linear, kind: type[nn.Linear], place: Placement | None, cut: TensorCut) -> None:
    """Change a linear's class, which has the same parameters under the same names, and cut its weight."""
    linear.__class__ = kind
    if place is not None:
        _distribute(linear, "weight", place, cut.mesh)


def _distribute(module: nn.Module, name: str, place: Placement, mesh: DeviceMesh) -> None:
    old = getattr(module, name)
    data = distribute_tensor(old.detach(), mesh, [place], src_data_rank=None)  # every rank has it: no traffic
    setattr(module, name, nn.Parameter(data, requires_grad=old.requires_grad))


def _cut_columns(linear: nn.Module, cut: TensorCut) -> None:
    for a, b in _adapters(linear):
        _become(b, ColumnLinear, COLUMNS, cut)
        cut.partial.append(a)
    base = _plain(linear)
    _become(base, ColumnLinear, COLUMNS, cut)
    if base.bias is not None:
        _distribute(base, "bias", COLUMNS, cut.mesh)


def _cut_rows(linear: nn.Module, cut: TensorCut) -> None:
    for a, b in _adapters(linear):
        _become(a, RowLinear, ROWS, cut)
        cut.partial.append(b)
    base = _plain(linear)
    _become(base, RowLinear, ROWS, cut)
    if base.bias is not None:
        base.adds_bias = float(cut.group.rank == 0)
        cut.partial.append(base)  # of it the bias
    linear.register_forward_hook(lambda module, args, out: cut.group.reduce(out))


def _cut_fused(attention: nn.Module, linear: nn.Module, cut: TensorCut) -> None:
    attention.num_heads //= cut.group.size  # type: ignore[operator,assignment]
    for a, b in _adapters(linear):
        _become(b, FusedLinear, None, cut)
        b.cut = (cut.group.rank, cut.group.size)
        cut.partial += [a, b]
    base = _plain(linear)
    _become(base, FusedLinear, None, cut)
    base.cut = (cut.group.rank, cut.group.size)
    cut.partial.append(base)


def _is_cut(parameter: Tensor, mesh: DeviceMesh) -> bool:
    """Whether each rank of the axis holds rows or columns of its own."""
    return isinstance(parameter, DTensor) and mesh.mesh_dim_names[0] in (parameter.device_mesh.mesh_dim_names or ())
