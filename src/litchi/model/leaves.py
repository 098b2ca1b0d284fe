"""Faster leaves: modules of the model whose class is changed, one by one, for a subclass with a forward of our own.

Parameters and their names stay, so sharding, adapters, checkpointing and files know nothing of it. It is done while
the model is built, before all of them; what comes later and changes a linear (LoRA, 4 bits, tensor parallel) is met
as it is, because leaves call their linears as modules and take the number of heads from what comes out. Without a
plan, as in a plain forward of transformers, an attention leaf falls back to the forward it replaces.

The gain of each is measured by `benchmarks/leaves.py`; `Leaves` has a switch for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from transformers.activations import SiLUActivation

from litchi.model.attention import attend, run_backward, run_forward
from litchi.model.family import Family, has_part, part
from litchi.model.precision import WIDEST, widen


@dataclass(frozen=True)
class Leaves:
    """Which leaves are changed.

    Args:
        fold: the patch embedding takes the two equal frames of a still picture as one.
        attention: rope and layout of queries, keys and values without copies.
        norm: RMSNorm with a backward in closed form.
        gate: activation and product of wide MLPs as one, which keeps three tensors of their width instead of four.
        rows: the last language layer, but for its keys and values, only at the rows that are needed.
    """

    fold: bool = True
    attention: bool = True
    norm: bool = True
    gate: bool = True
    rows: bool = True


def change_leaves(hf: nn.Module, family: Family, leaves: Leaves) -> None:
    """Change the classes of a model's leaves, in place, before adapters and sharding."""
    roles = dict(family.roles)
    for module in hf.modules():
        role = roles.get(type(module).__name__)
        if role is not None and getattr(leaves, SWITCHES[role]) and _suits(role, module):
            module.__class__ = _blend(LEAVES[role], type(module))  # type: ignore[arg-type]
    if leaves.rows and leaves.attention and any(role == "attention" for role in roles.values()):
        last = part(hf, family.language_layers)[-1]  # type: ignore[index]
        last.__class__ = _blend(NeededRows, type(last))  # type: ignore[arg-type]


def _suits(role: str, module: Any) -> bool:
    return role != "gate" or isinstance(module.act_fn, nn.SiLU | SiLUActivation)


@cache
def _blend(leaf: type, kind: type) -> type:
    """The class of transformers with the forward of a leaf, under its own name."""
    return type(kind.__name__, (leaf, kind), {"__doc__": leaf.__doc__, "__module__": __name__})


# ------------------------------------------------------------------------------------------------ patch embedding


class FoldedPatches(nn.Module):
    """The embedding of patches as one linear layer. A still picture's two frames are equal, so its patch comes once
    and meets the sum of the two frames' weights: half the products of the convolution, and the same gradient for both.

    Takes fp [P, 3 * patch^2] of still pictures, or [P, 3 * temporal * patch^2] where frames differ.
    """

    proj: nn.Conv3d

    def forward(self, patches: Tensor) -> Tensor:
        weight = self.proj.weight
        if patches.shape[-1] * weight.shape[2] == weight[0].numel():
            weight = weight.sum(2)
        return F.linear(patches.to(weight.dtype), weight.flatten(1))


def folds_stills(tower: nn.Module) -> bool:
    """Whether a vision tower takes the patches of still pictures once instead of once for each frame."""
    return any(isinstance(module, FoldedPatches) for module in tower.children())


# ------------------------------------------------------------------------------------------------------- attention


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
    """Turn the pairs (x[i], x[i + D/2]) by their angles, in fp32 at least. x [T, H, D]; cos, sin as `_angles`."""
    if x.dtype not in WIDEST:
        turned = _rotate(widen(x), cos, sin)
        return turned.to(x.dtype) if out is None else out.copy_(turned)
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), -1).mul_(sin)
    return swapped.addcmul_(x, cos) if out is None else torch.addcmul(swapped, x, cos, out=out)


