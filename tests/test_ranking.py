"""Ranking metrics against enumeration of all orders (ties) and against trec_eval (no ties)."""

import itertools
import json
import math
import subprocess
import sys
from fractions import Fraction

import ir_measures
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from litchi.errors import DataError, UsageError
from litchi.evaluate.ranking import DEFAULT_METRICS, ScoredGroup, chance_mrr, paired_difference, ranking_metrics

NAMES = ["mrr", "ndcg", "map"] + [
    f"{kind}@{k}" for kind in ("mrr", "ndcg", "map", "recall", "hit", "precision") for k in (1, 2, 3, 10)
]


def group(scores, relevance, query="q", **more):
    return ScoredGroup(query, [f"d{i}" for i in range(len(scores))], scores, relevance, **more)


def plain(name, grades, missing):
    """A metric of one strict order, by its definition."""
    kind, _, cut = name.partition("@")
    top = grades[: int(cut)] if cut else grades
    total = sum(g > 0 for g in [*grades, *missing])
    hits = [i for i, g in enumerate(top) if g > 0]
    ideal = sorted([*grades, *missing], reverse=True)[: int(cut) if cut else None]
    return {
        "mrr": lambda: 1 / (hits[0] + 1) if hits else 0,
        "ndcg": lambda: dcg(top) / dcg(ideal),
        "map": lambda: sum((n + 1) / (i + 1) for n, i in enumerate(hits)) / total,
        "recall": lambda: len(hits) / total,
        "hit": lambda: float(bool(hits)),
        "precision": lambda: len(hits) / int(cut),
    }[kind]()


def dcg(grades):
    return sum(max(g, 0) / math.log2(i + 2) for i, g in enumerate(grades))


def enumerated(name, scores, grades, missing):
    orders = [
        [grades[i] for i in order]
        for order in itertools.permutations(range(len(scores)))
        if all(scores[a] >= scores[b] for a, b in itertools.pairwise(order))
    ]
    return math.fsum(plain(name, order, missing) for order in orders) / len(orders)


@st.composite
def tied(draw):
    documents = draw(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([-1, 0, 0, 1, 2, 0.5])), max_size=6))
    missing = tuple(draw(st.lists(st.sampled_from([0, 1, 3]), max_size=2)))
    return [s for s, _ in documents], [g for _, g in documents], missing


@settings(max_examples=60, deadline=None)
@given(tied())
def test_ties_count_as_the_mean_over_all_orders(case):
    scores, grades, missing = case
    if not any(g > 0 for g in [*grades, *missing]):
        with pytest.raises(DataError, match="no query has a relevant document"):
            ranking_metrics([group(scores, grades, missing_relevance=missing)])
        return
    found = ranking_metrics([group(scores, grades, missing_relevance=missing)], NAMES).metrics
    for name in NAMES:
        assert found[name] == pytest.approx(enumerated(name, scores, grades, missing), abs=1e-12), name


def test_without_ties_the_values_are_those_of_trec_eval():
    rng = np.random.default_rng(1)
    groups, run, qrels = [], {}, {}
    for i in range(60):
        n = int(rng.integers(1, 25))
        scores, grades = rng.permutation(n).astype(float), rng.integers(0, 4, n)
        grades[rng.integers(n)] = 1
        groups.append(group(scores, grades, f"q{i}", missing_relevance=(2, 0)[: i % 3]))
        run[f"q{i}"] = {f"d{j}": s for j, s in enumerate(scores)}
        qrels[f"q{i}"] = {f"d{j}": int(g) for j, g in enumerate(grades)}
        qrels[f"q{i}"] |= {f"m{j}": g for j, g in enumerate(groups[-1].missing_relevance)}
    report = ranking_metrics(groups, NAMES)
    assert report.tie_rate == 0
    theirs = {"mrr": "RR", "ndcg": "nDCG", "map": "AP", "recall": "R", "hit": "Success", "precision": "P"}
    measures = {
        name: ir_measures.parse_measure(theirs[name.split("@")[0]] + name[len(name.split("@")[0]) :]) for name in NAMES
    }
    for row in ir_measures.iter_calc(list(measures.values()), qrels, run):
        name = next(name for name, measure in measures.items() if measure == row.measure)
        ours = report.values[report.query_ids.index(row.query_id), NAMES.index(name)]
        assert ours == pytest.approx(row.value, abs=1e-9), (name, row.query_id)


