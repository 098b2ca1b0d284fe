"""One optimizer step on all ranks: units first, loss sums, one clip, one decision.

sum the units over ranks -> each micro-batch gives a loss sum, scaled by data ranks / units, and is back-propagated
-> gradients are synchronised on the last one -> the norm is clipped once -> all ranks decide alike -> update
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from litchi.dist import Ranks, gather_objects, sum_ranks
from litchi.errors import UserError
from litchi.parallel.apply import Wrapped
from litchi.train.optim import set_rate
from litchi.types import Batch, StepResult


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
        batches: this rank's micro-batches; the same number on every rank.
        rate: share of the full learning rate.

    Raises:
        UserError: a trainable tensor has no gradient, or the step is not finite and the policy is to stop.
    """
    wrapped = trainer.wrapped
    units, pictures, tokens, pixels = sum_ranks(
        sum(b.units for b in batches),
        sum(len(b.grids) for b in batches),
        sum(b.tokens for b in batches if b.units),
        sum(len(b.pixels) for b in batches) * wrapped.owner.spec.patch**2,
    )
    lr = set_rate(trainer.optimizer, rate)
    losses = _accumulate(trainer, batches, wrapped.data_ranks / units)
    (total,) = sum_ranks(sum(losses))
    total /= units
    if trainer.scaler is not None:
        trainer.scaler.unscale_(trainer.optimizer)
    if not pictures:
        _leave_vision_out(wrapped)
    norm = gradient_norm(p for g in trainer.optimizer.param_groups for p in g["params"])
    finite = math.isfinite(total) and math.isfinite(norm)
    if finite:
        _prove_gradients(trainer, pictures > 0)
    elif trainer.on_nonfinite == "stop":
        names = _suspects(batches, losses)
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


def _accumulate(trainer: Trainer, batches: Sequence[Batch], scale: float) -> list[float]:
    """Forward and backward of all micro-batches; returns the loss sum of each."""
    losses: list[Tensor] = []
    for i, batch in enumerate(batches):
        with trainer.wrapped.synchronise(last=i == len(batches) - 1):
            with trainer.wrapped.compute():
                out = trainer.wrapped.model(batch)
            loss = out.loss * scale
            if trainer.scaler is not None:
                loss = trainer.scaler.scale(loss)
            loss.backward()
        losses.append(out.loss.detach().double())
    return torch.stack(losses).tolist()  # the one place where the host waits for the device


def _suspects(batches: Sequence[Batch], losses: Sequence[float]) -> list[str]:
    """Samples of all ranks' micro-batches whose loss is not finite; all of the step where only a gradient is not."""
    own = [(math.isfinite(loss), b.samples) for b, loss in zip(batches, losses, strict=True)]
    every = [part for rank in gather_objects(own) for part in rank]
    blamed = [names for fine, names in every if not fine] or [names for _, names in every]
    return [name for names in blamed for name in names]


def _leave_vision_out(wrapped: Wrapped) -> None:
    """Without a picture on any rank the vision parts are no part of the update: no momentum, no decay."""
    for module in wrapped.vision_modules():
        for parameter in module.parameters():
            parameter.grad = None


def gradient_norm(parameters: Iterable[nn.Parameter]) -> float:
    """Norm of all gradients over all ranks, squares summed in fp64 (fp32 moved losses by 1e-5 between layouts)."""
    squares: dict[int, list[Tensor]] = {}  # by how many ranks hold the same piece; 0: all of them, the whole of it
    for parameter in parameters:
        grad, copies = parameter.grad, 0
        if grad is None:
            continue
        if isinstance(grad, DTensor):
            mesh, places = grad.device_mesh, grad.placements
            copies = math.prod(mesh.size(axis) for axis, place in enumerate(places) if isinstance(place, Replicate))
            grad = grad.to_local()
        squares.setdefault(copies, []).append(grad.double().pow(2).sum())
    sums = {copies: float(torch.stack(parts).sum()) for copies, parts in squares.items()}
    whole = sums.pop(0, 0.0)
    (pieces,) = sum_ranks(sum(total / copies for copies, total in sums.items()))
    return math.sqrt(whole + pieces)


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
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
    if trainer.scaler is not None:
        if finite:
            trainer.scaler.step(optimizer)
        trainer.scaler.update(None if finite else trainer.scaler.get_scale() * 0.5)
    elif finite:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
