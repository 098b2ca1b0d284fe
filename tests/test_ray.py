"""`--engine ray`: the losses of the same ranks without Ray, one line per error, and a start after a lost worker."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
from runs import chat_rows, read_rows

from litchi.errors import DataError, MachineError, UserError
from litchi.parallel import ray as engine

needs_ray = pytest.mark.skipif(
    not importlib.util.find_spec("ray"), reason="Ray is not installed: pip install 'litchi[ray]'"
)


def test_without_ray_the_command_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MachineError, match=r"Ray is not installed. Run pip install 'litchi\[ray\]'"):
        engine.run_on_ray(lambda ranks: None, 2, output="run")


class Wrapping(Exception):
    def __init__(self, inner):
        self._base_exc = inner


class Failed(Exception):
    def __init__(self, text="", **parts):
        super().__init__(text)
        self.__dict__.update(parts)


def test_what_ray_reports_becomes_one_line():
    ours = DataError("3 rows are bad")
    assert engine.explain(Failed(controller_failure=ours), 3) is ours
    assert engine.explain(Failed(worker_failures={1: RuntimeError("x"), 2: Wrapping(ours)}), 3) is ours
    line = engine.explain(
        Failed(worker_failures={1: RuntimeError("y"), 0: RuntimeError("Traceback\n  z: gone\n")}), 3
    ).line()
    assert line.startswith("z: gone (rank 0): it failed in all 4 starts. The workers")
    assert type(engine.explain(Failed("no cluster"), 3)) is UserError
    assert engine.explain(Failed("no cluster"), 3).line().startswith("no cluster (Ray). ")


LOSSES = ("step", "loss", "units", "grad_norm", "tokens")


def words(folder, name, *more):
    (folder / "c.yaml").write_text("task: chat\ntrainable: {language: full}\n")
    quick = ("model.path=builtin:tiny", "track=[]", "data.workers=1", "train.global_batch_size=4", "train.steps=4")
    return ["train", "c.yaml", "data.train=chat.jsonl", f"output=runs/{name}", *quick, *more]


def litchi(folder, *argv):
    command = [sys.executable, "-m", "litchi", *argv]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(300)  # a cluster takes 20 s to start on two cores, much longer on busy ones
def test_workers_of_ray_give_the_losses_of_ranks(tmp_path):
    chat_rows(tmp_path)
    for name, more in (("alone", ()), ("ray", ("--engine", "ray", "--fresh"))):
        ended = litchi(tmp_path, *words(tmp_path, name), "--procs", "2", *more)
        assert ended.returncode == 0, ended.stderr[-3000:]
    alone, ray = (read_rows(tmp_path / "runs" / name / "metrics.jsonl") for name in ("alone", "ray"))
    assert len(ray) == 4 and [len(row["peak_bytes"]) for row in ray] == [2] * 4
    assert [[row[k] for k in LOSSES] for row in ray] == [[row[k] for k in LOSSES] for row in alone]
    assert (tmp_path / "runs" / "ray" / "export").is_dir()


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(300)  # a cluster takes 20 s to start on two cores, much longer on busy ones
def test_bad_data_ends_a_run_on_ray_at_once(tmp_path):
    (tmp_path / "chat.jsonl").write_text('{"messages": [\n')
    ended = litchi(tmp_path, *words(tmp_path, "bad"), "--engine", "ray", "--procs", "2")
    said = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert (ended.returncode, len(said)) == (3, 1), ended.stderr[-3000:]
    assert "chat.jsonl" in said[0]


CRASH = """
import json, os
from pathlib import Path
from litchi.parallel.ray import run_on_ray

def body(ranks):
    mark = Path("FOLDER", f"start-{ranks.rank}")
    if ranks.rank == 1 and not mark.exists():
        mark.write_text("")
        os._exit(1)  # as a machine that is lost
    from litchi.dist import gather_objects
    Path("FOLDER", f"done-{ranks.rank}").write_text(json.dumps(gather_objects(ranks.rank)))

run_on_ray(body, 2, output="FOLDER/run")
"""


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(300)  # a cluster takes 20 s to start on two cores, much longer on busy ones
def test_a_lost_worker_is_started_again(tmp_path):
    code = CRASH.replace("FOLDER", str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert json.loads((tmp_path / "done-1").read_text()) == [0, 1] and (tmp_path / "start-1").exists()
