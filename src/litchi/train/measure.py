"""`evaluate`, `score`, `generate` and `export` on a TARGET: open it as it was trained, run it, hand on the figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from litchi.batch.sources import index_sources, refuse_bad
from litchi.config import Config, resolve_micro_batch_tokens
from litchi.data.jsonl import read_offsets
from litchi.data.processor import load_processor
from litchi.dist import Ranks, barrier, gather_objects
from litchi.errors import UsageError
from litchi.evaluate.ranking import paired_difference
from litchi.evaluate.run import EvalSet, Measure, Measured, generate_set, measure_set, score_set
from litchi.model.build import resolve_model
from litchi.train.export import export_model
from litchi.train.loop import check_ids
from litchi.train.progress import count_progress
from litchi.train.target import Target, find_target, open_target, target_config


def guess_task(data: str) -> str:
    """chat or rerank, by the first row of a file."""
    lines = read_offsets(data)
    try:
        first = json.loads(lines.read(0))
    except ValueError:
        first = None
    return "chat" if isinstance(first, dict) and "messages" in first else "rerank"


def open_set(target: Target, config: Config, data: str, ranks: Ranks, *, require_labels: bool) -> EvalSet:
    """Scan the rows to measure on; bad rows stop it or are left out and counted, as the settings say."""
    processor = load_processor(resolve_model(target.base, first=ranks.local_rank == 0, wait=barrier))
    corpus = index_sources(
        config,
        config.data.eval,
        processor,
        require_labels=require_labels,
        rank=ranks.rank,
        ranks=ranks.world,
        gather=gather_objects,
        progress=lambda name: count_progress(f"reading {name}", enabled=ranks.is_main),
    )
    left_out = refuse_bad(corpus.sources, config)
    check_ids(corpus)
    if left_out and ranks.is_main:
        import sys

        print(f"{len({f.line for f in left_out})} rows of {data} are left out or changed", file=sys.stderr)
    return EvalSet(corpus.sources[0], corpus.renderers[0], config.eval.max_rows)


def _prepare(name: str, data: str, overrides: Sequence[str], task: str | None = None):
    target = find_target(name)
    words = [f"data.eval={json.dumps(data)}", *overrides]
    return target, target_config(target, words, task=task or guess_task(data))


def _how(config: Config, ranks: Ranks, **more: Any) -> Measure:
    return Measure(
        metrics=config.eval.metrics,
        slices=config.eval.slices,
        max_new_tokens=config.eval.max_new_tokens,
        micro_batch_tokens=resolve_micro_batch_tokens(config, ranks.device.type),
        **more,
    )


def measure_one(name: str, data: str, overrides: Sequence[str], ranks: Ranks) -> Measured:
    """Figures of one target on one file."""
    target, config = _prepare(name, data, overrides)
    rows = open_set(target, config, data, ranks, require_labels=True)
    wrapped = open_target(target, config, ranks)
    progress = count_progress(f"measuring {name}", enabled=ranks.is_main)
    return measure_set(wrapped, rows, ranks, _how(config, ranks), progress)


def measure_target(
    name: str, data: str, overrides: Sequence[str], ranks: Ranks, *, against: str | None = None
) -> dict[str, Any]:
    """The JSON answer of `evaluate`; with `against`, both reports and the paired differences."""
    tuned = measure_one(name, data, overrides, ranks)
    if against is None:
        return tuned.report
    base = measure_one(against, data, _same_prompt(name, overrides), ranks)
    out = {**tuned.report, "against": base.report}
    if tuned.ranking is not None and base.ranking is not None:
        out["difference"] = {
            metric: {"difference": d.difference, "low": d.low, "high": d.high}
            for metric, d in paired_difference(base.ranking, tuned.ranking).items()
        }
    return out


def _same_prompt(name: str, overrides: Sequence[str]) -> list[str]:
    """The base is asked with the tuned model's template and pixel limits, so that only the weights differ."""
    given = {text.split("=", 1)[0] for text in overrides}
    return [f"{k}={json.dumps(v)}" for k, v in find_target(name).facts if k not in given] + list(overrides)


def write_lines(name: str, data: str, overrides: Sequence[str], out: Path, ranks: Ranks, *, task: str) -> int:
    """Write what `score` or `generate` gives, a line per document or row; returns how many."""
    if out.exists():
        raise UsageError(f"--out {out} exists", why="nothing is overwritten", remedy="Remove it or name another file")
    target, config = _prepare(name, data, overrides, task)
    rows = open_set(target, config, data, ranks, require_labels=False)
    wrapped = open_target(target, config, ranks)
    progress = count_progress(f"reading with {name}", enabled=ranks.is_main)
    how = _how(config, ranks)
    if task == "rerank":
        groups = score_set(wrapped, rows, ranks, how, progress)
        lines = [
            {"query_id": rows.index.rows[row].id, "doc_id": doc, "score": value}
            for row, docs, values in groups
            for doc, value in zip(docs, values, strict=True)
        ]
    else:
        lines = [{"id": i, "text": t} for i, t, _, _ in generate_set(wrapped, rows, ranks, how, progress)]
    if ranks.is_main:
        part = out.with_name(f".{out.name}.part")
        part.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
        part.replace(out)
    return len(lines)


def export_target(name: str, out: Path, overrides: Sequence[str], ranks: Ranks) -> None:
    """Write a target as a merged Hugging Face folder."""
    if out.exists():
        raise UsageError(f"{out} exists", why="nothing is overwritten", remedy="Remove it or name another folder")
    target = find_target(name)
    config = target_config(target, overrides, task="rerank")
    wrapped = open_target(target, config, ranks)
    base = resolve_model(target.base)
    facts = {
        "task": config.task,
        "base": target.base,
        "template": config.data.template if config.task == "rerank" else "chat",
        "instruction": config.data.instruction,
        "pixels": {"min": wrapped.owner.spec.min_pixels, "max": wrapped.owner.spec.max_pixels},
        "settings": config.model_dump(mode="json"),
        "step": target.checkpoint.step if target.checkpoint else None,
    }
    export_model(wrapped.owner, base, out, ranks, facts)


def format_report(report: dict[str, Any]) -> str:
    """A report for people: metrics with their intervals, slices, warnings."""
    lines = [f"{report.get('queries', report.get('rows')):,} {'queries' if 'queries' in report else 'rows'}"]
    if "tie_rate" in report:
        lines[0] += f", tie rate {report['tie_rate']:.4f}"
    intervals = report.get("intervals", {})
    for name, value in report["metrics"].items():
        interval = "  [{:.4f}, {:.4f}]".format(*intervals[name]) if name in intervals else ""
        line = f"{name:<14} {value:.4f}{interval}"
        if "against" in report:
            line += f"  against {report['against']['metrics'][name]:.4f}"
        if name in report.get("difference", {}):
            d = report["difference"][name]
            line += f"  difference {d['difference']:+.4f} [{d['low']:+.4f}, {d['high']:+.4f}]"
        lines.append(line)
    for field, values in report.get("slices", {}).items():
        for value, part in values.items():
            figures = "  ".join(f"{k} {v:.4f}" for k, v in part["metrics"].items())
            lines.append(f"{field}={value} ({part.get('queries', part.get('rows'))}): {figures}")
    return "\n".join(lines + [f"warning: {w}" for w in report.get("warnings", ())])
