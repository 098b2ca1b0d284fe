"""Small runs for tests: rows with pictures, training in this process, what a target computes."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from rendering import draw, sample, say

from litchi.batch.collate import collate
from litchi.batch.loader import load_patches, media_grid
from litchi.batch.sources import make_renderer
from litchi.config import load_config
from litchi.data.processor import load_processor
from litchi.model.build import resolve_model
from litchi.model.family import part
from litchi.train.checkpoint import list_checkpoints
from litchi.train.loop import train_run
from litchi.train.target import find_target, open_target, target_config

QUICK = ("data.workers=0", "track=[]", "train.log_every=100", "optim.warmup=1", "optim.schedule=constant")
COLOURS = ("red", "green", "blue", "grey")


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def chat_rows(folder: Path, count: int = 6) -> Path:
    """Conversations, every second one about a picture."""
    rows = []
    for i in range(count):
        pictures = [draw(folder / f"c{i}.png", 70 + 28 * i, 56, seed=i)] if i % 2 else []
        user = {"role": "user", "content": say(f"Which colour is number {i}?", *pictures)}
        answer = {"role": "assistant", "content": f"A {COLOURS[i % 4]} one."}
        rows.append({"id": f"r{i}", "messages": [user, answer], "kind": "picture" if i % 2 else "text"})
    return write_rows(folder / "chat.jsonl", rows)


def rerank_rows(folder: Path, count: int = 6, name: str = "rerank.jsonl") -> Path:
    """Groups of a positive and two negatives; every second query has a picture, one negative too."""
    rows = []
    for i in range(count):
        query: dict = {"text": f"a {COLOURS[i % 4]} hat"}
        if i % 2:
            query["image"] = draw(folder / f"q{i}.png", 84, 56 + 28 * (i % 3), seed=i)
        wrong = {"text": f"{COLOURS[(i + 2) % 4]} shoe", "image": draw(folder / f"d{i}.png", 140, 84, seed=50 + i)}
        rows.append(
            {
                "id": f"q{i}",
                "query": query,
                "pos_doc": f"hat, {COLOURS[i % 4]}",
                "neg_docs": [f"hat, {COLOURS[(i + 1) % 4]}", wrong],
                "kind": "picture" if i % 2 else "text",
            }
        )
    return write_rows(folder / name, rows)


def settings(*words: str):
    return load_config(None, [*QUICK, *words])


def train(ranks, out: Path, *words: str, **more) -> Path:
    """Train in this process into `out`."""
    return train_run(settings("model.path=builtin:tiny", f"output={out}", *words), ranks, **more)


def open_model(name: Path | str, ranks, *words: str):
    """A TARGET opened as the verbs open it: (wrapped, renderer)."""
    target = find_target(str(name))
    config = target_config(target, words, task="chat")
    processor = load_processor(resolve_model(config.model.path))
    return open_target(target, config, ranks), make_renderer(config, processor, ".")


def logits_of(wrapped, renderer, fields: dict) -> tuple[list[int], torch.Tensor]:
    """Ids of a chat row and Litchi's logits of all its tokens."""
    renderer = type(renderer)("chat", renderer.processor)
    one = renderer.render(sample(renderer, fields), lambda media: media_grid(media, renderer))
    batch = collate([one], load_patches([one], renderer), renderer.processor)
    owner = wrapped.owner
    with torch.no_grad():
        return batch.ids.tolist(), part(owner.hf, owner.family.head)(owner.hidden(batch))


def read_json(path: Path):
    return json.loads(path.read_text(encoding="utf-8"))


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def numbers(run: Path) -> list[dict]:
    """What does not depend on the clock, of every line of metrics.jsonl."""
    keys = ("step", "epoch", "loss", "units", "grad_norm", "lr", "tokens", "pixels", "skipped")
    return [{key: row[key] for key in keys} for row in read_rows(run / "metrics.jsonl")]


def state_hashes(run: Path) -> tuple[int, dict[str, str]]:
    """Hashes of the last checkpoint's weights and optimizer state, file by file."""
    last = list_checkpoints(run)[-1]
    return last.step, {name: entry["sha256"] for name, entry in last.manifest["files"].items()}
