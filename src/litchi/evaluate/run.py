"""Measure a model on named sets: sharded over ranks, no row twice, no hang on uneven or empty ranks.

SourceIndex -> micro-batches (the same number on every rank, some empty) -> scores or answers -> a report on all ranks
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from litchi.batch.balance import split_costs
from litchi.batch.collate import CountUnits
from litchi.batch.cutting import Pick
from litchi.batch.encoders import Job, choose_jobs
from litchi.batch.index import SourceIndex
from litchi.batch.loader import Corpus, iterate_jobs
from litchi.data.features import FeatureStore
from litchi.data.processor import END_OF_TURN, Processor
from litchi.data.render import Renderer
from litchi.dist import gather_objects, max_ranks, sum_ranks
from litchi.errors import UsageError, UserError
from litchi.evaluate.json_answers import JSON_METRICS, JsonRules, judge_answers
from litchi.evaluate.ranking import RankingReport, ScoredGroup, ranking_metrics
from litchi.evaluate.text import text_metrics
from litchi.model.flops import read_costs
from litchi.model.generate import generate_greedy
from litchi.parallel.apply import Wrapped
from litchi.types import ChatSample, RerankSample

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class EvalSet:
    """A named set: the usable rows of a file, or the first `max_rows` of them. `features` as in `Corpus`."""

    index: SourceIndex
    renderer: Renderer
    max_rows: int | None = None
    features: FeatureStore | None = None

    @property
    def name(self) -> str:
        return self.index.name

    @property
    def rows(self) -> range:
        count = len(self.index.rows)
        return range(count if self.max_rows is None else min(count, self.max_rows))

    @property
    def corpus(self) -> Corpus:
        return Corpus((self.index,), (self.renderer,), features=self.features)

    def split(
        self, wrapped: Wrapped, micro_batch_tokens: int, ranks: int, rows: range | None = None
    ) -> list[list[list[Pick]]]:
        """[rank][micro-batch] -> picks of the rows (all where left out), even in cost over so many ranks."""
        rows = self.rows if rows is None else rows
        costs = read_costs(wrapped.owner.hf.config.to_dict(), scored=self.renderer.task == "rerank")
        work = [self.index.rows[i].work(self.index.rows[i].documents or None) for i in rows]
        shares = split_costs(
            [costs.cost(w) for w in work],
            ranks,
            micro_batch_tokens,
            tokens=[w.tokens for w in work],
            pictures=[costs.picture_costs(w) for w in work],
        )
        return [
            [[(rows[n], self.index.rows[rows[n]].documents or None) for n in batch] for batch in own] for own in shares
        ]

    def deal(self, wrapped: Wrapped, shares: Sequence[Sequence[Any]]) -> list[Job]:
        """This rank's of [data rank][micro-batch], of which each has as many; a vision rank's are those it encodes."""
        return choose_jobs(shares, self.corpus.patches, wrapped.layout.vision_ranks, wrapped.data_rank)

    def share(self, wrapped: Wrapped, micro_batch_tokens: int) -> list[Job]:
        """This rank's micro-batches; as many as every other rank has, or those a vision rank encodes pictures of."""
        return self.deal(wrapped, self.split(wrapped, micro_batch_tokens, wrapped.data_ranks))


@dataclass(frozen=True)
class Measured:
    """Figures of one set. `lines` are what the `score` and `generate` verbs write; `report` is the JSON answer."""

    name: str
    metrics: dict[str, float]
    report: dict[str, Any]
    lines: list[dict[str, Any]]
    ranking: RankingReport | None = None


@dataclass(frozen=True)
class Measure:
    """How to measure: metric names (None: the usual), slices, generation, micro-batch limits, the loss's divisor."""

    metrics: Sequence[str] | None = None
    slices: Sequence[str] = ()
    max_new_tokens: int = 64
    micro_batch_tokens: int = 8192
    workers: int = 0
    generate: bool = True
    count_units: CountUnits | None = None  # what a rerank loss is divided by
    rules: JsonRules | None = None  # for answers that are to be JSON
    between: Callable[[], object] = lambda: None  # called by all ranks behind each micro-batch; it may raise


def measure_set(wrapped: Wrapped, data: EvalSet, how: Measure, progress: Progress | None = None) -> Measured:
    """Measure one set on all ranks; every rank returns the same."""
    training = wrapped.model.training
    wrapped.model.eval()
    try:
        with torch.no_grad():
            if data.renderer.task == "rerank":
                return measure_ranking(wrapped, data, how, progress)
            return measure_chat(wrapped, data, how, progress)
    finally:
        wrapped.model.train(training)


