"""Groups of a query and its documents in other tools' formats; what a `Format` is stands in `formats.py`.

In and out as there: records and rows. A document is a text, or an object with text, image and video.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from litchi.data.content import is_named
from litchi.data.formats import (
    CHAT,
    MARKS,
    Format,
    Record,
    Refer,
    UnfitError,
    content_value,
    given,
    is_bare,
    listed,
    media_value,
    own_id,
    times,
    without,
    write_litchi,
)
from litchi.types import Content, RerankSample

_LEADING = re.compile(r"(?:<(?:image|video)>)*")


def _lose_ids(sample: RerankSample, lost: set[str]) -> None:
    if any(is_named(d.id, i) for i, d in enumerate(sample.documents)):
        lost.add("ids of documents")


def _two_sides(sample: RerankSample, lost: set[str]) -> tuple[list[Content], list[Content]]:
    """Positives and negatives; grades above 1 are lost there."""
    _lose_ids(sample, lost)
    if not {d.label for d in sample.documents} <= {0.0, 1.0}:
        lost.add("grades of documents")
    positive = [d.content for d in sample.documents if d.label > 0]
    return positive, [d.content for d in sample.documents if d.label <= 0]


# ---------------------------------------------------------------- ms-swift: messages


def _swift_text(content: Content, refer: Refer, lost: set[str]) -> tuple[str, list[Any], list[Any]]:
    if any(mark in content.text for mark in MARKS):
        raise UnfitError("a text has <image> or <video>, which would be a mark there")
    lost |= {"times of videos"} if any(map(times, content.media)) else set()
    marks = "".join(f"<{m.kind}>" for m in content.media)
    images, videos = ([media_value(m, refer) for m in content.media if m.kind == kind] for kind in ("image", "video"))
    return marks + content.text, images, videos


def _write_swift(sample: RerankSample, refer: Refer, lost: set[str]) -> list[Record]:
    text, images, videos = _swift_text(sample.query, refer, lost)
    system = [] if sample.instruction is None else [{"role": "system", "content": sample.instruction}]
    record = given(id=own_id(sample)) | {"messages": [*system, {"role": "user", "content": text}]}
    record |= given(images=images, videos=videos)
    for name, side in zip(("positive", "negative"), _two_sides(sample, lost), strict=True):
        read = [_swift_text(content, refer, lost) for content in side]
        record[f"{name}_messages"] = [[{"role": "assistant", "content": text}] for text, _, _ in read]
        for key, lists in (("images", [r[1] for r in read]), ("videos", [r[2] for r in read])):
            record |= {f"{name}_{key}": lists} if any(lists) else {}
    return [record | dict(sample.fields)]


def _swift_content(messages: Any, images: Any, videos: Any) -> tuple[str | None, Record]:
    """A system text, and the one other message as a content."""
    system = [m["content"] for m in listed(messages) if m.get("role") == "system"]
    said = [m.get("content") for m in listed(messages) if m.get("role") != "system"]
    if len(said) != 1 or not isinstance(said[0], str):
        raise UnfitError(f"{len(said)} messages stand where one text is needed")
    leading = _LEADING.match(said[0])
    text = said[0][leading.end() if leading else 0 :]
    if any(mark in text for mark in MARKS):
        raise UnfitError("a picture stands inside a text: in groups pictures come before the text")
    refs = {"image": listed(images), "video": listed(videos)}
    for kind, found in refs.items():
        marks = said[0].count(f"<{kind}>")
        if marks and marks != len(found):  # without marks all media stand first
            raise UnfitError(f"{marks} <{kind}> marks, {len(found)} {kind}s")
    if len(refs["video"]) > 1:
        raise UnfitError(f"{len(refs['video'])} videos in one text: one is read")
    video = refs["video"][0] if refs["video"] else None
    return (system[0] if system else None), given(text=text, image=refs["image"], video=video)


def _read_swift(records: Sequence[Record]) -> Record:
    (record,) = records
    if record.get("positive_messages") is None and isinstance(record.get("query"), str):
        docs = {"pos_doc": listed(record.get("response")), "neg_docs": listed(record.get("rejected_response"))}
        return without(record, "response", "rejected_response") | docs
    instruction, query = _swift_content(record.get("messages"), record.get("images"), record.get("videos"))
    row = given(query=query, instruction=instruction)
    known = ["messages", "images", "videos"]
    for name, key in (("positive", "pos_doc"), ("negative", "neg_docs")):
        messages = listed(record.get(f"{name}_messages"))
        images, videos = (listed(record.get(f"{name}_{kind}")) for kind in ("images", "videos"))
        for found in (images, videos):
            if found and len(found) != len(messages):
                raise UnfitError(f"{len(messages)} {name}_messages, media of {len(found)}")
        padded = zip(messages, images or [None] * len(messages), videos or [None] * len(messages), strict=True)
        row[key] = [_swift_content(*one)[1] for one in padded]
        known += [f"{name}_messages", f"{name}_images", f"{name}_videos"]
    return without(record, *known) | row


# ---------------------------------------------------------------- FlagEmbedding: texts


def _texts(contents: Sequence[Content]) -> list[str]:
    if any(content.media for content in contents):
        raise UnfitError("a query or document has pictures: only texts are held there")
    return [content.text for content in contents]


def _read_flag(records: Sequence[Record]) -> Record:
    (record,) = records
    row = {"query": record.get("query"), "pos_doc": listed(record.get("pos")), "neg_docs": listed(record.get("neg"))}
    return without(record, "query", "pos", "neg", "prompt") | row | given(instruction=record.get("prompt"))


def _write_flag(sample: RerankSample, refer: Refer, lost: set[str]) -> list[Record]:
    positive, negative = _two_sides(sample, lost)
    (query,) = _texts([sample.query])
    record = given(id=own_id(sample)) | {"query": query, "pos": _texts(positive), "neg": _texts(negative)}
    return [record | given(prompt=sample.instruction) | dict(sample.fields)]


# ---------------------------------------------------------------- sentence-transformers: every column is an input


def _lose_others(sample: RerankSample, lost: set[str]) -> None:
    lost |= {"id"} if own_id(sample) is not None else set()
    lost |= {"instruction"} if sample.instruction is not None else set()
    lost |= {f"field {key}" for key in sample.fields}


def _number(name: str) -> int:
    return int(name.rpartition("_")[2]) if "_" in name else 0


def _read_triples(records: Sequence[Record]) -> Record:
    (record,) = records
    asked = "anchor" if "anchor" in record else "query"
    names = [name for name in record if re.fullmatch(r"negative(_\d+)?", name) and record[name] is not None]
    negatives = [record[name] for name in sorted(names, key=_number)]
    row = {"query": record.get(asked), "pos_doc": record.get("positive"), "neg_docs": negatives}
    return without(record, asked, "positive", *[n for n in record if re.fullmatch(r"negative(_\d+)?", n)]) | row


def _write_triples(sample: RerankSample, refer: Refer, lost: set[str]) -> list[Record]:
    _lose_others(sample, lost)
    positive, negative = _two_sides(sample, lost)
    if len(positive) != 1 or not negative:
        raise UnfitError(f"{len(positive)} positives and {len(negative)} negatives: one and at least one are needed")
    values = [content_value(content, refer) for content in negative]
    names = ["negative"] if len(values) == 1 else [f"negative_{i + 1}" for i in range(len(values))]
    record = {"anchor": content_value(sample.query, refer), "positive": content_value(positive[0], refer)}
    return [record | dict(zip(names, values, strict=True))]


def _labels(sample: RerankSample) -> list[float]:
    return [int(d.label) if d.label.is_integer() else d.label for d in sample.documents]


def _read_graded(records: Sequence[Record]) -> Record:
    (record,) = records
    return record


def _write_columns(sample: RerankSample, refer: Refer, lost: set[str]) -> list[Record]:
    _lose_others(sample, lost)
    _lose_ids(sample, lost)
    documents = [content_value(d.content, refer) for d in sample.documents]
    return [{"query": content_value(sample.query, refer), "documents": documents, "labels": _labels(sample)}]


DOCUMENT, LABEL = ("document", "passage", "answer"), ("label", "score")


def _read_pairs(records: Sequence[Record]) -> Record:
    document = next((name for name in DOCUMENT if name in records[0]), DOCUMENT[0])
    label = next((name for name in LABEL if name in records[0]), LABEL[0])
    row = {"query": records[0].get("query")}
    row |= {"documents": [r.get(document) for r in records], "labels": [r.get(label) for r in records]}
    return without(records[0], "query", document, label) | row


def _write_pairs(sample: RerankSample, refer: Refer, lost: set[str]) -> list[Record]:
    _lose_others(sample, lost)
    _lose_ids(sample, lost)
    query = content_value(sample.query, refer)
    pairs = zip(sample.documents, _labels(sample), strict=True)
    return [{"query": query, "document": content_value(d.content, refer), "label": label} for d, label in pairs]


# ---------------------------------------------------------------- Qwen3-VL-Reranker: what its script takes, with labels


def _write_qwen(sample: RerankSample, refer: Refer, lost: set[str]) -> list[Record]:
    documents = [
        content_value(d.content, refer, id=d.id if is_named(d.id, i) else None, plain=False)
        for i, d in enumerate(sample.documents)
    ]
    record = given(id=own_id(sample), instruction=sample.instruction)
    record |= {"query": content_value(sample.query, refer, plain=False), "documents": documents}
    return [record | {"labels": _labels(sample)} | dict(sample.fields)]


RERANK: dict[str, Format] = {
    "ms-swift-reranker": Format("rerank", _read_swift, _write_swift),
    "flagembedding": Format("rerank", _read_flag, _write_flag),
    "st-triples": Format("rerank", _read_triples, _write_triples),
    "st-columns": Format("rerank", _read_graded, _write_columns),
    "st-pairs": Format("rerank", _read_pairs, _write_pairs, grouped="query"),
    "qwen3-vl-reranker": Format("rerank", _read_graded, _write_qwen),
}
FORMATS: dict[str, Format] = {"litchi": Format("", _read_graded, write_litchi), **CHAT, **RERANK}


def guess_format(record: Record) -> str | None:
    """The format of a record by its keys, or None. Where two read it alike, Litchi's own is taken."""
    keys = {key for key, value in record.items() if value is not None}
    if "conversations" in keys:
        return "llava" if keys & {"image", "video"} else "sharegpt"
    if "positive_messages" in keys or {"query", "response", "rejected_response"} <= keys:
        return "ms-swift-reranker"
    if "messages" in keys:
        said = [m for m in listed(record["messages"]) if isinstance(m, dict)]
        bare = any(is_bare(part) for m in said if isinstance(m.get("content"), list) for part in m["content"])
        return "ms-swift" if bare or any("loss" in message for message in said) else "litchi"
    if {"query", "response"} <= keys:
        return "ms-swift"
    if {"instruction", "output"} <= keys:
        return "alpaca"
    if {"query", "pos", "neg"} <= keys:
        return "flagembedding"
    if "positive" in keys and keys & {"anchor", "query"}:
        return "st-triples"
    if "query" in keys and keys & {"pos_doc", "documents"}:
        return "litchi"
    if "query" in keys and keys & set(DOCUMENT) and keys & set(LABEL):
        return "st-pairs"
    return "qa" if "answer" in keys and keys & {"question", "image", "images", "video"} else None
