"""Memory that runs out: the largest micro-batch is tried first, and a step that fails goes on in smaller pieces, with
the same numbers, in one process or several."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from number_job import run_all, run_in_space, run_or_end, run_wrong
from processes import Running, RunningRanks
from runs import chat_rows, read_rows, rerank_rows, settings, state_hashes, write_rows

from litchi.batch.loader import make_batch
from litchi.errors import MachineError
from litchi.train.checkpoint import list_checkpoints
from litchi.train.largest import FINEST, ROOM, find_largest, search_size, steps_to_plan
from litchi.train.oom import SmallerBatches, ask_smaller, is_out_of_memory, smaller
from litchi.train.setup import prepare_run

PHASES = {"forward": "micro-batch", "backward": "micro-batch", "optimizer": "the update"}
WRAPPERS = {"forward": "parallel.dp_shard=2", "backward": "parallel.dp_replicate=2", "optimizer": "parallel.dp_shard=2"}


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Without dropout, which would drop other things in other micro-batches; SGD, which keeps rounding small."""
    data = chat_rows(tmp_path_factory.mktemp("data"), 24)
    return [
        "task=chat", f"data.train={data}", "trainable.lora.rank=4", "optim.name=sgd", "optim.lr=0.05", "train.steps=6",
        "train.export=never", "train.global_batch_size=12", "train.micro_batch_tokens=2048", "train.save_every=2",
    ]  # fmt: skip


def losses(run):
    lines = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in lines] == list(range(1, len(lines) + 1))
    return [row["loss"] for row in lines]


def lowered(run):
    return [e for e in read_rows(run / "events.jsonl") if e["event"] == "micro_batch_tokens"]


# --------------------------------------------------------------------------------------------------------- in a step


@pytest.fixture(scope="module")
def whole(tmp_path_factory, words, ranks):
    run = tmp_path_factory.mktemp("whole") / "run"
    assert run_wrong(ranks, str(run), words, []) == [0, ""]
    return run


def small_from_the_start(tmp_path, words, ranks, tokens):
    run = tmp_path / "small"
    assert run_wrong(ranks, str(run), [*words, f"train.micro_batch_tokens={tokens}"], []) == [0, ""]
    return run


@pytest.mark.parametrize("phase", PHASES)
def test_one_process_goes_on_with_smaller_micro_batches(tmp_path, words, ranks, whole, phase, capfd):
    run = tmp_path / "run"
    assert run_wrong(ranks, str(run), words, [[phase, [4], None, 200]]) == [0, ""]
    *_, entry = lowered(run)
    assert entry["step"] == 3 and entry["in_step"] == 4, "from the step behind the last checkpoint"
    assert entry["tokens"] == entry["of"]["tokens"] // 2 and entry["phase"].startswith(PHASES[phase])
    said = capfd.readouterr().err
    assert "out of memory in step 4" in said and all(name in said for name in entry["of"]["samples"])
    small = small_from_the_start(tmp_path, words, ranks, entry["tokens"])
    assert losses(run) == pytest.approx(losses(small), rel=1e-6)
    micro = [[row["micro_batches"] for row in read_rows(one / "metrics.jsonl")] for one in (whole, run, small)]
    assert micro[1] == micro[0][:2] + micro[2][2:] and micro[0] != micro[2]
    assert losses(run) != losses(whole), "rounding differs, or nothing was cut"


@pytest.mark.parametrize("phase", PHASES)
def test_one_of_two_ranks(tmp_path, words, ranks, phase):
    """The rank it happens on ends with a request; both start again, agree on it, and go on."""
    run = tmp_path / "run"
    given = str(run), [*words, WRAPPERS[phase]], [[phase, [4], 1, 200]]
    entries, starts = [], 0
    while starts < 4:
        starts += 1
        both = RunningRanks(tmp_path / f"start{starts}", 2, run_or_end, *given).running
        status = both[1].end().status
        if status == 0:
            assert both[0].end().status == 0
            break
        assert status == 76
        both[0].kill()  # it waits for the other
        entries.append(Path(f"{run}.rank1").read_text())
    assert entries and all("out of memory in step 4" in line and "rank 1" in line for line in entries)
    *_, entry = lowered(run)
    assert entry["rank"] == 1 and all(name in entries[-1] for name in entry["of"]["samples"])
    assert not list(run.glob(".smaller-*"))
    small = small_from_the_start(tmp_path, words, ranks, entry["tokens"])
    assert losses(run) == pytest.approx(losses(small), rel=1e-6)


