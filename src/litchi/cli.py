"""One function per verb, no logic. Nothing heavy is imported before a verb needs it."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from litchi import __version__
from litchi.errors import MachineError, StoppedError, UsageError, UserError

if TYPE_CHECKING:
    from litchi.dist import Ranks

SLURM = "Say --slurm nodes=2 --slurm tasks=8 for 16 ranks"
INTERRUPTED = 130  # what typer makes of the keyboard's interrupt

app = typer.Typer(
    name="litchi",
    help="Fine-tune Qwen2.5-VL and its rerankers, and prove it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
data_app = typer.Typer(help="Check data before a run is paid for.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data_app, name="data")

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings, as in docs/settings.md.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Procs = Annotated[int | None, typer.Option("--procs", min=1, help="Ranks to start; default: one per GPU, or one.")]
Engine = Literal["torch", "ray"]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, all else on stderr.")]


def main() -> None:
    """Run the command line; errors of the user's are one line and an exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    # threads that wait must sleep: spinning on a machine with other work made a step 20 times slower
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        status = app(standalone_mode=False)  # of `typer.Exit`, which it catches itself; else None
    except UserError as error:
        if not (isinstance(error, StoppedError) and "TORCHELASTIC_RUN_ID" in os.environ):  # there the parent says it
            _speak(error.line())
        _leave(error.status)
    except typer._click.ClickException as error:  # an unknown option, a missing argument
        _speak(f"{error.format_message().rstrip('.')}. See litchi --help")
        _leave(2)
    except Exception as error:
        line = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {line[0] if line else 'no reason given'}. Run again with --debug"
        _speak(text, echo=True)
        _leave(1)
    if status == INTERRUPTED:
        _speak("stopped by the keyboard")
        _leave(StoppedError.status)
    _leave(status or 0)


def _speak(text: str, *, echo: bool = False) -> None:
    """Say an error once for all ranks: rank 0 at once, another if nobody has ended it all two seconds later.

    Args:
        text: the error.
        echo: it may only be what a rank notices when another has ended, which is the one to hear.
    """
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    time.sleep(2.0 * (rank > 0) + 4.0 * (echo and world > 1))
    if "--debug" in sys.argv and sys.exc_info()[0]:
        traceback.print_exc()
    print(f"error: {text}", file=sys.stderr, flush=True)


def _leave(status: int) -> NoReturn:
    """End the process; a rank does not wait for peers that may hang in a collective."""
    for child in multiprocessing.active_children():  # loader workers, which would hold the terminal for seconds
        child.kill()
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")  # the cursor, which a live line that was cut off has hidden
    sys.stdout.flush()
    sys.stderr.flush()
    if "RANK" in os.environ:
        os._exit(status)
    sys.exit(status)


def _in_ranks(procs: int | None, body: Callable[[Ranks], int | None]) -> None:
    """Run a verb in the ranks a launcher made, or start `procs` ranks of it."""
    from litchi.parallel.launch import join_ranks, ranks_to_start, run_ranks

    count = ranks_to_start(procs)
    if count > 1:
        raise typer.Exit(run_ranks(sys.argv[1:], count))
    from litchi.dist import stop_ranks
    from litchi.model.build import quiet_libraries
    from litchi.parallel.heartbeat import Heartbeat

    quiet_libraries()
    ranks = join_ranks()
    with Heartbeat(ranks, _lost):
        status = body(ranks)
    stop_ranks()
    if status:
        raise typer.Exit(status)


def _lost(error: UserError | None) -> NoReturn:
    """End a rank whose peer is gone while its main thread waits for it."""
    if error:
        print(f"error: {error.line()}", file=sys.stderr, flush=True)
    _leave(MachineError.status)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"litchi {__version__}")
        raise typer.Exit(0)


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Fine-tune Qwen2.5-VL and its rerankers, and prove it."""


# --------------------------------------------------------------------------------------------------------- verbs


@data_app.command("check")
def data_check(
    file: Annotated[str, typer.Argument(metavar="FILE")],
    overrides: Overrides = None,
    task: Annotated[str | None, typer.Option("--task", help="rerank or chat; default: by the first row.")] = None,
    write_clean: Annotated[
        str | None, typer.Option("--write-clean", metavar="OUT", help="Write the usable rows.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Parse every row, decode every picture, count every token."""
    from litchi.config import load_config
    from litchi.data.jsonl import guess_task
    from litchi.data.processor import load_processor
    from litchi.model.build import BUILTIN, resolve_model
    from litchi.prepare import check

    words = list(overrides or [])
    words += [] if any(w.startswith("task=") for w in words) else [f"task={task or guess_task(file)}"]
    words += [] if any(w.startswith("model.path=") for w in words) else [f"model.path={BUILTIN}"]
    config = load_config(None, [f"data.train={json.dumps(file)}", *words], need=("model.path", "data.train"))
    corpus = check.check_files(config, load_processor(resolve_model(config.model.path)))
    report = check.check_report(corpus)
    print(check.to_json(report) if as_json else check.format_report(report))
    if write_clean:
        said = check.write_clean(corpus, Path(write_clean), media_root=config.data.media_root)
        print(said, file=sys.stderr)
    if any(f["severity"] == "error" for f in report["findings"]):
        raise typer.Exit(3)


