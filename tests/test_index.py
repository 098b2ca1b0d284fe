"""The index: what a row costs is what its rendering has, a scan is made once, and ranks scan together."""

import json
import os
from dataclasses import replace
from threading import Barrier, Thread

import pytest
from rendering import draw, renderer_for, say

from litchi.batch import index as index_module
from litchi.batch.cost import forest_pairs
from litchi.batch.index import ScanRules, build_index
from litchi.batch.loader import Corpus
from litchi.types import IGNORE

RULES = ScanRules(max_length=512)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LITCHI_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def pictures(tmp_path):
    return [draw(tmp_path / f"{k}.png", *size, seed=k) for k, size in enumerate([(56, 56), (84, 140), (140, 84)])]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def chat_rows(pictures, count=4):
    """Rows of growing length, every other with a picture."""
    rows = []
    for n in range(count):
        content = say(f"What is it{' and what else' * n}?", *(pictures[n % 3 : n % 3 + 1] if n % 2 else []))
        rows.append(
            {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "red " * n + "bag"}]}
        )
    return rows


def rerank_row(pictures, **other):
    row = {"query": "a bag", "pos_doc": {"image": pictures[0]}, "neg_docs": [{"image": p} for p in pictures[1:]]}
    return row | other


def scan(path, renderer, rules=RULES, **options):
    """(index, number of signs of progress): none means that nothing was scanned."""
    signs = []
    found = build_index(path, "set", renderer, rules, progress=lambda *sign: signs.append(sign), **options)
    return found, len(signs)


def codes(found):
    return [(f.line, f.severity, f.code) for f in found.findings]


# ---- Costs


