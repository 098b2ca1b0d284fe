"""Vision on ranks of its own: who encodes what and when, and whole runs that end as without."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import RunningRanks, rank_variables, run_litchi_ranks, start_litchi
from runs import chat_rows, read_rows, rerank_rows
from safetensors.torch import load_file

from litchi.batch.encoders import NOBODY, Job, assign_encoders, choose_jobs, encoded_steps
from litchi.config import load_config
from litchi.errors import UsageError
from litchi.parallel.encoder import list_receivers
from litchi.parallel.mesh import AXES, Layout, choose_layout
from litchi.scale.selfcheck import STEPS, Ran, run_job, write_rows
from litchi.scale.selfcheck import Job as Training

# ------------------------------------------------------------------------------------------------------- the plan


def test_an_assignment_by_hand():
    """Two micro-steps of three data ranks; 9 and 5 begin, then whoever has least: 3 with 5, then 4 with 8."""
    patches = [[5, 0], [9, 4], [3, 0]]
    assert assign_encoders(patches, 2) == [[1, NOBODY], [0, 1], [1, NOBODY]]
    assert assign_encoders(patches, 1) == [[0, NOBODY], [0, 0], [0, NOBODY]]
    assert assign_encoders([], 2) == []


grids_of_ranks = st.integers(1, 4).flatmap(
    lambda micro: st.lists(st.lists(st.integers(0, 50), min_size=micro, max_size=micro), min_size=1, max_size=5)
)


@given(grids_of_ranks, st.integers(1, 4))
def test_pictures_are_shared_out_evenly_and_only_where_there_are_some(patches, encoders):
    assigned = assign_encoders(patches, encoders)
    load = [0] * encoders
    for own, given_to in zip(patches, assigned, strict=True):
        for count, encoder in zip(own, given_to, strict=True):
            assert (encoder == NOBODY) == (count == 0)
            if count:
                load[encoder] += count
    assert max(load) - min(load) <= max(max(own) for own in patches)


@given(grids_of_ranks, st.integers(1, 4))
def test_both_ends_agree_on_what_travels_and_in_which_order(patches, encoders):
    ranks = len(patches)
    shares = [[(rank, micro) for micro in range(len(own))] for rank, own in enumerate(patches)]

    def jobs(rank):
        return choose_jobs(shares, lambda picks: patches[picks[0]][picks[1]], encoders, rank)

    for rank in range(ranks):
        assert [job.picks for job in jobs(rank)] == shares[rank]
        for encoder in range(encoders):
            wanted = [job.picks for job in jobs(rank) if job.peer == encoder]
            sent = [job.picks for job in jobs(ranks + encoder) if job.peer == rank]
            assert wanted == sent
    for encoder in range(encoders):  # one order for all: micro-steps, then data ranks
        order = [(micro, rank) for rank, micro in (job.picks for job in jobs(ranks + encoder))]
        assert order == sorted(order)


def test_without_vision_ranks_nothing_travels():
    assert choose_jobs([["a", "b"], ["c"]], lambda picks: 1, 0, 1) == [Job("c", NOBODY)]


@given(st.integers(1, 9), st.integers(0, 9))
def test_every_step_is_encoded_once_in_order_and_before_its_end(first, more):
    last = first + more
    done = []
    for step in range(first, last + 1):
        done += encoded_steps(step, first=first, last=last)
        assert step in done and max(done) <= step + 1
    assert done == list(range(first, last + 1))
    assert list(encoded_steps(first, first=first, last=last)) == [first, first + 1][: 1 + bool(more)]


small = st.integers(1, 3)


@given(st.builds(Layout, **dict.fromkeys(AXES, small), vision_ranks=small))
def test_vision_ranks_come_behind_and_first_stages_receive(layout):
    world = layout.ranks + layout.vision_ranks
    assert [rank for rank in range(world) if layout.encodes(rank)] == list(range(layout.ranks, world))
    assert not any(layout.leads(rank) for rank in range(layout.ranks, world))
    numbers = [layout.data_rank(rank) for rank in range(layout.ranks, world)]
    assert numbers == list(range(layout.data_ranks, layout.data_ranks + layout.vision_ranks))
    receivers = list_receivers(layout)
    assert Counter(map(len, receivers)) == {layout.tp * layout.cp: layout.data_ranks}
    for data, ranks in enumerate(receivers):
        assert all(layout.place(rank).pp == 0 and layout.data_rank(rank) == data for rank in ranks)


def chosen(world, *words):
    return choose_layout(load_config(None, ["task=chat", *words], need=()).parallel, world, fits_whole=True)


def test_axes_take_the_ranks_that_vision_leaves():
    layout = chosen(7, "parallel.tp=2", "parallel.vision_ranks=1")
    assert layout == Layout(dp_replicate=3, tp=2, vision_ranks=1) and layout.ranks == 6
    assert str(layout) == "dp_replicate 3 x tp 2 + vision_ranks 1"


@pytest.mark.parametrize(
    "world, words, said",
    [
        (2, ["parallel.vision_ranks=2"], "parallel.vision_ranks=2 of 2 ranks: none is left for the language model"),
        (6, ["parallel.vision_ranks=1", "parallel.tp=2"], "multiple of 2 ranks, but there are 5 besides .*ranks=1"),
        (6, ["parallel.vision_ranks=1", "parallel.dp_shard=2"], "dp_shard=2 does not divide 5 ranks, 5 besides"),
        (
            6,
            ["parallel.vision_ranks=2", "parallel.dp_shard=2", "parallel.dp_replicate=3"],
            "= 6, but there are 4 besides parallel.vision_ranks=2",
        ),
    ],
)
def test_numbers_of_ranks_that_do_not_fit_are_refused_with_both(world, words, said):
    with pytest.raises(UsageError, match=said):
        chosen(world, *words)


# ------------------------------------------------------------------------------------------------------ real ranks

SAME = 1e-6
MORE = {  # layouts beside those of the table of selfcheck
    "tp": ({"tp": 2, "vision_ranks": 1}, "none"),
    "cp": ({"cp": 2, "vision_ranks": 1}, "DDP"),
    "pp": ({"pp": 2, "vision_ranks": 1}, "none"),
    "shards": ({"dp_shard": 2, "vision_ranks": 1}, "FSDP2"),
    "alone": ({"vision_ranks": 2}, "none"),
}
KINDS = (("trainable={language: full}", "chat"), ("trainable={language: lora, lora: {rank: 4}}", "rerank"))


def train_few(ranks, folder, layouts):
    from dataclasses import asdict
    from pathlib import Path

    out = []
    for trained, task in KINDS:
        words = [*Training("one", "LoRA, language", task).words(Path(folder))[:-1], trained]
        for layout in layouts:
            given = [f"parallel.{axis}={size}" for axis, size in layout.items()]
            out.append(asdict(run_job(ranks, [*words, *given])))
    return out


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_vision_ranks_beside_every_axis_give_the_numbers_of_one(tmp_path):
    write_rows(tmp_path)
    layouts = [layout for layout, _ in MORE.values()]
    one = RunningRanks(tmp_path / "one", 1, train_few, str(tmp_path), [{}])
    three = RunningRanks(tmp_path / "three", 3, train_few, str(tmp_path), layouts)
    (alone,), many = one.results(250), three.results(250)
    for number, found in enumerate(many[0]):
        name, (_, wrapper) = list(MORE.items())[number % len(MORE)]
        ran, base = Ran(**found), Ran(**alone[number // len(MORE)])
        loss, norm = ran.differs(base)
        assert loss <= SAME and norm <= 100 * SAME, (name, loss, norm)
        assert ran.wrapper == wrapper and len(ran.losses) == STEPS
        assert all(rank[number]["losses"] == ran.losses for rank in many)


def run_words(folder, task, out, *more):
    rows = {"chat": chat_rows, "rerank": rerank_rows}[task]
    data = folder / f"{task}.jsonl"
    if not data.exists():
        rows(folder)
    (folder / "run.yaml").write_text("model:\n  path: builtin:tiny\n", encoding="utf-8")
    return [
        *("train", str(folder / "run.yaml"), "track=[]", "data.workers=0", "optim.name=sgd", "optim.lr=0.002"),
        *("optim.clip=null", f"task={task}", f"data.train={data}", f"data.eval={data}", f"output={folder / out}"),
        *("train.global_batch_size=3", "train.eval_every=2", "train.save_every=2", "train.micro_batch_tokens=150"),
        *("eval.max_new_tokens=4", "train.keep=9", "trainable={language: lora, lora: {rank: 4}}", *more),
    ]


def assert_alike(folder, name, alone, steps):
    mine, one = (read_rows(folder / run / "metrics.jsonl") for run in (name, alone))
    assert [row["loss"] for row in mine] == pytest.approx([row["loss"] for row in one], rel=SAME)
    assert [(r["pixels"], r["tokens"], r["units"]) for r in mine] == [
        (r["pixels"], r["tokens"], r["units"]) for r in one
    ]
    assert len(mine) == steps and any(row["pixels"] for row in mine) and mine[0]["loss"] != mine[-1]["loss"]
    figures, figures_one = (read_rows(folder / run / "eval.jsonl") for run in (name, alone))
    assert [f["step"] for f in figures] == [f["step"] for f in figures_one] and len(figures) == steps // 2
    for row, row_one in zip(figures, figures_one, strict=True):
        assert row["metrics"] == pytest.approx(row_one["metrics"], rel=SAME)
    weights, weights_one = (load_file(folder / run / "export" / "model.safetensors") for run in (name, alone))
    assert weights.keys() == weights_one.keys() and any("visual" in key for key in weights)
    assert all(torch.allclose(weights[key], weights_one[key], rtol=1e-4, atol=1e-6) for key in weights)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("task", ["rerank", "chat"])
def test_a_run_with_evaluations_a_resume_and_an_export_ends_as_without(tmp_path, task):
    (tmp_path / "logs").mkdir()
    layout = ("train.steps=12", "parallel.dp_shard=2" if task == "chat" else "parallel.dp_replicate=2")
    whole = run_litchi_ranks(tmp_path / "logs" / "whole", 2, *run_words(tmp_path, task, "whole", *layout))
    assert [e.status for e in whole] == [0, 0], whole[0].err
    words = run_words(tmp_path, task, "parted", *layout, "parallel.vision_ranks=1")
    begun = [start_litchi(tmp_path / "logs" / f"begun{e['RANK']}", *words, env=e) for e in rank_variables(3)]
    begun[0].wait_for("step  3/12")
    os.kill(begun[2].pid, signal.SIGTERM)  # the vision rank
    ended = [rank.end(60) for rank in begun]
    assert [e.status for e in ended] == [75, 75, 75], ended[0].err
    again = run_litchi_ranks(tmp_path / "logs" / "again", 3, *words, timeout_s=120)
    assert [e.status for e in again] == [0, 0, 0], "\n".join(e.err[-2000:] for e in again)
    assert "resumed from" in again[0].err
    assert_alike(tmp_path, "parted", "whole", 12)
