"""A run from settings to export. Reads top to bottom: set-up, resume, steps, evaluation, export.

The loop knows nothing of the model: it asks the loader for micro-batches, `train_step` for a step, and calls
evaluation, checkpoint and log by name.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from litchi.batch.loader import iterate_steps
from litchi.config import Config
from litchi.dist import Ranks, barrier, gather_numbers
from litchi.errors import StoppedError
from litchi.evaluate.run import measure_set
from litchi.train.checkpoint import Checkpoint, list_checkpoints, load_checkpoint, rotate_checkpoints, save_checkpoint
from litchi.train.export import export_model
from litchi.train.guard import StopRequest
from litchi.train.losses import make_loss
from litchi.train.metrics import append_line, cut_back, peak_bytes, peak_flops
from litchi.train.optim import rate_at
from litchi.train.progress import count_progress
from litchi.train.setup import Run, make_folder, prepare_run, refuse_changed, set_aside
from litchi.train.step import train_step
from litchi.train.watch import BestWatch, how_to_measure
from litchi.types import Batch, StepResult


def train_run(config: Config, ranks: Ranks, *, fresh: bool = False, allow_changed: Sequence[str] = ()) -> Path:
    """Train, evaluate and export; resume when the run's folder has a checkpoint.

    Returns:
        The run's folder.
    """
    folder = Path(config.output)
    if fresh and ranks.is_main:
        set_aside(folder)
    barrier()
    saved = list_checkpoints(folder)
    changed = refuse_changed(config, saved, allow_changed)
    if ranks.is_main:
        make_folder(folder)
        (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    barrier()
    if saved and not changed and (folder / "done.json").is_file():
        if ranks.is_main:
            print(f"already finished: {folder} ({saved[-1].step} steps). Start over with --fresh", flush=True)
        return folder
    run = prepare_run(config, ranks, folder)
    first = _resume(run, saved)
    watch = BestWatch(config, folder)  # read once: later on rank 0 writes while others would read
    barrier()
    try:
        with StopRequest(alone=ranks.world == 1) as request:
            last = _steps(run, first, request, watch)
        _finish(run, last, watch)
    finally:
        run.log.close()
    return folder


# --------------------------------------------------------------------------------------------------------- steps


def _resume(run: Run, saved: Sequence[Checkpoint]) -> int:
    """Load the newest checkpoint; returns the first step to take."""
    if not saved:
        for name in ("metrics.jsonl", "eval.jsonl"):
            if run.log.main:
                cut_back(run.folder / name, 0)
        barrier()
        return 1
    newest = saved[-1]
    load_checkpoint(newest, run.wrapped.model, run.trainer.optimizer)
    if run.trainer.scaler is not None:
        run.trainer.scaler = torch.amp.GradScaler("cuda", init_scale=newest.manifest["scale"])
    if run.log.main:
        cut_back(run.folder / "metrics.jsonl", newest.step)
        cut_back(run.folder / "eval.jsonl", newest.step)
    barrier()
    run.log.say(f"resumed from {newest.folder.name}: {len(newest.manifest['tensors'])} tensors restored")
    return newest.step + 1


def _steps(run: Run, first: int, request: StopRequest, watch: BestWatch) -> int:
    """Take the steps; returns the last one taken.

    Raises:
        StoppedError: a signal came; the state is saved.
    """
    config, total = run.config, run.derived.steps
    per_epoch = run.plan.epochs.steps_per_epoch
    _, count_units = make_loss(config.loss)
    eval_every = config.train.eval_every.in_steps(per_epoch) if config.train.eval_every else 0
    save_every = config.train.save_every.in_steps(per_epoch) if config.train.save_every else 0
    if watch.exhausted:
        return first - 1
    loader = iterate_steps(run.plan, first, total, workers=config.data.workers, count_units=count_units)
    step = first - 1
    for step, batches, waited in loader:
        start = time.perf_counter()
        torch.manual_seed(step_seed(config.train.seed, step, run.wrapped.layout.dropout_rank(run.ranks.rank)))
        rate = rate_at(step, total=total, warmup=run.derived.warmup_steps, schedule=config.optim.schedule)
        result = train_step(run.trainer, step, batches, rate)
        facts = _step_facts(run, batches, result, time.perf_counter() - start, waited)
        stop = any(asked for (asked,) in gather_numbers(request.signal is not None))
        run.log.step(result, facts)
        saved = False
        if eval_every and step % eval_every == 0 and step < total:
            saved = watch.see(step, evaluate_now(run, step)) and _save(run, step, watch.best_step)
        if save_every and step % save_every == 0 and step < total and not saved:
            saved = _save(run, step, watch.best_step)
        if stop and step < total:
            if not saved:
                _save(run, step, watch.best_step)
            name = request.signal.name if request.signal else "a signal to another rank"
            raise StoppedError(f"stopped by {name} at step {step}", remedy="The same command goes on from there")
        if watch.exhausted:
            run.log.say(f"stopped early at step {step}: {watch.since} evaluations without a better {config.train.best}")
            run.log.event("early_stop", step=step, best_step=watch.best_step)
            break
    return step


def step_seed(seed: int, step: int, rank: int) -> int:
    """Seed of dropout in a step: computed, never remembered."""
    return (seed * 1_000_003 + step) * 4_099 + rank


def _step_facts(run: Run, batches: Sequence[Batch], result: StepResult, step_s: float, waited: float) -> dict[str, Any]:
    """What a line of metrics.jsonl says besides the step's numbers. The balances are of planned cost, not measured."""
    seconds, peaks = zip(*gather_numbers(step_s + waited, peak_bytes(run.ranks.device)), strict=True)
    balance = run.plan.balance(result.step)
    speed, top = result.tokens / max(seconds), peak_flops(run.ranks.device)
    return {
        "epoch": run.plan.epochs.epoch_of(result.step),
        "step_s": step_s,
        "data_wait_s": waited,
        "tokens_per_s": speed,
        "mfu": None if top is None else 6 * run.wrapped.weights[1] * speed / top / run.ranks.world,
        "peak_bytes": [int(p) for p in peaks],
        "balance": balance.rank,
        "balance_micro": balance.micro,
        "micro_batches": len(batches),
    }


