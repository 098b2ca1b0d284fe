"""Killed while saving, a full disk, damaged checkpoints, two runs on one folder: nothing is lost, nothing silent."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from fault_job import hold_lock, run_killed, run_killed_anywhere, run_killed_rank, run_limited, run_plainly
from processes import Running, RunningRanks
from runs import chat_rows, numbers, read_json, read_rows, rerank_rows, settings, state_hashes, train, write_rows

from litchi.data import templates
from litchi.errors import MachineError, UsageError, UserError
from litchi.model.build import builtin_folder
from litchi.scale.inject import DAMAGES, flip, shard
from litchi.train import durable, resume, saver, setup, shards
from litchi.train.checkpoint import find_damage, list_checkpoints, load_checkpoint, settle_checkpoints
from litchi.train.durable import hash_file
from litchi.train.journal import Journal
from litchi.train.setup import prepare_run

STEPS = 4


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def words(room):
    """LoRA with dropout, pictures, a rate that falls; a save in every step, and rotation with each."""
    data = rerank_rows(room / "data")
    return [
        "task=rerank", f"data.train={data}", "trainable.lora.rank=4", "trainable.lora.dropout=0.2",
        "optim.schedule=cosine", "optim.lr=2e-3", "data.negatives=1", f"train.steps={STEPS}", "train.export=never",
        "train.global_batch_size=2", "train.micro_batch_tokens=256", "train.save_every=1", "train.keep=1",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def whole(room, words):
    """The run that nothing happens to, in a process that writes down every moment of its saves."""
    out = room / "whole"
    assert Running(run_killed, (str(out), words, None), room / "p-whole", {}).end().status == 0
    return out


@pytest.fixture(scope="module")
def moments(whole):
    return read_json(Path(f"{whole}.moments"))


def assert_as_whole(run, whole):
    assert numbers(run) == numbers(whole)
    assert state_hashes(run) == state_hashes(whole)
    names = sorted(p.name for p in (run / "checkpoints").iterdir())
    assert names == [f"step-{STEPS:08d}"], names


# ----------------------------------------------------------------------------------------------------------- killed


def find(moments, text, save):
    """Number of the moment that begins like this, in the n-th save."""
    return [i for i, m in enumerate(moments) if m.startswith(text)][save]


PLACES = {
    "before the shard has all its bytes": ("before write 1", 1),
    "before the shard is synced": ("before fsync /.step-00000002.part/shard", 0),
    "before the manifest has its name": ("before replace /.step-00000003.part/.manifest.json", 0),
    "before the checkpoint has its name": ("before replace /.step-00000002.part", -1),
    "after it has its name, before the folder is synced": ("after replace /.step-00000004.part", -1),
    "behind the last step, while an old one goes": ("after unlink /.step-00000003.gone/manifest.json", 0),
}


def test_the_moments_cover_a_save(moments):
    """Every file is synced before it is renamed, the manifest is last, and rotation comes behind the rename."""
    first = {m: i for i, m in reversed(list(enumerate(moments)))}
    last = {m: i for i, m in enumerate(moments)}
    order = [
        "before mkdir /.step-00000002.part",
        "after fsync /.step-00000002.part/shard-00000.safetensors",
        "after replace /.step-00000002.part/.tensors.json.part",
        "after fsync /.step-00000002.part/.manifest.json.part",
        "after replace /.step-00000002.part/.manifest.json.part",
    ]
    at = [first[m] for m in order] + [
        last["after fsync /.step-00000002.part"],
        last["after replace /.step-00000002.part"],
    ]
    assert at == sorted(at)
    assert moments.index("after replace /.step-00000002.part") < moments.index("before rename /step-00000001")
    assert len(moments) > 100


@pytest.fixture(scope="module")
def killed(room, words, moments):
    """A run for each of `PLACES`, killed there; two at a time."""
    runs = {}
    for number, (name, (text, save)) in enumerate(PLACES.items()):
        out = room / f"killed{number}"
        at = find(moments, text, save)
        runs[name] = out, Running(run_killed, (str(out), words, at), room / f"p{number}", {})
        if number % 2:
            statuses = [one.end().status for _, one in list(runs.values())[-2:]]
            assert statuses == [-signal.SIGKILL] * 2
    return {name: out for name, (out, _) in runs.items()}


@pytest.mark.parametrize("name", PLACES)
def test_killed_in_a_save_it_ends_as_the_whole_one(name, killed, ranks, words, whole):
    out = killed[name]
    assert len(numbers(out)) < STEPS or not (out / "done.json").exists()
    train(ranks, out, *words)
    assert_as_whole(out, whole)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_fifty_random_kills(room, words, moments, whole, ranks, capsys):
    """35 at a random moment of a save or rotation, 15 at a random time; some runs are killed twice."""
    draw, inside, resumed = random.Random(11), 0, 0
    for number in range(50):
        out = room / f"random{number}"
        for _ in range(1 + (number % 5 == 0)):
            at = draw.randrange(len(moments)) if number < 35 else None
            one = Running(run_killed, (str(out), words, at), room / f"q{number}", {})
            if at is None:
                one.process.join(draw.uniform(0.5, 3.0))
                one.kill()
            else:
                one.process.join(60)
                inside += one.process.exitcode == -signal.SIGKILL
                one.kill()
        resumed += bool(list_checkpoints(out)) if out.exists() else 0
        train(ranks, out, *words)
        assert_as_whole(out, whole)
    with capsys.disabled():
        print(f"\n50 of 50 bit-identical; {inside} kills inside a save; {resumed} resumed from a checkpoint")
    assert inside >= 35 and resumed >= 25


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_kills_in_a_rotation(room, words, moments, whole, ranks, capsys):
    """At moments evenly spread over all of them between an old checkpoint's loss of its name and its end. What then
    still counts is whole, byte by byte, and there is always one."""
    inside = [i for i, moment in enumerate(moments) if moment.startswith("before rename /step-") or ".gone" in moment]
    assert len(inside) >= 20 and len(inside) == len(set(inside))
    for number in range(20):
        out = room / f"rotating{number}"
        at = inside[number * len(inside) // 20]
        one = Running(run_killed, (str(out), words, at), room / f"t{number}", {})
        assert one.end(60).status == -signal.SIGKILL
        left = list_checkpoints(out)
        assert left and not [found for found in map(find_damage, left) if found], moments[at]
        train(ranks, out, *words)
        assert_as_whole(out, whole)
    with capsys.disabled():
        print(f"\n20 of 20 at {len(inside)} moments of a rotation: nothing half-removed counted, bit-identical")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["LoRA", "in full, pixels by schedule", "features kept, loaders"])
def test_thirty_kills_anywhere_in_a_run(kind, room, words, ranks, capsys):
    """At moments drawn from all in which anything changes in the run's folder, from its first file to the export: with
    evaluations, the best kept, rows left out. What is there in the end is what the run that was not killed leaves."""
    bad = {"id": "lost", "query": {"text": "x", "image": "missing.png"}, "pos_doc": "a", "neg_docs": ["b"]}
    data = rerank_rows(room / "anywhere", 10)
    data.write_text(data.read_text() + json.dumps(bad) + "\n")
    words = [
        *(word for word in words if not word.startswith(("data.train", "train.", "trainable."))),
        *(f"data.train={data}", f"data.eval={rerank_rows(room / 'held', 4)}", "data.on_bad_media=skip"),
        *("data.max_bad_fraction=0.2", "train.steps=5", "train.global_batch_size=2", "train.micro_batch_tokens=256"),
        *("train.save_every=2", "train.eval_every=2", "train.keep=1", "train.best=mrr@10", "eval.max_rows=3"),
        *{
            "LoRA": ("trainable.lora.rank=4", "trainable.lora.dropout=0.2"),
            "in full, pixels by schedule": (
                *("trainable.language=full", "trainable.vision=full"),
                "curriculum=[{until: 2, pixels: {max: 6272}}]",
            ),
            "features kept, loaders": (
                *("trainable.vision=frozen", "trainable.merger=frozen", "train.features=cache", "data.workers=2"),
            ),
        }[kind],
    ]
    place = room / kind
    place.mkdir()
    whole = place / "whole"
    assert Running(run_killed_anywhere, (str(whole), words, None), place / "p-whole", {}).end(120).status == 0
    moments = read_json(place / "moments-whole")
    found = [i for i, moment in enumerate(moments) if not moment.startswith("before write")]
    for at in sorted(random.Random(5).sample(found, 30)):
        out = place / f"at{at}"
        one = Running(run_killed_anywhere, (str(out), words, at), place / f"p{at}", {})
        assert one.end(60).status == -signal.SIGKILL, moments[at]
        train(ranks, out, *words)
        assert left_of(out) == left_of(whole), moments[at]
    with capsys.disabled():
        print(f"\n{kind}: 30 of 30 at moments drawn from {len(found)}: everything is there, bit-identical")


def left_of(run):
    """What a run leaves behind, without its times: names of all files, and what is in those that are the same."""
    files = {str(path.relative_to(run)): path for path in run.rglob("*") if "stacks" not in path.parts}
    same = (".safetensors", "config.json", "tokenizer.json", "quarantine.jsonl", "done.json")
    held = {name: hash_file(path) for name, path in files.items() if name.endswith(same)}
    evals = [{k: v for k, v in row.items() if not k.endswith("_s")} for row in read_rows(run / "eval.jsonl")]
    return sorted(files), held, numbers(run), evals


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("rank", "at"), [(0, 30), (0, 75), (1, 2), (1, 5)])
def test_one_of_two_ranks_killed_in_a_save(room, words, rank, at):
    """Both shards or none: the survivor ends with an error, and the resumed run as the one nothing happened to."""
    shared = [*words, "parallel.dp_shard=2"]
    reference, out = room / "pair", room / f"pair-{rank}-{at}"
    if not reference.exists():
        RunningRanks(room / "r-pair", 2, run_plainly, str(reference), shared).results()
    running = RunningRanks(room / f"r-{rank}-{at}", 2, run_killed_rank, str(out), shared, rank, at).running
    ended = [one.end(60).status for one in running]
    assert ended[rank] == -signal.SIGKILL and ended[1 - rank] not in (0, -signal.SIGKILL)
    again = RunningRanks(room / f"a-{rank}-{at}", 2, run_plainly, str(out), shared).results()
    assert [r[0] for r in again] == [0, 0]
    assert_as_whole(out, reference)
    shards = [name for name in state_hashes(out)[1] if name.startswith("shard")]
    assert len(shards) == 2, "one of each rank"


# ---------------------------------------------------------------------------------------------------------- damaged


@pytest.fixture(scope="module")
def begun(room, ranks, words):
    """A run with three checkpoints, which was then told that it is not finished."""
    out = train(ranks, room / "begun", *words, "train.keep=3")
    (out / "done.json").unlink()
    return out


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_found_named_and_kept(damage, begun, tmp_path, ranks, capsys):
    out = shutil.copytree(begun, tmp_path / "run")
    apply, said = DAMAGES[damage]
    apply(out / "checkpoints" / "step-00000004")
    older = settle_checkpoints(out, ranks)
    printed = capsys.readouterr().err
    assert older.step == (2 if damage == "a shard is that of another step" else 3) and find_damage(older) is None
    (line,) = printed.splitlines()
    assert re.search(said, line), line
    (aside,) = (out / "checkpoints").glob("*.corrupt*")
    assert aside.name in line
    assert older.step in [c.step for c in list_checkpoints(out)]


def test_a_run_goes_on_from_the_one_before(begun, room, ranks, words, whole, capsys):
    out = shutil.copytree(begun, room / "fallen")
    flip(shard(out / "checkpoints" / "step-00000004"), 0.5)
    train(ranks, out, *words)
    said = capsys.readouterr().err
    assert "step-00000004 is damaged" in said and "resumed from step-00000003" in said
    assert numbers(out) == numbers(whole) and state_hashes(out) == state_hashes(whole)
    assert (out / "checkpoints" / "step-00000004.corrupt").is_dir()


def test_with_none_left_the_run_does_not_begin_anew(begun, room, ranks, words):
    out = shutil.copytree(begun, room / "lost")
    for folder in (out / "checkpoints").iterdir():
        os.truncate(shard(folder), 5)
    for _ in range(2):  # the second time there are only the ones set aside
        with pytest.raises(UserError, match=r"none of the 3 checkpoints is sound.*nothing was deleted"):
            train(ranks, out, *words)
    assert len(list((out / "checkpoints").glob("*.corrupt"))) == 3 and numbers(out) == numbers(begun)


def test_a_damaged_checkpoint_is_not_opened_for_anything_else(begun, room, ranks, words):
    out = shutil.copytree(begun, room / "opened")
    newest = list_checkpoints(out)[-1]
    flip(shard(newest.folder), 0.9)
    run = prepare_run(settings("model.path=builtin:tiny", f"output={out}", *words), ranks, out)
    with pytest.raises(UserError, match=r"the checkpoint is damaged .*shard-00000"):
        load_checkpoint(newest, run.wrapped.model, None)


def test_a_stale_checkpoint_of_a_later_step_costs_none_of_ours(begun, room, ranks):
    """What another run left there under a higher number neither counts nor goes."""
    from litchi.train.checkpoint import rotate_checkpoints

    out = shutil.copytree(begun, room / "stale")
    rotate_checkpoints(out, keep=1, best=None, written=3)
    assert [c.step for c in list_checkpoints(out)] == [3, 4]


# ---------------------------------------------------------------------------------------------------------- refused


def test_what_a_run_began_with_is_refused_by_name_when_it_changed(room, ranks, words, monkeypatch):
    """Data of equal length, the base, a template, pixel limits, a setting."""
    rows = [dict(row) for row in read_rows(room / "data" / "rerank.jsonl")]
    data = write_rows(room / "data" / "own.jsonl", rows)
    base = shutil.copytree(builtin_folder(), room / "base")
    mine = [w for w in words if not w.startswith(("data.train", "train.steps"))]
    mine += [f"data.train={data}", f"model.path={base}", "train.steps=1"]
    out = train(ranks, room / "origin", *mine)
    longer = [*mine, "train.steps=2"]

    def refused(match, *more, allowed=("train.steps",)):
        with pytest.raises(UsageError, match=match) as error:
            train(ranks, out, *longer, *more, allow_changed=allowed)
        return str(error.value)

    said = {"setting": refused("optim.lr was 0.002 and is 0.1", "optim.lr=0.1")}
    text = data.read_text()
    data.write_text(text.replace("hat", "cap", 1))
    said["data"] = refused(r"the training data changed: .*own.jsonl: sha256 was \w{12} and is")
    data.write_text(text + text.splitlines()[0].replace('"q0"', '"q99"') + "\n")
    said["data, longer"] = refused("the training data changed: .*own.jsonl: bytes was .* and is")
    data.write_text(text)
    config = (base / "config.json").read_text()
    (base / "config.json").write_text(config.replace("{", '{"note": 1, ', 1))
    said["base"] = refused("the base model changed: config was")
    (base / "config.json").write_text(config)
    pixels = base / "preprocessor_config.json"
    before = pixels.read_text()
    body = json.loads(before)
    body.pop("size", None)
    pixels.write_text(json.dumps({**body, "min_pixels": 3136, "max_pixels": 31360}))
    said["pixels"] = refused("the pixel limits changed: m.. was ")
    pixels.write_text(before)
    with monkeypatch.context() as patch:
        real = templates.find_template
        from dataclasses import replace

        patch.setattr(resume, "find_template", lambda name: replace(real(name), yes="Yes"))
        said["template"] = refused("the prompt template changed")
    for name, key in {"data": "data", "base": "base", "pixels": "data.pixels", "template": "data.template"}.items():
        assert f"--allow-changed {key}" in said[name]
    data.write_text(text.replace("hat", "cap", 1))
    train(ranks, out, *longer, allow_changed=["train.steps", "data"])
    assert [row["step"] for row in numbers(out)] == [1, 2]


# ------------------------------------------------------------------------------------------------------ disk, folder


def test_a_full_disk_ends_all_ranks_and_spares_older_checkpoints(room, words):
    """Files of one of two ranks may not grow: both end with the same line, and the run goes on when there is room."""
    out = room / "full"
    told = RunningRanks(room / "p-full", 2, run_limited, str(out), words, 1, 4096).results(60)
    for status, line, seconds, names, after, _ in told:
        assert status == 4 and seconds < 60 and after == 0
        assert "the checkpoint of step 3 cannot be written; older ones are intact" in line
        assert "EFBIG" in line and "shard-00001.safetensors" in line and "\n" not in line
        assert names == ["step-00000002"]
    assert told[0][1] == told[1][1] and len(numbers(out)) == STEPS


def test_sharded_state_is_whole_behind_an_evaluation(room):
    """A forward without gradients leaves embedding and head gathered, under other parameters than the optimizer's."""
    data = chat_rows(room / "chat", 4)
    words = [
        "task=chat", f"data.train={data}", f"data.eval={data}", "eval.max_new_tokens=1", "trainable.language=full",
        "trainable.head=full", "parallel.dp_shard=2", "train.steps=2", "train.global_batch_size=2",
        "train.export=never", "train.eval_every=1", "train.save_every=1",
    ]  # fmt: skip
    assert RunningRanks(room / "p-eval", 2, run_plainly, str(room / "eval"), words).results() == [[0, ""]] * 2
    for checkpoint in list_checkpoints(room / "eval"):
        names = checkpoint.manifest["tensors"]
        kinds = [{n.split(".", k)[k] for n in names if n.startswith(s)} for s, k in STATES.items()]
        assert kinds[0] == kinds[1] == kinds[2] and any("embed_tokens" in n for n in kinds[0])


