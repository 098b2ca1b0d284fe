"""Files of records, whatever the records mean: JSON lines, a JSON array, CSV, Parquet, WebDataset tar.

In: a path; its ending says what it is. Out: records, numbered from 1 (JSON lines by line); and such a file. References
to media are strings: paths, or data URLs where the file holds the bytes. What is written reads back as the same.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import mimetypes
import os
import re
import sys
import tarfile
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from litchi.data.formats import Record, UnfitError, is_media_name, map_media
from litchi.data.jsonl import read_offsets
from litchi.data.values import RowError, load_object, read_data_url
from litchi.errors import DataError, UsageError

KINDS = (".jsonl", ".json", ".csv", ".parquet", ".tar")
HOLDS_BYTES = (".parquet", ".tar")
BATCH = 256  # records of a Parquet file in memory at a time
# Cells that are text whatever they look like, and cells that are text unless they are a JSON object or list.
TEXTS = frozenset({"id", "question", "answer", "response", "text", "caption", "instruction", "system", "prompt"})
MIXED = re.compile(r"query|anchor|positive|negative(_\d+)?|document|passage|pos_doc|images?|videos?")
_MAGIC = {
    b"\x89PNG": "png",
    b"\xff\xd8": "jpg",
    b"GIF8": "gif",
    b"RIFF": "webp",
    b"BM": "bmp",
    b"II*": "tif",
    b"MM\0": "tif",
}

Records = Callable[[], Iterator[Record]]


def kind_of(path: Path) -> str:
    """The ending a file is read by. Raises UsageError."""
    kind = path.suffix.lower()
    if kind not in KINDS:
        raise UsageError(f"{path} is of no kind that is converted", why=f"{', '.join(KINDS)} are", remedy="Rename it")
    return kind


def read_records(path: Path) -> Iterator[tuple[int, Record]]:
    """Read a file record by record (a JSON array whole). Raises DataError with file and number."""
    kind = kind_of(path)
    if kind == ".jsonl":
        lines = read_offsets(path)
        for i in range(len(lines)):
            try:
                yield int(lines.numbers[i]), load_object(lines.read(i))
            except RowError as error:
                raise DataError(error.message, where=lines.source(i)) from None
        return
    read = {".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet, ".tar": _read_tar}[kind]
    try:
        yield from enumerate(read(path), 1)
    except (OSError, ValueError, tarfile.TarError, csv.Error) as error:
        raise DataError(f"{path} cannot be read", why=str(error), remedy=f"Is it {kind}?") from None


def write_records(path: Path, records: Records) -> None:
    """Write a new file; `records` may be called twice, and gives the same each time. Raises UsageError: it exists."""
    kind = kind_of(path)
    if path.exists():
        raise UsageError(f"{path} exists", why="nothing is overwritten", remedy="Name another file")
    if not path.parent.is_dir():
        raise UsageError(f"{path} cannot be written", why=f"there is no folder {path.parent}", remedy="Make it")
    part = path.with_name(f".{path.name}.part")
    write = {
        ".jsonl": _write_jsonl,
        ".json": _write_json,
        ".csv": _write_csv,
        ".parquet": _write_parquet,
        ".tar": _write_tar,
    }[kind]
    try:
        write(part, records)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


# ---------------------------------------------------------------- JSON


def _read_json(path: Path) -> Iterator[Record]:
    found = json.loads(path.read_text(encoding="utf-8-sig"))
    for record in found if isinstance(found, list) else [found]:
        yield load_object(json.dumps(record).encode())  # as strictly as a line


def _write_jsonl(path: Path, records: Records) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for record in records():
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _write_json(path: Path, records: Records) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for number, record in enumerate(records()):
            file.write(("[\n" if number == 0 else ",\n") + json.dumps(record, ensure_ascii=False))
        file.write("\n]\n")


# ---------------------------------------------------------------- cells of a table


def encode_cell(name: str, value: Any) -> str | None:
    """A value as the text of a cell: texts as they are unless they would be read otherwise, the rest as JSON."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if isinstance(value, str) and decode_cell(name, text) != value:
        text = json.dumps(value, ensure_ascii=False)
    if decode_cell(name, text) != value:
        raise UnfitError(f"the value of {name} would be read from a table as {decode_cell(name, text)!r}")
    return text


