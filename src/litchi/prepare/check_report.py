"""The report of `litchi data check`: what was found, how the data is distributed, the worst rows with their pictures.

In: checked files and their JSON answer. Out: an HTML page that loads nothing from elsewhere (pictures are in it, made
small), and the same in Markdown (pictures are shown from where they lie).
"""

from __future__ import annotations

import base64
import io
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from litchi.data.media import MediaError, decode_image
from litchi.data.values import RowError
from litchi.errors import UsageError
from litchi.prepare.check import Checked
from litchi.prepare.scan import row_media
from litchi.types import Media, Source

PER_CODE = 5  # rows shown of each kind of finding
EXTREME = 3  # longest rows and largest pictures
PICTURES = 6  # of a row
THUMBNAIL = 128  # pixels of the longer side
EXCERPT = 400  # characters of a row
TITLES = {
    "tokens": "Tokens per row (up to)",
    "picture sides": "Side of a picture of the same area, in pixels (up to)",
    "modalities": "Rows by what they are made of",
}


@dataclass(frozen=True)
class Shown:
    """A row as the report shows it: why, where, its text cut short, its pictures."""

    why: str
    where: str
    excerpt: str
    media: tuple[Media, ...]


def check_out(name: str) -> Path:
    """The place a report goes to, before anything is checked. Raises UsageError: it exists, or there is no folder."""
    out = Path(name)
    if out.suffix in (".html", ".md"):
        if out.exists():
            raise UsageError(f"{out} exists", why="nothing is overwritten", remedy="Name another file")
        if not out.parent.is_dir():
            raise UsageError(f"{out} cannot be written", why=f"there is no folder {out.parent}", remedy="Make it")
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists", why="nothing is overwritten", remedy="Name a new folder, a .html or a .md")
    return out


def write_report(files: Sequence[Checked], report: dict[str, Any], out: Path) -> list[Path]:
    """Write `out` as HTML or Markdown by its ending, or both into a folder; returns what was written."""
    paths = [out]
    if out.suffix not in (".html", ".md"):
        out.mkdir(parents=True, exist_ok=True)
        paths = [out / "report.html", out / "report.md"]
    shown = list(choose_rows(files))
    for path in paths:
        text = _page(files, report, shown) if path.suffix == ".html" else _markdown(files, report, shown, path.parent)
        path.write_text(text, encoding="utf-8")
    return paths


# ---------------------------------------------------------------- which rows


def choose_rows(files: Sequence[Checked]) -> Iterator[Shown]:
    """The first rows of each kind of finding, errors first; then the longest rows and the largest pictures."""
    for file in files:
        at = {int(line): row for row, line in enumerate(file.lines.numbers)} if file.findings else {}
        told: Counter[str] = Counter()
        for f in sorted(file.findings, key=lambda f: (f.severity != "error", f.code, f.line)):
            told[f.code] += 1
            if told[f.code] <= PER_CODE and f.line in at:
                yield _show(file, at[f.line], f"{f.severity}: {f.code}: {f.message}")
    for file in files:
        for i in np.argsort(-file.facts.tokens, kind="stable")[:EXTREME]:
            yield _show(file, int(file.facts.row[i]), f"longest: {file.facts.tokens[i]:,} tokens")
        for i in np.argsort(-file.facts.pixels, kind="stable")[:EXTREME]:
            if file.facts.pixels[i]:
                yield _show(file, int(file.facts.row[i]), f"largest picture: {file.facts.pixels[i]:,} pixels")


def _show(file: Checked, row: int, why: str) -> Shown:
    raw = file.lines.read(row)
    source = Source(file.path, int(file.lines.numbers[row]))
    try:
        media = row_media(file.renderer, raw, source)
    except RowError:
        media = []
    text = raw.decode("utf-8", "backslashreplace").strip()
    distinct = tuple({m.key: m for m in media}.values())
    return Shown(why, str(source), text if len(text) <= EXCERPT else text[:EXCERPT] + " ...", distinct)


def _thumbnail(media: Media) -> tuple[str | None, str]:
    """A small picture as a data URL, or None; and what to say of it."""
    if media.kind != "image":
        return None, f"{media.name}: a video"
    try:
        picture = Image.fromarray(decode_image(media))
    except MediaError as error:
        return None, f"{media.name}: {error.reason}"
    size = f"{picture.width} x {picture.height}"
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG" if picture.width * picture.height < 4096 else "JPEG", quality=80)
    kind = "png" if buffer.getvalue().startswith(b"\x89PNG") else "jpeg"
    url = f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return url, f"{media.name}, {size}"


# ---------------------------------------------------------------- pages


def _totals(report: dict[str, Any]) -> list[tuple[str, str]]:
    return [(name, f"{report[name]:,}") for name in ("rows", "usable", "tokens", "pixels")]


