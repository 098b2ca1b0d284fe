"""Who the ranks are: a scheduler's variables, sizes of axes, the screen of rank 0."""

from __future__ import annotations

import json
import os
import re
import threading

import pytest

from litchi.config import load_config
from litchi.dist import slurm_variables
from litchi.errors import UsageError
from litchi.parallel.mesh import Layout, choose_layout
from litchi.train.metrics import RunLog
from litchi.types import StepResult

SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "gpu[03-04,11]",
}


def test_a_task_of_srun_is_a_rank():
    found = slurm_variables(SRUN)
    port = found.pop("MASTER_PORT")
    assert found == {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu03"}
    assert 20000 <= int(port) < 40000 and port != slurm_variables({**SRUN, "SLURM_STEP_ID": "3"})["MASTER_PORT"]
    assert port == slurm_variables({**SRUN, "SLURM_PROCID": "0"})["MASTER_PORT"]


@pytest.mark.parametrize(
    "nodes, first", [("a7", "a7"), ("a7,b[1-2]", "a7"), ("n-[9,12]", "n-9"), ("x[001-128]", "x001")]
)
def test_ranks_meet_at_the_first_node(nodes, first):
    assert slurm_variables({**SRUN, "SLURM_STEP_NODELIST": nodes})["MASTER_ADDR"] == first


def test_a_batch_script_and_a_lone_task_are_no_ranks():
    script = {k: v for k, v in SRUN.items() if not k.startswith("SLURM_STEP_")}
    assert slurm_variables(script) == {}
    assert slurm_variables({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}) == {} == slurm_variables({})


def axes(*words):
    return load_config(None, ["task=chat", *words], need=()).parallel


@pytest.mark.parametrize(
    "words, world, fits, layout, wrapper",
    [
        ([], 1, False, Layout(1, 1), "none"),
        ([], 4, True, Layout(4, 1), "DDP"),
        ([], 4, False, Layout(1, 4), "FSDP2"),
        (["parallel.dp_shard=2"], 4, True, Layout(2, 2), "HSDP"),
        (["parallel.dp_shard=4"], 4, True, Layout(1, 4), "FSDP2"),
        (["parallel.dp_replicate=2"], 4, True, Layout(2, 2), "HSDP"),
        (["parallel.dp_replicate=4", "parallel.dp_shard=1"], 4, False, Layout(4, 1), "DDP"),
    ],
)
def test_sizes_of_the_data_axes(words, world, fits, layout, wrapper):
    found = choose_layout(axes(*words), world, fits_whole=fits)
    assert (found, found.wrapper) == (layout, wrapper)


@pytest.mark.parametrize(
    "words, numbers", [(["parallel.dp_shard=3"], "3.*4"), (["parallel={dp_replicate: 2, dp_shard: 4}"], "8.*4")]
)
def test_axes_that_do_not_fit_the_ranks_are_refused_with_both_numbers(words, numbers):
    with pytest.raises(UsageError, match=numbers):
        choose_layout(axes(*words), 4, fits_whole=True)


def log_steps(folder, out, *, every=1, skipped=()):
    log = RunLog(folder, main=True, tensorboard=False, total=5, every=every, out=out)
    for step in range(1, 6):
        result = StepResult(step, 2.5 / step, 10, 1.0, 1e-4, 1234, 0, step in skipped)
        log.step(result, {"epoch": 0, "tokens_per_s": 5678.0, "step_s": 2.0, "data_wait_s": 1.0})
    log.say("checkpoint")
    log.close()


def read_terminal(main: int, read: list[bytes]) -> None:
    """Read until the other side is closed, which Linux reports as an error."""
    try:
        while chunk := os.read(main, 4096):
            read.append(chunk)
    except OSError:
        pass


def test_a_terminal_has_one_live_line(tmp_path):
    main, second = os.openpty()
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read_terminal(main, read))
    reader.start()  # a terminal holds 4 kB: somebody has to read while the line is drawn
    with open(second, "w") as out:
        log_steps(tmp_path, out, skipped=(4,))
    reader.join(timeout=10)
    shown = b"".join(read).decode()
    assert "\x1b[2K" in shown and "3/5" in shown  # lines drawn over, not below, each other
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "5,678 tokens/s  left 0:06" in plain and "loss 0.8333" in plain
    assert "step 4/5  loss 0.6250" in plain  # what must not be overlooked stays
    assert "SKIPPED" in plain and plain.rstrip().endswith("checkpoint")


def test_without_a_terminal_there_are_plain_lines(tmp_path):
    with (tmp_path / "out.txt").open("w") as out:
        log_steps(tmp_path, out, every=2, skipped=(3,))
    text = (tmp_path / "out.txt").read_text()
    assert "\x1b" not in text
    assert [line.split("  ")[0] for line in text.splitlines()] == [
        *("step 1/5", "step 2/5", "step 3/5", "step 4/5", "step 5/5", "checkpoint")
    ]
    assert text.count("SKIPPED") == 1  # at its step, also between two lines
    assert [json.loads(line)["skipped"] for line in (tmp_path / "metrics.jsonl").open()] == [
        False,
        False,
        True,
        False,
        False,
    ]
