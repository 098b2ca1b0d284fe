"""Versions of the libraries Litchi meets, what they ask of each other, and pairs known to be bad together.

read_versions() -> {name: version} -> check_libraries
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import NamedTuple

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from litchi.prepare.diagnosis import Check, Verdict

MET = (
    *("torch", "torchvision", "transformers", "tokenizers", "peft", "accelerate", "safetensors", "huggingface-hub"),
    *("numpy", "pillow", "av", "pydantic", "typer", "pyarrow", "bitsandbytes", "torchao", "flash-attn", "liger-kernel"),
    *("triton", "ray", "tensorboard", "trackio", "nvidia-ml-py", "fastapi", "uvicorn", "modelscope", "deepspeed"),
)


class BadPair(NamedTuple):
    """Two libraries that do not go together although each lets the other in; `other` empty: one that is bad alone."""

    name: str
    versions: str
    other: str
    others: str
    verdict: Verdict
    why: str
    remedy: str


BAD_PAIRS = (
    BadPair(
        *("peft", "<0.18", "transformers", ">=5"),
        verdict="fail",
        why="it imports caches that transformers 5 does not have",
        remedy="pip install 'peft>=0.18'",
    ),
    BadPair(
        *("torch", "<2.3", "numpy", ">=2"),
        verdict="fail",
        why="it was built against numpy 1 and hands over no arrays",
        remedy="pip install 'torch>=2.3'",
    ),
    BadPair(
        *("torch", ">=2.9,<2.10", "", ""),
        verdict="warn",
        why="its Conv3d in bf16 is slow and takes much memory, and the vision tower begins with one",
        remedy="Take torch 2.10 or newer",
    ),
    BadPair(
        *("bitsandbytes", "<0.48", "torch", ">=2.9"),
        verdict="warn",
        why="it has no kernels for CUDA 13, which these builds of torch may have",
        remedy="pip install 'bitsandbytes>=0.48'",
    ),
)


def read_versions(names: Sequence[str] = MET) -> dict[str, str]:
    """Versions of those that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def read_requirements(name: str) -> list[str]:
    """What an installed library asks for, in its own words."""
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


def check_libraries(
    versions: Mapping[str, str], requirements: Callable[[str], Sequence[str]] = read_requirements
) -> Iterator[Check]:
    """One line of all versions, then one for each requirement that is not met and each known bad pair."""
    yield Check("libraries", "ok", ", ".join(f"{name} {version}" for name, version in versions.items()))
    for name in ("litchi", *versions):
        for asked, needed in _unmet(requirements(name), versions):
            fact = f"{name} asks for {asked.name}{needed}, and {versions[asked.name]} is there"
            yield Check(f"library {asked.name}", "fail", fact, f"pip install '{asked.name}{needed}'")
    for pair in BAD_PAIRS:
        if _inside(versions.get(pair.name), pair.versions) and (
            not pair.other or _inside(versions.get(pair.other), pair.others)
        ):
            names = " with ".join(f"{n} {versions[n]}" for n in (pair.name, pair.other) if n)
            yield Check(f"library {pair.name}", pair.verdict, f"{names}: {pair.why}", pair.remedy)


def _unmet(requirements: Sequence[str], versions: Mapping[str, str]) -> Iterator[tuple[Requirement, SpecifierSet]]:
    for text in requirements:
        try:
            asked = Requirement(text)
        except InvalidRequirement:
            continue
        meant = asked.marker is None or asked.marker.evaluate({"extra": ""})
        if meant and asked.name in versions and not _inside(versions[asked.name], str(asked.specifier)):
            yield asked, asked.specifier


def _inside(version: str | None, allowed: str) -> bool:
    """A version before a release counts as that release, and what stands behind a + is left out."""
    return version is not None and SpecifierSet(allowed).contains(version.partition("+")[0], prereleases=True)
