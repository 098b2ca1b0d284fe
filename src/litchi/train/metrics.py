"""What a run writes while it goes: a line per step in metrics.jsonl, eval.jsonl, TensorBoard, and the screen."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import torch

from litchi.errors import UserError
from litchi.train.durable import disk_error, replace_file
from litchi.train.progress import StepLine
from litchi.types import StepResult


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one JSON line and hand it to the system at once."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Lines of a JSONL file we wrote, without the half line a killed writer left; none where there is no file."""
    if not path.is_file():
        return []
    out = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            out.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return out


def cut_back(path: Path, step: int) -> None:
    """Keep the lines up to a step, so that each step stands once after a resume."""
    if path.is_file():
        kept = [json.dumps(r, ensure_ascii=False) + "\n" for r in read_lines(path) if r["step"] <= step]
        replace_file(path, "".join(kept))


def peak_bytes(device: torch.device) -> int:
    """Most memory this process has held: on its GPU, or in RAM."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def status_bytes(name: str) -> int:
    """What Linux counts of this process: `VmRSS` in RAM now, `VmHWM` at most, `VmPeak` at most of addresses."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def reserved_bytes(device: torch.device) -> tuple[int, int] | None:
    """What the GPU's allocator holds now, and how much of it is in use: what lies between is cached or in fragments.
    None on the CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)


# Dense bf16 peak rates from the makers' data sheets, in FLOP/s; a name is matched by its beginning.
PEAK_FLOPS = {"NVIDIA H200": 989e12, "NVIDIA H100": 989e12, "NVIDIA A100": 312e12, "NVIDIA L40S": 362e12}


def peak_flops(device: torch.device) -> float | None:
    """Peak rate of a GPU we know; None elsewhere, and then no MFU is given."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((rate for known, rate in PEAK_FLOPS.items() if name.startswith(known)), None)


class RunLog:
    """Writes of rank 0. On other ranks every method does nothing."""

    def __init__(
        self, folder: Path, *, main: bool, tensorboard: bool, total: int, every: int, out: TextIO | None = None
    ):
        self.folder, self.main, self.total, self.every, self.out = folder, main, total, every, out or sys.stderr
        self.board = _open_board(folder) if main and tensorboard else None
        self.line = StepLine(total, self.out) if main and self.out.isatty() else None
        self.failure: UserError | None = None  # of a line that could not be written

    @property
    def failed(self) -> bool:
        """Whether a line could not be written here. The other ranks must hear of it before `raise_failure`."""
        return self.failure is not None

    def raise_failure(self) -> None:
        """Raise what kept a line from being written."""
        if self.failure is not None:
            raise self.failure

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        try:
            append_line(self.folder / name, record)
        except OSError as error:
            self.failure = disk_error(error, f"{name} cannot be written", self.folder / name)

    def say(self, text: str) -> None:
        """Print a line."""
        if self.main:
            self.hide()
            print(text, file=self.out, flush=True)

    def hide(self) -> None:
        """Take the live line away, because something else is about to be drawn."""
        if self.line is not None:
            self.line.hide()

    def step(self, result: StepResult, extra: Mapping[str, Any]) -> None:
        """Write a step everywhere."""
        if not self.main:
            return
        record = {
            "step": result.step,
            "epoch": extra["epoch"],
            "loss": result.loss,
            "units": result.units,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens": result.tokens,
            "pixels": result.pixels,
            **{k: v for k, v in extra.items() if k != "epoch"},
            "skipped": result.skipped,
        }
        self._append("metrics.jsonl", record)
        if self.board is not None:
            for name in ("loss", "grad_norm", "lr", "tokens_per_s"):
                self.board.add_scalar(f"train/{name}", record[name], result.step)
        self._show(result, record)

    def _show(self, result: StepResult, record: Mapping[str, Any]) -> None:
        left = (record["step_s"] + record["data_wait_s"]) * (self.total - result.step)
        figures = (
            f"loss {result.loss:.4f}  norm {result.grad_norm:.2f}  lr {result.lr:.1e}  "
            f"{record['tokens_per_s']:,.0f} tokens/s  left {format_time(left)}"
        )
        line = f"step {result.step:>{len(str(self.total))}}/{self.total}  {figures}"
        if result.skipped:
            self.say(f"{line}  SKIPPED: {record.get('left_out', 'not finite')}")
        elif self.line is not None:
            self.line.show(result.step, figures)
        elif result.step % self.every == 0 or result.step in (1, self.total):
            self.say(line)

    def evaluation(
        self, step: int, name: str, metrics: Mapping[str, Any], intervals: Mapping[str, Any] | None = None
    ) -> None:
        """Write the figures of one set, with their 95 % intervals where they have some."""
        if not self.main:
            return
        record = {"step": step, "name": name, "metrics": dict(metrics)}
        self._append("eval.jsonl", record | ({"intervals": dict(intervals)} if intervals else {}))
        if self.board is not None:
            for key, value in metrics.items():
                self.board.add_scalar(f"eval/{name}/{key}", value, step)
        self.say(f"eval at step {step}  {name}: " + "  ".join(f"{k} {v:.4f}" for k, v in metrics.items()))

    def close(self) -> None:
        """Let go of the screen and of TensorBoard's file."""
        self.hide()
        if self.board is not None:
            self.board.close()


def _open_board(folder: Path):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"))


def format_time(seconds: float) -> str:
    """1:02:03 or 2:03."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"
