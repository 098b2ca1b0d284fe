"""Attention over a forest of spans, in pieces merged by their log-sum-exp: no mask, no copied keys, no padding.

A span attends causally to itself and fully to each of its ancestors. Every (queries, keys) block of that rule is a
`Piece`; an ordinary flash kernel runs on each, and pieces that share queries are merged by log-sum-exp. In the
backward pass every piece calls the ordinary flash backward with the merged output and log-sum-exp, which gives its
exact share of the gradient (the identity ring attention rests on, arXiv 2310.01889). On the CPU the pieces are a
loop; on CUDA the pieces of one kind are one variable-length call (`model/kernels.py`).

The function is registered with transformers under `NAME`; the plan travels through the model's own forwards as the
keyword `plan`. Without a plan (a plain forward or `generate`) it falls back to transformers' SDPA.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.autograd import Function
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from litchi.model.kernels import Kernels, choose_kernels
from litchi.model.spans import Piece, Plan

NAME = "litchi_spans"


def run_forward(q: Tensor, k: Tensor, v: Tensor, pieces: Sequence[Piece], scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp by the kernels chosen for the pieces.

    Args:
        q: [T, Hq, D]; k, v: [T, Hk, D] after rope, Hq a multiple of Hk.

    Returns:
        output [T, Hq, D] in q's dtype and log-sum-exp fp32 [T, Hq].
    """
    return _kernels(q, pieces).forward(q, k, v, pieces, scale)


def run_backward(grad, q, k, v, out, lse, pieces: Sequence[Piece], scale: float, into=None):
    """Gradients of q, k, v, in new tensors or in the three of `into`."""
    return _kernels(q, pieces).backward(grad, q, k, v, out, lse, pieces, scale, into=into)


def _kernels(q: Tensor, pieces: Sequence[Piece]) -> Kernels:
    return choose_kernels(getattr(pieces, "kernel", "auto"), q.device, q.dtype)


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
