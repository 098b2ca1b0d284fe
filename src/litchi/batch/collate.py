"""Examples -> Batch: one flat token stream, each distinct picture once, no padding.

The pictures come decoded (patches by media key); this file only places things. It is the same for training,
evaluation, generation and serving.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from litchi.batch.positions import forest_positions
from litchi.data.processor import END_OF_TEXT, IMAGE_PAD, VIDEO_PAD, Processor
from litchi.types import IGNORE, Batch, Example

CountUnits = Callable[[torch.Tensor, Sequence[tuple[int, int]]], int]


def collate(
    examples: Sequence[Example],
    patches: Mapping[str, np.ndarray],
    processor: Processor,
    count_units: CountUnits | None = None,
) -> Batch:
    """Lay examples side by side.

    Args:
        examples: at least none; without one the batch is the empty batch of one ignored token.
        patches: media key -> uint8 [patches, 3 * patch^2], of a video [patches, 3 * temporal * patch^2]; without the
            pictures other ranks encode.
        processor: for the merge size and token ids.
        count_units: (targets, groups) -> what the loss is divided by; counts targets when left out.

    Raises:
        AssertionError: a picture's features and its tokens do not agree (never reached by checked data).
    """
    if not examples:
        return _empty_batch(processor)
    merge, per_second = processor.vision.merge, processor.vision.video.per_second
    features, grids, pixels = _place_pictures(examples, patches, merge)
    spans: list[tuple[int, int, int]] = []
    runs: dict[int, tuple[int, int, int]] = {}
    steps: dict[int, float] = {}
    image_at, image_from, rows, targets = [], [], [], []
    groups: list[tuple[int, int]] = []
    offset = scored = 0
    for example in examples:
        base = len(spans)
        spans += [(a + offset, b + offset, p + base if p >= 0 else -1) for a, b, p in example.spans]
        for number, at in example.media_at:
            media = example.media[number]
            first, count = features[media.media.key]
            runs[at + offset] = media.grid
            if media.step_s and per_second:
                steps[at + offset] = media.step_s * per_second
            image_at.append(np.arange(at + offset, at + offset + count))
            image_from.append(np.arange(first, first + count))
        new_rows, new_targets = _needed_rows(example)
        if example.scored:
            groups.append((scored, scored + len(new_rows)))
            scored += len(new_rows)
        rows.append(new_rows + offset)
        targets.append(new_targets)
        offset += example.tokens
    ids = np.concatenate([e.ids for e in examples]).astype(np.int64)
    places = _joined(image_at)
    pads = [processor.controls[pad] for pad in (IMAGE_PAD, VIDEO_PAD) if pad in processor.controls]
    assert np.isin(ids, pads).sum() == len(places), "picture tokens and picture features differ"
    target = torch.from_numpy(np.concatenate(targets))
    return Batch(
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(forest_positions(spans, runs, merge, steps)),
        spans=tuple(spans),
        pixels=torch.from_numpy(pixels),
        grids=tuple(grids),
        image_at=torch.from_numpy(places),
        image_from=torch.from_numpy(_joined(image_from)),
        rows=torch.from_numpy(np.concatenate(rows)),
        targets=target,
        groups=tuple(groups),
        doc_ids=tuple(d for e in examples for d in e.doc_ids),
        samples=tuple(e.id for e in examples),
        units=len(target) if count_units is None else count_units(target, groups),
    )


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _place_pictures(examples: Sequence[Example], patches: Mapping[str, np.ndarray], merge: int):
    """Each distinct picture once: key -> (first feature row, number of rows), grids, all patches."""
    features: dict[str, tuple[int, int]] = {}
    grids, pixels, first = [], [], 0
    for example in examples:
        for media in example.media:
            if media.media.key not in features:
                count = media.tokens(merge)
                features[media.media.key] = (first, count)
                grids.append(media.grid)
                first += count
                if media.media.key in patches:
                    pixels.append(patches[media.media.key])
                    assert len(pixels[-1]) == media.patches, f"{media.media.name}: patches and grid differ"
    return features, grids, join_patches(pixels)


def join_patches(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Patches of some pictures, one after the other: uint8 [P, 3 * patch^2]. With a video among them a patch has two
    frames, and those of a picture are equal: [P, 3 * temporal * patch^2]. Without any [0, 0]."""
    if not parts:
        return np.zeros((0, 0), np.uint8)
    width = max(part.shape[1] for part in parts)
    wide = [
        part if part.shape[1] == width else np.tile(part.reshape(len(part), 3, -1), width // part.shape[1])
        for part in parts
    ]
    return np.concatenate([part.reshape(len(part), width) for part in wide])


def _needed_rows(example: Example) -> tuple[np.ndarray, np.ndarray]:
    """Tokens whose hidden state goes to the head, and what it is compared with."""
    if example.scored:
        return np.array(example.scored, np.int64), np.array(example.targets, np.float32)
    labels = example.labels[1:]
    rows = np.flatnonzero(labels != IGNORE)
    return rows, labels[rows].astype(np.int64)


def _empty_batch(processor: Processor) -> Batch:
    none = torch.zeros(0, dtype=torch.int64)
    return Batch(
        ids=torch.tensor([processor.control(END_OF_TEXT)]),
        positions=torch.zeros(3, 1, dtype=torch.int64),
        spans=((0, 1, -1),),
        pixels=torch.zeros(0, 0, dtype=torch.uint8),
        grids=(),
        image_at=none,
        image_from=none,
        rows=none,
        targets=none,
        groups=(),
        doc_ids=(),
        samples=(),
        units=0,
    )