@pytest.mark.slow
def test_litchi_train_starts_its_ranks_again(tmp_path, words, ranks):
    """The program itself, with memory that runs out on its second rank."""
    run, here = tmp_path / "run", Path(__file__).parent
    (tmp_path / "sitecustomize.py").write_text(  # a rank is a copy of the launcher, which then runs the module
        "import os, runpy\nfrom types import SimpleNamespace\nplain = runpy.run_module\n"
        "def run_module(*words, **how):\n    from litchi.scale.inject import Injection\n"
        "    Injection(SimpleNamespace(rank=int(os.environ['RANK'])), 'backward', [4], 1, 200)\n"
        "    return plain(*words, **how)\nrunpy.run_module = run_module\n"
    )
    (tmp_path / "run.yaml").write_text("task: chat\n")
    more = ["model.path=builtin:tiny", "data.workers=0", "track=[]", "optim.warmup=1", "optim.schedule=constant"]
    command = [sys.executable, "-m", "litchi", "train", str(tmp_path / "run.yaml"), "--procs", "2", *words, *more]
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{here}"}
    done = subprocess.run(
        [*command, f"output={run}"], env=env, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *_, entry = lowered(run)
    assert entry["rank"] == 1 and "out of memory in step 4" in done.stderr
    small = small_from_the_start(tmp_path, words, ranks, entry["tokens"])
    assert losses(run) == pytest.approx(losses(small), rel=1e-6)


def test_a_sample_alone_is_named_with_what_may_help(tmp_path, words, ranks):
    """What cannot be cut stops the run."""
    run = tmp_path / "run"
    status, line = run_wrong(ranks, str(run), words, [["forward", [4]]])
    assert status == MachineError.status
    assert line.startswith("out of memory in step 4 with one sample alone: r") and "tokens" in line and "pixels" in line
    for remedy in ("data.max_length", "data.pixels.max", "checkpoint_activations", "dp_shard", "offload"):
        assert remedy in line
    assert len(lowered(run)) > 1, "it was made smaller first"


@pytest.mark.slow
def test_a_real_limit_of_address_space(tmp_path, ranks):
    """Long rows in one process that may not take more: found by the rehearsal, and cut until they fit."""
    words = [f"word{n}" for n in range(400)]
    turns = [{"role": "user", "content": " ".join(words)}, {"role": "assistant", "content": "yes"}]
    rows = [
        {"id": f"long {i}", "messages": [{**turns[0], "content": f"{i} {turns[0]['content']}"}, turns[1]]}
        for i in range(16)
    ]
    data = write_rows(tmp_path / "long.jsonl", rows)
    settings_of = [
        "task=chat", f"data.train={data}", "trainable.language=full", "optim.name=sgd", "optim.lr=0.01",
        "train.steps=2", "train.global_batch_size=8", "train.micro_batch_tokens=32768", "train.export=never",
    ]  # fmt: skip
    run = tmp_path / "run"
    ended = Running(run_in_space, (str(run), settings_of, 400 << 20), tmp_path / "p", {}).end()
    assert ended.status == 0, ended.err[-3000:]
    entries = lowered(run)
    assert entries and all(e["of"]["samples"][0].startswith("long ") for e in entries)
    assert "out of memory in step" in ended.err and "largest micro-batch: " in ended.err
    assert entries[0]["in_step"] == 1 and not any(e["tokens"] > 16384 for e in entries)
    small = tmp_path / "small"
    least = min(e["tokens"] for e in entries)
    assert run_wrong(ranks, str(small), [*settings_of, f"train.micro_batch_tokens={least}"], []) == [0, ""]
    assert losses(run) == pytest.approx(losses(small), rel=1e-6)


def test_what_is_said_of_memory():
    with pytest.raises(RuntimeError) as real:
        torch.empty(1 << 55, dtype=torch.uint8)
    assert is_out_of_memory(real.value), real.value
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(OSError(12, "Cannot allocate memory"))
    assert not is_out_of_memory(RuntimeError("[Gloo] Connection closed by peer")) and not is_out_of_memory(OSError(28))


@pytest.mark.parametrize(
    ("limit", "tokens", "divides", "expected"),
    [
        (512, 400, True, 200),
        (512, 800, True, 400),
        (512, 1024, True, None),
        (512, 400, False, None),
        (1, 1, True, None),
    ],
)
def test_half_of_what_did_not_fit(limit, tokens, divides, expected):
    assert smaller(limit, tokens, divides=divides) == expected


def test_a_group_that_is_cut_can_be_made_smaller(tmp_path, ranks):
    """One group alone, with three documents; and where groups stay whole it cannot."""
    data = rerank_rows(tmp_path, 2)
    run = prepare_run(settings("model.path=builtin:tiny", "task=rerank", f"data.train={data}", f"output={tmp_path}/r",
                               "train.steps=1", "train.micro_batch_tokens=4096"), ranks, tmp_path)  # fmt: skip
    batch = make_batch(run.plan.corpus, run.plan.shares(1)[0][0][:1])
    how = {"step": 1, "at": 0, "limit": 4096, "patch": 14}
    assert isinstance(ask_smaller(tmp_path, ranks, [batch], **how, cuts=True), SmallerBatches)
    assert isinstance(ask_smaller(tmp_path, ranks, [batch], **how, cuts=False), MachineError)


# ------------------------------------------------------------------------------------------------- before the first


@pytest.mark.parametrize(
    "axes", [("dp_shard", "dp_replicate"), pytest.param(("tp", "pp", "cp"), marks=pytest.mark.slow)], ids=str
)
def test_the_rehearsal_changes_nothing(tmp_path, words, axes):
    """Bit by bit: losses, weights, the optimizer's state; with dropout, whose random numbers it must not take."""
    more = ["trainable.lora.dropout=0.2", "optim.name=adamw", "optim.lr=1e-3", "train.steps=3", "train.save_every=1"]
    jobs = {
        str(tmp_path / f"{axis} {on}"): [[*words, *more, f"parallel.{axis}=2", f"train.rehearse={on}"], []]
        for axis in axes
        for on in ("true", "false")
    }
    results = RunningRanks(tmp_path / "p", 2, run_all, jobs).results(100)
    assert all(outcome == [0, ""] for outcome in results[0].values()), results[0]
    for axis in axes:
        with_it, without = tmp_path / f"{axis} true", tmp_path / f"{axis} false"
        assert losses(with_it) == losses(without) and state_hashes(with_it) == state_hashes(without), axis
    said = (tmp_path / "p" / "rank0" / "err.txt").read_text()
    assert said.count("largest micro-batch: ") == len(axes)


def test_the_largest_of_the_run_is_rehearsed(tmp_path, words, ranks, capfd):
    run = prepare_run(settings("model.path=builtin:tiny", f"output={tmp_path}/r", *words), ranks, tmp_path)
    plan = run.plan
    every = [(step, number) for step in range(1, 7) for number in range(len(plan.shares(step)[0]))]
    tokens = {key: make_batch(plan.corpus, plan.shares(key[0])[0][key[1]]).tokens for key in every}
    (_, step, number) = find_largest(plan, steps_to_plan(plan, 1, 6), ranks)[0]
    assert tokens[step, number] >= 0.9 * max(tokens.values()) and len(set(tokens.values())) > 1
    capfd.readouterr()
    assert run_wrong(ranks, str(tmp_path / "run"), words, []) == [0, ""]
    said = next(line for line in capfd.readouterr().err.splitlines() if line.startswith("largest micro-batch"))
    assert f"{tokens[step, number]:,} tokens" in said and f"in step {step};" in said and "peak" in said


def test_of_a_long_run_the_steps_of_its_largest_samples_are_planned(tmp_path, words, ranks):
    run = prepare_run(settings("model.path=builtin:tiny", f"output={tmp_path}/r", *words), ranks, tmp_path)
    steps = steps_to_plan(run.plan, 1, 100_000, most=50)
    assert {1, 2, 100_000} <= set(steps) and len(steps) < 60
    assert steps_to_plan(run.plan, 3, 40, most=50) == list(range(3, 41))


@pytest.mark.parametrize(("per_token", "ends"), [(1e-5, 65536), (2.5e-5, 28_000), (1e-3, 1024)])
def test_the_size_is_where_the_memory_ends(per_token, ends):
    """Memory that grows by so much a token, from a tenth: the size found is just below the limit, and no try is above
    it but the first."""
    tried = []

    def share(size):
        tried.append(0.1 + per_token * size)
        return tried[-1], size

    found = search_size(share, 1024, 65_536)
    assert ends - 1.5 * FINEST <= found or found in (1024, 65_536)
    assert abs(found - min(65_536, max(1024, (ROOM - 0.1) / per_token))) <= FINEST
    assert all(peak <= ROOM + 1e-9 for peak in tried[1:])


def test_data_that_does_not_fill_a_size_ends_the_search():
    assert search_size(lambda size: (0.2, min(size, 3000)), 1024, 65_536) == 8192


def limit_and_train(out, words):
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, hard))
    run_in_space(out, words, 0)


def test_auto_is_measured_under_a_limit_and_taken_from_the_journal_later(tmp_path, words, ranks):
    run = tmp_path / "run"
    auto = [word for word in words if "micro_batch_tokens" not in word]
    ended = Running(limit_and_train, (str(run), auto), tmp_path / "p", {}).end()
    assert ended.status == 0 and "measured, on ranks with" in ended.err
    (entry,) = [e for e in read_rows(run / "events.jsonl") if e["event"] == "auto_micro_batch_tokens"]
    assert entry["tokens"] in (512, 1024, 2048)
    config = settings("model.path=builtin:tiny", f"output={run}", *auto)
    again = prepare_run(config, ranks, run, resumed=list_checkpoints(run)[-1])
    assert again.plan.micro_batch_tokens == entry["tokens"]
    fresh = prepare_run(config, ranks, tmp_path)
    assert fresh.plan.micro_batch_tokens == 8192, "no limit is known here"
