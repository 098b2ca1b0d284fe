"""A usable row as the index keeps it: what it costs with any of its documents, and under any pixel budget.

Tokens of text are counted once; those of a picture follow from its size and the budget, so no row is scanned twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from litchi.batch.cost import Grid, Work, forest_pairs
from litchi.batch.schedule import choose_negatives
from litchi.data.media import Header, grid_of
from litchi.data.segments import Segment
from litchi.data.video import fit_video, step_of, video_size
from litchi.types import IGNORE, Content, Example, Media, VisionSpec

# width and height of a picture in its file, as it stands upright, then what it gets at most where that goes by detail
# (`Media.pixels`); of a video also how many frames are taken and the seconds they stand for, then again the pixels
Size = tuple[int, int] | tuple[int, int, int] | tuple[int, int, int, float] | tuple[int, int, int, float, int]


class RowCost(NamedTuple):  # half the memory of a dataclass, and read from the cache in a third of the time
    """A usable row. For a group, `documents` are the numbers that may take part, `lengths` their prompts' tokens.

    `grids` are the row's distinct pictures, with `sizes` and `names`: for a group the query's first, `shared` of them,
    which always take part; `pictures` are, for each of `documents`, the numbers of those that come with it, () where
    none has any. `shown` are the numbers of the pictures in each span (the prefix, then each of `documents`; for chat
    one span), as often as they stand there.
    """

    line: int  # number into Lines, from 0
    id: str
    tokens: int  # of the whole row: for a group, with its prefix counted once
    patches: int
    rows: int = 0  # chat: tokens that are trained on
    prefix: int = 0
    documents: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    positives: int = 0  # the first of `documents`; the others are negatives
    grids: tuple[Grid, ...] = ()
    shared: int = 0
    pictures: tuple[tuple[int, ...], ...] = ()
    sizes: tuple[Size, ...] = ()
    names: tuple[int, ...] = ()  # the same number for the same picture in all rows of all files
    shown: tuple[tuple[int, ...], ...] = ()
    segment: Segment | None = None  # of a row whose video is cut
    stages: tuple[tuple[int, int, int, int], ...] = ()  # of a row with boxes: `stage_cost` under other budgets
    allotted: tuple[int | None, ...] = ()  # where pixels go by detail: `Media.pixels` of all the row's media, in order

    def chosen(self, seed: int, epoch: int, wanted: int | None) -> tuple[int, ...] | None:
        """Documents that take part in an epoch: all positives and the chosen negatives. None for chat."""
        if not self.documents:
            return None
        negatives = self.documents[self.positives :]
        picked = choose_negatives(seed, epoch, self.id, len(negatives), wanted)
        return self.documents[: self.positives] + tuple(negatives[i] for i in picked)

    def work(self, chosen: Sequence[int] | None) -> Work:
        """What the row takes with these documents (their prefix is at least the whole group's)."""
        if chosen is None:
            return Work(self.tokens, forest_pairs(self.tokens), self.rows, self.grids, self.names)
        at = [self.documents.index(d) for d in chosen]
        children = [self.lengths[i] - self.prefix for i in at]
        grids, names = self.grids, self.names
        if self.pictures:
            own = sorted({number for i in at for number in self.pictures[i]})
            grids = grids[: self.shared] + tuple(grids[number] for number in own)
            names = names[: self.shared] + tuple(names[number] for number in own)
        return Work(self.prefix + sum(children), forest_pairs(self.prefix, children), len(at), grids, names)

    def at(self, spec: VisionSpec) -> RowCost:
        """The same row under another pixel budget."""
        grids = tuple(fit_grid(size, spec) for size in self.sizes)
        if grids == self.grids:
            return self
        more = [(_area(new) - _area(old)) // spec.merge**2 for new, old in zip(grids, self.grids, strict=True)]
        first, *others = (sum(more[number] for number in span) for span in self.shown)
        tokens, rows = self.tokens + first + sum(others), self.rows
        if self.stages:
            tokens, rows = next(one[2:] for one in self.stages if one[:2] == (spec.min_pixels, spec.max_pixels))
        return self._replace(
            tokens=tokens,
            rows=rows,
            patches=sum(map(_area, grids)),
            prefix=self.prefix + first if self.documents else 0,
            lengths=tuple(length + first + own for length, own in zip(self.lengths, others, strict=True)),
            grids=grids,
        )


@lru_cache(maxsize=65_536)
def fit_grid(size: Size, spec: VisionSpec) -> Grid:
    """Grid of a picture of this size; the same object for equal grids: an index has many pictures and few grids."""
    if len(size) > 3:
        return fit_video(size, spec)  # type: ignore[arg-type]
    return grid_of(Header(size[0], size[1], frames=1), spec, *size[2:])  # type: ignore[arg-type]


def size_of(media: Media, header: Header, spec: VisionSpec) -> Size:
    """What the grid of a picture or video follows from."""
    size = (header.width, header.height) if media.kind == "image" else video_size(media, header, spec)
    return size if media.pixels is None else (*size, media.pixels)  # type: ignore[return-value]


def with_step(grid: Grid, size: Size, spec: VisionSpec) -> Grid | tuple[int, int, int, float]:
    """The grid, of a video with the seconds from one of its frames to the next."""
    return (*grid, step_of(size, spec)) if len(size) > 3 else grid  # type: ignore[arg-type]


def count_trained(example: Example) -> int:
    """Tokens a chat example is trained on."""
    return int((example.labels[1:] != IGNORE).sum())


def stage_cost(spec: VisionSpec, example: Example) -> tuple[int, int, int, int]:
    """A budget, and what an example takes under it: tokens, and those that are trained on. A box of larger numbers is
    longer, so that this does not follow from its pictures alone."""
    return spec.min_pixels, spec.max_pixels, example.tokens, count_trained(example)


def _area(grid: Grid) -> int:
    t, h, w = grid
    return t * h * w


@lru_cache(maxsize=65_536)
def name_picture(key: str) -> int:
    """A number that stands for a picture wherever it is met, on all ranks (8 bytes of a hash of its key)."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")


@lru_cache(maxsize=65_536)
def same_object(value):
    """The same object for equal values: rows have many small tuples that repeat."""
    return value


def pictures_by_span(example: Example, numbers: dict[str, int]) -> list[tuple[int, ...]]:
    """The numbers of the pictures that stand in each span of an example, given their numbers by key."""
    spans: list[list[int]] = [[] for _ in example.spans]
    for media, at in example.media_at:
        span = next(n for n, (start, end, _) in enumerate(example.spans) if start <= at < end)
        spans[span].append(numbers.get(example.media[media].media.key, -1))
    return [same_object(tuple(span)) for span in spans]


def number_pictures(query: Content, documents: Sequence[Content]):
    """Pictures of a group: key -> number, the query's first; how many are the query's; the others of each document."""
    number = {key: n for n, key in enumerate(dict.fromkeys(m.key for m in query.media))}
    shared = len(number)
    pictures = []
    for content in documents:
        own = dict.fromkeys(m.key for m in content.media)
        for key in own:
            number.setdefault(key, len(number))
        pictures.append(same_object(tuple(number[key] for key in own if number[key] >= shared)))
    return number, shared, tuple(pictures) if any(pictures) else ()
