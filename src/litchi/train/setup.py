"""Everything a run decides before its first step: folder, data, precision, model, layout, optimizer, schedule.

Settings and ranks in, one `Run` out. Order matters: the data is checked before the weights, which take minutes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from litchi.batch.curriculum import plan_curriculum
from litchi.batch.loader import Corpus, StepPlan
from litchi.batch.schedule import EpochPlan
from litchi.batch.sources import index_sources, refuse_bad
from litchi.config import Config, DataSource, derive, resolve_micro_batch_tokens
from litchi.data.processor import Processor, load_processor
from litchi.data.templates import find_template
from litchi.dist import Ranks, barrier, gather_objects
from litchi.errors import DataError
from litchi.evaluate.run import EvalSet
from litchi.model.adapters import apply_trainable, fill_weights, load_adapter
from litchi.model.build import DTYPES, Loaded, build_model, read_config, resolve_model
from litchi.model.family import part
from litchi.model.flops import read_costs
from litchi.model.forward import LitchiModel
from litchi.model.kernels import choose_kernels
from litchi.model.precision import COMPUTE, choose_precision
from litchi.model.sizes import check_axes
from litchi.model.tokens import check_rows, release_rows
from litchi.parallel.apply import Wrapped, apply_parallel
from litchi.parallel.mesh import Layout, choose_layout
from litchi.parallel.placement import Placement, find_devices, list_units, plan_placement, spread_model
from litchi.train.checkpoint import Checkpoint
from litchi.train.durable import FolderLock, on_main, replace_file
from litchi.train.features import open_features, prepare_features
from litchi.train.journal import Journal
from litchi.train.largest import MEASURED
from litchi.train.losses import cutting, make_loss
from litchi.train.metrics import RunLog
from litchi.train.offload import check_offload
from litchi.train.oom import obey_requests
from litchi.train.optim import build_optimizer
from litchi.train.outlook import look_out, take_auto
from litchi.train.progress import count_progress
from litchi.train.reach import check_reach
from litchi.train.resume import describe_origin, plan_room, refuse_full_disk, refuse_other
from litchi.train.run import Run
from litchi.train.step import Trainer


def prepare_run(
    config: Config, ranks: Ranks, folder: Path, *, resumed: Checkpoint | None = None, allowed: Sequence[str] = ()
) -> Run:
    """Index the data, load and wrap the model, derive what follows from both.

    Args:
        resumed: what the run will go on from; its data, base, template and pixel limits must be those of now.
        allowed: which of them may have changed.
    """
    torch.manual_seed(config.train.seed)
    if config.train.deterministic:  # on the CPU every kernel we use is; on CUDA some have to be told
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    tensorboard = config.track is None or "tensorboard" in config.track
    base = resolve_model(config.model.path, first=ranks.local_rank == 0, wait=barrier)
    choose_precision(config.train.precision, ranks.device)  # what cannot be is said at once
    corpus, eval_sets = index_data(config, load_processor(base), ranks)  # before the weights, which take minutes
    origin = describe_origin(config, base, corpus, ranks)
    refuse_other(origin, resumed, allowed, folder)
    carried = [] if resumed is None else resumed.manifest["journal"]
    step = resumed.step if resumed else None
    journal = Journal.resume(folder, ranks, step=step, carried=carried)
    lowered = obey_requests(folder, ranks, journal, resumed=step)
    outlook = look_out(config, read_config(base), corpus, ranks)
    config, most = take_auto(config, outlook, ranks, journal)
    chosen = choose_settings(config, ranks.device, journal, most)
    precision = choose_precision(chosen.train.precision, ranks.device)
    loaded = build_model(
        base,
        dtype=choose_dtype(chosen, ranks.device),
        quantize=config.model.quantize,
        new_tokens=config.model.new_tokens,
    )
    epochs = _epoch_plan(config, corpus)
    wrapped = build_wrapped(
        config, loaded, corpus.renderers[0].processor, ranks, precision, adapter=_path(config.model.adapter)
    )
    store = open_features(chosen, wrapped, ranks)
    corpus, eval_sets = replace(corpus, features=store), [replace(one, features=store) for one in eval_sets]
    derived = derive(
        chosen,
        samples=sum(epochs.counts),
        ranks=wrapped.data_ranks,
        mean_tokens=sum(s.tokens for s in corpus.sources) / sum(corpus.sizes),
        device_type=ranks.device.type,
    )
    run_log = RunLog(
        folder, main=ranks.is_main, tensorboard=tensorboard, total=derived.steps, every=config.train.log_every
    )
    _quarantine(config, corpus, eval_sets, run_log, folder, ranks)
    optimizer = build_optimizer(wrapped.model, loaded.family, config)
    scaler = torch.amp.GradScaler("cuda") if precision == "fp16" and wrapped.encoder is None else None
    trainer = Trainer(wrapped, optimizer, ranks, config.optim.clip, scaler)
    plan = _step_plan(chosen, read_config(base), corpus, epochs, wrapped, ranks.device, derived.steps, lowered)
    run = Run(
        config, ranks, folder, run_log, plan, eval_sets, derived, loaded, wrapped, trainer, origin, journal, outlook
    )
    _describe(run, first=resumed.step + 1 if resumed else 1)
    prepare_features(config, wrapped, ranks, plan, eval_sets, run_log.say)
    return run


def _step_plan(
    chosen: Config,
    shape: Mapping[str, Any],
    corpus: Corpus,
    epochs: EpochPlan,
    wrapped: Wrapped,
    device: torch.device,
    steps: int,
    lowered: tuple[tuple[int, int], ...],
) -> StepPlan:
    """Which rows every rank works on in every step.

    Args:
        shape: config.json of the base.
        lowered: as in `StepPlan`.
    """
    costs = read_costs(
        shape,
        scored=chosen.task == "rerank",
        trainable=chosen.trainable,
        checkpoint=chosen.train.checkpoint_activations,
    )
    layout = wrapped.layout
    return StepPlan(
        corpus=corpus,
        epochs=epochs,
        negatives=chosen.data.negatives,
        micro_batch_tokens=resolve_micro_batch_tokens(chosen, device.type),
        rank=wrapped.data_rank,
        ranks=wrapped.data_ranks,
        least=2 * layout.pp if layout.pp > 1 else 1,
        pictures=wrapped.pictures,
        encoders=layout.vision_ranks,
        curriculum=plan_curriculum(chosen.curriculum, corpus.renderers[0].processor, steps),
        cuts=cutting(chosen.loss, vision_ranks=layout.vision_ranks),
        lowered=lowered,
        costs=costs.without_pictures() if chosen.train.features == "precompute" else costs,
    )


def choose_settings(config: Config, device: torch.device, journal: Journal, most: int | None = None) -> Config:
    """The settings with what `auto` stands for: as the run has journalled it, else as this machine suggests.

    So a run that goes on elsewhere computes as it began.

    Args:
        most: tokens of a micro-batch that the planner gives room to.
    """
    auto: dict[str, Any] = {}
    if config.train.precision == "auto":
        auto["precision"] = choose_precision("auto", device)
    if config.train.micro_batch_tokens is None:
        auto["micro_batch_tokens"] = most or resolve_micro_batch_tokens(config, device.type)
    if config.model.dtype == "auto":
        auto["dtype"] = str(choose_dtype(config, device)).removeprefix("torch.")
    if auto:
        known = journal.decide("auto", step=1, **auto)
        auto = {key: known.get(key, value) for key, value in auto.items()}
        for measured in journal.made(MEASURED):
            auto |= {"micro_batch_tokens": measured["tokens"]} if "micro_batch_tokens" in auto else {}
    dtype = {"dtype": auto.pop("dtype")} if "dtype" in auto else {}
    return config.model_copy(
        update={"train": config.train.model_copy(update=auto), "model": config.model.model_copy(update=dtype)}
    )


def _epoch_plan(config: Config, corpus: Corpus) -> EpochPlan:
    weights = tuple(s.weight for s in config.data.train)
    return EpochPlan(corpus.sizes, weights, config.train.seed, config.train.global_batch_size, config.data.shuffle)


def scan_files(
    config: Config, sources: Sequence[DataSource], processor: Processor, ranks: Ranks, **how: bool
) -> Corpus:
    """Scan files, each rank a share, with progress; `how` as in `index_sources`."""
    return index_sources(
        config,
        sources,
        processor,
        **how,
        rank=ranks.rank,
        ranks=ranks.world,
        gather=gather_objects,
        progress=lambda name: count_progress(f"reading {name}", enabled=ranks.is_main),
    )


def index_data(config: Config, processor: Processor, ranks: Ranks) -> tuple[Corpus, list[EvalSet]]:
    """Scan training and evaluation files; machines that cannot read them and bad rows are decided on here."""
    check_reach((source.path for source in (*config.data.train, *config.data.eval)), ranks)
    corpus = scan_files(config, config.data.train, processor, ranks, by_curriculum=True)
    measured = scan_files(config, config.data.eval, processor, ranks)
    check_reach((path for index in corpus.sources + measured.sources for path in index.media), ranks)
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
                raise DataError(
                    f"the id {row.id!r} stands twice",
                    where=f"{index.source(seen[row.id])} and {index.source(row)}",
                    why="in an evaluation each id is one query",
                    remedy="Give the rows ids of their own",
                )
            seen[row.id] = row


def choose_dtype(config: Config, device: torch.device) -> torch.dtype:
    """What weights are held in. `auto`: bfloat16 on a GPU when no part trains in full, float32 otherwise; float64 is
    what is computed in."""
    held = "float64" if config.train.precision == "fp64" else config.model.dtype
    if held != "auto":
        return DTYPES[held]
    parts = (config.trainable.vision, config.trainable.merger, config.trainable.language, config.trainable.head)
    light = all(p.mode != "full" for p in parts)
    return torch.bfloat16 if device.type == "cuda" and light and config.train.precision != "fp32" else torch.float32


def build_wrapped(
    config: Config,
    loaded: Loaded,
    processor: Processor,
    ranks: Ranks,
    precision: str,
    *,
    adapter: Path | None = None,
    training: bool = True,
) -> Wrapped:
    """Set what trains (nothing, unless `training`), make the owner, wrap it and read its weights.

    Args:
        loaded: on the meta device.
        adapter: folder of the adapter to put on it; None: new additions where `trainable` wants them.
    """
    if adapter is not None:
        load_adapter(loaded, adapter)
    if training:
        apply_trainable(loaded, config.trainable)
        release_rows(loaded.hf, loaded.family, rerank=config.task == "rerank")
    check_rows(loaded, stages=config.parallel.pp, head=config.trainable.head.mode)
    layout = _find_layout(config, loaded, ranks)
    choose_kernels(config.model.attention, ranks.device, COMPUTE[precision])
    score_loss, _ = make_loss(config.loss)
    template = find_template(config.data.template) if config.task == "rerank" else None
    owner = LitchiModel(
        loaded.hf,
        loaded.family,
        processor.vision,
        words=None if template is None else (processor.word(template.yes), processor.word(template.no)),
        score_loss=score_loss,
        attention=config.model.attention,
    )
    owner.train()

    placement = _find_placement(config, loaded, ranks)

    def fill() -> None:
        waits = placement is not None or (config.train.offload == "all" and not layout.encodes(ranks.rank))
        device = torch.device("cpu") if waits else ranks.device
        fill_weights(loaded.hf, loaded.folder, adapter=adapter, seed=config.train.seed, device=device)
        if placement is not None:
            spread_model(loaded.hf, loaded.family, placement)

    return apply_parallel(
        owner,
        layout,
        ranks,
        precision=precision,
        checkpoint=config.train.checkpoint_activations,
        tied=loaded.tied,
        offload=config.train.offload == "all",
        whole_tower=training and config.train.features != "off",
        compiled=training and config.train.compile,
        fill=fill,
    )


def _find_layout(config: Config, loaded: Loaded, ranks: Ranks) -> Layout:
    """The layout of the settings, for a model in which what trains is set. UsageError where it cannot be cut so."""
    layout = choose_layout(config.parallel, ranks.world, fits_whole=_fits_whole(loaded, ranks.device))
    tower = part(loaded.hf, loaded.family.vision)
    check_axes(
        read_config(loaded.folder),
        tp=layout.tp,
        cp=layout.cp,
        pp=layout.pp,
        vision_trains=any(p.requires_grad for p in tower.parameters()),
    )
    check_offload(config.train.offload, layout)
    return layout


def _find_placement(config: Config, loaded: Loaded, ranks: Ranks) -> Placement | None:
    """Where each layer goes if one process takes all GPUs; UsageError where they do not hold the model."""
    if config.model.placement == "one":
        return None
    placement = plan_placement(list_units(loaded.hf, loaded.family), find_devices(ranks.world))
    print(placement.line(), file=sys.stderr)
    return placement


def _path(name: str | None) -> Path | None:
    return None if name is None else Path(name)


def _fits_whole(loaded: Loaded, device: torch.device) -> bool:
    """Whether weights, gradients and AdamW's state take at most half of the GPU."""
    if device.type != "cuda":
        return True
    state = 0
    for parameter in loaded.hf.parameters():
        size = parameter.numel() * parameter.element_size()
        state += size * (4 if parameter.requires_grad else 1)
    return state < torch.cuda.get_device_properties(device).total_memory / 2


