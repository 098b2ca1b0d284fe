"""Facts of this machine: GPUs through NVML, the rest from the system. The one place that asks; no verdicts here.

    read_machine(folder) -> Machine -> prepare/diagnosis

A `Machine` is plain data, so one that was recorded elsewhere (`to_json`, `machine_from_json`) is judged the same.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from litchi.parallel.numa import PCI, read_nodes

CGROUP = Path("/sys/fs/cgroup")
SHM = Path("/dev/shm")
NODE_UNKNOWN = -1

# How two GPUs reach each other, from near to far; `node`: two root complexes of one NUMA node, `system`: of two.
Link = Literal["self", "nvlink", "switch", "bridge", "node", "system"]


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver describes it. `ecc_errors`: uncorrected ones since the driver was loaded; None: not counted.

    `slowed`: why its clock is held down, where heat or power supply are the reason. `node`: its NUMA node, -1: unknown.
    """

    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int
    ecc: bool | None = None
    ecc_errors: int | None = None
    slowed: tuple[str, ...] = ()
    node: int = NODE_UNKNOWN


@dataclass(frozen=True)
class Machine:
    """What there is. Versions are as they are written; None: it is not there.

    `driver_cuda`: the newest CUDA the driver knows. `driver_error`: why a driver that is there does not answer.
    `torch_cuda`, `torch_arches`, `torch_gpus`: what torch was built with and for, and how many GPUs it sees.
    `links[i][j]`: how GPU i reaches GPU j. `nodes`: NUMA node -> number of its cores.
    `cores`, `ram_bytes`, `ram_free_bytes`: what this process may use, a container's limits included.
    """

    python: str
    torch: str
    torch_cuda: str | None = None
    torch_arches: tuple[str, ...] = ()
    torch_gpus: int = 0
    driver: str | None = None
    driver_cuda: str | None = None
    driver_error: str | None = None
    nvcc: str | None = None
    gpus: tuple[Gpu, ...] = ()
    links: tuple[tuple[Link, ...], ...] = ()
    nodes: Mapping[int, int] | None = None
    cores: int = 1
    ram_bytes: int = 0
    ram_free_bytes: int = 0
    shm_free_bytes: int | None = None
    open_files: int = 0
    open_files_most: int = 0
    disk_free_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def machine_from_json(fields: Mapping[str, Any]) -> Machine:
    """A machine that was recorded with `to_json`."""
    gpus = tuple(
        Gpu(**{**g, "capability": tuple(g["capability"]), "slowed": tuple(g.get("slowed", ()))})
        for g in fields.get("gpus", ())
    )
    rest = {
        "torch_arches": tuple(fields.get("torch_arches", ())),
        "links": tuple(tuple(row) for row in fields.get("links", ())),
        "nodes": {int(node): cores for node, cores in (fields.get("nodes") or {}).items()},
    }
    return Machine(**{**fields, "gpus": gpus, **rest})


def read_machine(folder: Path) -> Machine:
    """Ask this machine.

    Args:
        folder: where runs are written, or the nearest folder above that is there.
    """
    import psutil
    import torch

    memory = psutil.virtual_memory()
    limit, used = _memory_limit()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen = torch.cuda.device_count()
    return Machine(
        python=platform.python_version(),
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        torch_arches=tuple(torch.cuda.get_arch_list()),
        torch_gpus=seen,
        nvcc=read_nvcc(),
        **read_gpus(),
        nodes={node: len(cores) for node, cores in read_nodes().items() if cores},
        cores=count_cores(),
        ram_bytes=min(memory.total, limit or memory.total),
        ram_free_bytes=min(memory.available, limit - used if limit else memory.available),
        shm_free_bytes=shutil.disk_usage(SHM).free if SHM.is_dir() else None,
        open_files=soft,
        open_files_most=hard,
        disk_free_bytes=shutil.disk_usage(nearest_folder(folder)).free,
    )


