"""The files of a checkpoint: tensors of all ranks as safetensors shards, their table as JSON, hashes in a manifest.

torch's DCP plans which rank writes and reads which piece of which tensor; here the pieces become files and come back
from them. DCP's own files hold pickles and no checksum. Nothing here is ever unpickled.

    step-00000100/  shard-00000.safetensors ...   pieces a rank wrote, keyed by tensor and offset
                    tensors.json                  every tensor: shape, dtype, its pieces and their files
                    manifest.json                 written last: size and sha256 of the others, and what travels along
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import (
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from litchi.parallel.pulse import PULSE
from litchi.train.durable import BLOCK, hash_file, hash_json, sync_file, sync_folder, write_json

MANIFEST, TABLE = "manifest.json", "tensors.json"
SELF = "sha256"  # of the manifest itself, in the manifest
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Written:
    """A file a rank has written, and the pieces in it."""

    file: str
    bytes: int
    sha256: str


# ------------------------------------------------------------------------------------------------------ safetensors


def write_shard(path: Path, pieces: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write tensors as a safetensors file, hashed on the way and synced. Returns its size and sha256."""
    header: dict[str, Any] = {}
    at = 0
    for key, tensor in pieces.items():
        end = at + tensor.numel() * tensor.element_size()
        header[key] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    hashed, size = hashlib.sha256(), 0
    try:
        with path.open("wb", buffering=0) as file:
            for part in _parts(len(text).to_bytes(8, "little") + text, pieces.values()):
                PULSE.move()
                hashed.update(part)
                size += len(part)
                while part:  # a disk that is nearly full takes a part of it
                    part = part[file.write(part) :]
            os.fsync(file.fileno())
    except OSError as error:  # a write does not say of which file it was
        error.filename = error.filename or str(path)
        raise
    return size, hashed.hexdigest()


def _parts(head: bytes, tensors: Iterable[Tensor]) -> Iterable[memoryview]:
    yield memoryview(head)
    for tensor in tensors:
        if tensor.numel():
            flat = memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
            yield from (flat[start : start + BLOCK] for start in range(0, len(flat), BLOCK))


def _key(name: str, offsets: Sequence[int]) -> str:
    return f"{name}@{','.join(map(str, offsets))}"


# ------------------------------------------------------------------------------------------------------------ write


