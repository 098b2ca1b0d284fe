"""What a rank of a run is to take of memory and time, said before its first step, and what it then took.

A `Run` in, two events of its journal out: `forecast` and `measured`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from litchi.parallel.estimate import estimate
from litchi.train.durable import format_bytes, on_main
from litchi.train.run import Run

FORECAST, MEASURED = "forecast", "measured"  # in the journal


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
