"""Losses and gradients that are not finite, in one step or several, on all ranks or one: left out, gone back for, or
the run stops; and the journal says where it began."""

from __future__ import annotations

import math
import signal

import pytest
from number_job import run_all, run_alone, run_wrong
from processes import Running, RunningRanks
from runs import chat_rows, read_rows, state_hashes

from litchi.config.train import Train
from litchi.train.checkpoint import list_checkpoints
from litchi.train.nonfinite import FEWEST, Watch, is_spike
from litchi.train.rollback import is_undone

MLP = "hf.model.language_model.layers.1.mlp"
ROW = [4, 5, 6]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """LoRA with dropout on pictures and text; a checkpoint every second step."""
    data = chat_rows(tmp_path_factory.mktemp("data"), 6)
    return [
        "task=chat", f"data.train={data}", "trainable.lora.rank=4", "trainable.lora.dropout=0.2", "optim.lr=2e-3",
        "train.steps=8", "train.export=never", "train.global_batch_size=2", "train.micro_batch_tokens=256",
        "train.save_every=2", "train.keep=2",
    ]  # fmt: skip


def numbers(run):
    """What does not depend on the clock; a NaN stands for itself."""
    keys = ("step", "loss", "units", "grad_norm", "lr", "tokens", "skipped")
    return [[str(row[key]) for key in keys] for row in read_rows(run / "metrics.jsonl")]


def events(run, kind):
    return [e for e in read_rows(run / "events.jsonl") if e["event"] == kind]


@pytest.fixture(scope="module")
def left_out(tmp_path_factory, words, ranks):
    """steps -> the run in which nothing but their updates is missing."""
    made = {}

    def run(steps):
        if tuple(steps) not in made:
            out = made[tuple(steps)] = tmp_path_factory.mktemp("left") / "run"
            assert run_wrong(ranks, str(out), words, [["left out", list(steps)]]) == [0, ""]
        return made[tuple(steps)]

    return run


@pytest.mark.parametrize("rule", ["skip", "rollback"])
@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_one_step_is_left_out(tmp_path, ranks, words, left_out, kind, rule):
    run = tmp_path / "run"
    assert run_wrong(ranks, str(run), [*words, f"train.on_nonfinite={rule}"], [[kind, [4]]]) == [0, ""]
    lines = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in lines] == list(range(1, 9))
    assert [row["step"] for row in lines if row["skipped"]] == [4] and lines[3]["left_out"] == "not finite"
    assert math.isfinite(lines[3]["loss"]) == (kind == "gradient") and not math.isfinite(lines[3]["grad_norm"])
    (entry,) = events(run, "nonfinite")
    assert entry["step"] == 4 and entry["kind"] == kind and len(entry["samples"]) == 2
    if kind == "loss":
        assert entry["where"] == MLP
    else:  # nearest to the loss among what trains: the additions of that MLP or what comes before it
        assert "layers.1." in entry["where"] and "lora" in entry["where"]
    assert state_hashes(run) == state_hashes(left_out([4]))
    assert state_hashes(run) != state_hashes(left_out([]))


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_stop_stops_at_the_first_and_names_samples(tmp_path, ranks, words, kind):
    run = tmp_path / "run"
    status, line = run_wrong(ranks, str(run), [*words, "train.on_nonfinite=stop"], [[kind, [4]]])
    (entry,) = events(run, "nonfinite")
    assert status == 1 and line.startswith("step 4 is not finite") and "layers.1." in line
    assert all(name in line for name in entry["samples"])
    assert [c.step for c in list_checkpoints(run)] == [2]


def test_three_in_a_row_stop_a_run_that_skips(tmp_path, ranks, words):
    run = tmp_path / "run"
    status, line = run_wrong(ranks, str(run), words, [["loss", ROW]])
    assert status == 1 and line.startswith("steps 4 to 6 are not finite") and MLP in line
    assert all(name in line for e in events(run, "nonfinite") for name in e["samples"])
    assert len(events(run, "nonfinite")) == 3


def test_three_that_are_not_in_a_row_do_not(tmp_path, ranks, words, left_out):
    run = tmp_path / "run"
    assert run_wrong(ranks, str(run), words, [["gradient", [3, 4, 6, 7]]]) == [0, ""]
    assert state_hashes(run) == state_hashes(left_out([3, 4, 6, 7]))


