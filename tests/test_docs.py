"""The documentation against the program: every command of a shell block is one the program takes, with settings it
knows; pages that are made are as they would be made now; what is named in them is there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby, takewhile
from pathlib import Path

import pytest

from litchi.cli import app
from litchi.cli.reference import commands_markdown, walk_verbs
from litchi.config import load_config
from litchi.config.words import known_keys

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "README.zh.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
VERBS = dict(walk_verbs(app))
ONLY_PARSED = {  # pages whose commands are not run as they stand, why not, and where such commands are run
    "clusters.md": "ask for a cluster; test_slurm has a stand-in for it, test_ray a small one",
    "compare.md": "of finished runs; test_compare and test_sweep make some",
    "data.md": "of files a reader has; test_check, test_convert, test_split and test_mine write theirs",
    "doctor.md": "of a model to be fetched; test_doctor and test_ladder take the packaged one",
    "evaluation.md": "of files a reader has; test_evaluate, test_business and test_json_answers write theirs",
    "export.md": "of the demo's run; test_export_quant exports a smaller one",
    "parallelism.md": "every layout, minutes long; test_selfcheck runs it",
    "playground.md": "do not end; test_page drives the pages",
    "results.md": "of rows not packaged; the page holds the figures of that run",
    "serving.md": "of runs a reader has, or do not end; test_serve and test_writing make theirs",
    "video.md": "of films a reader has; test_video and test_segments draw theirs",
}
FILES = (".py", ".md", ".toml", ".yaml", ".yml")


def read_commands(page: Path) -> list[list[str]]:
    """The words of every `litchi` command in the shell blocks of a page, whatever starts it."""
    found = []
    for words in shell_commands(page):
        starts = [i for i, word in enumerate(words) if Path(word).name == "litchi"]
        if starts and (starts[0] == 0 or words[starts[0] - 1] == "-m"):
            found.append(words[starts[0] + 1 :])
    return found


def shell_commands(page: Path) -> Iterator[list[str]]:
    """The words of every command in the shell blocks of a page."""
    for block in re.findall(r"```(?:bash|console|sh)[^\n]*\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
        yield from split_commands(block.replace("\\\n", " "))


def split_commands(text: str) -> Iterator[list[str]]:
    """The words of each command of a shell block."""
    plain = re.sub(r"(^|\s)#.*$", "", text, flags=re.M)
    lex = shlex.shlex(plain, posix=True, punctuation_chars=";&|\n")
    lex.whitespace, lex.whitespace_split, lex.commenters = " \t", True, ""
    for ends, words in groupby(lex, key=lambda word: set(word) <= set(";&|\n")):
        if not ends:
            yield list(takewhile(lambda word: ">" not in word, words))


COMMANDS = [(page, words) for page in PAGES for words in read_commands(page)]


def parse(words: list[str]) -> tuple[str, dict]:
    """(verb, its parameters), as the program takes them apart; raises what the program would say."""
    size = 2 if " ".join(words[:2]) in VERBS else 1
    name = " ".join(words[:size])
    return name, VERBS[name].make_context(name, list(words[size:])).params


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=[f"{p.stem}-{' '.join(w)[:60]}" for p, w in COMMANDS])
def test_a_command_of_the_documentation_is_one_of_the_program(page, words):
    _, params = parse(words)
    for word in params.get("overrides") or []:
        key, equals, _ = word.partition("=")
        assert equals and key in known_keys(), word


def test_what_else_the_documentation_runs_is_there():
    """Targets of make and files for python; one that a page shows under its title is made from it."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    seen = set()
    for page, (first, *rest) in [(one, words) for one in PAGES for words in shell_commands(one)]:
        if Path(first).name in ("make", "python"):
            (name, *_) = [word for word in rest if not word.startswith("-")]
            made = re.findall(r"title=\"(.+?)\"", page.read_text(encoding="utf-8"))
            inline = rest[0] in ("-c", "-m")
            assert inline or (name in targets if first == "make" else name in made or (ROOT / name).exists()), name
            seen.add(Path(first).name)
    assert seen == {"make", "python"}


