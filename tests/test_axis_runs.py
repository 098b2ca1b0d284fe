"""Whole runs on tp, cp and pp: evaluation, checkpoint, resume elsewhere, export and answers are one process's."""

from __future__ import annotations

import shutil

import pytest
import torch
from processes import RunningRanks
from run_job import run_all
from runs import chat_rows, read_rows, rerank_rows
from safetensors.torch import load_file

LAYOUTS = {
    "tp": "parallel.tp=2",
    "cp": "parallel.cp=2",
    "pp": "parallel.pp=2",
    "shards": "parallel.dp_shard=2",
}
TRAINED = {
    "chat": "trainable={vision: full, merger: full, language: full}",
    "rerank": "trainable={vision: frozen, language: lora, lora: {rank: 4}}",
}
SAME = 1e-6
ROUNDING = {"tp": 3e-6}  # it adds up halves: the losses of these few groups came out 1.5e-6 apart


def words_of(folder, task, out, steps=4):
    rows = chat_rows if task == "chat" else rerank_rows
    if not (folder / f"{task}.jsonl").exists():
        rows(folder)
    data = folder / f"{task}.jsonl"
    return [
        *(f"task={task}", f"data.train={data}", f"data.eval={data}", f"output={folder / out}", TRAINED[task]),
        *(f"train.steps={steps}", "train.global_batch_size=3", "train.eval_every=2", "train.save_every=2"),
        *("train.micro_batch_tokens=150", "eval.max_new_tokens=4", "train.keep=9"),
    ]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A folder with the runs `<task>-<layout>`, and `resumed-<layout>`: begun by one process, gone on with by two."""
    folder = tmp_path_factory.mktemp("runs")
    one = [["train", *words_of(folder, task, f"{task}-one")] for task in TRAINED]
    one += [["generate", str(folder / "chat-one"), str(folder / "chat.jsonl"), str(folder / "answers-one.jsonl")]]
    RunningRanks(folder / "ranks-one", 1, run_all, one).results(300)
    two: list[list[str]] = []
    for name, layout in LAYOUTS.items():
        two += [["train", *words_of(folder, task, f"{task}-{name}"), layout] for task in TRAINED]
        begun = folder / f"resumed-{name}"
        shutil.copytree(folder / "chat-one", begun)
        for late in ("checkpoints/step-00000004", "export"):
            shutil.rmtree(begun / late)
        (begun / "done.json").unlink()
        two.append(["train", *words_of(folder, "chat", f"resumed-{name}"), layout])
        data, answers = str(folder / "chat.jsonl"), str(folder / f"answers-{name}.jsonl")
        two.append(["generate", str(folder / "chat-one"), data, answers, layout])
        two.append(["measure", str(folder / "rerank-one"), str(folder / "rerank.jsonl"), layout])
    pair = RunningRanks(folder / "ranks-two", 2, run_all, two).results(400)
    assert pair[0] == pair[1]
    said = {name: pair[0][5 * i : 5 * i + 5] for i, name in enumerate(LAYOUTS)}
    return folder, said


def figures(folder, name):
    return [(row["step"], row["name"], row["metrics"]) for row in read_rows(folder / name / "eval.jsonl")]


def assert_alike(folder, name, alone):
    same = ROUNDING.get(name.partition("-")[2], SAME)
    losses = [row["loss"] for row in read_rows(folder / name / "metrics.jsonl")]
    assert losses == pytest.approx([row["loss"] for row in read_rows(folder / alone / "metrics.jsonl")], rel=same)
    assert len(losses) == 4 and losses[0] != losses[-1]
    for (step, data, metrics), (step_one, data_one, one) in zip(
        figures(folder, name), figures(folder, alone), strict=True
    ):
        assert (step, data) == (step_one, data_one)
        assert {"loss"} <= metrics.keys() <= one.keys()
        assert metrics == pytest.approx({key: one[key] for key in metrics}, rel=same)
    mine, one = (load_file(folder / run / "export" / "model.safetensors") for run in (name, alone))
    assert mine.keys() == one.keys()
    assert all(torch.allclose(mine[key], one[key], rtol=1e-4, atol=1e-6) for key in one)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("task", TRAINED)
def test_a_run_ends_as_on_one_process(ran, task, layout):
    folder, _ = ran
    assert_alike(folder, f"{task}-{layout}", f"{task}-one")
    if task == "rerank":
        mine, one = (
            load_file(folder / run / "export" / "adapter" / "adapter_model.safetensors")
            for run in (f"{task}-{layout}", f"{task}-one")
        )
        assert mine.keys() == one.keys() and len(one) == 2 * 7 * 4
        assert all(torch.allclose(mine[key], one[key], rtol=1e-4, atol=1e-6) for key in one)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_goes_on_in_another_layout(ran, layout):
    folder, _ = ran
    assert_alike(folder, f"resumed-{layout}", "chat-one")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_answers_and_scores_of_a_finished_run(ran, layout):
    folder, said = ran
    *_, answers, scores = said[layout]
    one = figures(folder, "rerank-one")[-1][-1]
    assert scores == pytest.approx(one, rel=1e-5)
    if layout in ("cp", "pp"):
        assert f"parallel.{layout}=2 gives losses and scores, but no generated answers" in answers
    else:
        assert read_rows(folder / f"answers-{layout}.jsonl") == read_rows(folder / "answers-one.jsonl")