STATES = {"model.": 1, "optim.exp_avg.": 2, "optim.exp_avg_sq.": 2}


@pytest.mark.parametrize("full", ["the metrics", "a full disk"])
def test_a_disk_that_fills_up_ends_the_run_with_one_line(full, room, words, ranks, monkeypatch, begun):
    """ENOSPC from the system at each place that is written; whatever was complete stays."""
    import errno

    out = shutil.copytree(begun, room / full.replace(" ", "-"))
    shutil.rmtree(out / "checkpoints" / "step-00000004")

    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(out / "there"))

    from litchi.train import metrics

    if full == "the metrics":
        monkeypatch.setattr(metrics, "append_line", refuse)
    else:
        monkeypatch.setattr(shards, "write_shard", refuse)
    with pytest.raises(MachineError, match=r"No space left on device \(ENOSPC, .* are free\)\. Make room") as error:
        train(ranks, out, *words, "train.keep=3")
    assert error.value.status == 4
    monkeypatch.undo()
    assert [c.step for c in list_checkpoints(out)] == [2, 3] and all(
        find_damage(c) is None for c in list_checkpoints(out)
    )
    assert not list((out / "checkpoints").glob(".*"))
    train(ranks, out, *words, "train.keep=3")
    assert numbers(out) == numbers(begun)


