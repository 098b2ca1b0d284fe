"""A run from settings to export. Reads top to bottom: data, model, resume, steps, evaluation, export.

The loop knows nothing of the model: it asks the loader for micro-batches, `train_step` for a step, and calls
evaluation, checkpoint and log by name.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from litchi.batch.loader import Corpus, StepPlan, iterate_steps
from litchi.batch.schedule import EpochPlan
from litchi.batch.sources import index_sources, refuse_bad
from litchi.config import METRICS, Config, Derived, derive, load_config, resolve_micro_batch_tokens
from litchi.data.processor import Processor, load_processor
from litchi.data.templates import find_template
from litchi.dist import Ranks, barrier, gather_numbers, gather_objects
from litchi.errors import MachineError, StoppedError, UsageError
from litchi.evaluate.ranking import DEFAULT_METRICS
from litchi.evaluate.run import EvalSet, Measure, measure_set
from litchi.model.adapters import apply_trainable, load_adapter
from litchi.model.attention import kernel_name
from litchi.model.build import DTYPES, Loaded, load_model, resolve_model
from litchi.model.forward import LitchiModel
from litchi.parallel.apply import COMPUTE, Wrapped, apply_parallel
from litchi.parallel.mesh import choose_layout
from litchi.train.checkpoint import Checkpoint, list_checkpoints, load_checkpoint, rotate_checkpoints, save_checkpoint
from litchi.train.export import export_model, identify_base
from litchi.train.guard import StopRequest
from litchi.train.losses import make_loss
from litchi.train.metrics import RunLog, append_line, cut_back, peak_bytes, peak_flops, read_lines
from litchi.train.optim import build_optimizer, rate_at
from litchi.train.progress import count_progress
from litchi.train.step import Trainer, train_step
from litchi.types import Batch, StepResult


@dataclass
class Run:
    """Everything a run has decided before its first step."""

    config: Config
    ranks: Ranks
    folder: Path
    log: RunLog
    plan: StepPlan
    eval_sets: list[EvalSet]
    derived: Derived
    loaded: Loaded
    wrapped: Wrapped
    trainer: Trainer

    @property
    def facts(self) -> dict[str, Any]:
        """What travels with checkpoints and exports."""
        spec = self.wrapped.owner.spec
        return {
            "task": self.config.task,
            "base": identify_base(self.config.model.path),
            "template": self.config.data.template if self.config.task == "rerank" else "chat",
            "instruction": self.config.data.instruction,
            "pixels": {"min": spec.min_pixels, "max": spec.max_pixels},
            "wrapper": self.wrapped.wrapper,
            "settings": self.config.model_dump(mode="json"),
            "numbers": self.config.numbers(),
        }


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
    changed = _refuse_changed(config, saved, allow_changed)
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


def make_folder(folder: Path) -> None:
    """Make the run's folder, or say why it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"output={folder} cannot be made", why=error.strerror, remedy="Choose another folder"
        ) from None


def set_aside(folder: Path) -> None:
    """Move an old run's folder out of the way; nothing is deleted."""
    if folder.exists():
        number = next(n for n in range(1, 10_000) if not folder.with_name(f"{folder.name}.{n}").exists())
        folder.rename(folder.with_name(f"{folder.name}.{number}"))
        print(f"the old run was moved to {folder}.{number}", flush=True)


def _refuse_changed(config: Config, saved: Sequence[Checkpoint], allowed: Sequence[str]) -> list[str]:
    """A resume with settings that change the numbers is refused by name; returns the changes that are allowed."""
    if not saved:
        return []
    before, now = saved[-1].manifest["numbers"], config.numbers()
    different = [k for k in sorted(before.keys() | now.keys()) if before.get(k) != now.get(k)]
    changed = [k for k in different if k not in allowed]
    if changed:
        raise UsageError(
            "; ".join(f"{k} was {before.get(k)!r} and is {now.get(k)!r}" for k in changed[:5]),
            where=config.output,
            why="the run that lies there was started with other settings",
            remedy=f"Start over with --fresh, choose another output=, or go on with --allow-changed {changed[0]}",
        )
    return different


