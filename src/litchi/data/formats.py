"""What other tools write, as rows of Litchi's own form and back: conversations here, groups in `formats_rerank.py`.

In: a record of another format, a plain object. Out: a row that `jsonl.parse_sample` reads; and from a `Sample` the
record again. References to media are strings everywhere: a path or a data URL. What a record cannot hold is either
named in `lost`, or makes the row one that does not fit (`UnfitError`); nothing is left out silently.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from litchi.data.boxes import has_boxes, mark_boxes
from litchi.data.detail import list_media
from litchi.data.values import RowError
from litchi.types import Box, ChatSample, Content, Media, RerankSample, Sample, Turn

MARKS = ("<image>", "<video>")
MEDIA_NAMES = ("image", "images", "video", "videos", "image_url")

Record = dict[str, Any]
Refer = Callable[[Media], str]  # how a record names a picture: its path as it is to stand there


class UnfitError(RowError):
    """A row another format cannot hold; `code` is `unfit`."""

    def __init__(self, message: str):
        super().__init__("unfit", message)


class Format(NamedTuple):
    """`read`: records -> row; `write`: sample, refer, lost -> records, adding to `lost` what they do not hold.

    A row is one record, except where `grouped`: there records that follow each other with equal values of it are one.
    """

    task: str
    read: Callable[[Sequence[Record]], Record]
    write: Callable[[Any, Refer, set[str]], list[Record]]
    grouped: str | None = None


def is_media_name(key: str) -> bool:
    """Whether what stands under a key names media: `images`, `positive_images`, `image`, ..."""
    return key in MEDIA_NAMES or key.rpartition("_")[2] in MEDIA_NAMES[:4]


def map_media(value: Any, change: Callable[[str], str]) -> Any:
    """The same record or row with every reference to media changed."""
    if isinstance(value, list):
        return [map_media(item, change) for item in value]
    if not isinstance(value, dict):
        return value
    return {k: _map_refs(v, change) if is_media_name(k) else map_media(v, change) for k, v in value.items()}


def _map_refs(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, list):
        return [_map_refs(item, change) for item in value]
    if isinstance(value, dict):  # image_url: {"url": ...}, video: {"video": ..., "start": ...}
        return {k: _map_refs(v, change) if k in ("url", "video", "image") else v for k, v in value.items()}
    return change(value) if isinstance(value, str) else value


def without(record: Mapping[str, Any], *known: str) -> Record:
    """The fields nobody reads; they travel along."""
    return {key: value for key, value in record.items() if key not in known}


def given(**fields: Any) -> Record:
    """Only what is there: neither None nor an empty list."""
    return {key: value for key, value in fields.items() if value is not None and value != []}


def listed(value: Any) -> list[Any]:
    """None, one or a list, as a list."""
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def own_id(sample: Sample) -> str | None:
    """The id a row was given; None where it was made from its line."""
    stem = os.path.splitext(os.path.basename(sample.source.file))[0]
    return None if sample.id == f"{stem}:{sample.source.line}" else sample.id


# ---------------------------------------------------------------- Litchi's own form


def write_litchi(sample: Sample, refer: Refer, lost: set[str]) -> list[Record]:
    """A sample as a row again."""
    if isinstance(sample, ChatSample):
        turns, boxes = mark_boxes(sample.turns)
        row: Record = {"messages": [_message(turn, refer) for turn in turns]} | given(boxes=boxes)
    else:
        documents = [content_value(d.content, refer, id=_document_id(d.id, i)) for i, d in enumerate(sample.documents)]
        row = given(query=content_value(sample.query, refer), instruction=sample.instruction)
        labels = [d.label for d in sample.documents]
        if labels == sorted(labels, reverse=True) and set(labels) <= {0.0, 1.0}:
            positive = documents[: labels.count(1.0)]
            row |= {"pos_doc": positive[0] if len(positive) == 1 else positive, "neg_docs": documents[len(positive) :]}
        else:
            row |= {"documents": documents, "labels": [int(x) if x.is_integer() else x for x in labels]}
    return [given(id=own_id(sample)) | row | dict(sample.fields)]


def _message(turn: Turn, refer: Refer) -> Record:
    parts: list[Record] = []
    for part in turn.parts:
        if isinstance(part, Media) and part.region:
            parts[-1].setdefault("regions", []).append(list(part.region))
        else:
            assert not isinstance(part, Box), "boxes are marks by now"
            parts.append(part_value(part, refer))
    plain = all(isinstance(part, str) for part in turn.parts)
    marked = turn.role == "user" and any(mark in str(part) for part in turn.parts for mark in MARKS)
    content = "".join(map(str, turn.parts)) if plain and not marked else parts
    return {"role": turn.role, "content": content} | ({} if turn.train else {"train": False})


def part_value(part: str | Media, refer: Refer) -> Record:
    """A part of a typed message."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": part.kind, part.kind: media_value(part, refer)} | times(part)


