"""The command line as its user meets it: real processes, exit status, one line per error, files of a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from processes import rank_variables, run_litchi, run_litchi_ranks, start_litchi

QUICK = ("model.path=builtin:tiny", "track=[]", "data.workers=1", "train.global_batch_size=4", "data.shuffle=false")
STEP_KEYS = {
    *("step", "epoch", "loss", "units", "grad_norm", "lr", "tokens", "pixels", "step_s", "data_wait_s"),
    *("tokens_per_s", "mfu", "peak_bytes", "balance", "balance_micro", "skipped"),
}


@pytest.fixture
def place(tmp_path):
    """A folder with settings, pictures and data: chat.jsonl (10 rows), rerank.jsonl (6 groups), one.jsonl."""
    for n in range(3):
        pixels = np.random.default_rng(n).integers(0, 256, (56, 84, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"p{n}.png")
    write(tmp_path / "chat.jsonl", [chat(n, f"p{n % 3}.png" if n % 2 else None) for n in range(10)])
    write(tmp_path / "one.jsonl", [chat(1, "p1.png")])
    groups = [
        {"query": f"red {n}", "pos_doc": {"text": "a red one", "image": f"p{n % 3}.png"}, "neg_docs": ["blue", "green"]}
        for n in range(6)
    ]
    write(tmp_path / "rerank.jsonl", groups)
    for task in ("chat", "rerank"):
        (tmp_path / f"{task}.yaml").write_text(f"task: {task}\ntrainable: {{language: full}}\noptim: {{lr: 1e-3}}\n")
    return tmp_path


def chat(n, picture=None, answer="red apple"):
    parts = ([{"type": "image", "image": picture}] if picture else []) + [{"type": "text", "text": f"What is {n}?"}]
    return {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]}


def write(path: Path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def words(place, task="chat", data=None, **settings):
    """The words of a quick training."""
    return [
        *("train", str(place / f"{task}.yaml"), f"data.train={place / (data or f'{task}.jsonl')}"),
        *(f"output={place / 'run'}", *QUICK, *(f"{key.replace('__', '.')}={value}" for key, value in settings.items())),
    ]


def lines(path: Path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def errors(ended):
    return [line for line in ended.err.splitlines() if line.startswith("error: ")]


def assert_error(ended, status, *texts):
    """One error with these texts, its status, and no traceback."""
    assert ended.status == status, ended.err
    assert len(errors(ended)) == 1, ended.err
    assert "Traceback" not in ended.err + ended.out
    for text in texts:
        assert text in ended.err, ended.err


# ----------------------------------------------------------------------------------------------------- wrong use


def test_wrong_settings_are_told_all_at_once(place):
    ended = run_litchi(place / "p", *words(place, train__stepz=3, optim__lr="fast", loss="bce"))
    assert_error(ended, 2, "train.stepz", "train.steps", "optim.lr", "loss.name")
    assert not (place / "run").exists()


@pytest.mark.parametrize(
    "argv, says",
    [
        (["train"], "CONFIG"),
        (["train", "c.yaml", "--stepz"], "--stepz"),
        (["train", "c.yaml", "--procs", "0"], "--procs"),
        (["trian", "c.yaml"], "trian"),
        (["train", "none.yaml", "data.train=x.jsonl"], "none.yaml"),
        (["evaluate"], "TARGET"),
        (["score", "builtin:tiny", "--data", "x.jsonl"], "--out"),
    ],
)
def test_wrong_words_are_one_line_and_status_2(tmp_path, argv, says):
    ended = run_litchi(tmp_path, *argv)
    assert_error(ended, 2, says)
    assert len(ended.err.splitlines()) == 1 and not ended.out


def test_help_and_version_do_not_import_torch():
    code = "import sys\ntry:\n    from litchi.cli import main; main()\nfinally:\n    assert 'torch' not in sys.modules"
    for argv, says in ((["--help"], "train"), (["train", "--help"], "--procs"), (["--version"], "litchi 0")):
        command = [sys.executable, "-c", code, *argv]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (ended.returncode, ended.stderr) == (0, "") and says in ended.stdout


def test_the_verb_alone_is_wrong_use(tmp_path):
    ended = run_litchi(tmp_path)
    assert ended.status == 2 and "Usage" in ended.out + ended.err and "Traceback" not in ended.err


@pytest.mark.parametrize("what", ["absent", "a file", "not a model"])
def test_a_wrong_model_path(place, what):
    path = {"absent": "/none/model", "a file": str(place / "chat.jsonl"), "not a model": str(place)}[what]
    ended = run_litchi(place / "p", *words(place, model__path=path))
    assert_error(ended, 2, path)


def test_an_output_that_is_a_file(place):
    (place / "run").write_text("mine")
    assert_error(run_litchi(place / "p", *words(place)), 2, "output=")
    assert (place / "run").read_text() == "mine"


def test_fp16_needs_a_gpu(place):
    ended = run_litchi(place / "p", *words(place, train__precision="fp16"))
    assert_error(ended, 4, "train.precision=fp16", "bf16")


def test_debug_gives_the_traceback(place):
    ended = run_litchi(place / "p", *words(place, train__precision="fp16"), "--debug")
    assert ended.status == 4 and "Traceback" in ended.err and len(errors(ended)) == 1


# ------------------------------------------------------------------------------------------------------ bad data


def test_a_missing_data_file(place):
    assert_error(run_litchi(place / "p", *words(place, data="none.jsonl")), 3, "none.jsonl")


def test_no_data_file_at_all(place):
    ended = run_litchi(place / "p", "train", str(place / "chat.yaml"), "model.path=builtin:tiny")
    assert_error(ended, 2, "data.train is not given")


@pytest.mark.parametrize("policy", ["error", "skip"])
@pytest.mark.parametrize("rows", [[], ["not json"] * 3, ["masked"] * 3], ids=["empty", "broken", "nothing to learn"])
def test_a_file_without_a_usable_row_ends_before_step_1(place, rows, policy):
    masked = chat(1)
    masked["messages"][1]["train"] = False
    write(place / "bad.jsonl", [masked if row == "masked" else row for row in rows])
    settings = {"data__on_bad_media": policy, "data__max_bad_fraction": 1.0}
    ended = run_litchi(place / "p", *words(place, data="bad.jsonl", **settings))
    assert_error(ended, 3, "bad.jsonl")
    assert "step 1/" not in ended.err and not (place / "run" / "metrics.jsonl").exists()


@pytest.fixture
def broken(place):
    """spoilt.jsonl: rows 2 and 5 name a picture that is cut off or absent, row 7 is no JSON; seven rows are fine."""
    (place / "cut.png").write_bytes((place / "p0.png").read_bytes()[:-900])
    rows = [chat(n, f"p{n % 3}.png" if n % 2 else None) for n in range(10)]
    rows[1], rows[4], rows[6] = chat(1, "cut.png"), chat(4, "absent.png"), '{"messages": ['
    write(place / "spoilt.jsonl", rows)
    return place


def test_bad_rows_stop_a_run_before_step_1(broken):
    ended = run_litchi(broken / "p", *words(broken, data="spoilt.jsonl"))
    assert_error(ended, 3, "3 of 10 rows are bad", "spoilt.jsonl:2:", "cut.png", "spoilt.jsonl:5:", "spoilt.jsonl:7:")
    assert "absent.png" in ended.err and "step 1/" not in ended.err


def test_skip_allows_only_so_many(broken):
    ended = run_litchi(broken / "p", *words(broken, data="spoilt.jsonl", data__on_bad_media="skip"))
    assert_error(ended, 3, "data.max_bad_fraction", "spoilt.jsonl:5:")


@pytest.mark.parametrize("world", [1, 2])
def test_skip_trains_on_exactly_the_good_rows(broken, world):
    settings = {"data__on_bad_media": "skip", "data__max_bad_fraction": 1.0, "train__epochs": 1}
    ended = run_litchi_ranks(broken / "p", world, *words(broken, data="spoilt.jsonl", **settings))
    assert [e.status for e in ended] == [0] * world, ended[0].err
    assert "7 of 10 rows" in ended[0].err and "3 rows in" in ended[0].err
    found = lines(broken / "run" / "quarantine.jsonl")
    assert [row["line"] for row in found] == [2, 5, 7] and all(row["file"].endswith("spoilt.jsonl") for row in found)
    good = [row for n, row in enumerate((broken / "spoilt.jsonl").read_text().splitlines()) if n not in (1, 4, 6)]
    write(broken / "good.jsonl", good)
    clean = run_litchi(broken / "q", *words(broken, data="good.jsonl", output=broken / "clean"))
    assert clean.status == 0
    losses, wanted = ([r["loss"] for r in lines(broken / name / "metrics.jsonl")] for name in ("run", "clean"))
    assert len(wanted) == 2 and losses == pytest.approx(wanted, rel=1e-6)


def test_data_check_answers_in_json(broken):
    ended = run_litchi(broken / "p", "data", "check", str(broken / "spoilt.jsonl"), "--task", "chat", "--json")
    assert ended.status == 3 and "Traceback" not in ended.err
    report = json.loads(ended.out)
    assert (report["rows"], report["usable"]) == (10, 7) and report["tokens"] > 0 and report["pixels"] > 0
    bad = [f for f in report["findings"] if f["severity"] == "error"]
    assert [f["line"] for f in bad] == [2, 5, 7]
    assert all(set(f) >= {"file", "line", "severity", "code", "message"} for f in bad)


def test_data_check_of_a_fine_file(place):
    ended = run_litchi(place / "p", "data", "check", str(place / "rerank.jsonl"), "--task", "rerank", "--json")
    assert ended.status == 0, ended.err
    assert json.loads(ended.out)["findings"] == []


# ---------------------------------------------------------------------------------------------------- whole runs


def assert_run(run: Path, steps: int, world: int):
    """A finished run's folder has what the contract says."""
    metrics = lines(run / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(1, steps + 1))
    for m in metrics:
        assert m.keys() >= STEP_KEYS
        assert len(m["peak_bytes"]) == world and min(m["peak_bytes"]) > 10**7
        assert m["loss"] > 0 and m["units"] > 0 and m["tokens"] > 0 and m["grad_norm"] > 0 and m["lr"] > 0
        assert m["tokens_per_s"] > 0 and m["step_s"] > 0 and m["data_wait_s"] >= 0
        assert m["balance_micro"] >= m["balance"] >= 1
        assert m["skipped"] is False and m["mfu"] is None
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    start = next(e for e in lines(run / "events.jsonl") if e["event"] == "start")
    assert (start["ranks"], start["wrapper"]) == (world, "DDP" if world > 1 else "none")
    assert "task: " in (run / "config.yaml").read_text()
    assert (run / "checkpoints" / f"step-{steps:08}" / "manifest.json").is_file()
    assert (run / "export" / "config.json").is_file() and list((run / "export").glob("*.safetensors"))
    assert (run / "quarantine.jsonl").read_text() == ""


