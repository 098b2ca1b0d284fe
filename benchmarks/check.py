"""Speed and memory of `litchi data check`, beside the rate at which this machine only decodes the same pictures.

    python benchmarks/check.py [--pictures 6000] [--side 96] [--per-row 1] [--workers 2]
    python benchmarks/check.py --rows 20000 200000      peak memory by number of rows, without pictures

Pictures are drawn once into a temporary folder; every measurement has a cache of its own, so each picture is decoded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from PIL import Image

from litchi.data.media import decode_image
from litchi.types import Media


def draw_pictures(folder: Path, count: int, side: int) -> list[str]:
    """Photo-like JPEGs (smooth with some noise), all different."""
    rng = np.random.default_rng(0)
    paths = []
    for i in range(count):
        coarse = rng.integers(0, 256, (6, 6, 3), np.uint8)
        picture = np.asarray(Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC)).astype(np.int16)
        noisy = np.clip(picture + rng.integers(-8, 9, picture.shape), 0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(folder / f"{i}.jpg", quality=90)
        paths.append(str(folder / f"{i}.jpg"))
    return paths


def decode(path: str) -> int:
    return decode_image(Media("image", path)).shape[0]


def decoding_rate(paths: list[str], workers: int) -> float:
    """Pictures per second of the decoder alone in as many processes."""
    start = time.perf_counter()
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        done = sum(1 for _ in pool.map(decode, paths, chunksize=64))
    return done / (time.perf_counter() - start)


CHECK = """
import json, resource, sys, time
from litchi.config import load_config
from litchi.data.processor import load_processor
from litchi.model.build import BUILTIN, resolve_model
from litchi.prepare.check import check_files, check_report
path, workers = sys.argv[1:]
words = [f"data.train={json.dumps(path)}", "task=chat", f"model.path={BUILTIN}", f"data.workers={workers}"]
config = load_config(None, words, need=("model.path", "data.train"))
processor = load_processor(resolve_model(BUILTIN))
idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
files = check_files(config, processor)
seconds = time.perf_counter() - start
report = check_report(files)
out = {"s": seconds, "rows": report["rows"], "findings": len(report["findings"]), "facts": files[0].facts.nbytes}
out |= {"idle_kib": idle, "peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
out |= {"worker_kib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss}
print(json.dumps(out))
"""


def run_check(path: Path, workers: int, folder: Path) -> dict:
    """`check_files` in a process of its own, with an empty cache."""
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        env = {**os.environ, "LITCHI_CACHE": cache}
        ended = subprocess.run(
            [sys.executable, "-c", CHECK, str(path), str(workers)],
            env=env, check=True, capture_output=True, text=True,
        )  # fmt: skip
    return json.loads(ended.stdout.splitlines()[-1])


def write_rows(path: Path, rows: int, picture) -> None:
    with path.open("w", encoding="utf-8") as file:
        for i in range(rows):
            shown = picture(i)
            asked = {"role": "user", "content": "<image>" * len(shown) + f"What is in picture {i}?"}
            told = {"role": "assistant", "content": f"Thing number {i}."}
            file.write(json.dumps({"messages": [asked, told], "images": shown}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=6000)
    parser.add_argument("--side", type=int, default=96)
    parser.add_argument(
        "--per-row", type=int, default=1, help="pictures of a row: its text costs as much as one or two"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="*")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for rows in asked.rows or ():
            write_rows(folder / f"{rows}.jsonl", rows, lambda i: [])
            found = run_check(folder / f"{rows}.jsonl", asked.workers, folder)
            grown = (found["peak_kib"] - found["idle_kib"]) / 1024
            print(
                f"{rows:,} rows: {found['s']:.1f} s, {found['rows'] / found['s']:,.0f} rows/s, "
                f"{grown:.1f} MiB above the idle process ({found['facts'] / rows:.0f} bytes a row kept), "
                f"a worker {found['worker_kib'] / 1024:.0f} MiB",
                flush=True,
            )
        if asked.rows is not None:
            return
        paths = draw_pictures(folder, asked.pictures, asked.side)
        n = asked.per_row
        write_rows(folder / "rows.jsonl", asked.pictures // n, lambda i: paths[n * i : n * i + n])
        for _ in range(3):
            alone = decoding_rate(paths, asked.workers)
            found = run_check(folder / "rows.jsonl", asked.workers, folder)
            rate = n * found["rows"] / found["s"]
            print(
                f"{asked.pictures:,} pictures of {asked.side} x {asked.side}, {n} a row, {asked.workers} processes: "
                f"check {rate:,.0f}/s, decoder alone {alone:,.0f}/s, ratio {rate / alone:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
