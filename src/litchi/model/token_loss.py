"""Cross entropy of rows of hidden states behind the head, in pieces whose logits exist one at a time.

Rows of logits are as long as the vocabulary, so all of them together are the largest tensor of a step by far. With a
plain head the gradient of each piece is worked out while its logits are there, and nothing of the size of the logits
is kept (as in Liger, arXiv 2410.10989); any other head (LoRA on it) is computed a second time in the backward.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from litchi.model.precision import widen

# numbers of logits that exist at a time: 64 MiB in fp32 stay near a CPU's cache, a GPU wants larger products
LOGITS_AT_ONCE = {"cpu": 2**24, "cuda": 2**27}
FEWEST_ROWS = 128


def rows_at_once(vocabulary: int, device: torch.device) -> int:
    """Rows of logits that exist at a time."""
    return max(FEWEST_ROWS, LOGITS_AT_ONCE.get(device.type, 2**24) // vocabulary)


class TokenLoss(Function):
    """Sum of the cross entropies of hidden [R, H] behind weight [V, H] against targets [R].

    The forward leaves the gradients; the backward multiplies them by the loss's own. The gradient of the weight is
    multiplied in place, so there is one backward.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, rows):
        wants_hidden, wants_weight, *_ = ctx.needs_input_grad
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        with torch.autocast(kind, enabled=False):
            total = widen(torch.zeros((), dtype=dtype, device=hidden.device))
            matrix, states = weight.to(dtype), hidden.to(dtype)
            of_hidden = torch.empty_like(hidden) if wants_hidden else None
            of_weight: Tensor | None = None
            for start in range(0, len(hidden), rows):
                part, target = states[start : start + rows], targets[start : start + rows, None]
                logits = widen(part @ matrix.t())
                logits.sub_(logits.amax(1, keepdim=True))
                picked = logits.gather(1, target)
                mass = logits.exp_().sum(1, keepdim=True)
                total += (mass.log() - picked).sum()
                if not (wants_hidden or wants_weight):
                    continue
                slope = logits.div_(mass).scatter_add_(1, target, torch.full_like(mass, -1.0)).to(dtype)
                if of_hidden is not None:
                    of_hidden[start : start + rows] = slope @ matrix
                if not wants_weight:
                    continue
                if of_weight is None:
                    of_weight = (slope.t() @ part).to(weight.dtype)
                elif of_weight.dtype == dtype:
                    of_weight.addmm_(slope.t(), part)
                else:
                    of_weight += slope.t() @ part
        ctx.of_hidden, ctx.of_weight = of_hidden, of_weight
        return total

    @staticmethod
    def backward(ctx, grad):
        of_hidden, of_weight = ctx.of_hidden, ctx.of_weight
        ctx.of_hidden = ctx.of_weight = None
        assert of_hidden is not None or of_weight is not None, "a token loss has one backward"
        if of_hidden is not None:
            of_hidden = of_hidden.mul_(grad)
        if of_weight is not None:
            of_weight = of_weight.mul_(grad)
        return of_hidden, of_weight, None, None


def plain_token_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """`TokenLoss` in pieces of as many rows as `rows_at_once` says."""
    return TokenLoss.apply(hidden, weight, targets, rows_at_once(len(weight), hidden.device))


def repeated_token_loss(head: nn.Module, hidden: Tensor, targets: Tensor, vocabulary: int) -> Tensor:
    """The same behind any head, whose logits are computed again in the backward."""

    def loss(states: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(widen(head(states)), target, reduction="sum")

    rows = rows_at_once(vocabulary, hidden.device)
    parts = zip(hidden.split(rows), targets.split(rows), strict=True)
    return torch.stack([checkpoint(loss, h, t, use_reentrant=False) for h, t in parts]).sum()
