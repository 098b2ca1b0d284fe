"""`litchi data check` names every row that cannot be used, counts the rest exactly, and can write them down."""

import json
from pathlib import Path

import pytest
from processes import run_litchi
from rendering import draw
from runs import read_rows, settings

from litchi.batch.index import sample_media
from litchi.batch.loader import make_batch
from litchi.data.processor import load_processor
from litchi.errors import UsageError
from litchi.prepare.check import check_files, check_report, format_report, write_clean


def group(query="a red hat", positive="hat, red", negatives=("hat, blue",), **more):
    return {"query": query, "pos_doc": positive, "neg_docs": list(negatives), **more}


def talk(answer="Red.", user="Which colour?", **more):
    return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": answer}], **more}


@pytest.fixture
def check(base_folder):
    def run(path, task, *words):
        config = settings("model.path=builtin:tiny", f"task={task}", f"data.train={json.dumps(str(path))}", *words)
        return check_files(config, load_processor(base_folder))

    return run


@pytest.fixture
def folder(tmp_path):
    """Pictures that can be used, and pictures that cannot."""
    draw(tmp_path / "data" / "good.png", 84, 56)
    draw(tmp_path / "data" / "thin.png", 2, 900)
    whole = Path(draw(tmp_path / "data" / "cut.png", 200, 200)).read_bytes()
    (tmp_path / "data" / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "data" / "text.png").write_text("no picture")
    return tmp_path / "data"


