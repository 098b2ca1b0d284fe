"""A tuned model as others load it: a merged Hugging Face folder, and a PEFT adapter folder for LoRA runs.

Tensors are gathered one by one and written shard by shard; no rank ever holds the whole model twice. The folder
carries processor, template and pixel limits, and a manifest that is written last.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from litchi import __version__
from litchi.data.processor import END_OF_TURN, load_processor
from litchi.dist import Ranks, barrier, max_ranks
from litchi.errors import UserError
from litchi.model.adapters import ADAPTER, adapter_config, adapter_state, in_adapter, saved_modules, uses_lora
from litchi.model.forward import LitchiModel
from litchi.model.quantize import PackedLinear
from litchi.model.tokens import ROWS, is_new_row, with_new_rows, write_tokenizer
from litchi.parallel.mesh import Layout
from litchi.parallel.pipeline import bring_together
from litchi.train.resume import describe_base

MANIFEST = "litchi.json"
SHARD_BYTES = 4 * 2**30
PROCESSOR_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "generation_config.json",
)


@dataclass(frozen=True)
class Form:
    """What weights are written as.

    Args:
        encode: (name, key in the file, whole tensor) -> keys and tensors of the file.
        config: what config.json says besides.
    """

    encode: Callable[[str, str, Tensor], dict[str, Tensor]]
    config: Mapping[str, Any]


def as_it_is(name: str, key: str, tensor: Tensor) -> dict[str, Tensor]:
    """`encode` that changes nothing."""
    return {key: tensor}


def export_model(
    owner: LitchiModel,
    base: Path,
    out: Path,
    ranks: Ranks,
    facts: Mapping[str, Any],
    *,
    layout: Layout | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    form: Form | None = None,
) -> bool:
    """Write the merged model and, where all that trained is LoRA, the adapter in `adapter/` below it.

    All ranks call it; rank 0 writes. The folder appears whole or not at all.

    Args:
        owner: the model, sharded or not, with or without LoRA.
        base: folder of the base model, for its config and processor files.
        out: the folder; one that is there is replaced.
        facts: for the manifest: base, task, template, pixel limits, settings, step.
        layout: of the ranks; None: every rank has all layers.
        dtype: of the written weights; None keeps what they are held in.
        shard_bytes: size at which a file of weights is closed.
        form: what the weights are written as; None: as they are, with the adapter beside them.

    Returns:
        Whether an adapter was written.

    Raises:
        UserError: LoRA layers exist, and all of them are zero or too small for `dtype`: merging would change nothing.
    """
    layout = layout or Layout()
    _refuse_unchanged(owner.hf)
    part = out.with_name(f".{out.name}.part")
    if ranks.is_main:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    written = dtype or next(owner.hf.parameters()).dtype
    body = {
        "litchi": __version__,
        "torch": torch.__version__,
        **facts,
        "base_files": {"revision": _revision(base), **describe_base(base)},
        "dtype": str(written).removeprefix("torch."),
    }
    changed: list[bool] = []
    merged = bring_together(merged_tensors(owner.hf, written, changed), layout, ranks.rank)
    _write_shards(merged, part, owner.hf, ranks, shard_bytes, form.encode if form else as_it_is)
    some, learnt = max_ranks(float(len(changed)), float(any(changed)))
    if some and not learnt:
        if ranks.is_main:
            shutil.rmtree(part)
        _refuse_same(f"what was learnt is lost when the merged weights are rounded to {body['dtype']}")
    adapter = form is None and is_adapter(owner.hf)
    if adapter:
        state = bring_together(adapter_tensors(owner.hf), layout, ranks.rank)
        _write_adapter(owner, dict(state), base, part / "adapter", ranks, body)
    if ranks.is_main:
        _copy_config(base, part, owner, body["dtype"], form.config if form else {})
        copy_processor(base, part, owner)
        _write_json(part / MANIFEST, body)
        shutil.rmtree(out, ignore_errors=True)
        part.replace(out)
    barrier()
    return adapter


def is_adapter(hf: nn.Module) -> bool:
    """Whether LoRA layers are all that differs from the base: full parts beside them do not fit into an adapter.
    Collective."""
    new: Any = hf.new_tokens
    grown = new is not None and new.grown  # PEFT puts rows into a table, and does not make it longer
    learns = [name for name, p in hf.named_parameters() if p.requires_grad]
    full = any(not in_adapter(name, saved_modules(hf)) or (grown and is_new_row(name)) for name in learns)
    lora, beside = max_ranks(float(uses_lora(hf)), float(full))
    return bool(lora) and not beside


def identify_base(path: str) -> str:
    """A base as manifests name it: found again from any working folder."""
    return str(Path(path).resolve()) if Path(path).is_dir() else path


def _revision(base: Path) -> str | None:
    """Of a folder that the hub's client has downloaded: the commit."""
    return base.name if base.parent.name == "snapshots" else None


