"""`litchi doctor`: what this machine is, whether it can train, and with a CONFIG whether it suffices for that run.

Facts come from probe.py and from three short measurements made here (disk, decoders, all-reduce); verdicts from
diagnosis.py, libraries.py and run_checks.py.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from litchi.config import Config
from litchi.dist import Ranks
from litchi.errors import MachineError, UserError
from litchi.prepare.diagnosis import Check, check_machine
from litchi.prepare.libraries import check_libraries, read_versions
from litchi.prepare.probe import Machine, nearest_folder, read_machine
from litchi.prepare.run_checks import check_files, check_precision, check_run, measure_needs
from litchi.train.durable import format_bytes

WRITE_BYTES, BLOCK_BYTES, WRITE_S = 1 << 28, 1 << 23, 1.5
SLOW_DISK = 100e6  # bytes per second
SUM_BYTES = {"cpu": 1 << 25, "cuda": 1 << 28}
SUM_S = 3.0  # of measuring all-reduce; at most 10 with what it takes to warm up
SUM_LIMIT_S = 120.0  # after which ranks that do not move are ended
SLOW_SUM = {"cpu": 0.1e9, "switch": 4e9, "nvlink": 40e9}  # bytes per second below which something is wrong
PICTURES = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")


def examine(config: Config | None, *, procs: int) -> dict[str, Any]:
    """The JSON answer of `doctor`.

    Args:
        config: of the run to check for; None: the machine alone.
        procs: ranks there will be on this machine.
    """
    folder = nearest_folder(Path(config.output if config else "."))
    machine = read_machine(folder)
    checks = [*check_machine(machine), check_write(folder), *check_decoders(), *check_libraries(read_versions())]
    if config is not None:
        checks += check_for_run(config, machine, procs)
    failed = any(check.verdict == "fail" for check in checks if check.name in ("cuda", "kernels"))
    checks.append(
        Check("all_reduce", "warn", "not measured", "Mend what failed above") if failed else check_sums(machine, procs)
    )
    return {"checks": [asdict(check) for check in checks]}


def check_for_run(config: Config, machine: Machine, procs: int) -> Iterator[Check]:
    """The checks that a CONFIG brings."""
    from litchi.parallel.mesh import choose_layout

    yield from check_files(config)
    if not config.model.path:
        return
    needs = measure_needs(config, gpu=bool(machine.gpus))
    if isinstance(needs, Check):
        yield needs
        yield from check_precision(config, machine)
        return
    half = min(g.total_bytes for g in machine.gpus) / 2 if machine.gpus else float("inf")
    try:
        layout = choose_layout(config.parallel, procs, fits_whole=needs.state_bytes < half)
    except UserError as error:
        yield Check("layout", "fail", error.what, error.remedy)
        return
    shards = layout.dp_shard * layout.tp * layout.pp
    yield from check_run(config, needs, machine, procs=procs, shards=shards)


def format_examination(answer: dict[str, Any]) -> str:
    """The answer for people: a line for each check, its remedy below."""
    wide = max(len(check["name"]) for check in answer["checks"])
    lines = []
    for check in answer["checks"]:
        lines.append(f"{check['verdict']:<4}  {check['name']:<{wide}}  {check['fact']}")
        if check["remedy"]:
            lines.append(f"{'':<{wide + 8}}-> {check['remedy']}")
    counts = {v: sum(c["verdict"] == v for c in answer["checks"]) for v in ("ok", "warn", "fail")}
    return "\n".join([*lines, "", ", ".join(f"{n} {verdict}" for verdict, n in counts.items())])


# ------------------------------------------------------------------------------------------------- disk and decoders


def check_write(folder: Path) -> Check:
    """Write a file for a moment, to the disk itself, and remove it."""
    try:
        rate = measure_write(folder)
    except OSError as error:
        return Check("disk_speed", "fail", f"{folder} cannot be written: {error.strerror}", "Choose another output=")
    fact = f"{format_bytes(rate)} a second are written to {folder}"
    if rate < SLOW_DISK:
        return Check("disk_speed", "warn", fact, "Checkpoints take long: save less often, or choose output= elsewhere")
    return Check("disk_speed", "ok", fact)


def measure_write(folder: Path) -> float:
    """Bytes per second, flushed; at most 256 MiB or a second and a half of it. Nothing is left."""
    block = os.urandom(BLOCK_BYTES)
    written, start = 0, time.perf_counter()
    with tempfile.TemporaryFile(dir=folder) as file:
        while written < WRITE_BYTES and time.perf_counter() - start < WRITE_S:
            written += file.write(block)
            file.flush()
            os.fsync(file.fileno())
    return written / (time.perf_counter() - start)


def check_decoders() -> Iterator[Check]:
    """Encode and decode a small picture in every usual form, and ask PyAV for its video decoders."""
    bad = {name: why for name in PICTURES if (why := _try_picture(name))}
    if bad:
        fact = "; ".join(f"{name} {why}" for name, why in bad.items())
        yield Check("pictures", "warn", f"Pillow cannot decode {fact}", "pip install --force-reinstall pillow")
    else:
        yield Check("pictures", "ok", f"Pillow decodes {', '.join(PICTURES)}")
    import av

    wanted = ("h264", "hevc", "vp9", "av1", "mpeg4")
    missing = [name for name in wanted if name not in av.codecs_available]
    if missing:
        fact = f"PyAV {av.__version__} has no {', '.join(missing)}"
        yield Check("videos", "warn", fact, "pip install --force-reinstall av")
    else:
        yield Check("videos", "ok", f"PyAV {av.__version__} decodes {', '.join(wanted)}")


def _try_picture(name: str) -> str | None:
    """None, or why this form of picture does not come back."""
    import numpy as np
    from PIL import Image

    stream = io.BytesIO()
    try:
        Image.new("RGB", (16, 16), (200, 30, 30)).save(stream, name)
        with Image.open(io.BytesIO(stream.getvalue())) as picture:
            red, green, _ = np.asarray(picture.convert("RGB"))[8, 8]
    except (OSError, KeyError) as error:
        return f"({error})"
    return None if red > 150 > green else "(its colours change)"


# -------------------------------------------------------------------------------------------------------- all-reduce


def check_sums(machine: Machine, procs: int) -> Check:
    """Start the ranks, let them sum for a few seconds, and judge rate and result."""
    if procs == 1:
        return Check("all_reduce", "ok", "one rank: nothing is exchanged (--procs N measures N ranks)")
    from litchi.parallel.launch import run_ranks

    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "sums.json"
        try:
            status = run_ranks(["doctor", "--job", str(file)], procs)
        except UserError as error:
            return Check("all_reduce", "fail", f"{procs} ranks could not sum: {error.what}", error.remedy)
        if status or not file.is_file():
            remedy = "What the ranks said stands above; NCCL_DEBUG=INFO says more, NCCL_P2P_DISABLE=1 may help"
            return Check(
                "all_reduce", "fail", f"{procs} ranks ended with status {status} before they had summed", remedy
            )
        return judge_sums(json.loads(file.read_text(encoding="utf-8")), machine.links)


def judge_sums(measured: dict[str, Any], links: Sequence[Sequence[str]]) -> Check:
    """A verdict on what ranks measured. Pure."""
    ranks, rate, device = measured["ranks"], measured["bytes_per_s"], measured["device"]
    fact = f"{format_bytes(rate)} a second between {ranks} ranks ({'NCCL' if device == 'cuda' else 'gloo'}, all-reduce "
    fact += f"of {format_bytes(measured['bytes'])}, bus rate)"
    if not measured["right"]:
        remedy = "NCCL_P2P_DISABLE=1, and turn ACS off or the IOMMU to pass-through in the firmware"
        return Check("all_reduce", "fail", f"sums are wrong: {fact}", remedy)
    joined = {link for row in links for link in row} - {"self"}
    kind = "cpu" if device == "cpu" else "nvlink" if joined == {"nvlink"} else "switch"
    if rate < SLOW_SUM[kind]:
        remedy = "Look at the topology above" if device == "cuda" else "End other work; GLOO_SOCKET_IFNAME=lo"
        return Check("all_reduce", "warn", f"{fact}; {format_bytes(SLOW_SUM[kind])} is the least to expect", remedy)
    return Check("all_reduce", "ok", fact)


def sum_in_ranks(ranks: Ranks, file: Path) -> None:
    """What each rank of `check_sums` does; rank 0 writes what was found."""
    late = threading.Timer(SUM_LIMIT_S, _too_late)
    late.daemon = True
    late.start()
    found = measure_sums(ranks)
    late.cancel()
    if ranks.is_main:
        file.write_text(json.dumps(found), encoding="utf-8")


def _too_late() -> None:
    print(f"error: an all-reduce did not end within {SUM_LIMIT_S:.0f} s", file=sys.stderr, flush=True)
    os._exit(MachineError.status)


def measure_sums(ranks: Ranks, seconds: float = SUM_S) -> dict[str, Any]:
    """Sum a buffer over all ranks again and again. The bus rate is 2 (n - 1) / n x bytes / time of one sum, which does
    not depend on the number of ranks. Collective; the same on every rank."""
    import torch
    import torch.distributed as dist

    from litchi.dist import max_ranks

    kind, world = ranks.device.type, ranks.world
    size = SUM_BYTES[kind]
    buffer = torch.full((size // 4,), float(ranks.rank + 1), device=ranks.device)
    dist.all_reduce(buffer)  # connects
    right = bool((buffer == world * (world + 1) / 2).all())
    buffer.zero_()

    def go(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            dist.all_reduce(buffer)
        if kind == "cuda":
            torch.cuda.synchronize()
        return max_ranks(time.perf_counter() - start)[0]

    go(1)
    times = max(1, min(1000, round(seconds / go(1))))
    each = go(times) / times
    wrong = max_ranks(float(not right))[0]
    rate = 2 * (world - 1) / world * size / each
    return {"ranks": world, "device": kind, "bytes": size, "bytes_per_s": rate, "right": not wrong}
