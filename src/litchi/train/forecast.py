"""What the planner says of a run before its first step, and what the run then took.

Settings, indexed data and the machine in; what `parallel: auto` and `micro_batch_tokens: auto` stand for on a GPU, and
a forecast of memory and time out. All of it stands in the journal: a run that goes on computes as it began.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from litchi.batch.loader import Corpus
from litchi.config import Config
from litchi.config.sections import Parallel
from litchi.dist import Ranks
from litchi.parallel.estimate import Recipe, estimate
from litchi.parallel.machines import Machine, find_machine, name_machine
from litchi.parallel.mesh import Layout
from litchi.parallel.recipe import best_layout, best_micro_batch, make_recipe, weigh_load
from litchi.train.durable import format_bytes, on_main
from litchi.train.journal import Journal
from litchi.train.largest import PLANNED

if TYPE_CHECKING:
    from litchi.train.setup import Run

FORECAST, MEASURED = "forecast", "measured"  # in the journal
TRIED = (16_384, 4_096, 1_024)  # tokens of a micro-batch, while no layout fits with more


@dataclass(frozen=True)
class Outlook:
    """What a forecast is made from.

    Args:
        machine: a card; null: this process's CPU.
        cards: of a machine.
        idle: bytes the process held before the model.
    """

    recipe: Recipe
    machine: Machine | None
    cards: int
    idle: int = 0


@dataclass(frozen=True)
class Choice:
    """What `auto` stands for, and why. Null: it was not `auto`, or the documented rule holds."""

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
    return Outlook(recipe, machine, cards, 0 if kind == "cuda" else resident_bytes())


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
    return {axis: n for axis, n in asdict(layout).items() if axis not in ("pp_schedule", "vision_ranks")}


# ------------------------------------------------------------------------------------------- forecast and measurement


def note_forecast(run: Run, first: int) -> None:
    """Say and write down what a rank is to take. Collective."""
    outlook = run.outlook
    if outlook is None:
        return
    recipe = replace(outlook.recipe, micro_batch_tokens=run.plan.limit(first))

    def work() -> dict[str, Any]:
        found = estimate(recipe, run.wrapped.layout, outlook.machine, cards=outlook.cards)
        beside = found.parts["reserve"] if outlook.machine else 0.0  # what the allocator of a GPU does not count
        return {
            "peak_bytes": round(found.peak_bytes - beside),
            "beside_bytes": round(beside),
            "idle_bytes": outlook.idle,
            "step_s": found.step_s if outlook.machine else None,
            "parts": {name: round(n) for name, n in found.parts.items()},
        }

    facts = on_main(run.ranks, work, what="no forecast can be made", place=run.folder)
    run.journal.note(FORECAST, step=first, **facts)
    time = f", {facts['step_s']:.2f} s a step" if facts["step_s"] else ""
    over = "" if outlook.machine else " above the idle process"
    run.log.say(f"forecast: {format_bytes(facts['peak_bytes'])} a rank{over}{time}")


def compare_forecast(forecast: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Forecast and measurement side by side: the most memory of each rank, the mean of steps behind the first. Pure.

    Args:
        lines: of metrics.jsonl.
    """
    own = [line for line in lines if line["step"] >= forecast["step"]]
    timed = own[1:] or own
    peaks = [max(rank) - forecast["idle_bytes"] for rank in zip(*(line["peak_bytes"] for line in own), strict=True)]
    step_s = sum(line["step_s"] for line in timed) / len(timed)
    planned = forecast["step_s"]
    return {
        "planned_bytes": forecast["peak_bytes"],
        "peak_bytes": peaks,
        "memory_off": forecast["peak_bytes"] / max(peaks) - 1,
        "planned_step_s": planned,
        "step_s": step_s,
        "time_off": None if planned is None else planned / step_s - 1,
    }


def say_forecast(found: Mapping[str, Any]) -> str:
    """One line of it."""
    said = (
        f"memory of a rank: planned {format_bytes(found['planned_bytes'])}, measured "
        f"{format_bytes(max(found['peak_bytes']))} (the plan is {found['memory_off']:+.0%} off)"
    )
    if found["planned_step_s"] is not None:
        said += (
            f"; a step: planned {found['planned_step_s']:.2f} s, measured {found['step_s']:.2f} s "
            f"({found['time_off']:+.0%})"
        )
    return said


def note_measured(run: Run, lines: Sequence[Mapping[str, Any]], last: int) -> None:
    """Say and write down what came of the forecast. Collective."""
    made = [e for e in run.journal.entries if e["event"] == FORECAST]
    if made and any(line["step"] >= made[-1]["step"] for line in lines):
        found = compare_forecast(made[-1], lines)
        run.journal.note(MEASURED, step=last, **found)
        run.log.say(say_forecast(found))


def resident_bytes() -> int:
    """What this process holds in RAM now."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmRSS:"))
