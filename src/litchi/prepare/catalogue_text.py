"""The words of the drawn catalogue: its 480 products (item x colour x pattern), their names and the queries for them.

A product is three English attribute words. Names and queries exist in English ("en") and Chinese ("zh"), each in
several spellings. Everything here is text: no picture is drawn and no file is touched.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

ITEMS = {
    "dress": "连衣裙",
    "shirt": "衬衫",
    "trousers": "长裤",
    "skirt": "半身裙",
    "coat": "大衣",
    "shoe": "鞋子",
    "boot": "靴子",
    "hat": "帽子",
    "bag": "手提包",
    "mug": "杯子",
    "umbrella": "雨伞",
    "sock": "袜子",
}
COLOURS = {
    "red": "红色",
    "orange": "橙色",
    "yellow": "黄色",
    "green": "绿色",
    "blue": "蓝色",
    "purple": "紫色",
    "pink": "粉色",
    "brown": "棕色",
    "black": "黑色",
    "grey": "灰色",
}
PATTERNS = {"plain": "纯色", "striped": "条纹", "dotted": "圆点", "checked": "格纹"}
ANY_ITEM = {"item": "商品"}  # stands for the item where a query leaves it open
CHINESE = {**ITEMS, **COLOURS, **PATTERNS, **ANY_ITEM}
VALUES = (tuple(ITEMS), tuple(COLOURS), tuple(PATTERNS))  # in the order of a product's attributes
LANGUAGES = ("en", "zh")


class Product(NamedTuple):
    """An article of the catalogue, by its English attribute words."""

    item: str
    colour: str
    pattern: str


PRODUCTS = tuple(Product(item, colour, pattern) for item in ITEMS for colour in COLOURS for pattern in PATTERNS)


@dataclass(frozen=True)
class Query:
    """What a shopper types. An attribute that is None is left open."""

    text: str
    language: str
    item: str | None
    colour: str | None
    pattern: str | None

    @property
    def kind(self) -> str:
        return "partial" if None in (self.item, self.colour, self.pattern) else "full"

    def satisfied_by(self, product: Product) -> bool:
        item, colour, pattern = product
        return self.item in (None, item) and self.colour in (None, colour) and self.pattern in (None, pattern)


def word(english: str, language: str) -> str:
    """Say an attribute word in a language."""
    return english if language == "en" else CHINESE[english]


def names(product: Product, language: str) -> tuple[str, ...]:
    """List the spellings of a product's full name; the first is the usual one."""
    item, colour, pattern = (word(attribute, language) for attribute in product)
    if language == "en":
        return (
            f"{colour} {pattern} {item}",
            f"{pattern} {colour} {item}",
            f"{item}, {colour}, {pattern}",
            f"{item} in {colour}, {pattern}",
        )
    return (
        f"{colour}{pattern}{item}",
        f"{pattern}{colour}{item}",
        f"{colour}的{pattern}{item}",
        f"{item}，{colour}，{pattern}",
    )


def full_query(product: Product, language: str, rng: random.Random) -> Query:
    """Ask for a product by its full name, in a random spelling."""
    return Query(rng.choice(names(product, language)), language, *product)


def partial_queries(product: Product, language: str) -> tuple[Query, Query, Query]:
    """Ask for two of a product's attributes: "red dress", "striped dress", "red striped item"."""
    item, colour, pattern = product

    def query(item: str | None, colour: str | None, pattern: str | None) -> Query:
        spoken = [word(w, language) for w in (colour, pattern, item or "item") if w]
        return Query((" " if language == "en" else "").join(spoken), language, item, colour, pattern)

    return query(item, colour, None), query(item, None, pattern), query(None, colour, pattern)


def draw_query(product: Product, rng: random.Random) -> Query:
    """Draw a query that a product satisfies: 70 % full names, 30 % two attributes, half English and half Chinese."""
    language = rng.choice(LANGUAGES)
    if rng.random() < 0.7:
        return full_query(product, language, rng)
    return rng.choice(partial_queries(product, language))


def gloss(text: str) -> str:
    """Say a query in plain English, whatever its language and spelling: "条纹红色连衣裙" -> "red striped dress"."""
    found = [w for values in (COLOURS, PATTERNS, ITEMS, ANY_ITEM) for w in values if w in text or CHINESE[w] in text]
    return " ".join(found)
