"""Which samples form a step: pure functions, and nothing is lost or counted twice."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from litchi.batch.schedule import EpochPlan, choose_negatives


def plan(sizes, weights=None, *, seed=0, batch=4, shuffle=True):
    return EpochPlan(tuple(sizes), tuple(weights or (1.0,) * len(sizes)), seed, batch, shuffle)


def epoch_rows(one, epoch):
    first = epoch * one.steps_per_epoch + 1
    return [one.rows(step).tolist() for step in range(first, first + one.steps_per_epoch)]


# ---- The order


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=3).filter(any), st.integers(1, 7), st.integers(0, 3))
def test_each_row_comes_once_an_epoch(sizes, batch, seed):
    one = plan(sizes, seed=seed, batch=batch)
    for epoch in (0, 1, 5):
        steps = epoch_rows(one, epoch)
        assert sorted(row for step in steps for row in step) == list(range(sum(sizes)))
        assert all(len(step) == batch for step in steps[:-1]) and 0 < len(steps[-1]) <= batch
        assert one.epoch_of(epoch * len(steps) + 1) == one.epoch_of((epoch + 1) * len(steps)) == epoch


def test_the_last_step_of_an_epoch_is_short():
    one = plan([10], batch=4)
    assert [len(step) for step in epoch_rows(one, 0)] == [4, 4, 2]


def test_orders_differ_by_epoch_and_seed_and_come_again():
    orders = [np.concatenate(epoch_rows(plan([40], seed=seed), epoch)) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert not any((order == np.arange(40)).all() for order in orders)
    assert (np.concatenate(epoch_rows(plan([40], seed=1), 1)) == orders[3]).all()


def test_a_step_can_be_asked_for_alone():
    """Nothing is remembered: step 17 is the same whether or not the steps before it were ever asked for."""
    assert plan([9, 5]).rows(17).tolist() == [plan([9, 5]).rows(step).tolist() for step in range(1, 18)][-1]


def test_without_shuffling_the_order_is_the_files():
    one = plan([3, 2], batch=2, shuffle=False)
    assert epoch_rows(one, 0) == epoch_rows(one, 3) == [[0, 1], [2, 3], [4]]


def counts_over(one, epochs):
    return Counter(row for epoch in range(epochs) for step in epoch_rows(one, epoch) for row in step)


def test_a_weight_of_two_gives_each_row_twice_an_epoch():
    one = plan([5, 3], [2.0, 1.0])
    assert one.counts == (10, 3)
    assert counts_over(one, 1) == {**dict.fromkeys(range(5), 2), **dict.fromkeys(range(5, 8), 1)}


def test_a_weight_of_a_half_gives_each_row_every_other_epoch():
    one = plan([6, 4], [1.0, 0.5])
    assert one.counts == (6, 2)
    halves = [{row for step in epoch_rows(one, epoch) for row in step if row >= 6} for epoch in range(4)]
    assert [len(h) for h in halves] == [2] * 4
    assert halves[0] | halves[1] == halves[2] | halves[3] == {6, 7, 8, 9}


@pytest.mark.parametrize(("size", "weight"), [(7, 0.5), (5, 1.3), (3, 2.5), (1, 0.2)])
def test_over_many_epochs_no_row_is_ahead_of_another(size, weight):
    one = plan([size], [weight])
    for epochs in (1, 3, 20):
        counts = counts_over(one, epochs)
        seen = [counts[row] for row in range(size)]
        assert max(seen) - min(seen) <= 1 and sum(seen) == epochs * one.counts[0]


# ---- Negatives


def test_negatives_are_a_function_of_seed_epoch_and_query():
    chosen = {
        (seed, epoch, query): choose_negatives(seed, epoch, query, 16, 5)
        for seed in (0, 1)
        for epoch in (0, 1)
        for query in "ab"
    }
    for key, negatives in chosen.items():
        assert negatives == choose_negatives(*key, 16, 5) == tuple(sorted(set(negatives)))
        assert len(negatives) == 5 and 0 <= negatives[0] and negatives[-1] < 16
    assert len(set(chosen.values())) == 8


@pytest.mark.parametrize("wanted", [None, 3, 9])
def test_all_negatives_take_part_where_no_fewer_are_wanted(wanted):
    assert choose_negatives(0, 0, "a", 3, wanted) == (0, 1, 2)


def test_every_negative_has_its_turn():
    turns = Counter(n for epoch in range(300) for n in choose_negatives(0, epoch, "a", 6, 2))
    assert min(turns.values()) > 60 and sum(turns.values()) == 600
