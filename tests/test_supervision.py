"""Runs that lose a rank or their launcher, are told to stop, or hang: they go on unaided or end at once, whole."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest
from processes import Program, Running, rank_variables, run_litchi, start_litchi
from runs import read_rows, rerank_rows

from litchi import __version__
from litchi.errors import RestartError, StoppedError
from litchi.parallel import launch
from litchi.parallel.launch import Budget, Ended, RunningRanks
from litchi.scale import chaos
from litchi.train.checkpoint import list_checkpoints

# ------------------------------------------------------------------------------------------------------- decisions


def test_a_new_checkpoint_renews_the_restarts():
    budget = Budget(3, reached=0)
    assert [budget.take(0) for _ in range(4)] == [0, 1, 2, None]
    assert budget.take(10) == 0 and budget.take(10) == 1 and budget.take(9) == 2, "going back is no progress"
    assert budget.take(9) is None and budget.take(11) == 0
    assert Budget(0, reached=0).take(5) is None
    many = Budget(10, reached=0)
    assert [many.take(0) for _ in range(10)][-4:] == [32, 60, 60, 60]


def test_an_error_is_never_started_again():
    kinds = {status: Ended(0, status) for status in (0, 1, 2, 3, 4, 75, 76, -9, -11)}
    assert [status for status, ended in kinds.items() if ended.again] == [76, -9, -11]
    assert (RestartError.status, StoppedError.status) == (76, 75)
    heavier = sorted(kinds.values(), key=lambda one: one.weight)
    assert [one.status for one in heavier][:2] == [0, 75] and {one.status for one in heavier[-4:]} == {1, 2, 3, 4}
    assert str(kinds[-9]) == "rank 0 was ended by SIGKILL"


# ------------------------------------------------------------------------------------------------- copies that wait


def copy_and_wait(threads):
    """Make two copies and say which they are; then wait to be killed, or let them begin."""
    if threads:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    with RunningRanks() as ranks:
        ranks.fork(["--version"], 2)
        print("copies", *(process.pid for process in ranks.processes), flush=True)
        if threads is None:
            time.sleep(60)
        ranks.start({**os.environ, "OF": "the start"})
        print("ended", ranks.wait(), flush=True)


def test_copies_that_wait_end_with_the_launcher(tmp_path):
    launcher = Running(copy_and_wait, (None,), tmp_path, {})
    launcher.wait_for("copies")
    copies = [psutil.Process(int(pid)) for pid in launcher.read()[0].split()[1:]]
    assert len(copies) == 2
    os.kill(launcher.pid, signal.SIGKILL)
    assert not psutil.wait_procs(copies, timeout=20)[1]


@pytest.mark.parametrize("threads", [False, True], ids=["copied", "started anew beside another thread"])
def test_copies_run_the_command_line(tmp_path, threads):
    ended = Running(copy_and_wait, (threads,), tmp_path, {}).end()
    assert ended.status == 0 and ended.out.splitlines()[1:] == [*[f"litchi {__version__}"] * 2, "ended None"]


def show(name, value):
    os.environ[name] = value
    before = dict(os.environ)
    launch._show_environment({name: value, **os.environ})
    assert dict(os.environ) == before and subprocess.check_output(["printenv", name], text=True).strip() == value
    print(Path("/proc/self/environ").read_bytes().split(b"\0")[0].decode(), psutil.Process().environ()[name])


def test_others_see_which_rank_a_copy_is(tmp_path):
    ended = Running(show, ("RANK", "7"), tmp_path, {}).end()
    assert (ended.status, ended.out) == (0, "RANK=7 7\n"), ended.err
    assert Running(show, ("RANK", "7" * 100_000), tmp_path / "long", {}).end().status != 0, (
        "it does not fit, and is not cut"
    )


# ------------------------------------------------------------------------------------------------- two ranks, whole


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    return chaos.Room(tmp_path_factory.mktemp("chaos") / "room", Program)


def test_a_killed_rank_is_started_again(room):
    chaos.kill_rank(room, "rank", rank=1, step=5)
    events = [e for e in read_rows(room.folder / "rank" / "events.jsonl") if e["event"] == "restart"]
    assert events == [{"event": "restart", "step": 4, "rank": 1, "status": -9, "attempt": 1}]


def test_a_killed_launcher_leaves_nothing_running(room):
    chaos.kill_launcher(room, "launcher", step=5)


@pytest.mark.slow
def test_a_signal_cuts_an_evaluation_short(room):
    chaos.stop_in_evaluation(room, "evaluation", number=signal.SIGUSR1)


@pytest.mark.slow
def test_a_loader_that_stands_still_is_noticed(room):
    chaos.halt_loader(room, "loader", hang_s=2.0)
    with pytest.raises(chaos.Failed, match="not bit-identical"):  # the comparison can fail
        (line, *rest) = (room.folder / "loader" / "metrics.jsonl").read_text().splitlines()
        (room.folder / "loader" / "metrics.jsonl").write_text("\n".join([line.replace('"loss": ', '"loss": 1'), *rest]))
        room.compare("loader")


@pytest.mark.slow
def test_a_signal_in_a_step_in_a_save_and_at_the_start(room):
    chaos.stop_in_step(room, "step")
    chaos.stop_in_saving(room, "saving", number=signal.SIGINT)
    chaos.stop_at_start(room, "start")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stands_still_is_noticed(room, rank):
    """Also the one that speaks for all when it can."""
    chaos.halt_rank(room, f"halted-{rank}", rank=rank)


# ----------------------------------------------------------------------------------------------------- one process


@pytest.fixture
def words(tmp_path):
    (tmp_path / "c.yaml").write_text("task: rerank\n")
    data = rerank_rows(tmp_path)
    return [
        *("train", str(tmp_path / "c.yaml"), f"data.train={data}", f"output={tmp_path / 'run'}"),
        *("model.path=builtin:tiny", "track=[]", "data.workers=1", "train.global_batch_size=2"),
        *("train.export=never", "train.rehearse=false"),
    ]  # fmt: skip


def test_a_signal_before_the_first_step_ends_at_once_and_harms_nothing(tmp_path, words):
    short = [*words, "train.steps=2"]
    assert run_litchi(tmp_path / "a", *short).status == 0
    longer = [*words, "train.steps=4", "--allow-changed", "train.steps"]
    one = start_litchi(tmp_path / "b", *longer)
    one.wait_for("6 of 6 rows")
    os.kill(one.pid, signal.SIGTERM)
    ended = one.end(20)
    assert ended.status == 75 and "stopped by SIGTERM before its first step" in ended.err, ended.err
    assert [c.step for c in list_checkpoints(tmp_path / "run")][-1] == 2
    assert run_litchi(tmp_path / "c", *longer).status == 0
    assert [row["step"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_second_notice_does_not_keep_a_run_from_saving(tmp_path, words):
    one = start_litchi(tmp_path / "a", *words, "train.steps=2000")
    one.wait_for("step    2/2000")
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
        os.kill(one.pid, number)
    ended = one.end(20)
    assert ended.status == 75 and "stopped by SIG" in ended.err
    done = read_rows(tmp_path / "run" / "metrics.jsonl")[-1]["step"]
    assert [c.step for c in list_checkpoints(tmp_path / "run")] == [done]


def test_a_lost_loader_is_named(tmp_path, words):
    one = start_litchi(tmp_path / "a", *words, "train.steps=2000")
    one.wait_for("step    2/2000")
    (loader,) = psutil.Process(one.pid).children()
    loader.kill()
    ended = one.end(20)
    assert ended.status == 4 and ended.err.count("error: ") == 1, ended.err
    assert "error: a process that loads samples was ended: DataLoader worker (pid" in ended.err


def test_a_port_that_is_taken_is_named(tmp_path, words):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = str(other.getsockname()[1])
        env = {**rank_variables(2)[0], "MASTER_PORT": port}
        for where, more, extra in (("127.0.0.1", env, []), ("localhost", {"MASTER_PORT": port}, ["--procs", "2"])):
            ended = start_litchi(tmp_path / where, *words, *extra, env=more).end(30)
            assert ended.status == 4, ended.err
            assert f"error: ranks cannot meet at {where}:{port}: another process listens there" in ended.err
