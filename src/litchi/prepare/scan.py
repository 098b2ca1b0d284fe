"""A file read once, in parallel, for `litchi data check`: what its rows cost, and numbers by which they are compared.

In: a file, its renderer and rules. Out: `Facts`, arrays of some hundred bytes a row, and findings. No row is kept: a
chunk of rows is read, judged and turned into numbers by a worker, so memory does not grow with what rows hold.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context

import numpy as np

from litchi.batch.index import CHUNK_ROWS, ScanRules, scan_rows
from litchi.data.content import content_key, is_named, key_of, media_key, plain_text, query_key, turn_keys
from litchi.data.detail import list_media
from litchi.data.jsonl import Lines
from litchi.data.render import Renderer
from litchi.data.segments import cut_sample
from litchi.errors import MachineError
from litchi.types import ChatSample, Content, Finding, Media, RerankSample, Sample, Source

COLUMNS = {
    "row": "int32",
    "tokens": "int32",
    "patches": "int64",
    "pixels": "int64",
    "content": "uint64",
    "asked": "uint64",
    "told": "uint64",
    "pair_row": "int32",
    "pair": "uint64",
    "label": "float32",
    "key_row": "int32",
    "kind": "uint8",
    "key": "uint64",
}
SHARED = ("query", "text", "picture")  # kinds of what two files may have in common; `Facts.kinds` counts in it


@dataclass
class Facts:
    """What is known of the usable rows of a file. `row` and `*_row` are numbers into `Lines`.

    `content` is the whole row, `asked` what is asked, `told` the answer (chat). `pair` is a query with one of its
    documents, `label` what the row says of it. `key` is what must not stand in another file too, of kind `kind`.
    `hurt` are rows that lose a document.
    """

    row: np.ndarray
    tokens: np.ndarray
    patches: np.ndarray
    pixels: np.ndarray  # of its largest picture, in the file
    content: np.ndarray
    asked: np.ndarray
    told: np.ndarray
    pair_row: np.ndarray
    pair: np.ndarray
    label: np.ndarray
    key_row: np.ndarray
    kind: np.ndarray
    key: np.ndarray
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)  # (histogram, bin) -> how many

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, np.ndarray))


def join_facts(parts: Sequence[Facts]) -> Facts:
    """One for many, in their order."""
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS}
    return Facts(**columns, counts=sum((part.counts for part in parts), Counter()))


def scan_file(
    lines: Lines,
    renderer: Renderer,
    rules: ScanRules,
    *,
    workers: int,
    compare: bool,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Facts, list[Finding]]:
    """Scan a file in worker processes.

    Args:
        compare: also collect what must not stand in another file (`Facts.key`).
        progress: called with (rows done, rows).

    Raises:
        MachineError: a worker died.
    """
    chunks = [range(i, min(i + CHUNK_ROWS, len(lines))) for i in range(0, len(lines), CHUNK_ROWS)]
    scan = partial(scan_chunk, lines, renderer, rules, compare)
    parts, findings, done = [], [], 0
    for chunk, (facts, said) in zip(chunks, _map(scan, chunks, workers), strict=True):
        parts.append(facts)
        findings += said
        done += len(chunk)
        if progress is not None:
            progress(done, len(lines))
    findings.sort(key=lambda f: (f.line, f.severity, f.message))
    return join_facts(parts), findings


_scan: Callable[[range], tuple[Facts, list[Finding]]] | None = None  # a worker's; set once by its initializer


def _map(scan: Callable, chunks: Sequence[range], workers: int) -> Iterator[tuple[Facts, list[Finding]]]:
    if workers < 2 or len(chunks) < 2:
        yield from map(scan, chunks)
        return
    workers = min(workers, len(chunks))
    pool = ProcessPoolExecutor(workers, mp_context=get_context("fork"), initializer=_start, initargs=(scan,))
    try:
        yield from pool.map(_run, chunks)
    except BrokenProcessPool:
        raise MachineError(
            "a process that checks rows died",
            why="out of memory, or a crash in a decoder",
            remedy="Set data.workers=1: then the bar ends at the rows that do it.",
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start(scan: Callable[[range], tuple[Facts, list[Finding]]]) -> None:
    global _scan
    _scan = scan


def _run(chunk: range) -> tuple[Facts, list[Finding]]:
    assert _scan is not None
    return _scan(chunk)


def count_workers(asked: int) -> int:
    """Processes to check with: all cores this process may use, or as many as a larger setting says; 0 and 1: none."""
    return asked if asked < 2 else max(asked, len(os.sched_getaffinity(0)))


# ---------------------------------------------------------------- a chunk


def scan_chunk(
    lines: Lines, renderer: Renderer, rules: ScanRules, compare: bool, numbers: range
) -> tuple[Facts, list[Finding]]:
    """Judge rows as training does, and turn the usable ones into numbers."""
    costs, findings, _ = scan_rows(lines, numbers, renderer, rules)
    columns: dict[str, list] = {name: [] for name in COLUMNS}
    counts: Counter[tuple[str, str]] = Counter()
    area = renderer.processor.vision.patch**2
    for cost in costs:
        source = Source(lines.path, int(lines.numbers[cost.line]))
        sample, _ = renderer.parse(lines.read(cost.line), source, require_labels=rules.require_labels)
        if cost.segment is not None and isinstance(sample, ChatSample):
            sample = cut_sample(sample, cost.segment)
        largest = max((w * h for w, h, *_ in cost.sizes), default=0)
        for name, value in (
            ("row", cost.line),
            ("tokens", cost.tokens),
            ("patches", cost.patches),
            ("pixels", largest),
        ):
            columns[name].append(value)
        findings += _describe(sample, cost.line, columns)
        if compare:
            for kind, key in shared_keys(sample):
                for name, value in (("key_row", cost.line), ("kind", SHARED.index(kind)), ("key", key)):
                    columns[name].append(value)
        counts["tokens", _bin(cost.tokens)] += 1
        counts["modalities", modality(sample)] += 1
        for w, h, *_ in cost.sizes:  # of a video also frames and seconds
            counts["picture sides", _bin(math.isqrt(w * h))] += 1
    counts["pixels", "all"] = sum(columns["patches"]) * area
    arrays = {name: np.array(values, COLUMNS[name]) for name, values in columns.items()}
    return Facts(**arrays, counts=counts), findings


def _bin(value: int) -> str:
    """The power of two that a value does not exceed, from 32 up."""
    return str(1 << max(5, (value - 1).bit_length()))


def _describe(sample: Sample, row: int, columns: dict[str, list]) -> list[Finding]:
    """Numbers of a row; what is wrong with it beside what a reader of rows sees."""
    if isinstance(sample, ChatSample):
        turns = turn_keys(sample)
        last = max(i for i, turn in enumerate(sample.turns) if turn.role == "assistant")
        asked, told = key_of(*turns[:last]), turns[last]
        whole = key_of(asked, told, *(int(turn.train) for turn in sample.turns))
        said = []
    else:
        query = key_of(sample.instruction, content_key(sample.query))
        documents = [content_key(d.content) for d in sample.documents]
        labels = [d.label for d in sample.documents]
        asked = told = 0
        whole = key_of(query, *documents, *labels)
        columns["pair_row"] += [row] * len(documents)
        columns["pair"] += [key_of(query, document) for document in documents]
        columns["label"] += labels
        said = _equal_negatives(sample, documents)
    for name, key in (("content", whole), ("asked", asked), ("told", told)):
        columns[name].append(key)
    return said


def _equal_negatives(sample: RerankSample, keys: Sequence[int]) -> list[Finding]:
    positives = {key: d.id for key, d in zip(keys, sample.documents, strict=True) if d.label > 0}
    equal = [
        (d.id, positives[key])
        for key, d in zip(keys, sample.documents, strict=True)
        if d.label <= 0 and key in positives
    ]
    return [
        Finding(
            sample.source.file,
            sample.source.line,
            "warning",
            "negative_equals_positive",
            f"document {negative} is negative and has the content of {positive}, which is positive",
        )
        for negative, positive in equal
    ]


def shared_keys(sample: Sample) -> Iterator[tuple[str, int]]:
    """What must not stand in a training and an evaluation file both, as (kind, number).

    The query with its pictures; the text of a positive document without pictures; the pictures of the query or of a
    positive document, or of a conversation. Negatives do not count: they are drawn from one catalogue.
    """
    yield "query", query_key(sample)
    if isinstance(sample, ChatSample):
        media = list_media(sample)
    else:
        positive = [d.content for d in sample.documents if d.label > 0]
        media = [m for content in (sample.query, *positive) for m in content.media]
        yield from {("text", key_of(plain_text(c.text))) for c in positive if not c.media}
    yield from {("picture", media_key(m)) for m in media}


def product_keys(sample: Sample, *, negatives: bool) -> set[tuple[str, int]]:
    """What a split must keep on one side: as `shared_keys`, whole documents and their own ids; also of `negatives`."""
    keys = set(shared_keys(sample))
    if isinstance(sample, RerankSample):
        for place, document in enumerate(sample.documents):
            if document.label > 0 or negatives:
                keys.add(("document", content_key(document.content, plain=True)))
                keys |= {("picture", media_key(m)) for m in document.content.media}
                keys |= {("id", key_of(document.id))} if is_named(document.id, place) else set()
    return keys


# ---------------------------------------------------------------- modalities


def modality(sample: Sample) -> str:
    """What a row is made of: "text", "1 picture", ... or, for a group, "text -> picture+text"."""
    if isinstance(sample, RerankSample):
        documents = sorted({_made_of(d.content) for d in sample.documents})
        return f"{_made_of(sample.query)} -> {' | '.join(documents)}"
    media = list_media(sample)
    if any(m.kind == "video" for m in media):
        return "video"
    return {0: "text", 1: "1 picture"}.get(len(media), "2 to 4 pictures" if len(media) < 5 else "5 pictures or more")


def _made_of(content: Content) -> str:
    kinds = [kind for kind in ("image", "video") if any(m.kind == kind for m in content.media)]
    words = ["picture" if kind == "image" else kind for kind in kinds] + ["text"] * bool(content.text.strip())
    return "+".join(words)


def row_media(renderer: Renderer, raw: bytes, source: Source) -> list[Media]:
    """The media of a row that can be parsed. Raises RowError."""
    return list_media(renderer.parse(raw, source, require_labels=False)[0])
