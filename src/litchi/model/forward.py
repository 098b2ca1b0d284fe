"""Batch -> loss sum and scores: the one module that owns the model.

DDP and FSDP2 wrap this module. The head and the loss are computed inside it, only at the rows that need them; the
vision tower is called once for all distinct pictures, or once on a blank where a batch has none and another rank may
have some. What ranks share of a batch is decided in `parallel/` and asked here, by `Shares`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from litchi.model.family import Family, part
from litchi.model.leaves import leaves_out_rows
from litchi.model.scoring import score_rows, token_loss
from litchi.model.spans import Plan, row_pieces, span_pieces
from litchi.model.vision import Grid, blank_picture, encode_pictures
from litchi.types import Batch, VisionSpec

ScoreLoss = Callable[[Tensor, Tensor, Sequence[tuple[int, int]]], Tensor]


@dataclass
class Output:
    """`loss` is a sum, to be divided by the units of all ranks; `scores` fp32 [R] for rerank, None for chat.

    Where ranks share a batch, `loss` is this rank's part of the sum, and `scores` are those of the whole batch.
    """

    loss: Tensor
    scores: Tensor | None


@dataclass
class Shares:
    """What this rank does of a batch that several ranks work on; by default all of it.

    Args:
        first, last: stages of the pipeline: whether embedding and vision, whether norm and head are here.
        speaks: whether the loss of whole groups is said by this rank; the others add nothing.
        silent_embedding: whether the gradient of looking up tokens is left to another rank.
        sequence: `parallel/sequence.py`, where the token stream is cut.
        tensor: the group of `parallel/tensor.py`, where layers are cut.
        pictures: `parallel/pictures.py`, where pictures are shared out.
    """

    first: bool = True
    last: bool = True
    speaks: bool = True
    silent_embedding: bool = False
    sequence: Any = None
    tensor: Any = None
    pictures: Any = None


class KeptFeatures(Protocol):
    """Where features of a frozen tower are kept: `model/features.py`."""

    def complete(self, owner: LitchiModel, batch: Batch, pixels: Tensor, grids: Sequence[Grid], /) -> Tensor:
        """Features of the pictures this rank encodes, kept or computed. [N, hidden]"""


class LitchiModel(nn.Module):
    """Owns a Hugging Face model and calls its parts' own forwards.

    Args:
        hf: the model, with attention `litchi_spans`.
        family: its names.
        spec: how it cuts pictures.
        words: (yes, no) ids for rerank, None for chat.
        score_loss: (scores, targets, groups) -> loss sum, for rerank.
        always_vision: call the tower in every batch, because ranks must run the same collectives.
        attention: what computes attention, by `model.attention`.
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
        attention: str = "auto",
    ):
        super().__init__()
        self.hf = hf
        self.family, self.spec, self.words, self.score_loss = family, spec, words, score_loss
        self.always_vision, self.attention = always_vision, attention
        self.computes_on: torch.device | None = None
        self.shares = Shares()
        self.features: KeptFeatures | None = None
        self.leaves_out = leaves_out_rows(part(hf, family.language_layers)[-1])  # type: ignore[index]

    @property
    def device(self) -> torch.device:
        """What is computed on; weights that wait in the machine's memory are brought there."""
        return self.computes_on or next(self.parameters()).device

    def forward(self, batch: Batch, received: Tensor | None = None) -> Output | Tensor:
        """The way of a batch, or of this stage's part of it.

        Args:
            batch: the whole batch, on every rank that works on it.
            received: hidden states of the stage before, [T, hidden]; None on the first.

        Returns:
            The output; hidden states [T, hidden] where another stage goes on.
        """
        mine = self.part(batch)
        hidden = self.layers(self.embed(mine) if received is None else received, mine, needed=self.shares.last)
        return self.finish(hidden, mine, batch) if self.shares.last else hidden

    def part(self, batch: Batch) -> Batch:
        """What this rank holds of a batch's token stream."""
        return batch if self.shares.sequence is None else self.shares.sequence.part(batch)

    def hidden(self, batch: Batch, cache: object | None = None) -> Tensor:
        """Hidden states of all tokens behind the last norm. [T, hidden]"""
        return self.layers(self.embed(batch), batch, cache)

    def embed(self, batch: Batch) -> Tensor:
        """Tokens looked up, features of pictures in their places. [T, hidden]"""
        embedded = part(self.hf, self.family.embedding)(batch.ids.to(self.device))
        if self.shares.silent_embedding and embedded.requires_grad:
            embedded.register_hook(torch.zeros_like)
        return self.place_pictures(embedded, batch)

    def layers(self, hidden: Tensor, batch: Batch, cache: object | None = None, *, needed: bool = False) -> Tensor:
        """Through the layers that are here, on the last stage also the norm.

        Args:
            hidden: [T, hidden].
            cache: listens while generating.
            needed: give only the rows that go to the head.

        Returns:
            [T, hidden], or [rows, hidden].
        """
        pieces = span_pieces(batch.spans)
        plan = Plan(pieces, cache=cache, sequence=self.shares.sequence)
        if needed and self.leaves_out:
            plan.rows = batch.rows.to(self.device)
            plan.last = pieces if plan.sequence is not None else row_pieces(batch.spans, batch.rows.tolist())
        found = part(self.hf, self.family.language)(
            inputs_embeds=hidden[None],
            position_ids=batch.positions.to(self.device)[:, None],
            attention_mask=None,
            use_cache=False,
            plan=plan.choose(self.attention),
        ).last_hidden_state[0]
        return found[batch.rows.to(self.device)] if needed and not self.leaves_out else found

    def finish(self, hidden: Tensor, mine: Batch, batch: Batch) -> Output:
        """Head and loss of the rows that need them. hidden [rows, hidden]"""
        tensor, targets = self.shares.tensor, mine.targets.to(self.device)
        if tensor is not None:
            hidden = tensor.copy(hidden)  # from here on its ranks compute different parts
        if self.words is None:
            own = slice(None) if tensor is None else slice(tensor.rank, None, tensor.size)
            return Output(self.token_loss(hidden[own], targets[own]), None)
        scores = score_rows(part(self.hf, self.family.head), hidden, self.words)
        if self.shares.sequence is not None:
            scores = self.shares.sequence.gather_scores(scores, batch)
        if self.score_loss is None or not batch.groups or not self.shares.speaks:
            return Output(scores.sum() * 0.0, scores)
        if batch.cuts:  # pieces of groups: their loss is known, and what it pulls each score by
            pull = torch.zeros_like(scores) if batch.pull is None else batch.pull.to(scores)
            return Output((pull * (scores - scores.detach())).sum() + batch.told, scores)
        return Output(self.score_loss(scores, targets, batch.groups), scores)

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
        if not batch.grids and not self.always_vision:
            return embedded

        def encode(pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
            if batch.kept:
                assert self.features is not None, "the batch names pictures whose features are to be kept"
                return self.features.complete(self, batch, pixels, grids).to(embedded.dtype)
            return (
                self.encode(pixels, grids).to(embedded.dtype) if grids or self.always_vision else embedded.detach()[:0]
            )

        if self.shares.pictures is None:
            features = encode(batch.pixels, batch.grids)
        else:
            features = self.shares.pictures.encode(batch, encode)
        features = features[batch.image_from.to(self.device)]
        return embedded.index_put((batch.image_at.to(self.device),), features)

    def encode(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Features of pictures, in one call of the tower. [N, hidden]

        Without a picture a blank one goes through the tower and its features are left out: what other ranks do with
        the tower's weights and gradients is done here too, and adds nothing.
        """
        tower = part(self.hf, self.family.vision)
        if grids:
            return encode_pictures(tower, pixels.to(self.device), grids, self.spec, attention=self.attention)
        blank, grid = blank_picture(self.spec, self.device)
        return encode_pictures(tower, blank, [grid], self.spec, attention=self.attention)[:0]

    def token_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Sum of the cross entropy of each row. hidden [R, hidden], targets [R] -> []"""
        vocabulary = int(self.hf.config.get_text_config().vocab_size)  # type: ignore[union-attr,operator]
        return token_loss(part(self.hf, self.family.head), hidden, targets, vocabulary)