def _angles(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """transformers' cos and sin [T, D], whose halves are equal, as `_rotate` takes them: [T, 1, D], fp32 at least, in
    the lower half the sine negated."""
    half = sin.shape[-1] // 2
    return widen(cos[:, None]), widen(torch.cat((-sin[:, None, :half], sin[:, None, half:]), -1))


class Rope(Function):
    """Rotary embedding of [T, H, D] by what `_angles` gives; the gradient turns back."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


class FusedAttention(Function):
    """Rope and attention of queries, keys and values that lie in one tensor [P, 3, H, D] -> [P, H, D]."""

    @staticmethod
    def forward(ctx, qkv, cos, sin, pieces, scale):
        turned = qkv[:, :2].view(len(qkv), -1, qkv.shape[-1])  # nobody else reads it: it is turned where it lies
        _rotate(turned, cos, sin, turned)
        q, k, v = qkv.unbind(1)
        out, lse = run_forward(q, k, v, pieces, scale)
        ctx.save_for_backward(qkv, out, lse, cos, sin)
        ctx.pieces, ctx.scale = pieces, scale
        return out

    @staticmethod
    def backward(ctx, grad):
        qkv, out, lse, cos, sin = ctx.saved_tensors
        back = torch.empty_like(qkv)
        q, k, v = qkv.unbind(1)
        run_backward(grad, q, k, v, out, lse, ctx.pieces, ctx.scale, back.unbind(1))
        turned = back[:, :2].view(len(qkv), -1, qkv.shape[-1])
        _rotate(turned, cos, -sin, turned)
        return back, None, None, None, None


class VisionAttention(nn.Module):
    """Attention of a vision block."""

    qkv: nn.Module
    proj: nn.Module
    head_dim: int
    scaling: float
    windowed: bool

    def forward(self, hidden_states, cu_seqlens=None, position_embeddings=None, plan=None, **kwargs):
        if plan is None:
            return super().forward(hidden_states, cu_seqlens, position_embeddings, **kwargs)  # type: ignore[misc]
        cos, sin = _angles(*position_embeddings)
        qkv = self.qkv(hidden_states).view(len(hidden_states), 3, -1, self.head_dim)
        pieces = plan.window if self.windowed and plan.window is not None else plan.full
        return self.proj(FusedAttention.apply(qkv, cos, sin, pieces, self.scaling).flatten(1))


class LanguageAttention(nn.Module):
    """Attention of a language layer; with `rows`, of those rows of the stream only, to all of it."""

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    head_dim: int
    scaling: float

    def forward(self, hidden_states, *args, position_embeddings=None, plan=None, rows=None, **kwargs):
        if plan is None:
            return super().forward(  # type: ignore[misc]
                hidden_states, *args, position_embeddings=position_embeddings, **kwargs
            )
        cos, sin = _angles(position_embeddings[0][0], position_embeddings[1][0])
        # where ranks trade tokens for heads each brings all its queries, and rows are chosen behind
        early = rows is not None and plan.sequence is None
        asking = hidden_states.index_select(1, rows) if early else hidden_states
        q, k, v = (
            linear(x)[0].unflatten(-1, (-1, self.head_dim))
            for linear, x in ((self.q_proj, asking), (self.k_proj, hidden_states), (self.v_proj, hidden_states))
        )
        q = Rope.apply(q, cos[rows], sin[rows]) if early else Rope.apply(q, cos, sin)
        out = attend(self, q, Rope.apply(k, cos, sin), v, plan, plan.last if early else plan.full, self.scaling)
        if rows is not None and not early:
            out = out.index_select(0, rows)
        return self.o_proj(out.flatten(1)[None]), None


class NeededRows(nn.Module):
    """The last decoder layer: nobody reads its output but at `plan.rows`, so it is computed there alone.

    [1, T, hidden] -> [1, rows, hidden]; without rows in the plan it is the layer it was.
    """

    self_attn: nn.Module
    mlp: nn.Module
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module

    def forward(self, hidden_states, *args, plan=None, **kwargs):
        if plan is None or plan.rows is None:
            kwargs |= {} if plan is None else {"plan": plan}
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        rows = plan.rows.to(hidden_states.device)
        normed = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(hidden_states=normed, plan=plan, rows=rows, **kwargs)
        hidden_states = hidden_states.index_select(1, rows) + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def compile_blocks(hf: nn.Module, family: Family) -> None:
    """Have torch.compile fuse what lies around attention in every block that is here; before sharding.

    Attention stays as it is: its plan changes with every batch, and each would be compiled anew. So does the layer
    that is computed at some rows alone.
    """
    blocks = list(part(hf, family.language_layers).children())
    if has_part(hf, family.vision):
        blocks += part(hf, family.vision_blocks).children()
    for block in blocks:
        if not leaves_out_rows(block):
            for module in block.children():
                if isinstance(module, VisionAttention | LanguageAttention):
                    module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
            block.compile(dynamic=True)


def leaves_out_rows(layer: nn.Module) -> bool:
    """Whether a decoder layer gives the rows of its plan alone."""
    return isinstance(layer, NeededRows)


# -------------------------------------------------------------------------------------------------- norm and gate


class Norm(Function):
    """w x / sqrt(mean(x^2) + eps) of [T, width] in fp32, its backward in closed form: r the inverse root,
    dx = r w g - x r^3 mean(x w g)."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        r = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return (x * r).mul_(weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight, r = ctx.saved_tensors
        product = grad * x
        of_weight = product.t().mv(r[:, 0]) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, of_weight, None
        mean = product.mv(weight)[:, None] * r.pow(3).div_(-x.shape[-1])
        return torch.mul(grad, weight, out=product).mul_(r).addcmul_(x, mean), of_weight, None


class RMSNorm(nn.Module):
    """RMSNorm in a third of the passes over memory on the CPU, and as one kernel on CUDA."""

    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype:
            if x.is_cuda:
                return F.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)
            if x.dtype in WIDEST:
                return Norm.apply(x.reshape(-1, x.shape[-1]), self.weight, self.variance_epsilon).view(x.shape)
        return super().forward(x)  # type: ignore[misc]


