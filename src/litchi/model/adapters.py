"""What trains: each part frozen, full or LoRA, by module path; and adapters as PEFT writes them.

LoRA is injected by path per part, because a list of suffixes also hits the vision tower. Its tensors are drawn by
seed and name, so that a start is the same in every layout. `import peft` is slow, so it happens only where an adapter
is.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from litchi.errors import UsageError
from litchi.model.build import Loaded
from litchi.model.dora import MAGNITUDE, add_magnitudes, first_magnitude
from litchi.model.family import PARTS, Family
from litchi.model.precision import widen
from litchi.model.tokens import ROWS, is_new_row
from litchi.model.weights import (
    Slices,
    fill_parameters,
    is_adapter_tensor,
    load_weights,
    plain_name,
    read_header,
)

if TYPE_CHECKING:
    from litchi.config import Lora, Trainable

ADAPTER = "default"  # PEFT's name of the only adapter
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def apply_trainable(loaded: Loaded, trainable: Trainable) -> dict[str, str]:
    """Set what trains, in place. Returns part -> mode, as it came out.

    Raises:
        UsageError: LoRA on a tied head, nothing trainable, or a target name that matches no linear layer.
    """
    if not loaded.hf.trains:
        raise UsageError(
            "this export does not train",
            where=loaded.folder,
            why="its weights were rounded, or its head is one row",
            remedy="Train from the merged export",
        )
    modes = {name: getattr(trainable, name).mode for name in PARTS}
    if loaded.tied and modes["head"] == "lora":
        raise UsageError(
            "trainable.head=lora",
            why="this model's head is its embedding, and a LoRA on it cannot be merged",
            remedy="Leave trainable.head at frozen",
        )
    if loaded.tied and modes["head"] == "full" and modes["language"] != "full":
        raise UsageError(
            "trainable.head=full",
            why="this model's head is its embedding, which belongs to the language part",
            remedy="Set trainable.language=full too, or trainable.head=frozen",
        )
    if all(mode == "frozen" for mode in modes.values()):
        raise UsageError("every part is frozen", why="nothing would be learnt", remedy="Set trainable.language=lora")
    saved = [path for name, path in _savable(loaded) if modes[name] == "full"]
    loaded.hf.saved_modules = tuple(dict.fromkeys((*saved_modules(loaded.hf), *saved)))
    lora_parts = [name for name in PARTS if modes[name] == "lora"]
    if uses_lora(loaded.hf):
        _go_on(loaded, lora_parts)
    elif lora_parts:
        add_lora(loaded, lora_parts, trainable.lora)
    for name, parameter in loaded.hf.named_parameters():
        mode = modes[loaded.family.part_of(plain_name(name))]
        parameter.requires_grad_(is_adapter_tensor(name) if mode == "lora" else mode == "full")
    return modes


def _savable(loaded: Loaded) -> list[tuple[str, str]]:
    """Parts that an adapter may hold whole, as PEFT's `modules_to_save`, with their paths: those that are one module
    and small beside the model."""
    family = loaded.family
    return [("merger", family.merger), *([] if loaded.tied else [("head", family.head)])]


def saved_modules(hf: nn.Module) -> tuple[str, ...]:
    """Paths of modules that an adapter holds whole, beside its LoRA layers."""
    return getattr(hf, "saved_modules", ())


def _go_on(loaded: Loaded, lora_parts: list[str]) -> None:
    """Check that an adapter that is already there (model.adapter) has layers in just the parts that train as LoRA."""
    there = {loaded.family.part_of(plain_name(n)) for n, _ in loaded.hf.named_parameters() if is_adapter_tensor(n)}
    odd = sorted(there ^ set(lora_parts))
    if odd:
        have = ", ".join(sorted(there))
        raise UsageError(
            f"trainable.{odd[0]} is {'not ' if odd[0] in there else ''}lora",
            why=f"the adapter that training goes on from (model.adapter) has its layers in: {have}",
            remedy="Train these parts as lora and no other, or export the adapter and start from the merged model",
        )


def add_lora(loaded: Loaded, parts: list[str], lora: Lora) -> None:
    """Inject LoRA layers into the linears of some parts, in place.

    They have no values where the base has none yet (`fill_lora`); else they are drawn by torch's global seed.
    """
    from peft import LoraConfig

    targets = [name for p in parts for name in lora_targets(loaded.hf, loaded.family, p, lora.targets)]
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        use_rslora=lora.variant == "rslora",
        use_dora=lora.variant == "dora",
        target_modules="|".join(re.escape(t) for t in targets),  # a regular expression over whole paths
    )
    _inject(config, loaded.hf)
    device = _of_base(loaded.hf).device
    if device.type != "meta":
        fill_lora(loaded.hf, torch.initial_seed(), device)


def _inject(config: Any, hf: nn.Module) -> None:
    """Layers without values: what PEFT draws depends on the order of modules, and `fill_lora` does not."""
    from peft import inject_adapter_in_model

    dora, config.use_dora = config.use_dora, False  # the layers are ours
    inject_adapter_in_model(config, hf, ADAPTER, low_cpu_mem_usage=True)
    config.use_dora = hf.peft_config[ADAPTER].use_dora = dora  # type: ignore[union-attr,index]
    if dora:
        add_magnitudes(hf, ADAPTER)
    wide = widen(torch.empty(0, dtype=_of_base(hf).dtype)).dtype  # small and trained: fp32 beside a bf16 base
    for name, parameter in hf.named_parameters():
        if is_adapter_tensor(name):
            parameter.data = parameter.data.to(wide)


def _of_base(hf: nn.Module) -> nn.Parameter:
    """A parameter of the base, for its device and type."""
    return next(p for name, p in hf.named_parameters() if not is_adapter_tensor(name))


def fill_lora(hf: nn.Module, seed: int, device: torch.device) -> None:
    """Draw LoRA's A as PEFT does and set B to zero, in place; each rank takes its shards of one and the same draw.
    DoRA's magnitudes are those of the base, which has its values."""

    def read(name: str, part: Slices) -> Tensor:
        if MAGNITUDE in name:
            return first_magnitude(hf.get_submodule(name.split(MAGNITUDE)[0]), part)
        whole = torch.empty(shapes[name])
        if ".lora_B." in name:
            return whole[part].zero_()
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        draw = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=draw)
        return whole[part]

    shapes = {name: parameter.shape for name, parameter in hf.named_parameters()}
    fill_parameters(hf, device, read, is_adapter_tensor)


