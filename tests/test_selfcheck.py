"""The table of layouts: every one against one process, on real gloo ranks, one process group per number of ranks."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from processes import RunningRanks, run_litchi

from litchi.errors import UserError
from litchi.scale.equalities import (
    CHECKS,
    LOSS,
    SCORE,
    Check,
    Equality,
    NotHere,
    apart,
    each_apart,
    format_equalities,
    run_checks,
)
from litchi.scale.selfcheck import (
    IN_BF16,
    LAYOUTS,
    MANY,
    QUICK,
    STEPS,
    TASKS,
    TRAINED,
    Job,
    Line,
    Ran,
    compare,
    fill_table,
    format_lines,
    limit_of,
    list_jobs,
    run_jobs,
    write_rows,
)
from litchi.scale.verified import write_page

WRAPPERS = {  # of those whose wrapper is not in the name
    "TP 2": "none",
    "TP 4": "none",
    "CP 2": "DDP",
    "CP 4": "DDP",
    "PP 2, 1F1B": "none",
    "PP 2, GPipe": "none",
    "PP 4": "none",
    "TP 2 x PP 2": "none",
    "DDP 2 x TP 2": "FSDP2",  # DDP takes neither cut tensors nor stages
    "DDP 2 x PP 2": "FSDP2",
    "CP 2 x TP 2": "FSDP2",
    "CP 2 x PP 2": "FSDP2",
    "vision 1 + DDP 2": "DDP",
    "vision 2 + FSDP2 2": "FSDP2",
}


def run_table(folder, world, kinds=None):
    """{job: what it gave} for the layouts of a number of ranks and for one process."""
    write_rows(folder)
    listed = [job for job in list_jobs(max(world, MANY)) if kinds is None or (job.trained, job.task) in kinds]
    listed = [job for job in listed if job.precision in ("fp32", "fp64") or kinds is None]
    alone = [job for job in listed if job.layout == "one"]
    jobs = [job for job in listed if job.ranks == world]
    running = [
        RunningRanks(folder / str(ranks), ranks, run_jobs, str(folder), [asdict(job) for job in some])
        for ranks, some in ((1, alone), (world, jobs))
    ]
    (one,), many = (ranks.results(timeout_s=900) for ranks in running)
    for job, rank_by_rank in zip(jobs, zip(*many, strict=True), strict=True):
        learners = rank_by_rank[: world - LAYOUTS[job.layout].get("vision_ranks", 0)]
        assert all(rank == learners[0] for rank in learners), "ranks disagree"
        assert all(rank["losses"] == learners[0]["losses"] for rank in rank_by_rank), "vision ranks count otherwise"
    return {job: Ran(**ran) for job, ran in zip([*alone, *jobs], [*one, *many[0]], strict=True)}


def check_table(table):
    """All jobs against the same work in one process."""
    wrong = []
    for job, ran in table.items():
        alone = table[replace(job, layout="one")]
        assert len(ran.losses) == STEPS and min(alone.norms) > 0.01 and alone.losses[0] != alone.losses[-1]
        line = compare(job, table, limit_of(job.precision, "cpu"))
        if not line.passed:
            wrong.append(str(line))
        if job.layout != "one":
            assert ran.wrapper == WRAPPERS.get(job.layout, job.layout.split()[0]), job
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_table(tmp_path_factory.mktemp("two"), 2, QUICK)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if Job(name, "", "").ranks == 2])
def test_two_ranks_give_the_numbers_of_one(two, layout):
    check_table({job: ran for job, ran in two.items() if job.layout in ("one", layout)})


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_every_layout_gives_the_numbers_of_one(tmp_path, world):
    check_table(run_table(tmp_path, world))


# ------------------------------------------------------------------------------------------------------- the report

ONE = Ran([2.0, 1.0], [4.0, 4.0], "none")


def test_a_difference_is_the_largest_of_any_step():
    job = Job("TP 2", "full", "chat")
    ran = {Job("one", "full", "chat"): ONE, job: Ran([2.0, 1.0 + 3e-6], [4.0, 4.0 - 8e-5], "none")}
    line = compare(job, ran, 1e-6)
    assert (line.loss, line.norm) == (pytest.approx(3e-6), pytest.approx(2e-5)) and not line.passed
    assert compare(job, ran, 1e-5).passed
    rough = {replace(one, precision="bf16"): value for one, value in ran.items()}
    line = compare(replace(job, precision="bf16"), rough, 1e-6)
    assert line.precision == "bf16" and line.norm == pytest.approx(2e-5) and not line.passed
    exact = {replace(one, precision="fp64"): value for one, value in ran.items()}
    assert not compare(replace(job, precision="fp64"), exact, 1e-5).passed, "norms may differ as little as losses"
    assert not compare(job, {**ran, job: Ran([2.0, math.nan], [4.0, 4.0], "none")}, 1.0).passed


def test_the_table_marks_what_differs_and_leaves_out_what_was_not_run():
    lines = [
        Line("TP 2", "full", "chat", 2, "none", 3e-6, 1e-6, False),
        Line("DDP 2", "full", "chat", 2, "DDP", 1e-7, 1e-6, True),
        Line("DDP 2", "LoRA", "rerank", 2, "DDP", 0.0, 0.0, True),
    ]
    head, _, tp, ddp = format_lines(lines).splitlines()
    assert head == "| layout | ranks | wrapper | full, chat | LoRA, rerank |"
    assert tp == "| TP 2 | 2 | none | 3e-06, 1e-06 **no** |  |"
    assert ddp == "| DDP 2 | 2 | DDP | 1e-07, 1e-06 | 0e+00, 0e+00 |"
    page = fill_table("a\n<!-- layouts:begin -->\nold\n<!-- layouts:end -->\nb\n", lines, "note")
    assert page.startswith("a\n<!-- layouts:begin -->\n\nnote\n\n| layout") and "old" not in page
    assert page.endswith("\n<!-- layouts:end -->\nb\n") and fill_table(page, lines, "note") == page
    with pytest.raises(UserError, match="no place for the table"):
        fill_table("a page", lines, "note")


SAME_KIND = ("fp32", "bf16")


def test_jobs_cover_every_layout_and_every_kind_of_training():
    jobs = list_jobs(8)
    assert {job.layout for job in jobs} == {"one", *LAYOUTS}
    whole, rough = ({j.layout for j in jobs if (j.trained, j.task, j.precision) == (*IN_BF16, p)} for p in SAME_KIND)
    assert whole == rough and len(rough) > 15
    assert {(job.trained, job.task) for job in jobs} == {(kind, task) for kind in TRAINED for task in TASKS}
    few = list_jobs(2)
    assert {job.trained for job in few} == set(TRAINED) and len(few) < len([job for job in jobs if job.ranks <= 2])
    assert {(job.trained, job.task) for job in list_jobs(8, quick=True)} == set(QUICK)
    assert not [job for job in jobs if "nf4" in job.trained and ("TP" in job.layout or job.precision == "fp64")]
    exact = [job for job in jobs if job.precision == "fp64"]
    assert {job.layout for job in exact} == {"one", *LAYOUTS} and limit_of("fp64", "cpu") < 1e-9 < limit_of(
        "fp32", "cpu"
    )
    assert {(j.trained, j.task) for j in few if j.precision == "fp64"} == set(QUICK)
    assert all(replace(job, layout="one") in jobs for job in jobs)


@pytest.mark.needs_gpu
@pytest.mark.slow
def test_the_verb_on_gpus(tmp_path):
    """Needs a GPU, two to say something: NCCL, fp32, the layouts of as many ranks as there are cards."""
    done = run_litchi(tmp_path, "selfcheck", "--json", "--procs", str(torch.cuda.device_count()), timeout_s=900)
    assert done.status == 0 and json.loads(done.out)["passed"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_verb(tmp_path):
    done = run_litchi(tmp_path, "selfcheck", "--json", "--report", str(tmp_path / "page.md"), timeout_s=800)
    report = json.loads(done.out)
    assert done.status == 0 and report["passed"], done.err
    assert {line["layout"] for line in report["layouts"]} == {n for n in LAYOUTS if Job(n, "", "").ranks == 2}
    names = {(one["name"], one["precision"]) for one in report["equalities"]}
    assert names == {(c.name, p) for c in CHECKS for p in ("fp32", "bf16") if p == "fp32" or c.twice}
    assert all(one["passed"] is not False for one in report["equalities"])
    page = (tmp_path / "page.md").read_text()
    assert "not run on a GPU" in page or report["machine"]["cards"]
    assert "| video timing |" in page and "| TP 2 | 2 |" in page


# -------------------------------------------------------------------------------------------------------- equalities


def test_differences_by_hand():
    assert apart([1.0, -3.0], [1.5, -4.0]) == 0.25 and each_apart([1.0, -3.0], [1.5, -4.0]) == pytest.approx(1 / 3)
    assert math.isnan(apart([1.0, math.nan], [1.5, -4.0])) and math.isnan(each_apart([1.0, math.nan], [1.5, -4.0]))
    with pytest.raises(ValueError, match="zip"):
        apart([1.0], [1.0, 2.0])


def test_a_check_that_fails_is_told_and_hides_no_other(tmp_path, ranks, monkeypatch):
    monkeypatch.setenv("LITCHI_CACHE", "")

    def raises(bench):
        raise ValueError("no such thing")

    def away(bench):
        raise NotHere("no compiler")

    def near(bench):
        assert bench.pairs.is_file() and bench.stills.is_file()
        return 2e-6

    checks = [
        Check("raises", "a = b", raises, SCORE),
        Check("away", "a = b", away, SCORE),
        Check("near", "a = b", near, LOSS),
        Check("nan", "a = b", lambda bench: math.nan, SCORE, twice=False),
    ]
    said = []
    found = run_checks(tmp_path / "room", ranks, quick=False, say=said.append, checks=checks)
    fp32, bf16 = ([one for one in found if one.precision == p] for p in ("fp32", "bf16"))
    assert [one.passed for one in fp32] == [False, None, False, False] and [o.passed for o in bf16] == [
        False,
        None,
        True,
    ]
    assert "no such thing" in fp32[0].note and len(said) == 7 and "1 of 4, fp32: raises: ValueError" in said[0]
    head, _, *rows = format_equalities(found).splitlines()
    assert head == "| | equal | fp32, difference (limit) | bf16, difference (limit) |"
    assert rows[1] == "| away | a = b | not run: no compiler | not run: no compiler |"
    assert rows[2] == "| near | a = b | 2e-06 (1e-06) **no** | 2e-06 (1e-02) |"
    assert rows[3] == "| nan | a = b | nan (1e-05) **no** |  |"


def test_a_page_keeps_what_other_commands_found(tmp_path):
    machine = {"date": "2026-12-01", "cards": [], "processor": "P", "system": "S", "versions": {"torch": "2"}}
    page, line = tmp_path / "page.md", asdict(Line("TP 2", "full", "chat", 2, "none", 1e-7, 1e-6, True))
    equal = {**asdict(Equality("packed", "a = b", "fp32", 1e-7, 1e-5)), "passed": True}
    tables = {"layouts": [line], "equalities": [equal], "tolerance": {"fp32": 1e-6}}
    write_page(page, {"machine": machine, "command": "litchi selfcheck", **tables})
    text = page.read_text()
    assert text.count("**not run on a GPU**; P; S; torch 2") == 2 and text.count("not run yet") == 1
    assert "all 1 are within (1e-06 in fp32)" in text and "| packed | a = b | 1e-07 (1e-05) |" in text
    cards = {**machine, "cards": ["H", "H"]}
    faults = [{"fault": "disk full", "passed": False, "notice_s": 1.0, "said": "x"}]
    write_page(page, {"machine": cards, "command": "litchi selfcheck --chaos", "faults": faults})
    text = page.read_text()
    assert "| packed |" in text and "| disk full | 1 | 0 | 1.0 to 1.0 |" in text and "1 of 1 failed" in text
    assert "2 x H; P" in text and "not run yet" not in text
