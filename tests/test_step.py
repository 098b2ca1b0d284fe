"""A step's gradient is that of (sum of token losses / supervised tokens), however its rows are cut into micro-batches.

The oracle is transformers' own model and torch's cross entropy, row by row.
"""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F
from rendering import pack, render, renderer_for, sample

from litchi.errors import UserError
from litchi.model.build import builtin_folder, load_model
from litchi.model.forward import LitchiModel
from litchi.parallel.apply import Wrapped
from litchi.parallel.mesh import Layout
from litchi.train.nonfinite import Fault
from litchi.train.step import Trainer, gradient_square, train_step

WORDS = (1, 40, 7, 2, 25, 3, 11)  # of each row's answer
SPLITS = {"one": [7], "seven": [1] * 7, "4 + 3": [4, 3], "2 + 5": [2, 5], "2 + 2 + 2 + 1": [2, 2, 2, 1]}


@pytest.fixture(scope="module")
def renderer(processor):
    return renderer_for("chat", processor)


@pytest.fixture(scope="module")
def examples(renderer):
    answers = [" ".join(["red", "apple", "two"][(n + i) % 3] for i in range(n)) for n in WORDS]
    turns = [
        [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": a}]
        for n, a in zip(WORDS, answers, strict=True)
    ]
    return [render(renderer, sample(renderer, {"id": f"row {i}", "messages": t}, i)) for i, t in enumerate(turns)]


@pytest.fixture(scope="module")
def expected(examples, hf_model):
    """rows -> (mean loss, gradient by name), by transformers."""

    def compute(rows):
        hf_model.zero_grad()
        total = count = 0
        for example in (examples[i] for i in rows):
            ids, labels = (torch.tensor(a.tolist()) for a in (example.ids, example.labels))
            logits = hf_model(input_ids=ids[None]).logits[0]
            total = total + F.cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum")
            count += int((labels[1:] != -100).sum())
        (total / count).backward()
        gradient = {n: p.grad.clone() for n, p in hf_model.named_parameters() if p.grad is not None}
        return float(total.detach()) / count, gradient

    yield compute
    hf_model.zero_grad()


@pytest.fixture
def make(ranks):
    """A trainer on a fresh model; SGD with rate 1, so that an update is the gradient."""

    def build(clip=None, kind=torch.optim.SGD, scaler=None):
        loaded = load_model(builtin_folder(), dtype=torch.float32)
        loaded.hf.requires_grad_(True)
        owner = LitchiModel(loaded.hf, loaded.family, loaded.processor.vision)
        optimizer = kind(owner.parameters(), lr=1.0)
        for group in optimizer.param_groups:
            group["full_lr"] = 1.0
        return Trainer(Wrapped(owner, owner, Layout(), 0, "fp32"), optimizer, ranks, clip, scaler)

    return build


def split(renderer, examples, sizes):
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [pack(renderer, examples[a : a + n]) for a, n in zip(starts, sizes, strict=True)]


def weights(trainer):
    return {n.removeprefix("hf."): p.detach().clone() for n, p in trainer.wrapped.owner.named_parameters()}


def take(trainer, batches, step=1):
    """(result, by how much each weight fell)."""
    before = weights(trainer)
    result = train_step(trainer, step, batches, 1.0)
    return result, {n: before[n] - w for n, w in weights(trainer).items()}


def assert_is(fell, gradient, tolerance=1e-5):
    """Each weight moved by its gradient; tensors with next to none are held against the norm of all."""
    whole = norm_of(gradient)
    assert whole > 0.1
    for name, moved in fell.items():
        wanted = gradient.get(name, torch.zeros_like(moved))
        assert (moved - wanted).norm() <= tolerance * max(float(wanted.norm()), 0.01 * whole), name


def norm_of(gradient):
    return float(torch.stack([g.double().norm() for g in gradient.values()]).norm())


@pytest.mark.parametrize("sizes", SPLITS.values(), ids=SPLITS)
def test_the_gradient_is_that_of_the_token_mean(make, renderer, examples, expected, sizes):
    loss, gradient = expected(range(7))
    result, fell = take(make(), split(renderer, examples, sizes))
    assert_is(fell, gradient)
    assert result.loss == pytest.approx(loss, rel=1e-6)  # so it does not grow with accumulation
    assert result.units == sum(int((e.labels[1:] != -100).sum()) for e in examples) > sum(WORDS)
    assert result.grad_norm == pytest.approx(norm_of(gradient), rel=1e-5)
    rowwise = sum(expected([i])[0] for i in range(7)) / 7
    assert abs(rowwise - loss) > 0.01  # a mean of the rows' means would be another number here


def test_a_short_last_window_is_divided_by_its_own_tokens(make, renderer, examples, expected):
    for rows in (range(0, 4), range(4, 7)):
        loss, gradient = expected(rows)
        result, fell = take(make(), [pack(renderer, [examples[i]]) for i in rows])
        assert_is(fell, gradient)
        assert result.loss == pytest.approx(loss, rel=1e-6)


def test_an_empty_micro_batch_changes_nothing(make, renderer, examples):
    plain, fell = take(make(), split(renderer, examples, [7]))
    beside, also = take(make(), [*split(renderer, examples, [7]), pack(renderer, [])])
    assert (beside.loss, beside.units, beside.tokens) == (plain.loss, plain.units, plain.tokens)
    assert all(torch.equal(fell[n], also[n]) for n in fell) and plain.grad_norm > 0.1


@pytest.mark.parametrize("sizes", SPLITS.values(), ids=SPLITS)
def test_the_norm_is_clipped_once(make, renderer, examples, expected, sizes):
    _, gradient = expected(range(7))
    norm = norm_of(gradient)
    result, fell = take(make(clip=norm / 2), split(renderer, examples, sizes))
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)  # as it was before the cut
    assert_is(fell, {n: g / 2 for n, g in gradient.items()}, tolerance=1e-4)


