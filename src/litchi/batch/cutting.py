"""Groups larger than a micro-batch, cut into pieces: the prefix with some of the documents each.

A loss that is a sum over documents takes the pieces as they come. One that compares documents takes the scores of all
of them: they are computed first without gradients, piece by piece (`train/two_pass.py`), so the pieces stand in the
first micro-batches of a step and say which group they are of. Pure, so all ranks plan alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

from litchi.batch.balance import Balance, measure_balance, split_costs
from litchi.batch.cost import CostModel, Work
from litchi.batch.rows import RowCost
from litchi.batch.sharing import Shares

Cuts = Literal["never", "free", "together"]  # free: the loss is a sum over documents
TWICE = 4 / 3  # cost of a piece that goes forwards twice and backwards once, a backward taken as two forwards


class Cut(NamedTuple):
    """Where a piece is from: the number of its group in the step, of its first document, and all its documents."""

    group: int
    first: int
    documents: tuple[int, ...]


# (row, chosen documents), for a piece also where it is from
Pick = tuple[int, tuple[int, ...] | None] | tuple[int, tuple[int, ...], Cut]


class PlannedStep(NamedTuple):
    """Picks of all ranks' micro-batches, how even they are, and how many of each rank's first ones are pieces."""

    picks: list[list[list[Pick]]]  # [rank][micro-batch]
    balance: Balance
    rehearsed: int


def cut_group(row: RowCost, chosen: Sequence[int], limit: int) -> list[tuple[int, ...]]:
    """The documents of a group in runs that are about even, each within the limit together with the prefix.

    What cannot be cut exceeds it: a prefix with one document. Where the prefix takes more than half of the limit a
    run has as many tokens as the prefix, or computing it again and again would take most of the time.
    """
    children = [row.lengths[row.documents.index(document)] - row.prefix for document in chosen]
    if row.prefix + sum(children) <= limit:
        return [tuple(chosen)]
    least = max(limit - row.prefix, row.prefix, *children)
    fewest = len(_runs(children, least))
    low, high = max(children), least  # the smallest room that takes no more runs
    while low < high:
        room = (low + high) // 2
        low, high = (low, room) if len(_runs(children, room)) <= fewest else (room + 1, high)
    runs = _runs(children, high)
    ends = list(accumulate(runs))
    return [tuple(chosen[end - count : end]) for end, count in zip(ends, runs, strict=True)]


def _runs(children: Sequence[int], room: int) -> list[int]:
    """How many children each run takes, filled one after the other."""
    runs, held = [0], 0
    for size in children:
        if runs[-1] and held + size > room:
            runs.append(0)
            held = 0
        runs[-1] += 1
        held += size
    return runs


def plan_picks(
    rows: Sequence[tuple[int, RowCost, tuple[int, ...] | None]],
    model: CostModel,
    *,
    ranks: int,
    limit: int,
    least: int = 1,
    cuts: Cuts = "never",
) -> PlannedStep:
    """Share the rows of a step out over ranks and micro-batches, large groups in pieces.

    Args:
        rows: number, cost and chosen documents of each.
        model: what is shared out evenly.
        ranks, limit, least: as in `split_costs`.
        cuts: whether groups may be cut, and how.
    """
    whole: list[tuple[Pick, Work]] = []
    pieces: list[tuple[Pick, Work]] = []
    for number, (row, cost, chosen) in enumerate(rows):
        runs = [chosen] if chosen is None or cuts == "never" else cut_group(cost, chosen, limit)
        if len(runs) == 1 or cuts == "free":
            whole += [((row, run), cost.work(run)) for run in runs]
            continue
        assert chosen is not None
        for run in runs:
            assert run is not None
            pieces.append(((row, run, Cut(number, chosen.index(run[0]), chosen)), cost.work(run)))
    parts = [part for part in (pieces, whole) if part]
    shares: Shares = [[] for _ in range(ranks)]
    for part in parts:
        wanted = least - len(shares[0]) if part is parts[-1] else 1
        for rank, own in enumerate(_split(part, model, ranks, limit, wanted)):
            first = len(pieces) if part is whole else 0
            shares[rank] += [[first + i for i in micro] for micro in own]
        if part is pieces:
            rehearsed = len(shares[0])
    every = pieces + whole
    costs, pictures = [model.cost(work) for _, work in every], [model.picture_costs(work) for _, work in every]
    for i in range(len(pieces)):
        costs[i] *= TWICE
        pictures[i] = {name: cost * TWICE for name, cost in pictures[i].items()}
    picks = [[[every[i][0] for i in micro] for micro in rank] for rank in shares]
    return PlannedStep(picks, measure_balance(costs, shares, pictures), rehearsed if pieces else 0)


def _split(part: Sequence[tuple[Pick, Work]], model: CostModel, ranks: int, limit: int, least: int) -> Shares:
    return split_costs(
        [model.cost(work) for _, work in part],
        ranks,
        limit,
        tokens=[work.tokens for _, work in part],
        least=max(1, min(least, len(part) // ranks)),  # more would be empty
        pictures=[model.picture_costs(work) for _, work in part],
    )
