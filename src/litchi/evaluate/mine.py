"""Hard negatives: documents that a scorer ranks high for a query although they are not what it asks for.

    rows -> Pool, Query -> (scores of a model or of a run) -> picked -> rows with new negatives

A document is never a negative of a query when its content is that of a positive of the same query in any row, or when
its score is above that of the query's lowest positive less the margin: it may well be right. All here is a pure
function of its arguments and the seed, but for reading and writing files.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from litchi.data.content import content_key, is_named, query_key
from litchi.data.formats import Refer, write_litchi
from litchi.data.jsonl import parse_sample, read_offsets
from litchi.data.records import data_url
from litchi.data.values import RowError
from litchi.errors import DataError, UsageError
from litchi.types import Document, Media, RerankSample, Source


@dataclass(frozen=True)
class Mining:
    """How to choose: `negatives` a query, drawn from ranks `first` to `last` (from 1) among what may be a negative.

    `margin`: how far below the positive's score a negative has to lie. `candidates`: documents scored per query, drawn
    from the pool. `keep`: also keep the rows' own negatives.
    """

    negatives: int = 7
    first: int = 1
    last: int = 50
    margin: float = 0.0
    candidates: int = 200
    seed: int = 0
    keep: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.last:
            raise UsageError(f"--ranks is {self.first}:{self.last}", why="first:last is needed, from 1")


def parse_ranks(text: str) -> tuple[int, int]:
    """`1:50` as (1, 50). Raises UsageError."""
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal()):
        raise UsageError(f"--ranks is {text}", why="first:last is needed, such as 1:50")
    return int(first), int(last)


@dataclass
class Pool:
    """Distinct documents by content; `names` are ids that stand for one content everywhere."""

    documents: dict[int, Document] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    unclear: set[str] = field(default_factory=set)

    def add(self, sample: RerankSample) -> None:
        """Take in the documents of a row; a name that stands for two contents is unclear."""
        for place, document in enumerate(sample.documents):
            key = content_key(document.content, plain=True)
            self.documents.setdefault(key, document)
            if is_named(document.id, place) and self.names.setdefault(document.id, key) != key:
                self.unclear.add(document.id)

    def name(self, key: int) -> str | None:
        """The id a document has of its own, where that is clear."""
        found = self.documents[key].id
        return found if self.names.get(found) == key and found not in self.unclear else None


@dataclass(frozen=True)
class Query:
    """A row to mine for: its sample, the contents of its documents, and all contents that are right for its query."""

    sample: RerankSample
    keys: tuple[int, ...]
    right: frozenset[int]

    @property
    def positives(self) -> list[int]:
        return [key for key, document in zip(self.keys, self.sample.documents, strict=True) if document.label > 0]


def read_groups(path: str, media_root: str | None) -> list[RerankSample]:
    """Parse the groups of a file. Raises DataError: a row cannot be parsed."""
    lines = read_offsets(path)
    root = media_root or os.path.dirname(os.path.abspath(path))
    samples = []
    for row in range(len(lines)):
        source = Source(path, int(lines.numbers[row]))
        try:
            sample, _ = parse_sample(
                lines.read(row), task="rerank", source=source, media_root=root, require_labels=False
            )
        except RowError as error:
            raise DataError(error.message, where=source, remedy="See `litchi data check`") from None
        assert isinstance(sample, RerankSample)
        samples.append(sample)
    return samples


def make_queries(samples: Sequence[RerankSample]) -> list[Query]:
    """Rows with a positive, in the order of the file."""
    asked = [query_key(sample) for sample in samples]
    keys = [tuple(content_key(d.content, plain=True) for d in sample.documents) for sample in samples]
    right: dict[int, set[int]] = defaultdict(set)
    for query, sample, own in zip(asked, samples, keys, strict=True):
        right[query] |= {key for key, document in zip(own, sample.documents, strict=True) if document.label > 0}
    return [
        Query(sample, own, frozenset(right[query]))
        for query, sample, own in zip(asked, samples, keys, strict=True)
        if any(document.label > 0 for document in sample.documents)
    ]


def draw_candidates(query: Query, pool: Pool, how: Mining) -> list[int]:
    """Contents to score for a query: its positives, and documents of the pool, all or as many as are drawn."""
    others = [key for key in pool.documents if key not in query.right]
    if len(others) > how.candidates:
        others = random.Random(f"mine {how.seed} {query.sample.id}").sample(others, how.candidates)
    return [*dict.fromkeys(query.positives), *others]


def scores_of_run(query: Query, pool: Pool, run: Mapping[str, float]) -> dict[int, float]:
    """Scores by content; ids are those of the row's documents, else of the pool. Raises DataError: an unknown id."""
    own = {document.id: key for document, key in zip(query.sample.documents, query.keys, strict=True)}
    scores: dict[int, float] = {}
    for name, score in run.items():
        key = own.get(name, pool.names.get(name) if name not in pool.unclear else None)
        if key is None:
            known = "stands for several contents" if name in pool.unclear else "is none of the row or the pool"
            raise DataError(
                f"the document {name!r} of the run {known}", where=query.sample.source,
                remedy="Score the documents of these files, by names that tell them apart",
            )  # fmt: skip
        scores[key] = max(score, scores.get(key, score))
    return scores


