"""Read the values a row is made of: strict JSON, ids, texts, references to pictures and videos.

In: the bytes of a line, then fields of it. Out: plain values and `Media`, or a `RowError` that names the field, what
was found and what is allowed. `jsonl.py` builds samples of them. Pictures are named, never opened (see `media.py`).
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

from litchi.errors import DataError
from litchi.types import Finding, Media, Source

CUT_KEYS = frozenset({"start", "end", "fps", "nframes"})

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class RowError(DataError):
    """A row that cannot be used. `code` is a stable word, `message` names the field, its value and what is allowed."""

    def __init__(self, code: str, message: str, *, where: Source | None = None):
        self.code, self.message = code, message
        super().__init__(message, where=where)

    def __reduce__(self):
        return _row_error, (self.code, self.message, self.where)


def is_number(value: Any) -> TypeGuard[float]:
    """A number and no bool, which in Python is one."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _row_error(code: str, message: str, where: Source | None) -> RowError:
    return RowError(code, message, where=where)


@dataclass(frozen=True)
class Row:
    """What parsing a row needs to know beside its fields, and the warnings it collects."""

    source: Source
    root: str | None
    strict: bool
    findings: list[Finding] = field(default_factory=list)

    def warn(self, code: str, message: str) -> None:
        self.findings.append(Finding(self.source.file, self.source.line, "warning", code, message))

    def warn_unread(self, value: Mapping[str, Any], known: frozenset[str], name: str) -> None:
        """Say which keys nobody reads: a typo such as `img` would otherwise lose a picture silently."""
        unread = sorted(key for key in value.keys() - known if value[key] is not None)
        if unread:
            self.warn("unknown_key", f"{name} has keys that are not read: {show(', '.join(unread))}")


