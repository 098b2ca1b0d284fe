"""The optimizer in the machine's memory: its state never lies on the GPU, and the update is computed by the CPU.

Gradients go down, the same torch optimizer takes its step on copies of the weights there, the new weights come up.
The copies have the weights' own type, so that the numbers are those of the optimizer on the device; sharded weights
(DTensors) have sharded copies and sharded state, and a checkpoint cannot tell the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from litchi.errors import UsageError
from litchi.model.weights import own_part
from litchi.parallel.mesh import Layout

Groups = Sequence[Mapping[str, Any]]


def check_offload(offload: str, layout: Layout) -> None:
    """`all` needs weights that FSDP2 brings to the device layer by layer. UsageError where there are none."""
    if offload == "all" and layout.wrapper not in ("FSDP2", "HSDP"):
        raise UsageError(
            "train.offload=all without sharded weights",
            where=f"parallel: {layout}",
            why="it is FSDP2 that brings weights to the GPU and back, layer by layer",
            remedy="Start at least two ranks with parallel.dp_shard above 1, or use train.offload=optimizer",
        )


class OffloadedOptimizer(torch.optim.Optimizer):
    """An optimizer whose state and update live in the machine's memory.

    `param_groups` hold the model's own parameters with all the settings of the optimizer behind, and are what a rate
    is set in. `state[parameter]` is the state itself, on the CPU, shaped like the parameter's shard.

    Args:
        groups: as any optimizer of torch takes them.
        make: groups of parameters on the CPU -> the optimizer that does the work.
    """

    def __init__(self, groups: Groups, make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]):
        super().__init__(groups, {})
        self.copies = {p: nn.Parameter(_room_like(p)) for g in self.param_groups for p in g["params"]}
        self.rooms: dict[nn.Parameter, Tensor] = {}  # for gradients, made when the first comes
        self.devices = {p.device for p in self.copies if p.device.type == "cuda"}
        self.inner = make([{**g, "params": [self.copies[p] for p in g["params"]]} for g in self.param_groups])
        for own, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            own.update(_settings(inner))
        self.read_weights()
        self._share_state()

    @torch.no_grad()
    def read_weights(self) -> None:
        """Take the weights the model has now, as after loading a checkpoint."""
        for parameter, copy in self.copies.items():
            own_part(copy).copy_(own_part(parameter), non_blocking=True)
        self._wait()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step with the gradients the model has now. A parameter without one stays as it is."""
        assert closure is None
        for parameter, copy in self.copies.items():
            copy.grad = None if parameter.grad is None else self._bring_down(parameter)
        self._wait()
        for own, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update(_settings(own))
        self.inner.step()
        for parameter, copy in self.copies.items():
            if copy.grad is not None:  # on the stream of the next forward; the next step waits before it writes here
                own_part(parameter).copy_(own_part(copy), non_blocking=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` gave; the weights are the model's."""
        self.inner.load_state_dict(state_dict)
        for own, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            own.update(_settings(inner))
        self.read_weights()
        self._share_state()

    def _share_state(self) -> None:
        self.state.clear()
        for parameter, copy in self.copies.items():
            self.state[parameter] = self.inner.state[copy]  # one dict under two names

    def _bring_down(self, parameter: nn.Parameter) -> Tensor:
        if parameter not in self.rooms:
            self.rooms[parameter] = _room_like(parameter)
        room = self.rooms[parameter]
        own_part(room).copy_(own_part(parameter.grad), non_blocking=True)
        return room

    def _wait(self) -> None:
        """Copies from the device are done when this returns."""
        for device in self.devices:
            torch.cuda.current_stream(device).synchronize()


def state_like(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor:
    """The tensor an optimizer's state is shaped after, on the device where the state lives."""
    return optimizer.copies[parameter] if isinstance(optimizer, OffloadedOptimizer) else parameter


def make_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """The state of a parameter before its first step, where it is not just shaped like the parameter; else nothing."""
    inner = optimizer.inner if isinstance(optimizer, OffloadedOptimizer) else optimizer
    make = getattr(inner, "make_state", None)
    return {} if make is None else make(state_like(optimizer, parameter))


def _room_like(parameter: Tensor) -> Tensor:
    """Room in the machine's memory, sharded as the parameter is; page-locked where a GPU copies into it."""
    return torch.empty_like(parameter, device="cpu", requires_grad=False, pin_memory=parameter.device.type == "cuda")


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
