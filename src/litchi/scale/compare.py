"""`litchi compare`: what runs cost and what they reached, side by side, from what they wrote while they ran.

    run folders -> read_run -> compare_runs (pure) -> the JSON answer -> Markdown, or compare_page's HTML

Times are those of the steps: waiting for data and computing. Start, evaluation, saving and export are not in them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from litchi.config.sections import SAME_NUMBERS, under
from litchi.errors import UsageError
from litchi.train.durable import format_bytes
from litchi.train.metrics import format_time, read_lines

SILENT = ("output", "track")  # settings whose differences mean nothing here
WHOLE = ("step_s", "data_wait_s", "cpu_s", "tokens_per_s")  # what else ends in `_s` is a part of a step
SIZES = (2, 4, 8)  # times the largest number of ranks that was measured


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder tells it. `steps`: lines of metrics.jsonl; `starts`: (first step, ranks), in order;
    `rows`: of each data file with its weight, None where no checkpoint says; `length`: epochs of a run that is done;
    `forecast`: planned and measured, of the last start."""

    name: str
    settings: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    starts: Sequence[tuple[int, int]]
    device: str | None
    rows: Sequence[tuple[int, float]] | None
    length: float | None
    metrics: Mapping[str, float]
    intervals: Mapping[str, Sequence[float]]
    forecast: Mapping[str, Any] | None = None  # and what came of it

    @cached_property
    def seconds(self) -> list[float]:
        """Of each step."""
        return [line["step_s"] + line["data_wait_s"] for line in self.steps]

    @property
    def ranks(self) -> int:
        """Of its last start."""
        return self.starts[-1][1] if self.starts else len(self.steps[-1]["peak_bytes"])

    @property
    def rank_hours(self) -> float:
        """Each step counts for the ranks it was taken on."""
        total = 0.0
        for line, seconds in zip(self.steps, self.seconds, strict=True):
            there = [ranks for first, ranks in self.starts if first <= line["step"]]
            total += seconds * (there[-1] if there else self.ranks)
        return total / 3600

    @property
    def steps_per_epoch(self) -> int | None:
        """By the rows of its data; else by an epoch that is over; else by the length of a run that is done."""
        batch = self.settings.get("train.global_batch_size")
        if self.rows and batch:
            return math.ceil(sum(max(1, round(n * weight)) if n else 0 for n, weight in self.rows) / batch)
        first = [line for line in self.steps if line["epoch"] == self.steps[0]["epoch"]]
        if len(first) < len(self.steps):
            return len(first)
        return round(len(self.steps) / self.length) if self.length else None

    def epoch(self) -> tuple[float | None, str]:
        """Seconds of an epoch, and how they are known: the mean of whole epochs, else by the mean step."""
        whole = self.steps_per_epoch
        if whole is None:
            return None, "unknown: no epoch is over, and no checkpoint tells the number of rows"
        of: dict[int, list[float]] = {}
        for line, seconds in zip(self.steps, self.seconds, strict=True):
            of.setdefault(line["epoch"], []).append(seconds)
        sums = [sum(times) for times in of.values() if len(times) == whole]
        if sums:
            return sum(sums) / len(sums), f"measured, {len(sums)} epoch{'s' * (len(sums) > 1)}"
        return sum(self.seconds) / len(self.steps) * whole, f"estimated from {len(self.steps)} of {whole} steps"


# ---------------------------------------------------------------------------------------------------------- reading


def read_runs(folders: Sequence[str]) -> list[RunRecord]:
    """Read folders; runs of one name are called by their paths."""
    names = [Path(folder).resolve().name for folder in folders]
    return [
        read_run(Path(folder), name if names.count(name) == 1 else folder)
        for folder, name in zip(folders, names, strict=True)
    ]


