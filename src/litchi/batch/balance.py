"""Samples of a step -> ranks -> micro-batches: within the token limit in as few as it allows, and even in cost.

`costs` is what ranks wait for each other over, `tokens` what memory holds. Every rank gets as many micro-batches as the
others. What is aimed at, in this order: few micro-batches; the heaviest rank near the mean; in each micro-step (the
m-th micro-batch of all ranks, in which sharded ranks wait for each other) the heaviest rank near the mean.
Pure and deterministic: largest first into the lightest rank, then exchanges between the heaviest rank and others.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace

import numpy as np

from litchi.batch.sharing import Pictures, Shares, gather_pictures, shared_loads

EVEN = 1.002  # heaviest rank / mean that is not improved on
ROUNDS = 200  # exchanges at most; 0.1 ms each
PAIRS = 16_384  # exchanges looked at in a round, about
MEMBERS = 256  # samples of a rank that are looked at in a round
PLACES = 2_000_000  # samples x micro-batches of a rank up to which each sample looks at all: 0.3 s. Beyond, as an
# evaluation of 100,000 rows has them, micro-batches are filled one after the other


def split_costs(
    costs: Sequence[float],
    ranks: int,
    limit: float,
    *,
    tokens: Sequence[int] | None = None,
    least: int = 1,
    pictures: Pictures | None = None,
) -> Shares:
    """Share the samples of a step out over ranks and micro-batches.

    Args:
        costs: of each sample of the step, above 0.
        ranks: number of data ranks.
        limit: tokens of a micro-batch; a single sample above it gets a micro-batch of its own.
        tokens: of each sample; its cost where left out.
        least: micro-batches of a rank at least.
        pictures: of each sample, those that are part of its cost; samples that share some are brought together.

    Returns:
        [rank][micro-batch] -> numbers into `costs`. A micro-batch is empty only where there are fewer samples than
        micro-batches.
    """
    cost = np.asarray(costs, np.float64)
    size = cost if tokens is None else np.asarray(tokens, np.float64)
    micro = max(least, _fewest(size, ranks, limit))
    while (place := _place(cost, size, ranks, micro, limit)) is None:
        micro += 1
    bins = _Bins(cost, size, ranks, micro, limit, place)
    bins.fill_empty()
    bins.even_ranks()
    shares = bins.line_up()
    return shares if pictures is None else gather_pictures(costs, shares, limit, size.tolist(), pictures)


def share_pictures(grids: Sequence[tuple[int, int, int]], ranks: int) -> list[list[int]]:
    """Numbers of the pictures each rank encodes: the largest first to the rank that has least. Pure."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    patches = [t * h * w for t, h, w in grids]
    for number in sorted(range(len(grids)), key=lambda n: (-patches[n], n)):
        rank = load.index(min(load))
        shares[rank].append(number)
        load[rank] += patches[number]
    return [sorted(share) for share in shares]


@dataclass(frozen=True)
class Balance:
    """How even the planned cost of a step is; 1 is even.

    `rank` is the heaviest rank's cost / the mean; `micro` the sum over micro-steps of the heaviest rank's cost / the
    mean rank's cost, which is what ranks need that wait for each other in every micro-step.
    """

    rank: float
    micro: float


def measure_balance(costs: Sequence[float], shares: Shares, pictures: Pictures | None = None) -> Balance:
    """Balance of a split; a picture counts once in a micro-batch where `pictures` are given as in `split_costs`."""
    loads = shared_loads(costs, shares, pictures or [{}] * len(costs))
    mean = loads.sum() / len(loads)
    if not mean:
        return Balance(1.0, 1.0)
    rank = max(1.0, float(loads.sum(1).max() / mean))  # free of rounding
    return Balance(rank, max(rank, float(loads.max(0).sum() / mean)))


# ---------------------------------------------------------------------------------------------------- first places


def _fewest(size: np.ndarray, ranks: int, limit: float) -> int:
    """Micro-batches of a rank that no split can go below."""
    alone = size > limit
    needed = int(alone.sum()) + math.ceil(size[~alone].sum() / limit)
    return max(1, math.ceil(max(needed, int((size > limit / 2).sum())) / ranks))


def _place(cost: np.ndarray, size: np.ndarray, ranks: int, micro: int, limit: float) -> list[int] | None:
    """A bin (rank * micro + number) for each sample: even in cost, else as full as can be. None: they do not fit."""
    place = _lightest_first(cost, size, ranks, micro, limit) if len(cost) * micro <= PLACES else None
    if place is None:
        place = _fullest_first(size, ranks * micro, limit)
        return None if place is None else _deal(place, cost, ranks, micro)
    return place


