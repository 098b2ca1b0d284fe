"""Batch -> loss sum and scores: the one module that owns the model.

DDP and FSDP2 wrap this module. The head and the loss are computed inside it, only at the rows that need them; the
vision tower is called once for all distinct pictures, or once with weight zero where a batch has none and another
rank may have some.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from litchi.model.attention import Plan, span_pieces
from litchi.model.family import Family, part
from litchi.model.scoring import score_rows
from litchi.model.vision import blank_picture, encode_pictures
from litchi.types import Batch, VisionSpec

ScoreLoss = Callable[[Tensor, Tensor, Sequence[tuple[int, int]]], Tensor]
ROWS_PER_CHUNK = 1024  # rows of logits that exist at a time: 1,024 x 152,064 in fp32 are 0.6 GB


@dataclass
class Output:
    """`loss` is a sum, to be divided by the units of all ranks; `scores` fp32 [R] for rerank, None for chat."""

    loss: Tensor
    scores: Tensor | None


class LitchiModel(nn.Module):
    """Owns a Hugging Face model and calls its parts' own forwards.

    Args:
        hf: the model, with attention `litchi_spans`.
        family: its names.
        spec: how it cuts pictures.
        words: (yes, no) ids for rerank, None for chat.
        score_loss: (scores, targets, groups) -> loss sum, for rerank.
        always_vision: call the tower in every batch, because ranks must run the same collectives.
    """

    def __init__(
        self,
        hf: nn.Module,
        family: Family,
        spec: VisionSpec,
        *,
        words: tuple[int, int] | None = None,
        score_loss: ScoreLoss | None = None,
        always_vision: bool = False,
    ):
        super().__init__()
        self.hf = hf
        self.family, self.spec, self.words, self.score_loss = family, spec, words, score_loss
        self.always_vision = always_vision

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(self, batch: Batch) -> Output:
        hidden = self.hidden(batch)[batch.rows.to(self.device)]
        targets = batch.targets.to(self.device)
        if self.words is None:
            return Output(self.token_loss(hidden, targets), None)
        scores = score_rows(part(self.hf, self.family.head), hidden, self.words)
        if self.score_loss is None or not batch.groups:
            return Output(scores.sum() * 0.0, scores)
        return Output(self.score_loss(scores, targets, batch.groups), scores)

    def hidden(self, batch: Batch, cache: object | None = None) -> Tensor:
        """Hidden states of all tokens behind the last norm. [T, hidden]"""
        language = part(self.hf, self.family.language)
        embedded = part(self.hf, self.family.embedding)(batch.ids.to(self.device))
        embedded = self.place_pictures(embedded, batch)
        plan = Plan(span_pieces(batch.spans), cache=cache)
        return language(
            inputs_embeds=embedded[None],
            position_ids=batch.positions.to(self.device)[:, None],
            attention_mask=None,
            use_cache=False,
            plan=plan,
        ).last_hidden_state[0]

    def next_hidden(self, tokens: Tensor, positions: Tensor, cache: object) -> Tensor:
        """One more token per sequence while generating: tokens [S], positions [S] -> [S, hidden]."""
        return part(self.hf, self.family.language)(
            inputs_embeds=part(self.hf, self.family.embedding)(tokens)[None],
            position_ids=positions[None, None].expand(3, 1, -1),
            attention_mask=None,
            use_cache=False,
            plan=Plan(full=(), cache=cache),
        ).last_hidden_state[0]

    def place_pictures(self, embedded: Tensor, batch: Batch) -> Tensor:
        """Put the features of each picture where its tokens stand. [T, hidden] -> [T, hidden]"""
        tower = part(self.hf, self.family.vision)
        if batch.grids:
            features = encode_pictures(tower, batch.pixels.to(self.device), batch.grids, self.spec)
            features = features[batch.image_from.to(self.device)]
            return embedded.index_put((batch.image_at.to(self.device),), features.to(embedded.dtype))
        if self.always_vision:
            pixels, grid = blank_picture(self.spec, self.device)
            return embedded + 0.0 * encode_pictures(tower, pixels, [grid], self.spec).sum().to(embedded.dtype)
        return embedded

    def token_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Sum of the cross entropy of each row. hidden [R, hidden], targets [R] -> []"""
        head = part(self.hf, self.family.head)
        if not len(hidden):
            return head(hidden).float().sum()
        return sum(
            F.cross_entropy(head(h).float(), t, reduction="sum")
            for h, t in zip(hidden.split(ROWS_PER_CHUNK), targets.split(ROWS_PER_CHUNK), strict=True)
        )  # type: ignore[return-value]
