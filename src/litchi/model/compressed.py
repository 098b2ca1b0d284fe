"""Weights in 8 or 4 bits as engines store them: a layer's weight <-> the tensors that stand for it in a file.

compressed-tensors (int8 per row, int4 in groups, both by rounding to the nearest) and bitsandbytes' nf4. A folder in
these forms is read by unpacking each layer into the type the model computes in: the file is small, the model in memory
is not. Where engines also round a layer's input, `RoundedLinear` does so here, so that scores are the engine's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from litchi.model.family import Family, part
from litchi.model.quantize import BLOCK, bitsandbytes_functions

NF4_STATE = "weight.quant_state.bitsandbytes__nf4"
_PART = re.compile(r"(.*\.)(weight(?:[._].+)?)")
INT8 = {"weight", "weight_scale"}
INT4 = {"weight_packed", "weight_scale", "weight_shape"}
NF4 = {
    *("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
    NF4_STATE,
}


def find_packed(keys: Iterable[str]) -> dict[str, frozenset[str]]:
    """Layers of a file that are held in these forms: "model.layers.0.mlp.up_proj." -> names of its tensors."""
    found: dict[str, set[str]] = {}
    for key in keys:
        if match := _PART.fullmatch(key):
            found.setdefault(match[1], set()).add(match[2])
    return {layer: frozenset(names) for layer, names in found.items() if names in (INT8, INT4, NF4)}


def packed_shape(parts: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Of the weight that some tensors stand for: `weight_shape` or the nf4 state is enough, else `weight`."""
    if "weight_shape" in parts:
        return tuple(parts["weight_shape"].tolist())
    if NF4_STATE in parts:
        return tuple(json.loads(bytes(parts[NF4_STATE].tolist()))["shape"])
    return tuple(parts["weight"].shape)


def pack_int8(weight: Tensor) -> dict[str, Tensor]:
    """A scale per row of [out, in], in the weight's type."""
    values, scales = _round(weight, 8, weight.shape[1])
    return {"weight": values, "weight_scale": scales}


def pack_int4(weight: Tensor, group: int) -> dict[str, Tensor]:
    """A scale per `group` weights of a row; eight weights to an int32, the first in the lowest bits."""
    values, scales = _round(weight, 4, group)
    nibbles = (values.to(torch.int32) + 8).unflatten(1, (-1, 8))
    packed = torch.zeros(nibbles.shape[:2], dtype=torch.int32)
    for place in range(8):
        packed |= nibbles[:, :, place] << 4 * place
    return {"weight_packed": packed, "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}


def _round(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Integers [out, in] and their scales [out, in / group]. What is divided by is the scale as it is stored."""
    groups = weight.float().unflatten(1, (-1, group))
    half = (2**bits - 1) / 2
    scales = (groups.abs().amax(2) / half).to(weight.dtype)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)  # a row of zeros stays one
    values = (groups / scales.float()[:, :, None]).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return values.flatten(1).to(torch.int8), scales


def pack_nf4(weight: Tensor) -> dict[str, Tensor]:
    """Double quantisation in blocks of 64, as bitsandbytes writes it. MachineError: it is not installed."""
    packed, state = bitsandbytes_functions().quantize_4bit(
        weight, blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
    )
    return {"weight": packed, **{f"weight.{name}": value for name, value in state.as_dict(packed=True).items()}}


def unpack(parts: Mapping[str, Tensor]) -> Tensor:
    """The weight that a layer's tensors stand for, [out, in], fp32."""
    if NF4_STATE in parts:
        functions = bitsandbytes_functions()
        state = {name.removeprefix("weight."): value for name, value in parts.items() if name != "weight"}
        restored = functions.QuantState.from_dict(state, device=torch.device("cpu"))
        return functions.dequantize_4bit(parts["weight"], restored).float()
    values, scales = parts.get("weight"), parts["weight_scale"].float()
    if values is None:
        bits = 32 * parts["weight_packed"].shape[1] // int(parts["weight_shape"][1])
        places = torch.arange(0, 32, bits, dtype=torch.int32)
        values = ((parts["weight_packed"][:, :, None] >> places) & (2**bits - 1)).flatten(1) - 2 ** (bits - 1)
    return (values.float().unflatten(1, (scales.shape[1], -1)) * scales[:, :, None]).flatten(1)


# ----------------------------------------------------------------------------------------------------- a model's config


def refuse_reason(quantization: Mapping[str, Any]) -> str | None:
    """Why a `quantization_config` cannot be read here, or None where it can."""
    method = quantization.get("quant_method")
    if method == "bitsandbytes":
        known = quantization.get("bnb_4bit_quant_type") == "nf4" and quantization.get("bnb_4bit_use_double_quant")
        return None if known else "of bitsandbytes only nf4 with double quantisation is read"
    if method != "compressed-tensors":
        return f"quant_method is {method}; read are compressed-tensors and bitsandbytes"
    for group in quantization["config_groups"].values():
        weights, inputs = group["weights"], group.get("input_activations")
        if weights["type"] != "int" or weights["num_bits"] not in (4, 8) or not weights.get("symmetric", True):
            return "of compressed-tensors symmetric weights of 4 or 8 bits are read"
        if inputs and not (inputs["type"] == "int" and inputs["num_bits"] == 8 and inputs.get("dynamic")):
            return "inputs are rounded to 8 bits as they come, or not at all"
    return None


def round_inputs(hf: nn.Module, family: Family, quantization: Mapping[str, Any]) -> None:
    """Let the linears of the language layers round what they are given, in place, where a config says so."""
    groups = quantization.get("config_groups", {}).values()
    if any(group.get("input_activations") for group in groups):
        for module in part(hf, family.language_layers).modules():
            if isinstance(module, nn.Linear):
                module.__class__ = RoundedLinear


class RoundedLinear(nn.Linear):
    """A linear layer that rounds each row of its input to 8 bits, as int8 kernels do. For inference: rounding has no
    gradient."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        scale = (x.abs().amax(-1, keepdim=True) / 127.5).clamp(min=torch.finfo(x.dtype).tiny)
        return super().forward((x / scale).round().clamp(-128, 127) * scale)
