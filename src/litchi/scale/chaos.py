"""Faults done to real runs on this machine: kill, stop, halt, starve or spoil a part of one; nothing must be lost.

Each fault starts `litchi train --procs 2` in a folder of its own, does its harm, lets the run (or the same command
again) end, and compares losses and the last checkpoint, byte by byte, with those of a run that nothing happened to.
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from litchi.errors import StoppedError
from litchi.scale.harm import ROW, damage_newest, exhaust_memory, fill_disk, limit_file, spoil_numbers
from litchi.scale.inject import DAMAGES
from litchi.scale.room import STEPS, Failed, NotHere, Room, Run, check, steps_of

NOTICE_S = 10.0


@dataclass(frozen=True)
class Result:
    """What came of a fault. `passed` None: it could not be done here. `notice_s`: from the harm until all that had to
    end had ended, or it was said."""

    fault: str
    passed: bool | None
    notice_s: float | None = None
    said: str = ""


# ----------------------------------------------------------------------------------------------- kill, stop and halt


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
    """A signal in the middle of training."""
    return _stop(room, out, number, lambda run: run.reach(step))


def stop_in_evaluation(room: Room, out: str, *, number: int = signal.SIGTERM) -> float:
    """The evaluation is not waited for, and done again by the run that goes on."""
    return _stop(room, out, number, lambda run: run.wait_for(lambda: "measuring " in run.text, "evaluation"), True)


def stop_in_saving(room: Room, out: str, *, number: int = signal.SIGTERM) -> float:
    """A signal while a checkpoint is written."""
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
            notice_s = run.wait_to_end()
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
        notice_s = run.wait_to_end()
        run.end(75)
        check(run.text.count("error: ") == 1 and f"stopped by {signal.Signals(number).name}" in run.text, run.text)
        check(len(steps_of(run.folder)) < STEPS, "it had ended already")
        check("eval at step" not in run.text, "the evaluation ran to its end")
    return notice_s


def halt_rank(room: Room, out: str, *, rank: int = 1, hang_s: float = 10.0, step: int = 5) -> float:
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


# ----------------------------------------------------------------------------------------------------------- the list

UNAIDED = "went on unaided, bit-identical; nothing left running"
STOPPED = "saved or unharmed, status 75, bit-identical when resumed"
SHOWN = {
    "SIGKILL of a rank": UNAIDED,
    "SIGKILL of the launcher": "ranks and loaders ended; the same command: bit-identical",
    "signal in a step": STOPPED,
    "signal in an evaluation": STOPPED,
    "signal in a save": STOPPED,
    "signal at the start": STOPPED,
    "SIGSTOP of a rank": f"named, stacks written, {UNAIDED}",
    "SIGSTOP of a loader": f"named with step and samples, {UNAIDED}",
    "files may not grow": "all ranks ended with one line, status 4, older checkpoints whole; then bit-identical",
    "disk full": "the same",
    "newest checkpoint damaged": "found, named, kept, the one before used, bit-identical",
    "NaN in the loss": "by the rule set: left out as if only that update were missing, gone back for, or stopped",
    "NaN in a gradient": "the same",
    "NaN three times in a row": "the same",
    "out of memory": "samples named, went on smaller, losses within 1e-6 of a run small from the start",
}


@dataclass(frozen=True)
class Fault:
    """A named harm; `run` does it once, and says after how many seconds it was noticed."""

    name: str
    run: Callable[[Room, str], float | None]


def list_faults(*, quick: bool = False, seed: int = 1) -> list[Fault]:
    """All faults, at moments drawn by a seed; with `quick` one of each."""
    draw = random.Random(seed)

    def moment() -> dict[str, Any]:
        return {"step": draw.randrange(STEPS - 5), "later_s": draw.uniform(0, 0.15)}

    def step() -> int:
        return draw.randrange(5, STEPS - 4)

    faults = []
    for _ in range(1 if quick else 10):
        faults += [Fault("SIGKILL of a rank", partial(kill_rank, rank=rank, **moment())) for rank in (0, 1)[quick:]]
    for n in range(1 if quick else 3):
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
    for n in range(1 if quick else 5):
        faults.append(Fault("files may not grow", partial(limit_file, rank=1 - n % 2, step=step())))
        faults.append(Fault("disk full", partial(fill_disk, step=step())))
    for damage in ["a bit of a tensor flipped"] if quick else DAMAGES:
        faults.append(Fault("newest checkpoint damaged", partial(damage_newest, damage=damage)))
    # of all that goes wrong in numbers or memory, which are compared with one run; the last step of an epoch is small
    first = draw.choice([n for n in range(5, STEPS - 4) if n % 3])
    for kind, name in (("loss", "NaN in the loss"), ("gradient", "NaN in a gradient")):
        for rule, rank in [("skip", 1)] if quick else [("skip", None), ("skip", 1), ("stop", 0)]:
            harm = partial(spoil_numbers, kind=kind, rank=rank, rule=rule, first=first)
            faults.append(Fault(name, harm))
    for rule, rank in [("rollback", 0)] if quick else [("rollback", 0), ("rollback", None), ("skip", 1)]:
        harm = partial(spoil_numbers, kind="loss", rank=rank, rule=rule, first=first, row=ROW)
        faults.append(Fault("NaN three times in a row", harm))
    for phase in ("forward", "backward", "optimizer"):
        for rank in (1,) if quick else (0, 1):
            faults.append(Fault("out of memory", partial(exhaust_memory, phase=phase, rank=rank, step=first)))
    return faults


def run_faults(folder: Path, faults: Sequence[Fault], say: Callable[[str], None] = print) -> list[Result]:
    """Do all of it, one after the other."""
    room = Room(folder)
    results = []
    for number, fault in enumerate(faults):
        start = time.monotonic()
        try:
            notice_s = fault.run(room, f"run-{number}")
            result = Result(fault.name, True, notice_s)
            told = "passed" if notice_s is None else f"passed, noticed after {notice_s:.1f} s"
        except NotHere as reason:
            result, told = Result(fault.name, None, None, str(reason)), f"not done: {reason}"
        except Exception as error:  # one that fails does not hide the others
            said = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
            result, told = Result(fault.name, False, None, said), f"FAILED: {said}"
        results.append(result)
        say(f"{number + 1} of {len(faults)}  {fault.name}: {told} ({time.monotonic() - start:.0f} s)")
    return results


def report_faults(*, quick: bool = False) -> dict[str, Any]:
    """The scorecard's figures; `passed`: none failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(StoppedError.status))  # the run under way is ended on the way out
    faults = list_faults(quick=quick)
    with tempfile.TemporaryDirectory() as folder:
        results = run_faults(Path(folder) / "room", faults, lambda text: print(text, file=sys.stderr, flush=True))
    passed = all(result.passed is not False for result in results)
    return {"passed": passed, "faults": [asdict(result) for result in results]}


def format_report(report: Mapping[str, Any]) -> str:
    """The scorecard as Markdown: a row for each kind of fault."""
    results = [Result(**one) for one in report["faults"]]
    rows = ["| fault | runs | passed | noticed after, s | shown |", "|---|---|---|---|---|"]
    for name in dict.fromkeys(result.fault for result in results):
        mine = [result for result in results if result.fault == name]
        times = sorted(result.notice_s for result in mine if result.notice_s is not None)
        span = f"{times[0]:.1f} to {times[-1]:.1f}" if times else ""
        away = {result.said for result in mine if result.passed is None}
        passed = f"not done: {away.pop()}" if away else sum(result.passed is True for result in mine)
        rows.append(f"| {name} | {len(mine)} | {passed} | {span} | {SHOWN.get(name, '')} |")
    return "\n".join(rows)
