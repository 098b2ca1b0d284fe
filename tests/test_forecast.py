"""Forecasts: what malloc holds, what `auto` takes of the planner, and a run's forecast beside its measure."""

from __future__ import annotations

import json
import subprocess
import sys
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import rerank_rows, train
from typer.testing import CliRunner

from litchi.cli import app
from litchi.config import load_config
from litchi.config.sections import Parallel
from litchi.dist import start_ranks, stop_ranks
from litchi.model.build import read_config, resolve_model
from litchi.model.sizes import size_config
from litchi.parallel import heap
from litchi.parallel.estimate import estimate
from litchi.parallel.heap import NODE, measure_held
from litchi.parallel.machines import find_machine
from litchi.parallel.mesh import Layout
from litchi.parallel.recipe import make_recipe, read_load
from litchi.parallel.trace import Kept, Setup, Stream, make_owner, measure_resident
from litchi.train.forecast import compare_forecast, say_forecast
from litchi.train.journal import Journal
from litchi.train.outlook import Outlook, choose, take_auto

A100 = find_machine("a100-80gb")
FULL = "trainable={vision: full, merger: full, language: full}"
MB = 2**20
on_glibc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc replays it, which Linux has")


@on_glibc
def test_what_is_freed_is_taken_again_unless_something_lies_between():
    """62 MB in small pieces, freed, then 20 in one: the same room, and new one where nodes of a graph are left."""

    def held(*between):
        events = [event for n in range(1000) for event in ((("node", n), NODE), (n, MB // 16))]
        freed = [(n, 0) for n in range(1000)]
        return heap._replay_apart(number([*events, *freed, *between, ("whole", 20 * MB)]), 31 * MB)

    assert held() == pytest.approx(83.5 * MB, rel=0.02)
    assert held(*((("node", n), 0) for n in range(1000))) == pytest.approx(63.5 * MB, rel=0.02)


@on_glibc
def test_a_large_piece_is_mapped_and_goes_at_once():
    events = [event for n in range(5) for event in ((n, 40 * MB), (n, 0))]
    assert measure_held(events) == pytest.approx(40 * MB, rel=0.01)
    assert measure_held(e for e in [("a", 40 * MB), ("b", 40 * MB), ("a", 0), ("b", 0)]) == pytest.approx(
        80 * MB, rel=0.01
    )


def test_where_it_cannot_be_replayed_the_pieces_are_counted(monkeypatch):
    monkeypatch.setattr(heap, "_replay_apart", lambda flat, start: 0)
    events = [("a", 300), ("b", 200), ("node", NODE), ("a", 0), ("c", 250), ("node", 0), ("b", 0), ("a", 400)]
    assert measure_held(events) == 650


def number(events):
    """As `replay` takes them."""
    names = {}
    return array("q", [n for key, size in events for n in (names.setdefault(key, len(names)), size)])


@pytest.mark.slow
def test_a_process_holds_more_than_its_tensors():
    trains = load_config(None, ["task=chat", "model.path=builtin:tiny", FULL], need=()).trainable
    model, setup = read_config(resolve_model("builtin:tiny")), Setup("cpu", torch.float32)
    owner = make_owner(model, trains, setup)
    whole = sum(p.numel() * 4 for p in owner.parameters())
    assert all(p.requires_grad for p in owner.hf.model.parameters())

    def held(tokens: int, kept: Kept) -> int:
        return measure_resident(model, trains, Stream(tokens, tokens // 4), setup, kept, 2)

    plain = held(64, Kept())
    assert 4 * whole < plain < 5 * whole  # weights, gradients, two states; and the batch
    assert held(2048, Kept()) > plain
    assert plain - held(64, Kept(states=0.0)) == pytest.approx(2 * whole, rel=0.05)
    assert plain - held(64, Kept(share=0.5)) == pytest.approx(1.5 * whole, rel=0.05)  # gradients come whole
    assert held(64, Kept(apart=True)) == pytest.approx(plain + 2 * whole, rel=0.02)


# --------------------------------------------------------------------------------------------------------------- auto


def outlook(*words, memory: float | None = None, size: str | None = None) -> tuple:
    config = load_config(None, ["task=chat", "model.path=builtin:tiny", FULL, *words], need=())
    model = size_config(size) if size else read_config(resolve_model("builtin:tiny"))
    recipe = make_recipe(config, model, read_load(config, model))
    return config, Outlook(recipe, A100 if memory is None else replace(A100, memory=memory), 8)


@pytest.mark.slow
def test_auto_copies_what_fits_and_shards_what_does_not():
    given = "train.micro_batch_tokens=1400"
    config, look = outlook(given)
    whole, cut = (estimate(look.recipe, layout, A100) for layout in (Layout(dp_replicate=2), Layout(dp_shard=2)))
    assert cut.peak_bytes < whole.peak_bytes
    most = choose(config, look, 2)
    assert most.layout == min((whole, cut), key=lambda e: e.step_s).layout and most.micro_batch_tokens is None
    least = choose(config, replace(look, machine=replace(A100, memory=(cut.peak_bytes + whole.peak_bytes) / 2)), 2)
    assert least.layout == Layout(dp_shard=2) and "dp_shard 2" in least.reason and "GB" in least.reason
    nothing = choose(config, replace(look, machine=replace(A100, memory=1e6)), 2)
    assert nothing.layout is None and "nothing that fits" in nothing.reason


def test_auto_leaves_what_is_given_and_says_how_much_fits():
    config, look = outlook("parallel.dp_shard=2", "train.micro_batch_tokens=1400")
    assert choose(config, look, 2).reason == ""
    config, look = outlook()
    one = choose(config, look, 1)
    assert one.layout is None and one.micro_batch_tokens == 2**16
    sizes = {n: estimate(replace(look.recipe, micro_batch_tokens=n, global_batch=10**6), Layout(), A100).peak_bytes
             for n in (2**12, 2**13)}  # fmt: skip
    recipe = replace(look.recipe, global_batch=10**6)
    tight = replace(look, recipe=recipe, machine=replace(A100, memory=sum(sizes.values()) / 2))
    assert choose(config, tight, 1).micro_batch_tokens == 2**12


def test_a_resumed_run_keeps_what_auto_stood_for(tmp_path):
    config, look = outlook()
    ranks = start_ranks()
    try:
        journal = Journal(tmp_path, ranks)
        taken, tokens = take_auto(config, look, ranks, journal)
        assert tokens and taken.parallel == config.parallel  # there is one rank
        again = Journal.resume(tmp_path, ranks, step=1, carried=journal.entries)
        assert take_auto(config, None, ranks, again) == (taken, tokens)  # nor is the planner asked
        other = replace(ranks, world=3)  # as many have not been seen
        assert take_auto(config, None, other, again) == (config, None)
        axes = {"dp_replicate": 1, "dp_shard": 3, "tp": 1, "cp": 1, "pp": 1}
        again.add("auto_plan", step=1, ranks=3, parallel=axes, micro_batch_tokens=512, reason="made up")
        taken, tokens = take_auto(config, None, other, again)
        assert (taken.parallel.dp_shard, tokens) == (3, 512) and "dp_shard: 3" in taken.to_yaml()
        given = config.model_copy(update={"parallel": Parallel(dp_replicate=3)})
        assert take_auto(given, None, other, again)[0].parallel == Parallel(dp_replicate=3)
    finally:
        stop_ranks()


@pytest.mark.slow
def test_a_model_is_cut_only_where_shards_do_not_fit():
    config, look = outlook("train.micro_batch_tokens=1400", "train.global_batch_size=8", size="7b")
    found = choose(config, look, 8).layout
    assert found is not None and (found.tp, found.cp, found.pp, found.dp_shard) == (1, 1, 1, 8)
    config, look = outlook("train.micro_batch_tokens=1400", "train.global_batch_size=4", size="7b")
    found = choose(config, look, 8).layout  # of four samples a step eight data ranks would have none
    assert found is not None and found.data_ranks <= 4 and found.tp * found.cp * found.pp >= 2


# ------------------------------------------------------------------------------------------------------- measurement


def test_forecast_and_measurement_by_hand():
    forecast = {"step": 3, "peak_bytes": 90, "idle_bytes": 20, "step_s": 1.5}
    steps = ((2, 9.0, [500, 1]), (3, 4.0, [90, 80]), (4, 2.0, [110, 95]), (5, 1.0, [120, 95]))
    lines = [{"step": n, "step_s": s, "peak_bytes": p} for n, s, p in steps]
    found = compare_forecast(forecast, lines)
    assert found["peak_bytes"] == [100, 75] and found["memory_off"] == pytest.approx(-0.1)
    assert found["step_s"] == 1.5 and found["time_off"] == 0.0
    assert say_forecast(found) == (
        "memory of a rank: planned 90 bytes, measured 100 bytes (the plan is -10% off); "
        "a step: planned 1.50 s, measured 1.50 s (+0%)"
    )
    assert compare_forecast(forecast | {"step_s": None}, lines)["time_off"] is None


@pytest.mark.slow
def test_a_run_says_what_came_of_its_forecast(tmp_path, capfd):
    words = ["task=rerank", f"data.train={rerank_rows(tmp_path)}", "train.steps=2", "train.global_batch_size=2"]
    words += ["trainable.language=lora", "train.export=never", "train.forecast=true"]
    ranks = start_ranks()
    try:
        folder = train(ranks, tmp_path / "run", *words)
    finally:
        stop_ranks()
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    planned, measured = (next(e for e in events if e["event"] == name) for name in ("forecast", "measured"))
    peaks = [json.loads(line)["peak_bytes"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert measured["peak_bytes"] == [max(rank) - planned["idle_bytes"] for rank in zip(*peaks, strict=True)]
    assert planned["peak_bytes"] == measured["planned_bytes"]
    assert planned["peak_bytes"] == pytest.approx(sum(planned["parts"].values()), abs=10)  # each is rounded
    said = "".join(capfd.readouterr())
    assert "forecast: " in said and "memory of a rank: planned" in said
    page = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["compare", str(folder), "--json", "--html", str(page)])
    assert json.loads(done.stdout)["runs"][0]["forecast"] == {
        key: value for key, value in measured.items() if key not in ("event", "step")
    }
    assert "Planned and measured" in page.read_text(encoding="utf-8")
    text = CliRunner().invoke(app, ["compare", str(folder)]).stdout
    assert "| run | memory planned | measured |" in text


@pytest.mark.needs_gpu
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_most_small_layouts_take_on_a_gpu_what_was_planned():
    file = Path(__file__).parents[1] / "benchmarks" / "planner.py"
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True)
    near, _, rest = done.stdout.strip().splitlines()[-1].partition(" of ")
    assert int(near) >= 6, done.stdout + done.stderr
    assert int(rest.split()[0]) >= 10
