"""Does it fit? The largest micro-batch of a run, taken forwards and backwards before the first step, and `auto` sizes.

StepPlan -> where each rank's largest micro-batch is -> its peak of memory; nothing else of the run is touched
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from litchi.batch.cutting import Pick
from litchi.batch.loader import Corpus, StepPlan, make_batch
from litchi.dist import Ranks, gather_objects, max_ranks
from litchi.model.forward import Output
from litchi.model.weights import own_part
from litchi.train.durable import format_bytes
from litchi.train.losses import make_loss
from litchi.train.metrics import peak_bytes, status_bytes
from litchi.train.oom import describe, guard_memory
from litchi.train.outlook import PLANNED
from litchi.train.run import Run
from litchi.train.step import Trainer
from litchi.train.two_pass import random_state
from litchi.types import Batch

PATCH = 0.4  # tokens a patch takes as much memory as: 32 blocks of width 1280 against 28 layers of 3584 (7B)
STEPS = 1000  # that are planned to find the largest micro-batch, about 2 ms each; of a longer run those with
ROWS = 200  # so many of the largest samples, and others evenly spread
TRIED = 20  # steps looked at for a size on trial
ROOM = 0.92  # of a memory limit that may be taken
FINEST = 256  # tokens
MEASURED = "auto_micro_batch_tokens"  # in the journal
BOUNDS = {"cuda": (1024, 65_536), "cpu": (512, 8192)}  # of `auto`


# ------------------------------------------------------------------------------------------------ which is the largest


def weigh(corpus: Corpus, picks: Sequence[Pick]) -> float:
    """Tokens of a micro-batch, with those that its patches take as much memory as."""
    tokens = sum(corpus.find(row)[1].work(chosen).tokens for row, chosen, *_ in picks)
    return tokens + PATCH * corpus.patches(picks)


def steps_to_plan(plan: StepPlan, first: int, last: int, most: int = STEPS) -> list[int]:
    """The steps among which the largest micro-batch is looked for: all, or those of the largest samples and some
    others. Pure."""
    if last - first < most:
        return list(range(first, last + 1))
    chosen = {first + (last - first) * i // (most - 1) for i in range(most)}
    weights = np.array([row.tokens + PATCH * row.patches for source in plan.corpus.sources for row in source.rows])
    heavy = np.argsort(-weights, kind="stable")[:ROWS]
    for epoch in {plan.epochs.epoch_of(first), plan.epochs.epoch_of(last)}:
        begin = epoch * plan.epochs.steps_per_epoch
        for step in range(max(first, begin + 1), min(last, begin + plan.epochs.steps_per_epoch) + 1):
            if np.isin(plan.epochs.rows(step), heavy).any():
                chosen.add(step)
    return sorted(chosen)


def find_largest(plan: StepPlan, steps: Sequence[int], ranks: Ranks) -> list[tuple[float, int, int]]:
    """(weight, step, number) of the largest micro-batch of each data rank; each process looks at a share of the steps.
    Collective."""
    best = [(-1.0, 0, 0)] * plan.ranks
    for step in steps[ranks.rank :: ranks.world]:
        corpus = plan.corpus_at(step)
        for rank, own in enumerate(plan.shares(step)):
            for number, picks in enumerate(own):
                best[rank] = max(best[rank], (weigh(corpus, picks), -step, -number))
    every = gather_objects(best)
    largest = [max(found[rank] for found in every) for rank in range(plan.ranks)]
    return [(weight, -step, -number) for weight, step, number in largest]


# ------------------------------------------------------------------------------------------------------------ trying


def try_batch(trainer: Trainer, batch: Batch) -> None:
    """Forward and backward beside gradients and optimizer state of their full size. Collective: every rank has one.

    Weights, gradients, optimizer and random state are as before when it returns.
    """
    wrapped = trainer.wrapped

    def forward(number: int, received: Tensor | None) -> Tensor:
        with wrapped.compute():
            out = wrapped.model(batch, received)
        return out.loss if isinstance(out, Output) else out

    with ExitStack() as stack:
        stack.enter_context(random_state(wrapped.owner.device))
        stack.enter_context(_full_state(trainer))
        if isinstance(wrapped.model, DistributedDataParallel):  # it orders its buckets by the first backward it reduces
            stack.enter_context(wrapped.model.no_sync())
        wrapped.run([batch], forward, torch.autograd.backward)


@contextmanager
def _full_state(trainer: Trainer) -> Iterator[None]:
    """Room for all gradients, and for what the optimizer will keep and does not yet."""
    optimizer = trainer.optimizer
    each = 2 if isinstance(optimizer, torch.optim.AdamW) else 0  # what is kept elsewhere was made with the optimizer
    own = [p for group in optimizer.param_groups for p in group["params"]]
    room = [torch.empty_like(own_part(p)) for p in own if not optimizer.state.get(p) for _ in range(each)]
    for parameter in own:
        parameter.grad = torch.zeros_like(parameter)
    try:
        yield
    finally:
        room.clear()
        optimizer.zero_grad(set_to_none=True)


# ------------------------------------------------------------------------------------------------------- sizes that fit


def memory_limit(device: torch.device, local_ranks: int) -> tuple[int, Callable[[], int]] | None:
    """Memory this process may take in bytes, and what tells the most it has taken; None where no limit is known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device), lambda: torch.cuda.max_memory_reserved(device)
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        return space, lambda: status_bytes("VmPeak")
    try:
        allowed = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return (int(allowed) // local_ranks, lambda: peak_bytes(device)) if allowed.isdecimal() else None


def search_size(share: Callable[[int], tuple[float, int]], low: int, high: int) -> int:
    """The largest size that fits, tried from below so that nothing has to fail: doubled, until the line through the
    last two meets the limit before the next; then once where it meets it. Pure but for `share`.

    Args:
        share: (size) -> the largest share of its memory limit that a rank takes, and the tokens there were to take:
            with half of the size or less the data does not fill it, and nothing larger is tried.
        low, high: the sizes allowed; `low` also when not even it fits.
    """
    size, slope, met = low, 0.0, False
    peak, tokens = share(low)
    while size < high and peak <= ROOM and tokens > size // 2 and not met:
        new = min(2 * size, high)
        if slope > 0 and size + (ROOM - peak) / slope < new:
            new, met = int(size + (ROOM - peak) / slope) // FINEST * FINEST, True
        if new <= size:
            break
        found, tokens = share(new)
        if found > ROOM:
            break
        slope = (found - peak) / (new - size)
        size, peak = new, found
    return size


# -------------------------------------------------------------------------------------------------------------- a run


def fit_memory(run: Run, first: int, *, fresh: bool) -> None:
    """Find what `micro_batch_tokens: auto` is on these ranks, and try the largest micro-batch. Collective.

    Args:
        first: the first step to take.
        fresh: whether the run begins; one that goes on has what its journal says.

    Raises:
        SmallerBatches, MachineError: as `ask_smaller` gives them.
    """
    train, last, ranks = run.config.train, run.derived.steps, run.ranks
    if first > last:  # a run that was killed behind its last step: only its end is left
        return
    if run.plan.encoders:  # whose features would have to be sent along
        run.log.say("largest micro-batch: not tried with vision ranks")
        return
    limit = memory_limit(ranks.device, ranks.world) if train.micro_batch_tokens is None and fresh else None
    if all(gather_objects(limit is not None)):
        assert limit is not None
        allowed, peak = limit

        def share(size: int) -> tuple[float, int]:
            tried = replace(run.plan, micro_batch_tokens=size)
            batch, _, _ = _try_largest(run, tried, steps_to_plan(tried, first, last, TRIED))
            taken, tokens = max_ranks(peak() / allowed, batch.tokens)
            return taken, int(tokens)

        low, high = BOUNDS[ranks.device.type]
        planned = run.journal.made(PLANNED)  # what the planner has no room for is not tried
        most = planned[-1]["micro_batch_tokens"] if planned else None
        size = search_size(share, low, max(low, min(high, most or high)))
        run.journal.add(MEASURED, step=1, tokens=size)
        run.plan = replace(run.plan, micro_batch_tokens=size)
        run.log.say(f"micro_batch_tokens {size:,}: measured, on ranks with {format_bytes(allowed)}")
    if train.rehearse:
        steps = steps_to_plan(run.plan, first, last)
        batch, step, peak_now = _try_largest(run, run.plan, steps)
        pixels = describe(batch, run.wrapped.owner.spec.patch)["pixels"]
        of = "" if len(steps) > last - first else f" (of {len(steps):,} steps looked at)"
        run.log.say(
            f"largest micro-batch: {batch.tokens:,} tokens, {pixels:,} pixels, in step {step:,}{of}; "
            f"peak {format_bytes(peak_now)}"
        )


def _try_largest(run: Run, plan: StepPlan, steps: Sequence[int]) -> tuple[Batch, int, float]:
    """Take this rank's largest micro-batch of some steps; returns it, its step and the most memory a rank has held."""
    _, step, number = find_largest(plan, steps, run.ranks)[plan.rank]
    corpus = plan.corpus_at(step)
    picks, (_, count_units) = plan.shares(step)[plan.rank][number], make_loss(run.config.loss)
    batch = make_batch(corpus, picks, count_units, pictures=plan.pictures)
    if not all(batch.kept):  # features would be kept from here, and not from the first epoch
        batch = make_batch(replace(corpus, features=None), picks, count_units, pictures=plan.pictures)
    if run.ranks.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(run.ranks.device)
    with guard_memory(run.folder, run.ranks, plan, [batch], step, run.wrapped.owner.spec.patch, lambda: 0):
        try_batch(run.trainer, batch)
    return batch, step, max_ranks(peak_bytes(run.ranks.device))[0]