def test_costs_of_chat_rows_are_those_of_their_examples(processor, tmp_path, pictures):
    renderer = renderer_for("chat", processor)
    found, _ = scan(write(tmp_path / "a.jsonl", chat_rows(pictures)), renderer)
    corpus = Corpus((found,), (renderer,))
    examples = [corpus.example(row, None) for row in range(4)]
    assert [r.tokens for r in found.rows] == [e.tokens for e in examples]
    assert [r.patches for r in found.rows] == [e.patches for e in examples]
    for row, example in zip(found.rows, examples, strict=True):
        work = row.work(None)
        assert (work.tokens, work.pairs) == (example.tokens, example.tokens * (example.tokens + 1) // 2)
        assert work.rows == (example.labels[1:] != IGNORE).sum() > 0
        assert work.grids == tuple(m.grid for m in example.media)
    assert len({r.tokens for r in found.rows}) == 4 and [r.patches > 0 for r in found.rows] == [False, True] * 2
    assert found.tokens == sum(e.tokens for e in examples) and found.patches == sum(e.patches for e in examples)
    assert [r.id for r in found.rows] == [f"a:{n}" for n in range(1, 5)]


def test_costs_of_groups_are_those_of_their_examples(processor, tmp_path, pictures):
    renderer = renderer_for("rerank", processor)
    rows = [
        rerank_row(pictures),
        {"query": "hat?", "pos_doc": ["a hat", "hats"], "neg_docs": ["bag", "\nshoe", "sock"]},
    ]
    found, _ = scan(write(tmp_path / "a.jsonl", rows), renderer)
    corpus = Corpus((found,), (renderer,))
    for number, row in enumerate(found.rows):
        example = corpus.example(number, None)
        whole = row.work(row.documents)
        assert row.tokens == whole.tokens == example.tokens
        assert whole.pairs == forest_pairs(row.prefix, [b - a for a, b, _ in example.spans[1:]])
        assert (whole.rows, whole.grids) == (len(example.scored), tuple(m.grid for m in example.media))
        assert (row.prefix, row.patches) == (example.spans[0][1], example.patches)
        assert list(row.lengths) == [row.prefix + b - a for a, b, _ in example.spans[1:]]
        chosen = row.chosen(0, 0, 1)
        assert len(chosen) == row.positives + 1 and chosen[: row.positives] == row.documents[: row.positives]
        smaller = corpus.example(number, chosen)
        assert row.work(chosen).tokens >= smaller.tokens, "a smaller group shares at least as much"
        assert sorted(row.work(chosen).grids) == sorted(m.grid for m in smaller.media)
        assert row.work(chosen).tokens < row.tokens and row.work(chosen).rows == row.positives + 1
    assert [row.positives for row in found.rows] == [1, 2]
    assert [len(row.grids) for row in found.rows] == [3, 0]


def test_a_picture_counts_once_whoever_shows_it(processor, tmp_path, pictures):
    """The query's picture comes back in a document, and two documents share one."""
    first, second, third = ({"image": p} for p in pictures)
    row = {
        "query": {"text": "like this", **first},
        "pos_doc": {"text": "it", **first},
        "neg_docs": [second, third, second],
    }
    renderer = renderer_for("rerank", processor)
    found, _ = scan(write(tmp_path / "a.jsonl", [row]), renderer)
    [cost], corpus = found.rows, Corpus((found,), (renderer,))
    assert (len(cost.grids), cost.shared, cost.pictures) == (3, 1, ((), (1,), (2,), (1,)))
    for chosen, distinct in (((0, 1, 2, 3), 3), ((0, 1, 3), 2), ((0, 2), 2), ((0,), 1)):
        grids = cost.work(chosen).grids
        assert len(grids) == distinct
        assert sorted(grids) == sorted(m.grid for m in corpus.example(0, chosen).media)


def test_blank_lines_keep_the_numbers_an_editor_shows(processor, tmp_path, pictures):
    path = tmp_path / "a.jsonl"
    one, other = (json.dumps(row) for row in chat_rows(pictures)[:2])
    path.write_text(f"\n{one}\n\n\n{other}\n", encoding="utf-8")
    found, _ = scan(str(path), renderer_for("chat", processor))
    assert [found.source(row).line for row in found.rows] == [2, 5]


# ---- The cache


def test_a_second_scan_reads_what_the_first_found(processor, tmp_path, pictures):
    path, renderer = write(tmp_path / "a.jsonl", chat_rows(pictures)), renderer_for("chat", processor)
    first, scanned = scan(path, renderer)
    again, rescanned = scan(path, renderer)
    assert (scanned, rescanned) == (1, 0)
    assert again.rows == first.rows and again.findings == first.findings and again.name == "set"
    assert again.load(again.rows[2], renderer) == first.load(first.rows[2], renderer)


def touch(path):
    status = os.stat(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))


def test_whatever_changes_the_costs_makes_a_new_scan(processor, tmp_path, pictures):
    path, renderer = write(tmp_path / "a.jsonl", chat_rows(pictures)), renderer_for("chat", processor)
    first, _ = scan(path, renderer)
    draw(tmp_path / "1.png", 140, 140)  # larger than before
    second, scanned = scan(path, renderer)
    assert scanned == 1 and second.patches > first.patches
    smaller = replace(renderer, processor=processor.with_pixels(3136, 3136))
    others = [(smaller, RULES), (replace(renderer, window=(0, 255)), RULES), (renderer, replace(RULES, max_length=40))]
    others += [(renderer, replace(RULES, verify="headers")), (replace(renderer, media_root="/elsewhere"), RULES)]
    for other, rules in others:
        assert scan(path, other, rules)[1] == 1
        assert scan(path, other, rules)[1] == 0
    touch(path)
    assert scan(path, renderer)[1] == 1
    (tmp_path / "1.png").unlink()
    gone, scanned = scan(path, renderer)
    assert scanned == 1 and len(gone.rows) == len(first.rows) - 1
    draw(tmp_path / "1.png", 140, 140)
    back, scanned = scan(path, renderer)
    assert scanned == 1 and len(back.rows) == len(first.rows)


def test_a_damaged_cache_is_scanned_again(processor, tmp_path, pictures):
    path, renderer = write(tmp_path / "a.jsonl", chat_rows(pictures)), renderer_for("chat", processor)
    first, _ = scan(path, renderer)
    [entry] = (tmp_path / "cache" / "index").iterdir()
    entry.write_bytes(entry.read_bytes()[:50])
    again, scanned = scan(path, renderer)
    assert scanned == 1 and again.rows == first.rows


