"""A run that was cut ends as the uncut one; a checkpoint is restored whole or refused."""

import copy
import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from runs import chat_rows, numbers, open_model, read_json, read_rows, rerank_rows, settings, train
from safetensors.torch import load_file

from litchi.dist import start_ranks
from litchi.errors import UserError
from litchi.train import loop
from litchi.train.checkpoint import list_checkpoints, load_checkpoint, read_checkpoint, rotate_checkpoints
from litchi.train.durable import hash_json, write_json
from litchi.train.setup import prepare_run
from litchi.train.watch import BestWatch


class Cut(Exception):
    """The run ends here as if its machine had."""


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoint")


@pytest.fixture(scope="module")
def words(room):
    """LoRA with dropout, pictures in some steps, a rate that depends on the step: what a resume can get wrong."""
    data = rerank_rows(room / "data")
    return (
        "task=rerank", f"data.train={data}", f"data.eval={data}", "trainable.merger=full",
        "trainable.lora.dropout=0.2", "optim.schedule=cosine", "optim.lr=2e-3", "data.negatives=1",
        "train.steps=6", "train.global_batch_size=2", "train.save_every=2", "train.eval_every=2",
    )  # fmt: skip


@pytest.fixture(scope="module")
def uncut(room, ranks, words):
    return train(ranks, room / "uncut", *words)


@pytest.fixture(scope="module")
def cut(room, ranks, words):
    """A run that was cut in step 5, behind the checkpoints of steps 2 and 4."""
    with pytest.MonkeyPatch.context() as patch:
        train_until(5, patch, ranks, room / "cut", *words)
    return room / "cut"


def train_until(step, monkeypatch, ranks, out, *words):
    """Train, and end without a word in the middle of a step."""
    real = loop.train_step

    def cut(trainer, now, *rest, **how):
        if now == step:
            raise Cut
        return real(trainer, now, *rest, **how)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", cut)
        with pytest.raises(Cut):
            train(ranks, out, *words)


def weights(run):
    return load_file(run / "export" / "model.safetensors")


def steps_of(run):
    return [c.step for c in list_checkpoints(run)]


@pytest.mark.parametrize("step", [2, 6])
def test_a_cut_run_ends_as_the_uncut_one(step, monkeypatch, room, ranks, words, uncut, capsys):
    """Cut before the first checkpoint, and after lines that the resume must take back."""
    out = room / f"cut{step}"
    train_until(step, monkeypatch, ranks, out, *words)
    assert len(numbers(out)) == step - 1 and not (out / "export").exists()
    assert train(ranks, out, *words) == out
    resumed = "resumed from step-0000000" in capsys.readouterr().err
    assert resumed == (step > 2)
    assert numbers(out) == numbers(uncut) and [row["step"] for row in numbers(out)] == [1, 2, 3, 4, 5, 6]
    assert read_rows(out / "eval.jsonl") == read_rows(uncut / "eval.jsonl") != []
    ours, theirs = weights(out), weights(uncut)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def test_the_uncut_run_is_worth_comparing_with(uncut):
    """Dropout and the rate differ from step to step, one step has no picture, and the weights moved."""
    rows = numbers(uncut)
    assert len({row["loss"] for row in rows}) == 6 and len({row["lr"] for row in rows}) == 6
    assert {bool(row["pixels"]) for row in rows} == {True, False} and rows[-1]["epoch"] > rows[0]["epoch"]
    start = dict(open_model("builtin:tiny", start_ranks())[0].owner.hf.named_parameters())
    end = dict(open_model(uncut, start_ranks())[0].owner.hf.named_parameters())
    assert any(not torch.equal(start[n], end[n]) for n in start)


def test_every_tensor_comes_back_bit_for_bit(room, ranks, words, uncut):
    """Weights, both averages of AdamW and its count, into a model and an optimizer that hold something else."""
    run = prepare_run(settings("model.path=builtin:tiny", f"output={room / 'again'}", *words), ranks, Path(room))
    newest = list_checkpoints(uncut)[-1]
    load_checkpoint(newest, run.wrapped.model, run.trainer.optimizer)
    state = copy.deepcopy(run.trainer.optimizer.state_dict()["state"])
    assert {float(s["step"]) for s in state.values()} == {5.0, 6.0}, "the merger sat out the step without pictures"
    assert all(s["exp_avg"].any() and s["exp_avg_sq"].any() for s in state.values())
    kept = {n: p.detach().clone() for n, p in run.wrapped.model.named_parameters() if p.requires_grad}
    assert any("lora_B" in n for n in kept) and any("merger" in n for n in kept)
    with torch.no_grad():
        for parameter in run.wrapped.model.parameters():
            parameter.add_(1.0) if parameter.requires_grad else None
    for values in run.trainer.optimizer.state.values():
        values["exp_avg"].zero_()
    load_checkpoint(newest, run.wrapped.model, run.trainer.optimizer)
    now = dict(run.wrapped.model.named_parameters())
    assert all(torch.equal(now[n], kept[n]) for n in kept)
    again = run.trainer.optimizer.state_dict()["state"]
    assert all(torch.equal(again[i][key], value) for i, values in state.items() for key, value in values.items())
    assert len(newest.manifest["tensors"]) == len(kept) + sum(len(values) for values in state.values())
    exported = dict(open_model(newest.folder, ranks)[0].owner.named_parameters())
    assert all(torch.equal(exported[n], kept[n]) for n in kept)