@pytest.mark.slow
def test_a_full_tmpfs(room, words, begun):
    """A real disk that is full. Needs the right to mount one."""
    place = room / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no right to mount a tmpfs")
    try:
        out = shutil.copytree(begun, place / "run")
        shutil.rmtree(out / "checkpoints" / "step-00000004")
        (place / "filler").write_bytes(b"x" * (shutil.disk_usage(place).free - 100_000))
        ((status, line),) = RunningRanks(room / "small-p", 1, run_plainly, str(out), words).results()
        assert status == 4 and "on its disk and" in line, line  # found before the first step
        ((status, line),) = RunningRanks(room / "small-q", 1, run_unasked, str(out), words).results()
        assert status == 4 and "ENOSPC" in line and "older ones are intact" in line
        assert [c.step for c in list_checkpoints(out)] == [2, 3]
        (place / "filler").unlink()
        ((status, _),) = RunningRanks(room / "small-r", 1, run_plainly, str(out), words).results()
        assert status == 0 and numbers(out) == numbers(begun)
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def run_unasked(ranks, out, words):
    """A run that does not look at the room on its disk first."""
    from litchi.train import loop

    loop.check_room = lambda run: "not looked"
    return run_plainly(ranks, out, words)


def test_room_is_looked_for_before_the_first_step(room, ranks, words, monkeypatch):
    usage = shutil.disk_usage(room)
    monkeypatch.setattr(resume.shutil, "disk_usage", lambda place: usage._replace(free=100_000))
    with pytest.raises(MachineError, match=r"the run needs \d+\.\d kB on its disk and 100\.0 kB are free") as error:
        train(ranks, room / "large", *words)
    assert "checkpoints of about" in str(error.value) and not (room / "large" / "metrics.jsonl").exists()


