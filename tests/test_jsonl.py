"""Lines of a file become samples, or an error that names the field; neighbours and order do not matter."""

import base64
import json
import os
import pickle
import random
import subprocess
import sys

import pytest

from litchi.data.jsonl import RowError, parse_sample, read_offsets
from litchi.data.values import read_data_url
from litchi.errors import DataError, UsageError
from litchi.types import Content, Document, Media, Source, Turn

SOURCE = Source("rows/train.jsonl", 7)
ANSWER = {"role": "assistant", "content": "Yes."}
PICTURE = Media("image", path="/data/a.png")


def parse(row, task="chat", **options):
    raw = row if isinstance(row, bytes) else json.dumps(row).encode()
    return parse_sample(raw, task=task, source=SOURCE, **({"media_root": "/data"} | options))


def refused(row, task="chat", **options):
    with pytest.raises(RowError) as error:
        parse(row, task, **options)
    return error.value


def asked(content, **fields):
    """Return a chat row with one question."""
    return {"messages": [{"role": "user", "content": content}, ANSWER], **fields}


def parts(row):
    sample, findings = parse(row)
    assert findings == []
    return sample.turns[0].parts


# ---------------------------------------------------------------- the file


def test_blank_lines_are_skipped_and_counted(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\n{"a": 1}\r\n  \n\n{"b": "\xc3\xa9"}')
    lines = read_offsets(path)
    assert len(lines) == 2
    assert lines.numbers.tolist() == [2, 5]
    assert [json.loads(lines.read(i)) for i in range(2)] == [{"a": 1}, {"b": "é"}]
    assert lines.source(1) == Source(str(path), 5)
    assert pickle.loads(pickle.dumps(lines)).read(1) == lines.read(1)


@pytest.mark.parametrize("content", [b"", b"\n \n\r\n"], ids=["empty", "blank"])
def test_a_file_without_rows_is_refused(tmp_path, content):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match="has no rows"):
        read_offsets(path)


def test_missing_files_and_folders_are_refused(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        read_offsets(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="directory"):
        read_offsets(tmp_path)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.zst", "a.parquet", "a.tar"])
def test_other_formats_say_that_they_are_not_read_yet(name):
    with pytest.raises(UsageError, match=r"not read yet.*Convert it to \.jsonl"):
        read_offsets(name)


def test_a_file_cut_after_it_was_scanned_is_noticed(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"b": 2}\n')
    lines = read_offsets(path)
    path.write_text('{"a": 1}\n')
    with pytest.raises(DataError, match=r"became shorter.*rows\.jsonl:2"):
        lines.read(1)


# ---------------------------------------------------------------- strict JSON


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b'{"id": 1, "id": 2}', "duplicate_key"),
        (b'{"messages": [{"role": "user", "role": "user"}]}', "duplicate_key"),
        (b'{"x": NaN}', "not_finite"),
        (b'{"x": [-Infinity]}', "not_finite"),
        (b'{"x": 1e999}', "not_finite"),
        (b'{"x": "\xff"}', "not_utf8"),
        (b'{"x": "\\ud83d"}', "not_utf8"),
        (b'["a", "list"]', "not_an_object"),
        (b'{"x": 1', "not_json"),
        (b'{"x": ' + b"9" * 5000 + b"}", "not_finite"),
        (b'{"x": ' + b"9" * 400 + b"}", "not_finite"),
        (b'{"x": ' + b"[" * 100_000, "not_json"),
    ],
)
def test_what_is_not_strict_json_is_refused(raw, code):
    assert refused(raw).code == code


def test_whole_surrogate_pairs_and_a_byte_order_mark_are_read():
    row = b"\xef\xbb\xbf" + json.dumps(asked("\U0001f600")).encode()
    assert b"\\ud83d" in row
    assert parse(row)[0].turns[0].parts == ("\U0001f600",)


def test_errors_name_the_row_and_cross_processes():
    error = refused(asked(42))
    assert error.message == "messages[0].content is 42: text or a list of parts is needed"
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.code, copy.status, str(copy)) == ("wrong_type", 3, f"{error.message} (rows/train.jsonl:7)")
    assert len(refused(asked({"x": "y" * 1000})).message) < 120


@pytest.mark.parametrize(("given", "id"), [(7, "7"), ("seven", "seven"), (None, "train:7")])
def test_ids_are_text_or_whole_numbers(given, id):
    assert parse(asked("Hi", id=given))[0].id == id


@pytest.mark.parametrize("given", [True, 1.5, "", [], {}])
def test_other_ids_are_refused(given):
    assert refused(asked("Hi", id=given)).code == "wrong_type"


