"""Weights from safetensors files into a model that is whole, sharded, or one stage of a pipeline.

Headers are compared with the class when the model is built; tensors are read when it has its layout. Every rank maps
the files and copies its own shards, so that no rank ever holds more than what it owns and one tensor on the way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from litchi.errors import UsageError
from litchi.model.compressed import NF4_STATE, find_packed, packed_shape, unpack
from litchi.model.quantize import PackedLinear
from litchi.model.tokens import ROWS, first_rows, is_new_row

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
SCORE = "score.weight"  # the one row of a classifier
Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Source:
    """Where a parameter lies: the file and its key there.

    Args:
        parts: (name, file, key) of each tensor that stands for it, where it is held in fewer bits.
        row: the row of the head that a classifier's one row becomes; the others are zero.
    """

    file: Path
    key: str
    parts: tuple[tuple[str, Path, str], ...] = ()
    row: int | None = None


# ------------------------------------------------------------------------------------------------- headers and names


def match_weights(hf: Any, folder: Path, *, score_row: int | None = None) -> dict[str, Source]:
    """Find every parameter of a class in the files, by their headers alone.

    Args:
        hf: the whole model as its class makes it, on the meta device, tied where its config says so. It is untied
            where the files hold two different tensors.
        folder: with model.safetensors, or with shards and their index.
        score_row: of a classifier, the id of the word its `score.weight` speaks for.

    Raises:
        UsageError: unreadable files, or tensors that are missing, unexpected or of another shape, with counts.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = get_model_conversion_mapping(hf)
    assert all(isinstance(r, WeightRenaming) for r in renamings), "this family's tensors are renamed and no more"
    expected = hf.state_dict()
    found: dict[str, Source] = {}
    odd = SimpleNamespace(missing_keys=set(), unexpected_keys=set(), mismatched_keys=set())
    headers = {key: (file, s) for file in _find_files(folder) for key, s in read_header(file, folder).items()}
    if score_row is not None:
        head = "lm_head.weight"
        _untie(hf, head)
        file, _ = headers.pop(SCORE, (folder, None))
        if file.is_file():
            found[head] = Source(file, SCORE, row=score_row)
    for source, shape in _join_parts(headers):
        name, _ = rename_source_key(source.key, renamings, [], hf.base_model_prefix, expected)
        if name not in expected:
            odd.unexpected_keys.add(name)
            continue
        found[name] = source
        if tuple(expected[name].shape) != shape:
            odd.mismatched_keys.add(f"{name}, which is {shape} and should be {tuple(expected[name].shape)}")
    _settle_ties(hf, found)
    odd.missing_keys = expected.keys() - found.keys()
    hf._adjust_missing_and_unexpected_keys(odd)  # buffers that older versions wrote are no surprise
    _refuse(odd, folder)
    hf._weight_conversions = [r for r in renamings if r.was_used()]  # an export goes the same way back
    return found


def _find_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise _unreadable(folder, f"there is neither {WEIGHTS} nor {INDEX}")
    try:
        names = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
    except (ValueError, KeyError, AttributeError) as error:
        raise _unreadable(folder, f"{INDEX} is damaged") from error
    return [folder / name for name in sorted(set(names))]


def read_header(file: Path, folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by key. A file that is cut off does not open."""
    try:
        with safe_open(file, framework="pt") as opened:
            return {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise _unreadable(folder, f"{file.name}: {str(error).splitlines()[0][:200]}") from error


def _unreadable(folder: Path, why: str) -> UsageError:
    return UsageError("the weights could not be read", where=folder, why=why)


def _join_parts(headers: dict[str, tuple[Path, tuple[int, ...]]]) -> Iterator[tuple[Source, tuple[int, ...]]]:
    """Every tensor of the files, those that stand for one weight together, under the weight's key."""
    packed = find_packed(headers)
    part_keys = {layer + name for layer, names in packed.items() for name in names}
    for key, (file, shape) in headers.items():
        if key not in part_keys:
            yield Source(file, key), shape
    for layer, names in packed.items():
        parts = tuple((name, headers[layer + name][0], layer + name) for name in sorted(names))
        small = {"weight_shape", NF4_STATE} & names or {"weight"}
        shape = packed_shape({name: _read_key(file, key) for name, file, key in parts if name in small})
        yield Source(parts[0][1], f"{layer}weight", parts), shape


def _settle_ties(hf: Any, found: dict[str, Source]) -> None:
    """Tied weights need one source; files that hold two different tensors have the last word over the config."""
    for target, source in list(hf.all_tied_weights_keys.items()):
        if target in found and source in found:
            if not torch.equal(*(_read_key(found[name].file, found[name].key) for name in (target, source))):
                _untie(hf, target)
        elif target in found:
            found[source] = found[target]
        elif source in found:
            found[target] = found[source]


def _untie(hf: Any, name: str) -> None:
    """Give a tied weight a parameter of its own."""
    if name in hf.all_tied_weights_keys:
        owner, _, key = name.rpartition(".")
        setattr(hf.get_submodule(owner), key, nn.Parameter(torch.empty_like(hf.get_parameter(name))))
        del hf.all_tied_weights_keys[name]


def _read_key(file: Path, key: str) -> Tensor:
    with safe_open(file, framework="pt") as opened:
        return opened.get_tensor(key)


def _refuse(odd: SimpleNamespace, folder: Path) -> None:
    for kind in ("missing", "unexpected", "mismatched"):
        names = sorted(getattr(odd, f"{kind}_keys"))
        if names:
            raise UsageError(
                f"{len(names)} {kind} keys in the weights, the first {names[0]}",
                where=folder,
                why="a model is loaded whole or not at all",
                remedy="Download it again, or check that config.json and the weights belong together",
            )


# --------------------------------------------------------------------------------------------------------- tensors


def load_weights(hf: nn.Module, folder: Path, device: torch.device) -> None:
    """Give every parameter storage and its values from the files, in place; LoRA's are left alone. Not collective.

    Args:
        hf: from `build_model`, with adapters, sharding or stages as they may be; parameters keep the names of the
            class. Tied ones stay one. Parameters that were on the meta device are replaced by new objects, so the
            optimizer and DDP come after this.
        folder: the one the model was built from.
        device: of the parameters: the rank's, or the CPU where FSDP2 offloads them. Buffers go to a GPU too; where
            parameters are on the CPU they stay, as FSDP2 has put them where it computes.
    """
    sources: dict[str, Source] = hf.weight_sources  # type: ignore[assignment]
    if not all(source.file.is_relative_to(folder) for source in sources.values()):
        raise ValueError(f"the model was not built from {folder}")
    if device.type != "cpu":
        _move_buffers(hf, device)
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}

        def open_file(file: Path) -> Any:
            if file not in opened:
                opened[file] = stack.enter_context(safe_open(file, framework="pt"))
            return opened[file]

        def read(name: str, wanted: Slices) -> Tensor:
            if is_new_row(name):
                weight = sources[name.replace(ROWS, "weight")]
                table = open_file(weight.file).get_slice(weight.key)
                return first_rows(hf.new_tokens, lambda number: table[number : number + 1])[wanted]  # type: ignore[arg-type]
            source = sources[plain_name(name)]
            if source.parts:
                return unpack({part: open_file(file).get_tensor(key) for part, file, key in source.parts})[wanted]
            if source.row is not None:
                row = open_file(source.file).get_tensor(source.key)
                head = row.new_zeros(hf.get_input_embeddings().num_embeddings, row.shape[1])  # type: ignore[operator]
                head[source.row] = row[0]
                return head[wanted]
            return open_file(source.file).get_slice(source.key)[wanted]

        fill_parameters(hf, device, read, lambda name: not is_adapter_tensor(name))
    lost = [name for name, buffer in hf.named_buffers() if buffer.is_meta]
    assert not lost, f"{lost} have no values"


