"""Naive model parallel: the layers of one model on several cards of one process, one card at work at a time.

Bytes of parameters and free memory in, a device for each module out; then accelerate's hooks, those of Hugging Face's
`device_map`, carry what a module is called with to its card. What the owner calls itself (vision, embedding, head)
stays together on the first card, the decoder layers follow in their order and the language model hands its result
back, so that the forward need not know. The map is ours: `infer_auto_device_map` fills one card after the other, keeps
room on the first for layers from the disk, and would put head and embedding on different cards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn

from litchi.errors import MachineError, UsageError
from litchi.model.family import Family, part

ROOM = 0.9  # of free memory that parameters may take; the rest is for activations and kernels
GIB = 2**30
SETTING = "model.placement=spread"


@dataclass(frozen=True)
class Unit:
    """Modules that stay on one card, by their paths, and what they need there."""

    paths: tuple[str, ...]
    needs_bytes: int
    trains: bool


@dataclass(frozen=True)
class Placement:
    """Where each module goes: `modules` are all paths with their device, `used_bytes` what each device then holds."""

    modules: dict[str, torch.device]
    used_bytes: dict[torch.device, int]

    @property
    def main(self) -> torch.device:
        """Where batches start, losses end, and vision, embedding and head are."""
        return next(iter(self.modules.values()))

    def device_of(self, name: str) -> torch.device:
        """The device of a parameter, by its name."""
        return next(device for path, device in self.modules.items() if name.startswith(f"{path}."))

    def line(self) -> str:
        """One line for the log."""
        held = [f"{device} {used / GIB:.1f} GiB" for device, used in self.used_bytes.items() if used]
        return f"placement: {len(held)} devices, one at work at a time: {', '.join(held)}"


def find_devices(world: int) -> dict[torch.device, int]:
    """The cards this process sees, with their free bytes.

    Raises:
        UsageError: there are other ranks, which see the same cards; MachineError: there are no two cards.
    """
    if world > 1:
        raise UsageError(
            SETTING,
            where=f"{world} ranks",
            why="it spreads one process over the cards, and each rank would take them all",
            remedy="Start one process (--procs 1), or leave model.placement at one and set parallel.dp_shard",
        )
    count = torch.cuda.device_count()
    if count < 2:
        raise MachineError(
            SETTING,
            why=f"it needs at least two GPUs, and {count} {'is' if count == 1 else 'are'} visible",
            remedy="Leave model.placement at one",
        )
    return {torch.device("cuda", i): torch.cuda.mem_get_info(i)[0] for i in range(count)}


def list_units(hf: nn.Module, family: Family) -> list[Unit]:
    """What may not be split, in the order of the forward: the ends, then each decoder layer."""
    language = family.language
    ends = [family.vision, family.embedding, f"{language}.rotary_emb", family.head]
    layers = [f"{family.language_layers}.{i}" for i in range(len(part(hf, family.language_layers)))]  # type: ignore[arg-type]
    last = [layers[-1], f"{language}.norm"]  # so small that it needs no place of its own
    counted: set[int] = set()
    return [_measure(hf, paths, counted) for paths in (ends, *([path] for path in layers[:-1]), last)]


def _measure(hf: nn.Module, paths: Sequence[str], counted: set[int]) -> Unit:
    """Bytes of parameters and buffers, a tied one once; of what trains also its gradient and AdamW's two averages."""
    needs, trains = 0, False
    for path in paths:
        module = part(hf, path)
        for tensor in (*module.parameters(), *module.buffers()):
            if id(tensor) not in counted:
                counted.add(id(tensor))
                needs += tensor.numel() * tensor.element_size() * (4 if tensor.requires_grad else 1)
                trains |= tensor.requires_grad
    return Unit(tuple(paths), needs, trains)


def plan_placement(units: Sequence[Unit], free_bytes: Mapping[torch.device, int], *, room: float = ROOM) -> Placement:
    """Cut the units into one run for each device so that the fullest device is as empty as it can be.

    Args:
        units: in the order of the forward.
        free_bytes: of each device, in the order they are filled.
        room: share of the free memory that may be taken.

    Raises:
        UsageError: they do not fit, naming the first module without a place, its bytes and the memory there is.
    """
    devices = list(free_bytes)
    rooms = [int(free_bytes[d] * room) for d in devices]
    total = [0]
    for unit in units:
        total.append(total[-1] + unit.needs_bytes)
    # fullest[j]: of the best cut of the first j units over the devices so far; cuts[i][j]: where device i then begins
    fullest = [0.0] + [float("inf")] * len(units)
    cuts: list[list[int]] = []
    for space in rooms:
        found = [
            min((max(fullest[k], (total[j] - total[k]) / space if j > k else 0.0), -k) for k in range(j + 1))
            for j in range(len(units) + 1)
        ]
        fullest = [share for share, _ in found]
        cuts.append([-k for _, k in found])
    if fullest[-1] > 1:
        raise _refusal(units, free_bytes, rooms)
    ends = [len(units)]
    for cut in reversed(cuts):
        ends.append(cut[ends[-1]])
    ends.reverse()
    modules, used = {}, {}
    for device, (start, end) in zip(devices, pairwise(ends), strict=True):
        modules |= {path: device for unit in units[start:end] for path in unit.paths}
        used[device] = total[end] - total[start]
    return Placement(modules, used)


def _refusal(units: Sequence[Unit], free_bytes: Mapping[torch.device, int], rooms: Sequence[int]) -> UsageError:
    """Name the first unit that is left when every device is filled to the brim."""
    left = list(units)
    for room in rooms:
        while left and left[0].needs_bytes <= room:
            room -= left.pop(0).needs_bytes
    unit = left[0]  # were none left, the best cut would have fitted too
    needs = sum(u.needs_bytes for u in units)
    cards = ", ".join(f"{device} {free / GIB:.1f} GiB free" for device, free in free_bytes.items())
    trains = (
        "it trains, and on the disk or on meta it would get no gradient" if unit.trains else "nothing is put on disk"
    )
    return UsageError(
        f"{SETTING}: {unit.paths[0]} ({unit.needs_bytes / GIB:.2f} GiB) finds no place",
        where=cards,
        why=f"{needs / GIB:.1f} GiB are needed, {sum(rooms) / GIB:.1f} GiB may be taken; {trains}",
        remedy="Take more or larger GPUs, weights of fewer bytes (model.dtype), or sharded ones (parallel.dp_shard)",
    )


class Carry(AlignDevicesHook):
    """Carries what a module is called with to its device. The module's own tensors are there already: accelerate would
    make new objects of them, and has been seen to leave a trainable one without its gradient."""

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module


def spread_model(hf: nn.Module, family: Family, placement: Placement) -> None:
    """Move the modules to their devices and have what they are called with follow them.

    Args:
        hf: with its weights; nothing of it may be left on meta.
    """
    meta = [name for name, tensor in hf.named_parameters() if tensor.is_meta]
    assert not meta, f"{meta[0]} has no values yet"
    for path, device in placement.modules.items():
        module = part(hf, path).to(device)
        if device != placement.main:
            add_hook_to_module(module, Carry(execution_device=device))
    add_hook_to_module(part(hf, family.language), Carry(execution_device=placement.main, io_same_device=True))
