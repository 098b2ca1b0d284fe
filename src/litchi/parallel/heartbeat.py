"""Notice that a rank, its machine or its network has gone: beats over the ranks' store, and an end within 30 s.

The process group waits for an hour, because a first download may take that long, and a machine that loses its power
closes no connection. So every rank writes a beat every two seconds, over a connection of its own, and reads those of
the others; a rank that has not been heard of for 30 s ends all that can still speak.

A rank that is slow is not silent: beats come from a thread of their own, which only a call that holds the interpreter
can stop, and none is known that does so for more than a few seconds. Whoever was itself asleep (a suspended machine,
a stopped job, such a call) cannot tell who was silent and begins to count anew.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from litchi.errors import MachineError

if TYPE_CHECKING:
    from torch.distributed import Store

    from litchi.dist import Ranks

BEAT_S = 2.0
SILENT_S = 30.0
LOOK_S = 1.0  # between two looks at who is silent
HUSH_S = 2.0
BYE = "bye"

End = Callable[[MachineError | None], object]


class Ears:
    """When each rank was last heard of. Pure: the time is given.

    Args:
        rank: who listens.
        world: ranks there are.
        now: seconds of a clock that never goes back.
    """

    def __init__(self, rank: int, world: int, now: float, *, silent_s: float = SILENT_S):
        self.rank, self.silent_s = rank, silent_s
        self.beats, self.hosts = [""] * world, [""] * world
        self.heard = [now] * world  # own place: when the store was last reached
        self.looked = now

    def hear(self, beats: Sequence[str], now: float) -> None:
        """Take in the beats of all ranks, `number host` or `bye`. One that has not changed says nothing new."""
        for rank, beat in enumerate(beats):
            if beat != self.beats[rank] or rank == self.rank or beat == BYE:
                self.beats[rank], self.heard[rank] = beat, now
            self.hosts[rank] = beat.partition(" ")[2] or self.hosts[rank]

    def look(self, now: float) -> list[int]:
        """The ranks that are silent. Own rank: the store is; then the others, heard through it, are not judged."""
        if now - self.looked > self.silent_s / 3:  # asleep itself
            self.heard = [now] * len(self.heard)
        self.looked = now
        silent = [rank for rank, at in enumerate(self.heard) if now - at > self.silent_s]
        return [self.rank] if self.rank in silent else silent

    def speaks(self, silent: Sequence[int]) -> bool:
        """Whether this rank says it for its machine: the first one there that can. Rank 0 may have held the store."""
        gone = {0} if self.rank in silent else set(silent)
        here = {rank for rank, host in enumerate(self.hosts) if host == self.hosts[self.rank]} - gone
        return self.rank == min(here, default=self.rank)

    def error(self, silent: Sequence[int], store: str) -> MachineError:
        """Say who is silent."""
        first = silent[0]
        if first == self.rank:
            what = f"the machine where ranks meet ({store}) has not been heard of for {self.silent_s:.0f} s"
        else:
            more = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
            what = f"rank {first} ({self.hosts[first] or 'unknown host'}){more} has not been heard of "
            what += f"for {self.silent_s:.0f} s"
        return MachineError(
            what,
            where=f"rank {self.rank} on {self.hosts[self.rank] or socket.gethostname()}",
            why="its machine, its network or the process is gone or stands still",
            remedy="Look there; the same command resumes from the last checkpoint",
        )


class Heartbeat:
    """While it is open, this rank beats and listens. Nothing at all in a world of one.

    Args:
        ranks: this process among all.
        end: called from a thread when a rank is silent, with the error to say, or None where another rank of this
            machine says it. It ends the process.
    """

    def __init__(self, ranks: Ranks, end: End, *, beat_s: float = BEAT_S, silent_s: float = SILENT_S):
        self.ranks, self.end, self.beat_s, self.silent_s = ranks, end, beat_s, silent_s
        self.closed = threading.Event()
        self.well = False  # left without an error: then say goodbye
        self.count = 0
        self.threads: list[threading.Thread] = []

    def __enter__(self) -> Heartbeat:
        if self.ranks.world > 1:
            from litchi.dist import barrier

            self.host, self.place = socket.gethostname(), f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            self.store = _connect()
            self._beat()
            barrier()  # so that everybody's first beat is there
            self.ears = Ears(self.ranks.rank, self.ranks.world, time.monotonic(), silent_s=self.silent_s)
            # Two threads: reading from a machine that is gone blocks, and somebody has to notice that.
            self.threads = [
                threading.Thread(target=work, name=f"heartbeat-{work.__name__}", daemon=True)
                for work in (self._listen, self._judge)
            ]
            for thread in self.threads:
                thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self.well = kind is None
        self.closed.set()
        for thread in self.threads:
            thread.join(self.silent_s if self.well else 0)

    def _beat(self) -> None:
        self.count += 1
        self.store.set(str(self.ranks.rank), f"{self.count} {self.host}")

    def _listen(self) -> None:
        names = [str(rank) for rank in range(self.ranks.world)]
        with contextlib.suppress(RuntimeError):  # the store is lost, which `_judge` notices by the silence
            while not self.closed.wait(self.beat_s):
                self._beat()
                self.ears.hear([beat.decode() for beat in self.store.multi_get(names)], time.monotonic())
            if self.well:
                self._leave()

    def _leave(self) -> None:
        """Say goodbye. Rank 0, whose process may hold the store, stays until all others have."""
        self.store.set(str(self.ranks.rank), BYE)
        self.store.add("gone", 1)
        until = time.monotonic() + self.silent_s
        while self.ranks.is_main and time.monotonic() < until and self.store.add("gone", 0) < self.ranks.world:
            time.sleep(0.02)

    def _judge(self) -> None:
        while not self.closed.wait(min(LOOK_S, self.silent_s / 4)):
            silent = self.ears.look(time.monotonic())
            if silent:
                speaks = self.ears.speaks(silent)
                if not speaks:
                    time.sleep(HUSH_S)  # until it has been said: a launcher ends all as soon as one has ended
                self.end(self.ears.error(silent, self.place) if speaks else None)
                return


def _connect() -> Store:
    """A connection of our own to the store the ranks met at; keys of an earlier start of the same ranks are not ours.

    It waits for hours: what is too long is for `_judge` to say.
    """
    from torch.distributed import PrefixStore, TCPStore

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(hours=24))
    return PrefixStore(f"litchi/heartbeat/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
