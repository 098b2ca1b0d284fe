"""What `import litchi` offers: few names, cheap to import, and the page that shows them does what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import runs

import litchi

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/python.md").read_text(encoding="utf-8")
HEAVY = (
    *("torch", "transformers", "peft", "accelerate", "numpy", "PIL", "av", "pyarrow", "pydantic", "yaml", "rich"),
    *("sacrebleu", "jsonschema", "fastapi", "uvicorn", "pynvml", "bitsandbytes", "onnx", "matplotlib"),
)
BUDGET = {  # heavy libraries that a command may import before it knows that it needs them
    ("--help",): set(),
    ("--version",): set(),
    ("train", "--help"): {"pydantic"},
    ("data", "check", "--help"): {"pydantic"},
    ("plan", "--help"): {"pydantic"},
    ("train", "no-such.yaml"): {"pydantic", "yaml"},
    ("serve", "no-such-target"): {"pydantic", "yaml", "numpy", "PIL", "fastapi", "uvicorn", "rich"},
}


def test_the_surface_is_ten_names_and_each_is_there():
    assert len(litchi.__all__) == 10 and dir(litchi) == sorted(litchi.__all__)
    for name in litchi.__all__:
        assert getattr(litchi, name) is not None and f"`{name}" in PAGE
    with pytest.raises(AttributeError, match="no attribute 'train_model'"):
        litchi.train_model  # noqa: B018


def loaded(code: str, *words: str) -> set[str]:
    """The heavy libraries that are imported when a program ends, however it does."""
    tail = (
        f"import os, sys\nsys.argv = ['litchi', *{list(words)!r}]\nreal = os._exit\n"
        f"def show(status): print('LOADED', *[m for m in {HEAVY!r} if m in sys.modules], flush=True); real(status)\n"
        f"os._exit = show\ntry:\n    {code}\nexcept SystemExit:\n    pass\nshow(0)"
    )
    done = subprocess.run([sys.executable, "-c", tail], capture_output=True, text=True, timeout=120)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("LOADED")]
    return set(line.split()[1:])


def test_importing_is_cheap():
    assert loaded("import litchi") == set()
    assert {"torch", "pydantic"} <= loaded("import litchi; litchi.train_run"), "the list of what is heavy sees them"


@pytest.mark.parametrize("words", BUDGET, ids=" ".join)
def test_a_command_imports_no_more_than_it_needs(words):
    assert loaded("from litchi.cli import main; main()", *words) <= BUDGET[words]


@pytest.mark.slow
def test_the_page_does_what_it_says(tmp_path):
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    runs.chat_rows(tmp_path).rename(tmp_path / "train.jsonl")
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "6 rows measured, 6 lines in answers.jsonl"
    assert (tmp_path / "runs/small/export/model.safetensors").exists() and (tmp_path / "exported/litchi.json").exists()
