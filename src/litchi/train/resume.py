"""What a run must have in common with the one it continues: settings, data, base, template, pixel limits, room.

describe_origin(...) -> what travels with a checkpoint    refuse_changed, refuse_other: by name, or --allow-changed
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from litchi import __version__
from litchi.batch.index import SourceIndex
from litchi.batch.loader import Corpus
from litchi.config import Config
from litchi.data.templates import find_template
from litchi.dist import Ranks
from litchi.errors import MachineError, UsageError
from litchi.train.checkpoint import Checkpoint, list_checkpoints
from litchi.train.durable import format_bytes, hash_json, on_main
from litchi.train.rollback import kept_checkpoints

WHOLE_BYTES = 1 << 28  # a data file up to here is hashed whole; of a larger one evenly spread pieces
PIECES, PIECE_BYTES = 256, 1 << 20
ORIGINS = {  # key of --allow-changed -> what changed, in words
    "base": "the base model",
    "data.template": "the prompt template",
    "data.pixels": "the pixel limits",
    "data": "the training data",
}


# --------------------------------------------------------------------------------------------------------- settings


def refuse_changed(config: Config, newest: Checkpoint | None, allowed: Sequence[str]) -> list[str]:
    """A resume with settings that change the numbers is refused by name; returns the changes that are allowed."""
    if newest is None:
        return []
    before, now = newest.manifest["numbers"], config.numbers()
    different = [k for k in sorted(before.keys() | now.keys()) if before.get(k) != now.get(k)]
    changed = [k for k in different if k not in allowed]
    if changed:
        raise UsageError(
            "; ".join(f"{k} was {before.get(k)!r} and is {now.get(k)!r}" for k in changed[:5]),
            where=config.output,
            why="the run that lies there was started with other settings",
            remedy=f"Start over with --fresh, choose another output=, or go on with --allow-changed {changed[0]}",
        )
    return different


# ----------------------------------------------------------------------------------------------------------- origin


def describe_origin(config: Config, base: Path, corpus: Corpus, ranks: Ranks) -> dict[str, Any]:
    """What the numbers of a run depend on besides its settings, by the keys of `ORIGINS`. Collective: rank 0 reads."""
    processor = corpus.renderers[0].processor
    spec = processor.vision
    prompts: Any = asdict(find_template(config.data.template)) if config.task == "rerank" else processor.chat_template

    def read() -> dict[str, Any]:
        return {
            "data": [describe_source(source) for source in corpus.sources],
            "base": {**describe_base(base), "tokenizer": hash_json(processor.tokenizer_json)},
            "data.template": hash_json(prompts),
            "data.pixels": {"min": spec.min_pixels, "max": spec.max_pixels},
        }

    return on_main(ranks, read, what="the data or the base model cannot be read", place=base)


def describe_source(index: SourceIndex) -> dict[str, Any]:
    """A data file: its content, which of its rows are used, and how large their pictures are as files."""
    said = hashlib.sha256()
    for row in index.rows:
        said.update(repr((row.line, row.id, row.documents)).encode())
    for path, (size, _) in sorted(index.media.items()):
        said.update(f"{os.path.basename(path)} {size}\n".encode())
    rows = said.hexdigest()
    file = {"bytes": os.path.getsize(index.path), "rows": len(index.rows)}
    return {"name": index.name, "path": index.path, **file, "sha256": hash_pieces(Path(index.path)), "index": rows}


def hash_pieces(path: Path) -> str:
    """sha256 of a file, of a very large one of pieces spread over it, its end included."""
    found, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            found.update(file.read())
        else:
            for number in range(PIECES):
                file.seek((size - PIECE_BYTES) * number // (PIECES - 1))
                found.update(file.read(PIECE_BYTES))
    return found.hexdigest()


def describe_base(folder: Path) -> dict[str, Any]:
    """A base model by its config.json and the headers and sizes of its weights: names, shapes, types, offsets."""
    files = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = file.read(8)
            head = length + file.read(min(int.from_bytes(length, "little"), 1 << 27))
        files[path.name] = [path.stat().st_size, hashlib.sha256(head).hexdigest()]
    config = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    return {"config": config, "weights": hash_json(files), "bytes": sum(size for size, _ in files.values())}


def refuse_other(
    origin: Mapping[str, Any], newest: Checkpoint | None, allowed: Sequence[str], where: object
) -> list[str]:
    """A resume on other data, base, template or pixel limits is refused by name; returns the changes allowed."""
    if newest is None:
        return []
    before = newest.manifest["origin"]
    different = [key for key in ORIGINS if _comparable(before[key]) != _comparable(origin[key])]
    for key in different:
        if key not in allowed:
            raise UsageError(
                f"{ORIGINS[key]} changed: {_tell(before[key], origin[key])}",
                where=where,
                why="the run that lies there began with something else",
                remedy=f"Put it back, start over with --fresh, or go on with --allow-changed {key}",
            )
    return different


def _comparable(value: Any) -> str:
    """A data file that was moved is the same file; another path is another setting, and refused as that."""
    if isinstance(value, list):
        value = [{k: v for k, v in one.items() if k != "path"} for one in value]
    return json.dumps(value, sort_keys=True)


def _tell(before: Any, now: Any) -> str:
    """The first thing that differs, as it was and is."""
    pairs = [(before, now)]
    if isinstance(before, list):
        if len(before) != len(now):
            return f"it was {len(before)} files and is {len(now)}"
        pairs = list(zip(before, now, strict=True))
    for old, new in pairs:
        if not isinstance(old, dict):
            return f"it was {str(old)[:12]} and is {str(new)[:12]}"
        for key in old:
            if key != "path" and old[key] != new.get(key):
                name = f"{old['path']}: " if "path" in old else ""
                a, b = (str(v)[:12] if isinstance(v, str) else f"{v:,}" for v in (old[key], new.get(key)))
                return f"{name}{key} was {a} and is {b}"
    return "its parts differ"


def versions() -> dict[str, str]:
    """What computed it."""
    names = ("torch", "transformers", "safetensors", "numpy", "pillow")
    return {"litchi": __version__, "python": platform.python_version(), **{name: version(name) for name in names}}


# ------------------------------------------------------------------------------------------------------------- room


@dataclass(frozen=True)
class Room:
    """What a run writes: bytes of a checkpoint, how many lie there at once at most, bytes of the export."""

    checkpoint_bytes: int
    count: int
    export_bytes: int


def plan_room(
    config: Config, *, trains: int, total: int, trained_width: int, held_width: int, steps: int, per_epoch: int
) -> Room:
    """Estimate it before the run.

    Args:
        trains, total: parameters; `trained_width`, `held_width`: bytes of one that trains, and of any.
        steps, per_epoch: of the run, and of an epoch.
    """
    train = config.train
    states = 0 if config.optim.name == "sgd" or train.save == "weights" else 2
    every = train.save_every or (train.eval_every if train.best else None)
    saves = steps // every.in_steps(per_epoch) + 1 if every else 1
    return Room(
        checkpoint_bytes=trains * trained_width * (1 + states),
        count=min(saves + (train.on_nonfinite == "rollback"), kept_checkpoints(train) + 1 + (train.best is not None)),
        export_bytes=total * held_width if train.export == "end" else 0,
    )


def refuse_full_disk(run: Path, ranks: Ranks, *, checkpoint_bytes: int, count: int, export_bytes: int) -> str:
    """Compare what a run will write with the room on its disk, before the first step.

    Args:
        checkpoint_bytes: of one checkpoint, estimated.
        count: checkpoints that lie there at once at most, the one being written included.
        export_bytes: of the export; 0: none.

    Returns:
        The line that says it.
    """

    def look() -> str:
        there = sum(sum(f["bytes"] for f in c.manifest["files"].values()) for c in list_checkpoints(run))
        needed = (
            max(checkpoint_bytes, count * checkpoint_bytes - there) + export_bytes
        )  # one goes after the next is there
        free = shutil.disk_usage(run).free
        each = f"{count} checkpoint{'s' * (count != 1)} of about {format_bytes(checkpoint_bytes)}"
        each += f", an export of {format_bytes(export_bytes)}" if export_bytes else ""
        if needed > free:
            raise MachineError(
                f"the run needs {format_bytes(needed)} on its disk and {format_bytes(free)} are free",
                where=run,
                why=each,
                remedy="Make room, lower train.keep, or choose an output= on another disk",
            )
        return f"disk: {each}; {format_bytes(free)} are free"

    return on_main(ranks, look, what="the run's folder cannot be written", place=run)
