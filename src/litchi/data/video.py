"""Videos as all others see them: header, size in tokens, patches. Files are read by `decoder.py`, in its own process.

In: a `Media` of a video: a file, its bytes, a folder of frames or a list of them. Out, in this order: its `Header`,
how many of its frames are taken and how large they are (from the header alone), and their patches. Raises MediaError.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache

import numpy as np

from litchi.data.decoder import own_decoder
from litchi.data.media import (
    Header,
    MediaError,
    check_size,
    cut_patches,
    decode_image,
    file_stamp,
    fit_size,
    media_paths,
    open_media,
    read_header,
    resize_picture,
)
from litchi.data.timeline import Packet, Timeline, build_timeline, count_frames, pick_frames
from litchi.types import Media, VisionSpec

SAMPLED = 4  # frames that are looked at for their detail
LIST_FPS = 2.0  # of frames whose row does not say it, as the family assumes
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".avif", ".jp2")

# width, height, frames that are taken, seconds they stand for, and `Media.pixels` where it is set
Size = tuple[int, int, int, float] | tuple[int, int, int, float, int]
Grid = tuple[int, int, int]


# --------------------------------------------------------------------------------------------------------- header


def read_video_header(media: Media) -> Header:
    """Size, frames and seconds of a video or its part, without decoding more than a frame. Raises MediaError."""
    line = _timeline(media)
    return Header(line.width, line.height, len(line.times), float(line.seconds), line.note)


def check_video(media: Media) -> None:
    """Decode all frames of a video or its part. Raises MediaError."""
    line = _timeline(media)
    frames = list_frames(media)
    if frames is None:
        own_decoder().check(media, line)
        return
    for _ in _decode_list(frames, line, range(len(line.times))):
        pass


def video_times(media: Media) -> tuple[list[float], float]:
    """When the frames of a video or its part are shown, and until when the last is, in seconds. Raises MediaError."""
    line = _timeline(media)
    return [line.at(tick) for tick in line.times.tolist()], line.at(line.end)


def _timeline(media: Media) -> Timeline:
    if media.data is not None:  # not remembered: that would hold the bytes of files
        return _scan(media)
    return _scanned(media, tuple(file_stamp(path) for path in media_paths(media)))


@lru_cache(maxsize=64)
def _scanned(media: Media, stamps: tuple[tuple[int, int], ...]) -> Timeline:
    return _scan(media)


def _scan(media: Media) -> Timeline:
    frames = list_frames(media)
    if frames is None:
        open_media(media)
        line = own_decoder().scan(media)
    else:
        first = read_header(Media("image", frames[0]))
        packets = [Packet(number, 1, True) for number in range(len(frames))]
        spacing = 1 / Fraction(str(media.fps or LIST_FPS))
        try:
            line = build_timeline(packets, spacing, 0, (media.start_s, media.end_s), (first.width, first.height))
        except MediaError as error:
            raise MediaError(error.code, error.reason, name=media.name) from None
        line = Timeline(
            line.width, line.height, line.times, spacing, line.end, note="" if media.fps else "no_frame_rate"
        )
    try:
        check_size(line.height, line.width)
    except MediaError as error:
        raise MediaError(error.code, error.reason, name=media.name) from None
    return line


def list_frames(media: Media) -> tuple[str, ...] | None:
    """The pictures a video consists of, those of a folder by name, numbers in names as numbers; None: it is a file."""
    if media.frames or media.path is None or not os.path.isdir(media.path):
        return media.frames or None
    names = [name for name in os.listdir(media.path) if name.lower().endswith(PICTURES) and not name.startswith(".")]
    if not names:
        raise MediaError("empty_video", f"a folder without pictures ({', '.join(PICTURES)})", name=media.name)
    parts = {name: [(int(p), "") if p.isdecimal() else (-1, p) for p in re.split(r"(\d+)", name)] for name in names}
    return tuple(os.path.join(media.path, name) for name in sorted(names, key=lambda name: (parts[name], name)))


# ------------------------------------------------------------------------------------------------- size in tokens


def video_size(media: Media, header: Header, spec: VisionSpec) -> Size:
    """What a video's grid follows from. All frames are taken of a list, up to the most there may be."""
    listed = bool(media.frames) or (media.path is not None and os.path.isdir(media.path))
    if listed and media.nframes is None:
        count = min(header.frames, spec.video.max_frames)
    else:
        count = count_frames(header.frames, header.seconds, spec.video, fps=media.fps, wanted=media.nframes)
    return header.width, header.height, count, header.seconds


