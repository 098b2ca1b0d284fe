"""Rows and a model for a side-by-side bench beyond those it brings: `python benchmarks/shapes.py PEER_HOME OUT`.

A folder of OUT for each shape, itself a PEER_HOME: its `data/` holds the same rerank groups in Litchi's form and in
ms-swift's, of the pictures of PEER_HOME; all else are links. ms-swift knows no prompt for this reranker, so its rows
bring the text of Litchi's: both compute the same tokens for a pair. `middle` is a random model of 60 M parameters with
32,768 tokens and the tokenizer of `tiny-qwen25vl`.

    pairs       a text query, 3 picture documents         200 groups: those of the bench's `rerank.jsonl`
    pictureq    a picture query, 16 text documents        80 groups
    pictured    a text query, 16 picture documents        20 groups
    catalogue   the same out of 40 pictures                20 groups
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from middle import write_middle

from litchi.data.templates import TEMPLATES

PROMPT = TEMPLATES["lychee"]
DOCUMENTS = 16
WORDS = (
    "red", "green", "blue", "yellow", "black", "white", "orange", "purple",
    "circle", "square", "triangle", "small", "large", "on", "ground", "stands",
)  # fmt: skip
Content = dict[str, str]
Group = tuple[Content, list[Content]]


def picture_queries(pictures: list[str], rng: random.Random) -> Iterator[Group]:
    for picture in pictures[:80]:
        texts = [" ".join(rng.choices(WORDS, k=rng.randint(4, 14))) for _ in range(DOCUMENTS)]
        yield {"text": "this one", "image": picture}, [{"text": text} for text in texts]


def picture_documents(pictures: list[str], rng: random.Random) -> Iterator[Group]:
    for _ in range(20):
        chosen = rng.sample(pictures, DOCUMENTS)
        yield {"text": " ".join(rng.choices(WORDS, k=4))}, [{"text": "picture", "image": p} for p in chosen]


def brought_groups(rows: list[str]) -> Iterator[Group]:
    for row in map(json.loads, rows):
        yield {"text": row["query"]}, [row["pos_doc"], *row["neg_docs"]]


def for_litchi(query: Content, documents: list[Content]) -> dict[str, Any]:
    return {"query": query, "pos_doc": documents[0], "neg_docs": documents[1:]}


def for_swift(query: Content, documents: list[Content]) -> dict[str, Any]:
    def written(content: Content) -> str:
        return "<image>" * ("image" in content) + content["text"]

    def message(content: Content) -> list[dict[str, str]]:
        return [{"role": "user", "content": written(content)}]

    def images(content: Content) -> list[str]:
        return [content["image"]] if "image" in content else []

    system, user = PROMPT.text.removeprefix("<|im_start|>system\n").split("<|im_end|>\n<|im_start|>user\n")
    before = user.partition("{document}")[0].format(instruction=PROMPT.instruction, query=written(query))
    row: dict[str, Any] = {
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": before}],
        "positive_messages": [message(documents[0])],
        "negative_messages": [message(d) for d in documents[1:]],
    }
    if images(query):
        row["images"] = images(query)
    if any(images(d) for d in documents):
        row["positive_images"] = [images(documents[0])]
        row["negative_images"] = [images(d) for d in documents[1:]]
    return row


def write_shape(home: Path, folder: Path, groups: list[Group]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "data").mkdir(parents=True)
    for entry in home.iterdir():
        if entry.name not in ("data", "out"):
            (folder / entry.name).symlink_to(entry.resolve())
    for name, form in (("rerank.jsonl", for_litchi), ("rerank_swift.jsonl", for_swift)):
        lines = [json.dumps(form(query, documents)) + "\n" for query, documents in groups]
        (folder / "data" / name).write_text("".join(lines), encoding="utf-8")


def main(home: Path, out: Path) -> None:
    rng = random.Random(0)
    rows = (home / "data" / "rerank.jsonl").read_text(encoding="utf-8").splitlines()
    write_shape(home, out / "pairs", list(brought_groups(rows)))
    pictures = sorted(str(p) for p in (home / "data" / "images").iterdir())
    write_shape(home, out / "pictureq", list(picture_queries(pictures, rng)))
    write_shape(home, out / "pictured", list(picture_documents(pictures, rng)))
    write_shape(home, out / "catalogue", list(picture_documents(pictures[:40], rng)))
    write_middle(home / "tiny-qwen25vl", out / "middle")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
