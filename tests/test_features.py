"""Features of a frozen tower computed once: the store, what is not done again, and the same numbers in every layout."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from features_job import Counted, run_all
from PIL import Image
from processes import RunningRanks, server
from rendering import draw
from runs import chat_rows, read_rows, rerank_rows, settings, train, write_rows

from litchi.batch import pictures
from litchi.batch.loader import iterate_steps
from litchi.data import features as store_module
from litchi.data.features import RECORD, FeatureStore
from litchi.model.family import part
from litchi.scale import selfcheck
from litchi.train.losses import make_loss
from litchi.train.setup import prepare_run
from litchi.train.step import train_step
from litchi.types import Media

WIDTH = 8
FROZEN = "trainable={vision: frozen, merger: frozen, language: full}"


def open_store(folder, **how) -> FeatureStore:
    return FeatureStore(folder / "store", width=WIDTH, dtype=torch.float32, **how)


def some(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(rows, WIDTH)).astype(np.float32))


def picture(folder: Path, seed: int = 0, name: str = "a.png") -> Media:
    return Media("image", draw(folder / name, 56, 56, seed))


GRID = (1, 4, 4)

# ------------------------------------------------------------------------------------------------------- the store


def test_what_is_kept_is_found_by_other_processes_and_read_back(tmp_path):
    one, other = open_store(tmp_path), open_store(tmp_path, writer=1)
    media = [picture(tmp_path, n, f"{n}.png") for n in range(3)]
    one.keep([one.name(m, GRID) for m in media[:2]], [some(4, 0), some(2, 1)])
    other.keep([other.name(media[2], GRID)], [some(3, 2)])
    for store in (one, other, open_store(tmp_path)):
        store.refresh()
        entries = [store.find_media(m, GRID) for m in media]
        features, bad = store.read(entries)
        assert not bad and torch.equal(features, torch.cat([some(4, 0), some(2, 1), some(3, 2)]))
        assert store.find_media(media[0], (1, 2, 2)) is None, "another pixel budget"
    assert {f.name for f in (tmp_path / "store").iterdir()} == {
        *("00000.data", "00000.index", "00001.data", "00001.index")
    }


def test_a_picture_is_its_bytes(tmp_path):
    """The same under another path, and as bytes in the row; not the file that has the path now."""
    store, media = open_store(tmp_path), picture(tmp_path)
    data = Path(media.path).read_bytes()
    store.keep([store.name(media, GRID)], [some(4)])
    copy = tmp_path / "copy.png"
    copy.write_bytes(data)
    again = open_store(tmp_path)
    for same in (Media("image", str(copy)), Media("image", data=data)):
        assert again.find(again.name(same, GRID)) is not None
    draw(Path(media.path), 56, 56, seed=1)
    os.utime(media.path, ns=(1, 1))
    assert again.find_media(media, GRID) is None and again.find(again.name(media, GRID)) is None


@pytest.mark.parametrize("damage", ["a byte", "cut", "gone"])
def test_damaged_features_are_not_used_and_replaced(tmp_path, caplog, damage):
    store, media = open_store(tmp_path), [picture(tmp_path, n, f"{n}.png") for n in range(2)]
    names = [store.name(m, GRID) for m in media]
    store.keep(names, [some(4, 0), some(4, 1)])
    store.close()
    data = tmp_path / "store" / "00000.data"
    if damage == "a byte":
        body = bytearray(data.read_bytes())
        body[5] ^= 1
        data.write_bytes(body)
    elif damage == "cut":
        os.truncate(data, data.stat().st_size - 1)
    else:
        data.unlink()
    wrong = {"a byte": [0], "cut": [1], "gone": [0, 1]}[damage]
    store = open_store(tmp_path)
    found = [store.find(name) for name in names]
    _, bad = store.read(found)
    assert bad == wrong and caplog.text.count("are damaged") == 1
    assert [store.find(name) is None for name in names] == [n in wrong for n in range(2)]
    store.keep([names[n] for n in wrong], [some(4, n) for n in wrong])
    features, bad = store.read([store.find(name) for name in names])
    assert not bad and torch.equal(features, torch.cat([some(4, 0), some(4, 1)]))
    later = open_store(tmp_path)  # meets the old record first
    entries = [later.find(name) for name in names]
    later.read(entries)
    assert not later.read([later.find(name) for name in names])[1]


def test_a_torn_or_damaged_record_is_left_out(tmp_path, caplog):
    store, media = open_store(tmp_path), [picture(tmp_path, n, f"{n}.png") for n in range(3)]
    names = [store.name(m, GRID) for m in media]
    for n, name in enumerate(names):
        store.keep([name], [some(4, n)])
    store.close()
    index = tmp_path / "store" / "00000.index"
    body = bytearray(index.read_bytes())
    body[RECORD.itemsize + 60] ^= 1
    index.write_bytes(body[:-3])
    store = open_store(tmp_path)
    assert [store.find(name) is not None for name in names] == [True, False, False]
    assert "1 records are damaged" in caplog.text
    store.keep(names[1:], [some(4, 1), some(4, 2)])
    assert index.stat().st_size == 4 * RECORD.itemsize, "the torn record made room"
    features, bad = open_store(tmp_path).read([store.find(name) for name in names])
    assert not bad and torch.equal(features, torch.cat([some(4, n) for n in range(3)]))


def test_a_full_disk_is_said_once_and_stops_nothing(tmp_path, caplog, monkeypatch):
    store, media = open_store(tmp_path), picture(tmp_path)
    monkeypatch.setattr(store_module, "SPARE_BYTES", 2**62)
    for _ in range(2):
        store.keep([store.name(media, GRID)], [some(4)])
    assert store.find_media(media, GRID) is None and caplog.text.count("cannot be kept") == 1


def _append(folder, number, together):
    store = open_store(Path(folder))
    names = [store.name(Media("image", data=f"{number}/{n}".encode()), GRID) for n in range(50)]
    for n, name in enumerate(names):
        store.keep([name], [some(2, 100 * number + n)])
        if n == 0:
            together.wait(60)  # each has a file of its own now


def test_two_runs_at_once_do_not_break_each_other(tmp_path):
    together = server.Barrier(3)  # of the fork server: this process has threads, so it cannot be forked itself
    running = [server.Process(target=_append, args=(str(tmp_path), number, together)) for number in range(3)]
    for process in running:
        process.start()
    for process in running:
        process.join(90)
    store = open_store(tmp_path)
    assert len(store) == 150 and len(list((tmp_path / "store").glob("*.data"))) == 3
    for number in range(3):
        for n in range(50):
            entry = store.find(store.name(Media("image", data=f"{number}/{n}".encode()), GRID))
            features, bad = store.read([entry])
            assert not bad and torch.equal(features, some(2, 100 * number + n))


# ------------------------------------------------------------------------------------------------------- whole runs


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LITCHI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def losses(run) -> list[float]:
    return [line["loss"] for line in read_rows(run / "metrics.jsonl")]


TASKS = {"chat": (chat_rows, "eval.metrics=[exact_match]"), "rerank": (rerank_rows, "eval.metrics=[mrr@10]")}


def run_words(task, data, features, *more):
    return (
        *(f"task={task}", f"data.train={data}", f"data.eval={data}", TASKS[task][1], FROZEN, "optim.lr=0.002"),
        *("optim.name=sgd", "train.global_batch_size=2", "train.epochs=2", "eval.max_new_tokens=4"),
        *("train.export=never", f"train.features={features}", *more),
    )


@pytest.mark.parametrize("task", TASKS)
def test_training_and_measuring_give_the_numbers_of_off(ranks, cache, tmp_path, task):
    data = TASKS[task][0](tmp_path / "data")
    ran, counts = {}, {}
    for name, features in (("off", "off"), ("cache", "cache"), ("again", "cache"), ("precompute", "precompute")):
        if name == "precompute":
            os.environ["LITCHI_CACHE"] = str(cache / "other")
        with Counted() as counted:
            rehearsed = f"train.rehearse={json.dumps(name != 'cache')}"  # which computes what it does not keep
            ran[name] = train(ranks, tmp_path / name, *run_words(task, data, features, rehearsed))
        counts[name] = counted.taken()
    assert losses(ran["cache"]) == pytest.approx(losses(ran["off"]), rel=1e-6) and len(losses(ran["off"])) == 6
    assert losses(ran["again"]) == losses(ran["cache"]) == losses(ran["precompute"]), "bit by bit"
    measured = [read_rows(run / "eval.jsonl")[-1]["metrics"] for run in ran.values()]
    assert all(one == pytest.approx(measured[0], rel=1e-5) for one in measured) and len(measured[0]) > 1
    shown = counts["cache"]["encoded"]
    assert shown > 2 and counts["cache"]["decoded"] == counts["precompute"]["decoded"] == shown
    assert counts["precompute"]["encoded"] == shown and counts["again"] == {"tower": 0, "encoded": 0, "decoded": 0}
    assert counts["off"]["decoded"] == shown and counts["off"]["encoded"] == 0 < counts["off"]["tower"]


@pytest.mark.parametrize("workers", [0, 2])
def test_from_the_second_epoch_nothing_is_decoded(ranks, cache, tmp_path, monkeypatch, workers):
    """Nor does the tower run, also when workers prepare batches several epochs ahead."""
    data, log = rerank_rows(tmp_path / "data"), tmp_path / "decoded"
    words = [f"data.train={data}", "task=rerank", FROZEN, "train.features=cache", f"data.workers={workers}"]
    words.append("train.rehearse=false")
    with Counted() as counted:
        count = pictures.decode_image

        def decode_image(media, **how):
            with log.open("a") as file:  # workers count for themselves
                file.write(f"{media.name}\n")
            return count(media, **how)

        monkeypatch.setattr(pictures, "decode_image", decode_image)
        monkeypatch.setattr(pictures.recent, "limit_bytes", 0)
        train(ranks, tmp_path / "run", *words, "train.global_batch_size=2", "train.epochs=3", "train.export=never")
    names = log.read_text().split()
    assert len(names) == len(set(names)) == counted.encoded == counted.tower == 9


def test_a_picture_that_micro_batches_share_is_decoded_once(ranks, tmp_path):
    one = draw(tmp_path / "one.png", 56, 56)
    rows = [{"query": f"bag {n}", "pos_doc": {"image": one}, "neg_docs": ["a hat"]} for n in range(4)]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    words = ["task=rerank", f"data.train={data}", FROZEN, "train.global_batch_size=4", "train.micro_batch_tokens=100"]
    with Counted() as counted:
        train(ranks, tmp_path / "run", *words, "train.steps=1", "train.export=never")
    assert counted.decoded == 1 < counted.tower


def test_recent_patches_keep_to_their_limit():
    recent = pictures.RecentPatches(100)
    for n in range(3):
        recent.add(n, np.zeros(40, np.uint8))
        recent.find(0)
    assert list(recent.held) == [2, 0] and recent.held_bytes == 80 and recent.find(1) is None


def test_a_resumed_run_ends_as_the_uninterrupted_one(ranks, cache, tmp_path, monkeypatch):
    data = rerank_rows(tmp_path / "data")
    words = run_words("rerank", data, "cache", "data.shuffle=true", "data.negatives=1", "data.eval=[]")
    whole = train(ranks, tmp_path / "whole", *words)
    monkeypatch.setenv("LITCHI_CACHE", str(tmp_path / "second"))
    short = train(ranks, tmp_path / "short", *words, "train.save_every=2")
    for folder in sorted((short / "checkpoints").iterdir())[1:]:
        (folder / "manifest.json").unlink()
    (short / "done.json").unlink()
    assert losses(train(ranks, short, *words, "train.save_every=2")) == losses(whole)


def test_a_changed_picture_gives_its_new_features(ranks, cache, tmp_path):
    data = chat_rows(tmp_path / "data")
    changed = next(Path(tmp_path / "data").rglob("*.png"))
    train(ranks, tmp_path / "before", *run_words("chat", data, "cache", "data.eval=[]"))
    draw(changed, *Image.open(changed).size, seed=77)
    ran = [train(ranks, tmp_path / f, *run_words("chat", data, f, "data.eval=[]")) for f in ("cache", "off")]
    assert losses(ran[0]) == pytest.approx(losses(ran[1]), rel=1e-6)
    assert losses(ran[0]) != pytest.approx(losses(tmp_path / "before"), rel=1e-4)


def test_a_damaged_store_is_repaired_by_the_run_that_meets_it(ranks, cache, tmp_path, caplog):
    data = chat_rows(tmp_path / "data")
    sound = train(ranks, tmp_path / "sound", *run_words("chat", data, "precompute", "data.eval=[]"))
    (body,) = cache.rglob("*.data")
    content = bytearray(body.read_bytes())
    content[10] ^= 255
    body.write_bytes(content)
    with Counted() as counted:
        words = run_words("chat", data, "cache", "data.eval=[]", "train.rehearse=false")
        again = train(ranks, tmp_path / "again", *words)
    assert losses(again) == losses(sound)
    assert counted.encoded == counted.decoded == 1 and caplog.text.count("are damaged") == 1


@pytest.mark.needs_gpu
def test_after_precomputing_a_gpu_is_free_of_the_tower(ranks, cache, tmp_path):
    """Needs a GPU: the tower waits in the machine's memory, and steps do as without."""
    data, ran = chat_rows(tmp_path / "data"), {}
    for features in ("off", "precompute"):
        (tmp_path / features).mkdir()
        config = settings("model.path=builtin:tiny", *run_words("chat", data, features))
        run = prepare_run(config, ranks, tmp_path / features)
        tower = part(run.wrapped.owner.hf, run.wrapped.owner.family.vision)
        assert next(tower.parameters()).device.type == ("cpu" if features == "precompute" else "cuda")
        _, count_units = make_loss(run.config.loss)
        steps = iterate_steps(run.plan, 1, 6, workers=0, count_units=count_units)
        ran[features] = [train_step(run.trainer, step, batches, 1.0).loss for step, batches, _ in steps]
        run.log.close()
    assert ran["precompute"] == pytest.approx(ran["off"], rel=2e-2)


