"""Whether a machine suffices for a run: model, data, precision, memory, RAM, cores and disk, before anything is loaded.

Config -> measure_needs (the model on the meta device, rows counted) -> Needs -> check_run (pure) -> [Check]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from litchi.config import Config
from litchi.errors import UserError
from litchi.prepare.diagnosis import BF16, FLASH, Check
from litchi.prepare.probe import Machine
from litchi.train.durable import format_bytes
from litchi.train.reach import try_paths
from litchi.train.resume import Room, plan_room

PROCESS_BYTES = 0.8e9  # of RAM a rank holds with its libraries, before it has a model
WORKER_BYTES = 0.2e9  # a process that loads samples shares most with its rank
CLOSE = 0.7  # of memory for weights, gradients and optimizer; activations need the rest
ENDLESS = 10**9  # steps of a run whose rows nobody has counted


@dataclass(frozen=True)
class Needs:
    """What a run asks for. Bytes are of the whole model, before ranks share it."""

    trains: int
    total: int
    weights_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    room: Room

    @property
    def state_bytes(self) -> int:
        return self.weights_bytes + self.gradient_bytes + self.optimizer_bytes


def check_files(config: Config) -> Iterator[Check]:
    """Whether the data files can be read; what is in them `litchi data check` says."""
    paths = [source.path for source in (*config.data.train, *config.data.eval)]
    failed = try_paths(paths)
    for path, why in failed.items():
        yield Check("data", "fail", f"{path}: {why}", "Check data.train and data.eval")
    if paths and not failed:
        yield Check("data", "ok", f"{len(paths)} file{'s' * (len(paths) > 1)} can be read")


def measure_needs(config: Config, *, gpu: bool) -> Needs | Check:
    """Build the model without its weights, set what trains, and count. A Check where that cannot be."""
    import torch

    from litchi.model.adapters import apply_trainable
    from litchi.model.build import build_model
    from litchi.parallel.estimate import STATES
    from litchi.train.setup import choose_dtype

    try:
        base = find_base(config.model.path)
        if base is None:
            fact = f"model.path={config.model.path} is not on this machine yet"
            return Check("model", "warn", fact, "The run downloads it; to have it checked do so before: hf download")
        dtype = choose_dtype(config, torch.device("cuda" if gpu else "cpu"))
        loaded = build_model(base, dtype=dtype, quantize=config.model.quantize)
        apply_trainable(loaded, config.trainable)
    except UserError as error:
        return Check("model", "fail", error.what, error.remedy or error.why)
    parameters = list(loaded.hf.parameters())
    trained = [p for p in parameters if p.requires_grad]
    trained_bytes = sum(p.numel() * p.element_size() for p in trained)
    steps, per_epoch = count_steps(config)
    room = plan_room(
        config,
        trains=sum(p.numel() for p in trained),
        total=sum(p.numel() for p in parameters),
        trained_width=max((p.element_size() for p in trained), default=4),
        held_width=parameters[0].element_size(),
        steps=steps,
        per_epoch=per_epoch,
    )
    return Needs(
        trains=sum(p.numel() for p in trained),
        total=sum(p.numel() for p in parameters),
        weights_bytes=sum(p.numel() * p.element_size() for p in parameters),
        gradient_bytes=trained_bytes,
        optimizer_bytes=round(trained_bytes * STATES[config.optim.name]),
        room=room,
    )


def find_base(path: str) -> Path | None:
    """The folder of a model that is on this machine; nothing is downloaded."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    from litchi.model.build import BUILTIN, resolve_model

    if path == BUILTIN or Path(path).is_dir():
        return resolve_model(path)
    if path.count("/") != 1 or path.startswith((".", "/", "~", "modelscope:")):
        return None if path.startswith("modelscope:") else resolve_model(path)  # which says what is wrong
    try:
        return Path(snapshot_download(path, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def count_steps(config: Config) -> tuple[int, int]:
    """Steps of the run and of an epoch, by the lines of its files, bad ones included."""
    files = [Path(source.path) for source in config.data.train]
    if not files or any(file.suffix != ".jsonl" or not file.is_file() for file in files):
        return config.train.steps or ENDLESS, 1
    rows = sum(round(count_lines(Path(source.path)) * source.weight) for source in config.data.train)
    per_epoch = max(1, -(-rows // config.train.global_batch_size))
    return config.train.steps or round(per_epoch * (config.train.epochs or 1)), per_epoch


def count_lines(path: Path) -> int:
    """Lines of a file, read in blocks."""
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 24), b""))


# ------------------------------------------------------------------------------------------------------- the verdicts


def check_run(config: Config, needs: Needs, machine: Machine, *, procs: int, shards: int) -> Iterator[Check]:
    """The run against the machine. Pure.

    Args:
        procs: ranks on this machine.
        shards: over how many of them the weights and their states are spread.
    """
    yield Check("model", "ok", f"{needs.trains:,} of {needs.total:,} parameters train")
    yield from check_precision(config, machine)
    yield _memory(config, needs, machine, procs, shards)
    yield _ram(config, needs, machine, procs)
    yield _workers(config, machine, procs)
    yield _room(needs.room, machine)


def check_precision(config: Config, machine: Machine) -> Iterator[Check]:
    """Whether these GPUs compute in what the settings name, by a kernel they have."""
    lowest = min((gpu.capability for gpu in machine.gpus), default=None)
    wanted, attention = config.train.precision, config.model.attention
    if wanted == "bf16" and lowest is not None and lowest < BF16:
        yield Check("precision", "fail", "train.precision=bf16, which these GPUs do not have", "Use fp16 or fp32")
    elif wanted == "fp16" and lowest is None:
        yield Check("precision", "fail", "train.precision=fp16, and there is no GPU", "Use fp32 or bf16")
    else:
        yield Check("precision", "ok", f"train.precision={wanted}")
    if attention in ("varlen", "flash") and (lowest is None or lowest < FLASH):
        why = "there is no GPU" if lowest is None else "these GPUs are too old for it"
        yield Check("attention", "fail", f"model.attention={attention}, and {why}", "model.attention=auto or sdpa")


def _memory(config: Config, needs: Needs, machine: Machine, procs: int, shards: int) -> Check:
    on_cpu, offload = not machine.gpus, config.train.offload
    away = {"none": 0, "optimizer": needs.optimizer_bytes, "all": needs.state_bytes}[offload]
    each = (needs.state_bytes - (0 if on_cpu else away)) / shards
    if on_cpu:
        free, place = machine.ram_free_bytes / procs, "RAM for each rank"
        each += PROCESS_BYTES
    else:
        free, place = min(g.free_bytes for g in machine.gpus[:procs]), "the fullest GPU"
    parts = f"weights {format_bytes(needs.weights_bytes)}, gradients {format_bytes(needs.gradient_bytes)}, "
    parts += f"optimizer {format_bytes(needs.optimizer_bytes)}, over {shards} rank{'s' * (shards > 1)}"
    fact = f"{format_bytes(each)} of {format_bytes(free)} of {place} before activations ({parts})"
    remedy = "Train with LoRA, model.quantize=nf4, train.offload, or more ranks; litchi plan says which layouts fit"
    if each > free:
        return Check("memory", "fail", fact, remedy)
    if each > CLOSE * free:
        return Check("memory", "warn", fact, f"Activations may not fit. {remedy}")
    return Check("memory", "ok", fact)


def _ram(config: Config, needs: Needs, machine: Machine, procs: int) -> Check:
    workers = procs * config.data.workers
    away = {"none": 0, "optimizer": needs.optimizer_bytes, "all": needs.state_bytes}[config.train.offload]
    needed = procs * PROCESS_BYTES + workers * WORKER_BYTES + (away if machine.gpus else 0)
    fact = f"{procs} rank{'s' * (procs > 1)} and {workers} workers take about {format_bytes(needed)}"
    fact += f" of {format_bytes(machine.ram_free_bytes)} free RAM"
    if needed > machine.ram_free_bytes:
        return Check("run_ram", "fail", fact, "Start fewer ranks, lower data.workers, or free memory")
    return Check("run_ram", "ok", fact)


def _workers(config: Config, machine: Machine, procs: int) -> Check:
    workers = config.data.workers
    fact = f"{procs} x {workers} workers and {procs} rank{'s' * (procs > 1)} on {machine.cores} cores"
    if procs > machine.cores:
        return Check("run_cores", "warn", fact, "Start as many ranks as there are cores at most")
    if procs * workers > machine.cores:
        return Check("run_cores", "warn", fact, f"data.workers={max(1, machine.cores // procs)}")
    return Check("run_cores", "ok", fact)


def _room(room: Room, machine: Machine) -> Check:
    needed = room.count * room.checkpoint_bytes + room.export_bytes
    fact = f"{room.count} checkpoint{'s' * (room.count > 1)} of {format_bytes(room.checkpoint_bytes)} and an export of "
    fact += f"{format_bytes(room.export_bytes)} need {format_bytes(needed)}; "
    fact += f"{format_bytes(machine.disk_free_bytes)} are free"
    if needed > machine.disk_free_bytes:
        return Check("run_disk", "fail", fact, "Make room, lower train.keep, or choose an output= on another disk")
    return Check("run_disk", "ok", fact)
