"""Ranks keep to the cores next to their GPU: recorded machines, and the refusal to overrule anybody."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from litchi.parallel import numa
from litchi.parallel.numa import choose_cores, parse_cores, read_gpu_node, read_nodes

# `cpulist` of each node, as machines of these kinds list them.
MACHINES = {
    "one node": {0: "0-1"},
    "two sockets with threads": {0: "0-47,96-143", 1: "48-95,144-191"},
    "four nodes": {0: "0-15", 1: "16-31", 2: "32-47", 3: "48-63"},
    "two sockets and memory alone": {0: "0-3", 1: "4-7", 2: ""},
}


def machine(name):
    return {node: parse_cores(text) for node, text in MACHINES[name].items()}


def choose(name, allowed=None, **where):
    nodes = machine(name)
    everything = [core for cores in nodes.values() for core in cores]
    return choose_cores(nodes, everything if allowed is None else allowed, **where)


@pytest.mark.parametrize(
    "name, gpu_node, local_rank, local_world, first, count",
    [
        ("two sockets with threads", 1, 0, 8, 48, 96),  # the GPU's node, whatever the rank
        ("two sockets with threads", None, 3, 8, 0, 96),
        ("two sockets with threads", None, 4, 8, 48, 96),
        ("four nodes", None, 2, 4, 32, 16),
        ("four nodes", 3, 0, 1, 48, 16),
        ("two sockets and memory alone", 2, 1, 2, 4, 4),  # a GPU whose node has no cores
        ("two sockets and memory alone", None, 2, 3, 4, 4),
    ],
)
def test_a_rank_gets_the_cores_of_its_node(name, gpu_node, local_rank, local_world, first, count):
    cores = choose(name, gpu_node=gpu_node, local_rank=local_rank, local_world=local_world)
    assert (min(cores), len(cores)) == (first, count)


def test_one_node_and_cores_that_were_chosen_already_are_left_alone():
    where = {"gpu_node": None, "local_rank": 0, "local_world": 2}
    assert choose("one node", **where) is None
    assert choose("four nodes", allowed=range(8), **where) is None
    assert choose_cores({}, [0, 1], **where) is None  # no /sys
    assert choose("four nodes", **where) is None  # two ranks on CPUs would have half of the machine


def test_what_linux_says_is_read(tmp_path):
    for node, text in MACHINES["two sockets and memory alone"].items():
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{text}\n")
    (tmp_path / "online").write_text("0-2\n")
    assert read_nodes(tmp_path) == {0: [0, 1, 2, 3], 1: [4, 5, 6, 7], 2: []}
    assert read_nodes(tmp_path / "none") == {}


@pytest.mark.parametrize("text, node", [("1\n", 1), ("-1\n", None), (None, None)])
def test_the_node_of_a_gpu(tmp_path, monkeypatch, text, node):
    import torch

    card = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    if text:
        (tmp_path / "0000:3b:00.0").mkdir()
        (tmp_path / "0000:3b:00.0" / "numa_node").write_text(text)
    assert read_gpu_node(torch.device("cuda", 0), tmp_path) == node
    assert read_gpu_node(torch.device("cpu"), tmp_path) is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores can be chosen on Linux only")
def test_the_choice_is_applied_to_this_process(monkeypatch):
    import torch

    before = sorted(os.sched_getaffinity(0))
    if len(before) < 2:
        pytest.skip("this process may use one core only")
    monkeypatch.setattr(numa, "read_nodes", lambda: {0: before[:1], 1: before[1:]})
    try:
        assert numa.pin_cores(torch.device("cpu"), local_rank=1, local_world=2) == set(before[1:])
        assert os.sched_getaffinity(0) == set(before[1:])
    finally:
        os.sched_setaffinity(0, before)