def test_other_fields_are_kept_for_slices():
    assert parse(asked("Hi", kind="short", id=1))[0].fields == {"kind": "short"}


# ---------------------------------------------------------------- chat: pictures


@pytest.mark.parametrize("images", [["a.png"], "a.png", ["file:///data/a.png"]], ids=["list", "text", "file url"])
def test_a_mark_is_replaced_by_its_picture(images):
    assert parts(asked("<image>What?", images=images)) == (PICTURE, "What?")


@pytest.mark.parametrize("fields", [{}, {"images": None}, {"images": []}], ids=["missing", "null", "empty"])
def test_no_pictures(fields):
    assert parts(asked("What?", **fields)) == ("What?",)


def test_marks_take_media_in_order_over_all_user_turns():
    row = asked("<image>one <video><image>", images=["a.png", "b.png", "c.png"], videos=["v.mp4"])
    row["messages"] += [{"role": "user", "content": "and <image>"}, ANSWER]
    turns = parse(row)[0].turns
    b, c, v = Media("image", "/data/b.png"), Media("image", "/data/c.png"), Media("video", "/data/v.mp4")
    assert turns[0].parts == (PICTURE, "one ", v, b)
    assert turns[2].parts == ("and ", c)


@pytest.mark.parametrize(
    ("text", "fields", "code", "numbers"),
    [
        ("What?", {"images": ["a.png"]}, "too_few_marks", "0 <image> marks, images has 1"),
        ("<image><image>", {"images": ["a.png"]}, "too_many_marks", "2 <image> marks, images has 1"),
        ("<image>What?", {}, "mark_no_image", "1 <image> mark, images has 0"),
        ("<video>", {"images": []}, "mark_no_video", "1 <video> mark, videos has 0"),
        (
            [{"type": "image", "image": "a.png"}],
            {"images": ["a.png"]},
            "too_few_marks",
            "0 <image> marks, images has 1",
        ),
    ],
)
def test_marks_and_media_must_agree(text, fields, code, numbers):
    error = refused(asked(text, **fields))
    assert error.code == code
    assert numbers in error.message


def test_marks_are_literal_outside_of_user_text():
    answer = "![fig](<image>) or <video>"
    row = asked([{"type": "image", "image": "a.png"}, {"type": "text", "text": "the <image> tag"}])
    row["messages"] = [{"role": "system", "content": "<image>"}, row["messages"][0], {**ANSWER, "content": answer}]
    system, user, last = parse(row)[0].turns
    assert system.parts == ("<image>",)
    assert user.parts == (PICTURE, "the <image> tag")
    assert last.parts == (answer,)


def test_null_padding_of_parts_adds_nothing():
    padded = [
        {"type": "image", "image": "a.png", "text": None},
        None,
        {"type": None, "text": None, "image": None},
        {"type": "text", "text": "Padded?", "image": None, "video": None},
    ]
    assert parts(asked(padded)) == (PICTURE, "Padded?")


def test_both_forms_of_a_message_give_the_same_turn():
    typed = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What"}, {"type": "text", "text": "?"}]
    assert parts(asked(typed)) == parts(asked("<image>What?", images=["a.png"]))


def test_pictures_as_data_urls_and_in_the_openai_form():
    url = "data:image/png;base64," + base64.b64encode(b"bytes").decode()
    picture = Media("image", data=b"bytes")
    assert parts(asked([{"type": "image_url", "image_url": {"url": url, "detail": "low"}}])) == (picture,)
    assert parts(asked("<image>", images=url)) == (picture,)
    assert read_data_url(url) == b"bytes"


def test_videos_have_a_time_range():
    video = {"type": "video", "video": "v.mp4", "start": 1, "end": 2.5, "fps": 2}
    assert parts(asked([video])) == (Media("video", "/data/v.mp4", start_s=1, end_s=2.5, fps=2),)
    for wrong in ({"start": 3}, {"start": -1}, {"end": 0}, {"fps": 0}, {"fps": "2"}, {"start": True}):
        assert refused(asked([video | wrong])).code == "bad_time_range"


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("https://example.org/a.png", "remote_media"),
        ("s3://bucket/a.png", "remote_media"),
        ("data:image/png;base64,@@@", "bad_base64"),
        ("data:image/png;base64,", "bad_base64"),
        ("data:image/png,raw", "bad_base64"),
        ("", "wrong_type"),
        ("a\0.png", "wrong_type"),
        (7, "wrong_type"),
        (None, "wrong_type"),
        ({"path": "a.png"}, "wrong_type"),
    ],
)
def test_other_references_are_refused(value, code):
    error = refused(asked("<image>", images=[value]))
    assert error.code == code
    assert "images[0]" in error.message


