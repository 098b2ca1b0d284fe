"""The process of one engine: jobs come in through a pipe, pieces of work gather, batches are computed, answers go out.

Three threads share the work. One reads the pipe, one prepares requests (text, pictures), and the main one runs the
model. What goes wrong with a request is told to that request; what goes wrong with a batch is tried again on its
pieces, so that one of them cannot spoil the others.

    in: ("job", number, Job) ("cancel", number)      out: ("ready", Facts, warnings) ("failed", UserError)
                                                          ("text", number, str) ("done", number, Scores | Answer)
                                                          ("refused", number, Refusal) ("stats", dict)
"""

from __future__ import annotations

import math
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from litchi.data.boxes import Frame, restore_boxes
from litchi.serve.answers import Growing
from litchi.serve.batcher import Batcher, Kind, Work
from litchi.serve.engine import Engine, compare_scores, sample_picture
from litchi.serve.jobs import Answer, ChatJob, EngineSpec, Front, Job, ScoreJob, Scores
from litchi.serve.limits import Refusal
from litchi.serve.preparing import Piece, Preparer
from litchi.types import ChatSample, Content, Document, Media, RerankSample, Source, Turn

HELD_BYTES = 2**28  # of decoded pictures that wait
LIVE = 16  # answers that grow at a time
YIELD = 5  # on a core it shares with the front, the model gives way: what is refused must not wait for it
FAILED = Refusal(500, "internal_error", "the model could not answer this request")


@dataclass
class Open:
    """A request under way in this process."""

    number: int
    job: Job
    came_s: float
    taken_s: float | None = None
    tokens: int = 0
    rest: int = 0  # pieces that are not done
    logits: list[list[float]] = field(default_factory=list)
    frame: Frame | None = None  # as in `Piece`


@dataclass
class Growth:
    """Answers that grow together: what one prefill began."""

    passes: Iterator[list[tuple[int, int | None]]]
    members: list[tuple[Open, Growing, int]]  # request, answer, tokens of its prompt
    dropped: set[int] = field(default_factory=set)


Taken = tuple[Work, Open]


