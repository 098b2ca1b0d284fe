"""Notice that a rank, its machine or its network has gone, or that nothing moves: beats over the ranks' store.

The process group waits for an hour, because a first download may take that long, and a machine that loses its power
closes no connection. So every rank writes a beat every two seconds, over a connection of its own, and reads those of
the others. What ends all that can still speak:

    a rank of this machine whose process has ended without a goodbye      6 s after that
    a rank that has not been heard of                                    30 s
    ranks that all beat, but of which none moves on                      `train.hang_s`, where a run asks for it

Before the end every rank writes its stacks. A rank that is slow is not silent: beats come from a thread of their own,
which only a call that holds the interpreter can stop, and none is known that does so for more than a few seconds.
Whoever was itself asleep (a suspended machine, a stopped job, such a call) cannot tell who was silent and begins to
count anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from litchi.errors import RestartError
from litchi.parallel.pulse import NAMED, PULSE, Place, ask_for_stack, read_place

if TYPE_CHECKING:
    from torch.distributed import Store

    from litchi.dist import Ranks

BEAT_S = 2.0
SILENT_S = 30.0
GONE_S = 5.0  # a launcher, which says it better, has ended this rank by then
LOOK_S = 1.0  # between two looks at who is silent
HUSH_S = 2.0
QUIET_S = 3 * BEAT_S  # a rank that beats is heard of sooner
BYE, ALARM, SAID = "bye", "alarm", "said"

End = Callable[[RestartError | None], object]


@dataclass(frozen=True)
class Finding:
    """What is wrong: with these ranks, the first above all. `kind` is "gone", "silent" or "stuck"."""

    kind: str
    ranks: tuple[int, ...]


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
        self.places = [Place()] * world
        self.left: set[int] = set()  # those who said goodbye
        self.gone: dict[int, float] = {}  # since when their process is
        self.looked = now

    def hear(self, beats: Sequence[str], now: float) -> None:
        """Take in the beats of all ranks, `number host place` or `bye`. One that has not changed says nothing new."""
        for rank, beat in enumerate(beats):
            if beat != self.beats[rank] or rank == self.rank or beat == BYE:
                self.beats[rank], self.heard[rank] = beat, now
            _, host, said = [*beat.split(" ", 2), "", ""][:3]
            self.hosts[rank] = host or self.hosts[rank]
            if said:
                self.places[rank] = read_place(json.loads(said))
            if beat == BYE:
                self.left.add(rank)

    def look(self, now: float, gone: Collection[int] = ()) -> list[int]:
        """The ranks that are silent. Own rank: the store is; then the others, heard through it, are not judged.

        Args:
            gone: ranks whose process is not there; for a moment that may be a launcher's doing.
        """
        if now - self.looked > self.silent_s / 3:  # asleep itself
            self.heard = [now] * len(self.heard)
        self.looked = now
        silent = [rank for rank, at in enumerate(self.heard) if now - at > self.silent_s]
        self.gone = {rank: self.gone.get(rank, now) for rank in gone if rank not in self.left}
        return [self.rank] if self.rank in silent else silent

    def lost(self, now: float) -> list[int]:
        """The ranks whose process has been gone for a while."""
        return sorted(rank for rank, at in self.gone.items() if now - at >= GONE_S)

    def stuck(self, now: float, hang_s: float) -> list[int]:
        """All ranks that are left if none of them has moved for so long: those that do not even beat first,
        wherever they were, then the one furthest behind."""
        left = [rank for rank in range(len(self.heard)) if rank not in self.left]
        idle = {r: self.idle_s(r, now) for r in left}
        if not left or min(idle.values()) <= hang_s:
            return []
        places = self.places  # those who do not count micro-batches are not behind in them
        quiet = {r: now - self.heard[r] > QUIET_S and r != self.rank for r in left}
        return sorted(left, key=lambda r: (not quiet[r], places[r].phases, places[r].parts % 2**31, -idle[r]))

    def idle_s(self, rank: int, now: float) -> float:
        """For how long a rank has not moved; 0 in a phase of unknown length."""
        said = self.places[rank].idle_s
        return 0.0 if said is None else said + (now - self.heard[rank] if rank != self.rank else 0.0)

    def speaks(self, silent: Sequence[int]) -> bool:
        """Whether this rank says it for its machine: the first one there that can. Rank 0 may have held the store."""
        gone = {0} if self.rank in silent else set(silent)
        here = {rank for rank, host in enumerate(self.hosts) if host == self.hosts[self.rank]} - gone
        return self.rank == min(here, default=self.rank)

    def error(self, found: Finding, store: str, *, hang_s: float = 0.0, stacks: object = None) -> RestartError:
        """Say what was found, of whom, and where that rank was."""
        first, place = found.ranks[0], self.places[found.ranks[0]]
        who = f"rank {first} ({self.hosts[first] or 'unknown host'})"
        more = f" and {len(found.ranks) - 1} more" if len(found.ranks) > 1 else ""
        last = f" Its last word: {place}." if place.phases else ""
        if found.kind == "stuck":
            what = f"nothing has moved for {hang_s:.0f} s; "
            what += f"{who} is furthest behind, at {place}" if len(self.heard) > 1 else f"it stands at {place}"
            why = "a file system, a network, a loader or a device does not answer, or a sample takes so long"
        elif found.kind == "gone":
            what, why = f"{who}{more} has ended without a goodbye", f"the system or somebody killed it.{last}"
        else:
            what = f"{who}{more} has not been heard of for {self.silent_s:.0f} s"
            if first == self.rank:
                what = f"the machine where ranks meet ({store}) has not been heard of for {self.silent_s:.0f} s"
            why = "its machine, its network or the process is gone or stands still" + (f".{last}" if last else "")
        return RestartError(
            what,
            where=f"rank {self.rank} on {self.hosts[self.rank] or socket.gethostname()}",
            why=why,
            remedy=(f"Stacks of all that can still write them are in {stacks}" if stacks else "Look there")
            + "; the same command resumes from the last checkpoint",
        )


class Heartbeat:
    """While it is open, this rank beats and listens. Alone it only looks whether it moves on.

    Args:
        ranks: this process among all.
        end: called from a thread when something is wrong, with the error to say, or None where another rank of this
            machine says it. It ends the process.
    """

    def __init__(self, ranks: Ranks, end: End, *, beat_s: float = BEAT_S, silent_s: float = SILENT_S):
        self.ranks, self.end, self.beat_s, self.silent_s = ranks, end, beat_s, silent_s
        self.closed = threading.Event()
        self.well = False  # left without an error: then say goodbye
        self.count = 0
        self.alarm: Finding | None = None  # what another rank has found
        self.processes: list[tuple[str, int] | None] = []
        self.threads: list[threading.Thread] = []

    def __enter__(self) -> Heartbeat:
        self.host, self.place, works = socket.gethostname(), "", [self._judge]
        if self.ranks.world > 1:
            from litchi.dist import barrier, gather_objects

            self.place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            self.store = _connect()
            self.processes = gather_objects((f"{self.host} {_namespace()}", os.getpid()))
            self._beat()
            if self.ranks.is_main:
                self.store.set(ALARM, "")
            barrier()  # so that everybody's first beat is there
            # Two threads: reading from a machine that is gone blocks, and somebody has to notice that.
            works.append(self._listen)
        self.ears = Ears(self.ranks.rank, self.ranks.world, time.monotonic(), silent_s=self.silent_s)
        self.ears.hosts[self.ranks.rank] = self.host
        self.threads = [threading.Thread(target=work, name=f"heartbeat-{work.__name__}", daemon=True) for work in works]
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
        place = PULSE.place
        said = json.dumps(asdict(replace(place, samples=place.samples[: NAMED + 1])))
        self.store.set(str(self.ranks.rank), f"{self.count} {self.host} {said}")

    def _listen(self) -> None:
        names = [*map(str, range(self.ranks.world)), ALARM]
        with contextlib.suppress(RuntimeError):  # the store is lost, which `_judge` notices by the silence
            while not self.closed.wait(self.beat_s):
                self._beat()
                *beats, alarm = (beat.decode() for beat in self.store.multi_get(names))
                self.ears.hear(beats, time.monotonic())
                if alarm:
                    kind, ranks = json.loads(alarm)
                    self.alarm = Finding(kind, tuple(ranks))
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
        look_s = min(LOOK_S, self.silent_s / 4)
        before = time.monotonic()
        while not self.closed.wait(look_s):
            now = time.monotonic()
            PULSE.age(min(now - before, 3 * look_s))
            before = now
            found = self._find(now) or self.alarm
            if found is not None:
                self._finish(found)
                return

    def _find(self, now: float) -> Finding | None:
        ears = self.ears
        if silent := ears.look(now, self._dead()) if self.ranks.world > 1 else []:
            return Finding("silent", tuple(silent))
        if lost := ears.lost(now):
            return Finding("gone", tuple(lost))
        ears.places[self.ranks.rank] = PULSE.place
        stuck = ears.stuck(now, PULSE.hang_s) if PULSE.hang_s else []
        return Finding("stuck", tuple(stuck)) if stuck else None

    def _dead(self) -> list[int]:
        """Ranks of this machine whose process is not there any more."""
        own = self.processes[self.ranks.rank]
        assert own is not None
        return [r for r, other in enumerate(self.processes) if other and other[0] == own[0] and not _runs(other[1])]

    def _finish(self, found: Finding) -> None:
        """Tell the others, so that all write their stacks, and end when they had time to."""
        stacks, hang_s = PULSE.folder if PULSE.file else None, PULSE.hang_s or 0.0
        behind = () if found.kind == "stuck" else found.ranks
        speaks = self.ears.speaks(behind)
        error = self.ears.error(found, self.place, hang_s=hang_s, stacks=stacks)
        if self.ranks.world > 1 and self.ranks.rank not in behind:
            said = json.dumps([found.kind, found.ranks])
            threading.Thread(target=self.store.set, args=(ALARM, said), daemon=True).start()  # it may not answer
            for rank in behind:
                self._ask(rank)
        PULSE.write_stacks(error.line())
        if self.ranks.world > 1 and stacks is not None:
            time.sleep(2 * self.beat_s)
        if not speaks:
            time.sleep(HUSH_S)  # until it has been said: a launcher ends all as soon as one has ended
        self.end(error if self._may_speak(behind, speaks) else None)

    def _may_speak(self, behind: Sequence[int], speaks: bool) -> bool:
        """Whether nobody of this machine has said it: the one that should may stand still. Without a store to ask in,
        as was decided."""
        if self.ranks.world == 1 or self.ranks.rank in behind:
            return speaks
        first: list[int] = []
        ask = threading.Thread(target=lambda: first.append(self.store.add(f"{SAID} {self.host}", 1)), daemon=True)
        ask.start()  # it may not answer
        ask.join(HUSH_S)
        return first[0] == 1 if first else speaks

    def _ask(self, rank: int) -> None:
        own, other = self.processes[self.ranks.rank], self.processes[rank]
        if own and other and own[0] == other[0] and self.ears.places[rank].idle_s is not None:
            ask_for_stack(other[1])


def _namespace() -> str:
    """Names the set of process ids that this process sees: containers of one name have their own."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _runs(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _connect() -> Store:
    """A connection of our own to the store the ranks met at; keys of an earlier start of the same ranks are not ours.

    It waits for hours: what is too long is for `_judge` to say.
    """
    from torch.distributed import PrefixStore, TCPStore

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(hours=24))
    return PrefixStore(f"litchi/heartbeat/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
