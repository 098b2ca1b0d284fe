"""Look at every picture once and remember what was found, so that a bad one is named before a run starts.

In: the media of a data set. Out: a `Verdict` for each. Verdicts are kept in an SQLite file and found again by path,
size and time of change, so a second look at half a million pictures costs one `stat` each.

Several processes may check at the same time, each its own slice. The cache is only a cache: when it cannot be read
or written, the pictures are looked at again and a warning says why.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import astuple, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import PIL

from litchi.data.detail import RULE, Detail, measure_detail, measure_frames
from litchi.data.media import RULES, Header, MediaError, decode_image, file_stamp, media_paths, read_header
from litchi.data.orphans import end_with_parent
from litchi.data.video import check_video, read_video_header, sample_frames
from litchi.errors import MachineError
from litchi.types import Media

log = logging.getLogger(__name__)

LOOK_CHUNK = 64  # pictures per task of a worker and per write: what a killed check has to do again
READ_CHUNK = 20_000  # keys per query
LOCK_TIMEOUT_S = 60
PASSING = {"decoder_hung", "decoder_died"}  # which may be another matter the next time

Window = tuple[float, float] | None
Stamp = tuple[int, int]  # bytes, time of change in ns

_CREATE = """CREATE TABLE IF NOT EXISTS seen (
    key TEXT, rules TEXT, bytes INTEGER, changed_ns INTEGER, decoded INTEGER, width INTEGER, height INTEGER,
    frames INTEGER, code TEXT, reason TEXT, seconds REAL, note TEXT, detail TEXT, PRIMARY KEY (key, rules))"""
_SELECT = """SELECT key, bytes, changed_ns, decoded, width, height, frames, code, reason, seconds, note, detail
    FROM seen WHERE key IN (SELECT value FROM json_each(?)) AND rules = ?"""
# A process that read headers only does not undo the decoding of another.
_INSERT = """INSERT INTO seen VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (key, rules) DO UPDATE SET
    bytes = excluded.bytes, changed_ns = excluded.changed_ns, decoded = excluded.decoded, width = excluded.width,
    height = excluded.height, frames = excluded.frames, code = excluded.code, reason = excluded.reason,
    seconds = excluded.seconds, note = excluded.note, detail = excluded.detail
    WHERE excluded.decoded >= decoded OR excluded.bytes <> bytes OR excluded.changed_ns <> changed_ns"""


@dataclass(frozen=True)
class Verdict:
    """What a look at a picture found: its header, or (`code` not None) why it cannot be used, as in `MediaError`.

    `detail` as in `data/detail.py`, where it was asked for; of a region there is none.
    """

    width: int = 0
    height: int = 0
    frames: int = 0
    code: str | None = None
    reason: str | None = None
    seconds: float = 0.0
    note: str = ""
    detail: Detail = ()

    @property
    def header(self) -> Header:
        """The header of a usable picture."""
        assert self.code is None, "an unusable picture has no header"
        return Header(self.width, self.height, self.frames, self.seconds, self.note)


def cache_root() -> Path:
    """Return the folder caches live in: $LITCHI_CACHE, else ~/.cache/litchi."""
    return Path(os.environ.get("LITCHI_CACHE") or "~/.cache/litchi").expanduser()


def check_media(
    media: Iterable[Media],
    *,
    decode: bool,
    workers: int = 0,
    cache: Path | None = None,
    window: Window = None,
    detail: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Verdict]:
    """Give a verdict on every picture, looking only at those that are new or changed.

    Args:
        media: may repeat; each key is looked at once.
        decode: look at every pixel. False: at headers, which misses most damage.
        workers: processes to decode in; 0 or 1: this one.
        cache: the file verdicts are kept in (made when missing; see `cache_root`), None: remember nothing.
        window: as in `decode_image`; each window has verdicts of its own, since it decides what is readable.
        detail: also measure what is lost of each when it is made smaller, for which pictures and a few frames of
            videos are decoded.
        progress: called with (looked at or remembered, total).

    Returns: verdicts by `Media.key`, in the order in which the keys came. Raises MachineError when a worker dies.
    """
    distinct = {one.key: one for one in media}
    stamps = {key: stamp for key, one in distinct.items() if (stamp := _stamp(one)) is not None}
    libraries = f"pillow {PIL.__version__}, av {version('av')}"
    rules = f"{RULES}, {libraries}, window {window}"  # what verdicts depend on beside the file
    rules += f", detail {RULE}" if detail else ""
    found = {} if cache is None else _recall(cache, stamps, rules, decode)
    report = progress or (lambda done, total: None)
    report(len(found), len(distinct))
    unseen = [one for key, one in distinct.items() if key not in found]
    for fresh in _look_at(unseen, partial(_look, decode=decode, window=window, detail=detail), workers):
        if cache is not None:
            _remember(cache, fresh, stamps, rules, decode)
        found |= fresh
        report(len(found), len(distinct))
    return {key: found[key] for key in distinct}


def _stamp(media: Media) -> Stamp | None:
    """Return what tells that a picture is unchanged; None: its verdict is not remembered."""
    if media.data is not None:
        return len(media.data), 0  # the key is a hash of the bytes
    stamps = [file_stamp(path) for path in media_paths(media)]
    if (-1, -1) in stamps:
        return None
    return sum(size for size, _ in stamps), max(changed for _, changed in stamps)


# ---------------------------------------------------------------- looking


def _look(media: Media, *, decode: bool, window: Window, detail: bool) -> Verdict:
    found: Detail = ()
    try:
        if media.kind == "image":
            header = read_header(media)
            if (decode or detail) and media.region is None:  # a region's picture stands beside it, and is looked at
                rgb = decode_image(media, window=window)
                found = measure_detail(rgb) if detail else ()
        else:
            header = read_video_header(media)
            if decode:
                check_video(media)
            if detail:
                found = measure_frames(sample_frames(media))
    except MediaError as error:
        inside = f"{error.name}: " if error.name != media.name else ""  # a frame of a list
        return Verdict(code=error.code, reason=inside + error.reason)
    return Verdict(header.width, header.height, header.frames, None, None, header.seconds, header.note, found)


def _look_at(media: Sequence[Media], look: Callable[[Media], Verdict], workers: int) -> Iterator[dict[str, Verdict]]:
    """Yield verdicts by chunks, in any order."""
    chunks = [media[i : i + LOOK_CHUNK] for i in range(0, len(media), LOOK_CHUNK)]
    if workers <= 1 or len(chunks) <= 1:
        yield from (_look_at_chunk(chunk, look) for chunk in chunks)
        return
    # forked: nothing is imported again, and neither threads nor database connections are open here
    pool = ProcessPoolExecutor(
        min(workers, len(chunks)),
        mp_context=multiprocessing.get_context("fork"),
        initializer=end_with_parent,
        initargs=(os.getpid(),),
    )
    try:
        for done in as_completed([pool.submit(_look_at_chunk, chunk, look) for chunk in chunks]):
            yield done.result()
    except BrokenProcessPool:
        raise MachineError(
            "a process that decodes pictures died",
            why="out of memory, or a crash in a decoder",
            remedy="Lower data.workers; with 1 the log ends at the picture.",
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _look_at_chunk(media: Sequence[Media], look: Callable[[Media], Verdict]) -> dict[str, Verdict]:
    return {one.key: look(one) for one in media}


# ---------------------------------------------------------------- remembering


def _connect(file: Path) -> sqlite3.Connection:
    """Open the cache. The rollback journal stays: a write-ahead log needs memory shared by all who write, which home
    folders on a network do not have."""
    file.parent.mkdir(parents=True, exist_ok=True)
    database = sqlite3.connect(file, timeout=LOCK_TIMEOUT_S, isolation_level="IMMEDIATE")
    database.execute(_CREATE)
    return database


def _recall(file: Path, stamps: Mapping[str, Stamp], rules: str, decode: bool) -> dict[str, Verdict]:
    """Find the verdicts on unchanged pictures. One on damage holds for both depths of looking."""
    found: dict[str, Verdict] = {}
    keys = list(stamps)
    try:
        with closing(_connect(file)) as database:
            for i in range(0, len(keys), READ_CHUNK):
                rows = database.execute(_SELECT, (json.dumps(keys[i : i + READ_CHUNK]), rules))
                for key, size, changed_ns, decoded, *verdict, detail in rows:
                    seen = replace(Verdict(*verdict), detail=tuple(json.loads(detail)))
                    if (size, changed_ns) == stamps[key] and (decoded or not decode or seen.code is not None):
                        found[key] = seen
    except (sqlite3.Error, OSError) as error:
        log.warning("the cache of checked pictures %s cannot be read (%s): pictures are looked at again", file, error)
    return found


def _remember(file: Path, fresh: Mapping[str, Verdict], stamps: Mapping[str, Stamp], rules: str, decode: bool) -> None:
    """Write verdicts down, but for those of the moment, and on files that could not be opened."""
    rows = [
        (key, rules, *stamps[key], int(decode), *astuple(verdict)[:-1], json.dumps(verdict.detail))
        for key, verdict in fresh.items()
        if key in stamps and verdict.code not in {"media_missing", *PASSING}
    ]
    try:
        with closing(_connect(file)) as database, database:
            database.executemany(_INSERT, rows)
    except (sqlite3.Error, OSError) as error:
        log.warning("the cache of checked pictures %s cannot be written (%s)", file, error)
