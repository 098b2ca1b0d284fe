"""The forms an export is written in besides merged weights: int8, int4, nf4, and a classifier with one row.

Rounded are the linears of the language layers. The vision tower, the merger, the embedding and the head stay as they
are: they are small, and what they lose shows most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn

from litchi.errors import UsageError
from litchi.model.compressed import pack_int4, pack_int8, pack_nf4
from litchi.model.family import Family, part
from litchi.model.forward import LitchiModel
from litchi.model.weights import SCORE
from litchi.train.export import Form, as_it_is

Format = Literal["merged", "int8", "int4", "int4-gptq", "int4-awq", "nf4", "score", "onnx-vision"]
CALIBRATED = {"int4-gptq": "gptq", "int4-awq": "awq"}  # by these methods
GROUPS = (128, 64, 32)  # weights that share a scale of int4: what engines have kernels for
# modules by both layouts of names, that of transformers and the older one of the hub and of vLLM
LEFT_ALONE = ("lm_head", "language_model.lm_head", r"re:visual\..*", r"re:model\.visual\..*")


def make_form(form: Format, owner: LitchiModel, yes: str | None) -> Form | None:
    """How to write a model in a format; None: as it is. What is calibrated is written as it is, and then rounded.

    Args:
        yes: the word a reranker's score speaks for, of its template; None for chat.

    Raises:
        UsageError: a score head of a chat model, or int4 of layers that no group divides.
    """
    if form == "merged":
        return None
    if form in CALIBRATED:
        return Form(as_it_is, {})
    if form == "score":
        return _score_form(owner, yes)
    if form == "int8":
        return Form(_rounding(owner.family, pack_int8), {"quantization_config": _compressed_config("int-quantized", 8)})
    if form == "nf4":
        return Form(_rounding(owner.family, pack_nf4), {"quantization_config": _nf4_config(owner)})
    group = find_group(owner)
    config = _compressed_config("pack-quantized", 4, group)
    return Form(_rounding(owner.family, lambda weight: pack_int4(weight, group)), {"quantization_config": config})


def is_rounded(family: Family, name: str) -> bool:
    """Whether a parameter is the weight of a linear of the language layers."""
    path, _, kind = name.rpartition(".")
    inside = path.startswith(f"{family.language_layers}.")
    return kind == "weight" and inside and path.rpartition(".")[2] in family.language_linears


def _rounding(family: Family, pack: Callable[[Tensor], dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
    def encode(name: str, key: str, tensor: Tensor) -> dict[str, Tensor]:
        if not is_rounded(family, name):
            return {key: tensor}
        return {key.removesuffix("weight") + part: value for part, value in pack(tensor).items()}

    return encode


def find_group(owner: LitchiModel) -> int:
    """How many weights of a row share a scale in 4 bits: the most that divides every layer. UsageError: none does."""
    layers = part(owner.hf, owner.family.language_layers)
    linears = {n: m for n, m in layers.named_modules() if isinstance(m, nn.Linear) and ".lora_" not in n}
    widths = {module.in_features for module in linears.values()}
    group = next((g for g in GROUPS if all(width % g == 0 for width in widths)), None)
    if group is None:
        raise UsageError(
            "int4 needs layers whose inputs are cut into groups of 128, 64 or 32",
            why=f"theirs are {', '.join(map(str, sorted(widths)))} wide",
            remedy="Export as int8",
        )
    return group


def _compressed_config(form: str, bits: int, group: int | None = None) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False, "observer": "minmax"}
    weights |= {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    scheme = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs if group is None else None,
        "output_activations": None,
        "format": form,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": list(LEFT_ALONE),
        "kv_cache_scheme": None,
    }


def _nf4_config(owner: LitchiModel) -> dict[str, Any]:
    held = part(owner.hf, owner.family.embedding).weight.dtype
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": str(held).removeprefix("torch."),
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": ["lm_head", "visual", "model.visual"],
    }


def _score_form(owner: LitchiModel, yes: str | None) -> Form:
    if yes is None or owner.words is None:
        raise UsageError("a score head is made of yes and no", why="a chat model has no such words")
    family, (yes_id, no_id) = owner.family, owner.words
    tied = part(owner.hf, family.head).weight is part(owner.hf, family.embedding).weight

    def encode(name: str, key: str, tensor: Tensor) -> dict[str, Tensor]:
        rows = name == f"{family.embedding if tied else family.head}.weight"
        score = {SCORE: (tensor[yes_id].float() - tensor[no_id].float()).to(tensor.dtype)[None]} if rows else {}
        return score if name == f"{family.head}.weight" else {key: tensor, **score}

    kind = family.architecture.replace("ForConditionalGeneration", "ForSequenceClassification")
    labels = {"num_labels": 1, "id2label": {"0": yes}, "label2id": {yes: 0}}
    return Form(encode, {"architectures": [kind], **labels, "tie_word_embeddings": False})
