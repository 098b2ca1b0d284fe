"""What a layout would take: peak memory of a rank by parts, and the time of a step by a roofline.

Model, what trains, the data's mean sample and a machine in, an `Estimate` for each layout out. States are counted on
the model itself, activations traced (`parallel/trace.py`), traffic by the formulas of `parallel/costs.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from litchi.model.family import find_family
from litchi.model.sizes import read_shape
from litchi.parallel.costs import NF4_BYTES, Work, bubble, count_linears, traffic_bytes
from litchi.parallel.machines import EFFICIENCY, REACHED, Machine
from litchi.parallel.mesh import Layout, gradients_wait
from litchi.parallel.trace import FEW, Kept, Setup, Stream, Taken, make_owner, measure_resident, trace, with_depth

if TYPE_CHECKING:
    from litchi.config import Trainable

CONTEXT = 0.6e9  # of a CUDA process before its first tensor, with cuBLAS's workspace
GROUPS = 0.5e9  # buffers of NCCL
LOST = 0.05  # of activations, to fragments of the allocator
LOADED = 0.08e9  # on the CPU, of one run: 30 MB of code, 52 MB in the buffers MKL keeps
STATES = {"adamw": 2.0, "adamw8bit": 0.5, "sgd": 0.0}  # what an optimizer keeps of a trained fp32 weight's bytes


@dataclass(frozen=True)
class Recipe:
    """What is trained, on what, how.

    Args:
        config: config.json.
        held: dtype of the weights as they lie.
        computed: dtype of the arithmetic.
        optimizer: `adamw`, `adamw8bit` or `sgd`.
        global_batch: samples of a step.
        tokens, rows, patches, flops: of a mean sample; `longest` tokens of the largest.
        micro_batch_tokens: of a rank at once.
    """

    config: Mapping[str, Any]
    trainable: Trainable
    held: torch.dtype
    computed: torch.dtype
    global_batch: int
    tokens: float
    rows: float
    patches: float
    flops: float
    longest: int
    micro_batch_tokens: int
    optimizer: str = "adamw"
    checkpoint: bool = False
    rerank: bool = False
    nf4: bool = False
    int8: bool = False
    offload: str = "none"
    device: str = "cuda"
    known: dict[Any, Taken] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def units(self) -> dict[str, Unit]:
        """Of a layer, a vision block, the rest of the tower, the embedding and the head."""
        return count_units(self)

    @property
    def kind(self) -> str:
        """Recipe of `parallel/costs.py` that is nearest, for traffic."""
        modes = [getattr(self.trainable, part).mode for part in ("language", "merger", "vision", "head")]
        return "full" if modes[0] == "full" else "nf4" if self.nf4 else "lora"


@dataclass(frozen=True)
class Unit:
    """Bytes of weights as they lie and as a layer computes with them; numbers and bytes of those that train."""

    held: float = 0.0
    computed: float = 0.0
    trained: float = 0.0
    trained_bytes: float = 0.0

    def __add__(self, other: Unit) -> Unit:
        return Unit(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __mul__(self, times: float) -> Unit:
        return Unit(*(a * times for a in vars(self).values()))


@dataclass(frozen=True)
class Estimate:
    """A layout: bytes of the fullest rank's peak by part, seconds of a step by what takes them."""

    layout: Layout
    parts: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    step_s: float = math.inf
    micro_batches: int = 0
    why_not: str | None = None

    @property
    def peak_bytes(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.why_not is None

    @property
    def bound(self) -> str:
        """What takes the most of a step: arithmetic, memory or communication."""
        return max(self.seconds, key=lambda k: self.seconds[k]) if self.seconds else ""


def count_units(recipe: Recipe) -> dict[str, Unit]:
    """Weights by unit, read off the model as it is built."""
    setup = Setup("cpu", recipe.held)
    config = with_depth(recipe.config, FEW, FEW)
    owner = make_owner(config, recipe.trainable, setup)
    family = find_family(dict(config), "config.json")
    names = {f"{family.language_layers}.0.": "layer", f"{family.vision_blocks}.0.": "block"}
    others = (f"{family.language_layers}.", f"{family.vision_blocks}.")
    units = {name: Unit() for name in ("layer", "block", "tower", "embedding", "head")}
    for name, p in owner.hf.named_parameters():
        found = next((unit for start, unit in names.items() if name.startswith(start)), None)
        if found is None:
            if name.startswith(others):
                continue
            found = "tower" if name.startswith(f"{family.vision}.") else "embedding"
            found = "head" if name.startswith(f"{family.head}.") else found
        size, n, trains = p.element_size(), p.numel(), p.requires_grad
        units[found] += Unit(size * n, recipe.computed.itemsize * n, n * trains, size * n * trains)
    if recipe.nf4 or recipe.int8:
        linears, each = count_linears(read_shape(recipe.config)), NF4_BYTES if recipe.nf4 else 1.0
        units["layer"] += Unit((each - recipe.held.itemsize) * linears, (each - 2) * linears)
    return units


def estimate(recipe: Recipe, layout: Layout, machine: Machine | None, *, cards: int = 8) -> Estimate:
    """Memory and time of a layout. Pure.

    Args:
        machine: None: this process's CPU, of which memory alone is said.
        cards: of one machine.
    """
    samples = max(1, min(int(recipe.micro_batch_tokens // recipe.tokens), recipe.global_batch // layout.data_ranks))
    per_rank = math.ceil(recipe.global_batch / layout.data_ranks)
    micro = max(math.ceil(per_rank / samples), layout.pp if layout.pp > 1 else 1)
    parts = _states(recipe, layout)
    taken = _activations(recipe, layout, samples)
    parts |= _working(recipe, layout, micro, machine)
    shape = read_shape(recipe.config)
    flight = min(layout.pp, micro)
    layers = math.ceil(shape.layers / layout.pp)
    language, vision = layers * taken.layer * flight, shape.vision_depth * taken.block * flight
    most = {name: getattr(taken, name) for name in ("vision", "language", "logits", "backward")}
    phase = max(most, key=lambda name: most[name])
    extra = {"language": "activations_language", "backward": "activations_language", "vision": "activations_vision"}
    parts["activations_language"], parts["activations_vision"], parts["logits"] = language, vision, 0.0
    parts[extra.get(phase, "logits")] += most[phase]
    activations = language + vision + most[phase]
    if recipe.device == "cuda":
        parts["reserve"] = CONTEXT + GROUPS * (layout.ranks > 1) + LOST * activations
    else:
        tensors = sum(n for name, n in parts.items() if name != "communication")
        parts["reserve"] = LOADED + _resident(recipe, layout, samples, micro) - tensors
    # the update's own passes come when activations are gone: one list of the trained shards, but for a fused one
    if layout.wrapper in ("FSDP2", "HSDP"):
        update = parts["optimizer"] / 2
        parts["optimizer"] += max(0.0, update - activations)
    found = Estimate(layout, parts, micro_batches=micro)
    if machine is None:
        return found
    if found.peak_bytes > machine.memory:
        need = f"needs {found.peak_bytes / 1e9:.0f} GB of {machine.memory / 1e9:.0f}"
        found = replace(found, why_not=need)
    if recipe.global_batch < layout.data_ranks:
        found = replace(found, why_not=f"{recipe.global_batch} samples a step are fewer than {layout.data_ranks} ranks")
    if (recipe.nf4 or recipe.int8) and layout.tp > 1:
        found = replace(found, why_not="packed weights are not cut by tp")
    seconds, step = _time(recipe, layout, machine, cards, micro, activations)
    return replace(found, seconds=seconds, step_s=step)


def _stages(recipe: Recipe, layout: Layout) -> list[tuple[int, Unit, Unit]]:
    """Of each stage: layers, one as tp leaves it, and the ends."""
    shape, units = read_shape(recipe.config), recipe.units
    edges = [shape.layers * n // layout.pp for n in range(layout.pp + 1)]
    first = units["embedding"] + units["tower"] + units["block"] * shape.vision_depth
    last = units["head"] + (units["embedding"] if shape.tied and layout.pp > 1 else Unit())
    out = []
    for stage in range(layout.pp):
        ends = (first if stage == 0 else Unit()) + (last if stage == layout.pp - 1 else Unit())
        out.append((edges[stage + 1] - edges[stage], units["layer"] * (1 / layout.tp), ends))
    return out


def _states(recipe: Recipe, layout: Layout) -> dict[str, float]:
    """Weights, gradients and the optimizer's state of the fullest rank."""
    wholes = [layer * n + ends for n, layer, ends in _stages(recipe, layout)]
    codes = 2 + 2 * 4 / 256 if recipe.optimizer == "adamw8bit" else 0.0  # two bytes a weight, two scales for 256
    state = 0.0 if codes else STATES[recipe.optimizer]

    def averages(unit: Unit) -> float:
        return state * unit.trained_bytes + codes * unit.trained

    whole = max(wholes, key=lambda unit: unit.held + unit.trained_bytes + averages(unit))
    shards = layout.dp_shard * layout.cp if layout.wrapper in ("FSDP2", "HSDP") else 1
    here = 0.0 if recipe.offload == "all" else 1 / shards
    there = 0.0 if recipe.device == "cuda" and recipe.offload != "none" else 1 / shards
    copies = (
        2 if recipe.device == "cpu" and recipe.offload == "optimizer" else 0
    )  # of weights and gradients, in the RAM
    return {
        "weights": whole.held * here,
        "gradients": whole.trained_bytes * here,
        "optimizer": averages(whole) * there + copies * whole.trained_bytes,
    }


def _working(recipe: Recipe, layout: Layout, micro: int, machine: Machine | None) -> dict[str, float]:
    """What communication holds: DDP's buckets; of FSDP2 gathered weights, gradients on their way and such that wait."""
    most = 0.0
    for n, layer, ends in _stages(recipe, layout):
        whole = layer * n + ends
        if layout.wrapper == "none":
            continue
        if layout.wrapper == "DDP":
            most = max(most, whole.trained_bytes)
            continue
        ends_open = recipe.units["embedding"] + recipe.units["head"] if layout.pp == 1 else ends
        gathered = layer.computed * (n if layout.pp > 1 else min(2, n)) + ends_open.computed
        moving = layer.trained * (2 * recipe.computed.itemsize + 4)
        memory = machine.memory if machine else 0.0
        waiting = 4 * whole.trained if micro > 1 and gradients_wait(whole.trained, memory) else 0.0
        most = max(most, gathered + moving + waiting)
    return {"communication": most}


def _setup(recipe: Recipe, layout: Layout) -> Setup:
    sharded = layout.wrapper in ("FSDP2", "HSDP")
    held = recipe.computed if sharded else recipe.held
    autocast = recipe.computed if recipe.computed != held else None
    return Setup(recipe.device, held, autocast, recipe.checkpoint, recipe.rerank, layout.tp)


def _activations(recipe: Recipe, layout: Layout, samples: int) -> Taken:
    """Of a micro-batch, between two that are traced: all of it is a sum over tokens and pictures."""
    setup = _setup(recipe, layout)
    tokens = max(samples * recipe.tokens, recipe.longest)
    scale = tokens / recipe.tokens / layout.cp  # samples of a rank
    low, high = 2.0, 8.0
    both = [_trace(recipe, setup, n, layout) for n in (low, high)]
    return both[0].blend(both[1], (scale - low) / (high - low))


def _resident(recipe: Recipe, layout: Layout, samples: int, micro: int) -> float:
    """Tensors of a process on a CPU, and what malloc loses between them."""
    shards = layout.dp_shard * layout.cp if layout.wrapper in ("FSDP2", "HSDP") else 1
    kept = Kept(1 / shards, STATES[recipe.optimizer], recipe.offload == "optimizer")
    scale = max(samples, recipe.longest / recipe.tokens) / layout.cp
    stream = make_mean(recipe, scale, scale, layout.tp)
    return measure_resident(recipe.config, recipe.trainable, stream, _setup(recipe, layout), kept, micro)


def _trace(recipe: Recipe, setup: Setup, samples: float, layout: Layout) -> Taken:
    frozen = recipe.trainable.vision.mode == "frozen"
    pictures = samples / (layout.tp if frozen else 1)
    if (setup, samples) not in recipe.known:
        recipe.known[setup, samples] = trace(
            recipe.config, recipe.trainable, make_mean(recipe, samples, pictures, layout.tp), setup
        )
    return recipe.known[setup, samples]


def make_mean(recipe: Recipe, samples: float, pictures: float, tp: int) -> Stream:
    """A batch of so many mean samples."""
    merge = read_shape(recipe.config).merge
    high = max(merge, round(math.sqrt(recipe.patches) / merge) * merge)
    wide = max(merge, round(recipe.patches / high / merge) * merge)
    whole = round(pictures * recipe.patches / (high * wide))
    grids = ((1, high, wide),) * max(1, whole) if recipe.patches else ()
    return Stream(
        round(samples * recipe.tokens), max(1, round(samples * recipe.rows / tp)), grids, round(recipe.tokens)
    )


def _time(
    recipe: Recipe, layout: Layout, machine: Machine, cards: int, micro: int, activations: float
) -> tuple[dict[str, float], float]:
    """Seconds of a step by the roofline, and all of it: what FSDP2 and DDP send is hidden behind arithmetic, what the
    other axes send is not."""
    step_tokens = round(recipe.global_batch * recipe.tokens)
    work = Work(step_tokens, max(1, round(step_tokens / (micro * layout.data_ranks))), recipe.checkpoint)
    waits = 1 - bubble(layout, work)
    arithmetic = recipe.flops * recipe.global_batch / layout.ranks / (machine.flops * EFFICIENCY) / waits
    units = recipe.units
    shape = read_shape(recipe.config)
    computed = units["layer"].computed * shape.layers / layout.tp / layout.pp + units["head"].computed
    state = sum(_states(recipe, layout).values())
    moved = micro * (3 * computed + 4 * activations) + 2 * state
    memory = moved / (machine.bandwidth * REACHED)
    sent = traffic_bytes(recipe.config, recipe.kind, layout, work)
    tensor = _tensor_bytes(recipe, layout, micro, work)
    sent["all-reduce"] = max(0.0, sent["all-reduce"] - tensor)
    inside, outside = machine.link * REACHED, machine.network * REACHED

    def link(ranks: int) -> float:
        return inside if ranks <= cards else outside

    shards = layout.tp * layout.cp * layout.dp_shard
    hidden = (sent["all-gather"] + sent["reduce-scatter"]) / link(shards)
    hidden += sent["all-reduce"] / link(layout.stage_ranks if layout.dp_replicate > 1 else shards)
    exposed = tensor / link(layout.tp) + sent["all-to-all"] / link(layout.tp * layout.cp)
    exposed += sent["point-to-point"] / link(layout.ranks)
    seconds = {"arithmetic": arithmetic, "memory": memory, "communication": hidden + exposed}
    return seconds, max(arithmetic, memory, hidden) + exposed


def _tensor_bytes(recipe: Recipe, layout: Layout, micro: int, work: Work) -> float:
    """What tp sends, as `parallel/costs.py` counts it."""
    shape, sums = read_shape(recipe.config), 6 if work.checkpoint else 4
    hidden = work.micro_batch_tokens / layout.cp * shape.hidden * 2
    return micro * shape.layers / layout.pp * sums * 2 * (layout.tp - 1) / layout.tp * hidden
