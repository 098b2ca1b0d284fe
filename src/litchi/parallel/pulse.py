"""What this process is doing and when it last moved on, and the stacks of all its threads and loaders when it does not.

The training loop says each phase and micro-batch (one call, no effect but on this object); the thread that beats
(heartbeat.py) passes it on to the other ranks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

NAMED = 8  # samples that are named
STACK_S = 0.3  # for a loader to write its stack

Samples = Sequence[str] | Callable[[], Sequence[str]]


@dataclass(frozen=True)
class Place:
    """Where a rank is. Ranks that keep step count alike.

    Args:
        phases, parts: phases begun, and micro-batches in this one; `parts` is -1 on ranks that do not count them.
        idle_s: seconds without moving on; None: in a phase of unknown length.
    """

    phase: str = "starting"
    samples: tuple[str, ...] = ()
    phases: int = 0
    parts: int = -1
    idle_s: float | None = None

    def __str__(self) -> str:
        more = f" and {len(self.samples) - NAMED} more" if len(self.samples) > NAMED else ""
        names = f", samples {', '.join(self.samples[:NAMED])}{more}" if self.samples else ""
        part = f"micro-batch {self.parts} of {self.phase}" if self.parts > 0 else self.phase
        return part + names


class Pulse:
    """The state of this process. The main thread writes it, others read."""

    def __init__(self) -> None:
        self.hang_s: float | None = None  # None: nobody asked to notice a hang
        self.folder: Path | None = None
        self.file: TextIO | None = None
        self.phase, self.samples = "starting", ()  # type: tuple[str, Samples]
        self.phases, self.parts, self.moves = 0, -1, 0
        self.limited = False
        self.idle_s, self._seen = 0.0, 0

    # ---------------------------------------------------------------------------------------------- the main thread

    def begin(self, phase: str, samples: Samples = (), *, limited: bool = True) -> None:
        """Begin a phase; `limited`: it must move on within `hang_s`."""
        self.parts = 0 if self.parts >= 0 else -1
        self.phase, self.samples, self.limited = phase, samples, limited
        self.phases += 1
        self.moves += 1

    def take(self, samples: Samples) -> None:
        """Begin the next micro-batch of the phase."""
        self.samples = samples
        self.parts = max(self.parts, 0) + 1
        self.moves += 1

    def move(self) -> None:
        """Move on within the phase: a part of a file is written, an answer has grown."""
        self.moves += 1

    @contextlib.contextmanager
    def watched(self, folder: Path, hang_s: float, rank: int) -> Iterator[None]:
        """Let a hang be noticed. SIGUSR2 adds the stacks to `folder`/rank-K.txt, also for processes forked meanwhile,
        and without the interpreter's help."""
        folder.mkdir(exist_ok=True)
        path = folder / f"rank-{rank}.txt"
        self.folder, self.hang_s, self.file = folder, hang_s, path.open("a", encoding="utf-8")
        faulthandler.register(signal.SIGUSR2, file=self.file, all_threads=True)
        try:
            yield
        finally:
            faulthandler.unregister(signal.SIGUSR2)
            self.hang_s, self.limited = None, False
            file, self.file = self.file, None
            file.close()
            with contextlib.suppress(OSError):
                if path.stat().st_size == 0:
                    path.unlink()
                folder.rmdir()  # by the last of all, when nobody has written anything

    # ---------------------------------------------------------------------------------------- the thread that beats

    def age(self, seconds: float) -> None:
        """Time has passed. Only while this process was awake: one that was stopped as a whole has not hung."""
        self.idle_s = 0.0 if self.moves != self._seen else self.idle_s + seconds
        self._seen = self.moves

    @property
    def place(self) -> Place:
        samples = self.samples() if callable(self.samples) else self.samples
        return Place(self.phase, tuple(samples), self.phases, self.parts, self.idle_s if self.limited else None)

    def write_stacks(self, why: str) -> None:
        """Write where every thread of this process and every loader stands. Nothing where no file was asked for."""
        file = self.file
        if file is None:
            return
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        print(f"---- {time.strftime('%Y-%m-%d %H:%M:%S')} {why}\n{self.place}", file=file)
        for ident, frame in sys._current_frames().items():
            print(f"\nthread {names.get(ident, ident)} of process {os.getpid()}", file=file)
            file.writelines(traceback.format_stack(frame))
        file.flush()
        for child in multiprocessing.active_children():
            print(f"\nloader {child.pid}, which writes here unless it is stopped", file=file, flush=True)
            ask_for_stack(child.pid)
            time.sleep(STACK_S)
        os.fsync(file.fileno())


def ask_for_stack(pid: int | None) -> None:
    """Let a process of ours write its stacks, even one whose interpreter does not answer."""
    if pid is not None and hasattr(signal, "SIGUSR2"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGUSR2)


def read_place(fields: dict[str, Any]) -> Place:
    """A place as it came over the wire."""
    return Place(**{**fields, "samples": tuple(fields["samples"])})


PULSE = Pulse()
