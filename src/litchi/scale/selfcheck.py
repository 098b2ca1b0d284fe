"""Every layout against one process, on this machine: the same steps on the same data, and how far the losses differ.

The packaged base is trained for a few steps on drawn rows in one process, then in each layout that the ranks at hand
allow. The table of docs/parallelism.md is what this prints.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from litchi.dist import Ranks

STEPS = 5
SETTINGS = (  # SGD: AdamW would turn rounding noise in gradients near zero into differences between layouts
    *("model.path=builtin:tiny", "track=[]", "data.workers=0", "data.shuffle=false", "optim.name=sgd"),
    *("optim.lr=0.002", "optim.schedule=constant", "optim.warmup=0", "optim.clip=null", "train.precision=fp32"),
    *(f"train.steps={STEPS}", "train.global_batch_size=10"),
)
LAYOUTS: dict[str, dict[str, int | str]] = {
    "DDP 2": {"dp_replicate": 2},
    "FSDP2 2": {"dp_shard": 2},
    "TP 2": {"tp": 2},
    "CP 2": {"cp": 2},
    "PP 2, 1F1B": {"pp": 2},
    "PP 2, GPipe": {"pp": 2, "pp_schedule": "gpipe"},
    "FSDP2 4": {"dp_shard": 4},
    "HSDP 2 x 2": {"dp_replicate": 2, "dp_shard": 2},
    "TP 4": {"tp": 4},
    "CP 4": {"cp": 4},
    "PP 4": {"pp": 4},
    "FSDP2 2 x TP 2": {"dp_shard": 2, "tp": 2},
    "FSDP2 2 x CP 2": {"dp_shard": 2, "cp": 2},
    "FSDP2 2 x PP 2": {"dp_shard": 2, "pp": 2},
    "DDP 2 x TP 2": {"dp_replicate": 2, "tp": 2},
    "DDP 2 x PP 2": {"dp_replicate": 2, "pp": 2},
    "CP 2 x TP 2": {"cp": 2, "tp": 2},
    "CP 2 x PP 2": {"cp": 2, "pp": 2},
    "TP 2 x PP 2": {"tp": 2, "pp": 2},
    "FSDP2 2 x TP 2 x PP 2": {"dp_shard": 2, "tp": 2, "pp": 2},
}
TRAINED = {
    "full": "trainable={vision: full, merger: full, language: full}",
    "LoRA": "trainable={vision: lora, language: lora, lora: {rank: 4}}",
    "LoRA, language": "trainable={language: lora, lora: {rank: 4}}",
}
TASKS = {  # micro-batches so small that every layout accumulates
    "chat": ("task=chat", "data.train={folder}/chat.jsonl", "train.micro_batch_tokens=100"),
    "rerank": ("task=rerank", "data.train={folder}/rerank.jsonl", "train.micro_batch_tokens=400"),
}


@dataclass(frozen=True)
class Job:
    """A few steps of training: what trains, on which task, in which layout."""

    layout: str
    trained: str
    task: str

    def words(self, folder: Path) -> list[str]:
        """Its settings, on the command line."""
        parallel = [f"parallel={json.dumps(LAYOUTS[self.layout])}"] if self.layout in LAYOUTS else []
        task = [word.format(folder=folder) for word in TASKS[self.task]]
        return [*SETTINGS, *task, TRAINED[self.trained], *parallel]

    @property
    def ranks(self) -> int:
        sizes = LAYOUTS.get(self.layout, {})
        return math.prod(size for axis, size in sizes.items() if isinstance(size, int))


@dataclass(frozen=True)
class Ran:
    """What a job gave: the same on all its ranks."""

    losses: list[float]
    norms: list[float]
    wrapper: str

    def differs(self, alone: Ran) -> tuple[float, float]:
        """Largest relative differences of losses and of gradient norms."""
        pairs = (self.losses, alone.losses), (self.norms, alone.norms)
        loss, norm = (max(abs(a - b) / abs(b) for a, b in zip(*pair, strict=True)) for pair in pairs)
        return loss, norm


def run_job(ranks: Ranks, words: Sequence[str]) -> Ran:
    """Take the steps of some settings on these ranks."""
    from litchi.batch.loader import iterate_steps
    from litchi.config import load_config
    from litchi.train.losses import make_loss
    from litchi.train.setup import prepare_run
    from litchi.train.step import train_step

    config = load_config(None, words)
    losses, norms = [], []
    with tempfile.TemporaryDirectory() as folder:
        run = prepare_run(config, ranks, Path(folder))
        _, count_units = make_loss(config.loss)
        for step, batches, _ in iterate_steps(run.plan, 1, run.derived.steps, workers=0, count_units=count_units):
            result = train_step(run.trainer, step, batches, 1.0)
            losses.append(result.loss)
            norms.append(result.grad_norm)
        run.log.close()
    return Ran(losses, norms, run.wrapped.wrapper)


def run_jobs(ranks: Ranks, folder: str, jobs: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Run jobs of one number of ranks in these processes, one after the other."""
    return [asdict(run_job(ranks, Job(**job).words(Path(folder)))) for job in jobs]


def write_rows(folder: Path) -> None:
    """Ten chat rows and ten groups: text alone, a picture, one shared by rows, in queries and in documents."""
    import numpy as np
    from PIL import Image

    names = []
    for n in range(3):
        pixels = np.random.default_rng(n).integers(0, 256, (56, 56 + 28 * n, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{n}.png")
        names.append(f"{n}.png")

    def content(text: str, picture: str | None) -> dict[str, str]:
        return {"text": text} | ({"image": picture} if picture else {})

    seen = [names[0], None, None, None, None, names[1], names[2], names[0], names[1], names[1]]
    words = ("apple", "red", "two")
    chat, rerank = [], []
    for n, picture in enumerate(seen):
        parts = ([{"type": "image", "image": picture}] if picture else []) + [{"type": "text", "text": f"What is {n}?"}]
        answer = " ".join(words[(n + i) % 3] for i in range(1 + 5 * n % 7))
        chat.append({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]})
        first = content("red apple " * (1 + n % 3), names[n % 3] if n % 3 == 0 else None)
        others = [content("two blue cups", None), content("a green tree", names[n % 3] if n % 4 == 0 else None)]
        rerank.append({"query": content(f"item {n}", seen[n - 3]), "pos_doc": [first], "neg_docs": others})
    for name, rows in (("chat", chat), ("rerank", rerank)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