def fill_weights(hf: nn.Module, folder: Path, *, adapter: Path | None, seed: int, device: torch.device) -> None:
    """Give every parameter its value: the base's from its files, LoRA's from an adapter or drawn by the seed."""
    load_weights(hf, folder, device)
    if adapter is not None:
        fill_adapter(hf, adapter, device)
    else:
        fill_lora(hf, seed, device)


def lora_targets(hf: nn.Module, family: Family, name: str, wanted: tuple[str, ...] | None) -> list[str]:
    """Paths of the linear layers of a part that LoRA sits on. UsageError when a wanted name matches none."""
    names = family.linears(name) if wanted is None or name in ("merger", "head") else wanted
    found = [
        path
        for path, module in hf.named_modules()
        if isinstance(module, nn.Linear) and path.split(".")[-1] in names and family.part_of(path) == name
    ]
    missing = [n for n in names if not any(p.split(".")[-1] == n for p in found)] if wanted is not None else []
    if missing or not found:
        known = sorted(
            {p.split(".")[-1] for p, m in hf.named_modules() if isinstance(m, nn.Linear) and _in(family, p, name)}
        )
        raise UsageError(
            f"trainable.lora.targets has {', '.join(missing) or 'names'} that match no linear layer of the {name} part",
            why=f"its layers are {', '.join(known)}",
        )
    return found


def _in(family: Family, path: str, name: str) -> bool:
    return family.part_of(path) == name


def uses_lora(hf: nn.Module) -> bool:
    """Whether layers of an adapter are in place."""
    return any(is_adapter_tensor(name) for name, _ in hf.named_parameters())


# ------------------------------------------------------------------------------------------------- adapter folders


