"""The verbs that train and hand on what was trained: one function each, no logic."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from litchi.cli.options import Debug, Overrides, Procs
from litchi.cli.ranks import end_now, in_ranks
from litchi.errors import UsageError

if TYPE_CHECKING:
    from litchi.dist import Ranks

SLURM = "Say --slurm nodes=2 --slurm tasks=8 for 16 ranks"
Engine = Literal["torch", "ray"]
ExportFormat = Literal["merged", "int8", "int4", "int4-gptq", "int4-awq", "nf4", "score", "onnx-vision", "triton"]


def train(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file of settings, or builtin:NAME.")],
    overrides: Overrides = None,
    procs: Procs = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over; the old run is moved aside.")] = False,
    allow_changed: Annotated[
        list[str] | None, typer.Option("--allow-changed", metavar="KEY", help="Resume although this setting changed.")
    ] = None,
    slurm: Annotated[
        list[str] | None, typer.Option("--slurm", metavar="KEY=VALUE", help="Submit as a job: nodes, gpus, time, ...")
    ] = None,
    show: Annotated[bool, typer.Option("--print", help="With --slurm: print the script instead.")] = False,
    profile: Annotated[
        int, typer.Option("--profile", min=0, metavar="STEPS", help="Trace so many steps, into the run's folder.")
    ] = 0,
    engine: Annotated[
        Engine, typer.Option("--engine", help="What starts the ranks: torch, or a Ray cluster.")
    ] = "torch",
    debug: Debug = False,
) -> None:
    """Train, evaluate and export; the same command on the same folder resumes."""
    from litchi.train.guard import stop_at_once

    stop_at_once(end_now)
    from litchi.config import load_config
    from litchi.config.several import split_runs
    from litchi.parallel.accelerate import adopt_accelerate

    runs = split_runs(overrides or [])
    if len(runs) > 1:
        from litchi.scale.sweep import place_runs, run_several

        if slurm or show or "RANK" in os.environ:
            raise UsageError("several values for a key need a plain `litchi train`", remedy="Take --procs for ranks")
        options = [*(["--procs", str(procs)] if procs else []), *["--fresh"] * fresh, *["--debug"] * debug]
        options += [*_each("--allow-changed", allow_changed), "--profile", str(profile), "--engine", engine]
        print(run_several(config, place_runs(config, overrides or [], runs), options))
        return

    settings = adopt_accelerate(load_config(config, overrides or []), os.environ)
    if slurm or show:
        from litchi.parallel.slurm import train_on_slurm

        if procs or not slurm:
            raise UsageError("--procs does not go with --slurm" if slurm else "--print goes with --slurm", remedy=SLURM)
        words = [config, *(overrides or []), *["--fresh"] * fresh, *_each("--allow-changed", allow_changed)]
        command = [sys.executable, "-m", "litchi", "train", *words]
        workers, output = settings.data.workers, settings.output
        print(train_on_slurm(slurm, command, workers=workers, output=output, folder=Path.cwd(), show=show).rstrip())
        return

    from litchi.parallel.launch import ranks_to_start

    if fresh and (engine == "ray" or ranks_to_start(procs) > 1):
        from litchi.train.setup import set_aside

        set_aside(Path(settings.output))  # here, for the ranks may be started more than once
        fresh = False

    def body(ranks: Ranks) -> None:
        from litchi.train.loop import train_run

        train_run(settings, ranks, fresh=fresh, allow_changed=allow_changed or [], profile=profile)

    if engine == "ray":
        from litchi.parallel.ray import run_on_ray

        run_on_ray(body, procs, output=settings.output)
    else:

        def newest() -> int:
            from litchi.train.checkpoint import list_checkpoints

            return max((c.step for c in list_checkpoints(Path(settings.output))), default=0)

        in_ranks(procs, body, restarts=settings.train.restarts, newest=newest)


def _each(option: str, values: list[str] | None) -> list[str]:
    return [word for value in values or [] for word in (option, value)]


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, a checkpoint or an adapter.")],
    out: Annotated[str, typer.Argument(metavar="OUT")],
    overrides: Overrides = None,
    form: Annotated[
        ExportFormat, typer.Option("--format", help="Weights merged, rounded, for a classifier; or for others.")
    ] = "merged",
    data: Annotated[
        str | None, typer.Option("--data", metavar="FILE", help="Rows to compare on; default: the run's own.")
    ] = None,
    limit: Annotated[
        float | None, typer.Option("--limit", metavar="LOSS", help="It may lose: MRR@10 (0.005), of chat loss (0.05).")
    ] = None,
    compressor: Annotated[
        str | None,
        typer.Option("--compressor", metavar="PYTHON", help="A Python with llmcompressor, for gptq and awq."),
    ] = None,
    procs: Procs = None,
    debug: Debug = False,
) -> None:
    """Write the model as a Hugging Face folder, and compare it with the trained one."""

    def body(ranks: Ranks) -> None:
        from litchi.train.export_target import export_target
        from litchi.train.export_triton import export_triton

        if form == "triton":
            export_triton(run, Path(out), overrides or [], ranks, data=data, limit=limit)
        else:
            export_target(
                run, Path(out), overrides or [], ranks, form=form, data=data, limit=limit, compressor=compressor
            )
        if ranks.is_main:
            print(f"export: {out}", file=sys.stderr)

    in_ranks(procs, body)


def demo(
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Folder of the demo.")] = "runs/demo",
    procs: Annotated[int, typer.Option("--procs", min=1, help="Ranks for the fine-tuning.")] = 2,
    debug: Debug = False,
) -> None:
    """Draw a catalogue, fine-tune a reranker on it, and show what it learnt."""
    from litchi.prepare.demo import run_demo

    run_demo(Path(out), procs=procs)
