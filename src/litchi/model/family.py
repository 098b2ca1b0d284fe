"""The one file with the model's names: which module is which part, and what the family's words are.

To add a member of the family: one entry in `FAMILIES` and one in `small_config` of `tests/test_forward.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from litchi.errors import UsageError

PARTS = ("vision", "merger", "language", "head")


@dataclass(frozen=True)
class Cut:
    """A module of a layer as tensor parallel cuts it; the names are those of its linears."""

    module: str
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    fused: str | None = None


Cuts = tuple[Cut, ...]


@dataclass(frozen=True)
class Family:
    """Names of a model class of transformers. Paths are those of `named_modules()`.

    Args:
        model_type: `config.model_type`, the only thing a class is chosen by.
        architecture: the class in transformers.
        windowed: whether the vision tower attends in windows.
        language_linears, vision_linears, merger_linears: the linear layers LoRA may sit on, by last name.
        roles: (class in transformers, what it is), of the modules `model/leaves.py` has faster forwards for.
    """

    model_type: str
    architecture: str
    windowed: bool
    vision: str = "model.visual"
    merger: str = "model.visual.merger"
    language: str = "model.language_model"
    head: str = "lm_head"
    embedding: str = "model.language_model.embed_tokens"
    norm: str = "model.language_model.norm"
    language_layers: str = "model.language_model.layers"
    vision_blocks: str = "model.visual.blocks"
    patch_embedding: str = "model.visual.patch_embed"
    language_linears: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    vision_linears: tuple[str, ...] = ("qkv", "proj", "gate_proj", "up_proj", "down_proj")
    merger_linears: tuple[str, ...] = ("0", "2")
    # how tensor parallel cuts a layer: modules whose input every rank holds, in them linears cut by output features,
    # one that holds queries, keys and values of all heads in one (cut by heads), and linears cut by input features
    language_cuts: Cuts = (
        Cut("self_attn", columns=("q_proj", "k_proj", "v_proj"), rows=("o_proj",)),
        Cut("mlp", columns=("gate_proj", "up_proj"), rows=("down_proj",)),
    )
    vision_cuts: Cuts = (
        Cut("attn", fused="qkv", rows=("proj",)),
        Cut("mlp", columns=("gate_proj", "up_proj"), rows=("down_proj",)),
    )
    merger_cuts: Cuts = (Cut("mlp", columns=("0",), rows=("2",)),)
    roles: tuple[tuple[str, str], ...] = ()

    def part_of(self, name: str) -> str:
        """The part a parameter or module belongs to. A tied head has no parameter of its own: it is language."""
        for part in ("merger", "vision", "language", "head"):  # the merger lies inside the vision tower
            path = getattr(self, part)
            if name == path or name.startswith(path + "."):
                return part
        raise ValueError(f"{name} belongs to no part of {self.model_type}")

    def linears(self, part: str) -> tuple[str, ...]:
        """Names of the linear layers of a part that LoRA may sit on."""
        return {
            "vision": self.vision_linears,
            "merger": self.merger_linears,
            "language": self.language_linears,
            "head": (self.head,),
        }[part]


FAMILIES = {
    "qwen2_5_vl": Family(
        model_type="qwen2_5_vl",
        architecture="Qwen2_5_VLForConditionalGeneration",
        windowed=True,
        roles=(
            ("Qwen2_5_VisionPatchEmbed", "patches"),
            ("Qwen2_5_VLVisionAttention", "vision_attention"),
            ("Qwen2_5_VLAttention", "attention"),
            ("Qwen2_5_VLRMSNorm", "norm"),
            ("Qwen2_5_VLMLP", "gate"),
            ("Qwen2MLP", "gate"),
        ),
    ),
    "qwen2_vl": Family(
        model_type="qwen2_vl",
        architecture="Qwen2VLForConditionalGeneration",
        windowed=False,
        vision_linears=("qkv", "proj", "fc1", "fc2"),
        vision_cuts=(Cut("attn", fused="qkv", rows=("proj",)), Cut("mlp", columns=("fc1",), rows=("fc2",))),
        roles=(
            ("PatchEmbed", "patches"),
            ("VisionAttention", "vision_attention"),
            ("Qwen2VLAttention", "attention"),
            ("Qwen2VLRMSNorm", "norm"),
            ("Qwen2MLP", "gate"),
        ),
    ),
}


def find_family(config: dict[str, Any], where: object) -> Family:
    """The family of a config.json. UsageError names the ones there are."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise UsageError(
            f"model_type is {kind!r}",
            where=where,
            why=f"Litchi trains {', '.join(FAMILIES)}",
            remedy="Give a Qwen2.5-VL or Qwen2-VL model (model.path)",
        )
    return FAMILIES[kind]


def part(model: nn.Module, path: str) -> nn.Module:
    """The submodule at a path of the family."""
    return model.get_submodule(path)


def has_part(model: nn.Module, path: str) -> bool:
    """Whether the submodule is here: a stage of a pipeline lacks some."""
    parent, _, name = path.rpartition(".")
    return getattr(model.get_submodule(parent), name) is not None