@pytest.mark.parametrize("size", [2, 8, 17, 32, 101])
@pytest.mark.parametrize("place", [0, -1])
def test_equal_scores_give_chance_wherever_the_positive_stands(size, place):
    relevance = [0.0] * size
    relevance[place] = 1.0
    report = ranking_metrics([group(np.zeros(size, np.float32), relevance)], ["mrr@10", "hit@1"])
    assert report.metrics["mrr@10"] == pytest.approx(sum(1 / r for r in range(1, min(size, 10) + 1)) / size, abs=1e-12)
    assert report.metrics["mrr@10"] == pytest.approx(chance_mrr(size), abs=1e-12)
    assert report.metrics["hit@1"] == pytest.approx(1 / size)
    assert report.tie_rate == 1


def test_chance_mrr_is_exact():
    assert round(chance_mrr(10), 4) == 0.2929
    assert round(chance_mrr(8), 4) == 0.3397
    assert chance_mrr(7, relevant=7) == 1
    n, r, k = 30, 3, 10
    first = [Fraction(math.comb(n - j, r - 1), math.comb(n, r)) for j in range(1, n - r + 2)]
    exact = sum(p / j for j, p in enumerate(first, 1) if j <= k)
    assert chance_mrr(n, k, r) == pytest.approx(float(exact), abs=1e-14)
    for relevant in (0, 5):
        with pytest.raises(ValueError):
            chance_mrr(4, relevant=relevant)


def test_the_order_of_documents_does_not_matter():
    rng = np.random.default_rng(0)
    scores, relevance = rng.integers(0, 4, 20).astype(np.float16), rng.integers(0, 3, 20)
    order = rng.permutation(20)
    a, b = (ranking_metrics([group(scores[i], relevance[i])], NAMES).metrics for i in (slice(None), order))
    assert a == pytest.approx(b, abs=1e-12)


def test_float32_scores_keep_their_order_and_their_ties():
    close = np.array([18.0, np.nextafter(np.float32(18), np.float32(19))], np.float32)
    assert ranking_metrics([group(close, [0, 1])], ["hit@1"]).metrics["hit@1"] == 1
    assert ranking_metrics([group(np.array([0.0, -0.0], np.float32), [0, 1])], ["hit@1"]).metrics["hit@1"] == 0.5


def test_tie_rate_counts_ties_between_relevant_and_not():
    groups = [
        group([1, 1, 0], [1, 0, 0], "undecided"),
        group([1, 0, 0], [1, 0, 0], "among the others"),
        group([1, 1, 0], [1, 2, 0], "among the relevant"),
        group([2, 1, 0], [1, 0, 0], "none"),
        group([1, 1, 1], [0, 0, 0], "unjudged"),
    ]
    report = ranking_metrics(groups)
    assert report.tie_rate == 0.25
    assert (report.queries, report.unjudged) == (4, 1)
    assert report.warnings == ["1 query has no relevant document, left out of the means: unjudged"]
    assert tuple(report.metrics) == DEFAULT_METRICS


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_an_error_with_its_document(value):
    scores = np.array([0.5, value, 0.1], np.float16)
    with pytest.raises(DataError) as error:
        ranking_metrics([group([1, 0], [1, 0], "fine"), group(scores, [1, 0, 0], "query 7")])
    for word in ("query 7", "d1", str(value), "float16", "fp16", "bf16"):
        assert word in error.value.line()


@pytest.mark.parametrize(
    "groups, words",
    [
        ([group([1, 0], [1, math.nan])], "relevance is not finite"),
        ([group([1, 0], [1, 0], missing_relevance=(math.inf,))], "relevance is not finite"),
        ([group([1], [1], "a"), group([1], [1], "a")], "query a appears twice"),
        ([ScoredGroup("a", ["x", "x"], [1, 2], [1, 0])], "document x appears twice"),
        ([], "no query"),
    ],
)
def test_bad_groups(groups, words):
    with pytest.raises(DataError, match=words):
        ranking_metrics(groups)


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="2 documents, 2 scores, 1 labels"):
        ranking_metrics([group([1, 2], [1])])


@pytest.mark.parametrize(
    "name, near", [("mmr@10", "mrr@10"), ("recall", "recall@10"), ("MRR@5", "mrr@5"), ("hit@0", "hit@10"), ("x", "")]
)
def test_an_unknown_metric_names_the_nearest(name, near):
    with pytest.raises(UsageError) as error:
        ranking_metrics([group([1], [1])], [name])
    assert near in (error.value.remedy or "")


