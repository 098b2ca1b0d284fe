"""Pipeline parallel: ranks of the axis `pp` hold runs of layers, and micro-batches travel through them.

The first stage has the vision tower and the embedding, the last the norm and the head. Hidden states go forward and
their gradients back, point to point. Every stage knows every micro-batch, so each knows how long the next message is:
streams keep their own lengths, nothing is padded, and there may be fewer micro-batches than stages (torch's own
schedules fix the shapes at the first step, which would fill most of a forest with padding).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from litchi.model.family import Family, has_part, part
from litchi.model.weights import own_part
from litchi.parallel.collectives import Group
from litchi.parallel.mesh import Layout


def split_layers(layers: int, stages: int) -> list[range]:
    """Layers of each stage: equal runs; where they do not divide, later stages have one more, for the first has the
    vision tower. Pure."""
    edges = [layers * stage // stages for stage in range(stages + 1)]
    return [range(a, b) for a, b in pairwise(edges)]


def cut_stage(hf: nn.Module, family: Family, stage: int, stages: int, *, tied: bool) -> None:
    """Take out what other stages hold, in place. What stays keeps its name."""
    layers = part(hf, family.language_layers)
    mine = split_layers(len(layers), stages)[stage]  # type: ignore[arg-type]
    for number in range(len(layers)):  # type: ignore[arg-type]
        if number not in mine:
            del layers._modules[str(number)]
    if stage > 0:
        take_out(hf, family.vision)
        if not (tied and stage == stages - 1):  # a tied head is the embedding, under the embedding's name
            take_out(hf, family.embedding)
    if stage < stages - 1:
        take_out(hf, family.head)
        _replace(hf, family.norm, nn.Identity())


def first_trained(hf: nn.Module, family: Family, stages: int) -> int:
    """The first stage that will have something to train. Asked before the model is cut."""
    ends = [part(hf, name) for name in (family.vision, family.embedding) if has_part(hf, name)]
    if any(p.requires_grad for end in ends for p in end.parameters()):
        return 0
    layers = list(part(hf, family.language_layers).children())
    for stage, numbers in enumerate(split_layers(len(layers), stages)):
        if any(p.requires_grad for number in numbers for p in layers[number].parameters()):
            return stage
    return stages - 1


def take_out(hf: nn.Module, path: str) -> None:
    """Leave a part to other ranks, in place."""
    _replace(hf, path, None)


def _replace(hf: nn.Module, path: str, module: nn.Module | None) -> None:
    parent, _, name = path.rpartition(".")
    setattr(hf.get_submodule(parent), name, module)


# ------------------------------------------------------------------------------------------------------ schedules


@dataclass(frozen=True)
class Action:
    """Forward ("F") or backward ("B") of a micro-batch."""

    kind: str
    micro: int


def plan_actions(schedule: str, stage: int, stages: int, micro_batches: int) -> list[Action]:
    """What a stage does, in order. Pure.

    `gpipe`: all forwards, then all backwards (Huang et al. 2019). `1f1b`: forwards until the first gradient can be
    back, then one backward for each forward, so that a stage keeps at most `stages` micro-batches (PipeDream-flush,
    Narayanan et al. 2021). Backwards run in the order of the forwards in both, so gradients add up alike.
    """
    ahead = micro_batches if schedule == "gpipe" else min(stages - stage - 1, micro_batches)
    actions = [Action("F", i) for i in range(ahead)]
    for i in range(micro_batches - ahead):
        actions += [Action("F", ahead + i), Action("B", i)]
    return actions + [Action("B", i) for i in range(micro_batches - ahead, micro_batches)]


# --------------------------------------------------------------------------------------------------------- a stage


@dataclass
class Pipeline:
    """One stage of the pipeline, and how it talks to its neighbours.

    Args:
        group: the stages, in order.
        schedule: of `parallel.pp_schedule`.
        width: of a hidden state.
        dtype: hidden states travel in.
        device: they are on.
        trains_from: the first stage that has something to train; to stages before it no gradient goes back.
        tied: the embedding, where the head is the same weight.
    """

    group: Group
    schedule: str
    width: int
    dtype: torch.dtype
    device: torch.device
    trains_from: int
    tied: nn.Module | None = None

    @property
    def first(self) -> bool:
        return self.group.rank == 0

    @property
    def last(self) -> bool:
        return self.group.rank == self.group.size - 1

    def run(
        self,
        lengths: Sequence[int],
        forward: Callable[[int, Tensor | None], Tensor],
        backward: Callable[[int, Tensor, Tensor | None], None],
    ) -> None:
        """Take all micro-batches of a step through this stage, forwards and backwards.

        Args:
            lengths: tokens a rank holds of each micro-batch.
            forward: (micro-batch, what came in) -> what goes out: hidden states, on the last stage the loss.
            backward: (micro-batch, what went out, its gradient or None on the last stage) back-propagates.
        """
        actions = plan_actions(self.schedule, self.group.rank, self.group.size, len(lengths))
        kept: dict[int, tuple[Tensor | None, Tensor]] = {}
        got: Tensor | None = None
        if actions:
            got = self._talk(receive=self._needs(actions[0]), lengths=lengths)
        for at, action in enumerate(actions):
            send: tuple[str, Tensor] | None = None
            if action.kind == "F":
                came = got.requires_grad_(self._gets_gradient(self.group.rank)) if got is not None else None
                out = forward(action.micro, came)
                kept[action.micro] = came, out
                if not self.last:
                    send = "F", out.detach()
            else:
                came, out = kept.pop(action.micro)
                if out.requires_grad:
                    backward(action.micro, out, got)
                if self._gets_gradient(self.group.rank):
                    assert came is not None and came.grad is not None
                    send = "B", came.grad
            following = self._needs(actions[at + 1]) if at + 1 < len(actions) else None
            got = self._talk(send=send, receive=following, lengths=lengths)

    def forward_only(self, tokens: int, forward: Callable[[Tensor | None], Tensor]) -> Tensor | None:
        """Take one batch through all stages without gradients; the last stage returns what comes out."""
        came = None if self.first else self._talk(receive=Action("F", 0), lengths=[tokens])
        out = forward(came)
        if self.last:
            return out
        self._talk(send=("F", out), lengths=[tokens])
        return None

    def _gets_gradient(self, stage: int) -> bool:
        """Whether the stage before waits for gradients: something trains there, or still earlier."""
        return stage > self.trains_from

    def _needs(self, action: Action) -> Action | None:
        """The message an action waits for."""
        if action.kind == "F":
            return None if self.first else action
        return None if self.last or not self._gets_gradient(self.group.rank + 1) else action

    def _talk(
        self, *, lengths: Sequence[int], send: tuple[str, Tensor] | None = None, receive: Action | None = None
    ) -> Tensor | None:
        """Send and receive at once, so that neighbours that send to each other do not wait for each other."""
        pair, ops, got = self.group.process_group, [], None
        if send is not None:
            to = self.group.rank + (1 if send[0] == "F" else -1)
            message = send[1].to(self.dtype).contiguous()
            ops.append(dist.P2POp(dist.isend, message, group=pair, group_peer=to))
        if receive is not None:
            source = self.group.rank + (-1 if receive.kind == "F" else 1)
            got = torch.empty(lengths[receive.micro], self.width, dtype=self.dtype, device=self.device)
            ops.append(dist.P2POp(dist.irecv, got, group=pair, group_peer=source))
        if ops:
            for work in dist.batch_isend_irecv(ops):
                work.wait()
        return got

    def sum_tied(self) -> None:
        """Sum the gradients of a tied embedding's two copies, on the first and the last stage."""
        weight = self.tied.weight if self.tied is not None and (self.first or self.last) else None
        if weight is None or weight.grad is None:
            return
        own = own_part(weight.grad)
        peer = self.group.size - 1 if self.first else 0
        other = torch.empty_like(own)
        pair = self.group.process_group
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, own.contiguous(), group=pair, group_peer=peer),
                dist.P2POp(dist.irecv, other, group=pair, group_peer=peer),
            ]
        ):
            work.wait()
        own.add_(other)


