"""Read a JSONL file line by line and parse a line into a sample.

In: the path of a file, then the bytes of one line. Out: `Lines` (where every row stands), and for a row its
`ChatSample` or `RerankSample` with warnings, or a `RowError` that says what is wrong with it.

The reader is our own: column stores want one type per column, number rows otherwise than an editor does, and add
nulls. Here a row is judged alone, so neither its neighbours nor its place in the file can change the verdict.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from litchi.data.boxes import join_texts, place_boxes
from litchi.data.values import (
    CUT_KEYS,
    Row,
    RowError,
    add_regions,
    is_number,
    load_object,
    read_id,
    read_media,
    read_media_list,
    read_pictures,
    read_text,
    show,
)
from litchi.errors import DataError, UsageError
from litchi.types import ChatSample, Content, Document, Finding, Media, Part, RerankSample, Sample, Source, Turn

NOT_READ_YET = (".gz", ".zst", ".parquet", ".tar")
ROLES = ("system", "user", "assistant")
CHAT_KEYS = frozenset({"id", "messages", "images", "videos", "boxes"})
RERANK_KEYS = frozenset({"id", "query", "pos_doc", "neg_docs", "documents", "labels", "instruction"})
CONTENT_KEYS = frozenset({"text", "image", "video"})
PART_KEYS = {
    "text": frozenset({"type", "text"}),
    "image": frozenset({"type", "image", "regions"}),
    "image_url": frozenset({"type", "image_url", "regions"}),
    "video": frozenset({"type", "video"}) | CUT_KEYS,
}

_MARK = re.compile(r"<(image|video)>")


# ---------------------------------------------------------------- the file


@dataclass(frozen=True)
class Lines:
    """Where the rows of a file stand: blank lines are left out, but counted in `numbers`.

    `offsets` and `lengths` are in bytes, `numbers` are the lines an editor shows, from 1; all int64 [rows].
    """

    path: str
    offsets: np.ndarray
    lengths: np.ndarray
    numbers: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets)

    def read(self, i: int) -> bytes:
        """Return the bytes of row `i`. Raises DataError when the file has become shorter."""
        with open(self.path, "rb") as file:  # opened anew: file positions are shared by forked workers
            file.seek(int(self.offsets[i]))
            raw = file.read(int(self.lengths[i]))
        if len(raw) < self.lengths[i]:
            raise DataError(f"{self.path} became shorter while it was read", where=self.source(i), remedy="Start again")
        return raw

    def source(self, i: int) -> Source:
        """Return the file and line of row `i`."""
        return Source(self.path, int(self.numbers[i]))


def read_offsets(path: str | os.PathLike[str]) -> Lines:
    """Find the rows of a JSONL file in one pass.

    Raises UsageError for a compressed or columnar file, DataError when there is no file or no row in it.
    """
    path = os.fspath(path)
    if path.lower().endswith(NOT_READ_YET):
        raise UsageError(f"{path} is not read yet", why="only plain JSONL is", remedy="Convert it to .jsonl first.")
    starts, lengths, numbers, offset = [], [], [], 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    starts.append(offset)
                    lengths.append(len(line))
                    numbers.append(number)
                offset += len(line)
    except OSError as error:
        raise DataError(f"{path} cannot be read", why=error.strerror, remedy="Name a .jsonl file.") from None
    if not starts:
        raise DataError(f"{path} has no rows", why=f"it holds {offset} bytes", remedy="Write one JSON object a line.")
    return Lines(path, *(np.array(column, dtype=np.int64) for column in (starts, lengths, numbers)))


# ---------------------------------------------------------------- the row


def parse_sample(
    raw: bytes,
    *,
    task: Literal["chat", "rerank"],
    source: Source,
    media_root: str | None,
    require_labels: bool = True,
) -> tuple[Sample, list[Finding]]:
    """Parse one line.

    Args:
        raw: the bytes of the line, one JSON object in UTF-8.
        task: which form the row has; fields the form does not know are kept in `sample.fields`.
        source: names the row in messages and gives the default id `<file stem>:<line>`.
        media_root: the folder relative paths start from. None: only data URLs are allowed (what a server needs).
        require_labels: False for rows to predict on: a chat row that ends with the user keeps all its turns and gets
            an empty answer in the place of the wanted one; a group may lack positives, negatives or labels (0 then).

    Returns: the sample and its warnings. Raises RowError for a row that cannot be used.
    """
    try:
        fields = load_object(raw)
        return parse_fields(fields, task=task, source=source, media_root=media_root, require_labels=require_labels)
    except RowError as error:
        raise RowError(error.code, error.message, where=source) from None


def parse_fields(
    fields: Mapping[str, Any],
    *,
    task: Literal["chat", "rerank"],
    source: Source,
    media_root: str | None,
    require_labels: bool = True,
) -> tuple[Sample, list[Finding]]:
    """Parse the object of a line; as `parse_sample`."""
    root = None if media_root is None else os.path.abspath(media_root)
    row = Row(source, root, require_labels)
    sample = _chat(fields, row) if task == "chat" else _rerank(fields, row)
    return sample, row.findings


def _row_id(fields: Mapping[str, Any], row: Row) -> str:
    stem = os.path.splitext(os.path.basename(row.source.file))[0]
    return read_id(fields.get("id"), "id", f"{stem}:{row.source.line}")


def _other(fields: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in known}


# ---------------------------------------------------------------- chat


def _chat(fields: Mapping[str, Any], row: Row) -> ChatSample:
    messages = fields.get("messages")
    if not isinstance(messages, list):
        raise RowError("wrong_type", f"messages is {show(messages)}: a list of {{role, content}} is needed")
    pools = {kind: read_media_list(fields.get(f"{kind}s"), kind, f"{kind}s", row) for kind in ("image", "video")}
    for kind, pool in pools.items():
        _check_marks(kind, _count_marks(messages, kind), len(pool))
    supply = {kind: iter(pool) for kind, pool in pools.items()}
    turns = [_turn(message, i, supply, row) for i, message in enumerate(messages)]
    if fields.get("boxes") is not None:
        turns = place_boxes(turns, fields["boxes"])
    turns = _learnable(turns, row) if row.strict else _answerable(turns)
    return ChatSample(row.source, _row_id(fields, row), tuple(turns), _other(fields, CHAT_KEYS))


def _count_marks(messages: list[Any], kind: str) -> int:
    """Count marks where they are marks: in user text of string form. In answers and typed parts they are text."""
    said = [message for message in messages if isinstance(message, dict) and message.get("role") == "user"]
    return sum(turn["content"].count(f"<{kind}>") for turn in said if isinstance(turn.get("content"), str))


def _check_marks(kind: str, marks: int, media: int) -> None:
    if marks == media:
        return
    found = f"user text has {marks} <{kind}> mark{'s' * (marks != 1)}, {kind}s has {media}: one mark each is needed"
    if media == 0:
        raise RowError(f"mark_no_{kind}", found)
    raise RowError("too_few_marks" if marks < media else "too_many_marks", found)


def _turn(message: Any, i: int, supply: Mapping[str, Iterator[Media]], row: Row) -> Turn:
    name = f"messages[{i}]"
    if not isinstance(message, dict):
        raise RowError("wrong_type", f"{name} is {show(message)}: an object with role and content is needed")
    role, train = message.get("role"), message.get("train")
    if role not in ROLES:
        raise RowError("wrong_role", f"{name}.role is {show(role)}: {', '.join(ROLES)} are allowed")
    if role == "system" and i > 0:
        raise RowError("wrong_role", f"{name}.role is 'system': it is allowed for the first message only")
    if train is not None and (role != "assistant" or not isinstance(train, bool)):
        raise RowError("wrong_train", f"{name}.train is {show(train)}: only the assistant has it, true or false")
    row.warn_unread(message, frozenset({"role", "content", "train"}), name)
    parts = _parts(message.get("content"), f"{name}.content", role, supply, row)
    if role == "assistant" and any(isinstance(part, Media) for part in parts):
        raise RowError("media_in_answer", f"{name}.content has a picture or video: answers are text")
    return Turn(role, parts, train is not False)


def _parts(content: Any, name: str, role: str, supply: Mapping[str, Iterator[Media]], row: Row) -> tuple[Part, ...]:
    if isinstance(content, str):
        return join_texts(_fill(content, supply) if role == "user" else [content])
    if isinstance(content, list):
        read = (_part(part, f"{name}[{i}]", row) for i, part in enumerate(content) if not _is_padding(part))
        return join_texts(one for parts in read for one in parts)
    code = "null_content" if content is None else "wrong_type"
    raise RowError(code, f"{name} is {show(content)}: text or a list of parts is needed")


def _fill(text: str, supply: Mapping[str, Iterator[Media]]) -> Iterator[Part]:
    """Put media in the place of marks; `_MARK` has one group, so pieces are text, kind, text, kind, ..., text."""
    for i, piece in enumerate(_MARK.split(text)):
        yield next(supply[piece]) if i % 2 else piece


def _is_padding(part: Any) -> bool:
    """Tell whether a column store padded the list here: null, or an object of nulls."""
    return part is None or (isinstance(part, dict) and bool(part) and all(value is None for value in part.values()))


def _part(part: Any, name: str, row: Row) -> Sequence[Part]:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in PART_KEYS:
        raise RowError("wrong_part", f"{name} is {show(part)}: an object of type {', '.join(PART_KEYS)} is needed")
    also = sorted(key for key in PART_KEYS if key != kind and part.get(key))
    if also:
        raise RowError("wrong_part", f"{name} is of type {kind} and has {', '.join(also)} too: make it two parts")
    row.warn_unread(part, PART_KEYS[kind] | PART_KEYS.keys(), name)
    value = part.get(kind)
    if kind == "text":
        return [read_text(value, f"{name}.text")]
    if kind == "video":
        return [read_media(value, kind, f"{name}.{kind}", row, cut=part)]
    if kind == "image_url":
        value, kind = value.get("url") if isinstance(value, dict) else value, "image_url.url"
    name = f"{name}.{kind}"
    return add_regions(read_media(value, "image", name, row), part.get("regions"), name)


def _learnable(turns: list[Turn], row: Row) -> list[Turn]:
    """Cut off what follows the last answer, and refuse a row that has no answer to learn."""
    answers = [i for i, turn in enumerate(turns) if turn.role == "assistant"]
    if not answers:
        raise RowError("no_answer", f"messages has {len(turns)} turns, none of the assistant: nothing to learn")
    if not any(turns[i].train for i in answers):
        raise RowError("nothing_to_learn", "every assistant turn has train: false")
    end = answers[-1] + 1
    if end < len(turns):
        row.warn("trailing_turn", f"messages[{end}] and what follows is cut off: no assistant turn comes after it")
    for i in answers:
        if turns[i].train and not turns[i].parts:
            row.warn("empty_answer", f"messages[{i}].content is empty: only the end of the turn is learned")
    return turns[:end]


def _answerable(turns: list[Turn]) -> list[Turn]:
    if not turns:
        raise RowError("no_turns", "messages is empty: there is nothing to answer")
    return turns if turns[-1].role == "assistant" else [*turns, Turn("assistant", ())]


# ---------------------------------------------------------------- rerank


def _rerank(fields: Mapping[str, Any], row: Row) -> RerankSample:
    query = _content(fields.get("query"), "query", "empty_query", row)
    graded = fields.get("documents") is not None
    listed = _graded(fields, row) if graded else _paired(fields)
    documents = tuple(_document(value, name, i, label, row) for i, (name, value, label) in enumerate(listed))
    _check_group(documents, row)
    instruction = fields.get("instruction")
    return RerankSample(
        row.source,
        _row_id(fields, row),
        query,
        documents,
        None if instruction is None else read_text(instruction, "instruction"),
        _other(fields, RERANK_KEYS),
    )


def _paired(fields: Mapping[str, Any]) -> list[tuple[str, Any, float]]:
    """List `pos_doc` and `neg_docs` as (name, document, label)."""
    positive, negatives = fields.get("pos_doc"), fields.get("neg_docs")
    if negatives is not None and not isinstance(negatives, list):
        raise RowError("wrong_type", f"neg_docs is {show(negatives)}: a list of documents is needed")
    if isinstance(positive, list):
        listed = [(f"pos_doc[{i}]", value, 1.0) for i, value in enumerate(positive)]
    else:
        listed = [] if positive is None else [("pos_doc", positive, 1.0)]
    return listed + [(f"neg_docs[{i}]", value, 0.0) for i, value in enumerate(negatives or [])]


def _graded(fields: Mapping[str, Any], row: Row) -> list[tuple[str, Any, float]]:
    """List `documents` with `labels` as (name, document, label)."""
    documents, labels = fields["documents"], fields.get("labels")
    if fields.get("pos_doc") is not None or fields.get("neg_docs") is not None:
        raise RowError("two_forms", "the row has documents and pos_doc or neg_docs: use one form")
    if not isinstance(documents, list):
        raise RowError("wrong_type", f"documents is {show(documents)}: a list is needed")
    if labels is None and not row.strict:
        labels = [0] * len(documents)
    if not isinstance(labels, list) or len(labels) != len(documents):
        count = len(labels) if isinstance(labels, list) else show(labels)
        raise RowError("label_count", f"documents has {len(documents)} entries, labels {count}: one each is needed")
    for i, label in enumerate(labels):
        if not is_number(label) or label < 0:
            raise RowError("wrong_label", f"labels[{i}] is {show(label)}: a number from 0 up is needed")
    return [(f"documents[{i}]", *pair) for i, pair in enumerate(zip(documents, map(float, labels), strict=True))]


def _document(value: Any, name: str, i: int, label: float, row: Row) -> Document:
    given = value.get("id") if isinstance(value, dict) else None
    return Document(read_id(given, f"{name}.id", f"d{i}"), _content(value, name, "empty_document", row), label)


def _content(value: Any, name: str, empty: str, row: Row) -> Content:
    """Parse a query or a document; `empty` is the code for one with neither text nor media."""
    if isinstance(value, dict):
        read = CONTENT_KEYS | {"id"} | (CUT_KEYS if value.get("video") is not None else frozenset())
        row.warn_unread(value, read, name)
        text = "" if value.get("text") is None else read_text(value["text"], f"{name}.text")
        media = read_pictures(value.get("image"), f"{name}.image", row)
        if value.get("video") is not None:
            media.append(read_media(value["video"], "video", f"{name}.video", row, cut=value))
        content = Content(text, tuple(media))
    elif isinstance(value, str):
        content = Content(value)
    elif value is None:
        raise RowError(empty, f"{name} is missing: text or an object with text, image or video is needed")
    else:
        raise RowError("wrong_type", f"{name} is {show(value)}: text or an object with text, image or video is needed")
    if not content.text.strip() and not content.media:
        raise RowError(empty, f"{name} is {show(value)}: it has neither text nor a picture")
    return content


def _check_group(documents: tuple[Document, ...], row: Row) -> None:
    places: dict[str, int] = {}
    for i, document in enumerate(documents):
        if places.setdefault(document.id, i) < i:
            raise RowError(
                "duplicate_id", f"documents {places[document.id]} and {i} both have the id {show(document.id)}"
            )
    if not documents and not row.strict:
        raise RowError("no_documents", "the row has no documents: there is nothing to rank")
    if row.strict and not any(document.label > 0 for document in documents):
        raise RowError("no_positive", f"none of {len(documents)} documents is positive (pos_doc, or a label above 0)")
    if row.strict and all(document.label > 0 for document in documents):
        raise RowError("no_negative", f"none of {len(documents)} documents is negative (neg_docs, or a label of 0)")


def guess_task(path: str) -> Literal["chat", "rerank"]:
    """chat or rerank, by the first row of a file."""
    try:
        first = json.loads(read_offsets(path).read(0))
    except ValueError:
        first = None
    return "chat" if isinstance(first, dict) and "messages" in first else "rerank"
