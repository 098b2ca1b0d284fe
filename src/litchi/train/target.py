"""TARGET of the verbs: a run folder, a checkpoint, an export, an adapter folder, a Hugging Face folder, a hub id, or
`builtin:tiny` - opened with the template and the pixel limits it was trained with, so that scores stay the same."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from litchi.batch.sources import make_renderer
from litchi.config import Config, load_config
from litchi.data.processor import load_processor
from litchi.dist import Ranks, barrier
from litchi.errors import UsageError
from litchi.model.adapters import adapter_base
from litchi.model.build import build_model, resolve_model
from litchi.model.family import PARTS
from litchi.model.precision import choose_precision
from litchi.parallel.apply import Wrapped
from litchi.train.checkpoint import Checkpoint, list_checkpoints, load_checkpoint, read_checkpoint
from litchi.train.export import MANIFEST
from litchi.train.setup import build_wrapped, choose_dtype

VIDEO_FACTS = ("fps", "min_frames", "max_frames", "pixels", "detail")


@dataclass(frozen=True)
class Target:
    """What a TARGET turned out to be.

    Args:
        name: as the user gave it.
        base: model.path of the weights it starts from.
        adapter: adapter folder on top, or None.
        checkpoint: trainable tensors on top, or None.
        manifest: what Litchi wrote beside the weights, or None where they are not Litchi's.
    """

    name: str
    base: str
    adapter: Path | None = None
    checkpoint: Checkpoint | None = None
    manifest: dict[str, Any] | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """Settings that travel with it, by dotted key: what a score depends on besides the weights."""
        if self.manifest is None or self.manifest["task"] is None:
            return {}
        settings = self.manifest["settings"]
        facts = {
            "task": self.manifest["task"],
            "loss": settings["loss"],
            "data.instruction": self.manifest["instruction"],
            "data.window": settings["data"]["window"],
            "train.precision": settings["train"]["precision"],
        }
        facts |= {f"data.pixels.{key}": value for key, value in self.manifest["pixels"].items()}
        video = settings["data"].get("video") or {}  # runs of before have none
        facts |= {f"data.video.{key}": video.get(key) for key in VIDEO_FACTS}
        facts |= {f"data.video.frame_pixels.{key}": value for key, value in video.get("frame_pixels", {}).items()}
        if self.manifest["task"] == "rerank":
            facts["data.template"] = self.manifest["template"]
        return {key: value for key, value in facts.items() if value is not None}


def find_target(name: str) -> Target:
    """Recognise a TARGET by what lies in its folder."""
    folder = Path(name)
    if not folder.is_dir():
        return Target(name, name)
    if (folder / "checkpoints").is_dir() or (folder / "export" / MANIFEST).is_file():
        return _run_target(name, folder)
    checkpoint = read_checkpoint(folder)
    if checkpoint is not None and "tensors" in checkpoint.manifest:
        return _checkpoint_target(name, checkpoint)
    base = adapter_base(folder)
    if base is not None:
        return Target(name, base, adapter=folder, manifest=_read_manifest(folder))
    return Target(name, name, manifest=_read_manifest(folder))


def _run_target(name: str, folder: Path) -> Target:
    """The export of a finished run, else its newest checkpoint."""
    export = folder / "export"
    if (export / MANIFEST).is_file():
        return Target(name, str(export), manifest=_read_manifest(export))
    saved = list_checkpoints(folder)
    if not saved:
        raise UsageError(
            "the run has no checkpoint yet", where=folder, remedy="Let it train on, or give another target"
        )
    return _checkpoint_target(name, saved[-1])


def _checkpoint_target(name: str, checkpoint: Checkpoint) -> Target:
    return Target(name, checkpoint.manifest["base"], checkpoint=checkpoint, manifest=checkpoint.manifest)


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    path = folder / MANIFEST
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def write_words(settings: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """Settings as `key=value` words, those left out that the command line gives itself."""
    given = [text.split("=", 1)[0] for text in overrides]
    return [
        f"{key}={json.dumps(value, ensure_ascii=False)}"
        for key, value in settings.items()
        if not any(g == key or g.startswith(f"{key}.") for g in given)
    ]


def same_prompt(name: str, overrides: Sequence[str]) -> list[str]:
    """Words to ask another model with a target's template and pixel limits, so that only the weights differ."""
    return [*write_words(find_target(name).facts, overrides), *overrides]


def target_config(target: Target, overrides: Sequence[str], *, task: str | None = None) -> Config:
    """Settings to open a target with: what travels with it, then the command line.

    Args:
        task: what the data says the task is, where neither the target nor the command line says so.
    """
    settings = {"model.path": target.base, "task": task, **target.facts}
    if target.adapter is not None and target.facts:
        known = (target.manifest or {})["settings"].get("model", {})
        settings |= {"model.new_tokens": known.get("new_tokens", [])}
    if target.checkpoint is not None:
        settings |= _model_settings(target.checkpoint.manifest["settings"])
    return load_config(None, [*write_words(settings, overrides), *overrides], need=("model.path",))


def _model_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What made the model of a checkpoint's run: its tensors only fit one with the same parts and LoRA layers."""
    trainable = settings["trainable"]
    parts = {f"trainable.{name}": trainable[name]["mode"] for name in PARTS}
    made = {f"model.{name}": settings["model"].get(name) for name in ("adapter", "dtype", "quantize", "new_tokens")}
    return {**parts, "trainable.lora": trainable["lora"], **{k: v for k, v in made.items() if v is not None}}


def open_target(target: Target, config: Config, ranks: Ranks) -> Wrapped:
    """Load the model of a target, ready to be measured."""
    folder = resolve_model(config.model.path, first=ranks.local_rank == 0, wait=barrier)
    loaded = build_model(
        folder,
        dtype=choose_dtype(config, ranks.device),
        quantize=config.model.quantize,
        new_tokens=config.model.new_tokens,
    )
    processor = make_renderer(config, load_processor(folder), ".").processor
    precision = choose_precision(config.train.precision, ranks.device)
    adapter = target.adapter if config.model.adapter is None else Path(config.model.adapter)
    wrapped = build_wrapped(
        config, loaded, processor, ranks, precision, adapter=adapter, training=target.checkpoint is not None
    )
    if target.checkpoint is not None:
        load_checkpoint(target.checkpoint, wrapped.model, None)
    wrapped.model.eval()
    return wrapped