def decode_cell(name: str, text: str) -> Any:
    """The value of a cell: JSON where it can only be meant as that, else the text. An empty cell is None."""
    if text == "":
        return None
    if name in TEXTS:
        return "" if text == '""' else text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, str):  # quotes are ours only around what would not be read as a text
        return value if value == "" or decode_cell(name, value) != value else text
    return value if isinstance(value, dict | list) or not MIXED.fullmatch(name) else text


def _columns(records: Records) -> list[str]:
    return list(dict.fromkeys(name for record in records() for name in record))


def _read_csv(path: Path) -> Iterator[Record]:
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8-sig", newline="") as file:
        for row in csv.DictReader(file, strict=True):
            if None in row:
                raise ValueError(f"a row has more cells than the {len(row) - 1} columns")
            cells = ((name, decode_cell(name, text)) for name, text in row.items() if text is not None)
            yield {name: value for name, value in cells if value is not None}


def _write_csv(path: Path, records: Records) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, _columns(records), lineterminator="\n")
        writer.writeheader()
        for record in records():
            writer.writerow({name: encode_cell(name, value) for name, value in record.items()})


# ---------------------------------------------------------------- Parquet


def _read_parquet(path: Path) -> Iterator[Record]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(BATCH):
            for record in batch.to_pylist():
                yield {k: v for k, v in ((k, _arrow_value(k, v)) for k, v in record.items()) if v is not None}