# -------------------------------------------------------------------------------------------------------- rerank


Group = tuple[int, tuple[str, ...], list[float]]  # row, document ids, scores


@dataclass(frozen=True)
class Scored:
    """`groups` in the order of the file; `loss` as in training. On every rank."""

    groups: list[Group]
    loss: float


@torch.no_grad()
def score_set(wrapped: Wrapped, data: EvalSet, how: Measure, progress: Progress | None = None) -> Scored:
    """Score every group of a set.

    Raises:
        UserError: a score is not finite; it names the document and what was computed in.
    """
    jobs = data.share(wrapped, how.micro_batch_tokens)
    mine: list[Group] = []
    total = units = 0.0
    for number, (groups, loss, counted) in enumerate(score_jobs(wrapped, data, jobs, how), 1):
        mine += groups
        total, units = total + loss, units + counted
        if progress is not None:
            progress(number, len(jobs))
    groups = sorted((group for share in gather_objects(mine) for group in share), key=lambda group: group[0])
    refuse_nonfinite(groups, data, wrapped)
    total, units = sum_ranks(total, units)
    return Scored(groups, total / units if units else math.nan)


@torch.no_grad()
def score_jobs(
    wrapped: Wrapped, data: EvalSet, jobs: Sequence[Job], how: Measure
) -> Iterator[tuple[list[Group], float, float]]:
    """The groups of each micro-batch with their scores, the sum of their losses and its units; a rank that does not
    lead has none."""
    batches = iterate_jobs(
        data.corpus, jobs, workers=how.workers, count_units=how.count_units, pictures=wrapped.pictures
    )
    for job, batch in zip(jobs, batches, strict=True):
        out = wrapped.evaluate(batch)
        how.between()
        if out is None or not wrapped.leads:
            yield [], 0.0, 0.0
            continue
        assert out.scores is not None
        scores = out.scores.float().cpu()
        places = zip(job.picks, batch.groups, strict=True)
        groups = [(row, batch.doc_ids[a:b], scores[a:b].tolist()) for (row, _), (a, b) in places]
        yield groups, float(out.loss), batch.units


def refuse_nonfinite(groups: Sequence[Group], data: EvalSet, wrapped: Wrapped) -> None:
    """Raises UserError where a score is not finite; it names the document and what was computed in."""
    for row, doc_ids, scores in groups:
        for doc, score in zip(doc_ids, scores, strict=True):
            if not math.isfinite(score):
                weights = str(next(wrapped.owner.parameters()).dtype).removeprefix("torch.")
                raise UserError(
                    f"the score of document {doc} of query {data.index.rows[row].id} is {score}",
                    where=data.index.source(data.index.rows[row]),
                    why=f"computed in {wrapped.precision} with weights in {weights}; a run that diverged leaves such "
                    "weights, and fp16 overflows above 65504",
                    remedy="Try train.precision=fp32, or take an earlier checkpoint",
                )


def measure_ranking(wrapped: Wrapped, data: EvalSet, how: Measure, progress: Progress | None = None) -> Measured:
    """Loss, and MRR, nDCG, ... of a set; see `ranking_metrics`."""
    scored = score_set(wrapped, data, how, progress)
    groups, lines = [], []
    for row, doc_ids, scores in scored.groups:
        sample = data.index.load(data.index.rows[row], data.renderer)
        assert isinstance(sample, RerankSample)
        label = {d.id: d.label for d in sample.documents}
        groups.append(
            ScoredGroup(
                sample.id,
                doc_ids,
                np.array(scores, np.float32),
                np.array([label[d] for d in doc_ids]),
                {field: sample.fields[field] for field in how.slices if field in sample.fields},
            )
        )
        lines += [{"query_id": sample.id, "doc_id": d, "score": s} for d, s in zip(doc_ids, scores, strict=True)]
    ranking = ranking_metrics(groups, how.metrics)
    metrics = {"loss": scored.loss, **ranking.metrics}
    return Measured(data.name, metrics, ranking.to_json() | {"metrics": metrics}, lines, ranking)


# ---------------------------------------------------------------------------------------------------------- chat