def test_a_finished_run_started_again_does_nothing(ranks, room, words, uncut, capsys):
    before = {p: p.stat().st_mtime_ns for p in uncut.rglob("*") if p.is_file()}
    assert train(ranks, uncut, *words) == uncut
    assert "already finished" in capsys.readouterr().out
    assert {p: p.stat().st_mtime_ns for p in before} == before


def test_a_setting_that_changes_the_numbers_is_refused_by_name(ranks, room, words, cut):
    out = shutil.copytree(cut, room / "changed")
    changed = [w.replace("optim.lr=2e-3", "optim.lr=1e-3") for w in words]
    with pytest.raises(UserError, match=r"optim\.lr was 0\.002 and is 0\.001") as error:
        train(ranks, out, *changed)
    assert "--allow-changed optim.lr" in str(error.value) and error.value.status == 2
    with pytest.raises(UserError, match=r"train\.seed was 0 and is 1"):
        train(ranks, out, *changed, "train.seed=1", allow_changed=["optim.lr"])
    assert numbers(out) == numbers(cut), "a refusal changes nothing"
    train(ranks, out, *changed, "train.log_every=7", allow_changed=["optim.lr"])
    rows = numbers(out)
    assert len(rows) == 6 and rows[:4] == numbers(cut) and rows[4]["lr"] < rows[3]["lr"] / 1.9


def test_a_finished_run_is_made_longer_by_name(ranks, room, words, uncut):
    """train.steps changes the rate of every step, so it is refused until it is allowed; then the run goes on."""
    out = shutil.copytree(uncut, room / "longer")
    longer = [w.replace("train.steps=6", "train.steps=8") for w in words]
    with pytest.raises(UserError, match=r"train\.steps was 6 and is 8"):
        train(ranks, out, *longer)
    train(ranks, out, *longer, allow_changed=["train.steps"])
    assert [row["step"] for row in numbers(out)] == list(range(1, 9))
    assert numbers(out)[:6] == numbers(uncut)
    assert read_json(out / "export" / "litchi.json")["step"] == 8


def test_fresh_moves_the_old_run_aside(ranks, room, words, capsys):
    out = room / "fresh"
    short = [w.replace("train.steps=6", "train.steps=1") for w in words]
    train(ranks, out, *short)
    old = (out / "metrics.jsonl").read_bytes()
    train(ranks, out, *short, "train.seed=7", fresh=True)
    assert (room / "fresh.1" / "metrics.jsonl").read_bytes() == old != (out / "metrics.jsonl").read_bytes()
    assert "fresh.1" in capsys.readouterr().out
    train(ranks, out, *short, fresh=True)
    assert (room / "fresh.2").is_dir() and len(numbers(out)) == 1


