"""A random model of 60 M parameters, a third of them for 32,768 tokens: large enough for its matrices to be what takes
the time. Shared by the measurements here; it has the tokenizer of a smaller model."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

MIDDLE = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 32768,
}  # fmt: skip
MIDDLE_VISION = {
    "depth": 6, "hidden_size": 384, "intermediate_size": 1152, "num_heads": 6, "out_hidden_size": 512,
    "fullatt_block_indexes": [2, 5],
}  # fmt: skip


def middle_config(tiny: Path) -> Qwen2_5_VLConfig:
    """The config of a small model with the middle one's sizes."""
    config = Qwen2_5_VLConfig.from_pretrained(tiny)
    for key, value in MIDDLE.items():
        setattr(config.text_config, key, value)
    config.text_config.layer_types = ["full_attention"] * MIDDLE["num_hidden_layers"]
    config.text_config.rope_parameters = {**config.text_config.rope_parameters, "mrope_section": [8, 12, 12]}
    for key, value in MIDDLE_VISION.items():
        setattr(config.vision_config, key, value)
    return config


def write_middle(tiny: Path, folder: Path, *, vocabulary: int | None = None) -> Path:
    """Save the model beside the tokenizer and the processor of a small one; 40 M with no more tokens than that has."""
    torch.manual_seed(0)
    shutil.copytree(tiny, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    config = middle_config(tiny)
    if vocabulary is not None:
        config.text_config.vocab_size = vocabulary
    Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder
