"""Features of pictures on disk: found by what a picture is, read back only when they are what was written.

Media + grid -> (is it there? -> its bytes), and (name, bytes) -> appended. A store is a folder: `00000.data` holds
features end to end, `00000.index` a record for each picture in it. Every process that computes features appends to
a pair of files of its own, which it holds locked while it lives; all processes of all runs read all pairs. The pages
of these files stay in the machine's memory as long as there is room, once for all processes.

A picture is known by the hash of its bytes; path, size and time of change stand for that hash, as they do for verdicts.
Each record and each picture's features carry a checksum. They are read, not mapped: a file that is cut off under a run
gives a short read, where a mapped one would end the process.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import logging
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from litchi.data.media import file_stamp, hash_media, media_paths, read_bytes
from litchi.types import Media

log = logging.getLogger(__name__)

Grid = tuple[int, int, int]

FORMAT = 1
SPARE_BYTES = 2**30  # of a disk, that a store leaves free
CHECKED = 76  # bytes of a record that its own checksum, the last field, is of
RECORD = np.dtype(
    [
        ("stamp", "V16"),
        ("content", "V32"),
        ("grid", "<u4", 3),
        ("offset", "<u8"),
        ("rows", "<u4"),
        ("sum", "<u4"),
        ("own", "<u4"),
    ]
)
NO_STAMP = bytes(16)


class PictureName(NamedTuple):
    """What a picture's features are kept under. `stamp` stands for `content` while the file is unchanged."""

    stamp: bytes
    content: bytes
    grid: Grid


class Entry(NamedTuple):
    """Where the features of a picture lie."""

    file: str
    offset: int
    rows: int
    sum: int
    number: int = -1  # in the order in which this process came to know them


def stamp_of(media: Media) -> bytes:
    """What tells that a file is unchanged: path, size and time of change, and which part of it is meant.
    NO_STAMP for bytes, and where none is."""
    stamps = [(path, *file_stamp(path)) for path in media_paths(media)]
    if not stamps or any(size < 0 for _, size, _ in stamps):
        return NO_STAMP
    text = "\0".join(f"{path}\0{size}\0{changed}" for path, size, changed in stamps)
    text += f"\0{media.cut}" if media.cut else ""
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=16).digest()


