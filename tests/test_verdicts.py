"""Verdicts on pictures: found again while the file is unchanged, looked for again when it is not."""

import multiprocessing
import os
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from litchi.data import verdicts
from litchi.data.media import Header
from litchi.data.verdicts import Verdict, cache_root, check_media
from litchi.types import Media


@pytest.fixture
def looked_at(monkeypatch):
    """Record the pictures that are really opened."""
    opened = []

    def look(media, **options):
        opened.append(media.name)
        return real(media, **options)

    real = verdicts._look
    monkeypatch.setattr(verdicts, "_look", look)
    return opened


def draw(path, size=(30, 20)):
    pixels = np.random.default_rng(len(path.name)).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return Media("image", path=str(path))


def damage(media):
    """Flip a byte of the pixels; the time of change is set, so that two writes within a clock tick differ too."""
    path = Path(media.path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9))
    return media


def test_verdicts_name_what_is_wrong(tmp_path):
    good, bad, gone = draw(tmp_path / "good.png"), damage(draw(tmp_path / "b.png")), Media("image", path="/none.png")
    video, inline = Media("video", path=good.path), Media("image", data=b"")
    found = check_media([good, bad, gone, video, inline, good], decode=True)
    assert list(found) == [m.key for m in (good, bad, gone, video, inline)]
    assert found[good.key] == Verdict(30, 20, 1)
    assert found[good.key].header == Header(30, 20, 1)
    codes = [found[m.key].code for m in (bad, gone, video, inline)]
    assert codes == ["unreadable_media", "media_missing", None, "unreadable_media"]  # a still picture is a short video
    assert "checksum" in found[bad.key].reason
    assert check_media([bad], decode=False)[bad.key].code is None  # headers do not show it


def test_unchanged_pictures_are_not_opened_again(tmp_path, looked_at):
    cache = tmp_path / "cache" / "media.sqlite"
    media = [draw(tmp_path / f"{i}.png") for i in range(3)] + [Media("image", data=b"not a picture")]
    first = check_media(media, decode=True, cache=cache)
    assert len(looked_at) == 4
    assert check_media(reversed(media), decode=True, cache=cache) == first
    assert check_media(media, decode=False, cache=cache) == first
    assert len(looked_at) == 4


def test_changed_and_missing_pictures_are_opened_again(tmp_path, looked_at):
    cache = tmp_path / "media.sqlite"
    one, two, gone = draw(tmp_path / "1.png"), draw(tmp_path / "2.png"), Media("image", path=str(tmp_path / "3.png"))
    check_media([one, two, gone], decode=True, cache=cache)
    damage(two)
    draw(tmp_path / "3.png")
    looked_at.clear()
    found = check_media([one, two, gone], decode=True, cache=cache)
    assert looked_at == [two.path, gone.path]
    assert [found[m.key].code for m in (one, two, gone)] == [None, "unreadable_media", None]


def test_a_look_at_headers_does_not_stand_for_decoding(tmp_path, looked_at):
    cache, media = tmp_path / "media.sqlite", damage(draw(tmp_path / "1.png"))
    assert check_media([media], decode=False, cache=cache)[media.key].code is None
    assert check_media([media], decode=True, cache=cache)[media.key].code == "unreadable_media"
    assert check_media([media], decode=False, cache=cache)[media.key].code == "unreadable_media"
    assert len(looked_at) == 2


def test_each_window_and_each_set_of_rules_has_its_own_verdicts(tmp_path, looked_at, monkeypatch):
    cache, path = tmp_path / "media.sqlite", tmp_path / "deep.tiff"
    Image.fromarray(np.array([[-1, 70000]], np.int32)).save(path)
    media = Media("image", path=str(path))
    assert "data.window" in check_media([media], decode=True, cache=cache)[media.key].reason
    assert check_media([media], decode=True, cache=cache, window=(0, 70000))[media.key].code is None
    monkeypatch.setattr(verdicts, "RULES", -1)
    check_media([media], decode=True, cache=cache)
    assert len(looked_at) == 3


def test_workers_find_what_one_process_finds(tmp_path, monkeypatch):
    monkeypatch.setattr(verdicts, "LOOK_CHUNK", 2)
    media = [draw(tmp_path / f"{i}.png", (28 + i, 28)) for i in range(9)]
    damage(media[4])
    seen = []
    found = check_media(media, decode=True, workers=2, progress=lambda done, total: seen.append((done, total)))
    assert found == check_media(media, decode=True)
    assert list(found) == [m.key for m in media]
    assert [found[m.key].width for m in media] == [28, 29, 30, 31, 0, 33, 34, 35, 36]
    assert seen[0] == (0, 9) and seen[-1] == (9, 9) and seen == sorted(seen)


def check_slice(paths, cache):
    check_media([Media("image", path=p) for p in paths], decode=True, cache=cache)


def test_several_processes_write_one_cache(tmp_path, monkeypatch, looked_at):
    monkeypatch.setattr(verdicts, "LOOK_CHUNK", 2)
    media, cache = [draw(tmp_path / f"{i}.png") for i in range(24)], tmp_path / "media.sqlite"
    fork = multiprocessing.get_context("fork")
    slices = [[m.path for m in media[rank::3]] for rank in range(3)]
    processes = [fork.Process(target=check_slice, args=(paths, cache)) for paths in slices]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(check_media(media, decode=True, cache=cache)) == 24
    assert looked_at == []  # the children's lists are theirs


def test_a_damaged_cache_costs_a_warning_and_a_second_look(tmp_path, caplog):
    cache, media = tmp_path / "media.sqlite", draw(tmp_path / "1.png")
    cache.write_bytes(b"no database" * 100)
    assert check_media([media], decode=True, cache=cache)[media.key] == Verdict(30, 20, 1)
    assert [str(cache) in message for message in caplog.messages] == [True, True]
    assert "cannot be read" in caplog.messages[0]


def test_many_remembered_pictures_need_few_queries(tmp_path, monkeypatch, looked_at):
    monkeypatch.setattr(verdicts, "READ_CHUNK", 50)
    monkeypatch.setattr(verdicts, "LOOK_CHUNK", 1000)
    cache = tmp_path / "media.sqlite"
    media = [Media("image", data=b"%d" % i) for i in range(120)]
    first = check_media(media, decode=True, cache=cache)
    queries = []
    connect = sqlite3.connect

    def traced(*args, **options):
        database = connect(*args, **options)
        database.set_trace_callback(queries.append)
        return database

    monkeypatch.setattr(verdicts.sqlite3, "connect", traced)
    assert check_media(media, decode=True, cache=cache) == first
    assert len([q for q in queries if q.startswith("SELECT")]) == 3
    assert len(looked_at) == 120


def test_the_cache_lives_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("LITCHI_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.setenv("LITCHI_CACHE", "")
    assert cache_root() == Path.home() / ".cache" / "litchi"
