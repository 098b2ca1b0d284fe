"""The GPU's path beside the CPU's: bf16, variable-length attention, NCCL. Needs a GPU; skipped where there is none."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
import runs
import torch
from processes import Running

from litchi.dist import start_ranks, stop_ranks
from litchi.parallel.launch import RunningRanks

pytestmark = pytest.mark.needs_gpu


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-3), ("bf16", 5e-2), ("fp16", 5e-2)])
def test_training_on_a_gpu_follows_the_cpu(tmp_path, precision, tolerance):
    """Needs a GPU: five SGD steps in each precision against fp32 on the CPU, in the metrics that are written."""
    rows = runs.chat_rows(tmp_path)
    words = ("task=chat", f"data.train={rows}", "trainable.language=full", "trainable.vision=full", "train.steps=5",
             "optim.name=sgd", "optim.lr=0.01", "train.global_batch_size=4")  # fmt: skip
    ranks = start_ranks()
    try:
        assert ranks.device.type == "cuda"
        gpu = losses(runs.train(ranks, tmp_path / "gpu", *words, f"train.precision={precision}"))
        at_cpu = replace(ranks, device=torch.device("cpu"))
        cpu = losses(runs.train(at_cpu, tmp_path / "cpu", *words, "train.precision=fp32"))
    finally:
        stop_ranks()
    assert cpu[0] > 0
    assert gpu == pytest.approx(cpu, rel=tolerance)


def score_in_a_copy(rows, out):
    """A launcher's only rank scores rows; it says on what."""
    torch.cuda.device_count()  # as the command line asks for it
    with RunningRanks() as ranks:
        ranks.fork(["score", "builtin:tiny", "--data", rows, "--out", out], 1)
        ranks.start({**os.environ, "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})
        print("ended", ranks.wait(), flush=True)


def test_a_copy_of_the_launcher_uses_the_gpu(tmp_path):
    """Needs a GPU: nothing the launcher has asked the driver keeps its ranks from it."""
    rows, out = runs.rerank_rows(tmp_path, 2), tmp_path / "scores.jsonl"
    ended = Running(score_in_a_copy, (str(rows), str(out)), tmp_path / "log", {}).end()
    assert ended.out.splitlines()[-1] == "ended None" and len(runs.read_rows(out)) == 6, ended.err
