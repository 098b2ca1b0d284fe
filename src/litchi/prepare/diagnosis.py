"""What the facts of a machine mean for training: a fact, a verdict and a remedy each. Pure.

Machine -> [Check]
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from litchi.prepare.probe import Machine
from litchi.train.durable import format_bytes

Verdict = Literal["ok", "warn", "fail"]

# Oldest driver of each CUDA major version on Linux, from NVIDIA's compatibility table. Within a major version
# any newer build runs on it, with the features of the older one.
OLDEST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
BF16 = (8, 0)
FLASH = (8, 0)
FEW_FILES = 4096
LITTLE_SHM = 1e9  # the 64 MB that containers get by default are used up by one batch of pictures
LITTLE_RAM = 4e9
LITTLE_DISK = 10e9
BUSY = 0.1  # of a GPU's memory that others hold
FAR = {"node": "two root complexes", "system": "the link between two sockets"}


@dataclass(frozen=True)
class Check:
    """A line of the report. `remedy` is None where there is nothing to do."""

    name: str
    verdict: Verdict
    fact: str
    remedy: str | None = None


def check_machine(machine: Machine) -> list[Check]:
    """Every check that needs the machine's facts alone."""
    checks = [_python(machine), *_cuda(machine)]
    if machine.gpus:
        checks += [*_gpus(machine), *_capability(machine), *_topology(machine)]
    return [*checks, *_numa(machine), *_system(machine)]


def _python(machine: Machine) -> Check:
    fact = f"Python {machine.python}, torch {machine.torch}"
    if version(machine.python) < (3, 11):
        return Check("python", "fail", fact, "Litchi needs Python 3.11 or newer")
    return Check("python", "ok", fact)


def version(text: str) -> tuple[int, ...]:
    """`13.0` or `2.14.1+cu130` as numbers, to compare them."""
    return tuple(int(n) for n in re.findall(r"\d+", text.partition("+")[0]))


# ------------------------------------------------------------------------------------------------------------- CUDA


def _cuda(machine: Machine) -> Iterator[Check]:
    yield _driver(machine)
    if machine.nvcc is not None and machine.torch_cuda is not None:
        fact = f"nvcc of CUDA {machine.nvcc}, torch built with {machine.torch_cuda}"
        if version(machine.nvcc)[0] != version(machine.torch_cuda)[0]:
            remedy = f"Set CUDA_HOME to a CUDA {machine.torch_cuda} before compiling kernels such as flash-attn"
            yield Check("nvcc", "warn", fact, remedy)
        else:
            yield Check("nvcc", "ok", fact)


def _driver(machine: Machine) -> Check:
    if machine.driver_error is not None:
        remedy = "Restart the machine, or reload the driver: after an update the old one stays loaded until then"
        return Check("cuda", "fail", f"the NVIDIA driver does not answer: {machine.driver_error}", remedy)
    if machine.driver is None or not machine.gpus:
        hidden = "" if machine.driver is None else f" (driver {machine.driver})"
        remedy = "Small models train on the CPU, by gloo; for large ones take a machine with GPUs"
        return Check("cuda", "warn", f"no GPU is visible{hidden}", remedy)
    known = machine.driver_cuda or "0"
    fact = f"driver {machine.driver} for CUDA up to {known}"
    if machine.torch_cuda is None:
        return Check("cuda", "fail", f"{fact}; torch has no CUDA", "Install torch's build for CUDA: pip install torch")
    built = version(machine.torch_cuda)
    fact += f", torch built with CUDA {machine.torch_cuda}"
    if version(known)[0] < built[0]:
        oldest = OLDEST_DRIVER.get(built[0])
        newer = f"Install driver {oldest} or newer" if oldest else "Install a newer driver"
        return Check(
            "cuda", "fail", f"{fact}: the driver is too old", f"{newer}, or a torch built with CUDA {known} or older"
        )
    if machine.torch_gpus < len(machine.gpus):
        remedy = "Look at CUDA_VISIBLE_DEVICES, at what python -c 'import torch; torch.cuda.init()' says, at dmesg"
        fact += f"; torch sees {machine.torch_gpus} of {len(machine.gpus)} GPUs"
        return Check("cuda", "fail", fact, remedy)
    if version(known) < built:
        remedy = "It runs; a newer driver also takes kernels that are compiled at run time"
        return Check("cuda", "warn", fact, remedy)
    return Check("cuda", "ok", fact)


