"""`litchi data check` names every row that cannot be used, counts the rest exactly, and can write them down."""

import base64
import io
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image
from processes import run_litchi
from rendering import draw
from runs import read_rows, settings

from litchi.batch.loader import make_batch
from litchi.batch.sources import index_sources
from litchi.data.detail import list_media
from litchi.data.processor import load_processor
from litchi.errors import UsageError
from litchi.prepare.check import check_files, check_report, format_report, write_clean
from litchi.prepare.check_report import check_out, write_report


def group(query="a red hat", positive="hat, red", negatives=("hat, blue",), **more):
    return {"query": query, "pos_doc": positive, "neg_docs": list(negatives), **more}


def talk(answer="Red.", user="Which colour?", **more):
    return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": answer}], **more}


def configure(path, task, *words):
    paths = [str(one) for one in path] if isinstance(path, list) else str(path)
    return settings("model.path=builtin:tiny", f"task={task}", f"data.train={json.dumps(paths)}", *words)


@pytest.fixture
def check(base_folder):
    return lambda path, task, *words: check_files(configure(path, task, *words), load_processor(base_folder))


@pytest.fixture
def index(base_folder):
    """The same rows as training scans them."""

    def run(path, task, *words):
        config = configure(path, task, *words)
        return index_sources(config, config.data.train, load_processor(base_folder))

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


@pytest.mark.parametrize(
    ("task", "wrong", "fine", "asked"), [("rerank", RERANK, group, "query"), ("chat", CHAT, talk, "user")]
)
def test_every_kind_of_bad_row_is_named(task, wrong, fine, asked, folder, check):
    """Good rows stand before, between and after; each bad one has one finding, in the order of the file."""
    rows = [fine()]
    for i, (row, _, _) in enumerate(wrong):
        rows += [row, fine(**{asked: f"question {i}"})]
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


def test_totals_are_what_training_would_read(folder, check, index):
    """Tokens and pixels of the usable rows, counted again on real batches."""
    shown = group(query={"text": "this", "image": "good.png"}, negatives=["hat, blue", {"image": "good.png"}])
    path, _ = write(folder / "rows.jsonl", shown, group(), b"{")
    words = ("data.pixels.min=6272", "data.pixels.max=12544")
    report = check_report(check(path, "rerank", *words))
    batch = make_batch(index(path, "rerank", *words), [(0, None), (1, None)])
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


def test_clean_rows_in_another_folder_still_find_their_media(folder, check, index, tmp_path):
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
        assert check_report(before)["findings"] == check_report(check(out, task))["findings"] == []
        before, after = index(path, task), index(out, task)
        old, new = ([c.load(i) for i in range(len(rows))] for c in (before, after))
        keys = [[m.key for m in list_media(s)] for s in old]
        assert [[str(Path(m.key).resolve()) for m in list_media(s)] for s in new] == keys and any(keys)
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


# ---- rows compared with each other


def told(report):
    return [(Path(f["file"]).name, f["line"], f["code"]) for f in report["findings"]]


def test_rows_that_repeat_or_contradict_an_earlier_one(folder, check):
    """Pictures count by their bytes: copy.png is good.png under another name."""
    (folder / "copy.png").write_bytes((folder / "good.png").read_bytes())
    rows = [
        group(),
        group(id="other", weight=2),  # the same content, whatever its id and fields
        group(query="A red hat"),  # another spelling is another row
        group(positive="hat, blue", negatives=["hat, green"]),  # line 1 says blue is wrong
        group(query={"image": "good.png"}, positive="x"),
        group(query={"image": "copy.png"}, positive="x"),
        group(query={"image": "copy.png"}, positive="y", negatives=["x"]),
        group(instruction="Rank otherwise.", positive="hat, blue", negatives=["hat, red"]),  # asks something else
    ]
    path, _ = write(folder / "rows.jsonl", *rows)
    report = check_report(check(path, "rerank"))
    assert told(report) == [
        ("rows.jsonl", 2, "duplicate_row"),
        ("rows.jsonl", 4, "contradicting_row"),
        ("rows.jsonl", 6, "duplicate_row"),
        ("rows.jsonl", 7, "contradicting_row"),
    ]
    assert [f["message"].split("line ")[1] for f in report["findings"]] == ["1", "1", "5", "5"]
    assert {f["severity"] for f in report["findings"]} == {"warning"} and report["usable"] == len(rows)


