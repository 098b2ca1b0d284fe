"""`litchi compare`: figures worked out by hand on made-up runs, the page's numbers against the JSON's, real runs."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from processes import run_litchi
from runs import QUICK, rerank_rows, train, write_rows
from typer.testing import CliRunner

from litchi.cli import app
from litchi.dist import start_ranks, stop_ranks
from litchi.scale.compare import fit_times


def make_run(
    folder: Path,
    *,
    ranks: int,
    step_s: float,
    wait_s: float = 0.0,
    steps: int = 4,
    per_epoch: int = 4,
    starts: list[tuple[int, int]] | None = None,
    settings: dict | None = None,
    done: bool = True,
    line: dict | None = None,
) -> str:
    """A run's folder as training leaves it, in which every step took the same."""
    lines = [
        {
            **{"step": n, "epoch": (n - 1) // per_epoch, "loss": 2.0 - 0.1 * n, "tokens": 1000, "skipped": False},
            **{"step_s": step_s, "data_wait_s": wait_s, "cpu_s": 1.0, "tokens_per_s": 1.0, "balance_micro": 1.0},
            **{"peak_bytes": [10**9 + 10**6 * n + rank for rank in range(ranks)], **(line or {})},
        }
        for n in range(1, steps + 1)
    ]
    write_rows(folder / "metrics.jsonl", lines)
    begun = [{"event": "start", "step": step, "ranks": n, "device": "cuda"} for step, n in starts or [(1, ranks)]]
    write_rows(folder / "events.jsonl", [{"event": "auto", "step": 1}, *begun])
    values = {"task": "rerank", "train": {"global_batch_size": 8, "epochs": steps / per_epoch}, "output": str(folder)}
    (folder / "config.yaml").write_text(yaml.safe_dump(values | (settings or {})), encoding="utf-8")
    if done:
        (folder / "done.json").write_text('{"step": 4}', encoding="utf-8")
    return str(folder)


def ask(*words: str) -> dict:
    done = CliRunner().invoke(app, ["compare", *words, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


HOUR = 3600.0


def test_four_cards_that_take_a_third_of_the_time_cost_more(tmp_path):
    """35.2 h on one card against 11.5 h on four: 46.0 card hours, 131 % of the cost, 3.06 times as fast."""
    one = make_run(tmp_path / "one", ranks=1, step_s=8.6 * HOUR, wait_s=0.2 * HOUR)
    four = make_run(tmp_path / "four", ranks=4, step_s=2.8 * HOUR, wait_s=0.075 * HOUR)
    first, second = ask(one, four, "--price", "2.5")["runs"]
    assert (first["epoch_s"], second["epoch_s"]) == (pytest.approx(35.2 * HOUR), pytest.approx(11.5 * HOUR))
    assert (first["rank_hours"], second["rank_hours"]) == (pytest.approx(35.2), pytest.approx(46.0))
    assert (first["cost"], second["cost"]) == (pytest.approx(88.0), pytest.approx(115.0))
    assert (first["relative_cost"], second["relative_cost"]) == (1.0, pytest.approx(1.30682, abs=1e-5))
    assert (first["speedup"], second["speedup"]) == (1.0, pytest.approx(3.06087, abs=1e-5))
    assert (first["efficiency"], second["efficiency"]) == (1.0, pytest.approx(0.765217, abs=1e-6))
    assert second["peak_bytes"] == 10**9 + 4 * 10**6 + 3
    assert second["time"]["data_wait"] == pytest.approx(0.075 / 2.875)
    assert sum(second["time"].values()) == pytest.approx(1.0)
    text = CliRunner().invoke(app, ["compare", one, four]).stdout
    assert "| four | 4 | 11:30:00 | 3.06x | 77% |" in text and "| 131% |" in text


def test_extrapolation_goes_through_the_runs_and_says_what_it_assumes(tmp_path):
    """100 s = a + b and 40 s = a + b / 4 give b = 80, a = 20; on 8, 16, 32 ranks 30, 25 and 22.5 s."""
    runs = [make_run(tmp_path / f"r{n}", ranks=n, step_s=s) for n, s in ((1, 25.0), (4, 10.0))]
    more = ask(*runs)["extrapolation"]
    assert [point["ranks"] for point in more["points"]] == [8, 16, 32]
    assert [point["epoch_s"] for point in more["points"]] == pytest.approx([30.0, 25.0, 22.5])
    assert [point["relative_cost"] for point in more["points"]] == pytest.approx([2.4, 4.0, 7.2])
    assert "epoch_s = 20 + 80 / ranks" in more["assumptions"][0]
    alone = ask(runs[1])["extrapolation"]
    assert [point["epoch_s"] for point in alone["points"]] == pytest.approx([20.0, 10.0, 5.0])
    assert "perfect scaling is assumed" in alone["assumptions"][0]
    other = make_run(tmp_path / "other", ranks=2, step_s=1.0, settings={"optim": {"lr": 1.0}})
    answer = ask(*runs, other)
    assert answer["extrapolation"] == more  # which learns from runs that compute the same only
    assert any("optim.lr" in note for note in answer["notes"])
    assert answer["runs"][2]["settings"]["optim.lr"] == 1.0 and answer["runs"][0]["settings"]["optim.lr"] is None


def test_fits_stay_sensible():
    assert fit_times([(1, 100.0), (2, 50.0), (4, 25.0)]) == pytest.approx((0.0, 100.0), abs=1e-9)
    assert fit_times([(1, 100.0), (2, 40.0)])[0] == 0.0  # better than perfect
    assert fit_times([(1, 100.0), (2, 120.0)]) == (110.0, 0.0)  # slower on more: nothing is shared
    assert fit_times([(2, 30.0), (2, 50.0)]) == pytest.approx((0.0, 80.0))


def test_an_epoch_that_is_not_over_is_estimated_or_unknown(tmp_path):
    part = make_run(tmp_path / "part", ranks=2, step_s=3.0, steps=4, per_epoch=10, done=False)
    assert ask(part)["runs"][0]["epoch_s"] is None
    manifest = tmp_path / "part/checkpoints/step-00000004/manifest.json"
    write_rows(manifest, [{"origin": {"data": [{"rows": 60}, {"rows": 10}]}}])
    settings = yaml.safe_load((tmp_path / "part/config.yaml").read_text())
    settings["data"] = {"train": [{"path": "a", "weight": 1.0}, {"path": "b", "weight": 2.0}]}
    (tmp_path / "part/config.yaml").write_text(yaml.safe_dump(settings))
    run = ask(part)["runs"][0]  # 60 + 2 x 10 rows in batches of 8: 10 steps of 3 s
    assert (run["epoch_s"], run["epoch_basis"]) == (30.0, "estimated from 4 of 10 steps")
    two = make_run(tmp_path / "two", ranks=2, step_s=3.0, steps=7, per_epoch=3, done=False)
    run = ask(two)["runs"][0]  # two epochs of three steps are over, a third has begun
    assert (run["epoch_s"], run["epoch_basis"]) == (9.0, "measured, 2 epochs")


def test_hours_count_for_the_ranks_they_were_spent_on(tmp_path):
    run = make_run(tmp_path / "run", ranks=2, step_s=HOUR, starts=[(1, 1), (3, 4)])
    answer = ask(run)  # two steps on one rank, two on four
    assert answer["runs"][0]["rank_hours"] == 10.0 and answer["runs"][0]["ranks"] == 4
    assert any("another number of ranks" in note for note in answer["notes"])


def test_time_that_was_measured_has_a_share(tmp_path):
    parts = {"communication_s": 2.0, "balance_micro": 1.25}
    time = ask(make_run(tmp_path / "run", ranks=2, step_s=8.0, wait_s=2.0, line=parts))["runs"][0]["time"]
    assert time == pytest.approx({"data_wait": 0.2, "imbalance": 0.16, "communication": 0.2, "compute": 0.44})


def test_metrics_are_the_last_ones_with_their_intervals(tmp_path):
    run = make_run(tmp_path / "run", ranks=1, step_s=1.0)
    lines = [{"step": n, "name": "eval", "metrics": {"mrr@10": n / 10}} for n in (2, 4)]
    lines[1]["intervals"] = {"mrr@10": [0.3, 0.5]}
    write_rows(tmp_path / "run/eval.jsonl", lines)
    (tmp_path / "run/test.json").write_text(
        json.dumps({"queries": 9, "metrics": {"mrr@10": 0.7}, "intervals": {"mrr@10": [0.6, 0.8]}})
    )
    found = ask(run)["runs"][0]
    assert found["metrics"] == {"mrr@10": 0.4, "test/mrr@10": 0.7}
    assert found["intervals"] == {"mrr@10": [0.3, 0.5], "test/mrr@10": [0.6, 0.8]}


class Page(HTMLParser):
    """What a browser would load from elsewhere, the embedded JSON, and the text of cells."""

    def __init__(self):
        super().__init__()
        self.data, self.cells, self.loads, self.inside = "", [], [], ""

    def handle_starttag(self, tag, attrs):
        self.inside = tag
        self.loads += [v for k, v in attrs if k in ("src", "href") and v and not v.startswith("data:")]

    def handle_data(self, data):
        if self.inside == "script":
            self.data += data
        elif self.inside in ("td", "th", "data"):
            self.cells.append(data)

    def handle_endtag(self, tag):
        self.inside = ""


def test_the_page_stands_alone_and_has_the_numbers_of_the_json(tmp_path):
    runs = [make_run(tmp_path / f"r<{n}>", ranks=n, step_s=40.0 / n + 2) for n in (1, 2)]
    page, text = tmp_path / "page.html", tmp_path / "page.md"
    answer = ask(*runs, "--html", str(page), "--markdown", str(text))
    html = page.read_text(encoding="utf-8")
    read = Page()
    read.feed(html)
    assert json.loads(read.data) == answer
    assert read.loads == [] and not re.search(r"https?://|url\(|@import", html)
    assert html.count("<script") == 1 and 'type="application/json"' in html  # no script that runs
    for run in answer["runs"]:
        assert {run["name"], f"{run['speedup']:.2f}x", f"{run['relative_cost']:.0%}"} <= set(read.cells)
    assert text.read_text(encoding="utf-8").startswith("| run | ranks |")
    assert html.count("<svg") == 5 and "NaN" not in html


def test_what_is_no_run_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "gone"):
        done = CliRunner().invoke(app, ["compare", str(tmp_path / name)])
        assert done.exception.status == 2 and name in done.exception.line()
    run = make_run(tmp_path / "run", ranks=1, step_s=1.0)
    done = CliRunner().invoke(app, ["compare", run, "--html", str(tmp_path / "no/page.html")])
    assert done.exception.status == 2


def test_a_real_run(tmp_path):
    """What compare says of a run is what its own lines give; intervals are those of the evaluation."""
    words = ["task=rerank", f"data.train={rerank_rows(tmp_path)}", f"data.eval={rerank_rows(tmp_path, name='e.jsonl')}"]
    words += ["train.epochs=2", "train.global_batch_size=2", "trainable.language=lora", "train.export=never"]
    ranks = start_ranks()
    try:
        folder = train(ranks, tmp_path / "run", *words)
    finally:
        stop_ranks()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    run = ask(str(folder))["runs"][0]
    assert len(lines) == 6 and run["epoch_basis"] == "measured, 2 epochs"
    assert run["epoch_s"] == pytest.approx(sum(line["step_s"] + line["data_wait_s"] for line in lines) / 2)
    assert run["peak_bytes"] == max(line["peak_bytes"][0] for line in lines)
    low, high = run["intervals"]["mrr@10"]
    assert low <= run["metrics"]["mrr@10"] <= high
    (folder / "done.json").unlink()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:2]))
    run = ask(str(folder))["runs"][0]  # the checkpoint tells the number of rows
    assert run["epoch_basis"] == "estimated from 2 of 3 steps"


