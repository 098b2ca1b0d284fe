"""The business figures of a log of shown lists, and of a ranking had it been shown in their place.

    LOG, RUN, CATALOGUE -> judge_log -> the JSON answer of `litchi evaluate --log`

`ctr` and `conversion` are clicks and conversions for each shown item. Those of the log are means; those of a ranking
are estimated (estimates.py), and how either spreads over the catalogue is counted (exposure.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from litchi.errors import DataError
from litchi.evaluate.click_log import ShownList, read_catalogue, read_click_log
from litchi.evaluate.estimates import CLIP, RESAMPLES, Estimate, Slots, estimate, find_slots, intervals
from litchi.evaluate.exposure import Ranking, measure_exposure
from litchi.evaluate.ranking import count_of, some_of
from litchi.evaluate.trec import read_run

PLACES = 10  # of a list that count
FEW = 100  # effective slots below which intervals are not to be trusted


def measure_log(log: str, run: str | None = None, catalogue: str | None = None, *, k: int = PLACES) -> dict[str, Any]:
    """The JSON answer of `litchi evaluate --log LOG [--run RUN] [--catalogue FILE]`."""
    items = None if catalogue is None else read_catalogue(catalogue)
    return judge_log(read_click_log(log), None if run is None else read_run(run), items, k=k)


def judge_log(
    lists: Sequence[ShownList],
    run: Mapping[str, Mapping[str, float]] | None = None,
    catalogue: Collection[str] | None = None,
    *,
    k: int = PLACES,
    clip: float = CLIP,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> dict[str, Any]:
    """Measure a log, and the ranking of a run.

    Args:
        lists: the log.
        run: query -> document -> score; None: only the log's own figures.
        catalogue: all items there are; None: those of log and run.
        k: places that count.

    Raises:
        DataError: log and run have no query in common, or an item is not in the catalogue.
    """
    kept = (ShownList(one.query_id, tuple(item for item in one.items if item.position <= k)) for one in lists)
    lists = [one for one in kept if one.items]
    if not lists:
        raise DataError(f"the log shows nothing at places 1 to {k}", remedy="Count positions from 1")
    shown = Counter(item.doc_id for one in lists for item in one.items)
    clicks = Counter(item.doc_id for one in lists for item in one.items if item.click)
    known = {*shown, *(document for scores in (run or {}).values() for document in scores)}
    warnings = []
    if catalogue is None:
        many = count_of(len(known), "item", "items")
        warnings.append(f"no catalogue is given: the {many} of log and run stand for it")
    elif odd := sorted(known.difference(catalogue)):
        found = f"{count_of(len(odd), 'item is', 'items are')} not in the catalogue"
        raise DataError(found, where=some_of(odd), remedy="Give the catalogue that log and run are of")
    items = catalogue or known
    own = find_slots(lists, {one.query_id: Ranking.of({}) for one in lists})
    report: dict[str, Any] = {
        "lists": len(lists),
        "queries": len({one.query_id for one in lists}),
        "k": k,
        "logged": {name: _mean(own, name, seed, resamples).to_json() for name in own.rewards},
        "by_place": {name: _by_place(own, name) for name in own.rewards},
        "exposure": {"logged": measure_exposure(shown, clicks, items)},
    }
    if run is not None:
        left = sorted({one.query_id for one in lists if one.query_id not in run})
        lists = [one for one in lists if one.query_id in run]
        if not lists:
            raise DataError("log and run have no query in common", remedy="Check that both use the same query ids.")
        if left:
            many = count_of(len(left), "query", "queries")
            warnings.append(f"{many} of the log not in the run, in none of its figures: {some_of(left)}")
        rankings = {one.query_id: Ranking.of(run[one.query_id]) for one in lists}
        report["exposure"]["ranking"] = measure_exposure(_exposure(lists, rankings, k), clicks, items)
        slots = find_slots(lists, rankings)
        report["effective_slots"] = slots.effective
        report["estimates"] = {
            reward: {
                name: found.to_json()
                for name, found in estimate(slots, reward, clip=clip, seed=seed, resamples=resamples).items()
            }
            for reward in slots.rewards
        }
        if 0 < slots.effective < FEW:
            warnings.append(f"only {slots.effective:.0f} effective slots: the intervals may be too narrow")
    return report | _by_name(report) | {"warnings": warnings}


def _mean(slots: Slots, reward: str, seed: int, resamples: int) -> Estimate:
    columns = {"r": slots.rewards[reward], "slots": np.ones(len(slots.place))}
    formulas = {"mean": (lambda s: s["r"] / s["slots"], None)}
    return intervals(slots.query, columns, formulas, seed=seed, resamples=resamples)["mean"]


def _by_place(slots: Slots, reward: str) -> dict[str, float]:
    places = map(int, np.unique(slots.place))
    return {str(place): float(slots.rewards[reward][slots.place == place].mean()) for place in places}


def _exposure(lists: Sequence[ShownList], rankings: Mapping[str, Ranking], k: int) -> dict[str, float]:
    """How often the ranking would have shown each item, once for each list of the log."""
    found: dict[str, float] = {}
    for query, times in Counter(one.query_id for one in lists).items():
        for document, chance in rankings[query].exposure(k).items():
            found[document] = found.get(document, 0.0) + times * chance
    return found


def _by_name(report: Mapping[str, Any]) -> dict[str, Any]:
    """All figures that are known under names of their own, as other reports have them: metrics and intervals."""
    metrics: dict[str, float] = {}
    spans: dict[str, list[float]] = {}
    estimates = [(name, "logged", found) for name, found in report["logged"].items()]
    for name, by_kind in report.get("estimates", {}).items():
        estimates += [(name, kind, found) for kind, found in by_kind.items()]
    for name, kind, found in estimates:
        if found["value"] is not None:
            metrics[f"{name}_{kind}"] = found["value"]
            if found["low"] is not None:
                spans[f"{name}_{kind}"] = [found["low"], found["high"]]
    for name, value in report["exposure"].get("ranking", report["exposure"]["logged"]).items():
        metrics[f"{name}@{report['k']}"] = value
    return {"metrics": metrics, "intervals": spans}


def format_log(report: Mapping[str, Any]) -> str:
    """The answer for people."""
    lines = [f"{report['lists']:,} lists of {report['queries']:,} queries, places 1 to {report['k']}"]
    for name, found in report["logged"].items():
        lines.append(f"{name} of the log {_say(found)}")
        lines.append("  by place " + "  ".join(f"{k}: {v:.4f}" for k, v in report["by_place"][name].items()))
    for name, by_kind in report.get("estimates", {}).items():
        lines.append(f"{name} of the ranking, {report['effective_slots']:.0f} effective slots")
        lines += [f"  {kind:<12} {_say(found)}" for kind, found in by_kind.items()]
    for whose, figures in report["exposure"].items():
        lines.append(f"{whose}: " + "  ".join(f"{name}@{report['k']} {value:.4f}" for name, value in figures.items()))
    return "\n".join([*lines, *(f"warning: {text}" for text in report["warnings"])])


def _say(found: Mapping[str, Any]) -> str:
    if found["value"] is None:
        return f"not identifiable: {found['why']}"
    interval = "" if found["low"] is None else f"  [{found['low']:.4f}, {found['high']:.4f}]"
    return f"{found['value']:.4f}{interval}"
