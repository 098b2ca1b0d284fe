"""Places in pictures, said in texts: in a row in the picture's own pixels, in a prompt in those of what the model sees.

In: `boxes` of a row, whose texts have a mark `<box>` for each. Out: `Box` parts in their places; the texts a model
reads (`[x0, y0, x1, y1]`, as the family answers); and an answer's boxes back in the picture's own pixels. A picture is
as people see it, turned as its EXIF says; whatever budget it is shown under, the same place is meant.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from litchi.data.media import read_header
from litchi.data.values import RowError, is_number, show
from litchi.types import Box, ChatSample, Media, Part, Sample, Turn

MARK = "<box>"
_LIST = re.compile(r"\[\s*(-?\d+(?:\.\d+)?(?:\s*,\s*-?\d+(?:\.\d+)?){1,3})\s*\]")


class Frame(NamedTuple):
    """A picture's sides (width, height) as the model sees it, and in its file."""

    shown: tuple[int, int]
    own: tuple[int, int]


# ------------------------------------------------------------------------------------------------------------ a row


def place_boxes(turns: Sequence[Turn], value: Any) -> list[Turn]:
    """Put the boxes of a row in the place of their marks. Raises RowError."""
    if not isinstance(value, list):
        raise RowError("wrong_box", f"boxes is {show(value)}: a list of [x0, y0, x1, y1] or [x, y] is needed")
    marks = sum(part.count(MARK) for turn in turns for part in turn.parts if isinstance(part, str))
    if marks != len(value):
        raise RowError("box_marks", f"texts have {marks} {MARK} marks, boxes has {len(value)}: one mark each is needed")
    pictures = whole_pictures(turns)
    boxes = iter([_read_box(one, f"boxes[{i}]", pictures) for i, one in enumerate(value)])
    return [replace(turn, parts=tuple(_fill(turn.parts, boxes))) for turn in turns]


def has_boxes(sample: Sample) -> bool:
    """Whether texts of a sample say places in pictures."""
    turns = sample.turns if isinstance(sample, ChatSample) else ()
    return any(isinstance(part, Box) for turn in turns for part in turn.parts)


def mark_boxes(turns: Sequence[Turn]) -> tuple[list[Turn], list[Any]]:
    """The same the other way round: turns with marks in their texts, and what stands for them in a row."""
    pictures = whole_pictures(turns)
    boxes = [part for turn in turns for part in turn.parts if isinstance(part, Box)]
    values = [{"box": list(box.at), "image": pictures.index(box.media)} for box in boxes]
    marked = [replace(t, parts=join_texts(MARK if isinstance(p, Box) else p for p in t.parts)) for t in turns]
    return marked, [one["box"] for one in values] if len(pictures) == 1 else values


def join_texts(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Join neighbouring texts and drop empty ones, so that all forms of a message give the same turn."""
    out: list[Part] = []
    for part in parts:
        if isinstance(part, str) and out and isinstance(out[-1], str):
            out[-1] += part
        elif part != "":
            out.append(part)
    return tuple(out)


def whole_pictures(turns: Sequence[Turn]) -> list[Media]:
    """The pictures of a conversation, in order, without regions of them."""
    media = [part for turn in turns for part in turn.parts if isinstance(part, Media)]
    return [one for one in media if one.kind == "image" and one.region is None]


def _fill(parts: Sequence[Part], boxes: Iterator[Box]) -> Iterator[Part]:
    for part in parts:
        if not isinstance(part, str):
            yield part
            continue
        for i, text in enumerate(part.split(MARK)):
            if i:
                yield next(boxes)
            if text:
                yield text


def _read_box(value: Any, name: str, pictures: Sequence[Media]) -> Box:
    given = value if isinstance(value, dict) else {"box": value}
    if unread := given.keys() - {"box", "image"}:
        raise RowError("wrong_box", f"{name} has {show(sorted(unread))}: box and image are allowed")
    at, number = given.get("box"), given.get("image")
    if not isinstance(at, list) or len(at) not in (2, 4) or not all(is_number(x) and x >= 0 for x in at):
        raise RowError("wrong_box", f"{name} is {show(at)}: [x0, y0, x1, y1] or [x, y] from 0 up is needed")
    if len(at) == 4 and not (at[0] < at[2] and at[1] < at[3]):
        raise RowError("wrong_box", f"{name} is {show(at)}: x0 must be before x1, y0 before y1")
    if number is None and len(pictures) == 1:
        number = 0
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < len(pictures):
        raise RowError("wrong_box", f"{name} names picture {show(number)}: the row has {len(pictures)}, counted from 0")
    return Box(pictures[number], tuple(at))


# --------------------------------------------------------------------------------------------------------- a prompt


def say_boxes(sample: ChatSample, side: int, grid_of: Callable[[Media], Sequence[Any]]) -> ChatSample:
    """The sample with its boxes as text.

    Args:
        side: of a patch.
        grid_of: as `GridOf`.

    Raises:
        RowError: a box reaches out of its picture.
        MediaError: the picture cannot be read.
    """
    if not has_boxes(sample):
        return sample

    def said(part: Part) -> Part:
        return write_box(part, frame_of(part.media, side, grid_of(part.media))) if isinstance(part, Box) else part

    return replace(sample, turns=tuple(replace(t, parts=join_texts(map(said, t.parts))) for t in sample.turns))


def frame_of(media: Media, side: int, grid: Sequence[Any]) -> Frame:
    """The frame of a picture with this grid. Raises MediaError."""
    header = read_header(media)
    return Frame((grid[2] * side, grid[1] * side), (header.width, header.height))


def write_box(box: Box, frame: Frame) -> str:
    """A box as the model reads it. Raises RowError."""
    limits = frame.own * 2
    if any(x > limit for x, limit in zip(box.at, limits, strict=False)):
        found = f"the box {list(box.at)} reaches out of its {frame.own[0]} x {frame.own[1]} pixels"
        raise RowError("box_outside", f"{box.media.name}: {found}")
    return _scaled(box.at, frame.own, frame.shown)


def _scaled(at: Sequence[float], sides: tuple[int, int], new: tuple[int, int]) -> str:
    places = [round(x * new[i % 2] / sides[i % 2]) for i, x in enumerate(at)]
    return f"[{', '.join(map(str, places))}]"


# -------------------------------------------------------------------------------------------------------- an answer


def restore_boxes(text: str, frame: Frame) -> str:
    """An answer with its boxes and points, lists of 4 or 2 numbers, in the picture's own pixels, kept inside it."""

    def back(match: re.Match[str]) -> str:
        at = [float(x) for x in match[1].split(",")]
        if len(at) == 3:
            return match[0]
        inside = [min(max(x, 0), frame.shown[i % 2]) for i, x in enumerate(at)]
        return _scaled(inside, frame.shown, frame.own)

    return _LIST.sub(back, text)


def only_picture(turns: Sequence[Turn]) -> Media | None:
    """The picture an answer's boxes are of; None: the conversation has none, or several."""
    distinct = {one.key: one for one in whole_pictures(turns)}
    return next(iter(distinct.values())) if len(distinct) == 1 else None
