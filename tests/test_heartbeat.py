"""A rank that stands still, is gone or hangs ends all soon, with one line; slow ones and early ends do not."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

from processes import RunningRanks

from litchi.dist import barrier
from litchi.parallel.heartbeat import BYE, GONE_S, Ears, Finding, Heartbeat
from litchi.parallel.pulse import PULSE, Place, Pulse

SILENT_S = 2.5  # instead of 30 s


def ears(world=3, rank=0):
    found = Ears(rank, world, 0.0, silent_s=30)
    found.hear([f"1 host{r // 2}" for r in range(world)], 0.0)
    return found


def listen(found, until, beats, start=0):
    """Hear `beats(second)` every two seconds and look every second; the first second with a silent rank, and who."""
    for now in range(start + 1, until + 1):
        if now % 2 == 0:
            found.hear(beats(now), float(now))
        if silent := found.look(float(now)):
            return now, silent
    return None


def test_a_rank_is_silent_after_30_seconds_without_a_new_beat():
    assert listen(ears(), 100, lambda now: [f"{now} a", f"{now} a", f"{min(now, 10)} b"]) == (41, [2])


def test_ranks_that_beat_late_or_said_goodbye_are_not():
    late = lambda now: [f"{now} a", f"{now // 28} a", "1 b" if now < 20 else BYE]  # noqa: E731
    assert listen(ears(), 300, late) is None


def test_a_store_that_does_not_answer_is_the_only_one_to_blame():
    found = ears(rank=1)
    for now in range(1, 40):
        silent = found.look(float(now))
        if silent:
            break
    assert (now, silent) == (31, [1])
    assert (
        "the machine where ranks meet (10.0.0.1:29500) has not"
        in found.error(Finding("silent", tuple(silent)), "10.0.0.1:29500").line()
    )


def test_who_was_asleep_itself_counts_anew():
    found, beats = ears(), lambda now: [f"{now} a", f"{now} a", "1 b"]
    assert listen(found, 20, beats) is None
    assert listen(found, 230, beats, start=200) is None  # at 201 its first look for 180 s
    assert listen(found, 260, beats, start=230) == (232, [2])


def test_one_rank_of_a_machine_speaks():
    found = [ears(5, rank) for rank in range(5)]  # host0: 0 1, host1: 2 3, host2: 4
    assert [e.speaks([4]) for e in found] == [True, False, True, False, True]
    assert [e.speaks([2]) for e in found if e.rank != 2] == [True, False, True, True]
    line = found[3].error(Finding("silent", (4, 2)), "").line()
    assert line.startswith("rank 4 (host2) and 1 more has not been heard of for 30 s (rank 3 on host1): ")


def beat(count, place):
    return f"{count} host {json.dumps(asdict(place))}"


def test_a_hang_is_when_nobody_moves_and_the_one_behind_is_named():
    ahead = Place("step 7", ("a",), phases=15, parts=1, idle_s=70)
    behind = Place("waiting for the data of step 7", ("b", "c"), phases=14, parts=0, idle_s=69)
    found = ears()
    found.hear([beat(1, ahead), beat(1, behind), beat(1, ahead)], 1.0)
    assert found.stuck(1.0, 68) == [1, 0, 2] and found.stuck(1.0, 69) == []
    line = found.error(Finding("stuck", (1, 0, 2)), "", hang_s=68, stacks="run/stacks").line()
    assert line.startswith("nothing has moved for 68 s; rank 1 (host) is furthest behind, at waiting for the data of")
    assert "step 7, samples b, c (rank 0 on host" in line and "are in run/stacks; the same command" in line
    second = ears()
    second.hear([beat(1, ahead), beat(1, ahead), beat(1, Place("step 7", (), 15, 2, 80))], 1.0)
    assert second.stuck(1.0, 60)[0] != 2, "a micro-batch further"


def test_a_rank_that_does_not_even_beat_is_named_first_wherever_it_was():
    further = ears()
    further.hear([beat(1, Place("step 7", (), 15, 2, 3)), beat(1, Place("step 8", (), 16, 1, 3)), BYE], 1.0)
    further.hear([beat(2, Place("step 7", (), 15, 2, 7)), beat(1, Place("step 8", (), 16, 1, 3)), BYE], 5.0)
    assert further.stuck(6.9, 4.0) == [0, 1], "it may only be between two beats"
    assert further.stuck(7.1, 4.0) == [1, 0]


def test_what_is_no_hang():
    slow = Place("step 7", (), 15, 1, 500)
    for other in (Place("step 7", (), 15, 1, 3), Place("exporting", (), 16, 0, None)):
        found = ears()
        found.hear([beat(1, slow), beat(1, slow), beat(1, other)], 1.0)
        assert found.stuck(1.0, 60) == []
    found.hear([beat(2, slow), beat(2, slow), BYE], 2.0)
    assert found.stuck(2.0, 60) == [0, 1], "who said goodbye holds nobody up"


def test_a_stopped_rank_does_not_move():
    """It says nothing any more, so that its last word stands."""
    found, place = ears(), Place("step 7", (), 15, 1, 1.5)
    for now in range(1, 9):
        found.hear([beat(now, Place("step 7", (), 15, 1, float(now)))] * 2 + [beat(1, place)], float(now))
    assert found.stuck(8.0, 7.5) == [2, 0, 1] and found.stuck(8.0, 8.5) == []


def test_a_rank_whose_process_is_gone_is_lost_soon():
    found = ears()
    for now in range(1, 10):
        found.hear([f"{now} a", f"{now} a", "1 a" if now < 6 else BYE], float(now))
        assert found.look(float(now), {1, 2} if now > 2 else ()) == []
        assert found.lost(float(now)) == ([1] if now >= 3 + GONE_S else [])
    assert "rank 1 (a) has ended without a goodbye" in found.error(Finding("gone", (1,)), "").line()


def test_time_asleep_is_not_idle():
    """Only what the watching thread has seen pass counts; a move begins it anew, also one within a phase."""
    pulse = Pulse()
    pulse.begin("step 1", lambda: ["q"])
    assert pulse.place.idle_s == 0.0 and pulse.place.samples == ("q",)
    for _ in range(3):
        pulse.age(1.0)
    assert pulse.place.idle_s == 2.0
    pulse.move()
    pulse.age(1.0)
    assert pulse.place.idle_s == 0.0
    pulse.take(["a", "b"])
    assert str(pulse.place) == "micro-batch 1 of step 1, samples a, b"
    pulse.begin("exporting", limited=False)
    assert pulse.place.idle_s is None and pulse.place.parts == 0


# ------------------------------------------------------------------------------------------------ on real processes


def beat_while(ranks, seconds, how):
    """Beat, and do something meanwhile."""

    def end(error):
        if error:
            print(f"error: {error.line()}", file=sys.stderr, flush=True)
        os._exit(4)

    with Heartbeat(ranks, end, beat_s=0.1, silent_s=SILENT_S) as beat:
        print("begun", flush=True)
        if how == "busy":  # two seconds of Python without a pause, and one call that holds the interpreter
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                sum(range(1000))
            sorted(range(1_000_000), key=lambda n: -n)
        else:
            time.sleep(seconds[ranks.rank] if isinstance(seconds, list) else seconds)
        threads = len(beat.threads)
    return threads


def test_silent_ranks_end_the_others_and_slow_or_early_ones_do_not(tmp_path):
    """Four worlds at once: each mostly waits. Rank 0's process holds the store, as under srun."""
    plans = {
        "stopped": (3, 60, ""),
        "killed": (2, 60, ""),
        "early": (2, [0.2, 1.5 * SILENT_S], ""),
        "busy": (2, 1.2 * SILENT_S, "busy"),
    }
    worlds = {name: RunningRanks(tmp_path / name, plan[0], beat_while, *plan[1:]) for name, plan in plans.items()}
    for world in worlds.values():
        for one in world.running:
            one.wait_for("begun")
    os.kill(worlds["stopped"].running[2].pid, signal.SIGSTOP)
    os.kill(worlds["killed"].running[0].pid, signal.SIGKILL)
    assert worlds["early"].results() == [2, 2]  # rank 0 stayed until the last had said goodbye
    assert worlds["busy"].results() == [2, 2]
    for name, others, says in (("stopped", (0, 1), "rank 2 ("), ("killed", (1,), "the machine where ranks meet (")):
        ended = [worlds[name].running[rank].end(15) for rank in others]
        worlds[name].running[2 if name == "stopped" else 0].kill()
        said = "".join(e.err for e in ended)
        assert {e.status for e in ended} == {4} and said.count("error: ") == 1, said
        assert f"error: {says}" in said and "has not been heard of" in said


