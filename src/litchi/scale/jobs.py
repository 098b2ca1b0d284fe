"""What the ranks of a self-check do, as a file says: layouts, equalities, or a run in which something goes wrong."""

from __future__ import annotations

import json
from pathlib import Path

from litchi.dist import Ranks
from litchi.train.checkpoint import list_checkpoints

RESTARTS = 3  # of a run in which something goes wrong, as `train.restarts` has them


def run_file(ranks: Ranks, file: Path) -> None:
    """Do the job of a file; what came of it lies beside it, or in the run's folder."""
    job = json.loads(file.read_text(encoding="utf-8"))
    if "layouts" in job:
        from litchi.scale import selfcheck

        selfcheck.run_file(ranks, file, job["layouts"])
    elif "equalities" in job:
        from litchi.scale import equalities

        equalities.run_file(ranks, file, **job["equalities"])
    else:
        from litchi.scale.inject import run_injected

        run_injected(ranks, job)


def newest_step(file: Path) -> int:
    """The step from which a run of such a file goes on."""
    folder = Path(json.loads(file.read_text(encoding="utf-8"))["output"])
    return max((one.step for one in list_checkpoints(folder)), default=0)