def assert_went_back(run, left_out):
    """To before the update that led there, and with it and the row left out from then on."""
    (entry,) = events(run, "rollback")
    assert (entry["from_step"], entry["to_step"]) == (6, 2)
    assert (entry["bad"], entry["leave_out"]) == (ROW, [3, *ROW])
    assert numbers(run)[-2:] == numbers(left_out([3, *ROW]))[-2:]
    assert state_hashes(run) == state_hashes(left_out([3, *ROW]))
    lines = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in lines] == list(range(1, 9))
    assert [row["step"] for row in lines if row.get("left_out") == "rolled back"] == [3, *ROW]


@pytest.fixture(scope="module")
def gone_back(tmp_path_factory, ranks, words):
    run = tmp_path_factory.mktemp("back") / "run"
    assert run_wrong(ranks, str(run), [*words, "train.on_nonfinite=rollback"], [["loss", ROW]]) == [0, ""]
    return run


def test_three_in_a_row_go_back(gone_back, left_out):
    assert_went_back(gone_back, left_out)


@pytest.mark.parametrize("moment", ["behind it", "in the middle of it"])
def test_killed_after_going_back_the_run_ends_the_same(tmp_path, words, gone_back, left_out, moment):
    run = tmp_path / "run"
    given = str(run), [*words, "train.on_nonfinite=rollback"], [["loss", ROW]]
    if moment == "behind it":
        first = Running(run_alone, given, tmp_path / "p1", {})
        first.wait_for("went back from step 6")
        first.kill()
    else:
        assert Running(run_alone, (*given, True), tmp_path / "p1", {}).end().status == -signal.SIGKILL
        assert [e["to_step"] for e in events(run, "rollback")] == [2]
    assert Running(run_alone, given, tmp_path / "p2", {}).end().status == 0
    assert_went_back(run, left_out)
    assert numbers(run) == numbers(gone_back)


def test_it_goes_back_only_so_often(tmp_path, ranks, words):
    """Every step behind the third is bad: one more is left out each time, until the run stops."""
    run = tmp_path / "run"
    more = ["train.on_nonfinite=rollback", "train.nonfinite_limit=1", "train.rollbacks=2"]
    status, line = run_wrong(ranks, str(run), [*words, *more], [["loss", [4, 5, 6, 7, 8]]])
    assert status == 1 and line.startswith("step 6 is not finite") and "went back 2 times" in line
    assert [e["leave_out"] for e in events(run, "rollback")] == [[3, 4], [2, 5]]


def test_there_must_be_something_to_go_back_to(tmp_path, ranks, words):
    """Step 1 has the weights as they were, a checkpoint of step 0."""
    run = tmp_path / "run"
    more = ["train.on_nonfinite=rollback", "train.nonfinite_limit=1"]
    assert run_wrong(ranks, str(run), [*words, *more], [["loss", [1]]]) == [0, ""]
    assert [(e["to_step"], e["leave_out"]) for e in events(run, "rollback")] == [(0, [1])]


# ------------------------------------------------------------------------------------------------------ several ranks

CASES = {  # the wrapper it is always tried in; in the other it is slow
    ("skip", "loss"): "DDP",
    ("skip", "gradient"): "DDP",
    ("stop", "loss"): "DDP",
    ("rollback", "loss"): "FSDP2",
}
AXES = {"FSDP2": "parallel.dp_shard=2", "DDP": "parallel.dp_replicate=2"}
LEFT = {"skip": [5], "rollback": [3, *ROW]}


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory, words):
    """(wrapper, always) -> runs with NaNs on the second of two ranks alone: in a step, or, to go back, in a row."""
    made = {}

    def run(wrapper, always):
        if (wrapper, always) not in made:
            root, more = tmp_path_factory.mktemp(wrapper), [*words, AXES[wrapper]]
            cases = [case for case, first in CASES.items() if (first == wrapper) == always]
            jobs = {
                str(root / f"{rule} {kind}"): [
                    [*more, f"train.on_nonfinite={rule}"],
                    [[kind, ROW if rule == "rollback" else [5], 1]],
                ]
                for rule, kind in cases
            }
            rules = {rule for rule, _ in cases}
            left = {
                str(root / f"{rule} left out"): [more, [["left out", steps]]]
                for rule, steps in LEFT.items()
                if rule in rules
            }
            results = RunningRanks(root / "p", 2, run_all, jobs | left).results(200)
            assert results[0] == results[1], "ranks decided differently"
            made[wrapper, always] = root, results[0]
        return made[wrapper, always]

    return run


