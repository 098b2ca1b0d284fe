"""Write the golden files of the rerank prompts: what transformers' own tokenizer makes of each whole prompt.

    python tests/golden/make_templates.py DIR

DIR is the folder of a Qwen2.5-VL model (tokenizer.json, tokenizer_config.json). Nothing of Litchi's renderer takes
part: a prompt is the template's text with its slots replaced. The real tokenizer is 7 MB, so `tokenizer.json` here is
its reduction to the pieces of these prompts, and `templates.json` says which real id each reduced one stands for.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
RECIPE = HERE.parents[1] / "recipes" / "tiny_base"
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"

# Ends of queries and beginnings of documents that a tokenizer merges with the letters beside them.
QUERIES = [
    "a red dress",
    "which of them is red?",
    "shoes (for running)",
    "哪一件是红色的？",
    "two lines\n",
    " led by a space",
]
DOCUMENTS = [
    "A red dress of cotton.",
    "(sold out) a red dress",
    '"Rosso", a dress',
    ": a list",
    "\nbegins with a newline",
    "\n\n  begins with two",
    "红色的连衣裙",
    "the same start, then one",
    "the same start, then another",
]
INSTRUCTIONS = [None, "Given a shopping query, find the product that matches it."]


def cases() -> list[dict]:
    """List (template, instruction, query, document) with the number of pictures before each text."""
    pairs = [((q, 0), (d, 0)) for q in QUERIES for d in DOCUMENTS]
    pairs += [((q, 0), (d, 1)) for q in QUERIES for d in ("", DOCUMENTS[1])]  # a document of a picture alone
    pairs += [((q, 1), (d, 0)) for q in ("", *QUERIES) for d in DOCUMENTS[1:5]]  # a query of a picture alone
    pairs += [((q, 1), (d, n)) for q in ("", QUERIES[1]) for d, n in (("", 1), (DOCUMENTS[1], 2))]
    names = ("lychee", "qwen3_vl_reranker", "mono_qwen2_vl")
    few = {*pairs[::7], *pairs[-4:]}  # the other templates differ in few places
    return [
        {"template": name, "instruction": instruction, "query": list(query), "document": list(document)}
        for name in names
        for query, document in pairs
        if name == "lychee" or (query, document) in few
        for instruction in (INSTRUCTIONS if name == "lychee" and (query, document) in few else [None])
    ]


def prompt(case: dict) -> str:
    """The whole prompt as one string."""
    from litchi.data.templates import TEMPLATES

    template = TEMPLATES[case["template"]]
    slots = {
        "{instruction}": case["instruction"] or template.instruction,
        "{query}": PICTURE * case["query"][1] + case["query"][0],
        "{document}": PICTURE * case["document"][1] + case["document"][0],
    }
    text = template.text
    for slot, value in slots.items():
        text = text.replace(slot, value)
    return text


def reduced_tokenizer(folder: Path, texts: list[str]) -> tuple[dict, list[int]]:
    """The tokenizer cut down to what these texts need, and the real id of each of its ids."""
    sys.path.insert(0, str(RECIPE))
    import tokenizer as recipe

    vocabulary, merges = recipe.read(folder)
    full = recipe.tokenizer_json(vocabulary, merges)
    reduced = recipe.tokenizer_json(*recipe.reduce(vocabulary, merges, texts))
    recipe.check(full, reduced, texts)
    real = {piece: vocabulary[piece] for piece in reduced["model"]["vocab"]}
    controls = {token["content"]: token["id"] for token in full["added_tokens"]}
    return reduced, [*real.values(), *(controls[token["content"]] for token in reduced["added_tokens"])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=HERE)
    arguments = parser.parse_args()

    import tokenizers
    import transformers

    oracle = transformers.AutoTokenizer.from_pretrained(arguments.folder)
    rows = cases()
    texts = [prompt(case) for case in rows]
    words = [word for word in ("yes", "no", "True", "False") if len(oracle.encode(word)) == 1]
    reduced, real_ids = reduced_tokenizer(arguments.folder, texts + words)
    golden = {
        "made_with": {"transformers": transformers.__version__, "tokenizers": tokenizers.__version__},
        "tokenizer": f"Qwen2.5-VL, {len(oracle)} tokens",
        "words": {word: oracle.encode(word) for word in words},
        "real_ids": real_ids,
        "cases": [case | {"ids": oracle.encode(text)} for case, text in zip(rows, texts, strict=True)],
    }
    lines = [json.dumps(case, ensure_ascii=False) for case in golden.pop("cases")]
    head = json.dumps(golden)[:-1]
    arguments.out.mkdir(parents=True, exist_ok=True)
    body = head + ', "cases": [\n' + ",\n".join(lines) + "\n]}\n"
    (arguments.out / "templates.json").write_text(body, encoding="utf-8")
    compact = json.dumps(reduced, ensure_ascii=False, separators=(",", ":"))
    (arguments.out / "tokenizer.json").write_text(compact, encoding="utf-8")
    print(f"{len(lines)} prompts, {len(real_ids)} of {len(oracle)} tokens")


if __name__ == "__main__":
    main()
