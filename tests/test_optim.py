"""The rate of every step by hand, and which parameter is in which group."""

from __future__ import annotations

import pytest
import torch

from litchi.config import load_config
from litchi.model.adapters import apply_trainable
from litchi.model.build import builtin_folder, load_model
from litchi.model.forward import LitchiModel
from litchi.train.optim import build_optimizer, rate_at, set_rate


def rates(schedule, total=6, warmup=2):
    return [rate_at(s, total=total, warmup=warmup, schedule=schedule) for s in range(1, total + 1)]


def test_rates_by_hand():
    assert rates("constant") == [0.5, 1, 1, 1, 1, 1]
    assert rates("linear") == pytest.approx([0.5, 1, 0.8, 0.6, 0.4, 0.2])
    # half a cosine in five equal steps; cos(36) and cos(72) degrees are (sqrt 5 + 1) / 4 and (sqrt 5 - 1) / 4
    golden = (5**0.5 + 1) / 4, (5**0.5 - 1) / 4
    falling = [(1 + c) / 2 for c in (golden[0], golden[1], -golden[1], -golden[0])]
    assert rates("cosine") == pytest.approx([0.5, 1, *falling])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("total, warmup", [(1, 0), (1, 1), (10, 0), (10, 3), (10, 10), (3, 20)])
def test_every_step_moves_and_none_is_above_the_full_rate(schedule, total, warmup):
    found = rates(schedule, total, warmup)
    assert all(0 < rate <= 1 for rate in found)
    assert found[:warmup] == sorted(found[:warmup]) and found[warmup:] == sorted(found[warmup:], reverse=True)
    if warmup <= total:
        assert max(found) == 1 or warmup == 0


def groups_of(*words):
    """(name -> its group), and the optimizer, of the packaged base under some settings."""
    config = load_config(None, ["model.path=builtin:tiny", "optim.weight_decay=0.1", *words], need=("model.path",))
    loaded = load_model(builtin_folder(), dtype=torch.float32)
    apply_trainable(loaded, config.trainable)
    owner = LitchiModel(loaded.hf, loaded.family, loaded.processor.vision)
    optimizer = build_optimizer(owner, loaded.family, config)
    group_of = {id(p): g for g in optimizer.param_groups for p in g["params"]}
    return {name: group_of.get(id(p)) for name, p in loaded.hf.named_parameters()}, optimizer


def test_decay_is_for_matrices_only():
    found, _ = groups_of("task=chat", "trainable={vision: full, merger: full, language: full}")
    assert None not in found.values()
    without = {name for name, group in found.items() if group["weight_decay"] == 0}
    assert without == {n for n in found if n.endswith(".bias") or "norm" in n or "ln_q" in n or "embed_tokens" in n}
    assert any(n.endswith("norm.weight") for n in without) and any(n.endswith(".bias") for n in without)
    assert {group["weight_decay"] for group in found.values()} == {0.0, 0.1}


def test_what_is_frozen_is_in_no_group():
    found, _ = groups_of("task=chat", "trainable={vision: frozen, merger: full, language: frozen}")
    assert {name for name, group in found.items() if group} == {n for n in found if ".visual.merger." in n}


def test_each_part_has_its_rate():
    parts = "trainable={vision: {mode: full, lr: 1e-6}, merger: {mode: full, lr: 1e-5}, language: full}"
    found, optimizer = groups_of("task=rerank", "optim.lr=1e-3", parts)
    for name, group in found.items():
        part = "merger" if ".merger." in name else "vision" if ".visual." in name else "language"
        assert (group["part"], group["full_lr"]) == (part, {"vision": 1e-6, "merger": 1e-5, "language": 1e-3}[part])
    assert set_rate(optimizer, 0.5) == 5e-4
    assert sorted({group["lr"] for group in optimizer.param_groups}) == [5e-7, 5e-6, 5e-4]


@pytest.mark.parametrize("task, decay", [("rerank", 0.0), ("chat", 0.1)])
def test_the_head_decays_only_where_all_its_rows_learn(task, decay):
    """Under a loss of yes and no all rows but two have no gradient and must stay as they are."""
    config = load_config(None, [f"task={task}", "trainable.head=full", "optim.weight_decay=0.1"], need=())
    loaded = load_model(builtin_folder(), dtype=torch.float32)
    head = loaded.hf.lm_head
    head.weight = torch.nn.Parameter(head.weight.detach().clone())  # the packaged base is tied; larger ones are not
    owner = LitchiModel(loaded.hf, loaded.family, loaded.processor.vision)
    optimizer = build_optimizer(owner, loaded.family, config)
    assert [g["weight_decay"] for g in optimizer.param_groups if g["part"] == "head"] == [decay]


def test_lora_matrices_decay():
    found, _ = groups_of("task=rerank", "trainable.language=lora")
    trained = {name: group for name, group in found.items() if group}
    assert trained and all(".lora_" in name and group["weight_decay"] == 0.1 for name, group in trained.items())
    assert {group["part"] for group in trained.values()} == {"language"}


def test_the_settings_choose_the_optimizer():
    _, sgd = groups_of("task=chat", "optim.name=sgd", "trainable.language=full")
    _, adamw = groups_of("task=chat", "optim.betas=[0.8, 0.9]", "trainable.language=full")
    assert type(sgd) is torch.optim.SGD and type(adamw) is torch.optim.AdamW
    assert adamw.param_groups[0]["betas"] == (0.8, 0.9)
