"""Two machines, as network namespaces with addresses of their own: the losses of one, and an end when one goes away."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import chat_rows, read_rows

SILENT_S = 30  # what `parallel/heartbeat.py` promises
SAME = ("step", "loss", "units", "tokens")


def ip(*words, check=True):
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True, timeout=20)


@pytest.fixture
def machines():
    """Names of two namespaces joined by a cable, 10.213.0.1 and .2; both are gone afterwards."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    names = [f"litchi{os.getpid()}{side}" for side in "ab"]
    try:
        for name in names:
            made = ip("netns", "add", name, check=False)
            if made.returncode:
                pytest.skip(f"network namespaces are not permitted here: {made.stderr.strip()}")
        ends = [f"eth{os.getpid()}{side}" for side in "ab"]
        made = ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1], check=False)
        if made.returncode:
            pytest.skip(f"pairs of network interfaces are not permitted here: {made.stderr.strip()}")
        for number, (name, end) in enumerate(zip(names, ends, strict=True), 1):
            ip("link", "set", end, "netns", name, "name", "eth0")
            ip("-n", name, "addr", "add", f"10.213.0.{number}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            ip("netns", "delete", name, check=False)


def start(folder: Path, name: str, number: int, *words) -> subprocess.Popen:
    """torchrun on one of the machines, with what it says in `folder`/NUMBER.txt."""
    launcher = ["torchrun", "--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1"]
    launcher += ["--master-addr", "10.213.0.1", "--master-port", "29400", "-m", "litchi"]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0"}
    with (folder / f"{number}.txt").open("w") as out:
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", *launcher[1:], *words]
        return subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)


def words(folder, name, steps):
    (folder / "c.yaml").write_text("task: chat\ntrainable: {language: full}\n")
    quick = ("model.path=builtin:tiny", "track=[]", "data.workers=0", "train.global_batch_size=4", "train.export=never")
    return ["train", f"{folder}/c.yaml", f"data.train={folder}/chat.jsonl", f"output={folder}/{name}", *quick, steps]


@pytest.mark.slow
def test_two_machines_give_the_losses_of_one(machines, tmp_path):
    chat_rows(tmp_path)
    both = [start(tmp_path, name, n, *words(tmp_path, "two", "train.steps=4")) for n, name in enumerate(machines)]
    said = [process.wait(100) or (tmp_path / f"{n}.txt").read_text() for n, process in enumerate(both)]
    assert all(isinstance(text, str) for text in said), [(tmp_path / f"{n}.txt").read_text()[-3000:] for n in (0, 1)]
    command = [sys.executable, "-m", "litchi", *words(tmp_path, "one", "train.steps=4"), "--procs", "2"]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    two, one = (read_rows(tmp_path / name / "metrics.jsonl") for name in ("two", "one"))
    assert len(one) == 4 and [[row[k] for k in SAME] for row in two] == [[row[k] for k in SAME] for row in one]
    assert [len(row["peak_bytes"]) for row in two] == [2] * 4


@pytest.mark.slow
def test_a_cable_that_is_pulled_ends_both_sides_with_one_line(machines, tmp_path):
    chat_rows(tmp_path)
    both = [start(tmp_path, name, n, *words(tmp_path, "two", "train.steps=100000")) for n, name in enumerate(machines)]
    try:
        until = time.monotonic() + 60
        while "step      3/" not in (tmp_path / "0.txt").read_text():
            assert time.monotonic() < until and both[0].poll() is None, (tmp_path / "0.txt").read_text()
            time.sleep(0.1)
        ip("-n", machines[1], "link", "set", "eth0", "down")
        pulled = time.monotonic()
        says = ["error: rank 1 (", "error: the machine where ranks meet (10.213.0.1:29400) has not been heard of"]
        waiting = {0, 1}
        while waiting and time.monotonic() - pulled < SILENT_S + 10:
            waiting -= {n for n in waiting if says[n] in (tmp_path / f"{n}.txt").read_text()}
            time.sleep(0.2)
        seconds = time.monotonic() - pulled
        texts = [(tmp_path / f"{n}.txt").read_text() for n in (0, 1)]
        assert not waiting, texts
        assert SILENT_S - 5 < seconds
        assert [text.count("error: ") for text in texts] == [1, 1] and "resumes from the last" in texts[0]
        time.sleep(2)  # the ranks have ended; torchrun itself may still look for its peers
        assert not ranks_of(tmp_path)
    finally:
        for process in both:
            if process.poll() is None:
                os.killpg(process.pid, 9)
            process.wait()


def ranks_of(folder: Path) -> list[str]:
    """Processes of ranks that train into a folder: those whose parent is a launcher's."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            command = (place / "cmdline").read_bytes()
            if str(folder).encode() in command and b"torch.distributed.run" not in command and b"netns" not in command:
                found.append(place.name)
        except OSError:  # it ended meanwhile
            continue
    return found
