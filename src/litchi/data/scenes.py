"""Hard cuts of a video: a file -> the times between which nothing is cut.

One pass over all frames, each reduced to a thumbnail; kept of it are two numbers for each frame. A cut is a frame that
differs from the one before by more than usual here: more than FLOOR levels, and RATIO times the median difference of
its neighbours, so that what moves all the time is no cut. A single odd frame, such as a flash, is none either: the
frame behind it is again like the one before it. Fades are not found.
"""

from __future__ import annotations

import numpy as np

from litchi.data.decoder import own_decoder
from litchi.types import Media

SIDE = 16  # of a thumbnail
FLOOR = 10.0  # levels of 255, mean over a thumbnail
RATIO = 4.0
NEIGHBOURS = 8  # on each side


def find_scenes(video: str | Media) -> list[tuple[float, float]]:
    """Begin and end of each scene of a file, or of the wanted part of it, in seconds; the first begins with the video,
    the last ends with it.

    A scene begins when its first frame is shown. Raises MediaError.
    """
    media = Media("video", video) if isinstance(video, str) else video
    decoder = own_decoder()
    line = decoder.scan(media)
    times, near, far = [], [], []
    before: list[np.ndarray] = []
    for at, thumbnail in decoder.thumbnails(media, line, SIDE):
        levels = thumbnail.astype(np.int16)
        times.append(at)
        near.append(_differ(levels, before[-1]) if before else 0.0)
        far.append(_differ(levels, before[0]) if len(before) == 2 else 0.0)
        before = [*before[-1:], levels]
    starts = [times[0], *(times[n] for n in find_cuts(np.array(near), np.array(far)))]
    ends = [*starts[1:], line.end]
    return [(line.at(start), line.at(end)) for start, end in zip(starts, ends, strict=True)]


def find_cuts(near: np.ndarray, far: np.ndarray) -> list[int]:
    """Frames that begin a scene.

    Args:
        near, far: difference of each frame from the one before and from the one before that, [N].
    """
    usual = np.array([_usual(near, n) for n in range(len(near))])
    striking = near > np.maximum(FLOOR, RATIO * usual)
    striking[:1] = False
    cuts = []
    for n in np.flatnonzero(striking).tolist():
        flash = n + 1 < len(near) and striking[n + 1] and far[n + 1] < min(near[n], near[n + 1]) / 2
        back = striking[n - 1] and far[n] < min(near[n - 1], near[n]) / 2
        if not flash and not back:
            cuts.append(n)
    return cuts


def _usual(near: np.ndarray, n: int) -> float:
    around = np.concatenate([near[max(1, n - NEIGHBOURS) : n], near[n + 1 : n + 1 + NEIGHBOURS]])
    return float(np.median(around)) if len(around) else 0.0


def _differ(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).mean())
