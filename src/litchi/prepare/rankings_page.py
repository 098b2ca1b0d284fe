"""A page and a picture that show what a reranker learned: candidates of a few queries in order, before and after.

Both are self-contained: the HTML carries its pictures, style and nothing from elsewhere; the PNG is drawn by Pillow.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont


class Candidate(NamedTuple):
    """A picture, the score the model gave it, and whether it is what the query asked for."""

    picture: str | Path
    score: float
    positive: bool


@dataclass(frozen=True)
class RankedQuery:
    """A query with its candidates as scored before and after training, in any order.

    `gloss` says the query in English; it stands beside a query of another language.
    """

    query: str
    before: Sequence[Candidate]
    after: Sequence[Candidate]
    gloss: str = ""


@dataclass(frozen=True)
class Figure:
    """A number between 0 and 1, drawn as a bar, with the ends of its interval where it has one."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    highlight: bool = False  # the one to look at

    @property
    def text(self) -> str:
        interval = "" if self.low is None or self.high is None else f"  [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.value:.3f}{interval}"


def write_rankings(
    path_html: str | Path,
    path_png: str | Path,
    *,
    title: str,
    rows: Sequence[RankedQuery],
    figures: Sequence[Figure],
) -> None:
    """Write the page and the picture.

    Args:
        path_html, path_png: the two files.
        title: stands above everything.
        rows: the queries to show, some six of them.
        figures: the bars at the top, in this order (before, after, control, chance, ...).
    """
    Path(path_html).write_text(_page(title, rows, figures), encoding="utf-8")
    _sheet(title, rows, figures).save(path_png)


def _ranked(candidates: Sequence[Candidate]) -> list[Candidate]:
    return sorted((Candidate(*c) for c in candidates), key=lambda c: -c.score)


def _rank(candidates: Sequence[Candidate]) -> str:
    """Say at which place the right one stands, counted from 1."""
    return next((str(place) for place, c in enumerate(_ranked(candidates), 1) if c.positive), "none")


# ---- HTML

STYLE = """
:root { --ground: #fbfaf8; --card: #fff; --ink: #22252a; --soft: #6d7480; --line: #e6e3de; --right: #1a8a50;
  --bar: #b9bec7; --accent: #c8385a }
@media (prefers-color-scheme: dark) {
  :root { --ground: #16181c; --card: #1f2227; --ink: #e8e9eb; --soft: #9aa1ad; --line: #32363d; --right: #3ecb82;
    --bar: #565d69; --accent: #ee6a88 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem 3rem; background: var(--ground); color: var(--ink);
  font: 16px/1.45 system-ui, sans-serif }
h1 { font-size: 1.5rem; line-height: 1.2; margin: 0 0 1rem }
h2 { font-size: 1.1rem; margin: 0 }
p { color: var(--soft); font-size: .85rem; margin: .1rem 0 .6rem }
section, dl { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 1rem;
  margin: 0 0 1rem }
dl { display: grid; grid-template-columns: minmax(6rem, max-content) 1fr max-content; gap: .4rem .8rem;
  align-items: center; font-size: .9rem }
dt, dd { margin: 0 }
dd.number { font-variant-numeric: tabular-nums; color: var(--soft); white-space: pre }
.track { position: relative; height: .9rem; background: var(--line); border-radius: 3px }
.track i { position: absolute; inset: 0 auto 0 0; background: var(--bar); border-radius: 3px }
.track b { position: absolute; top: 50%; height: 2px; margin-top: -1px; background: var(--ink) }
.track.highlight i { background: var(--accent) }
h3 { font-size: .75rem; font-weight: 600; color: var(--soft); margin: .5rem 0 .3rem }
ol { list-style: none; display: grid; grid-template-columns: repeat(10, 1fr); gap: .4rem; margin: 0; padding: 0 }
li { text-align: center; font-size: .7rem; color: var(--soft); font-variant-numeric: tabular-nums }
img { display: block; width: 100%; border-radius: 8px; border: 3px solid transparent; outline: 1px solid var(--line) }
li.right { color: var(--right); font-weight: 700 }
li.right img { border-color: var(--right); outline: none }
@media (max-width: 40rem) {
  ol { grid-template-columns: repeat(5, 1fr) }
  dl { grid-template-columns: 1fr max-content; grid-auto-flow: dense } /* the number goes up beside its name */
  dd.track { grid-column: 1 / 3 } }
"""


