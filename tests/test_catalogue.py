"""The drawn catalogue: what is held out stays out, rows mean what they say, the page shows what was ranked."""

from __future__ import annotations

import base64
import importlib.util
import json
import random
import sys
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from litchi.prepare import rankings_page
from litchi.prepare.catalogue import draw, draw_rows, near_misses, shuffle_queries, split, write_rerank
from litchi.prepare.catalogue_text import LANGUAGES, PRODUCTS, Product, full_query, gloss, names, partial_queries
from litchi.prepare.rankings_page import Candidate, Figure, RankedQuery, write_rankings

RECIPE = Path(__file__).parents[1] / "recipes" / "tiny_base" / "make_data.py"
PARTS = split()
HELD_OUT = {"validation": PARTS.validation, "test": PARTS.test}
DRAWINGS = {"train": range(1000, 1006), "validation": range(90000, 90040), "test": range(100000, 100040)}


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def shown(document: dict) -> Product:
    return Product(*Path(document["image"]).stem.split("-")[:3])


def satisfies(product: Product, query: str) -> bool:
    """Judge by the words alone, apart from how the rows were made."""
    words = set(gloss(query).split()) - {"item"}
    assert len(words) >= 2
    return words <= set(product)


def test_split_sizes_and_disjointness():
    assert [len(part) for part in PARTS] == [384, 48, 48]
    assert sorted(product for part in PARTS for product in part) == sorted(PRODUCTS)


@pytest.mark.parametrize("part", HELD_OUT)
def test_held_out_products_are_balanced(part):
    products = HELD_OUT[part]
    items, colours, patterns = (Counter(product[k] for product in products) for k in range(3))
    assert len(items) == 12 and set(items.values()) == {4}
    assert len(colours) == 10 and set(colours.values()) <= {4, 5, 6}
    assert len(patterns) == 4 and set(patterns.values()) <= {11, 12, 13}
    assert all(len(near_misses(product, 2, products)) == 1 for product in products)  # the sister


def test_every_item_colour_pair_is_trained_on():
    assert min(Counter(product[:2] for product in PARTS.train).values()) == 2
    assert len({product[:2] for product in PARTS.train}) == 120


def test_drawing_is_a_pure_function():
    for product in PRODUCTS[::37]:
        random.seed(1)
        first = draw(product, 7).tobytes()
        random.seed(2)
        assert draw(product, 7).tobytes() == first
        assert draw(product, 8).tobytes() != first
    assert draw(PRODUCTS[0], 0).size == (56, 56) and draw(PRODUCTS[0], 0, side=84).size == (84, 84)


def test_drawings_differ_between_products():
    assert len({draw(product, 0).tobytes() for product in PRODUCTS}) == len(PRODUCTS)


def test_queries_mean_their_attributes():
    rng = random.Random(0)
    for product in PRODUCTS[::29]:
        for language in LANGUAGES:
            assert len(set(names(product, language))) == 4
            full = full_query(product, language, rng)
            assert full.kind == "full" and [p for p in PRODUCTS if full.satisfied_by(p)] == [product]
            for query in partial_queries(product, language):
                assert query.kind == "partial" and query.satisfied_by(product)
                assert sum(map(query.satisfied_by, PRODUCTS)) in (4, 10, 12)
                assert {p for p in PRODUCTS if query.satisfied_by(p)} == {
                    p for p in PRODUCTS if satisfies(p, query.text)
                }


def test_gloss_says_a_chinese_query_in_english():
    assert gloss("连衣裙，红色，条纹") == gloss("striped red dress") == "red striped dress"
    assert gloss("红色条纹商品") == "red striped item"
    assert gloss("黑色半身裙") == "black skirt"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rerank")
    for part, negatives, rows in (("train", 7, 120), ("validation", 9, 40), ("test", 9, 40)):
        write_rerank(folder, rows=rows, split=part, negatives=negatives, seed=0, drawing_seeds=DRAWINGS[part])
    write_rerank(folder, rows=120, split="train", negatives=7, seed=0, drawing_seeds=DRAWINGS["train"], shuffled=True)
    return folder


