"""The exact cost of every row, known before the first step: tokens from headers, without decoding for the count.

file -> Lines -> (parse, check pictures, render) -> SourceIndex. What is scanned once is cached by the file's identity,
the renderer's and the pictures'; on several ranks each scans a share (`gather` brings the shares together).
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from litchi.batch.rows import (
    RowCost,
    Size,
    count_trained,
    fit_grid,
    name_picture,
    number_pictures,
    pictures_by_span,
    same_object,
    size_of,
    stage_cost,
    with_step,
)
from litchi.data.boxes import has_boxes
from litchi.data.detail import RULE, Shown, allot_pixels, list_media, with_pixels
from litchi.data.jsonl import Lines, RowError, read_offsets
from litchi.data.media import RULES, MediaError, file_stamp, media_paths, media_warnings
from litchi.data.orphans import end_with_parent
from litchi.data.render import Renderer
from litchi.data.segments import Cutting, Segment, cut_sample, has_answer, split_sample
from litchi.data.verdicts import PASSING, Verdict, cache_root, check_media
from litchi.types import ChatSample, Example, Finding, Media, RerankSample, Sample, Source, VisionSpec

INDEX_VERSION = 5  # raise when a change alters what a scan finds
CHUNK_ROWS = 256  # rows a worker scans between two signs of progress
EXCLUDED = {"no_answer", "no_event", "nothing_to_learn", "too_long"}  # rows that are left out without being wrong

Gather = Callable[[Any], list[Any]]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class SourceIndex:
    """One file, scanned: its usable rows with their costs, and what was found in the others."""

    path: str
    name: str
    lines: Lines
    rows: tuple[RowCost, ...]
    findings: tuple[Finding, ...]
    media: dict[str, tuple[int, int]] = field(repr=False)  # path -> (size, mtime_ns) when it was scanned

    @property
    def bad(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity == "error")

    @property
    def left_out(self) -> tuple[Finding, ...]:
        """Of rows and negatives that are not used, bad or not; the others are warnings of rows that are."""
        return tuple(f for f in self.findings if f.severity == "error" or f.code in EXCLUDED)

    @property
    def tokens(self) -> int:
        return sum(r.tokens for r in self.rows)

    @property
    def patches(self) -> int:
        return sum(r.patches for r in self.rows)

    def is_unchanged(self, media: Media) -> bool:
        """Whether a picture is still the one that was scanned."""
        return all(self.media.get(path) == file_stamp(path) for path in media_paths(media))

    def source(self, row: RowCost) -> Source:
        return Source(self.path, int(self.lines.numbers[row.line]))

    def load(self, row: RowCost, renderer: Renderer) -> Sample:
        """Read and parse a usable row again."""
        sample = renderer.parse(self.lines.read(row.line), self.source(row), require_labels=False)[0]
        if row.segment and isinstance(sample, ChatSample):
            sample = cut_sample(sample, row.segment)
        return with_pixels(sample, row.allotted)


@dataclass(frozen=True)
class ScanRules:
    """What makes a row unusable."""

    max_length: int
    overlong: str = "drop"  # or "error"
    verify: str = "decoded"  # or "headers", "off"
    require_labels: bool = True


# ---------------------------------------------------------------------------------------------------------- scan


class Scan(NamedTuple):
    """What was found in some rows: costs of the usable ones, findings, and (size, mtime_ns) of media by path."""

    costs: list[RowCost]
    findings: list[Finding]
    media: dict[str, tuple[int, int]]


def scan_rows(lines: Lines, numbers: Sequence[int], renderer: Renderer, rules: ScanRules) -> Scan:
    """Parse, check and render rows."""
    samples, findings = [], []
    for i in numbers:
        source = Source(lines.path, int(lines.numbers[i]))
        try:
            sample, said = renderer.parse(lines.read(i), source, require_labels=rules.require_labels)
            findings += said
            samples.append((i, sample))
        except RowError as error:
            findings.append(_row_finding(source, error.code, error.what))
    verdicts = check_media(
        [m for _, s in samples for m in list_media(s)],
        decode=rules.verify == "decoded",
        cache=cache_root() / "media.sqlite",
        window=renderer.window,
        detail=renderer.budget is not None,
    )
    whole: list[tuple[int, Segment | None, Sample]] = [(i, None, sample) for i, sample in samples]
    if renderer.cutting is not None:
        whole, said = _cut_samples(samples, verdicts, renderer.cutting, renderer, rules)
        findings += said
    costs = []
    for i, segment, sample in whole:
        try:
            cost, said = _scan_sample(i, sample, verdicts, renderer, rules)
            costs.append(cost._replace(segment=segment))
            findings += said
        except RowError as error:
            findings.append(_row_finding(sample.source, error.code, error.what, rules))
    return Scan(costs, findings, _media_stamps(m for _, s in samples for m in list_media(s)))


def _cut_samples(samples, verdicts: dict[str, Verdict], cutting: Cutting, renderer: Renderer, rules: ScanRules):
    """Segments in the place of rows with a long video; `verdicts` gains those on their parts."""
    out: list[tuple[int, Segment | None, Sample]] = []
    findings: list[Finding] = []
    for i, sample in samples:
        try:
            readable = all(verdicts[m.key].code is None for m in list_media(sample))
            parts = split_sample(sample, cutting) if readable else []
        except (RowError, MediaError) as error:
            reason = error.reason if isinstance(error, MediaError) else error.what
            findings.append(_row_finding(sample.source, error.code, reason))
            continue
        said = [(i, segment, part) for segment, part in parts if has_answer(part) or not rules.require_labels]
        if len(said) < len(parts):
            found = f"{len(parts) - len(said)} of {len(parts)} segments are left out: no answer belongs to them"
            findings.append(_row_finding(sample.source, "no_event", found))
        out += said if parts else [(i, None, sample)]
    fresh = [m for _, segment, sample in out if segment for m in list_media(sample) if m.key not in verdicts]
    cache, detail = cache_root() / "media.sqlite", renderer.budget is not None
    verdicts |= check_media(fresh, decode=False, cache=cache, window=renderer.window, detail=detail)
    return out, findings


def _row_finding(source: Source, code: str, message: str, rules: ScanRules | None = None) -> Finding:
    fine = code in EXCLUDED and not (code == "too_long" and rules is not None and rules.overlong == "error")
    return Finding(source.file, source.line, "warning" if fine else "error", code, message)


def _scan_sample(number: int, sample: Sample, verdicts: dict[str, Verdict], renderer: Renderer, rules: ScanRules):
    findings = []
    allotted: tuple[int | None, ...] = ()
    if renderer.budget is not None:
        allotted = same_object(allot_pixels(sample, renderer.budget, lambda m: _shown(m, verdicts[m.key])))
        sample = with_pixels(sample, allotted)
    usable = sample
    if isinstance(sample, RerankSample):
        usable, findings = _drop_bad_negatives(sample, verdicts, rules)
    else:
        _check_all(list_media(sample), verdicts)
    for media in {m.key: m for m in list_media(usable)}.values():
        for code, text in media_warnings(verdicts[media.shown].header):
            findings.append(Finding(sample.source.file, sample.source.line, "warning", code, f"{media.name}: {text}"))
    spec = renderer.processor.vision
    sizes = {m.key: size_of(m, verdicts[m.shown].header, spec) for m in list_media(usable)}

    def render(spec: VisionSpec) -> Example:
        return renderer.render(usable, lambda m: with_step(fit_grid(sizes[m.key], spec), sizes[m.key], spec))

    example = render(spec)
    if isinstance(sample, RerankSample) and isinstance(usable, RerankSample):
        numbers = {d.id: n for n, d in enumerate(sample.documents)}
        cost = _group_cost(number, usable, numbers, example, sizes, rules, findings)
        return cost._replace(allotted=allotted), findings
    if example.tokens > rules.max_length:
        raise RowError("too_long", f"{example.tokens} tokens, data.max_length is {rules.max_length}")
    cost = RowCost(
        line=number,
        id=sample.id,
        tokens=example.tokens,
        patches=example.patches,
        rows=count_trained(example),
        grids=same_object(tuple(m.grid for m in example.media)),
        sizes=same_object(tuple(sizes[m.media.key] for m in example.media)),
        names=tuple(name_picture(m.media.key) for m in example.media),
        shown=tuple(pictures_by_span(example, {m.media.key: n for n, m in enumerate(example.media)})),
        allotted=allotted,
        stages=tuple(stage_cost(stage, render(stage)) for stage in renderer.stages) if has_boxes(sample) else (),
    )
    return cost, findings


def _shown(media: Media, verdict: Verdict) -> Shown | None:
    return None if verdict.code is not None else Shown(verdict.width, verdict.height, verdict.detail or None)


def _check_all(media: Iterable[Media], verdicts: dict[str, Verdict]) -> None:
    for m in media:
        if verdicts[m.shown].code is not None:
            raise RowError(str(verdicts[m.shown].code), f"{m.name}: {verdicts[m.shown].reason}")


def _drop_bad_negatives(sample: RerankSample, verdicts: dict[str, Verdict], rules: ScanRules):
    """A bad negative leaves its group while one remains; a bad query or positive drops the group."""
    _check_all(sample.query.media, verdicts)
    kept, findings = [], []
    for document in sample.documents:
        try:
            _check_all(document.content.media, verdicts)
            kept.append(document)
        except RowError as error:
            if document.label > 0:
                raise RowError(error.code, f"document {document.id}: {error.what}") from None
            findings.append(
                Finding(
                    sample.source.file, sample.source.line, "error", error.code, f"document {document.id}: {error.what}"
                )
            )
    if findings and (not kept or (rules.require_labels and all(d.label > 0 for d in kept))):
        raise RowError(findings[0].code, f"no usable negative is left: {findings[0].message}")
    return replace(sample, documents=tuple(kept)), findings


def _group_cost(
    number: int,
    sample: RerankSample,
    numbers: dict[str, int],
    example: Example,
    sizes: dict[str, Size],
    rules: ScanRules,
    findings: list,
) -> RowCost:
    prefix = example.spans[0][1]
    lengths = [prefix + end - start for start, end, _ in example.spans[1:]]
    kept = []
    for place, (document, length) in enumerate(zip(sample.documents, lengths, strict=True)):
        if length <= rules.max_length:
            kept.append((document.label <= 0, numbers[document.id], length, place))
        elif document.label > 0 or rules.overlong == "error":
            raise RowError(
                "too_long", f"document {document.id}: {length} tokens, data.max_length is {rules.max_length}"
            )
        else:
            text = f"document {document.id} left out: {length} tokens, data.max_length is {rules.max_length}"
            findings.append(Finding(sample.source.file, sample.source.line, "warning", "too_long", text))
    if rules.require_labels and not any(negative for negative, *_ in kept):
        raise RowError("too_long", f"no negative is within data.max_length={rules.max_length}")
    if not kept:
        raise RowError("too_long", f"no document is within data.max_length={rules.max_length}")
    kept.sort()  # positives first, each kind in the order of the file
    contents = [sample.documents[place].content for *_, place in kept]
    keys, shared, pictures = number_pictures(sample.query, contents)
    grids = {m.media.key: m.grid for m in example.media}
    spans = pictures_by_span(example, keys)
    return RowCost(
        line=number,
        id=sample.id,
        tokens=prefix + sum(length - prefix for _, _, length, _ in kept),
        patches=sum(t * h * w for t, h, w in (grids[key] for key in keys)),
        prefix=prefix,
        documents=tuple(n for _, n, _, _ in kept),
        lengths=tuple(length for _, _, length, _ in kept),
        positives=sum(not negative for negative, *_ in kept),
        grids=same_object(tuple(grids[key] for key in keys)),
        shared=shared,
        pictures=pictures,
        sizes=same_object(tuple(sizes[key] for key in keys)),
        names=tuple(name_picture(key) for key in keys),
        shown=(spans[0], *(spans[1 + place] for *_, place in kept)) if keys else (),
    )


def _media_stamps(media: Iterable[Media]) -> dict[str, tuple[int, int]]:
    return {path: file_stamp(path) for m in media for path in media_paths(m)}


# --------------------------------------------------------------------------------------------------------- index


def build_index(
    path: str,
    name: str,
    renderer: Renderer,
    rules: ScanRules,
    *,
    rank: int = 0,
    ranks: int = 1,
    gather: Gather = lambda share: [share],
    workers: int = 1,
    progress: Progress | None = None,
) -> SourceIndex:
    """Scan a file, or read what an earlier scan of it found.

    Args:
        path: the JSONL file.
        name: what the source is called in reports.
        rank, ranks: this process scans the rank-th share of the chunks.
        gather: brings the shares of all ranks together, in rank order, on every rank.
        workers: processes this rank scans with.
        progress: called with (rows done, rows of this rank).
    """
    lines = read_offsets(path)
    entry = cache_root() / "index" / f"{_index_key(path, renderer, rules)}.pkl"
    cached = _read_entry(entry)
    # every rank must take the same branch: one rank's miss makes all scan
    if all(gather(cached is not None)):
        assert cached is not None
        return replace(cached, name=name, lines=lines)
    chunks = [range(i, min(i + CHUNK_ROWS, len(lines))) for i in range(0, len(lines), CHUNK_ROWS)]
    share = _scan_chunks(lines, chunks[rank::ranks], renderer, rules, workers, progress)
    shares: list[Scan] = gather(share)
    costs = sorted((c for s in shares for c in s.costs), key=lambda c: c.line)
    findings = sorted((f for s in shares for f in s.findings), key=lambda f: (f.line, f.severity, f.message))
    media = {k: v for s in shares for k, v in s.media.items()}
    index = SourceIndex(path, name, lines, tuple(costs), tuple(findings), media)
    if rank == 0 and not any(finding.code in PASSING for finding in findings):
        _write_entry(entry, index)
    return index


def _scan_chunks(lines, chunks, renderer, rules, workers, progress) -> Scan:
    together = Scan([], [], {})
    total, done = sum(map(len, chunks)), 0
    for chunk, found in zip(chunks, _map_chunks(lines, chunks, renderer, rules, workers), strict=True):
        together.costs.extend(found.costs)
        together.findings.extend(found.findings)
        together.media.update(found.media)
        done += len(chunk)
        if progress is not None:
            progress(done, total)
    return together


def _map_chunks(lines, chunks, renderer, rules, workers) -> Iterator[Scan]:
    if workers < 2 or len(chunks) < 2:
        yield from (scan_rows(lines, chunk, renderer, rules) for chunk in chunks)
        return
    with ProcessPoolExecutor(
        min(workers, len(chunks)),
        mp_context=get_context("fork"),
        initializer=_start_worker,
        initargs=(os.getpid(), lines, renderer, rules),
    ) as pool:
        yield from pool.map(_scan_in_worker, chunks)


_worker: dict[str, Any] = {}  # what every chunk of a scanning process needs; set once by its initializer


def _start_worker(parent: int, lines: Lines, renderer: Renderer, rules: ScanRules) -> None:
    end_with_parent(parent)
    _worker["args"] = (lines, renderer, rules)


def _scan_in_worker(chunk: range) -> Scan:
    lines, renderer, rules = _worker["args"]
    return scan_rows(lines, chunk, renderer, rules)


def _index_key(path: str, renderer: Renderer, rules: ScanRules) -> str:
    processor = renderer.processor
    parts = [
        INDEX_VERSION,
        RULES,
        path,
        os.path.abspath(path),
        file_stamp(path),
        renderer.task,
        renderer.instruction,
        renderer.media_root,
        renderer.window,
        renderer.cutting,
        [RULE, asdict(renderer.budget)] if renderer.budget else None,
        [asdict(stage) for stage in renderer.stages],
        asdict(renderer.template) if renderer.template else None,
        hashlib.sha256(processor.tokenizer_json.encode()).hexdigest(),
        processor.chat_template,
        asdict(processor.vision),
        asdict(rules),
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _read_entry(entry: Path) -> SourceIndex | None:
    """A cached index that still holds: none of its pictures has changed since."""
    try:
        index: SourceIndex = pickle.loads(entry.read_bytes())
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, TypeError, ImportError):
        return None
    return index if all(file_stamp(path) == stamp for path, stamp in index.media.items()) else None


def _write_entry(entry: Path, index: SourceIndex) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    part = entry.with_suffix(f".{os.getpid()}")
    part.write_bytes(pickle.dumps(index))
    part.replace(entry)
