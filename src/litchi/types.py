"""What crosses a boundary: a line of data on its way to a loss.

    train.jsonl -> Sample -> Example -> Batch -> StepResult

Everything here is frozen and says what it guarantees. This module imports neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

IGNORE = -100  # the label of a token that is not trained on, as in torch's cross entropy


@dataclass(frozen=True)
class Source:
    """A line of a file, counted from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Media:
    """A picture or a video: an absolute path, or the bytes themselves. Exactly one of `path`, `data`, `frames` is set.

    A video also as the paths of its `frames`, and as the part of it from `start_s` to `end_s`; `fps` or `nframes` of
    its frames are taken, as the settings say where neither is set. Of frames without time stamps `fps` is the rate.

    `region` is the part of a picture that is meant, (x0, y0, x1, y1) in its pixels as people see it. `pixels` is what
    a picture (or a frame) gets at most where its detail says so: see `data/detail.py`.
    """

    kind: Literal["image", "video"]
    path: str | None = None
    data: bytes | None = field(default=None, repr=False)
    start_s: float | None = None
    end_s: float | None = None
    fps: float | None = None
    nframes: int | None = None
    frames: tuple[str, ...] = ()
    region: tuple[int, int, int, int] | None = None
    pixels: int | None = None

    @cached_property
    def key(self) -> str:
        """Identity: two media with the same key are the same picture and are encoded once."""
        return self.shown if self.pixels is None else f"{self.shown}^{self.pixels}"

    @cached_property
    def shown(self) -> str:
        """The same without how large it is shown."""
        listed = "\0".join(self.frames).encode(errors="surrogateescape")
        name = self.path if self.path is not None else "sha256:" + hashlib.sha256(self.data or listed).hexdigest()
        return f"{self.kind}:{name}#{self.cut}" if self.cut else name

    @property
    def cut(self) -> str:
        """Which frames of a video, which region of a picture are meant; "" is the whole picture."""
        if self.kind == "image":
            return "" if self.region is None else ",".join(map(str, self.region))
        return f"{self.start_s}-{self.end_s}@{self.fps}x{self.nframes}"

    @property
    def name(self) -> str:
        """What messages call it."""
        if self.frames:
            return f"{len(self.frames)} frames from {self.frames[0]} on"
        return self.path if self.path is not None else f"<{len(self.data or b'')} bytes of {self.kind}>"


@dataclass(frozen=True)
class Box:
    """A place in a picture, said in a text: (x0, y0, x1, y1), or a point (x, y), in its pixels as people see it."""

    media: Media
    at: tuple[float, ...]


Part = str | Media | Box  # literal text, a picture or video in its place, a place in a picture


@dataclass(frozen=True)
class Turn:
    """One message. `train` is meaningful for the assistant only."""

    role: Literal["system", "user", "assistant"]
    parts: tuple[Part, ...]
    train: bool = True


@dataclass(frozen=True)
class ChatSample:
    """A parsed chat line. Its last turn is the assistant's; marks and media agree."""

    source: Source
    id: str
    turns: tuple[Turn, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)  # the row's other fields, for slices


@dataclass(frozen=True)
class Content:
    """A query or a document: media first, then text; one of them may be empty, not both."""

    text: str
    media: tuple[Media, ...] = ()


@dataclass(frozen=True)
class Document:
    """A candidate of a group. `label` is 1.0 / 0.0 for pos_doc / neg_docs, a grade otherwise."""

    id: str
    content: Content
    label: float


@dataclass(frozen=True)
class RerankSample:
    """A parsed rerank line: a query with its documents in the order of the file (positives first)."""

    source: Source
    id: str
    query: Content
    documents: tuple[Document, ...]
    instruction: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


Sample = ChatSample | RerankSample


@dataclass(frozen=True)
class Finding:
    """Something to say about a row. `code` is a stable word such as `unreadable_media` or `too_long`."""

    file: str
    line: int
    severity: Literal["error", "warning"]
    code: str
    message: str


@dataclass(frozen=True)
class VideoSpec:
    """How frames are taken from videos and how large they are; by default as the family's reader does.

    `min_pixels` and `max_pixels` are of a frame, `total_pixels` of all frames, two that make one patch in time counted
    once. `per_second`: positions in time per second; None: frames of the grid are counted.
    """

    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    min_pixels: int = 128 * 28 * 28
    max_pixels: int = 768 * 28 * 28
    total_pixels: int = 90_316_800  # nine tenths of 128,000 tokens
    per_second: float | None = None


