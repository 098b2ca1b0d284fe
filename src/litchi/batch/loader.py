"""Micro-batches of one rank, prepared ahead of time by worker processes: parse, render, decode, collate.

The loader's whole state is one integer, the step it begins at; everything else is computed from it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from torch.utils.data import DataLoader, Dataset

from litchi.batch.balance import Balance, measure_balance, share_pictures, split_costs
from litchi.batch.collate import CountUnits, collate
from litchi.batch.cost import BY_TOKENS, CostModel
from litchi.batch.encoders import NOBODY, Job, choose_jobs, encoded_steps
from litchi.batch.index import RowCost, SourceIndex
from litchi.batch.schedule import EpochPlan
from litchi.data.media import decode_image, grid_of, picture_patches, read_header
from litchi.data.render import Renderer
from litchi.errors import DataError, UserError
from litchi.types import Batch, ChatSample, Example, Media, PlacedMedia, Sample, Source


@dataclass(frozen=True)
class Corpus:
    """The indexed sources, laid end to end: row numbers of the schedule count over all of them."""

    sources: tuple[SourceIndex, ...]
    renderers: tuple[Renderer, ...]  # one per source: each has its own media root

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(s.rows) for s in self.sources)

    def find(self, row: int) -> tuple[SourceIndex, RowCost, Renderer]:
        for source, renderer in zip(self.sources, self.renderers, strict=True):
            if row < len(source.rows):
                return source, source.rows[row], renderer
            row -= len(source.rows)
        raise IndexError(row)

    def patches(self, picks: Picks) -> int:
        """Patches of the pictures of some rows, one that several rows share counted for each."""
        grids = (grid for row, chosen in picks for grid in self.find(row)[1].work(chosen).grids)
        return sum(t * h * w for t, h, w in grids)

    def load(self, row: int) -> Sample:
        source, cost, renderer = self.find(row)
        return source.load(cost, renderer)

    def example(self, row: int, chosen: Sequence[int] | None) -> Example:
        """Render a row with these documents. Raises DataError when it is no longer what was indexed."""
        source, cost, renderer = self.find(row)
        with _naming(source.source(cost)):
            example = renderer.render(self.load(row), lambda media: media_grid(media, renderer), chosen)
        planned = cost.work(chosen).tokens  # fewer documents may share a longer prefix: a group may come out below it
        if example.tokens > planned or (not cost.documents and example.tokens < planned):
            raise DataError(
                f"{cost.id} has {example.tokens} tokens and had {planned} when it was indexed",
                where=source.source(cost),
                why="the file or a picture changed while the run was reading it",
                remedy="Start the run again",
            )
        return example

    def prompt(self, row: int) -> Example:
        source, cost, renderer = self.find(row)
        with _naming(source.source(cost)):
            sample = self.load(row)
            assert isinstance(sample, ChatSample)
            return renderer.render_prompt(sample, lambda media: media_grid(media, renderer))[0]


@contextmanager
def _naming(source: Source) -> Iterator[None]:
    """Put the row into an error that does not know it."""
    try:
        yield
    except DataError as error:
        raise DataError(error.what, where=error.where or source, why=error.why, remedy=error.remedy) from error


def media_grid(media: Media, renderer: Renderer) -> tuple[int, int, int]:
    """Grid of a picture from its header."""
    return grid_of(read_header(media), renderer.processor.vision)


Share = tuple[int, int]  # of the pictures of a batch: which of how many shares; (0, 0) is none
ALL: Share = (0, 1)


def load_patches(examples: Sequence[Example], renderer: Renderer, share: Share = ALL) -> dict[str, np.ndarray]:
    """Decode each distinct picture of some examples once, or a share of them.

    Raises:
        DataError: a picture cannot be read, or is not what it was; it names the row and the file.
    """
    distinct: dict[str, tuple[PlacedMedia, Source]] = {}
    for example in examples:
        for placed in example.media:
            distinct.setdefault(placed.media.key, (placed, example.source))
    which, shares = share
    grids = [placed.grid for placed, _ in distinct.values()]
    mine = set(share_pictures(grids, shares)[which]) if shares else set()
    patches: dict[str, np.ndarray] = {}
    for number, (key, (placed, source)) in enumerate(distinct.items()):
        if number in mine:
            with _naming(source):
                rgb = decode_image(placed.media, window=renderer.window)
            patches[key], grid = picture_patches(rgb, spec=renderer.processor.vision)
            if grid != placed.grid:
                raise DataError(f"{placed.media.name} changed while the run was reading it", where=source)
    return patches


@dataclass(frozen=True, eq=False)  # compared by identity: it keys a cache, and holds large arrays
class StepPlan:
    """Everything that decides what a rank computes in a step: pure, the same on every rank but for `rank`.

    Args:
        rank, ranks: of those that see different data; a rank behind them is a vision rank.
        costs: what is shared out evenly; by default tokens.
        least: micro-batches of a rank in a step at least.
        pictures: the share of a batch's pictures that this rank decodes.
        encoders: vision ranks.
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

    def micro_batches(self, step: int) -> list[list[tuple[int, tuple[int, ...] | None]]]:
        """This rank's micro-batches of a step: lists of (row, chosen documents)."""
        return [job.picks for job in self.jobs(step)]

    def jobs(self, step: int) -> list[Job]:
        """The same, with whom features are exchanged; on a vision rank the micro-batches it encodes the pictures of."""
        return _plan_jobs(self, step)

    def prepared(self, step: int, *, first: int, last: int) -> range:
        """The steps whose micro-batches this rank takes up in a step of a run from `first` to `last`."""
        encodes = self.rank >= self.ranks
        return encoded_steps(step, first=first, last=last) if encodes else range(step, step + 1)

    def balance(self, step: int) -> Balance:
        """How even the planned cost of a step is."""
        return _plan_step(self, step)[1]


