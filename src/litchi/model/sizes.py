"""Shapes of the family's members, and what follows from them: parameters by part, and the sizes an axis may have.

config.json in, integers and texts out. All of it is pure and imports no torch, so that a layout is refused before
any weight is read. `format_table` is the table of docs/parallelism.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from litchi.errors import UsageError

AXES = ("dp_replicate", "dp_shard", "tp", "cp", "pp")


@dataclass(frozen=True)
class Member:
    """What differs between the members of Qwen2.5-VL."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    vision_intermediate: int
    tied: bool = False


MEMBERS = {
    "3b": Member(2048, 11008, 36, 16, 2, 151936, 3420, tied=True),
    "7b": Member(3584, 18944, 28, 28, 4, 152064, 3420),
    "32b": Member(5120, 27648, 64, 40, 8, 152064, 3456),
    "72b": Member(8192, 29568, 80, 64, 8, 152064, 3456),
}


def size_config(name: str) -> dict[str, Any]:
    """config.json of a member of Qwen2.5-VL: `3b`, `7b`, `32b` or `72b`."""
    if name not in MEMBERS:
        raise UsageError(f"model size {name!r}", why=f"one of {', '.join(MEMBERS)}")
    m = MEMBERS[name]
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "tie_word_embeddings": m.tied,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "text_config": {
            "model_type": "qwen2_5_vl_text",
            "hidden_size": m.hidden,
            "intermediate_size": m.intermediate,
            "num_hidden_layers": m.layers,
            "num_attention_heads": m.heads,
            "num_key_value_heads": m.kv_heads,
            "vocab_size": m.vocabulary,
            "max_position_embeddings": 128000,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": m.tied,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        "vision_config": {
            "model_type": "qwen2_5_vl_vision",
            "depth": 32,
            "hidden_size": 1280,
            "num_heads": 16,
            "intermediate_size": m.vision_intermediate,
            "out_hidden_size": m.hidden,
            "in_channels": 3,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
        },
    }


@dataclass(frozen=True)
class Shape:
    """The integers of a config.json, of the language model and of the vision tower.

    `window` is the side in pixels that most vision layers attend within; None: all attend to a whole frame, and the
    MLPs there have no gate (Qwen2-VL).
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    vision_depth: int
    vision_hidden: int
    vision_heads: int
    vision_intermediate: int
    patch: int
    temporal: int
    merge: int
    window: int | None

    @property
    def name(self) -> str:
        """The member's name where it is one, else what it looks like."""
        for name, m in MEMBERS.items():
            if (m.hidden, m.layers, m.heads, m.intermediate) == (
                self.hidden, self.layers, self.heads, self.intermediate
            ):  # fmt: skip
                return f"Qwen2.5-VL-{name.upper()}"
        return f"{self.layers} layers of {self.hidden}"


