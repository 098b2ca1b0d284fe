"""Harm that is not a signal, done to real runs: disks that fill up, damaged checkpoints, numbers, memory.

Each takes a room and the name of a run's folder in it, and raises `Failed` when the run did not come out as it should.
What is returned are the seconds until it was noticed, or None where that is the step itself.
"""

from __future__ import annotations

import contextlib
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from litchi.scale.inject import DAMAGES
from litchi.scale.room import NotHere, Room, Run, check, events_of, numbers_of, steps_of
from litchi.train.checkpoint import list_checkpoints
from litchi.train.shards import find_changed

FULL_S = 60.0  # in which all ranks of a run whose disk is full have ended
SMALL_BYTES = 16 * 2**20
# smaller pieces drop other things; at a rate of 0.05 losses of two sizes were 7e-6 apart without a fault
WITHOUT_DROPOUT = ("trainable.lora.dropout=0", "optim.name=sgd", "optim.lr=0.002")
SAME_LOSS = 1e-6
ROW = 3


# --------------------------------------------------------------------------------------------------------------- disk


def limit_file(room: Room, out: str, *, rank: int, step: int) -> float:
    """No file of a rank may grow (EFBIG): all end with one line, and the run goes on when they may."""
    with room.running(out) as run:
        run.reach(step)
        pid, written = run.ranks()[rank].pid, (run.folder / "metrics.jsonl").stat().st_size
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (written + 200, hard))
        notice_s = run.wait_to_end()
        _ended_full(run, "EFBIG", notice_s)
    room.finish(out)
    return notice_s


def fill_disk(room: Room, out: str, *, step: int) -> float:
    """A disk that is full (ENOSPC), which needs the right to mount one."""
    with _small_disk(room.folder / f"disk-{out}") as disk:
        place, filler = str(disk / "run"), disk / "filler"
        with room.running(place) as run:
            run.reach(step)
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            notice_s = run.wait_to_end()
            _ended_full(run, "ENOSPC", notice_s)
        filler.unlink()
        room.finish(place)
    return notice_s


@contextlib.contextmanager
def _small_disk(place: Path) -> Iterator[Path]:
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_BYTES}", "none", str(place)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        raise NotHere("no right to mount a small disk")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def _ended_full(run: Run, number: str, notice_s: float) -> None:
    run.end(4)
    check(notice_s < FULL_S, f"ended after {notice_s:.0f} s")
    check(run.text.count("error: ") == 1 and number in run.text.partition("error: ")[2], run.text)
    saved = [(one.folder, one.manifest["files"]) for one in list_checkpoints(run.folder)]
    sound = bool(saved) and not any(find_changed(folder, files, files) for folder, files in saved)
    check(sound, "an older checkpoint is gone or damaged")
    check(not list((run.folder / "checkpoints").glob(".*")), "what was half written is left over")


# -------------------------------------------------------------------------------------------------------- checkpoints


def damage_newest(room: Room, out: str, *, damage: str, step: int = 10) -> None:
    """The newest checkpoint is not as it was written: it is named and kept, and the one before is used."""
    begun = _stopped(room, step)
    folder = shutil.copytree(begun, room.folder / out)
    older, newest = (one.folder for one in list_checkpoints(folder)[-2:])
    harm, said = DAMAGES[damage]
    harm(newest)
    before = newest if not older.exists() else older
    text = room.finish(out, "train.keep=3")
    lines = [line for line in text.splitlines() if "is damaged" in line]
    check(len(lines) == 1 and re.search(said, lines[0]) is not None, text)
    (aside,) = (folder / "checkpoints").glob("*.corrupt*")
    check(aside.name in lines[0], lines[0])
    used = re.search(r"resumed from (step-\d+)", text)
    check(used is not None and used.group(1) < newest.name and used.group(1) <= before.name, text)


def _stopped(room: Room, step: int) -> Path:
    """A run with three checkpoints that was stopped; it is made once."""
    if "stopped" not in room.wholes:
        with room.running("stopped", "train.keep=3") as run:
            run.reach(step)
            run.process.send_signal(signal.SIGTERM)
            run.end(75)
        room.wholes["stopped"] = run.folder
    return room.wholes["stopped"]


# -------------------------------------------------------------------------------------------------- numbers and memory


def spoil_numbers(room: Room, out: str, *, kind: str, rank: int | None, rule: str, first: int, row: int = 1) -> None:
    """A NaN in the loss or a gradient, in one step or a row of them, under a rule of `train.on_nonfinite`: updates are
    left out by all ranks alike, the run goes back, or it stops, and the journal says where it began."""
    steps = list(range(first, first + row))
    ends = rule == "stop" or (rule == "skip" and row >= ROW)
    with room.running(out, f"train.on_nonfinite={rule}", inject=[[kind, steps, rank]]) as run:
        run.end(1 if ends else 0)
    found = events_of(run.folder, "nonfinite")
    seen = steps[:1] if rule == "stop" else steps
    check([one["step"] for one in found] == seen, f"the journal has {found}")
    check(all(one["kind"] == kind and "layers.1." in one["where"] for one in found), f"the journal has {found}")
    if ends:
        line = run.text.partition("error: ")[2]
        check("not finite" in line and found[0]["samples"][0] in line, run.text)
        return
    left_out = [first - 1, *steps] if rule == "rollback" else steps
    wanted = room.whole(inject=[["left out", left_out, None]])
    check(numbers_of(run.folder) == numbers_of(wanted), f"{out}: not the run without the updates of {left_out}")


def exhaust_memory(room: Room, out: str, *, phase: str, rank: int, step: int, above: int = 120) -> None:
    """Memory runs out on a rank: samples are named, all start again smaller, with the losses of a run that was small
    from the start."""
    with room.running(out, *WITHOUT_DROPOUT, inject=[[phase, [step], rank, above]]) as run:
        run.end(0)
    entries = events_of(run.folder, "micro_batch_tokens")
    check(bool(entries), "the journal has no smaller micro-batches")
    last = entries[-1]
    check(last["rank"] == rank and last["in_step"] == step, f"the journal has {last}")
    check(f"out of memory in step {step}: " in run.text and last["of"]["samples"][0] in run.text, run.text)
    small = room.whole(*WITHOUT_DROPOUT, f"train.micro_batch_tokens={last['tokens']}")
    pairs = list(zip(_losses(run.folder), _losses(small), strict=True))
    most = max(abs(a - b) / abs(b) for a, b in pairs)
    check(most <= SAME_LOSS, f"losses differ by {most:.1e} from a run that was small from the start")


def _losses(folder: Path) -> Sequence[float]:
    return [line["loss"] for line in steps_of(folder)]