# ------------------------------------------------------------------------------------------------------------- GPUs


def _gpus(machine: Machine) -> Iterator[Check]:
    gpus = machine.gpus
    names = sorted({gpu.name for gpu in gpus})
    each = " and ".join(f"{sum(g.name == name for g in gpus)} x {name}" for name in names)
    if len(names) > 1:
        remedy = "A step takes as long as on the slowest: choose equal ones with CUDA_VISIBLE_DEVICES"
        yield Check("gpus", "warn", each, remedy)
    else:
        yield Check("gpus", "ok", f"{each}, compute capability {_dotted(gpus[0].capability)}")
    least = min(gpus, key=lambda g: g.free_bytes)
    fact = f"{format_bytes(least.free_bytes)} of {format_bytes(least.total_bytes)} are free on GPU {gpus.index(least)}"
    busy = [n for n, g in enumerate(gpus) if g.free_bytes < (1 - BUSY) * g.total_bytes]
    if busy:
        remedy = f"End what runs there (nvidia-smi), or leave it out: {_numbers(busy)}"
        yield Check("gpu_memory", "warn", fact, remedy)
    else:
        yield Check("gpu_memory", "ok", f"{fact}, the fullest")
    broken = [n for n, g in enumerate(gpus) if g.ecc_errors]
    off = [n for n, g in enumerate(gpus) if g.ecc is False]
    if broken:
        errors = sum(gpus[n].ecc_errors or 0 for n in broken)
        fact = f"{errors} uncorrected memory errors on {_numbers(broken)} since the driver was loaded"
        yield Check("ecc", "fail", fact, "Leave it out with CUDA_VISIBLE_DEVICES and have it reset or replaced")
    elif off:
        fact = f"memory errors are not corrected on {_numbers(off)}"
        yield Check("ecc", "warn", fact, "nvidia-smi -e 1 and a restart; a flipped bit may spoil a long run unseen")
    elif any(g.ecc for g in gpus):
        yield Check("ecc", "ok", "on, without uncorrected errors")
    else:
        yield Check("ecc", "ok", "these GPUs do not have it")
    slow = [n for n, g in enumerate(gpus) if g.slowed]
    if slow:
        reasons = " and ".join(sorted({why for n in slow for why in gpus[n].slowed}))
        fact = f"{_numbers(slow)} {'are' if len(slow) > 1 else 'is'} held down by {reasons}"
        yield Check("clocks", "warn", fact, "Look at fans and power; all ranks wait for the slowest")
    else:
        yield Check("clocks", "ok", "no GPU is held down by heat or power supply")


def _capability(machine: Machine) -> Iterator[Check]:
    lowest = min(gpu.capability for gpu in machine.gpus)
    said = _dotted(lowest)
    if machine.torch_arches:
        fact = f"torch has kernels for {' '.join(machine.torch_arches)}"
        if _has_kernels(lowest, machine.torch_arches):
            yield Check("kernels", "ok", fact)
        else:
            remedy = "Take a torch built with an older CUDA, or newer GPUs"
            yield Check("kernels", "fail", f"{fact}, none for compute capability {said}", remedy)
    if lowest >= BF16:
        yield Check("bf16", "ok", f"compute capability {said} has bf16")
    else:
        remedy = "train.precision=fp16 or fp32; `auto` takes fp32 here"
        yield Check("bf16", "warn", f"compute capability {said} has no bf16", remedy)
    if lowest >= FLASH:
        yield Check("flash", "ok", f"compute capability {said} has variable-length flash attention")
    else:
        remedy = "model.attention=auto takes sdpa, which is slower and needs more memory for long rows"
        yield Check("flash", "warn", f"compute capability {said} has no flash attention", remedy)


def _has_kernels(capability: tuple[int, int], arches: Sequence[str]) -> bool:
    """A kernel runs on its own major version from its minor one on; `compute_` ones are compiled for anything newer."""
    for arch in arches:
        kind, _, number = arch.partition("_")
        digits = re.match(r"\d+", number)
        if digits is None:
            continue
        built = int(digits[0][:-1]), int(digits[0][-1])
        if built <= capability and (kind == "compute" or built[0] == capability[0]):
            return True
    return False


