"""Sharing a step out over ranks and micro-batches: nothing lost, within the limit, few micro-batches, even in cost."""

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from litchi.batch.balance import PLACES, measure_balance, split_costs
from litchi.batch.cost import Work, forest_pairs
from litchi.batch.sharing import shared_loads
from litchi.config import load_config
from litchi.model.flops import read_costs
from litchi.model.sizes import size_config

LIMIT = 16384


def mixture(count, seed):
    """Costs on the 7B model and tokens of texts (lognormal lengths) with pictures (lognormal areas, many shapes)."""
    draw = np.random.default_rng(seed)
    trainable = load_config(None, ["task=chat", "model.path=builtin:tiny"], need=()).trainable
    model = read_costs(size_config("7b"), scored=False, trainable=trainable)
    works = []
    for pictures in draw.choice([0, 1, 2, 4], count, p=[0.3, 0.45, 0.15, 0.1]):
        text = int(np.clip(draw.lognormal(5.5, 1.0), 20, 4000))
        area, aspect = np.clip(draw.lognormal(12.5, 0.8, pictures), 3136, 1e6), np.exp(draw.normal(0, 0.3, pictures))
        sides = [np.maximum(2, 2 * np.round(np.sqrt(area * a) / 28).astype(int)) for a in (aspect, 1 / aspect)]
        grids = tuple((1, int(h), int(w)) for h, w in zip(*sides, strict=True))
        tokens = text + sum(h * w // 4 for _, h, w in grids)
        works.append(Work(tokens, forest_pairs(tokens), text // 3, grids))
    return [model.cost(w) for w in works], [w.tokens for w in works]


def loads_of(costs, shares):
    return np.array([[sum(costs[i] for i in batch) for batch in rank] for rank in shares])


# ---- Every split


@st.composite
def steps(draw):
    """Tokens, costs that go with them more or less, ranks, a limit, the least number of micro-batches."""
    tokens = draw(st.lists(st.integers(1, 100), max_size=40))
    costs = [t * draw(st.floats(0.2, 5)) for t in tokens]
    return tokens, costs, draw(st.integers(1, 8)), draw(st.integers(1, 150)), draw(st.integers(1, 4))


@settings(max_examples=200, deadline=None)
@given(steps())
def test_every_sample_is_computed_once_within_the_limit(step):
    tokens, costs, ranks, limit, least = step
    shares = split_costs(costs, ranks, limit, tokens=tokens, least=least)
    assert len(shares) == ranks and len({len(share) for share in shares}) == 1 and len(shares[0]) >= least
    batches = [batch for share in shares for batch in share]
    assert sorted(i for batch in batches for i in batch) == list(range(len(costs)))
    for batch in batches:
        assert len(batch) <= 1 or sum(tokens[i] for i in batch) <= limit
        assert batch == sorted(batch), "the order in the step is kept"
    assert all(batches) or len(costs) < len(batches), "empty only where there are too few samples"
    assert shares == split_costs(costs, ranks, limit, tokens=tokens, least=least)


def test_few_samples_leave_ranks_empty():
    assert split_costs([5, 5], 4, 100) == [[[0]], [[1]], [[]], [[]]]
    assert split_costs([], 2, 100) == [[[]], [[]]]


def test_a_pipeline_gets_the_micro_batches_it_asks_for():
    costs, tokens = mixture(64, seed=0)
    for least in (1, 4, 8):
        shares = split_costs(costs, 2, LIMIT, tokens=tokens, least=least)
        fewest = math.ceil(sum(tokens) / (2 * LIMIT))
        assert len(shares[0]) == max(least, fewest) and all(batch for share in shares for batch in share)
        assert measure_balance(costs, shares).micro < 1.05


def test_the_samples_of_a_step_do_not_depend_on_the_ranks():
    costs = list(range(1, 30))
    for ranks in (1, 2, 5):
        shares = split_costs(costs, ranks, 60)
        assert sorted(i for share in shares for batch in share for i in batch) == list(range(29))


# ---- How even


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("count", [256, 512, 1024])
def test_ranks_are_even_where_that_can_be(ranks, count):
    """Within 5 % of the mean; where one sample is dearer than a rank's mean, within 1 % of that sample."""
    for seed in range(3):
        costs, tokens = mixture(count, seed)
        shares = split_costs(costs, ranks, LIMIT, tokens=tokens)
        balance = measure_balance(costs, shares)
        bound = max(1.0, max(costs) * ranks / sum(costs))
        assert balance.rank <= max(1.05, 1.01 * bound), (balance, bound)
        assert len(shares[0]) == math.ceil(sum(tokens) / (ranks * LIMIT)), "no more micro-batches than the tokens need"
        assert balance.rank <= balance.micro * (1 + 1e-12)
        if bound == 1.0 and count >= 8 * ranks:
            assert balance.micro <= 1.05
        assert balance.rank <= measure_balance(costs, split_costs(tokens, ranks, LIMIT)).rank * (1 + 1e-3)


def test_the_limit_may_leave_next_to_no_room():
    """Tokens fill 99 % and more of all micro-batches: still the fewest, and even ranks."""
    for seed in range(3):
        costs, tokens = mixture(700, seed)
        micro = 12
        limit = sum(tokens) / (8 * micro) * 1.005
        shares = split_costs(costs, 8, limit, tokens=tokens)
        assert len(shares[0]) <= micro + 1
        assert measure_balance(costs, shares).rank <= 1.05


def test_balance_is_worked_out_from_the_plan():
    shares = [[[0], [1]], [[2], []]]
    found = measure_balance([3.0, 1.0, 4.0], shares)
    assert (found.rank, found.micro) == (1.0, 5 / 4)
    assert measure_balance([], [[[]], [[]]]).rank == 1.0


def best_split(costs, tokens, ranks, limit):
    """(fewest micro-batches, lightest heaviest rank with so many), by trying every assignment of samples to ranks."""

    def needed(members):
        """Micro-batches of one rank: the fewest that filling them one by one takes, over all orders."""
        best = math.inf
        for order in set(itertools.permutations([tokens[i] for i in members])):
            bins, held = (1, 0) if order else (0, 0)
            for size in order:
                if held and held + size > limit:
                    bins, held = bins + 1, 0
                held += size
            best = min(best, bins)
        return best

    found = []
    for owner in itertools.product(range(ranks), repeat=len(costs)):
        members = [[i for i, r in enumerate(owner) if r == rank] for rank in range(ranks)]
        if owner[0] == 0:  # ranks are alike
            found.append((max(map(needed, members)), max(sum(costs[i] for i in m) for m in members)))
    return min(found)


def test_small_steps_are_near_the_best_there_is():
    """Against every possible split of six samples: as few micro-batches nearly always, never two more."""
    more, excess = 0, []
    for seed in range(25):
        draw = np.random.default_rng(seed)
        tokens = draw.integers(10, 60, 6).tolist()
        costs = [t * float(draw.uniform(0.5, 2)) for t in tokens]
        micro, heaviest = best_split(costs, tokens, 2, 70)
        shares = split_costs(costs, 2, 70, tokens=tokens)
        assert micro <= len(shares[0]) <= micro + 1
        if len(shares[0]) == micro:
            excess.append(loads_of(costs, shares).sum(1).max() / heaviest)
        else:
            more += 1
    assert more <= 1 and min(excess) >= 1 - 1e-12
    assert np.mean(excess) < 1.03 and max(excess) < 1.25, (np.mean(excess), max(excess))


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_large_evaluation_is_shared_out_too(ranks):
    """Beyond what each sample can look at all micro-batches of: still complete, within the limit, few and even."""
    some, sizes = mixture(500, seed=0)
    costs, tokens = some * 40, sizes * 40
    shares = split_costs(costs, ranks, 4096, tokens=tokens)
    batches = [batch for share in shares for batch in share]
    assert len(costs) * len(shares[0]) > PLACES
    assert sorted(i for batch in batches for i in batch) == list(range(len(costs))) and all(batches)
    assert all(len(batch) == 1 or sum(tokens[i] for i in batch) <= 4096 for batch in batches)
    assert measure_balance(costs, shares).micro < 1.05


def test_a_step_is_planned_in_no_time():
    """2,048 samples on 64 ranks took 15 to 45 ms; the bound leaves room for a busy machine."""
    costs, tokens = mixture(2048, seed=0)
    start = time.process_time()
    split_costs(costs, 64, LIMIT, tokens=tokens)
    assert time.process_time() - start < 0.2


# ---- Pictures that repeat


def catalogue(groups, *, documents, pictures, kinds, seed):
    """Groups whose documents' pictures come from one of the kinds of a catalogue: costs, tokens, costs of pictures."""
    draw = np.random.default_rng(seed)
    price = draw.uniform(100, 400, pictures)
    costs, tokens, shown = [], [], []
    for _ in range(groups):
        kind = draw.integers(kinds) * (pictures // kinds)
        own = {int(kind + p): float(price[kind + p]) for p in draw.choice(pictures // kinds, documents, replace=False)}
        tokens.append(int(draw.uniform(300, 900)) + 64 * documents)
        costs.append(tokens[-1] + sum(own.values()))
        shown.append(own)
    return costs, tokens, shown


def count_pictures(shares, shown):
    return sum(len({p for i in batch for p in shown[i]}) for rank in shares for batch in rank)


@st.composite
def steps_with_pictures(draw):
    tokens, costs, ranks, limit, least = draw(steps())
    shown = [
        {p: 1.0 + p for p in draw(st.lists(st.integers(0, 9), max_size=4, unique=True))} for _ in range(len(tokens))
    ]
    return tokens, [c + sum(own.values()) for c, own in zip(costs, shown, strict=True)], ranks, limit, least, shown


@settings(max_examples=60, deadline=None)
@given(steps_with_pictures())
def test_samples_that_share_pictures_are_computed_once_within_the_limit_too(step):
    tokens, costs, ranks, limit, least, shown = step
    shares = split_costs(costs, ranks, limit, tokens=tokens, least=least, pictures=shown)
    plain = split_costs(costs, ranks, limit, tokens=tokens, least=least)
    batches = [batch for share in shares for batch in share]
    assert [len(share) for share in shares] == [len(share) for share in plain], "no more micro-batches"
    assert sorted(i for batch in batches for i in batch) == list(range(len(costs)))
    for batch in batches:
        assert (len(batch) <= 1 or sum(tokens[i] for i in batch) <= limit) and batch == sorted(batch)
    assert all(batches) or len(costs) < len(batches)
    assert shares == split_costs(costs, ranks, limit, tokens=tokens, least=least, pictures=shown)
    before, after = (shared_loads(costs, one, shown) for one in (plain, shares))
    assert after.sum(1).max() + after.max(0).sum() <= (before.sum(1).max() + before.max(0).sum()) * (1 + 1e-9)
    for own, load in zip(shares, after, strict=True):  # by hand: each picture once in a micro-batch
        for batch, found in zip(own, load, strict=True):
            language = sum(costs[i] - sum(shown[i].values()) for i in batch)
            assert found == pytest.approx(language + sum({p: c for i in batch for p, c in shown[i].items()}.values()))


@pytest.mark.parametrize("ranks", [1, 4])
def test_pictures_repeat_within_micro_batches(ranks):
    """Of a catalogue in kinds a fifth fewer pictures are encoded, and what the heaviest rank computes falls."""
    for seed in range(3):
        costs, tokens, shown = catalogue(64, documents=8, pictures=400, kinds=20, seed=seed)
        plain = split_costs(costs, ranks, 8192, tokens=tokens)
        shares = split_costs(costs, ranks, 8192, tokens=tokens, pictures=shown)
        distinct = len({p for own in shown for p in own})
        assert distinct <= count_pictures(shares, shown) <= 0.8 * count_pictures(plain, shown)
        heaviest = [shared_loads(costs, one, shown).sum(1).max() for one in (plain, shares)]
        assert heaviest[1] < 0.9 * heaviest[0]
        assert measure_balance(costs, shares, shown).rank <= 1.05


def test_without_repeats_nothing_changes():
    costs, tokens = mixture(256, seed=0)
    alone = [{i: cost / 3} for i, cost in enumerate(costs)]
    assert split_costs(costs, 8, LIMIT, tokens=tokens, pictures=alone) == split_costs(costs, 8, LIMIT, tokens=tokens)
    free = [{0: 0.0}] * len(costs)
    assert split_costs(costs, 8, LIMIT, tokens=tokens, pictures=free) == split_costs(costs, 8, LIMIT, tokens=tokens)
