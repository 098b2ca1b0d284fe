"""Compiled blocks give the numbers of plain ones: `train.compile`, alone, under DDP and FSDP2, checkpointed."""

from __future__ import annotations

import pytest
from layout_job import run_all, write_rows
from PIL import Image
from processes import RunningRanks

pytestmark = pytest.mark.slow  # a compiler runs for a minute

LAYOUTS = {
    "DDP": ["parallel.dp_replicate=2"],
    "FSDP2": ["parallel.dp_shard=2"],
    "FSDP2, checkpointed": ["parallel.dp_shard=2", "train.checkpoint_activations=true"],
}


def test_compiled_blocks_change_nothing(tmp_path):
    Image.effect_noise((84, 56), 90).convert("RGB").save(tmp_path / "p.png")
    rows = write_rows(tmp_path / "rows.jsonl", ["p.png", None, None, "p.png", "p.png", None])
    words = ["task=chat", f"data.train={rows}", "train.global_batch_size=2", "train.steps=3"]
    words.append("trainable={vision: full, merger: full, language: full}")
    one = RunningRanks(tmp_path / "one", 1, run_all, {"plain": words, "compiled": [*words, "train.compile=true"]})
    jobs = {name: [*words, *layout, "train.compile=true"] for name, layout in LAYOUTS.items()}
    two = RunningRanks(tmp_path / "two", 2, run_all, jobs)
    alone, ranks = one.results()[0], two.results()
    plain = alone["plain"]
    assert max(plain["norms"]) > 1 and all(way > 0 for part, way in plain["travel"].items() if part != "lora")
    for found in (alone["compiled"], *ranks[0].values()):
        assert found["losses"] == pytest.approx(plain["losses"], rel=1e-6)
        assert found["norms"] == pytest.approx(plain["norms"], rel=1e-5)
    # it was compiled: fused sums round otherwise
    assert alone["compiled"]["weights"] != plain["weights"]
