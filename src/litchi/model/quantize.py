"""A frozen base in fewer bits: the language part's linears become NF4 with double quantisation, as QLoRA has them, or
int8 with a scale per row.

bitsandbytes has the kernels of NF4. Its layers hide the scales beside the parameters, where neither the meta device nor
FSDP2 nor `module.to` finds them: here the packed weight is one frozen parameter of bytes, which FSDP2 shards and does
not cast, and the scales (1/32 of its size, of int8 a number a row) are buffers that every rank holds whole. Tensors are
packed one by one as they are read, so the model never exists in more bits.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from litchi.errors import MachineError
from litchi.model.family import Family, part

BLOCK = 64  # weights that share a scale
SCALE_BLOCK = 256  # scales that share a scale: what bitsandbytes' kernels know
# it says while it is imported, which peft does too where it is installed, which of its optional kernels are missing
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def quantize_language(hf: nn.Module, family: Family, kind: str) -> None:
    """Let the linears of the language layers hold their weights in `nf4` or `int8`, in place, before adapters and
    sharding.

    The model is on the meta device (`build_model`); `load_weights` packs what it reads. Everything else (vision,
    merger, embedding, norms, head) stays as it is.

    Raises:
        MachineError: nf4, and bitsandbytes is not installed.
    """
    if kind == "nf4":
        _library()
    for module in part(hf, family.language_layers).modules():
        if type(module) is nn.Linear:
            assert module.weight.is_meta, "weights are packed while they are read"
            module.__class__ = {"nf4": NF4Linear, "int8": Int8Linear}[kind]
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
    packed = {id(m.weight): m.in_features * m.out_features for m in hf.modules() if isinstance(m, PackedLinear)}
    sizes = [(packed.get(id(p), p.numel()), p.requires_grad) for p in hf.parameters()]
    return sum(n for n, trains in sizes if trains), sum(n for n, _ in sizes)


def weight_of(linear: nn.Linear) -> Tensor:
    """The weight that a linear computes with, [out, in], fp32."""
    if isinstance(linear, PackedLinear):
        return linear.unpack(linear.weight, torch.float32)
    return linear.weight.float()


class PackedLinear(nn.Linear):
    """A linear layer whose weight is held in fewer bits; bias as it was. The kinds below say how."""

    weight: nn.Parameter
    whole_shape: torch.Size
    whole_dtype: torch.dtype
    keeps_norms = False  # set where the norms of the weight's rows are wanted, which a shard of bytes does not tell
    norms: Tensor | None = None

    def prepare(self) -> None:
        """Change the weight for a packed one, without values yet."""
        self.whole_shape, self.whole_dtype = self.weight.shape, self.weight.dtype
        self._prepare()

    def pack(self, whole: Tensor) -> Tensor:
        """Quantise a weight where it is: what the parameter holds is returned, the scales kept."""
        assert whole.shape == self.whole_shape
        packed = self._pack(whole.to(self.whole_dtype))
        if self.keeps_norms:
            self.norms = torch.linalg.vector_norm(self.unpack(packed, torch.float32), dim=1)
        return packed

    @abstractmethod
    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight again, [out, in], from all that the parameter holds."""

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):  # as of any linear
            x = x.to(torch.get_autocast_dtype(kind))
        return self._product(x, None if self.bias is None else self.bias.to(x.dtype))

    @abstractmethod
    def _prepare(self) -> None: ...

    @abstractmethod
    def _pack(self, whole: Tensor) -> Tensor: ...

    @abstractmethod
    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor: ...


class Int8Linear(PackedLinear):
    """In 8 bits, rounded to the nearest. Buffer: `scales` [out, 1], the largest of a row / 127."""

    scales: Tensor

    def _prepare(self) -> None:
        self.weight = nn.Parameter(torch.empty_like(self.weight, dtype=torch.int8), requires_grad=False)
        self.register_buffer("scales", torch.empty(self.out_features, 1, device="meta"), persistent=False)

    def _pack(self, whole: Tensor) -> Tensor:
        scales = whole.float().abs().amax(1, keepdim=True) / 127
        self.scales = torch.where(scales == 0, torch.ones_like(scales), scales)  # a row of zeros stays one
        return (whole.float() / self.scales).round().to(torch.int8)

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        return (packed.float() * self.scales.to(packed.device)).to(dtype)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out = _Int8Product.apply(x, self.weight, self.scales.to(x.device))
        return out if bias is None else out + bias


class _Int8Product(Function):
    """x [..., in] by a weight in int8: it exists in more bits only within the product, forwards and backwards."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        ctx.save_for_backward(weight, scales)
        return (x @ weight.to(x.dtype).t()) * scales.t().to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        weight, scales = ctx.saved_tensors
        return (grad * scales.t().to(grad.dtype)) @ weight.to(grad.dtype), None, None


class NF4Linear(PackedLinear):
    """In 4 bits, two to a byte.

    Buffers: `scales` of blocks of weights, as bytes, by the table `scale_code`; what these are multiplied by
    (`scale_scales`) and moved by (`scale_offset`).
    """

    def _prepare(self) -> None:
        blocks = -(-self.weight.numel() // BLOCK)
        packed = torch.empty(-(-self.weight.numel() // 2), dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(packed, requires_grad=False)
        sizes = {"scale_scales": (-(-blocks // SCALE_BLOCK),), "scale_offset": (), "scale_code": (256,), "code": (16,)}
        self.register_buffer("scales", torch.empty(blocks, dtype=torch.uint8, device="meta"), persistent=False)
        for name, shape in sizes.items():
            self.register_buffer(name, torch.empty(shape, device="meta"), persistent=False)

    def _pack(self, whole: Tensor) -> Tensor:
        packed, state = _library().functional.quantize_4bit(
            whole, blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
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
        state = self._state(dtype, packed.device)
        return _library().functional.dequantize_4bit(packed.view(-1, 1), state)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
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
