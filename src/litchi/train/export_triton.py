"""A model repository for Triton: TARGET -> OUT/litchi/{config.pbtxt, 1/model.py, 1/export/}, for its Python backend.

The export inside is a merged one, compared as any other; the code is `serve/triton_model.py`.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from litchi.dist import Ranks, barrier
from litchi.errors import UsageError
from litchi.train.export_target import export_target
from litchi.train.target import find_target

NAME = "litchi"
ROWS, WAIT_US = 64, 5000  # of a batch; how long its first request may wait for others


def write_config(*, rows: int = ROWS, wait_us: int = WAIT_US) -> str:
    """config.pbtxt: text in, a score out, batches gathered by Triton, an instance on each GPU or on the CPU."""
    sides = ",\n".join(f'  {{ name: "{name}", data_type: TYPE_STRING, dims: [ 1 ] }}' for name in ("QUERY", "DOCUMENT"))
    return f"""name: "{NAME}"
backend: "python"
max_batch_size: {rows}
input [
{sides}
]
output [
  {{ name: "SCORE", data_type: TYPE_FP32, dims: [ 1 ] }}
]
dynamic_batching {{ max_queue_delay_microseconds: {wait_us} }}
instance_group [ {{ count: 1, kind: KIND_AUTO }} ]
"""


def export_triton(
    name: str, out: Path, overrides: Sequence[str], ranks: Ranks, *, data: str | None = None, limit: float | None = None
) -> dict[str, Any] | None:
    """Write the repository. All ranks call it.

    Returns:
        The figures of the export inside, or None where it was not compared.

    Raises:
        UserError: as `export_target`; or the model gives no scores.
    """
    if out.exists():
        raise UsageError(f"{out} exists", why="nothing is overwritten", remedy="Remove it or name another folder")
    if (find_target(name).manifest or {}).get("task") == "chat":
        raise UsageError(
            "a Triton repository of a chat model", where=name, why="this one gives scores",
            remedy="Export it merged and give it to Triton's vLLM backend",
        )  # fmt: skip
    draft = out.with_name(f".{out.name}.repository")
    inside = draft / NAME / "1"
    if ranks.is_main:
        shutil.rmtree(draft, ignore_errors=True)
        inside.mkdir(parents=True)
    barrier()
    figures = export_target(name, inside / "export", overrides, ranks, data=data, limit=limit)
    if ranks.is_main:
        (inside / "model.py").write_text(
            (resources.files("litchi") / "serve" / "triton_model.py").read_text(encoding="utf-8"), encoding="utf-8"
        )
        (draft / NAME / "config.pbtxt").write_text(write_config(), encoding="utf-8")
        (draft / "README.md").write_text(README, encoding="utf-8")
        draft.replace(out)
    barrier()
    return figures


README = f"""# A model repository for Triton

    tritonserver --model-repository .

Triton's Python needs `litchi[serve]` (or an execution environment made with conda-pack, named in `config.pbtxt`).
Rows of `QUERY` and `DOCUMENT` are text, or JSON of an object with `text` and `image` (a data URL); `SCORE` is
logit(yes) - logit(no). Triton gathers up to {ROWS} rows in {WAIT_US / 1000:g} ms into a batch. `config.pbtxt` follows
Triton's schema; the server itself was **not run here**.
"""