def _page(title: str, rows: Sequence[RankedQuery], figures: Sequence[Figure]) -> str:
    bars = "".join(_bar(figure) for figure in figures)
    queries = "".join(_query(row) for row in rows)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>"
        f"<h1>{escape(title)}</h1>\n<dl>{bars}</dl>\n"
        f"<p>Each line shows the candidates from the highest score to the lowest. "
        f"The right one is framed in green.</p>\n{queries}</body></html>\n"
    )


def _bar(figure: Figure) -> str:
    interval = ""
    if figure.low is not None and figure.high is not None:
        interval = f'<b style="left:{100 * figure.low:.1f}%;width:{100 * (figure.high - figure.low):.1f}%"></b>'
    return (
        f'<dt>{escape(figure.name)}</dt><dd class="track{" highlight" if figure.highlight else ""}">'
        f'<i style="width:{100 * figure.value:.1f}%"></i>{interval}</dd>'
        f'<dd class="number">{escape(figure.text)}</dd>\n'
    )


def _query(row: RankedQuery) -> str:
    lines = "".join(
        f"<h3>{name}</h3><ol>{''.join(_thumbnail(c, place) for place, c in enumerate(_ranked(candidates), 1))}</ol>\n"
        for name, candidates in (("Before", row.before), ("After", row.after))
    )
    gloss = f"{escape(row.gloss)} · " if row.gloss and row.gloss != row.query else ""
    return (
        f"<section><h2>{escape(row.query)}</h2>"
        f"<p>{gloss}right product: place {_rank(row.before)} before, {_rank(row.after)} after</p>\n{lines}</section>\n"
    )


def _thumbnail(candidate: Candidate, place: int) -> str:
    data = base64.b64encode(_png(Path(candidate.picture))).decode()
    kind = ' class="right"' if candidate.positive else ""
    alt = f"{place}: {Path(candidate.picture).stem}"
    return f'<li{kind}><img alt="{escape(alt)}" src="data:image/png;base64,{data}">{candidate.score:+.2f}</li>'


def _png(path: Path) -> bytes:
    """Give the bytes to embed: the file's own if it is a PNG, else the picture as one."""
    content = path.read_bytes()
    if not content.startswith(b"\x89PNG"):
        out = io.BytesIO()
        Image.open(io.BytesIO(content)).convert("RGB").save(out, "PNG")
        content = out.getvalue()
    return content


# ---- PNG

GROUND, INK, SOFT, LINE = (251, 250, 248), (34, 37, 42), (109, 116, 128), (230, 227, 222)
RIGHT, BAR, ACCENT = (26, 138, 80), (185, 190, 199), (200, 56, 90)
MARGIN, THUMB, GAP, LABEL = 32, 76, 10, 74  # pixels; LABEL is the column that says "before" and "after"
CJK_FONTS = (  # searched for by name in the folders of the system
    *("NotoSansCJK-Regular.ttc", "NotoSansSC-Regular.otf", "NotoSansSC-Regular.ttf", "SourceHanSansSC-Regular.otf"),
    *("wqy-microhei.ttc", "wqy-zenhei.ttc", "DroidSansFallbackFull.ttf", "DroidSansFallback.ttf"),
    *("PingFang.ttc", "Hiragino Sans GB.ttc", "STHeiti Medium.ttc", "msyh.ttc", "simhei.ttf"),
)
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def find_cjk_font(size: int) -> Font | None:
    """Return a font of the system that has Chinese characters, or None."""
    for name in CJK_FONTS:
        try:
            return ImageFont.truetype(name, size)
        except OSError:
            continue
    return None


