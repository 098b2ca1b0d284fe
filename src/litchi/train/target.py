"""TARGET of the verbs: a run folder, a checkpoint, an export, an adapter folder, a Hugging Face folder, a hub id, or
`builtin:tiny` - opened with the template and the pixel limits it was trained with, so that scores stay the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from litchi.batch.sources import make_renderer
from litchi.config import Config, load_config
from litchi.data.processor import load_processor
from litchi.dist import Ranks, barrier
from litchi.errors import UsageError
from litchi.model.adapters import adapter_base, load_adapter
from litchi.model.build import load_model, resolve_model
from litchi.parallel.apply import Wrapped
from litchi.train.checkpoint import Checkpoint, list_checkpoints, load_checkpoint, read_checkpoint
from litchi.train.export import MANIFEST
from litchi.train.loop import build_wrapped, choose_dtype, choose_precision

KEPT = ("task", "data.template", "data.instruction", "data.pixels.min", "data.pixels.max", "data.window")


@dataclass(frozen=True)
class Target:
    """What a TARGET turned out to be.

    Args:
        name: as the user gave it.
        base: model.path of the weights it starts from.
        adapter: adapter folder on top, or None.
        checkpoint: trainable tensors on top, or None.
        facts: settings that travel with it, by dotted key.
        settings: all settings of the run, where it is one.
    """

    name: str
    base: str
    adapter: Path | None = None
    checkpoint: Checkpoint | None = None
    facts: tuple[tuple[str, Any], ...] = ()
    settings: dict[str, Any] | None = None


def find_target(name: str) -> Target:
    """Recognise a TARGET by what lies in its folder."""
    folder = Path(name)
    if not folder.is_dir():
        return Target(name, name)
    if (folder / "checkpoints").is_dir():
        return _run_target(name, folder)
    checkpoint = read_checkpoint(folder)
    if checkpoint is not None and "tensors" in checkpoint.manifest:
        return _checkpoint_target(name, checkpoint)
    if (folder / MANIFEST).is_file():
        return Target(name, name, facts=_facts(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))))
    base = adapter_base(folder)
    if base is not None:
        beside = folder.parent / "config.yaml"  # an adapter of ours lies in its run's folder
        facts = _settings_facts(load_config(beside)) if beside.is_file() else ()
        return Target(name, base, adapter=folder, facts=facts)
    return Target(name, name)


def _run_target(name: str, folder: Path) -> Target:
    """The export of a finished run, else its newest checkpoint."""
    export = folder / "export"
    if (export / MANIFEST).is_file():
        return Target(name, str(export), facts=_facts(json.loads((export / MANIFEST).read_text(encoding="utf-8"))))
    saved = list_checkpoints(folder)
    if not saved:
        raise UsageError(
            "the run has no checkpoint yet", where=folder, remedy="Let it train on, or give another target"
        )
    return _checkpoint_target(name, saved[-1])


def _checkpoint_target(name: str, checkpoint: Checkpoint) -> Target:
    manifest = checkpoint.manifest
    return Target(name, manifest["base"], checkpoint=checkpoint, facts=_facts(manifest), settings=manifest["settings"])


def _facts(manifest: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    template = manifest["template"]
    facts = {
        "task": manifest["task"],
        "data.template": None if template == "chat" else template,
        "data.instruction": manifest["instruction"],
        "data.pixels.min": manifest["pixels"]["min"],
        "data.pixels.max": manifest["pixels"]["max"],
        "data.window": manifest["settings"]["data"]["window"],
    }
    return tuple((k, v) for k, v in facts.items() if v is not None)


def _settings_facts(config: Config) -> tuple[tuple[str, Any], ...]:
    flat = config.flat()
    return tuple((key, flat[key]) for key in KEPT if flat.get(key) is not None)


def target_config(target: Target, overrides: Sequence[str], *, task: str | None = None) -> Config:
    """Settings to open a target with: what travels with it, then the command line.

    Args:
        task: what the data says the task is, where neither the target nor the command line says so.
    """
    given = {text.split("=", 1)[0] for text in overrides}
    words = [f"{k}={json.dumps(v)}" for k, v in target.facts if k not in given]
    if task is not None and "task" not in given and not any(w.startswith("task=") for w in words):
        words.append(f"task={task}")
    if target.settings is not None:
        words += _part_words(target.settings)
    return load_config(None, [f"model.path={target.base}", *words, *overrides], need=("model.path",))


def _part_words(settings: dict[str, Any]) -> list[str]:
    """What trained in a checkpoint's run: its tensors only fit a model with the same parts and LoRA layers."""
    trainable = settings["trainable"]
    words = [f"trainable.{name}={trainable[name]['mode']}" for name in ("vision", "merger", "language", "head")]
    return words + [f"trainable.lora={json.dumps(trainable['lora'])}"]


def open_target(target: Target, config: Config, ranks: Ranks) -> Wrapped:
    """Load the model of a target, ready to be measured."""
    folder = resolve_model(target.base, first=ranks.local_rank == 0, wait=barrier)
    loaded = load_model(folder, dtype=choose_dtype(config, ranks.device))
    processor = make_renderer(config, load_processor(folder), ".").processor
    if target.adapter is not None:
        load_adapter(loaded, target.adapter)
    precision = choose_precision(config.train.precision, ranks.device)
    wrapped = build_wrapped(config, loaded, processor, ranks, precision, training=target.checkpoint is not None)
    if target.checkpoint is not None:
        load_checkpoint(target.checkpoint, wrapped.model, None)
    wrapped.owner.requires_grad_(False)
    wrapped.model.eval()
    return wrapped
