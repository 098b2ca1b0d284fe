"""What content-aware resolution reads that uniform scaling does not: `python benchmarks/small_print.py [--steps 300]`.

Codes of two digits in small type, each to be read by a model tuned from `builtin:tiny` under a budget of pixels, twice:
`pages` are 448 x 448 with large shapes, the code anywhere between them, and its place is given as a region; `photos`
are eight of 224 x 224 in a row, blank or of a shape, and one of a label with the code. With uniform scaling every
picture gets the same share of the budget; content-aware, regions and pictures with more detail get more of it. The
rows that are read are drawn anew, and no code of theirs was trained on more often than another.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from litchi.config import load_config
from litchi.dist import Ranks, start_ranks, stop_ranks
from litchi.train.loop import train_run
from litchi.train.measure import measure_one

LEAST = 784  # pixels of one token
BUDGET = {"pages": 12 * LEAST, "photos": 32 * LEAST}  # of a row
PHOTOS = 8
ASKED = "Which code?"


def draw_shapes(side: int, count: int, rng: random.Random) -> Image.Image:
    """A white picture with a few large shapes of one colour each."""
    picture = Image.new("RGB", (side, side), "white")
    pen = ImageDraw.Draw(picture)
    for _ in range(count):
        x, y = rng.randrange(side // 2), rng.randrange(side // 2)
        corners = (x, y, x + rng.randrange(side // 4, side // 2), y + rng.randrange(side // 4, side // 2))
        colour = tuple(rng.randrange(60, 230) for _ in range(3))
        (pen.rectangle if rng.random() < 0.5 else pen.ellipse)(corners, fill=colour)
    return picture


def print_code(picture: Image.Image, code: str, at: tuple[int, int], size: int) -> tuple[int, int, int, int]:
    """Print a code on a white label; where that is."""
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(size)
    region = (at[0], at[1], at[0] + 56, at[1] + 28)
    pen.rectangle(region, fill="white")
    for place, digit in enumerate(code):  # one to a token at full size
        pen.text((at[0] + 28 * place + 14, at[1] + 14), digit, fill="black", font=font, anchor="mm")
    return region


def write_page(folder: Path, code: str, name: str, rng: random.Random, *, aware: bool) -> list[dict[str, Any]]:
    picture = draw_shapes(448, 3, rng)
    region = print_code(picture, code, (rng.randrange(448 - 56), rng.randrange(448 - 28)), 12)
    picture.save(folder / f"{name}.png")
    regions = {"regions": [list(region)]} if aware else {}
    return [{"type": "image", "image": f"{name}.png", **regions}]


def write_photos(folder: Path, code: str, name: str, rng: random.Random, *, aware: bool) -> list[dict[str, Any]]:
    label, parts = rng.randrange(PHOTOS), []
    shaped = rng.sample([n for n in range(PHOTOS) if n != label], 2)
    for number in range(PHOTOS):
        picture = draw_shapes(224, number in shaped, rng)
        if number == label:
            print_code(picture, code, (rng.randrange(70, 98), rng.randrange(84, 112)), 16)
        if number in (label, *shaped):
            picture.save(folder / f"{name}-{number}.png")
        elif not (folder / "blank.png").exists():
            picture.save(folder / "blank.png")
        shown = f"{name}-{number}.png" if number in (label, *shaped) else "blank.png"
        parts.append({"type": "image", "image": shown})
    return parts


WRITE = {"pages": write_page, "photos": write_photos}


def write_rows(folder: Path, kind: str, split: str, count: int, *, aware: bool) -> Path:
    """Rows that are the same for both ways but for the regions."""
    rng, path = random.Random(f"{kind} {split}"), folder / f"{kind}-{split}-{aware}.jsonl"
    with path.open("w") as file:
        for number in range(count):
            code = f"{number % 100:02d}"
            parts = WRITE[kind](folder, code, f"{kind}-{split}-{number}", rng, aware=aware)
            user = {"role": "user", "content": [*parts, {"type": "text", "text": ASKED}]}
            row = {"messages": [user, {"role": "assistant", "content": " ".join(code)}]}
            file.write(json.dumps(row) + "\n")
    return path


def read(folder: Path, kind: str, ranks: Ranks, chosen: argparse.Namespace, *, aware: bool) -> dict[str, float]:
    """Train and measure one way."""
    data, test = (
        write_rows(folder, kind, split, count, aware=aware)
        for split, count in (("train", chosen.rows), ("test", chosen.test))
    )
    pictures = PHOTOS if kind == "photos" else 1
    limits = f"max: {448**2}, total: {BUDGET[kind]}" if aware else f"max: {BUDGET[kind] // pictures}"
    out = folder / f"{kind}-{aware}"
    words = ["task=chat", "model.path=builtin:tiny", f"data.train={data}", f"data.pixels={{min: {LEAST}, {limits}}}",
             "trainable={vision: full, merger: full, language: full}", "train.global_batch_size=32", "track=[]",
             f"train.steps={chosen.steps}", "train.log_every=100", "data.workers=0", f"output={out}",
             "optim={lr: 1e-3, warmup: 20, betas: [0.9, 0.98]}"]  # fmt: skip
    train_run(load_config(None, words), ranks)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    report = measure_one(str(out), str(test), ["eval.max_new_tokens=4"], ranks).report
    return {
        "exact": report["metrics"]["exact_match"],
        "pixels": sum(line["pixels"] for line in lines) / len(lines) / 32,
        "cpu_s": sum(line["cpu_s"] for line in lines),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--test", type=int, default=200)
    parser.add_argument("--kinds", nargs="*", default=list(WRITE))
    chosen = parser.parse_args()
    ranks = start_ranks()
    print("| rows | budget | scaling | pixels a row | codes read | processor time |\n|---|---|---|---|---|---|")
    for kind in chosen.kinds:
        for aware in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                found = read(Path(folder), kind, ranks, chosen, aware=aware)
            way = "content-aware" if aware else "uniform"
            figures = f"{found['pixels']:,.0f} | {100 * found['exact']:.1f} % | {found['cpu_s']:,.0f} s"
            print(f"| {kind} | {BUDGET[kind]:,} | {way} | {figures} |", flush=True)
    stop_ranks()


if __name__ == "__main__":
    main()
