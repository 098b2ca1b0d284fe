"""A tuned model as others load it: a merged Hugging Face folder, and a PEFT adapter folder for LoRA runs.

Tensors are gathered one by one and written shard by shard; no rank ever holds the whole model twice. The folder
carries processor, template and pixel limits, and a manifest that is written last.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from litchi import __version__
from litchi.dist import Ranks, barrier
from litchi.errors import UserError
from litchi.model.adapters import ADAPTER, adapter_config, adapter_state, uses_lora
from litchi.model.forward import LitchiModel

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


def export_model(
    owner: LitchiModel,
    base: Path,
    out: Path,
    ranks: Ranks,
    facts: Mapping[str, Any],
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the merged model. All ranks call it; rank 0 writes.

    Args:
        owner: the model, sharded or not, with or without LoRA.
        base: folder of the base model, for its config and processor files.
        out: the folder; it appears whole or not at all.
        facts: for the manifest: task, template, pixel limits, step.
        dtype: of the written weights; None keeps what they are trained in.

    Raises:
        UserError: LoRA layers exist and all of them are zero: merging would change nothing.
    """
    part = out.with_name(f".{out.name}.part")
    if ranks.is_main:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        _copy_processor(base, part, owner)
    tensors = merged_tensors(owner, dtype)
    _write_shards(tensors, part, owner.hf, ranks)
    if ranks.is_main:
        manifest = {"litchi": __version__, "torch": torch.__version__, **facts}
        (part / MANIFEST).write_text(json.dumps(manifest, ensure_ascii=False, indent=1), encoding="utf-8")
        shutil.rmtree(out, ignore_errors=True)
        part.replace(out)
    barrier()


def merged_tensors(owner: LitchiModel, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Names of the base model and whole tensors on the CPU, LoRA folded in, a tied head once. Collective when sharded."""
    hf = owner.hf
    lora = {name for name, m in hf.named_modules() if hasattr(m, "lora_A")}
    changed = not lora
    seen: set[int] = set()
    for name, parameter in hf.named_parameters():
        if ".lora_" in name or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        value = whole(parameter)
        layer = name.removesuffix(".base_layer.weight")
        if layer in lora and name.endswith(".base_layer.weight"):
            module = hf.get_submodule(layer)
            a, b = (whole(getattr(module, f"lora_{x}")[ADAPTER].weight).float() for x in "AB")  # type: ignore[index]
            delta = (b @ a) * module.scaling[ADAPTER]  # type: ignore[index]
            changed |= bool(delta.any())
            value = (value.float() + delta).to(value.dtype)
        yield name.replace(".base_layer", ""), value if dtype is None else value.to(dtype)
    if not changed:
        raise UserError(
            "the merged model is the base model",
            why="every LoRA B matrix is zero: nothing was learnt",
            remedy="Train longer, or export the base itself",
        )


def whole(tensor: Tensor) -> Tensor:
    """The full tensor on the CPU; gathered when it is sharded (collective)."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu()


def _write_shards(tensors: Iterator[tuple[str, Tensor]], part: Path, hf: nn.Module, ranks: Ranks) -> None:
    """Write tensors as they come, in files of SHARD_BYTES, under the hub's key names."""
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
        for key, tensor in _hub_names(hf, {name: value}).items():
            shard[key] = tensor.contiguous()
            held += tensor.numel() * tensor.element_size()
            total += tensor.numel() * tensor.element_size()
        if held >= SHARD_BYTES:
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


def _copy_processor(base: Path, part: Path, owner: LitchiModel) -> None:
    """The base's config and processor files, with the pixel limits this model was trained with."""
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    (part / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    for name in PROCESSOR_FILES:
        if (base / name).is_file():
            shutil.copyfile(base / name, part / name)
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (part / name).is_file():
            body = json.loads((part / name).read_text(encoding="utf-8"))
            _set_pixels(body if name.startswith("pre") else body.get("image_processor", {}), owner)
            (part / name).write_text(json.dumps(body, indent=1), encoding="utf-8")


def _set_pixels(picture: dict[str, Any], owner: LitchiModel) -> None:
    low, high = owner.spec.min_pixels, owner.spec.max_pixels
    if "size" in picture:
        picture["size"] = {"shortest_edge": low, "longest_edge": high}
    if "min_pixels" in picture or "size" not in picture:
        picture["min_pixels"], picture["max_pixels"] = low, high


def export_adapter(owner: LitchiModel, out: Path, ranks: Ranks, lora: Any, base: str) -> bool:
    """Write a PEFT adapter folder when the model has LoRA layers; returns whether it has. All ranks call it."""
    from safetensors.torch import save_file

    if not uses_lora(owner.hf):
        return False
    state = {n: whole(p) for n, p in owner.hf.named_parameters() if ".lora_" in n}
    if ranks.is_main:
        part = out.with_name(f".{out.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        body = {k: v.contiguous() for k, v in adapter_state(state).items()}
        save_file(body, part / "adapter_model.safetensors", metadata={"format": "pt"})
        config = adapter_config(owner.hf, owner.family, lora, base)
        (part / "adapter_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        shutil.rmtree(out, ignore_errors=True)
        part.replace(out)
    barrier()
    return True
