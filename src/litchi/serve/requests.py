"""The body of a request -> what is asked of a model, or a `Refusal` that names the field.

A query, a document and a message are read by the parser of data files, without a folder: a path is never opened.
What a client sends and nobody reads is said in the answer's `warnings`; what would change an answer is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from litchi.config.serve import Serve
from litchi.data.boxes import only_picture
from litchi.data.jsonl import parse_fields
from litchi.data.values import CUT_KEYS, RowError, load_object, show
from litchi.serve.jobs import ChatJob, Job, ScoreJob
from litchi.serve.limits import Refusal
from litchi.types import ChatSample, Content, Document, Finding, Media, RerankSample, Source, Turn

HERE = Source("the request", 1)
RERANK_KEYS = frozenset({"model", "query", "documents", "top_n", "return_documents", "instruction", "user"})
SCORE_KEYS = frozenset({"model", "pairs", "text_1", "text_2", "instruction", "user"})
CHAT_KEYS = frozenset(
    {"model", "messages", "max_tokens", "max_completion_tokens", "stream", "stream_options", "stop", "user"}
    | {"boxes", "restore_boxes"}
    | {"metadata", "store", "seed"}  # of no effect on a greedy answer
)
# What would give another answer than was asked for: only these values are taken.
PLAIN: dict[str, tuple[Any, ...]] = {
    "temperature": (None, 0),
    "top_p": (None, 1),
    "n": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "logit_bias": (None, {}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
}
UNREACHED = frozenset({"remote_media", "local_media"})
_FIELD = re.compile(r"[a-z_]+[a-z0-9_.\[\]]*")


@dataclass(frozen=True)
class RerankRequest:
    """`top_n` None: all documents. `documents` as they were sent, for those who want them back. `places` says for each
    document which of the job's it is: equal ones are scored once, so that their scores are equal to the last bit."""

    job: ScoreJob
    model: str | None
    places: tuple[int, ...]
    top_n: int | None
    documents: Sequence[Any] | None
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class ScoreRequest:
    """`places` says for each pair which group and which document of it holds its score."""

    job: ScoreJob
    model: str | None
    places: tuple[tuple[int, int], ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class ChatRequest:
    """`include_usage`: a stream ends with what it took."""

    job: ChatJob
    model: str | None
    stream: bool
    include_usage: bool
    warnings: tuple[str, ...]


Asked = RerankRequest | ScoreRequest | ChatRequest


def read_body(raw: bytes) -> dict[str, Any]:
    """A JSON object, strictly: UTF-8, no key twice, no NaN."""
    try:
        return load_object(raw)
    except RowError as error:
        raise Refusal(400, error.code, error.message.replace("the row is", "the body is")) from None


# -------------------------------------------------------------------------------------------------------- rerank


def parse_rerank(fields: Mapping[str, Any], limits: Serve) -> RerankRequest:
    """Cohere's and Jina's form: query, documents, top_n, return_documents; and instruction."""
    documents = _documents(fields.get("documents"), "documents", limits)
    top_n = _whole(fields.get("top_n"), "top_n", None, low=1)
    back = _flag(fields.get("return_documents"), "return_documents")
    sample, findings = _group(fields.get("query"), documents, fields.get("instruction"))
    distinct, first, places = _distinct(sample.documents)
    names = tuple(f"documents[{i}]" for i in first)
    return RerankRequest(
        check_size(ScoreJob((replace(sample, documents=distinct),), (names,)), limits),
        _text(fields.get("model"), "model"),
        places,
        top_n,
        documents if back else None,
        _warnings(findings, fields, RERANK_KEYS),
    )


def _distinct(documents: Sequence[Document]) -> tuple[tuple[Document, ...], list[int], tuple[int, ...]]:
    """Documents that differ, where each was met first, and for every document which of them it is."""
    numbers: dict[Any, int] = {}
    places = tuple(numbers.setdefault(_same(d.content), len(numbers)) for d in documents)
    first = [places.index(number) for number in range(len(numbers))]
    return tuple(replace(documents[i], id=f"d{n}") for n, i in enumerate(first)), first, places


def _documents(value: Any, name: str, limits: Serve) -> list[Any]:
    if not isinstance(value, list):
        raise Refusal(400, "wrong_type", f"{name} is {show(value)}: a list of documents is needed", param=name)
    if not value:
        raise Refusal(400, "no_documents", f"{name} is empty: there is nothing to rank", param=name)
    if len(value) > limits.documents:
        found = f"{name} has {len(value)} entries, {limits.documents} are allowed"
        raise Refusal(413, "too_many_documents", found, param=name)
    return value


def _group(query: Any, documents: Sequence[Any], instruction: Any) -> tuple[RerankSample, list[Finding]]:
    """A query and its documents; ids of the client's are its own affair, and may repeat."""
    plain = [{k: v for k, v in d.items() if k != "id"} if isinstance(d, dict) else d for d in documents]
    fields = {"query": query, "documents": plain, "instruction": instruction}
    sample, findings = _parsed(fields, "rerank")
    assert isinstance(sample, RerankSample)
    return sample, findings


def _parsed(fields: Mapping[str, Any], task: Any):
    try:
        return parse_fields(fields, task=task, source=HERE, media_root=None, require_labels=False)
    except RowError as error:
        raise refuse_row(error) from None


def refuse_row(error: RowError) -> Refusal:
    """What the parser or the renderer of data says, as an answer."""
    if error.code in UNREACHED:
        name = error.message.partition(" is ")[0]
        found = f"{name} is no data URL: nothing is fetched from elsewhere, and no file is opened"
        return Refusal(400, error.code, found, param=name)
    named = _FIELD.match(error.message)
    word = named.group() if named else ""
    param = word if word.split("[")[0].split(".")[0] in ("query", "documents", "messages", "instruction") else None
    return Refusal(400, error.code, error.message, param=param)


# --------------------------------------------------------------------------------------------------------- score


def parse_score(fields: Mapping[str, Any], limits: Serve) -> ScoreRequest:
    """`pairs` of {query, document}; or text_1 and text_2, one against each or one by one, as vLLM has it."""
    pairs = _pairs(fields, limits)
    groups: dict[Any, list[int]] = {}
    contents: list[tuple[Any, Any]] = []
    findings: list[Finding] = []
    for i, (query, document) in enumerate(pairs):
        try:
            sample, said = _group(query, [document], fields.get("instruction"))
        except Refusal as refusal:
            at = f"pairs[{i}]"
            message = f"{at}: {refusal.message.replace('documents[0]', 'document')}"
            raise Refusal(refusal.status, refusal.code, message, param=at) from None
        findings += said
        contents.append((sample, sample.documents[0]))
        groups.setdefault(_same(sample.query), []).append(i)
    samples, names, places = [], [], {}
    for number, members in enumerate(groups.values()):
        distinct, first, which = _distinct([contents[i][1] for i in members])
        samples.append(replace(contents[members[0]][0], documents=distinct))
        names.append(tuple(f"pairs[{members[n]}]" for n in first))
        places |= {i: (number, n) for i, n in zip(members, which, strict=True)}
    return ScoreRequest(
        check_size(ScoreJob(tuple(samples), tuple(names)), limits),
        _text(fields.get("model"), "model"),
        tuple(places[i] for i in range(len(pairs))),
        _warnings(findings, fields, SCORE_KEYS),
    )


def _pairs(fields: Mapping[str, Any], limits: Serve) -> list[tuple[Any, Any]]:
    if fields.get("pairs") is None:
        one, two = fields.get("text_1"), fields.get("text_2")
        left = one if isinstance(one, list) else [one]
        right = _documents(two if isinstance(two, list) else [two], "text_2", limits)
        if len(left) not in (1, len(right)):
            found = f"text_1 has {len(left)} entries, text_2 {len(right)}: one, or as many, are needed"
            raise Refusal(400, "pair_count", found, param="text_1")
        return list(zip(left * (len(right) // len(left)), right, strict=True))
    pairs = _documents(fields["pairs"], "pairs", limits)
    for i, pair in enumerate(pairs):
        if not isinstance(pair, dict):
            found = f"pairs[{i}] is {show(pair)}: an object with query and document is needed"
            raise Refusal(400, "wrong_type", found, param=f"pairs[{i}]")
    return [(pair.get("query"), pair.get("document")) for pair in pairs]


def _same(content: Content) -> tuple[Any, ...]:
    return content.text, tuple(media.key for media in content.media)


# ---------------------------------------------------------------------------------------------------------- chat


def parse_chat(fields: Mapping[str, Any], limits: Serve) -> ChatRequest:
    """OpenAI's form. Answers are greedy, so whatever asks for another kind of answer is refused by name."""
    for name, values in PLAIN.items():
        value = fields.get(name)
        if not any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in values):
            allowed = " or ".join(repr(v) for v in values[1:])
            found = f"{name} is {show(value)}: answers are greedy, {allowed} is what can be had. Leave it out"
            raise Refusal(400, "unsupported_value", found, param=name)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        found = f"messages is {show(messages)}: a list of {{role, content}} is needed"
        raise Refusal(400, "wrong_type", found, param="messages")
    if len(messages) > limits.messages:
        found = f"messages has {len(messages)} entries, {limits.messages} are allowed"
        raise Refusal(413, "too_many_messages", found, param="messages")
    sample, findings = _parsed({"messages": [_message(m) for m in messages], "boxes": fields.get("boxes")}, "chat")
    assert isinstance(sample, ChatSample)
    if messages[-1].get("role") == "assistant":  # it is a part of the conversation, not the answer that is wanted
        sample = replace(sample, turns=(*sample.turns, Turn("assistant", ())))
    limit = limits.new_tokens
    wanted = [_whole(fields.get(name), name, None, low=1) for name in ("max_completion_tokens", "max_tokens")]
    asked = next((n for n in wanted if n is not None), None)
    stream = _flag(fields.get("stream"), "stream")
    restore = _flag(fields.get("restore_boxes"), "restore_boxes")
    if restore and (stream or only_picture(sample.turns) is None):
        found = "restore_boxes goes with one picture, and an answer in one piece"
        raise Refusal(400, "unsupported_value", found, param="restore_boxes")
    options = fields.get("stream_options")
    if options is not None and not (stream and isinstance(options, dict)):
        raise Refusal(400, "wrong_type", "stream_options is an object, and goes with stream", param="stream_options")
    warnings = _warnings(findings, fields, CHAT_KEYS | PLAIN.keys())
    if asked is not None and asked > limit:
        warnings += (f"max_tokens is {asked}: an answer has {limit} at most",)
    return ChatRequest(
        check_size(ChatJob(sample, min(asked or limit, limit), _stops(fields.get("stop")), restore), limits),
        _text(fields.get("model"), "model"),
        stream,
        _flag((options or {}).get("include_usage"), "stream_options.include_usage"),
        warnings,
    )


def _message(message: Any) -> Any:
    """A message as data files have it. Text is text: `<image>` in it is no mark, and stands for no picture."""
    if not isinstance(message, dict):
        return message
    content = message.get("content")
    if isinstance(content, str) and message.get("role") == "user":
        content = [{"type": "text", "text": content}]
    if isinstance(content, list):
        content = [_video(part) for part in content]
    role = "system" if message.get("role") == "developer" else message.get("role")
    return {**message, "role": role, "content": content}


def _video(part: Any) -> Any:
    """{"type": "video_url", "video_url": {"url": ...}, "start": ...} as data files have it."""
    if not isinstance(part, dict) or part.get("type") != "video_url":
        return part
    value = part.get("video_url")
    times = {key: part[key] for key in CUT_KEYS & part.keys()}
    return {"type": "video", "video": value.get("url") if isinstance(value, dict) else value, **times}


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or len(listed) > 4 or not all(isinstance(s, str) and s for s in listed):
        raise Refusal(400, "wrong_type", f"stop is {show(value)}: a text, or up to four, are needed", param="stop")
    return tuple(listed)


# ------------------------------------------------------------------------------------------------------- values


def check_size(job: Any, limits: Serve) -> Any:
    """Refuse a number of pictures beyond all use, before any is looked at."""
    media = sum(len(content.media) for content in _contents(job))
    if media > limits.pictures:
        raise Refusal(413, "too_many_pictures", f"{media} pictures, {limits.pictures} are allowed")
    return job


def _contents(job: Job) -> Iterator[Content]:
    if isinstance(job, ChatJob):
        for turn in job.sample.turns:
            yield Content("", tuple(part for part in turn.parts if isinstance(part, Media)))
        return
    for sample in job.samples:
        yield sample.query
        yield from (d.content for d in sample.documents)


def _whole(value: Any, name: str, default: int | None, *, low: int) -> int | None:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        found = f"{name} is {show(value)}: a whole number from {low} up is needed"
        raise Refusal(400, "wrong_value", found, param=name)
    return value


def _flag(value: Any, name: str) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    raise Refusal(400, "wrong_type", f"{name} is {show(value)}: true or false is needed", param=name)


def _text(value: Any, name: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise Refusal(400, "wrong_type", f"{name} is {show(value)}: text is needed", param=name)


def _warnings(findings: Sequence[Finding], fields: Mapping[str, Any], known: frozenset[str]) -> tuple[str, ...]:
    unread = sorted(key for key in fields.keys() - known if fields[key] is not None)
    said = [f"{show(', '.join(unread))} is not read here"] if unread else []
    return (*said, *dict.fromkeys(finding.message for finding in findings))
