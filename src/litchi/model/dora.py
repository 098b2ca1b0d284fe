"""DoRA (arXiv 2402.09353): LoRA beside which the length of each row of a weight is learnt by itself.

A layer with LoRA in; in place, a magnitude per output feature and the forward that uses it. Names and files are PEFT's.
The forward is ours, because PEFT's multiplies an identity matrix by A and B, and does not know our packed weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from litchi.model.precision import widen
from litchi.model.quantize import PackedLinear, weight_of

MAGNITUDE = ".lora_magnitude_vector."


class Magnitude(nn.Module):
    """The lengths that the rows of a layer's weight shall have, [out]."""

    def __init__(self, out: int, device: torch.device):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, dtype=torch.float32, device=device))


class Directed:
    """What PEFT calls for the additions of a layer."""

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **_: Any) -> Tensor:
        """What the base layer gave -> what base and additions give together, in the same type."""
        a, b = module.lora_A[active_adapter], module.lora_B[active_adapter]
        scale, base = module.scaling[active_adapter], module.base_layer
        gain = find_gain(
            weight_of(base), a.weight, b.weight, scale, module.lora_magnitude_vector[active_adapter].weight
        )
        plain = result if base.bias is None else result - base.bias
        added = b(a(module.lora_dropout[active_adapter](x))) * scale
        return (result + (gain - 1) * plain + gain * added).to(result.dtype)


def find_gain(weight: Tensor, a: Tensor, b: Tensor, scale: float, magnitude: Tensor) -> Tensor:
    """What each output of (weight + scale b a) is multiplied by, so that its row has the length `magnitude`. fp32 [out]

    The length it has is held constant, as in section 4.3 of the paper: it has no gradient.
    """
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        length = torch.linalg.vector_norm(weight + scale * (widen(b) @ widen(a)), dim=1)
    return widen(magnitude) / length


def add_magnitudes(hf: nn.Module, adapter: str) -> None:
    """Give every layer with LoRA its magnitudes, without values yet, in place."""
    for layer in list(hf.modules()):
        if adapter in getattr(layer, "lora_A", {}):
            base: Any = layer.base_layer
            if isinstance(base, PackedLinear):
                base.keeps_norms = True
            layer.lora_magnitude_vector[adapter] = Magnitude(base.out_features, layer.lora_A[adapter].weight.device)  # type: ignore[index,union-attr]
            layer.lora_variant[adapter] = Directed()  # type: ignore[index,union-attr,operator]
            layer.use_dora[adapter] = True  # type: ignore[index,union-attr,operator]


def first_magnitude(layer: Any, part: tuple[slice, ...]) -> Tensor:
    """The lengths of this rank's rows of the base: with them a layer computes what its base does."""
    base = layer.base_layer
    if isinstance(base, PackedLinear):
        assert base.norms is not None, "norms are kept while the weight is packed"
        return base.norms[part]
    local = base.weight.to_local() if isinstance(base.weight, DTensor) else base.weight  # cut as the magnitudes are
    return torch.linalg.vector_norm(widen(local.detach()), dim=1)
