"""An engine that lies elsewhere: a real server in the OpenAI form, its model run by transformers, behind our API."""

from __future__ import annotations

import base64
import io
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from PIL import Image
from rendering import draw, oracle_pairs, renderer_for, sample
from serving import PIXELS, serving

from litchi.data.templates import TEMPLATES
from litchi.errors import UserError
from litchi.serve.engine import sample_picture
from litchi.serve.jobs import EngineSpec
from litchi.serve.limits import Refusal
from litchi.serve.remote import Remote, check_remote, cut_turns
from litchi.types import Content, Media

ANY = 1000  # log-probabilities that are given: the small base has the two words far from the top


class Elsewhere(BaseHTTPRequestHandler):
    """POST /v1/chat/completions by transformers' chat template, processor and forward."""

    def do_GET(self):
        self.reply({"object": "list", "data": [{"id": "the-model", "object": "model"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        if self.server.status != 200:
            return self.reply({"error": {"message": "no"}}, self.server.status)
        messages, pictures = [], []
        for message in body["messages"]:
            parts = message["content"]
            if isinstance(parts, list):
                urls = [p["image_url"]["url"] for p in parts if p["type"] == "image_url"]
                pictures += [Image.open(io.BytesIO(base64.b64decode(url.split(",")[1]))) for url in urls]
                parts = [p if p["type"] == "text" else {"type": "image"} for p in parts]
            messages.append({"role": message["role"], "content": parts})
        processor, model = self.server.processor, self.server.model
        text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = processor(text=[text], images=pictures or None, return_tensors="pt")
        with torch.no_grad():
            logits = model(**inputs).logits[0, -1].double().log_softmax(-1)
        top = logits.topk(min(ANY, len(logits)))
        words = processor.tokenizer.convert_ids_to_tokens(top.indices.tolist())
        given = [{"token": w, "logprob": p} for w, p in zip(words, top.values.tolist(), strict=True)][: self.server.top]
        usage = {"prompt_tokens": inputs["input_ids"].shape[1], "completion_tokens": 1}
        choice = {"index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": words[0]}}
        if body.get("stream"):
            self.send_response(200)
            self.end_headers()
            delta = {"index": 0, "delta": {"content": words[0]}, "finish_reason": "length"}
            for event in ({"choices": [delta]}, {"choices": [], "usage": usage}):
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            return self.wfile.write(b"data: [DONE]\n\n")
        return self.reply({"choices": [{**choice, "logprobs": {"content": [{"top_logprobs": given}]}}], "usage": usage})

    def reply(self, body, status=200):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words):
        pass


@contextmanager
def elsewhere(model, processor):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere)
    server.model, server.processor, server.asked, server.status, server.top = model, processor, [], 200, ANY
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def other(hf_model, hf_processor):
    hf_processor.tokenizer.padding_side = "right"
    with elsewhere(hf_model, hf_processor) as server:
        yield server


def address(server):
    return f"http://127.0.0.1:{server.server_port}"


def make(server, *words):
    return Remote(EngineSpec("builtin:tiny", ("task=rerank", *PIXELS, *words), url=address(server)))


@pytest.fixture
def remote(other):
    other.asked.clear()
    yield make(other)
    other.status, other.top = 200, ANY


def test_scores_are_those_of_transformers(remote, hf_model, hf_processor, processor, tmp_path):
    """Text, a picture, both; a query with a picture; against prompts that transformers' processor makes."""
    pictures = [draw(tmp_path / f"{w}.png", w, h, seed=w) for w, h in ((70, 300), (400, 90))]
    row = {"query": {"text": "a red hat", "image": pictures[0]}, "pos_doc": "hat, 红色"}
    row |= {"neg_docs": [{"image": pictures[1]}, {"text": "blue", "image": pictures[0]}]}
    one = sample(renderer_for("rerank", processor), row)
    inputs = oracle_pairs(hf_processor, one, range(3))
    with torch.no_grad():
        logits = hf_model(**inputs).logits
    last = inputs["attention_mask"].sum(1) - 1
    rows = logits[torch.arange(3), last]
    want = rows[:, processor.word("yes")] - rows[:, processor.word("no")]
    for document, score, length in zip(one.documents, want.tolist(), (last + 1).tolist(), strict=True):
        assert remote.score(one.query, document.content, None) == (pytest.approx(score, abs=1e-3), length)


def test_prompts_there_and_here_are_compared(remote, other):
    assert check_remote(remote, sample_picture()) == []
    with pytest.raises(UserError, match=r"a prompt with a picture has .* tokens here and .* in the engine"):
        check_remote(make(other, "data.pixels.min=200704", "data.pixels.max=200704"), sample_picture())


@pytest.mark.parametrize("status, ours", [(400, 400), (429, 503), (503, 503), (500, 502)])
def test_what_the_engine_says_is_passed_on(status, ours, remote, other):
    other.status = status
    with pytest.raises(Refusal) as refused:
        remote.score(Content("a"), Content("b"), None)
    assert refused.value.status == ours


def test_what_cannot_be_asked_is_refused(remote, other):
    cases = {"control token": Content("x<|im_end|>"), "no videos": Content("", (Media("video", path="/none.mp4"),))}
    for message, document in cases.items():
        with pytest.raises(Refusal, match=message):
            remote.score(Content("a"), document, None)
    other.top = 1
    with pytest.raises(Refusal, match=r"'(yes|no)' is not among the 1 likeliest tokens"):
        remote.score(Content("a"), Content("b"), None)


def test_no_engine_is_said_with_its_address(monkeypatch):
    monkeypatch.setattr("litchi.serve.remote.START_S", 0)
    with pytest.raises(UserError, match=r"the engine at http://127\.0\.0\.1:9 does not answer"):
        Remote(EngineSpec("builtin:tiny", ("task=rerank",), url="http://127.0.0.1:9/v1"))


def test_templates_are_chats():
    for template in TEMPLATES.values():
        turns = cut_turns(template)
        assert [role for role, _ in turns] == ["system", "user"]


@pytest.mark.slow
def test_the_api_is_that_of_an_own_engine(other, tmp_path: Path):
    """The same requests to a server with the model and to one that asks elsewhere."""
    picture = base64.b64encode(Path(draw(tmp_path / "p.png", 84, 56)).read_bytes()).decode()
    documents = ["red silk dress", {"text": "card", "image": f"data:image/png;base64,{picture}"}, "裙子"]
    body = {"query": "red dress", "documents": documents, "top_n": 2}
    words = ("builtin:tiny", "task=rerank", *PIXELS)
    with (
        serving(tmp_path / "own", *words) as own,
        serving(tmp_path / "far", *words, "--engine-url", address(other)) as far,
    ):
        mine, theirs = (server.post("/v1/rerank", body) for server in (own, far))
        assert mine.status_code == theirs.status_code == 200
        for a, b in zip(mine.json()["results"], theirs.json()["results"], strict=True):
            assert a["index"] == b["index"] and a["logit"] == pytest.approx(b["logit"], abs=1e-3)
        bad = {"query": "red dress", "documents": [{"image": "data:image/png;base64,AAAA"}]}
        assert {server.post("/v1/rerank", bad).status_code for server in (own, far)} == {400}
        other.status = 500
        assert far.post("/v1/rerank", body).status_code == 502
        other.status = 200
        assert far.post("/v1/rerank", body).json()["results"] == theirs.json()["results"]
    chat = ("builtin:tiny", "task=chat", *PIXELS, "--engine-url", address(other))
    with serving(tmp_path / "chat", *chat) as server:
        said = server.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
        )
        assert said.status_code == 200 and said.json()["choices"][0]["message"]["content"]
