"""What `accelerate launch` asks for: adopted where ours is open, passed where equal, refused by name where not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes import start_litchi

from litchi.config import load_config
from litchi.errors import UsageError
from litchi.parallel.accelerate import adopt_accelerate, lone_ranks

# What `accelerate launch --multi_gpu --num_processes 2` sets when nothing else is said (accelerate 1.15).
SILENT = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_USE_CPU": "False",
}
# ... and what `--use_fsdp --fsdp_version 2` adds.
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
}
SIZES = {f"PARALLELISM_CONFIG_{axis}_SIZE": "1" for axis in ("DP_REPLICATE", "DP_SHARD", "TP", "CP", "SP")}
AXES = {**FSDP, "ACCELERATE_USE_PARALLELISM_CONFIG": "true", **SIZES}


def settings(*words):
    return load_config(None, ["task=chat", *words], need=())


def test_defaults_ask_for_nothing():
    config = settings("train.precision=bf16", "parallel.dp_shard=2")
    assert adopt_accelerate(config, {}) == config == adopt_accelerate(config, SILENT)


@pytest.mark.parametrize(
    "words, env, becomes",
    [
        ([], {"ACCELERATE_MIXED_PRECISION": "bf16"}, {"train.precision": "bf16"}),
        (["train.precision=fp16"], {"ACCELERATE_MIXED_PRECISION": "fp16"}, {"train.precision": "fp16"}),
        (["train.precision=fp32"], {"ACCELERATE_MIXED_PRECISION": "no"}, {"train.precision": "fp32"}),
        ([], FSDP, {"parallel.dp_replicate": 1, "parallel.dp_shard": None}),
        (["parallel.dp_shard=4"], FSDP, {"parallel.dp_replicate": None, "parallel.dp_shard": 4}),
        (["parallel.dp_replicate=2"], FSDP, {"parallel.dp_replicate": 2, "parallel.dp_shard": None}),
        (
            ["train.checkpoint_activations=true"],
            {**FSDP, "FSDP_ACTIVATION_CHECKPOINTING": "true"},
            {"train.checkpoint_activations": True, "parallel.dp_replicate": 1},
        ),
        (
            [],
            {**AXES, "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "4"},
            {"parallel.dp_replicate": 2, "parallel.dp_shard": 4, "parallel.tp": 1},
        ),
        ([], {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"}, {}),
    ],
)
def test_what_is_open_or_equal_is_taken(words, env, becomes):
    before = settings(*words).flat()
    after = adopt_accelerate(settings(*words), {**SILENT, **env}).flat()
    assert {key: after[key] for key in becomes} == becomes
    assert {key for key in after if after[key] != before[key]} <= set(becomes)


@pytest.mark.parametrize(
    "words, env, says",
    [
        (
            ["train.precision=fp32"],
            {"ACCELERATE_MIXED_PRECISION": "bf16"},
            "ACCELERATE_MIXED_PRECISION=bf16: train.precision is fp32. Set train.precision=bf16, or launch with "
            "--mixed_precision no",
        ),
        ([], {"ACCELERATE_MIXED_PRECISION": "fp8"}, "ACCELERATE_MIXED_PRECISION=fp8: train.precision is bf16, fp16"),
        ([], {"ACCELERATE_USE_DEEPSPEED": "true"}, "ACCELERATE_USE_DEEPSPEED=true: .*parallel.dp_shard"),
        ([], {"ACCELERATE_USE_MEGATRON_LM": "true"}, "ACCELERATE_USE_MEGATRON_LM=true: .*parallel.tp"),
        ([], {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "ACCELERATE_DYNAMO_BACKEND=INDUCTOR: .*--dynamo_backend no"),
        (
            [],
            {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4: .*train.global_batch_size",
        ),
        ([], {**FSDP, "FSDP_VERSION": "1"}, "FSDP_VERSION=1: .*--fsdp_version 2"),
        (["parallel.dp_shard=1"], FSDP, "ACCELERATE_USE_FSDP=true: parallel.dp_shard is 1"),
        ([], {**FSDP, "FSDP_RESHARD_AFTER_FORWARD": "false"}, "FSDP_RESHARD_AFTER_FORWARD=false"),
        ([], {**FSDP, "FSDP_OFFLOAD_PARAMS": "true"}, "FSDP_OFFLOAD_PARAMS=true: train.offload is none"),
        ([], {**FSDP, "FSDP_ACTIVATION_CHECKPOINTING": "true"}, "FSDP_ACTIVATION_CHECKPOINTING=true: train.checkpoint"),
        ([], {"FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true"}, "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD=true"),
        ([], {**AXES, "PARALLELISM_CONFIG_TP_SIZE": "2"}, "PARALLELISM_CONFIG_TP_SIZE=2: parallel.tp is 1. Set"),
        ([], {**AXES, "PARALLELISM_CONFIG_SP_SIZE": "2"}, "PARALLELISM_CONFIG_SP_SIZE=2: Litchi has no such axis"),
    ],
)
def test_what_contradicts_is_refused_by_name(words, env, says):
    with pytest.raises(UsageError, match=says):
        adopt_accelerate(settings(*words), {**SILENT, **env})


def test_all_contradictions_are_told_at_once():
    env = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_MIXED_PRECISION": "fp8", **FSDP, "FSDP_VERSION": "1"}
    with pytest.raises(UsageError) as error:
        adopt_accelerate(settings(), env)
    assert str(error.value).count("\n  ") == 3


MEETING = {**SILENT, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "env, command, ranks",
    [
        ({}, "bash", None),
        ({**MEETING, "WORLD_SIZE": "2"}, "accelerate launch --num_processes 2", None),
        (SILENT, "accelerate launch --num_processes 1", 1),
        (MEETING, "python accelerate launch --cpu --num_processes 2 -m litchi", 2),
        (MEETING, "accelerate launch --num-processes=4 -m litchi", 4),
        (MEETING, "accelerate launch --num_machines 1 --num_processes 4 -m litchi", 4),
    ],
)
def test_ranks_that_accelerate_leaves_to_mpi_are_started_by_us(env, command, ranks):
    assert lone_ranks(env, command.split()) == ranks


@pytest.mark.parametrize("command", ["accelerate launch", "accelerate launch --num_processes 4 --num_machines 2"])
def test_or_refused_where_their_number_is_not_known(command):
    with pytest.raises(UsageError, match="--multi_gpu"):
        lone_ranks(MEETING, command.split())


# ------------------------------------------------------------------------------------------------- the real command


def words_of(folder, *more):
    rows = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "red"}]} for n in "abcd"
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "chat.yaml").write_text("task: chat\ntrainable: {language: full}\n")
    quick = ("model.path=builtin:tiny", "track=[]", "data.workers=0", "train.steps=2", "train.global_batch_size=4")
    return ["train", str(folder / "chat.yaml"), f"data.train={folder / 'chat.jsonl'}", *quick, *more]


def test_a_contradiction_ends_the_command_before_anything_is_loaded(tmp_path):
    words = words_of(tmp_path, f"output={tmp_path / 'run'}", "train.precision=fp32")
    ended = start_litchi(tmp_path, *words, env={"ACCELERATE_MIXED_PRECISION": "fp16"}).end()
    assert ended.status == 2 and "ACCELERATE_MIXED_PRECISION=fp16: train.precision is fp32" in ended.err
    assert "Traceback" not in ended.err and not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, wrapper",
    [
        (["--cpu"], "DDP"),
        (["--use_fsdp", "--fsdp_version", "2", "--main_process_port", "0"], "FSDP2"),
    ],
    ids=["one process", "sharded ranks"],
)
def test_accelerate_launch_trains_on_two_ranks(tmp_path, options, wrapper):
    command = [str(Path(sys.executable).with_name("accelerate")), "launch", *options, "--num_processes", "2"]
    command += ["--num_machines", "1", "--mixed_precision", "bf16", "-m", "litchi"]
    words = words_of(tmp_path, f"output={tmp_path / 'run'}")
    ended = subprocess.run([*command, *words], capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0, ended.stderr
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [len(step["peak_bytes"]) for step in steps] == [2, 2]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    start = next(e for e in events if e["event"] == "start")
    assert (start["precision"], start["ranks"], start["wrapper"]) == ("bf16", 2, wrapper)