WIDE = (
    1024  # of an MLP: the gate's second look at silu takes a few percent of a narrow model's step, of a wide one's none
)
ROWS = 128  # whose passes follow each other in a CPU's cache


class Gate(Function):
    """silu(gate) * up of [T, width]: silu is computed again in the backward, not kept."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return _combine(gate, up)

    @staticmethod
    def backward(ctx, grad):
        return _combine_backward(grad, *ctx.saved_tensors)


class GateDown(Function):
    """The same and the linear layer behind it, whose input is computed again too: [T, width] -> [T, hidden]."""

    @staticmethod
    def forward(ctx, gate, up, weight, bias):
        ctx.save_for_backward(gate, up, weight)
        return F.linear(_combine(gate, up), weight, bias)

    @staticmethod
    def backward(ctx, grad):
        gate, up, weight = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        of_weight = flat.t() @ _combine(gate, up).flatten(0, -2) if ctx.needs_input_grad[2] else None
        of_bias = flat.sum(0) if ctx.needs_input_grad[3] else None
        if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[1]):
            return None, None, of_weight, of_bias
        return *_combine_backward(grad @ weight, gate, up), of_weight, of_bias


def _combine(gate: Tensor, up: Tensor) -> Tensor:
    out = torch.empty_like(gate)
    for g, u, o in _in_rows(gate, up, out):
        torch.mul(F.silu(g), u, out=o)
    return out


def _combine_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
    for d, g, u, x, y in _in_rows(grad, gate, up, of_gate, of_up):
        torch.ops.aten.silu_backward.grad_input(d * u, g, grad_input=x)
        torch.mul(F.silu(g), d, out=y)
    return of_gate, of_up


def _in_rows(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Rows of tensors of one shape, some at a time on a CPU."""
    flat = [t.view(-1, t.shape[-1]) for t in tensors]
    return zip(*(t.split(ROWS) for t in flat), strict=True) if flat[0].device.type == "cpu" else iter([tuple(flat)])


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    intermediate_size: int

    def forward(self, x: Tensor) -> Tensor:
        if self.intermediate_size < WIDE:
            return super().forward(x)  # type: ignore[misc]
        gate, up = self.gate_proj(x).contiguous(), self.up_proj(x).contiguous()
        down = self.down_proj
        if gate.is_cuda:
            return down(liger_gate().apply(gate, up))
        if type(down) is nn.Linear and type(down.weight.data) is Tensor and down.weight.dtype == gate.dtype:
            return GateDown.apply(gate, up, down.weight, down.bias)
        return down(Gate.apply(gate, up))


@cache
def liger_gate() -> type[Function]:
    """On CUDA both passes as one kernel each, where liger-kernel is installed."""
    if find_spec("liger_kernel") is None:
        return Gate
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction


# role of a class (`Family.roles`) -> its leaf, and the switch it hangs on
LEAVES: dict[str, type[nn.Module]] = {
    "patches": FoldedPatches,
    "vision_attention": VisionAttention,
    "attention": LanguageAttention,
    "norm": RMSNorm,
    "gate": GatedMLP,
}
SWITCHES = {
    "patches": "fold",
    "vision_attention": "attention",
    "attention": "attention",
    "norm": "norm",
    "gate": "gate",
}