@app.command()
def train(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file of settings.")],
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
    from litchi.config import load_config
    from litchi.parallel.accelerate import adopt_accelerate

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

    if engine == "ray" and fresh:
        from litchi.train.setup import set_aside

        set_aside(Path(settings.output))  # here, for Ray may start the workers more than once
        fresh = False

    def body(ranks: Ranks) -> None:
        from litchi.train.loop import train_run

        train_run(settings, ranks, fresh=fresh, allow_changed=allow_changed or [], profile=profile)

    if engine == "ray":
        from litchi.parallel.ray import run_on_ray

        run_on_ray(body, procs, output=settings.output)
    else:
        _in_ranks(procs, body)


def _each(option: str, values: list[str] | None) -> list[str]:
    return [word for value in values or [] for word in (option, value)]


@app.command()
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
    procs: Procs = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure a model on a file, or a run file against qrels."""
    if run or qrels:
        from litchi.evaluate.trec import measure_files

        if not (run and qrels) or target:
            raise UsageError("--run and --qrels go together", why="they take the place of TARGET")
        _answer(measure_files(run, qrels), as_json)
        return
    if not target or not data:
        raise UsageError("TARGET and --data are needed", remedy="litchi evaluate TARGET --data FILE")

    def body(ranks: Ranks) -> None:
        from litchi.train.measure import measure_target

        report = measure_target(target, data, overrides or [], ranks, against=against)
        if ranks.is_main:
            _answer(report, as_json)

    _in_ranks(procs, body)


@app.command()
def score(
    target: Annotated[str, typer.Argument(metavar="TARGET")],
    overrides: Overrides = None,
    data: Annotated[str, typer.Option("--data", metavar="FILE")] = ...,  # type: ignore[assignment]
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="JSONL of query_id, doc_id, score.")] = ...,  # type: ignore[assignment]
    procs: Procs = None,
    debug: Debug = False,
) -> None:
    """Write the score of every query and document."""
    _write(target, data, overrides or [], out, procs, "rerank")


@app.command()
def generate(
    target: Annotated[str, typer.Argument(metavar="TARGET")],
    overrides: Overrides = None,
    data: Annotated[str, typer.Option("--data", metavar="FILE")] = ...,  # type: ignore[assignment]
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="JSONL of id and text.")] = ...,  # type: ignore[assignment]
    procs: Procs = None,
    debug: Debug = False,
) -> None:
    """Write the greedy answer to every row's last turn."""
    _write(target, data, overrides or [], out, procs, "chat")


def _write(target: str, data: str, overrides: list[str], out: str, procs: int | None, task: str) -> None:
    def body(ranks: Ranks) -> None:
        from litchi.train.measure import write_lines

        count = write_lines(target, data, overrides, Path(out), ranks, task=task)
        if ranks.is_main:
            print(f"{count:,} lines in {out}", file=sys.stderr)

    _in_ranks(procs, body)


@app.command()
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, a checkpoint or an adapter.")],
    out: Annotated[str, typer.Argument(metavar="OUT")],
    overrides: Overrides = None,
    procs: Procs = None,
    debug: Debug = False,
) -> None:
    """Write the merged model as a Hugging Face folder."""

    def body(ranks: Ranks) -> None:
        from litchi.train.measure import export_target

        export_target(run, Path(out), overrides or [], ranks)
        if ranks.is_main:
            print(f"export: {out}", file=sys.stderr)

    _in_ranks(procs, body)


@app.command()
def selfcheck(
    procs: Annotated[int, typer.Option("--procs", min=1, help="Ranks at most.")] = 2,
    quick: Annotated[bool, typer.Option("--quick", help="Full chat and LoRA rerank only.")] = False,
    write: Annotated[
        str | None, typer.Option("--write", metavar="FILE", help="Put the table into a document, between its marks.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
    job: Annotated[str | None, typer.Option("--job", hidden=True)] = None,
) -> None:
    """Train in every layout these ranks allow, and compare each with one process."""
    from litchi.scale import selfcheck as check

    if job is not None:
        _in_ranks(None, lambda ranks: check.run_file(ranks, Path(job)))
        return
    report = check.report_layouts(procs, quick=quick, write=None if write is None else Path(write))
    print(json.dumps(report) if as_json else check.format_report(report))
    if not report["passed"]:
        raise typer.Exit(1)


@app.command()
def demo(
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Folder of the demo.")] = "runs/demo",
    procs: Annotated[int, typer.Option("--procs", min=1, help="Ranks for the fine-tuning.")] = 2,
    debug: Debug = False,
) -> None:
    """Draw a catalogue, fine-tune a reranker on it, and show what it learnt."""
    from litchi.prepare.demo import run_demo

    run_demo(Path(out), procs=procs)


def _answer(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
        return
    from litchi.train.measure import format_report

    print(format_report(report))
