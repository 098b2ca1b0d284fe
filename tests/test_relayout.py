"""A run that is cut at any step of any epoch, and one that goes on in other layouts: no row is lost or taken twice."""

from __future__ import annotations

import pytest
from fault_job import run_until
from processes import RunningRanks
from runs import chat_rows, read_rows

from litchi.train.checkpoint import list_checkpoints

PER_EPOCH = 6  # steps of 11 rows, two at a time


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    return tmp_path_factory.mktemp("relayout")


@pytest.fixture(scope="module")
def words(room):
    """Three epochs with dropout and a falling rate."""
    return [
        *("task=chat", f"data.train={chat_rows(room / 'data', 11)}", "trainable.lora.rank=4", "optim.lr=2e-3"),
        *("trainable.lora.dropout=0.2", "optim.schedule=cosine", "train.epochs=3", "train.global_batch_size=2"),
        *("train.micro_batch_tokens=100", "train.save_every=1", "train.keep=2", "train.seed=5", "train.export=never"),
    ]


def ended(run):
    lines = [(row["step"], row["epoch"], row["loss"]) for row in read_rows(run / "metrics.jsonl")]
    last = list_checkpoints(run)[-1]
    return lines, last.step, {name: entry["sha256"] for name, entry in last.manifest["files"].items()}


@pytest.fixture(scope="module")
def uncut(room, words, ranks):
    """The run that nothing happens to: (folder, step -> its rows)."""
    rows = dict(run_until(ranks, str(room / "uncut"), words, None))
    assert list(rows) == list(range(1, 3 * PER_EPOCH + 1))
    epochs = [[rows[PER_EPOCH * n + k] for k in range(1, PER_EPOCH + 1)] for n in range(3)]
    assert all(sorted(r for step in epoch for r in step) == sorted(f"r{n}" for n in range(11)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    return room / "uncut", rows


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [[1], [5], [6], [7], [12], [17], [5, 9]], ids=str)
def test_cut_anywhere_each_row_is_taken_once_an_epoch(cuts, room, words, uncut, ranks):
    """In an epoch, before and behind its end, at the end of the next, twice."""
    folder, rows = uncut
    out, taken = room / f"cut-{cuts}", {}
    for cut in (*cuts, None):
        taken |= dict(run_until(ranks, str(out), words, cut))
    assert taken == rows and ended(out) == ended(folder)


CHAIN = (
    (4, "parallel.dp_shard=4"),
    (2, "parallel.dp_shard=2"),
    (1, "parallel.dp_shard=1"),
    (2, "parallel.tp=2"),
    (2, "parallel.pp=2"),
    (4, "parallel={dp_replicate: 2, tp: 2}"),
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_goes_on_with_other_ranks_and_axes(room, ranks):
    """FSDP 4 -> 2 -> 1 -> TP 2 -> PP 2 -> DDP 2 x TP 2, two steps each: SGD without dropout."""
    words = [
        *("task=chat", f"data.train={chat_rows(room / 'chain', 11)}", "optim.name=sgd", "optim.lr=0.01"),
        *("trainable={vision: full, merger: full, language: full}", "train.steps=12", "train.global_batch_size=4"),
        *("train.micro_batch_tokens=100", "train.save_every=2", "train.export=never"),
    ]
    rows = dict(run_until(ranks, str(room / "alone"), words, None))
    out, taken = room / "moved", {}
    for number, (world, axes) in enumerate(CHAIN, 1):
        last = 2 * number if number < len(CHAIN) else None
        given = str(out), [*words, axes], last
        for per_rank in RunningRanks(room / f"p{number}", world, run_until, *given).results(300):
            for step, names in per_rank:
                taken.setdefault(step, set()).update(names)
    assert taken == {step: set(names) for step, names in rows.items()}
    alone, moved = (read_rows(run / "metrics.jsonl") for run in (room / "alone", out))
    assert [row["step"] for row in moved] == list(range(1, 13))
    for key in ("units", "tokens", "pixels", "epoch"):
        assert [row[key] for row in moved] == [row[key] for row in alone], key
    assert [row["loss"] for row in moved] == pytest.approx([row["loss"] for row in alone], rel=1e-6)