def nearest_folder(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def count_cores() -> int:
    """Cores this process may use: its affinity, and its container's share of time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(CGROUP / "cpu.max").partition(" ")
    return max(1, min(cores, int(quota) // int(period))) if quota.isdigit() else cores


def _memory_limit() -> tuple[int | None, int]:
    """A container's limit of memory and what it uses of it, without files that are only cached."""
    limit = _read(CGROUP / "memory.max")
    if not limit.isdigit():
        return None, 0
    cached = re.search(r"^inactive_file (\d+)$", _read(CGROUP / "memory.stat"), re.M)
    return int(limit), int(_read(CGROUP / "memory.current") or 0) - int(cached[1] if cached else 0)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def read_nvcc() -> str | None:
    """CUDA version of the compiler on the path or in CUDA_HOME."""
    home = os.environ.get("CUDA_HOME")
    found = shutil.which("nvcc") or (home and shutil.which("nvcc", path=f"{home}/bin"))
    if not found:
        return None
    try:
        said = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = re.search(r"release (\d+\.\d+)", said)
    return version[1] if version else None


# ------------------------------------------------------------------------------------------------------------- NVML


def read_gpus() -> dict[str, Any]:
    """Driver, GPUs that CUDA_VISIBLE_DEVICES lets through, and their links, as fields of a Machine."""
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibraryNotFound:
        return {}
    except nvml.NVMLError as error:
        return {"driver_error": str(error)}
    try:
        handles = [_handle(nvml, name) for name in _visible(nvml.nvmlDeviceGetCount())]
        cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
        return {
            "driver": nvml.nvmlSystemGetDriverVersion(),
            "driver_cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
            "gpus": tuple(_read_gpu(nvml, handle) for handle in handles),
            "links": tuple(tuple(_read_link(nvml, a, b) for b in handles) for a in handles),
        }
    except nvml.NVMLError as error:
        return {"driver_error": str(error)}
    finally:
        nvml.nvmlShutdown()


def _visible(count: int) -> list[str]:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(n) for n in range(count)] if chosen is None else [n.strip() for n in chosen.split(",") if n.strip()]


def _handle(nvml: Any, name: str) -> Any:
    return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)


def _ask(nvml: Any, question: Any, *words: Any) -> Any:
    """An answer that some GPUs do not have."""
    try:
        return question(*words)
    except nvml.NVMLError:
        return None


def _read_gpu(nvml: Any, handle: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    ecc = _ask(nvml, nvml.nvmlDeviceGetEccMode, handle)
    errors = _ask(
        nvml,
        nvml.nvmlDeviceGetTotalEccErrors,
        handle,
        nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        nvml.NVML_VOLATILE_ECC,
    )
    reasons = _ask(nvml, nvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0
    slow = {
        "heat": nvml.nvmlClocksThrottleReasonSwThermalSlowdown | nvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        "its power supply": nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
    }
    return Gpu(
        name=nvml.nvmlDeviceGetName(handle),
        capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        total_bytes=memory.total,
        free_bytes=memory.free,
        ecc=None if ecc is None else bool(ecc[0]),
        ecc_errors=errors,
        slowed=tuple(why for why, bits in slow.items() if reasons & bits),
        node=_read_node(nvml, handle),
    )


def _read_node(nvml: Any, handle: Any) -> int:
    bus = nvml.nvmlDeviceGetPciInfo(handle).busId
    place = (bus if isinstance(bus, str) else bus.decode()).lower()
    text = _read(PCI / place[-12:] / "numa_node")  # NVML writes eight digits of the domain, /sys four
    return int(text) if text.lstrip("-").isdigit() else NODE_UNKNOWN


def _read_link(nvml: Any, a: Any, b: Any) -> Link:
    if a is b:
        return "self"
    if _ask(nvml, nvml.nvmlDeviceGetP2PStatus, a, b, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK:
        return "nvlink"
    level = _ask(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, a, b)
    near: dict[Any, Link] = {
        nvml.NVML_TOPOLOGY_INTERNAL: "switch",
        nvml.NVML_TOPOLOGY_SINGLE: "switch",
        nvml.NVML_TOPOLOGY_MULTIPLE: "switch",
        nvml.NVML_TOPOLOGY_HOSTBRIDGE: "bridge",
        nvml.NVML_TOPOLOGY_NODE: "node",
    }
    return near.get(level, "system")