# ---- Ranks and workers


def many_rows(tmp_path, pictures):
    rows = chat_rows(pictures) * 3
    rows[5] = {"messages": []}
    return write(tmp_path / "many.jsonl", rows)


def test_ranks_and_workers_find_what_one_process_finds(processor, tmp_path, pictures, monkeypatch):
    monkeypatch.setattr(index_module, "CHUNK_ROWS", 2)
    path, renderer = many_rows(tmp_path, pictures), renderer_for("chat", processor)
    monkeypatch.setenv("LITCHI_CACHE", str(tmp_path / "alone"))
    alone, signs = scan(path, renderer)
    assert signs == 6 and len(alone.rows) == 11 and [line for line, *_ in codes(alone)] == [6]
    monkeypatch.setenv("LITCHI_CACHE", str(tmp_path / "workers"))
    several, signs = scan(path, renderer, workers=2)
    assert signs == 6 and (several.rows, several.findings, several.media) == (alone.rows, alone.findings, alone.media)
    monkeypatch.setenv("LITCHI_CACHE", str(tmp_path / "ranks"))
    for found, signs in on_ranks(2, path, renderer):
        assert signs == 3 and (found.rows, found.findings, found.media) == (alone.rows, alone.findings, alone.media)
    assert [signs for _, signs in on_ranks(2, path, renderer)] == [0, 0]


