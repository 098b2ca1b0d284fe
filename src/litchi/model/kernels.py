"""Attention over pieces by the kernels of a device: block by block, or one variable-length call for many blocks.

Each way gives output and log-sum-exp of all pieces merged, and their gradients. `choose_kernels` says which is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from litchi.errors import MachineError
from litchi.model.precision import widen
from litchi.model.spans import Piece, Pieces

# ------------------------------------------------------------------------------------------------ piece by piece


def _cut(x: Tensor, start: int, end: int, count: int) -> Tensor:
    """[T, H, ...] -> [count, H, length, ...], a view. One call and not three: with small pieces they add up."""
    length = (end - start) // count
    token, head, *rest = x.stride()
    size = (count, x.shape[1], length, *x.shape[2:])
    return x.as_strided(size, (length * token, head, token, *rest), x.storage_offset() + start * token)


def _flash_block(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """One block on the CPU: output [n, Hq, L, D], log-sum-exp [n, Hq, L], fp32 at least."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _flash_block_backward(grad, q, k, v, out, lse, causal: bool, scale: float):
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return kernel(grad, q, k, v, out, lse.contiguous(), 0.0, causal, scale=scale)


def _math_scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = widen(q) @ widen(k).repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return scores


def _math_block(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The definition, for fp32 on CUDA, where no flash kernel exists, and for the tests."""
    scores = _math_scores(q, k, causal, scale)
    values = widen(v).repeat_interleave(q.shape[1] // v.shape[1], 1)
    return (scores.softmax(-1) @ values).to(q.dtype), scores.logsumexp(-1)


def _math_block_backward(grad, q, k, v, out, lse, causal: bool, scale: float):
    group = q.shape[1] // k.shape[1]
    weight = (_math_scores(q, k, causal, scale) - lse[..., None]).exp()
    g, values, keys = widen(grad), widen(v).repeat_interleave(group, 1), widen(k).repeat_interleave(group, 1)
    delta = (g * widen(out)).sum(-1, keepdim=True)
    ds = weight * (g @ values.transpose(-1, -2) - delta) * scale
    dk, dv = ds.transpose(-1, -2) @ widen(q), weight.transpose(-1, -2) @ g
    dk, dv = (t.unflatten(1, (-1, group)).sum(2) for t in (dk, dv))
    return (ds @ keys).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def pieces_forward(
    q: Tensor, k: Tensor, v: Tensor, pieces: Sequence[Piece], scale: float, block=_flash_block
) -> tuple[Tensor, Tensor]:
    """Run and merge the pieces.

    Args:
        q: [T, Hq, D]; k, v: [T, Hk, D] after rope, Hq a multiple of Hk.
        block: attention of one block, `_flash_block` or `_math_block`.

    Returns:
        output [T, Hq, D] in q's dtype and log-sum-exp fp32 [T, Hq].
    """
    out = q.new_empty(q.shape)  # contiguous, as what comes behind attention wants it
    lse = widen(q.new_empty(q.shape[:2]))
    for p in pieces:
        query, key = (p.q0, p.q1, p.count), (p.k0, p.k1, p.count)
        o, part = block(_cut(q, *query), _cut(k, *key), _cut(v, *key), p.causal, scale)
        out_here, lse_here = _cut(out, *query), _cut(lse, *query)
        if p.first:
            out_here.copy_(o)
            lse_here.copy_(part)
        else:  # in fp32: merging in bf16 would add to the error of shared prefixes
            merged = torch.logaddexp(lse_here, part)
            keeps, adds = ((t - merged).exp_()[..., None] for t in (lse_here, part))
            if out.dtype == lse.dtype:
                out_here.mul_(keeps).addcmul_(o, adds)
            else:
                out_here.copy_((out_here.float() * keeps).add_(o.float() * adds))
            lse_here.copy_(merged)
    return out, lse


def pieces_backward(
    grad, q, k, v, out, lse, pieces: Sequence[Piece], scale: float, block=_flash_block_backward, into=None
):
    """Gradients of q, k, v: each piece's backward with the merged output and log-sum-exp, summed.

    Args:
        into: room for the three, whose values do not matter; None: new tensors.
    """
    dq, dk, dv = into or (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
    tiled = isinstance(pieces, Pieces) and pieces.tiled == len(q) == len(k)
    if not tiled:
        for total in (dq, dk, dv):
            total.zero_()
    for p in pieces:
        query, key = (p.q0, p.q1, p.count), (p.k0, p.k1, p.count)
        part = block(
            *(
                _cut(t, *where)
                for t, where in ((grad, query), (q, query), (k, key), (v, key), (out, query), (lse, query))
            ),
            p.causal,
            scale,
        )
        for total, where, share in zip((dq, dk, dv), (query, key, key), part, strict=True):
            here = _cut(total, *where)
            if tiled and p.first:
                here.copy_(share)
            else:
                here.add_(share)
    return dq, dk, dv


# -------------------------------------------------------------------------------------------------- CUDA kernels


def _levels(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Pieces that can run in one variable-length call: same kind, disjoint queries."""
    levels: list[list[Piece]] = []
    ends: list[int] = []
    for piece in pieces:
        for i, level in enumerate(levels):
            if level[0].causal == piece.causal and level[0].first == piece.first and ends[i] <= piece.q0:
                level.append(piece)
                ends[i] = piece.q1
                break
        else:
            levels.append([piece])
            ends.append(piece.q1)
    return levels


def _lengths(level: Sequence[Piece], device: torch.device):
    """Index of the queries and keys of a level, cumulative lengths, largest lengths."""
    queries, keys = [], []
    for p in level:
        queries += [
            (p.q0 + i * (p.q1 - p.q0) // p.count, p.q0 + (i + 1) * (p.q1 - p.q0) // p.count) for i in range(p.count)
        ]
        keys += [
            (p.k0 + i * (p.k1 - p.k0) // p.count, p.k0 + (i + 1) * (p.k1 - p.k0) // p.count) for i in range(p.count)
        ]

    def pack(ranges):
        sizes = torch.tensor([0] + [b - a for a, b in ranges])
        index = torch.cat([torch.arange(a, b) for a, b in ranges])
        return index.to(device), sizes.cumsum(0).to(device, torch.int32), int(sizes.max())

    return pack(queries), pack(keys)


def _calls(pieces: Sequence[Piece], device: torch.device) -> list:
    """The variable-length calls of the pieces: (causal, first, queries, keys), the last two as `_lengths` gives them,
    but with a slice for a run of tokens, which is a view and no copy."""
    if isinstance(pieces, Pieces) and device in pieces.made:
        return pieces.made[device]
    calls = []
    for level in _levels(pieces):
        lengths = _lengths(level, torch.device("cpu"))
        sides = [(_run_or_index(index, device), cu.to(device), longest) for index, cu, longest in lengths]
        calls.append((level[0].causal, level[0].first, *sides))
    if isinstance(pieces, Pieces):
        pieces.made[device] = calls
    return calls


def _run_or_index(index: Tensor, device: torch.device) -> slice | Tensor:
    start, count = int(index[0]), len(index)
    if torch.equal(index, torch.arange(start, start + count)):
        return slice(start, start + count)
    return index.to(device)


def _torch_call(q: Tensor, k: Tensor, v: Tensor, lengths: tuple, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Variable-length flash of torch: output [Q, Hq, D], log-sum-exp [Hq, Q]."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *lengths, 0.0, causal, False, scale=scale)
    return out, lse


def _torch_call_backward(grad, q, k, v, out, lse, lengths: tuple, causal: bool, scale: float):
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which is off
    return torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, *lengths, 0.0, causal, state, state[:0], scale=scale
    )


def _flash_call(q: Tensor, k: Tensor, v: Tensor, lengths: tuple, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The same of the package flash-attn."""
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

    out, lse, *_ = _flash_attn_varlen_forward(q, k, v, *lengths, dropout_p=0.0, softmax_scale=scale, causal=causal)
    return out, lse


def _flash_call_backward(grad, q, k, v, out, lse, lengths: tuple, causal: bool, scale: float):
    from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

    room = tuple(torch.empty_like(t) for t in (q, k, v))
    _flash_attn_varlen_backward(
        grad, q, k, v, out, lse, *room, *lengths, dropout_p=0.0, softmax_scale=scale, causal=causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, deterministic=False,
    )  # fmt: skip
    return room


def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, pieces: Sequence[Piece], scale: float, call=_torch_call
) -> tuple[Tensor, Tensor]:
    """`pieces_forward` on CUDA: one variable-length call per level (half precision only)."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    for causal, first, (qi, cu_q, max_q), (ki, cu_k, max_k) in _calls(pieces, q.device):
        o, part = call(q[qi], k[ki], v[ki], (cu_q, cu_k, max_q, max_k), causal, scale)
        part = part.transpose(0, 1)
        if first:
            out[qi], lse[qi] = o, part
        else:
            before = lse[qi]
            merged = torch.logaddexp(before, part)
            weighted = (
                out[qi].float() * (before - merged).exp()[..., None] + o.float() * (part - merged).exp()[..., None]
            )
            out[qi], lse[qi] = weighted.to(out.dtype), merged
    return out, lse


def varlen_backward(
    grad, q, k, v, out, lse, pieces: Sequence[Piece], scale: float, call=_torch_call_backward, into=None
) -> tuple[Tensor, Tensor, Tensor]:
    """`pieces_backward` on CUDA."""
    dq, dk, dv = (torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (q, k, v))
    for causal, _, (qi, cu_q, max_q), (ki, cu_k, max_k) in _calls(pieces, q.device):
        part = call(
            grad[qi].contiguous(), q[qi], k[ki], v[ki], out[qi], lse[qi].transpose(0, 1).contiguous(),
            (cu_q, cu_k, max_q, max_k), causal, scale,
        )  # fmt: skip
        for total, index, share in zip((dq, dk, dv), (qi, ki, ki), part, strict=True):
            if isinstance(index, slice):
                total[index].add_(share)
            else:
                total.index_add_(0, index, share.float())
    if into is not None:
        return tuple(room.copy_(t) for room, t in zip(into, (dq, dk, dv), strict=True))  # type: ignore[return-value]
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


# -------------------------------------------------------------------------------------------------------- choosing


class Kernels(NamedTuple):
    """A way to compute attention: `forward` and `backward` take what `pieces_forward` and `pieces_backward` take."""

    name: str
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def _by_block(name: str, block: Any, back: Any) -> Kernels:
    return Kernels(
        name,
        partial(pieces_forward, block=block),
        partial(pieces_backward, block=back),
    )


def _by_call(name: str, call: Any, back: Any) -> Kernels:
    return Kernels(name, partial(varlen_forward, call=call), partial(varlen_backward, call=back))


ON_CPU = _by_block("spans, CPU flash", _flash_block, _flash_block_backward)
MATH = _by_block("spans, math", _math_block, _math_block_backward)
VARLEN = _by_call("spans, varlen flash", _torch_call, _torch_call_backward)
FLASH = _by_call("spans, flash-attn", _flash_call, _flash_call_backward)


def choose_kernels(choice: str, device: torch.device, dtype: torch.dtype) -> Kernels:
    """The kernels that run, by `model.attention`, for tensors of a device and a precision.

    `auto` is variable-length flash on CUDA in half precision, block by block elsewhere; in fp32 on CUDA, where no
    flash kernel exists, by the definition.

    Raises:
        MachineError: this device, this precision or this machine's packages have not what was chosen.
    """
    half = device.type == "cuda" and dtype != torch.float32
    if choice == "auto":
        choice = "varlen" if half else "sdpa"
    if choice == "sdpa":
        return ON_CPU if device.type == "cpu" else MATH
    if not half:
        raise MachineError(
            f"model.attention={choice} computes in bf16 or fp16 on a GPU",
            why=f"this run computes in {str(dtype).removeprefix('torch.')} on {device.type}",
            remedy="Leave it at auto",
        )
    if choice == "flash" and find_spec("flash_attn") is None:
        raise MachineError(
            "model.attention=flash needs the package flash-attn",
            remedy="Install it, or take varlen: torch's own build of the same kernel",
        )
    return FLASH if choice == "flash" else VARLEN
