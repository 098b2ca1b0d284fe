"""What is served is what is evaluated: the same scores alone and in any company, for every client, until the end."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
import signal
import socket
import time
from pathlib import Path

import httpx
import pytest
import runs
import serving
from processes import run_litchi
from serving import PIXELS, as_request, copy_base, data_url, logits_of, mixed_rows
from torch import tensor

from litchi.config import load_config
from litchi.serve.replies import sigmoid

NEAR = 1e-5


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    words = ("builtin:tiny", *PIXELS, "serve.batch_tokens=700")  # so that there are many batches, and groups are cut
    words += ("serve.queue=256", "serve.queue_s=600", "serve.request_s=600")  # many at once, on a busy machine
    with serving.serving(tmp_path_factory.mktemp("server"), *words) as one:
        yield one


def post_all(server, bodies, *, at_once=True):
    """Rerank some requests, all at once or in random batches."""

    async def send():
        async with server.client() as client:
            answers, dice, rest = [], random.Random(1), list(bodies)
            while rest:
                size = len(rest) if at_once else dice.randint(1, 9)
                batch, rest = rest[:size], rest[size:]
                answers += await asyncio.gather(*(client.post("/v1/rerank", json=body) for body in batch))
            return answers

    return asyncio.run(send())


def assert_near(found, wanted):
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours == pytest.approx(theirs, abs=NEAR)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_served_scores_are_those_of_evaluation_and_training(server, ranks, tmp_path, count):
    """Alone, all at once and in random batches."""
    rows = mixed_rows(tmp_path, count, seed=count)
    wanted = serving.scores_by_litchi(tmp_path, rows, ranks, *PIXELS)
    assert len({round(s, 3) for scores in wanted for s in scores}) > count  # scores that differ
    bodies = [as_request(row) for row in rows]
    assert sum("data:" in json.dumps(body) for body in bodies) > count // 3  # pictures are among them
    alone = [logits_of(server.post("/v1/rerank", body)) for body in bodies]
    assert_near(alone, wanted)
    assert_near([logits_of(a) for a in post_all(server, bodies)], wanted)
    assert_near([logits_of(a) for a in post_all(server, bodies, at_once=False)], wanted)
    assert trained_loss(tmp_path, rows, ranks) == pytest.approx(mean_loss(alone), abs=NEAR)


def trained_loss(folder, rows, ranks):
    """The loss of a first step over all groups, before anything was learnt; the first document is the positive."""
    groups = [row | {"labels": [1, *row["labels"][1:]]} for row in rows if len(row["documents"]) > 1]
    data = runs.write_rows(folder / "train.jsonl", groups)
    size = f"train.global_batch_size={len(groups)}"
    words = ("task=rerank", f"data.train={data}", *PIXELS, "train.steps=1", size, "train.export=never")
    return runs.read_rows(runs.train(ranks, folder / "run", *words) / "metrics.jsonl")[0]["loss"]


def mean_loss(scores):
    """What it is by these scores: binary cross entropy, the mean over documents."""
    each = [math.log1p(math.exp(z if n else -z)) for group in scores if len(group) > 1 for n, z in enumerate(group)]
    return sum(each) / len(each)


def test_batches_of_several_requests_are_made(server, tmp_path):
    bodies = [as_request(row) for row in mixed_rows(tmp_path, 30, seed=5)]
    before = counted(server, "litchi_batch_documents_count")
    post_all(server, bodies)
    assert counted(server, "litchi_batch_documents_count") - before < 30


def counted(server, name):
    lines = server.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def test_a_picture_met_before_is_not_encoded_again_and_gives_the_same_score(server, tmp_path):
    picture = data_url(Path(runs.draw(tmp_path / "p.png", 80, 100, seed=77)).read_bytes())
    body = {"query": "card", "documents": [{"image": picture}]}
    first = logits_of(server.post("/v1/rerank", body))
    before = counted(server, "litchi_pictures_found")
    again = logits_of(server.post("/v1/rerank", {"query": "card", "documents": ["x", {"image": picture}]}))
    assert counted(server, "litchi_pictures_found") == before + 1
    assert again[1] == pytest.approx(first[0], abs=NEAR)


def test_a_query_met_before_is_not_computed_again_and_gives_the_same_scores(server, tmp_path, ranks):
    rows = mixed_rows(tmp_path, 6, seed=31)
    shown = runs.draw(tmp_path / "query.png", 90, 120, seed=5)
    for number, row in enumerate(rows):  # the same query, with documents that share more and less with each other
        row.pop("instruction", None)
        row["query"] = {"text": "red striped dress of silk", "image": shown}
        if number % 2:
            one = {"image": runs.draw(tmp_path / f"d{number}.png", 60, 60, seed=number)}
            row["documents"] = [{**one, "text": text} for text in ("a dress", "a mug", "a dress of 42")]
            row["labels"] = [0, 0, 0]
    wanted = serving.scores_by_litchi(tmp_path, rows, ranks, *PIXELS)
    before = counted(server, "litchi_saved_tokens")
    assert_near([logits_of(server.post("/v1/rerank", as_request(row))) for row in rows], wanted)
    assert_near([logits_of(a) for a in post_all(server, [as_request(row) for row in rows])], wanted)
    assert counted(server, "litchi_saved_tokens") - before > 11 * 40


def test_a_group_larger_than_a_batch_is_scored_in_pieces(server, tmp_path, ranks):
    rows = mixed_rows(tmp_path, 1)
    rows[0]["documents"] = [f"{word} dress number {i}" for i, word in enumerate(serving.WORDS * 8)]
    rows[0]["labels"] = [0] * len(rows[0]["documents"])
    wanted = serving.scores_by_litchi(tmp_path, rows, ranks, *PIXELS)
    before = counted(server, "litchi_batch_documents_count")
    assert_near([logits_of(server.post("/v1/rerank", as_request(rows[0])))], wanted)
    assert counted(server, "litchi_batch_documents_count") - before > 1


# ---- The forms of clients


def test_a_client_of_cohere_or_jina(server):
    body = {"model": "any", "query": "red dress", "documents": ["blue jeans", {"text": "red silk dress", "id": 1}]}
    found = server.post("/v1/rerank", body | {"top_n": 1, "return_documents": True, "max_chunks_per_doc": 10}).json()
    (best,) = found["results"]
    assert best["index"] == 1 and best["document"] == {"text": "red silk dress", "id": 1}
    assert best["relevance_score"] == pytest.approx(1 / (1 + math.exp(-best["logit"])))
    assert found["usage"]["total_tokens"] > 0 and found["id"] and found["model"] == "builtin:tiny"
    assert "max_chunks_per_doc" in found["warnings"][0]
    many = server.post("/v1/rerank", body | {"top_n": 99}).json()["results"]
    assert [r["index"] for r in many] == [1, 0]


def test_equal_documents_have_equal_scores_and_keep_their_order(server):
    documents = ["a mug", "red dress", {"text": "a mug"}, "red dress", "a mug"]
    results = server.post("/v1/rerank", {"query": "red dress", "documents": documents}).json()["results"]
    assert [r["index"] for r in results] in ([1, 3, 0, 2, 4], [0, 2, 4, 1, 3])
    assert len({r["logit"] for r in results}) == 2


def test_pairs_are_scored_as_groups_are(server):
    wanted = logits_of(server.post("/v1/rerank", {"query": "red dress", "documents": ["blue jeans", "red dress"]}))
    pairs = [{"query": "red dress", "document": text} for text in ("red dress", "blue jeans", "red dress")]
    pairs.insert(1, {"query": "a mug", "document": "red dress"})
    data = server.post("/v1/score", {"pairs": pairs}).json()["data"]
    assert [d["logit"] for d in data][::2] == pytest.approx([wanted[1], wanted[0]], abs=NEAR)
    assert data[0]["logit"] == data[3]["logit"] and data[1]["logit"] != data[0]["logit"]
    texts = {"text_1": "red dress", "text_2": ["blue jeans", "red dress"]}
    found = [d["logit"] for d in server.post("/v1/score", texts).json()["data"]]
    assert found == pytest.approx(wanted, abs=NEAR)


def test_the_openai_package_chats_with_a_picture(server, ranks, tmp_path):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=httpx.Client(trust_env=False))
    rows = [runs.read_rows(runs.chat_rows(tmp_path, 4))[i] for i in range(4)]
    wanted = answers_by_litchi(tmp_path, ranks)
    for row in rows:
        messages = [as_openai(row["messages"][0])]
        whole = client.chat.completions.create(model="any", messages=messages, max_tokens=12, temperature=0)
        choice = whole.choices[0]
        assert choice.message.content == wanted[row["id"]] and choice.finish_reason in ("stop", "length")
        assert whole.usage.completion_tokens <= 12 and whole.usage.prompt_tokens > 0
        pieces = list(
            client.chat.completions.create(
                model="any", messages=messages, max_tokens=12, stream=True, stream_options={"include_usage": True}
            )
        )
        text = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
        assert text == choice.message.content and pieces[-1].usage == whole.usage
        assert pieces[-2].choices[0].finish_reason == choice.finish_reason
    assert [model.id for model in client.models.list()] == ["builtin:tiny"]
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="any", messages=messages, temperature=0.7)


def as_openai(message):
    parts = []
    for part in message["content"]:
        if part["type"] == "image":
            url = data_url(Path(part["image"]).read_bytes())
            parts.append({"type": "image_url", "image_url": {"url": url, "detail": "high"}})
        else:
            parts.append(part)
    return {"role": "user", "content": parts}


def answers_by_litchi(folder, ranks):
    from litchi.train.writing import write_lines

    words = [*PIXELS, "data.workers=0", "eval.max_new_tokens=12"]
    write_lines("builtin:tiny", str(folder / "chat.jsonl"), words, folder / "answers.jsonl", ranks, task="chat")
    return {line["id"]: line["text"] for line in runs.read_rows(folder / "answers.jsonl")}


def test_an_answer_ends_at_a_stop_text_and_at_its_limit(server):
    body = {"messages": [{"role": "user", "content": "Describe a red dress with <image> and <|im_end|> in it."}]}
    whole = server.post("/v1/chat/completions", body | {"max_tokens": 20}).json()["choices"][0]
    text = whole["message"]["content"]
    assert len(text) > 1
    short = server.post("/v1/chat/completions", body | {"max_tokens": 20, "stop": text[1]}).json()["choices"][0]
    assert short["message"]["content"] == text.partition(text[1])[0] and short["finish_reason"] == "stop"


def test_scores_far_apart_stay_in_order_behind_the_sigmoid():
    logits = [9.0, 9.01, 9.02, 9.03, 18.0, 18.05]
    values = [sigmoid(z) for z in logits]
    assert values == sorted(values) and len(set(values)) == 6
    assert values == pytest.approx([1 / (1 + math.exp(-z)) for z in logits], abs=1e-15)
    assert sigmoid(-60.0) == pytest.approx(8.75651076269652e-27) and sigmoid(60.0) == 1.0 and sigmoid(-800) == 0.0


def test_what_is_served_is_said(server):
    (model,) = server.get("/v1/models").json()["data"]
    assert model["pixels"] == {"min": 3136, "max": 50176} and model["template"] == "lychee"
    assert server.get("/health").json() == {"status": "ok"}
    forms = server.get("/openapi.json").json()
    assert {"/v1/rerank", "/v1/score", "/v1/chat/completions"} <= forms["paths"].keys()
    server.post("/v1/rerank", {"query": "a", "documents": ["b"]})
    line = server.logged(path="/v1/rerank", status=200, documents=1)
    assert line["tokens"] > 0 and line["seconds"] >= line["worked_s"]


@pytest.mark.slow
def test_a_second_model_answers_by_its_name_with_the_prompts_of_the_first(tmp_path, ranks):
    """The first one as an export says what it was trained with; the packaged base then scores as `score` has it so."""
    words = ("task=rerank", "data.template=mono_qwen2_vl", "train.precision=fp32")
    settings = load_config(None, words, need=()).model_dump(mode="json")
    first = copy_base(tmp_path / "first", lambda weights: weights["model.norm.weight"].neg_())
    limits = json.loads((first / "preprocessor_config.json").read_text())["size"]
    pixels = {"min": limits["shortest_edge"], "max": limits["longest_edge"]}
    said = {"task": "rerank", "template": "mono_qwen2_vl", "instruction": "Find it.", "pixels": pixels}
    (first / "litchi.json").write_text(json.dumps(said | {"settings": settings}))
    rows = mixed_rows(tmp_path, 20, seed=3)
    plain = serving.scores_by_litchi(tmp_path / "plain", rows, ranks)
    wanted = serving.scores_by_litchi(tmp_path, rows, ranks, *words, "data.instruction=Find it.")
    with serving.serving(tmp_path / "served", str(first), "--against", "builtin:tiny") as server:
        models = server.get("/v1/models").json()["data"]
        assert [model["id"] for model in models] == [str(first), "builtin:tiny"]
        assert [(m["tasks"], m["template"], m["instruction"]) for m in models] == [
            (["rerank"], "mono_qwen2_vl", "Find it.")
        ] * 2
        for row, scores, other in zip(rows, wanted, plain, strict=True):
            base = server.post("/v1/rerank", as_request(row) | {"model": "builtin:tiny"})
            assert base.json()["model"] == "builtin:tiny"
            assert logits_of(base) == pytest.approx(scores, abs=NEAR) != other
            tuned, any_name = (server.post("/v1/rerank", as_request(row) | more) for more in ({}, {"model": "any"}))
            assert tuned.json()["model"] == any_name.json()["model"] == str(first)
            assert logits_of(tuned) == pytest.approx(logits_of(any_name), abs=NEAR)
            assert logits_of(tuned) == pytest.approx([-score for score in scores], abs=1e-4)  # its norm is the negative
        server.logged(path="/v1/rerank", status=200, model="builtin:tiny")
        assert set(re.findall(r'litchi_tokens_total{engine="(.)"}', server.get("/metrics").text)) == {"0", "1"}


# ---- Its beginning and its end


def test_a_busy_port_is_named_before_anything_is_loaded(tmp_path):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        ended = run_litchi(tmp_path, "serve", "builtin:tiny", "--port", str(port))
    assert ended.status == 4 and f"127.0.0.1:{port}" in ended.err and "loading" not in ended.err


def test_what_cannot_be_served_is_said_with_its_status(tmp_path):
    running = [
        serving.start_server(tmp_path / "a", str(tmp_path / "nothing")),
        serving.start_server(tmp_path / "b", "builtin:tiny", "serve.queu=3"),
    ]
    missing, typo = (one.running.end(60) for one in running)
    assert missing.status == 2 and "nothing" in missing.err
    assert typo.status == 2 and "serve.queue" in typo.err and "loading" not in typo.err


@pytest.mark.slow
def test_a_signal_lets_running_requests_finish(tmp_path):
    with serving.serving(tmp_path, "builtin:tiny", *PIXELS, "serve.wait_ms=1500") as server:
        url = server.url

        async def ask_and_stop():
            async with server.client() as client:
                asked = asyncio.create_task(client.post("/v1/rerank", json={"query": "a", "documents": ["b"]}))
                await asyncio.sleep(0.5)  # the request waits for others to share a batch with
                os.kill(server.running.pid, signal.SIGTERM)
                return await asked

        assert len(logits_of(asyncio.run(ask_and_stop()))) == 1
        ended = server.running.end(30)
        assert ended.status == 0 and '"stopped"' in ended.err and "Traceback" not in ended.err
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", trust_env=False)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_engine_that_dies_is_replaced(tmp_path):
    import psutil

    with serving.serving(tmp_path, "builtin:tiny", *PIXELS, "--procs", "2", spawn=True) as server:
        body = {"query": "a red dress", "documents": ["b", "c"]}
        wanted = logits_of(server.post("/v1/rerank", body))
        engines = [p for p in psutil.Process(server.running.pid).children() if "spawn_main" in " ".join(p.cmdline())]
        assert len(engines) == 2
        for engine in engines:
            engine.kill()
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and server.get("/health").status_code == 200:
            time.sleep(0.02)
        assert server.post("/v1/rerank", body).status_code == 503
        while time.monotonic() < deadline and server.get("/health").status_code != 200:
            time.sleep(0.2)
        assert logits_of(server.post("/v1/rerank", body)) == pytest.approx(wanted, abs=NEAR)


# ---- Models that should not be served


def embedding(weights):
    return weights[next(name for name in weights if name.endswith("embed_tokens.weight"))]


@pytest.mark.slow
def test_a_model_of_nan_is_not_served(tmp_path):
    model = copy_base(tmp_path / "model", lambda weights: embedding(weights).fill_(float("nan")))
    ended = run_litchi(tmp_path / "out", "serve", str(model), "--port", "0")
    assert ended.status == 1 and "self check" in ended.err and "float32" in ended.err


@pytest.mark.slow
def test_a_score_that_is_no_number_is_an_error_of_its_request_alone(tmp_path, processor):
    tokens = processor.encode("Ω")  # in no prompt but those that say it
    model = copy_base(tmp_path / "model", lambda weights: embedding(weights).index_fill_(0, tensor(tokens), math.inf))
    with serving.serving(tmp_path / "out", str(model), *PIXELS) as server:
        good = {"query": "a red dress", "documents": ["b", "c"]}
        wanted = logits_of(server.post("/v1/rerank", good))
        bad = {"query": "a", "documents": ["b", "an Ω"]}
        first, failed, last = post_all(server, [good, bad, good])
        assert failed.status_code == 500 and failed.json()["error"]["code"] == "nonfinite_score"
        assert failed.json()["error"]["param"] == "documents[1]" and "Traceback" not in failed.text
        assert_near([logits_of(first), logits_of(last)], [wanted, wanted])
        assert "score of documents[1] is" in server.log and "weights in float32" in server.log


@pytest.mark.slow
def test_pixel_limits_that_do_not_belong_to_the_training_are_refused(tmp_path, ranks):
    rows = runs.rerank_rows(tmp_path / "data")
    words = ("task=rerank", f"data.train={rows}", "train.steps=1", "train.global_batch_size=2", *PIXELS)
    run = runs.train(ranks, tmp_path / "run", *words, "trainable.language=full", "optim.lr=1e-3")
    settings = run / "export" / "preprocessor_config.json"
    before = settings.read_text()
    assert "50176" in before
    settings.write_text(before.replace("50176", "100352"))
    ended = run_litchi(tmp_path / "out", "serve", str(run), "--port", "0")
    assert ended.status == 1 and "50176" in ended.err and "100352" in ended.err
    settings.write_text(before)
    with serving.serving(tmp_path / "served", str(run)) as server:
        (model,) = server.get("/v1/models").json()["data"]
        assert model["pixels"] == {"min": 3136, "max": 50176} and model["tasks"] == ["rerank"]
        refused = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "task_not_served"
