"""score = logit(yes) - logit(no), in fp32, from two rows of the head: the full vocabulary is never multiplied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class HeadRows(nn.Linear):
    """The head with a forward that can be asked for some of its rows. Same parameters, same names."""

    def forward(self, hidden: Tensor, rows: tuple[int, ...] | None = None) -> Tensor:
        if rows is None:
            return super().forward(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            weight = self.weight[list(rows)].float()
            return hidden.float() @ weight.T


def ask_rows(head: nn.Module) -> None:
    """Give a plain linear head the forward of `HeadRows`, in place. Done before sharding and adapters."""
    assert type(head) is nn.Linear and head.bias is None
    head.__class__ = HeadRows


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
            low = head.lora_dropout[name](hidden.float()) @ head.lora_A[name].weight.float().T
            logits = logits + head.scaling[name] * (low @ head.lora_B[name].weight[list(words)].float().T)
    return logits
