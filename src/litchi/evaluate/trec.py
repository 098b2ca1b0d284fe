"""Runs and judgements as files: TREC's columns, or JSON lines where ids may hold spaces.

    run    TREC: query Q0 document rank score tag     JSONL: {"query_id", "doc_id", "score"}
    qrels  TREC: query 0 document relevance           JSONL: {"query_id", "doc_id", "relevance"}

A file is JSONL when its first line begins with `{`. The order of a ranking is that of the scores; the rank column is
not used, as in trec_eval.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from litchi.data.values import RowError, is_number, load_object
from litchi.errors import DataError
from litchi.evaluate.ranking import ScoredGroup, count_of, ranking_metrics, some_of

Scores = dict[str, dict[str, float]]  # query -> document -> score or relevance, in the order of the file

_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_INTEGER = re.compile(r"[+-]?[0-9]+")


def read_run(path: str | Path) -> Scores:
    """Read the scores of a ranking. A DataError names file and line."""
    return _read(Path(path), "score", ("query", "Q0", "document", "rank", "score", "tag"))


def read_qrels(path: str | Path) -> Scores:
    """Read judgements. A DataError names file and line."""
    return _read(Path(path), "relevance", ("query", "0", "document", "relevance"))


def join(
    run: Mapping[str, Mapping[str, float]], qrels: Mapping[str, Mapping[str, float]]
) -> tuple[list[ScoredGroup], list[str]]:
    """Bring a run and its judgements together: a group per query of the qrels, and what there is to warn of.

    A document without a judgement is not relevant. A judged document that is not in the run is not retrieved. A query
    of the qrels that is not in the run has no documents, so all its metrics are 0. A query of the run that is not in
    the qrels cannot be judged and is left out. The last three are counted in the warnings.

    Raises:
        DataError: run and qrels have no query in common.
    """
    if not run.keys() & qrels.keys():
        raise DataError(
            "run and qrels have no query in common",
            why=f"the run has {some_of(list(run)) or 'none'}, the qrels have {some_of(list(qrels)) or 'none'}",
            remedy="Check that both use the same query ids.",
        )
    groups = [_group(query, run.get(query, {}), judged) for query, judged in qrels.items()]
    silent = [g.query_id for g in groups if not g.doc_ids and any(grade > 0 for grade in g.missing_relevance)]
    missing = sum(grade > 0 for g in groups if g.doc_ids for grade in g.missing_relevance)
    extra = [query for query in run if query not in qrels]
    notes = []
    if silent:
        notes.append(
            f"{count_of(len(silent), 'query', 'queries')} of the qrels not in the run, counted as 0: {some_of(silent)}"
        )
    if missing:
        notes.append(
            f"{count_of(missing, 'relevant document', 'relevant documents')} not in the run, counted as not retrieved"
        )
    if extra:
        notes.append(
            f"{count_of(len(extra), 'query', 'queries')} of the run not in the qrels, left out: {some_of(extra)}"
        )
    return groups, notes


def check_id(name: str, where: object) -> None:
    """Refuse an id that cannot be written in TREC form: it is empty or holds white space. Raises DataError."""
    if not name or re.search(r"\s", name):
        raise DataError(
            f"id {name!r} cannot be written in TREC form",
            where=where,
            why="its columns are separated by white space",
            remedy="Write JSON lines instead.",
        )


def write_run(path: str | Path, run: Iterable[tuple[str, Mapping[str, float]]], tag: str = "litchi") -> None:
    """Write (query, scores of its documents) in TREC form, best first.

    Raises:
        DataError: an id is empty or holds white space, or a score is not finite.
    """
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for query, scores in run:
            ranked = sorted(scores.items(), key=lambda item: -item[1])
            for rank, (document, score) in enumerate(ranked, 1):
                for name in (query, document):
                    check_id(name, path)
                file.write(f"{query} Q0 {document} {rank} {_finite(query, document, score)!r} {tag}\n")


def _group(query: str, scores: Mapping[str, float], judged: Mapping[str, float]) -> ScoredGroup:
    return ScoredGroup(
        query_id=query,
        doc_ids=list(scores),
        scores=list(scores.values()),
        relevance=[judged.get(document, 0.0) for document in scores],
        missing_relevance=tuple(grade for document, grade in judged.items() if document not in scores),
    )


def _finite(query: str, document: str, score: float) -> float:
    if not math.isfinite(score):
        raise DataError(
            f"score is {score}", where=f"query {query}, document {document}", why="a finite number is expected"
        )
    return float(score)


def _read(path: Path, value: str, columns: tuple[str, ...]) -> Scores:
    found: Scores = {}
    lines: dict[tuple[str, str], int] = {}
    parse = None
    for number, text in iterate_lines(path):
        where = f"{path}:{number}"
        if parse is None:
            parse = _parse_json if text.startswith("{") else _parse_columns
        query, document, worth = parse(text, value, columns, where)
        first = lines.setdefault((query, document), number)
        if first != number:
            raise DataError(
                f"query {query!r}, document {document!r} appears twice",
                where=f"{path}:{first} and {where}",
                remedy="Keep one of the two lines.",
            )
        found.setdefault(query, {})[document] = worth
    if not found:
        raise DataError("the file has no lines", where=path, why="a line for each query and document is needed")
    return found


def iterate_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their numbers from 1."""
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, 1):
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip(" \t\r\n")
                if text:
                    yield number, text
    except UnicodeDecodeError as error:
        raise DataError("the line is not UTF-8", where=f"{path}:{number}", why=str(error)) from None
    except OSError as error:
        raise DataError("cannot read the file", where=path, why=error.strerror) from None


