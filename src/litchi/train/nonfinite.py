"""Numbers that go wrong: where one that is not finite began, and when a run goes back or stops for them.

micro-batches and losses of a step -> Fault            lines of metrics.jsonl, one by one -> steps to be blamed
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from litchi.config.train import Train
from litchi.dist import gather_objects
from litchi.errors import UserError
from litchi.model.weights import own_part
from litchi.parallel.apply import Wrapped
from litchi.train.two_pass import RandomState, random_state
from litchi.types import Batch

NOT_FINITE, OVERFLOW, ROLLED_BACK = "not finite", "fp16 overflow", "rolled back"  # why an update was left out
WINDOW, FEWEST = 50, 20  # losses a spike is measured against; with fewer there is none
SIGMA = 1.4826  # standard deviations of a normal distribution in its median absolute deviation
FLAT = 1e-3  # of the median: losses that hardly differ make no spike of a small change
NAMED = 20  # samples in an error


@dataclass(frozen=True)
class Fault:
    """What was not finite first in a step, the same on every rank.

    `where` is a module, for a gradient a parameter: of those without a finite one the nearest to the loss.
    """

    kind: str  # loss or gradient
    where: str
    samples: tuple[str, ...]  # of the micro-batches whose loss it is; of the whole step where only a gradient is not

    def facts(self) -> dict[str, Any]:
        """For the journal."""
        return asdict(self)


# ------------------------------------------------------------------------------------------------------ where it began


def find_gradient(wrapped: Wrapped) -> str | None:
    """The parameter nearest to the loss whose gradient is not finite on some rank. Collective, before they go."""
    found = None
    for number, (name, parameter) in enumerate(wrapped.owner.named_parameters()):
        grad = parameter.grad
        if grad is not None and not bool(own_part(grad).isfinite().all()):
            found = number, name
    stage = 0 if wrapped.encoder is not None else wrapped.layout.place(wrapped.rank).pp
    every = [(at, *one) for at, one in gather_objects((stage, found)) if one is not None]
    return max(every)[2] if every else None


def find_fault(
    wrapped: Wrapped,
    batches: Sequence[Batch],
    losses: Sequence[float],
    states: Mapping[int, RandomState],
    parameter: str | None,
) -> Fault:
    """Say where a step that is not finite began. Collective: all ranks take one micro-batch forwards once more.

    Args:
        batches, losses: this rank's, as the step computed them.
        states: what each micro-batch dropped by.
        parameter: as `find_gradient` gives it.
    """
    counted = batches if wrapped.encoder is None else ()
    own = [(math.isfinite(loss), b.samples) for b, loss in zip(counted, losses, strict=False)]
    every = gather_objects(own)
    guilty = [number for rank in every for number, (fine, _) in enumerate(rank) if not fine]
    blamed = [names for rank in every for fine, names in rank if not fine or not guilty]
    samples = tuple(dict.fromkeys(name for names in blamed for name in names))
    if not guilty:
        return Fault("gradient", parameter or "the norm of all", samples)
    if wrapped.layout.vision_ranks:
        return Fault("loss", "not looked for with vision ranks", samples)
    number = min(guilty)
    with random_state(wrapped.owner.device, states.get(number)), torch.no_grad(), _first_module(wrapped.owner) as found:
        wrapped.evaluate(batches[number])
    names = [name for name in gather_objects(found[0] if found else None) if name]
    return Fault("loss", names[0] if names else "the loss itself", samples)


@contextmanager
def _first_module(model: nn.Module) -> Iterator[list[str]]:
    """Collects the module, innermost first, that was the first to give something not finite."""
    found: list[str] = []

    def hook(name: str):
        def look(module: nn.Module, given: Any, out: Any) -> None:
            if not found and not all(map(_is_finite, tree_leaves(out))):
                found.append(name)

        return look

    hooks = [module.register_forward_hook(hook(name or "the model")) for name, module in model.named_modules()]
    try:
        yield found
    finally:
        for one in hooks:
            one.remove()


def _is_finite(value: Any) -> bool:
    return not (isinstance(value, Tensor) and value.is_floating_point()) or bool(value.isfinite().all())


# ------------------------------------------------------------------------------------------------------- what to do


def is_spike(loss: float, before: Sequence[float], times: float | None) -> bool:
    """Whether a loss stands out: above median + `times` x the standard deviation of the losses before it, both taken
    from medians, so that a few odd ones do not count. With fewer than `FEWEST` losses nothing does. Pure."""
    if times is None or len(before) < FEWEST:
        return False
    middle = median(before)
    spread = SIGMA * median(abs(one - middle) for one in before)
    return loss > middle + times * max(spread, FLAT * abs(middle))


class Watch:
    """What the steps so far say about the next: a function of the lines of metrics.jsonl, so a resume knows the same.

    Args:
        train: its `on_nonfinite`, `nonfinite_limit` and `loss_spike`.
    """

    def __init__(self, train: Train, lines: Sequence[Mapping[str, Any]] = ()):
        self.limit = 1 if train.on_nonfinite == "stop" else train.nonfinite_limit
        self.spike = train.loss_spike
        self.row: list[int] = []  # steps that were not finite, one after the other, up to now
        self.applied: int | None = None  # the last step before them whose update was taken
        self.losses: deque[float] = deque(maxlen=WINDOW)
        for line in lines:
            self.see(line["step"], line["loss"], line.get("left_out"))

    def see(self, step: int, loss: float, left_out: str | None) -> list[int]:
        """Take in a step. Returns the steps for which the run must go back or stop; mostly none."""
        if left_out == NOT_FINITE:
            self.row.append(step)
            return list(self.row) if len(self.row) >= self.limit else []
        if left_out is not None:  # a scale that was too high, or a step that is known: they say nothing new
            return []
        if is_spike(loss, self.losses, self.spike):
            return [step]
        self.row, self.applied = [], step
        self.losses.append(loss)
        return []

    def blame(self, bad: Sequence[int]) -> list[int]:
        """The steps to leave out when a run goes back for bad ones: also the update before them, which led there.
        Without it the way again would be the same."""
        return [*([] if self.applied is None else [self.applied]), *bad]


def name_samples(samples: Sequence[str]) -> str:
    """For an error."""
    more = f" and {len(samples) - NAMED} more" if len(samples) > NAMED else ""
    return ", ".join(samples[:NAMED]) + more


def refuse_numbers(bad: Sequence[int], faults: Sequence[Mapping[str, Any]], *, why: str | None = None) -> UserError:
    """The error of a run that stops for its numbers.

    Args:
        bad: the steps.
        faults: what the journal says of them; none for a loss that is only too high.
        why: what kept it from going on.
    """
    steps = f"step {bad[0]}" if len(bad) == 1 else f"steps {bad[0]} to {bad[-1]}"
    found = "; ".join(dict.fromkeys(f"{f['kind']} at {f['where']}" for f in faults))
    samples = tuple(dict.fromkeys(name for f in faults for name in f["samples"]))
    look = f"look at {name_samples(samples)}" if samples else "the loss rose far above those before it"
    return UserError(
        f"{steps} {'is' if len(bad) == 1 else 'are'} not finite" if faults else f"the loss of {steps} stands out",
        where=found or None,
        why=look if why is None else f"{why}; {look}",
        remedy="Lower optim.lr, lengthen optim.warmup, or take these samples out",
    )
