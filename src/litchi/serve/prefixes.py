"""Keys and values of queries met lately: asked again with other documents, a query is not computed again.

A batch -> which of its tokens are known already -> scores of the rest, which attends to what is kept. How far a kept
query can be used is the longest common run of tokens and pictures with the prefix of the new group: keys and values
of a token depend on what is before it alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from litchi.model.attention import run_forward
from litchi.model.forward import LitchiModel
from litchi.model.spans import Plan, row_pieces
from litchi.types import Batch, Example

LEAST = 16  # tokens; fewer are computed faster than fetched


@dataclass(eq=False)
class Prefix:
    """The root of a group: ids [n], (token, picture) of its pictures, and by layer keys and values [n, Hk, D]."""

    ids: np.ndarray
    pictures: tuple[tuple[int, str], ...]
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def held_bytes(self) -> int:
        return sum(t.nbytes for pair in self.layers.values() for t in pair)


def root_of(example: Example) -> Prefix:
    """The root of a group without keys and values."""
    end = example.spans[0][1]
    shown = tuple((at, example.media[number].media.key) for number, at in example.media_at if at < end)
    return Prefix(example.ids[:end], shown)


def common_tokens(one: Prefix, other: Prefix) -> int:
    """How many tokens two roots begin with in common, pictures included."""
    limit = min(len(one.ids), len(other.ids))
    different = np.flatnonzero(one.ids[:limit] != other.ids[:limit])
    limit = int(different[0]) if len(different) else limit
    for ours, theirs in zip(one.pictures, other.pictures, strict=False):
        if ours != theirs:
            return min(limit, ours[0], theirs[0])
    more = one.pictures[len(other.pictures) :] or other.pictures[len(one.pictures) :]
    return min(limit, more[0][0]) if more else limit


class Prefixes:
    """Queries met lately, up to so many bytes; what was used last stays. For the model's thread alone."""

    def __init__(self, limit_bytes: int):
        self.limit_bytes, self.held_bytes = limit_bytes, 0
        self.held: dict[Hashable, Prefix] = {}  # what was used last stands last
        self.saved_tokens = 0

    def find(self, query: Hashable) -> Prefix | None:
        """A query that is held; it is then the last to go."""
        prefix = self.held.pop(query, None)
        if prefix is not None:
            self.held[query] = prefix
        return prefix

    def keep(self, query: Hashable, prefix: Prefix) -> None:
        """Hold a query; those that were asked longest ago make room."""
        if (old := self.held.pop(query, None)) is not None:
            self.held_bytes -= old.held_bytes
        self.held[query] = prefix
        self.held_bytes += prefix.held_bytes
        while self.held_bytes > self.limit_bytes:
            self.held_bytes -= self.held.pop(next(iter(self.held))).held_bytes

    def score(
        self, owner: LitchiModel, batch: Batch, examples: Sequence[Example], queries: Sequence[Hashable]
    ) -> Tensor:
        """Scores of a batch of groups, fp32 [R]; what is known of their queries is not computed.

        Args:
            batch: of `examples`, whole.
            queries: what tells the query of each.
        """
        reads, writes, start = [], [], 0
        known = torch.zeros(batch.tokens, dtype=torch.bool)
        for example, query in zip(examples, queries, strict=True):
            root, held = root_of(example), self.find(query)
            count = 0 if held is None else common_tokens(root, held)
            if held is not None and count >= LEAST:
                reads.append((start, count, held))
                known[start : start + count] = True
                self.saved_tokens += count
            if self.limit_bytes and len(root.ids) - count >= LEAST:
                writes.append((query, start, root))
            start += example.tokens
        listening = PrefixPass(batch, ~known, reads, [(start, root) for _, start, root in writes], owner.attention)
        mine = listening.shorten(batch)
        hidden = owner.layers(owner.embed(mine), mine, listening, needed=True)
        out = owner.finish(hidden, mine, mine).scores
        assert out is not None
        for query, _, root in writes:
            self.keep(query, root)
        return out


class PrefixPass:
    """One forward: layers hand their keys and values to `attend`, which adds those that are kept and keeps new ones."""

    def __init__(
        self,
        batch: Batch,
        fresh: Tensor,
        reads: Sequence[tuple[int, int, Prefix]],
        writes: Sequence[tuple[int, Prefix]],
        kernel: str,
    ):
        self.reads, self.writes = reads, writes
        self.tokens, self.rows = batch.tokens, torch.nonzero(fresh)[:, 0]
        if reads:
            plan = Plan(
                row_pieces(batch.spans, self.rows.tolist()), last=row_pieces(batch.spans, batch.rows.tolist())
            ).choose(kernel)
            self.pieces, self.last = plan.full, plan.last

    def shorten(self, batch: Batch) -> Batch:
        """The batch without the tokens that are known. Its spans say nothing: `attend` knows better."""
        if not self.reads:
            return batch
        place = torch.full((batch.tokens,), -1)
        place[self.rows] = torch.arange(len(self.rows))
        shown = place[batch.image_at]
        return replace(
            batch,
            ids=batch.ids[self.rows],
            positions=batch.positions[:, self.rows],
            spans=((0, len(self.rows), -1),),
            image_at=shown[shown >= 0],
            image_from=batch.image_from[shown >= 0],
            rows=place[batch.rows],
        )

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor | None:
        """Called by the attention function with q [R, Hq, D], k, v [T, Hk, D] of the tokens that are computed."""
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        q, k = q.to(v.dtype), k.to(v.dtype)
        whole = k.shape[0] == len(self.rows) and not self.reads
        keys, values = (k, v) if whole else (t.new_empty(self.tokens, *t.shape[1:]) for t in (k, v))
        if not whole:
            rows = self.rows.to(k.device)
            keys[rows], values[rows] = k, v
            for start, count, prefix in self.reads:
                old_keys, old_values = prefix.layers[layer]
                keys[start : start + count], values[start : start + count] = old_keys[:count], old_values[:count]
        for start, prefix in self.writes:
            end = start + len(prefix.ids)
            prefix.layers[layer] = keys[start:end].clone(), values[start:end].clone()
        if whole:
            return None
        pieces = self.pieces if len(q) == len(self.rows) else self.last
        assert pieces is not None
        return run_forward(q, keys, values, pieces, scale)[0]
