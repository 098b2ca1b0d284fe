"""The pictures of a micro-batch: their grids, their patches, and which of them need no decoding.

Examples -> the distinct pictures this rank is to bring -> features where a store has them, patches of the others.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from litchi.batch.balance import share_pictures
from litchi.batch.rows import fit_grid, size_of, with_step
from litchi.data.features import Entry, FeatureStore, PictureName, stamp_of
from litchi.data.media import decode_image, picture_patches, read_header
from litchi.data.render import Renderer
from litchi.data.video import read_video_header, video_patches
from litchi.errors import DataError
from litchi.types import Example, Media, PlacedMedia, Source, VisionSpec

Share = tuple[int, int]  # of the pictures of a batch: which of how many shares; (0, 0) is none
ALL: Share = (0, 1)
Brought = Sequence[tuple[PlacedMedia, Source]]


@contextmanager
def naming(source: Source) -> Iterator[None]:
    """Put the row into an error that does not know it."""
    try:
        yield
    except DataError as error:
        raise DataError(error.what, where=error.where or source, why=error.why, remedy=error.remedy) from error


def media_grid(media: Media, renderer: Renderer, spec: VisionSpec | None = None):
    """Grid of a picture or video from its header, under the renderer's budget or another: as `GridOf` gives it."""
    spec = spec or renderer.processor.vision
    header = read_header(media) if media.kind == "image" else read_video_header(media)
    size = size_of(media, header, spec)
    return with_step(fit_grid(size, spec), size, spec)


def list_pictures(examples: Sequence[Example], share: Share = ALL) -> Brought:
    """The distinct pictures of some examples, or a share of them, in order; each with the row it was first met in."""
    distinct: dict[str, tuple[PlacedMedia, Source]] = {}
    for example in examples:
        for placed in example.media:
            distinct.setdefault(placed.media.key, (placed, example.source))
    which, shares = share
    pictures = list(distinct.values())
    if shares == 1:
        return pictures
    return [pictures[n] for n in share_pictures([p.grid for p, _ in pictures], shares)[which]] if shares else []


@dataclass(frozen=True)
class Kept:
    """What a store says of the pictures a rank brings.

    Args:
        features: of those that are kept, [N, hidden]; None: of none.
        flags: of each picture, whether it is kept.
        names: of the others, in order, what their features are to be kept under.
        keys: of the pictures that are kept.
        data: of the others, by key, the bytes that had to be read.
    """

    features: Tensor | None = None
    flags: tuple[bool, ...] = ()
    names: tuple[PictureName, ...] = ()
    keys: frozenset[str] = frozenset()
    data: dict[str, bytes] = field(default_factory=dict)


NOTHING = Kept()


def find_features(pictures: Brought, store: FeatureStore | None) -> Kept:
    """Read the features that a store has of some pictures. Raises DataError where a picture's file cannot be read."""
    if store is None or not pictures:
        return NOTHING
    found = [store.find_media(placed.media, placed.grid) for placed, _ in pictures]
    if None not in found:
        features, bad = store.read(found)  # type: ignore[arg-type]
        if not bad:
            return Kept(features, (True,) * len(found), (), frozenset(p.media.key for p, _ in pictures))
    return _sort_out(pictures, store)


def _sort_out(pictures: Brought, store: FeatureStore) -> Kept:
    """Some are kept and some are not."""
    known, kept = look_up(pictures, store)
    features, bad = store.read(list(known.values())) if known else (None, [])
    return _sort_out(pictures, store) if bad else replace(kept, features=features)  # the bad are not found again


def look_up(pictures: Brought, store: FeatureStore) -> tuple[dict[str, Entry], Kept]:
    """Where the features of some pictures lie, by key, and all but these features themselves."""
    store.refresh()
    known: dict[str, Entry] = {}
    names: dict[str, PictureName] = {}
    data: dict[str, bytes] = {}
    for placed, source in pictures:
        key, entry = placed.media.key, store.find_media(placed.media, placed.grid)
        if entry is None:
            with naming(source):
                names[key], read = store.name_bytes(placed.media, placed.grid)
            entry = store.find(names[key])  # the same bytes under another path or time
            if entry is None and read is not None:
                data[key] = read
        if entry is not None:
            known[key] = entry
    flags = tuple(placed.media.key in known for placed, _ in pictures)
    rest = tuple(names[p.media.key] for (p, _), kept in zip(pictures, flags, strict=True) if not kept)
    return known, Kept(None, flags, rest, frozenset(known), data)


def load_patches(
    examples: Sequence[Example],
    renderer: Renderer,
    share: Share = ALL,
    spec: VisionSpec | None = None,
    kept: Kept = NOTHING,
) -> dict[str, np.ndarray]:
    """Decode each distinct picture of some examples once, or a share of them, but for those that are kept.

    Args:
        spec: as in `media_grid`.

    Returns:
        By key: uint8 [P, 3 * patch^2], of a video [P, 3 * temporal * patch^2].

    Raises:
        DataError: a picture cannot be read, or is not what it was; it names the row and the file.
    """
    return decode_pictures(list_pictures(examples, share), renderer, spec, kept)


class RecentPatches:
    """Patches of the pictures a process decoded last, up to so many bytes. A picture that several micro-batches of a
    step show, or one of a small catalogue, is decoded once."""

    def __init__(self, limit_bytes: int):
        self.limit_bytes, self.held_bytes = limit_bytes, 0
        self.held: dict[Hashable, np.ndarray] = {}  # what was used last stands last

    def find(self, key: Hashable) -> np.ndarray | None:
        """Patches that are still held."""
        if (found := self.held.pop(key, None)) is not None:
            self.held[key] = found
        return found

    def add(self, key: Hashable, patches: np.ndarray) -> None:
        """Hold patches; those that were met longest ago make room."""
        self.held[key] = patches
        self.held_bytes += patches.nbytes
        while self.held_bytes > self.limit_bytes:
            self.held_bytes -= self.held.pop(next(iter(self.held))).nbytes

    def clear(self) -> None:
        """Let go of all."""
        self.held, self.held_bytes = {}, 0


recent = RecentPatches(2**26)


def decode_pictures(
    pictures: Brought, renderer: Renderer, spec: VisionSpec | None, kept: Kept
) -> dict[str, np.ndarray]:
    """Decode pictures but for those that are kept; as `load_patches`."""
    patches: dict[str, np.ndarray] = {}
    spec = spec or renderer.processor.vision
    for placed, source in pictures:
        key = placed.media.key
        if key in kept.keys:
            continue
        known = (key, stamp_of(placed.media), placed.grid, renderer.window, spec.patch, spec.video)
        if (found := recent.find(known)) is None:
            with naming(source):
                if placed.media.kind == "video":
                    read = video_patches if renderer.frames is None else renderer.frames.patches
                    found, grid = read(placed.media, spec=spec)
                else:
                    rgb = decode_image(placed.media, window=renderer.window, data=kept.data.get(key))
                    found, grid = picture_patches(rgb, spec=spec, pixels=placed.media.pixels)
            if grid != placed.grid:
                raise DataError(
                    f"{placed.media.name} changed while the run was reading it", where=source,
                    remedy="Start the run again",
                )  # fmt: skip
            recent.add(known, found)
        patches[key] = found
    return patches
