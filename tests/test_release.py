"""What is given away: the wheel and the source archive hold what they should, no more, with all licences."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import litchi

ROOT = Path(__file__).parents[1]
NAME = f"litchi-{litchi.__version__}"


def files(folder: str) -> set[str]:
    """What lies in a folder, without what Python and tools leave there."""
    found = (path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(ROOT)) for path in found if not path.name.startswith(".")}


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return out


def test_the_wheel_holds_the_package_its_settings_and_its_licences(archives):
    (path,) = archives.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        about = {name for name in names if name.startswith(f"{NAME}.dist-info/")}
        text = wheel.read(f"{NAME}.dist-info/METADATA").decode()
    assert names - about == {n.removeprefix("src/") for n in files("src/litchi")} | {
        f"litchi/{name}" for name in files("configs")
    }
    assert {f"{NAME}.dist-info/licenses/{name}" for name in ("LICENSE", "NOTICE")} <= about
    assert "License-Expression: Apache-2.0" in text and f"Version: {litchi.__version__}" in text
    assert path.stat().st_size < 5e6


def test_the_source_archive_is_enough_for_the_tests_and_the_pages(archives):
    (path,) = archives.glob("*.tar.gz")
    with tarfile.open(path) as source:
        names = {name.removeprefix(f"{NAME}/") for name in source.getnames()}
    folders = ("src", "tests", "configs", "docs", "benchmarks", "examples", "recipes")
    alone = {
        "README.md",
        "README.zh.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "NOTICE",
        "Makefile",
        "mkdocs.yml",
    }
    wanted = alone | {"pyproject.toml"} | set().union(*map(files, folders))
    assert not wanted - names and names - wanted <= {"PKG-INFO", ".gitignore"}


def test_the_version_is_said_in_one_place_and_in_the_changes():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "version" in project["dynamic"] and f"## {litchi.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_what_comes_from_others_is_named():
    text = (ROOT / "NOTICE").read_text(encoding="utf-8")
    for name in (*(ROOT / "src").rglob("tokenizer.json"), *(ROOT / "tests").rglob("tokenizer.json")):
        assert str(name.relative_to(ROOT)) in text
