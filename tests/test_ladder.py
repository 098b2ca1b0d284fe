"""`litchi ladder`: each gate on made-up lines, real climbs that pass, and real ones that stop where a fault is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import rerank_rows, write_rows
from safetensors.torch import save_file
from typer.testing import CliRunner

from litchi.cli import app
from litchi.scale.ladder import compare_tensors, plan_rungs, rung_words
from litchi.scale.ladder_gates import Climb, check_gates

START = {"precision": "fp32", "device": "cpu"}
LOSSES = [2.0, 1.8, 1.7, 1.5, 1.2]


def climb(losses=LOSSES, *, procs: int = 1, step_s: float = 1.0, peak: int = 100, **more) -> Climb:
    lines = [
        {**dict(step=n, loss=loss, skipped=False, step_s=step_s, data_wait_s=0.0), "peak_bytes": [peak - 10, peak]}
        for n, loss in enumerate(losses, 1)
    ]
    return Climb(**{**dict(procs=procs, lines=lines, start=START, optimizer="adamw", limit_bytes=200.0), **more})


def reason(one: Climb) -> str:
    found = check_gates(one)
    return "" if found is None else found.reason


def test_a_sound_rung_passes_every_gate():
    one = climb(again=climb().lines[3:], tensors=9)
    two = climb([*LOSSES, 1.1, 1.0], procs=2, step_s=0.6, first=one, before=one, floor=0.8)
    assert check_gates(one) is None and check_gates(two) is None
    assert two.efficiency == pytest.approx(1 / (2 * 0.6))
    figures = two.figures()
    assert (figures["loss_first"], figures["loss_last"], figures["peak_bytes"]) == (2.0, 1.0, 100)
    assert figures["loss_difference"] == 0.0 and json.dumps(figures)


ONE = climb()
REPORT = {"metrics": {"loss": 1.0, "mrr@10": 0.5}, "against": {"metrics": {"loss": 1.0, "mrr@10": 0.6}}}
FAULTS = {
    "NaN": (climb([2.0, float("nan")]), "step 2 is not finite (loss nan)"),
    "left out": (replace(ONE, lines=[{**line, "skipped": line["step"] == 3} for line in ONE.lines]), "step 3 is not"),
    "rising": (climb([1.0, 1.1, 1.2, 1.1, 1.3]), "does not fall: 1.0000 at first, 1.1000 later"),
    "flat, many steps": (climb([2.0, 1.0] * 20), "does not fall: 1.5000 at first, 1.5000 later"),
    "other loss at once": (
        climb([2.0 * (1 + 3e-6), *LOSSES[1:]], procs=2, before=ONE),
        "step 1: the loss is 2.000006 on 2",
    ),
    "other loss later": (climb([2.0, 1.8, 1.71, 1.5, 1.2], procs=2, before=ONE), "step 3: "),
    "unmoved": (
        climb(tensors=5, unmoved=["model.a", "model.b"]),
        "2 of 5 trainable tensors did not move, the first model.a",
    ),
    "memory": (climb(peak=195), "a rank held 195 bytes of 200 bytes"),
    "more than planned": (
        climb(forecast={"peak_bytes": [90, 130], "planned_bytes": 100}),
        "a rank held 130 bytes, planned were 100 bytes",
    ),
    "resumed otherwise": (climb(again=[{"step": 4, "loss": 1.5000001}]), "step 4 after a resume"),
    "metric fell": (
        climb(evaluations={"e": {**REPORT, "difference": {"mrr@10": {"low": -0.2, "high": -0.01}}}}),
        "e: mrr@10 fell from 0.6000 to 0.5000",
    ),
    "loss rose": (
        climb(evaluations={"e": {**REPORT, "metrics": {"loss": 1.03}}}),
        "e: the loss rose from 1.0000 to 1.0300",
    ),
    "too slow": (climb(procs=4, step_s=0.5, first=ONE, floor=0.6), "4 ranks work at 50%"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_gate_names_its_fault(name):
    one, said = FAULTS[name]
    assert said in reason(one)


def test_gates_allow_what_is_noise():
    half = {"precision": "bf16", "device": "cuda"}
    before = climb(start=half)
    assert not reason(climb([2.0 * 1.004, 1.8 * 1.015, *LOSSES[2:]], procs=2, start=half, before=before))
    assert reason(climb([2.0 * 1.006, *LOSSES[1:]], procs=2, start=half, before=before))
    assert not reason(climb([2.0, 1.8005, *LOSSES[2:]], procs=2, before=ONE))  # AdamW has made a step
    sgd = climb([2.0, 1.8005, *LOSSES[2:]], procs=2, before=ONE, optimizer="sgd")
    assert reason(sgd).startswith("step 2: ")
    unsure = {**REPORT, "difference": {"mrr@10": {"low": -0.2, "high": 0.05}}}
    assert not reason(climb(evaluations={"e": unsure}))


def test_rungs_and_their_words():
    assert [(r.procs, r.steps, r.last) for r in plan_rungs(4)] == [
        (1, 5, False),
        (2, 10, False),
        (2, 0, False),
        (4, 10, True),
    ]
    assert [(r.procs, r.steps, r.last) for r in plan_rungs(2)] == [(1, 5, False), (2, 10, True), (2, 0, True)]
    assert [r.name for r in plan_rungs(1)] == ["1 process, 5 steps", "1 process, an epoch"]
    given = ["optim.lr=1e-4", "train.epochs=3", "parallel.tp=2", "output=x", "optim.warmup=0.1"]
    low, top = plan_rungs(2)[:2]
    words = rung_words(given, low, 5, Path("r"))
    assert words[0] == "optim.lr=1e-4" and {"train.steps=5", "train.save_every=3", "parallel=auto"} <= set(words)
    assert not {"train.epochs=3", "parallel.tp=2", "output=x", "optim.warmup=0.1"} & set(words)
    assert "parallel.tp=2" in rung_words(given, top, 10, Path("r"))


def test_tensors_that_did_not_move_are_found(tmp_path):
    old = {"model.hf.a@0": torch.ones(2), "model.hf.a@2": torch.ones(2), "model.hf.b@0": torch.ones(2)}
    old |= {"model.hf.visual.c@0": torch.ones(2), "optim.step.a@0": torch.ones(1)}
    new = {**old, "model.hf.a@2": torch.tensor([1.0, 2.0])}
    for name, tensors in (("old", old), ("new", new)):
        (tmp_path / name).mkdir()
        save_file({key: value.clone() for key, value in tensors.items()}, tmp_path / name / "shard-00000.safetensors")
    assert compare_tensors(tmp_path / "old", tmp_path / "new", seen=True) == (3, ["model.hf.b", "model.hf.visual.c"])
    assert compare_tensors(tmp_path / "old", tmp_path / "new", seen=False) == (2, ["model.hf.b"])


# ------------------------------------------------------------------------------------------------------- real climbs


def go(folder: Path, *words: str, options: tuple[str, ...] = (), rows: int = 24) -> tuple[int, dict]:
    """Climb with two processes at most, on groups of the tests' own."""
    config = folder / "run.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text("task: rerank\nmodel: {path: 'builtin:tiny'}\ntrainable: {language: full}\n")
    data = rerank_rows(folder, rows)
    base = [
        f"data.train={data}",
        f"output={folder}/run",
        "data.workers=0",
        "optim.lr=3e-4",
        "train.global_batch_size=2",
    ]
    keys = {word.partition("=")[0] for word in words}
    base = [word for word in base if word.partition("=")[0] not in keys]
    done = CliRunner().invoke(app, ["ladder", str(config), *base, *words, "--limit", "12", "--json", *options])
    assert done.exit_code in (0, 1), (done.output, done.exception)
    return done.exit_code, json.loads(done.stdout)


