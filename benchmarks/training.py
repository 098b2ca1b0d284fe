"""What a training run reaches on this machine, measured by plain `train_run` calls: a Markdown table.

    OMP_NUM_THREADS=1 python benchmarks/training.py [CASE...]

Cases: chat, rerank, picture, middle, two, data, lists, same; by default all.

Each run has a process of its own, which measures the rate of a matrix product (1,024 wide, fp32, one thread) before and
after; MFU is (FLOPs of the plan's rows, `model/flops.py`) / (CPU time x that rate). The first steps are left out.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

WARM = 3  # steps left out
COLORS = ("red", "green", "blue", "yellow", "black", "white", "orange", "purple")
FULL = "trainable={vision: full, merger: full, language: full}"
PLAIN = (
    "data.pixels={min: 3136, max: 12845056}",
    "train.precision=fp32",
    "train.export=never",
    "track=[]",
    "optim.schedule=constant",
    "optim.warmup=0",
)
COLUMNS = ("samples/s", "samples/CPU-s", "documents/CPU-s", "tokens/CPU-s", "MFU", "peak MB", "balance", "data wait",
           "start, s")  # fmt: skip


# -------------------------------------------------------------------------------------------------- in the process


def matmul_rate(seconds: float = 0.5) -> float:
    """FLOP/s of products of 1,024 x 1,024 matrices on this thread."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    a @ b
    count, start = 0, time.process_time()
    while time.process_time() - start < seconds:
        a @ b
        count += 1
    return count * 2 * 1024**3 / (time.process_time() - start)


def child(job: dict[str, Any]) -> None:
    """Train once in this process, or as one rank of several, and print the figures."""
    from litchi.config import load_config
    from litchi.dist import start_ranks, stop_ranks
    from litchi.train.loop import train_run

    torch.set_num_threads(1)
    ranks = start_ranks()
    before, start = matmul_rate(), time.time()
    folder = train_run(load_config(None, job["words"]), ranks)
    rate = (before + matmul_rate()) / 2
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    work = plan_flops(job["words"], len(steps), ranks) if job["flops"] else None
    stop_ranks()
    if ranks.is_main:
        begun = time.time() - start - sum(s["step_s"] + s["data_wait_s"] for s in steps)
        print("\nRESULT " + json.dumps({"steps": steps, "rate": rate, "flops": work, "start_s": begun}))


def plan_flops(words: list[str], steps: int, ranks: Any) -> list[float]:
    """FLOPs of each step, by the plan."""
    from litchi.config import load_config
    from litchi.train.setup import prepare_run

    with tempfile.TemporaryDirectory() as folder:
        plan = prepare_run(load_config(None, words), ranks, Path(folder)).plan
    found = []
    for step in range(1, steps + 1):
        picks = [pick for micro in plan.micro_batches(step) for pick in micro]
        works = [plan.corpus.find(row)[1].work(documents) for row, documents, *_ in picks]
        costs = plan.costs
        shared = {n: c for w in works for n, c in costs.picture_costs(w).items()}
        found.append(sum(costs.without_pictures().cost(w) for w in works) + sum(shared.values()))
    return found


# ------------------------------------------------------------------------------------------------------- the cases


def draw_pictures(folder: Path, count: int) -> list[str]:
    import random

    from PIL import Image, ImageDraw

    rng = random.Random(0)
    names = []
    for n in range(count):
        back, front = rng.sample(COLORS, 2)
        picture = Image.new("RGB", (rng.randrange(56, 337), rng.randrange(56, 337)), back)
        ImageDraw.Draw(picture).ellipse([8, 8, *(side - 8 for side in picture.size)], fill=front)
        names.append(f"{n}.png")
        picture.save(folder / names[-1])
    return names


def write_rows(folder: Path, kind: str, count: int = 200, negatives: int = 3) -> Path:
    """Rows of a kind with drawn pictures: chat; text query, picture documents; picture query, text documents; text."""
    import random

    rng = random.Random(1)
    pictures = draw_pictures(folder, 200)
    words = [f"{a} {b}" for a in COLORS for b in COLORS]
    rows: list[dict[str, Any]] = []
    for n in range(count):
        picture = pictures[n % len(pictures)]
        if kind == "chat":
            user = [{"type": "image", "image": picture}, {"type": "text", "text": "Which colours are there?"}]
            rows.append({"messages": [{"role": "user", "content": user},
                                      {"role": "assistant", "content": f"A {rng.choice(words)} one."}]})  # fmt: skip
        elif kind == "pictures":
            others = [{"image": p, "text": "picture"} for p in rng.sample(pictures, negatives)]
            rows.append({"query": rng.choice(words), "pos_doc": {"image": picture, "text": "picture"},
                         "neg_docs": others})  # fmt: skip
        else:
            texts = [" ".join(rng.choices(words, k=rng.randint(3, 8))) for _ in range(negatives + 1)]
            query = {"image": picture, "text": "this"} if kind == "texts" else {"text": rng.choice(words)}
            rows.append({"query": query, "pos_doc": texts[0], "neg_docs": texts[1:]})
    path = folder / f"{kind}{negatives}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run(words: list[str], procs: int = 1, copies: int = 1, *, flops: bool = True) -> list[dict[str, Any]]:
    """Run a training on `procs` ranks, or several of one rank side by side."""
    base = [sys.executable] if procs == 1 else [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node",
                                                str(procs), "--master-port", "29641"]  # fmt: skip
    outs = [tempfile.mkdtemp() for _ in range(copies)]
    jobs = [{"words": [*PLAIN, *words, f"output={out}"], "flops": flops} for out in outs]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen([*base, __file__, "--child", json.dumps(job)], stdout=subprocess.PIPE, text=True, env=env)
        for job in jobs
    ]
    found = []
    for process in processes:
        out, _ = process.communicate()
        found.append(json.loads(next(line for line in out.splitlines() if line.startswith("RESULT "))[7:]))
    return found


