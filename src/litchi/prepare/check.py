"""`litchi data check`: every row parsed, every picture decoded, every token counted, before a run is paid for.

In: a JSONL file and settings. Out: findings (file, line, severity, code, message) and totals, as the JSON answer.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from litchi.batch.loader import Corpus
from litchi.batch.sources import index_sources
from litchi.config import Config
from litchi.data.processor import Processor
from litchi.errors import UsageError
from litchi.train.progress import count_progress
from litchi.types import Finding

MEDIA_KEYS = {"image", "images", "video", "videos", "image_url"}  # what stands under these in a row is media


def check_files(config: Config, processor: Processor) -> Corpus:
    """Scan the files of `data.train` whole, with a progress bar."""
    return index_sources(config, config.data.train, processor, progress=lambda name: count_progress(f"checking {name}"))


def check_report(corpus: Corpus) -> dict[str, Any]:
    """The JSON answer of the contract."""
    indexes = corpus.sources
    patch_pixels = corpus.renderers[0].processor.vision.patch ** 2
    empty = [Finding(i.path, 0, "error", "no_usable_row", "no row can be used") for i in indexes if not i.rows]
    return {
        "rows": sum(len(i.lines) for i in indexes),
        "usable": sum(len(i.rows) for i in indexes),
        "tokens": sum(i.tokens for i in indexes),
        "pixels": sum(i.patches for i in indexes) * patch_pixels,
        "findings": [
            {"file": f.file, "line": f.line, "severity": f.severity, "code": f.code, "message": f.message}
            for f in [*(f for i in indexes for f in i.findings), *empty]
        ],
    }


def format_report(report: dict[str, Any]) -> str:
    """The same for people: one line per finding, totals, and counts per code."""
    lines = [
        f"{Path(f['file']).name}:{f['line']}: {f['severity']}: {f['code']}: {f['message']}" for f in report["findings"]
    ]
    counts = Counter((f["severity"], f["code"]) for f in report["findings"])
    usable, rows, tokens, pixels = (report[key] for key in ("usable", "rows", "tokens", "pixels"))
    lines.append(f"{usable:,} of {rows:,} rows usable, {tokens:,} tokens, {pixels:,} pixels")
    lines += [f"  {n:,} x {severity}: {code}" for (severity, code), n in sorted(counts.items())]
    return "\n".join(lines)


def write_clean(corpus: Corpus, out: Path, *, media_root: str | None) -> str:
    """Write the usable rows letter for letter, and say in a sentence what was written.

    Relative paths of media start from `media_root` or, without one, from the folder of the file that names them. So
    where `out` lies in another folder, rows with relative paths get paths from there, and are counted.

    Raises:
        UsageError: `out` exists, or its folder does not.
    """
    kept = moved = partly = 0
    with _create(out) as file:
        for index in corpus.sources:
            home = os.path.dirname(os.path.abspath(index.path))
            away = media_root is None and not os.path.samefile(home, out.parent)
            hurt = {f.line for f in index.bad}
            for row in index.rows:
                raw = index.lines.read(row.line).rstrip(b"\r\n")
                fitted = _move_media(raw, home, os.path.abspath(out.parent)) if away else raw
                file.write(fitted + b"\n")
                kept, moved = kept + 1, moved + (fitted != raw)
                partly += index.source(row).line in hurt
    notes = []
    if moved:
        notes.append(f"in {moved:,} of them the paths of media were rewritten, because {out} lies in another folder")
    if partly:
        notes.append(f"{partly:,} of them still have documents that cannot be used (data.on_bad_media=skip)")
    return "; ".join([f"{kept:,} rows written to {out}", *notes])


def _create(out: Path) -> BinaryIO:
    try:
        return out.open("xb")
    except FileExistsError:
        raise UsageError(f"{out} exists", why="nothing is overwritten", remedy="Name another file") from None
    except OSError as error:
        raise UsageError(f"{out} cannot be written", why=error.strerror, remedy="Name another file") from None


def _move_media(raw: bytes, home: str, away: str) -> bytes:
    """A row whose relative paths of media start from `away` instead of `home`; the same bytes where it has none."""
    row = json.loads(raw.decode("utf-8-sig"))
    moved = _moved(row, lambda path: os.path.relpath(os.path.join(home, path), away))
    return raw if moved == row else json.dumps(moved, ensure_ascii=False).encode()


def _moved(value: Any, move: Callable[[str], str]) -> Any:
    """The same with the paths moved that stand where the reader of rows looks for media."""
    if isinstance(value, list):
        return [_moved(item, move) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _moved_media(item, move) if key in MEDIA_KEYS else _moved(item, move) for key, item in value.items()}


def _moved_media(value: Any, move: Callable[[str], str]) -> Any:
    if isinstance(value, list):
        return [_moved_media(item, move) for item in value]
    if isinstance(value, dict):  # image_url: {"url": ...}
        return {key: _moved_media(item, move) if key == "url" else item for key, item in value.items()}
    if not isinstance(value, str) or value.startswith("data:"):
        return value
    path = value.removeprefix("file://")
    return value if os.path.isabs(path) else move(path)


def to_json(report: dict[str, Any]) -> str:
    return json.dumps(report, ensure_ascii=False)