# --------------------------------------------------------------------------------------------------------- topology


def _topology(machine: Machine) -> Iterator[Check]:
    count = len(machine.gpus)
    pairs = {(i, j): machine.links[i][j] for i in range(count) for j in range(i + 1, count)} if machine.links else {}
    if not pairs:
        return
    far = [pair for pair, link in pairs.items() if link in FAR]
    kinds = set(pairs.values())
    if far:
        words = ", ".join(f"{i}-{j}" for i, j in far)
        over = " and ".join(sorted({FAR[pairs[pair]] for pair in far}))
        remedy = (
            "Gradients cross it in every step. Keep tp and cp within GPUs on one side (CUDA_VISIBLE_DEVICES orders "
            "them), prefer LoRA or larger global batches; if NCCL hangs, NCCL_P2P_DISABLE=1"
        )
        fact = f"GPU pair{'s' * (len(far) > 1)} {words}: only through {over}, without direct transfers"
        yield Check("topology", "warn", fact, remedy)
    elif kinds == {"nvlink"}:
        yield Check("topology", "ok", "NVLink between all GPUs: every axis is fast, tp and cp too")
    elif "nvlink" in kinds:
        fast = ", ".join(f"{i}-{j}" for (i, j), link in pairs.items() if link == "nvlink")
        fact = f"NVLink between {fast} only, PCIe between the others"
        yield Check("topology", "ok", f"{fact}: tp and cp belong within these")
    else:
        how = "a PCIe switch" if kinds == {"switch"} else "one PCIe root complex"
        fact = f"all GPUs under {how}: about 20 GB/s at best"
        yield Check("topology", "ok", f"{fact}; data parallelism is fine, tp and cp are slow")


def _numa(machine: Machine) -> Iterator[Check]:
    nodes = machine.nodes or {}
    if len(nodes) < 2:
        return
    fact = f"{len(nodes)} NUMA nodes of {' and '.join(str(n) for n in nodes.values())} cores"
    unknown = [n for n, gpu in enumerate(machine.gpus) if gpu.node < 0]
    if unknown:
        remedy = "Ranks are laid over the nodes in order; in a virtual machine pass the topology through"
        yield Check("numa", "warn", f"{fact}; of {_numbers(unknown)} the node is unknown", remedy)
    else:
        yield Check("numa", "ok", f"{fact}; each rank stays on the cores next to its GPU")


# ----------------------------------------------------------------------------------------------------------- system


def _system(machine: Machine) -> Iterator[Check]:
    yield Check("cores", "ok", f"{machine.cores} for this process")
    fact = f"{format_bytes(machine.ram_free_bytes)} of {format_bytes(machine.ram_bytes)} are free"
    little = machine.ram_free_bytes < LITTLE_RAM
    yield Check("ram", "warn" if little else "ok", fact, "End other programs, or give it more" if little else None)
    if machine.shm_free_bytes is not None:
        little = machine.shm_free_bytes < LITTLE_SHM
        remedy = "docker run --shm-size=8g (or --ipc=host), or data.workers=0" if little else None
        fact = f"{format_bytes(machine.shm_free_bytes)} are free in /dev/shm, through which workers hand over batches"
        yield Check("shm", "warn" if little else "ok", fact, remedy)
    few = machine.open_files < FEW_FILES
    most = f"ulimit -n {machine.open_files_most}" if machine.open_files_most > machine.open_files else "raise the limit"
    fact = f"{machine.open_files:,} at once"
    yield Check("open_files", "warn" if few else "ok", fact, f"{most}: workers hold many" if few else None)
    little = machine.disk_free_bytes < LITTLE_DISK
    fact = f"{format_bytes(machine.disk_free_bytes)} are free where runs are written"
    yield Check("disk", "warn" if little else "ok", fact, "Make room, or choose output= elsewhere" if little else None)


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _numbers(which: Sequence[int]) -> str:
    return f"GPU{'s' * (len(which) > 1)} {', '.join(map(str, which))}"
