"""The optimizer in the machine's memory takes the same steps, bit by bit: alone, sharded, and across a resume."""

from __future__ import annotations

import copy
from pathlib import Path
from unittest import mock

import pytest
import torch
from layout_job import SETTINGS, digest, run_job, weights, write_rows
from processes import RunningRanks
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from litchi.batch.loader import iterate_steps
from litchi.config import load_config
from litchi.dist import Ranks
from litchi.errors import UsageError
from litchi.parallel import apply
from litchi.parallel.mesh import Layout
from litchi.train.checkpoint import list_checkpoints, load_checkpoint, optimizer_state
from litchi.train.losses import make_loss
from litchi.train.offload import OffloadedOptimizer, check_offload
from litchi.train.optim import set_rate
from litchi.train.saver import Saver
from litchi.train.setup import prepare_run
from litchi.train.step import train_step

MAKE = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "adamw, one tensor at a time": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=False),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
}


def small(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def groups_of(model):
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    return [
        {"params": matrices, "weight_decay": 0.1, "full_lr": 1e-2},
        {"params": rest, "weight_decay": 0.0, "full_lr": 3e-3},
    ]


def take_steps(model, optimizer, first, last):
    for step in range(first, last):
        set_rate(optimizer, 1 / (1 + step))
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
        model(x).square().sum().backward()
        if step % 2:
            model[0].bias.grad = None  # left out of this step
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MAKE)
def test_the_same_steps_bit_by_bit(name, dtype):
    plain, offloaded = small(dtype), small(dtype)
    one = MAKE[name](groups_of(plain))
    other = OffloadedOptimizer(groups_of(offloaded), MAKE[name])
    before = plain[0].weight.detach().clone()
    take_steps(plain, one, 0, 5)
    take_steps(offloaded, other, 0, 5)
    for a, b in zip(plain.parameters(), offloaded.parameters(), strict=True):
        assert torch.equal(a, b) and one.state[a].keys() == other.state[b].keys()
        assert all(torch.equal(one.state[a][key], other.state[b][key]) for key in one.state[a])
    assert not torch.equal(before, offloaded[0].weight) and one.state[plain[0].weight]
    own = {p.data_ptr() for p in offloaded.parameters()}
    assert own.isdisjoint(p.data_ptr() for g in other.inner.param_groups for p in g["params"])


def test_groups_show_the_settings_of_the_optimizer_behind():
    other = OffloadedOptimizer(groups_of(small()), MAKE["adamw"])
    assert [g["fused"] for g in other.param_groups] == [True, True]
    assert [g["weight_decay"] for g in other.param_groups] == [0.1, 0.0]
    assert set_rate(other, 0.5) == 5e-3
    other.step()  # nothing has a gradient
    assert [g["lr"] for g in other.inner.param_groups] == [5e-3, 1.5e-3]
    assert not any(other.state.values())


def test_state_dict_goes_back_and_forth():
    straight, resumed = small(), small()
    one, other = (OffloadedOptimizer(groups_of(m), MAKE["adamw"]) for m in (straight, resumed))
    take_steps(straight, one, 0, 6)
    take_steps(resumed, other, 0, 3)
    saved = copy.deepcopy(other.state_dict())
    fresh = OffloadedOptimizer(groups_of(resumed), MAKE["adamw"])
    fresh.load_state_dict(saved)
    take_steps(resumed, fresh, 3, 6)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))
    plain = MAKE["adamw"](groups_of(small()))
    plain.load_state_dict(saved)  # a plain optimizer takes it too
    assert len(plain.state) == 4


def test_all_needs_shards():
    with pytest.raises(UsageError, match=r"train.offload=all without sharded weights \(parallel: dp_replicate 2\)"):
        check_offload("all", Layout(dp_replicate=2))
    check_offload("all", Layout(dp_shard=2))
    check_offload("optimizer", Layout(dp_replicate=2))
    check_offload("none", Layout())


# ------------------------------------------------------------------------------------------------------ whole steps


