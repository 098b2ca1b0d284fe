"""Ranking metrics that do not depend on how a sort happens to break ties.

Libraries place tied documents by position or by name, so a head that gives every document the same score looks
perfect or hopeless by accident. Here a metric is its mean over all orders of the tied documents, in closed form:
McSherry and Najork, "Computing Information Retrieval Performance Measures Efficiently in the Presence of Tied
Scores", ECIR 2008. Without ties every value is trec_eval's.

A document is relevant when its relevance is above 0; a negative grade counts as 0, as in trec_eval.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from litchi.errors import DataError, UsageError

Array = np.ndarray[Any, np.dtype[Any]]

DEFAULT_METRICS = ("mrr@10", "ndcg@10", "recall@10", "hit@1", "map")
RESAMPLES = 1000
CONSTANT_QUERIES = 10  # fewer queries may well have equal scores by chance
NAMED = 5  # how many queries a warning names


@dataclass(frozen=True, eq=False)
class ScoredGroup:
    """A query with its documents, in any order. `slices` holds the fields to report on separately.

    `missing_relevance` are the grades of judged documents without a score: ranked below everything, never retrieved,
    they only raise what recall, ndcg and map divide by.
    """

    query_id: str
    doc_ids: Sequence[str]
    scores: Sequence[float] | Array
    relevance: Sequence[float] | Array
    slices: Mapping[str, object] = field(default_factory=dict)
    missing_relevance: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class RankingReport:
    """What an evaluation found. Means and intervals are over `queries`, those with a relevant document.

    `values[i, j]` is metric j, in the order of `metrics`, of the query `query_ids[i]`. `unjudged` queries have no
    relevant document and are in none of the figures. `tie_rate` is the fraction of queries in which a tie leaves
    open whether a relevant or a non-relevant document comes first.
    """

    queries: int
    unjudged: int
    tie_rate: float
    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    slices: dict[str, dict[str, dict[str, Any]]]
    warnings: list[str]
    query_ids: tuple[str, ...]
    values: Array

    def to_json(self) -> dict[str, Any]:
        """The answer of `litchi evaluate`: plain numbers, lists and dicts."""
        return {
            "queries": self.queries,
            "unjudged": self.unjudged,
            "tie_rate": self.tie_rate,
            "metrics": self.metrics,
            "intervals": {name: list(interval) for name, interval in self.intervals.items()},
            "slices": self.slices,
            "warnings": self.warnings,
        }


@dataclass(frozen=True)
class Difference:
    """Mean over queries of (second report - first report), with its 95 % interval."""

    difference: float
    low: float
    high: float
    queries: int


def ranking_metrics(
    groups: Iterable[ScoredGroup], metrics: Sequence[str] | None = None, *, notes: Sequence[str] = ()
) -> RankingReport:
    """Measure a ranking.

    Args:
        groups: one per query.
        metrics: `mrr`, `ndcg`, `map` (each also with `@k`), `recall@k`, `hit@k`, `precision@k`.
            ndcg has trec_eval's linear gain, relevance / log2(rank + 1), not 2^relevance - 1.
            None: DEFAULT_METRICS.
        notes: warnings of the reader, put before those of the report.

    A query without a relevant document says nothing about a ranking: it is counted in `unjudged` and left out of the
    means (trec_eval would count it as 0).

    Raises:
        DataError: a score or relevance that is not finite, a repeated query or document, nothing to measure.
        UsageError: an unknown metric.
    """
    names = tuple(dict.fromkeys(DEFAULT_METRICS if metrics is None else metrics))
    measures = [_parse_metric(name) for name in names]
    groups = list(groups)
    _check_unique([group.query_id for group in groups], "query")
    expected = [_expect(group) for group in groups]
    judged = [(group, e) for group, e in zip(groups, expected, strict=True) if e.total]
    if not judged:
        raise DataError(
            "no query has a relevant document",
            why=f"{len(groups)} queries were read and none has a relevance above 0",
            remedy="Check the labels, or that queries and judgements use the same ids.",
        )
    values = np.array([[measure(e, k) for measure, k in measures] for _, e in judged]).reshape(len(judged), len(names))
    low, high = _interval(values)
    return RankingReport(
        queries=len(judged),
        unjudged=len(groups) - len(judged),
        tie_rate=float(np.mean([e.undecided for _, e in judged])),
        metrics=_named(names, values.mean(axis=0)),
        intervals={name: (float(a), float(b)) for name, a, b in zip(names, low, high, strict=True)},
        slices=_slices([group for group, _ in judged], names, values),
        warnings=[*notes, *_warnings(groups, expected)],
        query_ids=tuple(group.query_id for group, _ in judged),
        values=values,
    )


def paired_difference(a: RankingReport, b: RankingReport) -> dict[str, Difference]:
    """Compare two reports on the same queries, query by query: b - a for each metric both have (base, then tuned).

    Pairing takes out how hard the queries are, so the interval is far narrower than two intervals side by side.

    Raises:
        DataError: the reports are not of the same queries.
        UsageError: they have no metric in common.
    """
    odd = sorted(set(a.query_ids) ^ set(b.query_ids))
    if odd:
        raise DataError(
            f"{len(odd)} queries are in one report only",
            where=some_of(odd),
            why="a paired comparison needs the same queries in both",
            remedy="Evaluate both on the same data.",
        )
    first, second = list(a.metrics), list(b.metrics)
    names = [name for name in first if name in second]
    if not names:
        raise UsageError(
            "the reports have no metric in common", why=f"one has {', '.join(first)}, the other {', '.join(second)}"
        )
    row = {query: i for i, query in enumerate(b.query_ids)}
    tuned = b.values[[row[query] for query in a.query_ids]][:, [second.index(name) for name in names]]
    change = tuned - a.values[:, [first.index(name) for name in names]]
    columns = zip(names, change.mean(axis=0), *_interval(change), strict=True)
    return {name: Difference(float(mean), float(low), float(high), len(change)) for name, mean, low, high in columns}


def chance_mrr(candidates: int, k: int | None = 10, relevant: int = 1) -> float:
    """Expected mrr@k of a random order of `candidates` documents, `relevant` of them relevant (n=10, r=1: 0.2929)."""
    if not 1 <= relevant <= candidates:
        raise ValueError(f"relevant must be in 1..{candidates}, got {relevant}")
    labels = [1.0] * relevant + [0.0] * (candidates - relevant)
    return _mrr(_expect(ScoredGroup("chance", [str(i) for i in range(candidates)], [0.0] * candidates, labels)), k)


# One query: what is expected at each rank, and the metrics read from that.


@dataclass(frozen=True, eq=False)
class _Expected:
    """A ranked query, averaged over all orders of its tied documents. Arrays run over the ranks 1..n."""

    gain: Array  # relevance at the rank
    relevant: Array  # probability that the document at the rank is relevant
    precision: Array  # (relevant at the rank) x (precision down to the rank)
    none_above: Array  # [n + 1]: probability that ranks 1..t hold no relevant document
    ideal: Array  # all grades, best first, with those of documents not retrieved
    total: int  # relevant documents, with those not retrieved
    undecided: bool
    constant: bool  # two documents or more, and all scores are equal


def _expect(group: ScoredGroup) -> _Expected:
    """Average over the orders of ties.

    A block of n tied documents, r of them relevant, below b relevant ones: each of its places holds a relevant
    document with probability r / n; given that, i places further up hold i (r - 1) / (n - 1) relevant ones on average
    and, without that condition, none with probability prod_{j < i} (n - r - j) / (n - j).
    """
    scores, grades = _checked(group)
    _, block, sizes = np.unique(-scores, return_inverse=True, return_counts=True)  # best score first
    hits = np.bincount(block, weights=grades > 0, minlength=len(sizes))
    at = np.repeat(np.arange(len(sizes)), sizes)  # the block of each rank
    n, r = sizes[at], hits[at]
    rank = np.arange(1, len(scores) + 1)
    place = rank - 1 - (np.cumsum(sizes) - sizes)[at]  # in the block, from 0
    above = (np.cumsum(hits) - hits)[at] + place * (r - 1) / np.maximum(n - 1, 1)
    ideal = np.sort(np.maximum([*grades, *group.missing_relevance], 0.0))[::-1]
    return _Expected(
        gain=(np.bincount(block, weights=grades, minlength=len(sizes)) / sizes)[at],
        relevant=r / n,
        precision=r / n * (above + 1) / rank,
        none_above=np.cumprod([1.0, *(np.maximum(n - r - place, 0) / (n - place))]),
        ideal=ideal,
        total=int((ideal > 0).sum()),
        undecided=bool(((hits > 0) & (hits < sizes)).any()),
        constant=len(scores) > 1 and len(sizes) == 1,
    )


def _checked(group: ScoredGroup) -> tuple[Array, Array]:
    """Scores and grades as float64, which holds every narrower float exactly, so that no tie appears or goes."""
    scores, grades = np.asarray(group.scores), np.asarray(group.relevance, dtype=np.float64)
    if not len(group.doc_ids) == len(scores) == len(grades):
        raise ValueError(f"{len(group.doc_ids)} documents, {len(scores)} scores, {len(grades)} labels")
    _check_unique(group.doc_ids, "document", where=f"query {group.query_id}")
    bad = np.flatnonzero(~np.isfinite(scores))
    if len(bad):
        raise DataError(
            f"score is {scores[bad[0]]}",
            where=f"query {group.query_id}, document {group.doc_ids[bad[0]]}, {scores.dtype}",
            why="an overflow in fp16 gives this",
            remedy="Use bf16 or fp32.",
        )
    if not np.isfinite([*grades, *group.missing_relevance]).all():
        raise DataError("a relevance is not finite", where=f"query {group.query_id}", remedy="Correct the label.")
    return scores.astype(np.float64), np.maximum(grades, 0.0)


def _check_unique(ids: Sequence[str], kind: str, where: str | None = None) -> None:
    if len(set(ids)) < len(ids):
        seen: set[str] = set()
        again = next(i for i in ids if i in seen or seen.add(i))  # type: ignore[func-returns-value]
        raise DataError(f"{kind} {again} appears twice", where=where, remedy=f"Give every {kind} an id of its own.")


def _mrr(e: _Expected, k: int | None) -> float:
    first = e.none_above[:-1] - e.none_above[1:]  # probability that the first relevant document stands there
    return float((first / np.arange(1, len(first) + 1))[:k].sum())


def _ndcg(e: _Expected, k: int | None) -> float:
    discount = 1 / np.log2(np.arange(2, len(e.ideal) + 2))
    return float((e.gain * discount[: len(e.gain)])[:k].sum() / (e.ideal * discount)[:k].sum())


def _recall(e: _Expected, k: int | None) -> float:
    return float(e.relevant[:k].sum() / e.total)


def _hit(e: _Expected, k: int | None) -> float:
    return float(1 - e.none_above[: None if k is None else k + 1][-1])


def _precision(e: _Expected, k: int | None) -> float:
    return float(e.relevant[:k].sum() / (k or 1))  # by k also where fewer documents were ranked, as in trec_eval


def _map(e: _Expected, k: int | None) -> float:
    return float(e.precision[:k].sum() / e.total)  # by all relevant documents, also with a cut, as in trec_eval


Measure = Callable[[_Expected, int | None], float]
_WHOLE: dict[str, Measure] = {"mrr": _mrr, "ndcg": _ndcg, "map": _map}  # with or without @k
_CUT: dict[str, Measure] = {"recall": _recall, "hit": _hit, "precision": _precision}  # with @k


def _parse_metric(name: str) -> tuple[Measure, int | None]:
    kind, _, cut = name.partition("@")
    measure = {**_WHOLE, **_CUT}.get(kind)
    if measure and re.fullmatch(r"[1-9][0-9]*", cut):
        return measure, int(cut)
    if kind in _WHOLE and name == kind:
        return _WHOLE[kind], None
    near = difflib.get_close_matches(kind.lower(), [*_WHOLE, *_CUT], n=1)
    raise UsageError(
        f"unknown metric {name!r}",
        why=f"the metrics are {', '.join(_WHOLE)}, each also with @k, and {'@k, '.join(_CUT)}@k (k = 1, 2, ...)",
        remedy=f"Did you mean {near[0]}@{cut if re.fullmatch('[1-9][0-9]*', cut) else 10}?" if near else None,
    )


# Many queries.


def _interval(values: Array, seed: int = 0) -> tuple[Array, Array]:
    """95 % interval of the mean of each column: percentiles over RESAMPLES bootstrap samples of the rows."""
    rng, n = np.random.default_rng(seed), len(values)
    # How often each row is drawn, one resample at a time: n numbers in memory instead of n x RESAMPLES.
    means = np.array([np.bincount(rng.integers(n, size=n), minlength=n) @ values for _ in range(RESAMPLES)]) / n
    low, high = np.percentile(means, [2.5, 97.5], axis=0)
    return low, high


def _slices(groups: Sequence[ScoredGroup], names: Sequence[str], values: Array) -> dict[str, dict[str, dict[str, Any]]]:
    rows: dict[str, dict[str, list[int]]] = {}
    for i, group in enumerate(groups):
        for name, value in group.slices.items():
            word = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            rows.setdefault(name, {}).setdefault(word, []).append(i)
    return {
        name: {
            word: {"queries": len(at), "metrics": _named(names, values[at].mean(axis=0))}
            for word, at in sorted(parts.items())
        }
        for name, parts in rows.items()
    }


def _named(names: Sequence[str], values: Array) -> dict[str, float]:
    return dict(zip(names, map(float, values), strict=True))


def _warnings(groups: Sequence[ScoredGroup], expected: Sequence[_Expected]) -> list[str]:
    found = []
    unjudged = [group.query_id for group, e in zip(groups, expected, strict=True) if not e.total]
    if unjudged:
        count = count_of(len(unjudged), "query has", "queries have")
        found.append(f"{count} no relevant document, left out of the means: {some_of(unjudged)}")
    ranked = [(group, e) for group, e in zip(groups, expected, strict=True) if len(e.gain) > 1]
    if len(ranked) >= CONSTANT_QUERIES and all(e.constant for _, e in ranked):
        same = len({float(group.scores[0]) for group, _ in ranked}) == 1
        what = "every score is equal" if same else "every score is equal within its query"
        found.append(f"{what}: an untrained or unloaded head?")
    return found


def count_of(n: int, one: str, many: str) -> str:
    """`1 query`, `2 queries`: for warnings."""
    return f"{n} {one if n == 1 else many}"


def some_of(ids: Sequence[str]) -> str:
    """The first NAMED ids: for warnings."""
    return ", ".join(ids[:NAMED]) + (", ..." if len(ids) > NAMED else "")
