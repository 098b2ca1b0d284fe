"""`litchi data check`: every row parsed, every picture decoded, every token counted, before a run is paid for.

In: files and settings. Out: findings (file, line, severity, code, message) and totals, as the JSON answer; the usable
rows as a file. An error is a row that cannot be used as it is; a warning is a row that is used as it stands.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from litchi.batch.index import ScanRules
from litchi.batch.sources import make_renderer
from litchi.config import Config, DataSource
from litchi.data.jsonl import Lines, read_offsets
from litchi.data.processor import Processor
from litchi.data.render import Renderer
from litchi.prepare.leakage import find_leaks, find_repeats
from litchi.prepare.lines import create, fit_row
from litchi.prepare.scan import Facts, count_workers, scan_file
from litchi.train.progress import count_progress
from litchi.types import Finding

SHOWN = 50  # findings of a kind that people are shown
HISTOGRAMS = ("tokens", "picture sides", "modalities")


@dataclass(frozen=True)
class Checked:
    """A file that was looked at; `findings` are in the order of its lines."""

    lines: Lines
    renderer: Renderer
    facts: Facts
    findings: tuple[Finding, ...]

    @property
    def path(self) -> str:
        return self.lines.path

    @property
    def usable(self) -> int:
        return len(self.facts.row)


def check_files(config: Config, processor: Processor) -> tuple[Checked, ...]:
    """Look at the files of `data.train` whole, with a progress bar, and compare them with each other and `data.eval`.

    Only findings on `data.train` are returned: the files of `data.eval` are what they are compared with.
    """
    compare = len(config.data.train) + len(config.data.eval) > 1
    files = [_check_file(source, config, processor, compare) for source in config.data.train]
    against = [_check_file(source, config, processor, compare) for source in config.data.eval]
    found: list[list[Finding]] = [[] for _ in files]
    for earlier, later in combinations(range(len(files)), 2):
        found[later] += _leaks(files[later], files[earlier])
    for number, file in enumerate(files):
        found[number] += [finding for other in against for finding in _leaks(file, other)]
    return tuple(
        replace(file, findings=tuple(sorted([*file.findings, *more], key=lambda f: f.line)))
        for file, more in zip(files, found, strict=True)
    )


def _leaks(file: Checked, other: Checked) -> list[Finding]:
    return find_leaks(file.lines, file.facts, other.lines, other.facts)


def _check_file(source: DataSource, config: Config, processor: Processor, compare: bool) -> Checked:
    lines = read_offsets(source.path)
    renderer = make_renderer(config, processor, source.path)
    facts, findings = scan_file(
        lines,
        renderer,
        ScanRules(config.data.max_length, config.data.overlong, config.data.verify),
        workers=count_workers(config.data.workers),
        compare=compare,
        progress=count_progress(f"checking {source.name}"),
    )
    findings += find_repeats(lines, facts)
    if not len(facts.row):
        findings.append(Finding(source.path, 0, "error", "no_usable_row", "no row can be used"))
    return Checked(lines, renderer, facts, tuple(sorted(findings, key=lambda f: f.line)))


def check_report(files: Sequence[Checked]) -> dict[str, Any]:
    """The JSON answer of the contract, with histograms beside it."""
    counts = sum((file.facts.counts for file in files), Counter())
    return {
        "rows": sum(len(file.lines) for file in files),
        "usable": sum(file.usable for file in files),
        "tokens": sum(int(file.facts.tokens.sum(dtype="int64")) for file in files),
        "pixels": counts["pixels", "all"],
        "histograms": {name: _histogram(counts, name) for name in HISTOGRAMS},
        "findings": [
            {"file": f.file, "line": f.line, "severity": f.severity, "code": f.code, "message": f.message}
            for file in files
            for f in file.findings
        ],
    }


def _histogram(counts: Counter[tuple[str, str]], name: str) -> dict[str, int]:
    """Bin -> how many; a bin of numbers is named by its upper end, which belongs to it."""
    bins = {label: n for (kind, label), n in counts.items() if kind == name}
    return {label: bins[label] for label in sorted(bins, key=lambda b: (int(b), b) if b.isdecimal() else (0, b))}


def format_report(report: dict[str, Any]) -> str:
    """The same for people: one line per finding, totals, and counts per code."""
    lines, counts = [], Counter()
    for f in report["findings"]:
        counts[f["severity"], f["code"]] += 1
        if counts[f["severity"], f["code"]] <= SHOWN:
            lines.append(f"{Path(f['file']).name}:{f['line']}: {f['severity']}: {f['code']}: {f['message']}")
    if more := sum(max(0, n - SHOWN) for n in counts.values()):
        lines.append(f"... and {more:,} more (--json has them all)")
    usable, rows, tokens, pixels = (report[key] for key in ("usable", "rows", "tokens", "pixels"))
    lines.append(f"{usable:,} of {rows:,} rows usable, {tokens:,} tokens, {pixels:,} pixels")
    lines += [f"  {n:,} x {severity}: {code}" for (severity, code), n in sorted(counts.items())]
    for name, bins in report["histograms"].items():
        up = "up to " if name != "modalities" else ""
        shown = ", ".join(f"{up}{label}: {n:,}" for label, n in bins.items())
        lines += [f"  {name}: {shown}"] if bins else []
    return "\n".join(lines)


def write_clean(files: Sequence[Checked], out: Path, *, media_root: str | None) -> str:
    """Write the usable rows letter for letter, and say in a sentence what was written.

    Relative paths of media start from `media_root` or, without one, from the folder of the file that names them. So
    where `out` lies in another folder, rows with relative paths get paths from there, and are counted.

    Raises:
        UsageError: `out` exists, or its folder does not.
    """
    kept = moved = partly = 0
    with create(out) as new:
        for file in files:
            hurt = {f.line for f in file.findings if f.severity == "error"}
            for row in map(int, file.facts.row):
                raw = file.lines.read(row).rstrip(b"\r\n")
                fitted = fit_row(raw, file.path, out, media_root=media_root)
                new.write(fitted + b"\n")
                kept, moved = kept + 1, moved + (fitted != raw)
                partly += int(file.lines.numbers[row]) in hurt
    notes = []
    if moved:
        notes.append(f"in {moved:,} of them the paths of media were rewritten, because {out} lies in another folder")
    if partly:
        notes.append(f"{partly:,} of them still have documents that cannot be used (data.on_bad_media=skip)")
    return "; ".join([f"{kept:,} rows written to {out}", *notes])


def to_json(report: dict[str, Any]) -> str:
    """The JSON answer of `data check` as text."""
    return json.dumps(report, ensure_ascii=False)