def test_an_incomplete_checkpoint_does_not_exist(ranks, room, words, cut, uncut):
    """Without its manifest, with half of it, or not yet renamed."""
    out = shutil.copytree(cut, room / "incomplete")
    assert steps_of(out) == [2, 4]
    manifest = out / "checkpoints" / "step-00000004" / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text[: len(text) // 2])
    assert steps_of(out) == [2] and read_checkpoint(manifest.parent) is None
    manifest.unlink()
    (out / "checkpoints" / ".step-00000006.part").mkdir()
    assert steps_of(out) == [2]
    train(ranks, out, *words)
    assert steps_of(out) == steps_of(uncut) and numbers(out) == numbers(uncut)


def test_a_checkpoint_of_other_tensors_is_refused_with_counts(ranks, room, words, uncut):
    """Also when the setting that made the difference was allowed to change."""
    newest = list_checkpoints(uncut)[-1]
    others = {
        "trainable.lora.rank=4": r"56 of \d+ tensors differ",
        "trainable.merger=frozen": r"5 of \d+ tensors differ",
    }
    for word, message in others.items():
        run = prepare_run(settings("model.path=builtin:tiny", "output=none", *words, word), ranks, Path(room))
        before = [p.detach().clone() for p in run.wrapped.model.parameters()]
        with pytest.raises(UserError, match=message) as error:
            load_checkpoint(newest, run.wrapped.model, run.trainer.optimizer)
        assert newest.folder.name in str(error.value)
        assert all(torch.equal(a, b) for a, b in zip(before, run.wrapped.model.parameters(), strict=True))


def write_checkpoints(run, *steps):
    for step in steps:
        folder = run / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        body = {"step": step, "files": {}}
        write_json(folder / "manifest.json", {**body, "sha256": hash_json(body)})


def test_rotation_keeps_the_newest_and_the_best(tmp_path):
    write_checkpoints(tmp_path, 1, 2, 3, 4, 5)
    rotate_checkpoints(tmp_path, keep=2, best=2)
    assert steps_of(tmp_path) == [2, 4, 5]
    rotate_checkpoints(tmp_path, keep=1, best=2)
    assert steps_of(tmp_path) == [2, 5], "the one just written stays"
    rotate_checkpoints(tmp_path, keep=3, best=None)
    assert steps_of(tmp_path) == [2, 5]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_one_kept_checkpoint_is_always_the_newest(ranks, room, words):
    out = train(ranks, room / "keep", *words, "train.keep=1")
    assert steps_of(out) == [6]


def test_saving_says_nothing_of_its_own(ranks, room, words):
    short = [w.replace("train.steps=6", "train.steps=1") for w in words]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(ranks, room / "quiet", *short)
    assert steps_of(room / "quiet") == [1]
    assert not [w for w in said if "torch.distributed" in str(w.message)]


# ---- the best


@pytest.fixture(scope="module")
def diverging(room):
    """Chat at a rate that soon makes the loss on other rows worse."""
    train_rows, eval_rows = chat_rows(room / "a", 4), chat_rows(room / "b", 6)
    return (
        "task=chat", f"data.train={train_rows}", f"data.eval={eval_rows}", "trainable.language=full",
        "train.global_batch_size=2", "train.eval_every=1", "train.best=loss", "train.keep=1", "eval.max_new_tokens=1",
        "optim.lr=0.03", "optim.clip=null",
    )  # fmt: skip


def test_early_stop_exports_the_best(ranks, room, diverging, capsys):
    out = train(ranks, room / "best", *diverging, "train.steps=12", "train.early_stop=3")
    losses = {row["step"]: row["metrics"]["loss"] for row in read_rows(out / "eval.jsonl")}
    best = min(losses, key=losses.get)
    last = max(losses)
    assert last == best + 3 < 12, "it went up for three evaluations, and then it stopped"
    assert "stopped early at step" in capsys.readouterr().err
    assert read_json(out / "export" / "litchi.json")["step"] == best
    assert read_json(out / "done.json") == {"step": last, "exported": best}
    assert steps_of(out) == [best, last], "with one checkpoint kept, the best stays too"
    ours = dict(open_model(out, ranks)[0].owner.hf.named_parameters())
    best_ones, last_ones = (
        dict(open_model(c.folder, ranks)[0].owner.hf.named_parameters()) for c in list_checkpoints(out)
    )
    assert all(torch.equal(ours[n], best_ones[n]) for n in ours)
    assert any(not torch.equal(ours[n], last_ones[n]) for n in ours)


def test_a_run_cut_while_watching_the_best_ends_alike(monkeypatch, ranks, room, diverging):
    words = (*diverging, "train.steps=12", "train.early_stop=3", "train.save_every=1", "train.keep=2")
    whole, cut = train(ranks, room / "watched", *words), room / "watched-cut"
    last = len(numbers(whole))
    train_until(last, monkeypatch, ranks, cut, *words)
    train(ranks, cut, *words)
    assert numbers(cut) == numbers(whole) and read_json(cut / "done.json") == read_json(whole / "done.json")


def test_several_sets_are_one_evaluation(tmp_path):
    """Read back after a cut they count as when they were measured: once, by the first set that has the metric."""
    config = settings(
        "model.path=builtin:tiny", "task=chat", "data.train=a.jsonl", "data.eval=b.jsonl", "train.best=loss",
        "train.eval_every=1", "train.early_stop=2",
    )  # fmt: skip
    figures = {1: (3.0, 1.0), 2: (2.0, 9.0), 3: (2.5, 0.5)}
    live = BestWatch(config, tmp_path)
    for step, (a, b) in figures.items():
        live.see(step, {"a": {"loss": a}, "b": {"loss": b}})
    lines = [
        {"step": s, "name": n, "metrics": {"loss": v}}
        for s, both in figures.items()
        for n, v in zip("ab", both, strict=True)
    ]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    back = BestWatch(config, tmp_path)
    assert (live.best_step, live.since, live.seen, live.exhausted) == (2, 1, 3, False)
    assert (back.best_step, back.since, back.seen, back.exhausted) == (2, 1, 3, False)
