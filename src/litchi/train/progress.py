"""Progress on a terminal: a bar for work that has no steps (reading, checking, measuring), a line for the steps."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def count_progress(text: str, *, enabled: bool = True) -> Callable[[int, int], None] | None:
    """A callback (done, total) that draws a bar on stderr, or None where nothing is to be drawn."""
    if not enabled:
        return None
    console = Console(stderr=True)
    if not console.is_terminal:
        return _PlainProgress(text)
    bar = Progress(
        TextColumn(text), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console, transient=True
    )
    task = bar.add_task(text, total=None)

    def show(done: int, total: int) -> None:
        bar.start()  # not before: where the answer is cached there is nothing to show
        bar.update(task, completed=done, total=total)
        if done >= total:
            bar.stop()

    return show


class _PlainProgress:
    """Without a terminal: a line at every tenth of the way."""

    def __init__(self, text: str):
        self.text, self.shown = text, 0

    def __call__(self, done: int, total: int) -> None:
        tenth = 10 * done // max(total, 1)
        if tenth > self.shown and total > 1:
            self.shown = tenth
            print(f"{self.text}: {done:,} of {total:,}", file=sys.stderr, flush=True)


class StepLine:
    """The one live line of a run on a terminal: bar, step, figures. It is gone while something else is drawn."""

    def __init__(self, total: int, out: TextIO):
        self._bar = Progress(
            TextColumn("step"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            console=Console(file=out),
            transient=True,
        )
        self._task = self._bar.add_task("step", total=total, figures="")

    def show(self, step: int, figures: str) -> None:
        """Draw a step."""
        self._bar.start()
        self._bar.update(self._task, completed=step, figures=figures)

    def hide(self) -> None:
        """Take the line away until the next step."""
        self._bar.stop()
