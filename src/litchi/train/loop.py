"""A run from settings to export. Reads top to bottom: set-up, resume, steps, evaluation, export.

The loop knows nothing of the model: it asks the loader for micro-batches, `train_step` for a step, and calls
evaluation, checkpoint and log by name.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from litchi.batch.loader import find_lost_worker, iterate_steps
from litchi.config import Config
from litchi.dist import Ranks, barrier, gather_numbers, max_ranks
from litchi.errors import StoppedError
from litchi.evaluate.run import measure_set
from litchi.parallel.launch import earlier_starts
from litchi.parallel.pulse import PULSE
from litchi.train.checkpoint import (
    Checkpoint,
    find_damage,
    list_checkpoints,
    load_checkpoint,
    refuse_checkpoint,
    rotate_checkpoints,
    settle_checkpoints,
)
from litchi.train.durable import FolderLock, format_bytes, on_main, replace_file, write_json
from litchi.train.export import copy_processor, export_model
from litchi.train.forecast import note_forecast, note_measured
from litchi.train.guard import CutShort, StopRequest
from litchi.train.largest import fit_memory
from litchi.train.losses import make_loss
from litchi.train.metrics import cut_back, peak_bytes, peak_flops, read_lines, reserved_bytes
from litchi.train.nonfinite import Watch, name_samples, refuse_numbers
from litchi.train.oom import SmallerBatches, guard_memory
from litchi.train.optim import rate_at
from litchi.train.profile import StepProfile
from litchi.train.progress import count_progress
from litchi.train.resume import refuse_changed
from litchi.train.rollback import EVENT as ROLLBACK
from litchi.train.rollback import GoBack, find_good, kept_checkpoints, left_out_steps, remove_undone, take_back
from litchi.train.run import Run
from litchi.train.saver import Saver
from litchi.train.setup import check_room, prepare_run, set_aside
from litchi.train.step import train_step
from litchi.train.watch import BestWatch, how_to_measure
from litchi.types import Batch, StepResult

UNREADABLE = "the run's folder cannot be read or written"


def train_run(
    config: Config, ranks: Ranks, *, fresh: bool = False, allow_changed: Sequence[str] = (), profile: int = 0
) -> Path:
    """Train, evaluate and export; resume when the run's folder has a checkpoint.

    Returns:
        The run's folder.
    """
    folder = Path(config.output)
    if fresh:
        on_main(ranks, lambda: set_aside(folder), what="the old run cannot be moved aside", place=folder)
    finished = on_main(ranks, lambda: _finished(config, folder, allow_changed), what=UNREADABLE, place=folder)
    if finished:
        if ranks.is_main:
            print(finished, flush=True)
        return folder
    lock = FolderLock(folder)
    on_main(ranks, lock.take, what=f"output={folder} cannot be made", place=folder)
    try:
        while True:
            try:
                _train(config, ranks, folder, allow_changed, profile)
                return folder
            except SmallerBatches as error:
                if ranks.world > 1:  # the others wait for this rank: all have to start again
                    raise
                said = error.line()
            print(said, file=sys.stderr, flush=True)
            gc.collect()
    finally:
        lock.release()


def _train(config: Config, ranks: Ranks, folder: Path, allowed: Sequence[str], profile: int) -> None:
    """Set up, resume, take the steps and finish, in a folder that is ours."""
    remove_undone(folder, ranks)
    newest = settle_checkpoints(folder, ranks)
    refuse_changed(config, newest, allowed)
    how_to_measure(config, ranks.device)  # refuses a schema that cannot be used before anything takes time
    run = prepare_run(config, ranks, folder, resumed=newest, allowed=allowed)
    saver = Saver(folder, ranks)
    well = False
    try:
        first = _resume(run, newest)
        saver.newest = first - 1
        _note_restarts(run)
        run.log.say(check_room(run))
        fit_memory(run, first, fresh=newest is None)
        note_forecast(run, first)
        if newest is None and config.train.on_nonfinite == "rollback":
            _save(run, saver, 0, None)  # something to go back to
            saver.wait()  # processes that load samples are forked behind this
        run.wrapped.model.register_forward_pre_hook(lambda _, inputs: PULSE.take(inputs[0].samples))
        watched = PULSE.watched(folder / "stacks", config.train.hang_s, ranks.rank)
        with StopRequest(alone=ranks.world == 1) as request, watched:
            steps = StepProfile(folder / "profile", profile, ranks.rank, run.log.say)
            while True:
                watch = BestWatch(config, folder)  # read once: later on rank 0 writes while others would read
                barrier()
                try:
                    last = _steps(run, saver, first, request, watch, steps)
                    break
                except GoBack as back:
                    first = _go_back(run, saver, back)
            _finish(run, saver, last, watch, request)
        well = True
    except RuntimeError as error:
        if lost := find_lost_worker(error):
            raise lost from error
        raise
    finally:
        saver.close(well=well)
        run.log.close()
        if run.plan.corpus.features is not None:
            run.plan.corpus.features.close()


def _finished(config: Config, folder: Path, allowed: Sequence[str]) -> str | None:
    """The line that says that a run has ended, if these settings began it."""
    saved = list_checkpoints(folder)
    if not saved or refuse_changed(config, saved[-1], allowed) or not (folder / "done.json").is_file():
        return None
    return f"already finished: {folder} ({saved[-1].step} steps). Start over with --fresh"


# --------------------------------------------------------------------------------------------------------- steps


def _resume(run: Run, newest: Checkpoint | None) -> int:
    """Load a checkpoint that was found sound, and take back what came after it; returns the first step to take."""
    restored = 0
    if newest is not None:
        restored = load_checkpoint(newest, run.wrapped.model, run.trainer.optimizer, checked=True)
        if run.trainer.scaler is not None and newest.manifest["scaler"]:
            run.trainer.scaler.load_state_dict(newest.manifest["scaler"])
    step = newest.step if newest else 0

    def take_back() -> None:
        (run.folder / "done.json").unlink(missing_ok=True)
        replace_file(run.folder / "config.yaml", run.config.to_yaml())
        cut_back(run.folder / "metrics.jsonl", step)
        measured = {r["name"] for r in read_lines(run.folder / "eval.jsonl") if r["step"] == step}
        whole = measured >= {data.name for data in run.eval_sets}  # else it was cut off between two sets
        cut_back(run.folder / "eval.jsonl", step if whole else step - 1)

    on_main(run.ranks, take_back, what="the run's folder cannot be written", place=run.folder)
    if newest is not None:
        run.log.say(f"resumed from {newest.folder.name}: {restored} tensors restored")
    return step + 1


def _note_restarts(run: Run) -> None:
    """Write down why these ranks were started again, as far as it is not there yet."""
    for start in earlier_starts():
        if {"event": "restart", **start} not in run.journal.entries:
            run.journal.note("restart", **start)


def _steps(run: Run, saver: Saver, first: int, request: StopRequest, watch: BestWatch, profile: StepProfile) -> int:
    """Take the steps; returns the last one taken.

    Raises:
        StoppedError: a signal came; the state is saved.
        GoBack: numbers went wrong, and `train.on_nonfinite` is to go back.
        UserError: they did, and the run is to stop.
    """
    config, total = run.config, run.derived.steps
    per_epoch = run.plan.epochs.steps_per_epoch
    _, count_units = make_loss(config.loss)
    eval_every = config.train.eval_every.in_steps(per_epoch) if config.train.eval_every else 0
    save_every = config.train.save_every.in_steps(per_epoch) if config.train.save_every else 0
    step = first - 1
    if step and eval_every and step % eval_every == 0 and step < total and watch.seen != step:
        try:  # a run that was stopped at this step had not measured it
            watch.see(step, evaluate_now(run, step, request))
        except CutShort:
            raise _stopped(request, step) from None
    if watch.exhausted:
        return step
    lines = on_main(run.ranks, lambda: read_lines(run.folder / "metrics.jsonl"), what=UNREADABLE, place=run.folder)
    numbers, leave_out = Watch(config.train, lines), left_out_steps(run.journal)
    patch = run.wrapped.owner.spec.patch
    loader = iterate_steps(run.plan, first, total, workers=config.data.workers, count_units=count_units)
    cpu = time.process_time()
    _await(run, first)
    for step, batches, waited in loader:
        profile.before()
        PULSE.begin(f"step {step}")
        start = time.perf_counter()
        torch.manual_seed(step_seed(config.train.seed, step, run.wrapped.layout.dropout_rank(run.ranks.rank)))
        rate = rate_at(step, total=total, warmup=run.derived.warmup_steps, schedule=config.optim.schedule)
        with guard_memory(run.folder, run.ranks, run.plan, batches, step, patch, lambda: run.trainer.at):
            result = train_step(run.trainer, step, batches, rate, leave_out=step in leave_out)
        step_s = time.perf_counter() - start
        profile.after()
        facts = _step_facts(run, batches, result, step_s, time.process_time() - cpu, waited)
        cpu = time.process_time()
        run.log.step(result, facts)
        asked, failed = zip(*gather_numbers(request.signal is not None, saver.failed or run.log.failed), strict=True)
        if any(failed):
            _raise_failure(run, saver)
        _judge(run, numbers, result)
        stop = any(asked)
        _tell_saved(run, saver)
        saved = False
        if eval_every and step % eval_every == 0 and step < total and not stop:
            saver.wait()  # processes that load samples are forked here
            try:
                figures = evaluate_now(run, step, request)
                saved = watch.see(step, figures) and _save(run, saver, step, watch.best_step)
            except CutShort:  # the resumed run begins it anew
                stop = True
        new = config.train.on_nonfinite != "rollback" or not result.skipped  # an older one may be needed to go back to
        if save_every and step % save_every == 0 and step < total and not saved and new:
            saved = _save(run, saver, step, watch.best_step)
        if stop and step < total:
            if not saved or config.train.save != "all":
                _save(run, saver, step, watch.best_step, whole=True)
            saver.wait()
            _tell_saved(run, saver)
            raise _stopped(request, step)
        if watch.exhausted:
            run.log.say(f"stopped early at step {step}: {watch.since} evaluations without a better {config.train.best}")
            run.journal.note("early_stop", step=step, best_step=watch.best_step)
            break
        _await(run, step + 1)
    profile.close()
    return step


def _await(run: Run, step: int) -> None:
    """Say that the data of a step are waited for, and of which samples."""

    def samples() -> list[str]:
        jobs = run.plan.jobs(step) if step <= run.derived.steps else []
        return [run.plan.corpus.find(pick[0])[1].id for job in jobs for pick in job.picks]

    PULSE.begin(f"waiting for the data of step {step}", samples)


def _stopped(request: StopRequest, step: int) -> StoppedError:
    name = request.signal.name if request.signal else "a signal to another rank"
    return StoppedError(f"stopped by {name} at step {step}", remedy="The same command goes on from there")


def _judge(run: Run, numbers: Watch, result: StepResult) -> None:
    """Write down where numbers went wrong, and go back or stop when it is too much. Collective."""
    fault, train, step = run.trainer.fault, run.config.train, result.step
    if fault is not None:
        run.journal.note("nonfinite", step=step, **fault.facts())
        run.log.say(f"step {step} is not finite: {fault.kind} at {fault.where}; samples {name_samples(fault.samples)}")
    bad = numbers.see(step, result.loss, run.trainer.left_out)
    if not bad:
        return
    if train.on_nonfinite == "rollback":
        raise GoBack(step, bad, numbers.blame(bad))
    raise refuse_numbers(bad, _faults(run, bad))


def _faults(run: Run, steps: Sequence[int]) -> list[dict[str, Any]]:
    return [e for e in run.journal.entries if e["event"] == "nonfinite" and e["step"] in steps]


def _go_back(run: Run, saver: Saver, back: GoBack) -> int:
    """Load the newest checkpoint from before the steps that are left out from now on; returns the first step to take.

    Raises:
        UserError: the run went back too often, or there is no such checkpoint.
    """
    saver.wait()
    _tell_saved(run, saver)
    train, before = run.config.train, len(run.journal.made(ROLLBACK))
    good = find_good(run.folder, min(back.leave_out), run.ranks)
    if before >= train.rollbacks or good is None:
        why = f"the run went back {before} times (train.rollbacks)" if good else "no checkpoint is from before them"
        raise refuse_numbers(back.bad, _faults(run, back.bad), why=why)
    take_back(back, good, run.journal)
    for state in run.trainer.optimizer.state.values():
        state.clear()  # in place: an optimizer in the machine's memory shares it
    first = _resume(run, good)
    saver.newest = good.step
    run.log.say(f"went back from step {back.step} to step {good.step}; left out: {', '.join(map(str, back.leave_out))}")
    return first


def step_seed(seed: int, step: int, rank: int) -> int:
    """Seed of dropout in a step: computed, never remembered."""
    return (seed * 1_000_003 + step) * 4_099 + rank


def _step_facts(
    run: Run, batches: Sequence[Batch], result: StepResult, step_s: float, cpu_s: float, waited: float
) -> dict[str, Any]:
    """What a line of metrics.jsonl says besides the step's numbers. The balances are of planned cost, not measured."""
    own = step_s + waited, cpu_s, peak_bytes(run.ranks.device)
    seconds, cpu, peaks = zip(*gather_numbers(*own), strict=True)
    held = reserved_bytes(run.ranks.device)  # on all ranks alike, or on none
    every = None if held is None else gather_numbers(*held)
    balance = run.plan.balance(result.step)
    speed, top = result.tokens / max(seconds), peak_flops(run.ranks.device)
    return {
        "epoch": run.plan.epochs.epoch_of(result.step),
        "step_s": step_s,
        "data_wait_s": waited,
        "cpu_s": sum(cpu),  # of all ranks since the last step, without the processes that load samples
        "tokens_per_s": speed,
        "mfu": None if top is None else 6 * run.wrapped.weights[1] * speed / top / run.ranks.world,
        "peak_bytes": [int(p) for p in peaks],
        **({} if every is None else {"reserved_bytes": [int(r) for r, _ in every]}),
        **({} if every is None else {"allocated_bytes": [int(a) for _, a in every]}),
        "balance": balance.rank,
        "balance_micro": balance.micro,
        "micro_batches": len(batches),
        **({"left_out": run.trainer.left_out} if result.skipped else {}),
    }