def run_real(command, timeout=110):
    """A command as a user types it, nothing shared with this process."""
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=timeout)


def test_procs_starts_ranks_and_trains(place):
    command = [Path(sys.executable).with_name("litchi"), *words(place, train__steps=6, train__save_every=3)]
    ended = run_real([*command, "--procs", "2"])
    assert ended.returncode == 0, ended.stderr
    assert_run(place / "run", 6, 2)
    assert (place / "run" / "checkpoints" / "step-00000003" / "manifest.json").is_file()
    assert "Warning" not in ended.stderr and "torch" not in ended.stderr.replace("torchrun", "")
    assert ended.stderr.count("step 6/6") == 1  # ranks beside the first say nothing


@pytest.mark.slow  # `run_litchi_ranks` below gives ranks the same variables, without 20 s of imports
def test_torchruns_ranks_are_taken(place):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, "--standalone"]
    ended = run_real([*command, "-m", "litchi", *words(place, "rerank", train__steps=6)])
    assert ended.returncode == 0, ended.stderr
    assert_run(place / "run", 6, 2)


@pytest.mark.parametrize("task", ["chat", "rerank"])
def test_one_process_and_again(place, task):
    ended = run_litchi(place / "p", *words(place, task, train__steps=4))
    assert ended.status == 0, ended.err
    assert_run(place / "run", 4, 1)
    before = (place / "run" / "metrics.jsonl").read_text()
    again = run_litchi(place / "p", *words(place, task, train__steps=4))
    assert again.status == 0 and "already finished" in again.out
    assert (place / "run" / "metrics.jsonl").read_text() == before


