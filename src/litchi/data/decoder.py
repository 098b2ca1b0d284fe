"""The process that decodes videos, as seen from outside: started when it is first needed, watched, ended when it hangs.

In: a file or bytes. Out: its `Timeline`, frames, or a `MediaError`. Decoders are C code fed with files from anywhere:
one that hangs cannot be stopped in a thread, one that crashes takes its process along, and one that eats memory eats
the run's. So each process that reads videos has one such child, used for one clip after the other.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

import numpy as np

from litchi.data.media import MediaError
from litchi.data.timeline import Timeline
from litchi.types import Media

HANG_S = 60.0  # without a sign of life, which comes with every frame
MEMORY_BYTES = 2 * 2**30
# It watches its parent before anything else is imported, which takes seconds on a busy machine.
_START = (
    "import sys; sys.path[:] = sys.argv[4:]; from litchi.data.orphans import watch_parent; "
    "watch_parent(int(sys.argv[2])); from litchi.data.frames import serve; serve(int(sys.argv[1]), int(sys.argv[3]))"
)


class Decoder:
    """A child process that decodes. It is gone when this one is, however that ends.

    Args:
        hang_s: seconds without a sign of life after which it is killed.
        memory_bytes: that it may take.
    """

    def __init__(self, *, hang_s: float = HANG_S, memory_bytes: int = MEMORY_BYTES):
        self.hang_s, self.memory_bytes = hang_s, memory_bytes
        self.owner, self.lock = os.getpid(), threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.pipe: Connection | None = None

    def scan(self, media: Media) -> Timeline:
        """When its frames are shown. Raises MediaError."""
        (line,) = self._ask(media, "scan", media.start_s, media.end_s, media.fps)
        return line

    def frames(self, media: Media, line: Timeline, wanted: Sequence[int]) -> Iterator[np.ndarray]:
        """Its frames at some of the times of its timeline, rising: uint8 [height, width, 3]. Raises MediaError."""
        return self._ask(media, "frames", line, list(wanted))

    def check(self, media: Media, line: Timeline) -> None:
        """Decode all of a timeline. Raises MediaError."""
        for _ in self._ask(media, "check", line):
            pass

    def thumbnails(self, media: Media, line: Timeline, side: int) -> Iterator[tuple[int, np.ndarray]]:
        """(time, uint8 [side, side, 3]) of every frame. Raises MediaError."""
        return self._ask(media, "thumbnails", line, side)

    def close(self) -> None:
        """End the process."""
        if self.process is not None and self.pipe is not None and self.owner == os.getpid():
            self.process.kill()
            self.process.wait()
            self.pipe.close()
        self.process = self.pipe = None

    # ------------------------------------------------------------------------------------------------- the process

    def _ask(self, media: Media, verb: str, *request: Any) -> Iterator[Any]:
        """What it answers, item by item; other threads wait until it is through."""
        with self.lock:
            yield from self._answers(media, verb, *request)

    def _answers(self, media: Media, verb: str, *request: Any) -> Iterator[Any]:
        done = False
        try:
            self._send((verb, (media.path, media.data), *request))
            while True:
                kind, *answer = self._hear(media)
                if kind == "item":
                    yield answer[0]
                elif kind == "error":
                    done = answer[0] != "media_too_large"  # what it holds by then is not given back
                    raise MediaError(answer[0], answer[1], name=media.name)
                elif kind == "end":
                    done = True
                    return
        finally:
            if not done:  # it hangs, has died, or is in the middle of an answer that nobody wants
                self.close()

    def _send(self, message: Any) -> None:
        if self.process is not None and self.process.poll() is not None:  # died while idle
            self.close()
        if self.pipe is None:
            self._start()
        assert self.pipe is not None
        with suppress(BrokenPipeError):  # heard of next
            self.pipe.send(message)

    def _hear(self, media: Media) -> tuple[Any, ...]:
        assert self.pipe is not None and self.process is not None
        try:
            if not self.pipe.poll(self.hang_s):
                raise MediaError("decoder_hung", f"no frame decoded in {self.hang_s:g} s", name=media.name)
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            status = self.process.wait()
            how = f"by signal {-status}" if status < 0 else f"with status {status}"
            raise MediaError("decoder_died", f"the process that decodes it was ended {how}", name=media.name) from None

    def _start(self) -> None:
        self.pipe, other = Pipe()
        with other:
            numbers = (other.fileno(), os.getpid(), self.memory_bytes)
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START, *map(str, numbers), *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )


_own: tuple[int, Decoder] | None = None


def own_decoder() -> Decoder:
    """This process's decoder. A forked worker starts one of its own."""
    global _own
    if _own is None or _own[0] != os.getpid():
        _own = os.getpid(), Decoder()
        atexit.register(_own[1].close)
    return _own[1]
