"""What is asked of the head: score = logit(yes) - logit(no), in fp32, from two of its rows, without multiplying the
full vocabulary; or the token loss, without keeping the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from litchi.model.dora import find_gain
from litchi.model.precision import widen
from litchi.model.token_loss import plain_token_loss, repeated_token_loss


class HeadRows(nn.Linear):
    """The head with a forward that can be asked for some of its rows, or for the loss of targets. Same parameters,
    same names. Both happen in here, where the weight is whole under FSDP2."""

    def forward(self, hidden: Tensor, rows: tuple[int, ...] | None = None, targets: Tensor | None = None) -> Tensor:
        if targets is not None:
            return plain_token_loss(hidden, self.weight, targets)
        if rows is None:
            return super().forward(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            return widen(hidden) @ widen(self.weight[list(rows)]).T


def ask_rows(head: nn.Module) -> None:
    """Give a plain linear head the forward of `HeadRows`, in place. Done before sharding and adapters."""
    assert type(head) is nn.Linear and head.bias is None
    head.__class__ = HeadRows


def token_loss(head: nn.Module, hidden: Tensor, targets: Tensor, vocabulary: int) -> Tensor:
    """Sum of the cross entropies of hidden states [R, hidden] behind the head against tokens [R]. []"""
    if not len(hidden):
        return widen(head(hidden)).sum()
    if isinstance(head, HeadRows) and not hasattr(head, "new_rows"):  # of new tokens, `model/tokens.py`
        return head(hidden, targets=targets)
    return repeated_token_loss(head, hidden, targets, vocabulary)


def score_rows(head: nn.Module, hidden: Tensor, words: tuple[int, int]) -> Tensor:
    """Scores of hidden states.

    Args:
        hidden: [R, hidden], at each prompt's last token.
        words: ids of yes and no.

    Returns:
        fp32 [R]. Rank by it: half-precision sigmoids turn different scores into exactly 1.0.
    """
    logits = head(hidden, words) if isinstance(head, HeadRows) else _adapted_rows(head, hidden, words)
    return logits[:, 0] - logits[:, 1]


def _adapted_rows(head: Any, hidden: Tensor, words: tuple[int, int]) -> Tensor:
    """Rows of a head with LoRA on it: its own forward would round them to the precision of the base."""
    logits = head.base_layer(hidden, words)
    with torch.autocast(hidden.device.type, enabled=False):
        for name in head.active_adapters:
            low = head.lora_dropout[name](widen(hidden)) @ widen(head.lora_A[name].weight).T
            up, scale = widen(head.lora_B[name].weight[list(words)]), head.scaling[name]
            logits = logits + scale * (low @ up.T)
            if name in head.lora_magnitude_vector:
                own = widen(head.base_layer.weight[list(words)])
                magnitude = head.lora_magnitude_vector[name].weight[list(words)]
                logits = logits * find_gain(own, head.lora_A[name].weight, up, scale, magnitude)
    return logits
