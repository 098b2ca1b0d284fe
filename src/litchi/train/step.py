"""One optimizer step on all ranks: units first, loss sums, one clip, one decision.

sum the units over ranks -> each micro-batch gives a loss sum, scaled by data ranks / units, and is back-propagated
-> gradients are synchronised on the last one -> the norm is clipped once -> all ranks decide alike -> update
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from litchi.dist import Ranks, sum_ranks
from litchi.errors import UserError
from litchi.model.forward import Output
from litchi.model.weights import own_part
from litchi.parallel.apply import Wrapped
from litchi.train.nonfinite import NOT_FINITE, OVERFLOW, ROLLED_BACK, Fault, find_fault, find_gradient
from litchi.train.optim import set_rate
from litchi.train.two_pass import RandomState, get_random, rehearse
from litchi.types import Batch, StepResult

SQUARED_AT_ONCE = 2**16  # numbers


@dataclass
class Trainer:
    """What a step needs, and what it leaves to be asked for.

    `unproven` are trainable tensors that have not had a gradient yet. Of the last step: `left_out` says why there was
    no update, `fault` where it began if the numbers were to blame, `at` which micro-batch was (or is) under way; None
    in the update.
    """

    wrapped: Wrapped
    optimizer: torch.optim.Optimizer
    ranks: Ranks
    clip: float | None
    scaler: torch.amp.GradScaler | None = None
    unproven: dict[str, nn.Parameter] = field(default_factory=dict)
    left_out: str | None = None
    fault: Fault | None = None
    at: int | None = None

    def __post_init__(self) -> None:
        self.unproven = {n: p for n, p in self.wrapped.model.named_parameters() if p.requires_grad}


def train_step(
    trainer: Trainer, step: int, batches: Sequence[Batch], rate: float, *, leave_out: bool = False
) -> StepResult:
    """Take one step.

    Args:
        trainer: model and optimizer.
        step: counted from 1.
        batches: this rank's micro-batches; the same number on every rank that learns.
        rate: share of the full learning rate.
        leave_out: compute its numbers, and leave its update out: a run went back because of it.

    Raises:
        UserError: a trainable tensor has no gradient.
    """
    wrapped = trainer.wrapped
    counted = batches if wrapped.leads else ()  # those of a batch that several ranks share count once
    units, pictures, tokens, pixels = sum_ranks(
        sum(b.units for b in counted),
        sum(len(b.grids) for b in counted),
        sum(b.tokens for b in counted if b.samples),
        sum(t * h * w for b in counted for t, h, w in b.grids) * wrapped.owner.spec.patch**2,
    )
    lr = set_rate(trainer.optimizer, rate)
    summed, batches, states = _accumulate(trainer, batches, wrapped.layout.gradient_ranks / units)
    if trainer.scaler is not None:
        trainer.scaler.unscale_(trainer.optimizer)
    if not pictures:
        _leave_vision_out(wrapped)
    square = gradient_square((p for g in trainer.optimizer.param_groups for p in g["params"]), wrapped.copies)
    # the one place where the host waits for the device
    *losses, square = torch.cat([summed, square[None].to(summed.device)]).tolist()
    total, square = sum_ranks(sum(losses), square)
    total, norm = total / units, math.sqrt(square)
    trainer.left_out = _reason(trainer, total, norm, leave_out)
    parameter = find_gradient(wrapped) if trainer.left_out == NOT_FINITE else None
    if trainer.left_out is None:
        _prove_gradients(trainer, pictures > 0)
    _update(trainer, norm)
    trainer.fault = None
    if trainer.left_out == NOT_FINITE:  # behind the update, which lets the gradients go
        trainer.fault = find_fault(wrapped, batches, losses, states, parameter)
    return StepResult(
        step=step,
        loss=total,
        units=int(units),
        grad_norm=norm,
        lr=lr,
        tokens=int(tokens),
        pixels=int(pixels),
        skipped=trainer.left_out is not None,
    )


def _reason(trainer: Trainer, loss: float, norm: float, leave_out: bool) -> str | None:
    """Why the update is left out; None: it is not. With fp16 a gradient that is too large for the scale is usual: it
    is nobody's fault until the scale is down to 1."""
    if leave_out:
        return ROLLED_BACK
    if math.isfinite(loss) and math.isfinite(norm):
        return None
    scaled = trainer.scaler is not None and trainer.scaler.get_scale() > 1.0
    return OVERFLOW if scaled and math.isfinite(loss) else NOT_FINITE