def test_a_norm_below_the_clip_is_left_alone(make, renderer, examples):
    _, free = take(make(), split(renderer, examples, [7]))
    _, loose = take(make(clip=1e4), split(renderer, examples, [7]))
    assert all(torch.equal(free[n], loose[n]) for n in free)


def poison(trainer):
    """Make the model's output not finite: one infinite weight in the last norm."""
    with torch.no_grad():
        trainer.wrapped.owner.hf.model.language_model.norm.weight[0] = float("inf")


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_that_is_not_finite_is_left_out(make, renderer, examples, kind):
    trainer = make(kind=kind)
    poison(trainer)
    before = weights(trainer)
    result, _ = take(trainer, split(renderer, examples, [4, 3]), step=5)
    assert result.skipped and result.step == 5 and not math.isfinite(result.loss)
    assert all(torch.equal(before[n], w) for n, w in weights(trainer).items())
    assert not trainer.optimizer.state  # neither momentum nor a count of steps
    assert all(p.grad is None for p in trainer.wrapped.owner.parameters())
    with torch.no_grad():
        trainer.wrapped.owner.hf.model.language_model.norm.weight[0] = 1.0
    after, fell = take(trainer, split(renderer, examples, [4, 3]), step=6)
    assert not after.skipped and all(moved.any() for n, moved in fell.items() if "language_model.layers" in n)


def test_a_fault_names_the_samples_and_the_first_module(make, renderer, examples):
    """Those of the micro-batch whose loss it is: here only one has the word with an infinite embedding."""
    trainer = make()
    odd = render(renderer, sample(renderer, {"id": "odd one", "messages": [
        {"role": "user", "content": "zebra"}, {"role": "assistant", "content": "yes"}]}, 9))  # fmt: skip
    word = next(iter(set(odd.ids.tolist()) - {i for e in examples for i in e.ids.tolist()}))
    with torch.no_grad():
        trainer.wrapped.owner.hf.model.language_model.embed_tokens.weight[word] = float("nan")
        head = trainer.wrapped.owner.hf.lm_head
        head.weight = torch.nn.Parameter(head.weight.detach().nan_to_num())  # untied, so that others stay finite
    batches = [*split(renderer, examples, [4, 3]), pack(renderer, [odd])]
    take(trainer, batches, step=3)
    assert trainer.left_out == "not finite"
    assert trainer.fault == Fault("loss", "hf.model.language_model.embed_tokens", ("odd one",))


@pytest.mark.parametrize("layer", [0, 1])
def test_a_fault_of_a_gradient_names_the_parameter_nearest_to_the_loss(make, renderer, examples, layer):
    trainer = make()
    norm = trainer.wrapped.owner.hf.model.language_model.layers[layer].post_attention_layernorm
    norm.register_full_backward_hook(lambda module, given, out: (given[0] * float("nan"),))
    result, _ = take(trainer, split(renderer, examples, [4, 3]))
    assert math.isfinite(result.loss) and not math.isfinite(result.grad_norm) and result.skipped
    fault = trainer.fault
    assert fault.kind == "gradient" and f"layers.{layer}." in fault.where, fault
    assert fault.samples == tuple(e.id for e in examples)