COLUMNS = {  # of the page -> of the JSON
    "ranks": "ranks", "epoch": "epoch_s", "speed-up": "speedup", "efficiency": "efficiency", "cost": "cost",
    "peak memory": "peak_bytes", "rank hours": "rank_hours", "relative cost": "relative_cost",
}  # fmt: skip
CELLS = """() => [...document.querySelectorAll("table")].map(t => [...t.rows].map(r => [...r.cells].map(c =>
    ({text: c.textContent, numbers: [...c.querySelectorAll("data")].map(d => [Number(d.value), d.textContent])}))))"""
UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "s": 1.0, "x": 1.0, "%": 0.01}


def read_shown(text):
    """A number as a person reads it, and by how much it may be rounded."""
    parts = text.split(":")
    if len(parts) > 1:
        return sum(int(part) * 60**n for n, part in enumerate(reversed(parts))), 0.5
    number, unit = re.fullmatch(r"([-+]?[\d.]+(?:e[-+]\d+)?) ?(kB|MB|GB|s|x|%|)", text).groups()
    digits = float(number.replace("+", ""))
    last = 10.0 ** -len(number.partition("e")[0].partition(".")[2]) * 10.0 ** int(number.partition("e")[2] or 0)
    return digits * UNITS.get(unit, 1.0), max(0.5 * last * UNITS.get(unit, 1.0), 0.005 * abs(digits))