class Worker:
    """The loop of an engine's process."""

    def __init__(self, engine: Engine, pipe: Any):
        self.engine, self.front = engine, Front(pipe)
        self.batcher = Batcher(engine.budget, HELD_BYTES)
        self.jobs: queue.SimpleQueue[tuple[int, Job, float] | None] = queue.SimpleQueue()
        self.known: set[int] = set()  # requests somebody waits for
        self.open: dict[int, Open] = {}  # of them, those that are prepared
        self.growing: list[Growth] = []
        self.guard = threading.Lock()
        self.preparer = Preparer(
            engine.renderers,
            engine.config.data.max_length,
            engine.budget,
            engine.config.serve,
            engine.memory,
            ThreadPoolExecutor(min(4, os.cpu_count() or 1)),
        )

    # ------------------------------------------------------------------------------------------ the pipe's thread

    def read_pipe(self) -> None:
        """Take in what the front says."""
        for message in self.front.messages():
            if message[0] == "job":
                with self.guard:
                    self.known.add(message[1])
                self.jobs.put((message[1], message[2], time.monotonic()))
            else:
                self._forget(message[1])
                self.batcher.drop(message[1])

    # -------------------------------------------------------------------------------------- the preparing thread

    def prepare_jobs(self) -> None:
        """Make pieces of one request after the other."""
        while (item := self.jobs.get()) is not None:
            number, job, came_s = item
            self.batcher.wait_for_room()
            if number not in self.known:
                continue
            try:
                works = self.preparer.prepare(number, job, came_s)
            except Refusal as refusal:
                self._forget(number)
                self.front.tell("refused", number, refusal)
            except Exception:
                traceback.print_exc()
                self._forget(number)
                self.front.tell("refused", number, FAILED)
            else:
                logits = [[math.nan] * len(s.documents) for s in job.samples] if isinstance(job, ScoreJob) else []
                tokens, frame = sum(w.load.example.tokens for w in works), works[0].load.frame
                with self.guard:
                    if number in self.known:
                        self.open[number] = Open(number, job, came_s, None, tokens, len(works), logits, frame)
                        self.batcher.add(works)

    def _forget(self, number: int) -> None:
        """Nobody waits for a request any more: it is answered, refused or given up."""
        with self.guard:
            self.known.discard(number)
            self.open.pop(number, None)

    # ------------------------------------------------------------------------------------------ the model's thread

    def run(self) -> None:
        """Score, begin answers, let answers grow, in turn."""
        threading.Thread(target=self.read_pipe, daemon=True).start()
        threading.Thread(target=self.prepare_jobs, daemon=True).start()
        while not self.batcher.closed:
            live = sum(len(growth.members) - len(growth.dropped) for growth in self.growing)
            kinds: tuple[Kind, ...] = ("score", "chat") if live < LIVE else ("score",)
            works = self.batcher.take(kinds, block=not self.growing)
            if works:
                self._compute(self._wanted(works))
            for growth in list(self.growing):
                self._grow(growth)
            self.batcher.busy()

    def _wanted(self, works: list[Work]) -> list[Taken]:
        """Pieces somebody waits for, with their requests."""
        wanted = []
        for work in works:
            request = self.open.get(work.request)
            if request is not None:
                request.taken_s = request.taken_s or time.monotonic()
                wanted.append((work, request))
        return wanted

    def _compute(self, taken: list[Taken]) -> None:
        if not taken:
            return
        try:
            if taken[0][0].kind == "chat":
                self._begin(taken)
            else:
                self._score(taken)
        except Exception:
            if len(taken) == 1:
                print(f"request {taken[0][0].request}:", file=sys.stderr, flush=True)
                traceback.print_exc()
                self._refuse(taken[0][0].request, FAILED)
                return
            half = len(taken) // 2
            self._compute(taken[:half])
            self._compute(taken[half:])

    def _refuse(self, number: int, refusal: Refusal) -> None:
        self.batcher.drop(number)
        self._forget(number)
        self.front.tell("refused", number, refusal)

    def _score(self, taken: list[Taken]) -> None:
        began = time.monotonic()
        pieces: list[Piece] = [work.load for work, _ in taken]
        scores = self.engine.score(pieces)
        took_s = time.monotonic() - began
        documents, tokens = sum(map(len, scores)), sum(piece.example.tokens for piece in pieces)
        memory = self.engine.memory
        self.front.tell(
            "stats",
            {"documents": documents, "tokens": tokens, "batch_s": took_s}
            | {"waiting": len(self.batcher.waiting), "found": memory.found, "asked": memory.asked}
            | {"cache_bytes": memory.held_bytes, "prefix_bytes": self.engine.prefixes.held_bytes}
            | {"saved_tokens": self.engine.prefixes.saved_tokens},
        )
        for (_, request), piece, found in zip(taken, pieces, scores, strict=True):
            if request.number in self.known:
                self._note(request, piece, found)

    def _note(self, request: Open, piece: Piece, found: list[float]) -> None:
        assert isinstance(request.job, ScoreJob)
        for document, score in zip(piece.documents, found, strict=True):
            if not math.isfinite(score):
                name = request.job.names[piece.group][document]
                print(f"request {request.number}: {self.engine.nonfinite(name, score)}", file=sys.stderr, flush=True)
                message = f"the score of {name} is not finite (computed in {self.engine.wrapped.precision})"
                self._refuse(request.number, Refusal(500, "nonfinite_score", message, param=name))
                return
            request.logits[piece.group][document] = score
        request.rest -= 1
        if not request.rest:
            self._forget(request.number)
            waited, worked = self._times(request)
            logits = tuple(tuple(group) for group in request.logits)
            self.front.tell("done", request.number, Scores(logits, request.tokens, waited, worked))

    def _times(self, request: Open) -> tuple[float, float]:
        taken = request.taken_s or request.came_s
        return taken - request.came_s, time.monotonic() - taken

    def _begin(self, taken: list[Taken]) -> None:
        """Read some prompts; their first tokens come with the first pass."""
        members, limits, dropped = [], [], set[int]()
        for work, request in taken:
            assert isinstance(request.job, ChatJob)
            growing = Growing(self.engine.decode, request.job.max_tokens, request.job.stop)
            members.append((request, growing, work.load.example.tokens))
            limits.append(request.job.max_tokens)
        growth = Growth(self.engine.answer([work.load for work, _ in taken], limits, dropped), members, dropped)
        self._advance(growth)  # an error in the prefill is that of these prompts
        self.growing.append(growth)

    def _grow(self, growth: Growth) -> None:
        """One more token for each of some answers."""
        try:
            self._advance(growth)
        except StopIteration:
            self.growing.remove(growth)
        except Exception:
            traceback.print_exc()
            self.growing.remove(growth)
            for member, (request, _, _) in enumerate(growth.members):
                if member not in growth.dropped:
                    self._refuse(request.number, FAILED)

    def _advance(self, growth: Growth) -> None:
        for member, token in next(growth.passes):
            request, growing, prompt = growth.members[member]
            if member in growth.dropped:
                continue
            if request.number not in self.known:  # its client has gone
                growth.dropped.add(member)
                continue
            text = growing.add(token)
            if text:
                self.front.tell("text", request.number, text)
            if growing.reason is not None:
                growth.dropped.add(member)
                self._forget(request.number)
                times = self._times(request)
                said = growing.text if request.frame is None else restore_boxes(growing.text, request.frame)
                answer = Answer(said, growing.reason, prompt, len(growing.ids), *times)
                self.front.tell("done", request.number, answer)


