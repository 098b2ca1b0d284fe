"""Scores of 100 text documents for a picture query, as `litchi score` computes them and as transformers does with
padded pairs, 16 at a time: `OMP_NUM_THREADS=1 python benchmarks/scoring.py [REPEATS]`.

Both read the same rows from a file, decode, tokenise and compute in one process, in turn; documents per CPU second,
median of the repeats, and the largest difference of a score.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

from litchi.data.templates import TEMPLATES
from litchi.dist import start_ranks
from litchi.evaluate.run import score_set
from litchi.model.build import builtin_folder
from litchi.train.measure import _prepare, open_set
from litchi.train.target import open_target
from litchi.train.watch import how_to_measure

PROMPT = TEMPLATES["lychee"]
QUERIES, DOCUMENTS, PAIRS, SIDES = 4, 100, 16, (280, 224)
PIXELS = 3136, 200_704
WORDS = ("red", "blue", "striped", "silk", "cotton", "dress", "mug", "handle", "lid", "summer", "small", "round")


def write_rows(folder: Path, queries: int) -> Path:
    draw = random.Random(0)
    rows = []
    for n in range(queries):
        Image.effect_noise(SIDES, 60 + n).convert("RGB").save(folder / f"{n}.png")
        texts = [" ".join(draw.choices(WORDS, k=draw.randint(6, 24))) for _ in range(DOCUMENTS)]
        rows.append({"query": {"text": "the same", "image": f"{n}.png"}, "pos_doc": texts[0], "neg_docs": texts[1:]})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@torch.inference_mode()
def padded(model, processor, folder: Path, row: dict) -> list[float]:
    """Scores of a row's pairs by padded forwards."""
    yes, no = (processor.tokenizer.convert_tokens_to_ids(word) for word in (PROMPT.yes, PROMPT.no))
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    texts = [
        PROMPT.text.format(instruction=PROMPT.instruction, query=picture + row["query"]["text"], document=document)
        for document in (row["pos_doc"], *row["neg_docs"])
    ]
    image = Image.open(folder / row["query"]["image"]).convert("RGB")
    scores: list[float] = []
    for at in range(0, len(texts), PAIRS):
        part = texts[at : at + PAIRS]
        inputs = processor(
            text=part, images=[image] * len(part), padding=True, padding_side="left", return_tensors="pt"
        )
        logits = model(**inputs, logits_to_keep=1).logits[:, -1].float()
        scores += (logits[:, yes] - logits[:, no]).tolist()
    return scores


def main(repeats: int) -> None:
    torch.set_num_threads(1)
    ranks = start_ranks()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = write_rows(folder, QUERIES)
        target, config = _prepare(
            "builtin:tiny", str(rows), [f"data.pixels={{min: {PIXELS[0]}, max: {PIXELS[1]}}}"], "rerank"
        )
        wrapped = open_target(target, config, ranks)
        how = how_to_measure(config, ranks.device)
        processor = AutoProcessor.from_pretrained(builtin_folder(), min_pixels=PIXELS[0], max_pixels=PIXELS[1])
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(builtin_folder(), dtype=torch.float32).eval()
        ours, theirs, apart = [], [], 0.0
        for _ in range(repeats):
            start = time.process_time()
            data = open_set(config, str(rows), ranks, require_labels=False)
            found = [values for _, _, values in score_set(wrapped, data, how).groups]
            middle = time.process_time()
            wanted = [padded(model, processor, folder, json.loads(row)) for row in rows.read_text().splitlines()]
            theirs.append(time.process_time() - middle)
            ours.append(middle - start)
            apart = max(abs(a - b) for f, w in zip(found, wanted, strict=True) for a, b in zip(f, w, strict=True))
    fast, slow = (QUERIES * DOCUMENTS / statistics.median(times) for times in (ours, theirs))
    print("\n| | documents per CPU second |\n|---|---|")
    print(f"| Litchi | {fast:,.0f} |\n| padded pairs, {PAIRS} at a time | {slow:,.0f} |")
    print(f"\n{fast / slow:.1f} times; scores differ by {apart:.1e} at most")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
