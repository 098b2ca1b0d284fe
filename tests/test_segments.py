"""Long videos in segments: where they are cut, what belongs to each, and a question answered segment by segment."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import serving
from clips import number_of, write_clip
from processes import run_litchi
from rendering import renderer_for

from litchi.batch.index import ScanRules, build_index
from litchi.batch.loader import Corpus, make_batch
from litchi.data.segments import Cutting, cut_evenly, find_segments, group_texts, read_lines, write_time
from litchi.data.video import _taken, read_video_header
from litchi.errors import UsageError
from litchi.train.analyze import Asked, analyze_video, format_analysis
from litchi.train.writing import write_lines
from litchi.types import Media

RULES = ScanRules(2048)
SMALL = ("data.video.frame_pixels.min=3136", "data.video.frame_pixels.max=3136", "eval.max_new_tokens=8")
COLOURS = [(200, 60, 40), (60, 60, 200), (60, 160, 60)]


def write_scenes(path: Path) -> str:
    """Three scenes of 2, 1 and 3 s at 10 frames a second."""
    lengths = zip(COLOURS, (20, 10, 30), strict=True)
    return write_clip(path, [np.full((48, 64, 3), c, np.uint8) for c, n in lengths for _ in range(n)])


def row(path, answer="0:01-0:03 a red bag\n0:04-0:05.5 a dog", **more):
    parts = [{"type": "video", "video": path, **more.pop("cut", {})}, {"type": "text", "text": "What is there?"}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
    return {"id": "a", "messages": turns, **more}


def index_of(folder, processor, *rows, cutting, rules=RULES):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    small = processor.with_video(min_pixels=3136, max_pixels=3136)
    renderer = replace(renderer_for("chat", small), cutting=cutting)
    return build_index(str(path), "rows", renderer, rules), renderer


def answers(index, renderer):
    return {row.id: index.load(row, renderer).turns[-1].parts for row in index.rows}


# ---- Where


def test_fixed_lengths_and_scenes(tmp_path):
    path = write_scenes(tmp_path / "a.mp4")
    assert cut_evenly(0, 25, 10) == [(0, 10), (10, 20), (20, 25)] and cut_evenly(1, 21, 10) == [(1, 11), (11, 21)]
    times = [tuple(one) for one in find_segments(Media("video", path), Cutting(2.5))]
    assert times == [(0, 0.0, 2.5), (1, 2.5, 5.0), (2, 5.0, 6.0)]
    times = [tuple(one) for one in find_segments(Media("video", path), Cutting(100, True))]
    assert times == [(0, 0.0, 2.0), (1, 2.0, 3.0), (2, 3.0, 6.0)]
    times = [one[1:] for one in find_segments(Media("video", path, start_s=1.0, end_s=5.0), Cutting(1.5, True))]
    assert times == [(1.0, 2.0), (2.0, 3.0), (3.0, 4.5), (4.5, 5.0)]


@pytest.mark.parametrize(("rate", "length"), [(3, 1 / 3), (10, 0.7), (30, 0.25)])
def test_every_frame_is_in_one_segment(tmp_path, processor, rate, length):
    """Also where bounds are no decimal numbers."""
    path = write_clip(tmp_path / "a.mp4", 20, rate=rate)
    found = []
    for segment in find_segments(Media("video", path), Cutting(length)):
        part = Media("video", path, start_s=segment.start_s, end_s=segment.end_s)
        count = read_video_header(part).frames
        found += [number_of(rgb) for rgb in _taken(part, count)]
    assert found == list(range(20))


def test_a_pause_in_which_no_frame_begins_is_no_segment(tmp_path):
    path = write_clip(tmp_path / "a.mkv", 3, times=[0, 100, 5000], tick="1/1000")
    times = [one[1:] for one in find_segments(Media("video", path), Cutting(1))]
    assert times[:2] == [(0.0, 1.0), (5.0, times[1][1])] and len(times) == 2


# ---- What belongs to each


def test_lines_are_cut_at_segments(tmp_path, processor):
    index, renderer = index_of(tmp_path, processor, row(write_scenes(tmp_path / "a.mp4")), cutting=Cutting(2.0))
    assert answers(index, renderer) == {
        "a#0": ("0:01-0:02 a red bag",),
        "a#1": ("0:00-0:01 a red bag",),
        "a#2": ("0:00-0:01.5 a dog",),
    }
    assert [r.segment[1:] for r in index.rows] == [(0, 2), (2, 4), (4, 6)] and not index.findings


def test_events_are_cut_the_same_way_and_segments_without_one_are_left_out(tmp_path, processor):
    path = write_scenes(tmp_path / "a.mp4")
    events = [{"start": 0.5, "end": 1, "text": "a cup"}, {"start": 4.25, "end": 9, "text": "a hat"}]
    index, renderer = index_of(tmp_path, processor, row(path, "-", events=events), cutting=Cutting(2.0))
    assert answers(index, renderer) == {"a#0": ("0:00.5-0:01 a cup",), "a#2": ("0:00.25-0:02 a hat",)}
    assert [f.code for f in index.findings] == ["no_event"] and not index.bad
    rules = replace(RULES, require_labels=False)
    every, renderer = index_of(tmp_path, processor, row(path, "-", events=events), cutting=Cutting(2.0), rules=rules)
    assert answers(every, renderer)["a#1"] == () and len(every.rows) == 3


def test_segments_cost_what_rows_with_their_times_cost(tmp_path, processor):
    """A row for each segment, written by hand, gives the same batches."""
    path = write_scenes(tmp_path / "a.mp4")
    index, renderer = index_of(tmp_path, processor, row(path), cutting=Cutting(2.0))
    texts = ["0:01-0:02 a red bag", "0:00-0:01 a red bag", "0:00-0:01.5 a dog"]
    rows = [row(path, text, cut={"start": 2 * n, "end": 2 * n + 2}) for n, text in enumerate(texts)]
    (tmp_path / "b").mkdir()
    by_hand, plain = index_of(tmp_path / "b", processor, *rows, cutting=None)
    for number in range(3):
        one = make_batch(Corpus((index,), (renderer,)), [(number, None)])
        other = make_batch(Corpus((by_hand,), (plain,)), [(number, None)])
        assert index.rows[number].tokens == by_hand.rows[number].tokens == one.tokens
        for name in ("ids", "positions", "pixels", "targets"):
            assert getattr(one, name).equal(getattr(other, name)), name


@pytest.mark.parametrize(
    ("answer", "more", "code"),
    [
        ("a red bag", {}, "no_times"),
        ("0:01-0:03 a red bag\nand a dog", {}, "no_times"),
        ("-", {"events": [{"start": 3, "end": 3, "text": "x"}]}, "bad_event"),
        ("-", {"events": "x"}, "wrong_type"),
    ],
)
def test_rows_that_cannot_be_cut_are_named(tmp_path, processor, answer, more, code):
    path = write_scenes(tmp_path / "a.mp4")
    index, _ = index_of(tmp_path, processor, row(path, answer, **more), cutting=Cutting(2.0))
    assert [f.code for f in index.bad] == [code] and not index.rows


def test_a_short_video_and_a_row_without_one_stay_whole(tmp_path, processor):
    path = write_scenes(tmp_path / "a.mp4")
    text = {"id": "t", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "there"}]}
    index, renderer = index_of(tmp_path, processor, row(path, "a bag"), text, cutting=Cutting(60.0))
    assert answers(index, renderer) == {"a#0": ("a bag",), "t": ("there",)}


def test_times_as_text():
    assert [write_time(s) for s in (0, 61, 3723.5, 59.9996)] == ["0:00", "1:01", "1:02:03.5", "1:00"]
    assert read_lines("0:10-0:20: a bag\n1:00:00.5 \u2013 1:00:02 it is 0:30") == [
        (10, 20, "a bag"),
        (3600.5, 3602, "it is 0:30"),
    ]
    assert read_lines("") is None and read_lines("at 0:10-0:20 a bag") is None


def test_texts_in_groups():
    assert group_texts([3, 3, 3, 3, 3], 7) == [[0, 1], [2, 3], [4]] and group_texts([9], 10) == [[0]]
    with pytest.raises(UsageError, match="do not fit together"):
        group_texts([5, 5], 7)


# ---- A question


def ask(path, ranks, *words, **more):
    return analyze_video(Asked(path, "What is there?", **more), "builtin:tiny", [*SMALL, *words], ranks)


def test_a_question_is_answered_as_rows_with_times_are(tmp_path, ranks):
    path = write_scenes(tmp_path / "a.mp4")
    answer = ask(path, ranks, length_s=100.0, at_scenes=True)
    cuts = [{"start": start, "end": end} for start, end in ((0, 2), (2, 3), (3, 6))]
    rows = [{"messages": row(path, cut=cut)["messages"][:1]} for cut in cuts]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    write_lines("builtin:tiny", str(tmp_path / "rows.jsonl"), SMALL, tmp_path / "out.jsonl", ranks, task="chat")
    wanted = [json.loads(line)["text"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [s["text"] for s in answer["segments"]] == wanted and len(set(wanted)) > 1
    assert [(s["start_s"], s["end_s"]) for s in answer["segments"]] == [(0, 2), (2, 3), (3, 6)]
    assert isinstance(answer["answer"], str) and "0:02-0:03" in format_analysis(answer)


def test_what_was_answered_is_not_asked_again(tmp_path, ranks):
    path, out = write_scenes(tmp_path / "a.mp4"), tmp_path / "a.json"
    first = ask(path, ranks, length_s=2.0, out=out)
    kept = tmp_path / "a.json.segments.jsonl"
    lines = kept.read_text().splitlines()
    assert len(lines) == 3
    told = json.loads(lines[1]) | {"text": "said before"}
    kept.write_text(f"{lines[0]}\n{json.dumps(told)}\n{lines[2][:20]}")  # the last was being written
    again = ask(path, ranks, length_s=2.0, out=out)
    number = int(told["id"].split("#")[1])
    assert again["segments"][number]["text"] == "said before"
    others = [n for n in range(3) if n != number]
    assert [again["segments"][n] for n in others] == [first["segments"][n] for n in others]
    fresh = ask(path, ranks, "eval.max_new_tokens=7", length_s=2.0, out=out)  # another setting: another answer
    assert "said before" not in str(fresh)


def test_a_segment_that_is_too_long_stops_it(tmp_path, ranks):
    with pytest.raises(UsageError, match="a segment is too long"):
        ask(write_scenes(tmp_path / "a.mp4"), ranks, "data.max_length=30", length_s=2.0)


@pytest.mark.slow
def test_two_processes_answer_as_one(tmp_path):
    path = write_scenes(tmp_path / "a.mp4")
    words = ["video", "analyze", path, "--question", "What is there?", "--target", "builtin:tiny", *SMALL]
    made = []
    for procs in ("1", "2"):
        out = tmp_path / f"{procs}.json"
        more = ("--scenes", "--procs", procs, "--out", str(out), "--json", "--fuse", "builtin:tiny")
        ended = run_litchi(tmp_path / procs, *words, *more)
        assert ended.status == 0, ended.err
        assert json.loads(ended.out) == json.loads(out.read_text())
        made.append(json.loads(out.read_text()))
    assert made[0] == made[1] and len(made[0]["segments"]) == 3


# ---- Served


@pytest.mark.slow
def test_a_server_takes_videos_and_says_what_the_files_say(tmp_path, ranks):
    clips = [write_clip(tmp_path / f"{n}.mp4", [np.full((48, 64, 3), c, np.uint8)] * 20) for n, c in enumerate(COLOURS)]
    urls = ["data:video/mp4;base64," + base64.b64encode(Path(clip).read_bytes()).decode() for clip in clips]
    words = SMALL[:2]
    documents = [{"video": clip} for clip in clips]
    group = {"id": "g", "query": {"text": "red"}, "documents": documents}
    (tmp_path / "group.jsonl").write_text(json.dumps(group) + "\n")
    write_lines("builtin:tiny", str(tmp_path / "group.jsonl"), words, tmp_path / "scores.jsonl", ranks, task="rerank")
    wanted = [json.loads(line)["score"] for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": row(clips[0])["messages"][:1]}) + "\n")
    write_lines("builtin:tiny", str(tmp_path / "chat.jsonl"), SMALL, tmp_path / "texts.jsonl", ranks, task="chat")
    said = json.loads((tmp_path / "texts.jsonl").read_text())["text"]
    with serving.serving(tmp_path / "server", "builtin:tiny", *words, "serve.request_pixels=150000") as server:
        body = {"query": "red", "documents": [{"video": url} for url in urls]}
        for _ in range(2):  # the second time from the features of the first
            found = {r["index"]: r["logit"] for r in server.post("/v1/rerank", body).json()["results"]}
            assert [found[n] for n in range(3)] == pytest.approx(wanted, abs=1e-5)
        parts = [{"type": "video_url", "video_url": {"url": urls[0]}}, {"type": "text", "text": "What is there?"}]
        asked = {"messages": [{"role": "user", "content": parts}], "max_tokens": 8}
        assert server.post("/v1/chat/completions", asked).json()["choices"][0]["message"]["content"] == said
        cut = {"query": "red", "documents": [{"video": urls[0][: len(urls[0]) // 2 // 4 * 4]}]}
        refused = server.post("/v1/rerank", cut)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "documents[0].video"
        large = {"query": "red", "documents": [{"video": {"video": url, "nframes": 20}} for url in urls]}
        assert server.post("/v1/rerank", large).status_code == 413


@pytest.mark.slow
def test_a_tuned_model_names_every_scene_in_its_time(tmp_path):
    """Tuned on clips of one colour each, of many lengths; asked about a film of ten scenes."""
    dice = np.random.default_rng(0)
    names = ["red", "blue", "green"]
    rows = []
    for number in range(48):
        kind = number % 3
        shade = np.clip(np.array(COLOURS[kind]) + dice.integers(-15, 16, 3), 0, 255).astype(np.uint8)
        clip = write_clip(
            tmp_path / f"{number}.mp4", [np.full((56, 56, 3), shade, np.uint8)] * int(dice.integers(10, 40))
        )
        rows.append(row(clip, names[kind]) | {"id": str(number)})
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    config = str(Path(__file__).parent.parent / "configs" / "chat-tiny.yaml")
    words = ("trainable.vision=full", "trainable.merger=full", "train.steps=60", "data.workers=0", *SMALL[:2])
    run = str(tmp_path / "run")
    data = f"data.train={tmp_path / 'train.jsonl'}"
    ended = run_litchi(tmp_path / "train", "train", config, data, f"output={run}", *words, timeout_s=240)
    assert ended.status == 0, ended.err
    kinds = [0, 1, 2, 1, 0, 2, 0, 1, 2, 0]
    lengths = [10, 25, 15, 30, 12, 20, 35, 18, 22, 13]
    film = [
        np.full((56, 56, 3), COLOURS[kind], np.uint8) for kind, n in zip(kinds, lengths, strict=True) for _ in range(n)
    ]
    path = write_clip(tmp_path / "film.mp4", film)
    asked = ("video", "analyze", path, "--question", "What is there?", "--target", run, "--scenes", "--json")
    ended = run_litchi(tmp_path / "asked", *asked)
    assert ended.status == 0, ended.err
    found = [(s["start_s"], s["end_s"], s["text"]) for s in json.loads(ended.out)["segments"]]
    bounds = [sum(lengths[:n]) / 10 for n in range(11)]
    assert found == [(a, b, names[kind]) for a, b, kind in zip(bounds, bounds[1:], kinds, strict=False)]
