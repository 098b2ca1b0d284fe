"""Collectives that gradients flow through, over the ranks of one axis.

Each is a pair: what the forward does, and its transpose in the backward. `copy` and `reduce` are the pair around a cut
layer (Megatron-LM, arXiv 1909.08053, calls them f and g); `exchange` is the all-to-all of Ulysses (arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function


@dataclass(frozen=True)
class Group:
    """The ranks of one axis: `rank` of `size`, and the process group they talk over."""

    process_group: dist.ProcessGroup = field(repr=False)
    rank: int
    size: int

    def copy(self, x: Tensor) -> Tensor:
        """As it is; gradients are summed over the ranks. For what every rank holds and each uses a part of."""
        return _Copy.apply(x, self)

    def reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks; gradients go back as they are. For what each rank has a part of."""
        return _Reduce.apply(x, self)

    def gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows of all ranks, in rank order; each gets back the summed gradient of its own.

        Args:
            x: [counts[rank], ...].
            counts: rows of each rank.
        """
        return _Gather.apply(x, self, tuple(counts))

    def exchange(self, x: Tensor) -> Tensor:
        """[size, ...] -> [size, ...]: entry j goes to rank j, entry i comes from rank i."""
        return _Exchange.apply(x, self)

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors over the ranks in place, those of one type in one call."""
        for dtype in sorted({t.dtype for t in tensors}, key=str):
            same = [t for t in tensors if t.dtype == dtype]
            flat = torch.cat([t.reshape(-1) for t in same])
            dist.all_reduce(flat, group=self.process_group)
            for tensor, part in zip(same, flat.split([t.numel() for t in same]), strict=True):
                tensor.copy_(part.view_as(tensor))


class _Copy(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group.process_group)
        return grad, None


class _Reduce(Function):
    @staticmethod
    def forward(ctx, x, group):
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group.process_group)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Gather(Function):
    @staticmethod
    def forward(ctx, x, group, counts):
        ctx.group, ctx.counts = group, counts
        # gloo gathers equal sizes only, so the shorter ones are filled up
        mine = x.new_zeros(max(counts), *x.shape[1:])
        mine[: len(x)] = x
        parts = [torch.empty_like(mine) for _ in counts]
        dist.all_gather(parts, mine, group=group.process_group)
        return torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group.process_group)
        first = sum(ctx.counts[: ctx.group.rank])
        return grad[first : first + ctx.counts[ctx.group.rank]], None, None


class _Exchange(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    def backward(ctx, grad):
        return _all_to_all(grad, ctx.group), None


def _all_to_all(x: Tensor, group: Group) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, x.contiguous(), group=group.process_group)
    return out
