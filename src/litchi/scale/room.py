"""A place where real runs are harmed and compared: `litchi train --procs 2` under way, and those nothing happened to.

What is started here ends here: a run is killed with all its processes when its block is left.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from litchi.scale.inject import Injected
from litchi.scale.selfcheck import write_rows
from litchi.train.checkpoint import list_checkpoints
from litchi.train.metrics import read_lines

STEPS = 20
SETTINGS = (
    *("task=rerank", "model.path=builtin:tiny", "track=[]", "data.workers=1", "data.negatives=1", "train.export=never"),
    *("trainable={language: lora, lora: {rank: 4, dropout: 0.2}}", "optim.lr=2e-3", "train.precision=fp32"),
    *(f"train.steps={STEPS}", "train.global_batch_size=4", "train.micro_batch_tokens=400", "train.keep=2"),
    *("train.save_every=3", "train.rehearse=false"),
)
MEASURED = ("data.eval={folder}/eval.jsonl", "train.eval_every=10")
SAME = ("step", "epoch", "loss", "units", "grad_norm", "lr", "tokens", "pixels", "skipped")
PATIENCE_S = 180.0
LEAVE_S = 5.0  # in which what a run has started ends behind it


class Failed(AssertionError):
    """A run did not come out of a fault as it should have."""


class NotHere(Exception):
    """This machine does not let a fault be done."""


def check(right: bool, what: str) -> None:
    """Raise Failed where something is not right."""
    if not right:
        raise Failed(what)


class Program(Protocol):
    """A program under way, as subprocess has it."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int, /) -> None: ...
    def kill(self) -> None: ...


Start = Callable[[Sequence[str], Path, Path], Program]


def start_program(words: Sequence[str], place: Path, log: Path) -> Program:
    """Start `litchi WORDS` in a folder, with a file for what it prints."""
    command = [sys.executable, "-m", "litchi", *words]
    with log.open("w") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, cwd=place, start_new_session=True)


