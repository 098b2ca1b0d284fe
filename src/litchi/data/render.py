"""Sample -> Example: the prompt as tokens, its labels, its spans and where its pictures stand.

Chat: the skeleton of the processor's chat template is rendered with a placeholder for every text, then the texts
are put in place; so a label mask is known by construction and nothing is ever searched for in a user's words.
Rerank: one prompt per document, each tokenised whole; the group's prefix is their longest common token prefix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np

from litchi.data.boxes import say_boxes
from litchi.data.detail import Budget
from litchi.data.jsonl import RowError, parse_sample
from litchi.data.processor import END_OF_TURN, IMAGE_PAD, VIDEO_PAD, VISION_END, VISION_START, Processor
from litchi.data.segments import Cutting
from litchi.data.templates import RerankTemplate
from litchi.types import (
    IGNORE,
    ChatSample,
    Content,
    Example,
    Finding,
    Media,
    PlacedMedia,
    RerankSample,
    Sample,
    Source,
    VisionSpec,
)

if TYPE_CHECKING:
    from litchi.data.frame_cache import FrameCache  # which needs torch

Grid = tuple[int, int, int]
GridOf = Callable[[Media], Grid | tuple[int, int, int, float]]  # of a video with the seconds of a frame of its grid

_OPEN, _CLOSE = "\ue000", "\ue001"  # private use: stand around the number of a text in a rendered skeleton
_SLOT = re.compile(f"{_OPEN}(\\d+){_CLOSE}")
_FIELD = re.compile(r"\{(instruction|query|document)\}")


@dataclass(frozen=True)
class Renderer:
    """Everything a line needs on its way to an example. Pure: the same line gives the same example anywhere.

    Args:
        task: "chat" or "rerank".
        processor: tokenizer, chat template and pixel budget.
        template: the rerank prompt (None for chat).
        instruction: replaces the template's default where the row has none.
        media_root: what relative paths are relative to.
        window: grey levels (low, high) of 16-bit pictures; None divides by 257.
        cutting: of long videos into rows of their own, which a scan does; None: they stay whole.
        frames: where decoded frames are kept; None: nowhere.
        budget: of pixels by detail, which a scan and a server share out.
        stages: how pictures are cut in other stages of a run: what a row with boxes takes then is scanned too.
    """

    task: Literal["chat", "rerank"]
    processor: Processor
    template: RerankTemplate | None = None
    instruction: str | None = None
    media_root: str = "."
    window: tuple[int, int] | None = None
    cutting: Cutting | None = None
    frames: FrameCache | None = None
    budget: Budget | None = None
    stages: tuple[VisionSpec, ...] = ()

    def parse(self, raw: bytes, source: Source, *, require_labels: bool = True) -> tuple[Sample, list[Finding]]:
        """Parse one line of a file. Raises RowError."""
        return parse_sample(
            raw, task=self.task, source=source, media_root=self.media_root, require_labels=require_labels
        )

    def render(self, sample: Sample, grid_of: GridOf, documents: Sequence[int] | None = None) -> Example:
        """Render a sample for training or scoring; `documents` picks some of a group's documents, in that order."""
        if isinstance(sample, ChatSample):
            return _render_chat(self.said(sample, grid_of), self.processor, grid_of)
        if self.template is None:
            raise ValueError("a rerank sample needs a template")
        return _render_rerank(sample, self, grid_of, documents)

    def render_prompt(self, sample: ChatSample, grid_of: GridOf) -> tuple[Example, str]:
        """The prompt of a chat sample's last answer, and that answer as text."""
        sample = self.said(sample, grid_of)
        *before, last = sample.turns
        stream = _chat_stream(ChatSample(sample.source, sample.id, tuple(before)), self.processor, prompt=True)
        return _one_span(sample, stream, self.processor, grid_of), "".join(p for p in last.parts if isinstance(p, str))

    def said(self, sample: ChatSample, grid_of: GridOf) -> ChatSample:
        """The sample with its boxes as text, in pixels of the pictures as they are shown."""
        return say_boxes(sample, self.processor.vision.patch, grid_of)


