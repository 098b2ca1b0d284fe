"""Rounds a merged export with llmcompressor: a folder of weights and one of samples in, a folder of weights out.

Run by an interpreter that has llmcompressor and not Litchi, for their pins exclude each other:
`PYTHON llmcompressor_job.py MODEL SAMPLES OUT METHOD GROUP`. Each sample is a safetensors file with the arguments of
the model's forward: `inputs_embeds` [1, T, hidden], pictures in their places, and `position_ids` [3, 1, T].
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(model: str, samples: str, out: str, method: str, group: str) -> None:
    """Round all linears outside the vision tower and the head to 4 bits.

    Args:
        method: "gptq" or "awq".
        group: weights that share a scale.
    """
    import torch
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.awq import AWQModifier
    from llmcompressor.modifiers.quantization import GPTQModifier
    from safetensors.torch import load_file
    from torch.utils.data import DataLoader
    from transformers import AutoModelForImageTextToText

    if not torch.cuda.is_available():  # AWQ of llmcompressor 0.14 pins memory, which there is no driver for
        torch.Tensor.pin_memory = lambda self, *_: self
    weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=int(group))
    recipe = {"gptq": GPTQModifier, "awq": AWQModifier}[method](
        config_groups={"group_0": QuantizationScheme(targets=["Linear"], weights=weights)},
        ignore=["lm_head", "re:.*visual.*"],
    )
    data = [load_file(path) for path in sorted(Path(samples).iterdir())]
    hf = AutoModelForImageTextToText.from_pretrained(model, dtype="auto", local_files_only=True)
    loader = DataLoader(data, batch_size=None)
    oneshot(model=hf, dataset=loader, recipe=recipe, num_calibration_samples=len(data))
    hf.save_pretrained(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