def test_every_page_is_run_or_says_why_not():
    """The README, the tutorials and the plans are run; a page of ONLY_PARSED is read by the program above."""
    shown = {page.name for page, _ in COMMANDS if page.parent.name != "tutorials" and page.parent != ROOT}
    assert shown == {*ONLY_PARSED, "memory.md", "planning.md"}
    for reason in ONLY_PARSED.values():
        for file in re.findall(r"test_\w+", reason):
            assert (ROOT / f"tests/{file}.py").exists(), file


def test_the_pages_hold_commands_of_every_verb():
    assert len(COMMANDS) > 50
    shown = {parse(words)[0] for _, words in COMMANDS if not words[0].startswith("--")}
    assert shown >= set(VERBS) - {"demo"}, set(VERBS) - shown  # `make demo`


def test_a_wrong_command_would_be_found():
    with pytest.raises(Exception, match="No such option: --proc"):
        parse(["train", "x.yaml", "--proc", "2"])
    with pytest.raises(KeyError):
        parse(["trian", "x.yaml"])


def run_plan(page: str) -> str:
    """What the one command of a page prints."""
    (command,) = read_commands(ROOT / "docs" / page)
    done = subprocess.run([sys.executable, "-m", "litchi", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_page_of_plans_plans():
    assert run_plan("planning.md").startswith("Qwen2.5-VL-7B on 1 x 8 a100-80gb: ")


@pytest.mark.slow
def test_the_page_of_memory_says_what_the_plan_says():
    page = (ROOT / "docs/memory.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| LoRA on the language \|(.*)\|$", page, re.M)
    *rest, whole = row.replace(" ", "").split("|")
    found = re.search(r"^one process +(.*)$", run_plan("memory.md"), re.M).group(1).split()
    assert whole == found[0] and set(rest) <= set(found[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_pages_that_are_named_are_there(page):
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:src|tests|docs|configs|benchmarks)/[\w./-]+)`", text)
    lost = [name for name in named if not (ROOT / name).exists()]
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, heading = target.partition("#")
        if "://" in target or file.startswith("/") or (file and not file.endswith(FILES)):
            continue
        there = (page.parent / file) if file else page
        if not there.exists() or (heading and heading not in headings(there)):
            lost.append(target)
    assert not lost, lost


def test_a_question_about_the_code_is_answered_where_the_page_says():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| question \| file \| begin at \|\n.*\n((?:\|.*\n)+)", text, re.M)
    rows = [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in table.splitlines()]
    assert len(rows) >= 20
    for question, file, name in rows:
        begins = rf"^(?:(?:class|def|async def) {name}\b|{name}(?::.*)? = )"
        assert re.search(begins, (ROOT / file).read_text(encoding="utf-8"), re.M), f"{question} {file}: {name}"


def headings(page: Path) -> set[str]:
    """What a link may name behind its #."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", line.lower()).strip()) for line in lines}


def test_the_page_of_commands_is_made_from_the_program():
    """To renew it: python -c "from litchi.cli import app; from litchi.cli.reference import *;
    print(commands_markdown(app), end='')" > docs/commands.md"""
    assert (ROOT / "docs/commands.md").read_text(encoding="utf-8") == commands_markdown(app)


def test_settings_that_pages_write_are_known():
    """`section.key` in backticks, where the section is one of ours."""
    sections = {key.partition(".")[0] for key in known_keys() if "." in key}
    wrong = []
    for page in PAGES:
        for word in re.findall(r"`([a-z]+(?:\.[a-z_0-9]+)+)(?:[:=][^`]*)?`", page.read_text(encoding="utf-8")):
            first, _, last = word.partition(".")
            if first in sections and last not in ("jsonl", "py", "yaml") and word not in known_keys():
                wrong.append(f"{page.name}: {word}")
    assert not wrong, wrong


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_packaged_settings_are_read(config):
    assert load_config(config, ["model.path=builtin:tiny", "data.train=train.jsonl"]).task in ("chat", "rerank")
