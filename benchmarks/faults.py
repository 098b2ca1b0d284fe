"""What a fault costs: a rank killed every so often. `python benchmarks/faults.py [SECONDS PERIOD]`, by default 600 120.

`litchi train --procs 2` on drawn chats; every PERIOD seconds one of its ranks, drawn by a seed, gets SIGKILL. Lost is
the time until the step after the last one done is done; beside it what it should consist of: a start, a step, and the
steps since the checkpoint taken again. Prints a Markdown table.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from training import FULL, write_rows

SAVE_EVERY = 20


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_for(path: Path, step: int, process: subprocess.Popen) -> float:
    """The time at which a step is done."""
    while len(read_steps(path)) < step:
        if process.poll() is not None:
            raise SystemExit(f"the run ended with {process.returncode} before step {step}")
        time.sleep(0.02)
    return time.monotonic()


def main(seconds: float, period: float) -> None:
    folder = Path(tempfile.mkdtemp())
    config, metrics = folder / "run.yaml", folder / "run" / "metrics.jsonl"
    config.write_text("task: chat\n", encoding="utf-8")
    words = [FULL, "model.path=builtin:tiny", f"data.train={write_rows(folder, 'chat')}", "track=[]",
             "train.global_batch_size=16", f"train.save_every={SAVE_EVERY}", "train.steps=1000000"]  # fmt: skip
    command = [sys.executable, "-m", "litchi", "train", str(config), *words, f"output={folder / 'run'}", "--procs", "2"]
    begun, draw, total = time.monotonic(), random.Random(0), 0.0
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    start_s = wait_for(metrics, 1, process) - begun
    print(
        "| killed at step | steps since the checkpoint | lost, s | start + step + steps again, s |\n|---|---|---|---|"
    )
    try:
        for number in range(1, int(seconds // period) + 1):
            time.sleep(max(0.0, begun + number * period - time.monotonic()))
            draw.choice(sorted(psutil.Process(process.pid).children(), key=lambda one: one.pid)).kill()
            killed, done = time.monotonic(), read_steps(metrics)
            lost = wait_for(metrics, len(done) + 1, process) - killed
            step_s = statistics.median(s["step_s"] + s["data_wait_s"] for s in done[-SAVE_EVERY:])
            again = len(done) % SAVE_EVERY
            print(f"| {len(done):,} | {again} | {lost:.1f} | {start_s + step_s * (1 + again):.1f} |", flush=True)
            total += lost
    finally:
        process.terminate()
        process.wait()
    often = f"a save every {SAVE_EVERY} steps = {SAVE_EVERY * step_s:.1f} s"
    print(f"\nA start {start_s:.1f} s, a step {step_s:.2f} s, {often}; {total / seconds:.1%} of the time lost")


if __name__ == "__main__":
    main(*map(float, sys.argv[1:] or ("600", "120")))