@pytest.mark.parametrize(
    ("wrapper", "rule", "kind"),
    [
        pytest.param(wrapper, *case, marks=() if wrapper == first else pytest.mark.slow)
        for case, first in CASES.items()
        for wrapper in AXES
    ],
)
def test_on_one_rank_only(on_one_rank, wrapper, rule, kind):
    root, results = on_one_rank(wrapper, CASES[rule, kind] == wrapper)
    run = root / f"{rule} {kind}"
    status, line = results[str(run)]
    found = events(run, "nonfinite")
    assert found and events(run, "start")[0]["wrapper"] == wrapper
    assert all(e["kind"] == kind and "layers.1." in e["where"] for e in found)
    if kind == "loss":  # the other rank's sample is not blamed
        assert all(len(e["samples"]) == 1 for e in found)
    if rule == "stop":
        assert status == 1 and line.startswith("step 5 is not finite") and found[0]["samples"][0] in line
        return
    assert (status, line) == (0, "")
    assert state_hashes(run) == state_hashes(root / f"{rule} left out")
    assert [e["leave_out"] for e in events(run, "rollback")] == ([LEFT[rule]] if rule == "rollback" else [])


# -------------------------------------------------------------------------------------------------------- pure parts


def test_a_spike_is_measured_by_medians():
    """By hand: median 2, deviations 0 or 1 of which the median is 1, so a standard deviation of 1.4826."""
    before = [1.0, 2.0, 3.0] * 9  # 18 of 27 deviate by 1
    assert is_spike(2 + 5.1 * 1.4826, before, 5.0) and not is_spike(2 + 4.9 * 1.4826, before, 5.0)
    assert not is_spike(-100.0, before, 5.0), "a fall is none"
    assert not is_spike(1e9, before, None) and not is_spike(1e9, before[: FEWEST - 1], 5.0)
    assert is_spike(2 + 5.1 * 1.4826, [*before[:-1], 1e6], 5.0), "one odd loss does not hide the next"
    assert is_spike(1.0051, [1.0] * 30, 5.0) and not is_spike(1.0049, [1.0] * 30, 5.0), "flat: 0.1 % of the median"


def test_what_is_watched_follows_from_the_lines():
    train = Train(on_nonfinite="rollback", loss_spike=6.0, epochs=1)
    lines = [{"step": n, "loss": 1.0 + 0.1 * (n % 3)} for n in range(1, 41)]
    lines += [{"step": 41, "loss": math.nan, "left_out": "not finite"}]
    lines += [{"step": 42, "loss": math.inf, "left_out": "fp16 overflow"}]
    watch = Watch(train, lines)
    assert watch.row == [41] and watch.applied == 40
    assert watch.see(43, math.nan, "not finite") == []
    assert watch.see(44, math.nan, "not finite") == [41, 43, 44]
    assert watch.blame([41, 43, 44]) == [40, 41, 43, 44]
    again = Watch(train, lines)
    assert again.see(43, 1.1, None) == [] and again.row == []
    assert again.see(44, 30.0, None) == [44] and again.blame([44]) == [43, 44]


def test_a_loss_that_stands_out_goes_back(tmp_path, ranks, words, left_out, monkeypatch):
    monkeypatch.setattr("litchi.train.nonfinite.FEWEST", 4)
    run = tmp_path / "run"
    more = ["train.on_nonfinite=rollback", "train.loss_spike=20"]
    assert run_wrong(ranks, str(run), [*words, *more], [["spike", [6]]]) == [0, ""]
    (entry,) = events(run, "rollback")
    assert (entry["from_step"], entry["to_step"], entry["leave_out"]) == (6, 4, [5, 6])
    assert [r["step"] for r in read_rows(run / "metrics.jsonl") if r["skipped"]] == [5, 6]
    assert state_hashes(run) == state_hashes(left_out([5, 6])) != state_hashes(left_out([]))


def test_checkpoints_of_steps_that_were_taken_back():
    back = {"event": "rollback", "step": 3, "to_step": 2, "decided": True}
    assert is_undone(4, [], [back]) and not is_undone(2, [], [back]), "behind it, and what was gone back to"
    assert not is_undone(4, [back], [back]), "one that was written on the way again"
