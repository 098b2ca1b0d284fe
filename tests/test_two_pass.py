"""Groups larger than a micro-batch: cut into pieces, with the loss and the gradient of the whole group."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_job import SETTINGS, run_all, run_job
from processes import RunningRanks
from rendering import draw

from litchi.batch.cost import CostModel
from litchi.batch.cutting import cut_group, plan_picks
from litchi.batch.loader import iterate_steps
from litchi.batch.rows import RowCost
from litchi.config import load_config
from litchi.train.losses import cutting, make_loss
from litchi.train.setup import prepare_run
from litchi.train.step import train_step
from litchi.train.two_pass import rehearse

SAME = 1e-6
LOSSES = ("group_softmax", "pairwise", "listwise_lambda", "bce", "{name: bce, weight: balanced}")
LIMIT = "train.micro_batch_tokens=120"


def row(prefix, children, positives=1):
    lengths = tuple(prefix + n for n in children)
    documents = tuple(range(len(children)))
    return RowCost(
        0, "q", prefix + sum(children), 0, prefix=prefix, documents=documents, lengths=lengths, positives=positives
    )


# ---- The plan


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), st.lists(st.integers(1, 50), min_size=2, max_size=40), st.integers(20, 300))
def test_a_group_is_cut_into_few_even_pieces_within_the_limit(prefix, children, limit):
    one = row(prefix, children)
    runs = cut_group(one, one.documents, limit)
    assert [d for run in runs for d in run] == list(one.documents) and all(runs)
    sizes = [one.work(run).tokens for run in runs]
    if one.tokens <= limit:
        assert len(runs) == 1
        return
    room = max(limit - prefix, prefix, *children)
    assert all(size - prefix <= room for size in sizes)
    assert len(runs) <= 2 * sum(children) / room + 1
    if len(runs) > 1:
        assert max(sizes) - prefix <= sum(children) / len(runs) + max(children)


def test_all_ranks_rehearse_as_many_micro_batches():
    rows = [(n, replace_line(row(40, [30] * n), n), tuple(range(n))) for n in (3, 31, 4, 17, 3, 2)]
    for ranks in (1, 2, 4):
        for cuts, pieces in (("never", 0), ("free", 0), ("together", 1)):
            plan = plan_picks(rows, CostModel(), ranks=ranks, limit=300, cuts=cuts)
            assert len({len(own) for own in plan.picks}) == 1
            found = sorted((pick[0], d) for own in plan.picks for micro in own for pick in micro for d in pick[1])
            assert found == sorted((n, d) for n, _, chosen in rows for d in chosen)
            cut = [[[len(pick) == 3 for pick in micro] for micro in own] for own in plan.picks]
            assert all(all(micro) for own in cut for micro in own[: plan.rehearsed])
            assert not any(any(micro) for own in cut for micro in own[plan.rehearsed :])
            assert bool(plan.rehearsed) == bool(pieces)
            sizes = [sum(rows_of(rows, p[0]).work(p[1]).tokens for p in micro) for own in plan.picks for micro in own]
            assert max(sizes) > 300 if cuts == "never" else max(sizes) <= 300


def replace_line(one, line):
    return one._replace(line=line)


def rows_of(rows, number):
    return next(cost for n, cost, _ in rows if n == number)


def test_which_losses_need_the_whole_group():
    def how(text, **more):
        return cutting(load_config(None, ["task=rerank", f"loss={text}"], need=()).loss, **more)

    assert [how(loss) for loss in LOSSES] == ["together"] * 3 + ["free", "together"]
    assert how("{name: bce, weight: 3.0}", vision_ranks=1) == "free" and how("pairwise", vision_ranks=1) == "never"
    assert cutting(load_config(None, ["task=chat"], need=()).loss) == "never"


# ---- The numbers


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Groups of 3 and of 14 documents; grades; pictures in a query and in documents of different pieces."""
    folder = tmp_path_factory.mktemp("groups")
    pictures = [draw(folder / f"{k}.png", 56, 56 + 28 * k, seed=k) for k in range(3)]
    rows = []
    for n, count in enumerate((3, 14, 2, 11)):
        documents = [f"a {'red ' * (k % 5)}bag {k}" for k in range(count)]
        documents[-1] = {"text": "it", "image": pictures[n % 3]}
        documents[1] = {"text": "or", "image": pictures[(n + n % 2) % 3]}
        query = {"text": "like", "image": pictures[0]} if n == 1 else f"the {'new ' * n}bag"
        rows.append(
            {"query": query, "documents": documents, "labels": [(3 * k + 2) % 4 if k % 3 else 0 for k in range(count)]}
        )
    path = folder / "graded.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


FULL = "trainable={vision: full, merger: full, language: full}"


def words(data, *more, parts=FULL):
    return ["task=rerank", f"data.train={data}", "train.global_batch_size=4", "train.steps=2",
            "data.pixels={min: 784, max: 3136}", parts, *more]  # fmt: skip


@pytest.fixture(scope="module")
def plain(data, ranks):
    return {loss: run_job(ranks, words(data, f"loss={loss}")) for loss in LOSSES}


def assert_same(found, wanted):
    assert found["losses"] == pytest.approx(wanted["losses"], rel=SAME)
    assert found["norms"] == pytest.approx(wanted["norms"], rel=10 * SAME)
    for name, travel in wanted["travel"].items():
        assert found["travel"][name] == pytest.approx(travel, rel=1e-4), name
    assert wanted["norms"][0] > 0.1 and wanted["travel"]["language"] > 0 and wanted["losses"][0] != wanted["losses"][1]


