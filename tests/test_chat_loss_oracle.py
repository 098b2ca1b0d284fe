"""Chat training against the trainers of others: the same rows and weights give TRL's and LLaMA-Factory's losses.

`golden/chat_loss.json` holds what they measured (see `golden/make_chat_loss.py`); nothing of them is needed here.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from litchi.batch.collate import collate
from litchi.batch.loader import load_patches, media_grid
from litchi.data.processor import END_OF_TURN
from litchi.data.render import Renderer
from litchi.model.build import load_model
from litchi.model.forward import LitchiModel
from litchi.types import IGNORE, Source

FOLDER = Path(__file__).parent / "golden" / "chat_loss"
GOLDEN = json.loads(FOLDER.with_suffix(".json").read_text(encoding="utf-8"))
PEERS = ("trl", "llamafactory")
LINES = (FOLDER / "rows.jsonl").read_bytes().splitlines()
NAMES = [json.loads(line)["id"] for line in LINES]
TOLERANCE = 1e-5  # relative, fp32


class Ours:
    """The model and the rendered rows, and how they become batches."""

    def __init__(self):
        loaded = load_model(FOLDER / "model", dtype=torch.float32)
        self.processor = loaded.processor
        self.model = LitchiModel(loaded.hf, loaded.family, self.processor.vision)
        self.renderer = Renderer("chat", self.processor, media_root=str(FOLDER))
        samples = [self.renderer.parse(line, Source("rows.jsonl", i))[0] for i, line in enumerate(LINES, 1)]
        self.examples = [self.renderer.render(s, lambda media: media_grid(media, self.renderer)) for s in samples]

    def batch(self, *rows):
        chosen = [self.examples[row] for row in rows]
        return collate(chosen, load_patches(chosen, self.renderer), self.processor)

    @torch.no_grad()
    def loss(self, batch) -> float:
        return self.model(batch).loss.item()


@pytest.fixture(scope="module")
def ours():
    return Ours()


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("row", range(len(LINES)), ids=NAMES)
def test_row_equals_peer(ours, peer, row):
    golden, example, batch = GOLDEN[peer]["rows"][row], ours.examples[row], ours.batch(row)
    assert (golden["id"], golden["tokens"]) == (example.id, example.tokens)
    assert golden["targets"] == example.labels[example.labels != IGNORE].tolist() == batch.targets.tolist()
    assert ours.loss(batch) == pytest.approx(golden["loss_sum"], rel=TOLERANCE)


@pytest.mark.parametrize("peer", PEERS)
def test_packed_rows_equal_the_padded_batch_of_peer(ours, peer):
    golden, batch = GOLDEN[peer]["all"], ours.batch(*range(len(LINES)))
    assert batch.units == golden["targets"]
    assert ours.loss(batch) / batch.units == pytest.approx(golden["loss_mean"], rel=TOLERANCE)


def test_newline_behind_an_answer_is_all_that_a_shorter_generation_block_leaves_out(ours):
    """A template whose generation block ends before the newline trains TRL on one token less per answer."""
    end, newline = ours.processor.control(END_OF_TURN), ours.processor.encode("\n")
    for row, golden in enumerate(GOLDEN["trl"]["no_newline"]["rows"]):
        batch = ours.batch(row)
        behind = np.flatnonzero(batch.targets == end) + 1
        assert batch.targets[behind].tolist() == newline * len(behind)
        kept = np.delete(np.arange(batch.units), behind)
        assert batch.targets[kept].tolist() == golden["targets"]
        loss = ours.loss(replace(batch, rows=batch.rows[kept], targets=batch.targets[kept]))
        assert loss == pytest.approx(golden["loss_sum"], rel=TOLERANCE)


WITH_PICTURES = [row for row, line in enumerate(LINES) if b'"image"' in line]


@pytest.mark.parametrize("row", WITH_PICTURES, ids=[NAMES[row] for row in WITH_PICTURES])
def test_oracle_would_notice(ours, row, monkeypatch):
    """The equalities are not vacuous: wrong patches, positions or windows move the loss well beyond the tolerance."""
    batch, spec = ours.batch(row), ours.model.spec
    flat = batch.positions.clone()
    flat[2, batch.image_at] = flat[1, batch.image_at]  # the columns of pictures forgotten
    wrong = {
        "patches": ours.loss(replace(batch, pixels=batch.pixels.flip(0))),
        "positions": ours.loss(replace(batch, positions=flat)),
    }
    monkeypatch.setattr(ours.model, "spec", replace(spec, window=spec.window // 4))
    wrong["windows"] = ours.loss(batch)
    monkeypatch.undo()
    loss = ours.loss(batch)
    moved = {name: abs(other / loss - 1) for name, other in wrong.items()}
    assert min(moved.values()) > 10 * TOLERANCE, moved