def fit_video(size: Size, spec: VisionSpec) -> Grid:
    """The grid of a video: frames that make one patch in time count once. Raises MediaError: extreme aspect."""
    width, height, count, _, *most = size
    low, video = spec.video.min_pixels, spec.video
    padded = -(-count // spec.temporal) * spec.temporal
    high = max(min(video.max_pixels, video.total_pixels / padded * spec.temporal, *most), int(low * 1.05))
    h, w = fit_size(height, width, factor=spec.factor, min_pixels=low, max_pixels=high)
    return padded // spec.temporal, h // spec.patch, w // spec.patch


def step_of(size: Size, spec: VisionSpec) -> float:
    """Seconds from one frame of the grid to the next, by the frames that are really taken."""
    _, _, count, seconds, *_ = size
    return spec.temporal * seconds / count


# -------------------------------------------------------------------------------------------------------- patches


def video_patches(media: Media, *, spec: VisionSpec) -> tuple[np.ndarray, Grid]:
    """Take frames of a video, resize them and cut them into patches.

    Returns: uint8 [P, 3 * temporal * patch^2], channels first, then frames, and the grid (frames, rows, columns); the
    last frame is repeated where a patch in time lacks one. Raises MediaError.
    """
    size = video_size(media, read_video_header(media), spec)
    t, h, w = fit_video(size if media.pixels is None else (*size[:4], media.pixels), spec)
    out = np.empty((t, h * w, 3, spec.temporal, spec.patch**2), np.uint8)
    number = 0
    for rgb in _taken(media, size[2]):
        patches = cut_patches(resize_picture(rgb, (h * spec.patch, w * spec.patch)), spec)
        out[number // spec.temporal, :, :, number % spec.temporal] = patches.reshape(h * w, 3, -1)
        number += 1
    for missing in range(number, t * spec.temporal):
        out[-1, :, :, missing % spec.temporal] = out[-1, :, :, (number - 1) % spec.temporal]
    return out.reshape(t * h * w, -1), (t, h, w)


def sample_frames(media: Media) -> Iterator[np.ndarray]:
    """A few RGB frames, spread over a video or its part, to know its detail by. Raises MediaError."""
    return _taken(media, min(SAMPLED, len(_timeline(media).times)))


def _taken(media: Media, count: int) -> Iterator[np.ndarray]:
    """RGB frames of a video, so many, in order."""
    line = _timeline(media)
    numbers = pick_frames(line.times, count).tolist()
    distinct = sorted(set(numbers))
    frames = list_frames(media)
    if frames is None:
        found = own_decoder().frames(media, line, line.times[distinct].tolist())
    else:
        found = _decode_list(frames, line, distinct)
    for number, rgb in zip(distinct, found, strict=True):
        for _ in range(numbers.count(number)):
            yield rgb


def _decode_list(frames: tuple[str, ...], line: Timeline, numbers) -> Iterator[np.ndarray]:
    for number in numbers:
        path = frames[int(line.times[number])]
        rgb = decode_image(Media("image", path))
        if rgb.shape[:2] != (line.height, line.width):
            found = f"{rgb.shape[1]} x {rgb.shape[0]} pixels, the first of its video has {line.width} x {line.height}"
            raise MediaError("unreadable_media", found, name=path)
        yield rgb
