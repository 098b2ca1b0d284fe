"""Cut the Qwen2.5 tokenizer down to what the tiny base model reads, and write its processor folder.

    python recipes/tiny_base/tokenizer.py --full DIR --out DIR

The first DIR is the folder of a Qwen2.5 model (tokenizer.json), or dashscope/resources of the PyPI package dashscope,
which brings the same vocabulary as qwen.tiktoken. Texts of the corpus (the catalogue's names and queries, the chat
rows, the rerank prompts, printable ASCII) keep exactly their pieces; any other text still has one, from smaller pieces
down to bytes. The reduced vocabulary has about 800 pieces instead of 151,643, so embeddings stay small.
"""

from __future__ import annotations

import argparse
import base64
import json
import string
from collections.abc import Iterator
from pathlib import Path

from make_data import sentences
from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from litchi.data.templates import TEMPLATES
from litchi.prepare.catalogue import INSTRUCTION
from litchi.prepare.catalogue_text import LANGUAGES, PRODUCTS, names, partial_queries

PUNCTUATION = "，。！？、；：“”‘’（）《》【】…—·￥"
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
CHAT_TEMPLATE = """\
{%- macro show(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}
{%- for part in content -%}
{%- if part.type in ('image', 'image_url') -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type in ('video', 'video_url') -%}<|vision_start|><|video_pad|><|vision_end|>
{%- else -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if messages[0].role != 'system' -%}
{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' -%}
{%- generation -%}{{ show(message.content) + '<|im_end|>\\n' }}{%- endgeneration -%}
{%- else -%}{{ show(message.content) + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

# The rest of a Qwen2.5 tokenizer.json besides its pieces: how text is cut into words, and the control tokens.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
ADDED = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>"),
)

Merge = tuple[str, str]


def corpus() -> Iterator[str]:
    """Give every text whose pieces must be kept, in the surroundings in which it is tokenised."""
    yield from sentences()
    yield from string.printable
    yield from PUNCTUATION
    yield from (f"{role}\n" for role in ("system", "user", "assistant"))
    for template in TEMPLATES.values():
        yield from (template.yes, template.no, " " + template.yes, " " + template.no)
        for instruction in {template.instruction, INSTRUCTION}:
            for query in queries():
                prompt = template.text.replace("{instruction}", instruction).replace("{query}", query)
                yield prompt.replace("{document}", PICTURE)


def queries() -> Iterator[str]:
    for product in PRODUCTS:
        for language in LANGUAGES:
            yield from names(product, language)
            yield from (query.text for query in partial_queries(product, language))


def reduce(vocabulary: dict[str, int], merges: list[Merge], texts: list[str]) -> tuple[dict[str, int], list[Merge]]:
    """Keep the bytes, the pieces that occur in the texts and all pieces these are merged from; renumber them."""
    halves = {left + right: (left, right) for left, right in merges}
    kept = {piece for piece, number in vocabulary.items() if number < 256}  # the bytes, from which all text can be made
    wanted = [piece for piece in pieces(vocabulary, merges, texts) if piece in vocabulary]
    while wanted:
        piece = wanted.pop()
        if piece not in kept:
            kept.add(piece)
            wanted += halves[piece]
    numbered = {piece: number for number, piece in enumerate(sorted(kept, key=vocabulary.__getitem__))}
    return numbered, [pair for pair in merges if kept.issuperset({*pair, "".join(pair)})]


def tokenizer_json(vocabulary: dict[str, int], merges: list[Merge]) -> dict:
    """Assemble a tokenizer.json; the control tokens follow the pieces."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    split = {"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": len(vocabulary) + k, "content": token, **flags, "special": token in SPECIAL}
            for k, token in enumerate(SPECIAL + ADDED)
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, BYTE_LEVEL]},
        "post_processor": BYTE_LEVEL,
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def pieces(vocabulary: dict[str, int], merges: list[Merge], texts: list[str]) -> set[str]:
    return {piece for cut in encode(tokenizer_json(vocabulary, merges), texts) for piece in cut}