def sleep_in_a_loader():
    time.sleep(60)


def hang(ranks, folder):
    """The last rank waits for its loader, the others for that rank."""

    def end(error):
        if error:
            print(f"error: {error.line()}", file=sys.stderr, flush=True)
        os._exit(4)

    with Heartbeat(ranks, end, beat_s=0.1), PULSE.watched(Path(folder), 1.5, ranks.rank):
        PULSE.begin("waiting for the data of step 1", ("q7",))
        barrier()
        if ranks.rank == ranks.world - 1:
            loader = multiprocessing.get_context("fork").Process(target=sleep_in_a_loader, daemon=True)
            loader.start()
            loader.join()
        PULSE.begin("step 1")
        barrier()


def test_a_hang_ends_all_with_the_stacks_of_all(tmp_path):
    """Alone and with two ranks, at once."""
    worlds = {world: RunningRanks(tmp_path / str(world), world, hang, str(tmp_path / f"s{world}")) for world in (1, 2)}
    for world, running in worlds.items():
        ended = [one.end(60) for one in running.running]
        said = "".join(e.err for e in ended)
        assert {e.status for e in ended} == {4} and said.count("error: ") == 1, said
        assert "nothing has moved for 2 s" in said and "at waiting for the data of step 1, samples q7" in said
        assert ("rank 1 (" in said) == (world == 2)
        stacks = [(tmp_path / f"s{world}" / f"rank-{rank}.txt").read_text() for rank in range(world)]
        assert "loader.join()" in stacks[-1] and "in sleep_in_a_loader" in stacks[-1].partition("loader ")[2]
        assert world == 1 or "in barrier" in stacks[0]


def test_what_was_not_needed_is_not_left(tmp_path):
    pulse = Pulse()
    with pulse.watched(tmp_path / "stacks", 5.0, 3):
        assert (tmp_path / "stacks" / "rank-3.txt").exists()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert "test_what_was_not_needed" in (tmp_path / "stacks" / "rank-3.txt").read_text()
        os.truncate(tmp_path / "stacks" / "rank-3.txt", 0)
    assert not (tmp_path / "stacks").exists() and pulse.hang_s is None


def test_a_world_of_one_only_looks_at_itself(ranks):
    assert beat_while(ranks, 0, "") == 1
