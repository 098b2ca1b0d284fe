"""Micro-batches of one rank, prepared ahead of time by worker processes: parse, render, decode, collate.

The loader's whole state is one integer, the step it begins at; everything else is computed from it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from litchi.batch.balance import Balance
from litchi.batch.collate import CountUnits, collate
from litchi.batch.cost import BY_TOKENS, CostModel, Grid
from litchi.batch.curriculum import Curriculum
from litchi.batch.cutting import Cut, Cuts, Pick, PlannedStep, plan_picks
from litchi.batch.encoders import NOBODY, Job, choose_jobs, encoded_steps
from litchi.batch.index import SourceIndex
from litchi.batch.pictures import ALL, Share, find_features, list_pictures, load_patches, media_grid, naming
from litchi.batch.rows import RowCost, name_picture, with_step
from litchi.batch.schedule import EpochPlan
from litchi.data.boxes import Frame, frame_of, only_picture
from litchi.data.detail import list_media
from litchi.data.features import FeatureStore
from litchi.data.orphans import end_with_parent
from litchi.data.render import GridOf, Renderer
from litchi.errors import DataError, RestartError, UserError
from litchi.types import (
    Batch,
    ChatSample,
    Example,
    Media,
    Piece,
    PlacedMedia,
    RerankSample,
    Sample,
    Source,
    VisionSpec,
)


@dataclass(frozen=True)
class Corpus:
    """The indexed sources, laid end to end: row numbers of the schedule count over all of them.

    Args:
        renderers: one per source: each has its own media root.
        spec: how pictures are cut, where rows were indexed under another pixel budget; None: as the renderers say.
        features: of pictures that need no decoding.
    """

    sources: tuple[SourceIndex, ...]
    renderers: tuple[Renderer, ...]
    spec: VisionSpec | None = None
    features: FeatureStore | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(s.rows) for s in self.sources)

    def find(self, row: int) -> tuple[SourceIndex, RowCost, Renderer]:
        """Source, cost under this corpus's pixel budget, and renderer of a row. IndexError: there is none."""
        for source, renderer in zip(self.sources, self.renderers, strict=True):
            if row < len(source.rows):
                cost = source.rows[row]
                return source, cost if self.spec is None else cost.at(self.spec), renderer
            row -= len(source.rows)
        raise IndexError(row)

    def patches(self, picks: Sequence[Pick]) -> int:
        """Patches of the pictures of some rows, one that several rows share counted once."""
        works = (self.find(row)[1].work(chosen) for row, chosen, *_ in picks)
        grids = {name: grid for work in works for name, grid in zip(work.pictures, work.grids, strict=True)}
        return sum(t * h * w for t, h, w in grids.values())

    def load(self, row: int) -> Sample:
        """Read and parse a row again."""
        source, cost, renderer = self.find(row)
        return source.load(cost, renderer)

    def example(self, row: int, chosen: Sequence[int] | None) -> Example:
        """Render a row with these documents. Raises DataError when it is no longer what was indexed."""
        source, cost, renderer = self.find(row)
        with naming(source.source(cost)):
            example = renderer.render(self.load(row), self._grids(source, cost, renderer), chosen)
        planned = cost.work(chosen).tokens  # fewer documents may share a longer prefix: a group may come out below it
        if example.tokens > planned or (not cost.documents and example.tokens < planned):
            raise DataError(
                f"{cost.id} has {example.tokens} tokens and had {planned} when it was indexed",
                where=source.source(cost),
                why="the file or a picture changed while the run was reading it",
                remedy="Start the run again",
            )
        return example

    def piece(self, row: int, cut: Cut) -> Piece:
        """What a piece of a group has to know of the whole."""
        sample = self.load(row)
        assert isinstance(sample, RerankSample)
        return Piece(cut.group, cut.first, tuple(sample.documents[n].label for n in cut.documents))

    def prompt(self, row: int) -> Example:
        """Render a chat row up to where its last answer begins."""
        source, cost, renderer = self.find(row)
        with naming(source.source(cost)):
            sample = self.load(row)
            assert isinstance(sample, ChatSample)
            return renderer.render_prompt(sample, self._grids(source, cost, renderer))[0]

    def reference(self, row: int) -> str:
        """The text of a row's last answer."""
        source, cost, renderer = self.find(row)
        with naming(source.source(cost)):
            sample = self.load(row)
            assert isinstance(sample, ChatSample)
            *_, last = renderer.said(sample, self._grids(source, cost, renderer)).turns
            return "".join(part for part in last.parts if isinstance(part, str))

    def frame(self, row: int) -> Frame:
        """The sides of a chat row's only picture. Raises DataError: it has none, or several."""
        source, cost, renderer = self.find(row)
        with naming(source.source(cost)):
            sample = self.load(row)
            assert isinstance(sample, ChatSample)
            media = only_picture(sample.turns)
            if media is None:
                raise DataError(f"{cost.id} does not show one picture", why="boxes of an answer are in pixels of one")
            return frame_of(media, renderer.processor.vision.patch, self._grids(source, cost, renderer)(media))

    def picture(self, row: int, name: int, grid: Grid) -> tuple[PlacedMedia, Source, Renderer]:
        """One of a row's pictures, by its number of `name_picture`."""
        source, cost, renderer = self.find(row)
        where = source.source(cost)
        for media in list_media(self.load(row)):
            if name_picture(media.key) == name:
                return PlacedMedia(media, grid), where, renderer
        raise DataError(
            f"{cost.id} has other pictures than it was indexed with", where=where,
            why="the file has changed meanwhile", remedy="Start the run again",
        )  # fmt: skip

    def _grids(self, source: SourceIndex, cost: RowCost, renderer: Renderer) -> GridOf:
        """Media -> grid: as indexed while the file is unchanged, else from its header."""
        known = dict(zip(cost.names, zip(cost.grids, cost.sizes, strict=True), strict=True))

        def grid(media: Media):
            indexed = known.get(name_picture(media.key))
            if indexed is not None and source.is_unchanged(media):
                return with_step(*indexed, renderer.processor.vision)
            return media_grid(media, renderer, self.spec)

        return grid