def _quarantine(
    config: Config, corpus: Corpus, eval_sets: Sequence[EvalSet], log: RunLog, folder: Path, ranks: Ranks
) -> None:
    """Write what is left out, and say how much."""
    indexes = (*corpus.sources, *(s.index for s in eval_sets))
    left_out = refuse_bad(indexes, config)
    path = folder / "quarantine.jsonl"
    reasons = [{"file": f.file, "line": f.line, "reason": f"{f.code}: {f.message}"} for f in left_out]
    text = "".join(json.dumps(reason, ensure_ascii=False) + "\n" for reason in reasons)
    on_main(ranks, lambda: replace_file(path, text), what="the quarantine cannot be written", place=path)
    for index in indexes:
        rows = {f.line for f in left_out if f.file == index.path}
        log.say(
            f"{index.name}: {len(index.rows):,} of {len(index.lines):,} rows, {index.tokens:,} tokens, "
            f"{index.patches:,} patches" + (f"; {len(rows)} rows in {path}" if rows else "")
        )


def _describe(run: Run, *, first: int) -> None:
    """Print and keep what was really taken: derived numbers with their formulas, wrapper, kernel, precision."""
    stages = run.plan.curriculum.lines(run.derived.steps) if run.plan.curriculum else []
    for line in (*run.derived.lines(), *stages):
        run.log.say(line)
    owner, precision = run.wrapped.owner, run.wrapped.precision
    trains, total = run.wrapped.weights
    kernel = choose_kernels(owner.attention, run.ranks.device, COMPUTE[precision]).name
    run.log.say(
        f"{trains:,} of {total:,} parameters train; {run.ranks.world} rank(s) on {run.ranks.device.type}: "
        f"{run.wrapped.layout}, wrapper {run.wrapped.wrapper}, compute {precision}, attention {kernel}"
    )
    run.journal.note(
        "start",
        step=first,
        ranks=run.ranks.world,
        device=run.ranks.device.type,
        layout={axis: size for axis, size in asdict(run.wrapped.layout).items() if size != 1},
        wrapper=run.wrapped.wrapper,
        precision=precision,
        attention=kernel,
        weights=str(next(owner.parameters()).dtype).removeprefix("torch."),
        micro_batch_tokens=run.plan.limit(first),
        torch=torch.__version__,
    )


def check_room(run: Run) -> str:
    """Whether the disk has room for what the run will write. Returns the line that says it; MachineError if not."""
    owner = run.wrapped.owner
    trains, total = run.wrapped.weights
    room = plan_room(
        run.config,
        trains=trains,
        total=total,
        trained_width=max((p.element_size() for p in owner.parameters() if p.requires_grad), default=4),
        held_width=next(owner.hf.parameters()).element_size(),
        steps=run.derived.steps,
        per_epoch=run.plan.epochs.steps_per_epoch,
    )
    return refuse_full_disk(run.folder, run.ranks, **asdict(room))


def set_aside(folder: Path) -> None:
    """Move an old run's folder out of the way; nothing is deleted. UsageError where a run is under way in it."""
    if folder.exists():
        with FolderLock(folder):
            number = next(n for n in range(1, 10_000) if not folder.with_name(f"{folder.name}.{n}").exists())
            folder.rename(folder.with_name(f"{folder.name}.{number}"))
        print(f"the old run was moved to {folder}.{number}", flush=True)