def test_conversations_that_repeat_or_contradict_an_earlier_one(folder, check):
    (folder / "copy.png").write_bytes((folder / "good.png").read_bytes())
    rows = [
        talk("Red.", "<image>?", images=["good.png"]),
        talk("Red.", "<image>?", images=["copy.png"]),
        talk("Blue.", "<image>?", images=["copy.png"]),
        talk("Red.", [{"type": "image", "image": "good.png"}, {"type": "text", "text": "?"}]),
        talk("Red.", "?<image>", images=["good.png"]),
        talk("Blue.", "?"),
    ]
    path, _ = write(folder / "rows.jsonl", *rows)
    found = [(line, code) for _, line, code in told(check_report(check(path, "chat")))]
    assert found == [(2, "duplicate_row"), (3, "contradicting_row"), (4, "duplicate_row")]


def test_a_negative_with_the_content_of_the_positive(folder, check):
    (folder / "copy.png").write_bytes((folder / "good.png").read_bytes())
    draw(folder / "other.png", 84, 56, seed=9)
    rows = [
        group(positive={"image": "good.png"}, negatives=[{"image": "other.png"}, {"image": "copy.png"}]),
        group(
            "b", positive=["x", {"text": "y", "image": "good.png"}], negatives=["z", {"text": "y", "image": "copy.png"}]
        ),
        group("c", positive={"text": "y", "image": "good.png"}, negatives=[{"text": "n", "image": "copy.png"}, "y"]),
    ]
    path, _ = write(folder / "rows.jsonl", *rows)
    report = check_report(check(path, "rerank"))
    assert [(line, code) for _, line, code in told(report)] == [(n, "negative_equals_positive") for n in (1, 2)]
    assert "document d2" in report["findings"][0]["message"] and "document d3" in report["findings"][1]["message"]


def test_what_files_share_is_named_in_the_checked_one(folder, check):
    """By query, by text of a positive, by picture; not what only negatives share, nor what one file repeats itself."""
    (folder / "copy.png").write_bytes((folder / "good.png").read_bytes())
    draw(folder / "other.png", 84, 56, seed=9)
    held, _ = write(
        folder / "eval.jsonl",
        group("A  RED hat", positive="e1", negatives=["shared negative", {"image": "other.png"}]),
        group("unlike", positive="Hat, Blue", negatives=["e2"]),
        group("unlike too", positive={"image": "copy.png"}, negatives=["e3"]),
    )
    path, _ = write(
        folder / "train.jsonl",
        group("a red hat", positive="t1", negatives=["shared negative", {"image": "other.png"}]),
        group("t2", positive="t2", negatives=["hat, blue"]),
        group("t3", positive="hat, blue", negatives=["t3"]),
        group({"text": "t4", "image": "good.png"}, positive="t4"),
        group({"text": "a red hat", "image": "other.png"}, positive="t5"),
    )
    wanted = [(1, "leaked_query"), (3, "leaked_text"), (4, "leaked_picture")]
    report = check_report(check(path, "rerank", f"data.eval={json.dumps(str(held))}"))
    assert told(report) == [("train.jsonl", line, code) for line, code in wanted]
    assert [f["message"].rsplit("/", 1)[1] for f in report["findings"]] == [f"eval.jsonl:{n}" for n in (1, 2, 3)]
    assert report["rows"] == 5  # of the checked file alone
    both = check_report(check([path, held], "rerank"))  # named together, the later file's rows are said
    assert both["rows"] == 8 and {(f[0], f[2]) for f in told(both)} == {("eval.jsonl", code) for _, code in wanted}