def test_constant_scores_are_warned_of_from_ten_queries_on():
    def warned(count, scores):
        return ranking_metrics([group(scores(i), [1, 0], f"q{i}") for i in range(count)]).warnings

    assert warned(10, lambda i: [0.5, 0.5]) == ["every score is equal: an untrained or unloaded head?"]
    assert warned(10, lambda i: [i, i]) == ["every score is equal within its query: an untrained or unloaded head?"]
    assert warned(9, lambda i: [0.5, 0.5]) == []
    assert warned(10, lambda i: [0.5, 0.5 - (i == 3)]) == []
    assert warned(10, lambda i: [1, 0]) == []


def many(seed, shift, queries=200):
    rng = np.random.default_rng(seed)
    return [
        group(
            rng.normal(size=10) + shift * np.eye(10)[0],
            np.eye(10)[0],
            f"q{i}",
            slices={"kind": "text" if i % 4 else "图"},
        )
        for i in range(queries)
    ]


def test_report_as_json_with_slices_and_intervals():
    report = ranking_metrics(many(0, 1.0), ["mrr@10", "hit@1"], notes=["from the reader"])
    answer = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert set(answer) == {"queries", "unjudged", "tie_rate", "metrics", "intervals", "slices", "warnings"}
    assert answer["warnings"] == ["from the reader"]
    parts = answer["slices"]["kind"]
    assert {word: part["queries"] for word, part in parts.items()} == {"text": 150, "图": 50}
    whole = sum(part["queries"] * part["metrics"]["mrr@10"] for part in parts.values()) / 200
    assert whole == pytest.approx(answer["metrics"]["mrr@10"])
    low, high = answer["intervals"]["mrr@10"]
    error = report.values[:, 0].std() / math.sqrt(200)
    assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.15)
    assert low < answer["metrics"]["mrr@10"] < high
    assert ranking_metrics(many(0, 1.0), ["mrr@10", "hit@1"]).intervals == report.intervals


def test_slices_of_other_values_than_text():
    groups = [group([1], [1], str(i), slices={"seen": i > 0, "grade": None}) for i in range(3)]
    found = ranking_metrics(groups, ["hit@1"]).slices
    assert {name: {w: p["queries"] for w, p in parts.items()} for name, parts in found.items()} == {
        "seen": {"false": 1, "true": 2},
        "grade": {"null": 3},
    }


def test_the_interval_of_a_perfect_ranking_is_a_point():
    report = ranking_metrics([group([1, 0], [1, 0], str(i)) for i in range(7)], ["mrr"])
    assert report.intervals == {"mrr": (1.0, 1.0)}


def test_paired_difference_pairs_by_query():
    base, tuned = many(0, 0.0), many(0, 1.5)
    before = ranking_metrics(base, ["mrr@10", "hit@1"])
    after = ranking_metrics(tuned[::-1], ["map", "mrr@10"])
    found = paired_difference(before, after)
    assert list(found) == ["mrr@10"]
    difference = found["mrr@10"]
    assert difference.difference == pytest.approx(after.metrics["mrr@10"] - before.metrics["mrr@10"])
    assert 0 < difference.low < difference.difference < difference.high
    assert difference.queries == 200
    change = after.values[::-1, 1] - before.values[:, 0]
    assert (difference.high - difference.low) / 2 == pytest.approx(1.96 * change.std() / math.sqrt(200), rel=0.15)
    same = paired_difference(before, before)["mrr@10"]
    assert (same.difference, same.low, same.high) == (0, 0, 0)


def test_paired_difference_needs_the_same_queries_and_a_common_metric():
    with pytest.raises(DataError, match="1 queries are in one report only"):
        paired_difference(ranking_metrics(many(0, 0, 10)), ranking_metrics(many(0, 0, 11)))
    with pytest.raises(UsageError, match="no metric in common"):
        paired_difference(ranking_metrics(many(0, 0, 10), ["map"]), ranking_metrics(many(0, 0, 10), ["mrr"]))


def test_torch_is_not_imported():
    names = ", ".join(f"litchi.evaluate.{name}" for name in ("ranking", "text", "trec"))
    code = f"import sys, {names}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
