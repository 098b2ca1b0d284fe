"""`litchi score` and `litchi generate`: a file of rows -> a file of scores or answers, over all ranks, resumable.

rows -> micro-batches -> what each gives, in `OUT.parts/` -> OUT, in the order of the rows, at once and whole

The micro-batches follow from the rows alone, not from the ranks or from what is done already, so that a command that
was interrupted and is started again writes what it would have written. `parts.py` holds what is done.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from litchi.batch.cutting import Pick
from litchi.batch.encoders import Job
from litchi.config import Config
from litchi.data.boxes import Frame, restore_boxes
from litchi.data.media import file_stamp
from litchi.dist import Ranks, barrier
from litchi.errors import UsageError
from litchi.evaluate.json_answers import check_answer, load_schema
from litchi.evaluate.run import EvalSet, Measure, answer_jobs, refuse_nonfinite, score_jobs
from litchi.evaluate.trec import check_id, write_run
from litchi.model.build import resolve_model
from litchi.parallel.apply import Wrapped
from litchi.train.durable import hash_json, on_main
from litchi.train.measure import open_set, prepare
from litchi.train.parts import Parts, open_new
from litchi.train.progress import count_progress
from litchi.train.resume import describe_source
from litchi.train.target import Target, open_target
from litchi.train.watch import how_to_measure

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

BLOCK_ROWS = 4096  # that micro-batches are made of at a time: the end of a long file is as far as its beginning


@dataclass(frozen=True)
class Written:
    """Lines of OUT. Of answers that were held against a schema: how many keep to it, and how many are no JSON."""

    lines: int
    fitting: int | None = None
    not_json: int = 0

    def __str__(self) -> str:
        if self.fitting is None:
            return f"{self.lines:,} lines"
        broken = self.lines - self.fitting - self.not_json
        counts = f"{self.fitting:,} keep to the schema, {broken:,} break it, {self.not_json:,} are no JSON"
        return f"{self.lines:,} answers ({counts})"


def write_lines(
    name: str,
    data: str,
    overrides: Sequence[str],
    out: Path,
    ranks: Ranks,
    *,
    task: Literal["rerank", "chat"],
    schema: str | None = None,
    trec: Path | None = None,
    restore: bool = False,
) -> Written:
    """Write what `score` or `generate` gives, a line per document or row; every rank returns the same.

    Args:
        schema: file of a JSON schema that answers are held against.
        trec: where the scores are written as a TREC run too.
        restore: whether boxes of answers are put into pixels of the rows' pictures, of which each row has one.

    Raises:
        UserError: a file cannot be written, `OUT.parts/` is of another command, or a score is not finite.
    """
    parts = Parts(out.with_name(f"{out.name}.parts"))
    for option, path in {"--out": out, "--trec": trec}.items():
        if path is not None:
            _refuse_path(option, path, begun=parts.begun)
    checker = None if schema is None else load_schema(schema)
    target, config = prepare(name, data, overrides, task)
    rows = open_set(config, data, ranks, require_labels=False)
    if trec is not None:
        for i in rows.rows:
            check_id(rows.index.rows[i].id, rows.index.source(rows.index.rows[i]))
    frames = {i: rows.corpus.frame(i) for i in rows.rows} if restore else {}
    wrapped = open_target(target, config, ranks)
    how = replace(how_to_measure(config, ranks.device), workers=config.data.workers)
    batches = plan_batches(rows, wrapped, how.micro_batch_tokens)

    def begin() -> tuple[int, set[int]]:
        command = describe_command(target, config, rows, batches) | {"schema": schema and Path(schema).read_text()}
        return parts.begin(command | ({"restore_boxes": True} if restore else {}))

    start, done = on_main(ranks, begin, what="what is done cannot be kept", place=parts.folder)
    rest = [batch for batch in batches if batch[0][0] not in done]
    if done and ranks.is_main:
        print(f"{len(done):,} of {len(rows.rows):,} rows are done already", file=sys.stderr)
    progress = count_progress(f"reading with {name}", enabled=ranks.is_main)
    with parts.write(start, ranks.rank) as keep:
        jobs = rows.deal(wrapped, deal_batches(rest, wrapped.data_ranks))
        for number, records in enumerate(_make_records(wrapped, rows, jobs, how, checker, trec, frames), 1):
            keep(records)
            if progress is not None:
                progress(min(len(batches), len(batches) - len(rest) + number * wrapped.data_ranks), len(batches))

    barrier()  # what other ranks have made is then in their parts

    def finish() -> Written:
        ids = [rows.index.rows[i].id for i in rows.rows]
        written = _write_out(out, trec, parts, ids)
        parts.remove()
        return written

    return on_main(ranks, finish, what=f"{out} cannot be written", place=out.parent)


def _refuse_path(option: str, path: Path, *, begun: bool) -> None:
    if path.exists() and not begun:  # else this command put it there, and was ended before it had removed its parts
        raise UsageError(
            f"{option} {path} exists", why="nothing is overwritten", remedy="Remove it or name another file"
        )
    if not path.parent.is_dir():
        raise UsageError(
            f"{option} {path} cannot be written", why=f"there is no folder {path.parent}", remedy="Make it"
        )


# ------------------------------------------------------------------------------------------------------ what is done


def plan_batches(rows: EvalSet, wrapped: Wrapped, micro_batch_tokens: int) -> list[list[Pick]]:
    """Micro-batches of a set, block by block, the same for any number of ranks."""
    batches = []
    for first in range(0, len(rows.rows), BLOCK_ROWS):
        block = rows.rows[first : first + BLOCK_ROWS]
        batches += [batch for batch in rows.split(wrapped, micro_batch_tokens, 1, block)[0] if batch]
    return batches


def deal_batches(batches: Sequence[list[Pick]], ranks: int) -> list[list[list[Pick]]]:
    """[rank][micro-batch], in turn; as many for each, the last ones empty."""
    dealt = [list(batches[rank::ranks]) for rank in range(ranks)]
    return [own + [[]] * (len(dealt[0]) - len(own)) for own in dealt]


def describe_command(target: Target, config: Config, rows: EvalSet, batches: Sequence[list[Pick]]) -> dict[str, Any]:
    """What a command has in common with the one it continues, by the name that is said when it differs."""
    folder = resolve_model(config.model.path)
    places = [folder, target.adapter, target.checkpoint and target.checkpoint.folder, config.model.adapter]
    source = describe_source(rows.index)
    return {
        "target": [[str(place), *file_stamp(str(place))] for place in places if place is not None],
        "data": [source["sha256"], source["index"]],
        "micro-batches": hash_json(batches),
        "eval.max_new_tokens": config.eval.max_new_tokens,
        **config.numbers(),
    }


def _make_records(
    wrapped: Wrapped,
    rows: EvalSet,
    jobs: Sequence[Job],
    how: Measure,
    checker: Validator | None,
    trec: Path | None,
    frames: Mapping[int, Frame],
) -> Iterator[list[dict[str, Any]]]:
    """What each micro-batch gives, by row."""
    if rows.renderer.task == "rerank":
        for groups, *_ in score_jobs(wrapped, rows, jobs, how):
            refuse_nonfinite(groups, rows, wrapped)
            for row, documents, _ in groups if trec is not None else ():
                for document in documents:
                    check_id(document, rows.index.source(rows.index.rows[row]))
            yield [{"row": row, "scores": dict(zip(docs, values, strict=True))} for row, docs, values in groups]
        return
    for answers in answer_jobs(wrapped, rows, jobs, how):
        said = [(row, restore_boxes(text, frames[row]) if row in frames else text) for row, text in answers]
        yield [{"row": row, "text": text, **_check(text, checker)} for row, text in said]


def _check(text: str, checker: Validator | None) -> dict[str, Any]:
    """What is said of an answer beside its text: the JSON in it, and what is wrong with it."""
    if checker is None:
        return {}
    found = check_answer(text, checker)
    return ({"json": found.value} if found.is_json else {}) | {"problem": found.problem}


# --------------------------------------------------------------------------------------------------------- the files


def _write_out(out: Path, trec: Path | None, parts: Parts, ids: Sequence[str]) -> Written:
    """OUT and the TREC run, from what lies in the parts."""
    if trec is not None:
        with open_new(trec) as path:
            write_run(path, ((ids[record["row"]], record["scores"]) for record in parts.read(len(ids))))
    count = fitting = not_json = 0
    checked = False
    with open_new(out) as path, path.open("w", encoding="utf-8", newline="\n") as file:
        for record in parts.read(len(ids)):
            lines = _lines(ids[record["row"]], record)
            count += len(lines)
            if "problem" in record:
                checked = True
                fitting += record["problem"] is None
                not_json += "json" not in record
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    return Written(count, fitting if checked else None, not_json)


def _lines(name: str, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The lines of a row."""
    if "scores" in record:
        return [{"query_id": name, "doc_id": doc, "score": score} for doc, score in record["scores"].items()]
    return [{"id": name, **{key: value for key, value in record.items() if key != "row"}}]
