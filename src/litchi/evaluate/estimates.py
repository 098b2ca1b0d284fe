"""What a ranking would earn, estimated from a log that another one made: replay, inverse propensities, doubly robust.

    ShownList (click_log.py), Ranking of each query -> find_slots -> Slots -> estimate -> figures, or why there are none

A slot is a place of a list of the log. Its weight is the probability that the ranking puts the shown item there over
that with which the log's system did (the propensity): what the log shows seldom counts for more. With w for the weight
and r = 1 for a click (a conversion), over the slots that the ranking fills:

- `replay`: mean r where log and ranking agree, of each place by itself and then over the places, so that agreeing more
  often at the top does not help. Needs a log in which all items are as likely at a place.
- `ips`: mean of w r. `clipped_ips`: with weights cut off, which is steadier and too low by at most what is cut off;
  its interval reaches that much higher. `snips`: sum of w r over sum of w.
- `dr`: what a model of r (place times item, learnt on other queries) expects of the ranking, plus the mean of w times
  the model's error. Right where propensities are, and the steadier the better the model.

All take it that a click depends on query, item and place, not on what stands around it. They are not identifiable
without propensities, or where the log does not show what the ranking would. Intervals are 95 %, by a seeded bootstrap
over queries. Ties of the ranking count as the mean over their orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from litchi.evaluate.click_log import ShownList
from litchi.evaluate.exposure import Ranking

Array = np.ndarray[Any, np.dtype[Any]]

CLIP = 10.0  # a weight at most, for clipped_ips
FOLDS = 5  # parts of the queries, each with a model of the others
PRIOR = 1.0  # clicks an item's model begins with, as many as its places lead to expect
RESAMPLES = 1000
AT_ONCE = 1 << 20  # draws held in memory, unless one resample has more
FAR = 4.0  # standard errors: one mean in fifteen thousand is farther off by chance
REPLAY, IPS, CLIPPED, SNIPS, DR = ESTIMATORS = ("replay", "ips", "clipped_ips", "snips", "dr")


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval, which one query does not have, or `why` it is not identifiable."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    why: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {"value": self.value, "low": self.low, "high": self.high, "why": self.why}


@dataclass(frozen=True, eq=False)
class Slots:
    """Places of all lists, as arrays over slots: the number of its query and of its item, its place from 1, the
    propensity (nan: not told), and the probability that the ranking puts this item (`agree`) or any (`filled`) there.

    `would` are the items that it would put there: arrays of slot, item and probability. `items` counts items.
    """

    query: Array
    item: Array
    place: Array
    propensity: Array
    agree: Array
    filled: Array
    would: tuple[Array, Array, Array]
    items: int
    rewards: Mapping[str, Array]

    @property
    def weight(self) -> Array:
        return self.agree / self.propensity

    @property
    def effective(self) -> float:
        """Effective sample size in slots: as many equally weighted ones tell as much. 0 without propensities."""
        total = self.weight.sum()
        return float(total**2 / (self.weight**2).sum()) if total > 0 else 0.0


def find_slots(lists: Sequence[ShownList], rankings: Mapping[str, Ranking]) -> Slots:
    """Lay the slots of a log beside what the ranking would put there. `rankings`: of every query of the log."""
    queries: dict[str, int] = {}
    items: dict[str, int] = {}
    slots: list[tuple[int, int, int, float, float, float]] = []
    would: list[tuple[int, int, float]] = []
    for shown in lists:
        ranking = rankings[shown.query_id]
        number = queries.setdefault(shown.query_id, len(queries))
        for item in shown.items:
            there = ranking.at(item.position)
            would += [(len(slots), items.setdefault(name, len(items)), 1 / len(there)) for name in there]
            slots.append(
                (
                    number,
                    items.setdefault(item.doc_id, len(items)),
                    item.position,
                    np.nan if item.propensity is None else item.propensity,
                    ranking.chance(item.doc_id, item.position),
                    float(bool(there)),
                )
            )
    query, item_of, place, propensity, agree, filled = (np.array(column) for column in zip(*slots, strict=True))
    columns = tuple(np.array(column) for column in zip(*would, strict=True)) or (np.zeros(0, int),) * 2 + (np.zeros(0),)
    flat = [item for shown in lists for item in shown.items]
    rewards = {"ctr": np.array([float(item.click) for item in flat])}
    if all(item.conversion is not None for item in flat):
        rewards["conversion"] = np.array([float(item.conversion or 0) for item in flat])
    return Slots(
        query, item_of, place, propensity, agree, filled, (columns[0], columns[1], columns[2]), len(items), rewards
    )


def estimate(
    slots: Slots, reward: str, *, clip: float = CLIP, seed: int = 0, resamples: int = RESAMPLES
) -> dict[str, Estimate]:
    """Mean reward of a slot under the ranking, by each estimator."""
    if (why := _refusal(slots)) is not None:
        return {name: Estimate(why=why) for name in ESTIMATORS}
    r, weight = slots.rewards[reward], slots.weight
    cut = np.minimum(weight, clip)
    expected, own = _expect(slots, r, seed)
    columns = {
        "filled": slots.filled,
        "w": weight,
        "w r": weight * r,
        "cut r": cut * r,
        "cut off": weight - cut,
        "dr": expected + weight * (r - own),
    }
    places = [int(place) for place in np.unique(slots.place[slots.filled > 0])]
    for place in places:
        here = slots.place == place
        columns |= {
            f"filled {place}": slots.filled * here,
            f"agree {place}": slots.agree * here,
            f"agree r {place}": slots.agree * here * r,
        }

    def replay(s: Mapping[str, Any]) -> Any:
        means = (s[f"agree r {k}"] / s[f"agree {k}"] * s[f"filled {k}"] for k in places)
        return sum(means) / s["filled"]

    formulas: dict[str, tuple[Formula, Formula | None]] = {
        REPLAY: (replay, None),
        IPS: (lambda s: s["w r"] / s["filled"], None),
        CLIPPED: (lambda s: s["cut r"] / s["filled"], lambda s: (s["cut r"] + s["cut off"]) / s["filled"]),
        SNIPS: (lambda s: s["w r"] / s["w"], None),
        DR: (lambda s: s["dr"] / s["filled"], None),
    }
    found = intervals(slots.query, columns, formulas, seed=seed, resamples=resamples)
    if (why := _uneven(slots)) is not None:
        found[REPLAY] = Estimate(why=why)
    return found


Formula = Callable[[Mapping[str, Any]], Any]


def intervals(
    query: Array,
    columns: Mapping[str, Array],
    formulas: Mapping[str, tuple[Formula, Formula | None]],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> dict[str, Estimate]:
    """Estimates that are functions of sums over slots, with 95 % intervals over resampled queries.

    Args:
        query: the query's number of each slot, from 0.
        columns: what is summed.
        formulas: of each estimate, and of its upper end where that is another.
    """
    sums = np.stack([np.bincount(query, weights=column) for column in columns.values()], axis=1)
    drawn, n = np.concatenate(list(_resample(sums, resamples, seed))), len(sums)
    whole = dict(zip(columns, sums.sum(axis=0), strict=True))
    again = dict(zip(columns, drawn.T, strict=True))
    found = {}
    for name, (formula, upper) in formulas.items():
        with np.errstate(divide="ignore", invalid="ignore"):  # a resample in which a place is never met says nothing
            low = np.nanpercentile(formula(again), 2.5)
            high = np.nanpercentile((upper or formula)(again), 97.5)
            value = float(formula(whole))
        found[name] = Estimate(value, float(low), float(high)) if n > 1 else Estimate(value)
    return found


def _resample(sums: Array, resamples: int, seed: int) -> Iterator[Array]:
    """Sums over as many queries as there are, drawn anew with repeats: [some resamples, columns] at a time."""
    rng, n = np.random.default_rng(seed), len(sums)
    at_once = max(1, AT_ONCE // n)
    for first in range(0, resamples, at_once):
        count = min(at_once, resamples - first)
        drawn = rng.integers(n, size=(count, n)) + n * np.arange(count)[:, None]
        yield np.bincount(drawn.ravel(), minlength=count * n).reshape(count, n) @ sums


# ------------------------------------------------------------------------------------------------- not identifiable


def _refusal(slots: Slots) -> str | None:
    """Why nothing can be said of the ranking; None: it can.

    Where the log shows all that the ranking would, the weights of a place are 1 on average (0 where it has no item).
    """
    silent = int(np.isnan(slots.propensity).sum())
    if silent:
        return f"{silent:,} of {len(slots.place):,} shown items have no propensity"
    if not slots.filled.any():
        return "the ranking has no item for any place of the log"
    for place in np.unique(slots.place[slots.filled > 0]):
        here = slots.place == place
        total, weight = slots.filled[here].sum(), slots.weight[here]
        if not weight.any():
            return f"at place {place} the log never shows what the ranking would"
        spread = total * max((weight**2).sum() / weight.sum() - 1, 0.0)  # of their sum, if their mean is 1
        if abs(weight.sum() - total) > FAR * spread**0.5 + 1e-9 * total:
            return (
                f"the weights at place {place} are {weight.sum() / total:.3g} on average where 1 is expected: the log "
                "lacks what the ranking would show, or its propensities are wrong"
            )
    return None


def _uneven(slots: Slots) -> str | None:
    """Why replay would be biased."""
    for place in np.unique(slots.place):
        there = slots.propensity[(slots.place == place) & (slots.agree > 0)]
        if len(there) and there.max() > there.min() * (1 + 1e-6):
            span = f"from {there.min():.3g} to {there.max():.3g}"
            return f"replay needs equal propensities: at place {place} they go {span}"
    return None


# ---------------------------------------------------------------------------------------------------------- a model


def _expect(slots: Slots, r: Array, seed: int) -> tuple[Array, Array]:
    """Expected reward at each slot of what the ranking would put there, and of what was shown; a query's by a model of
    the other queries: the mean of the place, times how much more than the means of its places the item has got."""
    at, item, chance = slots.would
    queries = int(slots.query.max()) + 1
    fold = np.random.default_rng(seed).permutation(queries) % FOLDS
    expected, own = np.zeros(len(r)), np.zeros(len(r))
    for part in range(min(FOLDS, queries)):
        known, asked = fold[slots.query] != part, fold[slots.query] == part
        place, shown = slots.place[known], slots.item[known]
        size = int(slots.place.max()) + 1
        mean = np.bincount(place, weights=r[known], minlength=size) / np.maximum(np.bincount(place, minlength=size), 1)
        usual = np.bincount(shown, weights=mean[place], minlength=slots.items)
        factor = (np.bincount(shown, weights=r[known], minlength=slots.items) + PRIOR) / (usual + PRIOR)
        own[asked] = np.minimum(mean[slots.place] * factor[slots.item], 1.0)[asked]
        guess = chance * np.minimum(mean[slots.place[at]] * factor[item], 1.0)
        expected[asked] = np.bincount(at, weights=guess, minlength=len(r))[asked]
    return expected, own
