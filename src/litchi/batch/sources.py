"""Settings -> indexed sources: a renderer for each file, the scan of its rows, and what is done with the bad ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from litchi.batch.curriculum import largest_spec, stage_specs
from litchi.batch.index import Gather, Progress, ScanRules, SourceIndex, build_index
from litchi.batch.loader import Corpus
from litchi.data.detail import WHOLE, Budget
from litchi.data.frame_cache import FrameCache
from litchi.data.processor import Processor
from litchi.data.render import Renderer
from litchi.data.segments import Cutting
from litchi.data.templates import find_template
from litchi.data.verdicts import cache_root
from litchi.errors import DataError
from litchi.types import Finding, VisionSpec

if TYPE_CHECKING:
    from litchi.config import Config, Data, DataSource

SHOWN = 20  # findings an error lists


def make_renderer(config: Config, processor: Processor, path: str) -> Renderer:
    """The renderer of one file: relative media start from `data.media_root` or the file's own folder."""
    rerank, video = config.task == "rerank", config.data.video
    template = find_template(config.data.template) if rerank else None
    if template is not None:
        processor.word(template.yes), processor.word(template.no)  # each must be one token
    processor = with_budget(processor.with_words(config.model.new_tokens), config.data)
    return Renderer(
        task=config.task,
        processor=processor,
        template=template,
        instruction=config.data.instruction,
        media_root=config.data.media_root or os.path.dirname(os.path.abspath(path)),
        window=config.data.window,
        cutting=None if video.segment_s is None else Cutting(video.segment_s, video.segment == "scenes"),
        frames=FrameCache(cache_root() / "frames", video.cache_mb * 2**20) if video.cache_mb else None,
        budget=by_detail(config.data, processor.vision),
    )


def by_detail(data: Data, spec: VisionSpec) -> Budget | None:
    """How pixels go by detail; None: they do not. In every stage of a run it is within the limits of `data.pixels`."""
    lost, frames = (None if s is None else round((1 - s) * WHOLE) for s in (data.pixels.detail, data.video.detail))
    budget = Budget(spec.min_pixels, spec.max_pixels, spec.factor, lost, data.pixels.total, frames)
    return budget if budget.looks else None


def with_budget(processor: Processor, data: Data) -> Processor:
    """The processor with the pixel budgets of pictures and videos that are set. Raises UsageError."""
    video = data.video
    return processor.with_pixels(data.pixels.min, data.pixels.max).with_video(
        fps=video.fps,
        min_frames=video.min_frames,
        max_frames=video.max_frames,
        min_pixels=video.frame_pixels.min,
        max_pixels=video.frame_pixels.max,
        total_pixels=video.pixels,
    )


def index_sources(
    config: Config,
    sources: Sequence[DataSource],
    processor: Processor,
    *,
    require_labels: bool = True,
    by_curriculum: bool = False,
    rank: int = 0,
    ranks: int = 1,
    gather: Gather = lambda share: [share],
    progress: Callable[[str], Progress | None] = lambda name: None,
) -> Corpus:
    """Scan all files of a list (see `build_index`).

    Args:
        by_curriculum: judge rows at the largest pixel budget of the run, as they are trained on.
    """
    rules = ScanRules(config.data.max_length, config.data.overlong, config.data.verify, require_labels)
    renderers = tuple(make_renderer(config, processor, s.path) for s in sources)
    if by_curriculum and renderers and config.curriculum:
        cut = renderers[0].processor
        stages = (cut.vision, *stage_specs(config.curriculum, cut))
        renderers = tuple(replace(renderer, stages=stages) for renderer in renderers)
    spec = _largest(config, renderers) if by_curriculum else None
    indexes = tuple(
        build_index(
            source.path,
            source.name,
            renderer if spec is None else _with_spec(renderer, spec),
            rules,
            rank=rank,
            ranks=ranks,
            gather=gather,
            workers=config.data.workers,
            progress=progress(source.name),
        )
        for source, renderer in zip(sources, renderers, strict=True)
    )
    return Corpus(indexes, renderers, None if spec is None else renderers[0].processor.vision)


def _largest(config: Config, renderers: Sequence[Renderer]) -> VisionSpec | None:
    """The largest pixel budget of the curriculum and of `data.pixels`; None where it is the latter."""
    if not renderers:
        return None
    processor = renderers[0].processor
    largest = largest_spec((processor.vision, *stage_specs(config.curriculum, processor)))
    return None if largest == processor.vision else largest


def _with_spec(renderer: Renderer, spec: VisionSpec) -> Renderer:
    return replace(renderer, processor=replace(renderer.processor, vision=spec))


def refuse_bad(indexes: Sequence[SourceIndex], config: Config) -> list[Finding]:
    """Decide what bad rows mean, alike on all ranks.

    Returns:
        Every finding of rows (or negatives) that are left out, for the quarantine.

    Raises:
        DataError: there are bad rows and the policy is to stop, or more than `data.max_bad_fraction` of a file is
            bad, or nothing usable is left.
    """
    left_out: list[Finding] = []
    for index in indexes:
        bad = index.bad
        rows = len({f.line for f in bad})
        if bad and config.data.on_bad_media == "error":
            raise DataError(
                f"{rows} of {len(index.lines)} rows are bad",
                where=index.path,
                why="\n" + list_findings(bad),
                remedy="\nMend them, or leave them out with data.on_bad_media=skip "
                f"(at most {_percent(config)} of the rows)",
            )
        if rows > config.data.max_bad_fraction * len(index.lines):
            raise DataError(
                f"{rows} of {len(index.lines)} rows are bad, data.max_bad_fraction is {config.data.max_bad_fraction}",
                where=index.path,
                why="\n" + list_findings(bad),
                remedy="\nMend them, or raise data.max_bad_fraction",
            )
        if not index.rows:
            raise DataError(
                f"none of its {len(index.lines)} rows can be used",
                where=index.path,
                why="\n" + list_findings(index.findings),
                remedy="\nSee `litchi data check`",
            )
        left_out += index.left_out
    return left_out


def _percent(config: Config) -> str:
    return f"{100 * config.data.max_bad_fraction:g} %"


def list_findings(findings: Sequence[Finding]) -> str:
    """One line each, the first few."""
    lines = [f"  {Path(f.file).name}:{f.line}: {f.code}: {f.message}" for f in findings[:SHOWN]]
    if len(findings) > SHOWN:
        lines.append(f"  ... and {len(findings) - SHOWN} more")
    return "\n".join(lines)