def on_ranks(ranks, path, renderer):
    """Scan on ranks that are threads of this process and gather as processes do: all or none."""
    barrier, slots, out = Barrier(ranks, timeout=30), [None] * ranks, [None] * ranks

    def run(rank):
        def gather(share):
            slots[rank] = share
            barrier.wait()
            found = list(slots)
            barrier.wait()
            return found

        out[rank] = scan(path, renderer, rank=rank, ranks=ranks, gather=gather)

    threads = [Thread(target=run, args=(rank,)) for rank in range(ranks)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    return out


def test_a_rank_without_the_cache_makes_all_scan(processor, tmp_path, pictures):
    """Else one would wait in a gather that the others never call."""
    path, renderer = many_rows(tmp_path, pictures), renderer_for("chat", processor)
    scan(path, renderer)
    _, signs = scan(path, renderer, gather=lambda share: [share, False] if isinstance(share, bool) else [share])
    assert signs == 1


# ---- Rows that cannot be used


def test_a_bad_negative_leaves_its_group(processor, tmp_path, pictures):
    rows = [rerank_row(pictures, neg_docs=[{"image": "none.png"}, {"image": pictures[1]}])]
    renderer = replace(renderer_for("rerank", processor), media_root=str(tmp_path))
    found, _ = scan(write(tmp_path / "a.jsonl", rows), renderer)
    assert found.rows[0].documents == (0, 2) and codes(found) == [(1, "error", "media_missing")]
    assert "document d1" in found.findings[0].message and "none.png" in found.findings[0].message
    example = Corpus((found,), (renderer,)).example(0, found.rows[0].chosen(0, 0, None))
    assert example.doc_ids == ("d0", "d2") and example.tokens == found.rows[0].tokens


@pytest.mark.parametrize(
    "change",
    [
        {"pos_doc": {"image": "none.png"}},
        {"query": {"image": "none.png"}},
        {"neg_docs": [{"image": "none.png"}, {"image": "nor.png"}]},
    ],
    ids=["positive", "query", "all negatives"],
)
def test_a_bad_query_or_positive_or_no_negative_left_drops_the_group(processor, tmp_path, pictures, change):
    renderer = replace(renderer_for("rerank", processor), media_root=str(tmp_path))
    rows = [rerank_row(pictures, **change), rerank_row(pictures)]
    found, _ = scan(write(tmp_path / "a.jsonl", rows), renderer)
    assert [row.line for row in found.rows] == [1] and codes(found) == [(1, "error", "media_missing")]


def test_damage_is_found_as_deep_as_was_asked(processor, tmp_path, pictures):
    raw = (tmp_path / "1.png").read_bytes()
    (tmp_path / "1.png").write_bytes(raw[:-40] + bytes(28) + raw[-12:])
    path, renderer = write(tmp_path / "a.jsonl", chat_rows(pictures)), renderer_for("chat", processor)
    headers, _ = scan(path, renderer, replace(RULES, verify="headers"))
    decoded, _ = scan(path, renderer)
    assert len(headers.rows) == 4 and headers.bad == ()
    assert len(decoded.rows) == 3 and [(f.line, f.code) for f in decoded.bad] == [(2, "unreadable_media")]


@pytest.mark.parametrize(("overlong", "severity"), [("drop", "warning"), ("error", "error")])
def test_rows_that_are_too_long_are_left_out_whole(processor, tmp_path, pictures, overlong, severity):
    path, renderer = write(tmp_path / "a.jsonl", chat_rows(pictures)), renderer_for("chat", processor)
    tokens = [row.tokens for row in scan(path, renderer)[0].rows]
    limit = sorted(tokens)[1]
    found, _ = scan(path, renderer, ScanRules(max_length=limit, overlong=overlong))
    assert [row.tokens for row in found.rows] == [n for n in tokens if n <= limit]
    left_out = [(n, severity, "too_long") for n, length in enumerate(tokens, 1) if length > limit]
    assert codes(found) == left_out and len(left_out) == 2
    assert len(found.bad) == (2 if overlong == "error" else 0)
    assert f"{max(tokens)} tokens, data.max_length is {limit}" in " ".join(f.message for f in found.findings)


def test_a_negative_that_is_too_long_leaves_and_a_positive_drops_the_group(processor, tmp_path):
    renderer = renderer_for("rerank", processor)
    long = "and a bag " * 400
    rows = [
        {"query": "bag", "pos_doc": "a bag", "neg_docs": [long, "a hat"]},
        {"query": "bag", "pos_doc": long, "neg_docs": ["a hat"]},
        {"query": "bag", "pos_doc": "a bag", "neg_docs": [long]},
    ]
    path = write(tmp_path / "a.jsonl", rows)
    found, _ = scan(path, renderer, ScanRules(max_length=200))
    assert [(row.line, row.documents) for row in found.rows] == [(0, (0, 2))]
    assert max(found.rows[0].lengths) <= 200 and found.bad == ()
    assert codes(found) == [(line, "warning", "too_long") for line in (1, 2, 3)]
    strict, _ = scan(path, renderer, ScanRules(max_length=200, overlong="error"))
    assert strict.rows == () and {f.line for f in strict.bad} == {1, 2, 3}


def test_the_lines_of_bad_rows_are_named(processor, tmp_path, pictures):
    path = tmp_path / "a.jsonl"
    good = json.dumps(chat_rows(pictures)[0]).encode()
    path.write_bytes(b"\n".join([good, b"{", good, b'{"messages": 3}']) + b"\n")
    found, _ = scan(str(path), renderer_for("chat", processor))
    assert [found.source(row).line for row in found.rows] == [1, 3]
    assert [f.line for f in found.bad] == [2, 4] and all(f.file == str(path) for f in found.bad)


def test_what_is_only_said_of_a_row_does_not_leave_it_out(processor, tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": [part]}, {"role": "assistant", "content": answer}]}
        for part, answer in (
            ({"type": "text", "text": "a bag", "img": "a.png"}, "red"),
            ({"type": "text", "text": "a bag"}, ""),
            ({"type": "text", "text": "and a bag " * 400}, "red"),
        )
    ]
    found, _ = scan(write(tmp_path / "a.jsonl", rows), renderer_for("chat", processor))
    warnings = ["unknown_key", "empty_answer", "too_long"]
    assert codes(found) == [(line, "warning", code) for line, code in enumerate(warnings, 1)]
    assert [found.source(row).line for row in found.rows] == [1, 2]
    assert [(f.line, f.code) for f in found.left_out] == [(3, "too_long")]
