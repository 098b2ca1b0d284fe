"""Stage 1 of the packaged base: the vision tower learns to point at words.

    python recipes/tiny_base/align.py --model DIR/init --out DIR/aligned

The mean of a picture's tokens is compared, by cosine, with the mean embedding of each word for its item, colour and
pattern ("red", " red" and the Chinese word); tower, merger and embeddings learn to tell them apart. So pictures and
words share a space before the language layers start. Trained through a language model of this size instead, pictures
become a code of their own, 30 times larger than embeddings, and comparing them with a query is learnt far more slowly.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from litchi.data.media import picture_patches
from litchi.model.build import Loaded, load_model
from litchi.model.family import part
from litchi.model.vision import encode_pictures
from litchi.prepare.catalogue import draw, split
from litchi.prepare.catalogue_text import CHINESE, VALUES

BATCH, DRAWINGS, RATE, TEMPERATURE = 192, 50, 1.5e-3, 14.0
PICTURE_SIZE = 1.5  # root mean square of picture tokens over that of embeddings, when the stage ends


def draw_pictures(spec, drawings: int) -> tuple[Tensor, Tensor, tuple[int, int, int]]:
    """All training products, several drawings each: patches uint8 [n, P, 588], labels [n, 3], grid of each."""
    patches, labels, grid = [], [], (1, 1, 1)
    for product in split().train:
        for seed in range(drawings):
            cut, grid = picture_patches(np.asarray(draw(product, seed)), spec=spec)
            patches.append(torch.from_numpy(cut))
            labels.append([values.index(v) for values, v in zip(VALUES, product, strict=True)])
    return torch.stack(patches), torch.tensor(labels), grid


def word_weights(loaded: Loaded) -> list[tuple[int, Tensor]]:
    """(attribute, matrix [values, vocabulary] that averages a word's token embeddings), in three spellings."""
    vocabulary = part(loaded.hf, loaded.family.embedding).weight.shape[0]
    out = []
    for attribute, values in enumerate(VALUES):
        for spell in (lambda word: word, lambda word: f" {word}", lambda word: CHINESE[word]):
            matrix = torch.zeros(len(values), vocabulary)
            for row, value in enumerate(values):
                ids = loaded.processor.encode(spell(value))
                for token in ids:
                    matrix[row, token] += 1 / len(ids)
            out.append((attribute, matrix))
    return out


def align(loaded: Loaded, steps: int, seed: int) -> None:
    """Train tower, merger and embeddings in place."""
    hf, spec = loaded.hf, loaded.processor.vision
    tower, embedding = part(hf, loaded.family.vision), part(hf, loaded.family.embedding)
    tower.requires_grad_(True)
    embedding.requires_grad_(True)
    pixels, labels, grid = draw_pictures(spec, DRAWINGS)
    words = word_weights(loaded)
    groups = [
        {"params": list(tower.parameters()), "share": 1.0, "weight_decay": 0.05},
        {"params": [embedding.weight], "share": 0.3, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.98))
    generator = torch.Generator().manual_seed(seed)
    for step in range(1, steps + 1):
        rate = RATE * min(1.0, step / 50) * 0.5 * (1 + np.cos(np.pi * (step - 1) / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate * group["share"]
        pick = torch.randint(len(pixels), (BATCH,), generator=generator)
        features = encode_pictures(tower, pixels[pick].flatten(0, 1), [grid] * BATCH, spec)
        pictures = F.normalize(features.view(BATCH, -1, features.shape[-1]).mean(1), dim=-1)
        losses = []
        for attribute, matrix in words:
            logits = TEMPERATURE * pictures @ F.normalize(matrix @ embedding.weight, dim=-1).T
            losses.append(F.cross_entropy(logits, labels[pick, attribute]))
        loss = (2 * sum(losses[:3]) + sum(losses[3:])) / 3  # items are the hardest
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(tower.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(step, *(f"{float(x):.3f}" for x in losses), flush=True)
    with torch.no_grad():
        size = embedding.weight.pow(2).mean().sqrt() / features.pow(2).mean().sqrt() * PICTURE_SIZE
        last = part(hf, loaded.family.merger).mlp[2]
        last.weight.mul_(size)
        last.bias.mul_(size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    loaded = load_model(args.model, dtype=torch.float32)
    align(loaded, args.steps, args.seed)
    shutil.copytree(args.model, args.out, dirs_exist_ok=True)
    loaded.hf.save_pretrained(args.out)


if __name__ == "__main__":
    main()
