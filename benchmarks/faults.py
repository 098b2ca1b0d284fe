"""What a fault costs: a rank killed every so often. `python benchmarks/faults.py [SECONDS PERIOD]`, by default 600 120.

`litchi train --procs 2` trains a model of 40 M parameters in full on drawn chats and saves every 20 steps; every PERIOD
seconds one of its ranks, drawn by a seed, gets SIGKILL. Lost is the time until the step behind the last one done is
done. It should be at most a start, a step and, on average, half of the time between two saves, since a kill comes
anywhere between them. Prints that as a Markdown table, and for how long saves made the run stand still.
"""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import psutil
from middle import write_middle
from training import FULL, write_rows

SAVE_EVERY = 20
SAVED = re.compile(r"checkpoint of step [\d,]+: (.*?) in ([\d.]+) s, waited ([\d.]+) s")


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
    from transformers import AutoConfig

    from litchi.model.build import builtin_folder
    from litchi.train.checkpoint import list_checkpoints

    folder = Path(tempfile.mkdtemp())
    tiny = builtin_folder()
    vocabulary = AutoConfig.from_pretrained(tiny).text_config.vocab_size
    base = write_middle(tiny, folder / "base", vocabulary=vocabulary)
    config, metrics, log = folder / "run.yaml", folder / "run" / "metrics.jsonl", folder / "log.txt"
    config.write_text("task: chat\n", encoding="utf-8")
    words = [FULL, f"model.path={base}", f"data.train={write_rows(folder, 'chat')}", "track=[]",
             "train.global_batch_size=4", f"train.save_every={SAVE_EVERY}", "train.steps=1000000"]  # fmt: skip
    command = [sys.executable, "-m", "litchi", "train", str(config), *words, f"output={folder / 'run'}", "--procs", "2"]
    print(f"{date.today()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before it began\n")
    begun, draw, lost = time.monotonic(), random.Random(0), []
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        start_s = wait_for(metrics, 1, process) - begun
        print("| killed at step | lost, s | start + step + steps since the save, s |\n|---|---|---|", flush=True)
        for number in range(1, int(seconds // period) + 1):
            time.sleep(max(0.0, begun + number * period - time.monotonic()))
            draw.choice(sorted(psutil.Process(process.pid).children(), key=lambda one: one.pid)).kill()
            killed, done = time.monotonic(), read_steps(metrics)
            newest = max((one.step for one in list_checkpoints(folder / "run")), default=0)
            lost.append(wait_for(metrics, len(done) + 1, process) - killed)
            step_s = statistics.median(s["step_s"] + s["data_wait_s"] for s in done[-SAVE_EVERY:])
            again = len(done) - newest  # a save under way does not count yet
            parts = f"{start_s:.1f} + {step_s:.1f} + {step_s * again:.1f} = {start_s + step_s * (1 + again):.1f}"
            print(f"| {len(done):,} | {lost[-1]:.1f} | {parts} |", flush=True)
    finally:
        process.terminate()
        process.wait()
    between = SAVE_EVERY * statistics.median(s["step_s"] + s["data_wait_s"] for s in read_steps(metrics))
    limit = start_s + between / SAVE_EVERY + between / 2
    print(
        f"\nAt most a start, a step and half of the {between:.1f} s between two saves: {limit:.1f} s; on average"
        f" {statistics.mean(lost):.1f} s were lost, {sum(one <= limit for one in lost)} of {len(lost)} times less"
        f" than that; {sum(lost) / seconds:.1%} of the time"
    )
    saves = SAVED.findall(log.read_text(encoding="utf-8"))
    waits = [float(waited) for *_, waited in saves]
    print(
        f"\n{len(saves)} saves of {saves[-1][0]}: they counted after"
        f" {statistics.median(float(took) for _, took, _ in saves):.1f} s; the run stood still for {min(waits):.2f} to"
        f" {max(waits):.2f} s, on average {statistics.mean(waits) / (between + statistics.mean(waits)):.1%} of the time"
    )


if __name__ == "__main__":
    main(*map(float, sys.argv[1:] or ("600", "120")))
