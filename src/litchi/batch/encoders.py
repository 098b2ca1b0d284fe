"""Which vision rank encodes the pictures of which micro-batch, and how far ahead. Pure, so all ranks plan alike.

`parallel.vision_ranks` take the vision tower off the ranks that learn. Ranks are numbered as in a plan: those that see
different data from 0, the vision ranks behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

NOBODY = -1


class Job(NamedTuple):
    """A micro-batch to prepare: its rows, and the other end its pictures' features come from or go to.

    `peer` is the number of a vision rank, on a vision rank that of a data rank, and NOBODY where nothing travels.
    """

    picks: Any
    peer: int = NOBODY


def assign_encoders(patches: Sequence[Sequence[int]], encoders: int) -> list[list[int]]:
    """The vision rank of each micro-batch: micro-step by micro-step, most patches first to the one that has least.

    Args:
        patches: [data rank][micro-batch] -> patches of its pictures.
        encoders: vision ranks.

    Returns:
        [data rank][micro-batch] -> number of the vision rank; NOBODY where there is no picture.
    """
    assigned = [[NOBODY] * len(own) for own in patches]
    load = [0] * encoders
    for micro in range(max(map(len, patches), default=0)):
        ranks = [rank for rank, own in enumerate(patches) if micro < len(own) and own[micro]]
        for rank in sorted(ranks, key=lambda rank: (-patches[rank][micro], rank)):
            lightest = load.index(min(load))
            assigned[rank][micro] = lightest
            load[lightest] += patches[rank][micro]
    return assigned


def choose_jobs(shares: Sequence[Sequence[Any]], patches: Callable[[Any], int], encoders: int, rank: int) -> list[Job]:
    """What a rank prepares of a step or of an evaluation, in order.

    A vision rank follows the micro-steps, within one the data ranks: whoever waits for features waits in this order
    too, so that no two ranks can wait for each other.

    Args:
        shares: [data rank][micro-batch] -> picks.
        patches: picks -> patches of their pictures.
        encoders: vision ranks.
        rank: a data rank, or behind them a vision rank.
    """
    if not encoders:
        return [Job(picks) for picks in shares[rank]]
    assigned = assign_encoders([[patches(picks) for picks in own] for own in shares], encoders)
    if rank < len(shares):
        return [Job(picks, peer) for picks, peer in zip(shares[rank], assigned[rank], strict=True)]
    places = sorted(
        (micro, data)
        for data, own in enumerate(assigned)
        for micro, encoder in enumerate(own)
        if encoder == rank - len(shares)
    )
    return [Job(shares[data][micro], data) for micro, data in places]


def encoded_steps(step: int, *, first: int, last: int) -> range:
    """The steps whose pictures a vision rank encodes while the others take a step: the next one, so that its features
    lie ready when it begins, and before the first step also that one's.

    Args:
        step: the one the others take.
        first, last: of this start of the run.
    """
    return range(step + (step > first), min(step + 1, last) + 1)
