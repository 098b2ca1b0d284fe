"""A long video in segments: where it is cut, and what of a row belongs to each part.

In: a chat sample with one video, and how long a segment may be. Out: its parts with their times, and a sample for each,
whose answers keep the lines about it. A line about a time reads `0:10-0:20 a red bag`; times count from the beginning
of the video the turn shows, so those of a segment count from its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from litchi.data.boxes import has_boxes
from litchi.data.scenes import find_scenes
from litchi.data.values import RowError, is_number, show
from litchi.data.video import video_times
from litchi.errors import UsageError
from litchi.types import ChatSample, Media, Turn

_TIME = r"(?:(\d+):)?(\d+):(\d\d(?:\.\d+)?)"
_LINE = re.compile(rf"\s*{_TIME}\s*[-\u2013]\s*{_TIME}[:,]?\s+(\S.*)")


class Cutting(NamedTuple):
    """How long videos are cut: into segments of `length_s`, `at_scenes` first at scene changes."""

    length_s: float
    at_scenes: bool = False


class Segment(NamedTuple):
    """A part of a video: its number, from 0, and seconds from the beginning of the file."""

    number: int
    start_s: float
    end_s: float


class Event(NamedTuple):
    """What is said of a time."""

    start_s: float
    end_s: float
    text: str


# -------------------------------------------------------------------------------------------------------- segments


def find_segments(media: Media, cutting: Cutting) -> list[Segment]:
    """Segments of a video or its wanted part; a stretch in which no frame begins is none. Raises MediaError."""
    times, end = video_times(media)
    start = times[0] if media.start_s is None else media.start_s
    stretches = find_scenes(media) if cutting.at_scenes else [(start, end)]
    pairs = [pair for stretch in stretches for pair in cut_evenly(*stretch, cutting.length_s)]
    # down to the microsecond, so that a frame at a bound that is no decimal number still begins its segment
    pairs = [(math.floor(a * 1e6) / 1e6, math.floor(b * 1e6) / 1e6) for a, b in pairs]
    shown = [(a, b) for a, b in pairs if np.searchsorted(times, a) < np.searchsorted(times, b)]
    return [Segment(number, a, b) for number, (a, b) in enumerate(shown)]


def cut_evenly(start: float, end: float, length: float) -> list[tuple[float, float]]:
    """Stretches of a length, the last as long as what is left."""
    count = max(1, math.ceil((end - start) / length - 1e-6))
    bounds = [start + number * length for number in range(count)] + [end]
    return list(pairwise(bounds))


def group_texts(tokens: Sequence[int], limit: int) -> list[list[int]]:
    """Numbers of texts in groups of at most `limit` tokens, in order.

    Raises:
        UsageError: no two fit together, or one does not fit at all.
    """
    groups: list[list[int]] = [[]]
    room = limit
    for number, length in enumerate(tokens):
        if length > room and groups[-1]:
            groups.append([])
            room = limit
        groups[-1].append(number)
        room -= length
    if len(tokens) > 1 and (len(groups) == len(tokens) or max(tokens) > limit):
        raise UsageError(
            f"answers of {max(tokens)} tokens do not fit together into a prompt of {limit}",
            remedy="Raise data.max_length, or lower eval.max_new_tokens",
        )
    return groups


def split_sample(sample: ChatSample, cutting: Cutting) -> list[tuple[Segment, ChatSample]]:
    """A sample for each segment of its video; none of a sample without a video.

    Raises:
        RowError: it shows several videos, or says without a time what cannot be given to a segment.
        MediaError: the video cannot be read.
    """
    media = {part.key: part for turn in sample.turns for part in turn.parts if isinstance(part, Media)}
    videos = [one for one in media.values() if one.kind == "video"]
    if not videos:
        return []
    if len(videos) > 1:
        raise RowError("several_videos", f"{len(videos)} videos: data.video.segment_s cuts rows with one")
    if has_boxes(sample):
        raise RowError("boxes", "it has boxes: data.video.segment_s cuts rows without")
    segments = find_segments(videos[0], cutting)
    if len(segments) > 1:
        for number, turn in enumerate(sample.turns):
            if "events" not in sample.fields and _says(turn) and read_lines(_text(turn)) is None:
                found = f"messages[{number}] has no times, and its video is cut into {len(segments)} segments"
                raise RowError("no_times", f"{found}: lines such as 0:10-0:20 a red bag, or events, are needed")
    return [(segment, cut_sample(sample, segment)) for segment in segments]


def cut_sample(sample: ChatSample, segment: Segment) -> ChatSample:
    """The sample of a segment. An answer nothing of which belongs to it is empty. Raises RowError."""
    shown = next(p for t in sample.turns for p in t.parts if isinstance(p, Media) and p.kind == "video")
    start, end = segment.start_s - (shown.start_s or 0), segment.end_s - (shown.start_s or 0)
    events = read_events(sample.fields["events"]) if "events" in sample.fields else None
    turns = []
    for number, turn in enumerate(sample.turns):
        parts = tuple(
            replace(part, start_s=segment.start_s, end_s=segment.end_s)
            if isinstance(part, Media) and part.kind == "video"
            else part
            for part in turn.parts
        )
        last = number == len(sample.turns) - 1
        said = events if last and events is not None else read_lines(_text(turn)) if _says(turn) else None
        if said is not None:
            text = write_lines(clip_events(said, start, end))
            parts = (text,) if text else ()
        turns.append(replace(turn, parts=parts))
    return replace(sample, id=f"{sample.id}#{segment.number}", turns=tuple(turns))


def has_answer(sample: ChatSample) -> bool:
    """Whether something is said in the last turn."""
    return bool(sample.turns[-1].parts)


def _says(turn: Turn) -> bool:
    return turn.role == "assistant" and bool(_text(turn).strip())


def _text(turn: Turn) -> str:
    return "".join(part for part in turn.parts if isinstance(part, str))


# ---------------------------------------------------------------------------------------------------------- events


def read_lines(text: str) -> list[Event] | None:
    """What a text says of times, a line each; None where a line has no time."""
    events = []
    for line in filter(str.strip, text.splitlines()):
        match = _LINE.fullmatch(line)
        if match is None:
            return None
        a, b = (3600 * int(h or 0) + 60 * int(m) + float(s) for h, m, s in (match.groups()[:3], match.groups()[3:6]))
        events.append(Event(a, b, match[7]))
    return events or None


def read_events(value: Any) -> list[Event]:
    """The `events` of a row: a list of {"start", "end", "text"}, in seconds. Raises RowError."""
    if not isinstance(value, list):
        raise RowError("wrong_type", f"events is {show(value)}: a list of {{start, end, text}} is needed")
    return [_read_event(item, f"events[{number}]") for number, item in enumerate(value)]


def _read_event(item: Any, name: str) -> Event:
    known: Mapping[str, Any] = item if isinstance(item, Mapping) else {}
    start, end, text = (known.get(key) for key in ("start", "end", "text"))
    if not is_number(start) or not is_number(end) or not 0 <= start < end or not isinstance(text, str) or not text:
        raise RowError("bad_event", f"{name} is {show(item)}: seconds start < end and a text are needed")
    return Event(start, end, text)


def clip_events(events: Sequence[Event], start: float, end: float) -> list[Event]:
    """Those that reach into a stretch, cut to it, with times from its beginning."""
    inside = [Event(max(a, start) - start, min(b, end) - start, text) for a, b, text in events]
    return [event for event in inside if event.start_s < event.end_s]


def write_lines(events: Sequence[Event]) -> str:
    """A line for each: `0:10-0:20 a red bag`."""
    return "\n".join(f"{write_time(a)}-{write_time(b)} {text}" for a, b, text in events)


def write_time(seconds: float) -> str:
    """0:10, 1:02:03.5; rounded to milliseconds, whole seconds without a fraction."""
    milli = round(seconds * 1000)
    whole, rest = divmod(milli, 1000)
    hours, minutes, left = whole // 3600, whole // 60 % 60, whole % 60
    clock = f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"
    return clock + (f".{rest:03d}".rstrip("0") if rest else "")
