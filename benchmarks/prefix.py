"""Whether computing a query once for all its documents ever loses: `OMP_NUM_THREADS=1 python benchmarks/prefix.py`.

CPU seconds of a rerank training step on groups of text, shared (a prefix, and a span for each document) and as
independent prompts, in turn on the same model, from groups with hardly anything to share to much.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from leaves import FAMILY, Shape, make_batch, make_model

from litchi.data.processor import load_processor
from litchi.model.build import builtin_folder
from litchi.model.forward import LitchiModel
from litchi.model.leaves import Leaves, change_leaves
from litchi.train.losses import bce
from litchi.types import Batch

GROUPS = ((8, 400, 2), (45, 400, 2), (45, 150, 3), (45, 60, 2), (45, 60, 3), (100, 100, 3), (100, 40, 8))


def step(model: LitchiModel, batch: Batch) -> float:
    start = time.process_time()
    model(batch).loss.backward()
    model.zero_grad(set_to_none=True)
    return time.process_time() - start


def main() -> None:
    torch.set_num_threads(1)
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    spec = load_processor(builtin_folder()).vision
    print(
        "| model | prefix, document, documents | token ratio | shared, ms | independent / shared |\n"
        "|---|---|---|---|---|"
    )
    for name, groups in (("tiny", 4), ("middle", 1)):
        hf = make_model(name)
        change_leaves(hf, FAMILY, Leaves())
        model = LitchiModel(hf, FAMILY, spec, words=(3, 4), score_loss=bce)
        for prefix, document, count in GROUPS:
            lengths = [document + 3 * n for n in range(count)]  # equal ones would be stacked, which real ones are not
            together = [Shape(prefix, tuple(lengths), False)] * groups
            apart = [Shape(prefix + n, (), False) for n in lengths] * groups
            shared = make_batch(together, 800, spec, 0, chat=False)
            alone = make_batch(apart, 800, spec, 0, chat=False)
            times = [(step(model, shared), step(model, alone)) for _ in range(steps)][1:]
            ratio = statistics.median(b / a for a, b in times)
            middle = 1000 * statistics.median(a for a, _ in times)
            print(
                f"| {name} | {prefix}, {document}, {count} | {alone.tokens / shared.tokens:.2f} | {middle:.0f} "
                f"| {ratio:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
