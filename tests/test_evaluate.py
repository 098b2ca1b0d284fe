"""Whatever form a model is given in, it is measured alike: with its own prompt and pixels, on any number of ranks."""

import json
import math

import pytest
import torch
from processes import run_litchi, run_litchi_ranks
from runs import chat_rows, read_json, read_rows, rerank_rows, train, write_rows
from safetensors.torch import load_file, save_file

from litchi.batch import loader
from litchi.errors import UserError
from litchi.evaluate.trec import measure_files
from litchi.train.checkpoint import list_checkpoints
from litchi.train.export_target import export_target
from litchi.train.measure import measure_one, measure_target
from litchi.train.writing import write_lines

PIXELS = ("data.pixels.min=6272", "data.pixels.max=12544")
CLOSE = {"abs": 1e-5}
KINDS = ("run", "checkpoint", "export", "adapter", "exported again", "unfinished run")


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    return tmp_path_factory.mktemp("evaluate")


@pytest.fixture(scope="module")
def data(room):
    return rerank_rows(room / "data", 6)


@pytest.fixture(scope="module")
def run(room, ranks, data):
    """LoRA on language and vision, with everything that has to travel set away from its default."""
    small = write_rows(room / "data" / "small.jsonl", read_rows(data)[:3])
    sets = f"data.eval=[{{path: {data}, name: big}}, {{path: {small}, name: small}}]"
    words = ("task=rerank", f"data.train={data}", sets, *PIXELS, "trainable.vision=lora", "eval.slices=[kind]")
    prompt = ("data.template=mono_qwen2_vl", "data.instruction=Find the hat", "loss={name: bce, weight: 3}")
    rate = ("optim.lr=5e-3", "train.steps=4", "train.global_batch_size=3", "train.eval_every=2", "train.save_every=2")
    return train(ranks, room / "run", *words, *prompt, *rate)


@pytest.fixture(scope="module")
def targets(room, run, ranks):
    """The run in each of its forms."""
    export_target(str(list_checkpoints(run)[-1].folder), room / "again", (), ranks)
    (room / "unfinished").mkdir()
    (room / "unfinished" / "checkpoints").symlink_to(run / "checkpoints")
    last = list_checkpoints(run)[-1].folder
    found = run, last, run / "export", run / "export" / "adapter", room / "again", room / "unfinished"
    return dict(zip(KINDS, map(str, found), strict=True))


@pytest.fixture(scope="module")
def scores(room, targets, data, ranks):
    """What `score` writes for each form, and for the base."""
    out = {}
    for name, target in {**targets, "base": "builtin:tiny"}.items():
        write_lines(target, str(data), (), room / f"{name}.jsonl", ranks, task="rerank")
        out[name] = read_rows(room / f"{name}.jsonl")
    return out


def values(lines):
    return [line["score"] for line in lines]


# ---- one model, many forms


def test_every_form_gives_the_same_scores(scores):
    first = scores["run"]
    assert [(x["query_id"], x["doc_id"]) for x in first] == [(f"q{i}", f"d{j}") for i in range(6) for j in range(3)]
    assert max(values(first)) - min(values(first)) > 0.1
    assert max(abs(a - b) for a, b in zip(values(first), values(scores["base"]), strict=True)) > 0.1
    for name in KINDS:
        assert [x["doc_id"] for x in scores[name]] == [x["doc_id"] for x in first]
        assert values(scores[name]) == pytest.approx(values(first), **CLOSE), name


@pytest.mark.parametrize("kind", ["run", "checkpoint", "adapter"])
def test_evaluate_is_what_was_measured_while_training(kind, run, targets, data, ranks):
    """The figures of the last evaluation: loss with its settings, and every metric."""
    lines = {row["name"]: row for row in read_rows(run / "eval.jsonl") if row["step"] == 4}
    assert lines.keys() == {"big", "small"} and lines["big"]["metrics"] != lines["small"]["metrics"]
    for name, path in (("big", data), ("small", data.with_name("small.jsonl"))):
        found = measure_one(targets[kind], str(path), (), ranks)
        assert found.metrics == pytest.approx(lines[name]["metrics"], **CLOSE)
        assert {"loss", "mrr@10", "ndcg@10", "recall@10"} <= found.metrics.keys()


