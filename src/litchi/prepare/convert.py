"""`litchi data convert`: other tools' data as Litchi's, Litchi's as theirs, and one of theirs as another.

    IN -> records -> row -> Sample -> records -> OUT

Every record that is written is read back first and has to give the same `Sample`. What it does not hold is an error
with its row, or with `lossy` a count by name; so is a row another format cannot hold at all.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from litchi.data.formats import Format, Record, UnfitError, compare_samples, map_media, refuse_places
from litchi.data.formats_rerank import FORMATS, guess_format
from litchi.data.jsonl import parse_fields
from litchi.data.records import HOLDS_BYTES, data_url, ending_of, kind_of, media_bytes, read_records, write_records
from litchi.data.values import RowError
from litchi.errors import DataError, UsageError
from litchi.types import ChatSample, Media, Sample, Source

NEEDED = 20  # rows looked at to guess a format


@dataclass
class Conversion:
    """What is asked for, and what came of it. Paths in IN start from `media_root`; in OUT from `out_root`, if any."""

    source: Path
    out: Path
    read: str
    write: str
    media_root: Path
    out_root: Path | None
    lossy: bool
    rows: int = 0
    records: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    unfit: Counter[str] = field(default_factory=Counter)


def convert_file(
    source: str,
    out: str,
    *,
    read: str | None = None,
    write: str | None = None,
    media_root: str | None = None,
    out_root: str | None = None,
    lossy: bool = False,
) -> dict[str, Any]:
    """Convert a file.

    Args:
        source, out: files; their endings say how records stand in them.
        read, write: names of formats; by default guessed from the first records, and Litchi's own.
        media_root: folder that relative paths in `source` start from; by default its own.
        out_root: folder that paths in `out` are to start from; by default they are absolute.
        lossy: count what is lost instead of stopping.

    Returns:
        The JSON answer: rows, records, from, to, lost, left_out.

    Raises:
        UsageError: an unknown format, or `out` exists. DataError: a row that cannot be read or held, with its line.
    """
    here, there = Path(source), Path(out)
    kind_of(here), kind_of(there)
    if there.exists():
        raise UsageError(f"{there} exists", why="nothing is overwritten", remedy="Name another file")
    read = _known(read, "--from") or _guess(here)
    write = _known(write, "--to") or "litchi"
    root = Path(media_root).absolute() if media_root else here.absolute().parent
    work = Conversion(here, there, read, write, root, Path(out_root).absolute() if out_root else None, lossy)
    write_records(there, lambda: _convert(work))
    return {
        "rows": work.rows,
        "records": work.records,
        "from": read,
        "to": write,
        "lost": dict(sorted(work.lost.items())),
        "left_out": dict(sorted(work.unfit.items())),
        "out": str(there),
    }


def format_answer(answer: dict[str, Any]) -> str:
    """The same for people."""
    lines = [f"{answer['rows']:,} rows of {answer['from']}: {answer['records']:,} of {answer['to']} in {answer['out']}"]
    lines += [f"  lost in {n:,} rows: {name}" for name, n in answer["lost"].items()]
    lines += [f"  left out {n:,} rows: {name}" for name, n in answer["left_out"].items()]
    return "\n".join(lines)


def _known(name: str | None, option: str) -> str | None:
    if name is not None and name not in FORMATS:
        raise UsageError(f"{option} {name} is not a format", why=f"there are {', '.join(FORMATS)}")
    return name


def _guess(path: Path) -> str:
    names: set[str] = set()
    for number, record in read_records(path):
        name = guess_format(record)
        if name is None:
            keys = ", ".join(list(record)[:8])
            raise UsageError(
                f"the format of {path} is not clear", where=f"record {number}", why=f"it has the keys {keys}",
                remedy=f"Say --from: {', '.join(FORMATS)}",
            )  # fmt: skip
        names.add(name)
        if number >= NEEDED:
            break
    for pair in ({"llava", "sharegpt"}, {"ms-swift", "litchi"}):  # rows without pictures, without `loss`
        if names == pair:
            return "llava" if "llava" in pair else "ms-swift"
    if len(names) != 1:
        raise UsageError(f"the format of {path} is not clear", why=f"it may be {' or '.join(sorted(names)) or 'any'}",
                         remedy="Say --from")  # fmt: skip
    return names.pop()


# ---------------------------------------------------------------- rows


def _convert(work: Conversion) -> Iterator[Record]:
    """The records of OUT; counts start anew, since a table is gone through twice."""
    work.rows = work.records = 0
    work.lost.clear()
    work.unfit.clear()
    target = FORMATS[work.write]
    for number, records in _rows(work):
        work.rows += 1
        where = Source(str(work.source), number)
        try:
            sample, answered = _read_sample(work, records, where)
            found = _write_sample(work, target, sample, answered)
        except UnfitError as error:
            if not work.lossy:
                raise _refusal(work, str(error.message), where) from None
            work.unfit[error.message] += 1
            continue
        except RowError as error:
            raise DataError(f"{error.message}", where=where, why=f"read as {work.read}, this is {error.code}") from None
        work.records += len(found)
        yield from found


def _refusal(work: Conversion, what: str, where: Source) -> DataError:
    return DataError(
        f"{work.write} cannot hold it: {what}" if work.write != "litchi" else f"{work.read}: {what}",
        where=where,
        remedy="With --lossy it is left out and counted",
    )


def _rows(work: Conversion) -> Iterator[tuple[int, list[Record]]]:
    grouped = FORMATS[work.read].grouped
    numbered = read_records(work.source)
    if grouped is None:
        yield from ((number, [record]) for number, record in numbered)
        return
    for _, same in groupby(numbered, key=lambda pair: json.dumps(pair[1].get(grouped), sort_keys=True)):
        pairs = list(same)
        yield pairs[0][0], [record for _, record in pairs]


def _read_sample(work: Conversion, records: list[Record], where: Source) -> tuple[Sample, bool]:
    """The sample of a row with its media where they will lie; whether it has an answer of its own."""
    source = FORMATS[work.read]
    if source.task == "chat" and any(record.keys() >= {"chosen", "rejected"} for record in records):
        raise UnfitError("it is a pair of a chosen and a rejected answer, and no loss takes those")
    row = source.read(records)
    row = map_media(row, lambda ref: _place(work, ref))
    sample = _parse(row, where, source.task)
    return sample, not isinstance(sample, ChatSample) or len(sample.turns) == len(row["messages"])


def _parse(row: Record, where: Source, task: str) -> Sample:
    task = task or ("chat" if "messages" in row else "rerank")
    return parse_fields(row, task=task, source=where, media_root="/", require_labels=False)[0]  # type: ignore[arg-type]


def _place(work: Conversion, ref: str) -> str:
    """Where a picture of IN is: an absolute path, or a file made of its bytes unless OUT holds bytes."""
    if not ref.startswith("data:"):
        given = ref.removeprefix("file://")
        return given if "://" in given else os.path.normpath(work.media_root / given)
    if kind_of(work.out) in HOLDS_BYTES:
        return ref
    data = media_bytes(ref)
    folder = work.out.absolute().parent / f"{work.out.stem}.media"
    path = folder / f"{hashlib.sha256(data).hexdigest()[:24]}.{ending_of(data, ref)}"
    if not path.exists():
        folder.mkdir(exist_ok=True)
        part = path.with_suffix(".part")
        part.write_bytes(data)
        part.replace(path)
    return str(path)


def _write_sample(work: Conversion, target: Format, sample: Sample, answered: bool) -> list[Record]:
    if not answered:
        assert isinstance(sample, ChatSample)
        sample = replace(sample, turns=sample.turns[:-1])  # the empty answer is the parser's
    task = "chat" if isinstance(sample, ChatSample) else "rerank"
    if target.task not in ("", task):
        raise UsageError(
            f"{work.write} holds {_held(target.task)}, {work.source} holds {_held(task)}",
            remedy="Name a format of the same task",
        )
    lost: set[str] = set()
    if work.write != "litchi":
        refuse_places(sample)
    records = target.write(sample, lambda media: _refer(work, media), lost)
    lost |= _differences(work, target, sample, records)
    if lost and not work.lossy:
        raise DataError(
            f"{work.write} cannot hold: {', '.join(sorted(lost))}",
            where=sample.source,
            remedy="Add --lossy to leave that out and count it",
        )
    work.lost.update(lost)
    return records


def _held(task: str) -> str:
    return "conversations" if task == "chat" else "groups of documents"


def _refer(work: Conversion, media: Media) -> str:
    if media.path is None:
        return data_url(media.data or b"")
    if work.out_root is None or kind_of(work.out) in HOLDS_BYTES:
        return media.path
    return os.path.relpath(media.path, work.out_root)


def _differences(work: Conversion, target: Format, sample: Sample, records: list[Record]) -> set[str]:
    """What the records do not say, found by reading them as a stranger would."""
    records = json.loads(json.dumps(records))
    row = map_media(target.read(records), lambda ref: _absolute(work, ref))
    if isinstance(sample, ChatSample) and sample.turns[-1].role != "assistant":
        row = {**row, "messages": [*row["messages"], {"role": "assistant", "content": ""}]}
        sample = replace(sample, turns=(*sample.turns, type(sample.turns[0])("assistant", ())))
    return compare_samples(sample, _parse(row, sample.source, target.task))


def _absolute(work: Conversion, ref: str) -> str:
    if ref.startswith("data:") or work.out_root is None:
        return ref
    return os.path.normpath(work.out_root / ref)