# ------------------------------------------------------------------------------------------------------- prepare


def prepare_run(config: Config, ranks: Ranks, folder: Path) -> Run:
    """Index the data, load and wrap the model, derive what follows from both."""
    torch.manual_seed(config.train.seed)
    tensorboard = config.track is None or "tensorboard" in config.track
    base = resolve_model(config.model.path, first=ranks.local_rank == 0, wait=barrier)
    precision = choose_precision(config.train.precision, ranks.device)
    corpus, eval_sets = index_data(config, load_processor(base), ranks)  # before the weights, which take minutes
    loaded = load_model(base, dtype=choose_dtype(config, ranks.device))
    epochs = _epoch_plan(config, corpus)
    derived = derive(
        config,
        samples=sum(epochs.counts),
        ranks=ranks.world,
        mean_tokens=sum(s.tokens for s in corpus.sources) / sum(corpus.sizes),
        device_type=ranks.device.type,
    )
    run_log = RunLog(
        folder, main=ranks.is_main, tensorboard=tensorboard, total=derived.steps, every=config.train.log_every
    )
    wrapped = build_wrapped(config, loaded, corpus.renderers[0].processor, ranks, precision)
    _quarantine(config, corpus, eval_sets, run_log, folder)
    optimizer = build_optimizer(wrapped.model, loaded.family, config)
    scaler = torch.amp.GradScaler("cuda") if precision == "fp16" else None
    trainer = Trainer(wrapped, optimizer, ranks, config.optim.clip, config.train.on_nonfinite, scaler)
    plan = StepPlan(
        corpus=corpus,
        epochs=epochs,
        negatives=config.data.negatives,
        micro_batch_tokens=resolve_micro_batch_tokens(config, ranks.device.type),
        rank=ranks.rank,
        ranks=wrapped.data_ranks,
    )
    run = Run(config, ranks, folder, run_log, plan, eval_sets, derived, loaded, wrapped, trainer)
    _describe(run)
    return run


def _epoch_plan(config: Config, corpus: Corpus) -> EpochPlan:
    weights = tuple(s.weight for s in config.data.train)
    return EpochPlan(corpus.sizes, weights, config.train.seed, config.train.global_batch_size, config.data.shuffle)


def index_data(config: Config, processor: Processor, ranks: Ranks) -> tuple[Corpus, list[EvalSet]]:
    """Scan training and evaluation files, each rank a share, with progress; bad rows are decided on here."""

    def scan(sources, require_labels=True):
        return index_sources(
            config,
            sources,
            processor,
            require_labels=require_labels,
            rank=ranks.rank,
            ranks=ranks.world,
            gather=gather_objects,
            progress=lambda name: count_progress(f"reading {name}", enabled=ranks.is_main),
        )

    corpus = scan(config.data.train)
    measured = scan(config.data.eval)
    refuse_bad(corpus.sources + measured.sources, config)
    check_ids(measured)
    sets = [
        EvalSet(index, renderer, config.eval.max_rows)
        for index, renderer in zip(measured.sources, measured.renderers, strict=True)
    ]
    return corpus, sets


def check_ids(corpus: Corpus) -> None:
    """A query id that stands twice in an evaluation file would be counted as one query."""
    for index in corpus.sources:
        seen: dict[str, Any] = {}
        for row in index.rows:
            if row.id in seen:
                raise UsageError(
                    f"the id {row.id!r} stands twice",
                    where=f"{index.source(seen[row.id])} and {index.source(row)}",
                    why="in an evaluation each id is one query",
                    remedy="Give the rows ids of their own",
                )
            seen[row.id] = row