def check_engine(worker: Worker) -> list[str]:
    """Ask the model something of each kind before anyone else does. Raises UserError."""
    engine, source = worker.engine, Source("the self check", 1)
    picture = Content("", (Media("image", data=sample_picture()),))
    warnings = list(engine.warnings)
    if "rerank" in engine.renderers:
        contents = (Content("a red dress"), picture, Content("a blue mug with two handles and a lid"))
        documents = tuple(Document(f"d{n}", content, 0.0) for n, content in enumerate(contents))
        sample = RerankSample(source, "check", Content("a red dress, or a picture"), documents)
        names = tuple(document.id for document in documents)
        together = _pieces(worker, ScoreJob((sample,), (names,)))
        alone = []
        for document in documents:
            one = RerankSample(source, "check", sample.query, (document,))
            alone += engine.score(_pieces(worker, ScoreJob((one,), ((document.id,),))))[0]
        found = [score for scores in engine.score(together) for score in scores]
        warnings += compare_scores(engine, alone, found)
    if "chat" in engine.renderers:
        turns = (Turn("user", (*picture.media, "What is it?")), Turn("assistant", ()))
        pieces = _pieces(worker, ChatJob(ChatSample(source, "check", turns), 2))
        for _ in engine.answer(pieces, [2], set()):
            pass
    return warnings


def _pieces(worker: Worker, job: Job) -> list[Piece]:
    return [work.load for work in worker.preparer.prepare(0, job, 0.0)]


def open_worker(pipe: Any, spec: EngineSpec) -> Worker:
    """Load the model, and ask it something before the front hears that it is ready. Raises UserError."""
    import torch

    from litchi.dist import start_ranks
    from litchi.model.build import quiet_libraries

    if spec.threads:
        torch.set_num_threads(spec.threads)
    os.environ["LOCAL_RANK"] = str(spec.device % max(1, torch.cuda.device_count()))
    if hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) == 1:
        os.nice(YIELD)
    quiet_libraries()
    worker = Worker(Engine(spec, start_ranks()), pipe)
    worker.front.tell("ready", worker.engine.facts, check_engine(worker))
    return worker
