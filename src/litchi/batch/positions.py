"""M-RoPE positions of a forest of spans: time, height and width of every token, worked out by Litchi itself.

Text advances all three by one. A picture at position p holds time p, rows p + 0..h-1, columns p + 0..w-1 (in merged
tokens); the text behind it goes on at the largest position so far plus one, as the models were trained
(arXiv 2409.12191, section 2.1). A span goes on where its parent ended; siblings start alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

Span = tuple[int, int, int]
Grid = tuple[int, int, int]


def forest_positions(spans: Sequence[Span], pictures: Mapping[int, Grid], merge: int) -> np.ndarray:
    """Positions of all tokens.

    Args:
        spans: (start, end, parent), parents first, covering 0..T-1.
        pictures: first token of each picture run -> its grid in patches.
        merge: patches per token and side.

    Returns:
        int64 [3, T].
    """
    out = np.empty((3, spans[-1][1] if spans else 0), np.int64)
    ends: list[int] = []
    starts = sorted(pictures)
    number = 0
    for start, end, parent in spans:
        at = ends[parent] if parent >= 0 else 0
        token = start
        while number < len(starts) and starts[number] < end:
            first = starts[number]
            at = _fill_text(out, token, first, at)
            token, at = _fill_picture(out, first, pictures[first], merge, at)
            number += 1
        ends.append(_fill_text(out, token, end, at))
    return out


def _fill_text(out: np.ndarray, start: int, end: int, at: int) -> int:
    out[:, start:end] = np.arange(at, at + end - start)
    return at + end - start


def _fill_picture(out: np.ndarray, start: int, grid: Grid, merge: int, at: int) -> tuple[int, int]:
    """Returns the token behind the picture and the position that follows its largest one."""
    t, h, w = grid[0], grid[1] // merge, grid[2] // merge
    end = start + t * h * w
    out[:, start:end] = np.indices((t, h, w)).reshape(3, -1) + at
    return end, at + max(t, h, w)
