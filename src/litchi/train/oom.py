"""Memory that runs out in a step: which samples it was, and a smaller `micro_batch_tokens` for the next attempt.

The rank it happens on cannot ask the others, which wait for it in a collective. It leaves a request in the run's folder
and ends with RestartError; when all start again they agree on the request, write it into the journal, and obey it.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from litchi.batch.loader import StepPlan
from litchi.dist import Ranks
from litchi.errors import MachineError, RestartError, UserError
from litchi.train.durable import on_main, replace_file
from litchi.train.journal import Journal
from litchi.train.nonfinite import name_samples
from litchi.types import Batch

EVENT = "micro_batch_tokens"
SAYS = ("can't allocate memory", "cannot allocate memory", "bad_alloc", "out of memory", "failed to allocate memory")


class SmallerBatches(RestartError):
    """Memory ran out; the request for smaller micro-batches is on the disk."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: torch's own, Python's, the allocator's on the CPU, or the system's."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in SAYS)


def smaller(limit: int, tokens: int, *, divides: bool) -> int | None:
    """The next limit for a micro-batch of so many tokens that did not fit, half of it; None where it is the smallest
    already. Pure.

    Args:
        limit: tokens a micro-batch may have now.
        divides: whether it has more than one sample, or one that can be cut.
    """
    less = tokens // 2
    return less if divides and 0 < less < limit else None


def describe(batch: Batch, patch: int) -> dict[str, Any]:
    """What a micro-batch was: samples, tokens and pixels."""
    pixels = sum(t * h * w for t, h, w in batch.grids) * patch**2
    return {"samples": list(batch.samples), "tokens": batch.tokens, "pixels": pixels}


@contextmanager
def guard_memory(
    folder: Path,
    ranks: Ranks,
    plan: StepPlan,
    batches: Sequence[Batch],
    step: int,
    patch: int,
    at: Callable[[], int | None],
) -> Iterator[None]:
    """Around a step: memory that runs out ends it as `ask_smaller` says.

    Args:
        at: tells the number of the micro-batch under way; None: the update.
    """
    try:
        yield
    except Exception as error:
        if not (batches and is_out_of_memory(error)):
            raise
        limit, cuts = plan.limit(step), plan.cuts != "never"
        raise ask_smaller(folder, ranks, batches, step=step, at=at(), limit=limit, patch=patch, cuts=cuts) from error


def ask_smaller(
    folder: Path,
    ranks: Ranks,
    batches: Sequence[Batch],
    *,
    step: int,
    at: int | None,
    limit: int,
    patch: int,
    cuts: bool,
) -> UserError:
    """Leave a request for smaller micro-batches. Not collective.

    Args:
        at: number of the micro-batch under way; None: the update, which the largest is held responsible for.
        limit: tokens a micro-batch may have now.
        patch: pixels of a patch's side.
        cuts: whether a group is cut where it exceeds a micro-batch.

    Returns:
        What the rank ends with: SmallerBatches, or MachineError where nothing smaller is left.
    """
    own = max(batches, key=lambda b: b.tokens) if at is None else batches[at]
    facts = describe(own, patch)
    phase = "the update" if at is None else f"micro-batch {at + 1} of {len(batches)}"
    size = f"{facts['tokens']:,} tokens, {facts['pixels']:,} pixels"
    less = smaller(limit, own.tokens, divides=len(own.samples) > 1 or (cuts and len(own.doc_ids) > 1))
    where = f"rank {ranks.rank}, {phase}"
    if less is None:
        return MachineError(
            f"out of memory in step {step} with one sample alone: {name_samples(own.samples) or 'an empty one'}",
            where=where,
            why=f"{size}, the smallest micro-batch there can be",
            remedy="Lower data.max_length or data.pixels.max, set train.checkpoint_activations=true or train.offload, "
            "start more ranks with parallel.dp_shard, or take it out",
        )
    asked = {"tokens": less, "in_step": step, "rank": ranks.rank, "phase": phase, "of": facts}
    replace_file(folder / f".smaller-{ranks.rank}.json", json.dumps(asked))
    return SmallerBatches(
        f"out of memory in step {step}: {name_samples(own.samples)}",
        where=where,
        why=f"{size}; micro_batch_tokens goes from {limit:,} down to {less:,}",
        remedy="The ranks start again from the last checkpoint, or with the same command",
    )


def obey_requests(folder: Path, ranks: Ranks, journal: Journal, *, resumed: int | None) -> tuple[tuple[int, int], ...]:
    """Agree on what ranks have asked for, and write it down before it is obeyed. Collective.

    Args:
        resumed: step of the checkpoint; None: there is none, and the requests stay until there is one that carries
            the journal.

    Returns:
        All that holds, as (first step, tokens of a micro-batch at most).
    """

    def read() -> list[dict[str, Any]]:
        return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(".smaller-*.json"))]

    def forget() -> None:
        for path in folder.glob(".smaller-*.json"):
            path.unlink()

    what = "the run's folder cannot be written"
    asked = on_main(ranks, read, what=what, place=folder)
    if asked:
        least = min(asked, key=lambda one: one["tokens"])
        journal.add(EVENT, step=(resumed or 0) + 1, why="out of memory", **least)
        if resumed is not None:
            on_main(ranks, forget, what=what, place=folder)
    return tuple((entry["step"], entry["tokens"]) for entry in journal.made(EVENT))