def measure_chat(wrapped: Wrapped, data: EvalSet, how: Measure, progress: Progress | None = None) -> Measured:
    """Loss per trained token, and exact match, BLEU, ... of generated last answers."""
    metrics = {"loss": _chat_loss(wrapped, data, how)}
    lines: list[dict[str, Any]] = []
    slices: dict[str, Any] = {}
    judged: dict[str, Any] = {}
    if how.generate:
        rows = generate_set(wrapped, data, how, progress)
        names = None if how.metrics is None else [m for m in how.metrics if m != "loss"]
        answers, references = [a for _, a, _, _ in rows], [r for _, _, r, _ in rows]
        metrics |= text_metrics(answers, references, names, rules=how.rules)
        if any(name in JSON_METRICS for name in names or ()):
            judged["json"] = judge_answers(answers, references, how.rules or JsonRules()).to_json([i for i, *_ in rows])
        lines = [{"id": i, "text": answer, "reference": ref} for i, answer, ref, _ in rows]
        for field in how.slices:
            for value in sorted({str(f[field]) for *_, f in rows if field in f}):
                part = [(a, r) for _, a, r, f in rows if str(f.get(field)) == value]
                figures = text_metrics([a for a, _ in part], [r for _, r in part], names, rules=how.rules)
                slices.setdefault(field, {})[value] = {"rows": len(part), "metrics": figures}
    report = {"rows": len(data.rows), "metrics": metrics, "slices": slices, **judged}
    return Measured(data.name, metrics, report, lines)


def _chat_loss(wrapped: Wrapped, data: EvalSet, how: Measure) -> float:
    total = units = 0.0
    jobs = data.share(wrapped, how.micro_batch_tokens)
    for batch in iterate_jobs(data.corpus, jobs, workers=how.workers, pictures=wrapped.pictures):
        out = wrapped.evaluate(batch)
        total += float(out.loss) if out is not None else 0.0  # parts, where ranks share a batch
        units += batch.units if wrapped.leads else 0
        how.between()
    total, units = sum_ranks(total, units)
    return total / units


def generate_set(
    wrapped: Wrapped,
    data: EvalSet,
    how: Measure,
    progress: Progress | None = None,
    keep: Callable[[str, str], None] | None = None,
) -> list[tuple[str, str, str, dict[str, Any]]]:
    """Greedy answers to every row's last turn: (id, answer, reference, fields), in the order of the file.

    Args:
        keep: told (id, answer) of each as soon as it is there, on the rank where it is.
    """
    jobs = data.share(wrapped, how.micro_batch_tokens)
    mine = []
    for number, made in enumerate(answer_jobs(wrapped, data, jobs, how), 1):
        mine += made
        if keep is not None:
            for row, text in made:
                keep(data.index.rows[row].id, text)
        if progress is not None:
            progress(number, len(jobs))
    out = []
    for row, answer in sorted(pair for share in gather_objects(mine) for pair in share):
        sample = data.index.load(data.index.rows[row], data.renderer)
        assert isinstance(sample, ChatSample)
        out.append((sample.id, answer, data.corpus.reference(row), dict(sample.fields)))
    return out


@torch.no_grad()
def answer_jobs(wrapped: Wrapped, data: EvalSet, jobs: Sequence[Job], how: Measure) -> Iterator[list[tuple[int, str]]]:
    """(row, greedy answer) of each micro-batch; a rank that does not lead has none."""
    processor = data.renderer.processor
    _refuse_generation(wrapped)
    stop = stop_ids(wrapped, processor)
    alive = (lambda here: max_ranks(float(here), group=wrapped.learners)[0] > 0) if wrapped.sharded else bool
    prompts = iterate_jobs(data.corpus, jobs, workers=how.workers, prompts=True, pictures=wrapped.pictures)
    for job, batch in zip(jobs, prompts, strict=True):
        if wrapped.encoder is not None:
            wrapped.evaluate(batch)
            yield []
            continue
        with wrapped.compute():
            answers = generate_greedy(
                wrapped.owner, batch, stop=stop, max_new_tokens=how.max_new_tokens, anyone_alive=alive
            )
        how.between()
        leads = zip(job.picks, answers, strict=True) if wrapped.leads else ()
        yield [(row, processor.decode(answer.ids)) for (row, _), answer in leads]


def _refuse_generation(wrapped: Wrapped) -> None:
    """Answers grow token by token, which a cut stream and a pipeline cannot."""
    for axis, size in (("cp", wrapped.layout.cp), ("pp", wrapped.layout.pp)):
        if size > 1:
            raise UsageError(
                f"parallel.{axis}={size} gives losses and scores, but no generated answers",
                remedy=f"Generate from the run with parallel.{axis}=1",
            )


def stop_ids(wrapped: Wrapped, processor: Processor) -> tuple[int, ...]:
    """Ids that end an answer: the end of a turn, which is what was learnt, and the generation config's."""
    known = wrapped.owner.hf.generation_config.eos_token_id  # type: ignore[union-attr]
    listed = known if isinstance(known, list) else [] if known is None else [known]
    return tuple({processor.control(END_OF_TURN), *listed})