def _arrow_value(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return decode_cell(name, value)
    return _plain(value)


def _plain(value: Any) -> Any:
    """Bytes as data URLs; without the nulls that fill up structs."""
    if isinstance(value, bytes):
        return data_url(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {"bytes", "path"}:
            return data_url(value["bytes"]) if value["bytes"] else value["path"]
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return value


def _write_parquet(path: Path, records: Records) -> None:
    """Columns of one type keep it; pictures are {bytes, path}, as the Hub shows them; anything else is JSON text."""
    import pyarrow
    import pyarrow.parquet

    shapes: dict[str, set[Any]] = {}
    for record in records():
        for name, value in record.items():
            shapes.setdefault(name, set()).add(_shape(name, value))
    schema = pyarrow.schema([(name, _arrow_type(pyarrow, found)) for name, found in shapes.items()])
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        pending = []
        for record in records():
            pending.append({field.name: _arrow_cell(pyarrow, field, record.get(field.name)) for field in schema})
            if len(pending) == BATCH:
                writer.write_table(pyarrow.Table.from_pylist(pending, schema))
                pending = []
        writer.write_table(pyarrow.Table.from_pylist(pending, schema))


def _shape(name: str, value: Any) -> Any:
    """What a value is made of, hashable; "json" where Arrow would change it."""
    if is_media_name(name) and (
        isinstance(value, str) or (isinstance(value, list) and all(isinstance(v, str) for v in value))
    ):
        return "media" if isinstance(value, str) else ("list", "media")
    if isinstance(value, bool | str | int | float):
        return type(value).__name__ if not isinstance(value, int) or -(2**63) <= value < 2**63 else "json"
    if isinstance(value, list):
        inner = {_shape("", item) for item in value} or {None}
        return ("list", inner.pop()) if len(inner) == 1 else "json"
    if isinstance(value, dict) and value and all(isinstance(item, str) for item in value.values()):
        return ("struct", *value)
    return "json"


def _arrow_type(pyarrow: Any, shapes: set[Any]) -> Any:
    simple = {"bool": pyarrow.bool_(), "str": pyarrow.string(), "int": pyarrow.int64(), "float": pyarrow.float64()}
    shapes = shapes - {("list", None)} or {("list", "str")}
    (shape, *more) = shapes
    if more or shape == "json":
        return pyarrow.string()
    if isinstance(shape, str):
        picture = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
        return picture if shape == "media" else simple[shape]
    if shape[0] == "struct":
        return pyarrow.struct([(key, pyarrow.string()) for key in shape[1:]])
    return pyarrow.list_(_arrow_type(pyarrow, {shape[1]}))


def _arrow_cell(pyarrow: Any, field: Any, value: Any) -> Any:
    if value is None or not pyarrow.types.is_string(field.type):
        return _packed(value) if is_media_name(field.name) and value is not None else value
    return encode_cell(field.name, map_media({field.name: value}, embed)[field.name])


def _packed(value: Any) -> Any:
    if isinstance(value, list):
        return [_packed(item) for item in value]
    name = None if value.startswith("data:") else os.path.basename(value)
    return {"bytes": media_bytes(value), "path": name}


# ---------------------------------------------------------------- WebDataset


def _read_tar(path: Path) -> Iterator[Record]:
    """A sample is the files that follow each other with one name before the first dot: a `.json` record and its media,
    or a picture with its `.txt`."""
    with tarfile.open(path, "r:*") as tar:
        files = (member for member in tar if member.isfile())
        for _, members in groupby(files, key=lambda m: _split(m.name)[0]):
            found = {m.name: stream.read() for m in members if (stream := tar.extractfile(m)) is not None}
            yield _tar_record(found)


def _split(name: str) -> tuple[str, str]:
    folder, _, file = name.rpartition("/")
    stem, _, ending = file.partition(".")
    return f"{folder}/{stem}", ending.lower()


def _tar_record(files: dict[str, bytes]) -> Record:
    endings = {_split(name)[1]: name for name in files}
    record = load_object(files[endings["json"]]) if "json" in endings else {}
    media = {
        name: data for name, data in files.items() if _split(name)[1].rpartition(".")[2] not in ("json", "txt", "cls")
    }
    named: set[str] = set()

    def inline(ref: str) -> str:
        named.add(ref)
        return data_url(media[ref]) if ref in media else ref

    record = map_media(record, inline)
    loose = [data_url(data) for name, data in media.items() if name not in named]
    if loose and not record.keys() & {"image", "images"}:
        record["image" if len(loose) == 1 else "images"] = loose[0] if len(loose) == 1 else loose
    text = endings.get("txt") or endings.get("cls")
    if text and "answer" not in record and not record.keys() & {"messages", "conversations", "query"}:
        record["answer"] = files[text].decode("utf-8")
    return record


def _write_tar(path: Path, records: Records) -> None:
    with tarfile.open(path, "w") as tar:
        for number, record in enumerate(records()):
            media: dict[str, bytes] = {}

            def put(ref: str, number: int = number, media: dict[str, bytes] = media) -> str:
                data = media_bytes(ref)
                name = f"{number:08d}.{len(media)}.{ending_of(data, ref)}"
                media[name] = data
                return name

            body = json.dumps(map_media(record, put), ensure_ascii=False).encode()
            for name, data in [(f"{number:08d}.json", body), *media.items()]:
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


# ---------------------------------------------------------------- media


def media_bytes(ref: str) -> bytes:
    """What a reference leads to. Raises UnfitError: a file that cannot be read cannot be put into another."""
    if ref.startswith("data:"):
        return read_data_url(ref)
    try:
        return Path(ref).read_bytes()
    except OSError as error:
        raise UnfitError(f"{ref} cannot be read: {error.strerror}") from None


def ending_of(data: bytes, ref: str = "") -> str:
    """The ending for the name of a file: by what it begins with, else by its old name."""
    found = next((ending for magic, ending in _MAGIC.items() if data.startswith(magic)), None)
    if found is None and ref.startswith("data:"):
        found = (mimetypes.guess_extension(ref[5:].partition(";")[0]) or ".bin")[1:]
    return found or os.path.splitext(ref)[1][1:].lower() or "bin"


def data_url(data: bytes) -> str:
    """Bytes as a data URL."""
    kind = mimetypes.guess_type(f"x.{ending_of(data)}")[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def embed(ref: str) -> str:
    """A reference that needs no file."""
    return ref if ref.startswith("data:") else data_url(media_bytes(ref))
