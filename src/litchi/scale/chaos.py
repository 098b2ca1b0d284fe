"""Faults done to real runs on this machine: kill, stop or halt a part of one; nothing must be lost or left over.

Each fault starts `litchi train --procs 2` in a folder of its own, does its harm, lets the run (or the same command
again) end, and compares losses and the last checkpoint, byte by byte, with those of a run that nothing happened to.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import psutil

from litchi.scale.selfcheck import write_rows

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
NOTICE_S = 10.0
LEAVE_S = 5.0  # in which what a run has started ends behind it


class Failed(AssertionError):
    """A run did not come out of a fault as it should have."""


def check(right: bool, what: str) -> None:
    if not right:
        raise Failed(what)


@dataclass(frozen=True)
class Result:
    """What came of a fault. `notice_s`: from the harm until all that had to end had ended, or it was said."""

    fault: str
    passed: bool
    notice_s: float | None = None
    said: str = ""


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
            with contextlib.suppress(psutil.Error):
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
        self.numbers: dict[bool, object] = {}
        self.count = 0

    def words(self, out: str, *, measured: bool, more: Sequence[str] = ()) -> list[str]:
        data = self.folder / "data"
        settings = [*SETTINGS, *(MEASURED if measured else ()), *more]
        words = [word.format(folder=data) if word in MEASURED else word for word in settings]
        files = [str(self.folder / "c.yaml"), f"data.train={data}/rerank.jsonl", f"output={self.folder / out}"]
        return ["train", *files, *words, "--procs", "2"]

    def start(self, out: str, *more: str, measured: bool = False) -> Run:
        self.count += 1
        place, log = self.folder / f"place-{self.count}", self.folder / f"log-{self.count}.txt"
        place.mkdir()
        log.touch()
        process = self.program(self.words(out, measured=measured, more=more), place, log)
        return Run(self.folder / out, place, log, process)

    @contextlib.contextmanager
    def running(self, out: str, *more: str, measured: bool = False) -> Iterator[Run]:
        """A run under way; whatever happens, nothing of it is left behind the block."""
        run = self.start(out, *more, measured=measured)
        try:
            yield run
        finally:
            run.kill()

    def finish(self, out: str, *more: str, measured: bool = False) -> None:
        """The same command again goes on to the end, as if nothing had happened."""
        with self.running(out, *more, measured=measured) as run:
            run.end(0)
        self.compare(out, measured=measured)

    def compare(self, out: str, *, measured: bool = False) -> None:
        """Whether a run ended as the one that nothing happened to."""
        if measured not in self.numbers:
            name = f"whole-{measured}"
            with self.running(name, measured=measured) as run:
                run.end(0)
            self.numbers[measured] = numbers_of(self.folder / name)
        check(numbers_of(self.folder / out) == self.numbers[measured], f"{out} is not bit-identical")


def steps_of(folder: Path) -> list[dict]:
    from litchi.train.metrics import read_lines

    return read_lines(folder / "metrics.jsonl")


def numbers_of(folder: Path) -> object:
    """Losses of all steps, figures of all evaluations, hashes of the last checkpoint's files."""
    from litchi.train.checkpoint import list_checkpoints
    from litchi.train.metrics import read_lines

    last = list_checkpoints(folder)[-1]
    files = {name: entry["sha256"] for name, entry in last.manifest["files"].items()}
    lines = [{key: line[key] for key in SAME} for line in steps_of(folder)]
    return lines, read_lines(folder / "eval.jsonl"), last.step, files


# ----------------------------------------------------------------------------------------------------------- faults


def kill_rank(room: Room, out: str, *, rank: int, step: int, later_s: float = 0.0) -> float:
    """SIGKILL a rank behind a step; the run goes on unaided. Returns seconds until all others had ended."""
    with room.running(out) as run:
        run.reach(step)
        time.sleep(later_s)
        run.ranks()[rank].kill()
        notice_s = run.wait_for(lambda: "(restart 1 of 3)" in run.text, "restart")
        check(f"rank {rank} was ended by SIGKILL; going on from step" in run.text, run.text)
        check(notice_s < NOTICE_S, f"noticed after {notice_s:.1f} s")
        run.end(0)
    room.compare(out)
    return notice_s


