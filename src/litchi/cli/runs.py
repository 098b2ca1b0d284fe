"""The verbs about whole runs: one function each, no logic."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from litchi.cli.options import AsJson, Debug, Overrides


def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders; the first is the measure.")],
    price: Annotated[float, typer.Option("--price", min=0.0, help="Of a rank (a GPU) for an hour.")] = 2.0,
    html: Annotated[str | None, typer.Option("--html", metavar="FILE", help="Write a page with plots.")] = None,
    markdown: Annotated[str | None, typer.Option("--markdown", metavar="FILE", help="Write the tables.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Set runs side by side: time, speed-up, cost, memory, metrics, and where the time went."""
    from litchi.scale import compare as compares

    found = compares.read_runs(runs)
    answer = compares.compare_runs(found, price=price)
    if html is not None:
        from litchi.scale.compare_page import format_page, thin_losses

        page = format_page(answer, {run.name: thin_losses(run.steps) for run in found})
        compares.write_text(Path(html), page)
    if markdown is not None:
        compares.write_text(Path(markdown), compares.format_answer(answer) + "\n")
    print(json.dumps(answer, ensure_ascii=False) if as_json else compares.format_answer(answer))
    for path in filter(None, (html, markdown)):
        print(f"written: {path}", file=sys.stderr)


def ladder(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file of settings, or builtin:NAME.")],
    overrides: Overrides = None,
    procs: Annotated[
        int | None, typer.Option("--procs", min=1, help="Ranks of the last rung; default: one per GPU, or two.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=11, help="Steps of the epoch at most.")] = 100,
    floor: Annotated[
        float | None, typer.Option("--floor", help="Least efficiency; default: 0.5 on GPUs, none on a CPU.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option("--memory", min=0.0, metavar="GB", help="Of a rank; default: this machine's.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Take a run in small first: one process, two, an epoch, all of them, with a gate behind each."""
    from litchi.config import load_config
    from litchi.parallel.launch import default_procs
    from litchi.scale import ladder as rungs

    settings = load_config(config, overrides or [])
    ranks = procs or max(2, default_procs())
    held = None if memory is None else memory * 1e9
    answer = rungs.climb_ladder(
        config, overrides or [], settings, procs=ranks, limit=limit, floor=floor, memory_bytes=held
    )
    print(json.dumps(answer, ensure_ascii=False) if as_json else rungs.format_ladder(answer))
    if not answer["passed"]:
        raise typer.Exit(1)
