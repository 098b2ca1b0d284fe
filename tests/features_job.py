"""What the ranks of `test_features.py` do: train a few steps and say what came out and what was computed for it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from litchi.batch import pictures
from litchi.dist import Ranks
from litchi.model import forward
from litchi.model.features import TowerFeatures
from litchi.scale.selfcheck import run_job


class Counted:
    """Calls of the tower, pictures that were encoded for being kept, and files that were decoded."""

    def __init__(self) -> None:
        self.tower = self.encoded = self.decoded = 0
        self.real = forward.encode_pictures, TowerFeatures.run_tower, pictures.decode_image

    def __enter__(self) -> Counted:
        plain, kept, decode = self.real
        pictures.recent.clear()

        def encode_pictures(*given, **named):
            self.tower += 1
            return plain(*given, **named)

        def run_tower(features, owner, pixels, grids):
            self.tower += 1
            self.encoded += len(grids)
            return kept(features, owner, pixels, grids)

        def decode_image(*given, **named):
            self.decoded += 1
            return decode(*given, **named)

        forward.encode_pictures, TowerFeatures.run_tower = encode_pictures, run_tower
        pictures.decode_image = decode_image
        return self

    def __exit__(self, *_: object) -> None:
        forward.encode_pictures, TowerFeatures.run_tower, pictures.decode_image = self.real

    def taken(self) -> dict[str, int]:
        return {"tower": self.tower, "encoded": self.encoded, "decoded": self.decoded}


def run_all(ranks: Ranks, folder: str, jobs: dict[str, list[str]]) -> dict[str, Any]:
    """Run every job (name -> settings) in these processes, with a cache of its own for each name before a `#`."""
    out = {}
    for name, words in jobs.items():
        os.environ["LITCHI_CACHE"] = str(Path(folder) / "caches" / name.split("#")[0].replace(" ", "-"))
        with Counted() as counted:
            ran = run_job(ranks, words)
        out[name] = {"losses": ran.losses, "norms": ran.norms, "wrapper": ran.wrapper, **counted.taken()}
    return json.loads(json.dumps(out))