def kill_launcher(room: Room, out: str, *, step: int, later_s: float = 0.0) -> float:
    """SIGKILL the launcher: its ranks and loaders end, and the same command resumes."""
    with room.running(out) as run:
        run.reach(step)
        time.sleep(later_s)
        run.process.kill()
        notice_s = run.wait_for(lambda: not run.left(), "end of all ranks", alive=False)
        check(notice_s < NOTICE_S, f"ended after {notice_s:.1f} s")
    room.finish(out)
    return notice_s


def stop_in_step(room: Room, out: str, *, number: int = signal.SIGTERM, step: int = 5) -> float:
    return _stop(room, out, number, lambda run: run.reach(step))


def stop_in_evaluation(room: Room, out: str, *, number: int = signal.SIGTERM) -> float:
    """The evaluation is not waited for, and done again by the run that goes on."""
    return _stop(room, out, number, lambda run: run.wait_for(lambda: "measuring " in run.text, "evaluation"), True)


def stop_in_saving(room: Room, out: str, *, number: int = signal.SIGTERM) -> float:
    places = room.folder / out / "checkpoints"
    return _stop(room, out, number, lambda run: run.wait_for(lambda: list(places.glob(".step-*.part")), "save"))


def stop_at_start(room: Room, out: str, *, number: int = signal.SIGTERM, said: str = " rows, ") -> float:
    """Before there is anything to save, and again before a run that resumes has begun to."""
    for first in (True, False):
        if not first:
            _stop_once(room, out, number, lambda run: run.reach(4))
        taken = len(steps_of(room.folder / out))
        with room.running(out) as run:
            run.reach(0)
            run.wait_for(lambda: said in run.text, said)
            run.process.send_signal(number)
            notice_s = run.wait_for(lambda: run.process.poll() is not None, "end", alive=False)
            run.end(75)
            check(len(steps_of(run.folder)) <= taken, "it had begun already")
    room.finish(out)
    return notice_s


def _stop(room: Room, out: str, number: int, moment: Callable[[Run], object], measured: bool = False) -> float:
    notice_s = _stop_once(room, out, number, moment, measured)
    room.finish(out, measured=measured)
    return notice_s


def _stop_once(room: Room, out: str, number: int, moment: Callable[[Run], object], measured: bool = False) -> float:
    with room.running(out, measured=measured) as run:
        moment(run)
        run.process.send_signal(number)
        notice_s = run.wait_for(lambda: run.process.poll() is not None, "end", alive=False)
        run.end(75)
        check(run.text.count("error: ") == 1 and f"stopped by {signal.Signals(number).name}" in run.text, run.text)
        check(len(steps_of(run.folder)) < STEPS, "it had ended already")
        check("eval at step" not in run.text, "the evaluation ran to its end")
    return notice_s


def halt_rank(room: Room, out: str, *, rank: int = 1, hang_s: float = 4.0, step: int = 5) -> float:
    """SIGSTOP a rank: it is named, the other writes its stacks, all start again. Where it had not yet told the other
    that it is past its start, its silence counts, 30 s, and not `train.hang_s`."""
    with room.running(out, f"train.hang_s={hang_s}") as run:
        run.reach(step)
        run.ranks()[rank].suspend()
        notice_s = run.wait_for(lambda: "error: " in run.text, "word of it")
        run.wait_for(lambda: "(restart 1 of 3)" in run.text, "restart")
        line = run.text.partition("error: ")[2].partition("\n")[0]
        check(f"rank {rank} (" in line and ("nothing has moved" in line or "not been heard of" in line), line)
        stacks = (run.folder / "stacks" / f"rank-{1 - rank}.txt").read_text(encoding="utf-8")
        check("thread MainThread of process" in stacks, stacks)
        run.end(0)
    room.compare(out)
    return notice_s


