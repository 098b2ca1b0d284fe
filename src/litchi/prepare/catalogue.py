"""The drawn catalogue: pictures of its products, the split, and rerank rows with hard candidates.

    split() -> products -> draw_rows() -> rows -> write_rerank() -> images/*.png and a JSONL

Everything but the writers is a pure function of its arguments and seeds. Held-out products are *combinations* that
training never shows, neither as a picture nor as a name, while each attribute is well known from other products:
ranking them takes all three attributes together. Negatives are near misses first, so one attribute never suffices.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from litchi.prepare.catalogue_text import PRODUCTS, VALUES, Product, Query, draw_query

INSTRUCTION = "Given a shopping query, find the product that matches it."
NEAR_MISSES = 2  # negatives per attribute that differ from the positive in it alone


class Split(NamedTuple):
    """Products by what they are for; no product is in two parts."""

    train: tuple[Product, ...]
    validation: tuple[Product, ...]
    test: tuple[Product, ...]


def split() -> Split:
    """Divide the products into 384 for training, 48 for validation and 48 for the test.

    A fifth of the item-colour pairs gives test products, another fifth validation products: two of their four
    patterns. Which two depends on the pair, so that items, colours and patterns stay balanced, every pair is seen in
    training with two patterns at least, and a held-out product has one held-out sister that differs in pattern only.
    """
    train: list[Product] = []
    validation: list[Product] = []
    test: list[Product] = []
    for product in PRODUCTS:
        item, colour, pattern = (values.index(word) for values, word in zip(VALUES, product, strict=True))
        held_out = (pattern - item - 2 * colour) % 4 in (0, 1 + (item + colour) // 5 % 3)
        part = {0: test, 2: validation}.get((item + colour) % 5, train) if held_out else train
        part.append(product)
    return Split(tuple(train), tuple(validation), tuple(test))


# ---- Pictures: a textured silhouette with a dark outline on a pale ground

INKS = {
    "red": (214, 40, 40),
    "orange": (245, 130, 32),
    "yellow": (246, 208, 40),
    "green": (46, 150, 70),
    "blue": (38, 84, 196),
    "purple": (126, 56, 170),
    "pink": (246, 140, 180),
    "brown": (122, 76, 40),
    "black": (28, 28, 32),
    "grey": (140, 144, 150),
}
OFF_WHITE = (246, 244, 238)  # of stripes, dots and checks
GROUNDS = (
    (255, 255, 255),
    (244, 240, 232),
    (232, 240, 246),
    (240, 246, 236),
    (250, 238, 240),
    (236, 236, 240),
    (252, 246, 220),
)
# Shapes lie on a grid of 0..100, y downwards: corners x, y, x, y, ... of polygons and boxes, angles in degrees
# clockwise from the right, widths on the same grid.
SHAPES: dict[str, tuple[tuple, ...]] = {
    "dress": (("polygon", (38, 8, 45, 16, 55, 16, 62, 8, 66, 14, 60, 42, 84, 92, 16, 92, 40, 42, 34, 14)),),
    "shirt": (("polygon", (36, 14, 50, 22, 64, 14, 92, 34, 82, 50, 70, 42, 70, 88, 30, 88, 30, 42, 18, 50, 8, 34)),),
    "trousers": (("polygon", (30, 8, 70, 8, 80, 94, 58, 94, 50, 36, 42, 94, 20, 94)),),
    "skirt": (("polygon", (34, 26, 66, 26, 90, 80, 10, 80)),),
    "coat": (
        (
            "polygon",
            (36, 6, 50, 14, 64, 6, 84, 22, 92, 70, 80, 72, 74, 40, 76, 95, 52, 95, 50, 40, 48, 95, 24, 95)
            + (26, 40, 20, 72, 8, 70, 16, 22),
        ),
    ),
    "shoe": (("polygon", (8, 46, 34, 46, 60, 60, 88, 64, 94, 76, 8, 76)), ("rectangle", (8, 77, 94, 82))),
    "boot": (("polygon", (32, 8, 62, 8, 62, 60, 90, 70, 92, 90, 32, 90)),),
    "hat": (("ellipse", (4, 60, 96, 82)), ("pieslice", (24, 22, 76, 112), 180, 360)),
    "bag": (("arc", (30, 10, 70, 66), 180, 360, 7), ("polygon", (14, 40, 86, 40, 92, 90, 8, 90))),
    "mug": (("rectangle", (16, 24, 68, 88)), ("arc", (52, 36, 94, 76), 250, 470, 8.4)),
    "umbrella": (
        ("pieslice", (6, 12, 94, 96), 180, 360),
        ("rectangle", (47, 50, 53, 86)),
        ("arc", (35, 76, 53, 96), 0, 180, 7),
    ),
    "sock": (("polygon", (36, 6, 64, 6, 64, 54, 88, 76, 80, 92, 64, 94, 36, 66)),),
}


class Pose:
    """Where the grid of a shape lands on a canvas: scaled, stretched, mirrored, sheared and shifted at random."""

    def __init__(self, rng: random.Random, canvas: int):
        self.scale = canvas / 100 * rng.uniform(0.74, 0.98)
        self.stretch = rng.uniform(0.92, 1.08)
        self.mirrored = rng.random() < 0.5
        self.shear = rng.uniform(-0.08, 0.08)
        self.x = canvas / 2 + canvas * rng.uniform(-0.05, 0.05)
        self.y = canvas / 2 + canvas * rng.uniform(-0.05, 0.05)

    def points(self, grid: Sequence[float]) -> list[tuple[float, float]]:
        return [self._point(x - 50, y - 50) for x, y in zip(grid[::2], grid[1::2], strict=True)]

    def _point(self, x: float, y: float) -> tuple[float, float]:
        x = -x if self.mirrored else x
        return self.x + (x * self.stretch + self.shear * y) * self.scale, self.y + y * self.scale

    def box(self, grid: Sequence[float]) -> tuple[float, float, float, float]:
        (left, top), (right, bottom) = self.points(grid)
        return min(left, right), top, max(left, right), bottom

    def angles(self, start: float, end: float) -> tuple[float, float]:
        return (180 - end, 180 - start) if self.mirrored else (start, end)


def draw(product: Product, seed: int, side: int = 56) -> Image.Image:
    """Draw a product, RGB of `side` x `side` pixels; the same arguments always give the same picture."""
    rng = random.Random("".join(product) + str(seed))
    canvas = 2 * side  # drawn at twice the size: halving it smooths the edges
    mask = _silhouette(product.item, Pose(rng, canvas), canvas)
    ink = tuple(min(255, max(0, channel + rng.randint(-14, 14))) for channel in INKS[product.colour])
    texture = _texture(product.pattern, ink, rng, canvas)
    picture = Image.new("RGB", (canvas, canvas), rng.choice(GROUNDS))
    outline = tuple(channel * 6 // 10 for channel in ink)  # pale patterned products need it to keep their silhouette
    picture.paste(outline, (0, 0), _grown(mask))
    picture.paste(texture, (0, 0), mask)
    return picture.resize((side, side), Image.Resampling.BOX)


def _silhouette(item: str, pose: Pose, canvas: int) -> Image.Image:
    mask = Image.new("L", (canvas, canvas))
    pen = ImageDraw.Draw(mask)
    for kind, grid, *rest in SHAPES[item]:
        if kind == "polygon":
            pen.polygon(pose.points(grid), fill=255)
        elif kind == "arc":
            start, end, width = rest
            pen.arc(pose.box(grid), *pose.angles(start, end), fill=255, width=int(width * pose.scale))
        elif kind == "pieslice":
            pen.pieslice(pose.box(grid), *pose.angles(*rest), fill=255)
        else:
            {"ellipse": pen.ellipse, "rectangle": pen.rectangle}[kind](pose.box(grid), fill=255)
    return mask


def _grown(mask: Image.Image) -> Image.Image:
    """Equal to `ImageFilter.MaxFilter(5)`, which would take half of the time of a drawing."""
    pixels, shifts = np.pad(np.asarray(mask), 2), range(5)
    pixels = np.max([pixels[k : k + mask.height] for k in shifts], axis=0)
    return Image.fromarray(np.max([pixels[:, k : k + mask.width] for k in shifts], axis=0))


def _texture(pattern: str, ink: tuple[int, ...], rng: random.Random, canvas: int) -> Image.Image:
    sheet = Image.new("RGB", (canvas, canvas), ink)
    pen = ImageDraw.Draw(sheet)
    period = canvas * rng.uniform(0.13, 0.17)
    phase = rng.uniform(0, period)
    at = [phase + k * period for k in range(-1, int(canvas / period) + 3)]
    if pattern == "dotted":
        _dots(pen, at, period)
    elif pattern == "striped":
        upright = rng.random() < 0.5
        _bars(pen, at, 0.42 * period, canvas, upright=upright)
    elif pattern == "checked":
        _bars(pen, at, 0.3 * period, canvas, upright=True)
        _bars(pen, at, 0.3 * period, canvas, upright=False)
    return sheet


def _bars(pen: ImageDraw.ImageDraw, at: list[float], width: float, canvas: int, *, upright: bool) -> None:
    for a in at:
        pen.rectangle((a, 0, a + width, canvas) if upright else (0, a, canvas, a + width), fill=OFF_WHITE)


def _dots(pen: ImageDraw.ImageDraw, at: list[float], period: float) -> None:
    radius = 0.27 * period
    for row, y in enumerate(at):
        for x in at:
            x += period / 2 * ((row + 1) % 2)  # every other row is shifted by half a period
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=OFF_WHITE)


# ---- Rows: a query, the one product that satisfies it, and candidates that do not


class Picture(NamedTuple):
    """A drawing of a product, told apart by the seed of the drawing."""

    product: Product
    seed: int

    @property
    def file(self) -> str:
        """Its path in the folder of the data."""
        return f"images/{'-'.join(self.product)}-{self.seed}.png"


@dataclass(frozen=True)
class Row:
    """A query with its pictures; only the first one satisfies it."""

    id: str
    query: Query
    pictures: tuple[Picture, ...]


def near_misses(product: Product, attribute: int, allowed: Collection[Product]) -> list[Product]:
    """List the allowed products that differ from a product in one attribute (0 item, 1 colour, 2 pattern) alone."""
    others = [product._replace(**{Product._fields[attribute]: value}) for value in VALUES[attribute]]
    return [other for other in others if other != product and other in allowed]


def draw_negatives(
    product: Product, query: Query, candidates: Sequence[Product], count: int, rng: random.Random
) -> list[Product]:
    """Draw distinct products that do not satisfy the query: near misses of `product` first, then random ones."""
    wrong = [other for other in candidates if not query.satisfied_by(other)]
    chosen: list[Product] = []
    for attribute in (2, 1, 0):
        near = near_misses(product, attribute, wrong)
        chosen += rng.sample(near, min(NEAR_MISSES, len(near)))
    rest = [other for other in wrong if other not in chosen]
    return chosen[:count] + rng.sample(rest, max(0, count - len(chosen)))


def draw_rows(rows: int, *, split_name: str, negatives: int, seed: int, drawing_seeds: Sequence[int]) -> list[Row]:
    """Draw rows whose positives are of one part of the split and whose negatives are of that part or of training."""
    parts = split()
    products: tuple[Product, ...] = getattr(parts, split_name)
    candidates = products if split_name == "train" else parts.train + products
    rng = random.Random(f"{split_name} {seed}")
    drawn = []
    for number in range(rows):
        product = rng.choice(products)
        query = draw_query(product, rng)
        shown = [product, *draw_negatives(product, query, candidates, negatives, rng)]
        pictures = tuple(Picture(other, rng.choice(drawing_seeds)) for other in shown)
        drawn.append(Row(f"{split_name}-{number:05d}", query, pictures))
    return drawn


def shuffle_queries(rows: Sequence[Row]) -> list[Row]:
    """Give every row the query of another row that its product does not satisfy: a control with nothing to learn.

    The queries stay the same ones, each used once: they move on by half the list, and a pair that happens to match
    swaps with the first row with which both fit.

    Raises:
        ValueError: no such pairing was found (a handful of rows that ask for the same).
    """
    half = len(rows) // 2
    queries = [row.query for row in (*rows[half:], *rows[:half])]
    products = [row.pictures[0].product for row in rows]

    def wrong(row: int, query: int) -> bool:
        return not queries[query].satisfied_by(products[row])

    for i in range(len(rows)):
        if not wrong(i, i):
            j = next((j for j in range(len(rows)) if wrong(i, j) and wrong(j, i)), None)
            if j is None:
                raise ValueError(f"no query among {len(rows)} is wrong for row {rows[i].id}")
            queries[i], queries[j] = queries[j], queries[i]
    return [replace(row, query=query) for row, query in zip(rows, queries, strict=True)]


# ---- Files


def write_picture(folder: Path, picture: Picture) -> str:
    """Draw a picture into a folder unless it is there already; return its path in the folder."""
    path = folder / picture.file
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        draw(*picture).save(path, compress_level=1)
    return picture.file


def write_rerank(
    folder: str | Path,
    *,
    rows: int,
    split: str,
    negatives: int,
    seed: int,
    drawing_seeds: Sequence[int],
    shuffled: bool = False,
) -> Path:
    """Write rerank rows as JSONL with the pictures they name.

    Args:
        folder: gets `images/*.png`, shared by all files written there, and `train.jsonl` or `train-shuffled.jsonl`.
        rows: number of queries.
        split: "train", "validation" or "test": the part the positives come from.
        negatives: products per query that do not satisfy it.
        seed: of the choice of products, queries and candidates.
        drawing_seeds: every picture is drawn with one of them.
        shuffled: write the control, in which every query belongs to another row (`shuffle_queries`).

    Returns:
        The JSONL file.
    """
    folder = Path(folder)
    drawn = draw_rows(rows, split_name=split, negatives=negatives, seed=seed, drawing_seeds=drawing_seeds)
    if shuffled:
        drawn = shuffle_queries(drawn)
    path = folder / f"{split}{'-shuffled' if shuffled else ''}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for row in drawn:
            positive, *rest = ({"image": write_picture(folder, picture)} for picture in row.pictures)
            file.write(json.dumps(_line(row, positive, rest), ensure_ascii=False) + "\n")
    return path


def _line(row: Row, positive: dict[str, str], negatives: list[dict[str, str]]) -> dict:
    return {
        "id": row.id,
        "query": row.query.text,
        "pos_doc": positive,
        "neg_docs": negatives,
        "instruction": INSTRUCTION,
        "language": row.query.language,
        "kind": row.query.kind,
    }