@lru_cache(maxsize=16)
def _plan_step(plan: StepPlan, step: int):
    """[rank][micro-batch] -> picks, and the balance of their costs."""
    epoch = plan.epochs.epoch_of(step)
    picks, work = [], []
    for row in plan.epochs.rows(step):
        _, cost, _ = plan.corpus.find(int(row))
        chosen = cost.chosen(plan.epochs.seed, epoch, plan.negatives)
        picks.append((int(row), chosen))
        work.append(cost.work(chosen))
    costs = [plan.costs.cost(w) for w in work]
    least = max(1, min(plan.least, len(picks) // plan.ranks))  # more would be empty
    shares = split_costs(costs, plan.ranks, plan.micro_batch_tokens, tokens=[w.tokens for w in work], least=least)
    return [[[picks[i] for i in micro] for micro in rank] for rank in shares], measure_balance(costs, shares)


@lru_cache(maxsize=16)
def _plan_jobs(plan: StepPlan, step: int) -> list[Job]:
    return choose_jobs(_plan_step(plan, step)[0], plan.corpus.patches, plan.encoders, plan.rank)


Picks = Sequence[tuple[int, tuple[int, ...] | None]]  # (row, chosen documents)


def make_batch(
    corpus: Corpus,
    picks: Picks,
    count_units: CountUnits | None = None,
    *,
    prompts: bool = False,
    pictures: Share = ALL,
    peer: int = NOBODY,
) -> Batch:
    """Read, render, decode and collate some rows; with `prompts` up to where the last answer begins."""
    renderer = corpus.renderers[0]
    examples = [corpus.prompt(row) if prompts else corpus.example(row, chosen) for row, chosen in picks]
    batch = collate(examples, load_patches(examples, renderer, pictures), renderer.processor, count_units)
    return replace(batch, peer=peer)


class MicroBatches(Dataset):
    """(step, micro-batch number) -> Batch, or the UserError that kept it from being made."""

    def __init__(self, plan: StepPlan, count_units: CountUnits | None):
        self.plan, self.count_units = plan, count_units

    def __getitem__(self, key: tuple[int, int]) -> Batch | UserError:
        step, micro = key
        plan = self.plan
        try:
            picks, peer = plan.jobs(step)[micro]
            return make_batch(plan.corpus, picks, self.count_units, pictures=plan.pictures, peer=peer)
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
    made = _ahead(MicroBatches(plan, count_units), _Keys(plan, first, last), workers)
    for step in range(first, last + 1):
        start = time.perf_counter()
        batches = [
            replace(next(made), ahead=prepared > step)
            for prepared in plan.prepared(step, first=first, last=last)
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
    return _ahead(made, range(len(jobs)), min(workers, len(jobs)))


def _ignore_signals(worker: int) -> None:
    """A signal is for the rank, which ends its step and then its workers; a worker that dies first is an error."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _ahead(dataset: Dataset, keys: Iterable, workers: int) -> Iterator[Batch]:
    loader = DataLoader(
        dataset,
        sampler=keys,  # type: ignore[arg-type]  # any iterable will do
        batch_size=None,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        multiprocessing_context="fork" if workers else None,
        worker_init_fn=_ignore_signals,
    )
    for batch in loader:
        if isinstance(batch, UserError):
            raise batch
        yield batch
