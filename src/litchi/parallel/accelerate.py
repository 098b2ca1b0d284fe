"""What `accelerate launch` asks of its ranks, held against our settings: environment and Config in, Config out.

Accelerate hands its settings on as environment variables. One that means a setting of ours is taken over where ours
was left open, passes where it is the same, and is refused by name where it is not; its defaults ask for nothing.
How it would wrap, prefetch and save (`FSDP_AUTO_WRAP_POLICY` and the like) has no counterpart here and changes no
number. Nothing of this imports accelerate or torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from litchi.errors import UsageError

if TYPE_CHECKING:
    from litchi.config import Config

# Variable: (values that ask for nothing, what to do instead). What Accelerate can switch on and Litchi does not have,
# or does by itself.
FOREIGN = {
    "ACCELERATE_USE_DEEPSPEED": (
        ("", "false"),
        "Litchi shards with FSDP2. Launch without DeepSpeed; for ZeRO 3 set parallel.dp_shard",
    ),
    "ACCELERATE_USE_MEGATRON_LM": (
        ("", "false"),
        "Litchi has axes of its own. Launch without Megatron-LM and set parallel.tp, parallel.pp",
    ),
    "ACCELERATE_DYNAMO_BACKEND": (("", "no"), "Litchi does not compile. Launch with --dynamo_backend no"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (
        ("", "1", "auto"),
        "accumulation follows from train.global_batch_size. Set that, and unset the variable",
    ),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": (
        ("", "false"),
        "recomputed activations stay on the device. Launch without it and set train.offload if memory is short",
    ),
}
# Variable of `--use_parallelism_config`: our axis.
AXES = {
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "dp_replicate",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "dp_shard",
    "PARALLELISM_CONFIG_TP_SIZE": "tp",
    "PARALLELISM_CONFIG_CP_SIZE": "cp",
}


def adopt_accelerate(config: Config, env: Mapping[str, str]) -> Config:
    """Settings with what `accelerate launch` asks for where ours were left open.

    Raises:
        UsageError: it asks for something else than our settings, with a line for each variable.
    """
    given: dict[str, dict[str, object]] = {"train": {}, "parallel": {}}
    problems = [*_precision(config, env, given["train"]), *_sharding(config, env, given["parallel"])]
    for name, (nothing, instead) in FOREIGN.items():
        if env.get(name, "").lower() not in nothing:
            problems.append(f"{name}={env[name]}: {instead}")
    if problems:
        raise UsageError("accelerate launch asks for other than our settings", why="\n  " + "\n  ".join(problems))
    sections = {"train": config.train, "parallel": config.parallel}
    return config.model_copy(
        update={name: section.model_copy(update=given[name]) for name, section in sections.items() if given[name]}
    )


def _precision(config: Config, env: Mapping[str, str], given: dict[str, object]) -> Iterator[str]:
    """Compare the precision. `no` is what Accelerate sets when nobody said anything, so it asks for nothing."""
    asked, ours = env.get("ACCELERATE_MIXED_PRECISION", "no").lower(), config.train.precision
    if asked in ("", "no", ours):
        return
    if asked not in ("bf16", "fp16"):
        yield f"ACCELERATE_MIXED_PRECISION={asked}: train.precision is bf16, fp16 or fp32. Launch with one of them"
    elif ours == "auto":
        given["precision"] = asked
    else:
        yield (
            f"ACCELERATE_MIXED_PRECISION={asked}: train.precision is {ours}. "
            f"Set train.precision={asked}, or launch with --mixed_precision {ours if ours != 'fp32' else 'no'}"
        )


def _sharding(config: Config, env: Mapping[str, str], given: dict[str, object]) -> Iterator[str]:
    """Compare FSDP and the axes."""
    if _on(env, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        yield from _axes(config, env, given)
    if not _on(env, "ACCELERATE_USE_FSDP"):
        return
    if env.get("FSDP_VERSION", "1") != "2":
        yield f"FSDP_VERSION={env.get('FSDP_VERSION', '1')}: Litchi shards with FSDP2. Launch with --fsdp_version 2"
    if env.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "false":
        yield (
            "FSDP_RESHARD_AFTER_FORWARD=false: Litchi gives weights back after each forward. "
            "Launch with --fsdp_reshard_after_forward true"
        )
    if config.parallel.dp_shard == 1:
        yield (
            "ACCELERATE_USE_FSDP=true: parallel.dp_shard is 1, which is no sharding. "
            "Set parallel=auto, or launch without --use_fsdp"
        )
    elif config.parallel.dp_shard is None and config.parallel.dp_replicate is None and not given:
        given["dp_replicate"] = 1  # all ranks share the weights of one copy
    if _on(env, "FSDP_OFFLOAD_PARAMS") and config.train.offload != "all":
        yield (
            f"FSDP_OFFLOAD_PARAMS=true: train.offload is {config.train.offload}. "
            "Set train.offload=all, or launch with --fsdp_offload_params false"
        )
    if _on(env, "FSDP_ACTIVATION_CHECKPOINTING") and not config.train.checkpoint_activations:
        yield (
            "FSDP_ACTIVATION_CHECKPOINTING=true: train.checkpoint_activations is false. "
            "Set it to true, or launch with --fsdp_activation_checkpointing false"
        )


def _axes(config: Config, env: Mapping[str, str], given: dict[str, object]) -> Iterator[str]:
    if env.get("PARALLELISM_CONFIG_SP_SIZE", "1") != "1":
        yield (
            f"PARALLELISM_CONFIG_SP_SIZE={env['PARALLELISM_CONFIG_SP_SIZE']}: Litchi has no such axis. "
            "Launch with --parallelism_config_sp_size 1; sequences are shared with parallel.cp"
        )
    for name, axis in AXES.items():
        asked, ours = int(env.get(name, "1")), getattr(config.parallel, axis)
        if ours is None:
            given[axis] = asked
        elif asked != ours:
            yield f"{name}={asked}: parallel.{axis} is {ours}. Set parallel.{axis}={asked}, or launch with {ours}"


def _on(env: Mapping[str, str], name: str) -> bool:
    return env.get(name, "").lower() in ("true", "1")


def lone_ranks(env: Mapping[str, str], command: Sequence[str]) -> int | None:
    """Ranks that a single process of `accelerate launch` stands for: without GPUs it starts one and leaves the
    others to MPI, with a place to meet (MASTER_ADDR) but not their number.

    Args:
        env: this process's environment.
        command: the command line of the process that started this one.

    Returns:
        The ranks to start ourselves; None where this is no such process.

    Raises:
        UsageError: the number is not on the command line, or is for several machines.
    """
    if "ACCELERATE_MIXED_PRECISION" not in env or "WORLD_SIZE" in env:
        return None
    if "MASTER_ADDR" not in env:
        return 1
    text = " ".join(command).replace("-", "_")
    found = {name: re.search(rf"__{name}[ =](\d+)", text) for name in ("num_processes", "num_machines")}
    processes, machines = (int(m[1]) if m else None for m in found.values())
    if processes is None or (machines or 1) > 1:
        raise UsageError(
            "accelerate launch started one process though it was asked for several",
            why="without GPUs it leaves the ranks to MPI",
            remedy="Launch with --multi_gpu (it starts ranks on CPUs too), use torchrun, or `litchi train --procs N`",
        )
    return processes
