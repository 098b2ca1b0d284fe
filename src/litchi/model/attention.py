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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "litchi_spans"

Span = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Piece:
    """`count` equal blocks side by side: queries [q0, q1) against keys [k0, k1), both cut into `count` parts.

    `first` marks the piece that opens its queries; the others are merged into what is there.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool
    count: int = 1
    first: bool = True


@dataclass
class Plan:
    """What attends to what in one forward. An opaque object, so that FSDP's and checkpointing's walks skip it.

    `full` are the pieces of ordinary layers, `window` those of the vision tower's windowed layers; `cache` is the
    `KeyValueCache` while generating (`model/generate.py`); `sequence` trades tokens for heads where several ranks
    hold the stream (`parallel/sequence.py`).
    """

    full: Sequence[Piece]
    window: Sequence[Piece] | None = None
    cache: object | None = field(default=None, repr=False)
    sequence: Any = field(default=None, repr=False)


def span_pieces(spans: Sequence[Span]) -> list[Piece]:
    """Pieces of a forest: each span's own causal block (equal neighbours stacked), then span against ancestor.

    Siblings that lie side by side attend to their ancestor in one piece.
    """
    own: list[Piece] = []
    ancestors: list[Piece] = []
    open_runs: dict[tuple[int, int], int] = {}  # (k0, k1) -> number in `ancestors` of the run that may still grow
    for start, end, parent in spans:
        last = own[-1] if own else None
        size = end - start
        if last is not None and last.q1 == start and (last.q1 - last.q0) == size * last.count:
            own[-1] = Piece(last.q0, end, last.q0, end, True, last.count + 1)
        else:
            own.append(Piece(start, end, start, end, True))
        while parent >= 0:
            k0, k1, above = spans[parent]
            run = open_runs.get((k0, k1))
            if run is not None and ancestors[run].q1 == start:
                ancestors[run] = Piece(ancestors[run].q0, end, k0, k1, False, 1, False)
            else:
                open_runs[k0, k1] = len(ancestors)
                ancestors.append(Piece(start, end, k0, k1, False, 1, False))
            parent = above
    return own + ancestors


# ------------------------------------------------------------------------------------------------ piece by piece


def _cut(x: Tensor, start: int, end: int, count: int) -> Tensor:
    """[T, H, ...] -> [count, H, length, ...], a view."""
    return x[start:end].unflatten(0, (count, -1)).transpose(1, 2)


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
    out = torch.empty_like(q)
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
            kept = out_here.float() * (lse_here - merged).exp()[..., None]
            out_here.copy_(kept.add_(o.float() * (part - merged).exp()[..., None]))
            lse_here.copy_(merged)
    return out, lse


def pieces_backward(grad, q, k, v, out, lse, pieces: Sequence[Piece], scale: float, block=_flash_block_backward):
    """Gradients of q, k, v: each piece's backward with the merged output and log-sum-exp, summed."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
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
            _cut(total, *where).add_(share)
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


def varlen_forward(q: Tensor, k: Tensor, v: Tensor, pieces: Sequence[Piece], scale: float) -> tuple[Tensor, Tensor]:
    """`pieces_forward` on CUDA: one variable-length flash call per level (half precision only)."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    for level in _levels(pieces):
        (qi, cu_q, max_q), (ki, cu_k, max_k) = _lengths(level, q.device)
        o, part, *_ = torch.ops.aten._flash_attention_forward(
            q[qi], k[ki], v[ki], cu_q, cu_k, max_q, max_k, 0.0, level[0].causal, False, scale=scale
        )
        part = part.transpose(0, 1)
        if level[0].first:
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
    for level in _levels(pieces):
        (qi, cu_q, max_q), (ki, cu_k, max_k) = _lengths(level, q.device)
        part = torch.ops.aten._flash_attention_backward(
            grad[qi].contiguous(), q[qi], k[ki], v[ki], out[qi], lse[qi].transpose(0, 1).contiguous(),
            cu_q, cu_k, max_q, max_k, 0.0, level[0].causal, state, state[:0], scale=scale,
        )  # fmt: skip
        for total, index, share in zip((dq, dk, dv), (qi, ki, ki), part, strict=True):
            total.index_add_(0, index, share.float())
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


# ------------------------------------------------------------------------------------------------ the one function


class PieceAttention(Function):
    """q [T, Hq, D], k, v [T, Hk, D] after rope -> [T, Hq, D]."""

    @staticmethod
    def forward(ctx, q, k, v, pieces, scale):
        if not q.is_cuda:
            out, lse = pieces_forward(q, k, v, pieces, scale)
        elif q.dtype == torch.float32:
            out, lse = pieces_forward(q, k, v, pieces, scale, _math_block)
        else:
            out, lse = varlen_forward(q, k, v, pieces, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.pieces, ctx.scale = pieces, scale
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        if not grad.is_cuda:
            grads = pieces_backward(grad, q, k, v, out, lse, ctx.pieces, ctx.scale)
        elif grad.dtype == torch.float32:
            grads = pieces_backward(grad, q, k, v, out, lse, ctx.pieces, ctx.scale, _math_block_backward)
        else:
            grads = varlen_backward(grad, q, k, v, out, lse, ctx.pieces, ctx.scale)
        return *grads, None, None


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
    """What transformers calls: query [1, Hq, T, D], key and value [1, Hk, T, D] -> ([1, T, Hq, D], None)."""
    if plan is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    scale = module.head_dim**-0.5 if scaling is None else scaling
    if plan.cache is not None:
        decoded = plan.cache.attend(module, q, k, v, scale)  # type: ignore[attr-defined]
        if decoded is not None:
            return decoded[None], None
    pieces = plan.window if plan.window is not None and module.windowed else plan.full
    q, k = q.to(v.dtype), k.to(v.dtype)  # under autocast rope hands back fp32 queries and keys beside bf16 values
    if plan.sequence is None:
        return PieceAttention.apply(q, k, v, pieces, scale)[None], None
    out = PieceAttention.apply(*plan.sequence.to_heads(q, k, v), pieces, scale)
    return plan.sequence.to_tokens(out)[None], None


def register() -> None:
    """Make the function known to transformers. Called once, on import of the model package's builder."""
    AttentionInterface.register(NAME, spans_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