def show(value: Any) -> str:
    """Format a value for a message, at most 60 characters long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def load_object(raw: bytes) -> dict[str, Any]:
    """Decode one JSON object, strictly: UTF-8, no key twice, finite numbers. Raises RowError."""
    try:
        text = raw.decode("utf-8-sig")  # some editors begin a file with a byte order mark
        fields = _DECODER.decode(text)
        if _SURROGATE.search(text):  # half of a pair cannot be encoded again, so no tokenizer takes it
            json.dumps(fields, ensure_ascii=False).encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise RowError("not_utf8", f"not UTF-8: {error.reason} at {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise RowError("not_json", f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise RowError("not_json", "not JSON that can be read: brackets in brackets without end") from None
    if not isinstance(fields, dict):
        raise RowError("not_an_object", f"the row is {show(fields)}: a JSON object is needed")
    return fields


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise RowError("duplicate_key", f"the key {show(twice)} stands twice in one object: its value is ambiguous")
    return fields


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):  # NaN, Infinity, -Infinity, and numbers such as 1e999
        raise RowError("not_finite", f"{show(text)} is not a finite number")
    return number


def _whole(text: str) -> int:
    _finite(text)  # also keeps out numbers of hundreds of digits, which no float holds
    return int(text)


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_finite, parse_float=_finite, parse_int=_whole)


def read_id(value: Any, name: str, default: str) -> str:
    """Read an id, text or a whole number, as text. Raises RowError."""
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise RowError("wrong_type", f"{name} is {show(value)}: text or a whole number is needed")
    return str(value)


def read_text(value: Any, name: str) -> str:
    """Read a text letter by letter. Raises RowError: a number or null is never turned into one."""
    if not isinstance(value, str):
        raise RowError("wrong_type", f"{name} is {show(value)}: text is needed")
    return value


def read_media_list(value: Any, kind: str, name: str, row: Row) -> list[Media]:
    """Read null, one reference or a list of them. Raises RowError."""
    if value is None:
        return []
    if isinstance(value, str | dict):  # one path, not one picture per letter
        return [read_media(value, kind, name, row)]
    if not isinstance(value, list):
        raise RowError("wrong_type", f"{name} is {show(value)}: a path or a list of paths is needed")
    return [read_media(item, kind, f"{name}[{i}]", row) for i, item in enumerate(value)]


def read_pictures(value: Any, name: str, row: Row) -> list[Media]:
    """Read null, one picture or a list of them; of an object {"image", "regions"} also its regions. Raises RowError."""
    if isinstance(value, list):
        return [one for i, item in enumerate(value) for one in _read_picture(item, f"{name}[{i}]", row)]
    return [] if value is None else _read_picture(value, name, row)


def _read_picture(value: Any, name: str, row: Row) -> list[Media]:
    if not isinstance(value, dict):
        return [read_media(value, "image", name, row)]
    row.warn_unread(value, frozenset({"image", "regions"}), name)
    return add_regions(read_media(value.get("image"), "image", name, row), value.get("regions"), name)


def add_regions(whole: Media, regions: Any, name: str) -> list[Media]:
    """A picture, and behind it regions of it, which are shown beside it. Raises RowError."""
    if not isinstance(regions, list | None):
        raise RowError("wrong_region", f"regions of {name} is {show(regions)}: a list of [x0, y0, x1, y1] is needed")
    found = [_read_region(one, f"{name}: regions[{i}]") for i, one in enumerate(regions or ())]
    return [whole, *(replace(whole, region=region) for region in found)]


def _read_region(value: Any, name: str) -> tuple[int, int, int, int]:
    if isinstance(value, list) and len(value) == 4 and all(type(x) is int and x >= 0 for x in value):
        x0, y0, x1, y1 = value
        if x0 < x1 and y0 < y1:
            return x0, y0, x1, y1
    raise RowError("wrong_region", f"{name} is {show(value)}: whole numbers x0 < x1, y0 < y1 are needed")


def read_media(value: Any, kind: Any, name: str, row: Row, cut: Mapping[str, Any] | None = None) -> Media:
    """Read a path (relative to `row.root`) or a data URL; `cut` is the object that has a video's time range.

    A video may also be a list of frames, or an object {"video", "start", "end", "fps", "nframes"}. Raises RowError,
    also for URLs of other machines.
    """
    if kind == "video" and isinstance(value, dict):
        row.warn_unread(value, CUT_KEYS | {"type", "video"}, name)
        if isinstance(value.get("video"), dict):
            raise RowError("wrong_type", f"{name}.video is {show(value['video'])}: a path is needed")
        return read_media(value.get("video"), kind, f"{name}.video", row, cut=value)
    times = (None, None, None, None) if cut is None else _read_cut(cut, name)
    if kind == "video" and isinstance(value, list) and value:
        frames = [read_media(item, "image", f"{name}[{i}]", row).path for i, item in enumerate(value)]
        if None in frames:
            raise RowError("wrong_type", f"{name} has data URLs: frames are given by their paths")
        return Media(kind, None, None, *times, tuple(str(frame) for frame in frames))
    if not isinstance(value, str) or not value or "\0" in value:
        raise RowError("wrong_type", f"{name} is {show(value)}: a path or a data URL is needed")
    if value.startswith("data:"):
        return Media(kind, None, read_data_url(value, name=name), *times)
    value = value.removeprefix("file://")
    if _SCHEME.match(value):
        raise RowError("remote_media", f"{name} is {show(value)}: it is not fetched. Download it and give its path")
    if row.root is None:
        raise RowError("local_media", f"{name} is {show(value)}: only data URLs are allowed here")
    return Media(kind, os.path.join(row.root, value), None, *times)


def _read_cut(part: Mapping[str, Any], name: str) -> tuple[float | None, float | None, float | None, int | None]:
    """Read start and end (seconds) and sampling rate (frames per second) or number of frames of a video."""
    for key in ("start", "end", "fps"):
        value = part.get(key)
        if value is not None and (not is_number(value) or value < 0):
            raise RowError("bad_time_range", f"{key} of {name} is {show(value)}: a number from 0 up is needed")
    start, end, fps = part.get("start"), part.get("end"), part.get("fps")
    if end is not None and end <= (start or 0):
        raise RowError("bad_time_range", f"{name} goes from {start or 0} to {end} s: start must be before end")
    if fps == 0:
        raise RowError("bad_time_range", f"fps of {name} is 0: a number above 0 is needed")
    nframes = part.get("nframes")
    if nframes is not None and (isinstance(nframes, bool) or not isinstance(nframes, int) or nframes < 1):
        raise RowError("bad_frame_count", f"nframes of {name} is {show(nframes)}: a whole number from 1 up is needed")
    if nframes is not None and fps is not None:
        raise RowError("bad_frame_count", f"{name} has fps and nframes: one of them decides which frames are taken")
    return start, end, fps, nframes


def read_data_url(url: str, *, name: str = "the data URL") -> bytes:
    """Decode `data:<type>;base64,<bytes>`. Raises RowError (`bad_base64`) for anything else; `name` is for messages."""
    head, comma, body = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise RowError("bad_base64", f"{name} is {show(url)}: data:<type>;base64,<bytes> is needed")
    try:
        data = base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowError("bad_base64", f"{name} is not base64: {error}") from None
    if not data:
        raise RowError("bad_base64", f"{name} holds no bytes")
    return data
