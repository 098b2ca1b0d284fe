"""Samples that show the same pictures, brought into the same micro-batch: each picture is encoded once there.

What a step holds does not change, nor how many micro-batches it takes; a split is taken only if the heaviest ranks
then have less to compute. Pure and deterministic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

Shares = list[list[list[int]]]  # [rank][micro-batch] -> numbers of samples, in their order in the step
Pictures = Sequence[Mapping[int, float]]  # of each sample: a picture's number -> what encoding it costs

SWEEPS = 2  # over all samples, moving each to where it costs least
FOREIGN = 2  # bins without room in which a sample is tried in exchange for each other
TRIALS = 4000  # exchanges that are tried at most: 0.3 s
PLACES = 500_000  # samples x micro-batches of all ranks up to which this is tried: 0.5 s


def shared_loads(costs: Sequence[float], shares: Shares, pictures: Pictures) -> np.ndarray:
    """Cost of each micro-batch, a picture counted once in it. [rank, micro-batch]"""
    return np.array([[_load(batch, costs, pictures) for batch in rank] for rank in shares])


def _load(batch: Sequence[int], costs: Sequence[float], pictures: Pictures) -> float:
    total, seen = sum(costs[i] for i in batch), set()
    for i in batch:
        for picture, cost in pictures[i].items():
            if picture in seen:
                total -= cost
            seen.add(picture)
    return total


def gather_pictures(
    costs: Sequence[float], shares: Shares, limit: float, tokens: Sequence[float], pictures: Pictures
) -> Shares:
    """A split with as many micro-batches in which pictures repeat more, or the same split where that is no faster.

    Args:
        costs: of each sample, all its pictures counted.
        shares: a split of them, even in these costs.
        limit: tokens of a micro-batch; a larger sample is alone in one.
        tokens: of each sample.
        pictures: of each sample, what is part of its cost.
    """
    times = Counter(picture for own in pictures for picture in own)
    repeated = [{p: cost for p, cost in own.items() if cost > 0 and times[p] > 1} for own in pictures]
    bins = sum(map(len, shares))
    if bins == 1 or not any(repeated) or len(costs) * bins > PLACES:
        return shares
    best, least = shares, _time(costs, shares, repeated)
    for start in (None, shares):
        found = _Gathering(costs, shares, limit, tokens, repeated).split(start)
        if found is not None and (time := _time(costs, found, repeated)) < least * (1 - 1e-9):
            best, least = found, time
    return best


def _time(costs: Sequence[float], shares: Shares, pictures: Pictures) -> float:
    """What a step takes: the heaviest rank, and ranks that wait for each other in every micro-step, half and half."""
    loads = shared_loads(costs, shares, pictures)
    return float(loads.sum(1).max() + loads.max(0).sum())


class _Gathering:
    """Samples on their way into bins (rank * micro + number), with what each bin holds and shows."""

    def __init__(self, costs, shares: Shares, limit: float, tokens, pictures: Pictures):
        self.ranks, self.micro, self.limit = len(shares), len(shares[0]), limit
        self.own = [cost - sum(p.values()) for cost, p in zip(costs, pictures, strict=True)]
        self.costs, self.tokens, self.pictures = costs, tokens, pictures
        bins = self.ranks * self.micro
        self.place = np.full(len(costs), -1, np.int64)
        self.trials = TRIALS
        self.shown: dict[int, Counter[int]] = {}  # picture -> bin -> how many of its samples show it
        self.held, self.load, self.counts = np.zeros(bins), np.zeros(bins), np.zeros(bins, np.int64)

    def split(self, start: Shares | None) -> Shares | None:
        """Begin from a split or from nothing; None where it does not work out within so many micro-batches."""
        if start is None:
            for i in sorted(range(len(self.costs)), key=lambda i: (-self.costs[i], i)):
                if (to := self._cheapest(i)) is None:
                    return None
                self._put(i, to)
        else:
            for rank, batches in enumerate(start):
                for number, batch in enumerate(batches):
                    for i in batch:
                        self._put(i, rank * self.micro + number)
        for _ in range(SWEEPS):
            if not sum(self._improve(i) for i in range(len(self.costs))):
                break
        if len(self.costs) >= len(self.counts) and not self.counts.all():
            return None
        return self._lined_up()

    def _improve(self, i: int) -> bool:
        """Put a sample where it is cheapest: where there is room, or in exchange for another; whether it moved."""
        at = self.place[i]
        self._take(i)
        keys, fits = self._keys(i)
        least = keys[at] * (1 - 1e-9)
        self._put(i, at)
        better = [int(to) for to in np.argsort(keys, kind="stable")[: 1 + FOREIGN] if keys[to] < least]
        for to in better:
            if fits[to] and self.counts[at] > 1:
                self._move(i, to)
                return True
            if any(self._exchange(i, j) for j in np.flatnonzero(self.place == to).tolist()):
                return True
        return False

    def _exchange(self, i: int, j: int) -> bool:
        """Exchange two samples if that costs less."""
        here, there = self.place[i], self.place[j]
        more = self.tokens[i] - self.tokens[j]
        fits = (self.counts[there] == 1 or self.held[there] + more <= self.limit) and (
            self.counts[here] == 1 or self.held[here] - more <= self.limit
        )
        if not fits or self.trials <= 0:
            return False
        self.trials -= 1
        before = self._total()
        self._move(i, there)
        self._move(j, here)
        if self._total() < before * (1 - 1e-9):
            return True
        self._move(i, here)
        self._move(j, there)
        return False

    def _total(self) -> float:
        """What all ranks compute, and by how much some are above the mean."""
        ranks = self.load.reshape(self.ranks, -1).sum(1)
        total = float(ranks.sum())
        return total + float(np.maximum(0, ranks - total / self.ranks).sum())

    def _cheapest(self, i: int) -> int | None:
        """The bin with room in which a sample that is in none costs least."""
        keys, fits = self._keys(i)
        return int(np.where(fits, keys, np.inf).argmin()) if fits.any() else None

    def _keys(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """What a sample that is in none costs in each bin: what it adds, and by how much its rank is then dearer than
        the mean; and whether there is room."""
        added = np.full(len(self.load), self.costs[i])
        for picture, cost in self.pictures[i].items():
            for number in self.shown.get(picture, ()):
                added[number] -= cost
        keys = added + 1e-6 * (self.load + added)  # where all is equal, the lightest
        if self.ranks > 1:
            ranks = self.load.reshape(self.ranks, -1).sum(1)
            keys += np.maximum(0, np.repeat(ranks, self.micro) + added - ranks.mean())
        return keys, (self.counts == 0) | (self.held + self.tokens[i] <= self.limit)

    def _move(self, i: int, to: int) -> None:
        self._take(i)
        self._put(i, to)

    def _put(self, i: int, to: int) -> None:
        self._add(i, to, 1)
        self.place[i] = to

    def _take(self, i: int) -> None:
        self._add(i, self.place[i], -1)

    def _add(self, i: int, to: int, sign: int) -> None:
        cost = self.own[i]
        for picture, price in self.pictures[i].items():
            there = self.shown.setdefault(picture, Counter())
            before = there[to]
            if before + sign:
                there[to] = before + sign
            else:
                del there[to]
            if not before or not before + sign:
                cost += price
        self.load[to] += sign * cost
        self.counts[to] += sign
        self.held[to] = self.held[to] + sign * self.tokens[i] if self.counts[to] else 0.0

    def _lined_up(self) -> Shares:
        """Each rank's micro-batches from the heaviest to the lightest, so that ranks wait little for each other."""
        batches: list[list[int]] = [[] for _ in self.held]
        for i, to in enumerate(self.place):
            batches[to].append(i)
        order = sorted(range(len(batches)), key=lambda b: (b // self.micro, -self.load[b], b))
        lined = [batches[b] for b in order]
        return [lined[rank * self.micro : (rank + 1) * self.micro] for rank in range(self.ranks)]