def test_the_size_of_a_checkpoint_is_estimated_well(whole, words, ranks):
    run = prepare_run(settings("model.path=builtin:tiny", f"output={whole}", *words), ranks, whole.parent)
    guess = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "refuse_full_disk", lambda *_, **figures: guess.update(figures) or "")
        setup.check_room(run)
    shards_bytes = [f["bytes"] for n, f in list_checkpoints(whole)[-1].manifest["files"].items() if n.startswith("sh")]
    assert guess["checkpoint_bytes"] == pytest.approx(sum(shards_bytes), rel=0.25)
    assert (guess["count"], guess["export_bytes"]) == (2, 0)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, ranks, words):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"output=.*file/run cannot be made: Not a directory\. Choose another"):
        train(ranks, tmp_path / "file" / "run", *words)


def test_two_runs_on_one_folder(room, ranks, words):
    """The second is refused and told of the first; a killed one does not block."""
    out = room / "taken"
    holder = Running(hold_lock, (str(out),), room / "holder", {})
    holder.wait_for("held")
    with pytest.raises(UsageError, match=rf"in use by another run .*process {holder.pid} on \S+, since 20") as error:
        train(ranks, out, *words)
    assert "\n" not in str(error.value)
    with pytest.raises(UsageError, match="in use by another run"):
        train(ranks, out, *words, fresh=True)
    assert sorted(p.name for p in out.iterdir()) == [".lock"]
    holder.kill()
    start = time.monotonic()
    train(ranks, out, *words, "train.steps=1")
    assert len(numbers(out)) == 1 and time.monotonic() - start < 30


