"""What is measured while a run goes, and which evaluation was the best."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import torch

from litchi.config import Config, resolve_micro_batch_tokens
from litchi.errors import UsageError
from litchi.evaluate import ranking, text
from litchi.evaluate.json_answers import JsonRules, load_schema
from litchi.evaluate.run import Measure
from litchi.train.losses import make_loss
from litchi.train.metrics import read_lines


def how_to_measure(config: Config, device: torch.device) -> Measure:
    """The same in a run and in `litchi evaluate`; what decides the best checkpoint is always measured.

    Raises:
        UsageError: the schema for answers cannot be used, or nothing uses it.
    """
    names, best = config.eval.metrics, config.train.best
    if best not in (None, "loss"):
        usual = text.DEFAULT_METRICS if config.task == "chat" else ranking.DEFAULT_METRICS
        names = tuple(dict.fromkeys([*(names or usual), best]))
    return Measure(
        metrics=names,
        slices=config.eval.slices,
        max_new_tokens=config.eval.max_new_tokens,
        micro_batch_tokens=resolve_micro_batch_tokens(config, device.type),
        generate=config.parallel.cp == config.parallel.pp == 1,
        count_units=make_loss(config.loss)[1],
        rules=_json_rules(config, names or ()),
    )


def _json_rules(config: Config, names: Sequence[str]) -> JsonRules:
    path = config.eval.json_schema
    if path is None and "json_schema" in names:
        raise UsageError("the metric json_schema needs a schema", remedy="Add eval.json_schema=FILE")
    if path is not None and not any(name.startswith("json_") for name in names):
        why = "no metric of eval.metrics begins with json_"
        raise UsageError(f"eval.json_schema={path} is used by nothing", why=why, remedy="Add json_schema to them")
    return JsonRules(None if path is None else load_schema(path), config.eval.json_tolerance)


class BestWatch:
    """The best value of `train.best` over the evaluations so far (of the first set that has it)."""

    def __init__(self, config: Config, folder: Path):
        self.metric, self.patience = config.train.best, config.train.early_stop
        self.best: float | None = None
        self.best_step: int | None = None
        self.since = 0
        self.seen: int | None = None  # the step that was measured last
        lines = read_lines(folder / "eval.jsonl")  # what an interrupted run had already seen
        for step, records in groupby(lines, key=lambda record: record["step"]):
            self.see(step, {r["name"]: r["metrics"] for r in records})

    @property
    def exhausted(self) -> bool:
        return self.patience is not None and self.since >= self.patience

    def see(self, step: int, figures: dict[str, dict[str, float]]) -> bool:
        """Take in an evaluation; returns whether it is the best so far."""
        self.seen = step
        values = [m[self.metric] for m in figures.values() if self.metric in m]
        if not values:
            return False
        value = -values[0] if self.metric == "loss" else values[0]
        if self.best is None or value > self.best:
            self.best, self.best_step, self.since = value, step, 0
            return True
        self.since += 1
        return False