def test_one_row_on_two_ranks(place):
    ended = run_litchi_ranks(place / "p", 2, *words(place, data="one.jsonl", train__steps=2))
    assert [e.status for e in ended] == [0, 0], ended[0].err
    alone = run_litchi(place / "q", *words(place, data="one.jsonl", train__steps=2, output=place / "alone"))
    assert alone.status == 0
    both, one = ([r["loss"] for r in lines(place / name / "metrics.jsonl")] for name in ("run", "alone"))
    assert len(one) == 2 and both == pytest.approx(one, rel=1e-6)


# ------------------------------------------------------------------------------------------------ errors of ranks


def test_an_error_on_all_ranks_is_told_once(place):
    ended = run_litchi_ranks(place / "p", 2, *words(place, model__path="/none/model"))
    assert ended[0].status == 2 and ended[1].status != 0
    assert len(errors(ended[0])) == 1 and all("stopped by SIGTERM" in line for line in errors(ended[1]))


def test_an_error_on_one_rank_ends_all(place):
    """A picture is lost between its check and its step; only the second rank needs it."""
    rows = [chat(n, None, "red apple two " * 4) for n in range(4)]  # two texts a step; the dearer one is rank 0's
    rows[3] = chat(3, "p0.png", "red")
    write(place / "late.jsonl", rows)
    settings = {"data__verify": "headers", "train__global_batch_size": 2, "data__workers": 0, "train__steps": 40}
    running = [
        start_litchi(place / f"r{e['RANK']}", *words(place, data="late.jsonl", **settings), env=e)
        for e in rank_variables(2)
    ]
    running[0].wait_for("step  2/40")
    (place / "p0.png").unlink()
    start = time.monotonic()
    while all(r.process.is_alive() for r in running) and time.monotonic() - start < 20:
        time.sleep(0.05)
    failed = next(r for r in running if not r.process.is_alive())
    seconds = time.monotonic() - start
    for one in running:
        if one.process.is_alive():
            os.kill(one.pid, signal.SIGTERM)  # as the launcher does
    ended = [r.end(5) for r in running]
    assert seconds < 15 and failed.process.exitcode == 3
    told = [e for e in ended if errors(e) and e.status != 75]  # the other is stopped for it
    assert len(told) == 1
    assert_error(told[0], 3, "p0.png", "late.jsonl:4")


