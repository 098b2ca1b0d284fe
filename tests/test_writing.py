"""`score` and `generate` over files: what was done is never lost, done twice or changed, wherever they were killed."""

from __future__ import annotations

import re

import pytest
from processes import Running, RunningRanks
from runs import chat_rows, read_rows, rerank_rows, write_rows
from writing_job import write_killed, write_on_ranks

from litchi.errors import DataError, UsageError
from litchi.evaluate.json_answers import load_schema
from litchi.evaluate.trec import read_run
from litchi.train.parts import Parts
from litchi.train.writing import _check, deal_batches, write_lines

SMALL = [
    "data.pixels.min=3136",
    "data.pixels.max=50176",
    "data.workers=0",
    "train.micro_batch_tokens=256",
    "eval.max_new_tokens=6",
]  # many batches


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return str(rerank_rows(tmp_path_factory.mktemp("data"), 10))


# ---- What is kept


def batch(*rows):
    return [{"row": row, "text": f"answer {row}\u2028\n{{"} for row in rows]


def test_a_part_cut_off_at_any_byte_holds_its_closed_batches(tmp_path):
    parts = Parts(tmp_path / "parts")
    assert parts.begin({"a": 1}) == (1, set())
    with parts.write(1, 0) as keep:
        ends = []
        for rows in ((3, 0), (2,), (1, 4)):
            keep(batch(*rows))
            ends.append((parts._list()[0].stat().st_size, rows))
    whole = parts._list()[0].read_bytes()
    for size in range(len(whole) + 1):
        parts._list()[0].write_bytes(whole[:size])
        start, done = parts.begin({"a": 1})
        closed = {row for end, rows in ends for row in rows if end - 1 <= size}  # the last byte ends the line
        assert (start, done) == (2, closed)
    assert list(parts.read(5)) == batch(0, 1, 2, 3, 4)
    parts.remove()
    assert list(tmp_path.iterdir()) == []


def test_starts_and_ranks_have_parts_of_their_own_and_a_lost_one_is_an_error(tmp_path):
    parts = Parts(tmp_path / "parts")
    for start, shares in ((1, [(0, 1), (4,)]), (2, [(2,), (3,)])):
        assert parts.begin({})[0] == start
        for rank, rows in enumerate(shares):
            with parts.write(start, rank) as keep:
                keep(batch(*rows))
                keep([])
    assert list(parts.read(5)) == batch(0, 1, 2, 3, 4)
    parts._list()[1].unlink()
    with pytest.raises(Exception, match="1 of 5 rows are in no part"):
        list(parts.read(5))


def test_batches_are_dealt_in_turn_and_as_many_to_each():
    assert deal_batches([[1], [2], [3], [4], [5]], 2) == [[[1], [3], [5]], [[2], [4], []]]
    assert deal_batches([], 3) == [[], [], []] and deal_batches([[1]], 2) == [[[1]], [[]]]


# ---- Whole commands


def killed(folder, data, out, more, moment, times=1):
    running = Running(write_killed, (moment, times, data, SMALL, str(out), more), folder / "killed", {})
    ended = running.end(100)
    assert ended.status == -9, ended.err


def places(folder):
    """Where the file that is wanted lies, and the one that is written in pieces."""
    for name in ("wanted", "out"):
        (folder / name).mkdir()
    return folder / "wanted" / "lines.jsonl", folder / "out" / "lines.jsonl"


def assert_same_folders(wanted, out):
    names = sorted(path.name for path in wanted.parent.iterdir())
    assert names == sorted(path.name for path in out.parent.iterdir())
    for name in names:
        assert (wanted.parent / name).read_bytes() == (out.parent / name).read_bytes()
    return names


def test_a_killed_command_goes_on_and_writes_the_same(tmp_path, data, ranks, capsys):
    wanted, out = places(tmp_path)
    more = {"task": "rerank", "trec": out.with_name("lines.run")}
    whole = write_lines("builtin:tiny", data, SMALL, wanted, ranks, **{**more, "trec": wanted.with_name("lines.run")})
    assert whole.lines == 30 and str(whole) == "30 lines"
    killed(tmp_path, data, out, more, "after a batch", 2)
    assert [path.name for path in out.parent.iterdir()] == ["lines.jsonl.parts"]
    assert write_lines("builtin:tiny", data, SMALL, out, ranks, **more) == whole
    assert re.search(r"[2-9] of 10 rows are done already", capsys.readouterr().err)
    assert assert_same_folders(wanted, out) == ["lines.jsonl", "lines.run"]
    scores = {}
    for line in read_rows(out):
        scores.setdefault(line["query_id"], {})[line["doc_id"]] = line["score"]
    assert read_run(more["trec"]) == scores and list(scores) == [f"q{i}" for i in range(10)]
    with pytest.raises(UsageError, match="exists: nothing is overwritten"):
        write_lines("builtin:tiny", data, SMALL, out, ranks, **more)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["rerank", "chat"])
