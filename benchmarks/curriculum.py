"""What a resolution schedule saves, and costs, at equal steps: `python benchmarks/curriculum.py [--steps 400]`.

The catalogue of the demo drawn at `--side` pixels, with a smaller size `--small` for the first third of the steps, as
10 of 30 epochs in the article that claims 40 %. First the processor time of steps of both sizes in turn, in one run, so
that other work on the machine falls on both alike; then, with `--steps`, MRR@10 with the schedule and without, on
combinations that training never shows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import litchi.prepare.catalogue as catalogue
from litchi.config import load_config
from litchi.dist import start_ranks, stop_ranks
from litchi.train.loop import train_run


def stage(until: int | float, side: int) -> str:
    return f"{{until: {until}, pixels: {{min: {side**2}, max: {side**2}}}}}"


def train(folder: Path, ranks, *words: str) -> tuple[list[dict[str, Any]], float | None]:
    """The lines of a run, and its MRR@10."""
    train_run(load_config(None, [*words, f"output={folder}"]), ranks)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    measured = folder / "eval.jsonl"
    found = measured.read_text().splitlines() if measured.exists() else []
    return lines, json.loads(found[-1])["metrics"]["mrr@10"] if found else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", type=int, default=140)
    parser.add_argument("--small", type=int, default=84)
    parser.add_argument("--turns", type=int, default=10, help="steps of each size that are timed")
    parser.add_argument("--steps", type=int, default=0, help="of the runs whose metric is compared")
    parser.add_argument("--vision", default="frozen")
    chosen = parser.parse_args()
    catalogue.draw = partial(catalogue.draw, side=chosen.side)
    folder, ranks = Path(tempfile.mkdtemp()), start_ranks()
    write = partial(catalogue.write_rerank, folder, seed=0)
    rows = 8 * (2 * chosen.turns if not chosen.steps else min(375, chosen.steps))
    data = write(rows=rows, split="train", negatives=7, drawing_seeds=range(1000, 1006))
    words = ["task=rerank", "loss=group_softmax", "model.path=builtin:tiny", f"data.train={data}", "data.workers=0",
             f"trainable={{language: full, vision: {chosen.vision}}}", "train.global_batch_size=8",
             f"data.pixels={{min: {chosen.side**2}, max: {chosen.side**2}}}", "track=[]", "train.export=never",
             "train.log_every=50", "optim={lr: 1e-3, warmup: 20, betas: [0.9, 0.98]}"]  # fmt: skip

    turns = [stage(step, (chosen.side, chosen.small)[step % 2]) for step in range(1, 2 * chosen.turns + 1)]
    lines, _ = train(folder / "turns", ranks, *words, f"train.steps={len(turns)}", f"curriculum=[{', '.join(turns)}]")
    print("| pictures | tokens a step | pixels a step | processor time of a step, median |\n|---|---|---|---|")
    times = []
    for name, first in ((chosen.side, 3), (chosen.small, 2)):  # the first step of a run is no measure
        some = lines[first::2]
        times.append(statistics.median(line["cpu_s"] for line in some))
        figures = (f"{statistics.mean(line[key] for line in some):,.0f}" for key in ("tokens", "pixels"))
        print(f"| {name} x {name} | {' | '.join(figures)} | {times[-1]:.2f} s |")
    print(f"a third of the steps at {chosen.small}: {100 * (1 - times[1] / times[0]) / 3:.0f} % less", flush=True)

    if chosen.steps:
        test = write(rows=240, split="test", negatives=9, drawing_seeds=range(100000, 100040))
        words += [f"data.eval={test}", f"train.steps={chosen.steps}"]
        for name, stages in (("without", "[]"), ("with", f"[{stage(0.3333, chosen.small)}]")):
            lines, found = train(folder / name, ranks, *words, f"curriculum={stages}")
            print(f"{name}: MRR@10 {found:.3f}, {sum(line['cpu_s'] for line in lines):.0f} s", flush=True)
    stop_ranks()


if __name__ == "__main__":
    main()
