"""step -> pixel budget: small pictures first, the full budget later. A pure function of the settings and the step.

    curriculum: [{until: 0.3, pixels: {max: 50176}}, {until: 0.6, pixels: {max: 200704}}]; afterwards data.pixels

Whether a row is usable is judged once, at the largest of all budgets; its cost in a step follows that step's budget.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING

from litchi.data.processor import Processor
from litchi.errors import UsageError
from litchi.types import VisionSpec

if TYPE_CHECKING:
    from litchi.config import Stage


@dataclass(frozen=True)
class Curriculum:
    """Stages one after the other.

    Args:
        ends: last step of each stage, rising.
        specs: how pictures are cut in each.
        full: how they are cut after the last one, in evaluation and in the export (`data.pixels`).
    """

    ends: tuple[int, ...]
    specs: tuple[VisionSpec, ...]
    full: VisionSpec

    def at(self, step: int) -> VisionSpec:
        """How pictures are cut in a step, counted from 1."""
        stage = bisect_left(self.ends, step)
        return self.specs[stage] if stage < len(self.ends) else self.full

    def lines(self, steps: int) -> list[str]:
        """What a run of so many steps takes, a line for each stage."""
        lines, first = [], 1
        for end, spec in zip((*self.ends, steps), (*self.specs, self.full), strict=True):
            if first <= min(end, steps):
                budget = f"{spec.min_pixels:,} to {spec.max_pixels:,} pixels a picture"
                lines.append(f"steps {first:,} to {min(end, steps):,}: {budget}")
            first = end + 1
        return lines


def stage_specs(stages: Sequence[Stage], processor: Processor) -> tuple[VisionSpec, ...]:
    """The budget of each stage; a limit it does not set is that of `data.pixels`, unless the other one crosses it."""
    return tuple(processor.with_pixels(stage.pixels.min, stage.pixels.max).vision for stage in stages)


def largest_spec(specs: Sequence[VisionSpec]) -> VisionSpec:
    """The budget under which no picture is smaller than under any of these."""
    low, high = (max(getattr(spec, limit) for spec in specs) for limit in ("min_pixels", "max_pixels"))
    return replace(specs[0], min_pixels=low, max_pixels=high)


def plan_curriculum(stages: Sequence[Stage], processor: Processor, steps: int) -> Curriculum | None:
    """The stages of a run of so many steps; None where there are none.

    Args:
        processor: with the budget of `data.pixels`.

    Raises:
        UsageError: a stage ends before it begins.
    """
    if not stages:
        return None
    ends = [end_of(stage.until, steps) for stage in stages]
    for number, (before, end) in enumerate(pairwise(ends), 2):
        if end <= before:
            raise UsageError(
                f"curriculum: stage {number} ends at step {end}, the one before it at step {before}",
                why=f"the run has {steps} steps",
                remedy="Let `until` rise from stage to stage",
            )
    return Curriculum(tuple(ends), stage_specs(stages, processor), processor.vision)


def end_of(until: int | float, steps: int) -> int:
    """Last step of a stage; a fraction is taken through the decimal that was written, rounded up."""
    return until if isinstance(until, int) else math.ceil(Fraction(str(until)) * steps)