def compare_in_browser(open_page, page, answer):
    """Every number of the page's tables is the JSON's to the last digit, and shown as it rounds."""
    shown = open_page(page.as_uri())
    costs, *others = shown.evaluate(CELLS)
    runs, count = answer["runs"], 0
    head = [cell["text"] for cell in costs[0]]
    for run, row in zip(runs, costs[1:], strict=True):
        for name, cell in zip(head, row, strict=True):
            if name in COLUMNS:
                wanted = run[COLUMNS[name]]
                assert [value for value, _ in cell["numbers"]] == ([] if wanted is None else [wanted]), name
                assert cell["numbers"] or cell["text"] == "?"
            else:
                assert cell["text"] == run["name" if name == "run" else "epoch_basis"]
    for table in others:
        head = [cell["text"] for cell in table[0]]
        for at, row in enumerate(table[1:]):
            found = [[value for value, _ in cell["numbers"]] for cell in row]
            if head[0] == "metric":
                name = row[0]["text"]
                wanted = [[r["metrics"][name], *r["intervals"].get(name, [])] if name in r["metrics"] else []
                          for r in runs]  # fmt: skip
                assert found[1:] == wanted, name
            elif head[0] == "ranks":
                point = answer["extrapolation"]["points"][at]
                assert found == [[point[COLUMNS[name]]] for name in head]
            else:
                plan = [run["forecast"] for run in runs if run["forecast"]][at]
                values = plan["planned_bytes"], max(plan["peak_bytes"]), plan["memory_off"], plan["planned_step_s"]
                wanted = [[] if v is None else [v] for v in (*values, plan["step_s"], plan["time_off"])]
                assert found[1:] == wanted
    for cell in (cell for table in (costs, *others) for row in table for cell in row):
        for value, text in cell["numbers"]:
            read, most = read_shown(text)
            assert abs(read - value) <= most + 1e-9, (text, value)
            count += 1
    return shown, count


