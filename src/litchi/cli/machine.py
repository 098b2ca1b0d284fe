"""The verbs that check this machine: one function each, no logic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from litchi.cli.options import AsJson, Debug, Overrides, Procs
from litchi.cli.ranks import in_ranks

if TYPE_CHECKING:
    pass


def selfcheck(
    procs: Annotated[int, typer.Option("--procs", min=1, help="Ranks at most.")] = 2,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer kinds of training, fp32 alone; of each fault one.")
    ] = False,
    chaos: Annotated[
        bool, typer.Option("--chaos", help="Kill, stop, starve and spoil real runs instead; nothing must be lost.")
    ] = False,
    write: Annotated[
        str | None, typer.Option("--write", metavar="FILE", help="Put the table into a document, between its marks.")
    ] = None,
    page: Annotated[
        str | None, typer.Option("--report", metavar="FILE", help="Write what was verified where, a page to keep.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
    job: Annotated[str | None, typer.Option("--job", hidden=True)] = None,
) -> None:
    """Check that nothing changes the numbers here: every layout, and what else has to be equal; or faults."""
    if job is not None:
        from litchi.scale.jobs import RESTARTS, newest_step, run_file

        file = Path(job)
        in_ranks(procs, lambda ranks: run_file(ranks, file), restarts=RESTARTS, newest=lambda: newest_step(file))
        return
    from litchi.scale import verified

    document = None if write is None else Path(write)
    if chaos:
        report = verified.report_chaos(quick=quick, write=document)
    else:
        report = verified.report_equal(procs, quick=quick, write=document)
    if page is not None:
        verified.write_page(Path(page), report)
    print(json.dumps(report) if as_json else verified.format_report(report))
    if not report["passed"]:
        raise typer.Exit(1)


def doctor(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG] [KEY=VALUE]...", help="A run to check the machine for, as for train."),
    ] = None,
    procs: Procs = None,
    as_json: AsJson = False,
    debug: Debug = False,
    job: Annotated[str | None, typer.Option("--job", hidden=True)] = None,
) -> None:
    """Look at this machine: can it train, and does it suffice for a run?"""
    from litchi.config import load_config
    from litchi.prepare import doctor as looks

    if job is not None:
        in_ranks(None, lambda ranks: looks.sum_in_ranks(ranks, Path(job)))
        return
    from litchi.parallel.launch import default_procs

    file = next((word for word in (words or [])[:1] if "=" not in word or Path(word).is_file()), None)
    settings = (words or [])[file is not None :]
    config = load_config(file, settings, need=()) if words else None
    answer = looks.examine(config, procs=procs or default_procs())
    print(json.dumps(answer, ensure_ascii=False) if as_json else looks.format_examination(answer))
    if any(check["verdict"] == "fail" for check in answer["checks"]):
        raise typer.Exit(4)


def plan(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file of settings, or builtin:NAME.")],
    overrides: Overrides = None,
    size: Annotated[
        str | None, typer.Option("--model-size", metavar="SIZE", help="3b, 7b, 32b or 72b instead of model.path.")
    ] = None,
    gpu: Annotated[
        str, typer.Option("--gpu", help="a100-80gb, a100-40gb, h100-80gb, h200, rtx4090 or l40s.")
    ] = "a100-80gb",
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="Cards of a machine.")] = 8,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Machines.")] = 1,
    price: Annotated[
        float | None, typer.Option("--price", min=0, metavar="USD", help="An hour of a card; default: a round figure.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say which layouts of a run fit a machine, how long they take, and what bounds them; start nothing."""
    from litchi.scale.plan import format_plan, plan_run

    report = plan_run(config, overrides or [], size=size, gpu=gpu, gpus=gpus, nodes=nodes, price=price)
    print(json.dumps(report) if as_json else format_plan(report))
    if not report["fits"]:
        raise typer.Exit(1)