def words_of(folder: Path) -> list[str]:
    rows = write_rows(folder / "rows.jsonl", [None] * 4)
    parts = "trainable={vision: full, merger: full, language: full}"
    chat = ["task=chat", f"data.train={rows}", "train.global_batch_size=2", "train.steps=2", parts]
    return [*chat, "optim.name=adamw", "optim.lr=0.001", "optim.weight_decay=0.1", "optim.clip=0.5"]


def run_with(ranks: Ranks, words: list[str], folder: str) -> dict:
    """Two steps with and without; then a checkpoint of one kind is resumed by the other."""
    out = {kind: run_job(ranks, [*words, f"train.offload={kind}"]) for kind in ("none", "optimizer")}
    if ranks.world > 1:
        policies = []
        with mock.patch.object(apply, "CPUOffloadPolicy", lambda **k: policies.append(k) or CPUOffloadPolicy(**k)):
            out["all"] = {**run_job(ranks, [*words, "train.offload=all"]), "policies": policies}
    crossed = {
        kind: resume(ranks, words, Path(folder), *kind) for kind in (("optimizer", "none"), ("none", "optimizer"))
    }
    return {**out, "crossed": list(crossed.values())}


def resume(ranks: Ranks, words: list[str], folder: Path, before: str, after: str) -> dict:
    """The weights after two steps, the second in a new run that goes on from the first's checkpoint."""
    for kind, step in ((before, 1), (after, 2)):
        place = folder / f"{before}-{after}"
        (folder / kind).mkdir(parents=True, exist_ok=True)
        run = prepare_run(load_config(None, [*SETTINGS, *words, f"train.offload={kind}"]), ranks, folder / kind)
        assert isinstance(run.trainer.optimizer, OffloadedOptimizer) == (kind == "optimizer")
        if step == 2:
            load_checkpoint(list_checkpoints(place)[-1], run.wrapped.model, run.trainer.optimizer)
        _, count = make_loss(run.config.loss)
        for number, batches, _ in iterate_steps(run.plan, step, step, workers=0, count_units=count):
            train_step(run.trainer, number, batches, 1.0)
        saver = Saver(place, ranks)
        saver.save(step, run.wrapped.model, run.trainer.optimizer, {})
        saver.wait()
    state = optimizer_state(run.wrapped.model, run.trainer.optimizer)
    after_it = weights(run.wrapped.owner)
    return {
        "weights": digest(after_it, after_it),
        "sharded": sum(isinstance(t, DTensor) for t in state.values()),
        "state": len(state),
    }


@pytest.fixture(scope="module")
def ran(tmp_path_factory, ranks):
    """What one process and two ranks with sharded weights say."""
    folder = tmp_path_factory.mktemp("offload")
    words = words_of(folder)
    two = RunningRanks(folder / "two", 2, run_with, [*words, "parallel.dp_shard=2"], str(folder / "sharded"))
    try:
        return {"none": [run_with(ranks, words, str(folder / "whole"))], "FSDP2": two.results()}
    finally:
        for one in two.running:
            one.kill()


@pytest.mark.parametrize("wrapper", ["none", "FSDP2"])
def test_training_gives_the_same_bits(ran, wrapper):
    for rank in ran[wrapper]:
        assert rank["none"]["wrapper"] == rank["optimizer"]["wrapper"] == wrapper
        assert rank["none"]["weights"] == rank["optimizer"]["weights"]
        assert rank["none"]["losses"] == rank["optimizer"]["losses"]
        assert rank["none"]["norms"] == rank["optimizer"]["norms"] and min(rank["none"]["norms"]) > 0.5  # clipped
        assert rank["none"]["travel"]["language"] > 0


def test_shards_in_the_machines_memory_give_the_same_bits(ran):
    for rank in ran["FSDP2"]:
        assert rank["all"]["policies"] == [{"pin_memory": False}]
        for key in ("weights", "losses", "norms", "wrapper"):
            assert rank["all"][key] == rank["none"][key]


@pytest.mark.parametrize("wrapper", ["none", "FSDP2"])
def test_a_checkpoint_of_one_kind_is_resumed_by_the_other(ran, wrapper):
    for rank in ran[wrapper]:
        for crossed in rank["crossed"]:
            assert crossed["weights"] == rank["none"]["weights"]
            assert crossed["state"] > 0 and (crossed["sharded"] > 0) == (wrapper == "FSDP2")
