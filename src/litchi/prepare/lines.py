"""Rows of a file written to another as they stand; relative paths of media still lead to the same files.

In: the bytes of rows and the folder their paths start from. Out: a new file. Nothing is overwritten.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

from litchi.data.jsonl import Lines
from litchi.errors import UsageError

MEDIA_KEYS = {"image", "images", "video", "videos", "image_url"}  # what stands under these in a row is media


def create(out: Path) -> BinaryIO:
    """Open a new file for writing. Raises UsageError: it exists, or its folder does not."""
    try:
        return out.open("xb")
    except FileExistsError:
        raise UsageError(f"{out} exists", why="nothing is overwritten", remedy="Name another file") from None
    except OSError as error:
        raise UsageError(f"{out} cannot be written", why=error.strerror, remedy="Name another file") from None


def write_rows(lines: Lines, numbers: Iterable[int], out: Path, *, media_root: str | None) -> tuple[int, int]:
    """Write some rows, letter for letter where `out` lies in the folder of their file or with a `media_root`.

    Returns: how many were written, and in how many the paths of media were rewritten for the other folder.
    """
    written = moved = 0
    with create(out) as file:
        for number in numbers:
            raw = lines.read(number).rstrip(b"\r\n")
            fitted = fit_row(raw, lines.path, out, media_root=media_root)
            file.write(fitted + b"\n")
            written, moved = written + 1, moved + (fitted != raw)
    return written, moved


def fit_row(raw: bytes, path: str, out: Path, *, media_root: str | None) -> bytes:
    """A row of `path` as it has to stand in `out`."""
    home = os.path.dirname(os.path.abspath(path))
    away = os.path.abspath(out.parent)
    return raw if media_root is not None or os.path.samefile(home, away) else move_media(raw, home, away)


def move_media(raw: bytes, home: str, away: str) -> bytes:
    """A row whose relative paths of media start from `away` instead of `home`; the same bytes where it has none."""
    row = json.loads(raw.decode("utf-8-sig"))
    moved = move_paths(
        row, lambda path: path if os.path.isabs(path) else os.path.relpath(os.path.join(home, path), away)
    )
    return raw if moved == row else json.dumps(moved, ensure_ascii=False).encode()


def move_paths(value: Any, move: Callable[[str], str]) -> Any:
    """The same with the paths changed that stand where the reader of rows looks for media."""
    if isinstance(value, list):
        return [move_paths(item, move) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _move(item, move) if key in MEDIA_KEYS else move_paths(item, move) for key, item in value.items()}


def _move(value: Any, move: Callable[[str], str]) -> Any:
    if isinstance(value, list):
        return [_move(item, move) for item in value]
    if isinstance(value, dict):  # image_url: {"url": ...}, video: {"video": ..., "start": ...}
        return {key: _move(item, move) if key in {"url", "video"} else item for key, item in value.items()}
    if not isinstance(value, str) or value.startswith("data:"):
        return value
    path = value.removeprefix("file://")
    moved = move(path)
    return value if moved == path else moved
