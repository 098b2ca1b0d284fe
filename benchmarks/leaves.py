"""What each replaced leaf of the model is worth: `OMP_NUM_THREADS=1 python benchmarks/leaves.py [STEPS]`, on a CPU.

CPU seconds of a training step (forward, backward, clip, AdamW; full fine-tuning, fp32), each variant in turn on the
same batches in one process, so that a busy machine slows all alike; in brackets the median of its ratios to the whole,
step by step. Pictures and token ids are random: lengths are what matters.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from middle import middle_config
from torch import nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from litchi.batch.positions import forest_positions
from litchi.data.processor import load_processor
from litchi.model import attention
from litchi.model.build import builtin_folder
from litchi.model.family import FAMILIES, part
from litchi.model.forward import LitchiModel
from litchi.model.leaves import Leaves, change_leaves, leaves_out_rows
from litchi.model.scoring import ask_rows
from litchi.model.vision import mark_windowed
from litchi.train.losses import bce
from litchi.types import Batch, VisionSpec

FAMILY = FAMILIES["qwen2_5_vl"]
SWITCHES = tuple(field.name for field in fields(Leaves))


def make_model(name: str) -> nn.Module:
    """A random model: of the shape of the packaged one, or the middle one."""
    folder = builtin_folder()
    config = middle_config(folder) if name == "middle" else Qwen2_5_VLConfig.from_pretrained(folder)
    torch.manual_seed(0)
    hf = Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=torch.float32)
    attention.register()
    hf.set_attn_implementation(attention.NAME)
    ask_rows(part(hf, FAMILY.head))
    mark_windowed(part(hf, FAMILY.vision))
    return hf.train()


@dataclass(frozen=True)
class Shape:
    """Of a sample: prefix with a picture or without, and what follows, each with a picture or without."""

    prefix: int
    children: tuple[int, ...] = ()
    pictured: bool = True  # the prefix
    pictured_children: bool = False


def make_batch(shapes: list[Shape], vocabulary: int, spec: VisionSpec, seed: int, *, chat: bool) -> Batch:
    """Samples side by side; a picture has 2 to 12 merged rows and columns, as one of 56 to 336 pixels a side."""
    draw = np.random.default_rng(seed)
    spans, grids, at, came, rows, runs, groups = [], [], [], [], [], {}, []
    end = features = 0
    for shape in shapes:
        base, first_row = len(spans), len(rows)
        for number, text in enumerate((shape.prefix, *shape.children)):
            start, pictured = end, shape.pictured_children if number else shape.pictured
            if pictured:
                h, w = (int(n) for n in 2 * draw.integers(2, 13, 2))
                tokens = h * w // 4
                runs[start + 1] = (1, h, w)
                grids.append((1, h, w))
                at += range(start + 1, start + 1 + tokens)
                came += range(features, features + tokens)
                features += tokens
                text += tokens
            end = start + text
            spans.append((start, end, base if number else -1))
            if chat:
                rows += range(end - 12, end - 1)
            elif number or not shape.children:
                rows.append(end - 1)
        if not chat:
            groups.append((first_row, len(rows)))
    patches = sum(h * w for _, h, w in grids)
    targets = draw.integers(0, vocabulary, len(rows)) if chat else (draw.random(len(rows)) < 0.3).astype(np.float32)
    return Batch(
        ids=torch.from_numpy(draw.integers(0, 800, end)),
        positions=torch.from_numpy(forest_positions(spans, runs, spec.merge)),
        spans=tuple(spans),
        pixels=torch.from_numpy(draw.integers(0, 256, (patches, 3 * spec.patch**2), dtype=np.uint8)),
        grids=tuple(grids),
        image_at=torch.tensor(at, dtype=torch.int64),
        image_from=torch.tensor(came, dtype=torch.int64),
        rows=torch.tensor(rows),
        targets=torch.from_numpy(targets),
        groups=tuple(groups),
        doc_ids=(),
        samples=(),
        units=len(rows),
    )


def draw_shapes(work: str, count: int, seed: int) -> list[Shape]:
    draw = np.random.default_rng(seed)
    if work == "chat":
        return [Shape(int(draw.integers(35, 60))) for _ in range(count)]
    if work == "rerank":  # a text query and three documents with a picture
        return [Shape(45, tuple(int(n) for n in draw.integers(12, 20, 3)), False, True) for _ in range(count)]
    return [Shape(45, tuple(int(n) for n in draw.integers(20, 60, 16)), True, False) for _ in range(count)]


class Variant:
    """The model with some leaves, the weights and the optimizer shared with the other variants."""

    def __init__(self, hf: nn.Module, leaves: Leaves):
        self.hf = hf
        plain = {module: type(module) for module in hf.modules()}
        change_leaves(hf, FAMILY, leaves)
        self.classes = {module: type(module) for module in hf.modules()}
        for module, kind in plain.items():
            module.__class__ = kind
        self.times: list[float] = []

    def step(self, model: LitchiModel, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
        for module, kind in self.classes.items():
            module.__class__ = kind
        model.leaves_out = leaves_out_rows(part(self.hf, FAMILY.language_layers)[-1])  # type: ignore[index]
        start = time.process_time()
        loss = model(batch).loss / batch.units
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.times.append(time.process_time() - start)
        return loss.item()


def measure(name: str, work: str, count: int, steps: int) -> None:
    hf = make_model(name)
    spec = load_processor(builtin_folder()).vision
    vocabulary = int(hf.config.text_config.vocab_size)
    scored = {} if work == "chat" else {"words": (3, 4), "score_loss": bce}
    model = LitchiModel(hf, FAMILY, spec, **scored)
    optimizer = torch.optim.AdamW([p for p in hf.parameters()], lr=1e-5, fused=True)
    whole, none = Leaves(), Leaves(**dict.fromkeys(SWITCHES, False))
    found = {"all leaves": whole, **{f"without {s}": replace(whole, **{s: False}) for s in SWITCHES}, "none": none}
    variants = {title: Variant(hf, leaves) for title, leaves in found.items()}
    batches = [make_batch(draw_shapes(work, count, n), vocabulary, spec, n, chat=work == "chat") for n in range(steps)]
    order = list(variants.values())
    for n, batch in enumerate(batches):
        for k in range(len(order)):
            order[(n + k) % len(order)].step(model, optimizer, batch)
    base = variants["all leaves"].times[1:]
    cells = []
    for variant in variants.values():
        times = variant.times[1:]
        ratio = statistics.median(t / b for t, b in zip(times, base, strict=True))
        cells.append(f"{1000 * statistics.median(times):,.0f} ({ratio - 1:+.1%})")
    tokens = round(sum(b.tokens for b in batches) / steps)
    patches = round(sum(len(b.pixels) for b in batches) / steps)
    print(f"| {name}, {work} {count} | {tokens:,} | {patches:,} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    print("| model, work | tokens | patches | all, ms | " + " | ".join(f"no {s}" for s in SWITCHES) + " | none |")
    print("|---" * (5 + len(SWITCHES)) + "|")
    for name, work, count in (
        ("tiny", "chat", 16),
        ("tiny", "rerank", 4),
        ("tiny", "sixteen texts", 1),
        ("middle", "chat", 4),
        ("middle", "sixteen texts", 1),
    ):
        measure(name, work, count, steps if name == "tiny" else max(4, steps // 2))


if __name__ == "__main__":
    main()
