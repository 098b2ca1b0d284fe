"""Micro-batches prepared ahead: the same from any number of workers, from any step on."""

import json
from dataclasses import fields, replace

import pytest
import torch
from rendering import draw, renderer_for

from litchi.batch.cost import CostModel
from litchi.batch.encoders import Job
from litchi.batch.index import ScanRules, build_index
from litchi.batch.loader import Corpus, StepPlan, iterate_jobs, iterate_steps
from litchi.batch.schedule import EpochPlan
from litchi.errors import DataError
from litchi.train.losses import count_documents


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rows")


@pytest.fixture(scope="module")
def pictures(folder):
    return [draw(folder / f"{k}.png", 56 + 28 * (k % 3), 84, seed=k) for k in range(6)]


def corpus_of(path, processor, task):
    renderer = renderer_for(task, processor)
    index = build_index(str(path), path.stem, renderer, ScanRules(max_length=512))
    assert not index.bad
    return Corpus((index,), (renderer,))


@pytest.fixture(scope="module")
def groups(folder, pictures, processor):
    rows = [
        {
            "query": f"a bag{' of red' * n}",
            "pos_doc": {"image": pictures[n % 6]},
            "neg_docs": [{"image": p} for p in pictures],
        }
        for n in range(10)
    ]
    (folder / "groups.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return corpus_of(folder / "groups.jsonl", processor, "rerank")


def plan(corpus, *, rank=0, ranks=1, limit=400, negatives=2):
    return StepPlan(corpus, EpochPlan(corpus.sizes, (1.0,), 0, 4), negatives, limit, rank, ranks)


def steps(one, first, last, workers=0):
    return [
        (step, batches)
        for step, batches, _ in iterate_steps(one, first, last, workers=workers, count_units=count_documents)
    ]


def assert_same(found, wanted):
    """Bit for bit, field by field."""
    assert [step for step, _ in found] == [step for step, _ in wanted]
    for (_, some), (_, others) in zip(found, wanted, strict=True):
        assert len(some) == len(others)
        for one, other in zip(some, others, strict=True):
            for field in fields(one):
                a, b = getattr(one, field.name), getattr(other, field.name)
                assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, field.name


def test_steps_hold_their_samples_and_pictures(groups):
    found = steps(plan(groups), 1, 3)
    sizes = [sum(len(b.samples) for b in batches) for _, batches in found]
    assert sizes == [4, 4, 2], "the last step of the epoch is short"
    assert sorted(s for _, batches in found for b in batches for s in b.samples) == sorted(
        row.id for row in groups.sources[0].rows
    )
    assert all(len(batches) > 1 for _, batches in found[:2]) and all(b.tokens <= 400 for _, bs in found for b in bs)
    for _, batches in found:
        for batch in batches:
            assert batch.units == len(batch.targets) == 3 * len(batch.samples)
            assert len(batch.grids) < 3 * len(batch.samples) or len(batch.samples) == 1
            assert len(batch.image_at) > 0 and batch.pixels.float().std() > 1


def test_workers_change_nothing(groups):
    assert_same(steps(plan(groups), 1, 4, workers=2), steps(plan(groups), 1, 4))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_that_begins_later_goes_on_alike(groups, workers):
    whole = steps(plan(groups), 1, 7)
    assert_same(steps(plan(groups), 5, 7, workers=workers), whole[4:])


def test_epochs_differ_in_order_and_negatives(groups):
    found = steps(plan(groups), 1, 6)
    first, second = ([b for _, batches in part for b in batches] for part in (found[:3], found[3:]))
    orders = [[s for b in batches for s in b.samples] for batches in (first, second)]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    chosen = [
        {s: b.doc_ids[x:y] for b in batches for s, (x, y) in zip(b.samples, b.groups, strict=True)}
        for batches in (first, second)
    ]
    assert chosen[0] != chosen[1] and all(ids[0] == "d0" and len(ids) == 3 for ids in chosen[0].values())


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_samples_of_a_step(groups, ranks):
    alone = steps(plan(groups), 1, 3)
    shares = [steps(plan(groups, rank=rank, ranks=ranks), 1, 3) for rank in range(ranks)]
    for number, (_, batches) in enumerate(alone):
        here = [share[number][1] for share in shares]
        assert len({len(b) for b in here}) == 1, "every rank has as many micro-batches"
        samples = [s for micro in here for b in micro for s in b.samples]
        assert sorted(samples) == sorted(s for b in batches for s in b.samples)
        assert sum(b.units for micro in here for b in micro) == sum(b.units for b in batches)


def test_the_balance_of_a_step_is_that_of_its_plan(groups):
    """Of the costs that were planned with, a picture counted once in a micro-batch; the same on every rank."""
    costs = CostModel(token=1.0, pair=0.01, patch=3.0)
    plans = [replace(plan(groups, rank=rank, ranks=2), costs=costs) for rank in range(2)]
    rows = groups.sources[0].rows

    def cost_of(works):
        once = {name: cost for work in works for name, cost in costs.picture_costs(work).items()}
        return sum(costs.cost(w) - sum(costs.picture_costs(w).values()) for w in works) + sum(once.values())

    for step in (1, 2):
        loads = [
            [cost_of([rows[row].work(chosen) for row, chosen in micro]) for micro in one.micro_batches(step)]
            for one in plans
        ]
        mean = sum(map(sum, loads)) / 2
        found = plans[0].balance(step)
        assert found == plans[1].balance(step)
        assert found.rank == pytest.approx(max(map(sum, loads)) / mean)
        assert found.micro == pytest.approx(sum(map(max, zip(*loads, strict=True))) / mean) and found.micro > 1


def test_a_long_run_is_not_listed(groups):
    """The first step of a run without an end comes at once."""
    made = iterate_steps(plan(groups), 1, 10**12, workers=0, count_units=count_documents)
    step, batches, waited = next(made)
    assert step == 1 and batches and waited >= 0


@pytest.mark.parametrize("workers", [0, 2])
def test_prompts_end_where_the_last_answer_begins(folder, processor, workers):
    rows = [
        {"messages": [{"role": "user", "content": f"{n} bags?"}, {"role": "assistant", "content": "no " * n + "bag"}]}
        for n in range(5)
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    corpus = corpus_of(folder / "chat.jsonl", processor, "chat")
    jobs = [Job([(0, None), (3, None)]), Job([(1, None)])]
    batches = list(iterate_jobs(corpus, jobs, workers=workers, prompts=True))
    assert [b.samples for b in batches] == [("chat:1", "chat:4"), ("chat:2",)]
    end = processor.encode("assistant\n")
    for batch in batches:
        for a, b, _ in batch.spans:
            assert batch.ids[b - len(end) : b].tolist() == end and b - a < 40
    whole = list(iterate_jobs(corpus, jobs, workers=workers))
    assert all(w.tokens > b.tokens for w, b in zip(whole, batches, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("damage", "words"), [("gone", "cannot be opened"), ("grown", "changed while the run")])
def test_a_picture_that_changes_under_a_run_stops_it_with_its_row(tmp_path, processor, workers, damage, words):
    pictures = [draw(tmp_path / f"{k}.png", 56, 56, seed=k) for k in range(3)]
    rows = [{"query": "bag", "pos_doc": {"image": p}, "neg_docs": ["a hat"]} for p in pictures]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    corpus = corpus_of(tmp_path / "rows.jsonl", processor, "rerank")
    if damage == "gone":
        (tmp_path / "1.png").unlink()
    else:
        draw(tmp_path / "1.png", 140, 140)
    one = StepPlan(corpus, EpochPlan(corpus.sizes, (1.0,), 0, 3), None, 4096, 0, 1)
    with pytest.raises(DataError) as error:
        steps(one, 1, 1, workers)
    assert "rows.jsonl:2" in str(error.value) and words in str(error.value)
