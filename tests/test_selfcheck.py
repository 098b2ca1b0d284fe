"""The table of layouts: every one against one process, on real gloo ranks, one process group per number of ranks."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch
from processes import RunningRanks, run_litchi

from litchi.errors import UserError
from litchi.scale.selfcheck import (
    LAYOUTS,
    QUICK,
    SAME,
    STEPS,
    Job,
    Line,
    Ran,
    compare,
    fill_table,
    format_lines,
    list_jobs,
    run_jobs,
    write_rows,
)

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
    listed = [job for job in list_jobs(world) if kinds is None or (job.trained, job.task) in kinds]
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
        alone = table[Job("one", job.trained, job.task)]
        assert len(ran.losses) == STEPS and min(alone.norms) > 0.01 and alone.losses[0] != alone.losses[-1]
        line = compare(job, table, SAME["cpu"])
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


def test_the_table_marks_what_differs_and_leaves_out_what_was_not_run():
    lines = [
        Line("TP 2", "full", "chat", 2, "none", 3e-6, 1e-6, False),
        Line("DDP 2", "full", "chat", 2, "DDP", 1e-7, 1e-6, True),
        Line("DDP 2", "LoRA", "rerank", 2, "DDP", 0.0, 0.0, True),
    ]
    head, _, tp, ddp = format_lines(lines).splitlines()
    assert head == "| layout | ranks | wrapper | full, chat | LoRA, rerank |"
    assert tp == "| TP 2 | 2 | none | 3e-06 **no** |  |"
    assert ddp == "| DDP 2 | 2 | DDP | 1e-07 | 0e+00 |"
    page = fill_table("a\n<!-- layouts:begin -->\nold\n<!-- layouts:end -->\nb\n", lines, "note")
    assert page.startswith("a\n<!-- layouts:begin -->\n\nnote\n\n| layout") and "old" not in page
    assert page.endswith("\n<!-- layouts:end -->\nb\n") and fill_table(page, lines, "note") == page
    with pytest.raises(UserError, match="no place for the table"):
        fill_table("a page", lines, "note")


def test_jobs_cover_every_layout_and_every_kind_of_training():
    jobs = list_jobs(8)
    assert {job.layout for job in jobs} == {"one", *LAYOUTS}
    assert not [job for job in jobs if "nf4" in job.trained and "TP" in job.layout]
    assert all(Job("one", job.trained, job.task) in jobs for job in jobs)


@pytest.mark.needs_gpu
@pytest.mark.slow
def test_the_verb_on_gpus(tmp_path):
    """Needs a GPU, two to say something: NCCL, fp32, the layouts of as many ranks as there are cards."""
    done = run_litchi(tmp_path, "selfcheck", "--json", "--procs", str(torch.cuda.device_count()), timeout_s=900)
    assert done.status == 0 and json.loads(done.out)["passed"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_verb(tmp_path):
    done = run_litchi(tmp_path, "selfcheck", "--json", timeout_s=500)
    report = json.loads(done.out)
    assert done.status == 0 and report["passed"]
    assert {line["layout"] for line in report["layouts"]} == {n for n in LAYOUTS if Job(n, "", "").ranks == 2}
