"""What a long command has done so far, in a folder: kept batch by batch, by several ranks, through any end.

records of a batch -> a part, whole or not at all -> the records of all rows, in their order

Each start of the command and each of its ranks has a part of its own, which nobody adds to later: a line that was cut
off is the last of its file. What counts is what stands before a line that closes a batch.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from litchi.errors import MachineError, UsageError
from litchi.train.durable import FolderLock, disk_error, sync_folder, write_json

COMMAND = "command.json"
Record = dict[str, Any]  # of a row; `row` is its number


class Parts:
    """The folder of one command."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.lock = FolderLock(folder)

    @property
    def begun(self) -> bool:
        return (self.folder / COMMAND).is_file()

    def begin(self, command: Mapping[str, Any]) -> tuple[int, set[int]]:
        """Take the folder for this process; returns the number of this start and the rows that are done.

        Raises:
            UsageError: another process has it, or it holds what another command has done.
        """
        self.lock.take()
        path = self.folder / COMMAND
        now = json.loads(json.dumps(command))
        if self.begun:
            before = json.loads(path.read_text(encoding="utf-8"))
            changed = [key for key in now if before.get(key) != now[key]]
            if changed:
                raise UsageError(
                    f"{self.folder} is of another command: other {', '.join(changed)}",
                    why="what it has done does not fit to what is asked for now",
                    remedy="Remove the folder, or name another --out",
                )
        else:
            write_json(path, now)
        starts = [int(part.name.partition("-")[0]) for part in self._list()]
        done = {record["row"] for part in self._list() for record, _ in _read_closed(part)}
        return max(starts, default=0) + 1, done

    @contextmanager
    def write(self, start: int, rank: int) -> Iterator[Callable[[Sequence[Record]], None]]:
        """What keeps the records of a batch: once it has returned, no end of the process loses them."""
        path = self.folder / f"{start:04}-{rank:04}.jsonl"
        with path.open("x", encoding="utf-8", newline="\n") as file:

            def keep(records: Sequence[Record]) -> None:
                if not records:
                    return
                lines = [*records, {"closed": len(records)}]
                try:
                    file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
                    file.flush()
                except OSError as error:
                    raise disk_error(error, "what is done cannot be kept", path) from None

            yield keep

    def read(self, rows: int) -> Iterator[Record]:
        """The records of rows 0, 1, ... rows - 1.

        Raises:
            MachineError: one is not there.
        """
        parts = self._list()
        places = np.full((rows, 2), -1, np.int64)
        for number, part in enumerate(parts):
            for record, offset in _read_closed(part):
                places[record["row"]] = number, offset
        missing = int((places[:, 0] < 0).sum())
        if missing:
            raise MachineError(
                f"{missing:,} of {rows:,} rows are in no part",
                where=self.folder,
                why="ranks wrote where rank 0 does not see it, or parts were removed",
                remedy="Put --out on a file system that all machines share, and start again",
            )
        files = [part.open("rb") for part in parts]
        try:
            for number, offset in places:
                files[number].seek(offset)
                yield json.loads(files[number].readline())
        finally:
            for file in files:
                file.close()

    def remove(self) -> None:
        """All is done, and elsewhere. It has another name first: half of it must not be taken for what is done."""
        gone = self.folder.with_name(f".{self.folder.name}.done")
        os.replace(self.folder, gone)
        sync_folder(gone.parent)
        self.lock.release()
        shutil.rmtree(gone)

    def _list(self) -> list[Path]:
        return sorted(self.folder.glob("*-*.jsonl"))


def _read_closed(part: Path) -> Iterator[tuple[Record, int]]:
    """Records of the closed batches of a part, with the places of their lines."""
    waiting: list[tuple[Record, int]] = []
    offset = 0
    with part.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:  # cut off
                return
            if "closed" in record:
                yield from waiting
                waiting = []
            else:
                waiting.append((record, offset))
            offset += len(line)


@contextmanager
def open_new(path: Path) -> Iterator[Path]:
    """A name to write to; when it is written, it is synced and put in its place."""
    part = path.with_name(f".{path.name}.part")
    yield part
    with part.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(part, path)
    sync_folder(path.parent)