def evaluate_now(run: Run, step: int, request: StopRequest) -> dict[str, dict[str, float]]:
    """Measure every set, log the figures; returns set name -> metrics.

    Raises:
        CutShort: a signal came. With vision ranks, whose batches are not those of the others, it is not looked for.
    """

    def look() -> None:
        PULSE.move()
        if not run.wrapped.layout.vision_ranks and max_ranks(float(request.signal is not None))[0]:
            raise CutShort

    figures = {}
    run.log.hide()
    how = replace(how_to_measure(run.config, run.ranks.device), between=look)
    for data in run.eval_sets:
        PULSE.begin(f"measuring {data.name} at step {step}")
        progress = count_progress(f"measuring {data.name}", enabled=run.ranks.is_main)
        measured = measure_set(run.wrapped, data, how, progress)
        figures[data.name] = measured.metrics
        run.log.evaluation(step, data.name, measured.metrics, measured.report.get("intervals"))
        for warning in measured.report.get("warnings", ()):
            run.log.say(f"warning: {data.name}: {warning}")
    on_main(run.ranks, run.log.raise_failure, what=UNREADABLE, place=run.folder)
    return figures


def _save(run: Run, saver: Saver, step: int, best_step: int | None, *, whole: bool = False) -> bool:
    """Begin to save a step, `whole` whatever `train.save` says; rotation follows when it counts."""
    PULSE.begin(f"saving step {step}")
    saver.save(
        step,
        run.wrapped.model,
        run.trainer.optimizer if whole or run.config.train.save == "all" else None,
        run.facts | run.checkpoint_facts(),
        beside=[run.folder / name for name in ("metrics.jsonl", "eval.jsonl")],
        add=lambda part: copy_processor(run.loaded.folder, part, run.wrapped.owner),
        after=lambda: _rotate(run, step, best_step),
    )
    return True