def figures(result: dict[str, Any], samples: int, documents: int = 0) -> dict[str, str]:
    """Columns of the table, of the steps behind the first ones."""
    steps = result["steps"][WARM:]
    count = samples * len(steps)
    seconds = sum(s["step_s"] + s["data_wait_s"] for s in steps)
    cpu = sum(s["cpu_s"] for s in steps)
    work = None if result["flops"] is None else sum(result["flops"][WARM:])
    return {
        "samples/s": f"{count / seconds:.1f}",
        "samples/CPU-s": f"{count / cpu:.1f}",
        "documents/CPU-s": f"{count * documents / cpu:.0f}" if documents else "",
        "tokens/CPU-s": f"{sum(s['tokens'] for s in steps) / cpu:,.0f}",
        "MFU": "" if work is None else f"{work / (cpu * result['rate']):.2f}",
        "peak MB": f"{max(max(s['peak_bytes']) for s in steps) / 2**20:,.0f}",
        "balance": f"{statistics.mean(s['balance'] for s in steps):.2f}",
        "data wait": f"{sum(s['data_wait_s'] for s in steps) / seconds:.1%}",
        "start, s": f"{result['start_s']:.1f}",
    }


def show(title: str, result: dict[str, Any], samples: int, documents: int = 0) -> None:
    row = figures(result, samples, documents)
    print(f"| {title} | " + " | ".join(row[c] for c in COLUMNS) + " |", flush=True)


def main(cases: list[str]) -> None:
    from middle import write_middle

    from litchi.model.build import builtin_folder

    folder = Path(tempfile.mkdtemp())
    middle = f"model.path={write_middle(builtin_folder(), folder / 'middle')}"
    chat, pictures = write_rows(folder, "chat"), write_rows(folder, "pictures", 200, 2)
    tiny = "model.path=builtin:tiny"
    talk = ["task=chat", FULL, f"data.train={chat}", "data.workers=0"]
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    command = f"python benchmarks/training.py {' '.join(cases)}"
    print(f"{machine}, {date.today()}, load {os.getloadavg()[0]:.1f}: `{command}`\n")
    print("| run | " + " | ".join(COLUMNS) + " |\n" + "|---" * (len(COLUMNS) + 1) + "|")
    if "chat" in cases:
        words = [*talk, tiny, "train.global_batch_size=16", "train.steps=25"]
        show("`builtin:tiny`, 16 chats with a picture", run(words)[0], 16)
    if "rerank" in cases:
        words = ["task=rerank", FULL, tiny, f"data.train={pictures}", "train.global_batch_size=4", "train.steps=25"]
        show("4 queries, 3 picture documents each", run([*words, "data.workers=0"])[0], 4, 3)
    if "picture" in cases:
        texts = write_rows(folder, "texts", 80, 15)
        words = ["task=rerank", FULL, tiny, f"data.train={texts}", "train.global_batch_size=4", "train.steps=18"]
        show("4 picture queries, 16 text documents each", run([*words, "data.workers=0"])[0], 4, 16)
    if "middle" in cases:
        words = [*talk, middle, "train.global_batch_size=20", "train.micro_batch_tokens=2048", "train.steps=7"]
        show("56 M, chats, 2,048 tokens at once", run(words)[0], 20)
    if "two" in cases:
        words = [*talk, tiny, "train.global_batch_size=16", "train.steps=25"]
        for n, one in enumerate(run(words, copies=2, flops=False)):
            show(f"two alone, side by side: {n + 1}", one, 16)
        both = [*talk, tiny, "train.global_batch_size=32", "train.steps=25"]
        show("two ranks, 16 chats each", run(both, procs=2, flops=False)[0], 32)
    if "data" in cases:
        words = [*talk, tiny, "train.global_batch_size=16", "train.steps=25", "data.workers=2"]
        show("chats, 2 workers", run(words, flops=False)[0], 16)
    if "lists" in cases:
        for negatives in (3, 31):
            rows = write_rows(folder, "plain", 40, negatives)
            words = ["task=rerank", "loss=group_softmax", FULL, middle, f"data.train={rows}", "data.workers=0"]
            words += ["train.global_batch_size=1", "train.micro_batch_tokens=256", "train.steps=6"]
            show(
                f"56 M, a group of 1 + {negatives} in pieces of 256 tokens",
                run(words, flops=False)[0],
                1,
                negatives + 1,
            )
    if "same" in cases:
        words = [*talk, tiny, "train.global_batch_size=16", "train.steps=12", "optim.name=sgd", "optim.lr=0.01"]
        one = run(words, flops=False)[0]
        two = run([*words, "parallel.dp_shard=2"], procs=2, flops=False)[0]
        pairs = [(a["loss"], b["loss"]) for a, b in zip(one["steps"], two["steps"], strict=True)]
        most = max(abs(a - b) / abs(a) for a, b in pairs)
        print(f"\nLosses of `--procs 2 parallel.dp_shard=2` and of one process, 12 SGD steps: within {most:.1e}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
    else:
        main(sys.argv[1:] or ["chat", "rerank", "picture", "middle", "two", "data", "lists", "same"])
