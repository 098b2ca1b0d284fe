"""The table of layouts: every one against one process, on real gloo ranks, one process group per number of ranks."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from processes import RunningRanks

from litchi.scale.selfcheck import LAYOUTS, STEPS, Job, Ran, run_jobs, write_rows

SAME = 1e-6  # relative, of losses, in fp32 under SGD
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
}
QUICK = [("full", "chat"), ("LoRA, language", "rerank")]
ALL = [(trained, task) for trained in ("full", "LoRA", "LoRA, language") for task in ("chat", "rerank")]


def run_table(folder, world, kinds):
    """{job: what it gave} for the layouts of a number of ranks and for one process."""
    write_rows(folder)
    names = [name for name in LAYOUTS if Job(name, "", "").ranks == world]
    alone = [Job("one", *kind) for kind in kinds]
    jobs = [Job(name, *kind) for kind in kinds for name in names]
    running = [
        RunningRanks(folder / str(ranks), ranks, run_jobs, str(folder), [asdict(job) for job in some])
        for ranks, some in ((1, alone), (world, jobs))
    ]
    (one,), many = (ranks.results(timeout_s=900) for ranks in running)
    assert all(rank == many[0] for rank in many), "ranks disagree"
    return {job: Ran(**ran) for job, ran in zip([*alone, *jobs], [*one, *many[0]], strict=True)}


def check_table(table):
    """All jobs against the same work in one process."""
    wrong = []
    for job, ran in table.items():
        alone = table[Job("one", job.trained, job.task)]
        assert len(ran.losses) == STEPS and min(alone.norms) > 0.01 and alone.losses[0] != alone.losses[-1]
        loss, norm = ran.differs(alone)
        if loss > SAME or norm > 100 * SAME:
            wrong.append(f"{job}: losses differ by {loss:.1e}, norms by {norm:.1e}")
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
@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_layout_gives_the_numbers_of_one(tmp_path, world):
    check_table(run_table(tmp_path, world, ALL if world < 8 else QUICK))
