"""Saving beside the run: state is copied to the machine's memory between two steps, and a thread writes it from there.

The thread has a gloo group of its own, so its collectives never meet those of the steps. A save waits for the one
before. What goes wrong in it is known to all ranks and raised by the next `wait`.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from litchi.dist import Ranks
from litchi.errors import UserError
from litchi.model.weights import own_part
from litchi.train.checkpoint import optimizer_state, place_of, trainable_state
from litchi.train.durable import disk_error
from litchi.train.shards import ShardWriter, hidden

END_S = 60.0  # a save under way may take so long when the run ends with an error


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is on the disk."""

    step: int
    bytes: int
    wait_s: float  # for which the run stood still
    save_s: float  # until it counted


class Saver:
    """Writes the checkpoints of a run, one at a time. All ranks make it and call it alike."""

    def __init__(self, run: Path, ranks: Ranks):
        self.run, self.ranks = run, ranks
        self.group = dist.new_group(backend="gloo")
        self.room: dict[str, Tensor] = {}  # state of the last save; its memory is used again
        self.thread: threading.Thread | None = None
        self.error: UserError | None = None
        self.saved: Saved | None = None  # the last one, until it has been told
        self.newest = 0  # the step saved last, or resumed from

    @property
    def failed(self) -> bool:
        """Whether this rank knows that the save under way has failed."""
        return self.error is not None

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        facts: Mapping[str, Any],
        *,
        beside: Sequence[Path] = (),
        add: Callable[[Path], None] = lambda folder: None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to save the state as it is now.

        Args:
            optimizer: None: weights alone, from which nothing can be resumed.
            facts: what travels along: settings, pixel limits, template, journal.
            beside: files of the run that must be on the disk before the checkpoint counts.
            add: puts further files into its folder.
            after: what rank 0 does when it counts, such as rotation.

        Raises:
            UserError: the save before this one failed.
        """
        start = time.perf_counter()
        self.wait()
        state = trainable_state(model) | ({} if optimizer is None else optimizer_state(model, optimizer))
        self._stage(dict(sorted(state.items())))  # equal states give equal files
        body = {"step": step, "ranks": self.ranks.world, "weights_only": optimizer is None, **facts}
        writer = ShardWriter(place_of(self.run, step), body, beside=beside, add=add, after=after)
        waited = time.perf_counter() - start
        self.newest = step
        self.thread = threading.Thread(
            target=self._write, args=(step, writer, start, waited), name="checkpoint", daemon=True
        )
        self.thread.start()

    def _stage(self, state: Mapping[str, Tensor]) -> None:
        """Copy to the machine's memory, on a GPU through page-locked memory."""
        self.room = {name: self.room.get(name) for name in state}  # type: ignore[misc]
        for name, tensor in state.items():
            room = self.room[name]
            if room is None or (own_part(room).shape, room.dtype) != (own_part(tensor).shape, tensor.dtype):
                pinned = tensor.device.type == "cuda"
                room = self.room[name] = torch.empty_like(
                    tensor, device="cpu", pin_memory=pinned, requires_grad=False, memory_format=torch.contiguous_format
                )
            own_part(room).copy_(own_part(tensor), non_blocking=True)
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize(self.ranks.device)

    def _write(self, step: int, writer: ShardWriter, start: float, waited: float) -> None:
        try:
            dcp.save(
                dict(self.room),
                storage_writer=writer,
                planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=self.group,
            )
            self.saved = Saved(step, writer.bytes, waited, time.perf_counter() - start)
        except BaseException as error:  # DCP's own is no Exception
            self.error = _explain(error, step, writer.place)
            if self.ranks.is_main:
                shutil.rmtree(hidden(writer.place, "part"), ignore_errors=True)

    def wait(self) -> None:
        """Wait for the save under way. Raises UserError, on all ranks, when it failed."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def take_saved(self) -> Saved | None:
        """The checkpoint that has come to count since this was asked last."""
        saved, self.saved = self.saved, None
        return saved

    def close(self, *, well: bool) -> None:
        """Let the save under way end. After an error, when peers may be gone, not for long."""
        if self.thread is not None:
            self.thread.join(None if well or self.ranks.world == 1 else END_S)
        self.room = {}


def _explain(error: BaseException, step: int, place: Path) -> UserError:
    """What a failed save means to the user: the error of the first rank that had one."""
    if isinstance(error, CheckpointException):
        error = error.failures[min(error.failures)][0]
    what = f"the checkpoint of step {step} cannot be written; older ones are intact"
    if isinstance(error, OSError):
        return disk_error(error, what, place)
    lines = str(error).strip().splitlines()
    return UserError(what, where=place, why=f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}")
