"""Inside the process that reads videos: when each frame is shown, and the pixels of some of them.

In: requests of `decoder.py` over a pipe. Out: a `Timeline`, RGB frames, thumbnails, or what is wrong with the file.
Frames are known by their time stamps, as the packets of the file give them; a stream without time stamps (raw MJPEG,
H.264) is counted through at a rate. GIF, WebP and other animated pictures are Pillow's, so that transparency is put on
white as in pictures. PyAV is imported here and nowhere else, and never in the process that trains.
"""

from __future__ import annotations

import io
import math
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from PIL import Image, ImageSequence

from litchi.data.media import FORMATS, MAX_PIXELS, MediaError, to_rgb, what_it_is
from litchi.data.timeline import Packet, Timeline, build_timeline

# Named, because FFmpeg's playlists and filters would open other files and addresses.
CONTAINERS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,ogg,flv,asf,ivf,mxf,nut,yuv4mpegpipe,"
    "mjpeg,h264,hevc,m4v,obu,av1"
)
NO_TIMES = 0x0080  # FFmpeg's AVFMT_NOTIMESTAMPS
COVER = 0x0400  # its AV_DISPOSITION_ATTACHED_PIC: the cover of a song
JUMP_S = 1.0  # a keyframe so far ahead is sought instead of decoded up to
GIF_PAUSE_MS = 100  # of a frame that says none, as browsers show it
BEAT_S = 0.5

Beat = Callable[[], None]
Place = tuple[str | None, bytes | None]  # a file, or its bytes


# ---------------------------------------------------------------------------------------------------- time stamps


def scan(place: Place, start_s: float | None, end_s: float | None, rate: float | None, beat: Beat) -> Timeline:
    """Read when frames are shown, from packets, without decoding more than one.

    Args:
        start_s, end_s: the part that is wanted; only that part of the file is read.
        rate: frames per second of a file that does not say it.
    """
    if _is_picture(place):
        return _scan_pictures(place, start_s, end_s)
    with _opened(place) as container:
        stream = _video_stream(container)
        untimed, base, guess = bool(container.format.flags & NO_TIMES), stream.time_base, stream.guessed_rate
        origin = stream.start_time or 0
        # a float through its decimal: 0.1 s is a tenth
        first = None if untimed or not start_s else origin + math.floor(Fraction(str(start_s)) / base)
        last = None if untimed or end_s is None else origin + Fraction(str(end_s)) / base
        sought = first is not None and _seek(container, stream, first)
        packets, there = _read_packets(container, stream, last, beat)
        if sought and (not packets or (packets[0].time or 0) > (first or 0)):
            with _opened(place) as anew:
                packets, there = _read_packets(anew, _video_stream(anew), last, beat)
                sought = False
        counted = untimed or any(packet.time is None for packet in packets)
        if not counted and there is not None:
            if not sought and stream.frames > there:
                raise MediaError("truncated_video", f"its header promises {stream.frames} frames, {there} are there")
            _check_length(stream, packets, origin)
    size = _upright_size(place, first if sought else None)
    if not counted:
        return build_timeline(packets, base, origin, (start_s, end_s), size)
    spacing = 1 / Fraction(str(rate)) if rate else 1 / (guess or Fraction(25))
    numbered = [Packet(number, 1, True) for number in range(len(packets))]
    line = build_timeline(numbered, spacing, 0, (start_s, end_s), size)
    return replace(line, counted=True, note="no_frame_rate" if untimed and not rate else "")


def _read_packets(container, stream, last: Fraction | None, beat: Beat) -> tuple[list[Packet], int | None]:
    """The packets up to a time, and how many were there if the file ended before. Raises MediaError."""
    packets, there = [], 0
    for packet in container.demux(stream):
        beat()
        if packet.dts is None and packet.pts is None and not packet.size:
            break  # the end
        if packet.is_corrupt:
            where = "" if packet.pts is None else f" at {float(packet.pts * stream.time_base):.2f} s"
            raise MediaError("truncated_video", f"the file is cut off or damaged{where}")
        there += 1
        if packet.is_discard:  # cut away by an edit list
            continue
        packets.append(Packet(packet.pts, packet.duration or 0, packet.is_keyframe))
        order = packet.pts if packet.dts is None else packet.dts  # frames that follow are not shown before
        if last is not None and order is not None and order >= last:
            return packets, None
    return packets, there


def _check_length(stream, packets: Sequence[Packet], origin: int) -> None:
    """A file that ends before its header says so is cut off."""
    promised = stream.duration * stream.time_base if stream.duration else _read_clock(stream.metadata.get("DURATION"))
    if promised is None or not packets:
        return
    final = max(packets, key=lambda packet: packet.time or 0)
    there, slack = (final.time or 0) + final.length - origin, Fraction(1, 4) / stream.time_base + 2 * final.length
    if (there + slack) * stream.time_base < promised:
        found = f"its header promises {float(promised):.2f} s, {float(there * stream.time_base):.2f} s are there"
        raise MediaError("truncated_video", found)


