"""`litchi data convert`: every format in every kind of file and back gives the same samples; what is lost is named."""

import json
import tarfile
from pathlib import Path

import pytest
from rendering import draw
from runs import read_rows

from litchi.data.content import media_key
from litchi.data.formats import compare_samples
from litchi.data.formats_rerank import FORMATS
from litchi.data.jsonl import parse_sample, read_offsets
from litchi.data.records import KINDS, decode_cell, encode_cell, read_records, write_records
from litchi.errors import DataError, UsageError
from litchi.prepare.convert import convert_file
from litchi.types import Media, Source

ODD = 'She said "1", [2], {"a": 3}; 红色\tand\r\nnew lines, '


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def chat(question, answer, **more):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


def pictures(folder, count=3):
    return [draw(folder / f"{i}.png", 60 + 20 * i, 40, seed=i) for i in range(count)]


# Rows that every format of the task can hold: one picture question, pictures only, no picture; one positive, texts.
CHAT = [
    chat([{"type": "image", "image": "0.png"}, {"type": "text", "text": "What?"}], "A cat.", kind="single"),
    chat("[1, 2]", '{"a": 1}', kind="1"),
    chat(
        [{"type": "image", "image": "1.png"}, {"type": "image", "image": "2.png"}, {"type": "text", "text": ODD}], ODD
    ),
]
GROUPS = [
    {"query": "a red hat", "pos_doc": "hat, red", "neg_docs": ["hat, blue", ODD, "7"]},
    {"query": "[5]", "pos_doc": "five", "neg_docs": ["six"]},
]
# What only some hold: system and several turns, no loss on a turn, ids, an instruction, pictures, grades, positives.
RICH_CHAT = [
    {
        "id": "talk",
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "<image> first <image>?"},
            {"role": "assistant", "content": "", "train": False},
            {"role": "user", "content": "And now?"},
            {"role": "assistant", "content": "Yes."},
        ],
        "images": ["0.png", "1.png"],
        "score": 1.5,
        "tags": ["a", "b"],
    }
]
RICH_GROUPS = [
    {
        "id": "g1",
        "query": {"text": "like this", "image": "0.png"},
        "pos_doc": [{"text": "red", "image": ["1.png", "2.png"]}, "scarlet"],
        "neg_docs": ["blue", {"image": "2.png"}],
        "instruction": "Find it.",
        "price": 3,
    }
]
GRADED = [{"query": "q", "documents": [{"id": "x", "text": "a"}, "b", "c"], "labels": [0, 2, 1]}]


def samples(path, task, root=None):
    """Parse a Litchi file with pictures by content, so that copies count as the same."""
    lines, found = read_offsets(path), []
    for i in range(len(lines)):
        root = root or str(Path(path).absolute().parent)
        sample, _ = parse_sample(
            lines.read(i), task=task, source=Source("rows.jsonl", i + 1), media_root=root, require_labels=False
        )
        found.append(by_content(sample))
    return found


def by_content(value):
    """Samples with each picture replaced by one named after its bytes."""
    from dataclasses import fields, is_dataclass, replace

    if isinstance(value, Media):
        assert value.data is not None or Path(value.path).is_file()
        return Media(value.kind, f"/{media_key(value):x}")
    if isinstance(value, tuple):
        return tuple(by_content(item) for item in value)
    if is_dataclass(value) and not isinstance(value, Source):
        return replace(value, **{f.name: by_content(getattr(value, f.name)) for f in fields(value)})
    return value


def same(before, after):
    assert len(before) == len(after) > 0
    return [compare_samples(a, b) for a, b in zip(before, after, strict=True)]


