"""M-RoPE positions of a forest of spans: time, height and width of every token, worked out by Litchi itself.

Text advances all three by one. A picture at position p holds time p, rows p + 0..h-1, columns p + 0..w-1 (in merged
tokens). Frame k of a video's grid holds time p + floor(k * step), where step is its seconds per frame of the grid times
the model's positions per second (arXiv 2502.13923, section 2.1.3); without the latter frames count up by one. The text
behind goes on at the largest position so far plus one, as the models were trained (arXiv 2409.12191, section 2.1). A
span goes on where its parent ended; siblings start alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

Span = tuple[int, int, int]
Grid = tuple[int, int, int]


def forest_positions(
    spans: Sequence[Span], pictures: Mapping[int, Grid], merge: int, steps: Mapping[int, float] | None = None
) -> np.ndarray:
    """Positions of all tokens.

    Args:
        spans: (start, end, parent), parents first, covering 0..T-1.
        pictures: first token of each picture run -> its grid in patches.
        merge: patches per token and side.
        steps: first token of a video's run -> positions in time from one frame of its grid to the next.

    Returns:
        int64 [3, T].
    """
    out = np.empty((3, spans[-1][1] if spans else 0), np.int64)
    ends: list[int] = []
    starts, steps = sorted(pictures), steps or {}
    number = 0
    for start, end, parent in spans:
        at = ends[parent] if parent >= 0 else 0
        token = start
        while number < len(starts) and starts[number] < end:
            first = starts[number]
            at = _fill_text(out, token, first, at)
            token, at = _fill_picture(out, first, pictures[first], merge, at, steps.get(first, 1.0))
            number += 1
        ends.append(_fill_text(out, token, end, at))
    return out


def _fill_text(out: np.ndarray, start: int, end: int, at: int) -> int:
    out[:, start:end] = np.arange(at, at + end - start)
    return at + end - start


def _fill_picture(out: np.ndarray, start: int, grid: Grid, merge: int, at: int, step: float) -> tuple[int, int]:
    """Returns the token behind the picture and the position that follows its largest one."""
    t, h, w = grid[0], grid[1] // merge, grid[2] // merge
    end = start + t * h * w
    out[:, start:end] = np.indices((t, h, w)).reshape(3, -1) + at
    if step == 1:
        return end, at + max(t, h, w)
    times = [math.floor(round(k * step, 6)) for k in range(t)]  # 0.1 s ten times is a second
    out[0, start:end] = np.repeat(times, h * w) + at
    return end, at + max(times[-1] + 1, h, w)
