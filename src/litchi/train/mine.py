"""`litchi mine`: the pool scored for every query by a TARGET on all ranks, or the scores of a run; new negatives.

In: a TARGET or a run file, rows, a pool. Out: the rows with hard negatives, and the JSON answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from litchi.config import Config
from litchi.data.formats import write_litchi
from litchi.dist import Ranks, barrier
from litchi.errors import DataError
from litchi.evaluate.mine import (
    Mining,
    Pool,
    Query,
    draw_candidates,
    make_queries,
    mine_rows,
    read_groups,
    refer_from,
    refuse_out,
    scores_of_run,
    write_mined,
)
from litchi.evaluate.run import score_set
from litchi.evaluate.trec import read_run
from litchi.train.measure import open_set
from litchi.train.progress import count_progress
from litchi.train.target import find_target, open_target, target_config, write_words
from litchi.train.watch import how_to_measure
from litchi.types import Document, RerankSample

GROUP = 32  # candidates scored as one group: a group is at most a micro-batch


def prepare(data: str, pool: str | None, out: Path, media_root: str | None) -> tuple[list[Query], Pool]:
    """Read what is mined for and in. Raises DataError: no row has a positive."""
    refuse_out(out)
    samples = read_groups(data, media_root)
    found = Pool()
    for sample in read_groups(pool, media_root) if pool else samples:
        found.add(sample)
    queries = make_queries(samples)
    if not queries:
        raise DataError("no row has a positive", where=data, why="a negative is told apart by the positive's score")
    return queries, found


def mine_run(run: str, data: str, out: Path, how: Mining, *, pool: str | None = None) -> dict[str, Any]:
    """Mine in the ranking of a run file; queries that are not in it are left out."""
    queries, documents = prepare(data, pool, out, None)
    scores = read_run(run)
    found = [scores_of_run(query, documents, scores.get(query.sample.id, {})) for query in queries]
    rows, answer = mine_rows(queries, found, documents, how)
    write_mined(rows, out, None)
    return answer


def mine_target(
    name: str, data: str, overrides: Sequence[str], out: Path, ranks: Ranks, how: Mining, *, pool: str | None = None
) -> dict[str, Any]:
    """Mine in the ranking of a TARGET; every rank returns the same answer, the first one writes."""
    target = find_target(name)
    work = out.with_name(f".{out.name}.candidates.jsonl")  # beside `out`, where all machines see it
    config = target_config(target, [*write_words({"data.eval": str(work)}, ()), *overrides], task="rerank")
    queries, documents = prepare(data, pool, out, config.data.media_root)
    drawn = [draw_candidates(query, documents, how) for query in queries]
    try:
        if ranks.is_main:
            _write_candidates(queries, drawn, documents, work, config)
        barrier()
        rows = replace(open_set(config, str(work), ranks, require_labels=False), max_rows=None)
        wrapped = open_target(target, config, ranks)
        progress = count_progress(f"scoring with {name}", enabled=ranks.is_main)
        scored = score_set(wrapped, rows, how_to_measure(config, ranks.device), progress)
    finally:
        barrier()
        if ranks.is_main:
            work.unlink(missing_ok=True)
    scores: list[dict[int, float]] = [{} for _ in queries]
    for row, ids, values in scored.groups:
        number = int(rows.index.rows[row].id.partition("#")[0])
        for document, value in zip(ids, values, strict=True):
            scores[number][int(document, 16)] = value
    mined, answer = mine_rows(queries, scores, documents, how)
    if ranks.is_main:
        write_mined(mined, out, config.data.media_root)
    return answer


def _write_candidates(
    queries: Sequence[Query], drawn: Sequence[Sequence[int]], pool: Pool, out: Path, config: Config
) -> None:
    """Groups of candidates as rows to score: ids of rows are query#piece, of documents their content's number."""
    refer = refer_from(str(Path(config.data.media_root or out.parent).absolute()))
    with out.open("w", encoding="utf-8") as file:
        for number, (query, keys) in enumerate(zip(queries, drawn, strict=True)):
            contents = dict(zip(query.keys, (d.content for d in query.sample.documents), strict=True))
            contents |= {key: pool.documents[key].content for key in keys if key in pool.documents}
            for piece, start in enumerate(range(0, len(keys), GROUP)):
                group = tuple(Document(f"{key:x}", contents[key], 0.0) for key in keys[start : start + GROUP])
                sample = RerankSample(
                    query.sample.source, f"{number}#{piece}", query.sample.query, group, query.sample.instruction
                )
                file.write(json.dumps(write_litchi(sample, refer, set())[0], ensure_ascii=False) + "\n")
