"""`litchi data check`: every row parsed, every picture decoded, every token counted, before a run is paid for.

In: a JSONL file and settings. Out: findings (file, line, severity, code, message) and totals, as the JSON answer.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from litchi.batch.loader import Corpus
from litchi.batch.sources import index_sources
from litchi.config import Config
from litchi.data.processor import Processor
from litchi.train.progress import count_progress


def check_files(config: Config, processor: Processor) -> Corpus:
    """Scan the files of `data.train` whole, with a progress bar."""
    return index_sources(config, config.data.train, processor, progress=lambda name: count_progress(f"checking {name}"))


def check_report(corpus: Corpus) -> dict[str, Any]:
    """The JSON answer of the contract."""
    indexes = corpus.sources
    patch_pixels = corpus.renderers[0].processor.vision.patch ** 2
    return {
        "rows": sum(len(i.lines) for i in indexes),
        "usable": sum(len(i.rows) for i in indexes),
        "tokens": sum(i.tokens for i in indexes),
        "pixels": sum(i.patches for i in indexes) * patch_pixels,
        "findings": [
            {"file": f.file, "line": f.line, "severity": f.severity, "code": f.code, "message": f.message}
            for i in indexes
            for f in i.findings
        ],
    }


def format_report(report: dict[str, Any]) -> str:
    """The same for people: one line per finding, totals, and counts per code."""
    lines = [
        f"{Path(f['file']).name}:{f['line']}: {f['severity']}: {f['code']}: {f['message']}" for f in report["findings"]
    ]
    counts = Counter((f["severity"], f["code"]) for f in report["findings"])
    lines.append(
        f"{report['usable']:,} of {report['rows']:,} rows usable, {report['tokens']:,} tokens, {report['pixels']:,} pixels"
    )
    lines += [f"  {n:,} x {severity}: {code}" for (severity, code), n in sorted(counts.items())]
    return "\n".join(lines)


def write_clean(corpus: Corpus, out: Path) -> int:
    """Write the usable rows letter for letter; returns how many. Relative media paths still start from the old folder.

    Raises:
        FileExistsError: `out` exists; nothing is overwritten.
    """
    count = 0
    with out.open("xb") as file:
        for index in corpus.sources:
            for row in index.rows:
                file.write(index.lines.read(row.line).rstrip(b"\n") + b"\n")
                count += 1
    return count


def to_json(report: dict[str, Any]) -> str:
    return json.dumps(report, ensure_ascii=False)