TASK_OF = {name: form.task for name, form in FORMATS.items() if form.task}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TASK_OF)
def test_there_and_back_again_through_every_format_and_kind_of_file(name, kind, tmp_path):
    """Litchi -> format in a file of a kind -> Litchi: the same samples, pictures by their bytes."""
    folder = tmp_path / "data"
    pictures(folder)
    rows = [dict(row) for row in (CHAT if TASK_OF[name] == "chat" else GROUPS)]
    start = write(folder / "rows.jsonl", rows)
    there = tmp_path / "there" / f"rows{kind}"
    there.parent.mkdir()
    (tmp_path / "back").mkdir()
    answer = convert_file(str(start), str(there), read="litchi", write=name)
    assert answer["rows"] == len(rows) and answer["lost"] == answer["left_out"] == {}
    back = tmp_path / "back" / "rows.jsonl"
    convert_file(str(there), str(back), read=name)
    assert same(samples(start, TASK_OF[name]), samples(back, TASK_OF[name])) == [set()] * len(rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("task", "rows"), [("chat", RICH_CHAT), ("rerank", RICH_GROUPS), ("rerank", GRADED)])
def test_litchis_own_form_in_every_kind_of_file(task, rows, kind, tmp_path):
    folder = tmp_path / "data"
    pictures(folder)
    start = write(folder / "rows.jsonl", rows)
    (tmp_path / "there").mkdir()
    there = tmp_path / "there" / f"rows{kind}"
    convert_file(str(start), str(there), read="litchi", write="litchi")
    back = tmp_path / "back.jsonl"
    assert convert_file(str(there), str(back))["from"] == "litchi"
    assert same(samples(start, task), samples(back, task)) == [set()]


HELD = {  # what each format keeps of the rich rows, beside what it was made for
    "sharegpt": {"train: false", "turns"},
    "llava": {"train: false", "turns", "system turn"},
    "alpaca": {"train: false", "turns"},
    "ms-swift": set(),
    "ms-swift-reranker": set(),
    "qwen3-vl-reranker": set(),
    "st-columns": {"id", "instruction", "field price"},
    "st-pairs": {"id", "instruction", "field price"},
}


@pytest.mark.parametrize("name", HELD)
def test_what_a_format_cannot_hold_is_refused_by_name_or_counted(name, tmp_path):
    pictures(tmp_path)
    rows = RICH_CHAT if TASK_OF[name] == "chat" else RICH_GROUPS
    start = write(tmp_path / "rows.jsonl", rows)
    out = tmp_path / "out.jsonl"
    if HELD[name]:
        with pytest.raises(DataError, match=rf"cannot hold: .*\({start}:1\)"):
            convert_file(str(start), str(out), write=name)
        assert not out.exists()
    answer = convert_file(str(start), str(out), write=name, lossy=bool(HELD[name]))
    assert answer["lost"] == {what: 1 for what in HELD[name]}
    back = tmp_path / "back.jsonl"
    convert_file(str(out), str(back), read=name)
    (differ,) = same(samples(start, TASK_OF[name]), samples(back, TASK_OF[name]))
    assert differ == HELD[name] - {"train: false", "system turn"}


def test_a_pair_of_answers_is_refused_and_not_left_without_one(tmp_path):
    asked = {"conversations": [{"from": "human", "value": "Hi"}]}
    told = {"chosen": {"from": "gpt", "value": "Hello"}, "rejected": {"from": "gpt", "value": "No"}}
    start = write(tmp_path / "rows.jsonl", [asked | told])
    with pytest.raises(DataError, match="a chosen and a rejected answer") as caught:
        convert_file(str(start), str(tmp_path / "out.jsonl"), read="sharegpt")
    assert str(caught.value.where) == f"{start}:1"


UNFIT = [
    ("flagembedding", RICH_GROUPS[0], "pictures"),
    ("st-triples", RICH_GROUPS[0], "2 positives"),
    ("qa", RICH_CHAT[0], "4 turns"),
    ("sharegpt", chat([{"type": "text", "text": "a <image> mark"}], "b"), "would be a mark"),
    ("llava", chat("a", "see ![x](<image>)"), "would be a mark"),
    ("ms-swift-reranker", {"query": "<image>", "pos_doc": "a", "neg_docs": ["b"]}, "would be a mark"),
    ("sharegpt", {"messages": [{"role": "assistant", "content": "Hi"}]}, "take turns"),
]