def test_a_signal_to_one_rank_stops_all_and_the_run_resumes(place):
    settings = {"train__steps": 40, "data__workers": 1}
    running = [start_litchi(place / f"r{e['RANK']}", *words(place, **settings), env=e) for e in rank_variables(2)]
    running[0].wait_for("step  3/40")
    os.kill(running[1].pid, signal.SIGTERM)
    ended = [r.end(20) for r in running]
    assert [e.status for e in ended] == [75, 75], ended[0].err
    assert_error(ended[0], 75, "stopped by")
    done = len(lines(place / "run" / "metrics.jsonl"))
    assert 3 <= done < 40
    again = run_litchi_ranks(place / "again", 2, *words(place, **settings))
    assert [e.status for e in again] == [0, 0] and "resumed from" in again[0].err
    assert_run(place / "run", 40, 2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_with_75(place, number):
    running = start_litchi(place / "p", *words(place, train__steps=500))
    running.wait_for("step   3/500")
    os.kill(running.pid, number)
    ended = running.end(20)
    assert_error(ended, 75, f"stopped by {number.name}", "The same command")
    done = len(lines(place / "run" / "metrics.jsonl"))
    assert (place / "run" / "checkpoints" / f"step-{done:08}" / "manifest.json").is_file() and done < 500


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_leaves_no_orphans(place, number):
    command = [Path(sys.executable).with_name("litchi"), *words(place, train__steps=2000), "--procs", "2"]
    log = (place / "log.txt").open("w")
    process = subprocess.Popen([str(c) for c in command], stdout=log, stderr=log, start_new_session=True)
    while "step    3/2000" not in (place / "log.txt").read_text():
        assert process.poll() is None, (place / "log.txt").read_text()
        time.sleep(0.1)
    process.send_signal(number)
    assert process.wait(40) == 75
    text = (place / "log.txt").read_text()
    assert text.count("error: ") == 1 and "Traceback" not in text, text
    left = [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(place).encode() in read(p)]
    assert not left
    assert (place / "run" / "checkpoints").is_dir()


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named(place):
    settings = {"train__steps": 2000, "train__restarts": 0}
    command = [Path(sys.executable).with_name("litchi"), *words(place, **settings), "--procs", "2"]
    log = (place / "log.txt").open("w")
    process = subprocess.Popen([str(c) for c in command], stdout=log, stderr=log)
    while "step    3/2000" not in (place / "log.txt").read_text():
        assert process.poll() is None, (place / "log.txt").read_text()
        time.sleep(0.1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = [c for c in children if b"RANK=1" in (Path("/proc") / c / "environ").read_bytes().split(b"\0")]
    os.kill(int(ranks[0]), signal.SIGKILL)
    assert process.wait(40) == 1
    text = (place / "log.txt").read_text()
    assert text.count("error: ") == 1 and "rank 1 was ended by SIGKILL" in text, text


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it ended meanwhile
        return b""
