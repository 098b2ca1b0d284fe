"""`litchi mine`: negatives come from the ranking, and nothing that may be right is ever one."""

import json
from pathlib import Path

import pytest
from processes import run_litchi
from rendering import draw
from runs import read_rows

from litchi.data.content import content_key
from litchi.errors import DataError, UsageError
from litchi.evaluate.mine import (
    Mining,
    Pool,
    draw_candidates,
    format_answer,
    make_queries,
    parse_ranks,
    pick_negatives,
    read_groups,
    scores_of_run,
)
from litchi.train.mine import mine_run, mine_target
from litchi.types import Content


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def text_key(text):
    return content_key(Content(text), plain=True)


def opened(path):
    samples, pool = read_groups(str(path), None), Pool()
    for sample in samples:
        pool.add(sample)
    return make_queries(samples), pool


ROWS = [
    {"id": "q1", "query": "hat", "pos_doc": "right", "neg_docs": ["a", "b", "c", "d", "e", "f"]},
    {"id": "q2", "query": "HAT ", "pos_doc": "also right", "neg_docs": ["a"]},
    {
        "id": "q3",
        "query": "cup",
        "pos_doc": {"id": "cup-1", "text": "cup"},
        "neg_docs": [{"id": "mug-1", "text": "mug"}],
    },
]
SCORES = {"right": 5.0, "a": 6.0, "b": 5.0, "c": 4.5, "d": 3.0, "e": 2.0, "f": 1.0, "also right": 4.0}


def picked(path, **how):
    queries, _ = opened(path)
    chosen, guarded = pick_negatives(queries[0], {text_key(t): s for t, s in SCORES.items()}, Mining(**how))
    names = {text_key(t): t for t in SCORES}
    return [names[key] for key in chosen], dict(guarded)


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ({}, "cdef"),  # a scores above the positive, b as much as it, another row says that "also right" is right
        ({"margin": 1.0}, "def"),
        ({"margin": 2.0}, "def"),  # 3.0 is just 2.0 below 5.0
        ({"margin": 2.5}, "ef"),
        ({"first": 2}, "def"),
        ({"first": 2, "last": 3}, "de"),
        ({"last": 1}, "c"),
        ({"first": 9, "last": 20}, ""),
        ({"margin": 9.0}, ""),
    ],
)
def test_window_margin_and_guards_by_hand(how, wanted, tmp_path):
    chosen, guarded = picked(write(tmp_path / "rows.jsonl", ROWS), **how)
    assert chosen == list(wanted)
    assert guarded["content"] == 1 and guarded["score"] == 6 - len("cdef") + len(
        [1 for x in "cdef" if SCORES[x] > 5.0 - how.get("margin", 0)]
    )


def test_draws_from_the_window_are_seeded(tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS)
    draws = {seed: picked(path, negatives=2, seed=seed)[0] for seed in range(12)}
    assert all(len(set(d)) == 2 and set(d) <= set("cdef") and d == sorted(d) for d in draws.values())
    assert len(set(map(tuple, draws.values()))) > 1
    assert draws == {seed: picked(path, negatives=2, seed=seed)[0] for seed in range(12)}


def test_the_lowest_positive_is_the_guard(tmp_path):
    rows = [{"query": "q", "pos_doc": ["high", "low"], "neg_docs": ["x", "y"]}]
    queries, _ = opened(write(tmp_path / "rows.jsonl", rows))
    scores = {text_key(t): s for t, s in {"high": 9, "low": 2, "x": 3, "y": 1}.items()}
    chosen, guarded = pick_negatives(queries[0], scores, Mining())
    assert chosen == [text_key("y")] and guarded["score"] == 1
    assert pick_negatives(queries[0], {text_key("x"): 1.0}, Mining())[0] is None


