"""How many pixels a picture needs, by its detail, and how pictures that are shown together share a budget.

In: decoded pixels. Out: its `Detail`; then, of the pictures of a row with their details and a `Budget`, the pixels each
gets at most (`Media.pixels`), which is what a run, an evaluation and a server show. All of it is in whole numbers, so
that it comes out the same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from PIL import Image

from litchi.data.media import fit_size
from litchi.types import Box, ChatSample, Content, Media, RerankSample, Sample

RULE = 1  # raised whenever a picture gets another detail, so that caches start anew
LEVELS = 4  # a half, a quarter, ... of each side
TILE = 2 ** (LEVELS + 1)  # pixels a side: print is as small in the corner of a page as on a page full of it
CALM = 100  # grey levels squared that noise may vary by
LARGEST = 2**22  # pixels that are looked at; a larger picture is reduced first
WHOLE = 1_000_000

Detail = tuple[int, ...]  # millionths that are lost at a half, a quarter, ... of the sides, where most is lost


def measure_detail(rgb: np.ndarray) -> Detail:
    """Measure what of a picture, uint8 [H, W, 3], is lost when it is made smaller.

    In each tile: the variance within blocks of 2, 4, ... pixels a side, which are one pixel then, as a share of the
    variance of the tile. Tiles lie in two layers, half a tile apart, and what both of them cover loses the smaller
    share: an edge is no detail because it runs along the border of a tile. The place that loses most counts.
    """
    grey = Image.fromarray(rgb).convert("L")
    grey = grey.reduce(_reduced(*grey.size))
    width, height = grey.size
    half, levels = TILE // 2, np.asarray(grey)
    around = ((half, half + -height % TILE), (half, half + -width % TILE))
    wide = np.pad(levels, around, mode="edge").astype(np.int64)
    places = zip(_lost_by_tile(wide[half:-half, half:-half]), _lost_by_tile(wide), strict=True)
    return tuple(int(np.minimum(_halves(one), _halves(other)[1:-1, 1:-1]).max()) for one, other in places)


def _lost_by_tile(sums: np.ndarray) -> list[np.ndarray]:
    """Millionths lost in each tile, level by level."""
    rows, columns = sums.shape[0] // TILE, sums.shape[1] // TILE
    squares, within = sums**2, []
    for _ in range(LEVELS + 1):
        squares = _halve(squares)
    for level in range(1, LEVELS + 2):
        sums = _halve(sums)
        blocks = (sums**2).reshape(rows, TILE >> level, columns, TILE >> level).sum((1, 3))
        # the sum over pixels of squared distances to their block's mean, times the pixels of a tile
        within.append(((squares << 2 * level) - blocks) << 2 * (LEVELS + 1 - level))
    return [part * WHOLE // (within[-1] + CALM * TILE**4) for part in within[:-1]]


def _halves(tiles: np.ndarray) -> np.ndarray:
    return tiles.repeat(2, 0).repeat(2, 1)


def measure_frames(frames: Iterable[np.ndarray]) -> Detail:
    """The detail of a video by some of its frames: at each size that of the frame that loses most."""
    return tuple(map(max, zip(*map(measure_detail, frames), strict=True)))


def _halve(values: np.ndarray) -> np.ndarray:
    """Sums of blocks of 2 x 2."""
    return values[::2, ::2] + values[1::2, ::2] + values[::2, 1::2] + values[1::2, 1::2]


def _reduced(width: int, height: int) -> int:
    return max(1, math.isqrt((width * height - 1) // LARGEST) + 1)


def needed_pixels(width: int, height: int, detail: Detail, lost: int) -> int | None:
    """The fewest pixels at which no more than `lost` millionths are lost; None: all it has."""
    level = sum(part <= lost for part in detail)
    whole = (width * height // _reduced(width, height) ** 2) << 2 * LEVELS
    if level == LEVELS:
        return max(1, whole >> 4 * LEVELS)
    known = (0, *detail)
    above, below = whole >> 2 * level, whole >> 2 * level + 2
    pixels = above - (above - below) * (lost - known[level]) // (known[level + 1] - known[level])
    return None if pixels == whole else max(1, pixels >> 2 * LEVELS)


# -------------------------------------------------------------------------------------------------------- a budget


@dataclass(frozen=True)
class Budget:
    """How many pixels pictures get by their detail.

    Args:
        low, high: pixels of a picture, as `data.pixels` has them.
        factor: sides are multiples of this many pixels.
        lost: millionths of a picture's detail it may lose; None: as many pixels as it has, within the limits.
        total: pixels of the pictures shown together.
        frames_lost: as `lost`, of videos.
    """

    low: int
    high: int
    factor: int
    lost: int | None = None
    total: int | None = None
    frames_lost: int | None = None

    @property
    def looks(self) -> bool:
        """Whether the detail of pictures or videos has to be known."""
        return self.pictures or self.frames_lost is not None

    @property
    def pictures(self) -> bool:
        return self.lost is not None or self.total is not None

    def area(self, shown: Shown, pixels: int | None) -> int:
        """Pixels of a picture that gets so many at most."""
        high = self.high if pixels is None else min(pixels, self.high)
        low = min(self.low, high)
        h, w = fit_size(shown.height, shown.width, factor=self.factor, min_pixels=low, max_pixels=high)
        return h * w


class Shown(NamedTuple):
    """A picture as it stands upright; a region has no detail: it is shown for it."""

    width: int
    height: int
    detail: Detail | None


def share_pixels(pictures: Sequence[Shown], budget: Budget) -> list[int | None]:
    """Pixels each of some pictures gets at most, so that they keep to the total; None: what it has.

    All pictures lose the same share of their detail, as little as the total allows; where that does not suffice, the
    largest are made smaller, regions among them. None gets less than `budget.low`, whatever the total.
    """

    def by_loss(lost: int) -> list[int | None]:
        return [None if p.detail is None else _limit(p, lost, budget) for p in pictures]

    def by_size(most: int) -> list[int | None]:
        return [min(most, _limit(p, WHOLE, budget) or most) if p.detail is not None else most for p in pictures]

    def fits(shares: list[int | None]) -> bool:
        areas = (budget.area(p, pixels) for p, pixels in zip(pictures, shares, strict=True))
        return budget.total is None or sum(areas) <= budget.total

    least = budget.lost or 0
    if fits(by_loss(least)):
        return by_loss(least)
    if fits(by_loss(WHOLE)):
        return by_loss(_first(least, WHOLE, lambda lost: fits(by_loss(lost))))
    return by_size(-_first(-budget.high, -budget.low, lambda most: fits(by_size(-most))))


def _limit(picture: Shown, lost: int, budget: Budget) -> int | None:
    assert picture.detail is not None
    pixels = needed_pixels(picture.width, picture.height, picture.detail, lost)
    return None if pixels is None else max(pixels, budget.low)


def _first(low: int, high: int, good: Callable[[int], bool]) -> int:
    """The first number above `low` that is good, or `high`."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle, high)
    return high