class ShardWriter(StorageWriter):
    """Writes what DCP has planned into a hidden folder, and makes it a checkpoint by renaming it.

    Args:
        place: the folder it becomes.
        body: the rest of the manifest.
        beside: files of the run that must be on the disk before the checkpoint counts.
        add: puts files that are nobody's state into the folder, on the first rank.
        after: what the first rank does when it does, with the others hearing of its errors.
    """

    def __init__(
        self,
        place: Path,
        body: Mapping[str, Any],
        *,
        beside: Sequence[Path] = (),
        add: Callable[[Path], None] = lambda folder: None,
        after: Callable[[], None] = lambda: None,
    ):
        self.place, self.body, self.beside, self.add, self.after = place, body, beside, add, after
        self.part = hidden(place, "part")
        self.rank = 0
        self.bytes = 0

    def reset(self, checkpoint_id: object = None) -> None:
        """Nothing is kept between two saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.rank = kwargs.get("rank", 0)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the first rank, before any writes: an empty hidden folder."""
        shutil.rmtree(self.part, ignore_errors=True)
        self.part.mkdir(parents=True)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's pieces. A rank without any writes no file."""
        pieces: dict[str, Tensor] = {}
        for item in sorted(plan.items, key=lambda item: (item.index.fqn, item.index.offset or ())):
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            pieces[_key(item.index.fqn, item.index.offset or ())] = tensor
        written: list[WriteResult] = []
        if pieces:
            name = f"shard-{self.rank:05d}.safetensors"
            file = Written(name, *write_shard(self.part / name, pieces))
            written = [WriteResult(item.index, file.bytes, file) for item in plan.items]
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank, when all have written: the table, then the manifest, then the name."""
        found = [result for rank in results for result in rank]
        where = {_key(r.index.fqn, r.index.offset or ()): r.storage_data.file for r in found}
        state = sorted(metadata.state_dict_metadata.items())
        table = {name: _describe(name, entry, where) for name, entry in state}
        write_json(self.part / TABLE, table)
        self.add(self.part)
        sizes = {r.storage_data.file: {"bytes": r.storage_data.bytes, "sha256": r.storage_data.sha256} for r in found}
        rest = [path for path in self.part.iterdir() if path.name not in sizes]
        for file in (*self.beside, *rest):
            sync_file(file)
        sizes |= {path.name: {"bytes": path.stat().st_size, "sha256": hash_file(path)} for path in rest}
        tensors = {name: {"shape": entry["shape"], "dtype": entry["dtype"]} for name, entry in table.items()}
        body = {**self.body, "tensors": tensors, "files": dict(sorted(sizes.items()))}
        write_json(self.part / MANIFEST, {**body, SELF: hash_json(body)})
        self.bytes = sum(entry["bytes"] for entry in sizes.values())
        if self.place.exists():  # not one of ours that counts: those were looked at before the first step
            os.replace(self.place, _free_name(self.place, "replaced"))
        os.replace(self.part, self.place)
        sync_folder(self.place.parent)
        self.after()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return isinstance(checkpoint_id, str | os.PathLike)


def _describe(name: str, entry: Any, where: Mapping[str, str]) -> dict[str, Any]:
    assert isinstance(entry, TensorStorageMetadata)
    pieces = [[list(c.offsets), list(c.sizes), where[_key(name, c.offsets)]] for c in entry.chunks]
    dtype = str(entry.properties.dtype).removeprefix("torch.")
    return {"shape": list(entry.size), "dtype": dtype, "pieces": pieces}


def hidden(place: Path, kind: str) -> Path:
    """The name beside a checkpoint under which it does not count."""
    return place.with_name(f".{place.name}.{kind}")


def _free_name(place: Path, kind: str) -> Path:
    names = (place.with_name(f"{place.name}.{kind}{n or ''}") for n in range(10_000))
    return next(name for name in names if not name.exists())


# ------------------------------------------------------------------------------------------------------------- read


class ShardReader(StorageReader):
    """Gives DCP the pieces it has planned to read, from the files of a checkpoint that was found sound."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.files: dict[MetadataIndex, str] = {}

    def reset(self, checkpoint_id: object = None) -> None:
        """Nothing is kept between two loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP's table of the checkpoint, made from its JSON twin."""
        table = json.loads((self.folder / TABLE).read_text(encoding="utf-8"))
        state: dict[str, Any] = {}
        for name, entry in table.items():
            chunks = []
            for offsets, sizes, file in entry["pieces"]:
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                self.files[MetadataIndex(name, offsets)] = file
            properties = TensorProperties(dtype=getattr(torch, entry["dtype"]))
            state[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
        return Metadata(state)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Each rank has read the table itself."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy each planned piece into its tensor; files are mapped, so that a slice costs no more than itself."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.files[item.storage_index], []).append(item)
        for name, items in by_file.items():
            with safe_open(self.folder / name, framework="pt") as file:
                for item in items:
                    key = _key(item.storage_index.fqn, item.storage_index.offset or ())
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(_read_piece(file, key, item))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return isinstance(checkpoint_id, str | os.PathLike)


def _read_piece(file: Any, key: str, item: ReadItem) -> Tensor:
    if not item.lengths:  # a number: it has no slices
        return file.get_tensor(key)
    cut = tuple(slice(at, at + size) for at, size in zip(item.storage_offsets, item.lengths, strict=True))
    return file.get_slice(key)[cut]


# ----------------------------------------------------------------------------------------------------------- damage


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder. ValueError says what is wrong with it."""
    try:
        body = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST} is missing") from None
    except OSError as error:
        raise ValueError(f"{MANIFEST} cannot be read ({error.strerror})") from None
    except ValueError:
        raise ValueError(f"{MANIFEST} is cut off or damaged") from None
    if not isinstance(body, dict) or body.pop(SELF, None) != hash_json(body):
        raise ValueError(f"{MANIFEST} is not what was written (sha256 differs)")
    named = folder.name.removeprefix("step-")
    if named.isdecimal() and int(named) != body["step"]:
        raise ValueError(f"{MANIFEST} is of step {body['step']}")
    return body


def find_missing(folder: Path, files: Mapping[str, Any]) -> str | None:
    """What is wrong with the files of a checkpoint by their names and sizes: it costs no reading."""
    try:
        there = {entry.name: entry for entry in os.scandir(folder) if not entry.name.startswith(".")}
        for name, entry in files.items():
            if name not in there:
                return f"{name} is missing"
            if not there[name].is_file():
                return f"{name} is not a file"
            size = there[name].stat().st_size
            if size != entry["bytes"]:
                return f"{name} has {size:,} bytes and had {entry['bytes']:,}"
    except OSError as error:
        return f"the folder cannot be read ({error.strerror})"
    extra = sorted(there.keys() - files.keys() - {MANIFEST})
    return f"{extra[0]} does not belong there" if extra else None


def find_changed(folder: Path, files: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """The first of these files whose content is not what was written."""
    for name in names:
        try:
            if hash_file(folder / name) != files[name]["sha256"]:
                return f"{name} is not what was written (sha256 differs)"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None
