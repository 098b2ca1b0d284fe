"""Start the ranks of this machine, watch over them, start them again where that helps; join them as one.

The launcher holds the store at which its ranks meet, as torchrun's agent does and in the same variables, so the ranks
need not know which of the two started them. Each rank is a process with a session of its own, and a copy of the
launcher: what takes seconds to import is imported once, also for ranks that start again.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from litchi.data.orphans import end_with_parent
from litchi.errors import MachineError, RestartError, StoppedError, UserError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from litchi.dist import Ranks

LAUNCHER = "LITCHI_LAUNCHER"  # process id of ours; ranks of other launchers do not have it
RESTARTS = "LITCHI_RESTARTS"  # what ended earlier starts of these ranks, for the journal
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
LOOK_S = 0.1
GRACE_S = 5.0  # for the other ranks when one has failed
STOP_S = 20.0  # for the other ranks when one has stopped and saved
LONGEST_S = 60.0


def launched() -> bool:
    """Whether a launcher (torchrun, accelerate, srun) has started this process as one rank of several."""
    from litchi.dist import slurm_variables

    return "WORLD_SIZE" in os.environ or bool(slurm_variables(os.environ))


def supervised() -> bool:
    """Whether a launcher of ours watches over this rank: it says how a run was stopped, and starts ranks again."""
    return LAUNCHER in os.environ


def default_procs() -> int:
    """One rank per GPU, or one."""
    import torch

    return max(1, torch.cuda.device_count())


def ranks_to_start(procs: int | None) -> int:
    """1 where a launcher has started the ranks; else what was asked for; else one per GPU, or one."""
    from litchi.parallel.accelerate import lone_ranks

    if launched():
        return 1
    return procs or lone_ranks(os.environ, _parent_command()) or default_procs()


def _parent_command() -> list[str]:
    """Command line of the process that started this one."""
    import psutil

    try:
        return psutil.Process(os.getppid()).cmdline()
    except psutil.Error:  # it has ended, or is another user's
        return []


# --------------------------------------------------------------------------------------------------------- decisions


@dataclass(frozen=True)
class Ended:
    """A rank that has ended, with its status, or minus the number of the signal that ended it."""

    rank: int
    status: int

    @property
    def again(self) -> bool:
        """Whether a new start may help: it was killed, or asked for it."""
        return self.status < 0 or self.status == RestartError.status

    @property
    def weight(self) -> int:
        """Of several that are found at once the heaviest is the cause: an error, a kill, a stop."""
        if self.again:
            return 2
        return {0: 0, StoppedError.status: 1}.get(self.status, 3)

    def __str__(self) -> str:
        if self.status < 0:
            return f"rank {self.rank} was ended by {signal.Signals(-self.status).name}"
        return f"rank {self.rank} asked for a new start"


@dataclass
class Budget:
    """How often ranks may start again without having come further in between.

    Args:
        allowed: `train.restarts`.
        reached: step of the newest checkpoint at the last start; a later one renews the budget.
    """

    allowed: int
    reached: int
    used: int = 0

    def take(self, newest: int) -> float | None:
        """Use one restart; returns the seconds to wait before it, or None where all are used up."""
        if newest > self.reached:
            self.reached, self.used = newest, 0
        if self.used >= self.allowed:
            return None
        self.used += 1
        return 0.0 if self.used == 1 else min(LONGEST_S, 2.0 ** (self.used - 2))


# ------------------------------------------------------------------------------------------------------------- ranks


class RunningRanks:
    """The ranks of one start. On leaving, all that were started are gone, with what they have started."""

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []
        self.pipes: list[Connection] = []

    def fork(self, arguments: Sequence[str], procs: int) -> None:
        """Make so many copies of this process, which are to run `litchi ARGUMENTS`.

        Where this process has other threads, which a copy lacks while it may wait for them, or has used a GPU, which a
        copy then cannot, each starts anew instead.
        """
        import torch

        anew, gpus = count_threads() != 1, torch.cuda.device_count()

        def begin(given: Connection) -> None:
            os.setsid()
            _be_no_launcher(before)
            for pipe in self.pipes:  # the launcher's ends, which a copy has too: without them it notices its end
                pipe.close()
            try:
                env = given.recv()
            except EOFError:
                os._exit(1)
            if anew or (gpus and torch.cuda._is_in_bad_fork()):
                os.execve(sys.executable, [sys.executable, "-m", "litchi", *arguments], env)
            own = {name: value for name, value in env.items() if os.environ.get(name) != value}
            os.environ.update(env)
            _show_environment({**own, **env})
            if threads := env.get("OMP_NUM_THREADS"):  # which libraries have read already
                torch.set_num_threads(int(threads))
            sys.argv[1:] = arguments
            runpy.run_module("litchi", run_name="__main__", alter_sys=True)

        context = multiprocessing.get_context("fork")
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until a copy no longer acts as the launcher
        try:
            for rank in range(procs):
                given, pipe = context.Pipe(duplex=False)
                self.pipes.append(pipe)
                process = context.Process(target=begin, args=(given,), name=f"rank {rank}")
                process.start()
                self.processes.append(process)
                given.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def start(self, env: Mapping[str, str]) -> None:
        """Let the copies begin, in this environment."""
        for rank, pipe in enumerate(self.pipes):
            with contextlib.suppress(BrokenPipeError), pipe:  # it was killed
                pipe.send({**env, "RANK": str(rank), "LOCAL_RANK": str(rank)})

    def left(self) -> list[int]:
        """Process ids of the ranks that have not ended."""
        return [process.pid for process in self.processes if process.exitcode is None and process.pid]

    def send(self, number: int) -> None:
        """Send a signal to the ranks that are left."""
        for pid in self.left():
            os.kill(pid, number)

    def worst(self) -> Ended | None:
        """The rank that has ended worst so far; None where all that have ended did so well."""
        ended = [Ended(rank, p.exitcode) for rank, p in enumerate(self.processes) if p.exitcode]
        return max(ended, key=lambda one: one.weight, default=None)

    def wait(self) -> Ended | None:
        """Wait until all have ended: the first that ends badly ends the others. Returns it, or None."""
        first, until = None, 0.0
        while self.left():
            if first is None and (first := self.worst()):
                until = time.monotonic() + (STOP_S if first.status == StoppedError.status else GRACE_S)
                self.send(signal.SIGTERM)
            if first is not None and time.monotonic() > until:
                self.kill()
            time.sleep(LOOK_S)
        return first or self.worst()

    def kill(self) -> None:
        """End all that are left, with what they have started."""
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):  # it has no session yet, and has started nothing
                os.killpg(pid, signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)

    def __enter__(self) -> RunningRanks:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        for process in self.processes:
            process.join()


def count_threads() -> int | None:
    """Threads of this process, those of libraries too; None where the system does not say."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return None


