"""A random Qwen2.5-VL of 1.7 million parameters beside a tokenizer: where the packaged base begins.

    python recipes/tiny_base/init_model.py --processor DIR --out DIR

DIR of --processor is what tokenizer.py wrote. Small heads and a strong embedding start (std 0.12, output projections
scaled down) are what made a model of this size learn in minutes.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoTokenizer, GenerationConfig, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

HIDDEN, LAYERS, HEADS = 128, 4, 8
EMBEDDING_STD, INIT_STD, OUTPUT_SCALE = 0.12, 0.05, 0.4


def build_config(processor: Path) -> Qwen2_5_VLConfig:
    """The shape of the model: 4 language layers, 2 vision layers, tied head."""
    tokenizer = AutoTokenizer.from_pretrained(processor)
    ids = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": 3 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
        "max_position_embeddings": 2048,
        "initializer_range": INIT_STD,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        "bos_token_id": ids("<|endoftext|>"),
        "eos_token_id": ids("<|im_end|>"),
        "pad_token_id": ids("<|endoftext|>"),
    }
    vision = {
        "depth": 2,
        "hidden_size": HIDDEN,
        "num_heads": 4,
        "intermediate_size": 2 * HIDDEN,
        "out_hidden_size": HIDDEN,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [1],
        "initializer_range": INIT_STD,
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=True,
    )


@torch.no_grad()
def build_model(config: Qwen2_5_VLConfig, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """Random weights from a seed."""
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.mul_(OUTPUT_SCALE)
        elif name.endswith("embed_tokens.weight"):
            parameter.mul_(EMBEDDING_STD / INIT_STD)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processor", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shutil.copytree(args.processor, args.out, dirs_exist_ok=True)
    config = build_config(args.processor)
    model = build_model(config, args.seed)
    text = config.text_config
    model.generation_config = GenerationConfig(eos_token_id=text.eos_token_id, pad_token_id=text.pad_token_id)
    model.save_pretrained(args.out)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters in {args.out}")


if __name__ == "__main__":
    main()
