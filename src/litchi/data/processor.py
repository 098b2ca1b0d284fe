"""The processor of a model folder, read without torch: text -> ids, chat template, pixel budget.

`load_processor(folder)` reads tokenizer.json, the chat template and the picture settings; everything that renders
samples (index, loader workers, evaluation, serving) goes through the one `Processor`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from litchi.errors import UsageError
from litchi.types import VideoSpec, VisionSpec

IMAGE_PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
END_OF_TURN = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
# added tokens of the family that are not marked as special, and are no words all the same
MARKS = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
)


@dataclass(frozen=True)
class Processor:
    """Text to ids and the picture settings of one model. Pickles small and cheap for loader workers.

    Args:
        tokenizer_json: the text of tokenizer.json.
        chat_template: the Jinja text of the chat template, or None.
        vision: how pictures become tokens, with the pixel budget in force.
    """

    tokenizer_json: str
    chat_template: str | None
    vision: VisionSpec

    @cached_property
    def controls(self) -> dict[str, int]:
        """The added tokens (`<|im_start|>`, ...) with their ids."""
        return {t["content"]: t["id"] for t in json.loads(self.tokenizer_json)["added_tokens"]}

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Ids of all tokens, by their letters as the file writes them."""
        return json.loads(self.tokenizer_json)["model"]["vocab"] | self.controls

    @cached_property
    def _plain(self) -> Tokenizer:
        """A tokenizer that knows no control tokens, so that letters typed by a user stay letters; words that somebody
        has added to the vocabulary it knows."""
        spec = json.loads(self.tokenizer_json)
        spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] in self.words]
        return Tokenizer.from_str(json.dumps(spec))

    @cached_property
    def words(self) -> dict[str, int]:
        """The added tokens that are words, with their ids."""
        added = json.loads(self.tokenizer_json)["added_tokens"]
        return {t["content"]: t["id"] for t in added if not t["special"] and t["content"] not in MARKS}

    @cached_property
    def _moved(self) -> dict[int | None, int]:
        """Ids that `_plain` gives to words, as if no control token stood before them -> their own."""
        return {self._plain.token_to_id(word): number for word, number in self.words.items()}

    def spell(self, word: str) -> list[int]:
        """Ids of the pieces of a word, as if it had not been added."""
        spec = json.loads(self.tokenizer_json)
        return Tokenizer.from_str(json.dumps({**spec, "added_tokens": []})).encode(word, add_special_tokens=False).ids

    def with_words(self, words: Iterable[str]) -> Processor:
        """The same processor with words added to the vocabulary, each behind the last token; those it has stay."""
        new = [word for word in dict.fromkeys(words) if word not in self.numbers]
        if not new:
            return self
        spec, first = json.loads(self.tokenizer_json), max(self.numbers.values()) + 1
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
        spec["added_tokens"] += [{"id": first + n, "content": word, **plain} for n, word in enumerate(new)]
        return replace(self, tokenizer_json=json.dumps(spec, ensure_ascii=False))

    @cached_property
    def _full(self) -> Tokenizer:
        return Tokenizer.from_str(self.tokenizer_json)

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        return re.compile("(" + "|".join(re.escape(t) for t in sorted(self.controls, key=len, reverse=True)) + ")")

    def __getstate__(self) -> dict[str, Any]:  # the tokenizers are rebuilt where they are needed
        return {"tokenizer_json": self.tokenizer_json, "chat_template": self.chat_template, "vision": self.vision}

    def encode(self, text: str) -> list[int]:
        """Encode text in which nothing is a control token."""
        return list(self._encode_run(text))

    @cached_property
    def _encode_run(self) -> Callable[[str], tuple[int, ...]]:
        """The documents of a group share most of their prompt, so a run of text is encoded once."""
        moved, plain = self._moved, self._plain

        def encode(text: str) -> tuple[int, ...]:
            ids = plain.encode(text, add_special_tokens=False).ids
            return tuple(moved.get(number, number) for number in ids) if moved else tuple(ids)

        return lru_cache(maxsize=65_536)(encode)

    def forget(self) -> None:
        """Drop the texts that were encoded: a server keeps no user's words, and they would add up."""
        self.__dict__.pop("_encode_run", None)

    def split_controls(self, literal: str) -> list[str]:
        """Cut template text at its control tokens: ["", "<|im_start|>", "user\\n", ...], controls at odd places."""
        return self._control_pattern.split(literal)

    def decode(self, ids: list[int]) -> str:
        """Text of generated ids, control tokens left out."""
        return self._full.decode(ids, skip_special_tokens=True)

    def control(self, token: str) -> int:
        """Id of a control token; UsageError when the tokenizer has no such token."""
        if token not in self.controls:
            raise UsageError(f"the tokenizer has no {token}", why="it is not a tokenizer of the Qwen2-VL family")
        return self.controls[token]

    def word(self, word: str) -> int:
        """Id of a label word, which must be one token."""
        ids = self.encode(word)
        if len(ids) != 1:
            raise UsageError(
                f"the label word {word!r} is {len(ids)} tokens in this tokenizer",
                why="a score is read from the logit of one token",
                remedy="Choose a template whose label words are single tokens (data.template)",
            )
        return ids[0]

    def with_pixels(self, minimum: int | None, maximum: int | None) -> Processor:
        """The same processor with another pixel budget; None keeps the model's own limit."""
        low = self.vision.min_pixels if minimum is None else minimum
        high = self.vision.max_pixels if maximum is None else maximum
        if low > high:
            if minimum is not None and maximum is not None:
                raise UsageError(
                    f"data.pixels.min={low} is above data.pixels.max={high}",
                    remedy="Lower the first or raise the second",
                )
            low = high = minimum if minimum is not None else high  # only one was set: the other gives way
        return replace(self, vision=replace(self.vision, min_pixels=low, max_pixels=high))

    def with_video(self, **settings: Any) -> Processor:
        """The same processor with other fields of its `VideoSpec`; None keeps the model's own.

        Raises UsageError: limits that cross.
        """
        video = replace(self.vision.video, **{key: value for key, value in settings.items() if value is not None})
        for low, high, name in (("min_frames", "max_frames", "frames"), ("min_pixels", "max_pixels", "pixels")):
            if getattr(video, low) > getattr(video, high):
                raise UsageError(
                    f"data.video: {getattr(video, low)} {name} at least, {getattr(video, high)} at most",
                    remedy=f"Lower {low} or raise {high}",
                )
        return replace(self, vision=replace(self.vision, video=video))


def load_processor(folder: str | Path) -> Processor:
    """Read the processor files of a model folder.

    Raises:
        UsageError: a file is missing or does not belong to the family.
    """
    folder = Path(folder)
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise UsageError(
            "tokenizer.json is missing", where=folder, remedy="Copy the base model's processor files beside the weights"
        )
    return Processor(
        tokenizer_json=tokenizer.read_text(encoding="utf-8"),
        chat_template=_read_chat_template(folder),
        vision=_read_vision(folder),
    )


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _read_chat_template(folder: Path) -> str | None:
    """A template of its own file wins over the one inside tokenizer_config.json, as in transformers."""
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = _read_json(folder / name).get("chat_template")
        if isinstance(template, str):
            return template
    return None


def _read_vision(folder: Path) -> VisionSpec:
    picture = _read_json(folder / "preprocessor_config.json") or _read_json(folder / "processor_config.json").get(
        "image_processor", {}
    )
    if not picture:
        raise UsageError(
            "preprocessor_config.json is missing",
            where=folder,
            why="it holds the pixel budget the model was trained with",
            remedy="Copy the base model's processor files beside the weights",
        )
    config = _read_json(folder / "config.json").get("vision_config", {})
    size = picture.get("size") or {}
    video = _read_json(folder / "video_preprocessor_config.json")
    frame, usual = video.get("size") or {}, VideoSpec()
    return VisionSpec(
        patch=picture["patch_size"],
        merge=picture["merge_size"],
        temporal=picture["temporal_patch_size"],
        window=config.get("window_size"),
        # where both spellings stand, transformers takes the older one
        min_pixels=picture.get("min_pixels") or size["shortest_edge"],
        max_pixels=picture.get("max_pixels") or size["longest_edge"],
        mean=tuple(picture["image_mean"]),
        std=tuple(picture["image_std"]),
        video=VideoSpec(
            fps=video.get("fps") or usual.fps,
            min_frames=video.get("min_frames") or usual.min_frames,
            max_frames=video.get("max_frames") or usual.max_frames,
            min_pixels=video.get("min_pixels") or frame.get("shortest_edge") or usual.min_pixels,
            max_pixels=video.get("max_pixels") or frame.get("longest_edge") or usual.max_pixels,
            per_second=config.get("tokens_per_second"),
        ),
    )
