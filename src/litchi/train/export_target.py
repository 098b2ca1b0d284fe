"""`export`: a TARGET -> a folder for others, read again and compared with what it was made of; then it has its name."""

from __future__ import annotations

import gc
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from litchi.config import Config
from litchi.data.jsonl import guess_task
from litchi.data.templates import RerankTemplate, find_template
from litchi.dist import Ranks, barrier
from litchi.errors import UsageError
from litchi.evaluate.run import EvalSet, Measure
from litchi.model.build import BUILTIN, resolve_model
from litchi.model.weights import is_adapter_tensor
from litchi.parallel.apply import Wrapped
from litchi.train.checkpoint import list_checkpoints
from litchi.train.export import MANIFEST, export_model, identify_base
from litchi.train.export_calibrated import calibrate, check_compressor, write_samples
from litchi.train.export_onnx import export_vision
from litchi.train.export_quant import CALIBRATED, Format, find_group, make_form
from litchi.train.export_readme import write_readme
from litchi.train.measure import open_set
from litchi.train.parity import ROWS, Given, compare, format_table, look, refuse_lost, weight_bytes
from litchi.train.target import Target, find_target, open_target, target_config, write_words
from litchi.train.watch import how_to_measure

Compared = tuple[EvalSet, Measure]  # rows, and how to measure on them


def export_target(
    name: str,
    out: Path,
    overrides: Sequence[str],
    ranks: Ranks,
    *,
    form: Format = "merged",
    data: str | None = None,
    limit: float | None = None,
    compressor: str | None = None,
) -> dict[str, Any] | None:
    """Write a target in a format, read it back and compare the two.

    Args:
        data: rows to compare on; None: the run's own, to evaluate on or else to train on.
        limit: how much of the metric it may lose; None: as `parity.LIMIT` says.
        compressor: an interpreter that has llmcompressor, for calibrated formats.

    Returns:
        The figures, or None where there is no row to compare on, which is said.

    Raises:
        UserError: it lost more than the limit, and was moved to `OUT.refused`; or merging changed nothing.
        UsageError: `out` exists, or a rounded format and no rows.
    """
    if out.exists():
        raise UsageError(f"{out} exists", why="nothing is overwritten", remedy="Remove it or name another folder")
    target = _find_trained(name)
    if form == "onnx-vision":
        return _export_vision(target, out, overrides, ranks)
    python = check_compressor(form, compressor, ranks) if form in CALIBRATED else None
    source = data or _own_rows(target, ("eval", "train"))
    if source is None and form != "merged":
        raise UsageError(
            f"there are no rows to compare the {form} export on",
            where=name,
            why="what it lost would be unknown",
            remedy="Give some with --data FILE",
        )
    words = [*(write_words({"data.eval": source}, ()) if source else ()), *overrides]
    config = target_config(target, words, task=guess_task(source) if source else "rerank")
    compared = _rows(config, source, ranks) if source else None
    draft = out.with_name(f".{out.name}.draft")
    draft.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".samples-") as place:
        seen = None
        if python and source:
            path = _own_rows(target, ("train",)) or source
            as_seen = target_config(target, [*write_words({"data.eval": path}, ()), *overrides], task=config.task)
            seen = open_set(as_seen, path, ranks, require_labels=True), Path(place)
        made = _write_draft(target, config, draft, ranks, form, compared, seen)
        gc.collect()  # two models at once may be more than the machine holds
        if python:
            calibrate(draft, Path(place), form=form, group=made.group, python=python)
    figures = None
    if made.before and compared:
        after = _read_again(target, config, words, draft, ranks, compared)
        figures = compare(config.task, made.before, after, rows=len(compared[0].rows), limit=limit)
        figures["bytes"] = [made.bytes, weight_bytes(draft)]
    if ranks.is_main:
        _describe(draft, form, made, figures, name)
    refused = out.with_name(f"{out.name}.refused")
    if ranks.is_main and figures and not figures["lost"] <= figures["limit"]:
        shutil.rmtree(refused, ignore_errors=True)
        draft.replace(refused)
    elif ranks.is_main:
        draft.replace(out)
    barrier()
    if figures:
        refuse_lost(figures, refused)
    return figures


@dataclass(frozen=True)
class _Made:
    """What is known of the model a draft was made of; `group`: weights that share a scale, where it is calibrated."""

    before: Given | None
    facts: dict[str, Any]
    template: RerankTemplate | None
    bytes: int
    kind: str
    group: int


