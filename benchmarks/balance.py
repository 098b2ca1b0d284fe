"""How even a step is on many ranks, shared out by count, by tokens, by cost: `python benchmarks/balance.py`.

A synthetic mixture: texts of lognormal length, with no picture (30 %), one (45 %), two (15 %) or four (10 %) of
lognormal area in many shapes; cost is FLOPs of the 7B model. Everything is planned, nothing computed: no GPU, seconds.
"""

from __future__ import annotations

import time

import numpy as np

from litchi.batch.balance import Balance, measure_balance, split_costs
from litchi.batch.cost import Work, forest_pairs
from litchi.config import load_config
from litchi.model.flops import read_costs
from litchi.model.sizes import size_config

LIMIT = 16384  # tokens of a micro-batch
SEEDS = range(5)
TRAINED = {
    "language by LoRA, tower frozen": ("trainable.language=lora", "trainable.vision=frozen", "trainable.merger=frozen"),
    "all in full": ("trainable.language=full", "trainable.vision=full", "trainable.merger=full"),
}


def draw_mixture(count: int, seed: int) -> list[Work]:
    """Samples of a step."""
    draw = np.random.default_rng(seed)
    works = []
    for pictures in draw.choice([0, 1, 2, 4], count, p=[0.3, 0.45, 0.15, 0.1]):
        text = int(np.clip(draw.lognormal(5.5, 1.0), 20, 4000))
        area = np.clip(draw.lognormal(12.5, 0.8, pictures), 56 * 56, 1e6)
        aspect = np.exp(draw.normal(0, 0.3, pictures))
        sides = [np.maximum(2, 2 * np.round(np.sqrt(area * a) / 28).astype(int)) for a in (aspect, 1 / aspect)]
        grids = tuple((1, int(h), int(w)) for h, w in zip(*sides, strict=True))
        tokens = text + sum(h * w // 4 for _, h, w in grids)
        works.append(Work(tokens, forest_pairs(tokens), text // 3, grids))
    return works


def split_all(costs: list[float], tokens: list[int], ranks: int) -> tuple[dict[str, Balance], float]:
    """Balance in cost of each way to share, and the milliseconds the last took."""
    ones = [1.0] * len(costs)
    found = {
        "count": measure_balance(costs, split_costs(ones, ranks, LIMIT, tokens=tokens)),
        "tokens": measure_balance(costs, split_costs(tokens, ranks, LIMIT)),
    }
    start = time.process_time()
    shares = split_costs(costs, ranks, LIMIT, tokens=tokens)
    taken_ms = 1000 * (time.process_time() - start)
    return found | {"cost": measure_balance(costs, shares)}, taken_ms


def main() -> None:
    ways = ("count", "tokens", "cost")
    print("| what trains | samples | ranks | by count | by tokens | by cost | bound | ms |")
    print("|---|---|---|---|---|---|---|---|")
    for name, words in TRAINED.items():
        trainable = load_config(None, ["task=chat", "model.path=builtin:tiny", *words], need=()).trainable
        model = read_costs(size_config("7b"), scored=False, trainable=trainable)
        for samples, ranks in ((256, 8), (1024, 8), (256, 64), (512, 64), (1024, 64), (2048, 64)):
            figures: dict[str, list[Balance]] = {way: [] for way in ways}
            bounds, times_ms = [], []
            for seed in SEEDS:
                works = draw_mixture(samples, seed)
                costs = [model.cost(w) for w in works]
                found, taken_ms = split_all(costs, [w.tokens for w in works], ranks)
                for way in ways:
                    figures[way].append(found[way])
                bounds.append(max(1.0, max(costs) * ranks / sum(costs)))
                times_ms.append(taken_ms)
            cells = [
                f"{np.mean([b.rank for b in figures[way]]):.3f} / {np.mean([b.micro for b in figures[way]]):.3f}"
                for way in ways
            ]
            row = [name, f"{samples:,}", ranks, *cells, f"{np.mean(bounds):.3f}", f"{np.median(times_ms):.0f}"]
            print("| " + " | ".join(map(str, row)) + " |")


if __name__ == "__main__":
    main()
