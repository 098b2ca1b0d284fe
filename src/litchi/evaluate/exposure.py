"""How a ranking spreads over a catalogue: coverage, the long tail's share, and the Gini coefficient of exposure.

    exposure of each item (how often it is among the first k), popularity, catalogue -> figures, 0..1

The head is the 20 % of the catalogue with the most clicks, the tail all others. Where items with equal clicks lie on
both sides of that line each of them counts in part, as the mean over their orders.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

HEAD = 0.2  # of the catalogue


@dataclass(frozen=True)
class Ranking:
    """Documents by score. Ties count as the mean over their orders: `places` has for each document the first and the
    last position it may stand at, from 1; `blocks` are the tied documents, best first, and `firsts` where each begins.
    """

    places: Mapping[str, tuple[int, int]]
    blocks: Sequence[Sequence[str]]
    firsts: Sequence[int]

    @classmethod
    def of(cls, scores: Mapping[str, float]) -> Ranking:
        """The ranking of documents by their scores; equal scores share their places."""
        tied: dict[float, list[str]] = {}
        for document, score in scores.items():
            tied.setdefault(score, []).append(document)
        blocks = [tied[score] for score in sorted(tied, reverse=True)]
        firsts = list(accumulate(map(len, blocks), initial=1))[: len(blocks)]
        places = {
            document: (first, first + len(block) - 1)
            for first, block in zip(firsts, blocks, strict=True)
            for document in block
        }
        return cls(places, blocks, firsts)

    def chance(self, document: str, position: int) -> float:
        """Probability that a document stands at a position."""
        first, last = self.places.get(document, (0, -1))
        return 1 / (last - first + 1) if first <= position <= last else 0.0

    def at(self, position: int) -> Sequence[str]:
        """Documents that may stand at a position."""
        number = bisect_right(self.firsts, position) - 1
        if number < 0 or position >= self.firsts[number] + len(self.blocks[number]):
            return ()
        return self.blocks[number]

    def exposure(self, k: int) -> dict[str, float]:
        """Probability of each document to be among the first k, where it is above 0."""
        return {
            document: min(1.0, (k - first + 1) / (last - first + 1))
            for document, (first, last) in self.places.items()
            if first <= k
        }


def measure_exposure(
    exposure: Mapping[str, float], popularity: Mapping[str, float], catalogue: Collection[str]
) -> dict[str, float]:
    """Coverage of the catalogue, shares of the long tail, and Gini coefficient.

    Args:
        exposure: how often an item of the catalogue is shown; items that are missing never are.
        popularity: clicks of an item.
        catalogue: all items there are.

    `coverage`: share of the catalogue that is shown at all. `tail_share`: share of what is shown that is the tail's.
    `tail_coverage`: share of the tail that is shown at all. `gini`: 0 where all items are shown as often, near 1
    where one takes all.
    """
    tail = tail_weights(popularity, catalogue)
    total, outside = math.fsum(exposure.get(item, 0.0) for item in catalogue), math.fsum(tail.values())
    shown = [item for item in catalogue if exposure.get(item, 0.0) > 0]
    return {
        "coverage": len(shown) / len(catalogue),
        "tail_share": math.fsum(exposure[item] * tail[item] for item in shown) / total if total else 0.0,
        "tail_coverage": math.fsum(tail[item] for item in shown) / outside if outside else 0.0,
        "gini": gini(exposure.get(item, 0.0) for item in catalogue),
    }


def tail_weights(popularity: Mapping[str, float], catalogue: Collection[str]) -> dict[str, float]:
    """How much of each item belongs to the tail: 1 or 0, or a part of it where equal items lie on the line."""
    ranking = Ranking.of({item: popularity.get(item, 0.0) for item in catalogue})
    head = ranking.exposure(math.ceil(HEAD * len(catalogue)))
    return {item: 1 - head.get(item, 0.0) for item in catalogue}


def gini(values: Iterable[float]) -> float:
    """Gini coefficient of numbers from 0; 0 where all are 0."""
    ordered = sorted(values)
    total, n = math.fsum(ordered), len(ordered)
    if not total:
        return 0.0
    return math.fsum((2 * i - n - 1) * value for i, value in enumerate(ordered, 1)) / (n * total)
