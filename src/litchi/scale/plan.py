"""`litchi plan`: every sensible layout of a run on a machine, with its memory, time and price, or why it is out.

Settings, the data's own rows (or a stated mix) and a machine in; a report out. Nothing is started.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from litchi.config import derive, load_config
from litchi.model.build import read_config, resolve_model
from litchi.model.sizes import AXES, allowed_sizes, read_shape, size_config
from litchi.parallel.estimate import Estimate, Recipe, estimate
from litchi.parallel.machines import Machine, find_machine
from litchi.parallel.mesh import Layout, offer_layouts
from litchi.parallel.recipe import make_recipe, read_load

PARTS = {  # of the table -> of an estimate
    "weights": "weights", "grads": "gradients", "optim": "optimizer", "language": "activations_language",
    "vision": "activations_vision", "logits": "logits", "comm": "communication", "reserve": "reserve",
}  # fmt: skip


def rank_layouts(recipe: Recipe, machine: Machine, cards: int, nodes: int) -> list[Estimate]:
    """Every offered layout: those that fit by the time of a step, then the others by what they miss; last those the
    model cannot be cut in."""
    found = [
        estimate(recipe, layout, machine, cards=cards)
        for layout in offer_layouts(recipe.config, cards * nodes, machine=cards)
    ]
    found.sort(key=lambda e: (not e.fits, e.step_s if e.fits else e.peak_bytes, e.layout.sizes))
    return found + [Estimate(layout, why_not=why) for layout, why in impossible(recipe.config, cards)]


def impossible(model: Mapping[str, Any], cards: int) -> list[tuple[Layout, str]]:
    """Powers of two that tp cannot take in a machine, and why."""
    heads, allowed = read_shape(model), allowed_sizes(model, "tp", limit=cards)
    sizes = [2**n for n in range(1, cards.bit_length()) if 2**n <= cards and cards % 2**n == 0]
    return [
        (
            Layout(tp=n, dp_shard=cards // n),
            f"{heads.heads} heads over {heads.kv_heads} key-value heads not divisible by tp {n}",
        )
        for n in sizes
        if n not in allowed
    ]


def plan_run(
    path: str, overrides: list[str], *, size: str | None, gpu: str, gpus: int, nodes: int, price: float | None
) -> dict[str, Any]:
    """The report of the verb: what was assumed, and the layouts, the recommended one first."""
    machine = find_machine(gpu)
    config = load_config(path, overrides, need=() if size else ("model.path",))
    model = size_config(size) if size else read_config(resolve_model(config.model.path))
    load = read_load(config, model)
    recipe = make_recipe(config, model, load)
    cost = machine.price if price is None else price
    layouts: list[dict[str, Any]] = []
    for found in rank_layouts(recipe, machine, gpus, nodes):
        steps = derive(
            config, samples=load.samples, ranks=found.layout.data_ranks, mean_tokens=load.tokens, device_type="cuda"
        ).steps
        hours = steps * found.step_s / 3600
        layouts.append(
            {
                "parallel": {axis: getattr(found.layout, axis) for axis in AXES},
                "fits": found.fits,
                "peak_bytes": round(found.peak_bytes),
                "parts": {name: round(n) for name, n in found.parts.items()},
                "step_s": found.step_s if math.isfinite(found.step_s) else None,
                "why_not": found.why_not,
                "wrapper": found.layout.wrapper,
                "bound": found.bound,
                "seconds": found.seconds,
                "micro_batches": found.micro_batches,
                "hours": hours if math.isfinite(hours) else None,
                "usd": hours * gpus * nodes * cost if math.isfinite(hours) else None,
            }
        )
    words = [*overrides, f"parallel={_inline(layouts[0]['parallel'])}"]
    return {
        "model": read_shape(model).name,
        "machine": {**asdict(machine), "gpus": gpus, "nodes": nodes, "price": cost},
        "data": asdict(load),
        "steps": steps,
        "fits": any(found["fits"] for found in layouts),
        "command": f"litchi train {path} {' '.join(words)}" + (f" --procs {gpus}" if nodes == 1 else ""),
        "layouts": layouts,
    }


def _inline(parallel: dict[str, int]) -> str:
    return "'{" + ", ".join(f"{axis}: {n}" for axis, n in parallel.items()) + "}'"


def format_plan(report: dict[str, Any], most: int = 12) -> str:
    """For people: what to start, then a table."""
    best, machine, data = report["layouts"][0], report["machine"], report["data"]
    gb = 1e9
    what = f"{report['model']} on {machine['nodes']} x {machine['gpus']} {machine['name']}"
    if report["fits"]:
        lines = [
            f"{what}: {_short(best['parallel'])}, {best['peak_bytes'] / gb:.1f} GB a card, "
            f"{best['step_s']:.2f} s a step ({best['bound']}), {best['hours']:.2f} h, {best['usd']:,.2f} USD "
            f"at {machine['price']:.2f} an hour and card",
            report["command"],
        ]
    else:
        lines = [f"{what}: nothing fits; nearest is {_short(best['parallel'])}, {best['why_not']}"]
    origin = "data.train" if data["from_data"] else "no data.train: a typical mix"
    lines += [
        f"{origin}: {data['samples']:,} samples of {data['tokens']:.0f} tokens, {data['patches']:.0f} patches; "
        f"{report['steps']:,} steps",
        "",
        f"{'layout':34} " + " ".join(f"{name:>8}" for name in ("GB", *PARTS)) + "  s a step  USD  bound",
    ]
    for found in report["layouts"][:most]:
        p = found["parts"]
        if not p:
            lines.append(f"{_short(found['parallel']):34} {found['why_not']}")
            continue
        cells = " ".join(f"{n / gb:8.1f}" for n in (found["peak_bytes"], *(p[name] for name in PARTS.values())))
        end = found["why_not"] or f"{found['step_s']:.2f}  {found['usd']:,.2f}  {found['bound']}"
        lines.append(f"{_short(found['parallel']):34} {cells}  {end}")
    if len(report["layouts"]) > most:
        lines.append(f"... and {len(report['layouts']) - most} more (--json has all)")
    return "\n".join(lines)


def _short(parallel: dict[str, int]) -> str:
    return " x ".join(f"{axis} {n}" for axis, n in parallel.items() if n > 1) or "one process"
