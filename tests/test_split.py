"""`litchi data split` and `sample`: nothing on both sides, the same for the same seed, counts as they are said."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_litchi
from rendering import draw
from runs import read_rows

from litchi.errors import DataError, UsageError
from litchi.prepare.sample import sample_file, share_out
from litchi.prepare.split import assign_components, find_components, format_answer, parse_parts, split_file

HALVES = {"a": 0.5, "b": 0.5}


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def group(i, query=None, positive=None, negatives=None, **more):
    return {
        "n": i,
        "query": query or f"query {i}",
        "pos_doc": positive or f"positive {i}",
        "neg_docs": negatives or [f"negative {i}"],
        **more,
    }


def sides(folder, *names):
    return [{row["n"] for row in read_rows(Path(folder) / f"{name}.jsonl")} for name in names]


@given(st.lists(st.sets(st.integers(0, 12), max_size=3), min_size=1, max_size=30))
@settings(max_examples=200, deadline=None)
def test_components_are_those_of_a_graph_search(contents):
    """Against a plain search: rows are together exactly when a chain of shared contents leads from one to the other."""
    reached = []
    for row in range(len(contents)):
        seen, todo = {row}, [row]
        while todo:
            here = todo.pop()
            near = [i for i in range(len(contents)) if i not in seen and contents[i] & contents[here]]
            seen |= set(near)
            todo += near
        reached.append(sorted(seen))
    found = find_components(contents)
    assert sorted(row for component in found for row in component) == list(range(len(contents)))
    assert all(reached[row] == component for component in found for row in component)


def test_rows_without_anything_in_common_give_exact_counts(tmp_path):
    path = write(tmp_path / "rows.jsonl", [group(i) for i in range(103)])
    answer = split_file(path, str(tmp_path / "out"), task="rerank", parts={"train": 0.9, "dev": 0.05, "test": 0.05})
    assert {name: part["rows"] for name, part in answer["parts"].items()} == {"train": 93, "dev": 5, "test": 5}
    train, dev, test = sides(tmp_path / "out", "train", "dev", "test")
    assert train | dev | test == set(range(103)) and len(train) + len(dev) + len(test) == 103
    assert answer["components"] == 103 and answer["notes"] == []


def test_the_seed_decides_and_nothing_else(tmp_path):
    path = write(tmp_path / "rows.jsonl", [group(i) for i in range(50)])
    drawn = []
    for name, seed in (("x", 1), ("y", 1), ("z", 2)):
        split_file(path, str(tmp_path / name), task="rerank", parts=HALVES, seed=seed)
        drawn.append(sides(tmp_path / name, "a", "b"))
    assert drawn[0] == drawn[1] != drawn[2]


def tied(folder):
    """Pairs of rows that share one thing each, however it is written; and what each shares."""
    draw(folder / "one.png", 40, 40, seed=1)
    (folder / "copy.png").write_bytes((folder / "one.png").read_bytes())
    draw(folder / "two.png", 40, 40, seed=2)
    return {
        "query": ({"query": "A red  HAT"}, {"query": "a red hat"}),
        "positive text": ({"positive": "Ｃｕｐ"}, {"positive": "cup"}),
        "id": ({"positive": {"id": "sku-1", "text": "x1"}}, {"positive": {"id": "sku-1", "text": "x2"}}),
        "picture": ({"positive": {"image": "one.png"}}, {"query": {"text": "like", "image": "copy.png"}}),
        "negative": ({"negatives": ["same wrong"]}, {"negatives": ["same wrong"]}),
        "negative picture": ({"negatives": [{"image": "two.png"}]}, {"positive": {"text": "t", "image": "two.png"}}),
    }


@pytest.mark.parametrize(
    "what",
    ["query", "positive text", "id", "picture", "negative", "negative picture"],
    ids=lambda s: s.replace(" ", "-"),
)
def test_rows_that_share_something_stay_together(what, tmp_path):
    """In every seed; without the tie both sides are met."""
    first, second = tied(tmp_path)[what]
    path = write(tmp_path / "rows.jsonl", [group(0, **first), group(1, **second), *(group(i) for i in range(2, 6))])
    loose = write(tmp_path / "loose.jsonl", [group(0, **first), *(group(i) for i in range(1, 6))])
    together = {True: 0, False: 0}
    for seed in range(8):
        answer = split_file(path, str(tmp_path / f"t{seed}"), task="rerank", parts=HALVES, seed=seed)
        assert answer["components"] == 5 and answer["largest_component"] == 2
        assert any({0, 1} <= side for side in sides(tmp_path / f"t{seed}", "a", "b"))
        split_file(loose, str(tmp_path / f"l{seed}"), task="rerank", parts=HALVES, seed=seed)
        together[any({0, 1} <= side for side in sides(tmp_path / f"l{seed}", "a", "b"))] += 1
    assert together[False]
    if what.startswith("negative"):
        free = split_file(path, str(tmp_path / "f"), task="rerank", parts=HALVES, share_negatives=True)
        assert free["components"] == 6


def test_conversations_are_tied_by_pictures_and_by_what_is_asked_without_one(tmp_path):
    draw(tmp_path / "one.png", 40, 40, seed=1)
    draw(tmp_path / "two.png", 40, 40, seed=2)

    def talk(n, text, image=None):
        user = {"role": "user", "content": "<image>" * bool(image) + text}
        return {"n": n, "messages": [user, {"role": "assistant", "content": "x"}], "images": image or []}

    rows = [talk(0, "What?", "one.png"), talk(1, "Which?", "one.png"), talk(2, "What?", "two.png")]
    rows += [talk(3, "Capital?"), talk(4, "capital?")]
    answer = split_file(write(tmp_path / "r.jsonl", rows), str(tmp_path / "o"), task="chat", parts=HALVES)
    assert answer["components"] == 3 and answer["largest_component"] == 2
    assert {frozenset({0, 1}), frozenset({2}), frozenset({3, 4})} == {
        frozenset(c) for c in find_components([{1}, {1}, {2}, {3}, {3}])
    }
    for side in sides(tmp_path / "o", "a", "b"):
        assert len({0, 1} & side) in (0, 2) and len({3, 4} & side) in (0, 2)


def test_shares_that_components_rule_out_are_said_with_the_figures(tmp_path):
    rows = [group(i, positive="the one product") for i in range(8)] + [group(i) for i in range(8, 10)]
    path = write(tmp_path / "rows.jsonl", rows)
    answer = split_file(path, str(tmp_path / "o"), task="rerank", parts=HALVES)
    assert {p["rows"] for p in answer["parts"].values()} == {8, 2}
    assert {p["asked"] for p in answer["parts"].values()} == {5}
    assert len(answer["notes"]) == 2 and "10 rows are 3 components, the largest of 8" in format_answer(answer)
    one = write(tmp_path / "one.jsonl", rows[:8])
    with pytest.raises(DataError, match=r"no rows are left for b .*8 rows are 1 components, the largest of 8"):
        split_file(one, str(tmp_path / "n"), task="rerank", parts=HALVES)
    assert not (tmp_path / "n").exists()


def test_folds_hold_out_every_row_once(tmp_path):
    rows = [group(i, positive=f"product {i // 2}") for i in range(22)]
    path = write(tmp_path / "rows.jsonl", rows)
    answer = split_file(path, str(tmp_path / "o"), task="rerank", parts={}, folds=3)
    assert sorted(p["rows"] for p in answer["parts"].values()) == [6, 8, 8] and answer["components"] == 11
    held = Counter()
    for i in range(3):
        train, out = sides(tmp_path / "o", f"fold-{i}.train", f"fold-{i}.eval")
        assert train | out == set(range(22)) and not {n // 2 for n in train} & {n // 2 for n in out}
        held.update(out)
    assert set(held.values()) == {1} and len(held) == 22


def test_rows_are_written_letter_for_letter_and_find_their_pictures(tmp_path):
    draw(tmp_path / "data" / "one.png", 40, 40)
    rows = [group(0, positive={"image": "one.png"}), group(1)]
    path = write(tmp_path / "data" / "rows.jsonl", rows)
    answer = split_file(path, str(tmp_path / "out"), task="rerank", parts=HALVES)
    assert answer["moved"] == 1 and "in 1 of them the paths of media were rewritten" in format_answer(answer)
    found = {row["n"]: row for name in "ab" for row in read_rows(tmp_path / "out" / f"{name}.jsonl")}
    assert found[1] == rows[1] and found[0]["pos_doc"]["image"] == "../data/one.png"


def test_components_go_where_most_is_lacking():
    """By hand: 5, 3, 2 rows over shares of 6 and 4: the 5 to a, the 3 to b, then a and b lack 1 each."""
    parts = assign_components([[0, 1, 2, 3, 4], [5, 6, 7], [8, 9]], {"a": 6, "b": 4}, seed=0)
    assert parts["a"][:5] == [0, 1, 2, 3, 4] and set(parts["b"]) >= {5, 6, 7}


def test_wrong_use_is_refused(tmp_path):
    path = write(tmp_path / "rows.jsonl", [group(i) for i in range(4)])
    for text in ("a", "a=0.5,a=0.5", "a=x", "a=1.5", "x/y=0.5"):
        with pytest.raises(UsageError):
            parse_parts(text)
    assert parse_parts("train=0.9, eval=0.1") == {"train": 0.9, "eval": 0.1}
    with pytest.raises(UsageError, match="add up"):
        split_file(path, str(tmp_path / "o"), task="rerank", parts={"a": 0.5, "b": 0.4})
    bad = write(tmp_path / "bad.jsonl", [group(0), {"query": 7}])
    with pytest.raises(DataError, match=r"bad.jsonl:2"):
        split_file(bad, str(tmp_path / "o"), task="rerank", parts=HALVES)
    write(tmp_path / "o" / "a.jsonl", [group(0)])
    with pytest.raises(UsageError, match="exists"):
        split_file(path, str(tmp_path / "o"), task="rerank", parts=HALVES)


# ---- sample


@given(st.dictionaries(st.text("abc", min_size=1), st.integers(1, 40), min_size=1), st.data())
@settings(max_examples=200, deadline=None)
def test_shares_add_up_and_are_within_a_row_of_their_quota(sizes, data):
    total = sum(sizes.values())
    n = data.draw(st.integers(0, total))
    shares = share_out(sizes, n)
    assert sum(shares.values()) == n
    for name, size in sizes.items():
        assert shares[name] <= size and abs(shares[name] - n * size / total) < 1


def test_a_sample_is_drawn_with_its_seed_and_keeps_the_order(tmp_path):
    path = write(
        tmp_path / "rows.jsonl", [{"n": i, "kind": "ab"[i % 5 == 0], "deep": {"x": i % 2}} for i in range(100)]
    )
    drawn = {}
    for name, seed in (("x", 1), ("y", 1), ("z", 2)):
        sample_file(path, str(tmp_path / f"{name}.jsonl"), 20, seed=seed)
        drawn[name] = [row["n"] for row in read_rows(tmp_path / f"{name}.jsonl")]
        assert len(set(drawn[name])) == 20 and drawn[name] == sorted(drawn[name])
    assert drawn["x"] == drawn["y"] != drawn["z"]
    answer = sample_file(path, str(tmp_path / "s.jsonl"), 10, stratify="kind")
    assert Counter(row["kind"] for row in read_rows(tmp_path / "s.jsonl")) == {"a": 8, "b": 2}
    assert answer["strata"] == {"a": {"rows": 8, "of": 80}, "b": {"rows": 2, "of": 20}}
    sample_file(path, str(tmp_path / "d.jsonl"), 10, stratify="deep.x")
    assert Counter(row["deep"]["x"] for row in read_rows(tmp_path / "d.jsonl")) == {0: 5, 1: 5}
    with pytest.raises(DataError, match=r"no field colour.*rows.jsonl:1"):
        sample_file(path, str(tmp_path / "e.jsonl"), 10, stratify="colour")
    for n in (0, 101):
        with pytest.raises(UsageError, match="100 rows"):
            sample_file(path, str(tmp_path / "e.jsonl"), n)
    with pytest.raises(UsageError, match="exists"):
        sample_file(path, path, 5)


def test_the_programs_answer_in_json(tmp_path):
    path = write(tmp_path / "rows.jsonl", [group(i) for i in range(10)])
    ended = run_litchi(tmp_path, "data", "sample", path, str(tmp_path / "s.jsonl"), "-n", "4", "--json")
    assert ended.status == 0 and json.loads(ended.out)["rows"] == 4
    words = ("--out", str(tmp_path / "o"), "--parts", "train=0.8,eval=0.2")
    ended = run_litchi(tmp_path, "data", "split", path, *words, "--json")
    assert ended.status == 0
    assert json.loads(ended.out)["parts"]["eval"] == {"rows": 2, "asked": 2}
    ended = run_litchi(tmp_path, "data", "convert", path, str(tmp_path / "f.jsonl"), "--to", "flagembedding", "--json")
    assert ended.status == 0 and json.loads(ended.out)["records"] == 10
    ended = run_litchi(tmp_path, "data", "split", path, *words)
    assert ended.status == 2 and "exists" in ended.err
