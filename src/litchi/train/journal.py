"""The journal of a run, events.jsonl: what cannot be computed from settings, data and seed.

A decision (what an `auto` setting chose, a batch left out, a smaller micro-batch) says from which step it holds. All
ranks agree on it and it is on the disk before that step is applied; checkpoints carry it, and a resume takes it from
here instead of deciding again. Notes (a start, an early stop) say what happened and are cut back with the steps.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from litchi.dist import Ranks, gather_objects
from litchi.train.durable import on_main, replace_file
from litchi.train.metrics import read_lines

JOURNAL = "events.jsonl"
DECIDED = "decided"  # marks a decision


class Journal:
    """The entries so far, the same on every rank.

    Args:
        folder: the run's.
        ranks: all of them use it alike.
        entries: what is there already.
    """

    def __init__(self, folder: Path, ranks: Ranks, entries: list[dict[str, Any]] | None = None):
        self.path, self.ranks = folder / JOURNAL, ranks
        self.entries = list(entries or [])

    @classmethod
    def resume(cls, folder: Path, ranks: Ranks, *, step: int | None, carried: list[dict[str, Any]]) -> Journal:
        """The journal of a run that goes on behind a step. Collective.

        Args:
            step: the checkpoint's; None: there is none.
            carried: the entries in the checkpoint. Decisions made after it, which are on the disk, hold as well:
                the run that is continued had taken them.
        """

        def cut() -> list[dict[str, Any]]:
            disk = [] if step is None else read_lines(folder / JOURNAL)
            later = [e for e in disk if e.get(DECIDED) and e not in carried]
            kept = [*carried, *later]
            replace_file(folder / JOURNAL, "".join(_line(e) for e in kept))
            return kept

        return cls(folder, ranks, on_main(ranks, cut, what="the journal cannot be written", place=folder))

    def decide(self, event: str, *, step: int, **facts: Any) -> dict[str, Any]:
        """Write down a decision that holds from a step on; one of that kind and step that stands already is returned
        instead. Collective; every rank says the same."""
        known = next((e for e in self.entries if e.get(DECIDED) and (e["event"], e["step"]) == (event, step)), None)
        return self.add(event, step=step, **facts) if known is None else known

    def add(self, event: str, *, step: int, **facts: Any) -> dict[str, Any]:
        """Write down a decision as `decide` does, whatever stands there already."""
        entry = {"event": event, "step": step, DECIDED: True, **facts}
        said = gather_objects(entry)
        assert all(other == said[0] for other in said), f"ranks disagree: {said}"
        self._add(entry)
        return entry

    def made(self, event: str) -> list[dict[str, Any]]:
        """The decisions of a kind, in the order in which they were made."""
        return [e for e in self.entries if e.get(DECIDED) and e["event"] == event]

    def note(self, event: str, *, step: int, **facts: Any) -> None:
        """Write down what happened at a step. Collective."""
        self._add({"event": event, "step": step, **facts})

    def _add(self, entry: dict[str, Any]) -> None:
        def write() -> None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line(entry))
                file.flush()
                os.fsync(file.fileno())

        on_main(self.ranks, write, what="the journal cannot be written", place=self.path)
        self.entries.append(entry)


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry, ensure_ascii=False) + "\n"
