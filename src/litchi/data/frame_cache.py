"""Frames of videos on disk, decoded, resized and cut into patches, so that the next epoch reads instead of decoding.

Media -> patches, from the folder or decoded and put there. An entry is a file of its own, named by what the patches
follow from: the file (path, size, time of change) or its bytes, the part and rate that are meant, the budgets, and the
libraries that decode. It is written under another name and renamed, so it is there as a whole or not at all, and it
carries a checksum: a damaged one is decoded again. Beyond the budget those go first that were used longest ago. All
processes of all runs share a folder; patches are the same with and without it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import threading
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np

from litchi.data.features import NO_STAMP, SPARE_BYTES, stamp_of
from litchi.data.media import RULES
from litchi.data.video import Grid, video_patches
from litchi.types import Media, VisionSpec

log = logging.getLogger(__name__)

FORMAT = 1
HEAD = struct.Struct("<4I2Q")  # checksum of the rest, grid, rows and columns of the patches
SWEEPS = 32  # parts of the budget: so much a process adds before it looks at the whole folder again
STALE_S = 3600.0  # after which a file that was never renamed belongs to a process that was killed


@dataclass(frozen=True)
class FrameCache:
    """Where frames are kept, and how many bytes of them."""

    folder: Path
    limit_bytes: int

    def patches(self, media: Media, *, spec: VisionSpec) -> tuple[np.ndarray, Grid]:
        """As `video_patches`. Raises MediaError."""
        name = _name(media, spec)
        if name is None:
            return video_patches(media, spec=spec)
        path = self.folder / name[:2] / name
        found = _read(path)
        if found is None:
            found = video_patches(media, spec=spec)
            if _name(media, spec) == name:  # the file was not written to meanwhile
                self._keep(path, *found)
        return found

    def _keep(self, path: Path, patches: np.ndarray, grid: Grid) -> None:
        """Add an entry; on a full or read-only disk it is not added, which is said once."""
        if patches.nbytes > self.limit_bytes:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            disk = os.statvfs(path.parent)
            if disk.f_bavail * disk.f_frsize < patches.nbytes + SPARE_BYTES:
                raise OSError(f"less than {SPARE_BYTES / 2**30:.0f} GiB of the disk would be left free")
            _write(path, patches, grid)
            if _due(self, patches.nbytes):
                sweep(self.folder, self.limit_bytes)
        except OSError as error:
            if self.folder not in _refused:
                log.warning("frames cannot be kept in %s (%s): they are decoded each time", self.folder, error)
            _refused.add(self.folder)


def sweep(folder: Path, limit_bytes: int) -> None:
    """Remove what was used longest ago until the rest is within a budget. Other processes may do the same."""
    entries = []
    for path in folder.glob("??/*"):
        with suppress(FileNotFoundError):  # removed by another
            status = path.stat()
            if path.suffix:  # being written
                if time.time() - status.st_mtime > STALE_S:
                    path.unlink()
            else:
                entries.append(_Entry(status.st_mtime_ns, status.st_size, path))
    held = sum(entry.size for entry in entries)
    for entry in sorted(entries):
        if held <= limit_bytes:
            return
        entry.path.unlink(missing_ok=True)
        held -= entry.size


class _Entry(NamedTuple):
    used_ns: int
    size: int
    path: Path


def _name(media: Media, spec: VisionSpec) -> str | None:
    """What an entry is called; None: nothing tells whether the file is unchanged."""
    stamp = stamp_of(media)
    if stamp == NO_STAMP and media.data is None:
        return None
    cut = spec.patch, spec.temporal, spec.merge
    text = repr((FORMAT, RULES, _libraries(), media.key, stamp, spec.video, cut))
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:40]


@lru_cache(maxsize=1)
def _libraries() -> tuple[str, str]:
    return version("av"), version("pillow")


def _read(path: Path) -> tuple[np.ndarray, Grid] | None:
    """An entry; None: it is not there, or not sound, and then it is removed."""
    try:
        data = np.fromfile(path, np.uint8)
    except OSError:
        return None
    if len(data) >= HEAD.size:
        checksum, t, h, w, rows, width = HEAD.unpack_from(data.data)
        if len(data) == HEAD.size + rows * width and zlib.crc32(data[4:].data) == checksum:
            with suppress(OSError):  # a disk that can only be read from
                os.utime(path)  # it was used
            return data[HEAD.size :].reshape(rows, width), (t, h, w)
    log.warning("%s: kept frames are damaged; they are decoded again", path)
    with suppress(OSError):
        path.unlink(missing_ok=True)
    return None


def _write(path: Path, patches: np.ndarray, grid: Grid) -> None:
    head = HEAD.pack(0, *grid, *patches.shape)[4:]
    body = np.ascontiguousarray(patches).data.cast("B")
    checksum = struct.pack("<I", zlib.crc32(body, zlib.crc32(head)))
    part = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    try:
        with part.open("wb") as file:
            file.writelines((checksum, head, body))
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


_added: dict[tuple[int, Path], int] = {}  # by process: bytes since it last looked at a folder
_refused: set[Path] = set()  # folders in which nothing could be kept, which has been said


def _due(cache: FrameCache, size: int) -> bool:
    key = os.getpid(), cache.folder
    added = _added.get(key, cache.limit_bytes) + size
    due = added > cache.limit_bytes // SWEEPS
    _added[key] = 0 if due else added
    return due
