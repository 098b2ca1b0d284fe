"""Ranks: who am I, how many are we, and the few reductions Litchi needs. The only file that starts a process group.

Without a launcher there is one rank and a group of one, so that every path is the same code.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from litchi.errors import MachineError


@dataclass(frozen=True)
class Ranks:
    """This process among all: `rank` of `world`, `local_rank` of its machine, and the device it computes on."""

    rank: int
    world: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def pick_device(local_rank: int) -> torch.device:
    """A GPU when there is one, without being asked, unless `accelerate launch --cpu` was."""
    if not torch.cuda.is_available() or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true"):
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise MachineError(
            f"rank {local_rank} of this machine has no GPU",
            why=f"{torch.cuda.device_count()} GPUs are visible",
            remedy=f"Start at most {torch.cuda.device_count()} ranks (--procs) or set CUDA_VISIBLE_DEVICES",
        )
    return torch.device("cuda", local_rank)


def slurm_variables(env: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables for a task of an `srun` step of several tasks; none elsewhere.

    Inside a batch script SLURM_PROCID and SLURM_NTASKS are set too, but no step is running: there Litchi starts the
    ranks itself. All tasks meet at the step's first node, at a port made from the job and the step.
    """
    if int(env.get("SLURM_STEP_NUM_TASKS", 1)) == 1 or "SLURM_PROCID" not in env:
        return {}
    first = re.match(r"([^,\[]+)(?:\[(\d+))?", env.get("SLURM_STEP_NODELIST", ""))  # node[03-07,12] -> node, 03
    job, step = int(env.get("SLURM_JOB_ID", 0)), int(env.get("SLURM_STEP_ID", 0))
    return {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": env.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": "".join(first.groups("")) if first else "127.0.0.1",
        "MASTER_PORT": str(20000 + (job * 7 + step) % 20000),
    }


def start_ranks(timeout_s: float = 3600.0) -> Ranks:
    """Join the ranks a launcher started (torchrun, accelerate, srun), or be the only one.

    Args:
        timeout_s: how long a rank waits for the others. A first download or scan by one rank may take that long;
            a rank that ends is noticed at once, by its closed connection.
    """
    for name, value in slurm_variables(os.environ).items():
        os.environ.setdefault(name, value)
    rank, world, local = (int(os.environ.get(n, d)) for n, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    device = pick_device(local)
    if device.type == "cuda":
        if not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:  # the second is the old name
            os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # read at the first use of the GPU
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        wait = timedelta(seconds=timeout_s)
        if world == 1:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=wait)
        else:
            with explain_port(os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")):
                store = _meet(rank, world, wait)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=wait)
    if device.type == "cpu" and world >= (os.cpu_count() or 1):
        torch.set_num_threads(1)  # two threads per rank on as many cores ran 30x slower than one
    return Ranks(dist.get_rank(), dist.get_world_size(), local, device)


def _meet(rank: int, world: int, wait: timedelta) -> dist.Store:
    """Where ranks meet. torchrun starts them again at the same store, which still has the addresses of those before."""
    store, _, _ = next(dist.rendezvous("env://", rank, world, timeout=wait))
    alone = os.environ.get("LOCAL_WORLD_SIZE") == str(world)  # agents of several machines count apart
    return dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if alone else "0", store)


@contextmanager
def explain_port(host: object, port: object) -> Iterator[None]:
    """Name the place when the port where ranks are to meet is taken. Raises MachineError."""
    try:
        yield
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise MachineError(
            f"ranks cannot meet at {host}:{port}",
            why="another process listens there",
            remedy="Choose another MASTER_PORT, or give none to litchi train --procs, which finds a free one",
        ) from None


def stop_ranks() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def gather_objects(value: Any) -> list[Any]:
    """The value of every rank, in rank order, on every rank."""
    if dist.get_world_size() == 1:
        return [value]
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def sum_ranks(*values: float) -> list[float]:
    """Sums over all ranks, in fp64 on the CPU."""
    total = torch.tensor(values, dtype=torch.float64)
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total.tolist()


def max_ranks(*values: float, group: dist.ProcessGroup | None = None) -> list[float]:
    """Largest value over all ranks, or over those of a group."""
    top = torch.tensor(values, dtype=torch.float64)
    if dist.get_world_size() > 1:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    return top.tolist()


def gather_numbers(*values: float) -> list[list[float]]:
    """The values of every rank, [rank][value], on every rank."""
    own = torch.tensor(values, dtype=torch.float64)
    if dist.get_world_size() == 1:
        return [own.tolist()]
    out = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(out, own)
    return [t.tolist() for t in out]


def barrier() -> None:
    """Wait for all ranks (on the CPU, so that no device is touched)."""
    sum_ranks(0.0)
