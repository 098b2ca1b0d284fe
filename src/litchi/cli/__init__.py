"""The command line: its verbs, in the files beside this one. Nothing heavy is imported before a verb needs it."""

from __future__ import annotations

import logging
import os
from typing import Annotated

import typer

from litchi import __version__
from litchi.cli import machine, measure, runs, serve, train
from litchi.cli.data import data_app
from litchi.cli.ranks import exit_status, leave, said_by_launcher, speak
from litchi.cli.video import video_app
from litchi.errors import StoppedError, UserError

INTERRUPTED = 130  # what typer makes of the keyboard's interrupt

VERBS = (
    *(train.train, measure.evaluate, measure.score, measure.generate, measure.mine),
    *(train.export, serve.serve, serve.watch, machine.selfcheck, machine.plan, train.demo),
    *(machine.doctor, runs.compare, runs.ladder),
)

app = typer.Typer(
    name="litchi",
    help="Fine-tune Qwen2.5-VL and its rerankers, and prove it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(data_app, name="data")
app.add_typer(video_app, name="video")
for verb in VERBS:
    app.command()(verb)


def main() -> None:
    """Run the command line; errors of the user's are one line and an exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    # threads that wait must sleep: spinning on a machine with other work made a step 20 times slower
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        status = app(standalone_mode=False)  # of `typer.Exit`, which it catches itself; else None
    except UserError as error:
        if not said_by_launcher(error):
            speak(error.line())
        leave(exit_status(error))
    except typer._click.ClickException as error:  # an unknown option, a missing argument
        speak(f"{error.format_message().rstrip('.')}. See litchi --help")
        leave(2)
    except Exception as error:
        line = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {line[0] if line else 'no reason given'}. Run again with --debug"
        speak(text, echo=True)
        leave(1)
    if status == INTERRUPTED:
        speak("stopped by the keyboard")
        leave(StoppedError.status)
    leave(status or 0)


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