def bring_together(tensors: Iterator[tuple[str, Tensor]], layout: Layout, rank: int) -> Iterator[tuple[str, Tensor]]:
    """Named CPU tensors of all stages, one after the other, then of the vision ranks: on rank 0 all of them, each name
    once; elsewhere none.

    Args:
        tensors: this stage's; walked by all its ranks, for it may be collective.
    """
    seen = set()
    mine = layout.pp if layout.encodes(rank) else layout.place(rank).pp
    for stage in range(layout.pp + bool(layout.vision_ranks)):
        leader = stage * layout.stage_ranks
        if stage == mine:
            for name, tensor in tensors:
                if rank == 0:
                    seen.add(name)
                    yield name, tensor
                elif rank == leader:
                    dist.send_object_list([name, tuple(tensor.shape), tensor.dtype], dst=0)
                    dist.send(tensor.contiguous(), dst=0)
            if rank == leader != 0:
                dist.send_object_list([None, None, None], dst=0)
        elif rank == 0:
            while (got := _receive(leader)) is not None:
                if got[0] not in seen:
                    seen.add(got[0])
                    yield got


def _receive(source: int) -> tuple[str, Tensor] | None:
    head: list[Any] = [None, None, None]
    dist.recv_object_list(head, src=source)
    if head[0] is None:
        return None
    tensor = torch.empty(head[1], dtype=head[2])
    dist.recv(tensor, src=source)
    return head[0], tensor
