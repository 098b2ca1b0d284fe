"""Start the ranks of this machine with torch's elastic launcher and hand their exit status on; join them as one."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from litchi.errors import StoppedError, UserError

if TYPE_CHECKING:
    from litchi.dist import Ranks


def launched() -> bool:
    """Whether a launcher (torchrun, accelerate, srun) has started this process as one rank of several."""
    from litchi.dist import slurm_variables

    return "WORLD_SIZE" in os.environ or bool(slurm_variables(os.environ))


def default_procs() -> int:
    """One rank per GPU, or one."""
    import torch

    return max(1, torch.cuda.device_count())


def ranks_to_start(procs: int | None) -> int:
    """1 where a launcher has started the ranks; else what was asked for; else one per GPU, or one."""
    from litchi.parallel.accelerate import lone_ranks

    if launched():
        return 1
    return procs or lone_ranks(os.environ, _parent_command()) or default_procs()


def _parent_command() -> list[str]:
    """Command line of the process that started this one."""
    import psutil

    try:
        return psutil.Process(os.getppid()).cmdline()
    except psutil.Error:  # it has ended, or is another user's
        return []


def run_ranks(arguments: Sequence[str], procs: int) -> int:
    """Run `litchi ARGUMENTS` on `procs` ranks and wait.

    Returns:
        The exit status of the rank that failed first, or 0.

    Raises:
        UserError: a rank was ended by a signal, so that it could say nothing; StoppedError: this process was.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("torch.distributed", "torch.distributed.elastic"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # the ranks speak for themselves
    if procs > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not _has_network():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=procs,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # a free port
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
    )
    try:
        elastic_launch(config, sys.executable)("-m", "litchi", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        raise UserError(
            f"rank {rank} was ended by {signal.Signals(-failure.exitcode).name}",
            why="mostly the system does that when memory runs out",
            remedy="Lower train.micro_batch_tokens, start fewer ranks, and look at the system's log",
        ) from None
    except SignalException as error:  # the ranks got it too, saved what they had, and said so
        raise StoppedError(f"stopped by {error.sigval.name}", remedy="The same command resumes") from None
    return 0


def join_ranks() -> Ranks:
    """Become one of the ranks a launcher started, or the only one, on the cores next to its GPU."""
    import socket

    from litchi.dist import gather_objects, start_ranks
    from litchi.parallel.numa import pin_cores

    ranks = start_ranks()
    host = socket.gethostname()
    pin_cores(ranks.device, local_rank=ranks.local_rank, local_world=gather_objects(host).count(host))
    return ranks


def _has_network() -> bool:
    """Whether this machine's own name can be reached; gloo would look for its address by it."""
    import socket

    try:
        socket.getaddrinfo(socket.gethostname(), None)
        return True
    except OSError:
        return False
