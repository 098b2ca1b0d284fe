"""Pictures -> features in one call of the vision tower, with everything it loops over worked out beforehand.

transformers' tower would build window indices and split queries per window in Python; it also accepts them ready
made. Windows of equal size are laid side by side so that they are one attention piece, and so are equal pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from litchi.model.leaves import folds_stills
from litchi.model.spans import Piece, Pieces, Plan, stack
from litchi.types import VisionSpec

Grid = tuple[int, int, int]


@lru_cache(maxsize=4096)
def _grid_layout(grid: Grid, merge: int, side: int | None):
    """Lay out one picture.

    Returns:
        The order of its merged tokens (frame by frame, windows of equal size together), the runs of equal windows
        as (count, tokens), and the row and column of every patch, int64 [patches, 2], in the processor's order.
    """
    t, gh, gw = grid
    h, w = gh // merge, gw // merge
    tokens = np.arange(t * h * w).reshape(t, h, w)
    down, across = side or h, side or w
    windows: list[np.ndarray] = []
    for frame in tokens:  # frames stay apart: a layer without windows attends within each
        cut = [frame[i : i + down, j : j + across].reshape(-1) for i in range(0, h, down) for j in range(0, w, across)]
        windows += sorted(cut, key=len, reverse=True)
    runs: list[list[int]] = []
    for window in windows:
        if runs and runs[-1][1] == len(window):
            runs[-1][0] += 1
        else:
            runs.append([1, len(window)])
    rows, columns = np.indices((gh, gw))
    blocks = [a.reshape(h, merge, w, merge).transpose(0, 2, 1, 3).reshape(-1) for a in (rows, columns)]
    return np.concatenate(windows), tuple((n, size) for n, size in runs), np.tile(np.stack(blocks, 1), (t, 1))


@dataclass(frozen=True)
class VisionLayout:
    """Of all pictures of a batch: window order [N], patch coordinates [P, 2], and the attention plan."""

    order: Tensor
    coordinates: Tensor
    plan: Plan


def vision_layout(grids: Sequence[Grid], spec: VisionSpec) -> VisionLayout:
    """Lay the pictures of a batch side by side."""
    unit = spec.merge * spec.merge
    side = spec.window // spec.factor if spec.window else None
    orders, coordinates, full, window = [], [], Pieces(), Pieces()
    at = 0  # in patches
    for grid in grids:
        order, runs, where = _grid_layout(grid, spec.merge, side)
        orders.append(order + at // unit)
        coordinates.append(where)
        stack(full, Piece(at, at + len(where), at, at + len(where), False, grid[0]))
        for count, size in runs:
            end = at + count * size * unit
            stack(window, Piece(at, end, at, end, False, count))
            at = end
    return VisionLayout(
        order=torch.from_numpy(np.concatenate(orders)),
        coordinates=torch.from_numpy(np.concatenate(coordinates)),
        plan=Plan(full=full, window=window),
    )


def mark_windowed(tower: nn.Module) -> None:
    """Tell each attention module whether its layer is windowed; `spans_attention` reads it."""
    full = getattr(tower, "fullatt_block_indexes", None)
    for i, block in enumerate(tower.blocks):  # type: ignore[arg-type]
        block.attn.windowed = full is not None and i not in full


def normalise_patches(pixels: Tensor, spec: VisionSpec, *, fold: bool = False) -> Tensor:
    """Patches as the family's processor normalises them.

    Args:
        pixels: uint8 [P, 3 * patch^2] of still pictures, or [P, 3 * temporal * patch^2] where frames differ.
        fold: leave the equal frames of still pictures as one.

    Returns:
        fp32 [P, 3 * temporal * patch^2], or [P, 3 * patch^2] where they are left as one.
    """
    mean = torch.tensor(spec.mean, device=pixels.device)[:, None] * 255
    std = torch.tensor(spec.std, device=pixels.device)[:, None] * 255
    values = pixels.view(len(pixels), 3, -1).to(torch.float32).sub_(mean).div_(std)
    if fold or values.shape[-1] != spec.patch**2:
        return values.flatten(1)
    return values[:, :, None].expand(-1, -1, spec.temporal, -1).reshape(len(pixels), -1)


def encode_pictures(
    tower: nn.Module,
    pixels: Tensor,
    grids: Sequence[Grid],
    spec: VisionSpec,
    *,
    attention: str = "auto",
    call: Callable[..., Any] | None = None,
) -> Tensor:
    """One call of the tower for all pictures.

    Args:
        pixels: uint8 as `normalise_patches` takes them.
        grids: of each picture, in patches.
        attention: what computes it, by `model.attention`.
        call: is called instead of the tower, with its arguments.

    Returns:
        Features [N, hidden] in the pictures' own token order.
    """
    layout = vision_layout(grids, spec)
    pixels = _narrow(pixels, spec)
    device = pixels.device
    count = len(pixels)
    # one chunk: transformers splits q, k, v by these lengths in Python, and the plan knows the pieces
    whole = torch.tensor([0, count])
    windows = (
        {"window_index": layout.order.to(device), "cu_window_seqlens": whole, "max_window_seqlen": count}
        if spec.window
        else {}
    )
    return (call or tower)(
        normalise_patches(pixels, spec, fold=folds_stills(tower)),
        None,
        position_ids=layout.coordinates.to(device),
        cu_seqlens=whole,
        max_seqlen=count,
        plan=layout.plan.choose(attention),
        **windows,
    ).pooler_output


def _narrow(pixels: Tensor, spec: VisionSpec) -> Tensor:
    """One frame of each patch where no patch's frames differ: a still picture is the same to the tower beside a video
    as alone."""
    if pixels.shape[-1] == 3 * spec.patch**2:
        return pixels
    frames = pixels.view(len(pixels), 3, spec.temporal, -1)
    first = frames[:, :, :1]
    return first.flatten(1) if torch.equal(frames, first.expand_as(frames)) else pixels


def blank_picture(spec: VisionSpec, device: torch.device) -> tuple[Tensor, Grid]:
    """The smallest picture there is, for a rank that has none: (pixels, grid)."""
    return torch.zeros(spec.merge**2, 3 * spec.patch**2, dtype=torch.uint8, device=device), (1, spec.merge, spec.merge)
