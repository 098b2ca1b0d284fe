"""Accelerators and their links as their makers publish them: a name in, memory, rates and a price out. Pure.

Rates are peaks: dense bf16, one direction of a link. What of a peak is reached is `EFFICIENCY`, an assumption.
"""

from __future__ import annotations

from dataclasses import dataclass

from litchi.errors import UsageError

MIB = 2**20
EFFICIENCY = 0.4  # of the peak of arithmetic, as docs/parallelism.md assumes; of links and memory 0.8
REACHED = 0.8


@dataclass(frozen=True)
class Machine:
    """A card, as one of several in a machine.

    Args:
        memory: bytes that its driver shows.
        flops: dense bf16 FLOP/s.
        bandwidth: bytes/s of its memory.
        link: bytes/s to another card of the machine, one direction.
        network: bytes/s a card has to other machines.
        price: an hour of it in USD; a round figure of what clouds asked in 2025, to be replaced by one's own.
        source: where the figures stand.
    """

    name: str
    memory: float
    flops: float
    bandwidth: float
    link: float
    network: float
    price: float
    source: str


MACHINES = {
    m.name: m
    for m in (
        # NVLink 3: 600 GB/s both ways; network: one 200 Gb/s adapter a card, as in a DGX A100
        Machine("a100-80gb", 81920 * MIB, 312e12, 2039e9, 300e9, 25e9, 1.8, "NVIDIA A100 data sheet, SXM 80 GB"),
        Machine("a100-40gb", 40960 * MIB, 312e12, 1555e9, 300e9, 25e9, 1.3, "NVIDIA A100 data sheet, SXM 40 GB"),
        # NVLink 4: 900 GB/s both ways; 400 Gb/s a card, as in a DGX H100
        Machine("h100-80gb", 81559 * MIB, 989e12, 3350e9, 450e9, 50e9, 3.0, "NVIDIA H100 data sheet, SXM"),
        Machine("h200", 143771 * MIB, 989e12, 4800e9, 450e9, 50e9, 3.8, "NVIDIA H200 data sheet, SXM"),
        # PCIe 4.0 x16 without peer to peer: 32 GB/s each way before protocol; a 100 Gb/s network shared by 8 cards
        Machine("rtx4090", 24564 * MIB, 165.2e12, 1008e9, 32e9, 1.6e9, 0.7, "NVIDIA Ada architecture paper 2.1"),
        Machine("l40s", 46068 * MIB, 362e12, 864e9, 32e9, 3.1e9, 0.9, "NVIDIA L40S data sheet"),
    )
}


def find_machine(name: str) -> Machine:
    """A machine by name; UsageError with the names there are."""
    if name not in MACHINES:
        raise UsageError(f"no machine {name!r}", why=f"known are {', '.join(MACHINES)}")
    return MACHINES[name]


def name_machine(device: str, memory: float) -> str | None:
    """The machine a driver's name stands for, `NVIDIA A100-SXM4-80GB` for one; None where it is not known."""
    flat = device.lower().replace(" ", "").replace("-", "")
    fitting = [m for m in MACHINES.values() if m.name.split("-")[0] in flat]
    near = min(fitting, key=lambda m: abs(m.memory - memory), default=None)
    return near.name if near else None
