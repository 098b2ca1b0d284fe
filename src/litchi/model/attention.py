"""Attention over a forest of spans, in pieces merged by their log-sum-exp: no mask, no copied keys, no padding.

A span attends causally to itself and fully to each of its ancestors. Every (queries, keys) block of that rule is a
`Piece`; an ordinary flash kernel runs on each, and pieces that share queries are merged by log-sum-exp. In the
backward pass every piece calls the ordinary flash backward with the merged output and log-sum-exp, which gives its
exact share of the gradient (the identity ring attention rests on, arXiv 2310.01889). On the CPU the pieces are a
loop; on CUDA the pieces of one kind are one variable-length call.

The function is registered with transformers under `NAME`; the plan travels through the model's own forwards as the
keyword `plan`. Without a plan (a plain forward or `generate`) it falls back to transformers' SDPA.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd import Function
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from litchi.model.spans import Piece, Pieces, Plan

NAME = "litchi_spans"


# ------------------------------------------------------------------------------------------------ piece by piece


def _cut(x: Tensor, start: int, end: int, count: int) -> Tensor:
    """[T, H, ...] -> [count, H, length, ...], a view. One call and not three: with small pieces they add up."""
    length = (end - start) // count
    token, head, *rest = x.stride()
    size = (count, x.shape[1], length, *x.shape[2:])
    return x.as_strided(size, (length * token, head, token, *rest), x.storage_offset() + start * token)


def _flash_block(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """One block on the CPU: output [n, Hq, L, D], log-sum-exp fp32 [n, Hq, L]."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _flash_block_backward(grad, q, k, v, out, lse, causal: bool, scale: float):
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return kernel(grad, q, k, v, out, lse.contiguous(), 0.0, causal, scale=scale)


def _math_scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = q.float() @ k.float().repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return scores


def _math_block(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The definition, for fp32 on CUDA, where no flash kernel exists, and for the tests."""
    scores = _math_scores(q, k, causal, scale)
    values = v.float().repeat_interleave(q.shape[1] // v.shape[1], 1)
    return (scores.softmax(-1) @ values).to(q.dtype), scores.logsumexp(-1)


def _math_block_backward(grad, q, k, v, out, lse, causal: bool, scale: float):
    group = q.shape[1] // k.shape[1]
    weight = (_math_scores(q, k, causal, scale) - lse[..., None]).exp()
    g, values, keys = grad.float(), v.float().repeat_interleave(group, 1), k.float().repeat_interleave(group, 1)
    delta = (g * out.float()).sum(-1, keepdim=True)
    ds = weight * (g @ values.transpose(-1, -2) - delta) * scale
    dk, dv = ds.transpose(-1, -2) @ q.float(), weight.transpose(-1, -2) @ g
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
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
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
            if out.dtype == torch.float32:
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
        into: room for the three, whose values do not matter; null: new tensors.
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


def varlen_forward(q: Tensor, k: Tensor, v: Tensor, pieces: Sequence[Piece], scale: float) -> tuple[Tensor, Tensor]:
    """`pieces_forward` on CUDA: one variable-length flash call per level (half precision only)."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    for causal, first, (qi, cu_q, max_q), (ki, cu_k, max_k) in _calls(pieces, q.device):
        o, part, *_ = torch.ops.aten._flash_attention_forward(
            q[qi], k[ki], v[ki], cu_q, cu_k, max_q, max_k, 0.0, causal, False, scale=scale
        )
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
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pieces: Sequence[Piece], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`pieces_backward` on CUDA."""
    dq, dk, dv = (torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (q, k, v))
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which is off
    for causal, _, (qi, cu_q, max_q), (ki, cu_k, max_k) in _calls(pieces, q.device):
        part = torch.ops.aten._flash_attention_backward(
            grad[qi].contiguous(), q[qi], k[ki], v[ki], out[qi], lse[qi].transpose(0, 1).contiguous(),
            cu_q, cu_k, max_q, max_k, 0.0, causal, state, state[:0], scale=scale,
        )  # fmt: skip
        for total, index, share in zip((dq, dk, dv), (qi, ki, ki), part, strict=True):
            if isinstance(index, slice):
                total[index].add_(share)
            else:
                total.index_add_(0, index, share.float())
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


# ------------------------------------------------------------------------------------------------ the one function


def run_forward(q: Tensor, k: Tensor, v: Tensor, pieces: Sequence[Piece], scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp by the kernels of the device."""
    if not q.is_cuda:
        return pieces_forward(q, k, v, pieces, scale)
    if q.dtype == torch.float32:
        return pieces_forward(q, k, v, pieces, scale, _math_block)
    return varlen_forward(q, k, v, pieces, scale)


def run_backward(grad, q, k, v, out, lse, pieces: Sequence[Piece], scale: float, into=None):
    """Gradients of q, k, v by the kernels of the device, in new tensors or in the three of `into`."""
    if not grad.is_cuda:
        return pieces_backward(grad, q, k, v, out, lse, pieces, scale, into=into)
    if grad.dtype == torch.float32:
        return pieces_backward(grad, q, k, v, out, lse, pieces, scale, _math_block_backward, into)
    grads = varlen_backward(grad, q, k, v, out, lse, pieces, scale)
    return grads if into is None else tuple(room.copy_(t) for room, t in zip(into, grads, strict=True))


class PieceAttention(Function):
    """q [R, Hq, D], k, v [T, Hk, D] after rope -> [R, Hq, D]."""

    @staticmethod
    def forward(ctx, q, k, v, pieces, scale):
        out, lse = run_forward(q, k, v, pieces, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.pieces, ctx.scale = pieces, scale
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        return *run_backward(grad, q, k, v, out, lse, ctx.pieces, ctx.scale), None, None


def kernel_name(device: torch.device, dtype: torch.dtype) -> str:
    """The attention kernel that will run, for the log."""
    if device.type != "cuda":
        return "spans, CPU flash"
    return "spans, math (fp32 has no flash kernel on CUDA)" if dtype == torch.float32 else "spans, varlen flash"


def spans_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    plan: Plan | None = None,
    **kwargs,
):
    """What transformers calls: query [1, Hq, T, D], key and value [1, Hk, T, D] -> ([1, T, Hq, D], None).

    Faster leaves (`model/leaves.py`) go to `attend` by themselves.
    """
    if plan is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    scale = module.head_dim**-0.5 if scaling is None else scaling
    pieces = plan.window if plan.window is not None and module.windowed else plan.full
    return attend(module, q, k, v, plan, pieces, scale)[None], None


def attend(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, plan: Plan, pieces: Sequence[Piece], scale: float
) -> Tensor:
    """Attention of a layer: q [R, Hq, D], k, v [T, Hk, D] after rope -> [R, Hq, D]."""
    if plan.cache is not None:
        decoded = plan.cache.attend(module, q, k, v, scale)  # type: ignore[attr-defined]
        if decoded is not None:
            return decoded
    q, k = q.to(v.dtype), k.to(v.dtype)  # under autocast rope hands back fp32 queries and keys beside bf16 values
    if plan.sequence is None:
        return PieceAttention.apply(q, k, v, pieces, scale)
    out = PieceAttention.apply(*plan.sequence.to_heads(q, k, v), pieces, scale)
    return plan.sequence.to_tokens(out)


def register() -> None:
    """Make the function known to transformers. Called once, on import of the model package's builder."""
    AttentionInterface.register(NAME, spans_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