def _be_no_launcher(mask: Iterable[int]) -> None:
    """Take signals as a new program would.

    Args:
        mask: what was blocked when the program began.
    """
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has told it to
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _show_environment(env: Mapping[str, str]) -> None:
    """Let others see what environment this copy has (`ps e`, /proc/PID/environ), by which ranks are told apart.

    They see the block of memory a program was started with, which nothing else reads once all is in `os.environ`.

    Args:
        env: what matters most first: the block has the size of the launcher's.
    """
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return
    begin, end = int(fields[47]), int(fields[48])  # env_start and env_end, of proc(5)
    text = b""
    for name, value in env.items():
        word = os.fsencode(f"{name}={value}") + b"\0"
        if len(text) + len(word) <= end - begin:
            text += word
    if text:
        ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


class Told:
    """While it is open, a signal to the launcher is one to its ranks: the first lets them save, a second kills them."""

    def __init__(self) -> None:
        self.by: signal.Signals | None = None
        self.ranks: RunningRanks | None = None

    def __enter__(self) -> Told:
        ours = [n for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]  # as nohup has told it to
        self._before = {number: signal.signal(number, self._pass_on) for number in ours}
        return self

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self.ranks is not None:
            again = self.by is not None and number == signal.SIGINT
            self.ranks.kill() if again else self.ranks.send(signal.SIGTERM)
        self.by = self.by or signal.Signals(number)

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, seconds: float) -> None:
        """Wait so long, or until a signal comes."""
        until = time.monotonic() + seconds
        while self.by is None and time.monotonic() < until:
            time.sleep(LOOK_S)