def media_value(media: Media, refer: Refer) -> Any:
    """A reference; of a video given by its frames a list of them."""
    return [refer(Media("image", frame)) for frame in media.frames] if media.frames else refer(media)


def times(media: Media) -> Record:
    """The part of a video that is meant."""
    return given(start=media.start_s, end=media.end_s, fps=media.fps, nframes=media.nframes)


def content_value(content: Content, refer: Refer, *, id: str | None = None, plain: bool = True) -> Any:
    """A query or document: its text alone where that is all (and `plain`), else an object."""
    if plain and id is None and not content.media:
        return content.text
    images = _pictures(content.media, refer)
    out: Record = given(id=id, text=content.text or None, image=images[0] if len(images) == 1 else images)
    for media in content.media:
        if media.kind == "video":
            out |= {"video": media_value(media, refer)} | times(media)
    return out


def _pictures(media: Iterable[Media], refer: Refer) -> list[Any]:
    out: list[Any] = []
    for one in media:
        if one.region is not None:
            out[-1] = out[-1] if isinstance(out[-1], dict) else {"image": out[-1], "regions": []}
            out[-1]["regions"].append(list(one.region))
        elif one.kind == "image":
            out.append(refer(one))
    return out


def refuse_places(sample: Sample) -> None:
    """Raises UnfitError where a row has boxes or regions of pictures, which no other format holds."""
    if has_boxes(sample):
        raise UnfitError("it has boxes")
    if any(media.region for media in list_media(sample)):
        raise UnfitError("it has regions of pictures")


def _document_id(name: str, place: int) -> str | None:
    return None if name == f"d{place}" else name


# ---------------------------------------------------------------- conversations

SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
SHAREGPT_NAMES = {"user": "human", "assistant": "gpt", "system": "system"}


def _said(messages: Any, role: str, content: str) -> list[Record]:
    """Messages of another format with the names of ours; what else is in them stays."""
    out = []
    for number, message in enumerate(listed(messages)):
        if not isinstance(message, dict) or message.get(role) not in SHAREGPT_ROLES:
            raise UnfitError(
                f"turn {number} has the role {message.get(role) if isinstance(message, dict) else message!r}"
            )
        out.append(
            {"role": SHAREGPT_ROLES[message[role]], "content": message.get(content), **without(message, role, content)}
        )
    return out


def _read_sharegpt(records: Sequence[Record], *, images: str = "images", videos: str = "videos") -> Record:
    (record,) = records
    messages = _said(record.get("conversations"), "from", "value")
    if record.get("system"):
        messages.insert(0, {"role": "system", "content": record["system"]})
    media = given(images=listed(record.get(images)), videos=listed(record.get(videos)))
    return without(record, "conversations", "system", images, videos) | {"messages": messages} | media


def _marked(sample: ChatSample, refer: Refer, lost: set[str]) -> tuple[list[tuple[Turn, str]], list[Any], list[Any]]:
    """Turns with their texts, where marks stand for media; images and videos in the order of their marks."""
    turns = []
    found: dict[str, list[Any]] = {"image": [], "video": []}
    for turn in sample.turns:
        for part in turn.parts:
            if isinstance(part, Media):
                found[part.kind].append(media_value(part, refer))
                lost |= {"times of videos"} if times(part) else set()
            elif any(mark in str(part) for mark in MARKS):
                raise UnfitError(f"a {turn.role} turn has the text <image> or <video>, which would be a mark there")
        turns.append((turn, "".join(f"<{p.kind}>" if isinstance(p, Media) else str(p) for p in turn.parts)))
    return turns, found["image"], found["video"]


