"""The axes of a layout: where ranks stand, what stages, streams and pictures are cut into. All of it pure."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from litchi.batch.balance import share_pictures
from litchi.config import load_config
from litchi.errors import UsageError
from litchi.parallel.mesh import AXES, Layout, Place, choose_layout
from litchi.parallel.pipeline import Action, plan_actions, split_layers
from litchi.parallel.sequence import count_rows, cut_stream
from litchi.types import Batch

small = st.integers(1, 3)


@given(st.builds(Layout, **dict.fromkeys(AXES, small)))
def test_places_are_a_grid_with_tp_ranks_side_by_side(layout):
    places = [layout.place(rank) for rank in range(layout.ranks)]
    assert len(set(places)) == layout.ranks
    assert places[: layout.tp] == [Place(tp=t) for t in range(layout.tp)]
    assert places[-1] == Place(**{axis: getattr(layout, axis) - 1 for axis in AXES})
    stages = Counter(place.pp for place in places)
    assert set(stages.values()) == {layout.stage_ranks}


@given(st.builds(Layout, **dict.fromkeys(AXES, small)))
def test_each_batch_has_one_rank_that_speaks_for_it(layout):
    leaders = [rank for rank in range(layout.ranks) if layout.leads(rank)]
    assert sorted(layout.data_rank(rank) for rank in leaders) == list(range(layout.data_ranks))
    assert all(layout.place(rank).pp == layout.pp - 1 for rank in leaders)
    seen = Counter(layout.data_rank(rank) for rank in range(layout.ranks))
    assert set(seen.values()) == {layout.tp * layout.cp * layout.pp}


@pytest.mark.parametrize(
    "layout, wrapper, data, averaged",
    [
        (Layout(), "none", 1, 1),
        (Layout(dp_replicate=4), "DDP", 4, 4),
        (Layout(dp_shard=4), "FSDP2", 4, 4),
        (Layout(dp_replicate=2, dp_shard=2), "HSDP", 4, 4),
        (Layout(tp=4), "none", 1, 1),
        (Layout(cp=4), "DDP", 1, 4),
        (Layout(pp=4), "none", 1, 1),
        (Layout(dp_replicate=2, tp=2), "FSDP2", 2, 2),
        (Layout(cp=2, pp=2), "FSDP2", 1, 2),
        (Layout(dp_shard=2, cp=2), "FSDP2", 2, 4),
    ],
)
def test_what_is_wrapped_and_averaged(layout, wrapper, data, averaged):
    assert (layout.wrapper, layout.data_ranks, layout.gradient_ranks) == (wrapper, data, averaged)


def chosen(world, fits=True, **axes):
    words = [f"parallel.{axis}={size}" for axis, size in axes.items()]
    return choose_layout(load_config(None, ["task=chat", *words], need=()).parallel, world, fits_whole=fits)


def test_data_axes_take_the_ranks_that_are_left():
    assert chosen(8, tp=2) == Layout(dp_replicate=4, tp=2)
    assert chosen(8, fits=False, tp=2, pp=2) == Layout(dp_shard=2, tp=2, pp=2)
    assert chosen(8, dp_shard=2, cp=2) == Layout(dp_replicate=2, dp_shard=2, cp=2)
    assert chosen(4, pp=4, pp_schedule="gpipe") == Layout(pp=4, pp_schedule="gpipe")
    assert str(chosen(8, dp_shard=2, cp=2)) == "dp_replicate 2 x dp_shard 2 x cp 2"


@pytest.mark.parametrize(
    "world, axes, said",
    [
        (6, {"tp": 4}, "tp 4 needs a multiple of 4 ranks, but there are 6"),
        (8, {"tp": 2, "dp_shard": 3}, r"dp_shard=3 does not divide 4 ranks \(8 / tp 2\)"),
        (8, {"tp": 2, "dp_shard": 2, "dp_replicate": 4}, "dp_replicate 4 x dp_shard 2 x tp 2 = 16, but there are 8"),
    ],
)
def test_products_that_do_not_fit_are_refused_with_both_numbers(world, axes, said):
    with pytest.raises(UsageError, match=said):
        chosen(world, **axes)


# ---------------------------------------------------------------------------------------------------------- stages


def test_layers_of_stages():
    assert split_layers(28, 4) == [range(0, 7), range(7, 14), range(14, 21), range(21, 28)]
    assert [len(r) for r in split_layers(7, 3)] == [2, 2, 3]  # the first stage has the vision tower besides
    assert [len(r) for r in split_layers(3, 3)] == [1, 1, 1]


def words(actions):
    return " ".join(f"{a.kind}{a.micro}" for a in actions)


def test_the_schedules_as_they_are_drawn_in_the_papers():
    assert words(plan_actions("gpipe", 0, 2, 3)) == "F0 F1 F2 B0 B1 B2"
    assert words(plan_actions("1f1b", 0, 2, 3)) == "F0 F1 B0 F2 B1 B2"
    assert words(plan_actions("1f1b", 1, 2, 3)) == "F0 B0 F1 B1 F2 B2"
    assert words(plan_actions("1f1b", 0, 4, 2)) == "F0 F1 B0 B1"  # fewer micro-batches than stages


@given(st.sampled_from(["1f1b", "gpipe"]), st.integers(1, 6), st.integers(0, 9))
def test_stages_never_wait_for_each_other_in_a_circle(schedule, stages, micro):
    """Every stage runs every micro-batch once each way, and there is always one that can go on."""
    left = [list(plan_actions(schedule, stage, stages, micro)) for stage in range(stages)]
    done = [set() for _ in range(stages)]
    assert all(sorted(map(words_of, actions)) == sorted(both(micro)) for actions in left)
    kept = [0] * stages
    while any(left):
        able = [s for s in range(stages) if left[s] and ready(left[s][0], s, stages, done)]
        assert able
        for stage in able:
            action = left[stage].pop(0)
            done[stage].add(action)
            kept[stage] += 1 if action.kind == "F" else -1
            if schedule == "1f1b":
                assert kept[stage] <= stages - stage


def words_of(action):
    return f"{action.kind}{action.micro}"


def both(micro):
    return [f"{kind}{i}" for kind, i in itertools.product("FB", range(micro))]


def ready(action, stage, stages, done):
    if action.kind == "F":
        return stage == 0 or action in done[stage - 1]
    return action in done[stage + 1] if stage < stages - 1 else Action("F", action.micro) in done[stage]


# --------------------------------------------------------------------------------------------- streams and pictures


def stream(tokens, rows, targets, groups=(), image_at=()):
    return Batch(
        ids=torch.arange(tokens),
        positions=torch.arange(tokens).expand(3, -1),
        spans=((0, tokens, -1),),
        pixels=torch.zeros(0, 0, dtype=torch.uint8),
        grids=(),
        image_at=torch.tensor(image_at, dtype=torch.int64),
        image_from=torch.arange(len(image_at)),
        rows=torch.tensor(rows),
        targets=torch.tensor(targets),
        groups=groups,
        doc_ids=(),
        samples=("a",),
        units=1,
    )


def test_a_stream_of_seven_tokens_on_two_ranks():
    batch = stream(7, rows=[1, 3, 4, 6], targets=[10, 30, 40, 60], image_at=[2, 3, 5])
    first, second = (cut_stream(batch, rank, 2) for rank in range(2))
    assert first.ids.tolist() == [0, 1, 2, 3] and second.ids.tolist() == [4, 5, 6, 0]
    assert second.positions[0].tolist() == [4, 5, 6, 0]
    assert first.spans == second.spans == ((0, 7, -1), (7, 8, -1))  # the filling attends to itself alone
    assert first.rows.tolist() == [1, 3] and first.targets.tolist() == [10, 30]
    assert second.rows.tolist() == [0, 2] and second.targets.tolist() == [40, 60]
    assert first.image_at.tolist() == [2, 3] and first.image_from.tolist() == [0, 1]
    assert second.image_at.tolist() == [1] and second.image_from.tolist() == [2]
    assert count_rows(batch, 2) == [2, 2] and count_rows(batch, 4) == [1, 1, 1, 1]


def test_groups_keep_all_their_targets():
    batch = stream(8, rows=[6, 7], targets=[1.0, 0.0], groups=((0, 2),))
    assert [cut_stream(batch, rank, 2).targets.tolist() for rank in range(2)] == [[1.0, 0.0]] * 2
    assert count_rows(batch, 2) == [0, 2]


@given(st.integers(1, 40), st.integers(1, 5), st.data())
def test_nothing_of_a_stream_is_lost_or_held_twice(tokens, size, data):
    rows = data.draw(st.lists(st.integers(0, tokens - 1), unique=True).map(sorted))
    batch = stream(tokens, rows=rows, targets=rows, image_at=rows)
    parts = [cut_stream(batch, rank, size) for rank in range(size)]
    length = len(parts[0].ids)
    assert {len(p.ids) for p in parts} == {length} and length * size - tokens < size
    assert [r + rank * length for rank, p in enumerate(parts) for r in p.rows.tolist()] == rows
    assert [t for p in parts for t in p.targets.tolist()] == rows
    assert [n for p in parts for n in p.image_from.tolist()] == list(range(len(rows)))
    assert [len(p.rows) for p in parts] == count_rows(batch, size)


@given(st.lists(st.tuples(st.just(1), st.integers(1, 30), st.integers(1, 30)), max_size=12), st.integers(1, 5))
def test_pictures_are_shared_out_evenly(grids, ranks):
    shares = share_pictures(grids, ranks)
    assert sorted(n for share in shares for n in share) == list(range(len(grids)))
    load = [sum(h * w for _, h, w in (grids[n] for n in share)) for share in shares]
    assert max(load) - min(load) <= max((h * w for _, h, w in grids), default=0)
