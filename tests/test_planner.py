"""The planner: what it traces against what autograd keeps, its arithmetic by hand, its report, and real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from litchi.config import load_config
from litchi.model.sizes import MEMBERS, count_parameters, size_config
from litchi.parallel.estimate import Recipe, estimate
from litchi.parallel.machines import MACHINES, find_machine, name_machine
from litchi.parallel.mesh import Layout
from litchi.parallel.recipe import best_layout, best_micro_batch, make_recipe, read_load
from litchi.parallel.trace import Setup, Stream, trace
from litchi.scale.plan import impossible, plan_run

FULL = "trainable={vision: full, merger: full, language: full, head: full}"
A100 = find_machine("a100-80gb")


def trainable(words):
    return load_config(None, ["task=chat", "model.path=builtin:tiny", words], need=()).trainable


def make(size, *words):
    config = load_config(None, ["task=chat", "model.path=builtin:tiny", *words], need=())
    model = size_config(size)
    return make_recipe(config, model, read_load(config, model))


def test_a_checkpointed_layer_keeps_its_input_alone():
    found = trace(size_config("7b"), trainable("trainable={language: lora}"), Stream(1000, 10),
                  Setup("cuda", torch.bfloat16, checkpoint=True))  # fmt: skip
    assert found.layer == 1000 * 3584 * 2


def test_a_layer_keeps_what_its_backward_reads():
    """Two normed inputs, queries, keys, values, attention's output and log-sum-exp, gate, up, their product, and what
    norms need: by hand, in bf16."""
    tokens, h, kv, wide = 512, 3584, 512, 18944
    found = trace(size_config("7b"), trainable("trainable={language: full}"), Stream(tokens, 5, lengths=512),
                  Setup("cuda", torch.bfloat16))  # fmt: skip
    kept = 2 * (2 * h + 2 * h + h + 2 * kv + h + 2 * wide)  # two residuals and their norms, q, k, v, out, gate, up
    least, most = tokens * kept, tokens * (kept + 2 * wide + 8 * h)
    assert least <= found.layer <= most


def test_pictures_of_a_frozen_tower_are_not_kept():
    stream = Stream(512, 5, ((1, 16, 16),))
    frozen = trace(size_config("3b"), trainable("trainable={language: full}"), stream, Setup("cuda", torch.bfloat16))
    trained = trace(size_config("3b"), trainable(FULL.replace(", head: full", "")), stream,
                    Setup("cuda", torch.bfloat16))  # fmt: skip
    assert frozen.block == 0 < trained.block


@pytest.mark.slow
def test_states_by_hand():
    whole = sum(count_parameters(size_config("7b")).values())
    found = estimate(make("7b", FULL), Layout(dp_shard=8), A100)
    parts = found.parts
    assert parts["weights"] == pytest.approx(4 * whole / 8)
    assert parts["gradients"] == pytest.approx(4 * whole / 8)
    assert parts["optimizer"] == pytest.approx(8 * whole / 8)
    assert sum(parts.values()) == found.peak_bytes
    lora = estimate(make("7b", "trainable={language: lora, lora: {rank: 16}}"), Layout(), A100).parts
    assert lora["gradients"] == pytest.approx(4 * 40_370_176) and lora["optimizer"] == 2 * lora["gradients"]
    assert lora["weights"] == pytest.approx(2 * whole + 4 * 40_370_176)
    assert estimate(make("7b", FULL, "optim.name=sgd"), Layout(dp_shard=8), A100).parts["optimizer"] == 0


@pytest.mark.slow
def test_more_tokens_and_no_checkpoints_take_more():
    recipe, layout = make("7b", FULL), Layout(dp_shard=8)
    more = replace(recipe, global_batch=512, micro_batch_tokens=32768, known={})
    few = replace(more, micro_batch_tokens=8192, known={})
    peak = {name: estimate(r, layout, A100).peak_bytes for name, r in (("more", more), ("few", few))}
    peak["twice"] = estimate(replace(more, checkpoint=True, known={}), layout, A100).peak_bytes
    assert peak["more"] > peak["few"] and peak["more"] > peak["twice"]


def test_a_layout_that_is_too_large_says_by_how_much():
    found = estimate(make("7b", FULL), Layout(dp_replicate=8), A100)
    assert not found.fits and found.why_not == f"needs {found.peak_bytes / 1e9:.0f} GB of 86"
    reasons = {layout.tp: why for layout, why in impossible(size_config("7b"), 8)}
    assert set(reasons) == {8} and "not divisible by tp 8" in reasons[8]
    assert (
        "fewer than 8 ranks"
        in estimate(
            make("3b", "train.global_batch_size=4", FULL.replace(", head: full", "")), Layout(dp_shard=8), A100
        ).why_not
    )


@pytest.mark.slow
def test_a_slower_network_bounds_what_spans_machines():
    recipe, layout = make("7b", FULL), Layout(dp_shard=16)
    fast, slow = (estimate(recipe, layout, replace(A100, network=n), cards=8) for n in (25e9, 1e9))
    assert slow.seconds["communication"] == pytest.approx(25 * fast.seconds["communication"])
    assert slow.bound == "communication" and slow.step_s > fast.step_s
    inside = estimate(recipe, layout, replace(A100, network=1e9), cards=16)
    assert inside.seconds["communication"] < fast.seconds["communication"]


def test_machines_are_found_by_their_drivers_names():
    assert name_machine("NVIDIA A100-SXM4-80GB", 85e9) == "a100-80gb"
    assert name_machine("NVIDIA A100-SXM4-40GB", 42e9) == "a100-40gb"
    assert name_machine("NVIDIA GeForce RTX 4090", 25e9) == "rtx4090"
    assert name_machine("Tesla V100", 32e9) is None
    assert all(m.source and m.price > 0 for m in MACHINES.values())


def plan(*words):
    done = subprocess.run([sys.executable, "-m", "litchi", "plan", *words], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_the_largest_model_on_the_smallest_card_does_not_fit(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("task: chat\nmodel: {path: 'builtin:tiny'}\ntrainable: {language: full}\n", encoding="utf-8")
    status, out, _ = plan(str(file), "--model-size", "72b", "--gpus", "1", "--gpu", "rtx4090")
    assert status == 1 and "nothing fits" in out and "needs " in out


@pytest.mark.slow
def test_the_verb_reports_and_says_when_nothing_fits(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("task: chat\nmodel: {path: 'builtin:tiny'}\ntrainable: {language: full}\n", encoding="utf-8")
    status, out, _ = plan(str(file), "--gpus", "2", "--json")
    report = json.loads(out)
    fitting = [found["fits"] for found in report["layouts"]]
    assert status == 0 and fitting == sorted(fitting, reverse=True) and fitting[0]
    times = [found["step_s"] for found in report["layouts"] if found["fits"]]
    assert times == sorted(times)
    for found in report["layouts"]:
        assert set(found) >= {"parallel", "fits", "peak_bytes", "parts", "step_s", "why_not"}
        assert found["fits"] == (found["why_not"] is None)
    status, _, err = plan(str(file), "--gpu", "abacus")
    assert status == 2 and "a100-80gb" in err


@pytest.mark.slow
def test_the_datas_own_rows_are_read(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "red " * n}, {"role": "assistant", "content": "two"}]}
        for n in (9, 99)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    file = tmp_path / "run.yaml"
    file.write_text("task: chat\nmodel: {path: 'builtin:tiny'}\ntrainable: {language: full}\n", encoding="utf-8")
    found = plan_run(
        str(file), [f"data.train={tmp_path}/rows.jsonl", "train.global_batch_size=2", "train.epochs=3"],
        size=None, gpu="h200", gpus=1, nodes=1, price=2.0,
    )  # fmt: skip
    data = found["data"]
    assert data["from_data"] and data["samples"] == 2 and found["steps"] == 3
    assert data["longest"] > data["tokens"] > 50
    best = found["layouts"][0]
    assert best["usd"] == pytest.approx(3 * best["step_s"] / 3600 * 2.0)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("cards", [8, 64])
@pytest.mark.parametrize("name", sorted(MEMBERS))
def test_real_members_are_planned(name, cards, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("task: chat\nmodel: {path: 'builtin:tiny'}\ntrainable: {language: lora}\n", encoding="utf-8")
    found = plan_run(str(file), [], size=name, gpu="h200", gpus=8, nodes=cards // 8, price=None)
    assert found["fits"] and len(found["layouts"]) >= 5


def test_a_recipe_is_of_a_gpu_that_computes_in_bf16():
    light, heavy = make("7b", "trainable={language: lora}"), make("7b", FULL)
    assert isinstance(light, Recipe)
    assert (light.held, light.computed) == (torch.bfloat16, torch.bfloat16)
    assert (heavy.held, heavy.computed) == (torch.float32, torch.bfloat16)


@pytest.mark.slow
def test_what_auto_would_take():
    recipe = make("3b", "trainable={language: lora}")
    best = best_layout(recipe, 2, A100)
    assert best is not None and best.fits and best.layout.ranks == 2
    tokens = best_micro_batch(replace(recipe, global_batch=512, known={}), best.layout, A100)
    less = best_micro_batch(replace(recipe, global_batch=512, known={}), best.layout, find_machine("rtx4090"))
    assert tokens > less > 0


def test_what_is_missing_or_unknown_is_named(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("task: chat\n", encoding="utf-8")
    status, _, err = plan(str(file), "--gpu", "a100-80gb")
    assert status == 2 and "model.path" in err and "config.json" not in err
    status, _, err = plan(str(file), "--model-size", "7b", "--gpu", "abacus")
    assert status == 2 and "abacus" in err and "a100-80gb" in err
