"""Every `litchi` command of the README runs, in its order, on the packaged model and a few rows; its request is
answered as it says."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import runs
import serving

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
COMMANDS = [
    shlex.split(line, comments=True)
    for block in BLOCKS
    for line in block.splitlines()
    if line.startswith(("litchi ", "torchrun ")) and not line.startswith(("litchi serve", "litchi watch"))  # do not end
]


def as_run_here(command: list[str]) -> list[str]:
    """The same command with the packaged model, two ranks instead of four, few rows and steps."""
    words = [word.replace("$MODEL", "builtin:tiny") for word in command[1:]]
    words = [{"4": "2", "1000": "3"}.get(word, word) for word in words]
    steps = ["train.steps=2", "eval.max_rows=2"] if "train" in words else []
    module = "torch.distributed.run" if command[0] == "torchrun" else "litchi"
    return [sys.executable, "-m", module, *words, *steps]


def task_of(command: list[str]) -> str:
    return "chat" if any("chat" in word for word in command) else "rerank"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_of_the_readme_run(tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    assert {c[1] for c in COMMANDS if c[0] == "litchi"} >= {"data", "train", "evaluate", "score", "generate", "export"}
    for command in COMMANDS:
        prepare_rows(tmp_path, task_of(command))
        if command[1] == "data" and command[2] != "check":
            rows = [{"query": f"item {n}", "pos_doc": f"a {n}", "neg_docs": [f"no {n}"]} for n in range(10)]
            runs.write_rows(tmp_path / "train.jsonl", rows)  # that share nothing
            (tmp_path / "theirs.json").write_text(json.dumps(rows), encoding="utf-8")
        if command[1:3] == ["data", "convert"]:  # which overwrites nothing
            (tmp_path / "train.jsonl").unlink()
        done = subprocess.run(as_run_here(command), cwd=tmp_path, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr[-2000:]}"


def prepare_rows(folder: Path, task: str) -> None:
    """train.jsonl and eval.jsonl of a task, and the judgements of eval.jsonl as the ranking example needs them."""
    make = runs.rerank_rows if task == "rerank" else runs.chat_rows
    rows = make(folder, 6)
    for name in ("train.jsonl", "eval.jsonl"):
        (folder / name).write_bytes(rows.read_bytes())
    if task == "rerank":
        lines = [
            {"query_id": row["id"], "doc_id": f"d{n}", "relevance": int(n == 0)}
            for row in runs.read_rows(rows)
            for n in range(3)
        ]
        (folder / "qrels.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_the_request_of_the_readme_is_answered_as_it_says(tmp_path):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    serve = shlex.split(re.search(r"^litchi (serve .*)$", text, re.M).group(1))
    command = shlex.split(re.search(r"^curl .*$", text, re.M).group())
    said = json.loads(re.search(r"^\{\"id\": \"rerank.*$", text, re.M).group())
    assert serve[-2:] == ["--port", "8000"] and command[1].startswith("http://127.0.0.1:8000/")
    with serving.serving(tmp_path, *serve[1:-2], spawn=True) as server:
        found = serving.send(server, command[1].removeprefix("http://127.0.0.1:8000"), command[-1].encode()).json()
    assert found.keys() == said.keys() and found["usage"] == said["usage"]
    for ours, theirs in zip(found["results"], said["results"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
