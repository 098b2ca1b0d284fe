"""A frozen base in 4 bits: the language part's linears become NF4 with double quantisation, as QLoRA has them.

bitsandbytes has the kernels. The layer is ours, because its own hides the scales beside the parameters, where neither
the meta device nor FSDP2 nor `module.to` finds them: here the packed weight is one frozen parameter of bytes, which
FSDP2 shards and does not cast, and the scales (1/32 of its size) are buffers that every rank holds whole. Tensors are
packed one by one as they are read, so the model never exists in more bits.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from litchi.errors import MachineError
from litchi.model.family import Family, part

BLOCK = 64  # weights that share a scale
SCALE_BLOCK = 256  # scales that share a scale: what bitsandbytes' kernels know
# it says while it is imported, which peft does too where it is installed, which of its optional kernels are missing
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def quantize_language(hf: nn.Module, family: Family) -> None:
    """Let the linears of the language layers hold their weights in NF4, in place, before adapters and sharding.

    The model is on the meta device (`build_model`); `load_weights` packs what it reads. Everything else (vision,
    merger, embedding, norms, head) stays as it is.

    Raises:
        MachineError: bitsandbytes is not installed.
    """
    _library()
    for module in part(hf, family.language_layers).modules():
        if type(module) is nn.Linear:
            assert module.weight.is_meta, "weights are packed while they are read"
            module.__class__ = NF4Linear
            module.prepare()  # type: ignore[operator]


def bitsandbytes_functions() -> Any:
    """Its functional module, or MachineError where it is not installed."""
    return _library("weights in nf4").functional


def _library(what: str = "model.quantize=nf4") -> Any:
    """bitsandbytes: importing it takes seconds, so it happens where a layer is in 4 bits."""
    try:
        import bitsandbytes
    except ImportError as error:
        raise MachineError(what, why="bitsandbytes is not installed", remedy="pip install 'litchi[quant]'") from error
    return bitsandbytes


def count_weights(hf: nn.Module) -> tuple[int, int]:
    """How many weights of a model train, and how many there are; of packed ones what they stand for."""
    packed = {id(m.weight): m.in_features * m.out_features for m in hf.modules() if isinstance(m, NF4Linear)}
    sizes = [(packed.get(id(p), p.numel()), p.requires_grad) for p in hf.parameters()]
    return sum(n for n, trains in sizes if trains), sum(n for n, _ in sizes)


class NF4Linear(nn.Linear):
    """A linear layer whose weight is held in 4 bits, two to a byte; bias as it was.

    Buffers: `scales` of blocks of weights, as bytes, by the table `scale_code`; what these are multiplied by
    (`scale_scales`) and moved by (`scale_offset`).
    """

    weight: nn.Parameter

    def prepare(self) -> None:
        """Change the weight for a packed one, without values yet."""
        self.whole_shape, self.whole_dtype = self.weight.shape, self.weight.dtype
        blocks = -(-self.weight.numel() // BLOCK)
        packed = torch.empty(-(-self.weight.numel() // 2), dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(packed, requires_grad=False)
        sizes = {"scale_scales": (-(-blocks // SCALE_BLOCK),), "scale_offset": (), "scale_code": (256,), "code": (16,)}
        self.register_buffer("scales", torch.empty(blocks, dtype=torch.uint8, device="meta"), persistent=False)
        for name, shape in sizes.items():
            self.register_buffer(name, torch.empty(shape, device="meta"), persistent=False)

    def pack(self, whole: Tensor) -> Tensor:
        """Quantise a weight where it is: the packed bytes are returned, the scales kept."""
        assert whole.shape == self.whole_shape
        packed, state = _library().functional.quantize_4bit(
            whole.to(self.whole_dtype), blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
        )
        found = {
            "scales": state.absmax,
            "scale_scales": state.state2.absmax,
            "scale_offset": state.offset,
            "scale_code": state.state2.code,
            "code": state.code,
        }
        for name, value in found.items():
            assert value.shape == getattr(self, name).shape
            setattr(self, name, value)
        return packed.flatten()

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight again, [out, in], from all its bytes."""
        state = self._state(dtype, packed.device)
        return _library().functional.dequantize_4bit(packed.view(-1, 1), state)

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):  # as of any linear
            x = x.to(torch.get_autocast_dtype(kind))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        state = self._state(x.dtype, x.device)
        return _library().matmul_4bit(x, self.weight.view(-1, 1), bias=bias, quant_state=state)

    def _state(self, dtype: torch.dtype, device: torch.device) -> Any:
        """The scales as bitsandbytes takes them."""
        make = _library().functional.QuantState
        scales = {name: buffer.to(device) for name, buffer in self.named_buffers()}
        second = make(
            absmax=scales["scale_scales"], code=scales["scale_code"], blocksize=SCALE_BLOCK, dtype=torch.float32
        )
        return make(
            absmax=scales["scales"],
            shape=self.whole_shape,
            code=scales["code"],
            blocksize=BLOCK,
            quant_type="nf4",
            dtype=dtype,
            offset=scales["scale_offset"],
            state2=second,
        )
