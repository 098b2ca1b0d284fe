"""Which cores a rank runs on: those next to its GPU, on a machine whose memory is in several pieces (NUMA nodes).

A rank that is moved to another node reads its pictures and fills its GPU through the link between them. The choice is
a pure function of what `/sys` says; it is applied only where nobody has restricted the cores already. Loader
workers are children of the rank and stay with it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NODES = Path("/sys/devices/system/node")
PCI = Path("/sys/bus/pci/devices")


def choose_cores(
    nodes: Mapping[int, Sequence[int]],
    allowed: Sequence[int],
    *,
    gpu_node: int | None,
    local_rank: int,
    local_world: int,
) -> set[int] | None:
    """Cores of the node a rank belongs to; None: leave them as they are.

    Args:
        nodes: node -> its cores; nodes of memory alone have none.
        allowed: cores this process may run on now.
        gpu_node: node of the rank's GPU; None where there is no GPU or the machine does not say.
        local_rank, local_world: this rank among those of its machine; without a GPU's word they are laid over the
            nodes in order, if there are as many.
    """
    with_cores = sorted(node for node, cores in nodes.items() if cores)
    everything = {core for cores in nodes.values() for core in cores}
    if len(with_cores) < 2 or set(allowed) != everything:  # a launcher, a container or the user has chosen
        return None
    if gpu_node not in with_cores:
        if local_world < len(with_cores):  # ranks on CPUs take the whole machine
            return None
        gpu_node = with_cores[local_rank * len(with_cores) // local_world]
    return set(nodes[gpu_node])


def read_nodes(root: Path = NODES) -> dict[int, list[int]]:
    """Node -> its cores, as Linux lists them; nothing elsewhere."""
    found = {}
    for folder in root.glob("node[0-9]*"):
        found[int(folder.name.removeprefix("node"))] = parse_cores((folder / "cpulist").read_text())
    return found


def parse_cores(text: str) -> list[int]:
    """`0-3,8` -> 0, 1, 2, 3, 8."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def read_gpu_node(device: torch.device, root: Path = PCI) -> int | None:
    """Node that a GPU hangs on; None: the machine does not say (-1), or this is no GPU."""
    if device.type != "cuda":
        return None
    import torch

    card = torch.cuda.get_device_properties(device)
    place = f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0"
    try:
        node = int((root / place / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def pin_cores(device: torch.device, *, local_rank: int, local_world: int) -> set[int] | None:
    """Keep this process and what it will start on the cores next to its GPU; returns them, None when left alone."""
    if not hasattr(os, "sched_setaffinity"):  # Linux only
        return None
    allowed = sorted(os.sched_getaffinity(0))
    cores = choose_cores(
        read_nodes(), allowed, gpu_node=read_gpu_node(device), local_rank=local_rank, local_world=local_world
    )
    if cores:
        os.sched_setaffinity(0, cores)
    return cores
