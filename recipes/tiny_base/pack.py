"""An export -> the packaged base: weights stored in bfloat16, which halves the download.

python recipes/tiny_base/pack.py --export DIR/chat/export --out src/litchi/builtin/tiny
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    shutil.copytree(args.export, args.out, ignore=shutil.ignore_patterns("litchi.json", "adapter"))
    weights = load_file(args.out / "model.safetensors")
    half = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    save_file(half, args.out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((args.out / "config.json").read_text(encoding="utf-8"))
    config["dtype"] = "bfloat16"
    (args.out / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
