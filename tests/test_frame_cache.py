"""Decoded frames on disk: the same patches with and without, within a budget, and never what is damaged."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from clips import write_animation, write_clip
from runs import read_rows, train, write_rows

from litchi.batch import pictures
from litchi.data import frame_cache
from litchi.data.frame_cache import HEAD, STALE_S, FrameCache, sweep
from litchi.data.media import MediaError
from litchi.data.verdicts import cache_root
from litchi.data.video import video_patches
from litchi.types import Media

PLENTY = 2**30
FRAMES = ("data.video.frame_pixels.min=3136", "data.video.frame_pixels.max=3136")


@pytest.fixture(scope="module")
def spec(processor):
    return processor.with_video(min_pixels=3136, max_pixels=3136).vision


def entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*/*") if path.is_file())


def garble(path: str) -> None:
    """Other bytes that nothing tells from the old ones: the same size and time of change."""
    status = os.stat(path)
    Path(path).write_bytes(b"x" * status.st_size)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def same(found, wanted) -> bool:
    return found[1] == wanted[1] and found[0].dtype == np.uint8 and np.array_equal(found[0], wanted[0])


def test_what_is_kept_is_not_decoded_again(tmp_path, spec):
    cache = FrameCache(tmp_path / "kept", PLENTY)
    folder = tmp_path / "frames"
    folder.mkdir()
    clip = write_clip(tmp_path / "a.mp4", 12)
    gif = write_animation(tmp_path / "a.gif", 5)
    media = [Media("video", clip, end_s=1.0), Media("video", gif), Media("video", data=Path(gif).read_bytes())]
    wanted = [video_patches(one, spec=spec) for one in media]
    for _ in range(2):
        assert all(same(cache.patches(one, spec=spec), right) for one, right in zip(media, wanted, strict=True))
        garble(clip), garble(gif)
    assert len(entries(cache.folder)) == 3
    assert cache.patches(media[0], spec=spec)[0].flags.writeable  # as decoded ones are: torch warns of others
    with pytest.raises(MediaError):
        video_patches(media[0], spec=spec)


def test_another_file_part_rate_or_budget_is_another_entry(tmp_path, spec):
    cache = FrameCache(tmp_path / "kept", PLENTY)
    clip = write_clip(tmp_path / "a.mp4", 40)
    larger = replace(spec, video=replace(spec.video, max_pixels=12_544, min_pixels=6272))
    fewer = replace(spec, video=replace(spec.video, max_frames=2, min_frames=2))
    media = Media("video", clip)
    cases = [
        *((media, one) for one in (spec, larger, fewer)),
        *((replace(media, **part), spec) for part in ({"start_s": 1.0}, {"end_s": 1.0}, {"fps": 4.0}, {"nframes": 2})),
    ]
    for _ in range(2):
        for one, how in cases:
            assert same(cache.patches(one, spec=how), video_patches(one, spec=how))
    assert len(entries(cache.folder)) == len(cases)
    write_clip(tmp_path / "a.mp4", [np.full((48, 64, 3), 90, np.uint8)] * 40)  # the file is another now
    assert same(cache.patches(media, spec=spec), video_patches(media, spec=spec))
    assert len(entries(cache.folder)) == len(cases) + 1


@pytest.mark.parametrize("at", [0, 5, HEAD.size - 1, HEAD.size, -1, "cut", "head", "empty"])
def test_a_damaged_entry_is_decoded_again(tmp_path, spec, at, caplog):
    cache = FrameCache(tmp_path / "kept", PLENTY)
    media = Media("video", write_animation(tmp_path / "a.gif", 4))
    wanted = cache.patches(media, spec=spec)
    (entry,) = entries(cache.folder)
    whole = entry.read_bytes()
    data = bytearray(whole)
    if isinstance(at, int):
        data[at] ^= 1
    entry.write_bytes(data if isinstance(at, int) else whole[: {"cut": -1, "head": 10, "empty": 0}[at]])
    assert same(cache.patches(media, spec=spec), wanted) and "damaged" in caplog.text
    assert entry.read_bytes() == whole


def test_those_used_longest_ago_go_first(tmp_path, spec):
    media = [Media("video", write_animation(tmp_path / f"{n}.gif", 4, pause_ms=100 + n)) for n in range(5)]
    size = HEAD.size + video_patches(media[0], spec=spec)[0].nbytes
    cache = FrameCache(tmp_path / "kept", 3 * size + 10)
    names = []
    for number, one in enumerate(media[:3]):
        cache.patches(one, spec=spec)
        names += [path for path in entries(cache.folder) if path not in names]
        os.utime(names[-1], (number + 1, number + 1))
    cache.patches(media[0], spec=spec)  # used again
    for one in media[3:]:
        cache.patches(one, spec=spec)
    left = entries(cache.folder)
    assert len(left) == 3 and sum(path.stat().st_size for path in left) <= cache.limit_bytes
    assert names[0] in left and names[1] not in left and names[2] not in left


def test_what_is_larger_than_the_budget_is_not_kept(tmp_path, spec):
    cache = FrameCache(tmp_path / "kept", 1000)
    media = Media("video", write_animation(tmp_path / "a.gif", 4))
    assert same(cache.patches(media, spec=spec), video_patches(media, spec=spec)) and not entries(cache.folder)


def test_what_a_killed_process_left_is_cleared_away(tmp_path):
    (tmp_path / "ab").mkdir()
    old, fresh = tmp_path / "ab" / "abc.1-1", tmp_path / "ab" / "abc.2-2"
    for path in (old, fresh):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 2 * STALE_S,) * 2)
    sweep(tmp_path, 0)
    assert entries(tmp_path) == [fresh]


def test_where_nothing_can_be_kept_frames_are_decoded(tmp_path, spec, caplog):
    """Said once. (A folder that is a file: the tests' user may write anywhere else.)"""
    (tmp_path / "kept").write_text("")
    cache = FrameCache(tmp_path / "kept", PLENTY)
    for n in range(2):
        media = Media("video", write_animation(tmp_path / f"{n}.gif", 4))
        assert same(cache.patches(media, spec=spec), video_patches(media, spec=spec))
    assert caplog.text.count("frames cannot be kept") == 1


def _read_all(folder: Path, limit: int, paths: list[str], spec, seed: int) -> None:
    cache, dice = FrameCache(folder, limit), np.random.default_rng(seed)
    wanted = [video_patches(Media("video", path), spec=spec) for path in paths]
    for number in dice.integers(0, len(paths), 30).tolist():
        assert same(cache.patches(Media("video", paths[number]), spec=spec), wanted[number])


def test_processes_share_a_folder(tmp_path, spec):
    """With room for two of four, so that they remove what others read."""
    paths = [write_animation(tmp_path / f"{n}.gif", 2 + 2 * n) for n in range(4)]
    size = video_patches(Media("video", paths[3]), spec=spec)[0].nbytes
    context = get_context("fork")
    running = [
        context.Process(target=_read_all, args=(tmp_path / "kept", int(size * 1.5), paths, spec, seed))
        for seed in range(3)
    ]
    for one in running:
        one.start()
    for one in running:
        one.join(60)
    assert [one.exitcode for one in running] == [0, 0, 0] and entries(tmp_path / "kept")


def test_a_run_is_the_same_with_and_without(tmp_path, ranks):
    """The last one finds all frames, and none of the clips."""
    clips = [write_clip(tmp_path / f"{n}.mp4", 8 + 2 * n) for n in range(3)]
    rows = [
        {
            "messages": [
                {"role": "user", "content": [{"type": "video", "video": clip}, {"type": "text", "text": "What?"}]},
                {"role": "assistant", "content": "red " * (n + 1)},
            ]
        }
        for n, clip in enumerate(clips)
    ]
    data = f"data.train={write_rows(tmp_path / 'rows.jsonl', rows)}"
    words = ("task=chat", data, *FRAMES, "train.steps=4", "train.global_batch_size=2", "train.export=never")
    losses = {}
    for name, more in (("without", ()), ("with", ("data.video.cache_mb=64",)), ("kept", ("data.video.cache_mb=64",))):
        pictures.recent.clear()
        if name == "kept":
            for clip in clips:
                garble(clip)
        out = train(ranks, tmp_path / name, *words, *more)
        losses[name] = [line["loss"] for line in read_rows(out / "metrics.jsonl")]
        assert bool(entries(cache_root() / "frames")) == (name != "without")
    assert losses["without"] == losses["with"] == losses["kept"] and len(set(losses["with"])) == 4


def test_a_process_looks_at_the_folder_now_and_then(tmp_path):
    """First of all, and whenever it has added a part of the budget."""
    cache = FrameCache(tmp_path, 3200)
    assert [frame_cache._due(cache, 60) for _ in range(5)] == [True, False, True, False, True]
