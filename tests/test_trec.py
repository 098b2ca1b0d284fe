"""Runs and qrels: both forms, their errors with file and line, and how they are brought together."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from litchi.errors import DataError
from litchi.evaluate.ranking import ranking_metrics
from litchi.evaluate.trec import join, read_qrels, read_run, write_run


@pytest.fixture
def saved(tmp_path):
    def save(content):
        path = tmp_path / "file"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return save


def line(**row):
    return json.dumps(row, ensure_ascii=False)


def test_both_forms_of_a_run(saved):
    expected = {"q1": {"a": 0.5, "b": -2.0}, "查询": {"文档": 1000.0}}
    assert read_run(saved("q1 Q0 a 1 .5 t\r\n\nq1\tQ0\tb  2 -2 t\n查询 Q0 文档 1 1e3 t")) == expected
    rows = [("q1", "a", 0.5), ("q1", "b", -2), ("查询", "文档", 1e3)]
    assert (
        read_run(saved("\ufeff" + "\n".join(line(query_id=q, doc_id=d, score=s, x=1) for q, d, s in rows))) == expected
    )


def test_both_forms_of_qrels(saved):
    assert read_qrels(saved("q 0 a 2\nq 0 b 0\n")) == {"q": {"a": 2, "b": 0}}
    assert read_qrels(saved(line(query_id="a b", doc_id="c d", relevance=0.5))) == {"a b": {"c d": 0.5}}


def test_an_ideographic_space_may_be_part_of_an_id(saved):
    assert read_qrels(saved("q 0 甲\u3000乙 1")) == {"q": {"甲\u3000乙": 1}}


GOOD = "q Q0 a 1 0.5 t"
GOOD_JSON = line(query_id="q", doc_id="a", score=1)


@pytest.mark.parametrize(
    "content, words",
    [
        (f"{GOOD}\nq Q0 b 2 0.5", "6 columns expected, 5 found"),
        (f"{GOOD}\nq 0 b 1", "6 columns expected, 4 found"),
        (f"{GOOD}\nq Q0 b x 0.5 t", "rank is 'x'"),
        (f"{GOOD}\nq Q0 b 2 nan t", "score is 'nan'"),
        (f"{GOOD}\nq Q0 b 2 1_0 t", "score is '1_0'"),
        (f"{GOOD}\nq Q0 b 2 1e999 t", "score is too large"),
        (f"{GOOD}\n\xff".encode("latin-1"), "not UTF-8"),
        (f"{GOOD_JSON}\n{GOOD}", "not JSON"),
        (f"{GOOD}\n{GOOD_JSON}x y z w v u", "columns expected"),
        (f"{GOOD_JSON}\n[1]", "a JSON object is needed"),
        (f"{GOOD_JSON}\n{line(doc_id='b', score=1)}", "query_id is missing"),
        (f"{GOOD_JSON}\n{line(query_id=1, doc_id='b', score=1)}", "query_id is 1"),
        (f"{GOOD_JSON}\n{line(query_id='q', doc_id='', score=1)}", 'doc_id is ""'),
        (f"{GOOD_JSON}\n{line(query_id='q', doc_id='b')}", "score is missing"),
        (f"{GOOD_JSON}\n{line(query_id='q', doc_id='b', score='1')}", 'score is "1"'),
        (f"{GOOD_JSON}\n{line(query_id='q', doc_id='b', score=True)}", "score is true"),
        (f"{GOOD_JSON}\n{line(query_id='q', doc_id='b', score=float('nan'))}", "not a finite number"),
        (f'{GOOD_JSON}\n{line(query_id="q", doc_id="b", score=1)[:-1]},"score":2}}', "stands twice"),
        (f"{GOOD_JSON}\n{line(query_id='q', doc_id='b', score=10**400)}", "not a finite number"),
    ],
)
def test_a_bad_line_is_named(saved, content, words):
    path = saved(content)
    with pytest.raises(DataError) as error:
        read_run(path)
    assert words in error.value.line()
    assert f"{path}:2" in error.value.line()


@pytest.mark.parametrize("form", [GOOD, GOOD_JSON])
def test_a_repeated_pair_names_both_lines(saved, form):
    path = saved(f"{form}\n{form.replace('a', 'other', 1) if form is GOOD else ''}\n{form}\n")
    with pytest.raises(DataError) as error:
        read_run(path)
    assert f"{path}:1 and {path}:3" in error.value.line()


def test_a_file_without_lines_or_that_is_not_there(saved, tmp_path):
    for path, words in ((saved(" \n"), "no lines"), (tmp_path / "none", "No such file"), (tmp_path, "cannot read")):
        with pytest.raises(DataError, match=words):
            read_qrels(path)


def test_join_counts_what_is_missing():
    qrels = {"a": {"x": 2, "y": 0, "z": 1}, "b": {"x": 1}, "none": {"x": 0}}
    run = {"a": {"w": 3.0, "x": 2.0}, "other": {"x": 1.0}}
    groups, notes = join(run, qrels)
    first, silent, unjudged = groups
    assert (first.doc_ids, first.relevance, first.missing_relevance) == (["w", "x"], [0, 2], (0, 1))
    assert (silent.doc_ids, silent.missing_relevance) == ([], (1,))
    assert notes == [
        "1 query of the qrels not in the run, counted as 0: b",
        "1 relevant document not in the run, counted as not retrieved",
        "1 query of the run not in the qrels, left out: other",
    ]
    report = ranking_metrics(groups, ["mrr@10", "recall@10", "hit@1", "map"], notes=notes)
    assert (report.queries, report.unjudged) == (2, 1)
    assert report.metrics == {"mrr@10": 0.25, "recall@10": 0.25, "hit@1": 0, "map": 0.125}
    assert report.warnings[:3] == notes
    assert unjudged.query_id == "none"


def test_join_without_a_common_query():
    with pytest.raises(DataError, match="no query in common"):
        join({"1": {"d": 1.0}}, {"q1": {"d": 1.0}})


names = st.text(st.characters(codec="utf-8", exclude_categories=["Z", "C"]), min_size=1, max_size=4)
numbers = st.floats(allow_nan=False, allow_infinity=False, width=32)
runs = st.dictionaries(names, st.dictionaries(names, numbers, min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=50, deadline=None)
@given(runs)
def test_what_is_written_is_read(tmp_path_factory, run):
    path = tmp_path_factory.mktemp("run") / "file"
    lines = [{"query_id": q, "doc_id": d, "score": score} for q, scores in run.items() for d, score in scores.items()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert read_run(path) == run
    if not next(iter(run)).startswith("{"):
        write_run(path, run.items())
        assert read_run(path) == run


def test_write_run_ranks_and_keeps_float32(tmp_path):
    path = tmp_path / "run"
    write_run(path, [("q", {"a": np.float32(0.1), "b": np.float32(2), "c": np.float32(2)})], tag="mine")
    assert path.read_text() == "q Q0 b 1 2.0 mine\nq Q0 c 2 2.0 mine\nq Q0 a 3 0.10000000149011612 mine\n"


def test_what_cannot_be_written(tmp_path):
    for query, document in (("a b", "d"), ("q", "x\u3000y"), ("q", "")):
        with pytest.raises(DataError, match="TREC form"):
            write_run(tmp_path / "run", [(query, {document: 1.0})])
    with pytest.raises(DataError, match=r"score is nan \(query q, document d\)"):
        write_run(tmp_path / "run", [("q", {"d": float("nan")})])
