"""A job -> pieces that fit into a batch: rendered, measured, its pictures decoded. Each request on its own.

Whatever is wrong with a request is found here, before it meets others: a text too long, a picture that is broken,
huge or a bomb. The decoder, the renderer and the limits on pixels are those the model was trained with.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from litchi.batch.collate import collate
from litchi.batch.pictures import list_pictures
from litchi.batch.rows import fit_grid, size_of, with_step
from litchi.config.serve import Serve
from litchi.data.boxes import Frame, frame_of, only_picture
from litchi.data.detail import Detail, Shown, allot_pixels, list_media, measure_frames, with_pixels
from litchi.data.features import NO_STAMP, PictureName
from litchi.data.media import Header, MediaError, decode_image, picture_patches, read_header
from litchi.data.render import Renderer
from litchi.data.values import RowError
from litchi.data.video import read_video_header, sample_frames, video_patches, video_size
from litchi.errors import UserError
from litchi.serve.batcher import SPREAD_S, Budget, Work
from litchi.serve.jobs import ChatJob, Job, ScoreJob
from litchi.serve.limits import Refusal
from litchi.serve.memory import FeatureMemory, Held
from litchi.serve.requests import refuse_row
from litchi.types import Batch, ChatSample, Content, Example, Media, PlacedMedia, RerankSample

LETTERS_PER_TOKEN = 64  # no text has more; what is longer is refused without being tokenised
TOO_LARGE = frozenset({"media_too_large"})
DETAILS = 10_000  # of pictures, that are remembered


@dataclass(frozen=True, eq=False)
class Piece:
    """An example with the numbers of its documents in the job, and what its pictures are made of, by key."""

    example: Example
    group: int
    documents: tuple[int, ...]
    patches: Mapping[str, np.ndarray] = field(repr=False)
    features: Mapping[str, Held] = field(repr=False)
    query: Hashable = None  # equal for equal queries with equal instructions
    frame: Frame | None = None  # of the picture that boxes of the answer are to be in the pixels of


@dataclass(frozen=True)
class Preparer:
    """Everything a job needs on its way into a batch.

    Args:
        renderers: by task.
        max_tokens: of a prompt.
        memory: features of pictures met before, which need no decoding.
        threads: decode pictures beside each other.
        details: of pictures met before.
    """

    renderers: Mapping[str, Renderer]
    max_tokens: int
    budget: Budget
    limits: Serve
    memory: FeatureMemory
    threads: ThreadPoolExecutor
    details: dict[str, Detail] = field(default_factory=dict)

    def prepare(self, request: int, job: Job, now_s: float) -> list[Work]:
        """Pieces of a job, each due in its turn. Raises Refusal."""
        renderer = self.renderers["rerank" if isinstance(job, ScoreJob) else "chat"]
        try:
            pictures = Pictures(self, renderer)
            job = pictures.allot(job)
            if isinstance(job, ScoreJob):
                planned = self._plan_scores(job, renderer, pictures)
            else:
                example = self._render_chat(job.sample, renderer, pictures)
                frame = pictures.frame(job.sample) if job.restore else None
                planned = [Piece(example, 0, (0,), {}, {}, None, frame)]
            return [
                self._work(request, job, pictures.bring(piece), now_s, number) for number, piece in enumerate(planned)
            ]
        except RowError as error:
            raise refuse_row(error) from None
        except MediaError as error:
            raise _refuse_picture(error, _where(job, error)) from None
        except UserError as error:
            raise Refusal(400, "unusable", error.what) from None
        finally:
            renderer.processor.forget()

    def _work(self, request: int, job: Job, piece: Piece, now_s: float, number: int) -> Work:
        example = piece.example
        fresh = sum(placed.patches for placed in example.media if placed.media.key in piece.patches)
        held = sum(patches.nbytes for patches in piece.patches.values())
        room = job.max_tokens if isinstance(job, ChatJob) else 0
        kind = "chat" if isinstance(job, ChatJob) else "score"
        return Work(request, kind, example.tokens + room, fresh, now_s + SPREAD_S * number, held, piece)  # type: ignore[arg-type]

    # --------------------------------------------------------------------------------------------- what is asked

    def _plan_scores(self, job: ScoreJob, renderer: Renderer, pictures: Pictures) -> list[Piece]:
        planned = []
        for group, (sample, names) in enumerate(zip(job.samples, job.names, strict=True)):
            self._check_letters("query", sample.query)
            for name, document in zip(names, sample.documents, strict=True):
                self._check_letters(name, document.content)
            whole = renderer.render(sample, pictures.grid)
            self._check_prompts(whole, names)
            shares = cut_documents(whole, self.budget)
            for share in shares:
                example = whole if len(shares) == 1 else renderer.render(sample, pictures.grid, share)
                query = (sample.instruction, sample.query.text, tuple(media.key for media in sample.query.media))
                planned.append(Piece(example, group, share, {}, {}, query))
        return planned

    def _check_letters(self, name: str, content: Content) -> None:
        if len(content.text) > LETTERS_PER_TOKEN * self.max_tokens:
            raise self._too_long(name, f"{len(content.text)} letters")

    def _check_prompts(self, whole: Example, names: Sequence[str]) -> None:
        (_, prefix, _), *children = whole.spans
        for name, (start, end, _) in zip(names, children, strict=True):
            length = prefix + end - start
            if length > self.max_tokens:
                raise self._too_long(name, f"{length} tokens with the query")

    def _too_long(self, name: str, found: str) -> Refusal:
        message = f"{name} has {found}, {self.max_tokens} tokens are allowed: nothing is cut off"
        return Refusal(413, "too_long", message, param=name)

    def _render_chat(self, sample: ChatSample, renderer: Renderer, pictures: Pictures) -> Example:
        letters = sum(len(part) for turn in sample.turns for part in turn.parts if isinstance(part, str))
        if letters > LETTERS_PER_TOKEN * self.max_tokens:
            raise self._too_long("messages", f"{letters} letters")
        example, _ = renderer.render_prompt(sample, pictures.grid)
        if example.tokens > self.max_tokens:
            raise self._too_long("messages", f"{example.tokens} tokens")
        return example


class Pictures:
    """The pictures of one request: looked at once each, then decoded once each, within the limits."""

    def __init__(self, preparer: Preparer, renderer: Renderer):
        self.preparer, self.renderer = preparer, renderer
        self.headers: dict[str, Header] = {}
        self.grids: dict[str, Any] = {}  # as `GridOf` gives them
        self.pixels = 0
        self.patches: dict[str, np.ndarray] = {}
        self.features: dict[str, Held] = {}

    def allot(self, job: Job) -> Job:
        """The same with what each picture gets, where that goes by detail. Raises MediaError, Refusal."""
        budget = self.renderer.budget
        if budget is None:
            return job
        samples = (job.sample,) if isinstance(job, ChatJob) else job.samples
        media = {one.shown: one for sample in samples for one in list_media(sample)}
        headers = {key: self.header(one) for key, one in media.items()}  # what is too large is not decoded
        details = dict(zip(media, self.preparer.threads.map(self._detail, media.values()), strict=True))

        def look(one: Media) -> Shown:
            return Shown(headers[one.shown].width, headers[one.shown].height, details[one.shown] or None)

        fitted: Any = tuple(with_pixels(sample, allot_pixels(sample, budget, look)) for sample in samples)
        return replace(job, sample=fitted[0]) if isinstance(job, ChatJob) else replace(job, samples=fitted)

    def _detail(self, media: Media) -> Detail:
        budget, known = self.renderer.budget, self.preparer.details
        assert budget is not None
        video = media.kind == "video"
        if media.region is not None or (budget.frames_lost is None if video else not budget.pictures):
            return ()
        if media.shown not in known:
            try:
                frames = sample_frames(media) if video else [decode_image(media, window=self.renderer.window)]
                found = measure_frames(frames)
            except MediaError as error:
                raise MediaError(error.code, error.reason, name=media.key) from None
            if len(known) >= DETAILS:
                known.clear()
            known[media.shown] = found
        return known[media.shown]

    def header(self, media: Media) -> Header:
        """Header of a picture or video, within the limits of a request. Raises MediaError, Refusal."""
        if media.shown in self.headers:
            return self.headers[media.shown]
        limits, spec = self.preparer.limits, self.renderer.processor.vision
        try:
            header = read_header(media) if media.kind == "image" else read_video_header(media)
        except MediaError as error:
            raise MediaError(error.code, error.reason, name=media.key) from None
        whole = header if media.region is None else self.header(replace(media, region=None))  # it is decoded for it
        pixels = whole.width * whole.height
        if pixels > limits.picture_pixels:
            found = f"{whole.width} x {whole.height} pixels, {limits.picture_pixels} together are allowed"
            raise MediaError("media_too_large", found, name=media.key)
        self.pixels += pixels * (1 if media.kind == "image" else video_size(media, header, spec)[2])
        if self.pixels > limits.request_pixels:
            found = f"the pictures and frames have more than {limits.request_pixels} pixels together"
            raise Refusal(413, "media_too_large", found)
        return self.headers.setdefault(media.shown, header)

    def grid(self, media: Media) -> Any:
        """Grid of a picture or video, from its header. Raises MediaError, Refusal."""
        if media.key not in self.grids:
            spec = self.renderer.processor.vision
            size = size_of(media, self.header(media), spec)
            self.grids[media.key] = with_step(fit_grid(size, spec), size, spec)
        return self.grids[media.key]

    def frame(self, sample: ChatSample) -> Frame | None:
        """Of the only picture of a conversation."""
        media = only_picture(sample.turns)
        side = self.renderer.processor.vision.patch
        return None if media is None else frame_of(media, side, self.grid(media))

    def bring(self, piece: Piece) -> Piece:
        """The same piece with its pictures: features where they are known, else patches."""
        placed = {one.media.key: one for one in piece.example.media}
        fresh = []
        for key, one in placed.items():
            if key in self.patches or key in self.features:
                continue
            held = self.preparer.memory.look(name_of(one))
            if held is None:
                fresh.append(one)
            else:
                self.features[key] = held
        for one, patches in zip(fresh, self.preparer.threads.map(self._decode, fresh), strict=True):
            self.patches[one.media.key] = patches
        return Piece(
            piece.example,
            piece.group,
            piece.documents,
            {key: self.patches[key] for key in placed if key in self.patches},
            {key: self.features[key] for key in placed if key in self.features},
            piece.query,
            piece.frame,
        )

    def _decode(self, placed: PlacedMedia) -> np.ndarray:
        media, spec = placed.media, self.renderer.processor.vision
        try:
            if media.kind == "video":
                patches, grid = video_patches(media, spec=spec)
            else:
                rgb = decode_image(media, window=self.renderer.window)
                patches, grid = picture_patches(rgb, spec=spec, pixels=media.pixels)
        except MediaError as error:
            raise MediaError(error.code, error.reason, name=media.key) from None
        assert grid == placed.grid
        return patches


def name_of(placed: PlacedMedia) -> PictureName:
    """What the features of a picture or video that came as bytes are kept under."""
    key = placed.media.shown
    name = hashlib.sha256(key.encode()).digest() if placed.media.cut else bytes.fromhex(key.removeprefix("sha256:"))
    return PictureName(NO_STAMP, name, placed.grid)


def cut_documents(whole: Example, budget: Budget) -> list[tuple[int, ...]]:
    """Documents of a group that go into a batch together; a document that alone exceeds the budget goes alone."""
    (_, prefix, _), *children = whole.spans
    patches = [0] * len(whole.spans)
    starts = [start for start, _, _ in whole.spans]
    for media, at in whole.media_at:
        patches[bisect_right(starts, at) - 1] += whole.media[media].patches
    shares: list[list[int]] = []
    tokens = pixels = 0
    for number, (start, end, _) in enumerate(children):
        tokens, pixels = tokens + end - start, pixels + patches[number + 1]
        if not shares or tokens > budget.tokens or pixels > budget.patches:
            shares.append([])
            tokens, pixels = prefix + end - start, patches[0] + patches[number + 1]
        shares[-1].append(number)
    return [tuple(share) for share in shares]


def _refuse_picture(error: MediaError, where: str | None) -> Refusal:
    status = 413 if error.code in TOO_LARGE else 400
    return Refusal(status, error.code, f"{where or 'a picture'}: {error.reason}", param=where)


def _where(job: Job, error: MediaError) -> str | None:
    """The field of the request that holds a picture."""

    def holds(parts: Sequence[Any]) -> bool:
        return any(isinstance(part, Media) and part.key == error.name for part in parts)

    if isinstance(job, ChatJob):
        return next((f"messages[{i}]" for i, turn in enumerate(job.sample.turns) if holds(turn.parts)), None)
    for sample, names in zip(job.samples, job.names, strict=True):
        for name, content in _named(sample, names):
            if holds(content.media):
                return f"{name}.{next(media.kind for media in content.media if media.key == error.name)}"
    return None


def _named(sample: RerankSample, names: Sequence[str]):
    yield "query", sample.query
    yield from zip(names, (d.content for d in sample.documents), strict=True)


def collate_pieces(pieces: Sequence[Piece], renderer: Renderer, memory: FeatureMemory) -> Batch:
    """One batch of pieces; each distinct picture once, as features where they are known by now."""
    examples = [piece.example for piece in pieces]
    placed = [one for one, _ in list_pictures(examples)]
    known: dict[str, Held] = {}
    patches: dict[str, np.ndarray] = {}
    for piece in pieces:
        known |= piece.features
        patches |= piece.patches
    for one in placed:
        held = known.get(one.media.key) or memory.find(name_of(one))
        if held is not None:
            known[one.media.key] = held
    fresh = {key: value for key, value in patches.items() if key not in known}
    batch = collate(examples, fresh, renderer.processor)
    flags = tuple(one.media.key in known for one in placed)
    return replace(
        batch,
        kept=flags,
        features=torch.cat([known[one.media.key].features for one in placed if one.media.key in known])
        if any(flags)
        else None,
        names=tuple(name_of(one) for one, kept in zip(placed, flags, strict=True) if not kept),
    )