def test_equal_pictures_under_other_names_are_never_negatives(tmp_path):
    draw(tmp_path / "one.png", 40, 40, seed=1)
    (tmp_path / "copy.png").write_bytes((tmp_path / "one.png").read_bytes())
    draw(tmp_path / "two.png", 40, 40, seed=2)
    rows = [
        {"id": "a", "query": "q", "pos_doc": {"image": "one.png"}, "neg_docs": ["n"]},
        {"id": "b", "query": "r", "pos_doc": {"image": "copy.png"}, "neg_docs": [{"image": "two.png"}]},
    ]
    queries, pool = opened(write(tmp_path / "rows.jsonl", rows))
    assert len(pool.documents) == 3
    for query in queries:
        candidates = draw_candidates(query, pool, Mining())
        assert len(candidates) == 3 and candidates[0] in query.right
        assert not set(candidates[1:]) & query.right


def test_candidates_are_all_or_a_seeded_draw(tmp_path):
    rows = [{"id": f"q{i}", "query": f"q{i}", "pos_doc": f"p{i}", "neg_docs": [f"n{i}"]} for i in range(30)]
    queries, pool = opened(write(tmp_path / "rows.jsonl", rows))
    assert set(draw_candidates(queries[0], pool, Mining())) == set(pool.documents)
    few = Mining(candidates=5)
    drawn = [draw_candidates(query, pool, few) for query in queries]
    assert all(len(set(d)) == 6 and d[0] == query.positives[0] for d, query in zip(drawn, queries, strict=True))
    assert len({tuple(d[1:]) for d in drawn}) > 20
    assert drawn == [draw_candidates(query, pool, few) for query in queries]


def test_ids_of_a_run_are_the_rows_then_the_pools(tmp_path):
    queries, pool = opened(write(tmp_path / "rows.jsonl", ROWS))
    found = scores_of_run(queries[2], pool, {"cup-1": 3.0, "mug-1": 2.0})
    assert found == {text_key("cup"): 3.0, text_key("mug"): 2.0}
    assert scores_of_run(queries[0], pool, {"d0": 1.0, "cup-1": 0.5}) == {text_key("right"): 1.0, text_key("cup"): 0.5}
    with pytest.raises(DataError, match=r"'nobody'.*none of the row or the pool.*rows.jsonl:1"):
        scores_of_run(queries[0], pool, {"nobody": 1.0})
    unclear = ROWS + [{"query": "x", "pos_doc": {"id": "cup-1", "text": "another cup"}, "neg_docs": ["y"]}]
    queries, pool = opened(write(tmp_path / "unclear.jsonl", unclear))
    with pytest.raises(DataError, match="several contents"):
        scores_of_run(queries[0], pool, {"cup-1": 1.0})


def test_mining_in_a_run_file(tmp_path):
    draw(tmp_path / "data" / "one.png", 40, 40, seed=1)
    rows = [
        {
            "id": "q1",
            "query": {"text": "like", "image": "one.png"},
            "pos_doc": {"id": "p", "text": "right"},
            "neg_docs": [{"id": "a", "text": "easy"}, {"id": "b", "image": "one.png"}, {"id": "c", "text": "high"}],
            "instruction": "Find it.",
            "kind": "x",
        },
        {"id": "q2", "query": "no scores", "pos_doc": "z", "neg_docs": ["w"]},
    ]
    path = write(tmp_path / "data" / "rows.jsonl", rows)
    run = write(
        tmp_path / "run.jsonl",
        [{"query_id": "q1", "doc_id": d, "score": s} for d, s in (("p", 2.0), ("a", 0.1), ("b", 1.5), ("c", 2.5))],
    )
    out = tmp_path / "out" / "mined.jsonl"
    out.parent.mkdir()
    answer = mine_run(run, path, out, Mining(negatives=1, last=1))
    assert answer["rows"] == 1 and answer["negatives"] == 1 and answer["guarded"] == {"content": 0, "score": 1}
    assert answer["left_out"] == {"positive_not_scored": [2], "nothing_found": []}
    assert "lines 2" in format_answer(answer)
    wanted = rows[0] | {"neg_docs": [{"id": "b", "image": "../data/one.png"}]}
    wanted["query"] = {"text": "like", "image": "../data/one.png"}
    assert read_rows(out) == [wanted]
    mine_run(run, path, out.with_name("kept.jsonl"), Mining(negatives=1, last=1, keep=True))
    kept = read_rows(out.with_name("kept.jsonl"))[0]
    assert [d["id"] for d in kept["neg_docs"]] == ["a", "b", "c"]  # the row's own, b among them
    with pytest.raises(UsageError, match="exists"):
        mine_run(run, path, out, Mining())