def _lightest_first(cost: np.ndarray, size: np.ndarray, ranks: int, micro: int, limit: float) -> list[int] | None:
    """Dearest first into the lightest bin with room of the lightest rank that has one."""
    costs, sizes = cost.tolist(), size.tolist()
    load, held = [0.0] * (ranks * micro), [0.0] * (ranks * micro)
    room = [math.inf] * ranks  # of the roomiest bin; an empty one takes a sample of any size
    heap = [(0.0, rank) for rank in range(ranks)]
    place = [0] * len(costs)
    for i in np.argsort(-cost, kind="stable").tolist():
        full = []
        while heap and room[heap[0][1]] < sizes[i]:
            full.append(heappop(heap))
        if not heap:
            return None
        total, rank = heap[0]
        bins = range(rank * micro, (rank + 1) * micro)
        fits = [b for b in bins if not held[b] or held[b] + sizes[i] <= limit]
        place[i] = lightest = min(fits, key=load.__getitem__)
        held[lightest] += sizes[i]
        load[lightest] += costs[i]
        least = min(held[b] for b in bins)
        room[rank] = limit - least if least else math.inf
        heapreplace(heap, (total + costs[i], rank))
        for entry in full:
            heappush(heap, entry)
    return place


def _fullest_first(size: np.ndarray, number: int, limit: float) -> list[int] | None:
    """Largest first into the fullest bin with room (best fit decreasing, which needs few bins)."""
    sizes = size.tolist()
    held: list[tuple[float, int]] = []  # of the bins in use, rising
    place = [0] * len(sizes)
    for i in np.argsort(-size, kind="stable").tolist():
        at = bisect_right(held, (limit - sizes[i], number))
        if at:
            before, fullest = held.pop(at - 1)
        elif len(held) < number:
            before, fullest = 0.0, len(held)
        else:
            return None
        place[i] = fullest
        insort(held, (before + sizes[i], fullest))
    return place


def _deal(place: list[int], cost: np.ndarray, ranks: int, micro: int) -> list[int]:
    """Deal full bins out to ranks, a round for each micro-batch: the heaviest of a round to the lightest rank."""
    load, weight = np.zeros(ranks), np.bincount(place, cost, ranks * micro)
    order = np.argsort(-weight, kind="stable").reshape(micro, ranks)
    new = np.empty(ranks * micro, np.int64)
    for m, bins in enumerate(order):
        lightest = np.argsort(load, kind="stable")
        new[bins] = lightest * micro + m
        load[lightest] += weight[bins]
    return new[place].tolist()


# --------------------------------------------------------------------------------------------------- improvements