def _parse_columns(text: str, value: str, columns: tuple[str, ...], where: str) -> tuple[str, str, float]:
    fields = re.split("[ \t]+", text)  # not str.split: an ideographic space may be part of an id
    if len(fields) != len(columns):
        raise DataError(
            f"{len(columns)} columns expected, {len(fields)} found",
            where=where,
            why=f"the columns are: {' '.join(columns)}",
            remedy="Ids with spaces need JSON lines.",
        )
    row = dict(zip(columns, fields, strict=True))
    if "rank" in row and not _INTEGER.fullmatch(row["rank"]):
        raise DataError(f"rank is {row['rank']!r}", where=where, why="an integer is expected")
    if not _NUMBER.fullmatch(row[value]):
        raise DataError(f"{value} is {row[value]!r}", where=where, why="a finite number is expected")
    return row["query"], row["document"], _bounded(float(row[value]), value, where)


def _parse_json(text: str, value: str, columns: tuple[str, ...], where: str) -> tuple[str, str, float]:
    row = read_object(text, where)
    for key in ("query_id", "doc_id"):
        if not isinstance(row.get(key), str) or not row[key]:
            found = f"{key} is {json.dumps(row[key], ensure_ascii=False)}" if key in row else f"{key} is missing"
            raise DataError(found, where=where, why="a string that is not empty is expected")
    worth = row.get(value)
    if not is_number(worth):
        found = f"{value} is {json.dumps(worth, ensure_ascii=False)}" if value in row else f"{value} is missing"
        raise DataError(found, where=where, why="a number is expected")
    return row["query_id"], row["doc_id"], _bounded(worth, value, where)


def read_object(text: str, where: str) -> dict[str, Any]:
    """The JSON object of a line, read as strictly as rows of data are. Raises DataError."""
    try:
        return load_object(text.encode())
    except RowError as error:
        raise DataError(error.message, where=where) from None


def _bounded(number: float, value: str, where: str) -> float:
    if not math.isfinite(number):
        raise DataError(f"{value} is too large", where=where, why="a finite number is expected")
    return float(number)


def measure_files(run: str, qrels: str) -> dict[str, Any]:
    """The JSON answer of `litchi evaluate --run RUN --qrels QRELS`."""
    groups, notes = join(read_run(run), read_qrels(qrels))
    return ranking_metrics(groups, notes=notes).to_json()
