"""`evaluate` on a TARGET: open it as it was trained, run it, hand on the figures. `writing.py`: `score`, `generate`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from litchi.batch.sources import refuse_bad
from litchi.config import Config
from litchi.data.jsonl import guess_task
from litchi.data.processor import load_processor
from litchi.dist import Ranks, barrier
from litchi.evaluate.ranking import paired_difference
from litchi.evaluate.run import EvalSet, Measured, measure_set
from litchi.model.build import resolve_model
from litchi.train.progress import count_progress
from litchi.train.setup import check_ids, scan_files
from litchi.train.target import Target, find_target, open_target, same_prompt, target_config, write_words
from litchi.train.watch import how_to_measure


def open_set(config: Config, data: str, ranks: Ranks, *, require_labels: bool) -> EvalSet:
    """Scan the rows to measure on; bad rows stop it or are left out and counted, as the settings say."""
    processor = load_processor(resolve_model(config.model.path, first=ranks.local_rank == 0, wait=barrier))
    corpus = scan_files(config, config.data.eval, processor, ranks, require_labels=require_labels)
    left_out = refuse_bad(corpus.sources, config)
    check_ids(corpus)
    if left_out and ranks.is_main:
        print(f"{len({f.line for f in left_out})} rows of {data} are left out or changed", file=sys.stderr)
    return EvalSet(corpus.sources[0], corpus.renderers[0], config.eval.max_rows)


def prepare(name: str, data: str, overrides: Sequence[str], task: str | None = None) -> tuple[Target, Config]:
    """A target, and the settings it is opened with for a data file."""
    target = find_target(name)
    words = [*write_words({"data.eval": data}, ()), *overrides]
    return target, target_config(target, words, task=task or guess_task(data))


def measure_one(name: str, data: str, overrides: Sequence[str], ranks: Ranks) -> Measured:
    """Figures of one target on one file."""
    target, config = prepare(name, data, overrides)
    rows = open_set(config, data, ranks, require_labels=True)
    wrapped = open_target(target, config, ranks)
    progress = count_progress(f"measuring {name}", enabled=ranks.is_main)
    return measure_set(wrapped, rows, how_to_measure(config, ranks.device), progress)


def measure_target(
    name: str, data: str, overrides: Sequence[str], ranks: Ranks, *, against: str | None = None
) -> dict[str, Any]:
    """The JSON answer of `evaluate`; with `against`, both reports and the paired differences."""
    tuned = measure_one(name, data, overrides, ranks)
    if against is None:
        return tuned.report
    base = measure_one(against, data, same_prompt(name, overrides), ranks)
    out = {**tuned.report, "against": base.report}
    if tuned.ranking is not None and base.ranking is not None:
        out["difference"] = {
            metric: {"difference": d.difference, "low": d.low, "high": d.high}
            for metric, d in paired_difference(base.ranking, tuned.ranking).items()
        }
    return out


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
    judged = report.get("json", {"accuracy": {}, "problems": []})
    lines += [f"field {name}: {share:.4f}" for name, share in judged["accuracy"].items()]
    lines += [f"{said['id']}: {said['problem']}" for said in judged["problems"]]
    return "\n".join(lines + [f"warning: {w}" for w in report.get("warnings", ())])
