"""A progress bar for long work that has no steps: reading, checking, measuring. On stderr, rank 0 only."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def count_progress(text: str, *, enabled: bool = True) -> Callable[[int, int], None] | None:
    """A callback (done, total) that draws a bar, or None where nothing is to be drawn."""
    if not enabled:
        return None
    console = Console(stderr=True)
    if not console.is_terminal:
        return _PlainProgress(text)
    bar = Progress(
        TextColumn(text), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console, transient=True
    )
    task = bar.add_task(text, total=None)
    bar.start()

    def show(done: int, total: int) -> None:
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
            print(f"{self.text}: {done:,} of {total:,}", file=Console(stderr=True).file, flush=True)