def read_run(folder: Path, name: str) -> RunRecord:
    """Read what a run wrote. UsageError where it has taken no step."""
    steps = read_lines(folder / "metrics.jsonl")
    if not steps:
        raise UsageError(
            f"{folder} is no run with steps",
            why="it has no metrics.jsonl with lines" if folder.is_dir() else "there is no such folder",
            remedy="Give folders that litchi train wrote (output=)",
        )
    file = folder / "config.yaml"
    settings = _flat(yaml.safe_load(file.read_text(encoding="utf-8")) or {}) if file.is_file() else {}
    events = read_lines(folder / "events.jsonl")
    starts = [entry for entry in events if entry["event"] == "start"]
    forecasts = [entry for entry in events if entry["event"] == "measured"]
    evaluations = {line["name"]: line for line in read_lines(folder / "eval.jsonl")}  # of each set the last
    one = len(evaluations) == 1
    metrics: dict[str, float] = {}
    intervals: dict[str, Sequence[float]] = {}
    for title, found in (*evaluations.items(), *_reports(folder)):
        prefix = "" if one and title in evaluations else f"{title}/"
        metrics |= {prefix + key: value for key, value in found["metrics"].items()}
        intervals |= {prefix + key: list(value) for key, value in found.get("intervals", {}).items()}
    return RunRecord(
        name=name,
        settings=settings,
        steps=steps,
        starts=[(entry["step"], entry["ranks"]) for entry in starts],
        device=starts[-1]["device"] if starts else None,
        rows=_read_rows(folder, settings),
        length=settings.get("train.epochs") if (folder / "done.json").is_file() else None,
        metrics=metrics,
        intervals=intervals,
        forecast={k: v for k, v in forecasts[-1].items() if k not in ("event", "step")} if forecasts else None,
    )


