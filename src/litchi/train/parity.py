"""An export against the model it was made of, on the same rows: (model, rows) -> what it gave -> a verdict.

The export is read from disk as anybody would read it, so a tensor that was lost, tied wrongly or rounded too far shows
in its scores. The figures go into the manifest, and an export that lost more than it may is refused.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from litchi.batch.loader import iterate_jobs
from litchi.dist import Ranks, max_ranks
from litchi.errors import UserError
from litchi.evaluate.run import EvalSet, Measure, measure_set
from litchi.model.family import part
from litchi.parallel.apply import Wrapped

METRIC = {"rerank": "mrr@10", "chat": "loss"}
LIMIT = {"rerank": 0.005, "chat": 0.05}  # half a point of MRR@10; 0.05 nat per token
ROWS = 200  # compared at most
LOGIT_BATCHES, LOGIT_ROWS = 8, 64  # of chat, whose logits are as wide as the vocabulary


@dataclass(frozen=True)
class Given:
    """What a model gave: its metric, `numbers` that two models are compared by, and how long a row took."""

    metric: float
    numbers: Tensor
    row_s: float


def look(wrapped: Wrapped, rows: EvalSet, ranks: Ranks, how: Measure) -> Given:
    """Run a model over the rows. Collective. `numbers` are scores of rerank (on every rank), logits of chat (this
    rank's, none where weights are sharded)."""
    task = rows.renderer.task
    start = time.perf_counter()
    measured = measure_set(wrapped, rows, how)
    row_s = (time.perf_counter() - start) / max(1, len(rows.rows))
    numbers = torch.tensor([line["score"] for line in measured.lines]) if task == "rerank" else None
    return Given(
        metric=measured.metrics[METRIC[task]],
        numbers=_logits(wrapped, rows, how) if numbers is None else numbers,
        row_s=row_s,
    )


@torch.no_grad()
def _logits(wrapped: Wrapped, rows: EvalSet, how: Measure) -> Tensor:
    if wrapped.sharded or wrapped.pipeline is not None:
        return torch.empty(0)
    found = []
    jobs = rows.share(wrapped, how.micro_batch_tokens)[:LOGIT_BATCHES]
    for batch in iterate_jobs(rows.corpus, jobs, workers=how.workers, pictures=wrapped.pictures):
        with wrapped.compute():
            hidden = wrapped.owner.hidden(batch)[batch.rows[:LOGIT_ROWS].to(wrapped.owner.device)]
            found.append(part(wrapped.owner.hf, wrapped.owner.family.head)(hidden).float().cpu().flatten())
    return torch.cat(found) if found else torch.empty(0)


def compare(task: str, before: Given, after: Given, *, rows: int, limit: float | None) -> dict[str, Any]:
    """The figures of an export, for its manifest. Collective.

    Returns:
        `metric` with its values `before` and `after`, `lost` (more is worse, whatever the metric) and the `limit` of
        it; `largest_difference` of scores or logits, or None; `row_s` as (before, after).
    """
    lost = after.metric - before.metric if task == "chat" else before.metric - after.metric
    numbers = min(before.numbers.numel(), after.numbers.numel())
    here = float((before.numbers - after.numbers).abs().max()) if numbers else -1.0
    (largest,) = max_ranks(here)
    return {
        "rows": rows,
        "metric": METRIC[task],
        "before": before.metric,
        "after": after.metric,
        "lost": lost,
        "limit": LIMIT[task] if limit is None else limit,
        "largest_difference": None if largest < 0 else largest,
        "of": "scores" if task == "rerank" else "logits",
        "row_s": [before.row_s, after.row_s],
    }


def refuse_lost(figures: Mapping[str, Any], refused: Path) -> None:
    """UserError where an export lost more than it may, or cannot be measured; `refused` is where it was moved."""
    if not figures["lost"] <= figures["limit"]:  # also where it is not a number
        raise UserError(
            f"the export lost {figures['lost']:.4f} of {figures['metric']}, from {figures['before']:.4f} to "
            f"{figures['after']:.4f} on {figures['rows']} rows",
            where=refused,
            why=f"{figures['limit']:g} is allowed",
            remedy="Take a format with more bits, or allow more with --limit",
        )


def weight_bytes(folder: Path) -> int:
    """Of the files of weights of a folder."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def format_table(form: str, figures: Mapping[str, Any]) -> str:
    """The figures for people."""
    metric, size = figures["metric"], figures["bytes"]
    largest = figures["largest_difference"]
    rows = [
        ("", "trained", form),
        (metric, f"{figures['before']:.4f}", f"{figures['after']:.4f}"),
        ("weights", f"{size[0] / 1e6:,.2f} MB", f"{size[1] / 1e6:,.2f} MB"),
        ("seconds per row", *(f"{value:.4f}" for value in figures["row_s"])),
    ]
    lines = [f"{name:<16} {a:>14} {b:>14}" for name, a, b in rows]
    apart = "not measured" if largest is None else f"{largest:.2g}"
    return "\n".join([*lines, f"{figures['rows']} rows; largest difference of {figures['of']}: {apart}"])