def _read_clock(text: str | None) -> Fraction | None:
    """Seconds of a Matroska tag such as 00:01:02.500000000."""
    match = re.fullmatch(r"(\d+):(\d+):(\d+(?:\.\d+)?)", text or "")
    return None if match is None else int(match[1]) * 3600 + int(match[2]) * 60 + Fraction(match[3])


def _upright_size(place: Place, at: int | None) -> tuple[int, int]:
    """Width and height of an upright frame, from the first that is decoded."""
    with _opened(place) as container:
        stream = _video_stream(container)
        if at is not None:
            _seek(container, stream, at)
        for frame in _decoded(container, stream):
            size = frame.width, frame.height
            return size[::-1] if frame.rotation % 180 else size
    raise MediaError("empty_video", "no frame can be decoded")


# --------------------------------------------------------------------------------------------------------- frames


def read_frames(place: Place, line: Timeline, wanted: Sequence[int], beat: Beat) -> Iterator[np.ndarray]:
    """RGB frames, uint8 [height, width, 3], shown at some of the times of a timeline, in rising order."""
    if _is_picture(place):
        yield from _read_pictures(place, wanted)
        return
    yield from (_upright(frame, line) for frame in _shown(place, line, wanted, beat, gap_s=JUMP_S))


def _shown(place: Place, line: Timeline, wanted: Sequence[int], beat: Beat, *, gap_s: float) -> Iterator[Any]:
    """The frame shown at each of some times. Raises MediaError: frames end before.

    Args:
        gap_s: a keyframe so far ahead is sought instead of decoded up to.
    """
    done = 0
    for frame in () if line.counted else _sought(place, line, wanted, beat, gap_s / float(line.tick)):
        yield frame
        done += 1
    if done < len(wanted):  # a seek came out behind its goal, or the file cannot be sought in
        yield from _sought(place, line, wanted[done:], beat, None)


def _sought(place: Place, line: Timeline, wanted: Sequence[int], beat: Beat, gap: float | None) -> Iterator[Any]:
    """The same, with jumps to keyframes where that saves `gap` ticks (None: nowhere); ends early where one failed."""
    keys = np.array(line.keys, np.int64)

    def key_before(goal: int) -> int | None:
        number = int(np.searchsorted(keys, goal, "right")) - 1
        return int(keys[number]) if gap is not None and number >= 0 else None

    with _opened(place) as container:
        stream = _video_stream(container)
        left, last, jumped = list(wanted), None, key_before(wanted[0])
        if jumped is not None and not _seek(container, stream, jumped):
            return
        while left:
            for number, frame in enumerate(_decoded(container, stream)):
                beat()
                at = number if line.counted else frame.pts
                if at is None:
                    continue
                while left and left[0] < at:
                    if last is None and jumped is not None:
                        return
                    yield last or frame
                    left.pop(0)
                last = frame
                while left and left[0] == at:
                    yield frame
                    left.pop(0)
                if not left:
                    return
                ahead = key_before(left[0])
                if ahead is not None and gap is not None and ahead > at + gap:
                    jumped, last = ahead, None
                    if not _seek(container, stream, ahead):
                        return
                    break
            else:
                if gap is not None:
                    return
                where = f"{line.at(left[0]):.2f} s of {line.at(line.end):.2f} s"
                raise MediaError("truncated_video", f"its frames end before that at {where}")


def check_frames(place: Place, line: Timeline, beat: Beat) -> Iterator[Any]:
    """Decode every frame of a timeline, and give none. Raises MediaError."""
    if not _is_picture(place):  # whose frames have all been decoded for the timeline
        ends = [int(line.times[0]), int(line.times[-1])]
        yield from (frame for frame in _shown(place, line, ends, beat, gap_s=math.inf) if frame is None)


def read_thumbnails(place: Place, line: Timeline, side: int, beat: Beat) -> Iterator[tuple[int, np.ndarray]]:
    """(time, uint8 [side, side, 3]) of every frame, in one pass."""
    if _is_picture(place):
        times = line.times.tolist()
        for at, frame in zip(times, _read_pictures(place, times), strict=True):
            yield at, np.asarray(Image.fromarray(frame).resize((side, side), Image.Resampling.BOX))
        return
    with _opened(place) as container:
        stream = _video_stream(container)
        for number, frame in enumerate(_decoded(container, stream)):
            beat()
            at = number if line.counted else frame.pts
            if at is not None and line.times[0] <= at <= line.times[-1]:
                yield at, frame.to_ndarray(format="rgb24", width=side, height=side, interpolation="AREA")


def _upright(frame, line: Timeline) -> np.ndarray:
    quarters = round(frame.rotation / 90) % 4
    width, height = (line.height, line.width) if quarters % 2 else (line.width, line.height)
    rgb = frame.to_ndarray(format="rgb24", width=width, height=height)
    return np.ascontiguousarray(np.rot90(rgb, quarters))


# -------------------------------------------------------------------------------------------------------- FFmpeg's


def _opened(place: Place):
    import av

    path, data = place
    try:
        return av.open(
            path if data is None else io.BytesIO(data),
            options={"format_whitelist": CONTAINERS},
            metadata_errors="replace",
        )
    except (av.error.FFmpegError, ValueError) as error:
        said = what_it_is(_head(place), "video") or f"not a video that can be read: {_say(error)}"
        raise MediaError("unreadable_media", said) from None


