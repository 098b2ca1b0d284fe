"""Exports in 4 bits that were rounded with regard to what the layers are given (GPTQ, AWQ).

A model and rows -> samples as its language layers get them; a merged folder and samples -> the folder in 4 bits, by
llmcompressor in an environment of its own (`llmcompressor_job.py`).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from litchi.batch.loader import make_batch
from litchi.dist import Ranks
from litchi.errors import MachineError, UsageError, UserError
from litchi.evaluate.run import EvalSet
from litchi.parallel.apply import Wrapped
from litchi.train.export_quant import CALIBRATED, LEFT_ALONE

SAMPLES = 128
JOB = Path(__file__).with_name("llmcompressor_job.py")
INSTALL = "Make one: python -m venv compressor; compressor/bin/pip install llmcompressor torchvision pillow"


def check_compressor(form: str, python: str | None, ranks: Ranks) -> str:
    """Refuse what cannot be calibrated before anything takes time; returns the interpreter.

    Raises:
        UsageError: no interpreter was named, or there are several ranks; MachineError: it has no llmcompressor.
    """
    if python is None:
        raise UsageError(
            f"{form} needs --compressor PYTHON", why="it is rounded by llmcompressor, in an environment of its own",
            remedy=f"{INSTALL}; then --compressor compressor/bin/python",
        )  # fmt: skip
    if ranks.world > 1:
        raise UsageError(f"{form} on {ranks.world} ranks", why="one process rounds it", remedy="Leave out --procs")
    try:
        done = subprocess.run([python, "-I", "-c", "import llmcompressor"], capture_output=True, text=True)
        failed = done.stderr.strip().splitlines()[-1:] if done.returncode else []
    except OSError as error:
        failed = [error.strerror or str(error)]
    if failed:
        raise MachineError(f"--compressor {python} cannot import llmcompressor", why=failed[0], remedy=INSTALL)
    return python


@torch.no_grad()
def write_samples(wrapped: Wrapped, data: EvalSet, folder: Path) -> int:
    """Write what the language layers get of rows drawn by a fixed seed, of rerank with one document each.

    Returns:
        How many there are.
    """
    draw = random.Random(0)
    rows = sorted(draw.sample(data.rows, min(SAMPLES, len(data.rows))))
    for number, row in enumerate(rows):
        documents = data.index.rows[row].documents
        batch = make_batch(data.corpus, [(row, (draw.choice(documents),) if documents else None)], None)
        with wrapped.compute():
            embedded = wrapped.owner.embed(batch)[None]
        sample = {"inputs_embeds": embedded.cpu().contiguous(), "position_ids": batch.positions[:, None].contiguous()}
        save_file(sample, folder / f"{number:04}.safetensors")
    return len(rows)


def calibrate(folder: Path, samples: Path, *, form: str, group: int, python: str) -> None:
    """Put the weights of a merged folder into 4 bits, in place.

    Args:
        group: weights that share a scale.

    Raises:
        UserError: llmcompressor failed; what it said stands on stderr.
    """
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".calibrated-") as place:
        out = Path(place) / "out"
        words: Sequence[str] = (str(folder), str(samples), str(out), CALIBRATED[form], str(group))
        # -I: neither what PYTHONPATH names nor the files beside the job are its modules
        done = subprocess.run(
            [python, "-I", str(JOB), *words], stdout=sys.stderr, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )
        if done.returncode:
            raise UserError(
                f"llmcompressor ended with status {done.returncode}", where=python, why="what it said stands above",
                remedy="Export as int4, which needs no data, or mend its environment",
            )  # fmt: skip
        for path in (*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")):
            path.unlink()
        for path in (*out.glob("*.safetensors"), *out.glob("*.safetensors.index.json")):
            shutil.move(path, folder / path.name)
        found = json.loads((out / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = found | {"ignore": list(LEFT_ALONE)}
    (folder / "config.json").write_text(json.dumps(config, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