class _Stream:
    """Tokens before pictures are expanded: `ids` holds a token id, or -(k + 1) for the k-th distinct picture."""

    def __init__(self, processor: Processor):
        self.processor = processor
        self.ids: list[int] = []
        self.labels: list[bool] = []
        self.media: list[Media] = []
        self._text = ""

    def text(self, text: str) -> None:
        self._text += text

    def flush(self, train: bool = False) -> None:
        """Encode the text gathered so far as one run, so that it is tokenised as the model would see it."""
        if self._text:
            self.push(self.processor.encode(self._text), train)
            self._text = ""

    def push(self, ids: list[int], train: bool = False) -> None:
        self.ids += ids
        self.labels += [train] * len(ids)

    def control(self, token: str, train: bool = False) -> None:
        self.flush()
        self.push([self.processor.control(token)], train)

    def picture(self, media: Media) -> None:
        self.flush()
        known = next((i for i, m in enumerate(self.media) if m.key == media.key), len(self.media))
        if known == len(self.media):
            self.media.append(media)
        self.push([-known - 1])

    def content(self, content: Content) -> None:
        for media in content.media:
            self.control(VISION_START)
            self.picture(media)
            self.control(VISION_END)
        self.text(content.text)

    def literal(self, text: str) -> None:
        """Template text: its control tokens are control tokens."""
        for i, piece in enumerate(self.processor.split_controls(text)):
            if i % 2:
                self.control(piece)
            else:
                self.text(piece)


# ---------------------------------------------------------------------------------------------------------- chat