# ---------------------------------------------------------------------------------------------------------- journal


def test_a_decision_is_taken_once_and_carried(tmp_path, ranks):
    journal = Journal.resume(tmp_path, ranks, step=None, carried=[])
    journal.note("start", step=1)
    first = journal.decide("micro_batch_tokens", step=3, tokens=512)
    assert journal.decide("micro_batch_tokens", step=3, tokens=999) == first, "asked again, it is not decided again"
    carried = list(journal.entries)
    journal.note("start", step=5)
    later = journal.decide("left_out", step=6, samples=["q1"])
    again = Journal.resume(tmp_path, ranks, step=4, carried=carried)
    assert again.entries == [*carried, later] == read_rows(tmp_path / "events.jsonl")
    assert again.made("micro_batch_tokens") == [first]
    assert Journal.resume(tmp_path, ranks, step=None, carried=[]).entries == []


def test_what_auto_stood_for_is_kept(begun, room, ranks, words):
    """A run that goes on elsewhere computes as it began."""
    out = shutil.copytree(begun, room / "moved")
    entry = next(e for e in read_rows(out / "events.jsonl") if e["event"] == "auto")
    assert entry == {"event": "auto", "step": 1, "decided": True, "precision": "fp32", "dtype": "float32"}
    newest = list_checkpoints(out)[-1]
    assert entry in newest.manifest["journal"]
    carried = [{**e, "precision": "bf16"} if e["event"] == "auto" else e for e in newest.manifest["journal"]]
    other = type(newest)(newest.folder, {**newest.manifest, "journal": carried})
    run = prepare_run(settings("model.path=builtin:tiny", f"output={out}", *words), ranks, out, resumed=other)
    assert run.wrapped.precision == "bf16" and run.config.train.precision == "auto"


