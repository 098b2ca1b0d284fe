"""What each axis costs, in closed formulas: bytes a rank holds, bytes it sends in a step. Pure, without torch.

Shapes, a recipe and a layout in, bytes out; `fill_tables` puts them into docs/parallelism.md, where the formulas are
explained. Activations, the buffers of kernels and communication, and what an allocator loses are not in them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from litchi.model.sizes import Shape, count_layer, count_parameters, format_table, read_shape, size_config
from litchi.parallel.mesh import Layout, gradients_wait

GIB = 2**30
COMPUTE_BYTES = 2  # of a value in bf16
GRADIENT_BYTES = 4
TRAINED_BYTES = 16  # weight, gradient and AdamW's two averages, each in fp32
NF4_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)  # a code; a scale in 8 bits for 64; a scale in fp32 for 256 of these
RECIPES = {
    "full": "all parts in full: AdamW, weights in fp32, computed in bf16",
    "lora": "LoRA of rank 16 on the linears of the language layers, the rest frozen in bf16",
    "nf4": "the same, and these linears in 4 bits",
}
LORA_RANK = 16
CARD_BYTES = 80e9


@dataclass(frozen=True)
class Work:
    """A step: tokens of all ranks together, tokens of a micro-batch, activations computed twice or kept."""

    step_tokens: int = 262_144
    micro_batch_tokens: int = 16_384
    checkpoint: bool = True

    def micro_batches(self, layout: Layout) -> int:
        """Of a rank in a step."""
        return max(1, -(-self.step_tokens // (self.micro_batch_tokens * layout.data_ranks)))


@dataclass(frozen=True)
class Part:
    """A part of the model: what it holds, what it gives to a gather of its weights, what trains of it."""

    held_bytes: float
    gather_bytes: float
    trained: int

    def __add__(self, other: Part) -> Part:
        return Part(
            self.held_bytes + other.held_bytes, self.gather_bytes + other.gather_bytes, self.trained + other.trained
        )

    def __mul__(self, times: float) -> Part:
        return Part(self.held_bytes * times, self.gather_bytes * times, round(self.trained * times))


NOTHING = Part(0.0, 0.0, 0)


def count_linears(shape: Shape) -> int:
    """Weights of the linears of one decoder layer."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return shape.hidden * (2 * q + 2 * kv + 3 * shape.intermediate)


def count_lora(shape: Shape, rank: int = LORA_RANK) -> int:
    """Parameters of LoRA on the linears of one decoder layer: rank x (inputs + outputs) of each."""
    h, i, q, kv = shape.hidden, shape.intermediate, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return rank * (2 * (h + q) + 2 * (h + kv) + 3 * (h + i))


def split_parts(config: Mapping[str, Any], recipe: str) -> dict[str, Part]:
    """`layer` (one decoder layer), `vision` (with the merger), `embedding` (with the last norm) and `head`."""
    shape, counted = read_shape(config), count_parameters(config)
    layer = count_layer(shape)
    ends = {
        "vision": counted["vision"] + counted["merger"],
        "embedding": counted["language"] - shape.layers * layer,
        "head": counted["head"],
    }
    if recipe == "full":
        return {n: Part(TRAINED_BYTES * c, COMPUTE_BYTES * c, c) for n, c in {"layer": layer, **ends}.items()}
    lora, linears = count_lora(shape), count_linears(shape)
    base = float(COMPUTE_BYTES * layer)
    if recipe == "nf4":
        base += (NF4_BYTES - COMPUTE_BYTES) * linears
    parts = {n: Part(COMPUTE_BYTES * c, COMPUTE_BYTES * c, 0) for n, c in ends.items()}
    return {"layer": Part(base + TRAINED_BYTES * lora, base + COMPUTE_BYTES * lora, lora), **parts}