@dataclass(frozen=True)
class Run:
    """`litchi train` under way. `place` is where it was started; all its processes stay there."""

    folder: Path
    place: Path
    log: Path
    process: Program

    @property
    def text(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def wait_for(self, there: Callable[[], object], what: str, *, alive: bool = True) -> float:
        """Wait until something is there; returns the seconds it took."""
        start = time.monotonic()
        while not there():
            check(not alive or self.process.poll() is None, f"ended before {what}:\n{self.text[-2000:]}")
            check(time.monotonic() - start < PATIENCE_S, f"no {what} in {PATIENCE_S:.0f} s:\n{self.text[-2000:]}")
            time.sleep(0.005)
        return time.monotonic() - start

    def wait_to_end(self) -> float:
        return self.wait_for(lambda: self.process.poll() is not None, "end", alive=False)

    def reach(self, step: int) -> None:
        """Wait until a step is done; 0: until all ranks have begun to start."""
        if step:
            self.wait_for(lambda: len(steps_of(self.folder)) >= step, f"step {step}")
        else:
            self.wait_for(lambda: len(self.ranks()) == 2, "ranks")

    def ranks(self) -> dict[int, psutil.Process]:
        """The ranks by number: they are started one after the other."""
        with contextlib.suppress(psutil.Error):
            return dict(enumerate(sorted(psutil.Process(self.process.pid).children(), key=lambda one: one.pid)))
        return {}

    def left(self) -> list[int]:
        """Processes of this run that have not ended: launcher, ranks, loaders."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, FileNotFoundError):  # psutil 7.0 says the second of one just gone
                if process.status() != psutil.STATUS_ZOMBIE and process.cwd() == str(self.place):
                    found.append(process.pid)
        return found

    def end(self, status: int) -> None:
        """Wait for the end: of this status, with nothing left over."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE_S)
        check(self.process.poll() == status, f"status {self.process.poll()} instead of {status}:\n{self.text[-3000:]}")
        until = time.monotonic() + LEAVE_S
        while self.left() and time.monotonic() < until:
            time.sleep(0.05)
        check(not self.left(), f"processes are left over: {self.left()}")

    def kill(self) -> None:
        """End the program and all ranks that are left."""
        if self.process.poll() is None:
            self.process.kill()
        for pid in self.left():
            with contextlib.suppress(psutil.Error):
                psutil.Process(pid).kill()
        self.process.wait()


class Room:
    """A folder with data, and the runs in it that nothing happened to."""

    def __init__(self, folder: Path, start: Start = start_program):
        self.folder, self.program = folder.resolve(), start
        (folder / "data").mkdir(parents=True)
        write_rows(folder / "data")
        rows = (folder / "data" / "rerank.jsonl").read_text(encoding="utf-8").splitlines()
        many = [json.dumps({"id": f"e{n}", **json.loads(row)}) for n, row in enumerate(rows * 12)]
        (folder / "data" / "eval.jsonl").write_text("\n".join(many) + "\n", encoding="utf-8")
        (folder / "c.yaml").write_text("task: rerank\n", encoding="utf-8")
        self.wholes: dict[str, Path] = {}
        self.count = 0

    def words(self, out: str, more: Sequence[str] = (), *, measured: bool = False, inject: Injected = ()) -> list[str]:
        """The command line behind `litchi`; a run in which something goes wrong is a job of `litchi selfcheck`."""
        data = self.folder / "data"
        places = [f"data.train={data}/rerank.jsonl", f"output={self.folder / out}"]
        settings = [*places, *SETTINGS, *((one.format(folder=data) for one in MEASURED) if measured else ()), *more]
        if not inject:
            return ["train", str(self.folder / "c.yaml"), *settings, "--procs", "2"]
        job = self.folder / f"job-{self.count}.json"
        job.write_text(json.dumps({"words": settings, "inject": inject, "output": str(self.folder / out)}))
        return ["selfcheck", "--job", str(job), "--procs", "2"]

    def start(self, out: str, *more: str, measured: bool = False, inject: Injected = ()) -> Run:
        """Start the program on a run's folder."""
        self.count += 1
        place, log = self.folder / f"place-{self.count}", self.folder / f"log-{self.count}.txt"
        place.mkdir()
        log.touch()
        process = self.program(self.words(out, more, measured=measured, inject=inject), place, log)
        return Run(self.folder / out, place, log, process)

    @contextlib.contextmanager
    def running(self, out: str, *more: str, measured: bool = False, inject: Injected = ()) -> Iterator[Run]:
        """A run under way; whatever happens, nothing of it is left behind the block."""
        run = self.start(out, *more, measured=measured, inject=inject)
        try:
            yield run
        finally:
            run.kill()

    def whole(self, *more: str, measured: bool = False, inject: Injected = ()) -> Path:
        """Folder of the run with these settings that ends without a fault; it is made once."""
        key = json.dumps([more, measured, inject])
        if key not in self.wholes:
            out = f"whole-{len(self.wholes)}"
            with self.running(out, *more, measured=measured, inject=inject) as run:
                run.end(0)
            self.wholes[key] = run.folder
        return self.wholes[key]

    def finish(self, out: str, *more: str, measured: bool = False) -> str:
        """The same command again goes on to the end, as if nothing had happened; returns what it said."""
        with self.running(out, *more, measured=measured) as run:
            run.end(0)
        self.compare(out, measured=measured)
        return run.text

    def compare(self, out: str, *, measured: bool = False) -> None:
        """Whether a run ended as the one that nothing happened to."""
        same = numbers_of(self.folder / out) == numbers_of(self.whole(measured=measured))
        check(same, f"{out} is not bit-identical")


def steps_of(folder: Path) -> list[dict]:
    """The lines of metrics.jsonl."""
    return read_lines(folder / "metrics.jsonl")


def events_of(folder: Path, kind: str) -> list[dict]:
    """The entries of a kind in events.jsonl."""
    return [entry for entry in read_lines(folder / "events.jsonl") if entry["event"] == kind]


def numbers_of(folder: Path) -> tuple[Any, ...]:
    """Losses of all steps whose update was applied, figures of all evaluations, hashes of the last checkpoint."""
    last = list_checkpoints(folder)[-1]
    files = {name: entry["sha256"] for name, entry in last.manifest["files"].items()}
    lines = [{key: line[key] for key in SAME} for line in steps_of(folder) if not line["skipped"]]
    return lines, read_lines(folder / "eval.jsonl"), last.step, files