def _refuse_unchanged(hf: nn.Module) -> None:
    """Before anything is written: a LoRA whose B is zero everywhere would give the base again. Collective."""
    up = [whole(p) for name, p in hf.named_parameters() if ".lora_B." in name]
    some, learnt = max_ranks(float(len(up)), float(any(b.any() for b in up)))
    if some and not learnt:
        _refuse_same("every LoRA B matrix is zero: nothing was learnt")


def _refuse_same(why: str) -> NoReturn:
    raise UserError(
        "the merged model would be the base model",
        why=why,
        remedy="Train longer, or leave the export out with train.export=never",
    )


def merged_tensors(
    hf: nn.Module, dtype: torch.dtype, changed: list[bool] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Names of the base and whole tensors on the CPU, out of 4 bits, LoRA folded in, a tied head once. Collective when
    sharded. `changed` gets, of each layer with LoRA, whether it differs from the base in this type."""
    for name, parameter in hf.named_parameters():
        if ".lora_" in name or is_new_row(name):
            continue
        value = whole(parameter)
        holder: Any = hf.get_submodule(name.rpartition(".")[0])
        if hasattr(holder, ROWS):
            value = with_new_rows(holder, value, whole(holder.new_rows))
        if isinstance(holder, PackedLinear) and parameter is holder.weight:
            value = holder.unpack(value, torch.float32)
        if name.endswith(".base_layer.weight"):
            layer: Any = hf.get_submodule(name.removesuffix(".base_layer.weight"))
            a, b = whole(layer.lora_A[ADAPTER].weight), whole(layer.lora_B[ADAPTER].weight)
            plain, value = value, value.float() + (b.float() @ a.float()) * layer.scaling[ADAPTER]
            if ADAPTER in layer.lora_magnitude_vector:  # DoRA
                lengths = torch.linalg.vector_norm(value, dim=1)
                value = value * (whole(layer.lora_magnitude_vector[ADAPTER].weight).float() / lengths)[:, None]
            if changed is not None:
                changed.append(not torch.equal(plain.to(dtype), value.to(dtype)))
        yield name.replace(".base_layer.", "."), value.to(dtype)


def adapter_tensors(hf: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and whole tensors of LoRA layers on the CPU. Collective when sharded."""
    for name, parameter in hf.named_parameters():
        if in_adapter(name, saved_modules(hf)):
            yield name, whole(parameter)


def whole(tensor: Tensor) -> Tensor:
    """The full tensor on the CPU; gathered when it is sharded (collective)."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu()


def _write_shards(
    tensors: Iterator[tuple[str, Tensor]],
    part: Path,
    hf: nn.Module,
    ranks: Ranks,
    shard_bytes: int,
    encode: Callable[[str, str, Tensor], dict[str, Tensor]],
) -> None:
    """Write tensors as they come, under the key names of the files the base was read from."""
    from safetensors.torch import save_file

    shard: dict[str, Tensor] = {}
    files: list[list[str]] = []
    held = total = 0

    def flush() -> None:
        nonlocal held
        save_file(shard, part / f"shard-{len(files)}.safetensors", metadata={"format": "pt"})
        files.append(list(shard))
        shard.clear()
        held = 0

    for name, value in tensors:
        if not ranks.is_main:
            continue  # it took part in the gathering
        for hub_key, whole_value in _hub_names(hf, {name: value}).items():
            for key, tensor in encode(name, hub_key, whole_value).items():
                shard[key] = tensor.contiguous()
                held += tensor.numel() * tensor.element_size()
                total += tensor.numel() * tensor.element_size()
        if held >= shard_bytes:
            flush()
    if ranks.is_main:
        if shard:
            flush()
        _name_shards(part, files, total)


def _hub_names(hf: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The key layout of the files the model came from, which is what other engines expect."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(hf, state)  # type: ignore[arg-type]


def _name_shards(part: Path, files: list[list[str]], total: int) -> None:
    if len(files) == 1:
        (part / "shard-0.safetensors").rename(part / "model.safetensors")
        return
    index: dict[str, str] = {}
    for i, names in enumerate(files):
        final = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        (part / f"shard-{i}.safetensors").rename(part / final)
        index |= dict.fromkeys(names, final)
    body = {"metadata": {"total_size": total}, "weight_map": index}
    (part / "model.safetensors.index.json").write_text(json.dumps(body, indent=1), encoding="utf-8")


def _copy_config(base: Path, part: Path, owner: LitchiModel, dtype: str, more: Mapping[str, Any]) -> None:
    """The base's config.json, saying what was written: the class, the type of the weights, and `more` of a form."""
    config, new = json.loads((base / "config.json").read_text(encoding="utf-8")), owner.hf.new_tokens
    config.setdefault("architectures", [owner.family.architecture])
    if "torch_dtype" not in config:
        config["dtype"] = dtype
    for section in (config, *(v for v in config.values() if isinstance(v, dict))):
        for key in section.keys() & {"dtype", "torch_dtype"}:
            section[key] = dtype
        if new is not None and "vocab_size" in section:
            section["vocab_size"] = new.rows
    _write_json(part / "config.json", {**config, **more})


def copy_processor(base: Path, part: Path, owner: LitchiModel) -> None:
    """The base's processor files, with the pixel limits this model was trained with."""
    for name in PROCESSOR_FILES:
        if (base / name).is_file():
            shutil.copyfile(base / name, part / name)
    new: Any = owner.hf.new_tokens
    if new is not None:
        write_tokenizer(new, part)
    _stop_at_turns(base, part)
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (part / name).is_file():
            body = json.loads((part / name).read_text(encoding="utf-8"))
            picture = body if name.startswith("pre") else body.get("image_processor")
            if picture:
                _set_pixels(picture, owner)
                _write_json(part / name, body)


def _stop_at_turns(base: Path, part: Path) -> None:
    """Let others' generation stop where the answers that were learnt do, whatever the base's stopped at."""
    path = part / "generation_config.json"
    body = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    known = body.get("eos_token_id")
    ids = known if isinstance(known, list) else [] if known is None else [known]
    end = load_processor(base).controls.get(END_OF_TURN)
    if end is not None and end not in ids:
        _write_json(path, {**body, "eos_token_id": [end, *ids]})


def _set_pixels(picture: dict[str, Any], owner: LitchiModel) -> None:
    """Limits in the forms the file has already: `size` is newer, transformers prefers `min_pixels` where both are."""
    low, high = owner.spec.min_pixels, owner.spec.max_pixels
    if "size" in picture:
        picture["size"] = {"shortest_edge": low, "longest_edge": high}
    if "min_pixels" in picture or "size" not in picture:
        picture["min_pixels"], picture["max_pixels"] = low, high


def _write_adapter(
    owner: LitchiModel, state: dict[str, Tensor], base: Path, out: Path, ranks: Ranks, facts: Mapping[str, Any]
) -> None:
    """A PEFT folder with processor and manifest of its own, so that it can be moved and opened alone."""
    from safetensors.torch import save_file

    if ranks.is_main:
        out.mkdir()
        body = {k: v.contiguous() for k, v in adapter_state(state, saved_modules(owner.hf)).items()}
        save_file(body, out / "adapter_model.safetensors", metadata={"format": "pt"})
        _write_json(out / "adapter_config.json", adapter_config(owner.hf, state, facts["base"]))
        copy_processor(base, out, owner)
        _write_json(out / MANIFEST, facts)


def _write_json(path: Path, body: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(body, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