class _Bins:
    """Samples in their bins, with what each bin holds, while they are moved about."""

    def __init__(self, cost: np.ndarray, size: np.ndarray, ranks: int, micro: int, limit: float, place: Sequence[int]):
        self.cost, self.size, self.ranks, self.micro, self.limit = cost, size, ranks, micro, limit
        self.place = np.array(place, np.int64)
        self.held = np.bincount(self.place, size, ranks * micro)
        self.counts = np.bincount(self.place, minlength=ranks * micro)
        self.load = np.bincount(self.place // micro, cost, ranks)

    def move(self, i: int, to: int) -> None:
        at = self.place[i]
        self.held[at] -= self.size[i]
        self.held[to] += self.size[i]
        self.counts[at] -= 1
        self.counts[to] += 1
        if self.counts[at] == 0:
            self.held[at] = 0.0  # free of rounding
        self.load[at // self.micro] -= self.cost[i]
        self.load[to // self.micro] += self.cost[i]
        self.place[i] = to

    def fill_empty(self) -> None:
        """Give each empty bin the cheapest sample that leaves none empty, of its own rank where that has one."""
        empty = np.flatnonzero(self.counts == 0)
        for number in empty[: max(0, len(self.cost) - (len(self.counts) - len(empty)))]:
            spare = np.flatnonzero(self.counts[self.place] > 1)
            foreign = self.place[spare] // self.micro != number // self.micro
            self.move(int(spare[np.lexsort((self.cost[spare], foreign))[0]]), int(number))

    def even_ranks(self) -> None:
        """Move samples of the heaviest rank to others, or exchange them, as long as that makes it lighter."""
        mean = self.load.sum() / self.ranks
        for _ in range(ROUNDS):
            heaviest = int(self.load.argmax())
            if self.load[heaviest] <= EVEN * mean or not self._relieve(heaviest):
                return

    def _relieve(self, heaviest: int) -> bool:
        """Move or exchange samples with the lightest ranks, else with heavier ones; False where nothing helps."""
        owner = self.place // self.micro
        mine = _thin(np.flatnonzero(owner == heaviest))
        others = np.argsort(self.load, kind="stable")[:-1]
        others = others[others != heaviest]
        at_once = max(1, PAIRS // (len(mine) * min(MEMBERS, -(-len(owner) // self.ranks))))
        for first in range(0, len(others), at_once):
            chosen = others[first : first + at_once]
            steps = [self._best_move(heaviest, mine, chosen), self._best_exchange(heaviest, mine, chosen)]
            after, step = min(steps, key=lambda one: one[0])
            if after < self.load[heaviest] * (1 - 1e-9):
                for sample, number in step:
                    self.move(sample, number)
                return True
        return False

    def _best_move(self, heaviest: int, mine: np.ndarray, others: np.ndarray):
        """(load of the heavier of the two ranks afterwards, [(sample, bin)]) of the best sample to give away."""
        if len(self.cost) >= len(self.counts):  # then no bin may become empty
            mine = mine[self.counts[self.place[mine]] > 1]
        if not len(mine):
            return np.inf, []
        bins = others * self.micro + self.held.reshape(self.ranks, -1)[others].argmin(1)
        fits = (self.held[bins] + self.size[mine][:, None] <= self.limit) | (self.counts[bins] == 0)
        less = self.cost[mine][:, None]
        after = np.where(fits, np.maximum(self.load[heaviest] - less, self.load[others] + less), np.inf)
        i, j = np.unravel_index(after.argmin(), after.shape)
        return after[i, j], [(int(mine[i]), int(bins[j]))]

    def _best_exchange(self, heaviest: int, mine: np.ndarray, others: np.ndarray):
        """The same for the best pair of samples to exchange."""
        owner = self.place // self.micro
        theirs = np.concatenate([_thin(np.flatnonzero(owner == rank)) for rank in others])
        if not len(theirs):
            return np.inf, []
        here, there = self.place[mine], self.place[theirs]
        less = self.cost[mine][:, None] - self.cost[theirs]
        grown = self.size[mine][:, None] - self.size[theirs]
        fits = (self.held[there] + grown <= self.limit) | (self.counts[there] == 1)
        fits &= (self.held[here][:, None] - grown <= self.limit) | (self.counts[here] == 1)[:, None]
        after = np.maximum(self.load[heaviest] - less, self.load[there // self.micro] + less)
        after = np.where(fits, after, np.inf)
        i, j = np.unravel_index(after.argmin(), after.shape)
        return after[i, j], [(int(mine[i]), int(there[j])), (int(theirs[j]), int(here[i]))]

    def line_up(self) -> Shares:
        """Pack each rank's samples anew so that its micro-batches follow the profile of the others'."""
        owner = self.place // self.micro
        members = [np.flatnonzero(owner == rank) for rank in range(self.ranks)]
        profile = np.zeros(self.micro)
        shares: Shares = [[] for _ in range(self.ranks)]
        largest = [self.cost[m].max(initial=0.0) for m in members]
        for rank in sorted(range(self.ranks), key=lambda r: (-largest[r], r)):
            packed = self._follow(members[rank], profile) if len(self.cost) * self.micro <= PLACES else None
            if packed is None:  # too tight: as it was, heaviest to heaviest
                by_bin = members[rank][np.argsort(self.place[members[rank]], kind="stable")]
                ends = np.cumsum(self.counts[rank * self.micro : (rank + 1) * self.micro])[:-1]
                old = np.split(by_bin, ends)
                old.sort(key=lambda batch: -self.cost[batch].sum())
                packed = [[] for _ in old]
                for number, batch in zip(np.argsort(-profile, kind="stable"), old, strict=True):
                    packed[number] = batch.tolist()
            profile = np.maximum(profile, [self.cost[batch].sum() for batch in packed])
            shares[rank] = [sorted(batch) for batch in packed]
        return shares

    def _follow(self, members: np.ndarray, profile: np.ndarray) -> list[list[int]] | None:
        """Largest first into the micro-batch that is furthest below the profile; None where they do not fit."""
        packed: list[list[int]] = [[] for _ in profile]
        gap, held, empty = profile.tolist(), [0.0] * self.micro, self.micro
        order = members[np.argsort(-self.cost[members], kind="stable")]
        costs, sizes = self.cost[order].tolist(), self.size[order].tolist()
        for k, i in enumerate(order.tolist()):
            if len(costs) - k <= empty:  # one for each that is still empty
                able = [m for m in range(self.micro) if not packed[m]]
            else:
                able = [m for m in range(self.micro) if not packed[m] or held[m] + sizes[k] <= self.limit]
            if not able:
                return None
            best = max(able, key=gap.__getitem__)
            empty -= not packed[best]
            packed[best].append(i)
            gap[best] -= costs[k]
            held[best] += sizes[k]
        return packed


def _thin(samples: np.ndarray) -> np.ndarray:
    """At most about MEMBERS of some samples, evenly taken."""
    return samples[:: max(1, len(samples) // MEMBERS)]