@pytest.mark.parametrize(("part", "negatives"), [("train", 7), ("validation", 9), ("test", 9)])
def test_rows_have_one_right_document(folder, part, negatives):
    rows = read(folder / f"{part}.jsonl")
    assert len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        products = [shown(document) for document in row["neg_docs"]]
        assert len(set(products)) == len(products) == negatives
        assert satisfies(shown(row["pos_doc"]), row["query"])
        assert not any(satisfies(product, row["query"]) for product in products)


@pytest.mark.parametrize("part", HELD_OUT)
def test_candidates_of_held_out_products(folder, part):
    allowed = set(PARTS.train) | set(HELD_OUT[part])
    for row in read(folder / f"{part}.jsonl"):
        positive = shown(row["pos_doc"])
        negatives = [shown(document) for document in row["neg_docs"]]
        assert positive in HELD_OUT[part] and set(negatives) <= allowed
        for attribute in range(3):
            possible = [p for p in near_misses(positive, attribute, allowed) if not satisfies(p, row["query"])]
            present = set(possible) & set(negatives)
            assert len(present) >= min(2, len(possible))


def test_training_never_shows_what_is_held_out(folder):
    held_out = {*PARTS.validation, *PARTS.test}
    spoken = {name for product in held_out for language in LANGUAGES for name in names(product, language)}
    for file in ("train.jsonl", "train-shuffled.jsonl"):
        for row in read(folder / file):
            assert row["query"] not in spoken
            assert not held_out & {shown(document) for document in (row["pos_doc"], *row["neg_docs"])}


def test_every_picture_is_written_once_and_used(folder):
    named = {
        document["image"]
        for file in folder.glob("*.jsonl")
        for row in read(file)
        for document in (row["pos_doc"], *row["neg_docs"])
    }
    assert {f"images/{path.name}" for path in (folder / "images").iterdir()} == named
    first = min(named)
    seed = int(Path(first).stem.rsplit("-", 1)[1])
    assert Image.open(folder / first).tobytes() == draw(shown({"image": first}), seed).tobytes()


def test_rows_mix_languages_and_kinds():
    count, same = 800, {"split_name": "train", "negatives": 0, "seed": 3, "drawing_seeds": DRAWINGS["train"]}
    rows = draw_rows(count, **same)
    assert 0.65 < sum(row.query.kind == "full" for row in rows) / count < 0.75
    assert 0.45 < sum(row.query.language == "zh" for row in rows) / count < 0.55
    assert rows == draw_rows(count, **same)


def test_shuffled_queries_never_match(folder):
    plain, shuffled = read(folder / "train.jsonl"), read(folder / "train-shuffled.jsonl")
    assert [row["pos_doc"] for row in plain] == [row["pos_doc"] for row in shuffled]
    assert Counter(row["query"] for row in plain) == Counter(row["query"] for row in shuffled)
    assert not any(satisfies(shown(row["pos_doc"]), row["query"]) for row in shuffled)
    by_query = {row["query"]: (row["language"], row["kind"]) for row in plain}
    assert all(by_query[row["query"]] == (row["language"], row["kind"]) for row in shuffled)


def test_shuffle_swaps_pairs_that_match_and_refuses_the_impossible():
    rows = draw_rows(40, split_name="test", negatives=1, seed=0, drawing_seeds=[0])
    twins = [rows[0], rows[1], rows[0], *rows[2:4], rows[0]]  # moving on by three puts row 0 beside itself, twice
    assert not any(row.query.satisfied_by(row.pictures[0].product) for row in shuffle_queries(twins))
    with pytest.raises(ValueError, match="no query"):
        shuffle_queries([rows[0], rows[0]])


# ---- The base model's task


@pytest.fixture(scope="module")
def make_data():
    spec = importlib.util.spec_from_file_location("make_data", RECIPE)
    module = sys.modules["make_data"] = importlib.util.module_from_spec(spec)  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def scene(make_data, tmp_path):
    return make_data.Scene(PARTS.train, PARTS.train, range(4), tmp_path, random.Random(0))


def words(message: dict) -> str:
    return "".join(part.get("text", "") for part in message["content"])


