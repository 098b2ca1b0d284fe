"""Write the task the tiny base model is pre-trained on: generic chat about the pictures of the drawn catalogue.

    python recipes/tiny_base/make_data.py --out DIR --rows 80000 --draws 40

It writes DIR/chat.jsonl from training products and DIR/chat-validation.jsonl from validation products, with
their pictures in DIR/images. English and Chinese take turns at random. The yes/no questions are about single
attributes ("Is it red?"): the base never hears of all attributes at once, nor of ranking, which is left to fine-tuning.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from litchi.prepare.catalogue import Picture, near_misses, split, write_picture
from litchi.prepare.catalogue_text import LANGUAGES, PRODUCTS, VALUES, Product, names, partial_queries, word

SYSTEM = "You are a helpful assistant."
WORDS = {
    "en": ("What is it?", "What is this?", "Three words:", "Item, colour, pattern?"),
    "zh": ("这是什么？", "是什么？", "三个词：", "品类、颜色、花纹？"),
}
CAPTION = {
    "en": ("What is in the picture?", "Describe the picture.", "Name this product.", "Caption:"),
    "zh": ("图片里是什么？", "请描述图片。", "这是什么商品？", "标题："),
}
ATTRIBUTE = (  # in the order of a product's attributes
    {"en": ("What product is it?", "Which kind of item?"), "zh": ("是什么品类？", "这是哪种东西？")},
    {"en": ("What colour is it?", "Main colour?"), "zh": ("什么颜色？", "主要颜色是什么？")},
    {"en": ("Which pattern does it have?", "Plain or patterned?"), "zh": ("什么花纹？", "是什么图案？")},
)
TRANSLATE = ("Translate: {}", "In Chinese or English: {}", "翻译：{}", "换一种说法：{}")
IN_LANGUAGE = (
    ("en", 'Is "{}" English?'),
    ("zh", 'Is "{}" Chinese?'),
    ("en", "“{}”是英文吗？"),
    ("zh", "“{}”是中文吗？"),
)
IS_IT = {"en": "Is it {}?", "zh": "是{}吗？"}
YES_NO = {"en": ("Yes", "No"), "zh": ("是", "否")}
TURNS = 8  # questions on one picture


@dataclass(frozen=True)
class Scene:
    """What rows are drawn from.

    Args:
        products: what rows are about.
        shown: all products that may be seen; near misses come from here.
        seeds: of the drawings.
        folder: where the pictures go.
        rng: the dice.
    """

    products: tuple[Product, ...]
    shown: tuple[Product, ...]
    seeds: range
    folder: Path
    rng: random.Random

    def language(self) -> str:
        return self.rng.choice(LANGUAGES)

    def product(self) -> Product:
        return self.rng.choice(self.products)

    def neighbour(self, product: Product) -> Product:
        """Another product: three times in four it differs in one attribute only, where there is such a one."""
        near = near_misses(product, self.rng.randrange(3), self.shown) if self.rng.random() < 0.75 else []
        return self.rng.choice(near or self.shown)

    def picture(self, product: Product) -> dict[str, str]:
        file = write_picture(self.folder, Picture(product, self.rng.choice(self.seeds)))
        return {"type": "image", "image": file}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def user(*parts: dict[str, str]) -> dict:
    return {"role": "user", "content": list(parts)}


def answer(words: str) -> dict:
    return {"role": "assistant", "content": [text(words)]}


# ---- Rows of one question. A picture stands before or behind its question, half and half.


def ask(scene: Scene, product: Product, question: str, reply: str, picture_first: float = 0.5) -> list[dict]:
    parts = [scene.picture(product), text(question)]
    return [user(*(parts if scene.rng.random() < picture_first else parts[::-1])), answer(reply)]


def three_words(scene: Scene) -> list[dict]:
    """Not in the mix below, which knows single attributes only; with `--mix` for a base that names all three."""
    product, language = scene.product(), scene.language()
    comma = ", " if language == "en" else "，"
    return ask(scene, product, scene.rng.choice(WORDS[language]), comma.join(word(w, language) for w in product))


def caption(scene: Scene) -> list[dict]:
    product, language = scene.product(), scene.language()
    spellings = names(product, language)
    name = spellings[0] if scene.rng.random() < 0.7 else scene.rng.choice(spellings)
    return ask(scene, product, scene.rng.choice(CAPTION[language]), name)


def attribute(scene: Scene) -> list[dict]:
    product, language, which = scene.product(), scene.language(), scene.rng.randrange(3)
    return ask(scene, product, scene.rng.choice(ATTRIBUTE[which][language]), word(product[which], language))


def question(scene: Scene) -> list[dict]:
    """One question, one picture. Mostly the question first, as in the prompt of a reranker."""
    product, language = scene.product(), scene.language()
    return ask(scene, product, *yes_no(scene, product, language, scene.rng.random() < 0.5), picture_first=0.25)


def translate(scene: Scene) -> list[dict]:
    product, language = scene.product(), scene.language()
    other = "zh" if language == "en" else "en"
    name = scene.rng.choice(names(product, language))
    return [user(text(scene.rng.choice(TRANSLATE).format(name))), answer(names(product, other)[0])]


def language(scene: Scene) -> list[dict]:
    """Ask for the language of a name. Only here the base says yes and no in lower case, as a reranker has to:
    so both words are trained, and mean nothing about pictures yet."""
    spoken = scene.language()
    asked, prompt = scene.rng.choice(IN_LANGUAGE)
    name = scene.rng.choice(names(scene.product(), spoken))
    return [user(text(prompt.format(name))), answer("yes" if asked == spoken else "no")]


def yes_no(scene: Scene, product: Product, language: str, agree: bool) -> tuple[str, str]:
    """Ask whether a product has a value of an attribute: question and answer."""
    which = scene.rng.randrange(3)
    wrong = [value for value in VALUES[which] if value != product[which]]
    value = product[which] if agree else scene.rng.choice(wrong)
    return IS_IT[language].format(word(value, language)), YES_NO[language][0 if agree else 1]


# ---- Rows of many questions: many answers for the price of one picture, or of one question


def picture_questions(scene: Scene) -> list[dict]:
    """Ask about one picture in eight turns, half of them answered with yes."""
    product = scene.product()
    agree = [turn % 2 == 0 for turn in range(TURNS)]
    scene.rng.shuffle(agree)
    turns: list[tuple[str, str]] = []
    for yes in agree:
        turn = yes_no(scene, product, scene.language(), yes)
        while turn in turns:  # a repeated question would be answered by copying; there are six yes questions to draw
            turn = yes_no(scene, product, scene.language(), yes)
        turns.append(turn)
    messages = [message for asked, reply in turns for message in (user(text(asked)), answer(reply))]
    messages[0]["content"].insert(0, scene.picture(product))
    return messages


SHAPES = {
    shape.__name__: shape
    for shape in (three_words, caption, attribute, question, translate, language, picture_questions)
}
MIX = {  # shares of the rows
    "caption": 1.0,
    "attribute": 1.0,
    "translate": 0.5,
    "language": 0.5,
    "picture_questions": 1.5,
    "question": 6.0,
}


def sentences() -> Iterator[str]:
    """Give every text of these rows, for all products: what the tokenizer has to know."""
    yield SYSTEM
    for prompts in (WORDS, CAPTION, *ATTRIBUTE):
        yield from (prompt for spoken in prompts.values() for prompt in spoken)
    yield from ("yes", "no", *YES_NO["en"], *YES_NO["zh"])
    for language in LANGUAGES:
        for attribute in (value for values in VALUES for value in values):
            yield from (word(attribute, language), IS_IT[language].format(word(attribute, language)))
        for product in PRODUCTS:
            for query in partial_queries(product, language):
                yield IS_IT[language].format(query.text)
            for name in names(product, language):
                yield from (name, IS_IT[language].format(name))
                yield from (prompt.format(name) for prompt in TRANSLATE)
                yield from (prompt.format(name) for _, prompt in IN_LANGUAGE)


# ---- Files


def rows(scene: Scene, count: int, mix: dict[str, float], name: str) -> Iterator[dict]:
    for number in range(count):
        (shape,) = scene.rng.choices(list(mix), list(mix.values()))
        messages = SHAPES[shape](scene)
        if shape != "picture_questions" and scene.rng.random() < 0.1:
            messages.insert(0, {"role": "system", "content": [text(SYSTEM)]})
        yield {"id": f"{name}-{number:06d}", "messages": messages, "shape": shape}


def write(path: Path, lines: Iterator[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def parse_mix(argument: str) -> dict[str, float]:
    """Read "caption=2,attribute=1"."""
    mix = {}
    for share in argument.split(","):
        shape, _, weight = share.partition("=")
        if shape not in SHAPES:
            raise argparse.ArgumentTypeError(f"unknown shape {shape!r}; there are {', '.join(SHAPES)}")
        try:
            mix[shape] = float(weight)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{share!r} is not shape=weight") from None
    return mix


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument("--rows", type=int, default=80000)
    parser.add_argument("--validation-rows", type=int, default=400)
    parser.add_argument("--draws", type=int, default=40, help="drawings of each product")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mix", type=parse_mix, help=f"shares of the shapes {', '.join(SHAPES)}, as shape=2,shape=1")
    arguments = parser.parse_args()
    mix, parts, out = arguments.mix or MIX, split(), arguments.out

    train = Scene(parts.train, parts.train, range(arguments.draws), out, random.Random(f"chat {arguments.seed}"))
    write(out / "chat.jsonl", rows(train, arguments.rows, mix, "chat"))
    dice = random.Random(f"chat validation {arguments.seed}")
    validation = Scene(parts.validation, parts.train + parts.validation, range(90000, 90040), out, dice)
    write(out / "chat-validation.jsonl", rows(validation, arguments.validation_rows, mix, "chat-validation"))


if __name__ == "__main__":
    main()
