"""Start the ranks of this machine with torch's elastic launcher, and hand their exit status on."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence

from litchi.errors import StoppedError, UserError


def launched() -> bool:
    """Whether a launcher (torchrun, accelerate, srun) has started this process as one rank of several."""
    from litchi.dist import slurm_variables

    return "WORLD_SIZE" in os.environ or bool(slurm_variables(os.environ))


def default_procs() -> int:
    """One rank per GPU, or one."""
    import torch

    return max(1, torch.cuda.device_count())


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


def _has_network() -> bool:
    """Whether this machine's own name can be reached; gloo would look for its address by it."""
    import socket

    try:
        socket.getaddrinfo(socket.gethostname(), None)
        return True
    except OSError:
        return False
