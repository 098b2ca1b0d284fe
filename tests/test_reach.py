"""A machine that cannot read the data is named before step 1; what no machine can read is left to the scan."""

from __future__ import annotations

import builtins
import socket
from itertools import pairwise

import pytest
from processes import RunningRanks
from runs import chat_rows, train

from litchi.errors import DataError, MachineError
from litchi.train.reach import open_path, refuse_unreachable, spread_sample, try_paths


def test_the_sample_is_spread_and_bounded():
    paths = [f"{n:05}" for n in range(10_000)]
    sample = spread_sample(reversed(paths), 20)
    assert len(sample) == 20 and (sample[0], sample[-1]) == ("00000", "09999")
    gaps = {int(b) - int(a) for a, b in pairwise(sample)}
    assert gaps <= {526, 527}
    assert spread_sample(["b", "a", "b"], 20) == ["a", "b"] and spread_sample([]) == []


def test_what_cannot_be_read_is_told_with_its_reason(tmp_path):
    (tmp_path / "here").write_text("x")
    failed = try_paths([str(tmp_path / name) for name in ("here", "gone", "here/below")], open_path)
    assert failed == {
        str(tmp_path / "gone"): "No such file or directory",
        str(tmp_path / "here/below"): "Not a directory",
    }


def test_the_machine_that_differs_is_named():
    with pytest.raises(MachineError) as error:
        refuse_unreachable(
            ["a", "b", "c"], [("n1", {"c": "gone"}), None, ("n2", {"a": "Stale file handle", "c": "gone"})]
        )
    assert str(error.value).startswith(
        "n2 cannot read a (1 of the 3 files tried; another machine reads it): Stale file"
    )


def test_what_none_can_read_is_not_the_machines_fault():
    refuse_unreachable(["a", "b"], [("n1", {"a": "gone"}), None, ("n2", {"a": "gone"})])
    refuse_unreachable(["a"], [("n1", {"a": "gone"})])


def train_on_two_machines(ranks, folder, blind):
    """Each rank is the first of a machine of its own; rank 1's cannot see `blind`."""
    ranks = type(ranks)(ranks.rank, ranks.world, 0, ranks.device)
    if ranks.rank == 1:
        really = builtins.open

        def open_here(path, *args, **kwargs):
            if str(path).endswith(blind):
                raise FileNotFoundError(2, "No such file or directory", path)
            return really(path, *args, **kwargs)

        builtins.open = open_here
        socket.gethostname = lambda: "node7"
    try:
        train(
            ranks,
            f"{folder}/run",
            "task=chat",
            "train.steps=1",
            f"data.train={folder}/chat.jsonl",
            "trainable.language=full",
        )
    except (MachineError, DataError) as error:
        return [type(error).__name__, error.line()]
    return ["none", ""]


@pytest.mark.parametrize("blind", [".png", ".jsonl"])
def test_a_run_on_two_machines_names_the_one_without_the_data(tmp_path, blind):
    chat_rows(tmp_path)
    kinds, texts = zip(
        *RunningRanks(tmp_path / "p", 2, train_on_two_machines, str(tmp_path), blind).results(), strict=True
    )
    assert kinds == ("MachineError", "MachineError")  # alike on both: none waits for the other
    assert texts[0] == texts[1] and texts[0].startswith("node7 cannot read ") and blind in texts[0]