def test_scores_measured_again_from_files(room, run, data, scores):
    """score -> RUN, the rows' labels -> QRELS; both forms of QRELS."""
    assert scores["run"]
    qrels = [(row["id"], f"d{i}", int(i == 0)) for row in read_rows(data) for i in range(3)]
    written = write_rows(room / "qrels.jsonl", [{"query_id": q, "doc_id": d, "relevance": r} for q, d, r in qrels])
    trec = room / "qrels.txt"
    trec.write_text("".join(f"{q} 0 {d} {r}\n" for q, d, r in qrels))
    trained = next(r["metrics"] for r in read_rows(run / "eval.jsonl") if r["step"] == 4 and r["name"] == "big")
    for judged in (written, trec):
        report = measure_files(str(room / "run.jsonl"), str(judged))
        assert report["queries"] == 6
        assert report["metrics"] == pytest.approx({k: v for k, v in trained.items() if k != "loss"})


@pytest.mark.parametrize("kind", ["export", "adapter"])
def test_what_travels_can_be_overridden(kind, targets, data, ranks, scores, tmp_path):
    """Pixels, template and instruction come with the target, and change the scores when the command line says so."""

    def scored(*words):
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        write_lines(targets[kind], str(data), words, out, ranks, task="rerank")
        return values(read_rows(out))

    lychee = scored("data.template=lychee")  # the run's own template has no place for an instruction
    for other in (lychee, scored("data.pixels.max=6272")):
        assert other != pytest.approx(values(scores["run"]), **CLOSE)
    assert scored("data.template=lychee", "data.instruction=Another one") != pytest.approx(lychee, **CLOSE)
    assert scored("data.template=lychee", "data.instruction=Find the hat") == lychee
    assert scored(*PIXELS, "data.template=mono_qwen2_vl") == values(scores[kind])


def test_slices_and_max_rows(targets, data, ranks):
    report = measure_one(targets["run"], str(data), ("eval.slices=[kind]",), ranks).report
    assert {k: v["queries"] for k, v in report["slices"]["kind"].items()} == {"picture": 3, "text": 3}
    few = measure_one(targets["run"], str(data), ("eval.max_rows=2", "eval.metrics=[mrr, hit@1]"), ranks)
    assert few.report["queries"] == 2 and [x["query_id"] for x in few.lines[::3]] == ["q0", "q1"]
    assert few.metrics.keys() == {"loss", "mrr", "hit@1"}


def test_against_the_base(targets, data, ranks):
    """Paired differences, tuned minus base; the base is asked with the tuned model's prompt."""
    report = measure_target(targets["run"], str(data), (), ranks, against="builtin:tiny")
    assert report["metrics"] != report["against"]["metrics"]
    for name, found in report["difference"].items():
        assert found["difference"] == pytest.approx(report["metrics"][name] - report["against"]["metrics"][name])
        assert found["low"] <= found["difference"] <= found["high"]
    words = (*PIXELS, "data.template=mono_qwen2_vl", "data.instruction=Find the hat", "loss={name: bce, weight: 3}")
    asked = measure_one("builtin:tiny", str(data), words, ranks).metrics
    assert report["against"]["metrics"] == pytest.approx(asked)
    assert asked != measure_one("builtin:tiny", str(data), (), ranks).metrics


# ---- what must not pass in silence


