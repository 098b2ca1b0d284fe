"""`litchi train --profile N`: where the time of N steps goes, as a trace and as a table of operators.

The first steps a process takes pay for what later ones have ready, so the steps looked at begin with the third.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

WARM = 2  # steps that are not looked at
ROWS = 25


class StepProfile:
    """Looks at steps `WARM + 1` to `WARM + steps` of this process, and writes what it saw.

    Args:
        folder: gets `rank0.json` (for chrome://tracing or ui.perfetto.dev) and `operators0.txt`, of each rank.
        steps: how many; 0: none.
        rank: of this process.
        say: told where the files are.
    """

    def __init__(self, folder: Path, steps: int, rank: int, say: Callable[[str], None] = print):
        self.folder, self.steps, self.rank, self.say = folder, steps, rank, say
        self.taken = 0
        self.profiler: profile | None = None

    def before(self) -> None:
        """A step begins."""
        self.taken += 1
        if self.steps and self.taken == WARM + 1:
            kinds = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()]
            self.profiler = profile(activities=kinds)
            self.profiler.start()

    def after(self) -> None:
        """A step has ended."""
        if self.profiler is not None and self.taken == WARM + self.steps:
            self.close()

    def close(self) -> None:
        """Write what was seen; a run may end before the last step that was asked for."""
        if self.profiler is None:
            return
        seen, self.profiler = self.profiler, None
        seen.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        seen.export_chrome_trace(str(self.folder / f"rank{self.rank}.json"))
        order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = seen.key_averages().table(sort_by=order, row_limit=ROWS, max_name_column_width=60)
        (self.folder / f"operators{self.rank}.txt").write_text(table, encoding="utf-8")
        self.say(f"profile of {self.taken - WARM} steps: {self.folder}")
