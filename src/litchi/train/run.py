"""A run as it is set up: `train/setup.py` makes it, and everything that works on a whole run takes it.

The settings, data, model and layout of one process in; what checkpoints and exports say of them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from litchi.batch.loader import StepPlan
from litchi.config import Config, Derived
from litchi.dist import Ranks
from litchi.evaluate.run import EvalSet
from litchi.model.build import Loaded
from litchi.parallel.apply import Wrapped
from litchi.train.export import identify_base
from litchi.train.journal import Journal
from litchi.train.metrics import RunLog
from litchi.train.outlook import Outlook
from litchi.train.resume import versions
from litchi.train.step import Trainer


@dataclass
class Run:
    """Everything a run has decided before its first step."""

    config: Config
    ranks: Ranks
    folder: Path
    log: RunLog
    plan: StepPlan
    eval_sets: list[EvalSet]
    derived: Derived
    loaded: Loaded
    wrapped: Wrapped
    trainer: Trainer
    origin: dict[str, Any]
    journal: Journal
    outlook: Outlook | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """What travels with checkpoints and exports."""
        return {
            "task": self.config.task,
            "base": identify_base(self.config.model.path),
            "template": self.config.data.template if self.config.task == "rerank" else "chat",
            "instruction": self.config.data.instruction,
            "pixels": self.config.data.pixels.in_force(self.wrapped.owner.spec),
            "wrapper": self.wrapped.wrapper,
            "settings": self.config.model_dump(mode="json"),
            "numbers": self.config.numbers(),
        }

    def checkpoint_facts(self) -> dict[str, Any]:
        """What travels with a checkpoint besides: what a resume compares and goes on from."""
        scaler = self.trainer.scaler
        return {
            "origin": self.origin,
            "journal": list(self.journal.entries),
            "scaler": None if scaler is None else scaler.state_dict(),
            "layout": str(self.wrapped.layout),
            "versions": versions(),
        }
