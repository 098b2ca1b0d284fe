"""What a sample costs to compute, from its shape alone: `Work` (tokens, pairs, rows, pictures) -> FLOPs.

The coefficients of a model are read in `model/flops.py`; without one, cost is tokens. Pure, so every rank plans alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

Grid = tuple[int, int, int]  # frames, rows, columns of a picture, in patches


@dataclass(frozen=True, slots=True)
class Work:
    """What has to be computed for a sample.

    Args:
        tokens: of the language part.
        pairs: (query, key) pairs in which a token attends (`forest_pairs`).
        rows: hidden states that go to the head.
        grids: of the distinct pictures.
        pictures: a number for each of them, the same wherever the picture is met; () where nobody compares them.
    """

    tokens: int
    pairs: int
    rows: int
    grids: tuple[Grid, ...] = ()
    pictures: tuple[int, ...] = ()


def forest_pairs(prefix: int, children: Sequence[int] = ()) -> int:
    """Pairs of a span and of its children's spans: own blocks causal, each child's to the prefix in full."""
    return prefix * (prefix + 1) // 2 + sum(n * (n + 1) // 2 + n * prefix for n in children)


@dataclass(frozen=True)
class CostModel:
    """Cost of each thing in `Work`: a sum over a batch, but for pictures that several of its samples share.

    Args:
        token, pair, row: of the language part and the head.
        patch: of the vision part, per patch of a picture.
        frame_pair, window_pair: of vision layers that attend within a frame, and within a window of it.
        window: side of a window in patches; None where there are no windows.
    """

    token: float = 1.0
    pair: float = 0.0
    row: float = 0.0
    patch: float = 0.0
    frame_pair: float = 0.0
    window_pair: float = 0.0
    window: int | None = None

    def cost(self, work: Work) -> float:
        language = self.token * work.tokens + self.pair * work.pairs + self.row * work.rows
        return language + sum(_picture_cost(self, grid) for grid in work.grids) if work.grids else language

    def without_pictures(self) -> CostModel:
        """Where their features are kept: placing them costs next to nothing."""
        return replace(self, patch=0.0, frame_pair=0.0, window_pair=0.0)

    def picture_costs(self, work: Work) -> dict[int, float]:
        """What each of the pictures adds to `cost`, by its number."""
        return {number: _picture_cost(self, grid) for number, grid in zip(work.pictures, work.grids, strict=False)}


BY_TOKENS = CostModel()


@lru_cache(maxsize=65_536)
def _picture_cost(model: CostModel, grid: Grid) -> float:
    t, h, w = grid
    cost = model.patch * t * h * w + model.frame_pair * t * (h * w) ** 2
    if model.window is not None:
        cost += model.window_pair * t * _sum_squares(h, model.window) * _sum_squares(w, model.window)
    return cost


def _sum_squares(side: int, window: int) -> int:
    """Sum of squares of the pieces a side falls into; windows are products of such pieces."""
    whole, rest = divmod(side, window)
    return whole * window**2 + rest**2
