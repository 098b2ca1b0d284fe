"""AdamW whose averages are held in 8 bits: gradients in, weights updated in place.

A number is a code of 8 bits into a table that is finer near zero (Dettmers et al., arXiv 2110.02861), times a scale of
256 neighbours in its row. Blocks never cross a row, and FSDP2 cuts weights by rows, so a shard has just the blocks the
whole tensor would have there: codes and scales are DTensors cut as the weight is, a checkpoint knows them whole, and
another layout goes on from it. (The blocks of torchao and bitsandbytes run through the flattened shard.) Held is the
root of the second average, which spans as many powers of ten as the first; what is not zero never becomes zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from litchi.model.weights import own_part

BLOCK = 256  # numbers that share a scale
FEWEST = 4096  # smaller tensors keep their averages in full: they weigh nothing
AT_ONCE = 2**24  # numbers that exist in fp32 at a time
EPS = 1e-8


@cache
def make_table(signed: bool) -> Tensor:
    """The 256 numbers that codes stand for, rising, from -1 (or 0) to 1."""
    found = [0.0, 1.0]
    for power in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (power + (0 if signed else 1)) + 1)
        middles = 10.0 ** (power - 6) * (edges[:-1] + edges[1:]) / 2
        found += middles.tolist() + (-middles).tolist() * signed
    return torch.tensor(sorted(found))


def pack(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Numbers [rows, n] -> codes, uint8 [rows, n], and scales, fp32 [rows, blocks]."""
    table = make_table(signed).to(values.device)
    width = values.shape[1]
    blocks = F.pad(values, (0, -width % BLOCK)).unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(2)
    shares = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, :, None]
    codes = torch.bucketize(shares, (table[:-1] + table[1:]) / 2, out_int32=True)
    if not signed:
        codes = torch.where(shares > 0, codes.clamp(min=1), codes)
    return codes.flatten(1)[:, :width].to(torch.uint8), scales


def unpack(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """The numbers again, fp32 [rows, n]."""
    table, width = make_table(signed).to(codes.device), codes.shape[1]
    return table[codes.int()] * scales.repeat_interleave(BLOCK, 1)[:, :width]


class AdamW8bit(torch.optim.Optimizer):
    """As torch.optim.AdamW, its state in 8 bits where a tensor has rows that lie whole on a rank."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float = 0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def make_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state before the first step, cut as the parameter is."""
        state = {"step": torch.zeros(())}
        if not _has_whole_rows(parameter):
            names = ("exp_avg", "exp_avg_root")
            return state | {name: torch.zeros_like(parameter, dtype=torch.float32) for name in names}
        for name in ("exp_avg", "exp_avg_root"):
            state[name] = torch.zeros_like(parameter, dtype=torch.uint8, memory_format=torch.contiguous_format)
            state[f"{name}_scale"] = _make_scales(parameter)
        return state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step. A parameter without a gradient stays as it is."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self.state[parameter].update(self.make_state(parameter))
                state = self.state[parameter]
                state["step"] += 1
                _update(parameter, {k: own_part(v) for k, v in state.items() if k != "step"}, int(state["step"]), group)


def _update(parameter: Tensor, state: dict[str, Tensor], step: int, group: dict[str, Any]) -> None:
    """One tensor, by runs of rows, in place."""
    (first, second), rate = group["betas"], group["lr"]
    packed = "exp_avg_scale" in state
    grad = own_part(parameter.grad)  # type: ignore[arg-type]
    for weight, slope, *parts in _runs(own_part(parameter), grad, *state.values(), rows=packed):
        own = dict(zip(state, parts, strict=True))
        average, root = own["exp_avg"], own["exp_avg_root"]
        if packed:
            average = unpack(average, own["exp_avg_scale"], signed=True)
            root = unpack(root, own["exp_avg_root_scale"], signed=False)
        slope = slope.float()
        average = average.lerp(slope, 1 - first)
        root = (root.square() * second + slope.square() * (1 - second)).sqrt()
        weight.mul_(1 - rate * group["weight_decay"])
        size = root / math.sqrt(1 - second**step) + EPS
        weight.add_((average / size).to(weight.dtype), alpha=-rate / (1 - first**step))
        for name, value, signed in (("exp_avg", average, True), ("exp_avg_root", root, False)):
            if packed:
                codes, scales = pack(value, signed=signed)
                own[name].copy_(codes)
                own[f"{name}_scale"].copy_(scales)
            else:
                own[name].copy_(value)


def _runs(*tensors: Tensor, rows: bool) -> Iterator[tuple[Tensor, ...]]:
    """Views of the same rows of all, not too many at once; of tensors in full all of it."""
    if not rows:
        yield tensors
        return
    flat = [tensor.view(len(tensor), -1) if len(tensor) else tensor.flatten(1) for tensor in tensors]
    step = max(1, AT_ONCE // max(1, flat[0].shape[1]))
    for start in range(0, len(flat[0]), step):
        yield tuple(tensor[start : start + step] for tensor in flat)


def _has_whole_rows(parameter: Tensor) -> bool:
    """Whether its state is worth packing, and each rank has whole rows of it."""
    if parameter.ndim < 2 or parameter.numel() < FEWEST:
        return False
    places = parameter.placements if isinstance(parameter, DTensor) else ()
    return all(place.is_replicate() or getattr(place, "dim", 0) == 0 for place in places)


def _make_scales(parameter: Tensor) -> Tensor:
    """Zeros [rows, blocks], cut as the parameter is."""
    local = own_part(parameter)
    blocks = -(-math.prod(parameter.shape[1:]) // BLOCK)
    zeros = torch.zeros(local.shape[0], blocks, device=local.device)
    if not isinstance(parameter, DTensor):
        return zeros
    whole = torch.Size((parameter.shape[0], blocks))
    return DTensor.from_local(
        zeros, parameter.device_mesh, parameter.placements, run_check=False, shape=whole, stride=(blocks, 1)
    )