def damaged(run, folder, change):
    """An export with other weights."""
    export = run / "export"
    folder.mkdir()
    for path in export.iterdir():
        if path.is_file() and path.name != "model.safetensors":
            (folder / path.name).symlink_to(path)
    tensors = load_file(export / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_a_score_that_is_no_number_is_an_error(run, data, ranks, tmp_path):
    """In `evaluate` and in `score`, naming document, row and what was computed in."""
    target = damaged(run, tmp_path / "nan", lambda t: t["model.norm.weight"].fill_(math.nan))
    out = tmp_path / "scores.jsonl"
    for call in (
        lambda: measure_one(target, str(data), (), ranks),
        lambda: write_lines(target, str(data), (), out, ranks, task="rerank"),
    ):
        with pytest.raises(UserError, match="score of document d0 of query q0 is nan") as error:
            call()
        assert f"{data}:1" in str(error.value) and "fp32 with weights in float32" in str(error.value)
    assert not out.exists() and not list(tmp_path.glob(".*"))


def test_equal_scores_warn(run, data, ranks, tmp_path, room):
    """Ten queries and more whose documents all score the same: a head that does nothing."""
    many = rerank_rows(tmp_path / "many", 10)
    target = damaged(run, tmp_path / "flat", lambda t: t["model.norm.weight"].zero_())
    found = measure_one(target, str(many), (), ranks).report
    assert any("every score is equal" in w for w in found["warnings"]) and found["tie_rate"] == 1.0
    assert not measure_one(target, str(data), (), ranks).report["warnings"], "of six queries that may be chance"
    assert not measure_one(str(run), str(many), (), ranks).report["warnings"]


def test_an_existing_file_is_not_overwritten(targets, data, ranks, tmp_path):
    out = tmp_path / "scores.jsonl"
    out.write_text("mine")
    with pytest.raises(UserError, match="exists") as error:
        write_lines(targets["run"], str(data), (), out, ranks, task="rerank")
    assert out.read_text() == "mine" and error.value.status == 2
    with pytest.raises(UserError, match="there is no folder"):
        write_lines(targets["run"], str(data), (), tmp_path / "none" / "x.jsonl", ranks, task="rerank")
    with pytest.raises(UserError, match="exists"):
        export_target(targets["checkpoint"], tmp_path, (), ranks)


def test_a_query_id_that_stands_twice_names_both_lines(data, ranks, tmp_path):
    rows = read_rows(data)
    for row in rows:  # paths as seen from the new folder
        row["query"]["image"] = None
    twice = write_rows(tmp_path / "twice.jsonl", [rows[0], rows[2], rows[0]])
    with pytest.raises(UserError, match="'q0' stands twice") as error:
        measure_one("builtin:tiny", str(twice), (), ranks)
    assert f"{twice}:1" in str(error.value) and f"{twice}:3" in str(error.value)


# ---- ranks


@pytest.mark.parametrize("rows", [1, 5])
def test_scores_do_not_depend_on_the_number_of_ranks(rows, room, targets, data, scores, tmp_path):
    """Fewer rows than ranks, and rows that do not divide; micro-batches so small that ranks have several."""
    words = (
        "score",
        targets["checkpoint"],
        "--data",
        str(data),
        f"eval.max_rows={rows}",
        "train.micro_batch_tokens=256",
    )
    ended = run_litchi_ranks(tmp_path, 2, *words, "--out", str(tmp_path / "two.jsonl"))
    assert [e.status for e in ended] == [0, 0], "\n".join(e.err[-2000:] for e in ended)
    two, one = read_rows(tmp_path / "two.jsonl"), scores["run"][: 3 * rows]
    assert [(x["query_id"], x["doc_id"]) for x in two] == [(x["query_id"], x["doc_id"]) for x in one]
    assert values(two) == pytest.approx(values(one), **CLOSE)


def test_evaluate_on_two_ranks_answers_once(targets, data, run, tmp_path):
    ended = run_litchi_ranks(tmp_path, 2, "evaluate", targets["export"], "--data", str(data), "--json")
    assert [e.status for e in ended] == [0, 0], "\n".join(e.err[-2000:] for e in ended)
    report = json.loads(ended[0].out)
    trained = next(r["metrics"] for r in read_rows(run / "eval.jsonl") if r["step"] == 4 and r["name"] == "big")
    assert report["metrics"] == pytest.approx(trained, **CLOSE) and not ended[1].out


# ---- chat


@pytest.fixture(scope="module")
def talk(room, ranks):
    """A model that has learnt its few answers by heart, so that exact match says something."""
    data = chat_rows(room / "talk", 4)
    words = ("task=chat", f"data.train={data}", f"data.eval={data}", "trainable.language=full", "eval.slices=[kind]")
    rate = ("optim.lr=5e-3", "train.steps=30", "train.global_batch_size=4", "eval.max_new_tokens=12", *PIXELS)
    return data, train(ranks, room / "talk-run", *words, *rate)


def test_chat_reports_loss_and_answers(talk, ranks):
    data, run = talk
    words = ("eval.slices=[kind]", "eval.max_new_tokens=12")
    found = measure_one(str(run), str(data), words, ranks)
    trained = read_rows(run / "eval.jsonl")[-1]["metrics"]
    assert found.metrics == pytest.approx(trained, **CLOSE) and found.metrics["exact_match"] >= 0.5
    assert {"loss", "exact_match", "bleu", "chrf", "rouge_l"} <= found.metrics.keys()
    assert {k: v["rows"] for k, v in found.report["slices"]["kind"].items()} == {"picture": 2, "text": 2}
    assert found.metrics["loss"] < measure_one("builtin:tiny", str(data), words, ranks).metrics["loss"] / 2


def test_generate_writes_what_evaluate_measured(talk, ranks, tmp_path):
    data, run = talk
    words = ("eval.max_new_tokens=12",)
    out = tmp_path / "answers.jsonl"
    assert write_lines(str(run), str(data), words, out, ranks, task="chat").lines == 4
    measured = measure_one(str(run), str(data), words, ranks)
    assert read_rows(out) == [{"id": x["id"], "text": x["text"]} for x in measured.lines]
    right = [x["text"] == x["reference"] for x in measured.lines]
    assert sum(right) / 4 == measured.metrics["exact_match"]


def test_generate_on_two_ranks_is_the_same_file(talk, ranks, tmp_path):
    data, run = talk
    write_lines(str(run), str(data), ("eval.max_new_tokens=12",), tmp_path / "one.jsonl", ranks, task="chat")
    words = ("generate", str(run), "--data", str(data), "eval.max_new_tokens=12", "--out", str(tmp_path / "two.jsonl"))
    ended = run_litchi_ranks(tmp_path, 2, *words)
    assert [e.status for e in ended] == [0, 0], "\n".join(e.err[-2000:] for e in ended)
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()


def test_generate_takes_a_row_that_ends_with_the_user(talk, ranks, tmp_path):
    """Questions without answers can be answered, not measured."""
    data, run = talk
    rows = read_rows(data)
    asked = write_rows(tmp_path / "asked.jsonl", [{"id": r["id"], "messages": r["messages"][:1]} for r in rows])
    out = tmp_path / "answers.jsonl"
    write_lines(str(run), str(asked), ("eval.max_new_tokens=12",), out, ranks, task="chat")
    known = measure_one(str(run), str(data), ("eval.max_new_tokens=12",), ranks).lines
    assert read_rows(out) == [{"id": x["id"], "text": x["text"]} for x in known]


# ---- one decoder


def test_training_and_measuring_read_pictures_by_one_function(monkeypatch, ranks, room, data, run):
    """Both go through `load_patches`, and for the same file get the same bytes."""
    seen: dict[str, dict[str, bytes]] = {}
    real = loader.load_patches

    def watch(*asked):
        patches = real(*asked)
        for key, value in patches.items():
            assert seen[now].setdefault(key, value.tobytes()) == value.tobytes()
        return patches

    monkeypatch.setattr(loader, "load_patches", watch)
    now = "train"
    seen[now] = {}
    train(ranks, room / "watched", "task=rerank", f"data.train={data}", *PIXELS, "train.steps=1", "optim.lr=1e-3")
    now = "evaluate"
    seen[now] = {}
    measure_one(str(run), str(data), (), ranks)
    assert len(seen["train"]) == 9 and seen["train"] == seen["evaluate"]
    assert {name.rsplit("/", 1)[1] for name in seen["train"]} == {f"d{i}.png" for i in range(6)} | {
        "q1.png",
        "q3.png",
        "q5.png",
    }


def test_the_program_prints_one_json_object(room, data, run, scores, tmp_path):
    qrels = write_rows(tmp_path / "q.jsonl", [{"query_id": f"q{i}", "doc_id": "d0", "relevance": 1} for i in range(6)])
    ended = run_litchi(tmp_path, "evaluate", "--run", str(room / "run.jsonl"), "--qrels", str(qrels), "--json")
    assert ended.status == 0, ended.err
    report = json.loads(ended.out)
    assert report["queries"] == 6 and {"mrr@10", "ndcg@10"} <= report["metrics"].keys() and "tie_rate" in report
    assert torch.isfinite(torch.tensor(list(report["metrics"].values()))).all()
    assert read_json(run / "export" / "litchi.json")["template"] == "mono_qwen2_vl"