def _accumulate(
    trainer: Trainer, batches: Sequence[Batch], scale: float
) -> tuple[Tensor, Sequence[Batch], dict[int, RandomState]]:
    """Forward and backward of all micro-batches; returns this rank's part of the loss sum of each, on the device, the
    batches as they were computed, and what each dropped by."""
    wrapped = trainer.wrapped
    losses = torch.zeros(len(batches), dtype=torch.float64, device=wrapped.owner.device)
    trainer.at = 0
    first = rehearse(wrapped, batches)
    states = {}

    def forward(number: int, received: Tensor | None) -> Tensor:
        trainer.at = number
        first.repeat_dropout(number)
        states[number] = get_random(wrapped.owner.device)
        with wrapped.compute():
            out = wrapped.model(first.batches[number], received)
        if not isinstance(out, Output):  # hidden states, for the next stage
            return out
        losses[number] = out.loss.detach()
        loss = out.loss * scale
        return loss if trainer.scaler is None else trainer.scaler.scale(loss)

    wrapped.run(batches, forward, torch.autograd.backward)
    wrapped.finish_gradients()
    trainer.at = None
    return losses, first.batches, states


def _leave_vision_out(wrapped: Wrapped) -> None:
    """Without a picture on any rank the vision parts are no part of the update: no momentum, no decay."""
    for module in wrapped.vision_modules():
        for parameter in module.parameters():
            parameter.grad = None


def gradient_square(parameters: Iterable[nn.Parameter], copies: Callable[[Tensor], int]) -> Tensor:
    """This rank's share of the squared norm of all gradients, in fp64 (fp32 moved losses by 1e-5 between layouts).

    Args:
        copies: how many ranks hold the same piece of a parameter.
    """
    squares: dict[int, list[Tensor]] = {}  # by copies
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None:
            squares.setdefault(copies(parameter), []).extend(_squares(own_part(grad)))
    return sum((_add_up(parts) / n for n, parts in squares.items()), torch.zeros((), dtype=torch.float64))


def _squares(tensor: Tensor) -> list[Tensor]:
    """Sums of squares in fp64, on a CPU of pieces that stay in its cache: a copy of the whole takes eight times it."""
    if tensor.device.type != "cpu":
        return [tensor.double().pow(2).sum()]
    doubled = (piece.double() for piece in tensor.flatten().split(SQUARED_AT_ONCE))
    return [torch.dot(piece, piece) for piece in doubled]


def _add_up(parts: Sequence[Tensor]) -> Tensor:
    """Parts lie on several devices where one process spreads a model over them."""
    return torch.stack([part.to(parts[0].device) for part in parts]).sum()


def _prove_gradients(trainer: Trainer, pictures: bool) -> None:
    """A tensor that is meant to learn must get a gradient in the first step in which its modality is present."""
    if not trainer.unproven:
        return
    vision = {id(p) for m in trainer.wrapped.vision_modules() for p in m.parameters()}
    lost = []
    for name, parameter in list(trainer.unproven.items()):
        if id(parameter) in vision and not pictures:
            continue
        if parameter.grad is None:
            lost.append(name)
        del trainer.unproven[name]
    if lost:
        raise UserError(
            f"{len(lost)} trainable tensors got no gradient, the first {lost[0]}",
            why="they would stay as they are without an error",
            remedy="Freeze their part (trainable.*), or report this as a bug",
        )


def _update(trainer: Trainer, norm: float) -> None:
    optimizer, applies = trainer.optimizer, trainer.left_out is None
    if applies and trainer.clip is not None and norm > trainer.clip:
        scale = trainer.clip / (norm + 1e-6)
        own = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if own:  # a vision rank has none
            torch._foreach_mul_([own_part(g) for g in own], scale)
    if trainer.scaler is not None:
        if applies:
            trainer.scaler.step(optimizer)
        less = 1.0 if trainer.left_out == ROLLED_BACK else 0.5
        trainer.scaler.update(None if applies else trainer.scaler.get_scale() * less)
    elif applies:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