def adapter_state(state: Mapping[str, Tensor], saved: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Names of what an adapter holds as PEFT and vLLM expect them in adapter_model.safetensors."""
    return {_adapter_key(name): t for name, t in state.items() if in_adapter(name, saved)}


def in_adapter(name: str, saved: tuple[str, ...]) -> bool:
    """Whether a tensor is of LoRA, of new tokens, or of a module that is saved whole."""
    return is_adapter_tensor(name) or is_new_row(name) or name.startswith(tuple(f"{path}." for path in saved))


def _adapter_key(name: str) -> str:
    if is_new_row(name):
        name = name.replace(ROWS, "token_adapter.trainable_tokens_delta")
    if MAGNITUDE in name:  # of the time when it was no module
        name = name.removesuffix(".weight").removesuffix(f".{ADAPTER}")
    return f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"


def adapter_config(hf: nn.Module, names: Iterable[str], base: str) -> dict[str, Any]:
    """adapter_config.json as PEFT holds it, with explicit module paths: loaded elsewhere it hits the same layers.

    Args:
        names: of all LoRA tensors; a stage of a pipeline has some of the layers.
    """
    names = list(names)
    targets = sorted({name.split(".lora_")[0] for name in names if is_adapter_tensor(name)})
    config = hf.peft_config[ADAPTER].to_dict()  # type: ignore[union-attr,index,operator]
    tables = [name.split(".")[-2] for name in names if is_new_row(name)]
    if tables:
        ids = list(hf.new_tokens.ids.values())  # type: ignore[union-attr]
        config["trainable_token_indices"] = dict.fromkeys(tables, ids)
    config["modules_to_save"] = list(saved_modules(hf)) or None
    return {**config, "base_model_name_or_path": base, "target_modules": targets, "inference_mode": True}


def load_adapter(loaded: Loaded, folder: Path) -> None:
    """Put a PEFT adapter folder onto a model, in place; every key must find its place.

    Where the base has no values yet the adapter's come with them, by `fill_adapter`.

    Raises:
        UsageError: not an adapter folder, or missing or unexpected keys, with counts.
    """
    from peft import LoraConfig

    path = folder / ADAPTER_WEIGHTS
    if not path.is_file() or not (folder / "adapter_config.json").is_file():
        raise UsageError(
            "not an adapter folder", where=folder, why=f"adapter_config.json and {ADAPTER_WEIGHTS} are needed"
        )
    config = LoraConfig.from_pretrained(str(folder))
    config.trainable_token_indices = None  # these rows are there already, by the words of model.new_tokens
    kept, config.modules_to_save = config.modules_to_save or (), None  # they need no module of PEFT's around them
    paths = [path for path, _ in loaded.hf.named_modules() if any(f".{path}".endswith(f".{name}") for name in kept)]
    loaded.hf.saved_modules = saved = tuple(paths)
    _inject(config, loaded.hf)
    want = {name: tuple(t.shape) for name, t in adapter_state(dict(loaded.hf.named_parameters()), saved).items()}
    have = read_header(path, folder)
    missing, unexpected = sorted(want.keys() - have.keys()), sorted(have.keys() - want.keys())
    unlike = sorted(n for n in want.keys() & have.keys() if want[n] != have[n])
    if missing or unexpected or unlike:
        raise UsageError(
            f"the adapter has {len(missing)} missing keys, {len(unexpected)} unexpected ones and {len(unlike)} of "
            f"another shape, where the model has {len(want)}; the first is {(missing + unexpected + unlike)[0]}",
            where=folder,
            why="an adapter that does not fit would leave the base model as it is",
            remedy="Give the model it was trained on (model.path)",
        )
    loaded.hf.requires_grad_(False)
    device = _of_base(loaded.hf).device
    if device.type != "meta":
        fill_adapter(loaded.hf, folder, device)


def fill_adapter(hf: nn.Module, folder: Path, device: torch.device) -> None:
    """Read the tensors of an adapter that `load_adapter` has put onto the model, in place; each rank its shards."""
    from safetensors import safe_open

    with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as opened:

        def read(name: str, part: Slices) -> Tensor:
            return opened.get_slice(_adapter_key(name))[part]

        fill_parameters(hf, device, read, lambda name: in_adapter(name, saved_modules(hf)))


def adapter_base(folder: Path) -> str | None:
    """The base an adapter folder names, or None when it is no adapter folder."""
    path = folder / "adapter_config.json"
    return json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"] if path.is_file() else None
