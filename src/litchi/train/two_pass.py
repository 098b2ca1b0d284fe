"""Losses that compare a group's documents, in the memory of a piece of it: scores first, then their gradients.

Pass 1 computes the scores of all pieces without gradients; the loss of each group on all its scores gives dL/ds. Pass 2
computes each piece again, with gradients, and back-propagates the sum of dL/ds x s: the gradient of the whole loss, by
the chain rule. Both passes drop the same, and all ranks make as many passes (`batch/cutting.py` plans both).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from litchi.dist import gather_objects
from litchi.model.forward import ScoreLoss
from litchi.parallel.apply import Wrapped
from litchi.types import Batch

RandomState = list[Tensor]


@dataclass
class Rehearsal:
    """The micro-batches of a step, those of pieces with the gradients of their scores, and what they dropped by."""

    batches: Sequence[Batch]
    states: dict[int, RandomState] = field(default_factory=dict)

    def repeat_dropout(self, number: int) -> None:
        """Bring the random state back to what it was before the micro-batch was rehearsed."""
        if number in self.states:
            set_random(self.states[number])


def rehearse(wrapped: Wrapped, batches: Sequence[Batch]) -> Rehearsal:
    """Pass 1 of a step: on all ranks alike, which may have none of the pieces."""
    if not any(batch.rehearsed for batch in batches):
        return Rehearsal(batches)
    states, found = {}, []
    with torch.no_grad():
        for number, batch in enumerate(batches):
            if not batch.rehearsed:
                continue
            states[number] = get_random(wrapped.owner.device)
            out = wrapped.evaluate(batch)
            if out is not None and out.scores is not None and wrapped.leads:
                scores = out.scores.cpu()
                found += [(c.group, c.first, scores[a:b]) for c, (a, b) in zip(batch.cuts, batch.groups, strict=True)]
    whole: dict[int, list[tuple[int, Tensor]]] = {}
    for group, first, scores in (piece for rank in gather_objects(found) for piece in rank):
        whole.setdefault(group, []).append((first, scores))
    return Rehearsal([_pull(batch, whole, wrapped.owner.score_loss) for batch in batches], states)


def _pull(batch: Batch, whole: dict[int, list[tuple[int, Tensor]]], score_loss: ScoreLoss | None) -> Batch:
    """The batch with the gradients of its scores, and the loss of the groups whose first piece it has."""
    if not batch.cuts:
        return batch
    assert score_loss is not None
    told, pull = 0.0, torch.zeros(len(batch.targets), dtype=whole[batch.cuts[0].group][0][1].dtype)
    for cut, (a, b) in zip(batch.cuts, batch.groups, strict=True):
        pieces = sorted(whole[cut.group], key=lambda piece: piece[0])
        scores = torch.cat([part for _, part in pieces]).requires_grad_()
        assert len(scores) == len(cut.targets), "a piece of a group is missing"
        with torch.enable_grad():
            loss = score_loss(scores, torch.tensor(cut.targets), ((0, len(scores)),))
            (grad,) = torch.autograd.grad(loss, scores)
        pull[a:b] = grad[cut.first : cut.first + b - a]
        told += float(loss.detach()) if cut.first == 0 else 0.0
    return replace(batch, pull=pull, told=told)


def get_random(device: torch.device) -> RandomState:
    """What the next random numbers of this process follow from, on the CPU and on its device."""
    cuda = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *cuda]


def set_random(state: RandomState) -> None:
    """Bring back what `get_random` gave."""
    torch.set_rng_state(state[0])
    for cuda in state[1:]:
        torch.cuda.set_rng_state(cuda)


@contextmanager
def random_state(device: torch.device, state: RandomState | None = None) -> Iterator[None]:
    """Leave the random state as it was, beginning with another one where it is given."""
    before = get_random(device)
    if state is not None:
        set_random(state)
    try:
        yield
    finally:
        set_random(before)
