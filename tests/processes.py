"""Real processes for tests: `litchi` as a program, and ranks of a function, without paying for imports each time.

They are children of one fork server that has torch and transformers ready (it takes seconds to import them), in
sessions of their own, with files for what they print. The server is a copy of the test's process from before its first
test, so nothing that a test did is in them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

server = multiprocessing.get_context("forkserver")
PRELOADED = (
    *("litchi.train.loop", "peft", "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl"),
    *("torch.utils.tensorboard", "litchi.serve.server"),
)
START = util.spawnv_passfds


def start_fork_server() -> None:
    """Fork the server out of this process, instead of starting an interpreter that imports all of it once more."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # no collection has to look through what was imported
    resource_tracker.ensure_running()
    with mock.patch.object(util, "spawnv_passfds", _fork_into):
        forkserver.ensure_running()


def _fork_into(path: bytes, arguments: Sequence[str], passed: Sequence[int]) -> int:
    """What multiprocessing starts as `python -c CODE` with some open files; returns the process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        util.spawnv_passfds = START
        faulthandler.disable()
        for number in map(int, os.listdir("/dev/fd")):
            if number > 2 and number not in passed:
                with contextlib.suppress(OSError):  # the list itself
                    os.close(number)
        exec(arguments[-1], {})
    except SystemExit:  # nobody needs it any more
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)


@dataclass
class Ended:
    """A process that has ended: status, what it printed, and how long it took."""

    status: int
    out: str
    err: str
    seconds: float


class Running:
    """A process under way. It and all it started are gone after `end` or `kill`."""

    def __init__(self, body: Callable[..., None], arguments: tuple, folder: Path, env: Mapping[str, str]):
        folder.mkdir(parents=True, exist_ok=True)
        self.files = folder / "out.txt", folder / "err.txt"
        self.start = time.monotonic()
        self.process = server.Process(target=_child, args=(body, arguments, str(folder), {**os.environ, **env}))
        self.process.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def read(self) -> tuple[str, str]:
        """What it has printed so far: (out, err)."""
        out, err = (f.read_text(encoding="utf-8") if f.exists() else "" for f in self.files)
        return out, err

    def wait_for(self, text: str, timeout_s: float = 60) -> None:
        """Wait until it has printed a text."""
        while not any(text in printed for printed in self.read()):
            assert self.process.is_alive(), f"ended without saying {text!r}:\n{self.read()[1]}"
            assert time.monotonic() - self.start < timeout_s, f"no {text!r} in {timeout_s} s:\n{self.read()[1]}"
            time.sleep(0.02)

    def end(self, timeout_s: float = 60) -> Ended:
        """Wait for its end; one that does not end is killed and the test fails."""
        self.process.join(timeout_s)
        seconds = time.monotonic() - self.start
        alive = self.process.is_alive()
        self.kill()
        out, err = self.read()
        assert not alive, f"still running after {timeout_s} s:\n{out}\n{err}"
        return Ended(self.process.exitcode, out, err, seconds)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.join()


def _child(body, arguments, folder, env):
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    for number, name in ((1, "out.txt"), (2, "err.txt")):
        os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    body(*arguments)


def rank_variables(world: int) -> list[dict[str, str]]:
    """What a launcher gives each of its ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    same = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{**same, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


# ---------------------------------------------------------------------------------------------------- the program


def start_litchi(folder: Path, *words: str, env: Mapping[str, str] | None = None) -> Running:
    """Start `litchi WORDS`, with `folder` for what it prints."""
    return Running(_litchi, (words,), folder, env or {})


def run_litchi(folder: Path, *words: str, timeout_s: float = 60) -> Ended:
    """Run `litchi WORDS` to its end."""
    return start_litchi(folder, *words).end(timeout_s)


def run_litchi_ranks(folder: Path, world: int, *words: str, timeout_s: float = 60) -> list[Ended]:
    """Run `litchi WORDS` on some ranks, as torchrun would, and end all once one has failed."""
    running = [start_litchi(folder / f"rank{e['RANK']}", *words, env=e) for e in rank_variables(world)]
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and any(r.process.is_alive() for r in running):
        if any(r.process.exitcode for r in running):  # neither None nor 0
            break
        time.sleep(0.05)
    for one in running:
        if one.process.is_alive():
            os.kill(one.pid, signal.SIGTERM)
    return [one.end(10) for one in running]


def start_serving(folder: Path, *words: str, env: Mapping[str, str] | None = None) -> Running:
    """Start `litchi serve WORDS`; its engines are copies of it, which has all imported, instead of new interpreters."""
    return Running(_serve_forking, (words,), folder, env or {})


def _serve_forking(words):
    from litchi.serve import pool

    fork = multiprocessing.get_context("fork")
    pool.multiprocessing = SimpleNamespace(get_context=lambda method: fork)
    _litchi(("serve", *words))


def _litchi(words):
    from litchi.cli import main

    sys.argv = ["litchi", *words]
    main()


class Program:
    """`litchi WORDS` under way in a folder, as subprocess would have started it."""

    def __init__(self, words: Sequence[str], place: Path, log: Path):
        self.running = Running(_litchi_in, (words, str(place), str(log)), place, {})
        self.pid = self.running.pid

    def poll(self) -> int | None:
        return self.running.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.running.process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("litchi", timeout or 0)
        return self.poll()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.running.process.kill()


def _litchi_in(words, place, log):
    os.chdir(place)
    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), number)
    _litchi(words)


# ---------------------------------------------------------------------------------------------- ranks of a function


class RunningRanks:
    """`function(ranks, *arguments)` under way on some ranks."""

    def __init__(self, folder: Path, world: int, function: Callable[..., Any], *arguments: Any):
        self.folders = [folder / f"rank{rank}" for rank in range(world)]
        self.running = [
            Running(_rank, (function, arguments, str(place)), place, env)
            for place, env in zip(self.folders, rank_variables(world), strict=True)
        ]

    def results(self, timeout_s: float = 100) -> list[Any]:
        """What each rank gave back, as JSON carries it."""
        try:
            ended = [one.end(timeout_s) for one in self.running]
        finally:
            for one in self.running:
                one.kill()
        assert {e.status for e in ended} == {0}, "\n".join(e.err[-3000:] for e in ended)
        return [json.loads((place / "result.json").read_text()) for place in self.folders]


def _rank(function, arguments, folder):
    from litchi.dist import start_ranks

    status = 1
    try:
        result = function(start_ranks(timeout_s=60), *arguments)
        Path(folder, "result.json").write_text(json.dumps(result))
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)  # peers may hang in a collective
