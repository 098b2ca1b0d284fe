"""The optimizer and its rate: groups by part, and the rate as a pure function of the step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from litchi.model.family import Family
from litchi.model.tokens import is_new_row
from litchi.train.adam8bit import AdamW8bit
from litchi.train.offload import OffloadedOptimizer

if TYPE_CHECKING:
    from litchi.config import Config


def rate_at(step: int, *, total: int, warmup: int, schedule: str) -> float:
    """Share of the full rate at a step counted from 1.

    It rises from 1/warmup to 1 over the warm-up and then falls so that it would reach 0 one step after the last:
    every step of a run moves the weights.
    """
    if step <= warmup:
        return step / warmup
    progress = (step - warmup) / (total - warmup + 1)
    if schedule == "constant":
        return 1.0
    if schedule == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def build_optimizer(model: nn.Module, family: Family, config: Config) -> torch.optim.Optimizer:
    """An optimizer over what trains, one group per (part, decays or not).

    Decay goes to matrices only: not to biases, norms and embeddings; and not to the head under a rerank loss, where
    all rows but two get no gradient and must stay.
    """
    groups: dict[tuple[str, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        name = name.split("hf.", 1)[1]  # as the family has it, behind the owner's and the wrappers'
        part = family.part_of(name.replace(".base_layer", "").split(".lora_")[0])
        still = name == f"{family.embedding}.weight" or is_new_row(name) or (part == "head" and config.task == "rerank")
        decays = parameter.ndim > 1 and not still
        groups.setdefault((part, decays), []).append(parameter)
    settings = config.optim
    params: list[dict[str, Any]] = []
    for (part, decays), members in sorted(groups.items(), key=lambda item: item[0]):
        mode = getattr(config.trainable, part)
        rate = mode.lr if mode.lr is not None else settings.lr
        params.append(
            {
                "params": members,
                "lr": rate,
                "full_lr": rate,
                "part": part,
                "weight_decay": settings.weight_decay if decays else 0.0,
            }
        )
    if not params:  # a vision rank: what is done with an optimizer is done with this one too
        params = [{"params": [], "lr": settings.lr, "full_lr": settings.lr}]
    meshes = {p.device_mesh if isinstance(p, DTensor) else None for g in params for p in g["params"]}
    each = None if len(meshes) == 1 else False  # one kernel for all takes tensors of one mesh only

    def make(params: list[dict[str, Any]]) -> torch.optim.Optimizer:
        if settings.name == "sgd":
            return torch.optim.SGD(params, lr=settings.lr, foreach=each)
        if settings.name == "adamw8bit":
            return AdamW8bit(params, lr=settings.lr, betas=settings.betas)
        return torch.optim.AdamW(params, lr=settings.lr, betas=settings.betas, foreach=each, fused=meshes == {None})

    return OffloadedOptimizer(params, make) if config.train.offload == "optimizer" else make(params)


def set_rate(optimizer: torch.optim.Optimizer, share: float) -> float:
    """Set every group to its share of the full rate; returns the largest rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["full_lr"] * share
    return max(g["lr"] for g in optimizer.param_groups)