def encode(tokenizer: dict, texts: list[str]) -> Iterator[list[str]]:
    encoder = Tokenizer.from_str(json.dumps(tokenizer))
    for start in range(0, len(texts), 4096):
        yield from (e.tokens for e in encoder.encode_batch(texts[start : start + 4096], add_special_tokens=False))


def check(full: dict, reduced: dict, texts: list[str]) -> None:
    """Stop unless both tokenizers cut every text into the same pieces."""
    for text, before, after in zip(texts, encode(full, texts), encode(reduced, texts), strict=True):
        if before != after:
            raise SystemExit(f"error: {text!r} is {before} in the full tokenizer and {after} in the reduced one")


# ---- Files


def read(folder: Path) -> tuple[dict[str, int], list[Merge]]:
    """Read vocabulary and merges from tokenizer.json or qwen.tiktoken."""
    if (folder / "tokenizer.json").is_file():
        model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        return model["vocab"], [(left, right) for left, right in pairs]
    if (folder / "qwen.tiktoken").is_file():
        return read_tiktoken(folder / "qwen.tiktoken")
    raise SystemExit(f"error: neither tokenizer.json nor qwen.tiktoken ({folder}). --full names the full tokenizer")


def read_tiktoken(path: Path) -> tuple[dict[str, int], list[Merge]]:
    """Read ranks of byte strings, in base64; a piece is merged from the two parts that all lower ranks leave of it."""
    lines = (line.split() for line in path.read_bytes().splitlines())
    ranks = {base64.b64decode(piece): int(rank) for piece, rank in lines}
    letters = bytes_to_unicode()
    spell = {piece: "".join(letters[byte] for byte in piece) for piece in ranks}
    merges = [tuple(spell[part] for part in parts(piece, ranks)) for piece in sorted(ranks, key=ranks.__getitem__)]
    return {spell[piece]: rank for piece, rank in ranks.items()}, [pair for pair in merges if len(pair) == 2]


def parts(piece: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    left = [piece[k : k + 1] for k in range(len(piece))]
    while len(left) > 2:
        at = min(range(len(left) - 1), key=lambda k: ranks.get(left[k] + left[k + 1], len(ranks)))
        left[at : at + 2] = [left[at] + left[at + 1]]
    return left


def write(folder: Path, tokenizer: dict, min_pixels: int, max_pixels: int) -> None:
    pictures = {
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "size": {"shortest_edge": min_pixels, "longest_edge": max_pixels},  # both are areas, in pixels
    }
    owner = {"processor_class": "Qwen2_5_VLProcessor"}
    files = {
        "tokenizer_config.json": tokenizer_config(tokenizer) | owner,
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessor"} | pictures | owner,
        "video_preprocessor_config.json": {"video_processor_type": "Qwen2VLVideoProcessor"} | pictures | owner,
    }
    folder.mkdir(parents=True, exist_ok=True)
    compact = json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":"))
    (folder / "tokenizer.json").write_text(compact, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def tokenizer_config(tokenizer: dict) -> dict:
    tokens = tokenizer["added_tokens"]
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "added_tokens_decoder": {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in tokens},
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "unk_token": None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", type=Path, required=True, help="folder with the tokenizer.json of a Qwen2.5 model")
    parser.add_argument("--out", type=Path, required=True, help="processor folder to write")
    parser.add_argument("--min-pixels", type=int, default=56 * 56)
    parser.add_argument("--max-pixels", type=int, default=56 * 56)
    arguments = parser.parse_args()
    full, texts = read(arguments.full), list(dict.fromkeys(corpus()))
    reduced = tokenizer_json(*reduce(*full, texts))
    check(tokenizer_json(*full), reduced, texts)
    write(arguments.out, reduced, arguments.min_pixels, arguments.max_pixels)
    size = len(reduced["model"]["vocab"]) + len(reduced["added_tokens"])
    print(f"{arguments.out}: {size} tokens; {len(texts)} texts have the same pieces as before")


if __name__ == "__main__":
    main()
