"""`litchi train` with several values for a key: a run for each, one after the other, and compared at the end.

    overrides of each run -> `litchi train` of each, in folders below `output` -> compare.py -> compare.md, compare.html

A run that fails does not stop the others: it is named at the end. The same command goes on with those that were
stopped or failed; runs that are done are not run again.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from litchi.config import load_config
from litchi.config.several import varied
from litchi.errors import StoppedError, UsageError, UserError
from litchi.scale.compare import compare_runs, format_answer, read_runs, write_text
from litchi.scale.compare_page import format_page, thin_losses
from litchi.train.guard import SIGNALS

PRICE = 2.0  # of a rank for an hour, as in `litchi compare`


def place_runs(file: str, overrides: Sequence[str], runs: Sequence[Sequence[str]]) -> dict[Path, list[str]]:
    """Folder -> overrides of each run; all settings are read, so that a wrong one is found before anything runs.

    Raises:
        UsageError: settings are wrong, or the folder above is that of a run.
    """
    above = {Path(load_config(file, run).output) for run in runs}.pop()
    if (above / "metrics.jsonl").exists():
        raise UsageError(f"output={above} is a run", why="the runs come into folders below", remedy="Name another one")
    placed: dict[Path, list[str]] = {}
    for run in runs:
        folder = above / ",".join(re.sub(r"[^\w.=+-]+", "_", word).strip("_") for word in varied(overrides, run))
        if folder in placed:
            raise UsageError(f"two runs would lie in {folder}", why="their values differ in signs alone")
        placed[folder] = [*run, f"output={json.dumps(str(folder))}"]
    return placed


def run_several(file: str, placed: Mapping[Path, Sequence[str]], options: Sequence[str] = ()) -> str:
    """Train them all; returns the tables, which lie beside the runs too.

    Args:
        placed: of `place_runs`.
        options: of `litchi train`, for each.

    Raises:
        StoppedError: by a signal; the same command goes on.
        UserError: a run failed. The others are compared before.
    """
    failed: dict[Path, int] = {}
    for number, (folder, words) in enumerate(placed.items(), 1):
        print(f"run {number} of {len(placed)}: {folder.name}", file=sys.stderr, flush=True)
        status = _train([file, *words, *options])
        if status == StoppedError.status:
            raise StoppedError(f"stopped in {folder.name}", remedy="The same command goes on")
        if status:
            failed[folder] = status
    done = [str(folder) for folder in placed if folder not in failed]
    tables = ""
    if done:
        found = read_runs(done)
        answer = compare_runs(found, price=PRICE)
        tables, above = format_answer(answer), Path(done[0]).parent
        write_text(above / "compare.md", tables + "\n")
        write_text(above / "compare.html", format_page(answer, {run.name: thin_losses(run.steps) for run in found}))
    if failed:
        if tables:
            print(tables, flush=True)
        names = ", ".join(f"{folder.name} (status {status})" for folder, status in failed.items())
        raise UserError(
            f"{len(failed)} of {len(placed)} runs failed", where=names, remedy="The same command runs them again"
        )
    return tables


def _train(words: Sequence[str]) -> int:
    """The exit status of a run; that of a stopped one where a signal came, which is passed on."""
    command = [sys.executable, "-m", "litchi", "train", *words]
    # a session of its own: a terminal would send its interrupt to both, and a second one ends a run without saving
    start = partial(subprocess.Popen, command, start_new_session=True, stdout=sys.stderr)
    started: list[subprocess.Popen] = []
    came: list[int] = []

    def pass_on(number: int, frame: Any) -> None:
        came.append(number)
        for process in started:
            process.terminate()

    before = {number: signal.signal(number, pass_on) for number in SIGNALS}
    try:
        started.append(start())
        if came:  # before it was there
            started[0].terminate()
        status = started[0].wait()
    finally:
        for process in started:
            process.kill()  # which does nothing to one that has ended
        for number, handler in before.items():
            signal.signal(number, handler)
    return StoppedError.status if came else status
