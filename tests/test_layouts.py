"""Every layout gives the numbers of one process: DDP and FSDP2 on real gloo ranks, all in one pair of processes."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import numpy as np
import pytest
from layout_job import run_all, write_rows
from PIL import Image
from processes import RunningRanks

pytestmark = pytest.mark.timeout(300)

SAME = 1e-6  # relative, of losses, in fp32 under SGD
LAYOUTS = {"DDP": "parallel.dp_replicate=2", "FSDP2": "parallel.dp_shard=2"}
PARTS = {
    "vision frozen": "trainable={vision: frozen, merger: frozen, language: full}",
    "vision trained": "trainable={vision: full, merger: full, language: full}",
    "merger only": "trainable={vision: frozen, merger: full, language: frozen}",
    "LoRA on language": "trainable={language: lora, lora: {rank: 4}}",
    "LoRA on both": "trainable={vision: lora, language: lora, lora: {rank: 4}}",
}
MOVES = {
    "vision frozen": {"language"},
    "vision trained": {"vision", "merger", "language"},
    "merger only": {"merger"},
    "LoRA on language": {"lora"},
    "LoRA on both": {"lora"},
}


def say_jobs(folder):
    """name -> (settings that do not depend on the layout, layouts it runs in)."""
    pictures = []
    for n in range(3):
        pixels = np.random.default_rng(n).integers(0, 256, (56, 56 + 28 * n, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"p{n}.png")
        pictures.append(f"p{n}.png")
    one, two, three = pictures
    # in pairs: a picture on one rank only, on none, on the other, on both, and the same on both
    mixed = write_rows(folder / "mixed.jsonl", [one, None, None, None, None, two, three, one, two, two])
    text = write_rows(folder / "text.jsonl", [None] * 6)
    lone = write_rows(folder / "lone.jsonl", [one])
    words = write_rows(folder / "words.jsonl", [None] * 7)
    chat = ["task=chat", f"data.train={mixed}", "train.global_batch_size=2", "train.steps=5"]
    trained, both = PARTS["vision trained"], tuple(LAYOUTS)
    jobs = {}
    for name, parts in PARTS.items():
        jobs[name] = [*chat, parts], both
        jobs[f"{name}, checkpointed"] = [*chat, parts, "train.checkpoint_activations=true", "train.steps=2"], both
    whole = ["task=chat", f"data.train={mixed}", "train.global_batch_size=10", "train.steps=3", trained]
    jobs["whole batch"] = whole, both
    jobs["accumulated"] = [*whole, "train.micro_batch_tokens=64"], both
    jobs["shuffled"] = [*whole, "data.shuffle=true", "train.global_batch_size=4"], both
    jobs["text only"] = ["task=chat", f"data.train={text}", "train.global_batch_size=2", "train.steps=3", trained], both
    decayed = ["optim.name=adamw", "optim.weight_decay=0.1", "optim.lr=0.001"]
    jobs["adamw"] = [*chat, trained, *decayed], both
    jobs["one row"] = ["task=chat", f"data.train={lone}", "train.steps=2", trained], both
    jobs["last short"] = (
        ["task=chat", f"data.train={words}", "train.global_batch_size=4", "train.steps=2", trained],
        both,
    )
    jobs["clipped"] = [*chat, trained, "optim.clip=0.5", "train.steps=3"], both
    jobs["bf16"] = [*chat, trained, "train.precision=bf16", "train.steps=2"], both
    # text-only micro-batches, a trained tower, gradients reduced once and in fp32 beside bf16 weights
    jobs["bf16 accumulated"] = [*whole, "train.micro_batch_tokens=64", "train.precision=bf16", "train.steps=2"], both
    jobs["auto"] = [*chat, PARTS["LoRA on language"], "train.steps=2"], ("auto",)
    return jobs


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """(name, layout) -> what each rank says; layout "one" is one process."""
    folder = tmp_path_factory.mktemp("layouts")
    jobs = say_jobs(folder)
    layouts = {**LAYOUTS, "auto": "parallel=auto"}
    two = {f"{name}/{layout}": [*words, layouts[layout]] for name, (words, chosen) in jobs.items() for layout in chosen}
    one = {name: words for name, (words, _) in jobs.items()}
    unweighed = [name for name in (*one, *two) if re.search("checkpointed|bf16|auto", name)]
    running = [RunningRanks(folder / str(n), n, run_all, jobs, unweighed) for n, jobs in ((2, two), (1, one))]
    pair, alone = (some.results(250) for some in running)
    out = {(name, "one"): [alone[0][name]] for name in one}
    return out | {tuple(name.split("/")): [rank[name] for rank in pair] for name in two}


def assert_same(ran, name, layout, tolerance=SAME):
    alone, ranks = ran[name, "one"][0], ran[name, layout]
    assert ranks[0]["wrapper"] == layout and alone["wrapper"] == "none"
    assert len(ranks) == 2 and ranks[0]["losses"] == ranks[1]["losses"]
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert ranks[0]["losses"] == pytest.approx(alone["losses"], rel=tolerance)
    assert ranks[0]["norms"] == pytest.approx(alone["norms"], rel=100 * tolerance)
    assert not any(ranks[0]["skipped"]) and max(alone["norms"]) > 1  # there was something to differ in
    for part, way in alone["travel"].items():
        assert ranks[0]["travel"][part] == pytest.approx(way, rel=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PARTS)
def test_what_trains_in_every_layout(ran, name, layout):
    assert_same(ran, name, layout)
    ranks = ran[name, layout]
    shown = list(zip(*(rank["pictures"] for rank in ranks), strict=True))
    assert {(a > 0, b > 0) for a, b in shown} >= {(True, False), (False, False), (True, True)}
    assert {part for part, way in ranks[0]["travel"].items() if way > 0} == MOVES[name]


@pytest.mark.parametrize("layout", ["one", *LAYOUTS])
@pytest.mark.parametrize("name", PARTS)
def test_checkpointing_activations_changes_nothing(ran, name, layout):
    plain, checkpointed = ran[name, layout][0], ran[f"{name}, checkpointed", layout][0]
    assert checkpointed["losses"] == plain["losses"][:2]  # the second after an update by the first's gradients
    assert checkpointed["norms"] == plain["norms"][:2] and plain["norms"][0] > 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["whole batch", "accumulated", "shuffled", "text only", "last short", "clipped"])
def test_batches_in_every_layout(ran, name, layout):
    assert_same(ran, name, layout)


@pytest.mark.parametrize("layout", ["one", *LAYOUTS])
def test_accumulation_changes_nothing(ran, layout):
    whole, pieces = ran["whole batch", layout][0], ran["accumulated", layout][0]
    assert max(whole["micro_batches"]) == 1 and min(pieces["micro_batches"]) >= 4
    assert pieces["losses"] == pytest.approx(whole["losses"], rel=SAME)
    assert pieces["norms"] == pytest.approx(whole["norms"], rel=100 * SAME)


@pytest.mark.parametrize("layout", ["one", *LAYOUTS])
def test_steps_without_a_picture_leave_vision_as_it_is(ran, layout):
    """Bit by bit, also with the momentum and the decay of AdamW after an earlier picture."""
    ranks = ran["adamw", layout]
    shown = [sum(step) for step in zip(*(rank["pictures"] for rank in ranks), strict=True)]
    moved = [a != b for a, b in pairwise(zip(*(rank["vision"] for rank in ranks), strict=True))]  # of each its part
    assert moved == [n > 0 for n in shown] and moved[:2] == [True, False]
    assert ran["text only", layout][0]["travel"]["vision"] == 0 < ran["text only", layout][0]["travel"]["language"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_row_on_two_ranks(ran, layout):
    assert_same(ran, "one row", layout)
    assert sorted(rank["pictures"] for rank in ran["one row", layout]) == [[0, 0], [1, 1]]


@pytest.mark.parametrize("layout", ["one", *LAYOUTS])
def test_bf16_computes_on_cpu(ran, layout):
    half, full = ran["bf16", layout][0]["losses"], ran["vision trained", layout][0]["losses"]
    assert len(half) == 2 and all(map(math.isfinite, half))
    assert half != full[:2] and half == pytest.approx(full[:2], rel=0.02)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_accumulates_text_beside_pictures(ran, layout):
    ranks = ran["bf16 accumulated", layout]
    assert min(ranks[0]["micro_batches"]) >= 4 and ranks[0]["losses"] == ranks[1]["losses"]
    assert ranks[0]["losses"] == pytest.approx(ran["accumulated", "one"][0]["losses"][:2], rel=0.02)


def test_auto_takes_copies_where_the_model_fits(ran):
    assert ran["auto", "auto"][0]["wrapper"] == "DDP"
    assert ran["auto", "auto"][0]["losses"] == ran["LoRA on language", "DDP"][0]["losses"][:2]


@pytest.mark.slow
def test_copies_of_shards_on_four_ranks(tmp_path):
    jobs = {n: w for n, (w, _) in say_jobs(tmp_path).items() if n in ("vision trained", "accumulated", "LoRA on both")}
    (alone,) = RunningRanks(tmp_path / "one", 1, run_all, jobs).results()
    mesh = ["parallel={dp_replicate: 2, dp_shard: 2}"]
    four = RunningRanks(tmp_path / "four", 4, run_all, {n: w + mesh for n, w in jobs.items()}).results()
    for name in jobs:
        assert {rank[name]["weights"] for rank in four} == {four[0][name]["weights"]}
        assert four[0][name]["wrapper"] == "HSDP"
        assert four[0][name]["losses"] == pytest.approx(alone[name]["losses"], rel=SAME)
        assert four[0][name]["norms"] == pytest.approx(alone[name]["norms"], rel=100 * SAME)
