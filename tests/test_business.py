"""Business figures: by hand on a log of four lists, against the truth of a simulated one, and what is refused."""

import itertools
import json
import math
import subprocess
import sys

import numpy as np
import pytest

from litchi.errors import DataError
from litchi.evaluate.business import format_log, judge_log, measure_log
from litchi.evaluate.click_log import ShownItem, ShownList, read_catalogue, read_click_log
from litchi.evaluate.estimates import ESTIMATORS, estimate, find_slots
from litchi.evaluate.exposure import Ranking, gini, measure_exposure, tail_weights

# query, then (item, click, conversion, propensity) from place 1 on
FOUR = [
    ("q1", [("a", 1, 1, 0.5), ("b", 0, 0, 0.25)]),
    ("q1", [("b", 0, 0, 0.5), ("a", 1, 0, 0.25)]),
    ("q2", [("b", 1, 0, 0.5), ("c", 1, 1, 0.25)]),
    ("q2", [("a", 0, 0, 0.5), ("b", 0, 0, 0.25)]),
]
RUN = {"q1": {"a": 3.0, "b": 2.0}, "q2": {"b": 2.0, "c": 1.0}}  # agrees with the first and the third list


def lists_of(rows, *, propensity=True):
    return [
        ShownList(
            query,
            tuple(
                ShownItem(item, place, click, sale, chance if propensity else None)
                for place, (item, click, sale, chance) in enumerate(items, 1)
            ),
        )
        for query, items in rows
    ]


def test_four_lists_by_hand():
    """Weights are 2 and 4 in the lists that agree, 0 in the others; 8 slots; clipped, 2 and 3."""
    report = judge_log(lists_of(FOUR), RUN, {"a", "b", "c", "d", "e"}, clip=3.0)
    values = {name: found["value"] for name, found in report["estimates"]["ctr"].items()}
    assert values.pop("dr") is not None
    assert values == pytest.approx(
        {
            "replay": (2 / 2 + 1 / 2) / 2,  # place 1: two of two, place 2: one of two
            "ips": (2 + 2 + 4) / 8,
            "clipped_ips": (2 + 2 + 3) / 8,
            "snips": (2 + 2 + 4) / 12,
        }
    )
    sales = {name: found["value"] for name, found in report["estimates"]["conversion"].items()}
    assert (sales["ips"], sales["replay"]) == pytest.approx(((2 + 4) / 8, (1 / 2 + 1 / 2) / 2))
    assert report["effective_slots"] == pytest.approx(12**2 / (4 + 16 + 4 + 16))
    assert report["logged"]["ctr"]["value"] == 4 / 8 and report["by_place"]["ctr"] == {"1": 2 / 4, "2": 2 / 4}
    assert report["logged"]["conversion"]["value"] == 2 / 8
    assert report["metrics"]["ctr_ips"] == 1.0 and set(report["intervals"]) >= {"ctr_ips", "ctr_logged"}
    # the head is one of five: a, clicked twice, b and c once; the ranking shows a twice, b four times, c twice
    assert report["exposure"]["ranking"] == pytest.approx(
        {"coverage": 3 / 5, "tail_share": 6 / 8, "tail_coverage": 2 / 4, "gini": (4 * 4 + 2 * 2) / (5 * 8)}
    )
    assert report["exposure"]["logged"]["coverage"] == 3 / 5
    assert report["warnings"] == ["only 4 effective slots: the intervals may be too narrow"]


def test_doubly_robust_by_hand():
    """Two queries, so each is judged by a model of the other: place means 1 and 0 (q1), 1/2 and 1/2 (q2)."""
    lists = lists_of([("q1", [("a", 1, 0, 0.5), ("b", 0, 0, 0.5)]), ("q2", [("a", 1, 0, 0.5), ("c", 1, 0, 0.5)])])
    found = estimate(find_slots(lists, {q: Ranking.of({"a": 2, "b": 1}) for q in ("q1", "q2")}), "ctr")["dr"]
    # Model of q2: places 1, 1; a got 1 where 1 is usual, b is not known: 1, 1. Model of q1: places 1, 0; a 1, b 1.
    # q1 with q2's model: 1 + 2 (1 - 1), 1 + 2 (0 - 1). q2 with q1's: 1 + 2 (1 - 1), and 0 at place 2 without a match.
    assert found.value == pytest.approx((1 + (1 - 2) + 1 + 0) / 4)