def choose_precision(wanted: str, device: torch.device) -> str:
    """fp32, bf16 or fp16. MachineError when the device cannot."""
    if device.type == "cuda":
        able = torch.cuda.is_bf16_supported(including_emulation=False)
        if wanted == "bf16" and not able:
            raise MachineError(
                "train.precision=bf16", where=torch.cuda.get_device_name(device),
                why="this GPU has no bf16 (compute capability below 8.0)", remedy="Use fp16 or fp32",
            )  # fmt: skip
        return ("bf16" if able else "fp32") if wanted == "auto" else wanted
    if wanted == "fp16":
        raise MachineError("train.precision=fp16", why="there is no GPU", remedy="Use fp32 or bf16")
    return "fp32" if wanted == "auto" else wanted


def choose_dtype(config: Config, device: torch.device) -> torch.dtype:
    """What weights are held in. `auto`: bfloat16 on a GPU when no part trains in full and nothing is sharded
    (FSDP2 wants one type per group, and LoRA's are fp32); float32 otherwise."""
    if config.model.dtype != "auto":
        return DTYPES[config.model.dtype]
    parts = (config.trainable.vision, config.trainable.merger, config.trainable.language, config.trainable.head)
    light = all(p.mode != "full" for p in parts) and (config.parallel.dp_shard or 1) == 1
    return torch.bfloat16 if device.type == "cuda" and light and config.train.precision != "fp32" else torch.float32


def build_wrapped(
    config: Config, loaded: Loaded, processor: Processor, ranks: Ranks, precision: str, *, training: bool = True
) -> Wrapped:
    """Set what trains (nothing, unless `training`), make the owner and wrap it."""
    if config.model.adapter:
        load_adapter(loaded, Path(config.model.adapter))
    if training:
        torch.manual_seed(config.train.seed)  # LoRA's A, alike on all ranks
        apply_trainable(loaded, config.trainable)
    layout = choose_layout(config.parallel, ranks.world, fits_whole=_fits_whole(loaded, ranks.device))
    score_loss, _ = make_loss(config.loss)
    template = find_template(config.data.template) if config.task == "rerank" else None
    owner = LitchiModel(
        loaded.hf,
        loaded.family,
        processor.vision,
        words=None if template is None else (processor.word(template.yes), processor.word(template.no)),
        score_loss=score_loss,
    )
    owner.train()
    return apply_parallel(owner, layout, ranks, precision=precision, checkpoint=config.train.checkpoint_activations)


def _fits_whole(loaded: Loaded, device: torch.device) -> bool:
    """Whether weights, gradients and AdamW's state take at most half of the GPU."""
    if device.type != "cuda":
        return True
    state = 0
    for parameter in loaded.hf.parameters():
        size = parameter.numel() * parameter.element_size()
        state += size * (4 if parameter.requires_grad else 1)
    return state < torch.cuda.get_device_properties(device).total_memory / 2


def _quarantine(config: Config, corpus: Corpus, eval_sets: Sequence[EvalSet], log: RunLog, folder: Path) -> None:
    """Write what is left out, and say how much."""
    indexes = (*corpus.sources, *(s.index for s in eval_sets))
    left_out = refuse_bad(indexes, config)
    if not log.main:
        return
    path = folder / "quarantine.jsonl"
    path.write_text("", encoding="utf-8")
    for finding in left_out:
        append_line(path, {"file": finding.file, "line": finding.line, "reason": f"{finding.code}: {finding.message}"})
    for index in indexes:
        rows = {f.line for f in left_out if f.file == index.path}
        log.say(
            f"{index.name}: {len(index.rows):,} of {len(index.lines):,} rows, {index.tokens:,} tokens, "
            f"{index.patches:,} patches" + (f"; {len(rows)} rows in {path}" if rows else "")
        )


