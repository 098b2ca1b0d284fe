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
from torch.distributed.tensor import DTensor

from litchi.dist import Ranks, gather_objects, sum_ranks
from litchi.errors import UserError
from litchi.model.forward import Output
from litchi.parallel.apply import Wrapped
from litchi.train.optim import set_rate
from litchi.train.two_pass import rehearse
from litchi.types import Batch, StepResult

SQUARED_AT_ONCE = 2**16  # numbers


@dataclass
class Trainer:
    """What a step needs. `unproven` are trainable tensors that have not had a gradient yet."""

    wrapped: Wrapped
    optimizer: torch.optim.Optimizer
    ranks: Ranks
    clip: float | None
    on_nonfinite: str
    scaler: torch.amp.GradScaler | None = None
    unproven: dict[str, nn.Parameter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.unproven = {n: p for n, p in self.wrapped.model.named_parameters() if p.requires_grad}


def train_step(trainer: Trainer, step: int, batches: Sequence[Batch], rate: float) -> StepResult:
    """Take one step.

    Args:
        trainer: model, optimizer and policy.
        step: counted from 1.
        batches: this rank's micro-batches; the same number on every rank that learns.
        rate: share of the full learning rate.

    Raises:
        UserError: a trainable tensor has no gradient, or the step is not finite and the policy is to stop.
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
    summed = _accumulate(trainer, batches, wrapped.layout.gradient_ranks / units)
    if trainer.scaler is not None:
        trainer.scaler.unscale_(trainer.optimizer)
    if not pictures:
        _leave_vision_out(wrapped)
    square = gradient_square((p for g in trainer.optimizer.param_groups for p in g["params"]), wrapped.copies)
    # the one place where the host waits for the device
    *losses, square = torch.cat([summed, square[None].to(summed.device)]).tolist()
    total, square = sum_ranks(sum(losses), square)
    total, norm = total / units, math.sqrt(square)
    finite = math.isfinite(total) and math.isfinite(norm)
    if finite:
        _prove_gradients(trainer, pictures > 0)
    elif trainer.on_nonfinite == "stop":
        names = _suspects(batches if wrapped.encoder is None else (), losses)
        raise UserError(
            f"step {step} is not finite: loss {total}, gradient norm {norm}",
            why=f"look at {', '.join(names[:20])}" + (f" and {len(names) - 20} more" if len(names) > 20 else ""),
            remedy="Lower optim.lr, lengthen optim.warmup, or take these samples out",
        )
    _update(trainer, norm, finite)
    return StepResult(
        step=step,
        loss=total,
        units=int(units),
        grad_norm=norm,
        lr=lr,
        tokens=int(tokens),
        pixels=int(pixels),
        skipped=not finite,
    )


def _accumulate(trainer: Trainer, batches: Sequence[Batch], scale: float) -> Tensor:
    """Forward and backward of all micro-batches; returns this rank's part of the loss sum of each, on the device."""
    wrapped = trainer.wrapped
    losses = torch.zeros(len(batches), dtype=torch.float64, device=wrapped.owner.device)
    first = rehearse(wrapped, batches)

    def forward(number: int, received: Tensor | None) -> Tensor:
        first.repeat_dropout(number)
        with wrapped.compute():
            out = wrapped.model(first.batches[number], received)
        if not isinstance(out, Output):  # hidden states, for the next stage
            return out
        losses[number] = out.loss.detach()
        loss = out.loss * scale
        return loss if trainer.scaler is None else trainer.scaler.scale(loss)

    wrapped.run(batches, forward, torch.autograd.backward)
    wrapped.finish_gradients()
    return losses


def _suspects(batches: Sequence[Batch], losses: Sequence[float]) -> list[str]:
    """Samples of all ranks' micro-batches whose loss is not finite; all of the step where only a gradient is not."""
    own = [(math.isfinite(loss), b.samples) for b, loss in zip(batches, losses, strict=False)]
    every = [part for rank in gather_objects(own) for part in rank]
    blamed = [names for fine, names in every if not fine] or [names for _, names in every]
    return [name for names in blamed for name in names]


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
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            squares.setdefault(copies(parameter), []).extend(_squares(local))
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


def _update(trainer: Trainer, norm: float, finite: bool) -> None:
    optimizer = trainer.optimizer
    if finite and trainer.clip is not None and norm > trainer.clip:
        scale = trainer.clip / (norm + 1e-6)
        own = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if own:  # a vision rank has none
            torch._foreach_mul_([g.to_local() if isinstance(g, DTensor) else g for g in own], scale)
    if trainer.scaler is not None:
        if finite:
            trainer.scaler.step(optimizer)
        trainer.scaler.update(None if finite else trainer.scaler.get_scale() * 0.5)
    elif finite:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