class FeatureStore:
    """The features in a folder, by picture.

    Args:
        folder: of features that came about in one way: see `model/features.py`.
        width: of a feature.
        dtype: of its numbers.
        writer: number of the pair of files this process would like to append to.
    """

    def __init__(self, folder: Path, *, width: int, dtype: torch.dtype, writer: int = 0):
        self.folder, self.width, self.dtype, self.writer = folder, width, dtype, writer
        self.row_bytes = width * dtype.itemsize
        self.entries: list[Entry] = []
        self.known: dict[bytes, int] = {}  # stamp + grid, and content + grid -> number of the entry
        self.others: dict[bytes, list[int]] = {}  # further entries for the same
        self.contents: dict[bytes, bytes] = {}  # stamp -> content
        self.damaged: set[Entry] = set()
        self.read_to: dict[str, int] = {}  # index file -> bytes of it that are known
        self.opened: dict[str, int] = {}  # data file -> descriptor
        self.output: tuple[int, int, str] | None = None  # descriptors of data and index, their name
        self.full = False
        folder.mkdir(parents=True, exist_ok=True)
        self.refresh()

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def held_bytes(self) -> int:
        """What all features take."""
        return sum(entry.rows for entry in self.entries) * self.row_bytes

    # ------------------------------------------------------------------------------------------------- finding

    def name(self, media: Media, grid: Grid) -> PictureName:
        """The name of a picture; its file is read where it is new or has changed. Raises MediaError."""
        return self.name_bytes(media, grid)[0]

    def name_bytes(self, media: Media, grid: Grid) -> tuple[PictureName, bytes | None]:
        """The same, and the bytes where they had to be read."""
        if media.path is None and media.kind == "image":
            digest = bytes.fromhex(media.key.partition("sha256:")[2][:64])
            return PictureName(NO_STAMP, _of_part(digest, media), grid), media.data
        stamp = stamp_of(media)
        content = self.contents.get(stamp)
        if content is not None:
            return PictureName(stamp, content, grid), None
        data = read_bytes(media) if media.kind == "image" else None
        content = hash_media(media) if data is None else _of_part(hashlib.sha256(data).digest(), media)
        if stamp != NO_STAMP and stamp == stamp_of(media):  # not written to meanwhile
            self.contents[stamp] = content
        return PictureName(stamp, content, grid), data

    def find_media(self, media: Media, grid: Grid) -> Entry | None:
        """Features of a picture whose file need not be read to know it."""
        if media.data is not None:
            return self.find(self.name(media, grid))
        stamp = stamp_of(media)
        return None if stamp == NO_STAMP else self.find(PictureName(stamp, self.contents.get(stamp, b""), grid))

    def find(self, name: PictureName) -> Entry | None:
        """Features kept under a name; None: there are none that are known to be sound or not yet looked at."""
        for key in _keys(name):
            for number in (self.known.get(key), *self.others.get(key, ())):
                if number is not None and self.entries[number] not in self.damaged:
                    return self.entries[number]
        return None

    def refresh(self) -> None:
        """Read what has been added to the indexes since."""
        for path in sorted(self.folder.glob("*.index")):
            with suppress(OSError):  # gone meanwhile
                done, size = self.read_to.get(path.name, 0), path.stat().st_size
                if size - done >= RECORD.itemsize:
                    self._read_index(path, done, (size - done) // RECORD.itemsize)

    def _read_index(self, path: Path, start: int, count: int) -> None:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(count * RECORD.itemsize)
        records = np.frombuffer(data[: len(data) // RECORD.itemsize * RECORD.itemsize], RECORD)
        self.read_to[path.name] = start + len(records) * RECORD.itemsize
        file_name, lost = f"{path.stem}.data", 0
        for n, record in enumerate(records.tolist()):
            stamp, content, grid, offset, rows, checksum, own = record
            at = n * RECORD.itemsize
            if zlib.crc32(data[at : at + CHECKED]) != own:
                lost += 1
                continue
            self._know(PictureName(stamp, content, tuple(grid)), Entry(file_name, offset, rows, checksum))
        if lost:
            log.warning("%s: %d records are damaged; the features of these pictures are computed again", path, lost)

    def _know(self, name: PictureName, entry: Entry) -> None:
        number = len(self.entries)
        self.entries.append(entry._replace(number=number))
        for key in _keys(name):
            if self.known.setdefault(key, number) != number:
                self.others.setdefault(key, []).append(number)
        if name.stamp != NO_STAMP:
            self.contents[name.stamp] = name.content

    # ------------------------------------------------------------------------------------------------- reading

    def read(self, entries: Sequence[Entry]) -> tuple[Tensor, list[int]]:
        """Features of some pictures, one after the other: [rows of all, width], and the numbers of damaged ones,
        whose rows hold anything. They are not found again."""
        out = torch.empty(sum(entry.rows for entry in entries), self.width, dtype=self.dtype)
        view, at, bad = memoryview(out.view(torch.uint8).numpy().reshape(-1)), 0, []  # type: ignore[arg-type]
        for number, entry in enumerate(entries):
            part = view[at : at + entry.rows * self.row_bytes]
            at += len(part)
            if not self._read_into(entry, part):
                bad.append(number)
                self._report_damage(entry)
        return out, bad

    def _read_into(self, entry: Entry, part: memoryview) -> bool:
        try:
            if entry.file not in self.opened:
                self.opened[entry.file] = os.open(self.folder / entry.file, os.O_RDONLY)
            done = 0
            while done < len(part):
                count = os.preadv(self.opened[entry.file], [part[done:]], entry.offset + done)
                if not count:
                    return False  # cut off
                done += count
        except OSError:
            return False
        return zlib.crc32(part) == entry.sum

    def _report_damage(self, entry: Entry) -> None:
        if not self.damaged:
            log.warning(
                "%s: features are damaged; those of these pictures are computed again", self.folder / entry.file
            )
        self.damaged.add(entry)
        if (file := self.opened.pop(entry.file, None)) is not None:
            os.close(file)  # another may have its name by now

    # ------------------------------------------------------------------------------------------------- keeping

    def keep(self, names: Sequence[PictureName], features: Sequence[Tensor]) -> None:
        """Append features of pictures; they are there for all processes when this returns. On a full or read-only disk
        they are not, which is said once."""
        if self.full or not names:
            return
        try:
            data_file, index_file, file_name = self.output = self.output or self._open_output()
            parts = [memoryview(f.detach().cpu().contiguous().view(torch.uint8).numpy().reshape(-1)) for f in features]  # type: ignore[arg-type]
            self._check_room(sum(map(len, parts)))
            offset = os.lseek(data_file, 0, os.SEEK_END)
            records = np.zeros(len(names), RECORD)
            fresh = []
            for n, (name, part) in enumerate(zip(names, parts, strict=True)):
                assert len(part) == len(features[n]) * self.row_bytes, "these are not features of this store"
                entry = Entry(f"{file_name}.data", offset, len(features[n]), zlib.crc32(part))
                records[n] = (name.stamp, name.content, name.grid, entry.offset, entry.rows, entry.sum, 0)
                records["own"][n] = zlib.crc32(records[n].tobytes()[:CHECKED])
                fresh.append((name, entry))
                offset += len(part)
            for part in parts:
                _write_all(data_file, part)
            _write_all(index_file, memoryview(records.tobytes()))
        except OSError as error:
            self.full = True
            log.warning("features cannot be kept in %s (%s): new ones are computed each time", self.folder, error)
            return
        index = f"{file_name}.index"
        self.read_to[index] = self.read_to.get(index, 0) + records.nbytes
        for name, entry in fresh:
            self._know(name, entry)

    def _check_room(self, wanted: int) -> None:
        disk = os.statvfs(self.folder)
        if disk.f_bavail * disk.f_frsize < wanted + SPARE_BYTES:
            raise OSError(f"less than {SPARE_BYTES / 2**30:.0f} GiB of the disk would be left free")

    def _open_output(self) -> tuple[int, int, str]:
        """The first pair of files that no living process appends to, from this process's number on."""
        for number in itertools.count(self.writer):
            name = f"{number:05d}"
            index = os.open(self.folder / f"{name}.index", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                fcntl.flock(index, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(index)
                continue
            os.ftruncate(index, os.fstat(index).st_size // RECORD.itemsize * RECORD.itemsize)  # a torn last record
            self.refresh()  # from now on nobody else adds to it
            data = os.open(self.folder / f"{name}.data", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            return data, index, name
        raise AssertionError("endless")

    def close(self) -> None:
        """Let go of the files."""
        for file in (*self.opened.values(), *(self.output or ())[:2]):
            os.close(file)
        self.opened, self.output = {}, None


def _of_part(content: bytes, media: Media) -> bytes:
    return hashlib.sha256(content + media.cut.encode()).digest() if media.cut else content


def _keys(name: PictureName) -> Iterator[bytes]:
    grid = np.array(name.grid, "<u4").tobytes()
    if name.stamp != NO_STAMP:
        yield name.stamp + grid
    if name.content:
        yield name.content + grid


def _write_all(file: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(file, data) :]
