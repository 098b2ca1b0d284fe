"""Layouts of the real members on pretended ranks: what a rank holds, against a count of our own."""

from __future__ import annotations

import math
import re

import pytest

from litchi.model.sizes import check_axes, size_config
from litchi.parallel.dry import build_dry, make_dry, measure_held, pretend_ranks
from litchi.parallel.mesh import Layout, offer_layouts
from litchi.parallel.pipeline import split_layers

COLUMNS = re.compile(r"(q|k|v|gate|up)_proj\.(weight|bias)$|merger\.mlp\.0\.")
ROWS = re.compile(r"(o|down)_proj\.weight$|attn\.proj\.weight$|merger\.mlp\.2\.weight$")


def count_bytes(shapes, layout, rank):
    """Bytes of bf16 a rank holds of everything trained, counted from names and shapes alone."""
    place = layout.place(rank)
    numbers = [int(found[1]) for name in shapes if (found := re.search(r"language_model\.layers\.(\d+)\.", name))]
    mine = split_layers(max(numbers) + 1, layout.pp)[place.pp]
    first, last = place.pp == 0, place.pp == layout.pp - 1
    shards, number = layout.dp_shard * layout.cp, place.dp_shard * layout.cp + place.cp
    total = 0
    for name, shape in shapes.items():
        layer = re.search(r"language_model\.layers\.(\d+)\.", name)
        here = (
            int(layer[1]) in mine
            if layer
            else first
            if ".visual." in name
            else (first or (last and "lm_head.weight" not in shapes))
            if "embed_tokens" in name
            else last
        )
        if not here:
            continue
        rows, others = shape[0], math.prod(shape[1:])
        if COLUMNS.search(name):
            rows //= layout.tp
        elif ROWS.search(name):
            others //= layout.tp
        if layout.wrapper in ("FSDP2", "HSDP"):
            piece = -(-rows // shards)
            rows = max(0, min(piece, rows - number * piece))
        total += 2 * rows * others
    return total


def hold(name, layout, rank):
    """(bytes a rank holds, bytes by our count, bytes of the whole model)."""
    owner, tied = make_dry(size_config(name))
    shapes = {n.removeprefix("hf."): tuple(p.shape) for n, p in owner.named_parameters()}
    with pretend_ranks(rank, layout.ranks) as ranks:
        wrapped = build_dry(owner, layout, ranks, tied=tied)
        assert wrapped.wrapper == (layout.wrapper if layout.wrapper != "DDP" else "none")  # DDP needs real weights
        held = measure_held(wrapped.model)
    assert held.trained_bytes == held.weights_bytes
    return held.weights_bytes, count_bytes(shapes, layout, rank), sum(2 * math.prod(s) for s in shapes.values())


@pytest.mark.parametrize(
    "name, layout, rank",
    [
        ("3b", Layout(tp=2, pp=2, dp_shard=2), 7),  # tied: the last stage has the embedding too
        ("7b", Layout(dp_shard=8), 3),
        ("32b", Layout(dp_replicate=2, dp_shard=4, tp=8, cp=1), 17),
        ("72b", Layout(dp_replicate=4, dp_shard=8, tp=8, cp=2, pp=2), 1023),
    ],
)
def test_a_rank_holds_its_share(name, layout, rank):
    held, counted, whole = hold(name, layout, rank)
    assert held == counted and 0 < held < whole / 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [8, 16, 64, 1024])
@pytest.mark.parametrize("name", ["7b", "32b", "72b"])
def test_every_offered_layout_builds(name, ranks):
    layouts = offer_layouts(size_config(name), ranks)
    assert len(layouts) >= 5
    for layout in layouts if ranks <= 64 else layouts[:: max(1, len(layouts) // 12)]:
        for rank in {0, layout.ranks - 1}:
            held, counted, _ = hold(name, layout, rank)
            assert held == counted, layout


@pytest.mark.parametrize("ranks", [1, 8, 48, 1024])
@pytest.mark.parametrize("name", ["3b", "7b", "32b", "72b"])
def test_offers_are_allowed_and_take_all_ranks(name, ranks):
    layouts = offer_layouts(size_config(name), ranks)
    assert len(set(layouts)) == len(layouts) > 0
    for layout in layouts:
        assert layout.ranks == ranks and layout.tp <= 8
        check_axes(size_config(name), tp=layout.tp, cp=layout.cp, pp=layout.pp, vision_trains=True)