def test_base_rows_are_chat_about_training_products(make_data, scene):
    mix = dict.fromkeys(make_data.SHAPES, 1.0)
    for row in make_data.rows(scene, 200, mix, "chat"):
        messages = [message for message in row["messages"] if message["role"] != "system"]
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
        pictures = [part["image"] for m in messages for part in m["content"] if part["type"] == "image"]
        assert {shown({"image": picture}) for picture in pictures} <= set(PARTS.train)
        assert all((scene.folder / picture).is_file() for picture in pictures)
        lower = any(words(m) in ("yes", "no") for m in messages if m["role"] == "assistant")
        assert lower == (row["shape"] == "language")


def test_questions_on_a_picture_are_half_yes_and_answered_right(make_data, scene):
    for _ in range(30):
        messages = make_data.picture_questions(scene)
        users, answers = messages[::2], [words(message) in ("Yes", "是") for message in messages[1::2]]
        assert len(answers) == 8 and sum(answers) == 4
        picture = None
        for message, yes in zip(users, answers, strict=True):
            picture = next((part["image"] for part in message["content"] if part["type"] == "image"), picture)
            asked = words(message).removeprefix("Is it ").removesuffix("?")
            asked = gloss(asked.removeprefix("是").removesuffix("吗？"))
            assert (asked in shown({"image": picture})) == yes


def test_base_texts_are_all_in_the_tokenizer_corpus(make_data, scene):
    known = set(make_data.sentences())
    for row in make_data.rows(scene, 200, dict.fromkeys(make_data.SHAPES, 1.0), "chat"):
        assert {words(message) for message in row["messages"]} <= known


# ---- The page


@pytest.fixture
def ranked(folder) -> list[RankedQuery]:
    ranked, rng = [], random.Random(0)
    for row in read(folder / "test.jsonl")[:6]:
        documents = [folder / document["image"] for document in (row["pos_doc"], *row["neg_docs"])]
        before = [Candidate(path, rng.gauss(0, 1), k == 0) for k, path in enumerate(documents)]
        after = [Candidate(path, rng.gauss(3 * (k == 0), 1), k == 0) for k, path in enumerate(documents)]
        ranked.append(RankedQuery(row["query"], before, after, gloss=gloss(row["query"])))
    return ranked


FIGURES = [Figure("before", 0.258, 0.22, 0.30), Figure("after <300>", 0.97, 0.94, 0.99, highlight=True)]
FIGURES.append(Figure("chance", 0.293))


def test_page_is_self_contained_and_shows_every_picture(ranked, tmp_path):
    write_rankings(tmp_path / "p.html", tmp_path / "p.png", title="A & B", rows=ranked, figures=FIGURES)
    page = (tmp_path / "p.html").read_text(encoding="utf-8")
    for row in ranked:
        assert row.query in page
        for candidate in row.before:
            assert page.count(base64.b64encode(Path(candidate.picture).read_bytes()).decode()) >= 2
    assert page.count('class="right"') == 2 * len(ranked)
    assert "A &amp; B" in page and "after &lt;300&gt;" in page and "0.258" in page
    assert "http" not in page and "<script" not in page
    assert page.count("src=") == page.count('src="data:image/png;base64,')


@pytest.mark.parametrize("with_font", [True, False])
def test_sheet_frames_the_right_product_in_green(ranked, tmp_path, monkeypatch, with_font):
    if not with_font:
        monkeypatch.setattr(rankings_page, "find_cjk_font", lambda size: None)
    write_rankings(tmp_path / "p.html", tmp_path / "p.png", title="Demo", rows=ranked, figures=FIGURES)
    with Image.open(tmp_path / "p.png") as sheet:
        counts = {colour: count for count, colour in sheet.convert("RGB").getcolors(1 << 24)}
    frame = (rankings_page.THUMB + 8) ** 2 - rankings_page.THUMB**2
    assert counts[rankings_page.RIGHT] >= 2 * len(ranked) * frame


def test_a_chinese_query_without_a_font_shows_its_gloss(monkeypatch):
    monkeypatch.setattr(rankings_page, "find_cjk_font", lambda size: None)
    assert rankings_page._spoken(RankedQuery("红色连衣裙", [], [], gloss="red dress"))[0] == "[zh] red dress"
