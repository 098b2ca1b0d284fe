"""Between the stages: scale the merger so that picture tokens are about as large as word embeddings.

    python recipes/tiny_base/scale_pictures.py --model DIR/words/export --rows DIR/data/words-validation.jsonl

Stage 1 leaves features many times larger than embeddings. In a residual stream that large nothing the language layers
add at a picture token counts, so a question that stands before the picture could not be answered there.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from litchi.data.media import decode_image, picture_patches
from litchi.model.build import load_model
from litchi.model.vision import encode_pictures
from litchi.types import Media

RATIO = 1.5  # root mean square of picture tokens over that of embeddings


def pictures_of(rows: Path, count: int) -> list[Media]:
    """The first pictures of a chat file."""
    found = []
    for line in rows.read_text(encoding="utf-8").splitlines()[:count]:
        parts = json.loads(line)["messages"][-2]["content"]
        found += [Media("image", path=str(rows.parent / p["image"])) for p in parts if p["type"] == "image"]
    return found


@torch.no_grad()
def measure_ratio(folder: Path, rows: Path) -> float:
    """Root mean square of the pictures' features over that of the embeddings."""
    loaded = load_model(folder, dtype=torch.float32)
    spec = loaded.processor.vision
    cut = [picture_patches(decode_image(m), spec=spec) for m in pictures_of(rows, 200)]
    pixels = torch.cat([torch.from_numpy(patches) for patches, _ in cut])
    tower = loaded.hf.get_submodule(loaded.family.vision)
    features = encode_pictures(tower, pixels, [grid for _, grid in cut], spec)
    words = loaded.hf.get_submodule(loaded.family.embedding).weight
    return float(features.pow(2).mean().sqrt() / words.pow(2).mean().sqrt())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    args = parser.parse_args()
    before = measure_ratio(args.model, args.rows)
    file = args.model / "model.safetensors"
    weights = load_file(file)
    last = [name for name in weights if "merger.mlp.2." in name]
    assert len(last) == 2, last
    save_file(
        {n: t * (RATIO / before) if n in last else t for n, t in weights.items()}, file, metadata={"format": "pt"}
    )
    print(f"pictures / words: {before:.2f}, now {measure_ratio(args.model, args.rows):.2f}")


if __name__ == "__main__":
    main()