# ------------------------------------------------------------------------------------------------------------ rows


def list_media(sample: Sample) -> list[Media]:
    """All media of a sample, in order."""
    if isinstance(sample, ChatSample):
        return [p for t in sample.turns for p in t.parts if isinstance(p, Media)]
    return list(sample.query.media) + [m for d in sample.documents for m in d.content.media]


def allot_pixels(sample: Sample, budget: Budget, look: Callable[[Media], Shown | None]) -> tuple[int | None, ...]:
    """What each medium of `list_media` gets: those of a conversation, of a query, of a document share the total.

    Args:
        look: at a medium; None: it cannot be used, and those shown with it get nothing either.
    """
    if isinstance(sample, ChatSample):
        return _allot(list_media(sample), budget, look)
    contents = (sample.query, *(d.content for d in sample.documents))
    return tuple(pixels for content in contents for pixels in _allot(content.media, budget, look))


def _allot(media: Sequence[Media], budget: Budget, look: Callable[[Media], Shown | None]) -> tuple[int | None, ...]:
    found = {one.shown: look(one) for one in media}
    kinds = {one.shown: one.kind for one in media}
    shares: dict[str, int | None] = {}
    pictures = {key: one for key, one in found.items() if kinds[key] == "image"}
    if budget.pictures and all(pictures.values()):
        listed = [one for one in pictures.values() if one is not None]
        shares |= zip(pictures, share_pixels(listed, budget), strict=True)
    for key, one in found.items():
        if kinds[key] == "video" and one is not None and one.detail and budget.frames_lost is not None:
            shares[key] = needed_pixels(one.width, one.height, one.detail, budget.frames_lost)
    return tuple(shares.get(one.shown) for one in media)


def with_pixels(sample: Sample, pixels: Sequence[int | None]) -> Sample:
    """The sample with what its media get, in the order of `list_media`."""
    if not any(pixels):
        return sample
    if isinstance(sample, RerankSample):
        rest = iter(pixels)

        def shown(content: Content) -> Content:
            return replace(content, media=tuple(replace(one, pixels=next(rest)) for one in content.media))

        query = shown(sample.query)
        documents = tuple(replace(d, content=shown(d.content)) for d in sample.documents)
        return replace(sample, query=query, documents=documents)
    known = {one.shown: share for one, share in zip(list_media(sample), pixels, strict=True)}

    def part(one):
        if isinstance(one, Box):
            return replace(one, media=part(one.media))
        return replace(one, pixels=known[one.shown]) if isinstance(one, Media) else one

    return replace(sample, turns=tuple(replace(t, parts=tuple(map(part, t.parts))) for t in sample.turns))
