"""`litchi doctor`: verdicts on recorded machines, what faults turn them into, this machine measured for real."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from processes import run_litchi
from runs import write_rows
from typer.testing import CliRunner

from litchi.cli import app
from litchi.config import load_config
from litchi.prepare import doctor
from litchi.prepare.diagnosis import check_machine
from litchi.prepare.libraries import check_libraries
from litchi.prepare.probe import Machine, machine_from_json, nearest_folder, read_machine
from litchi.prepare.run_checks import Needs, check_run, count_steps, measure_needs
from litchi.train.resume import Room

MACHINES = Path(__file__).parent / "machines"


def recorded(name: str) -> Machine:
    return machine_from_json(json.loads((MACHINES / f"{name}.json").read_text(encoding="utf-8")))


def verdicts(machine: Machine) -> dict[str, str]:
    return {check.name: check.verdict for check in check_machine(machine)}


def find(machine: Machine, name: str):
    return next(check for check in check_machine(machine) if check.name == name)


SYSTEM = dict.fromkeys(("python", "cores", "ram", "disk", "shm", "open_files"), "ok")
GPU = dict.fromkeys(("cuda", "gpus", "gpu_memory", "ecc", "clocks", "kernels"), "ok")
TABLE = {
    "a100x8-nvswitch": {
        **SYSTEM,
        **GPU,
        **dict.fromkeys(("nvcc", "bf16", "flash", "topology", "numa"), "ok"),
    },
    "rtx4090x4-two-sockets": {
        **SYSTEM,
        **GPU,
        **{"shm": "warn", "open_files": "warn", "bf16": "ok", "flash": "ok", "topology": "warn", "numa": "ok"},
    },
    "v100": {**SYSTEM, **GPU, "nvcc": "warn", "bf16": "warn", "flash": "warn"},
    "none": {**SYSTEM, "cuda": "warn"},
}


@pytest.mark.parametrize("name", TABLE)
def test_verdicts_on_recorded_machines(name):
    machine = recorded(name)
    assert verdicts(machine) == TABLE[name]
    assert all(check.remedy for check in check_machine(machine) if check.verdict != "ok")
    assert machine_from_json(json.loads(json.dumps(machine.to_json()))) == machine


def test_pairs_behind_two_root_complexes_are_named():
    check = find(recorded("rtx4090x4-two-sockets"), "topology")
    assert "0-2, 0-3, 1-2, 1-3:" in check.fact and "0-1" not in check.fact
    one = replace(recorded("rtx4090x4-two-sockets"), links=(("self", "node"), ("node", "self")))
    one = replace(one, gpus=one.gpus[:2])
    assert (
        find(one, "topology").verdict,
        "pair 0-1: only through two root complexes" in find(one, "topology").fact,
    ) == (
        "warn",
        True,
    )


def broken_gpu(machine: Machine, number: int, **what) -> Machine:
    gpus = [replace(gpu, **what) if n == number else gpu for n, gpu in enumerate(machine.gpus)]
    return replace(machine, gpus=tuple(gpus))


FAULTS = {
    "driver too old": (dict(driver="535.183.01", driver_cuda="12.2"), "cuda", "fail", "580.65.06"),
    "driver older than the build": (dict(torch_cuda="13.1"), "cuda", "warn", "newer driver"),
    "torch without CUDA": (dict(torch_cuda=None), "cuda", "fail", "build for CUDA"),
    "driver does not answer": (
        dict(driver_error="Driver/library version mismatch", gpus=()),
        "cuda",
        "fail",
        "Restart",
    ),
    "torch sees fewer": (dict(torch_gpus=7), "cuda", "fail", "CUDA_VISIBLE_DEVICES"),
    "no kernels": (dict(torch_arches=("sm_90", "sm_100")), "kernels", "fail", "older CUDA"),
    "nvcc of another version": (dict(nvcc="11.8"), "nvcc", "warn", "CUDA_HOME"),
    "old Python": (dict(python="3.10.4"), "python", "fail", "3.11"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_machine_is_found(name):
    change, check, verdict, remedy = FAULTS[name]
    found = find(replace(recorded("a100x8-nvswitch"), **change), check)
    assert found.verdict == verdict and remedy in found.remedy


@pytest.mark.parametrize(
    ("change", "check", "verdict", "said"),
    [
        (dict(ecc_errors=3), "ecc", "fail", "3 uncorrected memory errors on GPU 5"),
        (dict(ecc=False), "ecc", "warn", "GPU 5"),
        (dict(slowed=("heat",)), "clocks", "warn", "GPU 5 is held down by heat"),
        (dict(free_bytes=10**9), "gpu_memory", "warn", "1.0 GB of 85.9 GB are free on GPU 5"),
        (dict(name="NVIDIA A100-PCIE-40GB"), "gpus", "warn", "1 x NVIDIA A100-PCIE-40GB and 7 x"),
        (dict(node=-1), "numa", "warn", "GPU 5"),
    ],
)
def test_a_fault_of_one_gpu_names_it(change, check, verdict, said):
    found = find(broken_gpu(recorded("a100x8-nvswitch"), 5, **change), check)
    assert found.verdict == verdict and said in found.fact


def test_v100_has_no_kernels_in_a_build_for_cuda_13():
    machine = replace(recorded("v100"), torch_arches=recorded("a100x8-nvswitch").torch_arches)
    assert find(machine, "kernels").verdict == "fail"
    newer = replace(machine, torch_arches=("sm_60", "compute_60"))  # PTX is compiled for what is newer
    assert find(newer, "kernels").verdict == "ok"


# ------------------------------------------------------------------------------------------------------- libraries


def test_bad_pairs_and_unmet_requirements():
    asked = {"torchvision": ["torch==2.14.1", "gdown>=4 ; extra == 'gdown'"], "litchi": ["peft>=0.21.2,<0.22"]}
    good = {"torch": "2.14.1+cu130", "torchvision": "0.29.1", "peft": "0.21.2", "transformers": "5.24.0"}

    def found(**versions):
        checks = check_libraries(good | versions, lambda name: asked.get(name, []))
        return [(c.name, c.verdict) for c in checks if c.verdict != "ok"]

    assert found() == []
    assert found(torch="2.13.0") == [("library torch", "fail")]
    assert found(peft="0.17.1") == [("library peft", "fail")] * 2  # our range, and the known pair
    assert found(torch="2.9.1", transformers="4.57.0") == [("library torch", "fail"), ("library torch", "warn")]


def test_libraries_here_go_together():
    from litchi.prepare.libraries import read_versions

    assert {c.verdict for c in check_libraries(read_versions())} <= {"ok", "warn"}
    assert read_versions(["torch", "no-such-library"]).keys() == {"torch"}


# ------------------------------------------------------------------------------------------------------- for a run


def tiny(folder: Path, *words: str):
    data = write_rows(folder / "t.jsonl", [{"query": "a", "pos_doc": "b", "neg_docs": ["c"]}] * 20)
    base = ["model.path=builtin:tiny", "task=rerank", f"data.train={data}", f"output={folder}/run"]
    return load_config(None, [*base, "train.global_batch_size=8", *words])


def run_verdicts(config, needs, machine, procs=1, shards=1):
    return {c.name: c.verdict for c in check_run(config, needs, machine, procs=procs, shards=shards)}


def test_needs_are_those_of_the_model(tmp_path):
    full = {f"trainable.{part}=full" for part in ("vision", "merger", "language")}
    needs = measure_needs(tiny(tmp_path, *full, "train.epochs=2", "train.save_every=2", "train.keep=2"), gpu=False)
    assert isinstance(needs, Needs)
    assert needs.trains == needs.total  # the head is tied
    assert needs.weights_bytes == needs.gradient_bytes == 4 * needs.total
    assert needs.optimizer_bytes == 8 * needs.total
    assert needs.room == Room(
        12 * needs.total, 3, 4 * needs.total
    )  # 6 steps, saved every second one, one being written
    frozen = measure_needs(tiny(tmp_path), gpu=True)  # LoRA on a GPU: in bf16, what is added in fp32
    assert frozen.trains < needs.total / 2 and frozen.weights_bytes < needs.weights_bytes
    assert count_steps(tiny(tmp_path, "train.epochs=2")) == (6, 3)


A100 = Needs(1, 1, 15 * 10**9, 15 * 10**9, 30 * 10**9, Room(45 * 10**9, 4, 15 * 10**9))


def test_a_run_against_machines(tmp_path):
    config, a100 = tiny(tmp_path), recorded("a100x8-nvswitch")
    good = dict.fromkeys(("model", "precision", "memory", "run_ram", "run_cores", "run_disk"), "ok")
    assert run_verdicts(config, A100, a100, procs=8, shards=8) == good
    assert run_verdicts(config, A100, a100)["memory"] == "warn"  # 60 GB of 85
    assert run_verdicts(config, replace(A100, optimizer_bytes=60 * 10**9), a100)["memory"] == "fail"
    v100 = recorded("v100")
    assert run_verdicts(tiny(tmp_path, "train.precision=bf16"), A100, v100)["precision"] == "fail"
    assert (
        run_verdicts(tiny(tmp_path, "model.attention=varlen", "train.precision=fp16"), A100, v100)["attention"]
        == "fail"
    )
    assert run_verdicts(config, A100, v100)["memory"] == "fail"
    assert run_verdicts(config, A100, replace(a100, disk_free_bytes=190 * 10**9))["run_disk"] == "fail"  # 4 x 45 + 15
    assert run_verdicts(config, A100, replace(a100, cores=8), procs=8)["run_cores"] == "warn"
    assert run_verdicts(config, A100, replace(a100, ram_free_bytes=4 * 10**9), procs=8)["run_ram"] == "fail"
    offloaded = tiny(tmp_path, "train.offload=optimizer", "optim.name=adamw")
    assert run_verdicts(offloaded, A100, a100)["memory"] == "ok"  # 30 of 85 GB are left on the GPU


# ------------------------------------------------------------------------------------------------------ the verb


@pytest.mark.parametrize(("change", "status"), [({}, 0), (dict(driver="535.183.01", driver_cuda="12.2"), 4)])
def test_exit_status_on_a_recorded_machine(monkeypatch, tmp_path, change, status):
    monkeypatch.setattr(doctor, "read_machine", lambda folder: replace(recorded("a100x8-nvswitch"), **change))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["doctor", "--json", "--procs", "1"])
    assert done.exit_code == status, done.output
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["cuda"]["verdict"] == ("fail" if status else "ok")
    assert all(check.keys() == {"name", "verdict", "fact", "remedy"} for check in checks.values())
    assert list(tmp_path.iterdir()) == []  # what was written to measure the disk is gone


def words_of(config) -> list[str]:
    return [
        *("model.path=builtin:tiny", "task=rerank", "data.workers=0"),
        *(f"data.train={config.data.train[0].path}", f"output={config.output}"),
    ]


def test_this_machine_for_a_run(tmp_path):
    words = words_of(tiny(tmp_path))
    done = CliRunner().invoke(app, ["doctor", *words, "--json", "--procs", "1"])
    answer = {check["name"] for check in json.loads(done.stdout)["checks"]}
    assert done.exit_code == 0, done.output
    assert {"python", "disk_speed", "pictures", "videos", "libraries", "data", "memory", "run_disk"} <= answer
    done = CliRunner().invoke(app, ["doctor", *words, f"data.eval={tmp_path}/gone.jsonl", "--procs", "1"])
    assert done.exit_code == 4 and "gone.jsonl: No such file" in done.stdout and "-> Check data.train" in done.stdout


@pytest.mark.slow
def test_two_ranks_are_measured(tmp_path):
    done = run_litchi(tmp_path, "doctor", "--json", "--procs", "2", timeout_s=100)
    answer = {check["name"]: check for check in json.loads(done.out)["checks"]}
    assert done.status == 0, done.out
    assert answer["all_reduce"]["verdict"] in ("ok", "warn") and "between 2 ranks" in answer["all_reduce"]["fact"]


def test_probe_reads_this_machine(tmp_path):
    machine = read_machine(nearest_folder(tmp_path / "not" / "there"))
    assert nearest_folder(tmp_path / "not" / "there") == tmp_path
    assert 0 < machine.cores <= (os.cpu_count() or 1)
    assert 0 < machine.ram_free_bytes <= machine.ram_bytes
    assert machine.disk_free_bytes > 0 and machine.open_files > 0
    assert len(machine.links) == len(machine.gpus)


def test_a_folder_that_cannot_be_written_and_a_slow_or_wrong_sum(tmp_path):
    assert doctor.check_write(tmp_path / "gone").verdict == "fail"
    measured = {"ranks": 4, "device": "cuda", "bytes": 1 << 28, "bytes_per_s": 20e9, "right": True}
    a100, pcie = recorded("a100x8-nvswitch").links, recorded("rtx4090x4-two-sockets").links
    assert doctor.judge_sums(measured, a100).verdict == "warn"  # PCIe's rate where there is NVLink
    assert doctor.judge_sums(measured, pcie).verdict == "ok"
    assert "wrong" in doctor.judge_sums(measured | {"right": False}, a100).fact
    assert doctor.judge_sums(measured | {"right": False}, a100).verdict == "fail"