def test_without_a_media_root_only_data_urls_are_read():
    assert refused(asked("<image>", images=["/etc/passwd"]), media_root=None).code == "local_media"
    assert parse(asked("<image>", images="data:;base64,QQ=="), media_root=None)[0].turns[0].parts[0].data == b"A"


def test_unread_keys_are_reported():
    _, findings = parse(asked([{"type": "image", "image": "a.png", "max_pixels": 99, "x": None}]))
    assert [(f.code, f.severity, f.line) for f in findings] == [("unknown_key", "warning", 7)]
    assert "max_pixels" in findings[0].message


# ---------------------------------------------------------------- chat: turns


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        ("not a list", "wrong_type"),
        (["text"], "wrong_type"),
        ([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": 42}], "wrong_type"),
        ([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None}], "null_content"),
        ([{"role": "tool", "content": "Hi"}, ANSWER], "wrong_role"),
        ([{"content": "Hi"}, ANSWER], "wrong_role"),
        ([{"role": "user", "content": "Hi"}, {"role": "system", "content": "late"}, ANSWER], "wrong_role"),
        ([{"role": "user", "content": "Hi", "train": False}, ANSWER], "wrong_train"),
        ([{"role": "user", "content": "Hi"}, {**ANSWER, "train": 0}], "wrong_train"),
        ([{"role": "user", "content": "Hi"}, {**ANSWER, "train": False}], "nothing_to_learn"),
        ([{"role": "user", "content": "Hi"}], "no_answer"),
        ([], "no_answer"),
        ([{"role": "assistant", "content": [{"type": "image", "image": "a.png"}]}], "media_in_answer"),
        ([{"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]}, ANSWER], "wrong_part"),
        ([{"role": "user", "content": [{"type": "text", "text": "x", "image": "a.png"}]}, ANSWER], "wrong_part"),
        ([{"role": "user", "content": [{}]}, ANSWER], "wrong_part"),
        ([{"role": "user", "content": [{"type": ["text"]}]}, ANSWER], "wrong_part"),
        ([{"role": "user", "content": [{"type": "text"}]}, ANSWER], "wrong_type"),
        ([{"role": "user", "content": [{"type": "image"}]}, ANSWER], "wrong_type"),
    ],
)
def test_turns_that_are_refused(messages, code):
    assert refused({"messages": messages}).code == code


def test_what_follows_the_last_answer_is_cut_off():
    row = asked("Hi")
    row["messages"].append({"role": "user", "content": "And now?"})
    sample, findings = parse(row)
    assert sample.turns == (Turn("user", ("Hi",)), Turn("assistant", ("Yes.",)))
    assert [f.code for f in findings] == ["trailing_turn"]


def test_an_empty_answer_is_kept_and_reported():
    row = {"messages": [*asked("Hi")["messages"], {"role": "assistant", "content": "", "train": True}]}
    sample, findings = parse(row)
    assert sample.turns[2] == Turn("assistant", ())
    assert [(f.code, "messages[2]" in f.message) for f in findings] == [("empty_answer", True)]


def test_turns_can_be_left_untrained_and_text_is_kept_letter_by_letter():
    row = {"messages": [{**ANSWER, "train": False}, {"role": "assistant", "content": "  two spaces\n"}]}
    assert parse(row)[0].turns == (Turn("assistant", ("Yes.",), False), Turn("assistant", ("  two spaces\n",)))


def test_questions_are_samples_where_no_answer_is_needed():
    row = {"messages": [*asked("Hi")["messages"], {"role": "user", "content": "And now?"}]}
    sample, findings = parse(row, require_labels=False)
    assert [t.role for t in sample.turns] == ["user", "assistant", "user", "assistant"]
    assert (sample.turns[-1].parts, findings) == ((), [])


def test_the_order_of_rows_changes_no_verdict(tmp_path):
    rows = [
        asked("<image>", images="a.png"),
        asked("<image>", images=["a.png"]),
        asked("x", images=None),
        asked(42),
        asked("<image>", images=[{"path": "a.png"}]),
        {"messages": "no"},
        ["a", "list"],
        asked("x", id=7),
        asked("x", id="seven"),
    ]

    def verdicts(order):
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(json.dumps(rows[i]) for i in order))
        lines, out = read_offsets(path), {}
        for at, i in enumerate(order):
            try:
                out[i] = parse(lines.read(at))[0].turns
            except RowError as error:
                out[i] = error.message
        return out

    order = list(range(len(rows)))
    expected = verdicts(order)
    assert sum(isinstance(v, str) for v in expected.values()) == 4
    for seed in range(5):
        assert verdicts(random.Random(seed).sample(order, len(order))) == expected


# ---------------------------------------------------------------- rerank

GROUP = {"query": "apple", "pos_doc": "a red apple", "neg_docs": ["a pear"]}


def test_a_group_of_texts():
    sample, findings = parse({**GROUP, "id": "q1", "instruction": "Find fruit", "kind": "en"}, "rerank")
    assert sample.query == Content("apple")
    assert sample.documents == (
        Document("d0", Content("a red apple"), 1.0),
        Document("d1", Content("a pear"), 0.0),
    )
    assert (sample.id, sample.instruction, sample.fields, findings) == ("q1", "Find fruit", {"kind": "en"}, [])


def test_a_group_of_pictures_with_ids():
    row = {
        "query": {"text": "which?", "image": "a.png"},
        "pos_doc": [{"text": "", "image": ["a.png", "b.png"]}, {"id": 5, "video": "v.mp4", "start": 0, "end": 2}],
        "neg_docs": [{"id": "n", "text": "pear", "image": None}, "plum"],
    }
    sample, findings = parse(row, "rerank")
    assert findings == []
    assert sample.query == Content("which?", (PICTURE,))
    assert [(d.id, d.label) for d in sample.documents] == [("d0", 1), ("5", 1), ("n", 0), ("d3", 0)]
    assert sample.documents[0].content == Content("", (PICTURE, Media("image", "/data/b.png")))
    assert sample.documents[1].content.media == (Media("video", "/data/v.mp4", start_s=0, end_s=2),)


def test_a_graded_group():
    row = {"query": "apple", "documents": ["a", {"id": "x", "text": "b"}, "c"], "labels": [0, 2, 0.5], "pos_doc": None}
    documents = parse(row, "rerank")[0].documents
    assert [(d.id, d.label) for d in documents] == [("d0", 0.0), ("x", 2.0), ("d2", 0.5)]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"query": ""}, "empty_query"),
        ({"query": {"text": "  "}}, "empty_query"),
        ({"query": None}, "empty_query"),
        ({"query": 3}, "wrong_type"),
        ({"query": {"text": 3}}, "wrong_type"),
        ({"pos_doc": None}, "no_positive"),
        ({"pos_doc": []}, "no_positive"),
        ({"pos_doc": [""]}, "empty_document"),
        ({"pos_doc": {"text": None, "image": []}}, "empty_document"),
        ({"neg_docs": None}, "no_negative"),
        ({"neg_docs": []}, "no_negative"),
        ({"neg_docs": "a pear"}, "wrong_type"),
        ({"neg_docs": [7]}, "wrong_type"),
        ({"neg_docs": [{"id": "d0", "text": "x"}]}, "duplicate_id"),
        ({"neg_docs": [{"id": 1.5, "text": "x"}]}, "wrong_type"),
        ({"neg_docs": [{"image": {"url": "a"}}]}, "wrong_type"),
        ({"instruction": 3}, "wrong_type"),
        ({"documents": ["a"], "labels": [1]}, "two_forms"),
    ],
)
def test_groups_that_are_refused(change, code):
    assert refused(GROUP | change, "rerank").code == code