def _reports(folder: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """Answers of `litchi evaluate --json` that lie in the run's folder."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    for path in sorted(folder.glob("*.json")):
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue
        if isinstance(report, dict) and isinstance(report.get("metrics"), dict):
            found.append((path.stem, report))
    return found


def _read_rows(folder: Path, settings: Mapping[str, Any]) -> list[tuple[int, float]] | None:
    """Rows and weights of the data files, as the newest checkpoint has them."""
    manifests = sorted((folder / "checkpoints").glob("step-*/manifest.json"))
    if not manifests:
        return None
    sources = json.loads(manifests[-1].read_text(encoding="utf-8"))["origin"]["data"]
    weights = [source.get("weight", 1.0) for source in settings.get("data.train") or []]
    return [(source["rows"], weight) for source, weight in zip(sources, weights, strict=True)]


def _flat(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out |= _flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
    return out


# -------------------------------------------------------------------------------------------------------- comparing


def compare_runs(runs: Sequence[RunRecord], *, price: float) -> dict[str, Any]:
    """The JSON answer of `compare`. Pure.

    Args:
        runs: the first is what the others are compared with.
        price: of a rank (a GPU) for an hour.
    """
    first = runs[0]
    keys = sorted({key for run in runs for key in run.settings if not under(key, SILENT)})
    differ = [key for key in keys if any(run.settings.get(key) != first.settings.get(key) for run in runs)]
    base_s, _ = first.epoch()
    out = []
    for run in runs:
        epoch_s, basis = run.epoch()
        speedup = base_s / epoch_s if epoch_s and base_s else None
        out.append(
            {
                "name": run.name,
                "ranks": run.ranks,
                "device": run.device,
                "steps": len(run.steps),
                "epoch_s": epoch_s,
                "epoch_basis": basis,
                "speedup": speedup,
                "efficiency": None if speedup is None else speedup * first.ranks / run.ranks,
                "metrics": dict(run.metrics),
                "intervals": dict(run.intervals),
                "peak_bytes": max(max(line["peak_bytes"]) for line in run.steps),
                "tokens_per_s": sum(line["tokens"] for line in run.steps) / sum(run.seconds),
                "rank_hours": run.rank_hours,
                "cost": run.rank_hours * price,
                "epoch_cost": None if epoch_s is None else run.ranks * epoch_s / 3600 * price,
                "relative_cost": run.ranks * epoch_s / (first.ranks * base_s) if epoch_s and base_s else None,
                "time": split_time(run),
                "forecast": run.forecast,
                "settings": {key: run.settings.get(key) for key in differ},
            }
        )
    return {"price": price, "runs": out, "extrapolation": extrapolate(runs), "notes": list_notes(runs, differ)}


def split_time(run: RunRecord) -> dict[str, float]:
    """Shares of the time of the steps. `imbalance`: in which ranks wait for the one with most to compute, by planned
    cost; parts that metrics.jsonl measures stand beside it; `compute` is the rest."""
    total = sum(run.seconds)
    parts: dict[str, float] = {"data_wait": sum(line["data_wait_s"] for line in run.steps)}
    for line in run.steps:
        heaviest = max(line.get("balance_micro") or line.get("balance") or 1.0, 1.0)
        parts["imbalance"] = parts.get("imbalance", 0.0) + line["step_s"] * (1 - 1 / heaviest)
        for key, value in line.items():
            if key.endswith("_s") and key not in WHOLE and isinstance(value, int | float):
                parts[key[:-2]] = parts.get(key[:-2], 0.0) + value
    shares = {name: seconds / total for name, seconds in parts.items()}
    return shares | {"compute": max(0.0, 1.0 - sum(shares.values()))}


def extrapolate(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Time of an epoch on more ranks than were measured: a part that ranks share and one that stays, a + b / ranks,
    by least squares through the runs whose numbers are the first one's. One size gives the ideal: a = 0."""
    first = runs[0]
    known = [(run.ranks, time) for run in runs if _same_numbers(run, first) and (time := run.epoch()[0]) is not None]
    if not known:
        return {"points": [], "assumptions": ["no epoch is known, so nothing is extrapolated"]}
    sizes = sorted({ranks for ranks, _ in known})
    fixed, shared = fit_times(known)
    points = []
    for ranks in (max(sizes) * times for times in SIZES):
        epoch_s = fixed + shared / ranks
        points.append(
            {
                "ranks": ranks,
                "epoch_s": epoch_s,
                "speedup": known[0][1] / epoch_s,
                "relative_cost": ranks * epoch_s / (known[0][0] * known[0][1]),
            }
        )
    measured = f"epoch_s = {fixed:.4g} + {shared:.4g} / ranks, through {len(known)} runs on {sizes} ranks"
    if len(sizes) == 1:
        measured = f"only {sizes[0]} rank(s) were measured: perfect scaling is assumed, the best there can be"
    return {
        "points": points,
        "assumptions": [
            measured,
            "the part that does not shrink (waiting, start of kernels, communication) stays as long as it is",
            "the same kind of machine and link; more ranks than one machine has cross a network that was not measured",
            "the global batch has work for all ranks, and data comes as fast as it is asked for",
        ],
    }


def fit_times(known: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """a, b >= 0 with seconds = a + b / ranks, by least squares."""
    xs, ys = [1 / ranks for ranks, _ in known], [time for _, time in known]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((one - x) ** 2 for one in xs)
    slope = sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / spread if spread > 1e-12 else 0.0
    fixed = y - slope * x
    if spread <= 1e-12 or fixed < 0:  # one size, or better than perfect: no fixed part
        return 0.0, sum(a * b for a, b in zip(xs, ys, strict=True)) / sum(a * a for a in xs)
    return (fixed, slope) if slope > 0 else (y, 0.0)


def _same_numbers(run: RunRecord, other: RunRecord) -> bool:
    keys = {key for key in (*run.settings, *other.settings) if not under(key, SAME_NUMBERS)}
    return all(run.settings.get(key) == other.settings.get(key) for key in keys)


def list_notes(runs: Sequence[RunRecord], differ: Sequence[str]) -> list[str]:
    """What a reader has to know before comparing."""
    first = runs[0]
    notes = ["times are of the steps; start, evaluation, saving and export are not in them"]
    numbers = [key for key in differ if not under(key, SAME_NUMBERS)]
    if numbers:
        notes.append(f"settings that change the numbers differ: {', '.join(numbers)}")
    if any(run.rows != first.rows for run in runs):
        notes.append("the data differ, or are not known of all: an epoch is not the same work")
    for run in runs:
        if len({ranks for _, ranks in run.starts}) > 1:
            notes.append(f"{run.name} went on with another number of ranks; its speed-up counts the last")
        skipped = sum(bool(line.get("skipped")) for line in run.steps)
        if skipped:
            notes.append(f"{run.name}: {skipped} updates were left out")
    return notes


# -------------------------------------------------------------------------------------------------------- for people


def format_answer(answer: Mapping[str, Any]) -> str:
    """The answer as Markdown."""
    runs = answer["runs"]
    head = ("run", "ranks", "epoch", "speed-up", "efficiency", "peak memory", "rank hours", "cost", "cost of an epoch")
    rows = [(*head, "relative cost")]
    for run in runs:
        rows.append(
            (
                run["name"],
                str(run["ranks"]),
                say(run["epoch_s"], format_time) + ("" if run["epoch_basis"].startswith("measured") else " *"),
                say(run["speedup"], "{:.2f}x".format),
                say(run["efficiency"], "{:.0%}".format),
                format_bytes(run["peak_bytes"]),
                f"{run['rank_hours']:.3g}",
                f"{run['cost']:.2f}",
                say(run["epoch_cost"], "{:.2f}".format),
                say(run["relative_cost"], "{:.0%}".format),
            )
        )
    parts = [_table(rows)]
    starred = [f"\\* {run['name']}: {run['epoch_basis']}" for run in runs if "measured" not in run["epoch_basis"]]
    parts += ["\n".join(starred)] if starred else []
    names = list(dict.fromkeys(name for run in runs for name in run["metrics"]))
    if names:
        metrics = [("metric", *(run["name"] for run in runs))]
        parts.append(_table([*metrics, *((n, *(figure(r, n) for r in runs)) for n in names)]))
    planned = forecast_rows(runs)
    parts += [_table(planned)] if planned else []
    kinds = list(dict.fromkeys(kind for run in runs for kind in run["time"]))
    time = [("share of the time", *(run["name"] for run in runs))]
    parts.append(_table([*time, *((k, *(f"{r['time'].get(k, 0.0):.1%}" for r in runs)) for k in kinds)]))
    if runs[0]["settings"]:
        settings = [("setting", *(run["name"] for run in runs))]
        parts.append(_table([*settings, *((k, *(str(r["settings"][k]) for r in runs)) for k in runs[0]["settings"])]))
    more = [("ranks", "epoch", "speed-up", "relative cost")]
    for point in answer["extrapolation"]["points"]:
        cells = format_time(point["epoch_s"]), f"{point['speedup']:.2f}x", f"{point['relative_cost']:.0%}"
        more.append((str(point["ranks"]), *cells))
    parts.append("Extrapolated, not measured:\n\n" + _table(more) if len(more) > 1 else "Nothing is extrapolated.")
    parts.append("\n".join(f"- {text}" for text in (*answer["extrapolation"]["assumptions"], *answer["notes"])))
    return "\n\n".join(parts)


def write_text(path: Path, text: str) -> None:
    """Write a report; UsageError where it cannot be."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written", why=error.strerror, remedy="Name a file in a folder that is there"
        ) from error


def say(value: float | None, how: Any) -> str:
    """A figure, or that it is not known."""
    return "?" if value is None else how(value)


def forecast_rows(runs: Sequence[Mapping[str, Any]]) -> list[Sequence[str]]:
    """A table of what was planned beside what was measured, of the runs that have both; none: no rows."""
    head = ("run", "memory planned", "measured", "off", "step planned", "measured", "off")
    rows = []
    for run in runs:
        if (found := run["forecast"]) is not None:
            memory = format_bytes(found["planned_bytes"]), format_bytes(max(found["peak_bytes"]))
            times = say(found["planned_step_s"], "{:.2f} s".format), f"{found['step_s']:.2f} s"
            off = say(found["time_off"], "{:+.0%}".format)
            rows.append((run["name"], *memory, f"{found['memory_off']:+.0%}", *times, off))
    return [head, *rows] if rows else []


def figure(run: Mapping[str, Any], name: str) -> str:
    """A metric with its interval."""
    if name not in run["metrics"]:
        return ""
    low_high = "  [{:.4f}, {:.4f}]".format(*run["intervals"][name]) if name in run["intervals"] else ""
    return f"{run['metrics'][name]:.4f}{low_high}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