def evaluate_now(run: Run, step: int) -> dict[str, dict[str, float]]:
    """Measure every set, log the figures; returns set name -> metrics."""
    figures = {}
    run.log.hide()
    how = how_to_measure(run.config, run.ranks.device)
    for data in run.eval_sets:
        progress = count_progress(f"measuring {data.name}", enabled=run.ranks.is_main)
        measured = measure_set(run.wrapped, data, run.ranks, how, progress)
        figures[data.name] = measured.metrics
        run.log.evaluation(step, data.name, measured.metrics)
        for warning in measured.report.get("warnings", ()):
            run.log.say(f"warning: {data.name}: {warning}")
    return figures


def _save(run: Run, step: int, best_step: int | None) -> bool:
    start = time.perf_counter()
    facts = run.facts | ({"scale": run.trainer.scaler.get_scale()} if run.trainer.scaler else {})
    save_checkpoint(run.folder, step, run.wrapped.model, run.trainer.optimizer, run.ranks, facts)
    if run.ranks.is_main:
        rotate_checkpoints(run.folder, keep=run.config.train.keep, best=best_step)
        run.log.say(f"checkpoint at step {step} in {time.perf_counter() - start:.1f} s")
    return True


# -------------------------------------------------------------------------------------------------------- finish


def _finish(run: Run, last: int, watch: BestWatch) -> None:
    """Save, measure, and export the best or the last state."""
    if not any(c.step == last for c in list_checkpoints(run.folder)):
        _save(run, last, watch.best_step)
    if run.eval_sets and watch.seen != last:
        watch.see(last, evaluate_now(run, last))
    barrier()
    exported = last
    if run.config.train.best and watch.best_step not in (None, last):
        best = next((c for c in list_checkpoints(run.folder) if c.step == watch.best_step), None)
        if best is not None:
            load_checkpoint(best, run.wrapped.model, None)
            exported = best.step
    if run.config.train.export == "end":
        facts = {k: v for k, v in run.facts.items() if k != "numbers"} | {"step": exported}
        out = run.folder / "export"
        adapter = export_model(run.wrapped.owner, run.loaded.folder, out, run.ranks, facts, layout=run.wrapped.layout)
        run.log.say(f"export of step {exported}: {out}" + (f", its adapter in {out / 'adapter'}" if adapter else ""))
    if run.ranks.is_main:
        append_line(run.folder / "done.json", {"step": last, "exported": exported})
    barrier()