def test_a_browser_shows_the_numbers_of_the_json(tmp_path, open_page, shot):
    planned = {"planned_bytes": 1.1e9, "peak_bytes": [10**9, 1_004_000_001], "memory_off": 0.0956, "step_s": 22.0}
    runs = [make_run(tmp_path / f"r<{n}>", ranks=n, step_s=40.0 / n + 2 / 7) for n in (1, 2)]
    write_rows(tmp_path / "r<2>/eval.jsonl", [{"step": 4, "name": "eval", "metrics": {"mrr@10": 1 / 3, "ndcg@5": 0.5},
                                               "intervals": {"mrr@10": [0.29876543, 0.41]}}])  # fmt: skip
    more = [{"event": "start", "step": 1, "ranks": 2, "device": "cpu"}]
    measured = {"event": "measured", "step": 4, **planned, "planned_step_s": None, "time_off": None}
    write_rows(tmp_path / "r<2>/events.jsonl", [*more, measured])
    page = tmp_path / "page.html"
    answer = ask(*runs, "--html", str(page))
    assert answer["runs"][1]["forecast"] is not None
    shown, count = compare_in_browser(open_page, page, answer)
    assert count == 2 * 8 + 4 * 3 + 3 + 1 + 4
    assert shown.get_by_role("heading", level=2).count() == 9
    shot(shown, "compare")


@pytest.mark.slow
def test_four_real_runs(tmp_path, open_page, shot):
    data = rerank_rows(tmp_path, 12)
    for name, procs, batch in (("one", 1, 4), ("two", 2, 4), ("one-8", 1, 8), ("two-8", 2, 8)):
        words = [*QUICK, "model.path=builtin:tiny", "task=rerank", f"data.train={data}", f"output={tmp_path}/{name}"]
        config = tmp_path / f"{name}.yaml"
        config.write_text("task: rerank\n")
        words += [f"train.global_batch_size={batch}", "train.epochs=2", "train.export=never"]
        ended = run_litchi(tmp_path / f"{name}.out", "train", str(config), *words, "--procs", str(procs), timeout_s=100)
        assert ended.status == 0, ended.err
    page = tmp_path / "page.html"
    answer = ask(*(str(tmp_path / name) for name in ("one", "two", "one-8", "two-8")), "--html", str(page))
    for run in answer["runs"]:
        lines = [json.loads(line) for line in (tmp_path / run["name"] / "metrics.jsonl").read_text().splitlines()]
        seconds = sum(line["step_s"] + line["data_wait_s"] for line in lines)
        ranks = 2 if "two" in run["name"] else 1
        assert run["ranks"] == ranks and run["epoch_s"] == pytest.approx(seconds / 2)
        assert run["rank_hours"] == pytest.approx(ranks * seconds / 3600)
        first = answer["runs"][0]
        assert run["relative_cost"] == pytest.approx(ranks * run["epoch_s"] / first["epoch_s"])
    assert any("train.global_batch_size" in note for note in answer["notes"])
    shown, count = compare_in_browser(open_page, page, answer)
    assert count >= 4 * 8 + 4 * len(answer["extrapolation"]["points"])
    shot(shown, "compare-real")
