"""The GPU's path beside the CPU's: bf16, variable-length attention, NCCL. Needs a GPU; skipped where there is none."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import runs
import torch

from litchi.dist import start_ranks, stop_ranks

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
