"""Predicted against measured peak memory, of small layouts that really run here: `python benchmarks/planner.py`.

Each run is a process of its own: its resident memory once all libraries are loaded, then the highest it had in two
steps of two micro-batches (so that gradients and the optimizer's state are there), less that. Prediction and run have
the same settings and rows; only the prediction sees no values. CPU and gloo in fp32; where there is a GPU, bf16 and
`torch.cuda.max_memory_allocated` against the prediction without its reserve.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FULL = "trainable={vision: full, merger: full, language: full}"
LORA = "trainable={language: lora, lora: {rank: 16}}"
FROZEN = "trainable={language: full}"
MERGER = "trainable={merger: full}"
CASES = {  # name: (ranks, settings)
    "full, 1,024 tokens": (1, (FULL, "train.micro_batch_tokens=1024")),
    "full, 2,048 tokens": (1, (FULL, "train.micro_batch_tokens=2048")),
    "full, 4,096 tokens": (1, (FULL, "train.micro_batch_tokens=4096")),
    "full, checkpointed": (1, (FULL, "train.micro_batch_tokens=4096", "train.checkpoint_activations=true")),
    "vision frozen": (1, (FROZEN, "train.micro_batch_tokens=2048")),
    "vision frozen, sgd": (1, (FROZEN, "train.micro_batch_tokens=2048", "optim.name=sgd")),
    "projector alone": (1, (MERGER, "train.micro_batch_tokens=2048")),
    "LoRA": (1, (LORA, "train.micro_batch_tokens=2048")),
    "LoRA, checkpointed": (1, (LORA, "train.micro_batch_tokens=4096", "train.checkpoint_activations=true")),
    "full, optimizer apart": (1, (FULL, "train.micro_batch_tokens=2048", "train.offload=optimizer")),
    "DDP 2": (2, (FULL, "train.micro_batch_tokens=2048", "parallel={dp_replicate: 2}")),
    "FSDP2 2": (2, (FULL, "train.micro_batch_tokens=2048", "parallel={dp_shard: 2}")),
}


def words(folder: Path, case: str, batch: int) -> list[str]:
    return [
        "task=chat", f"model.path={folder}/model", f"data.train={folder}/rows.jsonl", "track=[]", "data.workers=0",
        f"train.global_batch_size={batch}", "train.steps=2", *CASES[case][1],
    ]  # fmt: skip


def write_inputs(folder: Path) -> None:
    """The middle model, and rows of a picture and a text of some hundred tokens."""
    import numpy as np
    from middle import write_middle
    from PIL import Image

    from litchi.model.build import builtin_folder

    write_middle(builtin_folder(), folder / "model")
    draw, rows = np.random.default_rng(0), []
    for n in range(96):
        pixels = draw.integers(0, 256, (224, 280, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{n}.png")
        text = " ".join(draw.choice(["apple", "red", "two", "tree", "cup"], 150))
        parts = [{"type": "image", "image": f"{n}.png"}, {"type": "text", "text": text}]
        rows.append({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": text}]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def measure(folder: Path, case: str, batch: int) -> None:
    """One rank: take the steps, print what they took above the loaded process."""
    import torch
    import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl

    from litchi.batch.loader import iterate_steps
    from litchi.config import load_config
    from litchi.parallel.launch import join_ranks
    from litchi.train.losses import make_loss
    from litchi.train.metrics import status_bytes
    from litchi.train.setup import prepare_run
    from litchi.train.step import train_step

    if "lora" in " ".join(CASES[case][1]):
        import peft  # noqa: F401
    assert transformers
    (torch.randn(512, 512, requires_grad=True) @ torch.randn(512, 512)).sum().backward()
    ranks = join_ranks()
    idle = status_bytes("VmRSS")
    config = load_config(None, words(folder, case, batch))
    with tempfile.TemporaryDirectory() as out:
        run = prepare_run(config, ranks, Path(out))
        _, count_units = make_loss(config.loss)
        for step, batches, _ in iterate_steps(run.plan, 1, 2, workers=0, count_units=count_units):
            train_step(run.trainer, step, batches, 1.0)
    on_gpu = ranks.device.type == "cuda"
    if ranks.is_main:
        print("PEAK", torch.cuda.max_memory_allocated() if on_gpu else status_bytes("VmHWM") - idle, flush=True)
    os._exit(0)


def predict(folder: Path, case: str, batch: int) -> None:
    import torch

    from litchi.config import load_config
    from litchi.model.build import read_config
    from litchi.parallel.estimate import estimate
    from litchi.parallel.machines import find_machine
    from litchi.parallel.mesh import choose_layout
    from litchi.parallel.recipe import make_recipe, read_load

    config = load_config(None, words(folder, case, 1))
    model = read_config(folder / "model")
    load = read_load(config, model)
    batch = 2 * CASES[case][0] * max(1, int(config.train.micro_batch_tokens // load.tokens))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    recipe = make_recipe(load_config(None, words(folder, case, batch)), model, load, device=device)
    layout = choose_layout(config.parallel, CASES[case][0], fits_whole=True)
    found = estimate(recipe, layout, find_machine("h200") if device == "cuda" else None)
    peak = found.peak_bytes - (found.parts["reserve"] if device == "cuda" else 0.0)
    print("PLAN", json.dumps({"peak": peak, "parts": found.parts, "micro": found.micro_batches, "batch": batch}))


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def call(role: str, folder: Path, case: str, batch: int = 1) -> str:
    ranks = CASES[case][0] if role == "measure" else 1
    command = [sys.executable, __file__, "--role", role, "--folder", str(folder), "--case", case, "--batch", str(batch)]
    if ranks > 1:
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *command[1:]]
    done = subprocess.run(command, capture_output=True, text=True)
    word = {"measure": "PEAK ", "predict": "PLAN "}[role]
    found = [line[len(word) :] for line in done.stdout.splitlines() if line.startswith(word)]
    if not found:
        raise SystemExit(f"{case}: {done.stdout[-500:]}{done.stderr[-1500:]}")
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--role", choices=("measure", "predict"))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--case")
    parser.add_argument("--batch", type=int, default=1)
    args = parser.parse_args()
    if args.role:
        {"measure": measure, "predict": predict}[args.role](args.folder, args.case, args.batch)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        print("| layout | predicted, MB | measured, MB | off |\n|---|---|---|---|")
        near, done = 0, 0
        for case in CASES if not args.case else [args.case]:
            if 0 < count_gpus() < CASES[case][0]:
                print(f"| {case} | | not run: {count_gpus()} GPU | |", flush=True)
                continue
            planned = json.loads(call("predict", folder, case))
            measured = int(call("measure", folder, case, planned["batch"]))
            off = planned["peak"] / measured - 1
            near, done = near + (abs(off) <= 0.1), done + 1
            print(f"| {case} | {planned['peak'] / 1e6:,.0f} | {measured / 1e6:,.0f} | {100 * off:+.0f} % |", flush=True)
            print(
                {k: round(v / 1e6) for k, v in planned["parts"].items()}, planned["micro"], file=sys.stderr, flush=True
            )
        print(f"\n{near} of {done} within 10 %")


if __name__ == "__main__":
    main()
