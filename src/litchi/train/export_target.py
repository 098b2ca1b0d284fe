"""`export`: a TARGET -> a folder for others, read again and compared with what it was made of; then it has its name."""

from __future__ import annotations

import gc
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from litchi.config import Config
from litchi.data.jsonl import guess_task
from litchi.data.templates import find_template
from litchi.dist import Ranks, barrier
from litchi.errors import UsageError
from litchi.evaluate.run import EvalSet, Measure
from litchi.model.build import BUILTIN, resolve_model
from litchi.model.weights import is_adapter_tensor
from litchi.parallel.apply import Wrapped
from litchi.train.checkpoint import list_checkpoints
from litchi.train.export import MANIFEST, export_model, identify_base
from litchi.train.export_calibrated import METHODS, calibrate, check_compressor, write_samples
from litchi.train.export_onnx import export_vision
from litchi.train.export_quant import Format, find_group, make_form
from litchi.train.export_readme import write_readme
from litchi.train.measure import open_set
from litchi.train.parity import ROWS, compare, format_table, look, refuse_lost, weight_bytes
from litchi.train.target import Target, find_target, open_target, target_config, write_words
from litchi.train.watch import how_to_measure


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
    python = check_compressor(form, compressor, ranks) if form in METHODS else None
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
    wrapped = open_target(target, config, ranks)
    rows, how = (None, None) if source is None else _rows(config, source, ranks)
    before = look(wrapped, rows, ranks, how) if rows and how else None
    facts = _facts(target, config, wrapped)
    template = find_template(config.data.template) if config.task == "rerank" else None
    size = _held_bytes(wrapped)
    shape = make_form(form, wrapped.owner, template.yes if template else None)
    draft = out.with_name(f".{out.name}.draft")
    base, kind = resolve_model(config.model.path), wrapped.owner.family.architecture
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".samples-") as samples:
        if python and source:
            seen = _own_rows(target, ("train",)) or source
            as_seen = target_config(target, [*write_words({"data.eval": seen}, ()), *overrides], task=config.task)
            write_samples(wrapped, open_set(as_seen, seen, ranks, require_labels=True), Path(samples))
        export_model(wrapped.owner, base, draft, ranks, facts, layout=wrapped.layout, form=shape)
        group = find_group(wrapped.owner) if python else 0
        del wrapped, shape
        gc.collect()  # two models at once may be more than the machine holds
        if python:
            calibrate(draft, Path(samples), form=form, group=group, python=python)
    figures = None
    if before and rows and how:
        again = find_target(str(draft))
        kept = [word for word in words if word.split(".")[0] not in ("model", "trainable")]
        settings = {**target.facts, "task": config.task, "data.pixels": config.data.pixels.model_dump(mode="json")}
        read = target_config(again, [*write_words(settings, kept), *kept], task=config.task)
        after = look(open_target(again, read, ranks), rows, ranks, how)
        figures = compare(config.task, before, after, rows=len(rows.rows), limit=limit)
        figures["bytes"] = [size, weight_bytes(draft)]
    if ranks.is_main:
        manifest = json.loads((draft / MANIFEST).read_text(encoding="utf-8")) | {"format": form, "parity": figures}
        text = write_readme(form, facts, figures, template, kind)
        (draft / "README.md").write_text(text, encoding="utf-8")
        (draft / MANIFEST).write_text(json.dumps(manifest, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        print(format_table(form, figures) if figures else _unmeasured(name), file=sys.stderr)
        refused = out.with_name(f"{out.name}.refused")
        if figures and not figures["lost"] <= figures["limit"]:
            shutil.rmtree(refused, ignore_errors=True)
            draft.replace(refused)
        else:
            draft.replace(out)
    barrier()
    if figures:
        refuse_lost(figures, out.with_name(f"{out.name}.refused"))
    return figures


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


def _rows(config: Config, source: str, ranks: Ranks) -> tuple[EvalSet, Measure]:
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