@dataclass(frozen=True, eq=False)  # compared by identity: it keys a cache, and holds large arrays
class StepPlan:
    """Everything that decides what a rank computes in a step: pure, the same on every rank but for `rank`.

    Args:
        rank, ranks: of those that see different data; a rank behind them is a vision rank.
        lowered: (step, tokens): from that step on a micro-batch has at most so many tokens, for memory ran out.
        costs: what is shared out evenly; by default tokens. From the second epoch on without pictures whose features
            are kept.
        least: micro-batches of a rank in a step at least.
        pictures: the share of a batch's pictures that this rank decodes.
        encoders: vision ranks.
        curriculum: the pixel budget of each step; None: the corpus's in all of them.
        cuts: whether groups larger than a micro-batch are cut, and how.
    """

    corpus: Corpus
    epochs: EpochPlan
    negatives: int | None
    micro_batch_tokens: int
    rank: int
    ranks: int
    costs: CostModel = BY_TOKENS
    least: int = 1
    pictures: Share = ALL
    encoders: int = 0
    curriculum: Curriculum | None = None
    cuts: Cuts = "never"
    lowered: tuple[tuple[int, int], ...] = ()

    def limit(self, step: int) -> int:
        """Tokens of a micro-batch of a step."""
        return min(self.micro_batch_tokens, *(tokens for first, tokens in self.lowered if first <= step), 2**62)

    def shares(self, step: int) -> list[list[list[Pick]]]:
        """The micro-batches of all data ranks in a step."""
        return _plan_step(self, step).picks

    def corpus_at(self, step: int) -> Corpus:
        """The corpus under the pixel budget of a step."""
        return self.corpus if self.curriculum is None else replace(self.corpus, spec=self.curriculum.at(step))

    def micro_batches(self, step: int) -> list[list[Pick]]:
        """This rank's micro-batches of a step: lists of (row, chosen documents), for a piece also what it is of."""
        return [job.picks for job in self.jobs(step)]

    def jobs(self, step: int) -> list[Job]:
        """The same, with whom features are exchanged; on a vision rank the micro-batches it encodes the pictures of."""
        return _plan_jobs(self, step)

    def prepared(self, step: int, *, first: int, last: int) -> range:
        """The steps whose micro-batches this rank takes up in a step of a run from `first` to `last`."""
        encodes = self.rank >= self.ranks
        return encoded_steps(step, first=first, last=last) if encodes else range(step, step + 1)

    def stretches(self, first: int, last: int) -> list[tuple[int, int]]:
        """Runs of steps that are prepared ahead of each other. Where features are kept, workers begin anew after the
        first epoch: those who prepare the second should find all of the first's."""
        end = (self.epochs.epoch_of(first) + 1) * self.epochs.steps_per_epoch
        return [(first, last)] if self.corpus.features is None or end >= last else [(first, end), (end + 1, last)]

    def balance(self, step: int) -> Balance:
        """How even the planned cost of a step is."""
        return _plan_step(self, step).balance

    def rehearsed(self, step: int) -> int:
        """How many of each rank's first micro-batches are pieces of groups, whose scores all are needed first."""
        return _plan_step(self, step).rehearsed


