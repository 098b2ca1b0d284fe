"""`--slurm`: the script it writes, the options it refuses, and the ranks that srun would make of it."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from processes import start_litchi

from litchi.dist import slurm_variables
from litchi.errors import UsageError
from litchi.parallel.slurm import OPTIONS, read_options, write_script

COMMAND = ["/v/bin/python", "-m", "litchi", "train", "my config.yaml", "optim.lr=1e-4", "data.instruction=it's 5"]


def script(*words, command=COMMAND):
    return write_script(read_options(words, workers=2, name="my run"), command, Path("/home/me/a b"))


def check_syntax(text):
    """bash reads it; shellcheck finds nothing, where there is one."""
    tools = [["bash", "-n", "/dev/stdin"]]
    if shutil.which("shellcheck"):
        tools.append(["shellcheck", "-"])
    for tool in tools:
        done = subprocess.run(tool, input=text, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_script_is_exactly_this():
    text = script("nodes=2", "gpus=a100:8", "time=12:00:00", "partition=gpu,big", "account=me", "mem=0")
    check_syntax(text)
    assert text == (
        """#!/bin/bash
# One rank per task. Submitted again it resumes.
#SBATCH --nodes=2
#SBATCH --gpus-per-node=a100:8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=4
#SBATCH --mem=0
#SBATCH --time=12:00:00
#SBATCH --partition=gpu,big
#SBATCH --account=me
#SBATCH --job-name=litchi-my-run
#SBATCH --signal=TERM@300
set -euo pipefail
cd '/home/me/a b'
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
srun --ntasks-per-node=8 --cpus-per-task=4 --kill-on-bad-exit=1 \\
  /v/bin/python -m litchi train 'my config.yaml' optim.lr=1e-4 'data.instruction=it'"'"'s 5'
"""
    )


def test_every_option_has_its_line():
    values = {"gpus": "2", "mem": "10G", "time": "10", "nodes": "3", "tasks": "4", "cpus": "5"}
    text = script(*(f"{key}={values.get(key, 'x')}" for key in OPTIONS))
    check_syntax(text)
    for key, option in OPTIONS.items():
        assert f"#SBATCH --{option.directive}={values.get(key, 'x')}\n" in text
    assert "srun --ntasks-per-node=4 --cpus-per-task=5 " in text
    assert "starts over" in script(command=[*COMMAND, "--fresh"])


@pytest.mark.parametrize(
    "word, says",
    [
        ("node=2", "did you mean nodes?"),
        ("partion=x", "did you mean partition?"),
        ("wckey=x", "it takes nodes, gpus"),
        ("nodes", "machines"),
        ("nodes=0", "machines"),
        ("nodes=two", "machines"),
        ("gpus=a100", "as 8 or a100:8"),
        ("partition=a b", "partition"),
        ("account=$(id)", "account"),
        ("time=1h", "12:00:00"),
    ],
)
def test_wrong_options_are_refused(word, says):
    with pytest.raises(UsageError) as error:
        script("tasks=1", word)
    assert word in str(error.value) and says in str(error.value)
    with pytest.raises(UsageError, match="twice"):
        script("nodes=1", "nodes=2")


def test_its_tasks_are_our_ranks(tmp_path):
    """Run the script with a stand-in for srun that prints what each task would be told."""
    fake(tmp_path, "srun", 'printf "%s\\n" "$@" "$OMP_NUM_THREADS"; pwd')
    (tmp_path / "a b").mkdir()
    text = script("nodes=2", "tasks=4").replace("/home/me/a b", str(tmp_path / "a b"))
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash"], input=text, capture_output=True, text=True, env=env, timeout=60)
    assert done.stdout.splitlines()[3:] == [*COMMAND, "1", str(tmp_path / "a b")]
    told = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "6", "SLURM_LOCALID": "2", "SLURM_STEP_NODELIST": "n[1-2]"}
    assert slurm_variables(told)["RANK"] == "6"


# ----------------------------------------------------------------------------------------------------- the command


def fake(folder, name, text):
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(stat.S_IRWXU)


@pytest.fixture
def words(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("task: chat\ntrainable: {language: full}\n")
    return [
        "train",
        str(config),
        "model.path=m",
        "data.train=t.jsonl",
        f"output={tmp_path}/runs/one",
        "--slurm=nodes=2",
    ]


def start(folder, words, *, sbatch=None):
    """Run the command with a stand-in for sbatch on the path, or without one."""
    (folder / "bin").mkdir()
    if sbatch:
        fake(folder / "bin", "sbatch", sbatch)
    return start_litchi(folder / "p", *words, env={"PATH": f"{folder / 'bin'}:/usr/bin:/bin"}).end()


def test_print_shows_the_script_and_submits_nothing(tmp_path, words):
    ended = start(tmp_path, [*words, "--slurm", "gpus=8", "--print", "--allow-changed", "optim.lr"], sbatch="exit 9")
    assert (ended.status, ended.err) == (0, "")
    check_syntax(ended.out)
    assert "#SBATCH --nodes=2\n" in ended.out and "#SBATCH --ntasks-per-node=8\n" in ended.out
    assert f"cd {os.getcwd()}\n" in ended.out and "#SBATCH --job-name=litchi-one\n" in ended.out
    command = [sys.executable, "-m", "litchi", *words[:5], "--allow-changed", "optim.lr"]
    assert ended.out.endswith(f"  {' '.join(command)}\n")
    assert not (tmp_path / "runs").exists()


def test_the_job_is_submitted(tmp_path, words):
    ended = start(tmp_path, words, sbatch='echo "Submitted batch job 7 from $1"')
    script = tmp_path / "runs" / "one.sbatch"
    assert (ended.status, ended.out) == (0, f"Submitted batch job 7 from {script} ({script})\n"), ended.err
    check_syntax(script.read_text())


@pytest.mark.parametrize(
    "more, sbatch, status, says",
    [
        ([], None, 4, "error: sbatch is not found"),
        ([], "echo 'sbatch: error: invalid partition' >&2; exit 1", 4, "one.sbatch): invalid partition. Change"),
        (["--slurm", "gpu=8"], None, 2, "did you mean gpus?"),
        (["optim.lrr=1"], None, 2, "optim.lrr"),  # settings are checked here, not after hours in a queue
        (["--procs", "2"], None, 2, "--procs"),
    ],
)
def test_what_goes_wrong_is_one_line(tmp_path, words, more, sbatch, status, says):
    ended = start(tmp_path, [*words, *more], sbatch=sbatch)
    assert ended.status == status and says in ended.err and not ended.out
    assert ended.err.count("error: ") == 1 and "Traceback" not in ended.err


def test_print_belongs_to_slurm(tmp_path, words):
    ended = start(tmp_path, [*words[:5], "--print"])
    assert ended.status == 2 and "--slurm" in ended.err