def test_ties_of_the_ranking_count_as_the_mean_over_their_orders():
    lists = lists_of(FOUR)
    orders = [{"a": 2.0, "b": 1.0}, {"a": 1.0, "b": 2.0}]
    each = [judge_log(lists, {"q1": scores, "q2": scores}) for scores in orders]
    tied = judge_log(lists, {q: {"a": 1.0, "b": 1.0} for q in ("q1", "q2")})
    for name in ("ips", "dr"):
        mean = sum(report["estimates"]["ctr"][name]["value"] for report in each) / 2
        assert tied["estimates"]["ctr"][name]["value"] == pytest.approx(mean)


# ------------------------------------------------------------------------------------------------ a simulated log

ITEMS = "abcd"
SEEN = np.array([1.0, 0.6, 0.4])  # probability that a place is looked at
GRADES = np.array([0.5, 0.3, 0.2, 0.1])  # that an item is clicked once it is seen; turned from query to query
LISTS = list(itertools.permutations(range(4), 3))
SIMULATIONS, QUERIES = 200, 120


def simulate(seed, chances):
    """Lists drawn with `chances` and clicked by chance, the ranking of each query, and its true click-through."""
    rng = np.random.default_rng(seed)
    orders = np.array(LISTS)
    propensity = np.array([[chances[orders[:, k] == i].sum() for k in range(3)] for i in range(4)])
    drawn = orders[rng.choice(len(orders), QUERIES, p=chances)]
    lists, rankings, truth = [], {}, 0.0
    for query, order in enumerate(drawn):
        grades = np.roll(GRADES, query % 4)
        clicks = rng.random(3) < SEEN * grades[order]
        items = [ShownItem(ITEMS[i], k + 1, int(clicks[k]), None, float(propensity[i, k])) for k, i in enumerate(order)]
        lists.append(ShownList(f"q{query}", tuple(items)))
        best = np.argsort(-np.roll(GRADES, query % 4 + query % 3 // 2), kind="stable")  # a third of them are wrong
        rankings[f"q{query}"] = Ranking.of({ITEMS[i]: -place for place, i in enumerate(best)})
        truth += float((SEEN * grades[best[:3]]).sum())
    return lists, rankings, truth / (3 * QUERIES)


EVEN = np.full(len(LISTS), 1 / len(LISTS))
UNEVEN = 0.5 * EVEN + 0.5 * np.random.default_rng(5).dirichlet(np.full(len(LISTS), 2.0))


@pytest.mark.parametrize("chances, names", [(EVEN, ESTIMATORS), (UNEVEN, ESTIMATORS[1:])], ids=["even", "uneven"])
def test_intervals_cover_the_truth_as_often_as_they_say(chances, names):
    covered = dict.fromkeys(names, 0)
    refused = 0  # a log that looks by chance as if its propensities were wrong
    off = {name: [] for name in names}
    for seed in range(SIMULATIONS):
        lists, rankings, truth = simulate(seed, chances)
        found = estimate(find_slots(lists, rankings), "ctr", seed=seed, resamples=200)
        if found["ips"].value is None:
            refused += 1
            continue
        assert (found["replay"].why is None) == ("replay" in names)
        for name in names:
            covered[name] += found[name].low <= truth <= found[name].high
            off[name].append(found[name].value - truth)
    assert refused <= 1
    spread = 3 * math.sqrt(0.95 * 0.05 / SIMULATIONS)
    for name in names:
        assert abs(covered[name] / (SIMULATIONS - refused) - 0.95) <= spread, (name, covered)
        assert abs(np.mean(off[name])) < 3 * np.std(off[name]) / math.sqrt(SIMULATIONS), name
    assert np.std(off["dr"]) < np.std(off["ips"])  # the model is of use


def test_the_clipped_interval_holds_the_truth_where_weights_are_cut():
    lists, rankings, truth = simulate(0, EVEN)
    found = estimate(find_slots(lists, rankings), "ctr", clip=2.0, resamples=200)
    assert found["clipped_ips"].value < 0.6 * truth  # the weights are 4
    assert found["clipped_ips"].low < truth < found["clipped_ips"].high


# -------------------------------------------------------------------------------------------- what is not identifiable


def test_without_propensities_nothing_is_told_of_a_ranking():
    report = judge_log(lists_of(FOUR, propensity=False), RUN)
    for by_kind in report["estimates"].values():
        for found in by_kind.values():
            assert found["value"] is found["low"] is None
            assert found["why"] == "8 of 8 shown items have no propensity"
    assert set(report["metrics"]) == {"ctr_logged", "conversion_logged"} | {
        f"{name}@10" for name in ("coverage", "tail_share", "tail_coverage", "gini")
    }
    assert "not identifiable: 8 of 8" in format_log(report)


def test_a_ranking_that_the_log_never_shows_is_named():
    report = judge_log(lists_of(FOUR), {"q1": {"z": 2.0, "a": 1.0}, "q2": {"z": 2.0, "c": 1.0}})
    for found in report["estimates"]["ctr"].values():
        assert found["value"] is None and found["why"] == "at place 1 the log never shows what the ranking would"
    assert report["exposure"]["ranking"]["coverage"] == 3 / 4


def test_a_ranking_too_short_for_the_log_is_named():
    report = judge_log([ShownList("q1", (ShownItem("b", 2, 1, None, 0.5),))], {"q1": {"a": 1.0}})
    assert report["estimates"]["ctr"]["dr"]["why"] == "the ranking has no item for any place of the log"
    assert report["logged"]["ctr"] == {"value": 1.0, "low": None, "high": None, "why": None}  # of a single query


def test_weights_that_cannot_be_right_are_named():
    """Lists of one item, drawn evenly from two; the ranking wants one of them, or an item that is not shown."""
    rng = np.random.default_rng(0)

    def log(propensity):
        return lists_of([(f"q{n}", [("ab"[rng.integers(2)], 0, 0, propensity)]) for n in range(120)])

    half = {f"q{n}": Ranking.of({"a" if n % 2 else "never": 1.0}) for n in range(120)}
    whole = {f"q{n}": Ranking.of({"a": 1.0}) for n in range(120)}
    assert estimate(find_slots(log(0.5), whole), "ctr")["ips"].why is None
    lacking = estimate(find_slots(log(0.5), half), "ctr")["ips"].why
    wrong = estimate(find_slots(log(0.2), whole), "ctr")["ips"].why
    for why in (lacking, wrong):
        assert "where 1 is expected" in why


def test_a_system_that_shows_one_order_tells_of_no_other():
    """Its propensities are 1."""
    lists = lists_of([(f"q{n}", [("a", 1, 0, 1.0)]) for n in range(4)])
    same = estimate(find_slots(lists, {f"q{n}": Ranking.of({"a": 1.0}) for n in range(4)}), "ctr")
    other = estimate(find_slots(lists, {f"q{n}": Ranking.of({"a" if n else "b": 1.0}) for n in range(4)}), "ctr")
    assert same["replay"].value == same["ips"].value == same["dr"].value == 1
    assert "0.75 on average where 1 is expected" in other["ips"].why


def test_replay_needs_an_even_log():
    rows = [("q1", [("a", 1, 0, 0.5)]), ("q2", [("a", 0, 0, 0.25)])]
    found = estimate(find_slots(lists_of(rows), {q: Ranking.of({"a": 1}) for q in ("q1", "q2")}), "ctr")
    assert found["replay"].value is None and "from 0.25 to 0.5" in found["replay"].why
    assert found["ips"].value == pytest.approx(1.0)


def test_queries_and_items_that_do_not_fit_are_named():
    report = judge_log(lists_of(FOUR), {"q1": RUN["q1"]}, "abc")
    assert report["warnings"][0] == "1 query of the log not in the run, in none of its figures: q2"
    assert report["estimates"]["ctr"]["ips"]["value"] == pytest.approx(2 / 4)
    with pytest.raises(DataError, match="no query in common"):
        judge_log(lists_of(FOUR), {"q9": {"a": 1.0}})
    with pytest.raises(DataError, match=r"1 item is not in the catalogue \(c\)"):
        judge_log(lists_of(FOUR), RUN, {"a", "b"})
    with pytest.raises(DataError, match="nothing at places 1 to 10"):
        judge_log([ShownList("q", (ShownItem("a", 11, 0),))])


def test_places_below_k_do_not_count():
    report = judge_log(lists_of(FOUR), RUN, k=1)
    assert report["estimates"]["ctr"]["ips"]["value"] == pytest.approx((2 + 2) / 4)
    assert report["by_place"]["ctr"] == {"1": 0.5}


# -------------------------------------------------------------------------------------------------------- exposure


def test_exposure_by_hand():
    popularity = {"a": 9, "b": 5, "c": 5, "d": 1}
    assert tail_weights(popularity, "abcde") == {"a": 0, "b": 1, "c": 1, "d": 1, "e": 1}
    assert tail_weights(popularity, "abcdef") == {"a": 0, "b": 0.5, "c": 0.5, "d": 1, "e": 1, "f": 1}  # 2 of 6: a tie
    assert measure_exposure({"a": 3, "b": 1}, popularity, "abcdef") == pytest.approx(
        {"coverage": 2 / 6, "tail_share": 0.5 / 4, "tail_coverage": 0.5 / 4, "gini": (3 * 1 + 5 * 3) / (6 * 4)}
    )
    assert gini([2, 2, 2]) == gini([0, 0]) == 0
    assert gini([0, 0, 0, 1]) == 3 / 4


def test_places_of_tied_documents():
    ranking = Ranking.of({"a": 2, "b": 1, "c": 1, "d": 0})
    assert [list(ranking.at(place)) for place in range(6)] == [[], ["a"], ["b", "c"], ["b", "c"], ["d"], []]
    assert [ranking.chance("b", place) for place in (1, 2, 3, 4)] == [0, 0.5, 0.5, 0]
    assert ranking.exposure(2) == {"a": 1, "b": 0.5, "c": 0.5}
    assert list(Ranking.of({}).at(1)) == []


# --------------------------------------------------------------------------------------------------------- reading


def item(**changes):
    return {"doc_id": "a", "position": 1, "click": 0, **changes}


@pytest.mark.parametrize(
    "shown, problem",
    [
        ([], "shown is missing"),
        ("a", "shown is missing"),
        (["a"], "a shown item is 'a'"),
        ([item(doc_id="")], "doc_id is ''"),
        ([item(position=0)], "position is 0"),
        ([item(position=True)], "position is True"),
        ([item(click=2)], "click is 2"),
        ([{"doc_id": "a", "position": 1}], "click is missing"),
        ([item(propensity=0)], "propensity is 0"),
        ([item(propensity=1.5)], "propensity is 1.5"),
        ([item(clicked=1)], "a shown item has 'clicked'"),
        ([item(), item(position=2)], "a doc_id stands twice"),
        ([item(), item(doc_id="b")], "a position stands twice"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, shown, problem):
    path = tmp_path / "log.jsonl"
    good = {"query_id": "q", "shown": [item()]}
    path.write_text("".join(json.dumps(row) + "\n" for row in (good, {"query_id": "q", "shown": shown})))
    with pytest.raises(DataError, match=problem) as error:
        read_click_log(path)
    assert f"{path}:2" in error.value.line()


def test_conversions_stand_everywhere_or_nowhere(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"query_id": "q", "shown": [item(), item(doc_id="b", position=2, conversion=1)]}))
    with pytest.raises(DataError, match="conversion stands on some"):
        read_click_log(path)


def test_the_command_says_what_the_function_says(tmp_path):
    log, run, catalogue = tmp_path / "log.jsonl", tmp_path / "run.jsonl", tmp_path / "items.txt"
    keys = ("doc_id", "position", "click", "conversion", "propensity")
    log.write_text(
        "".join(
            json.dumps({"query_id": s.query_id, "shown": [{key: getattr(i, key) for key in keys} for i in s.items]})
            + "\n"
            for s in lists_of(FOUR)
        )
    )
    run.write_text(
        "".join(
            json.dumps({"query_id": query, "doc_id": document, "score": score}) + "\n"
            for query, scores in RUN.items()
            for document, score in scores.items()
        )
    )
    catalogue.write_text('a\nb\n{"doc_id": "c"}\nd e\n')
    assert read_catalogue(catalogue) == {"a", "b", "c", "d e"}
    assert read_click_log(log) == lists_of(FOUR)
    words = ["evaluate", "--log", str(log), "--run", str(run), "--catalogue", str(catalogue)]
    said = {}
    for form in ((), ("--json",)):
        done = subprocess.run(
            [sys.executable, "-m", "litchi", *words, *form], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        said[form] = done.stdout
    answer = measure_log(str(log), str(run), str(catalogue))
    assert json.loads(said["--json",]) == answer == judge_log(lists_of(FOUR), RUN, {"a", "b", "c", "d e"})
    assert said[()] == format_log(answer) + "\n"
    assert "ips          1.0000" in said[()]