def _codes(report: dict[str, Any]) -> list[tuple[str, str, int]]:
    counts = Counter((f["severity"], f["code"]) for f in report["findings"])
    return [(severity, code, n) for (severity, code), n in sorted(counts.items())]


STYLE = """
:root { color-scheme: light dark; --line: #8884; --bar: #c8385a }
body { margin: 0 auto; max-width: 64rem; padding: 1.5rem 1rem 3rem; font: 15px/1.45 system-ui, sans-serif }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse } td, th { padding: .15rem .8rem .15rem 0; text-align: left }
td.n { text-align: right; font-variant-numeric: tabular-nums }
td.bar { width: 24rem } td.bar i { display: block; height: .8rem; background: var(--bar); border-radius: 3px }
article { border: 1px solid var(--line); border-radius: 10px; padding: .7rem 1rem; margin: .7rem 0 }
article p { margin: .2rem 0; overflow-wrap: anywhere } 
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .4rem 0 }
figure { display: inline-block; margin: .2rem .6rem .2rem 0; vertical-align: top; max-width: 12rem }
figcaption { font-size: .75rem; overflow-wrap: anywhere }
"""


def _page(files: Sequence[Checked], report: dict[str, Any], shown: Sequence[Shown]) -> str:
    title = "Data check: " + ", ".join(file.path for file in files)
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>',
        f"<style>{STYLE}</style><h1>{escape(title)}</h1>",
        _table([(escape(name), f'<td class="n">{value}</td>') for name, value in _totals(report)]),
        "<h2>Findings</h2>",
        _table([(f"{severity}: {escape(code)}", f'<td class="n">{n:,}</td>') for severity, code, n in _codes(report)])
        or "<p>None.</p>",
    ]
    for name, bins in report["histograms"].items():
        parts.append(f"<h2>{TITLES[name]}</h2>")
        most = max(bins.values(), default=1)
        parts.append(_table([(escape(label), _bar(n, most)) for label, n in bins.items()]) or "<p>None.</p>")
    parts.append("<h2>Rows to look at</h2>")
    parts += [_article(row) for row in shown]
    return "\n".join(parts) + "</html>\n"


def _table(rows: Sequence[tuple[str, str]]) -> str:
    return f"<table>{''.join(f'<tr><th>{head}</th>{cells}</tr>' for head, cells in rows)}</table>" if rows else ""


def _bar(n: int, most: int) -> str:
    return f'<td class="n">{n:,}</td><td class="bar"><i style="width:{100 * n / most:.1f}%"></i></td>'


def _article(row: Shown) -> str:
    figures = []
    for media in row.media[:PICTURES]:
        url, caption = _thumbnail(media)
        image = f'<img src="{url}" alt="">' if url else ""
        figures.append(f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>")
    if len(row.media) > PICTURES:
        figures.append(f"<p>and {len(row.media) - PICTURES} more</p>")
    head = f"<p><b>{escape(row.where)}</b></p><p>{escape(row.why)}</p>"
    return f"<article>{head}<pre>{escape(row.excerpt)}</pre>{''.join(figures)}</article>"


def _markdown(files: Sequence[Checked], report: dict[str, Any], shown: Sequence[Shown], folder: Path) -> str:
    lines = [f"# Data check: {', '.join(file.path for file in files)}", ""]
    lines += _grid("what", "how many", _totals(report))
    lines += ["## Findings", ""]
    lines += _grid("finding", "rows", [(f"{severity}: {code}", f"{n:,}") for severity, code, n in _codes(report)])
    for name, bins in report["histograms"].items():
        lines += [f"## {TITLES[name]}", ""]
        lines += _grid("bin", "how many", [(label.replace("|", "\\|"), f"{n:,}") for label, n in bins.items()])
    lines += ["## Rows to look at", ""]
    for row in shown:
        fence = "`" * max(3, 1 + max((len(run) for run in row.excerpt.split("\n") if set(run) == {"`"}), default=0))
        lines += [f"**{row.where}**: {row.why}", "", f"{fence}text", row.excerpt, fence, ""]
        lines += [_figure(media, folder) for media in row.media[:PICTURES]]
        lines += [""] if row.media else []
    return "\n".join(lines)


def _grid(left: str, right: str, rows: Sequence[tuple[str, str]]) -> list[str]:
    if not rows:
        return ["None.", ""]
    return [f"| {left} | {right} |", "|---|---:|", *(f"| {a} | {b} |" for a, b in rows), ""]


def _figure(media: Media, folder: Path) -> str:
    if media.kind != "image" or media.path is None or not os.path.isfile(media.path):
        return f"- {media.name}"
    path = os.path.relpath(media.path, folder.resolve())
    return f'<img src="{escape(path)}" alt="{escape(os.path.basename(path))}" height="{THUMBNAIL}">'
