"""Work that waits -> batches: by a budget of tokens and of pixels, in the order of arrival, with a deadline.

While the model is at work, what arrives gathers by itself. Where it is idle, the first piece waits for others, but
not longer than `wait_s`. A piece of a large request stands as if it had come `SPREAD_S` later than the piece before
it, so that small requests get in between and none waits for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

SPREAD_S = 0.1
Kind = Literal["score", "chat"]


@dataclass(frozen=True)
class Budget:
    """What a batch may hold, and how long a first piece waits for others."""

    tokens: int
    patches: int
    wait_s: float


@dataclass(frozen=True)
class Work:
    """A piece of a request that fits into a batch: what it takes, when it is due, and what it is (`load`)."""

    request: int
    kind: Kind
    tokens: int
    patches: int
    due_s: float
    held_bytes: int = 0
    load: Any = field(default=None, compare=False, repr=False)


def choose(waiting: Sequence[Work], budget: Budget, kinds: Collection[Kind] = ("score", "chat")) -> list[Work]:
    """The next batch: the piece that is due first, and of those behind it what still fits. One kind in a batch."""
    ordered = sorted((w for w in waiting if w.kind in kinds), key=lambda w: w.due_s)
    chosen: list[Work] = []
    tokens = patches = 0
    for work in ordered:
        fits = tokens + work.tokens <= budget.tokens and patches + work.patches <= budget.patches
        if not chosen or (fits and work.kind == chosen[0].kind):
            chosen.append(work)
            tokens, patches = tokens + work.tokens, patches + work.patches
    return chosen


def is_full(waiting: Sequence[Work], budget: Budget) -> bool:
    """Whether nothing is gained by waiting for more."""
    return sum(w.tokens for w in waiting) >= budget.tokens or sum(w.patches for w in waiting) >= budget.patches


class Batcher:
    """Where pieces wait, for one thread that takes them and others that bring them.

    Args:
        held_limit_bytes: of decoded pictures that wait; who brings more is held up until some are taken.
    """

    def __init__(self, budget: Budget, held_limit_bytes: int, clock: Callable[[], float] = time.monotonic):
        self.budget, self.held_limit_bytes, self.clock = budget, held_limit_bytes, clock
        self.waiting: list[Work] = []
        self.idle_since_s: float | None = None  # when the first of those that wait found the model idle
        self.changed = threading.Condition()
        self.closed = False

    def add(self, works: Sequence[Work]) -> None:
        """Let pieces wait for their turn."""
        with self.changed:
            self.waiting += works
            self.changed.notify_all()

    def drop(self, request: int) -> None:
        """Nobody waits for a request any more."""
        with self.changed:
            self.waiting = [w for w in self.waiting if w.request != request]
            self.changed.notify_all()

    def wait_for_room(self) -> None:
        """Hold up who decodes pictures faster than they are computed."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or self._held_bytes() < self.held_limit_bytes)

    def take(self, kinds: Collection[Kind], *, block: bool) -> list[Work]:
        """The next batch; [] when there is none and `block` is false, or when the batcher is closed."""
        with self.changed:
            while not self.closed:
                able = [w for w in self.waiting if w.kind in kinds]
                if not able and not block:
                    return []
                rest_s = None
                if able:
                    if self.idle_since_s is None:
                        self.idle_since_s = self.clock()
                    rest_s = self.idle_since_s + self.budget.wait_s - self.clock()
                    if not block or rest_s <= 0 or is_full(able, self.budget):
                        return self._remove(choose(able, self.budget, kinds))
                self.changed.wait(rest_s)
            return []

    def busy(self) -> None:
        """The model has been at work: what has gathered meanwhile waits no longer."""
        with self.changed:
            self.idle_since_s = self.clock() - self.budget.wait_s if self.waiting else None

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def _remove(self, chosen: list[Work]) -> list[Work]:
        taken = set(map(id, chosen))
        self.waiting = [w for w in self.waiting if id(w) not in taken]
        self.idle_since_s = None
        self.changed.notify_all()
        return chosen

    def _held_bytes(self) -> int:
        return sum(w.held_bytes for w in self.waiting)
