"""The model of a Triton repository, for its Python backend: rows of QUERY and DOCUMENT in, SCORE out.

This file is copied into the repository as `1/model.py`, beside the export; Triton's Python needs `litchi[serve]`.
A row is text, or JSON of an object with `text` and `image` (a data URL) as in `/v1/score`. Triton gathers requests
into batches; a row that cannot be scored fails its own request alone.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as backend  # type: ignore[import-not-found]  # Triton's own


class TritonPythonModel:
    """What Triton calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the export beside this file, on the GPU Triton gives."""
        if args.get("model_instance_kind") == "GPU":
            os.environ["LOCAL_RANK"] = args["model_instance_device_id"]
        from litchi.serve.pairs import PairScorer

        self.scorer = PairScorer(str(Path(args["model_repository"]) / args["model_version"] / "export"))

    def execute(self, requests: list[Any]) -> list[Any]:
        """A response for each request, all of whose rows are scored together."""
        sizes, pairs = [], []
        for request in requests:
            sides = [_read(request, name) for name in ("QUERY", "DOCUMENT")]
            sizes.append(len(sides[0]))
            pairs += list(zip(*sides, strict=True))
        found = iter(self.scorer.score(pairs))
        return [_respond([next(found) for _ in range(size)]) for size in sizes]


def _read(request: Any, name: str) -> list[Any]:
    rows = backend.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)
    texts = [row.decode() if isinstance(row, bytes) else str(row) for row in rows]
    return [_object(text) for text in texts]


def _object(text: str) -> Any:
    """Text that is a JSON object is one."""
    try:
        found = json.loads(text) if text.startswith("{") else text
    except ValueError:
        return text
    return found if isinstance(found, dict) else text


def _respond(scores: list[Any]) -> Any:
    for score in scores:
        if isinstance(score, Exception):
            return backend.InferenceResponse(output_tensors=[], error=backend.TritonError(str(score)))
    column = np.array(scores, np.float32).reshape(-1, 1)
    return backend.InferenceResponse(output_tensors=[backend.Tensor("SCORE", column)])
