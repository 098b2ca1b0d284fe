"""What goes to the process of a model and comes back: small frozen values that cross a pipe.

ScoreJob -> Scores        ChatJob -> text, piece by piece, then Answer
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from litchi.types import ChatSample, RerankSample


@dataclass(frozen=True)
class ScoreJob:
    """Queries, each with its documents. `names` says what a document is called in messages, group by group."""

    samples: tuple[RerankSample, ...]
    names: tuple[tuple[str, ...], ...]

    @property
    def documents(self) -> int:
        return sum(len(sample.documents) for sample in self.samples)


@dataclass(frozen=True)
class ChatJob:
    """A conversation to be answered, with at most so many tokens, up to one of the `stop` texts.
    `restore`: boxes of the answer are wanted in pixels of the picture as it was sent."""

    sample: ChatSample
    max_tokens: int
    stop: tuple[str, ...] = ()
    restore: bool = False


Job = ScoreJob | ChatJob


@dataclass(frozen=True)
class Scores:
    """logit(yes) - logit(no) of each document, in the order of the job; tokens that were computed; seconds waited and
    at work."""

    logits: tuple[tuple[float, ...], ...]
    tokens: int
    waited_s: float
    worked_s: float


@dataclass(frozen=True)
class Answer:
    """The whole text; why it ended: `stop`, or `length`."""

    text: str
    reason: str
    prompt_tokens: int
    new_tokens: int
    waited_s: float
    worked_s: float


@dataclass(frozen=True)
class Facts:
    """What an engine says of itself when it is ready: shown by /v1/models and checked between engines."""

    name: str
    tasks: tuple[str, ...]
    facts: dict[str, Any]


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is made of.

    Args:
        name: TARGET, as the user gave it.
        overrides: `key=value` words.
        threads: of the processor, for each engine; None: torch's own choice.
        device: which GPU, where there are some.
        like: the TARGET whose prompts and pixel limits it is asked with, so that only the weights differ.
        url: of another server that has the model; None: it is loaded here.
    """

    name: str
    overrides: tuple[str, ...] = ()
    threads: int | None = None
    device: int = 0
    like: str | None = None
    url: str | None = None


class Front:
    """The front as the process of an engine has it; when it is gone, the process has no purpose and ends."""

    def __init__(self, pipe: Any):
        self.pipe, self.writing = pipe, threading.Lock()

    def tell(self, *message: Any) -> None:
        """Send a message, from any thread."""
        try:
            with self.writing:
                self.pipe.send(message)
        except OSError:
            os._exit(0)

    def messages(self) -> Iterator[tuple[Any, ...]]:
        """What the front says, as it comes."""
        while True:
            try:
                message = self.pipe.recv()
            except (EOFError, OSError):
                os._exit(0)
            yield message