def pick_negatives(query: Query, scores: Mapping[int, float], how: Mining) -> tuple[list[int] | None, Counter[str]]:
    """Choose the negatives of a query, hardest first, and count what the guards kept out.

    Returns None for a query none of whose positives has a score: nothing can be said of its negatives.
    """
    known = [scores[key] for key in query.positives if key in scores]
    if not known:
        return None, Counter()
    highest = min(known) - how.margin
    guarded: Counter[str] = Counter()
    ranked = []
    for key in sorted(scores, key=lambda key: (-scores[key], key)):
        if key in query.right:
            guarded["content"] += key not in query.positives
        elif scores[key] > highest or (scores[key] == highest and how.margin == 0):
            guarded["score"] += 1
        else:
            ranked.append(key)
    window = ranked[how.first - 1 : how.last]
    if len(window) > how.negatives:
        rng = random.Random(f"pick {how.seed} {query.sample.id}")
        window = [window[i] for i in sorted(rng.sample(range(len(window)), how.negatives))]
    return window, guarded


def replace_negatives(query: Query, picked: Sequence[int], pool: Pool, how: Mining) -> RerankSample:
    """The row with its new negatives; an id that would stand twice, or is not clear in the pool, is left out."""
    kept = [
        (key, document)
        for key, document in zip(query.keys, query.sample.documents, strict=True)
        if document.label > 0 or (how.keep and key not in query.right)
    ]
    documents = [document for _, document in kept]
    have = {key for key, _ in kept}
    ids = {document.id for document in documents}
    for key in picked:
        if key not in have:
            name = pool.name(key)
            place = f"d{len(documents)}"  # the id a document without one gets
            documents.append(Document(name if name and name not in ids else place, pool.documents[key].content, 0.0))
            ids.add(documents[-1].id)
    return replace(query.sample, documents=tuple(documents))


def mine_rows(
    queries: Sequence[Query], scores: Iterable[Mapping[int, float]], pool: Pool, how: Mining
) -> tuple[list[RerankSample], dict[str, Any]]:
    """Rows with new negatives, and the JSON answer. A row for which nothing is found is left out, its line named."""
    rows, guarded, mined = [], Counter({"content": 0, "score": 0}), 0
    left: dict[str, list[int]] = {"positive_not_scored": [], "nothing_found": []}
    for query, found in zip(queries, scores, strict=True):
        picked, kept_out = pick_negatives(query, found, how)
        guarded += kept_out
        row = None if picked is None else replace_negatives(query, picked, pool, how)
        if row is None or all(document.label > 0 for document in row.documents):
            left["positive_not_scored" if picked is None else "nothing_found"].append(query.sample.source.line)
            continue
        rows.append(row)
        mined += len(picked or ())
    return rows, {
        "queries": len(queries),
        "pool": len(pool.documents),
        "rows": len(rows),
        "negatives": mined,
        "guarded": {name: guarded[name] for name in ("content", "score")},
        "left_out": left,
    }


def write_mined(rows: Sequence[RerankSample], out: Path, media_root: str | None) -> None:
    """Write rows; paths of media start from `media_root` or else from the folder of `out`."""
    start = os.path.abspath(media_root or out.parent)
    part = out.with_name(f".{out.name}.part")
    with part.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(write_litchi(row, refer_from(start), set())[0], ensure_ascii=False) + "\n")
    part.replace(out)


def refer_from(folder: str) -> Refer:
    """Names media by their paths from a folder."""

    def refer(media: Media) -> str:
        return data_url(media.data or b"") if media.path is None else os.path.relpath(media.path, folder)

    return refer


def refuse_out(out: Path) -> None:
    """Raises UsageError: `out` exists, or its folder does not."""
    if out.exists():
        raise UsageError(f"--out {out} exists", why="nothing is overwritten", remedy="Remove it or name another file")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out} cannot be written", why=f"there is no folder {out.parent}", remedy="Make it")


def format_answer(answer: Mapping[str, Any]) -> str:
    """The answer for people."""
    lines = [
        f"{answer['rows']:,} of {answer['queries']:,} rows with {answer['negatives']:,} negatives "
        f"of {answer['pool']:,} documents",
        f"  never negatives: {answer['guarded']['score']:,} scored like a positive, "
        f"{answer['guarded']['content']:,} with the content of another row's positive",
    ]
    for name, found in answer["left_out"].items():
        if found:
            shown = ", ".join(map(str, found[:10])) + (", ..." if len(found) > 10 else "")
            lines.append(f"  left out, {name.replace('_', ' ')}: {len(found):,} rows, lines {shown}")
    return "\n".join(lines)