@lru_cache(maxsize=4096)
def _skeleton(template: str, shape: tuple[tuple[str, tuple[str, ...]], ...], prompt: bool) -> str:
    """Render the chat template for turns of this shape (role, kinds of parts), texts as numbered placeholders."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    messages, number = [], 0
    for role, kinds in shape:
        parts: list[dict[str, str]] = []
        for kind in kinds:
            parts.append({"type": "text", "text": f"{_OPEN}{number}{_CLOSE}"} if kind == "text" else {"type": kind})
            number += kind == "text"
        only_text = all(kind == "text" for kind in kinds)
        messages.append({"role": role, "content": "".join(p["text"] for p in parts) if only_text else parts})
    try:
        rendered, _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=prompt)
    except TemplateError as error:  # a template may refuse an order of roles
        roles = ", ".join(role for role, _ in shape) or "none"
        raise RowError("chat_template", f"the chat template refuses turns of {roles}: {error}") from None
    return rendered[0]


def _chat_stream(sample: ChatSample, processor: Processor, *, prompt: bool = False) -> _Stream:
    if processor.chat_template is None:
        raise RowError("no_chat_template", "the model folder has no chat template (chat_template.jinja)")
    # an empty turn holds an empty text, so that the end of an empty answer is found and learnt
    turns = [(t, t.parts or ("",)) for t in sample.turns]
    shape = tuple((t.role, tuple(p.kind if isinstance(p, Media) else "text" for p in parts)) for t, parts in turns)
    texts = [(p, t.role == "assistant", t.train) for t, parts in turns for p in parts if isinstance(p, str)]
    media = iter([p for _, parts in turns for p in parts if isinstance(p, Media)])
    out = _Stream(processor)
    # the split gives literal, number, literal, number, ...: an answer's end of turn opens the literal behind it
    pieces = _SLOT.split(_skeleton(processor.chat_template, shape, prompt))
    trained = answering = False
    for i, piece in enumerate(pieces):
        if i % 2 == 0:
            if answering and piece:  # empty between two texts of one turn
                piece = _close_answer(out, piece, trained)
                answering = False
            _push_literal(out, piece, media)
            continue
        text, is_answer, train = texts[int(piece)]
        if is_answer and not answering:
            out.flush()  # the header is tokenised on its own, exactly as it stands before a generated answer
            answering, trained = True, train
        out.text(text)
    out.flush()
    return out


def _close_answer(out: _Stream, literal: str, trained: bool) -> str:
    """End an answer: its text, the end-of-turn token and the newline behind it are learnt; return what is left."""
    if not literal.startswith(END_OF_TURN):
        raise RowError("chat_template", f"the chat template ends an answer with {literal[:20]!r}, not {END_OF_TURN}")
    out.flush(trained)
    out.control(END_OF_TURN, trained)
    literal = literal[len(END_OF_TURN) :]
    if literal.startswith("\n"):
        out.text("\n")
        out.flush(trained)
        literal = literal[1:]
    return literal


def _push_literal(out: _Stream, literal: str, media: Iterator[Media]) -> None:
    for i, piece in enumerate(out.processor.split_controls(literal)):
        if piece in (IMAGE_PAD, VIDEO_PAD):
            out.picture(next(media))
        elif i % 2:
            out.control(piece)
        else:
            out.text(piece)


def _render_chat(sample: ChatSample, processor: Processor, grid_of: GridOf) -> Example:
    example = _one_span(sample, _chat_stream(sample, processor), processor, grid_of)
    if not (example.labels != IGNORE).any():
        raise RowError("nothing_to_learn", "no token of this row is trained on")
    return example


def _one_span(sample: ChatSample, stream: _Stream, processor: Processor, grid_of: GridOf) -> Example:
    placed = tuple(_place(m, grid_of) for m in stream.media)
    ids, labels, at = _expand(stream.ids, stream.labels, placed, processor)
    return Example(
        id=sample.id,
        source=sample.source,
        ids=ids,
        labels=labels,
        spans=((0, len(ids), -1),),
        media=placed,
        media_at=at,
    )


def _place(media: Media, grid_of: GridOf) -> PlacedMedia:
    t, h, w, *step = grid_of(media)
    return PlacedMedia(media, (t, h, w), *step)


def _expand(
    ids: list[int], train: list[bool], placed: Sequence[PlacedMedia], processor: Processor, offset: int = 0
) -> tuple[np.ndarray, np.ndarray, tuple[tuple[int, int], ...]]:
    """Put as many pad tokens as a picture has features in its place. `at` counts from `offset`."""
    merge = processor.vision.merge
    out: list[int] = []
    labels: list[int] = []
    at: list[tuple[int, int]] = []
    for token, learnt in zip(ids, train, strict=True):
        if token < 0:
            one = placed[-token - 1]
            count = one.tokens(merge)
            at.append((-token - 1, offset + len(out)))
            out += [processor.control(IMAGE_PAD if one.media.kind == "image" else VIDEO_PAD)] * count
            labels += [IGNORE] * count
        else:
            out.append(token)
            labels.append(token if learnt else IGNORE)
    return np.array(out, np.int32), np.array(labels, np.int32), tuple(at)


# -------------------------------------------------------------------------------------------------------- rerank


def _render_rerank(
    sample: RerankSample, renderer: Renderer, grid_of: GridOf, documents: Sequence[int] | None
) -> Example:
    chosen = [sample.documents[i] for i in (documents if documents is not None else range(len(sample.documents)))]
    processor, media = renderer.processor, []
    prompts = []
    for document in chosen:
        stream = _Stream(processor)
        stream.media = media  # one numbering for the whole group, so equal pictures compare equal
        _push_prompt(stream, renderer, sample, document.content)
        prompts.append(stream.ids)
    shared = common_prefix(prompts)
    placed = tuple(_place(m, grid_of) for m in media)
    parts = [prompts[0][:shared]] + [p[shared:] for p in prompts]
    spans: list[tuple[int, int, int]] = []
    streams, at, end = [], [], 0
    for i, part in enumerate(parts):
        ids, _, where = _expand(part, [False] * len(part), placed, processor, end)
        spans.append((end, end + len(ids), -1 if i == 0 else 0))
        streams.append(ids)
        at += where
        end += len(ids)
    ids = np.concatenate(streams)
    return Example(
        id=sample.id,
        source=sample.source,
        ids=ids,
        labels=np.full(len(ids), IGNORE, np.int32),
        spans=tuple(spans),
        media=placed,
        media_at=tuple(at),
        scored=tuple(stop - 1 for _, stop, _ in spans[1:]),
        doc_ids=tuple(d.id for d in chosen),
        targets=tuple(d.label for d in chosen),
    )


def _push_prompt(stream: _Stream, renderer: Renderer, sample: RerankSample, document: Content) -> None:
    assert renderer.template is not None
    for i, piece in enumerate(_FIELD.split(renderer.template.text)):
        if i % 2 == 0:
            stream.literal(piece)
        elif piece == "instruction":
            stream.text(sample.instruction or renderer.instruction or renderer.template.instruction)
        else:
            stream.content(sample.query if piece == "query" else document)
    stream.flush()


def common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """Length of the longest common prefix that leaves every prompt at least one token of its own."""
    limit = min(len(p) for p in prompts) - 1
    first = prompts[0]
    for other in prompts[1:]:
        limit = next((i for i in range(limit) if first[i] != other[i]), limit)
    return limit
