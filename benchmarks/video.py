"""Memory and time of `litchi video analyze` on generated clips of 10 and 60 minutes, on one process and on two.

    python benchmarks/video.py [--target builtin:tiny] [--minutes 10 60] [--segment 300] [--pairs 3]

Prints for each clip its bytes, the wall time and the peak of resident memory of all processes together; then so many
times what two independent runs at once take for the segments of the first clip, and what one run of two processes
takes: where that is half, two processes reach 1.00 of two independent ones. Alternating, because a machine's speed
changes; nothing else should run on its two cores meanwhile.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import av
import numpy as np
import psutil

RATE, SIZE = 5, (320, 240)


def write_clip(path: Path, minutes: int) -> None:
    """A square that drifts over a background which changes every 40 s."""
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=RATE, options={"preset": "ultrafast", "g": "50"})
        stream.width, stream.height, stream.pix_fmt = *SIZE, "yuv420p"
        rgb = np.zeros((SIZE[1], SIZE[0], 3), np.uint8)
        for number in range(minutes * 60 * RATE):
            scene = number // (40 * RATE)
            rgb[:] = (60 + 37 * scene % 180, 60 + 91 * scene % 180, 60 + 53 * scene % 180)
            left = number // 4 % (SIZE[0] - 60)
            rgb[90:150, left : left + 60] = (250, 220, 0)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(rgb, format="rgb24")))
        out.mux(stream.encode(None))


def start(words: list[str]) -> psutil.Popen:
    program = [sys.executable, "-m", "litchi", "video", "analyze", *words]
    return psutil.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def watch(running: list[psutil.Popen]) -> tuple[float, float, list[float]]:
    """Seconds until all have ended, the most they held together, in MiB (what they share counted for each), and the
    seconds each took for its segments."""
    began, peak = time.monotonic(), 0
    while any(one.poll() is None for one in running):
        held = 0
        for one in running:
            try:
                held += sum(p.memory_info().rss for p in (one, *one.children(recursive=True)))
            except psutil.Error:  # ended meanwhile
                continue
        peak = max(peak, held)
        time.sleep(0.05)
    said = [one.stderr.read() for one in running]
    if any(one.returncode for one in running):
        sys.exit("\n".join(said))
    spent = [float(re.findall(r"answered in ([\d.]+) s", text)[0]) for text in said]
    return time.monotonic() - began, peak / 2**20, spent


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--target", default="builtin:tiny")
    asked.add_argument("--minutes", type=int, nargs="+", default=[10, 60])
    asked.add_argument("--segment", default="300")
    asked.add_argument("--pairs", type=int, default=3, help="0: memory alone")
    asked.add_argument("words", nargs="*", help="settings, key=value")
    given = asked.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        clips = [Path(folder) / f"{minutes}.mp4" for minutes in given.minutes]
        for path, minutes in zip(clips, given.minutes, strict=True):
            write_clip(path, minutes)
        words = ["--question", "What is there?", "--target", given.target, "--segment", given.segment, *given.words]
        for path, minutes in zip(clips, given.minutes, strict=True):
            seconds, held, (spent,) = watch([start([str(path), *words])])
            size = f"{minutes} min, {path.stat().st_size >> 10:,} KiB"
            print(f"{size}: {seconds:.1f} s, segments {spent:.1f} s, {held:,.0f} MiB", flush=True)
        reached = []
        for _ in range(given.pairs):
            alone = max(watch([start([str(clips[0]), *words]) for _ in range(2)])[2])
            _, held, (both,) = watch([start([str(clips[0]), *words, "--procs", "2"])])
            reached.append(alone / 2 / both)
            print(
                f"two at once {alone:.1f} s, two processes {both:.1f} s, {held:,.0f} MiB: {reached[-1]:.2f}", flush=True
            )
        if reached:
            print(f"two processes reach {statistics.median(reached):.2f} of two independent ones (median)")


if __name__ == "__main__":
    main()
