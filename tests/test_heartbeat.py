"""A rank that stands still or is gone ends the others soon, with one line; slow ones and early ends do not."""

from __future__ import annotations

import os
import signal
import sys
import time

from processes import RunningRanks

from litchi.parallel.heartbeat import BYE, Ears, Heartbeat

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
    assert "the machine where ranks meet (10.0.0.1:29500) has not" in found.error(silent, "10.0.0.1:29500").line()


def test_who_was_asleep_itself_counts_anew():
    found, beats = ears(), lambda now: [f"{now} a", f"{now} a", "1 b"]
    assert listen(found, 20, beats) is None
    assert listen(found, 230, beats, start=200) is None  # at 201 its first look for 180 s
    assert listen(found, 260, beats, start=230) == (232, [2])


def test_one_rank_of_a_machine_speaks():
    found = [ears(5, rank) for rank in range(5)]  # host0: 0 1, host1: 2 3, host2: 4
    assert [e.speaks([4]) for e in found] == [True, False, True, False, True]
    assert [e.speaks([2]) for e in found if e.rank != 2] == [True, False, True, True]
    line = found[3].error([4, 2], "").line()
    assert line.startswith("rank 4 (host2) and 1 more has not been heard of for 30 s (rank 3 on host1): ")


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


def test_a_world_of_one_has_no_thread(ranks):
    assert beat_while(ranks, 0, "") == 0
