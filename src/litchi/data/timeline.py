"""When the frames of a video are shown, and which of them a model gets: pure, from time stamps.

In: the packets of a file. Out: a `Timeline`; from it and the settings how many frames are taken and at which times.
The rule is that of the family's own reader (qwen-vl-utils), with time stamps in the place of frame numbers: where
frames are evenly spaced it takes the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from litchi.data.media import MediaError
from litchi.types import VideoSpec


@dataclass(frozen=True)
class Timeline:
    """When the frames of a video, or of its part from `start` to `end`, are shown.

    `times` int64 [N] rise and count ticks of `tick` seconds; the last frame is shown until `end`. `keys` are those
    that decoding can begin at. `counted`: the file has no time stamps, and `times` number its frames.
    `width` and `height` are those of an upright frame. `note` is a warning: "" or `no_frame_rate`.
    """

    width: int
    height: int
    times: np.ndarray
    tick: Fraction
    end: int
    keys: tuple[int, ...] = ()
    origin: int = 0
    counted: bool = False
    note: str = ""

    @property
    def seconds(self) -> Fraction:
        """Of the part that its frames cover."""
        return (self.end - int(self.times[0])) * self.tick

    def at(self, tick: int) -> float:
        """Seconds from the beginning of the file."""
        return float((tick - self.origin) * self.tick)


class Packet(NamedTuple):
    """A frame as it lies in the file."""

    time: int | None  # in ticks
    length: int
    key: bool  # whether decoding can begin here


def build_timeline(
    packets: Sequence[Packet],
    tick: Fraction,
    origin: int,
    part: tuple[float | None, float | None],
    size: tuple[int, int],
) -> Timeline:
    """The timeline of some packets, in any order, or of the part from .. to (seconds) of them. Raises MediaError."""
    lengths = {packet.time: packet.length for packet in packets if packet.time is not None}
    times = np.array(sorted(lengths), np.int64)
    if not len(times):
        raise MediaError("empty_video", "it holds no frame")
    start, end = (None if s is None else origin + Fraction(str(s)) / tick for s in part)
    usual = int(np.median(np.diff(times))) if len(times) > 1 else 1
    final = int(times[-1]) + (lengths[int(times[-1])] or usual)
    first = 0 if start is None else int(np.searchsorted(times, math.ceil(start)))
    stop = len(times) if end is None else int(np.searchsorted(times, math.ceil(end)))
    if first >= stop:
        where = f"from {part[0] or 0:g} s" + (f" to {part[1]:g} s" if part[1] is not None else "")
        raise MediaError("empty_video", f"it has no frame {where}; it ends at {float((final - origin) * tick):.2f} s")
    until = int(times[stop]) if stop < len(times) else final
    if end is not None:
        until = min(until, max(int(times[stop - 1]) + 1, round(end)))
    keys = tuple(sorted(packet.time for packet in packets if packet.key and packet.time is not None))
    return Timeline(*size, times[first:stop], tick, until, keys, origin)


# ------------------------------------------------------------------------------------------------------- sampling


def count_frames(total: int, seconds: float, spec: VideoSpec, *, fps: float | None = None, wanted: int | None = None):
    """How many of a video's frames are taken: an even number, but for a video of one frame.

    Args:
        total, seconds: its frames and what they cover.
        fps, wanted: what the row says: frames per second, or their number; None: as `spec` says.
    """
    if wanted is not None:
        count: float = round(wanted / 2) * 2
    else:
        count = max(seconds * (fps or spec.fps), math.ceil(spec.min_frames / 2) * 2)
        count = min(count, spec.max_frames // 2 * 2)
    return max(math.floor(min(count, total) / 2) * 2, min(2, total))


def pick_frames(times: np.ndarray, count: int) -> np.ndarray:
    """Which frames are taken: those nearest to `count` evenly spaced times from the first to the last frame.

    Args:
        times: rising int64 [N].

    Returns:
        Numbers into `times`, int64 [count]; one may come twice where frames are further apart than the times. A tie
        goes to the even number, as rounding does.
    """
    if count == 1:
        return np.zeros(1, np.int64)
    steps = np.arange(count, dtype=np.int64)
    goals = int(times[0]) * (count - 1 - steps) + int(times[-1]) * steps  # in ticks / (count - 1), so in whole numbers
    fine = times.astype(np.int64) * (count - 1)
    after = np.searchsorted(fine, goals).clip(1, len(times) - 1)
    before = after - 1
    left, right = goals - fine[before], fine[after] - goals
    return np.where((left < right) | ((left == right) & (before % 2 == 0)), before, after)