def run_ranks(arguments: Sequence[str], procs: int, *, restarts: int = 0, newest: Callable[[], int] = lambda: 0) -> int:
    """Run `litchi ARGUMENTS` on `procs` ranks and wait; start them again when one was killed or asked for it.

    Args:
        restarts: how often without a new checkpoint in between.
        newest: the step of the newest checkpoint, from which a new start goes on; 0: there is none.

    Returns:
        The exit status of the rank that failed first, or 0.

    Raises:
        UserError: a rank was ended by a signal, so that it could say nothing, and may not start again;
            StoppedError: this process was told to stop, or a rank was.
    """
    budget, made = Budget(restarts, newest()), []
    with Told() as told:
        while told.by is None:
            with RunningRanks() as ranks:
                told.ranks = ranks
                ranks.fork(arguments, procs)  # before there is a store, whose thread would not be in a copy
                store = _open_store()  # a new one, which knows nothing of the ranks before
                ranks.start(_environment(procs, store, made))
                if told.by is not None:  # while they were started
                    ranks.send(signal.SIGTERM)
                ended = ranks.wait()
            del store
            if ended is None:
                return 0
            stopped = ended.status == StoppedError.status
            if not (stopped or ended.again):
                return ended.status
            step = newest()
            if stopped or told.by is not None:
                raise _stopped(told.by, step)
            pause = budget.take(step)
            if pause is None:
                return _give_up(ended, budget)
            made.append({"step": step + 1, "rank": ended.rank, "status": ended.status, "attempt": budget.used})
            when = f"in {pause:.0f} s" if pause else "at once"
            print(
                f"{ended}; going on from step {step + 1} {when} (restart {budget.used} of {restarts})",
                file=sys.stderr,
                flush=True,
            )
            told.wait(pause)
    raise _stopped(told.by, newest())


def _stopped(by: signal.Signals | None, step: int) -> StoppedError:
    name = "a signal to a rank" if by is None else by.name
    where = f"the newest checkpoint is of step {step}" if step else None
    return StoppedError(f"stopped by {name}", where=where, remedy="The same command resumes")


def _give_up(ended: Ended, budget: Budget) -> int:
    """Say that all restarts are used up. The status of a rank that has said itself what is wrong."""
    tried = f", {budget.used + 1} times without a new checkpoint in between" if budget.used else ""
    if ended.status > 0 and not tried:
        return MachineError.status
    if ended.status > 0:
        raise MachineError(f"{ended}{tried}", remedy="What it said stands above; the same command goes on")
    raise UserError(
        f"{ended}{tried}",
        why="mostly the system does that when memory runs out",
        remedy="Lower train.micro_batch_tokens, start fewer ranks, and look at the system's log",
    )


def _open_store() -> TCPStore:
    """The store at which ranks meet, on a free port, or on the one that MASTER_PORT names."""
    from torch.distributed import TCPStore

    from litchi.dist import explain_port

    adopted = "ACCELERATE_MIXED_PRECISION" in os.environ  # which names one port for all runs
    port = 0 if adopted else int(os.environ.get("MASTER_PORT", 0))
    with explain_port("localhost", port):
        return TCPStore("localhost", port, is_master=True, wait_for_workers=False)


def _environment(procs: int, store: TCPStore, made: Sequence[Mapping[str, int]]) -> dict[str, str]:
    """torchrun's variables, and ours."""
    env = dict(os.environ)
    if procs > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    if not _has_network():
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return {
        **env,
        "WORLD_SIZE": str(procs),
        "LOCAL_WORLD_SIZE": str(procs),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(len(made)),
        LAUNCHER: str(os.getpid()),
        RESTARTS: json.dumps(made),
    }


def _has_network() -> bool:
    """Whether this machine's own name can be reached; gloo would look for its address by it."""
    try:
        socket.getaddrinfo(socket.gethostname(), None)
        return True
    except OSError:
        return False


# ------------------------------------------------------------------------------------------------------- in the rank


def follow_launcher() -> None:
    """End with the launcher: ours, or torchrun's agent. What is left then cannot meet any more."""
    if supervised():
        end_with_parent(int(os.environ[LAUNCHER]))
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(os.getppid())


def earlier_starts() -> list[dict[str, int]]:
    """What ended earlier starts of these ranks, and from which step each went on."""
    return json.loads(os.environ.get(RESTARTS, "[]"))


def join_ranks() -> Ranks:
    """Become one of the ranks a launcher started, or the only one, on the cores next to its GPU."""
    from litchi.dist import gather_objects, start_ranks
    from litchi.parallel.numa import pin_cores

    ranks = start_ranks()
    host = socket.gethostname()
    pin_cores(ranks.device, local_rank=ranks.local_rank, local_world=gather_objects(host).count(host))
    return ranks
