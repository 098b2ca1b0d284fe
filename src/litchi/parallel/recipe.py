"""What a planner has to know of a run: its settings and the mean sample of its data, or of a stated mix.

Config, config.json and indexed rows in; a `Recipe` out, and what is chosen from its estimates. Pure but for the index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from litchi.batch.cost import CostModel, Work, forest_pairs
from litchi.batch.loader import Corpus
from litchi.batch.sources import index_sources
from litchi.config import Config, resolve_micro_batch_tokens
from litchi.data.processor import load_processor
from litchi.model.build import DTYPES, resolve_model
from litchi.model.flops import read_costs
from litchi.model.precision import COMPUTE
from litchi.parallel.estimate import Estimate, Recipe, estimate
from litchi.parallel.machines import Machine
from litchi.parallel.mesh import Layout, offer_layouts

MIX = Work(
    tokens=700, pairs=forest_pairs(700), rows=100, grids=((1, 42, 42),)
)  # a picture of 588 x 588, text, an answer
MIX_SAMPLES = 10_000


@dataclass(frozen=True)
class Load:
    """The data: samples of an epoch, and the mean one."""

    samples: int
    tokens: float
    rows: float
    patches: float
    flops: float
    longest: int
    from_data: bool


def read_load(config: Config, model: Mapping[str, Any]) -> Load:
    """From the files of `data.train` where there are any, else `MIX`."""
    if not config.data.train:
        patches = sum(t * h * w for t, h, w in MIX.grids)
        return Load(MIX_SAMPLES, MIX.tokens, MIX.rows, patches, _costs(config, model).cost(MIX), MIX.tokens, False)
    folder = resolve_model(config.model.path)
    corpus = index_sources(config, config.data.train, load_processor(folder), by_curriculum=True)
    return weigh_load(config, model, corpus)


def weigh_load(config: Config, model: Mapping[str, Any], corpus: Corpus) -> Load:
    """The mean sample of indexed rows."""
    costs = _costs(config, model)
    rows = [row for source in corpus.sources for row in source.rows]
    works = [row.work(row.chosen(config.train.seed, 0, config.data.negatives)) for row in rows]
    n = len(works)
    weighted = sum(round(len(s.rows) * w.weight) for s, w in zip(corpus.sources, config.data.train, strict=True))
    return Load(
        samples=max(1, weighted),
        tokens=sum(w.tokens for w in works) / n,
        rows=sum(w.rows for w in works) / n,
        patches=sum(t * h * v for w in works for t, h, v in w.grids) / n,
        flops=sum(map(costs.cost, works)) / n,
        longest=max(w.tokens for w in works),
        from_data=True,
    )


def _costs(config: Config, model: Mapping[str, Any]) -> CostModel:
    scored, twice = config.task == "rerank", config.train.checkpoint_activations
    return read_costs(model, scored=scored, trainable=config.trainable, checkpoint=twice)


def make_recipe(config: Config, model: Mapping[str, Any], load: Load, *, device: str = "cuda") -> Recipe:
    """What the planner has to know of a run, with `auto` as it comes out on a GPU that computes in bf16."""
    parts = (config.trainable.vision, config.trainable.merger, config.trainable.language, config.trainable.head)
    precision = config.train.precision
    if precision == "auto":
        precision = "fp32" if device == "cpu" else "bf16"
    light = device == "cuda" and precision != "fp32" and all(p.mode != "full" for p in parts)
    held = "float64" if precision == "fp64" else config.model.dtype
    return Recipe(
        config=model,
        trainable=config.trainable,
        held=DTYPES[held] if held != "auto" else torch.bfloat16 if light else torch.float32,
        computed=COMPUTE[precision],
        global_batch=config.train.global_batch_size,
        tokens=load.tokens,
        rows=load.rows,
        patches=0.0 if config.train.features == "precompute" else load.patches,
        flops=load.flops,
        longest=load.longest,
        micro_batch_tokens=resolve_micro_batch_tokens(config, device),
        optimizer=config.optim.name,
        checkpoint=config.train.checkpoint_activations,
        rerank=config.task == "rerank",
        nf4=config.model.quantize == "nf4",
        int8=config.model.quantize == "int8",
        offload=config.train.offload,
        device=device,
    )


def best_layout(recipe: Recipe, ranks: int, machine: Machine, *, cards: int = 8) -> Estimate | None:
    """The fastest layout that fits, for `parallel: auto` on a GPU; None where nothing fits.

    Axes that cut the model are taken only where copies and shards do not fit: with them evaluation can do less.
    """
    offered = offer_layouts(recipe.config, ranks, machine=cards)
    if recipe.offload == "all":
        offered = [layout for layout in offered if layout.wrapper in ("FSDP2", "HSDP")]

    def cuts(layout: Layout) -> tuple[bool, ...]:
        return layout.pp > 1, layout.cp > 1, layout.tp > 1

    for _, some in groupby(sorted(offered, key=cuts), key=cuts):
        found = [estimate(recipe, layout, machine, cards=cards) for layout in some]
        if best := min((e for e in found if e.fits), key=lambda e: e.step_s, default=None):
            return best
    return None


def best_micro_batch(recipe: Recipe, layout: Layout, machine: Machine, most: int = 65_536) -> int:
    """The largest power of two of tokens whose peak the planner gives room; an upper bound for a search. 0 if none."""
    sizes = [2**n for n in range(9, most.bit_length()) if 2**n <= most]
    fitting = [n for n in sizes if estimate(replace(recipe, micro_batch_tokens=n), layout, machine).fits]
    return max(fitting, default=0)