def test_killed_again_and_again(tmp_path, data, ranks, task):
    wanted, out = places(tmp_path)
    if task == "chat":
        data = str(chat_rows(tmp_path / "chat", 24))
    more = {"rerank": {"task": "rerank", "trec": out.with_name("lines.run")}, "chat": {"task": "chat"}}[task]
    there = {"trec": wanted.with_name("lines.run")} if task == "rerank" else {}
    write_lines("builtin:tiny", data, SMALL, wanted, ranks, **more | there)
    moments = [("before command.json", 1), ("after command.json", 1), ("before a batch", 1), ("after a batch", 1)]
    moments += [("before a batch", 2), *([("after lines.run", 1)] if there else []), ("before lines.jsonl", 1)]
    moments += [("after lines.jsonl", 1), ("before .lines.jsonl.parts.done", 1)]
    for moment in moments:
        killed(tmp_path, data, out, more, *moment)
    write_lines("builtin:tiny", data, SMALL, out, ranks, **more)
    assert assert_same_folders(wanted, out) == ["lines.jsonl", *(path.name for path in there.values())]


@pytest.mark.slow
def test_several_ranks_go_on_where_they_were_killed_also_as_another_number(tmp_path, data, ranks):
    wanted, out = places(tmp_path)
    more = {"task": "rerank"}
    write_lines("builtin:tiny", data, SMALL, wanted, ranks, **more)
    two = RunningRanks(tmp_path / "a", 2, write_on_ranks, data, SMALL, str(out), more, "after a batch", 2)
    assert two.running[1].end(100).status == -9
    two.running[0].kill()
    assert len(list(Parts(out.with_name("lines.jsonl.parts"))._list())) == 2
    three = RunningRanks(tmp_path / "b", 3, write_on_ranks, data, SMALL, str(out), more, "after a batch", 1)
    assert three.running[2].end(100).status == -9
    for one in three.running:
        one.kill()
    assert RunningRanks(tmp_path / "c", 2, write_on_ranks, data, SMALL, str(out), more).results() == [30, 30]
    assert assert_same_folders(wanted, out) == ["lines.jsonl"]


def test_parts_of_another_command_are_refused_by_name(tmp_path, data, ranks):
    _, out = places(tmp_path)
    parts = Parts(out.with_name("lines.jsonl.parts"))
    parts.begin({"target": "x", "data.pixels.min": 3136})
    with pytest.raises(UsageError, match=r"lines\.jsonl\.parts is of another command: other target, data, ") as error:
        write_lines("builtin:tiny", data, SMALL, out, ranks, task="rerank")
    assert "data.pixels.min" not in error.value.line() and "Remove the folder" in error.value.line()


def test_answers_are_held_against_a_schema(tmp_path, ranks):
    """The packaged base answers no JSON, but with words that make JSON of nothing; a schema of texts tells."""
    data, out = chat_rows(tmp_path, 3), tmp_path / "answers.jsonl"
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "required": ["colour"]}')
    written = write_lines("builtin:tiny", str(data), SMALL, out, ranks, task="chat", schema=str(schema))
    assert (written.lines, written.fitting, written.not_json) == (3, 0, 3)
    assert str(written) == "3 answers (0 keep to the schema, 0 break it, 3 are no JSON)"
    for line in read_rows(out):
        assert line.keys() == {"id", "text", "problem"} and line["problem"].startswith("no JSON")


def test_what_is_said_of_an_answer(tmp_path):
    path = tmp_path / "schema.json"
    path.write_text('{"type": "object", "required": ["colour"]}')
    schema = load_schema(path)
    assert _check('{"colour": "red"}', schema) == {"json": {"colour": "red"}, "problem": None}
    broken = _check('Sure: {"color": "red"}', schema)
    assert broken["json"] == {"color": "red"} and "'colour' is a required property" in broken["problem"]
    assert "json" not in _check("red", schema) and _check("red", None) == {}


def test_an_id_that_no_trec_run_can_hold_is_said_before_anything_is_computed(tmp_path, ranks):
    data = write_rows(tmp_path / "rows.jsonl", [{"id": "a b", "query": "x", "pos_doc": "y", "neg_docs": ["z"]}])
    with pytest.raises(DataError, match="'a b' cannot be written in TREC form") as error:
        more = {"task": "rerank", "trec": tmp_path / "out.run"}
        write_lines("builtin:tiny", str(data), SMALL, tmp_path / "out.jsonl", ranks, **more)
    assert f"{data}:1" in str(error.value) and len(list(tmp_path.iterdir())) == 1