@lru_cache(maxsize=16)
def _plan_step(plan: StepPlan, step: int) -> PlannedStep:
    epoch, corpus = plan.epochs.epoch_of(step), plan.corpus_at(step)
    rows = []
    for row in map(int, plan.epochs.rows(step)):
        _, cost, _ = corpus.find(row)
        rows.append((row, cost, cost.chosen(plan.epochs.seed, epoch, plan.negatives)))
    kept = epoch > 0 and corpus.features is not None
    costs = plan.costs.without_pictures() if kept else plan.costs
    return plan_picks(rows, costs, ranks=plan.ranks, limit=plan.limit(step), least=plan.least, cuts=plan.cuts)


@lru_cache(maxsize=16)
def _plan_jobs(plan: StepPlan, step: int) -> list[Job]:
    return choose_jobs(_plan_step(plan, step).picks, plan.corpus_at(step).patches, plan.encoders, plan.rank)


def make_batch(
    corpus: Corpus,
    picks: Sequence[Pick],
    count_units: CountUnits | None = None,
    *,
    prompts: bool = False,
    pictures: Share = ALL,
    peer: int = NOBODY,
) -> Batch:
    """Read, render, decode and collate some rows; with `prompts` up to where the last answer begins."""
    renderer = corpus.renderers[0]
    examples = [corpus.prompt(row) if prompts else corpus.example(row, chosen) for row, chosen, *_ in picks]
    kept = find_features(list_pictures(examples, pictures), corpus.features)
    patches = load_patches(examples, renderer, pictures, corpus.spec, kept)
    batch = collate(examples, patches, renderer.processor, count_units)
    cuts = tuple(corpus.piece(row, *cut) for row, _, *cut in picks if cut)
    if cuts:
        batch = replace(batch, cuts=cuts, units=_count_once(cuts, count_units))
    return replace(batch, peer=peer, features=kept.features, kept=kept.flags, names=kept.names)


def _count_once(cuts: Sequence[Piece], count_units: CountUnits | None) -> int:
    """Units of groups in pieces: all of them where a group's first piece is."""
    whole = [torch.tensor(cut.targets) for cut in cuts if cut.first == 0]
    return sum(count_units(targets, ((0, len(targets)),)) if count_units else len(targets) for targets in whole)