def _sheet(title: str, rows: Sequence[RankedQuery], figures: Sequence[Figure]) -> Image.Image:
    columns = max((max(len(row.before), len(row.after)) for row in rows), default=10)
    width = 2 * MARGIN + LABEL + columns * (THUMB + GAP) - GAP
    bars_height, row_height = 30 * len(figures), 2 * (THUMB + 26) + 62
    height = MARGIN + 52 + bars_height + 24 + row_height * len(rows) + MARGIN // 2
    sheet = Image.new("RGB", (width, height), GROUND)
    pen = ImageDraw.Draw(sheet)
    pen.text((MARGIN, MARGIN), title, INK, _font(26))
    y = MARGIN + 52
    left = MARGIN + 20 + max((int(_font(16).getlength(figure.name)) for figure in figures), default=0)
    for figure in figures:
        _draw_bar(pen, figure, y, left, width - MARGIN - 180)
        y += 30
    y += 24
    for row in rows:
        _draw_query(sheet, pen, row, y)
        y += row_height
    return sheet


@cache
def _font(size: int) -> Font:
    return ImageFont.load_default(size)


def _draw_bar(pen: ImageDraw.ImageDraw, figure: Figure, y: int, left: int, right: int) -> None:
    middle, colour = y + 10, ACCENT if figure.highlight else BAR

    def at(value: float) -> float:
        return left + (right - left) * value

    pen.text((MARGIN, middle), figure.name, INK, _font(16), anchor="lm")
    pen.rounded_rectangle((left, y + 2, right, y + 18), 3, LINE)
    pen.rounded_rectangle((left, y + 2, max(left + 4, at(figure.value)), y + 18), 3, colour)
    if figure.low is not None and figure.high is not None:
        pen.line((at(figure.low), middle, at(figure.high), middle), INK, 2)
        for end in (figure.low, figure.high):
            pen.line((at(end), middle - 4, at(end), middle + 4), INK, 2)
    pen.text((right + 16, middle), figure.text, SOFT, _font(16), anchor="lm")


def _draw_query(sheet: Image.Image, pen: ImageDraw.ImageDraw, row: RankedQuery, y: int) -> None:
    pen.line((MARGIN, y, sheet.width - MARGIN, y), LINE, 1)
    text, font = _spoken(row)
    pen.text((MARGIN, y + 26), text, INK, font, anchor="lm")
    places = f"right product: place {_rank(row.before)} before, {_rank(row.after)} after"
    pen.text((sheet.width - MARGIN, y + 26), places, SOFT, _font(15), anchor="rm")
    y += 48
    for name, candidates in (("before", row.before), ("after", row.after)):
        pen.text((MARGIN, y + THUMB // 2), name, SOFT, _font(15), anchor="lm")
        for column, candidate in enumerate(_ranked(candidates)):
            _draw_candidate(sheet, pen, candidate, MARGIN + LABEL + column * (THUMB + GAP), y)
        y += THUMB + 26


def _spoken(row: RankedQuery) -> tuple[str, Font]:
    """Choose the words and the font: without a font for Chinese the gloss takes the query's place."""
    if row.query.isascii():
        return row.query, _font(19)
    font = find_cjk_font(19)
    if font is None:
        return f"[zh] {row.gloss or '...'}", _font(19)
    return f"{row.query}  ({row.gloss})" if row.gloss else row.query, font


def _draw_candidate(sheet: Image.Image, pen: ImageDraw.ImageDraw, candidate: Candidate, x: int, y: int) -> None:
    with Image.open(candidate.picture) as picture:
        sheet.paste(picture.convert("RGB").resize((THUMB, THUMB), Image.Resampling.LANCZOS), (x, y))
    if candidate.positive:
        pen.rectangle((x - 4, y - 4, x + THUMB + 3, y + THUMB + 3), outline=RIGHT, width=4)
    else:
        pen.rectangle((x, y, x + THUMB - 1, y + THUMB - 1), outline=LINE)
    colour = RIGHT if candidate.positive else SOFT
    pen.text((x + THUMB // 2, y + THUMB + 12), f"{candidate.score:+.2f}", colour, _font(12), anchor="mm")
