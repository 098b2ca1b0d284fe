"""What a rung of the ladder must have shown: gates over the lines it wrote. Pure.

Climb (what a rung gave) -> check_gates -> a Failure, or None
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from litchi.train.durable import format_bytes

SAME = {"cpu": 1e-6, "cuda": 1e-5}  # relative, of losses in fp32 before any update
HALF = 5e-3  # the same in bf16 and fp16
AFTER_UPDATES = {"fp32": 1000, "half": 4}  # times as much: AdamW turns rounding noise near zero into steps
FULL = 0.95  # of the memory
PLANNED = 1.25  # times as much as planned
WORSE = 1.02  # times the base's loss


class Failure(NamedTuple):
    """A gate that was not passed."""

    reason: str
    remedy: str


@dataclass(frozen=True)
class Climb:
    """What a rung gave.

    `lines`: of metrics.jsonl; `again`: those that were taken again from a checkpoint. `unmoved`: trainable tensors that
    equal themselves between two checkpoints, `vision` of them those that only pictures move. `start`: the journal's
    entry. `limit_bytes`: memory of a rank. `evaluations`: of each set, what `litchi evaluate --against` answered.
    """

    procs: int
    lines: Sequence[Mapping[str, Any]]
    start: Mapping[str, Any]
    optimizer: str
    limit_bytes: float
    first: Climb | None = None  # the lowest rung
    before: Climb | None = None
    again: Sequence[Mapping[str, Any]] = ()
    tensors: int = 0
    unmoved: Sequence[str] = ()
    evaluations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    floor: float = 0.0  # of the efficiency
    forecast: Mapping[str, Any] | None = None  # of memory and time, and what came of it; on GPUs

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.lines]

    @property
    def peak_bytes(self) -> int:
        return max(max(line["peak_bytes"]) for line in self.lines)

    @property
    def efficiency(self) -> float | None:
        """Against the lowest rung, over the steps both took, the first left out: it warms up."""
        if self.first is None:
            return None
        common = min(len(self.lines), len(self.first.lines))
        own, theirs = (sum(_seconds(line) for line in one.lines[1:common]) for one in (self, self.first))
        return theirs * self.first.procs / (own * self.procs)

    def tolerance(self, step: int) -> float:
        """Relative difference that the losses of two layouts may have at a step."""
        kind = "half" if self.start["precision"] in ("bf16", "fp16") else "fp32"
        same = SAME[self.start["device"]] if kind == "fp32" else HALF
        return same * (1 if step == 1 else 10 if self.optimizer == "sgd" else AFTER_UPDATES[kind])

    def figures(self) -> dict[str, Any]:
        """What the answer says of the rung."""
        own = self.lines[1:] or self.lines
        found = {
            "steps": len(self.lines),
            "loss_first": self.losses[0],
            "loss_last": self.losses[-1],
            "step_s": sum(_seconds(line) for line in own) / len(own),
            "peak_bytes": self.peak_bytes,
            "memory_bytes": int(self.limit_bytes),
            "planned_bytes": self.forecast and self.forecast["planned_bytes"],
            "efficiency": self.efficiency,
            "loss_difference": self.before and max(differences(self, self.before), default=0.0),
            "tensors": self.tensors,
            "taken_again": len(self.again),
        }
        measured = {name: report["metrics"] for name, report in self.evaluations.items()}
        base = {name: report["against"]["metrics"] for name, report in self.evaluations.items()}
        return found | ({"metrics": measured, "base": base} if measured else {})


def _seconds(line: Mapping[str, Any]) -> float:
    return line["step_s"] + line["data_wait_s"]


def differences(one: Climb, other: Climb) -> list[float]:
    """Relative differences of the losses of the steps both took."""
    return [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(one.losses, other.losses, strict=False)]


def check_gates(climb: Climb) -> Failure | None:
    """The first gate that was not passed."""
    return next((found for gate in GATES if (found := gate(climb))), None)


def finite(climb: Climb) -> Failure | None:
    """Every step is."""
    for line in climb.lines:
        if line["skipped"] or not math.isfinite(line["loss"]):
            return Failure(
                f"step {line['step']} is not finite (loss {line['loss']})",
                "Lower optim.lr; events.jsonl names the module and the samples",
            )
    return None


def falling(climb: Climb) -> Failure | None:
    """Some later step must be below the first; of many, the last quarter on average below the first."""
    losses = climb.losses
    part = len(losses) // 4
    early, late = losses[0], min(losses[len(losses) // 2 :])
    if part >= 5:
        early, late = sum(losses[:part]) / part, sum(losses[-part:]) / part
    if late < early:
        return None
    return Failure(
        f"the loss does not fall: {early:.4f} at first, {late:.4f} later",
        "Raise or lower optim.lr, and look at the answers and labels: litchi data check",
    )


def as_before(climb: Climb) -> Failure | None:
    """Losses are those of the rung before."""
    if climb.before is None:
        return None
    for step, difference in enumerate(differences(climb, climb.before), 1):
        if difference > climb.tolerance(step):
            return Failure(
                f"step {step}: the loss is {climb.losses[step - 1]:.7g} on {climb.procs} ranks and "
                f"{climb.before.losses[step - 1]:.7g} on {climb.before.procs}, {difference:.1e} apart",
                "litchi selfcheck says which layout computes otherwise on this machine",
            )
    return None


def moved(climb: Climb) -> Failure | None:
    """Every trainable tensor has."""
    if not climb.unmoved:
        return None
    return Failure(
        f"{len(climb.unmoved)} of {climb.tensors} trainable tensors did not move, the first {climb.unmoved[0]}",
        "Freeze that part (trainable.*), raise its lr, or hold weights in float32: in bfloat16 small updates vanish",
    )


def memory(climb: Climb) -> Failure | None:
    """No rank came near the limit."""
    if climb.peak_bytes <= FULL * climb.limit_bytes:
        return None
    return Failure(
        f"a rank held {format_bytes(climb.peak_bytes)} of {format_bytes(climb.limit_bytes)}",
        "Lower train.micro_batch_tokens, shard (parallel.dp_shard), or litchi plan",
    )


def as_planned(climb: Climb) -> Failure | None:
    """No rank held much more than its forecast."""
    if climb.forecast is None or max(climb.forecast["peak_bytes"]) <= PLANNED * climb.forecast["planned_bytes"]:
        return None
    return Failure(
        f"a rank held {format_bytes(max(climb.forecast['peak_bytes']))}, planned were "
        f"{format_bytes(climb.forecast['planned_bytes'])}",
        "Larger layouts will not be as litchi plan says either; find what holds it, or set parallel and "
        "train.micro_batch_tokens by hand with room to spare",
    )


def round_trip(climb: Climb) -> Failure | None:
    """A resumed run takes the same steps: to the bit on a CPU, within the tolerance of one layout on a GPU."""
    by_step = {line["step"]: line["loss"] for line in climb.lines}
    exact = climb.start["device"] == "cpu"
    for line in climb.again:
        was = by_step[line["step"]]
        if line["loss"] != was and (exact or abs(line["loss"] - was) > climb.tolerance(2) * abs(was)):
            return Failure(
                f"step {line['step']} after a resume has loss {line['loss']:.9g}, and had {was:.9g}",
                "Do not rely on its checkpoints; litchi selfcheck --chaos looks closer",
            )
    return None


def evaluation(climb: Climb) -> Failure | None:
    """No metric's interval of differences lies below zero; without intervals the loss is not above the base's."""
    for name, report in climb.evaluations.items():
        base = report["against"]["metrics"]
        for metric, d in report.get("difference", {}).items():
            if d["high"] < 0:
                return Failure(
                    f"{name}: {metric} fell from {base[metric]:.4f} to {report['metrics'][metric]:.4f} "
                    f"(difference {d['low']:+.4f} to {d['high']:+.4f})",
                    "Lower optim.lr, or look whether the training data are of the same task",
                )
        if "difference" not in report and report["metrics"]["loss"] > WORSE * base["loss"]:
            return Failure(
                f"{name}: the loss rose from {base['loss']:.4f} to {report['metrics']['loss']:.4f}",
                "Lower optim.lr, or look whether the training data are of the same task",
            )
    return None


def efficient(climb: Climb) -> Failure | None:
    """Ranks together are not much slower than alone."""
    if climb.efficiency is None or climb.efficiency >= climb.floor:
        return None
    return Failure(
        f"{climb.procs} ranks work at {climb.efficiency:.0%} of the speed of as many single ones, the floor is "
        f"{climb.floor:.0%}",
        "litchi doctor measures the link; larger global batches and more data.workers help",
    )


GATES: Sequence[Callable[[Climb], Failure | None]] = (
    *(finite, falling, as_before, moved, memory, as_planned, round_trip, evaluation, efficient),
)