def halt_loader(room: Room, out: str, *, rank: int = 1, hang_s: float = 4.0, step: int = 5) -> float:
    """SIGSTOP a process that loads samples: the rank that waits for it is named, with the samples."""
    with room.running(out, f"train.hang_s={hang_s}") as run:
        run.reach(step)
        (loader,) = run.ranks()[rank].children()
        loader.suspend()
        notice_s = run.wait_for(lambda: "error: nothing has moved" in run.text, "word of it")
        line = run.text.partition("error: nothing")[2].partition("\n")[0]
        check(f"rank {rank} (" in line and "waiting for the data of step" in line and "samples " in line, line)
        run.end(0)
        check(not psutil.pid_exists(loader.pid) or loader.status() == psutil.STATUS_ZOMBIE, "the loader is left over")
    room.compare(out)
    return notice_s


@dataclass(frozen=True)
class Fault:
    """A named harm; `run` does it once, and says after how many seconds it was noticed."""

    name: str
    run: Callable[[Room, str], float]


def list_faults(*, kills: int = 10, stops: int = 3, seed: int = 1) -> list[Fault]:
    """All faults: so many kills of each rank at random moments, stops of each kind, ..."""
    draw = random.Random(seed)

    def moment() -> dict[str, Any]:
        return {"step": draw.randrange(STEPS - 5), "later_s": draw.uniform(0, 0.15)}

    faults = []
    for _ in range(kills):
        faults += [Fault("SIGKILL of a rank", partial(kill_rank, rank=rank, **moment())) for rank in (0, 1)]
    for n in range(stops):
        number, said = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)[n % 3], ("", " rows, ", "accumulation")[n % 3]
        faults += [
            Fault("SIGKILL of the launcher", partial(kill_launcher, **moment())),
            Fault("signal in a step", partial(stop_in_step, number=number, step=draw.randrange(1, STEPS - 4))),
            Fault("signal in an evaluation", partial(stop_in_evaluation, number=number)),
            Fault("signal in a save", partial(stop_in_saving, number=number)),
            Fault("signal at the start", partial(stop_at_start, number=number, said=said)),
            Fault("SIGSTOP of a rank", partial(halt_rank, rank=n % 2)),
            Fault("SIGSTOP of a loader", partial(halt_loader, rank=n % 2)),
        ]
    return faults


def run_faults(folder: Path, faults: Sequence[Fault], say: Callable[[str], None] = print) -> list[Result]:
    """Do all of it, one after the other."""
    room = Room(folder)
    results = []
    for number, fault in enumerate(faults):
        try:
            result = Result(fault.name, True, fault.run(room, f"run-{number}"))
        except Failed as error:
            result = Result(fault.name, False, None, str(error))
        results.append(result)
        took = f"noticed after {result.notice_s:.1f} s" if result.notice_s is not None else f"FAILED: {result.said}"
        say(f"{number + 1} of {len(faults)}  {fault.name}: {took}")
    return results


def report_faults(*, quick: bool = False) -> dict[str, Any]:
    """The JSON answer of `selfcheck --chaos`; `quick`: each fault once."""
    faults = list_faults(kills=1, stops=1) if quick else list_faults()
    with tempfile.TemporaryDirectory() as folder:
        results = run_faults(Path(folder) / "room", faults, lambda text: print(text, file=sys.stderr, flush=True))
    return {"passed": all(result.passed for result in results), "faults": [asdict(result) for result in results]}


def format_report(report: Mapping[str, Any]) -> str:
    """The scorecard as Markdown: a row for each kind of fault."""
    results = [Result(**one) for one in report["faults"]]
    rows = ["| fault | runs | passed | noticed after, s |", "|---|---|---|---|"]
    for name in dict.fromkeys(result.fault for result in results):
        mine = [result for result in results if result.fault == name]
        times = sorted(result.notice_s for result in mine if result.notice_s is not None)
        span = f"{times[0]:.1f} to {times[-1]:.1f}" if times else ""
        rows.append(f"| {name} | {len(mine)} | {sum(result.passed for result in mine)} | {span} |")
    return "\n".join(rows)