@dataclass(frozen=True)
class VisionSpec:
    """How the family cuts pictures into tokens; read from the model's config and processor.

    A patch is `patch` x `patch` pixels; `merge` x `merge` patches make one token; `window` is the side, in pixels,
    of an attention window (None: no windows). `min_pixels` and `max_pixels` are the pixel budget of a picture.
    """

    patch: int
    merge: int
    temporal: int
    window: int | None
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    video: VideoSpec = VideoSpec()

    @property
    def factor(self) -> int:
        """Sides of a resized picture are multiples of this many pixels."""
        return self.patch * self.merge


@dataclass(frozen=True)
class PlacedMedia:
    """A picture in an example: its grid (frames, rows, columns) in patches, and a video's seconds per frame of it."""

    media: Media
    grid: tuple[int, int, int]
    step_s: float = 0.0

    def tokens(self, merge: int) -> int:
        t, h, w = self.grid
        return t * h * w // (merge * merge)

    @property
    def patches(self) -> int:
        t, h, w = self.grid
        return t * h * w


@dataclass(frozen=True)
class Example:
    """A rendered sample: spans of tokens in a tree. Never split between micro-batches.

    `spans` are (start, end, parent) over the one token stream, parents before children, -1 for a root. A token
    attends to itself and what stands before it in its span, and to all of its ancestors. `media_at[i]` is
    (media number, first token) of the i-th placeholder run; a media number may appear more than once.
    `labels` holds the token's own id where it is trained on (chat), IGNORE elsewhere.
    `scored` are the tokens whose hidden state gives a score (rerank), one per document, with `doc_ids`, `targets`.
    """

    id: str
    source: Source
    ids: np.ndarray  # int32 [T]
    labels: np.ndarray  # int32 [T]
    spans: tuple[tuple[int, int, int], ...]
    media: tuple[PlacedMedia, ...] = ()
    media_at: tuple[tuple[int, int], ...] = ()
    scored: tuple[int, ...] = ()
    doc_ids: tuple[str, ...] = ()
    targets: tuple[float, ...] = ()

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def patches(self) -> int:
        return sum(m.patches for m in self.media)


@dataclass(frozen=True)
class Piece:
    """Of a group that was cut because it exceeds a micro-batch: which group of the step, and where its rows begin."""

    group: int
    first: int
    targets: tuple[float, ...]  # of the whole group


@dataclass(frozen=True)
class Batch:
    """A micro-batch of one rank: a forest of spans on one token stream, without padding.

    T tokens, M distinct pictures of P patches together, N = P / merge^2 picture features, R rows whose hidden state
    is needed. An empty batch (T = 1, units = 0, weight 0) lets a rank with nothing to learn take part.
    """

    ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [3, T]: time, height, width of M-RoPE
    spans: tuple[tuple[int, int, int], ...]  # (start, end, parent)
    # of the pictures this rank encodes, patches in merge order: uint8 [P, 3 * patch^2], with a video among them
    # [P, 3 * temporal * patch^2] for all
    pixels: Tensor
    grids: tuple[tuple[int, int, int], ...]  # [M]
    image_at: Tensor  # int64 [K]: token of the k-th picture token in the stream
    image_from: Tensor  # int64 [K]: row of the feature that belongs there, in 0..N-1
    rows: Tensor  # int64 [R]: tokens whose hidden state goes to the head
    targets: Tensor  # chat: int64 [R], the next token; rerank: float32 [R], the label
    groups: tuple[tuple[int, int], ...]  # rerank: rows [a, b) of each group
    doc_ids: tuple[str, ...]  # rerank: name of each row
    samples: tuple[str, ...]  # id of each example
    units: int  # what this batch adds to the divisor of the loss
    peer: int = -1  # with vision ranks: which of them its features come from; on one of them, which data rank's it is
    ahead: bool = False  # on a vision rank: its features are for the next step
    # where groups are cut and their loss needs all their scores (`train/two_pass.py`):
    rehearsed: bool = False  # whether all ranks compute the scores of their batch of this number first
    cuts: tuple[Piece, ...] = ()  # of each of `groups`; () where they are whole
    pull: Tensor | None = None  # float32 [R]: gradient of the loss by each score
    told: float = 0.0  # loss of the groups whose first piece is here
    # where features are kept (`train.features`), of the pictures this rank encodes, in their order:
    kept: tuple[bool, ...] = ()  # whether the picture's features came along, instead of its patches
    features: Tensor | None = None  # [rows, hidden]: of those
    names: tuple[Any, ...] = ()  # of the others: what their features are to be kept under

    @property
    def tokens(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class StepResult:
    """One optimizer step on all ranks; the same on every rank."""

    step: int
    loss: float  # sum of losses over all ranks / units over all ranks
    units: int
    grad_norm: float
    lr: float
    tokens: int
    pixels: int
    skipped: bool
