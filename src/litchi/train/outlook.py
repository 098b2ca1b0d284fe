"""What the planner says of a run before its model is built: what `auto` stands for on a GPU.

Settings, indexed data and the machine in; the layout and the micro-batch size they leave to `auto` out, with what a
forecast is made from. What was chosen stands in the journal: a run that goes on computes as it began.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from litchi.batch.loader import Corpus
from litchi.config import Config
from litchi.config.sections import Parallel
from litchi.dist import Ranks
from litchi.parallel.estimate import Recipe
from litchi.parallel.machines import Machine, find_machine, name_machine
from litchi.parallel.mesh import Layout
from litchi.parallel.recipe import best_layout, best_micro_batch, make_recipe, weigh_load
from litchi.train.durable import on_main
from litchi.train.journal import Journal
from litchi.train.metrics import status_bytes

PLANNED = "auto_plan"  # in the journal
TRIED = (16_384, 4_096, 1_024)  # tokens of a micro-batch, while no layout fits with more


@dataclass(frozen=True)
class Outlook:
    """What a forecast is made from.

    Args:
        machine: a card; None: this process's CPU.
        cards: of a machine.
        idle: bytes the process held before the model.
    """

    recipe: Recipe
    machine: Machine | None
    cards: int
    idle: int = 0


@dataclass(frozen=True)
class Choice:
    """What `auto` stands for, and why. None: it was not `auto`, or the documented rule holds."""

    layout: Layout | None
    micro_batch_tokens: int | None
    reason: str


def look_out(config: Config, model: Mapping[str, Any], corpus: Corpus, ranks: Ranks) -> Outlook | None:
    """What a forecast needs; None where none is wanted (`train.forecast`), and of what the planner does not know:
    other GPUs, vision ranks, int8 weights."""
    kind = ranks.device.type
    wanted = config.train.forecast if config.train.forecast is not None else kind == "cuda"
    if not wanted or config.parallel.vision_ranks or config.model.quantize == "int8":
        return None
    machine = None
    if kind == "cuda":
        memory = torch.cuda.get_device_properties(ranks.device).total_memory
        name = name_machine(torch.cuda.get_device_name(ranks.device), memory)
        if name is None:
            return None
        machine = replace(find_machine(name), memory=float(memory))
    recipe = make_recipe(config, model, weigh_load(config, model, corpus), device=kind)
    cards = int(os.environ.get("LOCAL_WORLD_SIZE") or torch.cuda.device_count() or 1)
    return Outlook(recipe, machine, cards, 0 if kind == "cuda" else status_bytes("VmRSS"))


def choose(config: Config, outlook: Outlook, ranks: int) -> Choice:
    """What `auto` stands for on a GPU. Pure.

    Args:
        ranks: there are.
    """
    recipe, machine = outlook.recipe, outlook.machine
    assert machine is not None
    open_layout = leaves_open(config.parallel) and ranks > 1
    open_size = config.train.micro_batch_tokens is None
    layout, said = None, []
    if open_layout:
        for tokens in TRIED if open_size else (recipe.micro_batch_tokens,):
            sized = replace(recipe, micro_batch_tokens=tokens)
            best = best_layout(sized, ranks, machine, cards=outlook.cards)
            if best is not None:
                layout = replace(best.layout, pp_schedule=config.parallel.pp_schedule)
                said.append(
                    f"parallel {layout}: {best.peak_bytes / 1e9:.1f} of {machine.memory / 1e9:.1f} GB at {tokens:,} "
                    f"tokens, {best.step_s:.2f} s a step, bound by {best.bound}"
                )
                break
        else:
            said.append("parallel by the rule of copies and shards: the planner finds nothing that fits")
    if open_size and (layout is not None or ranks == 1):
        most = best_micro_batch(recipe, layout or Layout(), machine)
        said.append(f"micro_batch_tokens {most:,}: the most that fits" if most else "no micro-batch fits by the plan")
        return Choice(layout, most or None, "; ".join(said))
    return Choice(layout, None, "; ".join(said))


def leaves_open(parallel: Parallel) -> bool:
    """Whether it is `auto`: no axis is set."""
    return parallel.model_copy(update={"pp_schedule": Parallel().pp_schedule}) == Parallel()


def take_auto(config: Config, outlook: Outlook | None, ranks: Ranks, journal: Journal) -> tuple[Config, int | None]:
    """The settings with the layout that `parallel: auto` stands for, and the tokens of `micro_batch_tokens: auto`:
    as the run has journalled them for so many ranks, else as the planner says. Collective."""
    known = next((e for e in reversed(journal.made(PLANNED)) if e["ranks"] == ranks.world), None)
    if known is None:
        if outlook is None or outlook.machine is None:
            return config, None
        made = on_main(
            ranks, lambda: choose(config, outlook, ranks.world), what="no layout can be chosen", place=journal.path
        )
        if not made.reason:
            return config, None
        axes = None if made.layout is None else axes_of(made.layout)
        known = journal.add(
            PLANNED, step=1, ranks=ranks.world, parallel=axes, micro_batch_tokens=made.micro_batch_tokens,
            reason=made.reason,
        )  # fmt: skip
    if ranks.is_main:
        print(f"auto: {known['reason']}", flush=True)
    if known["parallel"] and leaves_open(config.parallel):
        config = config.model_copy(update={"parallel": config.parallel.model_copy(update=known["parallel"])})
    return config, known["micro_batch_tokens"]


def axes_of(layout: Layout) -> dict[str, int]:
    """Sizes of the axes as settings name them."""
    return {axis: n for axis, n in asdict(layout).items() if axis not in ("pp_schedule", "vision_ranks")}
