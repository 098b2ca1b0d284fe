"""What the tests of the model and the batches share: drawn pictures, rows as a user writes them, the oracle's input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

from litchi.batch.collate import collate
from litchi.batch.loader import load_patches, media_grid
from litchi.data.media import decode_image
from litchi.data.render import Renderer
from litchi.data.templates import TEMPLATES
from litchi.types import ChatSample, Media, RerankSample, Source

MARK = "<|vision_start|><|image_pad|><|vision_end|>"


def draw(path: Path, width: int, height: int, seed: int = 0) -> str:
    """Save a picture of smooth noise; return its path."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(path)
    return str(path)


def renderer_for(task, processor, template="lychee"):
    return Renderer(task, processor, TEMPLATES[template] if task == "rerank" else None)


def sample(renderer, fields, number=1):
    """Parse a row given as a dict."""
    raw = json.dumps(fields, ensure_ascii=False).encode()
    return renderer.parse(raw, Source("rows.jsonl", number), require_labels=False)[0]


def chat(renderer, *turns, number=1):
    """A chat sample of (role, content) or (role, content, train)."""
    keys = ("role", "content", "train")
    return sample(renderer, {"messages": [dict(zip(keys, turn, strict=False)) for turn in turns]}, number)


def say(text="", *pictures):
    """Content of a user's turn: pictures, then text."""
    parts = [{"type": "image", "image": picture} for picture in pictures]
    return [*parts, {"type": "text", "text": text}] if text else parts


def render(renderer, one, documents=None):
    return renderer.render(one, lambda media: media_grid(media, renderer), documents)


def pack(renderer, examples, count_units=None):
    """The batch of some examples."""
    return collate(examples, load_patches(examples, renderer), renderer.processor, count_units)


# ---- What transformers is given for the same


def pictures_of(one) -> list[Image.Image]:
    """All pictures of a chat sample as transformers takes them."""
    return [Image.fromarray(decode_image(p)) for turn in one.turns for p in turn.parts if isinstance(p, Media)]


def oracle_chat(hf_processor, one: ChatSample, *, prompt: bool = False):
    """Inputs that transformers' own processor makes of a chat sample (with `prompt`: up to the last answer)."""
    turns = one.turns[:-1] if prompt else one.turns
    messages = [
        {
            "role": turn.role,
            "content": [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in turn.parts],
        }
        for turn in turns
    ]
    text = hf_processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    return hf_processor(text=[text], images=pictures_of(one) or None, return_tensors="pt")


def oracle_pairs(hf_processor, one: RerankSample, numbers, *, side="right", template="lychee"):
    """Inputs of a group's prompts, padded by transformers."""
    kind = TEMPLATES[template]
    texts, pictures = [], []
    for number in numbers:
        slots = {"{query}": one.query, "{document}": one.documents[number].content}
        text = kind.text.replace("{instruction}", one.instruction or kind.instruction)
        for slot, content in slots.items():
            text = text.replace(slot, MARK * len(content.media) + content.text)
        texts.append(text)
        order = sorted(slots.items(), key=lambda pair: kind.text.index(pair[0]))
        pictures += [Image.fromarray(decode_image(m)) for _, content in order for m in content.media]
    hf_processor.tokenizer.padding_side = side
    return hf_processor(text=texts, images=pictures or None, return_tensors="pt", padding=True)