def test_what_travels_with_a_checkpoint(begun):
    manifest = list_checkpoints(begun)[-1].manifest
    assert manifest["versions"].keys() >= {"litchi", "torch", "transformers", "python"}
    assert manifest["origin"].keys() == {"data", "base", "data.template", "data.pixels"}
    assert manifest["settings"]["train"]["save_every"] and manifest["numbers"] and manifest["template"]
    assert manifest["scaler"] is None and manifest["step"] == STEPS
    files = {p.name for p in (begun / "checkpoints" / "step-00000004").iterdir()}
    assert files >= {
        "manifest.json",
        "tensors.json",
        "shard-00000.safetensors",
        "tokenizer.json",
        "preprocessor_config.json",
    }
    assert not any(b"\x80\x02" == p.read_bytes()[:2] for p in begun.rglob("*") if p.is_file()), "a pickle"


def test_weights_alone_are_measured_but_not_resumed(room, ranks, words):
    light = [*words, "train.save=weights", "train.steps=2"]
    out = train(ranks, room / "light", *light)
    newest = list_checkpoints(out)[-1]
    assert newest.manifest["weights_only"] and all(n.startswith("model.") for n in newest.manifest["tensors"])
    run = prepare_run(settings("model.path=builtin:tiny", f"output={room / 'none'}", *words), ranks, room)
    assert load_checkpoint(newest, run.wrapped.model, None) == len(newest.manifest["tensors"]) > 50
    with pytest.raises(UserError, match="has weights alone, and a run cannot go on from it"):
        train(ranks, out, *light, "train.steps=3", allow_changed=["train.steps"])


def test_an_error_in_the_background_comes_with_the_next_step(begun, room, ranks, words, monkeypatch):
    out = shutil.copytree(begun, room / "background")
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    shutil.rmtree(out / "checkpoints" / "step-00000003")

    def refuse(*_, **__):
        raise RuntimeError("no such thing\nsecond line")

    monkeypatch.setattr(saver.ShardWriter, "write_data", refuse)
    with pytest.raises(UserError, match=r"checkpoint of step 3 cannot be written.*RuntimeError: no such thing$"):
        train(ranks, out, *words, "train.keep=3")
    assert len(numbers(out)) in (3, 4)


def test_a_large_file_is_hashed_by_pieces(tmp_path, monkeypatch):
    path = tmp_path / "rows"
    path.write_bytes(bytes(range(256)) * 64)
    whole = resume.hash_pieces(path)
    monkeypatch.setattr(resume, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(resume, "PIECE_BYTES", 100)
    pieces = resume.hash_pieces(path)
    flip(path, 0.9999)
    assert whole != pieces != resume.hash_pieces(path)


def test_bytes_are_written_for_people():
    assert [durable.format_bytes(n) for n in (12, 4.5e6, 7.25e10)] == ["12 bytes", "4.5 MB", "72.5 GB"]