def _alternate(sample: ChatSample) -> None:
    roles = [turn.role for turn in sample.turns if turn.role != "system"]
    if roles != ["user", "assistant"] * (len(roles) // 2):
        raise UnfitError(f"the turns are {', '.join(roles)}: user and assistant have to take turns there")


def _conversation(turns: Iterable[tuple[Turn, str]], lost: set[str]) -> list[Record]:
    out = []
    for turn, text in turns:
        lost |= set() if turn.train else {"train: false"}
        out.append({"from": SHAREGPT_NAMES[turn.role], "value": text})
    return out


def _write_sharegpt(sample: ChatSample, refer: Refer, lost: set[str]) -> list[Record]:
    _alternate(sample)
    turns, images, videos = _marked(sample, refer, lost)
    record = given(id=own_id(sample)) | {"conversations": _conversation(turns, lost)}
    return [record | given(images=images, videos=videos) | dict(sample.fields)]


def _read_llava(records: Sequence[Record]) -> Record:
    return _read_sharegpt(records, images="image", videos="video")


def _write_llava(sample: ChatSample, refer: Refer, lost: set[str]) -> list[Record]:
    _alternate(sample)
    turns, images, videos = _marked(sample, refer, lost)
    lost |= {"system turn"} if sample.turns[0].role == "system" else set()
    conversation = _conversation([pair for pair in turns if pair[0].role != "system"], lost)
    media = {key: refs[0] if len(refs) == 1 else refs for key, refs in (("image", images), ("video", videos)) if refs}
    return [given(id=own_id(sample)) | media | {"conversations": conversation} | dict(sample.fields)]


def _read_swift(records: Sequence[Record]) -> Record:
    (record,) = records
    if record.get("messages") is not None:
        record = _fill_parts(record)
        messages = [
            {**without(m, "loss"), **given(train=m.get("loss"))} for m in _said(record["messages"], "role", "content")
        ]
        return without(record, "messages") | {"messages": messages}
    pairs = [*listed(record.get("history")), [record.get("query"), record.get("response")]]
    messages = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    for asked, told in pairs:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": told}]
    return without(record, "history", "query", "response", "system") | {"messages": messages}


def _fill_parts(record: Record) -> Record:
    """With media put into parts that only say their type (TRL has such too), in the order of the lists beside them."""
    said = [m for m in listed(record["messages"]) if isinstance(m, dict) and isinstance(m.get("content"), list)]
    parts = [part for message in said for part in message["content"] if is_bare(part)]
    if not parts:
        return record
    out = {**record, "messages": [dict(m) if isinstance(m, dict) else m for m in listed(record["messages"])]}
    for kind in ("image", "video"):
        refs = listed(out.pop(f"{kind}s", None))
        wanted = sum(part["type"] == kind for part in parts)
        if wanted != len(refs):
            raise UnfitError(f"{wanted} parts of type {kind}, {len(refs)} {kind}s")
        supply = iter(refs)
        for message in out["messages"]:
            if isinstance(message, dict) and isinstance(message.get("content"), list):
                message["content"] = [
                    {**part, kind: next(supply)} if is_bare(part) and part["type"] == kind else part
                    for part in message["content"]
                ]
    return out


def is_bare(part: Any) -> bool:
    """Whether a part says that a picture or video stands there, but not which."""
    return isinstance(part, dict) and part.get("type") in ("image", "video") and part.get(part["type"]) is None


def _write_swift(sample: ChatSample, refer: Refer, lost: set[str]) -> list[Record]:
    turns, images, videos = _marked(sample, refer, lost)
    messages = [{"role": t.role, "content": text} | ({} if t.train else {"loss": False}) for t, text in turns]
    record = given(id=own_id(sample)) | {"messages": messages}
    return [record | given(images=images, videos=videos) | dict(sample.fields)]


def _read_alpaca(records: Sequence[Record]) -> Record:
    (record,) = records
    asked = [part for part in (record.get("instruction"), record.get("input")) if part not in (None, "")]
    whole = "\n".join(asked) if all(isinstance(part, str) for part in asked) else asked  # which is refused
    rest = without(record, "instruction", "input", "output")
    return _read_swift([rest | {"query": whole, "response": record.get("output")}])


def _write_alpaca(sample: ChatSample, refer: Refer, lost: set[str]) -> list[Record]:
    _alternate(sample)
    turns, images, videos = _marked(sample, refer, lost)
    lost |= set() if all(turn.train for turn, _ in turns) else {"train: false"}
    system = turns[0][1] if turns[0][0].role == "system" else None
    said = [text for turn, text in turns if turn.role != "system"]
    *history, (asked, told) = ([q, a] for q, a in zip(said[::2], said[1::2], strict=True))
    record = given(id=own_id(sample), system=system, history=history, images=images, videos=videos)
    return [record | {"instruction": asked, "input": "", "output": told} | dict(sample.fields)]


def _read_qa(records: Sequence[Record]) -> Record:
    (record,) = records
    parts = [{"type": kind, kind: ref} for kind in ("image", "video") for ref in listed(record.get(kind))]
    parts += [{"type": "image", "image": ref} for ref in listed(record.get("images"))]
    if record.get("question") is not None:
        parts.append({"type": "text", "text": record["question"]})
    messages = [{"role": "system", "content": record["system"]}] if record.get("system") is not None else []
    messages += [{"role": "user", "content": parts}, {"role": "assistant", "content": record.get("answer")}]
    return without(record, "image", "images", "video", "question", "answer", "system") | {"messages": messages}


def _write_qa(sample: ChatSample, refer: Refer, lost: set[str]) -> list[Record]:
    system = sample.turns[0] if sample.turns[0].role == "system" else None
    rest = sample.turns[1:] if system else sample.turns
    if [turn.role for turn in rest] != ["user", "assistant"]:
        raise UnfitError(f"{len(rest)} turns: one question and one answer are needed there")
    question, answer = rest
    media = [part for part in question.parts if isinstance(part, Media)]
    texts = [part for part in question.parts if isinstance(part, str)]
    if (*media, *texts) != question.parts or len({m.kind for m in media}) > 1:
        raise UnfitError("the question has a text before a picture: there pictures come first")
    lost |= {"times of videos"} if any(map(times, media)) else set()
    lost |= set() if answer.train else {"train: false"}
    refs = [media_value(m, refer) for m in media]
    key = "video" if media and media[0].kind == "video" else "image"
    record = given(id=own_id(sample), system="".join(map(str, system.parts)) if system else None)
    record |= {key: refs[0] if len(refs) == 1 else refs} if refs else {}
    record |= {"question": texts[0]} if texts else {}
    return [record | {"answer": "".join(map(str, answer.parts))} | dict(sample.fields)]


CHAT: dict[str, Format] = {
    "sharegpt": Format("chat", _read_sharegpt, _write_sharegpt),
    "llava": Format("chat", _read_llava, _write_llava),
    "ms-swift": Format("chat", _read_swift, _write_swift),
    "alpaca": Format("chat", _read_alpaca, _write_alpaca),
    "qa": Format("chat", _read_qa, _write_qa),
}


# ---------------------------------------------------------------- comparing


def compare_samples(wanted: Sample, found: Sample) -> set[str]:
    """Names of what differs between a sample and what was read back of it; labels 1 and 0 may stand in any order."""
    differ = {"id"} if wanted.id != found.id else set()
    if isinstance(wanted, RerankSample) and isinstance(found, RerankSample):
        ours, theirs = _documents(wanted), _documents(found)
        same = {"query": wanted.query == found.query, "instruction": wanted.instruction == found.instruction}
        same["documents or labels"] = [d[1:] for d in ours] == [d[1:] for d in theirs]
        same["ids of documents"] = [d[0] for d in ours] == [d[0] for d in theirs]
        differ |= {name for name, equal in same.items() if not equal}
    elif isinstance(wanted, ChatSample) and isinstance(found, ChatSample):
        differ |= {"turns"} if wanted.turns != found.turns else set()
    else:
        differ.add("task")
    keys = wanted.fields.keys() | found.fields.keys()
    return differ | {f"field {key}" for key in keys if wanted.fields.get(key) != found.fields.get(key)}


def _documents(sample: RerankSample) -> list[tuple[str | None, Content, float]]:
    documents = [(_document_id(d.id, i), d.content, d.label) for i, d in enumerate(sample.documents)]
    return sorted(documents, key=lambda d: -d[2]) if {d[2] for d in documents} <= {0.0, 1.0} else documents