@pytest.mark.parametrize(
    ("labels", "code"),
    [
        ([1], "label_count"),
        (None, "label_count"),
        ([1, -1], "wrong_label"),
        ([1, "0"], "wrong_label"),
        ([True, False], "wrong_label"),
        ([0, 0], "no_positive"),
        ([2, 1], "no_negative"),
    ],
)
def test_labels_that_are_refused(labels, code):
    assert refused({"query": "q", "documents": ["a", "b"], "labels": labels}, "rerank").code == code


def test_a_misspelt_key_of_a_document_is_reported():
    _, findings = parse({**GROUP, "neg_docs": [{"text": "pear", "img": "a.png"}]}, "rerank")
    assert [f.message for f in findings] == ["neg_docs[0] has keys that are not read: 'img'"]


@pytest.mark.parametrize(
    ("change", "labels"),
    [({"pos_doc": None}, [0.0]), ({"neg_docs": None}, [1.0]), ({}, [1.0, 0.0])],
)
def test_groups_to_score_need_neither_positives_nor_negatives(change, labels):
    sample, _ = parse(GROUP | change, "rerank", require_labels=False)
    assert [d.label for d in sample.documents] == labels


def test_documents_to_score_need_no_labels():
    row = {"query": "q", "documents": ["a", "b"]}
    assert [d.label for d in parse(row, "rerank", require_labels=False)[0].documents] == [0.0, 0.0]
    assert refused({"query": "q"}, "rerank", require_labels=False).code == "no_documents"


def test_reading_rows_and_headers_does_not_import_torch():
    code = "import sys, litchi.data.jsonl, litchi.data.media, litchi.data.verdicts; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