def test_the_search_repeats_what_was_dropped_and_moves_nothing(make, renderer, examples):
    """The micro-batch is run again with the dropout it had: a fault that only its mask makes is found."""
    trainer = make()
    layers = trainer.wrapped.owner.hf.model.language_model.layers
    masks = []

    def drop(module, given, out):
        mask = torch.rand(()).item()
        masks.append(mask)
        return out * (float("inf") if len(masks) in (2, 3) else 1.0)  # the second micro-batch, and it again

    layers[1].mlp.register_forward_hook(drop)
    torch.manual_seed(3)
    expected = [torch.rand(()).item() for _ in range(2)]
    torch.manual_seed(3)
    take(trainer, split(renderer, examples, [4, 3]))
    assert masks[:2] == expected and masks[2] == masks[1], "masks of two micro-batches, and the second's again"
    assert torch.rand(()).item() not in masks
    assert trainer.fault.samples == tuple(e.id for e in examples[4:])
    assert trainer.fault.where == "hf.model.language_model.layers.1.mlp"


def test_an_overflow_of_fp16_only_lowers_the_scale(make, renderer, examples):
    """Until the scale is 1: then the numbers are to blame."""
    trainer = make(scaler=torch.amp.GradScaler("cpu", init_scale=2.0))
    norm = trainer.wrapped.owner.hf.model.language_model.norm
    norm.register_full_backward_hook(lambda module, given, out: (given[0] * float("inf"),))
    first, fell = take(trainer, split(renderer, examples, [4, 3]))
    assert first.skipped and trainer.left_out == "fp16 overflow" and trainer.fault is None
    assert trainer.scaler.get_scale() == 1.0 and not any(moved.any() for moved in fell.values())
    take(trainer, split(renderer, examples, [4, 3]), step=2)
    assert trainer.left_out == "not finite" and trainer.fault.kind == "gradient"


def test_a_step_that_is_left_out_is_computed_and_changes_nothing(make, renderer, examples):
    trainer = make()
    before = weights(trainer)
    left = train_step(trainer, 4, split(renderer, examples, [4, 3]), 1.0, leave_out=True)
    assert left.skipped and trainer.left_out == "rolled back" and left.grad_norm > 0.1
    assert all(torch.equal(before[n], w) for n, w in weights(trainer).items())
    taken, fell = take(trainer, split(renderer, examples, [4, 3]), step=4)
    assert taken.loss == left.loss and not taken.skipped and any(moved.any() for moved in fell.values())


def test_a_tensor_without_a_gradient_is_an_error_that_names_it(make, renderer, examples):
    trainer = make()
    layer = trainer.wrapped.owner.hf.model.language_model.layers[1].mlp
    layer.down_proj.register_forward_hook(lambda module, given, out: out.detach())  # as a broken kernel would
    with pytest.raises(UserError, match="got no gradient") as caught:
        take(trainer, split(renderer, examples, [7]))
    assert "layers.1.mlp." in caught.value.line()


def test_the_square_of_the_gradient_is_torchs_in_double_precision():
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(n, 3)) for n in (1, 50, 30_000)]
    for p in parameters:
        p.grad = torch.randn_like(p) * 1e-3
    parameters[1].grad *= 1e6
    parameters.append(torch.nn.Parameter(torch.zeros(2)))  # without a gradient
    whole = torch.cat([p.grad.double().flatten() for p in parameters[:3]])
    expected = float(torch.linalg.vector_norm(whole)) ** 2
    assert float(gradient_square(parameters, lambda parameter: 1)) == pytest.approx(expected, rel=2e-14)
    twice = gradient_square(parameters, lambda parameter: 2)  # as if this rank's share were held by another too
    assert float(twice) == pytest.approx(expected / 2, rel=2e-14)


def test_lines_of_the_log_carry_the_same_loss(make, renderer, examples, tmp_path):
    from litchi.train.metrics import RunLog

    result, _ = take(make(), split(renderer, examples, [4, 3]))
    log = RunLog(tmp_path, main=True, tensorboard=False, total=1, every=1, out=(tmp_path / "out.txt").open("w"))
    log.step(result, {"epoch": 0, "tokens_per_s": 1.0, "step_s": 1.0, "data_wait_s": 0.0})
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == result.loss
    assert f"loss {result.loss:.4f}" in (tmp_path / "out.txt").read_text()
