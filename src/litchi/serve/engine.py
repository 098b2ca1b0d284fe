"""One model that scores and answers: opened as evaluation opens it, checked before it is used.

TARGET and settings -> `Engine`; pieces -> scores, by the forward that evaluation uses; a prompt -> its answer, token
by token. Nothing here knows of HTTP or of processes.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from litchi import __version__
from litchi.batch.sources import make_renderer
from litchi.config import Config, resolve_micro_batch_tokens
from litchi.data.processor import load_processor
from litchi.data.render import Renderer
from litchi.dist import Ranks
from litchi.errors import UserError
from litchi.evaluate.run import stop_ids
from litchi.model.build import resolve_model
from litchi.model.features import TowerFeatures
from litchi.model.generate import stream_greedy
from litchi.parallel.apply import Wrapped
from litchi.serve.batcher import Budget
from litchi.serve.jobs import EngineSpec, Facts
from litchi.serve.memory import FeatureMemory
from litchi.serve.prefixes import Prefixes
from litchi.serve.preparing import Piece, collate_pieces
from litchi.train.target import Target, find_target, open_target, same_prompt, target_config

ALONE = {
    "fp64": 1e-3,
    "fp32": 1e-3,
    "bf16": 0.5,
    "fp16": 0.1,
}  # how far neighbours may move a score of about 20


class Engine:
    """A model in memory, with the renderers of what it can be asked."""

    def __init__(self, spec: EngineSpec, ranks: Ranks):
        target = find_target(spec.name)
        words = list(spec.overrides) if spec.like is None else same_prompt(spec.like, spec.overrides)
        config = target_config(target, words, task=known_task(target) or "rerank")
        both = known_task(target) is None and not any(w.startswith("task=") for w in words)
        processor = load_processor(resolve_model(config.model.path))
        self.warnings = check_pixels(target, config, processor.vision)
        self.spec, self.config = spec, config
        self.wrapped: Wrapped = open_target(target, config, ranks)
        self.renderers = make_renderers(config, processor, both=both)
        self.memory = FeatureMemory(config.serve.cache_mb * 2**20)
        owner = self.wrapped.owner
        owner.score_loss = None  # there is nothing to learn here
        owner.features = TowerFeatures(self.memory, alone=False)  # type: ignore[arg-type]  # it finds, reads and keeps
        self.prefixes = Prefixes(config.serve.prefix_mb * 2**20)
        self.stop = stop_ids(self.wrapped, processor)
        serve = config.serve
        tokens = serve.batch_tokens or resolve_micro_batch_tokens(config, ranks.device.type)
        self.budget = Budget(tokens, serve.batch_pixels // owner.spec.patch**2, serve.wait_ms / 1000)

    @property
    def facts(self) -> Facts:
        """What this engine says of itself."""
        owner = self.wrapped.owner
        facts: dict[str, Any] = {
            "pixels": self.config.data.pixels.in_force(owner.spec),
            "template": self.config.data.template if "rerank" in self.renderers else None,
            "instruction": self.config.data.instruction,
            "dtype": self.dtype,
            "precision": self.wrapped.precision,
            "device": str(owner.device),
            "max_tokens": self.config.data.max_length,
            "batch_tokens": self.budget.tokens,
            "litchi": __version__,
        }
        return Facts(self.spec.name, tuple(self.renderers), facts)

    @property
    def dtype(self) -> str:
        return str(next(self.wrapped.owner.parameters()).dtype).removeprefix("torch.")

    @torch.no_grad()
    def score(self, pieces: Sequence[Piece]) -> list[list[float]]:
        """logit(yes) - logit(no) of the documents of each piece. A score may be not finite: see `nonfinite`."""
        batch = collate_pieces(pieces, self.renderers["rerank"], self.memory)
        with self.wrapped.compute():
            examples, queries = [piece.example for piece in pieces], [piece.query for piece in pieces]
            scores = self.prefixes.score(self.wrapped.owner, batch, examples, queries).float().cpu().tolist()
        return [scores[a:b] for a, b in batch.groups]

    def nonfinite(self, name: str, score: float) -> str:
        """What the log says of a score that is no number."""
        return (
            f"the score of {name} is {score}: computed in {self.wrapped.precision} with weights in {self.dtype}; a run "
            "that diverged leaves such weights, and fp16 overflows above 65504"
        )

    def answer(
        self, pieces: Sequence[Piece], limits: Sequence[int], dropped: set[int]
    ) -> Iterator[list[tuple[int, int | None]]]:
        """Greedy answers of some prompts, a token each with every pass; see `stream_greedy`."""
        batch = collate_pieces(pieces, self.renderers["chat"], self.memory)
        passes = stream_greedy(
            self.wrapped.owner, batch, stop=self.stop, limits=limits, room=max(limits), dropped=dropped
        )
        while True:
            with torch.no_grad(), self.wrapped.compute():
                said = next(passes, None)
            if said is None:
                return
            yield said

    def decode(self, ids: list[int]) -> str:
        """Text of an answer."""
        return self.renderers["chat"].processor.decode(ids)


def known_task(target: Target) -> str | None:
    """What a target was trained for; None where it is not known."""
    return target.facts.get("task")


def make_renderers(config: Config, processor: Any, *, both: bool) -> dict[str, Renderer]:
    """Renderers of the tasks that are served, on one processor: its texts are forgotten together."""
    first = make_renderer(config, processor, ".")
    if not both:
        return {first.task: first}
    chat = Renderer("chat", first.processor, window=first.window, budget=first.budget)
    return {"rerank": first, "chat": chat}


def check_pixels(target: Target, config: Config, folder: Any) -> list[str]:
    """Compare the pixel limits in force and in the folder with those of the training.

    Returns:
        Warnings, where the command line changes them on purpose.

    Raises:
        UserError: the folder's processor has others than its manifest: some other program would see other pictures.
    """
    if target.manifest is None or "pixels" not in target.manifest:
        return []
    trained = target.manifest["pixels"]
    limits = (trained["min"], trained["max"])
    found = (folder.min_pixels, folder.max_pixels)
    if target.adapter is None and target.checkpoint is None and found != limits:
        raise UserError(
            f"the pixel limits of preprocessor_config.json are {found}, those of the training were {limits}",
            where=target.base,
            why="the files of the export do not belong together",
            remedy="Export it again",
        )
    used = config.data.pixels.model_dump(exclude_none=True)
    if used == trained:
        return []
    return [f"pixel limits are {used}, those of the training were {trained}: scores will differ"]


def sample_picture() -> bytes:
    """A small drawn picture, for the self check."""
    levels = np.indices((40, 56)).sum(0) * 2 % 256
    out = io.BytesIO()
    Image.fromarray(levels.astype(np.uint8)).convert("RGB").save(out, "PNG")
    return out.getvalue()


def compare_scores(engine: Engine, alone: Sequence[float], together: Sequence[float]) -> list[str]:
    """The self check of a reranker: finite, the same alone as beside others; warns where all are equal.

    Raises:
        UserError: the model cannot be served.
    """
    for number, score in enumerate([*alone, *together]):
        if not math.isfinite(score):
            raise UserError("the self check failed", why=engine.nonfinite(f"document {number}", score))
    gap = max(abs(a - b) for a, b in zip(alone, together, strict=True))
    allowed = ALONE[engine.wrapped.precision]
    if gap > allowed:
        raise UserError(
            "the self check failed", why=f"a score moved by {gap:.2g} with its neighbours, {allowed:g} are allowed"
        )
    same = len(set(together)) == 1
    return ["all documents of the self check have the same score: is the head trained?"] if same else []
