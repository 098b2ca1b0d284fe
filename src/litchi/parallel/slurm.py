"""`litchi train CONFIG --slurm nodes=2`: an sbatch script that starts the same command as one rank per GPU, by srun.

The ranks read what they are from srun's variables (`dist.slurm_variables`), so the script has no address and no port.
"""

from __future__ import annotations

import difflib
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from litchi.errors import MachineError, UsageError

SAVE_S = 300  # before the time limit: the ranks are told to save and end; sbatch counts in minutes
NUMBER = r"[1-9]\d*"
WORD = r"[^\s'\"\\`$]+"


@dataclass(frozen=True)
class Option:
    """What may stand after `--slurm`: the line of the script it becomes, the values it takes, and what it means."""

    directive: str
    takes: str
    means: str


OPTIONS = {
    "nodes": Option("nodes", NUMBER, "machines"),
    "gpus": Option("gpus-per-node", rf"(\w[\w.-]*:)?{NUMBER}", "GPUs of each machine, as 8 or a100:8; one rank each"),
    "tasks": Option("ntasks-per-node", NUMBER, "ranks of each machine; default: its GPUs, or one"),
    "cpus": Option("cpus-per-task", NUMBER, "cores of each rank; default: data.workers + 2"),
    "mem": Option("mem", r"\d+[KMGT]?", "memory of each machine, as 200G; 0: all of it"),
    "time": Option("time", r"[\d:-]+", "limit, as 12:00:00 or 2-00:00:00"),
    "partition": Option("partition", WORD, "partition"),
    "account": Option("account", WORD, "account"),
    "qos": Option("qos", WORD, "quality of service"),
    "constraint": Option("constraint", WORD, "features the machines must have"),
    "reservation": Option("reservation", WORD, "reservation"),
    "exclude": Option("exclude", WORD, "machines to avoid"),
    "name": Option("job-name", WORD, "name of the job; default: the run's folder"),
}


def read_options(words: Sequence[str], *, workers: int, name: str) -> dict[str, str]:
    """Read `key=value` words and lay them over the defaults.

    Args:
        words: what stood after each `--slurm`.
        workers: loader workers of a rank, which need cores.
        name: of the job unless one is given.

    Raises:
        UsageError: an unknown key, with the nearest; a wrong value, with what is allowed.
    """
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key not in OPTIONS:
            near = difflib.get_close_matches(key, OPTIONS, 1, cutoff=0.5)
            raise UsageError(
                f"--slurm {word}: there is no {key!r}",
                why=f"did you mean {near[0]}?" if near else "it takes " + ", ".join(OPTIONS),
            )
        option = OPTIONS[key]
        if not equals or not re.fullmatch(option.takes, value):
            raise UsageError(f"--slurm {word}: not a value of {key}", why=f"{key}=... is {option.means}")
        if key in given:
            raise UsageError(f"--slurm {key} is given twice", remedy="Leave one out")
        given[key] = value
    gpus = given.get("gpus", "1").rpartition(":")[2]
    safe = re.sub(r"[^\w.-]", "-", name) or "run"
    return {"name": f"litchi-{safe}", "nodes": "1", "tasks": gpus, "cpus": str(workers + 2), **given}


def write_script(options: dict[str, str], command: Sequence[str], folder: Path) -> str:
    """The script.

    Args:
        options: see `read_options`.
        command: what each rank runs.
        folder: where it runs; all machines must have it.
    """
    directives = [f"#SBATCH --{option.directive}={options[key]}" for key, option in OPTIONS.items() if key in options]
    again = "starts over" if "--fresh" in command else "resumes"
    lines = [
        "#!/bin/bash",
        f"# One rank per task. Submitted again it {again}.",
        *directives,
        f"#SBATCH --signal=TERM@{SAVE_S}",
        "set -euo pipefail",
        f"cd {shlex.quote(str(folder))}",
        'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"',
        # sbatch does not hand cpus-per-task on to srun; and without kill-on-bad-exit the others would wait for the lost
        f"srun --ntasks-per-node={options['tasks']} --cpus-per-task={options['cpus']} --kill-on-bad-exit=1 \\",
        f"  {shlex.join(command)}",
    ]
    return "\n".join(lines) + "\n"


def submit_script(text: str, path: Path) -> str:
    """Keep the script and hand it to sbatch; returns what sbatch says.

    Raises:
        MachineError: there is no sbatch, or it refuses the job.
    """
    if shutil.which("sbatch") is None:
        raise MachineError(
            "sbatch is not found",
            why="a job is submitted from a login node of the cluster",
            remedy="Print the script with --print, and submit it there",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    done = subprocess.run(["sbatch", str(path)], capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines()
        raise MachineError(
            "sbatch refuses the job",
            where=path,
            why=reason[-1].removeprefix("sbatch: error: ") if reason else f"status {done.returncode}",
            remedy="Change the options of --slurm",
        )
    return done.stdout.strip()


def train_on_slurm(
    words: Sequence[str], command: Sequence[str], *, workers: int, output: str, folder: Path, show: bool
) -> str:
    """Write the job of a training; `show`: return the script, else submit it and return what sbatch says."""
    text = write_script(read_options(words, workers=workers, name=Path(output).name), command, folder)
    return text if show else f"{submit_script(text, Path(f'{output}.sbatch'))} ({output}.sbatch)"