def _move_buffers(hf: nn.Module, device: torch.device) -> None:
    for module in hf.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if not buffer.is_meta:
                setattr(module, name, buffer.to(device))


def is_adapter_tensor(name: str) -> bool:
    """Whether a parameter, by its name, is what LoRA or DoRA adds."""
    return ".lora_A." in name or ".lora_B." in name or ".lora_magnitude_vector." in name


def plain_name(name: str) -> str:
    """A parameter's name without what PEFT puts into it."""
    return name.replace(".base_layer", "").split(".lora_")[0]


def fill_parameters(
    hf: nn.Module, device: torch.device, read: Callable[[str, Slices], Tensor], wanted: Callable[[str], bool]
) -> None:
    """Give parameters storage and values, each rank its own part.

    Args:
        read: (name, slices) -> that part of the whole tensor.
        wanted: whether a parameter is filled, by its name.
    """
    filled: dict[nn.Parameter, nn.Parameter] = {}
    computes_on = next((b.device for b in hf.buffers() if not b.is_meta), device)
    for path, module in hf.named_modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            name = f"{path}.{key}" if path else key
            if not wanted(name):
                continue

            def take(part: Slices, name: str = name, module: Any = module, packs: bool = key == "weight") -> Tensor:
                if not (packs and isinstance(module, PackedLinear)):
                    return read(name, part)
                whole = read(name, tuple(slice(n) for n in module.whole_shape))
                return module.pack(whole.to(computes_on))[part]

            if parameter not in filled:
                filled[parameter] = _filled(parameter, device, take)
            if filled[parameter] is not parameter:
                setattr(module, key, filled[parameter])


@torch.no_grad()
def _filled(parameter: nn.Parameter, device: torch.device, read: Callable[[Slices], Tensor]) -> nn.Parameter:
    """The parameter itself where it has storage on the device, else a new one. FSDP2 finds it at its first forward."""
    out = parameter
    if parameter.is_meta or parameter.device != device:
        # of a DTensor the same layout on another device, which DTensor.from_local would move to the mesh's device
        out = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
    local = own_part(out)
    value = read(local_slices(parameter))
    assert local.shape == value.shape, f"{tuple(local.shape)} is not {tuple(value.shape)}"
    local.copy_(value)
    return out


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: all of it, unless it is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_slices(tensor: Tensor) -> Slices:
    """The part of a whole tensor that this rank holds. Every layout here cuts it into contiguous blocks."""
    begin, end = [0] * tensor.ndim, list(tensor.shape)
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        # FSDP2 over tensor parallel cuts what tensor parallel has left, though its axis comes first: a strided shard
        axes = sorted(range(mesh.ndim), key=lambda axis: isinstance(placements[axis], _StridedShard))
        for axis in axes:
            placement: Any = placements[axis]
            if isinstance(placement, Replicate):
                continue
            assert isinstance(placement, (Shard, _StridedShard)), f"{placement} cannot be read from a file"
            dim, length = placement.dim, end[placement.dim] - begin[placement.dim]
            chunk = -(-length // mesh.size(axis))  # as torch.chunk cuts: the last may be shorter, or empty
            rank = mesh.get_local_rank(axis)
            begin[dim], end[dim] = (begin[dim] + min(length, chunk * r) for r in (rank, rank + 1))
    return tuple(slice(b, e) for b, e in zip(begin, end, strict=True))