def catalogue(folder, count=10):
    rows = []
    for i in range(count):
        picture = draw(folder / f"{i}.png", 56, 56, seed=i)
        rows.append(
            {"id": f"q{i}", "query": f"item {i}", "pos_doc": {"image": picture, "text": f"item {i}"}, "neg_docs": ["x"]}
        )
    return write(folder / "rows.jsonl", rows)


QUICK = ("model.path=builtin:tiny", "data.workers=0", "data.pixels.max=3136", "train.micro_batch_tokens=600")


def test_mining_with_a_model_equals_mining_in_its_scores(tmp_path, ranks):
    """The same negatives as from a run of the scores that `litchi score` writes for the whole pool."""
    from litchi.train.writing import write_lines

    path = catalogue(tmp_path, 5)
    how = Mining(negatives=2, last=3)
    answer = mine_target("builtin:tiny", path, QUICK, tmp_path / "mined.jsonl", ranks, how)
    rows = read_rows(Path(path))
    documents = [{"id": f"p{i}", **row["pos_doc"]} for i, row in enumerate(rows)] + [{"id": "x", "text": "x"}]
    full = []
    for i, row in enumerate(rows):
        others = [d for j, d in enumerate(documents) if j != i]
        full.append({"id": row["id"], "query": row["query"], "pos_doc": documents[i], "neg_docs": others})
    whole = write(tmp_path / "whole.jsonl", full)
    write_lines("builtin:tiny", whole, QUICK, tmp_path / "scores.jsonl", ranks, task="rerank")
    oracle = mine_run(str(tmp_path / "scores.jsonl"), whole, tmp_path / "oracle.jsonl", how)
    assert answer["pool"] == oracle["pool"] == 6 and answer["negatives"] == oracle["negatives"]
    mined = {
        row["id"]: [d if isinstance(d, str) else d["text"] for d in row["neg_docs"]]
        for row in read_rows(tmp_path / "mined.jsonl")
    }
    wanted = {row["id"]: [d["text"] for d in row["neg_docs"]] for row in read_rows(tmp_path / "oracle.jsonl")}
    assert mined == wanted and any(wanted.values())
    assert not list(tmp_path.glob(".*candidates*"))


@pytest.mark.slow
def test_the_program_mines_on_ranks(tmp_path):
    """One process and two write the same file, which can be trained on."""
    path = catalogue(tmp_path)
    files = []
    for procs in ("1", "2"):
        out = tmp_path / f"mined{procs}.jsonl"
        words = ("--data", path, "--out", str(out), "-n", "3", "--ranks", "1:5", "--procs", procs, "--json")
        ended = run_litchi(tmp_path, "mine", "builtin:tiny", *QUICK[1:], *words)
        assert ended.status == 0, ended.err
        files.append((json.loads(ended.out), out.read_bytes()))
    assert files[0] == files[1] and files[0][0]["negatives"] > 0
    ended = run_litchi(tmp_path, "data", "check", str(tmp_path / "mined1.jsonl"), "--json")
    report = json.loads(ended.out)
    assert ended.status == 0 and report["usable"] == report["rows"] == files[0][0]["rows"]
    assert not {f["code"] for f in report["findings"]} & {"negative_equals_positive", "contradicting_row"}


def test_wrong_use(tmp_path):
    assert parse_ranks("2:9") == (2, 9)
    for text in ("5", "a:b", "3:"):
        with pytest.raises(UsageError):
            parse_ranks(text)
    with pytest.raises(UsageError, match="first:last"):
        Mining(first=3, last=2)
    path = write(tmp_path / "rows.jsonl", [{"query": "q", "neg_docs": ["a"]}])
    with pytest.raises(DataError, match="no row has a positive"):
        mine_run("none", path, tmp_path / "out.jsonl", Mining())
    ended = run_litchi(tmp_path, "mine", "--data", path, "--out", str(tmp_path / "o.jsonl"))
    assert ended.status == 2 and "TARGET or --run is needed" in ended.err
