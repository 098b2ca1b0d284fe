"""Going back to a checkpoint because of steps whose numbers went wrong, and leaving those steps out on the way again.

The journal says so before anything is taken back, so a run that is killed anywhere in between goes on the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from litchi.config.train import Train
from litchi.dist import Ranks
from litchi.train.checkpoint import (
    Checkpoint,
    find_damage,
    list_checkpoints,
    refuse_checkpoint,
    remove_checkpoint,
)
from litchi.train.durable import on_main
from litchi.train.journal import JOURNAL, Journal
from litchi.train.metrics import read_lines

EVENT = "rollback"


class GoBack(Exception):
    """The run must go back because of these steps; raised on all ranks alike."""

    def __init__(self, step: int, bad: Sequence[int], leave_out: Sequence[int]):
        super().__init__(f"step {step}")
        self.step, self.bad, self.leave_out = step, list(bad), list(leave_out)


def kept_checkpoints(train: Train) -> int:
    """How many of the newest are kept: one from before the last update must be there to go back to."""
    return max(train.keep, 2) if train.on_nonfinite == "rollback" else train.keep


def left_out_steps(journal: Journal) -> set[int]:
    """The steps whose update is left out, because the run went back for them."""
    return {step for entry in journal.made(EVENT) for step in entry["leave_out"]}


def find_good(folder: Path, before: int, ranks: Ranks) -> Checkpoint | None:
    """The newest sound checkpoint of a step below one; damaged ones on the way are set aside. Collective."""

    def newest() -> Checkpoint | None:
        return next((c for c in reversed(list_checkpoints(folder)) if c.step < before), None)

    while (found := on_main(ranks, newest, what="the run's folder cannot be read", place=folder)) is not None:
        damage = "it has weights alone" if found.manifest["weights_only"] else find_damage(found)
        if damage is None:
            return found
        refuse_checkpoint(found, damage, ranks)
    return None


def take_back(back: GoBack, good: Checkpoint, journal: Journal) -> None:
    """Write down that the run goes back, then remove the checkpoints behind it. Collective."""
    number = len(journal.made(EVENT)) + 1
    at = {"number": number, "from_step": back.step, "to_step": good.step}
    journal.add(EVENT, step=good.step + 1, **at, bad=back.bad, leave_out=back.leave_out)
    remove_undone(journal.path.parent, journal.ranks)


def remove_undone(folder: Path, ranks: Ranks) -> None:
    """Remove checkpoints of steps that were taken back: those behind a rollback that do not know of it. Collective."""

    def remove() -> None:
        entries = read_lines(folder / JOURNAL)
        for checkpoint in list_checkpoints(folder):
            if is_undone(checkpoint.step, checkpoint.manifest["journal"], entries):
                remove_checkpoint(checkpoint)

    on_main(ranks, remove, what="a checkpoint cannot be removed", place=folder)


def is_undone(step: int, known: Sequence[Mapping[str, Any]], entries: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a checkpoint, which carries the entries known to it, is of steps that were taken back since. Pure."""
    return any(e["event"] == EVENT and e["to_step"] < step and e not in known for e in entries)