def _describe(run: Run) -> None:
    """Print and keep what was really taken: derived numbers with their formulas, wrapper, kernel, precision."""
    for line in run.derived.lines():
        run.log.say(line)
    owner, precision = run.wrapped.owner, run.wrapped.precision
    trains = sum(p.numel() for p in owner.parameters() if p.requires_grad)
    total = sum(p.numel() for p in owner.parameters())
    kernel = kernel_name(run.ranks.device, COMPUTE[precision])
    run.log.say(
        f"{trains:,} of {total:,} parameters train; {run.ranks.world} rank(s) on {run.ranks.device.type}, "
        f"wrapper {run.wrapped.wrapper}, compute {precision}, attention {kernel}"
    )
    run.log.event(
        "start",
        ranks=run.ranks.world,
        device=run.ranks.device.type,
        wrapper=run.wrapped.wrapper,
        precision=precision,
        attention=kernel,
        weights=str(next(owner.parameters()).dtype).removeprefix("torch."),
        micro_batch_tokens=run.plan.micro_batch_tokens,
        torch=torch.__version__,
    )


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
        torch.manual_seed(step_seed(config.train.seed, step, run.ranks.rank))
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
    """What a line of metrics.jsonl says besides the step's numbers. `balance`: heaviest rank / mean, in tokens."""
    own = sum(b.tokens for b in batches), step_s + waited, peak_bytes(run.ranks.device)
    costs, seconds, peaks = zip(*gather_numbers(*own), strict=True)
    speed, top = result.tokens / max(seconds), peak_flops(run.ranks.device)
    weights = sum(p.numel() for p in run.wrapped.owner.parameters())
    return {
        "epoch": run.plan.epochs.epoch_of(result.step),
        "step_s": step_s,
        "data_wait_s": waited,
        "tokens_per_s": speed,
        "mfu": None if top is None else 6 * weights * speed / top / run.ranks.world,
        "peak_bytes": [int(p) for p in peaks],
        "balance": max(costs) * len(costs) / sum(costs),
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


def how_to_measure(config: Config, device: torch.device) -> Measure:
    """The same in a run and in `litchi evaluate`; what decides the best checkpoint is always measured."""
    names, best = config.eval.metrics, config.train.best
    if best not in (None, "loss"):
        usual = METRICS[config.task] if config.task == "chat" else DEFAULT_METRICS
        names = tuple(dict.fromkeys([*(names or usual), best]))
    return Measure(
        metrics=names,
        slices=config.eval.slices,
        max_new_tokens=config.eval.max_new_tokens,
        micro_batch_tokens=resolve_micro_batch_tokens(config, device.type),
        count_units=make_loss(config.loss)[1],
    )


class BestWatch:
    """The best value of `train.best` over the evaluations so far (of the first set that has it)."""

    def __init__(self, config: Config, folder: Path):
        self.metric, self.patience = config.train.best, config.train.early_stop
        self.best: float | None = None
        self.best_step: int | None = None
        self.since = 0
        self.seen: int | None = None  # the step that was measured last
        lines = read_lines(folder / "eval.jsonl")  # what an interrupted run had already seen
        for step, records in groupby(lines, key=lambda record: record["step"]):
            self.see(step, {r["name"]: r["metrics"] for r in records})

    @property
    def exhausted(self) -> bool:
        return self.patience is not None and self.since >= self.patience

    def see(self, step: int, figures: dict[str, dict[str, float]]) -> bool:
        """Take in an evaluation; returns whether it is the best so far."""
        self.seen = step
        values = [m[self.metric] for m in figures.values() if self.metric in m]
        if not values:
            return False
        value = -values[0] if self.metric == "loss" else values[0]
        if self.best is None or value > self.best:
            self.best, self.best_step, self.since = value, step, 0
            return True
        self.since += 1
        return False


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
        adapter = export_model(run.wrapped.owner, run.loaded.folder, out, run.ranks, facts)
        run.log.say(f"export of step {exported}: {out}" + (f", its adapter in {out / 'adapter'}" if adapter else ""))
    if run.ranks.is_main:
        append_line(run.folder / "done.json", {"step": last, "exported": exported})
    barrier()


def run_config(folder: Path) -> Config:
    """The resolved settings of a run's folder."""
    return load_config(folder / "config.yaml")
