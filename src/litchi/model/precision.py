"""Precisions: what `train.precision` names, and what sums are kept in."""

from __future__ import annotations

import torch
from torch import Tensor

from litchi.errors import MachineError

COMPUTE = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HELD = ("fp64", "fp32")  # computed in what the weights are held in: nothing is cast
WIDEST = tuple(COMPUTE[name] for name in HELD)


def widen(x: Tensor) -> Tensor:
    """In fp32 at least: what would round too much in half precision."""
    return x if x.dtype == torch.float64 else x.float()


def choose_precision(wanted: str, device: torch.device) -> str:
    """fp64, fp32, bf16 or fp16. MachineError when the device cannot."""
    if device.type == "cuda":
        able = torch.cuda.is_bf16_supported(including_emulation=False)
        if wanted == "bf16" and not able:
            raise MachineError(
                "train.precision=bf16", where=torch.cuda.get_device_name(device),
                why="this GPU has no bf16 (compute capability below 8.0)", remedy="Use fp16 or fp32",
            )  # fmt: skip
        return ("bf16" if able else "fp32") if wanted == "auto" else wanted
    if wanted == "fp16":
        raise MachineError("train.precision=fp16", why="there is no GPU", remedy="Use fp32 or bf16")
    return "fp32" if wanted == "auto" else wanted