def read_shape(config: Mapping[str, Any]) -> Shape:
    """The shape of a config.json, of the form with `text_config` or of the flat one the hub still has."""
    text = config.get("text_config") or config
    vision = config["vision_config"]
    old = "embed_dim" in vision  # as Qwen2-VL has it: `hidden_size` is what the tower hands on
    width = vision["embed_dim"] if old else vision["hidden_size"]
    return Shape(
        hidden=text["hidden_size"],
        intermediate=text["intermediate_size"],
        layers=text["num_hidden_layers"],
        heads=text["num_attention_heads"],
        kv_heads=text["num_key_value_heads"],
        head_dim=text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"],
        vocabulary=text["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        vision_depth=vision["depth"],
        vision_hidden=width,
        vision_heads=vision["num_heads"],
        vision_intermediate=int(width * vision.get("mlp_ratio", 4)) if old else vision["intermediate_size"],
        patch=vision.get("patch_size", 14),
        temporal=vision.get("temporal_patch_size", 2),
        merge=vision.get("spatial_merge_size", 2),
        window=None if old else vision.get("window_size", 112),
    )


# -------------------------------------------------------------------------------------------------- parameters


def count_layer(shape: Shape) -> int:
    """Parameters of one decoder layer."""
    h, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = h * (q + 2 * kv) + (q + 2 * kv) + q * h  # q, k and v have biases, o has none
    return attention + 3 * h * shape.intermediate + 2 * h


def count_block(shape: Shape) -> int:
    """Parameters of one vision block of Qwen2.5-VL, every linear with a bias."""
    h, i = shape.vision_hidden, shape.vision_intermediate
    return h * 3 * h + 3 * h + h * h + h + 2 * (h * i + i) + i * h + h + 2 * h


def count_parameters(config: Mapping[str, Any]) -> dict[str, int]:
    """Parameters by part, of Qwen2.5-VL. A tied head is counted with the language part."""
    s = read_shape(config)
    merged = s.vision_hidden * s.merge**2
    return {
        "vision": 3 * s.temporal * s.patch**2 * s.vision_hidden + s.vision_depth * count_block(s),
        "merger": s.vision_hidden + merged * merged + merged + merged * s.hidden + s.hidden,
        "language": s.vocabulary * s.hidden + s.layers * count_layer(s) + s.hidden,
        "head": 0 if s.tied else s.vocabulary * s.hidden,
    }


# -------------------------------------------------------------------------------------------------------- axes


def _cut_by_tp(shape: Shape, vision_trains: bool) -> dict[str, int]:
    """What tensor parallel cuts, by the words of an error."""
    cut = {
        "{} attention heads": shape.heads,
        "{} key-value heads": shape.kv_heads,
        "an MLP of {}": shape.intermediate,
    }
    if vision_trains:
        cut |= {"{} vision heads": shape.vision_heads, "a vision MLP of {}": shape.vision_intermediate}
    return cut


def allowed_sizes(
    config: Mapping[str, Any], axis: str, *, tp: int = 1, vision_trains: bool = False, limit: int = 64
) -> list[int]:
    """Sizes an axis may have, up to a limit.

    Args:
        config: config.json.
        axis: one of AXES.
        tp: the size of the tensor axis, for `cp`: both divide the attention heads.
        vision_trains: whether the vision tower trains; tensor parallel cuts it then too.
        limit: the largest size of interest.
    """
    if axis not in AXES:
        raise ValueError(f"{axis} is no axis: {', '.join(AXES)}")
    shape = read_shape(config)
    sizes = range(1, limit + 1)
    if axis == "tp":
        cut = _cut_by_tp(shape, vision_trains).values()
        return [n for n in sizes if all(whole % n == 0 for whole in cut)]
    if axis == "cp":  # key-value heads that cannot be divided are repeated: the queries' heads are the only bound
        return [n for n in sizes if shape.heads % (tp * n) == 0]
    return [n for n in sizes if n <= shape.layers] if axis == "pp" else list(sizes)


def check_axes(
    config: Mapping[str, Any], *, tp: int = 1, cp: int = 1, pp: int = 1, vision_trains: bool = False
) -> None:
    """Refuse what the model cannot be cut in.

    Raises:
        UsageError: with what cannot be cut, the model, and the sizes that can be taken.
    """
    shape = read_shape(config)

    def refuse(axis: str, size: int, what: str) -> None:
        sizes = allowed_sizes(config, axis, tp=tp, vision_trains=vision_trains, limit=max(64, size))
        shown = f"1 to {shape.layers}" if axis == "pp" else ", ".join(map(str, sizes))
        raise UsageError(
            f"parallel.{axis}={size}: {what}",
            where=shape.name,
            why=f"allowed {'is' if len(sizes) == 1 else 'are'} {shown}",
            remedy=f"Choose another parallel.{axis}, or shard the weights over more data ranks (parallel.dp_shard)",
        )

    uneven = [text.format(f"{n:,}") for text, n in _cut_by_tp(shape, vision_trains).items() if n % tp]
    if uneven:
        refuse("tp", tp, f"{', '.join(uneven)} cannot be cut in {tp}")
    if shape.heads % (tp * cp):
        left = f"{shape.heads} attention heads" if tp == 1 else f"{shape.heads // tp} attention heads left by tp={tp}"
        refuse("cp", cp, f"{left} cannot be cut in {cp}")
    if pp > shape.layers:
        refuse("pp", pp, f"{shape.layers} layers are fewer than {pp} stages")


def format_table(names: Sequence[str] = tuple(MEMBERS)) -> str:
    """Markdown table of the sizes each member allows. The tower adds a column because it is cut where it trains."""
    head = (
        "| model | attention heads | key-value heads | layers | `tp` | `tp`, vision trains | `cp` at `tp` 1 | "
        "`tp` x `cp` divides | `pp` | `dp_replicate`, `dp_shard` |"
    )
    lines = [head, "|" + "---|" * 10]
    for name in names:
        config = size_config(name)
        s = read_shape(config)
        frozen, trained, cp = (
            ", ".join(map(str, allowed_sizes(config, axis, vision_trains=trains)))
            for axis, trains in (("tp", False), ("tp", True), ("cp", False))
        )
        lines.append(
            f"| {name.upper()} | {s.heads} | {s.kv_heads} | {s.layers} | {frozen} | {trained} | {cp} | {s.heads} | "
            f"1 to {s.layers} | any |"
        )
    return "\n".join(lines) + "\n"
