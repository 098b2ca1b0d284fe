"""What the ranks of `test_layouts.py` do: train a few steps under some settings and say what came out."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from litchi.batch.loader import iterate_steps
from litchi.config import load_config
from litchi.dist import Ranks
from litchi.train.losses import make_loss
from litchi.train.optim import rate_at
from litchi.train.setup import prepare_run
from litchi.train.step import train_step

SETTINGS = (  # SGD: AdamW would turn rounding noise in gradients near zero into differences between layouts
    *("model.path=builtin:tiny", "track=[]", "data.workers=0", "data.shuffle=false", "optim.name=sgd"),
    *("optim.lr=0.002", "optim.schedule=constant", "optim.warmup=0", "optim.clip=null"),
)


def run_all(ranks: Ranks, jobs: dict[str, list[str]], unweighed: Sequence[str] = ()) -> dict[str, Any]:
    """Run every job (name -> settings) in these processes, without the weights of some."""
    return {name: run_job(ranks, words, weigh=name not in unweighed) for name, words in jobs.items()}


def run_job(ranks: Ranks, words: list[str], *, weigh: bool = True) -> dict[str, Any]:
    """What it gave; `weights` and `travel` only if they are to be brought together, which takes longer than a step."""
    config = load_config(None, [*SETTINGS, *words])
    with tempfile.TemporaryDirectory() as folder:
        run = prepare_run(config, ranks, Path(folder))
        before = weights(run.wrapped.owner) if weigh else {}
        out: dict[str, Any] = {k: [] for k in ("losses", "norms", "pictures", "micro_batches", "vision", "skipped")}
        out["vision"].append(vision_here(run.wrapped.owner))
        _, count_units = make_loss(config.loss)
        for step, batches, _ in iterate_steps(run.plan, 1, run.derived.steps, workers=0, count_units=count_units):
            rate = rate_at(step, total=run.derived.steps, warmup=0, schedule="constant")
            result = train_step(run.trainer, step, batches, rate)
            out["losses"].append(result.loss)
            out["norms"].append(result.grad_norm)
            out["skipped"].append(result.skipped)
            out["pictures"].append(sum(len(b.grids) for b in batches))
            out["micro_batches"].append(len(batches))
            out["vision"].append(vision_here(run.wrapped.owner))
    out["wrapper"] = run.wrapped.wrapper
    if not weigh:
        return out
    after = weights(run.wrapped.owner)
    travel = {part: 0.0 for part in ("vision", "merger", "language", "lora")}
    for name in before:
        part = "merger" if ".merger." in name else "vision" if ".visual." in name else "language"
        part = "lora" if ".lora_" in name else part
        travel[part] += float((after[name].double() - before[name].double()).abs().sum())
    return {**out, "weights": digest(after, after), "travel": travel}


def weights(owner: torch.nn.Module) -> dict[str, Tensor]:
    """Copies of this rank's weights, the shards of others brought together."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in owner.named_parameters()
    }


def vision_here(owner: torch.nn.Module) -> str:
    """A digest of what this rank holds of the vision part."""
    held = {n: p.detach() for n, p in owner.named_parameters() if ".visual." in n}
    local = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in held.items()}
    return digest(local, local)


def digest(tensors: dict[str, Tensor], names) -> str:
    """Equal if and only if every bit is."""
    total = hashlib.sha256()
    for name in names:
        total.update(tensors[name].numpy().tobytes())
    return total.hexdigest()


def write_rows(path: Path, pictures: list[str | None]) -> str:
    """A chat file, a row for each entry, with the picture it names; the answers' lengths differ."""
    with path.open("w") as file:
        for n, picture in enumerate(pictures):
            text = {"type": "text", "text": f"What is number {n}?"}
            parts = [{"type": "image", "image": picture}, text] if picture else [text]
            answer = " ".join(["apple", "red", "two"][(n + i) % 3] for i in range(1 + 5 * n % 7))
            turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")
    return str(path)
