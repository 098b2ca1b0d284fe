"""metrics.jsonl of a run -> rank0.jsonl of a side-by-side bench, a line a step.

    python benchmarks/peers/records.py FOLDER SAMPLES [DOCUMENTS]

SAMPLES of a step (groups of DOCUMENTS each). `t` and `c` are seconds of the clock and of all ranks' CPU since the
start, at the beginning of the step; nothing is padded, so `tok` and `real` are the same.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

PATCH_PIXELS = 14 * 14


def main(folder: Path, samples: int, documents: int) -> None:
    clock = cpu = 0.0
    with (folder / "rank0.jsonl").open("w", encoding="utf-8") as out:
        for text in (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            step = json.loads(text)
            clock += step["data_wait_s"]
            record = {
                "t": clock,
                "c": cpu,
                "fb": step["step_s"],
                "n": samples * documents,
                "tok": step["tokens"],
                "real": step["tokens"],
                "lab": step["units"],
                "patch": step["pixels"] // PATCH_PIXELS,
                "loss": step["loss"],
                "rss_mb": max(step["peak_bytes"]) // 2**20,
            }
            clock, cpu = clock + step["step_s"], cpu + step["cpu_s"]
            out.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1)
