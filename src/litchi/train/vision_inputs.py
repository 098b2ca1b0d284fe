"""What a vision tower in ONNX is given besides pixels, from the grids of pictures. Needs numpy alone: this file lies
beside the graph, and Litchi checks the graph with it.

The graph has no loops over windows or pictures: which window and which frame a patch belongs to comes in as numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def vision_inputs(
    grids: Sequence[tuple[int, int, int]], *, merge: int = 2, window: int | None = 4
) -> dict[str, np.ndarray]:
    """Inputs of pictures that are encoded in one call.

    Args:
        grids: (frames, rows, columns) in patches of each, as the processor's `image_grid_thw` says.
        merge: patches that become one token, along a side.
        window: side of a window in tokens; None: the tower has no windows.

    Returns:
        int64 `order` [tokens], in which windows lie behind each other, and `back`, the way back; `positions`
        [patches, 2], row and column of each in the pixels' order; `windows` and `frames` [patches], numbers of what a
        patch attends within, in the order of windows.
    """
    order, positions, windows, frames = [], [], [], []
    tokens = seen_windows = seen_frames = 0
    for count, height, width in grids:
        rows, columns = height // merge, width // merge
        down, across = window or rows, window or columns
        for _ in range(count):
            numbers = np.arange(rows * columns).reshape(rows, columns) + tokens
            for i in range(0, rows, down):
                for j in range(0, columns, across):
                    inside = numbers[i : i + down, j : j + across].reshape(-1)
                    order.append(inside)
                    windows.append(np.full(len(inside) * merge**2, seen_windows))
                    seen_windows += 1
            frames.append(np.full(rows * columns * merge**2, seen_frames))
            blocks = [
                a.reshape(rows, merge, columns, merge).transpose(0, 2, 1, 3).reshape(-1)
                for a in np.indices((height, width))
            ]
            positions.append(np.stack(blocks, 1))
            tokens, seen_frames = tokens + rows * columns, seen_frames + 1
    places = np.concatenate(order)
    found = {
        "order": places,
        "back": np.argsort(places),
        "positions": np.concatenate(positions),
        "windows": np.concatenate(windows),
        "frames": np.concatenate(frames),
    }
    return {name: value.astype(np.int64) for name, value in found.items()}