@pytest.mark.parametrize(("name", "row", "why"), UNFIT)
def test_a_row_that_does_not_fit_is_named_or_left_out_and_counted(name, row, why, tmp_path):
    pictures(tmp_path)
    good = CHAT[1] if TASK_OF[name] == "chat" else GROUPS[1]
    start = write(tmp_path / "rows.jsonl", [good, row])
    with pytest.raises(DataError, match=why) as caught:
        convert_file(str(start), str(tmp_path / "out.jsonl"), write=name)
    assert str(caught.value.where) == f"{start}:2"
    lossy = convert_file(str(start), str(tmp_path / "out.jsonl"), write=name, lossy=True)
    assert sum(lossy["left_out"].values()) == 1 and len(read_rows(tmp_path / "out.jsonl")) == 1


# ---- what others write, by hand

FOREIGN = [
    (
        "sharegpt",
        {
            "conversations": [{"from": "human", "value": "<image>Hi"}, {"from": "gpt", "value": "Yo"}],
            "system": "S",
            "images": ["0.png"],
        },
        {
            "messages": [
                {"role": "system", "content": "S"},
                {"role": "user", "content": [{"type": "image", "image": "0.png"}, {"type": "text", "text": "Hi"}]},
                {"role": "assistant", "content": "Yo"},
            ]
        },
    ),
    (
        "llava",
        {
            "id": "7",
            "image": "0.png",
            "conversations": [{"from": "human", "value": "<image>\nHi"}, {"from": "gpt", "value": "Yo"}],
        },
        chat([{"type": "image", "image": "0.png"}, {"type": "text", "text": "\nHi"}], "Yo", id="7"),
    ),
    (
        "ms-swift",
        {
            "messages": [
                {"role": "user", "content": "<image>a"},
                {"role": "assistant", "content": "b", "loss": False},
                {"role": "user", "content": "c"},
                {"role": "assistant", "content": "d", "loss": True},
            ],
            "images": "0.png",
        },
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "image": "0.png"}, {"type": "text", "text": "a"}]},
                {"role": "assistant", "content": "b", "train": False},
                {"role": "user", "content": "c"},
                {"role": "assistant", "content": "d"},
            ]
        },
    ),
    (
        "ms-swift",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "image"}]},
                {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
            ],
            "images": ["1.png", "0.png"],
        },
        chat([{"type": "text", "text": "a"}, *({"type": "image", "image": f"{i}.png"} for i in (1, 0))], "b"),
    ),
    (
        "ms-swift",
        {"system": "S", "history": [["a", "b"]], "query": "c", "response": "d"},
        {
            "messages": [
                {"role": "system", "content": "S"},
                *chat("a", "b")["messages"],
                *chat("c", "d")["messages"],
            ]
        },
    ),
    (
        "alpaca",
        {
            "instruction": "<image>Sort.",
            "input": "b, a",
            "output": "a, b",
            "system": "S",
            "history": [["q", "r"]],
            "images": ["0.png"],
        },
        {
            "messages": [
                {"role": "system", "content": "S"},
                *chat("q", "r")["messages"],
                *chat([{"type": "image", "image": "0.png"}, {"type": "text", "text": "Sort.\nb, a"}], "a, b")[
                    "messages"
                ],
            ]
        },
    ),
    ("alpaca", {"instruction": "Name one.", "input": "", "output": "A", "history": []}, chat("Name one.", "A")),
    ("qa", {"image": "0.png", "question": "Q?", "answer": "[1]"}, chat("<image>Q?", "[1]", images=["0.png"])),
    (
        "ms-swift-reranker",
        {
            "messages": [{"role": "user", "content": "<image>q"}],
            "images": ["0.png"],
            "positive_messages": [[{"role": "user", "content": "<image>"}]],
            "positive_images": [["1.png"]],
            "negative_messages": [[{"role": "assistant", "content": "b"}], [{"role": "assistant", "content": "c"}]],
        },
        {"query": {"text": "q", "image": "0.png"}, "pos_doc": {"image": "1.png"}, "neg_docs": ["b", "c"]},
    ),
    (
        "ms-swift-reranker",
        {"query": "q", "response": "a", "rejected_response": ["b", "c"]},
        {"query": "q", "pos_doc": "a", "neg_docs": ["b", "c"]},
    ),
    (
        "flagembedding",
        {"query": "q", "pos": ["a", "b"], "neg": ["c"], "prompt": "P", "pos_scores": [1, 0.5]},
        {"query": "q", "pos_doc": ["a", "b"], "neg_docs": ["c"], "instruction": "P", "pos_scores": [1, 0.5]},
    ),
    (
        "st-triples",
        {"anchor": "q", "positive": "a", "negative_10": "k", "negative_2": "b"},
        {"query": "q", "pos_doc": "a", "neg_docs": ["b", "k"]},
    ),
    (
        "qwen3-vl-reranker",
        {
            "instruction": "I",
            "query": {"text": "q"},
            "documents": [{"text": "a"}, {"image": "0.png"}],
            "labels": [1, 0],
            "fps": 1.0,
        },
        {"query": "q", "pos_doc": "a", "neg_docs": [{"image": "0.png"}], "instruction": "I", "fps": 1.0},
    ),
]