def test_histograms_count_what_is_usable(folder, check):
    path, _ = write(
        folder / "rows.jsonl",
        talk("Red.", "<image>?", images=["good.png"]),
        talk(user="<image><image>", images=["good.png", "good.png"]),
        talk(),
        b"{",
    )
    report = check_report(check(path, "chat"))
    assert report["histograms"]["modalities"] == {"1 picture": 1, "2 to 4 pictures": 1, "text": 1}
    assert sum(report["histograms"]["tokens"].values()) == report["usable"] == 3
    assert report["histograms"]["picture sides"].keys() == {"128"}  # the root of 84 x 56 is 68
    mixed = group(query={"image": "good.png"}, positive={"text": "a", "image": "good.png"}, negatives=["b"])
    path, _ = write(folder / "groups.jsonl", mixed)
    bins = check_report(check(path, "rerank"))["histograms"]["modalities"]
    assert bins == {"picture -> picture+text | text": 1}


@pytest.mark.parametrize("workers", [0, 2])
def test_chunks_and_workers_change_nothing(workers, folder, check):
    """More rows than a chunk: repeats and contradictions are found across chunks, whoever scanned them."""
    rows = [group(f"q{i}", positive={"image": "good.png"}) for i in range(600)]
    rows[590] = rows[3]
    rows[400] = b"{"
    path, _ = write(folder / "rows.jsonl", *rows)
    report = check_report(check(path, "rerank", f"data.workers={workers}"))
    assert told(report) == [("rows.jsonl", 401, "not_json"), ("rows.jsonl", 591, "duplicate_row")]
    assert report["usable"] == 599 and sum(report["histograms"]["tokens"].values()) == 599


def test_facts_take_a_bounded_number_of_bytes_a_row(folder, check):
    """No text and no object is kept: rows ten times as long take as many bytes."""
    sizes = []
    for words in (1, 60):
        rows = [group(f"q{i} " + "word " * words, positive="a " * words) for i in range(40)]
        (checked,) = check(write(folder / f"{words}.jsonl", *rows)[0], "rerank")
        sizes.append(checked.facts.nbytes)
    assert sizes[0] == sizes[1] < 40 * 120


# ---- the report


def test_the_page_shows_the_worst_rows_and_loads_nothing(folder, check, tmp_path):
    hard = '<script>alert("x")</script> | ``` &'
    rows = [group(hard, positive={"image": "good.png"}), group("b", positive={"image": "cut.png"}), b"{", group()]
    path, _ = write(folder / "rows.jsonl", *rows)
    files = check(path, "rerank")
    written = write_report(files, check_report(files), check_out(str(tmp_path / "report")))
    assert [p.name for p in written] == ["report.html", "report.md"]
    page, text = (p.read_text(encoding="utf-8") for p in written)
    seen = Page()
    seen.feed(page)
    assert not seen.loads and "script" not in seen.tags
    thumbnails = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in seen.pictures]
    assert thumbnails and all(max(t.size) <= 128 for t in thumbnails)
    assert any(t.size == (84, 56) for t in thumbnails)
    for shown in (page, text):
        assert all(
            word in shown for word in ("rows.jsonl:2", "unreadable_media", "cut off", "rows.jsonl:3", "not_json")
        )
    assert "../data/good.png" in text
    with pytest.raises(UsageError, match="exists"):
        check_out(str(tmp_path / "report"))
    with pytest.raises(UsageError, match="exists"):
        check_out(str(tmp_path / "report" / "report.md"))


class Page(HTMLParser):
    """What a page shows, and what it would load."""

    def __init__(self):
        super().__init__()
        self.tags, self.pictures, self.loads = set(), [], []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        for name, value in attributes:
            if name in ("src", "href", "srcset", "data") and value:
                (self.pictures if value.startswith("data:image/") else self.loads).append(value)


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
    words = ("--task", "rerank", "--against", str(path), "--report", str(folder / "page.html"))
    clean = run_litchi(folder, "data", "check", str(out), "data.max_length=500", *words)
    assert clean.status == 0 and "1 of 1 rows usable" in clean.out
    assert "clean.jsonl:1: warning: leaked_query" in clean.out and (folder / "page.html").exists()