class MicroBatches(Dataset):
    """(step, micro-batch number) -> Batch, or the UserError that kept it from being made."""

    def __init__(self, plan: StepPlan, count_units: CountUnits | None):
        self.plan, self.count_units = plan, count_units

    def __getitem__(self, key: tuple[int, int]) -> Batch | UserError:
        step, micro = key
        plan = self.plan
        try:
            picks, peer = plan.jobs(step)[micro]
            batch = make_batch(plan.corpus_at(step), picks, self.count_units, pictures=plan.pictures, peer=peer)
            return replace(batch, rehearsed=micro < plan.rehearsed(step))
        except UserError as error:  # travels to the training process, which raises it there
            return error


class FixedBatches(Dataset):
    """number -> Batch of these jobs, for evaluation."""

    def __init__(self, corpus: Corpus, jobs: Sequence[Job], count_units: CountUnits | None, **how):
        self.corpus, self.jobs, self.count_units, self.how = corpus, jobs, count_units, how

    def __len__(self) -> int:
        return len(self.jobs)

    def __getitem__(self, number: int) -> Batch | UserError:
        try:
            picks, peer = self.jobs[number]
            return make_batch(self.corpus, picks, self.count_units, peer=peer, **self.how)
        except UserError as error:
            return error


@dataclass(frozen=True)
class _Keys:
    """The order in which micro-batches are made, endless runs included: never listed, only walked."""

    plan: StepPlan
    first: int
    last: int

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for step in range(self.first, self.last + 1):
            for micro in range(len(self.plan.jobs(step))):
                yield step, micro


def iterate_steps(
    plan: StepPlan, first: int, last: int, *, workers: int, count_units: CountUnits | None = None
) -> Iterator[tuple[int, list[Batch], float]]:
    """Yield (step, this rank's micro-batches, seconds waited for them) for steps first..last.

    On a vision rank they are those of the next step, marked `ahead`: see `encoded_steps`.

    Raises:
        UserError: what kept a micro-batch from being made, with file and line.
    """
    for begin, end in plan.stretches(first, last):
        made = prepare_ahead(MicroBatches(plan, count_units), _Keys(plan, begin, end), workers)
        for step in range(begin, end + 1):
            start = time.perf_counter()
            batches = [
                replace(next(made), ahead=prepared > step)
                for prepared in plan.prepared(step, first=begin, last=end)
                for _ in plan.jobs(prepared)
            ]
            yield step, batches, time.perf_counter() - start


def iterate_jobs(
    corpus: Corpus,
    jobs: Sequence[Job],
    *,
    workers: int,
    count_units: CountUnits | None = None,
    prompts: bool = False,
    pictures: Share = ALL,
) -> Iterator[Batch]:
    """Batches of these jobs, in order, prepared ahead. Raises UserError as `iterate_steps` does."""
    made = FixedBatches(corpus, jobs, count_units, prompts=prompts, pictures=pictures)
    return prepare_ahead(made, range(len(jobs)), min(workers, len(jobs)))


def _begin_worker(rank: int, worker: int) -> None:
    """A signal is for the rank, which ends its step and then its workers; a worker that dies first is an error. One
    whose rank is killed ends too, whatever it is doing."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(rank)


def find_lost_worker(error: BaseException) -> RestartError | None:
    """What torch says, from wherever the rank is, when a worker was ended; None: another error."""
    text = str(error).partition("\n")[0]
    if not (isinstance(error, RuntimeError) and text.startswith("DataLoader worker (pid")):
        return None
    return RestartError(
        "a process that loads samples was ended",
        why=text,
        remedy="Mostly the system does that when memory runs out: lower data.workers",
    )


def _as_it_is(made: Any) -> Any:
    return made


def prepare_ahead(dataset: Dataset, keys: Iterable, workers: int) -> Iterator[Any]:
    """What a data set has under each of some keys, made by worker processes; an error it gives is raised here."""
    loader = DataLoader(
        dataset,
        sampler=keys,  # type: ignore[arg-type]  # any iterable will do
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        multiprocessing_context="fork" if workers else None,
        worker_init_fn=partial(_begin_worker, os.getpid()),
    )
    for batch in loader:
        if isinstance(batch, UserError):
            raise batch
        yield batch