def test_a_rate_that_is_too_high_stops_the_climb_on_its_lowest_rung(tmp_path):
    status, answer = go(tmp_path, "optim.lr=1e30", "optim.clip=null")
    assert status == 1 and not answer["passed"]
    assert [rung["passed"] for rung in answer["rungs"]] == [False]
    assert "finite" in answer["rungs"][0]["reason"] and answer["rungs"][0]["remedy"]


def text_rows(folder: Path) -> str:
    rows = [{"query": f"a {n} hat", "pos_doc": f"hat {n}", "neg_docs": [f"shoe {n}"]} for n in range(24)]
    return str(write_rows(folder / "text.jsonl", rows))


PLANTED = {
    "data that is not there": (lambda f: [f"data.train={f}/gone.jsonl"], (), 1, "gone.jsonl"),
    "too little memory": (lambda f: [], ("--memory", "0.1"), 1, "a rank held"),
    "vision trains, no picture": (
        lambda f: ["trainable.vision=full", f"data.train={text_rows(f)}"],
        (),
        1,
        "did not move",
    ),
    "a part without a rate": (lambda f: ["trainable.merger={mode: full, lr: 1e-30}"], (), 1, "did not move"),
    "a picture that is none": (lambda f: ["data.on_bad_media=error", f"data.train={broken(f)}"], (), 1, "broken.png"),
    "a layout these ranks do not make": (lambda f: ["parallel.dp_shard=3"], (), 2, "dp_shard=3"),
    "too slow": (lambda f: [], ("--floor", "50"), 2, "the floor is 5000%"),
}


def broken(folder: Path) -> str:
    (folder / "broken.png").write_bytes(b"no picture")
    rows = [{"query": {"image": "broken.png"}, "pos_doc": "a", "neg_docs": ["b"]}] * 4
    return str(write_rows(folder / "broken.jsonl", rows))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_stops_the_climb_where_it_shows(tmp_path, name):
    words, options, rung, said = PLANTED[name]
    (tmp_path / "x").mkdir()
    status, answer = go(tmp_path, *words(tmp_path / "x"), options=options)
    assert status == 1 and [r["passed"] for r in answer["rungs"]] == [True] * (rung - 1) + [False], answer
    assert said in answer["rungs"][-1]["reason"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sound_run_passes_and_is_not_run_twice(tmp_path):
    measured = f"data.eval={rerank_rows(tmp_path / 'e', 6)}"
    status, answer = go(tmp_path, measured)
    assert status == 0 and answer["passed"], answer
    assert [rung["name"] for rung in answer["rungs"]] == [r.name for r in plan_rungs(2)]
    one, two, epoch = (rung["figures"] for rung in answer["rungs"])
    assert two["loss_difference"] < 1e-3 and one["taken_again"] == 2 and two["taken_again"] == 5
    assert one["tensors"] == two["tensors"] > 10
    assert epoch["steps"] == 12 and epoch["metrics"].keys() == epoch["base"].keys() != set()
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")}
    assert go(tmp_path, measured) == (0, answer)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")} == times
