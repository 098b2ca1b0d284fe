"""The verbs that ask a model about a file: one function each, no logic."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from litchi.cli.options import AsJson, Debug, Overrides, Procs, Seed
from litchi.cli.ranks import in_ranks
from litchi.errors import UsageError

if TYPE_CHECKING:
    from litchi.dist import Ranks


def evaluate(
    target: Annotated[str | None, typer.Argument(metavar="[TARGET]")] = None,
    overrides: Overrides = None,
    data: Annotated[str | None, typer.Option("--data", metavar="FILE", help="What to measure on.")] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="RUN", help="Scores in TREC form or JSONL.")] = None,
    qrels: Annotated[
        str | None, typer.Option("--qrels", metavar="QRELS", help="Relevance in TREC form or JSONL.")
    ] = None,
    against: Annotated[
        str | None, typer.Option("--against", metavar="TARGET", help="A second model, such as the base.")
    ] = None,
    log: Annotated[
        str | None, typer.Option("--log", metavar="LOG", help="Shown lists with clicks, to judge --run by.")
    ] = None,
    catalogue: Annotated[
        str | None, typer.Option("--catalogue", metavar="FILE", help="With --log: the ids of all items there are.")
    ] = None,
    procs: Procs = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure a model on a file, or a run file against qrels or a log of clicks."""
    if log or catalogue:
        from litchi.evaluate.business import format_log, measure_log

        if target or data or qrels or against or not log:
            raise UsageError("--log goes with --run and --catalogue alone", remedy="See litchi evaluate --help")
        answer = measure_log(log, run, catalogue)
        print(json.dumps(answer, ensure_ascii=False) if as_json else format_log(answer))
        return
    if run or qrels:
        from litchi.evaluate.trec import measure_files

        if not (run and qrels) or target:
            raise UsageError("--run and --qrels go together", why="they take the place of TARGET")
        say_report(measure_files(run, qrels), as_json)
        return
    if not target or not data:
        raise UsageError("TARGET and --data are needed", remedy="litchi evaluate TARGET --data FILE")

    def body(ranks: Ranks) -> None:
        from litchi.train.measure import measure_target

        report = measure_target(target, data, overrides or [], ranks, against=against)
        if ranks.is_main:
            say_report(report, as_json)

    in_ranks(procs, body)


def score(
    target: Annotated[str, typer.Argument(metavar="TARGET")],
    overrides: Overrides = None,
    data: Annotated[str, typer.Option("--data", metavar="FILE")] = ...,  # type: ignore[assignment]
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="JSONL of query_id, doc_id, score.")] = ...,  # type: ignore[assignment]
    trec: Annotated[str | None, typer.Option("--trec", metavar="FILE", help="The same as a TREC run too.")] = None,
    procs: Procs = None,
    debug: Debug = False,
) -> None:
    """Write the score of every query and document; interrupted, the same command goes on."""
    _write(target, data, overrides, out, procs, "rerank", trec=None if trec is None else Path(trec))


def generate(
    target: Annotated[str, typer.Argument(metavar="TARGET")],
    overrides: Overrides = None,
    data: Annotated[str, typer.Option("--data", metavar="FILE")] = ...,  # type: ignore[assignment]
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="JSONL of id and text.")] = ...,  # type: ignore[assignment]
    schema: Annotated[
        str | None, typer.Option("--schema", metavar="FILE", help="JSON schema to hold the answers against.")
    ] = None,
    restore_boxes: Annotated[
        bool, typer.Option("--restore-boxes", help="Boxes in answers as pixels of the row's picture.")
    ] = False,
    procs: Procs = None,
    debug: Debug = False,
) -> None:
    """Write the greedy answer to every row's last turn; interrupted, the same command goes on."""
    _write(target, data, overrides, out, procs, "chat", schema=schema, restore=restore_boxes)


def _write(
    target: str,
    data: str,
    overrides: list[str] | None,
    out: str,
    procs: int | None,
    task: Literal["rerank", "chat"],
    **more: Any,
) -> None:
    def body(ranks: Ranks) -> None:
        from litchi.train.writing import write_lines

        written = write_lines(target, data, overrides or [], Path(out), ranks, task=task, **more)
        if ranks.is_main:
            print(f"{written} in {out}", file=sys.stderr)

    in_ranks(procs, body)


def mine(
    target: Annotated[str | None, typer.Argument(metavar="[TARGET]")] = None,
    overrides: Overrides = None,
    data: Annotated[str, typer.Option("--data", metavar="FILE", help="Rows to find negatives for.")] = ...,  # type: ignore[assignment]
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="The rows with new negatives.")] = ...,  # type: ignore[assignment]
    pool: Annotated[
        str | None, typer.Option("--pool", metavar="FILE", help="Rows whose documents to search; default: FILE's own.")
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="Scores to take in place of TARGET's.")
    ] = None,
    negatives: Annotated[int, typer.Option("-n", "--negatives", min=1, help="For each query.")] = 7,
    window: Annotated[str, typer.Option("--ranks", metavar="FIRST:LAST", help="Ranks to draw from.")] = "1:50",
    margin: Annotated[float, typer.Option("--margin", help="How far below the positive's score.")] = 0.0,
    candidates: Annotated[int, typer.Option("--candidates", min=1, help="Documents to score for each query.")] = 200,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the rows' own negatives too.")] = False,
    seed: Seed = 0,
    procs: Procs = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Find hard negatives in the ranking of a model, or of a run file."""
    from litchi.evaluate.mine import Mining, format_answer, parse_ranks

    first, last = parse_ranks(window)
    how = Mining(negatives, first, last, margin, candidates, seed, keep)

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer) if as_json else format_answer(answer))

    if (target is None) == (run is None):
        raise UsageError("TARGET or --run is needed", why="one of them says how documents are ranked")
    if run is not None:
        from litchi.train.mine import mine_run

        say(mine_run(run, data, Path(out), how, pool=pool))
        return

    def body(ranks: Ranks) -> None:
        from litchi.train.mine import mine_target

        assert target is not None
        answer = mine_target(target, data, overrides or [], Path(out), ranks, how, pool=pool)
        if ranks.is_main:
            say(answer)

    in_ranks(procs, body)


def say_report(report: dict[str, Any], as_json: bool) -> None:
    """Print the answer of `evaluate`."""
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
        return
    from litchi.train.measure import format_report

    print(format_report(report))