@pytest.mark.parametrize(("name", "record", "row"), FOREIGN)
def test_records_as_other_tools_write_them(name, record, row, tmp_path):
    pictures(tmp_path)
    start = tmp_path / "theirs.json"
    start.write_text(json.dumps([record]), encoding="utf-8")
    wanted = write(tmp_path / "ours.jsonl", [row])
    answer = convert_file(str(start), str(tmp_path / "out.jsonl"), read=name)
    assert answer["rows"] == 1
    task = "chat" if "messages" in row else "rerank"
    assert same(samples(wanted, task), samples(tmp_path / "out.jsonl", task)) == [set()]
    guessed = tmp_path / "guessed.jsonl"
    assert convert_file(str(start), str(guessed))["from"] in (name, "litchi")
    assert guessed.read_bytes() == (tmp_path / "out.jsonl").read_bytes()


def test_labelled_pairs_of_one_query_are_one_group(tmp_path):
    pairs = [("q", "a", 1), ("q", "b", 0), ("r", "c", 0.5), ("r", "d", 0), ("q", "e", 1)]
    rows = [dict(zip(("query", "passage", "score"), pair, strict=True)) for pair in pairs]
    answer = convert_file(str(write(tmp_path / "in.jsonl", rows)), str(tmp_path / "out.jsonl"))
    assert (answer["from"], answer["rows"]) == ("st-pairs", 3)
    assert read_rows(tmp_path / "out.jsonl") == [
        {"query": "q", "pos_doc": "a", "neg_docs": ["b"]},
        {"query": "r", "documents": ["c", "d"], "labels": [0.5, 0]},
        {"query": "q", "pos_doc": "e", "neg_docs": []},
    ]


def test_a_table_of_pictures_as_the_hub_stores_it(tmp_path):
    """Bytes in structs become files named by their hash, each once; nulls that fill up structs are nothing."""
    import pyarrow
    import pyarrow.parquet

    red, blue = (Path(p).read_bytes() for p in pictures(tmp_path, 2))
    shown = [{"bytes": red, "path": "red.png"}, {"bytes": blue, "path": None}, {"bytes": red, "path": "again.png"}]
    table = pyarrow.table({"image": shown, "question": ["a", "b", "c"], "answer": ["1", "2", None]})
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet")
    with pytest.raises(UsageError, match="record 3"):
        convert_file(str(tmp_path / "in.parquet"), str(tmp_path / "out.jsonl"))
    pyarrow.parquet.write_table(table.slice(0, 2), tmp_path / "in.parquet")
    answer = convert_file(str(tmp_path / "in.parquet"), str(tmp_path / "out.jsonl"))
    assert (answer["from"], answer["rows"]) == ("qa", 2)
    found = [row["messages"][0]["content"][0]["image"] for row in read_rows(tmp_path / "out.jsonl")]
    assert [Path(p).read_bytes() for p in found] == [red, blue]
    assert {Path(p).parent for p in found} == {tmp_path / "out.media"}


