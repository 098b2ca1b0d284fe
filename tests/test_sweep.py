"""Several values for a key: which runs they make, and real runs of them, stopped, failed, gone on with and compared."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import QUICK, rerank_rows

from litchi.config.several import split_runs, varied
from litchi.errors import UsageError
from litchi.scale.sweep import place_runs


@pytest.mark.parametrize(
    "words, runs",
    [
        (["optim.lr=1e-5,2e-5"], [["optim.lr=1e-5"], ["optim.lr=2e-5"]]),
        (
            ["train.seed=0", "optim.lr=1e-5, 2e-5"],
            [["train.seed=0", "optim.lr=1e-5"], ["train.seed=0", "optim.lr=2e-5"]],
        ),
        (["loss=bce,{name: pairwise, margin: 1}"], [["loss=bce"], ["loss={name: pairwise, margin: 1}"]]),
        (["trainable.vision=frozen,lora"], [["trainable.vision=frozen"], ["trainable.vision=lora"]]),
        (["train.eval_every=1 epoch,10"], [["train.eval_every=1 epoch"], ["train.eval_every=10"]]),
    ],
)
def test_values_that_make_runs(words, runs):
    assert split_runs(words) == runs


@pytest.mark.parametrize(
    "word",
    [
        "optim.betas=[0.9, 0.95]",  # a list in brackets
        "optim.betas=0.9,0.95",  # of a setting that is a list: said to be wrong, not run twice
        "eval.metrics=bleu,chrf",
        "data.train=a,b.jsonl",  # a path
        "output=runs/a,b",
        "curriculum=[{until: 1, pixels: {max: 3}}, {until: 2}]",
        "parallel={dp_shard: 2, tp: 2}",
        "optim.lrr=1,2",  # no such setting, which reading says
        "optim.lr=1e-5",
        "fast",
    ],
)
def test_values_that_are_taken_as_they_stand(word):
    assert split_runs([word]) == [[word]]


def test_every_combination_once():
    words = ["optim.lr=1,2", "train.steps=3", "train.seed=0,1"]
    runs = split_runs(words)
    assert [varied(words, run) for run in runs] == [
        ["optim.lr=1", "train.seed=0"],
        ["optim.lr=1", "train.seed=1"],
        ["optim.lr=2", "train.seed=0"],
        ["optim.lr=2", "train.seed=1"],
    ]


@pytest.mark.parametrize(
    "word, problem", [("train.seed=1,,2", "a value is empty"), ("train.seed=1,2,1", "given twice")]
)
def test_values_that_make_no_runs(word, problem):
    with pytest.raises(UsageError, match=problem):
        split_runs([word])


def config_at(folder: Path, rows: Path) -> Path:
    path = folder / "run.yaml"
    path.write_text(
        f"task: rerank\nmodel: {{path: 'builtin:tiny'}}\ndata: {{train: '{rows}'}}\noutput: '{folder / 'runs'}'\n"
    )
    return path


def test_all_settings_are_read_before_anything_runs(tmp_path):
    file = str(config_at(tmp_path, tmp_path / "rows.jsonl"))
    words = ["loss=bce,{name: pairwise, margin: 1}", "train.steps=2"]
    placed = place_runs(file, words, split_runs(words))
    assert [folder.relative_to(tmp_path / "runs").name for folder in placed] == [
        "loss=bce",
        "loss=_name_pairwise_margin_1",
    ]
    assert [run[-1] for run in placed.values()] == [f'output="{folder}"' for folder in placed]
    words = ["optim.lr=1e-5,fast"]
    with pytest.raises(UsageError, match="=fast: a number from 0"):
        place_runs(file, words, split_runs(words))
    words = ["optim.lr=1e-5,2e-5"]
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "metrics.jsonl").touch()
    with pytest.raises(UsageError, match="is a run"):
        place_runs(file, words, split_runs(words))


def sweep(file: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "litchi", "train", str(file), *QUICK, "train.export=never", *words]


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_runs_are_stopped_gone_on_with_and_compared(tmp_path):
    file = config_at(tmp_path, rerank_rows(tmp_path, 6))
    words = ["optim.lr=1e-3,0", "train.steps=4", "train.global_batch_size=3", "train.save_every=1"]
    first, second = tmp_path / "runs" / "optim.lr=1e-3", tmp_path / "runs" / "optim.lr=0"
    process = subprocess.Popen(sweep(file, *words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (second / "metrics.jsonl").exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate()
    assert process.returncode == 75 and "stopped in optim.lr=0" in error and out == ""
    kept = (first / "metrics.jsonl").read_bytes()
    done = subprocess.run(sweep(file, *words), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (first / "metrics.jsonl").read_bytes() == kept  # a run that is done is not run again
    assert len(losses(first)) == len(losses(second)) == 4
    assert losses(first)[0] == losses(second)[0] and losses(first)[3] != losses(second)[3]
    assert "| setting | optim.lr=1e-3 | optim.lr=0 |" in done.stdout
    assert (tmp_path / "runs" / "compare.md").read_text() == done.stdout
    assert "<svg" in (tmp_path / "runs" / "compare.html").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_fails_is_named_and_the_others_are_compared(tmp_path):
    """Two ranks cannot be made of one process."""
    file = config_at(tmp_path, rerank_rows(tmp_path, 6))
    done = subprocess.run(
        sweep(file, "parallel.dp_shard=2,1", "train.steps=1"), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert "1 of 2 runs failed (parallel.dp_shard=2 (status 2))" in done.stderr
    assert "| parallel.dp_shard=1 | 1 |" in done.stdout
    assert len(losses(tmp_path / "runs" / "parallel.dp_shard=1")) == 1


def test_a_job_has_one_value_for_each_key():
    command = sweep(Path("none.yaml"), "train.seed=0,1", "--slurm", "nodes=1")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "several values" in done.stderr
