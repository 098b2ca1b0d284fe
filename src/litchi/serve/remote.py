"""An engine that lies elsewhere: a vLLM (or SGLang) that speaks the OpenAI form, asked for one token a document.

The front's process speaks to this one as to any engine (`worker.py`), so the API, its limits and the playground are
the same. A score is logprob(yes) - logprob(no) of the first token, which is the difference of their logits. TARGET is
the folder that the other server serves: its template, its instruction and its pixel limits are taken from there, and a
prompt of text and one of a picture must be as many tokens there as here, or nothing is served.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from PIL import Image

from litchi import __version__
from litchi.batch.pictures import media_grid
from litchi.batch.sources import make_renderer
from litchi.data.boxes import has_boxes
from litchi.data.media import MediaError, decode_image
from litchi.data.processor import load_processor
from litchi.data.render import Renderer
from litchi.data.templates import RerankTemplate
from litchi.errors import UserError
from litchi.model.build import resolve_model
from litchi.serve.jobs import Answer, ChatJob, EngineSpec, Facts, Front, Job, ScoreJob, Scores
from litchi.serve.limits import Refusal
from litchi.train.target import find_target, target_config
from litchi.types import ChatSample, Content, Document, Media, Part, RerankSample, Source, Turn

KEY = "LITCHI_ENGINE_KEY"  # of the environment: what the other server wants as its key
CALLS = 64  # under way at a time: it batches them
TOP = 20  # log-probabilities that a server gives by default at most
ASK_S, START_S = 300, 600
TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", re.DOTALL)
LAST = "<|im_start|>assistant\n"


class Remote:
    """The other server, and what it has to be asked."""

    def __init__(self, spec: EngineSpec):
        assert spec.url is not None
        self.spec, self.url = spec, spec.url.rstrip("/").removesuffix("/v1")
        target = find_target(spec.name)
        config = target_config(target, spec.overrides, task=target.facts.get("task") or "rerank")
        self.config = config
        processor = load_processor(resolve_model(target.base if target.adapter is None else str(target.adapter)))
        self.renderer: Renderer = make_renderer(config, processor, ".")
        if self.renderer.budget is not None:
            raise UserError(
                "pixels by detail (data.pixels.detail, .total, data.video.detail) cannot be had of an engine",
                where=self.url,
                why="it sizes pictures itself",
                remedy="Serve without --engine-url",
            )
        self.turns = None if self.renderer.template is None else cut_turns(self.renderer.template)
        self.controls = re.compile("|".join(map(re.escape, self.renderer.processor.controls)))
        self.model = self._find_model()

    @property
    def facts(self) -> Facts:
        """What it says of itself, as an engine of ours does."""
        facts = {
            "pixels": self.config.data.pixels.in_force(self.renderer.processor.vision),
            "template": None if self.renderer.template is None else self.renderer.template.name,
            "instruction": self.config.data.instruction,
            "device": self.url,
            "engine_model": self.model,
            "max_tokens": self.config.data.max_length,
            "litchi": __version__,
        }
        return Facts(self.spec.name, (self.renderer.task,), facts)

    # -------------------------------------------------------------------------------------------------- what is asked

    def score(self, query: Content, document: Content, instruction: str | None) -> tuple[float, int]:
        """The score of a document and the tokens of its prompt. Raises Refusal."""
        template = self.renderer.template
        assert template is not None and self.turns is not None
        text = instruction or self.config.data.instruction or template.instruction
        slots = {"{instruction}": Content(text), "{query}": query, "{document}": document}
        messages = [{"role": role, "content": self._fill(body, slots)} for role, body in self.turns]
        said = self._post(
            {"messages": messages, "max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": TOP}
        )
        given = said["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        return find_score(given, template), int(said["usage"]["prompt_tokens"])

    def answer(self, job: ChatJob) -> Iterator[tuple[str, str | None, dict[str, int]]]:
        """Pieces of an answer, with why it ended and the usage once they are known. Raises Refusal."""
        if job.restore or has_boxes(job.sample):
            raise Refusal(400, "unsupported", "the engine behind this server sizes pictures itself: no boxes are said")
        messages = [
            {"role": turn.role, "content": [self._part(part) for part in turn.parts]} for turn in job.sample.turns[:-1]
        ]
        body = {"messages": messages, "max_tokens": job.max_tokens, "temperature": 0, "stop": list(job.stop) or None}
        for event in self._stream({**body, "stream": True, "stream_options": {"include_usage": True}}):
            choice = (event.get("choices") or [{}])[0]
            text = (choice.get("delta") or {}).get("content") or ""
            yield text, choice.get("finish_reason"), event.get("usage") or {}

    def _fill(self, body: str, slots: dict[str, Content]) -> str | list[dict[str, Any]]:
        """The content of a turn; plain text as text, for not every chat template takes a list there."""
        if not re.search(r"\{\w+\}", body):
            return body
        parts: list[dict[str, Any]] = []
        for piece in re.split(r"(\{\w+\})", body):
            if piece in slots:
                parts += [self._part(media) for media in slots[piece].media]
                parts += [self._part(slots[piece].text)] if slots[piece].text else []
            elif piece:
                parts.append({"type": "text", "text": piece})
        return parts

    def _part(self, part: Part) -> dict[str, Any]:
        if isinstance(part, str):
            found = self.controls.search(part)
            if found:  # here they are letters; the other server would take them for the prompt's own
                raise Refusal(400, "control_token", f"{found[0]} is a control token of the engine behind this server")
            return {"type": "text", "text": part}
        if not isinstance(part, Media) or part.kind != "image":
            raise Refusal(400, "unsupported", "the engine behind this server is given text and pictures, no videos")
        try:
            rgb = decode_image(part, window=self.renderer.window)
        except MediaError as error:
            raise Refusal(400, error.code, str(error)) from None
        out = io.BytesIO()
        Image.fromarray(rgb).save(out, "PNG", compress_level=1)
        data = base64.b64encode(out.getvalue()).decode()
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}

    # ------------------------------------------------------------------------------------------------------ its server

    def _find_model(self) -> str:
        """The name the other server gives its model, once it is up."""
        deadline = time.monotonic() + START_S
        while True:
            try:
                with self._open("/v1/models", None, 10) as reply:
                    return str(json.load(reply)["data"][0]["id"])
            except (OSError, ValueError, LookupError) as error:
                if isinstance(error, urllib.error.HTTPError) or time.monotonic() > deadline:
                    raise UserError(
                        f"the engine at {self.url} does not answer",
                        why=str(error),
                        remedy="Start it, or check --engine-url",
                    ) from None
                time.sleep(1)

    def _open(self, path: str, body: dict[str, Any] | None, timeout_s: float) -> Any:
        head = {"Content-Type": "application/json"}
        if os.environ.get(KEY):
            head["Authorization"] = f"Bearer {os.environ[KEY]}"
        data = None if body is None else json.dumps({"model": self.model, **body}).encode()
        request = urllib.request.Request(self.url + path, data, head)
        return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout_s)

    def _ask(self, body: dict[str, Any]) -> Any:
        try:
            return self._open("/v1/chat/completions", body, ASK_S)
        except urllib.error.HTTPError as error:
            said = error.read(2000).decode(errors="replace")
            if error.code in (400, 413, 422):
                raise Refusal(
                    400, "refused_by_engine", f"the engine behind this server refused it: {said[:300]}"
                ) from None
            if error.code in (429, 503):
                raise Refusal(503, "overloaded", "the engine behind this server has no room", retry_s=5) from None
            raise Refusal(502, "engine_error", f"the engine behind this server failed with {error.code}") from None
        except OSError as error:
            raise Refusal(502, "engine_gone", f"the engine behind this server does not answer: {error}") from None

    def _post(self, body: dict[str, Any]) -> Any:
        with self._ask(body) as reply:
            return json.load(reply)

    def _stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self._ask(body) as reply:
            for line in reply:
                text = line.decode().strip().removeprefix("data:").strip()
                if text == "[DONE]":
                    return
                if text.startswith("{"):
                    yield json.loads(text)


def cut_turns(template: RerankTemplate) -> tuple[tuple[str, str], ...]:
    """A prompt as (role, text) of its turns. UserError where a chat cannot say it."""
    turns = TURN.findall(template.text)
    again = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + LAST
    if again != template.text:
        raise UserError(f"the template {template.name} is no chat", why="the engine is asked through its chat endpoint")
    return tuple(turns)


def find_score(given: Sequence[dict[str, Any]], template: RerankTemplate) -> float:
    """logit(yes) - logit(no) from the likeliest first tokens: what their logits have in common goes out."""
    found = {entry["token"]: float(entry["logprob"]) for entry in given}
    missing = [word for word in (template.yes, template.no) if word not in found]
    if missing:
        raise Refusal(
            502, "no_logprob", f"{missing[0]!r} is not among the {len(found)} likeliest tokens that the engine names"
        )
    return found[template.yes] - found[template.no]


# ---------------------------------------------------------------------------------------------------- the process


class Relay:
    """Jobs of the front, each a few calls of the other server at a time."""

    def __init__(self, remote: Remote, pipe: Any):
        self.remote, self.front = remote, Front(pipe)
        self.known: set[int] = set()  # requests somebody waits for
        self.calls, self.jobs = ThreadPoolExecutor(CALLS), ThreadPoolExecutor(CALLS)

    def run(self) -> None:
        """Take in what the front says."""
        for message in self.front.messages():
            if message[0] == "job":
                self.known.add(message[1])
                self.jobs.submit(self._do, message[1], message[2], time.monotonic())
            else:
                self.known.discard(message[1])

    def _do(self, number: int, job: Job, came_s: float) -> None:
        began = time.monotonic()
        try:
            done: Scores | Answer | None
            if isinstance(job, ScoreJob):
                done = self._score(number, job, came_s, began)
            else:
                done = self._answer(number, job, came_s, began)
            if done is not None:
                self.front.tell("done", number, done)
        except Refusal as refusal:
            self.front.tell("refused", number, refusal)
        except Exception:
            traceback.print_exc()
            self.front.tell(
                "refused", number, Refusal(502, "engine_error", "the engine behind this server gave no answer")
            )
        finally:
            self.known.discard(number)

    def _score(self, number: int, job: ScoreJob, came_s: float, began: float) -> Scores | None:
        pairs = [(sample, document) for sample in job.samples for document in sample.documents]

        def ask(pair: tuple[RerankSample, Document]) -> tuple[float, int]:
            sample, document = pair
            if number not in self.known:  # its client has gone
                raise Refusal(499, "gone", "nobody waits")
            return self.remote.score(sample.query, document.content, sample.instruction)

        found = list(self.calls.map(ask, pairs))
        if number not in self.known:
            return None
        scores = iter(score for score, _ in found)
        logits = tuple(tuple(next(scores) for _ in sample.documents) for sample in job.samples)
        tokens, now = sum(count for _, count in found), time.monotonic()
        nothing = dict.fromkeys(("waiting", "found", "asked", "cache_bytes", "prefix_bytes", "saved_tokens"), 0)
        self.front.tell("stats", {**nothing, "documents": len(found), "tokens": tokens, "batch_s": now - began})
        return Scores(logits, tokens, began - came_s, now - began)

    def _answer(self, number: int, job: ChatJob, came_s: float, began: float) -> Answer | None:
        said, reason, usage = [], "stop", dict[str, int]()
        for text, ended, counted in self.remote.answer(job):
            if number not in self.known:
                return None
            if text:
                said.append(text)
                self.front.tell("text", number, text)
            reason, usage = ended or reason, counted or usage
        counts = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
        return Answer("".join(said), reason, *counts, began - came_s, time.monotonic() - began)


def check_remote(remote: Remote, picture: bytes) -> list[str]:
    """Compare the number of tokens of prompts here and there: another template, other pixel limits or another tokenizer
    show in them. Raises UserError."""
    source, shown = Source("the self check", 1), Content("", (Media("image", data=picture),))
    if remote.renderer.task != "rerank":
        turns = (Turn("user", (*shown.media, "What is it?")), Turn("assistant", ()))
        *_, (_, _, usage) = remote.answer(ChatJob(ChatSample(source, "check", turns), 1))
        return [] if usage else ["the engine does not say how many tokens a prompt has: nothing was compared"]
    for document in (Content("a blue mug with two handles"), shown):
        sample = RerankSample(source, "check", Content("a red dress"), (Document("d", document, 0.0),))
        here = remote.renderer.render(sample, lambda media: media_grid(media, remote.renderer)).tokens
        try:
            _, there = remote.score(sample.query, document, None)
        except Refusal as refusal:
            raise UserError("the engine cannot be asked", where=remote.url, why=refusal.message) from None
        if here != there:
            what = "a prompt with a picture" if document.media else "a prompt"
            raise UserError(
                f"{what} has {here} tokens here and {there} in the engine", where=remote.url,
                why="its chat template, tokenizer or pixel limits are others, so scores would be too",
                remedy=f"Let it serve the folder {remote.spec.name}",
            )  # fmt: skip
    return []


def open_relay(pipe: Any, spec: EngineSpec) -> Relay:
    """Ask the other server something before the front hears that it is ready. Raises UserError."""
    from litchi.serve.engine import sample_picture

    try:
        relay = Relay(Remote(spec), pipe)
        warnings = check_remote(relay.remote, sample_picture())
    except Refusal as refusal:
        raise UserError("the engine cannot be asked", why=refusal.message) from None
    relay.front.tell("ready", relay.remote.facts, warnings)
    return relay