def write(path, *rows):
    """Write rows as they stand; what is no text is written as JSON. Returns the path and the lines."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path, lines


# (row, code, severity): one row of every kind that is wrong, or worth saying something about
RERANK = [
    (b"{", "not_json", "error"),
    (b"[1]", "not_an_object", "error"),
    (b'{"query": "\xff"}', "not_utf8", "error"),
    (b'{"query": "a", "query": "b"}', "duplicate_key", "error"),
    (b'{"query": "a", "weight": NaN}', "not_finite", "error"),
    (group(query=""), "empty_query", "error"),
    (group(positive={"text": ""}), "empty_document", "error"),
    (group(positive=[]), "no_positive", "error"),
    (group(negatives=[]), "no_negative", "error"),
    (group(positive=7), "wrong_type", "error"),
    ({"query": "a", "documents": ["b", "c"], "labels": [1]}, "label_count", "error"),
    ({"query": "a", "documents": ["b", "c"], "labels": [1, -1]}, "wrong_label", "error"),
    (group(positive={"id": "x", "text": "a"}, negatives=[{"id": "x", "text": "b"}]), "duplicate_id", "error"),
    (group(positive={"image": "missing.png"}), "media_missing", "error"),
    (group(query={"image": "cut.png"}), "unreadable_media", "error"),
    (group(negatives=[{"image": "text.png"}]), "unreadable_media", "error"),
    (group(query={"image": "thin.png"}), "extreme_aspect", "error"),
    (group(query={"image": "https://example.org/a.png"}), "remote_media", "error"),
    (group(query={"image": "data:image/png;base64,!!"}), "bad_base64", "error"),
    (group(positive="long " * 400), "too_long", "warning"),
]
CHAT = [
    (talk(answer=None), "null_content", "error"),
    (talk(answer=5), "wrong_type", "error"),
    (talk(user="<image> what?"), "mark_no_image", "error"),
    (talk(user="what?", images=["good.png"]), "too_few_marks", "error"),
    ({"messages": [{"role": "user", "content": "hi"}]}, "no_answer", "warning"),
    ({"messages": [{"role": "judge", "content": "hi"}]}, "wrong_role", "error"),
    (talk(answer="long " * 400), "too_long", "warning"),
]


@pytest.mark.parametrize(("task", "wrong", "fine"), [("rerank", RERANK, group), ("chat", CHAT, talk)])
def test_every_kind_of_bad_row_is_named(task, wrong, fine, folder, check):
    """Good rows stand before, between and after; each bad one has one finding, in the order of the file."""
    rows = [fine()]
    for row, _, _ in wrong:
        rows += [row, fine()]
    path, _ = write(folder / "rows.jsonl", *rows)
    report = check_report(check(path, task, "data.max_length=400"))
    found = [(f["line"], f["code"], f["severity"]) for f in report["findings"]]
    assert found == [(2 * i + 2, code, severity) for i, (_, code, severity) in enumerate(wrong)]
    assert {f["file"] for f in report["findings"]} == {str(path)}
    assert (report["rows"], report["usable"]) == (2 * len(wrong) + 1, len(wrong) + 1)
    text = format_report(report)
    assert f"{len(wrong) + 1} of {2 * len(wrong) + 1} rows usable" in text
    assert all(f"rows.jsonl:{line}: {severity}: {code}: " in text for line, code, severity in found)


def test_too_long_rows_are_listed_with_their_length(folder, check):
    """The length that is named is the one that would just be enough."""
    path, _ = write(folder / "long.jsonl", talk(answer="word " * 300), talk())
    (finding,) = check_report(check(path, "chat", "data.max_length=200"))["findings"]
    tokens = int(finding["message"].split()[0])
    assert "data.max_length is 200" in finding["message"] and tokens > 200
    assert check_report(check(path, "chat", f"data.max_length={tokens}"))["usable"] == 2
    assert check_report(check(path, "chat", f"data.max_length={tokens - 1}"))["usable"] == 1


def test_a_bad_negative_leaves_its_group(folder, check):
    path, _ = write(folder / "rows.jsonl", group(negatives=["hat, blue", {"image": "cut.png"}, {"image": "good.png"}]))
    report = check_report(check(path, "rerank"))
    (finding,) = report["findings"]
    assert report["usable"] == 1 and finding["code"] == "unreadable_media" and "document d2" in finding["message"]


def test_totals_are_what_training_would_read(folder, check):
    """Tokens and pixels of the usable rows, counted again on real batches."""
    shown = group(query={"text": "this", "image": "good.png"}, negatives=["hat, blue", {"image": "good.png"}])
    path, _ = write(folder / "rows.jsonl", shown, group(), b"{")
    corpus = check(path, "rerank", "data.pixels.min=6272", "data.pixels.max=12544")
    report = check_report(corpus)
    batch = make_batch(corpus, [(0, None), (1, None)])
    assert report["usable"] == 2 and report["tokens"] == batch.tokens
    assert report["pixels"] == len(batch.pixels) * 14 * 14 > 0  # the picture stands twice and is encoded once


# ---- --write-clean


def test_clean_rows_are_the_usable_ones_letter_for_letter(folder, check):
    """Spaces, escapes and the order of keys stay; also relative paths, since the file lies in the same folder."""
    odd = b'{ "pos_doc":"caf\\u00e9",  "neg_docs":["\xe7\xba\xa2"], "query":{"image":"good.png"}, "score": 1.50 }'
    path, lines = write(folder / "rows.jsonl", odd, b"{", group(), group(query=""))
    sentence = write_clean(check(path, "rerank"), folder / "clean.jsonl", media_root=None)
    assert (folder / "clean.jsonl").read_bytes() == odd + b"\n" + lines[2] + b"\n"
    assert sentence == f"2 rows written to {folder / 'clean.jsonl'}"
    report = check_report(check(folder / "clean.jsonl", "rerank"))
    assert (report["rows"], report["usable"], report["findings"]) == (2, 2, [])


def test_clean_rows_in_another_folder_still_find_their_media(folder, check, tmp_path):
    """Every place where a row names media; texts that look like paths, and rows without media, are left alone."""
    rerank = [
        group(query={"text": "good.png", "image": "good.png"}, negatives=[{"image": ["good.png", "good.png"]}, "x"]),
        {"query": "a", "documents": [{"image": f"file://{folder}/good.png"}, "good.png"], "labels": [1, 0]},
        b'{"query":"plain",  "pos_doc":"good.png", "neg_docs":["b"]}',
    ]
    typed = [{"type": "image", "image": "good.png"}, {"type": "image_url", "image_url": {"url": "good.png"}}]
    chat = [talk(user=[*typed, {"type": "text", "text": "good.png"}]), talk(user="<image>?", images=["good.png"])]
    for task, rows, moved in (("rerank", rerank, 1), ("chat", chat, 2)):
        path, _ = write(folder / f"{task}.jsonl", *rows)
        before = check(path, task)
        out = tmp_path / "elsewhere" / f"{task}.jsonl"
        out.parent.mkdir(exist_ok=True)
        assert f"in {moved} of them the paths of media were rewritten" in write_clean(before, out, media_root=None)
        after = check(out, task)
        assert check_report(before)["findings"] == check_report(after)["findings"] == []
        old, new = ([c.load(i) for i in range(len(rows))] for c in (before, after))
        keys = [[m.key for m in sample_media(s)] for s in old]
        assert [[str(Path(m.key).resolve()) for m in sample_media(s)] for s in new] == keys and any(keys)
        batches = [make_batch(c, [(i, None) for i in range(len(rows))]) for c in (before, after)]
        assert batches[0].tokens == batches[1].tokens and (batches[0].ids == batches[1].ids).all()
    assert (tmp_path / "elsewhere" / "rerank.jsonl").read_bytes().splitlines()[1:] == [
        json.dumps(rerank[1]).encode(),
        rerank[2],
    ]


def test_with_a_media_root_paths_stay(folder, check, tmp_path):
    """Then they start from there, wherever the file lies."""
    path, lines = write(folder / "rows.jsonl", group(query={"image": "good.png"}))
    out = tmp_path / "clean.jsonl"
    write_clean(check(path, "rerank", f"data.media_root={folder}"), out, media_root=str(folder))
    assert out.read_bytes() == lines[0] + b"\n"
    assert check_report(check(out, "rerank", f"data.media_root={folder}"))["findings"] == []


def test_a_row_that_loses_a_document_is_kept_and_said(folder, check):
    path, lines = write(folder / "rows.jsonl", group(negatives=["hat, blue", {"image": "cut.png"}]), group())
    sentence = write_clean(check(path, "rerank"), folder / "clean.jsonl", media_root=None)
    assert "1 of them still have documents that cannot be used" in sentence
    assert (folder / "clean.jsonl").read_bytes() == b"".join(line + b"\n" for line in lines)


def test_nothing_is_overwritten(folder, check):
    path, lines = write(folder / "rows.jsonl", group())
    with pytest.raises(UsageError, match="exists"):
        write_clean(check(path, "rerank"), path, media_root=None)
    assert path.read_bytes() == lines[0] + b"\n"
    with pytest.raises(UsageError, match="cannot be written"):
        write_clean(check(path, "rerank"), folder / "none" / "out.jsonl", media_root=None)


# ---- the program


def test_the_program_answers_in_json_and_by_status(folder):
    path, _ = write(folder / "rows.jsonl", group(), b"{", group(positive="long " * 2000))
    out = folder / "clean.jsonl"
    ended = run_litchi(folder, "data", "check", str(path), "--task", "rerank", "--json", "--write-clean", str(out))
    report = json.loads(ended.out)
    assert ended.status == 3 and "1 rows written" in ended.err
    assert (report["rows"], report["usable"]) == (3, 1)
    assert {(f["line"], f["severity"], f["code"]) for f in report["findings"]} == {
        (2, "error", "not_json"),
        (3, "warning", "too_long"),
    }
    assert all(f.keys() >= {"file", "line", "severity", "code", "message"} for f in report["findings"])
    assert report["tokens"] > 0 and report["pixels"] == 0
    assert len(read_rows(out)) == 1
    clean = run_litchi(folder, "data", "check", str(out), "--task", "rerank")
    assert clean.status == 0 and "1 of 1 rows usable" in clean.out