def _video_stream(container):
    streams = [s for s in container.streams.video if not int(s.disposition) & COVER]
    if not streams:
        kinds = ", ".join(sorted({s.type for s in container.streams})) or "nothing"
        raise MediaError("no_video_stream", f"it holds {kinds} and no moving pictures")
    stream = streams[0]
    context = stream.codec_context
    if context is None:
        raise MediaError("unreadable_media", "its codec is not known")
    if context.width * context.height > MAX_PIXELS:
        raise MediaError("media_too_large", f"{context.width} x {context.height} pixels, {MAX_PIXELS} are allowed")
    context.thread_count = 1  # ranks and their workers share the cores, and memory stays what it is
    return stream


def _decoded(container, stream) -> Iterator[Any]:
    import av

    try:
        for frame in container.decode(stream):
            if frame.is_corrupt:
                raise MediaError("unreadable_media", f"damaged at {frame.time or 0:.2f} s")
            yield frame
    except av.error.FFmpegError as error:
        if isinstance(error, MemoryError):
            raise
        raise MediaError("unreadable_media", f"damaged: {_say(error)}") from None


def _seek(container, stream, at: int) -> bool:
    """Go to the keyframe before a time; False: the file cannot be sought in."""
    import av

    try:
        container.seek(at, stream=stream)
    except av.error.FFmpegError:
        return False
    return True


def _say(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def _head(place: Place) -> bytes:
    if place[1] is not None:
        return place[1][:512]
    with open(place[0] or "", "rb") as file:
        return file.read(512)


# -------------------------------------------------------------------------------------------------------- Pillow's


def _is_picture(place: Place) -> bool:
    head = _head(place)
    return head.startswith((b"GIF8", b"\x89PNG\r\n")) or (head.startswith(b"RIFF") and head[8:12] == b"WEBP")


def _frames_of(place: Place) -> Iterator[tuple[Image.Image, int]]:
    """Each frame of an animated picture, composed, with the milliseconds it is shown."""
    try:
        with Image.open((place[0] or "") if place[1] is None else io.BytesIO(place[1]), formats=FORMATS) as image:
            if image.size[0] * image.size[1] > MAX_PIXELS:
                raise MediaError("media_too_large", f"{image.size[0]} x {image.size[1]} pixels")
            for frame in ImageSequence.Iterator(image):
                frame.load()
                yield frame, round(frame.info.get("duration") or 0) or GIF_PAUSE_MS
    except (MediaError, MemoryError):
        raise
    except Exception as error:  # Pillow's decoders raise a dozen kinds on damaged files
        raise MediaError("unreadable_media", str(error) or type(error).__name__) from None


def _scan_pictures(place: Place, start_s: float | None, end_s: float | None) -> Timeline:
    packets, at, size = [], 0, (0, 0)
    for frame, length in _frames_of(place):
        packets.append(Packet(at, length, True))
        at, size = at + length, frame.size
    return build_timeline(packets, Fraction(1, 1000), 0, (start_s, end_s), size)


def _read_pictures(place: Place, wanted: Sequence[int]) -> Iterator[np.ndarray]:
    left, at = set(wanted), 0
    for frame, length in _frames_of(place):
        if at in left:
            yield np.array(to_rgb(frame, None))
        at += length


# ------------------------------------------------------------------------------------------------------ the process


def serve(descriptor: int, memory_bytes: int) -> None:
    """Answer requests until the other end is gone, within so much memory more than the process begins with."""
    connection = Connection(descriptor)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # they are for the run, which ends its step first
    import av  # noqa: F401

    _limit_memory(memory_bytes)
    said = time.monotonic()

    def beat() -> None:
        nonlocal said
        if time.monotonic() - said > BEAT_S:
            said = time.monotonic()
            connection.send(("beat",))

    verbs: dict[str, Callable[..., Iterable[Any]]] = {
        "scan": lambda place, start_s, end_s, rate: [scan(place, start_s, end_s, rate, beat)],
        "frames": lambda place, line, wanted: read_frames(place, line, wanted, beat),
        "check": lambda place, line: check_frames(place, line, beat),
        "thumbnails": lambda place, line, side: read_thumbnails(place, line, side, beat),
    }
    while True:
        try:
            verb, *request = connection.recv()
            try:
                for item in verbs[verb](*request):
                    connection.send(("item", item))
                connection.send(("end",))
            except MediaError as error:
                connection.send(("error", error.code, error.reason))
            except MemoryError:
                connection.send(("error", "media_too_large", f"to decode it takes over {memory_bytes >> 20} MiB"))
            except Exception as error:
                connection.send(("error", "unreadable_media", f"{type(error).__name__}: {error}"))
        except (EOFError, OSError):
            return


def _limit_memory(memory_bytes: int) -> None:
    import resource

    with suppress(OSError, ValueError), open("/proc/self/statm", encoding="ascii") as file:  # elsewhere: no limit
        now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + memory_bytes, now + memory_bytes))
