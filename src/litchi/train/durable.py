"""Files that survive: written, synced and renamed into place; the lock of a folder; what a full disk is called.

Bytes and names in, files on disk out. A name appears when what it names is complete and on the disk.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from litchi.dist import Ranks, gather_objects
from litchi.errors import MachineError, UsageError, UserError

LOCK = ".lock"
BLOCK = 1 << 22  # bytes hashed at once
NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}  # of a file system that has none
NO_PLACE = {errno.EEXIST, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS}  # for a folder
LIKELY = {
    errno.ENOSPC: "Make room on that disk",
    errno.EDQUOT: "Your quota is used up: make room",
    errno.EFBIG: "Raise the limit of file sizes (ulimit -f)",
    errno.EROFS: "Choose an output= that can be written to",
    errno.EACCES: "Choose an output= that can be written to",
    errno.EPERM: "Choose an output= that can be written to",
}
T = TypeVar("T")


def replace_file(path: Path, text: str) -> None:
    """Give a file a new content: after a crash it has the old one or the new one."""
    part = path.with_name(f".{path.name}.part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    sync_folder(path.parent)


def write_json(path: Path, body: Mapping[str, Any]) -> None:
    """Write a JSON file that is on the disk when this returns."""
    replace_file(path, json.dumps(body, ensure_ascii=False, indent=1) + "\n")


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk: a rename counts from here."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def sync_file(path: Path) -> None:
    """Put what others have written into a file on the disk; nothing where there is none."""
    if path.is_file():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def hash_file(path: Path) -> str:
    """sha256 of a file's content."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            found.update(block)
    return found.hexdigest()


def hash_json(body: Any) -> str:
    """sha256 of what a JSON value says, whatever its layout."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def format_bytes(count: float) -> str:
    """12.3 GB, 45 MB, 678 bytes."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"


def disk_error(error: OSError, what: str, place: Path) -> MachineError:
    """Word what the system says of a file that cannot be written."""
    name = errno.errorcode.get(error.errno or 0, "no number")
    try:
        left = f", {format_bytes(shutil.disk_usage(_existing(place)).free)} are free"
    except OSError:
        left = ""
    return MachineError(
        what,
        where=error.filename or place,
        why=f"{(error.strerror or str(error))} ({name}{left})",
        remedy=f"{LIKELY.get(error.errno or 0, 'Look at that disk')}; then the same command resumes",
    )


def _existing(place: Path) -> Path:
    return next((p for p in (place, *place.parents) if p.exists()), Path("/"))


def on_main(ranks: Ranks, work: Callable[[], T], *, what: str, place: Path) -> T:
    """Let rank 0 do something with the run's folder; all ranks get what came of it, or raise its error together.

    Args:
        ranks: all call it.
        work: what rank 0 does; what it returns travels by pickle.
        what: the error if the system refuses, such as "the folder cannot be written".
        place: the folder.
    """
    out: tuple[T | None, UserError | None] = (None, None)
    if ranks.is_main:
        try:
            out = work(), None
        except UserError as error:
            out = None, error
        except OSError as error:
            out = None, disk_error(error, what, place)
    result, failed = gather_objects(out)[0]
    if failed is not None:
        raise failed
    return result


class FolderLock:
    """A folder belongs to one run at a time. The system lets go of it however the process ends.

    It is a record lock (fcntl), which no child inherits: a worker that outlives its rank does not hold it. NFS knows
    these locks too; where a file system has none, nothing is locked and a warning says so.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.file: int | None = None

    def take(self) -> None:
        """Make the folder and take it. UsageError where there can be none, or naming the process that has it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno not in NO_PLACE:
                raise
            raise UsageError(
                f"output={self.folder} cannot be made", why=error.strerror, remedy="Choose another folder"
            ) from None
        self.file = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in NO_LOCKS:
                print(f"warning: {self.folder} is on a file system without locks: start one run there at a time")
                return
            holder = os.pread(self.file, 4096, 0)
            self.release()
            raise UsageError(
                "the folder is in use by another run",
                where=self.folder,
                why=_describe_holder(holder),
                remedy="Wait for it, end it, or choose another output=",
            ) from None
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        said = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since})
        os.ftruncate(self.file, 0)
        os.pwrite(self.file, said.encode(), 0)

    def release(self) -> None:
        """Let go of it, if it is held."""
        if self.file is not None:
            os.close(self.file)
            self.file = None

    def __enter__(self) -> FolderLock:
        self.take()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def _describe_holder(text: bytes) -> str:
    try:
        holder = json.loads(text)
        return f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
    except (ValueError, KeyError, TypeError):
        return "it did not say who it is"