@pytest.mark.parametrize("loss", LOSSES)
def test_pieces_have_the_loss_and_gradient_of_the_group(data, ranks, plain, loss):
    found = run_job(ranks, words(data, f"loss={loss}", LIMIT))
    assert_same(found, plain[loss])
    assert plain[loss]["micro_batches"] == [1, 1] and found["micro_batches"][0] > 2


def on_two_ranks(data, folder, plain, losses):
    """Each axis in the same two processes, held against one process without pieces."""
    jobs = {axis: words(data, f"loss={loss}", LIMIT, f"parallel.{axis}=2") for axis, loss in losses.items()}
    first, second = RunningRanks(folder, 2, run_all, jobs).results()
    for axis, loss in losses.items():
        assert_same(first[axis] if axis != "pp" else {**first[axis], "travel": plain[loss]["travel"]}, plain[loss])
        assert first[axis]["losses"] == second[axis]["losses"]
    return first


def test_pieces_on_two_ranks(data, plain, tmp_path):
    """Whole weights and sharded ones: as many passes on both, or this would hang."""
    found = on_two_ranks(data, tmp_path, plain, {"dp_replicate": "listwise_lambda", "dp_shard": "group_softmax"})
    assert {axis: one["wrapper"] for axis, one in found.items()} == {"dp_replicate": "DDP", "dp_shard": "FSDP2"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pieces_on_ranks_that_share_a_batch(data, plain, tmp_path):
    losses = {"tp": "pairwise", "cp": "listwise_lambda", "pp": "group_softmax"}
    on_two_ranks(data, tmp_path, plain, losses)


def prepared(ranks, folder, *more):
    folder.mkdir(exist_ok=True)
    return prepare_run(load_config(None, [*SETTINGS, *more]), ranks, folder)


def first_step(run):
    _, count_units = make_loss(run.config.loss)
    [(_, batches, _)] = iterate_steps(run.plan, 1, 1, workers=0, count_units=count_units)
    return batches


def test_both_passes_drop_the_same(data, ranks, tmp_path):
    lora = "trainable={language: lora, lora: {rank: 4, dropout: 0.5}}"
    run = prepared(ranks, tmp_path, *words(data, "loss=pairwise", LIMIT, parts=lora))
    with torch.no_grad():
        for name, parameter in run.wrapped.owner.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    batches = first_step(run)
    model = run.wrapped.model.train()
    torch.manual_seed(1)
    first = rehearse(run.wrapped, batches)
    told = sum(batch.told for batch in first.batches)
    scores = {}
    for number, batch in enumerate(first.batches):
        if batch.cuts:
            first.repeat_dropout(number)
            out = model(batch)
            assert out.scores.requires_grad and float(out.loss.detach()) == pytest.approx(batch.told)
            for cut, (a, b) in zip(batch.cuts, batch.groups, strict=True):
                scores.setdefault((cut.group, cut.targets), []).append((cut.first, out.scores[a:b].detach()))
    loss = run.wrapped.owner.score_loss
    again = sum(
        float(loss(torch.cat([s for _, s in sorted(parts, key=lambda p: p[0])]), torch.tensor(t), ((0, len(t)),)))
        for (_, t), parts in scores.items()
    )
    assert told == pytest.approx(again, rel=1e-6) and len(scores) == 2
    torch.manual_seed(2)
    assert sum(batch.told for batch in rehearse(run.wrapped, batches).batches) != pytest.approx(told, rel=1e-3)


def kept_bytes(trainer, batches):
    """The most bytes that were kept for a backward at one time, tensors counted once."""
    alive: dict[int, list[int]] = {}
    most = 0

    class Held:
        def __init__(self, tensor):
            nonlocal most
            self.tensor, self.key = tensor, tensor.untyped_storage().data_ptr()
            alive.setdefault(self.key, [tensor.untyped_storage().nbytes(), 0])[1] += 1
            most = max(most, sum(size for size, _ in alive.values()))

        def __del__(self):
            alive[self.key][1] -= 1
            if not alive[self.key][1]:
                del alive[self.key]

    with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
        train_step(trainer, 1, batches, 1.0)
    weights = sum(p.numel() * p.element_size() for p in trainer.wrapped.owner.parameters())
    return most, weights


def test_the_memory_of_a_large_group_is_that_of_a_piece(ranks, tmp_path):
    """1 + 31 documents at most 1.3 times what 1 + 3 take."""
    most, limit = {}, 100_000
    for negatives in (3, 31):
        documents = [f"{k} {'and a very new one ' * 12}" for k in range(1 + negatives)]
        group = {"query": "a bag", "pos_doc": documents[0], "neg_docs": documents[1:]}
        path = tmp_path / f"{negatives}.jsonl"
        path.write_text(json.dumps(group) + "\n", encoding="utf-8")
        how = words(path, "loss=listwise_lambda", "train.steps=1", f"train.micro_batch_tokens={limit}")
        run = prepared(ranks, tmp_path / str(negatives), *how)
        batches = first_step(run)
        limit = batches[0].tokens
        most[negatives], weights = kept_bytes(run.trainer, batches)
    assert len(batches) >= 8 and all(batch.cuts for batch in batches)
    assert most[31] <= 1.3 * most[3] and most[3] > 2 * weights, (most, weights)