# ------------------------------------------------------------------------------------------------------- layouts

LAYOUTS = {  # two ranks each: what is run, on a cache of their own; `again` on the one that `cache` has filled
    "DDP 2": ("cache", "again"),
    "FSDP2 2": ("cache", "precompute"),
    "TP 2": ("cache", "again", "precompute"),
    "CP 2": ("cache",),
    "PP 2, 1F1B": ("cache", "precompute"),
}
ONE = (("chat", "off"), ("rerank", "off"), ("chat", "cache"))
SETTINGS = [*selfcheck.SETTINGS, "model.path=builtin:tiny", FROZEN, "train.steps=2"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """name -> what each rank says, in the layouts of two ranks and in one process."""
    folder = tmp_path_factory.mktemp("layouts")
    selfcheck.write_rows(folder)
    words = {
        task: [*SETTINGS, *(word.format(folder=folder) for word in more)] for task, more in selfcheck.TASKS.items()
    }
    one = {f"{task} {f}": [*words[task], f"train.features={f}"] for task, f in ONE}
    many = {}
    for layout, ways in LAYOUTS.items():
        parallel = f"parallel={json.dumps(selfcheck.LAYOUTS[layout])}"
        chat = [*words["chat"], parallel, "train.features=cache"]
        rerank = [*words["rerank"], parallel, "train.features=precompute"]
        jobs = {"cache": chat, "cache#again": chat, "precompute": rerank}
        many |= {f"{layout} {name}": job for name, job in jobs.items() if name.removeprefix("cache#") in ways}
    for f in ("off", "cache"):
        half = [*words["chat"], "train.precision=bf16", f"train.features={f}"]
        one[f"half {f}"], many[f"sharded half {f}"] = half, [*half, 'parallel={"dp_shard": 2}']
    running = [RunningRanks(folder / str(n), n, run_all, str(folder), jobs) for n, jobs in ((1, one), (2, many))]
    alone, both = (ranks.results() for ranks in running)
    return {name: [rank[name] for rank in both] for name in many} | {name: [alone[0][name]] for name in one}


WAYS = [(layout, way) for layout, ways in LAYOUTS.items() for way in ways]


@pytest.mark.parametrize(("layout", "way"), WAYS)
def test_every_layout_gives_the_numbers_of_one_process_without(ran, layout, way):
    ranks = ran[f"{layout} {'cache#again' if way == 'again' else way}"]
    alone = ran["rerank off" if way == "precompute" else "chat off"][0]
    assert ranks[0]["losses"] == ranks[1]["losses"] == pytest.approx(alone["losses"], rel=1e-6)
    assert ranks[0]["norms"] == pytest.approx(alone["norms"], rel=1e-4)
    assert alone["encoded"] == 0 < alone["tower"]
    if way == "again":
        assert ranks[0]["losses"] == ran[f"{layout} cache"][0]["losses"], "bit by bit"


@pytest.mark.parametrize(("layout", "way"), WAYS)
def test_ranks_share_what_they_compute(ran, layout, way):
    assert ran["chat cache"][0]["encoded"] == 4  # three pictures and a video
    encoded = [rank["encoded"] for rank in ran[f"{layout} {'cache#again' if way == 'again' else way}"]]
    if way == "cache":
        assert 4 <= sum(encoded) <= 8
    elif way == "precompute":
        assert sum(encoded) == 4 and (min(encoded) > 0 or layout.startswith("PP"))
    else:
        assert encoded == [0, 0]


@pytest.mark.parametrize(("name", "wrapper"), [("half", "none"), ("sharded half", "FSDP2")])
def test_bf16_computes_features_as_without(ran, name, wrapper):
    """By autocast, and where FSDP2 casts weights: the tower it leaves whole is cast alike."""
    off, kept = ran[f"{name} off"][0], ran[f"{name} cache"][0]
    assert kept["wrapper"] == off["wrapper"] == wrapper and kept["losses"] == pytest.approx(off["losses"], rel=2e-3)
    assert kept["encoded"] > 0 and off["losses"] != ran["chat off"][0]["losses"]
