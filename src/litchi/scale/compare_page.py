"""The page of `litchi compare`: tables and plots in one file that needs no network and runs no script.

the JSON answer, losses of each run -> HTML with the answer inside, in <script type="application/json" id="answer">;
a number of a table is shown rounded, and stands in full in its <data value>
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from litchi.scale.compare import forecast_rows, say
from litchi.train.durable import format_bytes
from litchi.train.metrics import format_time

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 260, 64, 36, 14
COLOURS = ("#c8385a", "#2f6fb5", "#1a8a50", "#b5792f", "#7a4fb0", "#2f9aa0", "#8a8a2a", "#6d7480")
CURVE_POINTS = 300
STYLE = """
:root { color-scheme: light dark; --ink: #22252a; --soft: #6d7480; --line: #d9d5cd; --card: #fff; --ground: #fbfaf8 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e9eb; --soft: #9aa1ad; --line: #3a3f47; --card: #1f2227; --ground: #16181c } }
body { margin: 0 auto; max-width: 64rem; padding: 1.5rem 1rem 3rem; background: var(--ground); color: var(--ink);
  font: 16px/1.45 system-ui, sans-serif }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 1rem; margin: 0 0 1rem;
  overflow-x: auto }
h1 { font-size: 1.5rem } h2 { font-size: 1.05rem; margin: 0 0 .6rem }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap }
th:first-child, td:first-child { text-align: left }
li, .note { color: var(--soft); font-size: .9rem }
svg { max-width: 100%; height: auto } svg text { fill: var(--ink); font: 12px system-ui, sans-serif }
svg .axis { stroke: var(--line) } svg .soft { fill: var(--soft) }
"""

Point = tuple[float, float]


def format_page(answer: Mapping[str, Any], losses: Mapping[str, Sequence[Point]]) -> str:
    """The page.

    Args:
        losses: (step, loss) of each run, to be drawn.
    """
    runs = answer["runs"]
    data = json.dumps(answer, ensure_ascii=False).replace("<", "\\u003c")
    sections = [
        ("Cost and speed", _runs_table(runs)),
        ("Speed-up", draw_speedup(answer)),
        ("Cost of an epoch, relative to the first", _bars(runs, "relative_cost", "{:.0%}".format)),
        ("Time of an epoch", _bars(runs, "epoch_s", format_time)),
        ("Where the time goes", _shares(runs)),
        ("Planned and measured", _planned_table(runs)),
        ("Loss", draw_lines(losses, across="step", up="loss")),
        ("Metrics", _metrics_table(runs)),
        ("Extrapolated, not measured", _more_table(answer["extrapolation"])),
    ]
    body = "".join(f"<section><h2>{title}</h2>{inner}</section>\n" for title, inner in sections if inner)
    notes = "".join(f"<li>{escape(text)}</li>" for text in answer["notes"])
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Runs compared</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">\n'
        f"<style>{STYLE}</style></head>\n<body><h1>{len(runs)} runs compared</h1>\n{body}<ul>{notes}</ul>\n"
        f'<script type="application/json" id="answer">{data}</script>\n</body></html>\n'
    )


def thin_losses(steps: Sequence[Mapping[str, Any]]) -> list[Point]:
    """Losses of a run, evenly spread ones if there are many; those that are not finite are left out."""
    every = max(1, len(steps) // CURVE_POINTS)
    return [(line["step"], line["loss"]) for line in steps if math.isfinite(line["loss"])][::every]


# ----------------------------------------------------------------------------------------------------------- tables


class Html(str):
    """A text that is HTML already."""


def _number(value: float | None, how: Callable[[float], str]) -> Html:
    return _data(value, say(value, how))


def _data(value: float | None, shown: str) -> Html:
    """A figure as it is read, and as it is."""
    return Html(escape(shown) if value is None else f'<data value="{value!r}">{escape(shown)}</data>')


def _table(rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        found = (cell if isinstance(cell, Html) else escape(cell) for cell in cells)
        return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in found) + "</tr>"

    return "<table>" + line(rows[0], "th") + "".join(line(row, "td") for row in rows[1:]) + "</table>"


def _runs_table(runs: Sequence[Mapping[str, Any]]) -> str:
    head = ("run", "ranks", "epoch", "known by", "speed-up", "efficiency", "peak memory", "rank hours", "cost")
    rows: list[Sequence[str]] = [(*head, "relative cost")]
    for run in runs:
        known = _number(run["ranks"], str), _number(run["epoch_s"], format_time), run["epoch_basis"]
        figures = _number(run["speedup"], "{:.2f}x".format), _number(run["efficiency"], "{:.0%}".format)
        taken = _number(run["peak_bytes"], format_bytes), _number(run["rank_hours"], "{:.3g}".format)
        costs = _number(run["cost"], "{:.2f}".format), _number(run["relative_cost"], "{:.0%}".format)
        rows.append((run["name"], *known, *figures, *taken, *costs))
    return _table(rows)


def _metrics_table(runs: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(name for run in runs for name in run["metrics"]))

    def cell(run: Mapping[str, Any], name: str) -> Html:
        if name not in run["metrics"]:
            return Html("")
        value, *ends = (_number(x, "{:.4f}".format) for x in (run["metrics"][name], *run["intervals"].get(name, ())))
        return Html(value + (f"&ensp;[{', '.join(ends)}]" if ends else ""))

    head = ("metric", *(run["name"] for run in runs))
    return _table([head, *((name, *(cell(run, name) for run in runs)) for name in names)]) if names else ""


def _planned_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """As `forecast_rows`, with the numbers in full."""
    rows = forecast_rows(runs)
    found = [run["forecast"] for run in runs if run["forecast"] is not None]

    def full(text: Sequence[str], f: Mapping[str, Any]) -> Sequence[str]:
        values = f["planned_bytes"], max(f["peak_bytes"]), f["memory_off"], f["planned_step_s"], f["step_s"]
        return text[0], *(_data(*pair) for pair in zip((*values, f["time_off"]), text[1:], strict=True))

    return _table([rows[0], *map(full, rows[1:], found)]) if rows else ""


def _more_table(more: Mapping[str, Any]) -> str:
    rows: list[Sequence[str]] = [("ranks", "epoch", "speed-up", "relative cost")]
    for point in more["points"]:
        figures = _number(point["speedup"], "{:.2f}x".format), _number(point["relative_cost"], "{:.0%}".format)
        rows.append((_number(point["ranks"], str), _number(point["epoch_s"], format_time), *figures))
    notes = "".join(f"<li>{escape(text)}</li>" for text in more["assumptions"])
    return (_table(rows) if more["points"] else "") + f"<ul>{notes}</ul>"


# ------------------------------------------------------------------------------------------------------------ plots


def draw_speedup(answer: Mapping[str, Any]) -> str:
    """Speed-up over ranks: measured, extrapolated, and what would be perfect."""
    runs = [run for run in answer["runs"] if run["speedup"] is not None]
    if not runs:
        return ""
    first = answer["runs"][0]["ranks"]
    more = [(p["ranks"], p["speedup"]) for p in answer["extrapolation"]["points"]]
    most = max([run["ranks"] for run in runs] + [ranks for ranks, _ in more])
    measured = sorted((run["ranks"], run["speedup"]) for run in runs)
    lines = {"measured": measured, "extrapolated": more, "perfect": [(first, 1.0), (most, most / first)]}
    return draw_lines(lines, across="ranks", up="speed-up", dots=True)


def draw_lines(lines: Mapping[str, Sequence[Point]], *, across: str, up: str, dots: bool = False) -> str:
    """A line for each name, with axes and a legend; "" where there is nothing to draw."""
    points = [point for line in lines.values() for point in line]
    if not points:
        return ""
    x0, x1 = min(x for x, _ in points), max(x for x, _ in points)
    y0, y1 = min(0.0, *(y for _, y in points)), max(y for _, y in points)
    wide, high = x1 - x0 or 1.0, y1 - y0 or 1.0

    def place(x: float, y: float) -> Point:
        return LEFT + (x - x0) / wide * (WIDTH - LEFT - 12), HEIGHT - BOTTOM - (y - y0) / high * (HEIGHT - BOTTOM - TOP)

    parts = []
    for n in range(5):
        x, y = x0 + wide * n / 4, y0 + high * n / 4
        px, py = place(x, y)
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - 12}" y1="{py:.1f}" y2="{py:.1f}"/>')
        parts.append(f'<text class="soft" x="{LEFT - 6}" y="{py + 4:.1f}" text-anchor="end">{y:.3g}</text>')
        parts.append(f'<text class="soft" x="{px:.1f}" y="{HEIGHT - 18}" text-anchor="middle">{x:.4g}</text>')
    parts.append(f'<text class="soft" x="{WIDTH - 12}" y="{HEIGHT - 3}" text-anchor="end">{escape(across)}</text>')
    parts.append(f'<text class="soft" x="4" y="11">{escape(up)}</text>')
    for n, line in enumerate(lines.values()):
        colour = COLOURS[n % len(COLOURS)]
        places = [place(*point) for point in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        if dots:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in places]
    return _svg(parts, HEIGHT) + _legend(list(lines))


def _bars(runs: Sequence[Mapping[str, Any]], key: str, how: Callable[[float], str]) -> str:
    known = [(run["name"], run[key]) for run in runs if run[key] is not None]
    most = max((value for _, value in known), default=0.0)
    if not most:
        return ""
    parts = []
    for n, (name, value) in enumerate(known):
        y, wide = 6 + 26 * n, value / most * (WIDTH - 280)
        parts.append(f'<text x="160" y="{y + 14}" text-anchor="end">{escape(_short(name))}</text>')
        parts.append(f'<rect x="170" y="{y}" width="{wide:.1f}" height="18" fill="{COLOURS[n % len(COLOURS)]}"/>')
        parts.append(f'<text x="{178 + wide:.1f}" y="{y + 14}">{escape(how(value))}</text>')
    return _svg(parts, 26 * len(known) + 8)


def _shares(runs: Sequence[Mapping[str, Any]]) -> str:
    kinds = list(dict.fromkeys(kind for run in runs for kind in run["time"]))
    parts = []
    for n, run in enumerate(runs):
        y, x = 6 + 26 * n, 170.0
        parts.append(f'<text x="160" y="{y + 14}" text-anchor="end">{escape(_short(run["name"]))}</text>')
        for k, kind in enumerate(kinds):
            wide = run["time"].get(kind, 0.0) * (WIDTH - 190)
            title = f"<title>{escape(kind)} {run['time'].get(kind, 0.0):.1%}</title>"
            colour = COLOURS[k % len(COLOURS)]
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="18" fill="{colour}">{title}</rect>')
            x += wide
    return _svg(parts, 26 * len(runs) + 8) + _legend(kinds)


def _svg(parts: Sequence[str], height: int) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">{"".join(parts)}</svg>'


def _legend(names: Sequence[str]) -> str:
    marks = (f'<span style="color:{COLOURS[n % len(COLOURS)]}">&#9632;</span> {escape(x)}' for n, x in enumerate(names))
    return f'<p class="note">{" &nbsp; ".join(marks)}</p>'


def _short(name: str) -> str:
    return name if len(name) <= 22 else f"...{name[-19:]}"
