"""Clips for tests: frames of one colour each, so that a decoded frame tells which one it was."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

STEP = 12  # levels from one frame's red to the next's, above what a lossy codec changes


def frame(number: int, size=(64, 48), step: int = STEP) -> np.ndarray:
    """Frame `number`: its red counts the frames, blue stands in the left half, so that a turn shows."""
    rgb = np.zeros((size[1], size[0], 3), np.uint8)
    rgb[..., 0] = number * step % 256
    rgb[:, : size[0] // 2, 2] = 255
    return rgb


def number_of(rgb: np.ndarray, step: int = STEP) -> int:
    """Which frame was decoded, by its red on the right, where nothing else is."""
    return round(float(rgb[4:-4, -12:-4, 0].mean()) / step)


def write_clip(path: Path, frames, *, rate=10, codec="libx264", times=None, turn=0, tick=None, **options) -> str:
    """Encode frames (how many of `frame`, or arrays); `times` in ticks of `tick` seconds instead of a rate."""
    frames = [frame(n) for n in range(frames)] if isinstance(frames, int) else frames
    with av.open(str(path), "w", options={k: v for k, v in options.items() if k == "movflags"}) as out:
        stream = out.add_stream(codec, rate=rate, options={k: v for k, v in options.items() if k != "movflags"})
        stream.height, stream.width = frames[0].shape[:2]
        stream.bit_rate = 4_000_000
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        if tick is not None:
            stream.codec_context.time_base = stream.time_base = Fraction(tick)
        if turn:
            stream.set_display_rotation(turn)
        for number, rgb in enumerate(frames):
            one = av.VideoFrame.from_ndarray(rgb, format="rgb24")
            if times is not None:
                one.pts, one.time_base = times[number], Fraction(tick)
            out.mux(stream.encode(one))
        out.mux(stream.encode(None))
    return str(path)


def write_animation(path: Path, frames: int, *, pause_ms=100, size=(64, 48)) -> str:
    """A GIF or an animated WebP."""
    pictures = [Image.fromarray(frame(n, size)) for n in range(frames)]
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=pause_ms, loop=0, lossless=True)
    return str(path)


def write_sound(path: Path) -> str:
    """A file of one tone, without pictures."""
    with av.open(str(path), "w") as out:
        stream = out.add_stream("aac", rate=8000, layout="mono")
        tone = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), format="fltp", layout="mono")
        tone.sample_rate, tone.pts = 8000, 0
        out.mux(stream.encode(tone))
        out.mux(stream.encode(None))
    return str(path)


def cut_file(path: str, share: float) -> str:
    """The first part of a file, as an interrupted download leaves it."""
    data = Path(path).read_bytes()
    cut = Path(path).with_stem(Path(path).stem + "-cut")
    cut.write_bytes(data[: int(len(data) * share)])
    return str(cut)