def test_a_tar_of_pictures_with_captions(tmp_path):
    names = pictures(tmp_path, 2)
    with tarfile.open(tmp_path / "in.tar", "w") as tar:
        for i, name in enumerate(names):
            (tmp_path / "c.txt").write_text(f"caption {i}")
            tar.add(name, f"part/{i:03}.png")
            tar.add(tmp_path / "c.txt", f"part/{i:03}.txt")
    answer = convert_file(str(tmp_path / "in.tar"), str(tmp_path / "out.jsonl"))
    assert (answer["from"], answer["rows"]) == ("qa", 2)
    for i, row in enumerate(read_rows(tmp_path / "out.jsonl")):
        user, told = row["messages"]
        assert Path(user["content"][0]["image"]).read_bytes() == Path(names[i]).read_bytes()
        assert told["content"] == f"caption {i}" and len(user["content"]) == 1


# ---- paths


def test_relative_paths_become_absolute_or_start_from_another_folder(tmp_path):
    data, root = tmp_path / "lists", tmp_path / "pictures"
    pictures(root)
    start = write(data / "rows.jsonl", [CHAT[0]])
    convert_file(str(start), str(tmp_path / "a.jsonl"), media_root=str(root), write="llava")
    assert read_rows(tmp_path / "a.jsonl")[0]["image"] == str(root / "0.png")
    convert_file(str(start), str(tmp_path / "b.jsonl"), media_root=str(root), write="llava", out_root=str(tmp_path))
    assert read_rows(tmp_path / "b.jsonl")[0]["image"] == "pictures/0.png"
    with pytest.raises(DataError, match="cannot be read"):
        convert_file(str(start), str(tmp_path / "c.parquet"), read="litchi")  # from its own folder there is no picture


def test_refusals(tmp_path):
    start = write(tmp_path / "rows.jsonl", [GROUPS[0]])
    (tmp_path / "there.jsonl").write_text("")
    for words, why in (
        ({"out": "there.jsonl"}, "nothing is overwritten"),
        ({"out": "none/out.jsonl"}, "no folder"),
        ({"out": "out.xlsx"}, "of no kind"),
        ({"write": "vicuna"}, "is not a format"),
        ({"write": "llava"}, "holds conversations"),
    ):
        out = str(tmp_path / words.pop("out", "out.jsonl"))
        with pytest.raises(UsageError, match=why):
            convert_file(str(start), out, **words)
    odd = write(tmp_path / "odd.jsonl", [{"a": 1}])
    with pytest.raises(UsageError, match="not clear"):
        convert_file(str(odd), str(tmp_path / "out.jsonl"))
    broken = tmp_path / "broken.jsonl"
    broken.write_bytes(b'{"query": "a", "query": "b"}\n')
    with pytest.raises(DataError, match=r"stands twice.*broken.jsonl:1"):
        convert_file(str(broken), str(tmp_path / "out.jsonl"), read="litchi")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["broken.jsonl", "odd.jsonl", "rows.jsonl", "there.jsonl"]


CELLS = [
    ODD,
    "1",
    "[1]",
    '{"a": 1}',
    '"quoted"',
    '"[1]"',
    "",
    "null",
    "true",
    "x",
    1,
    1.5,
    True,
    [1, "a"],
    {"k": ["v"]},
]


@pytest.mark.parametrize("name", ["query", "kind", "messages"])
@pytest.mark.parametrize("value", CELLS, ids=repr)
def test_cells_of_tables_keep_texts_and_numbers_apart(name, value):
    if name == "query" and isinstance(value, int | float):
        pytest.skip("a query is never a number")
    found = decode_cell(name, encode_cell(name, value))
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("kind", KINDS)
def test_many_records_in_every_kind_of_file(kind, tmp_path):
    """More than a batch, with fields that only some have and that differ in type."""
    records = [{"n": i, "text": f"t{i}", **({"extra": [i]} if i % 3 else {"extra": "s"})} for i in range(600)]
    write_records(tmp_path / f"r{kind}", lambda: iter(records))
    found = list(read_records(tmp_path / f"r{kind}"))
    assert [record for _, record in found] == records
    assert [number for number, _ in found] == list(range(1, 601))
