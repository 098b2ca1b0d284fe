"""The files in `examples/clusters/`: read as their tools read them, their commands taken by our own parser."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from litchi import cli
from litchi.config import load_config
from litchi.parallel.accelerate import adopt_accelerate
from litchi.parallel.slurm import read_options, write_script

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "clusters"
FILES = sorted(path for path in FOLDER.iterdir() if path.is_file())
PAGE = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")


def text_of(path):
    """A file without its comments, its backslash-newlines joined; of a YAML file what its strings say."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".yaml", ".yml"):
        header = "\n".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
        text = "\n".join([header, *strings(yaml.safe_load(text))])
    else:
        text = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    return re.sub(r"\\\n\s*", " ", text)


def strings(node):
    """The strings of a YAML tree; a list of plain words counts as one command line."""
    if isinstance(node, dict):
        yield from (text for value in node.values() for text in strings(value))
    elif isinstance(node, list) and node and all(isinstance(word, str) for word in node):
        yield " ".join(node) if not any(" " in word for word in node) else "\n".join(node)
    elif isinstance(node, list):
        yield from (text for value in node for text in strings(value))
    elif isinstance(node, str):
        yield node


def commands(path):
    """The words after `litchi` of each command in a file."""
    return [shlex.split(words) for words in re.findall(r"(?:^|-m\s+|\s)litchi (train .*)", text_of(path))]


def parse(words):
    """What the command line makes of some words, without running it."""
    group = typer.main.get_command(cli.app)
    verb = group.commands[words[0]]
    return verb.make_context(words[0], list(words[1:])).params


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_command_of_each_file_is_one_of_ours(path):
    found = commands(path)
    assert len(found) == 1, f"{path.name} has {len(found)} commands: {text_of(path)}"
    taken = parse(found[0])
    settings = ROOT / "configs" / Path(taken["config"]).name
    config = load_config(settings, taken["overrides"])
    assert config.output == "/data/runs/rerank" and config.model.path == "/data/lychee"
    assert path.name in PAGE and f"`examples/clusters/{path.name}`" in PAGE


@pytest.mark.parametrize("path", [p for p in FILES if p.suffix in (".sh", ".sbatch")], ids=lambda path: path.name)
def test_the_scripts_are_clean(path):
    subprocess.run(["bash", "-n", path], check=True, timeout=60)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", path], check=True, timeout=60)


def test_the_sbatch_file_is_what_slurm_print_writes():
    """But for where it runs and what the first comment says."""
    text = (FOLDER / "slurm.sbatch").read_text(encoding="utf-8")
    command = [".venv/bin/python", "-m", "litchi", *commands(FOLDER / "slurm.sbatch")[0]]
    options = read_options(["nodes=2", "gpus=8", "time=24:00:00"], workers=2, name="rerank")
    written = re.sub(
        r"^cd .*$", 'cd "$SLURM_SUBMIT_DIR"', write_script(options, command, Path("/x")), flags=re.MULTILINE
    )

    def lines(script):
        return [line for line in re.sub(r"\\\n\s*", " ", script).splitlines() if not line.startswith("# ")][1:]

    assert [" ".join(line.split()) for line in lines(text)] == [
        " ".join(line.split()) for line in lines(written) if line != "# One rank per task. Submitted again it resumes."
    ]


def test_what_accelerate_makes_of_its_file_is_adopted(monkeypatch):
    """Accelerate's own launcher turns the file into variables; ours are then bf16 and sharded over all ranks."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"]})
    parser = launch_command_parser()
    asked, _, _ = _validate_launch_command(
        parser.parse_args(["--config_file", str(FOLDER / "accelerate.yaml"), "--machine_rank", "1", "-m", "litchi"])
    )
    assert asked.use_fsdp and (asked.num_machines, asked.num_processes, asked.machine_rank) == (2, 16, 1)
    env = prepare_multi_gpu_env(asked)
    assert env["FSDP_VERSION"] == "2" and env["ACCELERATE_MIXED_PRECISION"] == "bf16"
    config = adopt_accelerate(load_config(None, ["task=chat"], need=()), env)
    assert config.train.precision == "bf16" and config.parallel.dp_replicate == 1
