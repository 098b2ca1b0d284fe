"""Pairs of a query and a document -> scores, in this process: for servers that bring their own queue.

The same parsing, rendering and forward as behind `/v1/score`; a pair that cannot be scored spoils no other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from litchi.dist import start_ranks
from litchi.errors import UsageError
from litchi.serve.engine import Engine
from litchi.serve.jobs import EngineSpec
from litchi.serve.limits import Refusal
from litchi.serve.preparing import Preparer
from litchi.serve.requests import parse_score

Side = str | dict[str, Any]  # text, or an object with `text`, `image` as the HTTP forms have them


class PairScorer:
    """A reranker in memory.

    Args:
        name: TARGET.
        overrides: `key=value` words.

    Raises:
        UsageError: it answers, and gives no scores.
    """

    def __init__(self, name: str, overrides: Sequence[str] = ()):
        self.engine = Engine(EngineSpec(name, tuple(overrides)), start_ranks())
        if "rerank" not in self.engine.renderers:
            raise UsageError(f"{name} gives no scores", why="it was trained to answer")
        config = self.engine.config
        self.preparer = Preparer(
            self.engine.renderers, config.data.max_length, self.engine.budget, config.serve, self.engine.memory,
            ThreadPoolExecutor(4),
        )  # fmt: skip

    def score(self, pairs: Sequence[tuple[Side, Side]]) -> list[float | Refusal]:
        """logit(yes) - logit(no) of each pair, or why it has none."""
        try:
            return list(self._score(pairs))
        except Refusal as refusal:
            if len(pairs) == 1:
                return [refusal]
        return [self.score([pair])[0] for pair in pairs]

    def _score(self, pairs: Sequence[tuple[Side, Side]]) -> list[float]:
        fields = [{"query": query, "document": document} for query, document in pairs]
        request = parse_score({"pairs": fields}, self.engine.config.serve)
        logits = [[math.nan] * len(sample.documents) for sample in request.job.samples]
        for work in self.preparer.prepare(0, request.job, 0.0):
            piece = work.load
            (found,) = self.engine.score([piece])
            for document, score in zip(piece.documents, found, strict=True):
                logits[piece.group][document] = score
        scores = [logits[group][document] for group, document in request.places]
        for (_, document), score in zip(pairs, scores, strict=True):
            if not math.isfinite(score):
                raise Refusal(500, "nonfinite_score", self.engine.nonfinite(str(document)[:80], score))
        return scores
