"""The tutorials: every file in them is written and every command run, in their order and in an empty folder; what they
show as printed is what is printed, but for times, sizes and measured figures."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.md"))
BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.M | re.S)
SPENT = 580  # seconds for one block


def read_blocks(page: Path) -> list[tuple[str, str, str]]:
    """(language, title, text) of every block of a page."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def blur(text: str, folder: Path) -> str:
    """A line without its figures, its folder and its runs of spaces."""
    return re.sub(r"\s+", " ", re.sub(r"[\d.,]*\d", "#", text.replace(f"{folder}/", ""))).strip()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_does_what_it_says(page, tmp_path):
    where = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    printed = ""
    for language, title, text in read_blocks(page):
        if language == "python":
            (tmp_path / title).write_text(text, encoding="utf-8")
        elif language == "bash":
            done = subprocess.run(
                ["bash", "-euc", text],
                cwd=tmp_path,
                env=os.environ | where,
                capture_output=True,
                text=True,
                timeout=SPENT,
            )
            assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
            printed = blur(done.stdout, tmp_path) + " " + blur(done.stderr, tmp_path)
        else:
            for line in text.splitlines():
                assert blur(line, tmp_path) in printed, line


def test_the_tutorials_hold_what_is_run():
    assert [page.stem for page in TUTORIALS] == ["chat", "demo", "rerank"]
    for page in TUTORIALS:
        languages = [language for language, _, _ in read_blocks(page)]
        assert languages.count("bash") >= 5 and set(languages) - {"python"} == {"bash", "text"}
