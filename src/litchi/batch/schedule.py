"""step -> samples: pure functions of (seed, sizes, step). Nothing is remembered. `balance` shares them out.

The samples of a global batch do not depend on the number of ranks. The end of an epoch is a short step: nothing is
dropped, repeated or counted twice.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True)
class EpochPlan:
    """Which rows an epoch holds.

    Args:
        sizes: usable rows of each source.
        weights: how many times each source is passed in an epoch (2.0: twice; 0.5: another half each time).
        seed: of the order.
        global_batch_size: samples of a full step.
        shuffle: False keeps the order of the files (weights must then be 1).
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int
    global_batch_size: int
    shuffle: bool = True

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows each source gives to an epoch; at least one where it has any."""
        return tuple(max(1, round(n * w)) if n else 0 for n, w in zip(self.sizes, self.weights, strict=True))

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(sum(self.counts) / self.global_batch_size)

    def epoch_of(self, step: int) -> int:
        """Epoch, counted from 0, of a step counted from 1."""
        return (step - 1) // self.steps_per_epoch

    def rows(self, step: int) -> np.ndarray:
        """Rows of a step (counted from 1): numbers into the sources laid end to end. int64 [<= global_batch_size]."""
        epoch = self.epoch_of(step)
        first = (step - 1) % self.steps_per_epoch * self.global_batch_size
        return epoch_order(self, epoch)[first : first + self.global_batch_size]


@lru_cache(maxsize=4)
def epoch_order(plan: EpochPlan, epoch: int) -> np.ndarray:
    """Order of an epoch's rows. int64 [sum of counts]."""
    if not plan.shuffle:
        return np.arange(sum(plan.sizes))
    parts, base = [], 0
    for source, (size, count) in enumerate(zip(plan.sizes, plan.counts, strict=True)):
        parts.append(base + _draw(plan.seed, source, size, epoch * count, count))
        base += size
    rows = np.concatenate(parts)
    return rows[np.random.default_rng([plan.seed, 1, epoch]).permutation(len(rows))]


def _draw(seed: int, source: int, size: int, first: int, count: int) -> np.ndarray:
    """Entries first .. first+count-1 of an endless run of permutations of a source, so that passes never overlap."""
    out = np.empty(count, np.int64)
    done = 0
    while done < count:
        turn, at = divmod(first + done, size)
        order = np.random.default_rng([seed, 0, source, turn]).permutation(size)
        take = min(size - at, count - done)
        out[done : done + take] = order[at : at + take]
        done += take
    return out


def choose_negatives(seed: int, epoch: int, query_id: str, available: int, wanted: int | None) -> tuple[int, ...]:
    """Choose the negatives of a group that take part in an epoch: a pure function, in the order of the file."""
    if wanted is None or wanted >= available:
        return tuple(range(available))
    digest = hashlib.sha256(f"{seed}/{epoch}/{query_id}".encode()).digest()
    generator = np.random.default_rng(int.from_bytes(digest[:8], "big"))
    return tuple(sorted(int(i) for i in generator.choice(available, wanted, replace=False)))
