"""`litchi ladder`: a run in small first, rung by rung, each with gates; the first that is not passed ends the climb.

    CONFIG -> plan_rungs -> `litchi train` of each, in folders beside the run's -> ladder_gates.py -> the JSON answer

All rungs take the run's settings with a constant rate from step 3 on, without dropout and curriculum, so that a step
is the same work in each and their losses can be compared. A rung that was passed is not run again.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from litchi.config import Config
from litchi.errors import StoppedError, UserError
from litchi.scale.compare import read_run
from litchi.scale.ladder_gates import Climb, Failure, check_gates
from litchi.train.metrics import read_lines

WORDS = (
    *("optim.schedule=constant", "optim.warmup=2", "trainable.lora.dropout=0", "curriculum=[]", "data.eval=[]"),
    *("train.save=all", "train.keep=10", "train.best=null", "train.early_stop=null", "train.eval_every=null"),
    *("train.on_nonfinite=stop", "train.loss_spike=null", "train.restarts=0", "train.export=never", "track=[]"),
)
EPOCH = 0  # as a number of steps: an epoch, or the limit
LONG = 10  # steps up to which a rung is resumed and its tensors are compared
EVAL_ROWS = 200
ERROR_LINES = 3  # of what a command said


@dataclass(frozen=True)
class Rung:
    """`steps` on `procs` ranks; in the layout of the settings where these are all ranks, else in one that is chosen."""

    procs: int
    steps: int
    last: bool

    @property
    def name(self) -> str:
        steps = "an epoch" if self.steps == EPOCH else f"{self.steps} steps"
        return f"{self.procs} process{'es' * (self.procs > 1)}, {steps}"


def plan_rungs(procs: int) -> list[Rung]:
    """From one process and five steps to all processes. Pure."""
    sizes = [(1, 5)]
    sizes += [(2, 10), (2, EPOCH)] if procs > 1 else [(1, EPOCH)]
    sizes += [(procs, 10)] if procs > 2 else []
    return [Rung(n, steps, n == procs) for n, steps in sizes]


def climb_ladder(
    file: str,
    overrides: Sequence[str],
    config: Config,
    *,
    procs: int,
    limit: int = 100,
    floor: float | None = None,
    memory_bytes: float | None = None,
) -> dict[str, Any]:
    """The JSON answer of `ladder`.

    Args:
        file, overrides, config: the run's settings, as they were given and as they were read.
        procs: ranks of the last rung.
        limit: steps of the epoch at most.
        floor: of the efficiency; None: a half on GPUs, none on a CPU, whose cores ranks share.
        memory_bytes: of a rank; None: of the GPU, or an even share of the RAM.

    Raises:
        StoppedError: by a signal; the same command goes on.
    """
    folder = Path(f"{config.output}-ladder")
    answer: list[dict[str, Any]] = []
    climbs: list[Climb] = []
    for rung in plan_rungs(procs):
        place = folder / f"{rung.procs}x{rung.steps or 'epoch'}"
        steps = rung.steps or _epoch_steps(folder / "1x5", limit)
        words = rung_words(overrides, rung, steps, place / "run")
        known = _known(place, words)
        print(f"{rung.name}{' (passed before)' if known else ''}", file=sys.stderr, flush=True)
        try:
            climb = _gather(place, rung, config, known) if known else _climb(file, words, rung, place, config)
        except _Ended as ended:
            failure: Failure | None = ended.failure
            answer.append({"name": rung.name, "passed": False, "figures": {}, **_said(failure)})
            _note(place, words, passed=False)
            break
        climb = replace(
            climb,
            first=climbs[0] if climbs else None,
            before=climbs[-1] if climbs else None,
            limit_bytes=memory_bytes or _memory(climb.start["device"], rung.procs),
            floor=(0.5 if climb.start["device"] == "cuda" else 0.0) if floor is None else floor,
        )
        failure = check_gates(climb)
        answer.append({"name": rung.name, "passed": failure is None, "figures": climb.figures(), **_said(failure)})
        _note(
            place, words, passed=failure is None, again=list(climb.again), tensors=climb.tensors, unmoved=climb.unmoved,
            evaluations=dict(climb.evaluations),
        )  # fmt: skip
        if failure is not None:
            break
        climbs.append(climb)
    return {"passed": len(climbs) == len(plan_rungs(procs)), "folder": str(folder), "rungs": answer}


def rung_words(overrides: Sequence[str], rung: Rung, steps: int, output: Path) -> list[str]:
    """Settings of a rung, on the command line; what it sets itself takes the place of what was given. Pure."""
    own = [*WORDS, f"train.steps={steps}", f"output={output}"]
    own += [f"train.save_every={-(-steps // 2)}"] if steps <= LONG else ["train.save_every=null"]
    own += [] if rung.last else ["parallel=auto"]
    keys = {word.partition("=")[0] for word in own} | {"train.epochs"}
    given = [word for word in overrides if word.partition("=")[0] not in keys]
    if not rung.last:
        given = [word for word in given if not word.startswith("parallel.")]
    return [*given, *own]


def format_ladder(answer: dict[str, Any]) -> str:
    """The answer for people."""
    lines = []
    for rung in answer["rungs"]:
        lines.append(f"{'passed' if rung['passed'] else 'FAILED'}  {rung['name']}")
        figures = rung["figures"]
        if figures:
            rate = "" if figures["efficiency"] is None else f", efficiency {figures['efficiency']:.0%}"
            apart = (
                "" if figures["loss_difference"] is None else f", {figures['loss_difference']:.0e} from the rung below"
            )
            lines.append(
                f"        loss {figures['loss_first']:.4f} -> {figures['loss_last']:.4f}{apart}, "
                f"{figures['step_s']:.2f} s a step, peak {figures['peak_bytes'] / 1e9:.2f} GB{rate}"
            )
        if not rung["passed"]:
            lines += [f"        {rung['reason']}", f"        -> {rung['remedy']}"]
    verdict = "All rungs are passed: start the run" if answer["passed"] else "Mend it and climb again"
    return "\n".join([*lines, f"{verdict} (rungs in {answer['folder']})"])


def _said(failure: Failure | None) -> dict[str, Any]:
    return {"reason": failure and failure.reason, "remedy": failure and failure.remedy}


# ------------------------------------------------------------------------------------------------------ taking a rung


class _Ended(Exception):
    """A command of a rung ended badly."""

    def __init__(self, failure: Failure):
        self.failure = failure


def _climb(file: str, words: Sequence[str], rung: Rung, place: Path, config: Config) -> Climb:
    """Train, compare tensors, resume, evaluate."""
    noted = _read_note(place)
    if place.exists() and (noted is None or noted["words"] != list(words) or noted["passed"] is not None):
        shutil.rmtree(place)  # of other settings, or it failed; one that was stopped goes on
    _note(place, words, passed=None)
    run = place / "run"
    command = ["train", file, *words, "--procs", str(rung.procs)]
    _litchi(command, place / "train.log")
    facts: dict[str, Any] = {"again": [], "tensors": 0, "unmoved": [], "evaluations": {}}
    first = read_lines(run / "metrics.jsonl")
    if len(first) <= LONG:
        steps = sorted((run / "checkpoints").glob("step-*"))
        facts["tensors"], facts["unmoved"] = compare_tensors(steps[-2], steps[-1], seen=_saw_pictures(first, steps[-2]))
        shutil.rmtree(steps[-1])
        (run / "done.json").unlink()
        _litchi(command, place / "resume.log")
        facts["again"] = read_lines(run / "metrics.jsonl")[int(steps[-2].name[5:]) :]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in first), encoding="utf-8")
    elif config.data.eval:
        facts["evaluations"] = _evaluate(run, rung, place, config)
    return _gather(place, rung, config, facts)


def _gather(place: Path, rung: Rung, config: Config, facts: dict[str, Any]) -> Climb:
    start = [entry for entry in read_lines(place / "run" / "events.jsonl") if entry["event"] == "start"][-1]
    forecasts = [entry for entry in read_lines(place / "run" / "events.jsonl") if entry["event"] == "measured"]
    return Climb(
        forecast=forecasts[-1] if forecasts else None,
        procs=rung.procs,
        lines=read_lines(place / "run" / "metrics.jsonl"),
        start=start,
        optimizer=config.optim.name,
        limit_bytes=0.0,
        **{key: facts[key] for key in ("again", "tensors", "unmoved", "evaluations")},
    )


def _saw_pictures(lines: Sequence[dict[str, Any]], since: Path) -> bool:
    """Whether a step behind a checkpoint had a picture; also true where none ever has, so that what waits for one is
    named."""
    steps = [line["step"] for line in lines if line["pixels"]]
    return not steps or max(steps) > int(since.name[5:])


def compare_tensors(before: Path, after: Path, *, seen: bool) -> tuple[int, list[str]]:
    """Trainable tensors of two checkpoints of one run: how many, and which did not move.

    Args:
        seen: there was a picture in between; without, the vision tower does not move, and is not looked at.
    """
    from safetensors import safe_open

    same: dict[str, bool] = {}
    for shard in sorted(after.glob("*.safetensors")):
        with safe_open(before / shard.name, framework="pt") as old, safe_open(shard, framework="pt") as new:
            for key in new.keys():  # noqa: SIM118
                name = key.partition("@")[0]
                if name.startswith("model.") and (seen or ".visual." not in name):
                    equal = bool((old.get_tensor(key) == new.get_tensor(key)).all())
                    same[name] = same.get(name, True) and equal
    return len(same), sorted(name for name, equal in same.items() if equal)


def _evaluate(run: Path, rung: Rung, place: Path, config: Config) -> dict[str, Any]:
    found = {}
    for data in config.data.eval:
        words = [str(run), "--data", data.path, "--against", config.model.path, "--json", "--procs", str(rung.procs)]
        words += [f"eval.max_rows={min(config.eval.max_rows or EVAL_ROWS, EVAL_ROWS)}"]
        out = _litchi(["evaluate", *words], place / "evaluate.log")
        found[data.name or data.path] = json.loads(out)
    return found


def _litchi(words: Sequence[str], log: Path) -> str:
    """Run litchi in a process, what it says into a file; returns its answer. A signal to this process is passed on."""
    with log.open("w", encoding="utf-8") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "litchi", *words], stdout=subprocess.PIPE, stderr=said, text=True
        )
        with _stopping(process):
            out, _ = process.communicate()
    if process.returncode == StoppedError.status:
        raise StoppedError("the ladder was stopped", where=log.parent, remedy="The same command goes on")
    if process.returncode:
        _, found, error = log.read_text(encoding="utf-8").partition("error: ")
        lines = [line.strip() for line in error.splitlines()[:ERROR_LINES]]
        reason = " ".join(lines) if found else f"litchi {words[0]} ended with status {process.returncode}"
        raise _Ended(Failure(reason, f"All that was said: {log}"))
    return out


@contextmanager
def _stopping(process: subprocess.Popen) -> Iterator[None]:
    """The process ends before this one does, whatever happens here."""

    def stop(number: int, frame: Any) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise StoppedError("the ladder was stopped", remedy="The same command goes on") from None
    finally:
        signal.signal(signal.SIGTERM, before)
        if process.poll() is None:
            process.kill()


# ---------------------------------------------------------------------------------------------------------- its notes


def _note(place: Path, words: Sequence[str], *, passed: bool | None, **facts: Any) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / "rung.json").write_text(json.dumps({"words": list(words), "passed": passed, **facts}), encoding="utf-8")


def _read_note(place: Path) -> dict[str, Any] | None:
    path = place / "rung.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _known(place: Path, words: Sequence[str]) -> dict[str, Any] | None:
    """What a rung of these settings has shown, if it was passed."""
    noted = _read_note(place)
    return noted if noted and noted["words"] == list(words) and noted["passed"] else None


def _epoch_steps(lowest: Path, limit: int) -> int:
    """Steps of an epoch, by the rows the lowest rung found, at most `limit`; more than a short rung's in any case."""
    whole = read_run(lowest / "run", "lowest").steps_per_epoch
    if whole is None:
        raise UserError("the lowest rung does not tell the length of an epoch", where=lowest, remedy="Remove it")
    return max(min(whole, limit), LONG + 1)


def _memory(device: str, procs: int) -> float:
    if device == "cuda":
        import torch

        return float(torch.cuda.get_device_properties(0).total_memory)
    import psutil

    return psutil.virtual_memory().total / procs