def _rotate(run: Run, step: int, best_step: int | None) -> None:
    keep = kept_checkpoints(run.config.train)
    rotate_checkpoints(run.folder, keep=keep, best=best_step, written=step)


def _tell_saved(run: Run, saver: Saver) -> None:
    saved = saver.take_saved()
    if saved is not None:
        size = format_bytes(saved.bytes)
        run.log.say(f"checkpoint of step {saved.step}: {size} in {saved.save_s:.1f} s, waited {saved.wait_s:.2f} s")


def _raise_failure(run: Run, saver: Saver) -> NoReturn:
    """Some rank could not write: all end with its error."""
    on_main(run.ranks, run.log.raise_failure, what=UNREADABLE, place=run.folder)
    saver.wait()
    raise AssertionError("a rank has failed without saying why")


# -------------------------------------------------------------------------------------------------------- finish


def _finish(run: Run, saver: Saver, last: int, watch: BestWatch, request: StopRequest) -> None:
    """Save, measure, and export the best or the last state. StoppedError: a signal came before it was measured."""
    lines = on_main(run.ranks, lambda: read_lines(run.folder / "metrics.jsonl"), what=UNREADABLE, place=run.folder)
    note_measured(run, lines, last)
    if saver.newest != last:
        _save(run, saver, last, watch.best_step)
    saver.wait()
    _tell_saved(run, saver)
    # done already, unless the run was killed between its last save and this
    on_main(run.ranks, lambda: _rotate(run, last, watch.best_step), what=UNREADABLE, place=run.folder)
    if run.eval_sets and watch.seen != last:
        try:
            watch.see(last, evaluate_now(run, last, request))
        except CutShort:
            raise _stopped(request, last) from None
    PULSE.begin("exporting", limited=False)
    exported = last
    if run.config.train.best and watch.best_step not in (None, last):
        exported = _take_best(run, watch.best_step) or last
    if run.config.train.export == "end":
        facts = {k: v for k, v in run.facts.items() if k != "numbers"} | {"step": exported}
        out = run.folder / "export"
        adapter = export_model(run.wrapped.owner, run.loaded.folder, out, run.ranks, facts, layout=run.wrapped.layout)
        run.log.say(f"export of step {exported}: {out}" + (f", its adapter in {out / 'adapter'}" if adapter else ""))
    done = {"step": last, "exported": exported}
    on_main(run.ranks, lambda: write_json(run.folder / "done.json", done), what=UNREADABLE, place=run.folder)


def _take_best(run: Run, step: int | None) -> int | None:
    """Load the best checkpoint's weights; None, with a warning, where it is not there any more or is damaged."""

    def find() -> Checkpoint | None:
        return next((c for c in list_checkpoints(run.folder) if c.step == step), None)

    best = on_main(run.ranks, find, what=UNREADABLE, place=run.folder)
    damage = "it is not there" if best is None else find_damage(best)
    if best is None or damage:
        if best is not None and damage:
            refuse_checkpoint(best, damage, run.ranks)
        run.log.say(f"warning: the best checkpoint, of step {step}, cannot be exported: {damage}. The last one is")
        return None
    load_checkpoint(best, run.wrapped.model, None, checked=True)
    return best.step