def _write_draft(
    target: Target,
    config: Config,
    draft: Path,
    ranks: Ranks,
    form: Format,
    compared: Compared | None,
    seen: tuple[EvalSet, Path] | None,
) -> _Made:
    """Open the model, measure it, and write it.

    Args:
        seen: rows to calibrate on, and the folder for what the language layers get of them.
    """
    wrapped = open_target(target, config, ranks)
    owner = wrapped.owner
    template = find_template(config.data.template) if config.task == "rerank" else None
    made = _Made(
        before=look(wrapped, compared[0], ranks, compared[1]) if compared else None,
        facts=_facts(target, config, wrapped),
        template=template,
        bytes=_held_bytes(wrapped),
        kind=owner.family.architecture,
        group=find_group(owner) if seen else 0,
    )
    shape = make_form(form, owner, template.yes if template else None)
    if seen:
        write_samples(wrapped, *seen)
    export_model(owner, resolve_model(config.model.path), draft, ranks, made.facts, layout=wrapped.layout, form=shape)
    return made


def _read_again(
    target: Target, config: Config, words: Sequence[str], draft: Path, ranks: Ranks, compared: Compared
) -> Given:
    """Open a draft as anybody would, with the trained model's data settings, and measure it."""
    again = find_target(str(draft))
    kept = [word for word in words if word.split(".")[0] not in ("model", "trainable")]
    settings = {**target.facts, "task": config.task, "data.pixels": config.data.pixels.model_dump(mode="json")}
    read = target_config(again, [*write_words(settings, kept), *kept], task=config.task)
    return look(open_target(again, read, ranks), compared[0], ranks, compared[1])


def _describe(draft: Path, form: Format, made: _Made, figures: dict[str, Any] | None, name: str) -> None:
    """Complete the manifest, write the README.md, and say what was compared."""
    manifest = json.loads((draft / MANIFEST).read_text(encoding="utf-8")) | {"format": form, "parity": figures}
    text = write_readme(form, made.facts, figures, made.template, made.kind)
    (draft / "README.md").write_text(text, encoding="utf-8")
    (draft / MANIFEST).write_text(json.dumps(manifest, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(format_table(form, figures) if figures else _unmeasured(name), file=sys.stderr)


def _export_vision(target: Target, out: Path, overrides: Sequence[str], ranks: Ranks) -> dict[str, Any] | None:
    """Of the tower alone nothing can be measured but its features: these are compared."""
    config = target_config(target, overrides, task="rerank")
    wrapped = open_target(target, config, ranks)
    base = resolve_model(config.model.path)
    figures = export_vision(wrapped.owner, base, out, ranks, _facts(target, config, wrapped), layout=wrapped.layout)
    barrier()
    return figures


def _find_trained(name: str) -> Target:
    """Of a run what it trained, from the checkpoint its own export was made of, where both that and its base are still
    there; else as `find_target`."""
    target = find_target(name)
    saved = list_checkpoints(Path(name)) if (Path(name) / "checkpoints").is_dir() else []
    for checkpoint in saved:
        base = checkpoint.manifest["base"]
        if target.manifest and checkpoint.step == target.manifest["step"] and (base == BUILTIN or Path(base).is_dir()):
            return Target(name, base, checkpoint=checkpoint, manifest=checkpoint.manifest)
    return target


def _unmeasured(name: str) -> str:
    return f"warning: not compared with {name}: there are no rows. Give some with --data FILE"


def _own_rows(target: Target, kinds: Sequence[str]) -> str | None:
    """The first of a run's files, to evaluate on ("eval") or to train on ("train"), that is still there."""
    data = ((target.manifest or {}).get("settings") or {}).get("data") or {}
    found = [source["path"] for kind in kinds for source in data.get(kind) or ()]
    return next((path for path in found if Path(path).is_file()), None)


def _rows(config: Config, source: str, ranks: Ranks) -> Compared:
    rows = open_set(config, source, ranks, require_labels=True)
    how = replace(how_to_measure(config, ranks.device), generate=False, metrics=None)
    return replace(rows, max_rows=min(ROWS, rows.max_rows or ROWS)), how


def _facts(target: Target, config: Config, wrapped: Wrapped) -> dict[str, Any]:
    known = target.manifest or {"task": None, "template": None, "step": None}  # of others' adapters we know no task
    return {
        "task": known["task"],
        "base": known.get("base", identify_base(config.model.path)),
        "template": known["template"],
        "instruction": config.data.instruction,
        "pixels": config.data.pixels.in_force(wrapped.owner.spec),
        "settings": known.get("settings", config.model_dump(mode="json")),
        "step": known["step"],
    }


def _held_bytes(wrapped: Wrapped) -> int:
    """Of the trained model's weights as this machine holds them, without what LoRA adds."""
    return sum(p.numel() * p.element_size() for n, p in wrapped.owner.hf.named_parameters() if not is_adapter_tensor(n))
