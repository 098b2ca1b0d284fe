"""Ulysses: ranks of the axis `cp` each hold a run of the stream's tokens, and in attention some heads of all tokens.

Everything but attention works token by token, so a rank carries 1/cp of the activations of a long stream. Before
attention an all-to-all trades tokens for heads, behind it another trades back (arXiv 2309.14509); the forest of spans
is attended to as ever. Gradients of weights are sums over tokens, so ranks of cp are averaged like ranks of data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from litchi.parallel.collectives import Group
from litchi.types import Batch


def cut_stream(batch: Batch, rank: int, size: int) -> Batch:
    """The part of a batch that is one rank's: a run of tokens with what belongs to them. Pure.

    The stream is filled up to a multiple of `size` by tokens of a span that nothing attends to. Spans, groups and
    pictures stay those of the whole batch; a rerank batch keeps all its targets, because its losses need whole groups.
    """
    fill = -batch.tokens % size
    length = (batch.tokens + fill) // size
    first, last = rank * length, (rank + 1) * length
    here = (batch.image_at >= first) & (batch.image_at < last)
    needed = (batch.rows >= first) & (batch.rows < last)
    spans = (*batch.spans, (batch.tokens, batch.tokens + fill, -1)) if fill else batch.spans
    return replace(
        batch,
        ids=pad(batch.ids, (0, fill))[first:last],
        positions=pad(batch.positions, (0, fill))[:, first:last],
        spans=spans,
        image_at=batch.image_at[here] - first,
        image_from=batch.image_from[here],
        rows=batch.rows[needed] - first,
        targets=batch.targets if batch.groups else batch.targets[needed],
    )


def count_rows(batch: Batch, size: int) -> list[int]:
    """How many of the needed rows of a whole batch each rank has."""
    length = -(-batch.tokens // size)
    edges = torch.searchsorted(batch.rows, torch.arange(size + 1) * length)
    return [int(b - a) for a, b in pairwise(edges)]


@dataclass(frozen=True)
class SequenceCut:
    """What a rank of cp does differently. The owner and the attention function ask it."""

    group: Group

    def part(self, batch: Batch) -> Batch:
        return cut_stream(batch, self.group.rank, self.group.size)

    def gather_scores(self, scores: Tensor, batch: Batch) -> Tensor:
        """Scores of this rank's rows -> of all rows of the whole batch, in order."""
        return self.group.gather(scores, count_rows(batch, self.group.size))

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[t, H, D] of own tokens -> [T, H / cp, D] of all tokens.

        Keys with fewer heads than ranks are repeated first, once for each query head.
        """
        if k.shape[1] % self.group.size:
            times = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        return self._trade(q), self._trade(k), self._trade(v)

    def _trade(self, x: Tensor) -> Tensor:
        apart = x.unflatten(1, (self.group.size, -1)).transpose(0, 1)
        return self.group.exchange(apart).flatten(0, 1)

    def to_tokens(self, out: Tensor) -> Tensor:
        """[T, H / cp, D] -> [t, H, D]."""
        together = self.group.exchange(out.unflatten(0, (self.group.size, -1)))
        return together.transpose(0, 1).flatten(1, 2)
