"""Settings of the data, as sections.py describes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator, model_validator

from litchi.config.kinds import Positive, Says, Section, Share, Window, as_sections, stem
from litchi.types import VisionSpec

Kept = Annotated[float, Gt(0), Le(1)]


class Pixels(Section):
    """The pixel budget of a picture: it is scaled, keeping its shape, until its area lies inside."""

    min: Positive | None = None
    """Pixels a picture is enlarged to; null: the model's own."""
    max: Positive | None = None
    """Pixels a picture is reduced to; null: the model's own."""


class Pictures(Pixels):
    """The pixel budget of a picture, and of those that are shown together."""

    detail: Kept | None = None
    """Share of a picture's detail that is kept where it is finest: it gets no more pixels than that takes; null: its
    detail is not looked at."""
    total: Positive | None = None
    """Pixels of all pictures of a row (rerank: of a query, of a document) at most, shared out by their detail, so that
    all keep the same share of it; no picture gets less than `min`. null: no limit."""

    def in_force(self, spec: VisionSpec) -> dict[str, float]:
        """The limits pictures are cut under, and what is set beside them: a score depends on all of it."""
        found = {"min": spec.min_pixels, "max": spec.max_pixels, "detail": self.detail, "total": self.total}
        return {key: value for key, value in found.items() if value is not None}


class Video(Section):
    """How a video is sampled."""

    fps: Annotated[float, Gt(0)] | None = None
    """Frames taken per second, where the row does not say `fps` or `nframes`; null: the model's own, 2."""
    min_frames: Positive | None = None
    """Frames at least, where the video has so many; null: the model's own, 4."""
    max_frames: Positive | None = None
    """Frames at most; a longer video is sampled more thinly. null: the model's own, 768."""
    frame_pixels: Pixels = Pixels()
    """The pixel budget of a frame."""
    pixels: Positive | None = None
    """Pixels of all frames together at most, two that make one patch in time counted once; null: the model's own,
    90,316,800. It lowers the budget of a frame, at the lowest to its least."""
    detail: Kept | None = None
    """Share of a video's detail that is kept where it is finest, by a few of its frames: a frame gets no more pixels
    than that takes; null: it is not looked at."""
    segment_s: Annotated[float, Gt(0)] | None = None
    """Length of a segment of a long video in seconds, each a sample of its own (chat); null: not cut."""
    segment: Literal["fixed", "scenes"] = "fixed"
    """Where `segment_s` cuts: after each such time, or at scene changes and within a scene that is longer."""
    cache_mb: Annotated[int, Ge(0)] = 0
    """Decoded frames kept on disk for further epochs and runs, in MiB; those used longest ago go first. 0: none."""


class DataSource(Section):
    """A file of samples. The path alone will do."""

    short = "path"

    path: Annotated[str, Says("a path")]
    """JSONL (also .gz, .zst), Parquet or WebDataset tar."""
    weight: Annotated[float, Gt(0)] = 1.0
    """Passes over the file in an epoch: 2.0 twice, 0.5 another half each time. Training only."""
    name: str = ""
    """What reports call it; by default the file's name without its endings."""

    @model_validator(mode="before")
    @classmethod
    def _name_it(cls, value: Any) -> Any:
        value = cls.expand(value)
        if not isinstance(value, dict) or not isinstance(value.get("path"), str) or value.get("name"):
            return value
        return {**value, "name": stem(value["path"])}


Sources = Annotated[
    tuple[DataSource, ...], BeforeValidator(as_sections), Says("a path, {path, weight, name}, or a list of these")
]


class Data(Section):
    """Where samples come from, and what is done with those that cannot be used."""

    train: Sources = ()
    """Samples to learn from. Required for training."""
    eval: Sources = ()
    """Samples to measure on during training, under different names."""
    media_root: str | None = None
    """Folder that relative media paths start from; null: the folder of the file that names them."""
    max_length: Positive = 4096
    """Tokens of a sample at most, pictures included (rerank: of a query with one document)."""
    overlong: Literal["drop", "error"] = "drop"
    """A longer sample is left out and counted, or stops the run. It is never cut."""
    verify: Literal["decoded", "headers", "off"] = "decoded"
    """What is checked of every medium before step 1: all its pixels, its header, nothing. Verdicts are cached."""
    on_bad_media: Literal["error", "skip"] = "error"
    """A medium that cannot be read stops the run, or its row is left out and put in quarantine."""
    max_bad_fraction: Share = 0.02
    """The share of rows that `skip` may leave out; more stops the run."""
    workers: Annotated[int, Ge(0)] = 2
    """Processes of each rank that load samples; 0: in the training process. The numbers do not depend on it."""
    shuffle: bool = True
    """A new order in each epoch; false: the order of the files."""
    template: str = "lychee"
    """Name of the prompt a query and a document are put into (rerank). Chat uses the model's own."""
    instruction: str | None = None
    """Instruction for rows that bring none (rerank); null: the template's own."""
    negatives: Positive | None = None
    """Negatives of a group that take part in an epoch, drawn anew each time (rerank); null: all."""
    pixels: Pictures = Pictures()
    """The pixel budget of a picture, and of those that are shown together."""
    window: Window | None = None
    """Grey levels of 16-bit pictures that become black and white; null: 0 and 65535."""
    video: Video = Video()
    """How a video is sampled."""
