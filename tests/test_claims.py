"""docs/claims.md answers every claimed number, with figures that are where it says and commands that can be given."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import yaml

from litchi.config import load_config
from litchi.config.several import split_runs
from litchi.scale.plan import plan_run

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
CLAIMS = yaml.safe_load((ROOT / "tests" / "claims.yaml").read_text(encoding="utf-8"))
ANSWERS = ("measured here on a small model", "planned for the real size", "not verifiable here")


def rows_of(heading: str) -> list[list[str]]:
    """Cells of the table below a heading."""
    part = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


ROWS = {cells[0]: cells for cells in rows_of("What they claim")}
PLANNED = [cells for cells in ROWS.values() if cells[2] == ANSWERS[1]]


def commands_in(cell: str) -> list[list[str]]:
    return [shlex.split(code) for code in re.findall(r"`((?:litchi|python) [^`]+)`", cell)]


def test_every_claim_has_its_row_and_every_row_its_claim():
    assert [(row["id"], row["claim"]) for row in CLAIMS] == [(cells[0], cells[1]) for cells in ROWS.values()]
    assert len(rows_of("What they claim")) == len(ROWS) == len({row["claim"] for row in CLAIMS})


@pytest.mark.parametrize("cells", ROWS.values(), ids=ROWS)
def test_an_answer_has_a_figure_and_a_command(cells):
    _, _, answer, figure, command = cells
    assert answer in ANSWERS and figure
    assert commands_in(command), "a row ends with its command"
    for words in commands_in(command):
        if words[0] == "python":
            assert (ROOT / words[1]).exists(), words[1]
        config = next((word for word in words if word.startswith("configs/")), None)
        if config is not None:
            for run in split_runs(settings_in(words)):
                load_config(str(ROOT / config), run, need=())


def settings_in(words: list[str]) -> list[str]:
    return [word for word in words[1:] if re.match(r"[a-z_.]+=", word)]


@pytest.mark.parametrize("cells", [c for c in ROWS.values() if c[2] == ANSWERS[0]], ids=lambda c: c[0])
def test_a_measured_figure_stands_in_the_page_it_names(cells):
    """Figures in bold, as that page writes them."""
    pages = re.findall(r"\]\(([\w-]+\.md)[#\w-]*\)", cells[3])
    figures = re.findall(r"\*\*([^*]+)\*\*", cells[3])
    assert len(pages) == 1 and figures
    text = (ROOT / "docs" / pages[0]).read_text(encoding="utf-8")
    for figure in figures:
        assert figure in text, f"{cells[0]}: {pages[0]} does not say {figure}"


def test_the_articles_cost_column_by_hand():
    hours = {1: 35.2, 2: 19.8, 4: 11.5}
    cost = {cards: cards * time / hours[1] for cards, time in hours.items()}
    assert {cards: f"{share:.1%}" for cards, share in cost.items()} == {1: "100.0%", 2: "112.5%", 4: "130.7%"}
    assert "100 / 112.5 / 130.7 %" in ROWS["B11"][3]
    speedup = [hours[1] / hours[cards] for cards in (2, 4)]
    assert f"{speedup[0]:.2f} times" in ROWS["B7"][3] and f"{speedup[1]:.2f} times" in ROWS["B8"][3]


@cache
def plan(command: tuple[str, ...]) -> str:
    """What the row says of a plan: GB a card and seconds a step of the layout that comes first."""
    size, gpu, gpus = (command[command.index(name) + 1] for name in ("--model-size", "--gpu", "--gpus"))
    words = settings_in(list(command))
    report = plan_run(str(ROOT / command[2]), words, size=size, gpu=gpu, gpus=int(gpus), nodes=1, price=None)
    best = report["layouts"][0]
    return f"**{best['peak_bytes'] / 1e9:.1f} GB**, {best['step_s']:.2f} s" if report["fits"] else "**does not fit**"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cells", PLANNED, ids=lambda c: c[0])
def test_planned_figures_are_those_of_the_commands(cells):
    said = [plan(tuple(words)) for words in commands_in(cells[4])]
    assert re.findall(r"\*\*does not fit\*\*|\*\*[\d.]+ GB\*\*, [\d.]+ s", cells[3]) == said


def test_settings_for_their_numbers_are_settings():
    for cells in rows_of("Their settings, here"):
        codes = re.findall(r"`([^`]+)`", cells[1])
        assert codes
        for code in codes:
            words = shlex.split(code)
            load_config(None, ["task=chat", *(word for word in words if not word.startswith("task="))], need=())
