"""Harm done to real runs: the list is whole, each harm is noticed, and one that is not noticed fails."""

from __future__ import annotations

import json

import pytest
from processes import Program, run_litchi

from litchi.scale import chaos, harm
from litchi.scale.room import Failed, NotHere, Room


def test_quick_is_one_of_each_and_each_says_what_is_shown():
    names = [fault.name for fault in chaos.list_faults(quick=True)]
    assert set(names) == set(chaos.SHOWN) and all(names.count(n) == 1 for n in chaos.SHOWN if n != "out of memory")
    whole = [fault.name for fault in chaos.list_faults()]
    least = {"SIGKILL of a rank": 20, "newest checkpoint damaged": 12, "files may not grow": 5, "disk full": 5}
    assert all(whole.count(name) >= count for name, count in least.items())
    assert sum(whole.count(name) for name in chaos.SHOWN if name.startswith("NaN")) >= 8
    moments = [fault.run.keywords for fault in chaos.list_faults()]
    assert moments == [fault.run.keywords for fault in chaos.list_faults()], "drawn by a seed"


def test_one_that_fails_is_told_and_hides_no_other(tmp_path):
    def fails(room, out):
        raise Failed("two ranks are left over")

    def away(room, out):
        raise NotHere("no right")

    said = []
    faults = [
        chaos.Fault("disk full", away),
        chaos.Fault("signal in a save", fails),
        chaos.Fault("signal in a save", lambda room, out: 1.25),
        chaos.Fault("out of memory", lambda room, out: None),
    ]
    results = chaos.run_faults(tmp_path / "room", faults, said.append)
    assert [one.passed for one in results] == [None, False, True, True]
    assert said[0].startswith("1 of 4  disk full: not done: no right") and "FAILED: two ranks are left over" in said[1]
    rows = chaos.format_report({"faults": [vars(one) for one in results]}).splitlines()
    assert rows[2].startswith("| disk full | 1 | not done: no right |  |")
    assert rows[3].startswith("| signal in a save | 2 | 1 | 1.2 to 1.2 | saved or unharmed")
    assert rows[4].startswith("| out of memory | 1 | 1 |  |")


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    return Room(tmp_path_factory.mktemp("chaos") / "room", Program)


@pytest.mark.slow
def test_a_disk_that_fills_up_is_noticed(room):
    harm.limit_file(room, "limit", rank=1, step=7)
    harm.limit_file(room, "limit0", rank=0, step=7)
    try:
        harm.fill_disk(room, "disk", step=7)
    except NotHere as reason:
        pytest.skip(str(reason))


@pytest.mark.slow
def test_a_damaged_checkpoint_is_noticed_and_one_that_is_not_damaged_fails(room, monkeypatch):
    harm.damage_newest(room, "damaged", damage="a bit of a tensor flipped")
    harm.damage_newest(room, "renamed", damage="the folder is another step's")
    monkeypatch.setitem(harm.DAMAGES, "nothing", (lambda folder: None, "anything"))
    with pytest.raises(Failed):
        harm.damage_newest(room, "sound", damage="nothing")


@pytest.mark.slow
def test_numbers_that_go_wrong_are_noticed(room):
    harm.spoil_numbers(room, "gradient", kind="gradient", rank=1, rule="skip", first=7)
    harm.spoil_numbers(room, "back", kind="loss", rank=0, rule="rollback", first=7, row=3)
    harm.spoil_numbers(room, "stop", kind="loss", rank=None, rule="stop", first=7)
    with pytest.raises(Failed, match="the journal has"):  # a step that the run does not reach
        harm.spoil_numbers(room, "never", kind="loss", rank=1, rule="skip", first=40)


@pytest.mark.slow
def test_memory_that_runs_out_is_noticed(room):
    harm.exhaust_memory(room, "memory", phase="backward", rank=1, step=7)
    with pytest.raises(Failed, match="no smaller micro-batches"):
        harm.exhaust_memory(room, "enough", phase="backward", rank=1, step=7, above=100_000)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_scorecard(tmp_path):
    """Each fault once, done to the real program."""
    ended = run_litchi(tmp_path, "selfcheck", "--chaos", "--quick", "--json", timeout_s=1700)
    report = json.loads(ended.out)
    assert ended.status == 0 and report["passed"], ended.err
    assert {one["fault"] for one in report["faults"]} == set(chaos.SHOWN)