def _stages(config: Mapping[str, Any], recipe: str, layout: Layout) -> list[tuple[int, Part, Part]]:
    """Of each pipeline stage: its number of layers, one of them as tp leaves it, and the ends it has."""
    parts, layers = split_parts(config, recipe), read_shape(config).layers
    edges = [layers * stage // layout.pp for stage in range(layout.pp + 1)]
    out = []
    for stage in range(layout.pp):
        first, last = stage == 0, stage == layout.pp - 1
        ends = (parts["vision"] + parts["embedding"] if first else NOTHING) + (parts["head"] if last else NOTHING)
        if last and not first and read_shape(config).tied:
            ends += parts["embedding"]
        out.append((edges[stage + 1] - edges[stage], parts["layer"] * (1 / layout.tp), ends))
    return out


def _shards(layout: Layout) -> int:
    """Ranks that share the weights a stage and a tensor rank have. cp holds other tokens, as ranks of data do."""
    return layout.dp_shard * layout.cp if layout.wrapper in ("FSDP2", "HSDP") else 1


def state_bytes(config: Mapping[str, Any], recipe: str, layout: Layout) -> float:
    """Weights, gradients and optimizer state of the fullest rank."""
    return max((layer * n + ends).held_bytes for n, layer, ends in _stages(config, recipe, layout)) / _shards(layout)


def working_bytes(config: Mapping[str, Any], recipe: str, layout: Layout, work: Work) -> float:
    """What the fullest rank holds besides, while it computes.

    DDP: buckets for the gradients and bf16 copies of the weights. FSDP2: two gathered layers (all of a pipeline's)
    and the gathered embedding and head, and between the micro-batches of a step whole gradients where these wait.
    """
    most = 0.0
    for n, layer, ends in _stages(config, recipe, layout):
        whole = layer * n + ends
        if layout.wrapper in ("none", "DDP"):
            copies = whole.gather_bytes if whole.trained and recipe == "full" else 0.0
            most = max(most, copies + GRADIENT_BYTES * whole.trained * (layout.wrapper == "DDP"))
            continue
        kept = n if layout.pp > 1 else min(2, n)
        waiting = whole.trained if work.micro_batches(layout) > 1 and gradients_wait(whole.trained, CARD_BYTES) else 0
        most = max(most, layer.gather_bytes * kept + _open_ends(config, recipe, ends) + GRADIENT_BYTES * waiting)
    return most


def _open_ends(config: Mapping[str, Any], recipe: str, ends: Part) -> float:
    """Embedding and head stay gathered from forward to backward; of vision two blocks of 32 are."""
    vision = split_parts(config, recipe)["vision"].gather_bytes
    return ends.gather_bytes if ends.gather_bytes < vision else ends.gather_bytes - vision * 30 / 32


def traffic_bytes(config: Mapping[str, Any], recipe: str, layout: Layout, work: Work) -> dict[str, float]:
    """Bytes a rank sends in a step, by collective, on the stage that sends most. Rings: (n - 1) / n of what is moved
    for a gather or a scatter, twice that for an all-reduce."""
    found = [_stage_traffic(config, layout, work, stage) for stage in _stages(config, recipe, layout)]
    return max(found, key=lambda sent: sum(sent.values()))


def _stage_traffic(
    config: Mapping[str, Any], layout: Layout, work: Work, stage: tuple[int, Part, Part]
) -> dict[str, float]:
    shape, micro = read_shape(config), work.micro_batches(layout)
    (n, layer, ends), shards = stage, _shards(layout)
    whole = layer * n + ends
    sent = dict.fromkeys(("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "point-to-point"), 0.0)
    if layout.wrapper == "DDP":
        sent["all-reduce"] += 2 * _ring(layout.gradient_ranks) * GRADIENT_BYTES * whole.trained
    elif layout.wrapper != "none":
        again = 2 if layout.pp == 1 else 1  # layers are let go behind the forward, embedding and head are not
        sent["all-gather"] = micro * _ring(shards) * (again * n * layer.gather_bytes + ends.gather_bytes)
        times = 1 if gradients_wait(whole.trained, CARD_BYTES) else micro
        sent["reduce-scatter"] = times * _ring(shards) * GRADIENT_BYTES * whole.trained
        sent["all-reduce"] += times * 2 * _ring(layout.dp_replicate) * GRADIENT_BYTES * whole.trained / shards
    tokens = work.micro_batch_tokens / layout.cp
    hidden = tokens * shape.hidden * COMPUTE_BYTES
    sums = 6 if work.checkpoint else 4  # two in the forward, two in the backward, two in the forward again
    sent["all-reduce"] += micro * n * sums * 2 * _ring(layout.tp) * hidden
    queries, keys = (heads * shape.head_dim / layout.tp for heads in (shape.heads, shape.kv_heads))
    if (shape.kv_heads // layout.tp) % layout.cp:
        keys = queries  # repeated until they can be dealt out
    passes = 3 if work.checkpoint else 2
    sent["all-to-all"] = micro * n * passes * _ring(layout.cp) * tokens * COMPUTE_BYTES * (2 * queries + 2 * keys)
    if layout.pp > 1:
        sent["point-to-point"] = micro * 2 * hidden  # hidden states to the next stage, their gradient to the one before
    return sent


def _ring(ranks: int) -> float:
    return (ranks - 1) / ranks


def compute_flops(config: Mapping[str, Any], recipe: str, layout: Layout, work: Work) -> float:
    """FLOPs of a rank in a step, language layers and head, without attention's pairs: 2 for a parameter and token in
    the forward, 2 for the gradient of the input, 2 for that of a weight that trains, 2 more for the forward again."""
    shape = read_shape(config)
    multiplied = shape.layers * count_linears(shape) + shape.vocabulary * shape.hidden
    passes = 2 + (recipe == "full") + work.checkpoint
    return 2 * passes * multiplied * work.step_tokens / layout.ranks


def bubble(layout: Layout, work: Work) -> float:
    """Share of a step in which a pipeline stage waits: (stages - 1) / (micro-batches + stages - 1)."""
    return (layout.pp - 1) / (work.micro_batches(layout) + layout.pp - 1)


# ------------------------------------------------------------------------------------- tables of docs/parallelism.md

SHOWN = ("7b", "32b", "72b")
EIGHT = {
    "DDP": Layout(dp_replicate=8),
    "FSDP2": Layout(dp_shard=8),
    "HSDP, 2 copies of 4 shards": Layout(dp_replicate=2, dp_shard=4),
    "TP 4 x FSDP2 2": Layout(dp_shard=2, tp=4),
    "CP 4 x FSDP2 2": Layout(dp_shard=2, cp=4),
    "PP 4 x FSDP2 2": Layout(dp_shard=2, pp=4),
}
LINKS = {"300 GB/s": 300e9, "25 GB/s": 25e9}  # NVLink of an A100 in one direction; PCIe 4 x16, or a 200 Gb/s network
FLOPS = 0.4 * 312e12  # of an A100 in bf16, at 40 %


def format_bytes_table() -> str:
    """Bytes of a parameter by recipe, and parameters of each member."""
    rows = [
        ("trained, AdamW in fp32", "4 weight + 4 gradient + 4 + 4 averages", f"{TRAINED_BYTES}"),
        ("frozen, bf16", "2 weight", f"{COMPUTE_BYTES}"),
        ("frozen, nf4", "1/2 code + 1/64 scale + 4/16384 scale of scales", f"{NF4_BYTES:.4f}"),
    ]
    lines = ["| parameter | parts | bytes |", "|---|---|---|", *(f"| {a} | {b} | {c} |" for a, b, c in rows), ""]
    lines += ["| model | vision | merger | language | head | LoRA, rank 16 |", "|---|---|---|---|---|---|"]
    for name in ("3b", *SHOWN):
        config = size_config(name)
        shape = read_shape(config)
        counted = [f"{n / 1e9:.3f} G" if n else "tied" for n in count_parameters(config).values()]
        lora = shape.layers * count_lora(shape)
        lines.append(f"| {name.upper()} | {' | '.join(counted)} | {lora / 1e6:.1f} M |")
    return "\n".join(lines) + "\n"


def format_memory_table(work: Work | None = None) -> str:
    """GB of the fullest of eight ranks: state, and what is held besides while computing."""
    work = work or Work()
    head = "| model | layout | " + " | ".join(f"{r}: state + at work" for r in RECIPES) + " |"
    lines = [head, "|" + "---|" * (2 + len(RECIPES))]
    for name in SHOWN:
        config = size_config(name)
        for title, layout in EIGHT.items():
            cells = []
            for recipe in RECIPES:
                state, working = state_bytes(config, recipe, layout), working_bytes(config, recipe, layout, work)
                no = "" if state + working < CARD_BYTES else " **no**"
                cells.append(f"{state / 1e9:.1f} + {working / 1e9:.1f}{no}")
            lines.append(f"| {name.upper()} | {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def format_traffic_table(work: Work | None = None) -> str:
    """GB a rank sends in a step, and seconds of links and of computing."""
    work = work or Work()
    kinds = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "point-to-point")
    head = f"| model | layout | micro-batches | {' | '.join(kinds)} | {' | '.join(f's at {link}' for link in LINKS)} |"
    lines = [head + " s of computing | LoRA: GB |", "|" + "---|" * (5 + len(kinds) + len(LINKS))]
    for name in SHOWN:
        config = size_config(name)
        for title, layout in EIGHT.items():
            sent = traffic_bytes(config, "full", layout, work)
            total = sum(sent.values())
            seconds = compute_flops(config, "full", layout, work) / FLOPS
            lora = sum(traffic_bytes(config, "lora", layout, work).values())
            cells = [f"{sent[k] / 1e9:.1f}" if sent[k] else "" for k in kinds]
            cells += [f"{total / rate:.2f}" for rate in LINKS.values()] + [f"{seconds:.1f}", f"{lora / 1e9:.1f}"]
            lines.append(f"| {name.upper()} | {title} | {work.micro_batches(layout)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


TABLES: dict[str, Callable[[], str]] = {
    "sizes": format_table,
    "bytes": format_bytes_table,
    "memory": format_memory_table,
    "traffic": format_traffic_table,
}


def fill_tables(text: str) -> str:
    """Renew the tables of a document, between `<!-- NAME:begin -->` and `<!-- NAME:end -->`."""
    for name, make in TABLES.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        text = re.sub(f"{begin}.*?{end}", lambda _, b=begin, e=end, m=make: f"{b}\n\n{m()}\n{e}", text, flags=re.DOTALL)  # type: ignore[misc]
    return text
