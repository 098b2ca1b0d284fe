"""Videos read: by time stamps, in a process that is watched; the sampling rule against the published one."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import av
import numpy as np
import psutil
import pytest
import torch
from clips import cut_file, frame, number_of, write_animation, write_clip, write_sound
from processes import run_litchi

from litchi.data.decoder import HANG_S, Decoder, own_decoder
from litchi.data.media import MediaError
from litchi.data.scenes import find_cuts, find_scenes
from litchi.data.timeline import count_frames, pick_frames
from litchi.data.verdicts import check_media
from litchi.data.video import fit_video, list_frames, read_video_header, step_of, video_patches, video_size
from litchi.types import Media, VideoSpec, VisionSpec

SPEC = VisionSpec(14, 2, 2, 112, 3136, 12_845_056, (0.5,) * 3, (0.5,) * 3)
SMALL = replace(SPEC, video=VideoSpec(min_pixels=3136, max_pixels=3136))


def clip(path, **cut) -> Media:
    return Media("video", str(path), **cut)


def taken(media: Media, spec: VisionSpec = SPEC) -> list[int]:
    """Numbers of the frames that are taken."""
    from litchi.data.video import _taken

    return [number_of(rgb) for rgb in _taken(media, video_size(media, read_video_header(media), spec)[2])]


def refused(media: Media) -> str:
    """The code of what is found when the whole clip is decoded."""
    (verdict,) = check_media([media], decode=True).values()
    assert verdict.code and verdict.reason
    return verdict.code


# ---- The rule


def published_rule(total: int, rate: float, fps: float, min_frames=4, max_frames=768) -> list[int]:
    """qwen-vl-utils, restated: which frames of a clip of evenly spaced ones are taken."""
    least, most = math.ceil(min_frames / 2) * 2, math.floor(min(max_frames, total) / 2) * 2
    wanted = min(min(max(total / rate * fps, least), most), total)
    return torch.linspace(0, total - 1, math.floor(wanted / 2) * 2, dtype=torch.float64).round().long().tolist()


def published_size(height: int, width: int, frames: int, total_pixels: float, low=128 * 784, high=768 * 784):
    """Its size of a frame."""
    high = max(min(high, total_pixels / frames * 2), int(low * 1.05))
    h, w = max(28, round(height / 28) * 28), max(28, round(width / 28) * 28)
    if h * w > high:
        beta = math.sqrt(height * width / high)
        h, w = math.floor(height / beta / 28) * 28, math.floor(width / beta / 28) * 28
    elif h * w < low:
        beta = math.sqrt(low / (height * width))
        h, w = math.ceil(height * beta / 28) * 28, math.ceil(width * beta / 28) * 28
    return h, w


def test_sampling_is_the_published_rule():
    """Thirty made-up (length, fps, budget): the same frames, the same size, time by the frames really taken."""
    draw = random.Random(7)
    seen = set()
    for _ in range(30):
        rate = draw.choice([10, 24, 25, 30, 60, 30000 / 1001])
        total, fps = draw.randint(2, 40_000), draw.choice([0.25, 0.5, 1, 2, 4, 8])
        budget = draw.choice([90_316_800, 20_000_000, 4_000_000, 400_000])
        height, width = draw.randint(60, 1200), draw.randint(60, 2000)
        spec = replace(SPEC, video=VideoSpec(fps=fps, total_pixels=budget))
        count = count_frames(total, total / rate, spec.video)
        frames = published_rule(total, rate, fps)
        assert pick_frames(np.arange(total) * 512, count).tolist() == frames
        size = width, height, count, total / rate
        h, w = published_size(height, width, count, budget)
        assert fit_video(size, spec) == (count // 2, h // 14, w // 14)
        assert step_of(size, spec) == pytest.approx(2 / (len(frames) / (total / rate)), rel=1e-12)
        seen.add((count in (4, 768), h * w < 150_000))
    assert len(seen) == 4  # limits reached and not reached


def test_few_frames():
    spec = VideoSpec()
    assert [count_frames(n, 100.0, spec) for n in (1, 2, 3, 4, 5)] == [1, 2, 2, 4, 4]
    assert count_frames(100, 10.0, spec, wanted=7) == 8 and count_frames(5, 1.0, spec, wanted=100) == 4
    assert pick_frames(np.array([5]), 1).tolist() == [0]


def test_frames_are_nearest_in_time():
    """Ten frames in the first second, then one a second: half of the time has a tenth of the frames."""
    times = np.array([*range(0, 1000, 100), *range(1000, 11_000, 1000)])
    assert pick_frames(times, 6).tolist() == [0, 11, 13, 15, 17, 19]  # 0, 2, 4, 6, 8, 10 s
    assert pick_frames(np.array([0, 1000, 4000]), 5).tolist() == [0, 1, 1, 2, 2]  # 2 s is nearer to 1 than to 4


# ---- Formats


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        ("a.mp4", "libx264"),
        ("a.mkv", "libx264"),
        ("a.webm", "libvpx-vp9"),
        ("a.avi", "mpeg4"),
        ("a.ts", "libx264"),
        ("vp8.webm", "libvpx"),
    ],
)
def test_containers(tmp_path, name, codec):
    media = clip(write_clip(tmp_path / name, 20, codec=codec))
    header = read_video_header(media)
    assert (header.width, header.height, header.frames) == (64, 48, 20)
    assert header.seconds == pytest.approx(2, abs=0.002) and not header.note
    assert taken(media) == [0, 6, 13, 19]
    assert taken(replace(media, fps=4)) == [0, 3, 5, 8, 11, 14, 16, 19]
    assert check_media([media], decode=True)[media.key].header == header
    data = Media("video", data=Path(media.path).read_bytes())
    assert taken(data) == [0, 6, 13, 19] and data.key != media.key


@pytest.mark.parametrize("name", ["a.gif", "a.webp"])
def test_animations(tmp_path, name):
    """Frames of 100, 100, ... ms, then a long one: the last is shown for two seconds."""
    media = clip(write_animation(tmp_path / name, 5, pause_ms=[100, 100, 100, 100, 2000]))
    header = read_video_header(media)
    assert (header.width, header.height, header.frames, header.seconds) == (64, 48, 5, 2.4)
    assert taken(media) == [0, 1, 3, 4] and check_media([media], decode=True)[media.key].header == header


def test_an_animation_without_pauses_and_with_clear_parts(tmp_path):
    from PIL import Image

    pictures = [Image.new("RGBA", (28, 28), (200, 0, 0, 255 * (n % 2))) for n in range(4)]
    pictures[0].save(tmp_path / "clear.gif", save_all=True, append_images=pictures[1:], duration=0, disposal=2)
    media = clip(tmp_path / "clear.gif")
    line = own_decoder().scan(media)
    assert read_video_header(media).seconds == pytest.approx(0.1 * len(line.times))
    first, second = list(own_decoder().frames(media, line, line.times[:2].tolist()))
    assert first.min() == 255 and second[0, 0, 0] == 200  # clear is white


def test_uneven_and_broadcast_rates(tmp_path):
    times = [*range(0, 10, 1), *range(10, 51, 10)]  # tenths of a second, then whole ones
    media = clip(write_clip(tmp_path / "vfr.mkv", 15, times=times, tick="1/10", rate=10))
    assert read_video_header(media).seconds == pytest.approx(5.1, abs=1.01)
    assert taken(replace(media, nframes=6)) == [0, 10, 11, 12, 13, 14]  # at 0, 1, 2, 3, 4, 5 s
    broadcast = clip(write_clip(tmp_path / "ntsc.mp4", 20, rate=Fraction(30000, 1001)))
    assert read_video_header(broadcast).seconds == pytest.approx(20 * 1001 / 30000, rel=1e-9)


def test_a_stream_without_time_stamps_has_the_rate_of_its_row(tmp_path):
    path = write_clip(tmp_path / "raw.mjpeg", 20, codec="mjpeg")
    header, told = read_video_header(clip(path)), read_video_header(clip(path, fps=5))
    assert (header.note, header.seconds) == ("no_frame_rate", 0.8)
    assert (told.note, told.seconds, told.frames) == ("", 4.0, 20)
    assert taken(clip(path, fps=5)) == list(range(20)) and taken(clip(path)) == [0, 6, 13, 19]
    assert taken(clip(path, fps=5, start_s=2.0)) == list(range(10, 20))


@pytest.mark.parametrize("turn", [90, 180, -90])
def test_turned_clips_stand_upright(tmp_path, turn):
    media = clip(write_clip(tmp_path / "turned.mp4", 4, turn=turn))
    line = own_decoder().scan(media)
    (rgb, *_) = own_decoder().frames(media, line, line.times.tolist())
    upright = np.rot90(frame(0), turn // 90)
    assert (line.height, line.width) == upright.shape[:2] == rgb.shape[:2]
    assert np.abs(rgb.astype(int) - upright).mean() < 8


def test_a_folder_and_a_list_of_frames(tmp_path):
    from PIL import Image

    for number in (10, 9, 2, 1, 11):
        Image.fromarray(frame(number)).save(tmp_path / f"f{number}.png")
    (tmp_path / "notes.txt").write_text("not a frame")
    folder = clip(tmp_path, fps=1)
    names = [Path(path).name for path in list_frames(folder)]
    assert names == ["f1.png", "f2.png", "f9.png", "f10.png", "f11.png"]
    assert taken(folder) == [1, 2, 9, 10, 11]
    size = video_size(folder, read_video_header(folder), SMALL)
    assert size == (64, 48, 5, 5.0) and step_of(size, SMALL) == 2.0
    patches, grid = video_patches(folder, spec=SMALL)
    assert grid[0] == 3 and patches.shape == (math.prod(grid), 3 * 2 * 196)
    last = patches.reshape(3, -1, 3, 2, 196)[2]
    assert (last[:, :, 0] == last[:, :, 1]).all()  # the fifth frame is repeated
    listed = Media("video", frames=list_frames(folder)[1:4])
    header = read_video_header(listed)
    assert (header.note, header.seconds, header.frames) == ("no_frame_rate", 1.5, 3) and taken(listed) == [2, 9, 10]
    Image.fromarray(frame(3, (28, 28))).save(tmp_path / "f12.png")
    assert refused(folder) == "unreadable_media"  # of another size


def test_single_and_odd_frames_are_padded(tmp_path):
    patches, grid = video_patches(clip(write_clip(tmp_path / "one.mp4", 1)), spec=SMALL)
    assert grid[0] == 1
    frames = patches.reshape(-1, 3, 2, 196)
    assert (frames[:, :, 0] == frames[:, :, 1]).all()
    two, _ = video_patches(clip(write_clip(tmp_path / "three.mp4", 3)), spec=SMALL)
    frames = two.reshape(-1, 3, 2, 196)
    assert (frames[:, :, 0] != frames[:, :, 1]).any()


def test_patches_are_those_of_the_family_processor(tmp_path):
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    media = clip(write_clip(tmp_path / "a.mp4", 20))
    spec = replace(SPEC, video=VideoSpec(min_pixels=3136, max_pixels=9000))
    patches, grid = video_patches(media, spec=spec)
    line = own_decoder().scan(media)
    frames = np.stack(list(own_decoder().frames(media, line, line.times[[0, 6, 13, 19]].tolist())))
    size = {"shortest_edge": 3136, "longest_edge": 9000}
    theirs = Qwen2VLVideoProcessor(size=size, cap_pixels_per_frame=True, do_normalize=False, do_rescale=False)
    found = theirs([torch.from_numpy(frames).permute(0, 3, 1, 2)], return_tensors="pt")
    assert found["video_grid_thw"].tolist() == [list(grid)]
    assert torch.equal(found["pixel_values_videos"].to(torch.uint8), torch.from_numpy(patches))


# ---- Parts of a video


def test_frames_that_an_edit_cut_away_are_not_taken(tmp_path):
    """As a phone trims a clip: all frames stay in the file, and its edit list begins at the fifth."""
    whole, trimmed = write_clip(tmp_path / "whole.mp4", 20, bf="0"), tmp_path / "trimmed.mp4"
    with av.open(whole) as source, av.open(str(trimmed), "w", options={"avoid_negative_ts": "disabled"}) as out:
        stream = out.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None:
                shift = int(0.5 / packet.time_base)
                packet.pts, packet.dts, packet.stream = packet.pts - shift, packet.dts - shift, stream
                out.mux(packet)
    with av.open(str(trimmed)) as found:
        assert found.streams.video[0].frames == 20
    media = clip(trimmed, nframes=8)
    header = read_video_header(media)
    assert (header.frames, header.seconds) == (15, 1.5) and taken(media) == [5, 7, 9, 11, 13, 15, 17, 19]
    assert check_media([media], decode=True)[media.key].code is None


def test_a_part_has_its_own_frames_and_costs_its_own_length(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (400, 48, 64, 3), np.uint8)
    noise[:, :, -16:] = np.stack([frame(n, step=1)[:, -16:] for n in range(400)])
    path = write_clip(tmp_path / "long.mp4", list(noise), codec="mpeg4", g="20", qmin="1", qmax="2")
    decoder = Decoder()
    decoder.scan(clip(write_clip(tmp_path / "warm.mp4", 2)))

    def reads(*request) -> int:
        before = psutil.Process(decoder.process.pid).io_counters().read_chars
        media = clip(path, start_s=request[0], end_s=request[1])
        line = decoder.scan(media)
        frames = list(decoder.frames(media, line, line.times.tolist()))
        assert line.at(line.times[0]) == request[0] and len(frames) == 10 * (request[1] - request[0])
        assert number_of(frames[0], 1) == pytest.approx(10 * request[0] % 256, abs=3)
        return psutil.Process(decoder.process.pid).io_counters().read_chars - before

    whole = reads(0, 40)
    assert whole > 2 * os.path.getsize(path)
    assert reads(30, 32) < whole / 4 and reads(12.5, 14.5) < whole / 4
    decoder.close()


def test_thin_sampling_jumps_and_finds_the_same_frames(tmp_path):
    media = clip(write_clip(tmp_path / "long.mp4", [frame(n, step=1) for n in range(250)], rate=5, g="10", bf="2"))
    decoder = own_decoder()
    line = decoder.scan(media)
    wanted = line.times[::40].tolist()
    jumping = list(decoder.frames(media, line, wanted))
    straight = list(decoder.frames(media, replace(line, keys=()), wanted))
    assert len(line.keys) >= 25
    assert [number_of(f, 1) for f in jumping] == pytest.approx(list(range(0, 250, 40)), abs=2)
    assert all((a == b).all() for a, b in zip(jumping, straight, strict=True))


# ---- What cannot be read


def test_what_cannot_be_read_is_named(tmp_path):
    whole = write_clip(tmp_path / "a.mp4", 60, movflags="+faststart")
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "page.mp4").write_text("<!doctype html><p>404")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe.mp4")
    found = {
        "truncated_video": [cut_file(whole, 0.6), cut_file(write_clip(tmp_path / "b.mkv", 60), 0.6)],
        "unreadable_media": [tmp_path / "empty.mp4", tmp_path / "page.mp4", tmp_path / "pipe.mp4"],
        "no_video_stream": [write_sound(tmp_path / "sound.m4a")],
        "media_missing": [tmp_path / "gone.mp4"],
        "empty_video": [tmp_path / "folder"],
    }
    for code, paths in found.items():
        assert [refused(clip(path)) for path in paths] == [code] * len(paths)
    assert refused(clip(whole, start_s=100)) == "empty_video"
    no_index = cut_file(write_clip(tmp_path / "late.mp4", 60), 0.6)  # the index stands at the end
    assert refused(clip(no_index)) == "unreadable_media"
    with pytest.raises(MediaError, match=r"page\.mp4: an HTML page, not a video"):
        read_video_header(clip(tmp_path / "page.mp4"))


def test_a_playlist_opens_no_other_file(tmp_path):
    write_clip(tmp_path / "a.ts", 4)
    (tmp_path / "list.m3u8").write_text("#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\na.ts\n#EXT-X-ENDLIST\n")
    assert refused(clip(tmp_path / "list.m3u8")) == "unreadable_media"


def test_damage_in_the_middle_is_found_by_decoding_all(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (30, 48, 64, 3), np.uint8)
    path = Path(write_clip(tmp_path / "a.mp4", list(noise)))
    data = bytearray(path.read_bytes())
    lost = slice(len(data) // 3, len(data) // 2)
    data[lost] = bytes(len(data[lost]))  # as a download in pieces leaves it
    path.write_bytes(data)
    assert check_media([clip(path)], decode=False)[clip(path).key].code is None
    assert refused(clip(path)) == "unreadable_media"


# ---- The process


@pytest.fixture
def decoder():
    decoder = Decoder()
    yield decoder
    decoder.close()


def test_one_process_reads_many_clips(tmp_path, decoder):
    pids = set()
    for number in range(4):
        assert len(decoder.scan(clip(write_clip(tmp_path / f"{number}.mp4", 3))).times) == 3
        pids.add(decoder.process.pid)
        with pytest.raises(MediaError):
            decoder.scan(clip(tmp_path / "gone.mp4"))
    assert len(pids) == 1


def test_threads_take_turns(tmp_path, decoder):
    films = [clip(write_clip(tmp_path / f"{count}.mp4", count)) for count in (3, 5, 7, 9)]

    def read(media: Media) -> list[int]:
        line = decoder.scan(media)
        return [number_of(rgb) for rgb in decoder.frames(media, line, line.times.tolist())]

    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(read, films * 5)]
    assert found == [list(range(count)) for count in (3, 5, 7, 9)] * 5


def test_a_hung_decoder_is_noticed_and_killed(tmp_path, decoder):
    media = clip(write_clip(tmp_path / "a.mp4", 3))
    decoder.scan(media)
    child = psutil.Process(decoder.process.pid)
    os.kill(child.pid, signal.SIGSTOP)
    decoder.hang_s = 1.0  # only now: to start takes longer where the machine is busy
    with pytest.raises(MediaError, match=r"a\.mp4: no frame decoded in 1 s") as error:
        decoder.scan(media)
    assert error.value.code == "decoder_hung" and not child.is_running()
    decoder.hang_s = HANG_S
    assert len(decoder.scan(media).times) == 3  # by another process


def test_a_decoder_that_dies_is_named(tmp_path, decoder):
    media = clip(write_clip(tmp_path / "a.mp4", 3))
    decoder.scan(media)
    pid = decoder.process.pid
    os.kill(pid, signal.SIGSTOP)  # so that it dies with a request on its hands
    threading.Timer(0.3, os.kill, (pid, signal.SIGSEGV)).start()
    threading.Timer(0.4, os.kill, (pid, signal.SIGCONT)).start()
    with pytest.raises(MediaError, match="ended by signal 11") as error:
        decoder.scan(media)
    assert error.value.code == "decoder_died"
    decoder.scan(media)
    os.kill(decoder.process.pid, signal.SIGKILL)  # while idle: nobody's clip is to blame
    decoder.process.wait()
    assert len(decoder.scan(media).times) == 3


def test_a_decoder_that_eats_memory_is_stopped(tmp_path):
    """A frame of 16 Mpx takes more than 20 MiB to decode."""
    media = clip(write_clip(tmp_path / "large.mkv", [frame(0, (4096, 4096))], codec="mjpeg"))
    small, large = Decoder(memory_bytes=20 * 2**20), Decoder(memory_bytes=2**30)
    with pytest.raises(MediaError) as error:
        small.scan(media)
    assert error.value.code in ("media_too_large", "decoder_died") and large.scan(media).width == 4096
    small.close(), large.close()


PARENT = """
import sys, time
from litchi.data.decoder import own_decoder
from litchi.types import Media
own_decoder().scan(Media("video", sys.argv[1]))
print(own_decoder().process.pid, flush=True)
time.sleep(60)
"""


SLOW = """
import sys, time
from litchi.data.decoder import Decoder
sys.path.insert(0, sys.argv[1])  # where numpy takes a minute to import
decoder = Decoder()
decoder._start()
print(decoder.process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("when", ["idle", "importing"])
def test_no_process_is_left_when_the_parent_is_killed(tmp_path, when):
    path = write_clip(tmp_path / "a.mp4", 3)
    body = "import pathlib, time\npathlib.Path(__file__).with_name('x').touch()\ntime.sleep(60)\n"
    (tmp_path / "numpy.py").write_text(body)
    words = [PARENT, path] if when == "idle" else [SLOW, str(tmp_path)]
    parent = subprocess.Popen([sys.executable, "-c", *words], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(parent.stdout.readline()))
    deadline = time.monotonic() + 30
    while when == "importing" and not (tmp_path / "x").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert child.is_running()
    parent.kill()
    parent.wait()
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


# ---- Scenes


def test_scenes_begin_at_every_hard_cut_and_nowhere_else(tmp_path):
    """Seven scenes of a moving square on backgrounds of which some are much alike; a flash in the fourth."""
    backgrounds = [
        (200, 60, 40),
        (60, 60, 200),
        (60, 160, 60),
        (250, 240, 230),
        (210, 250, 210),
        (0, 0, 0),
        (40, 40, 40),
    ]
    lengths = [30, 11, 25, 40, 12, 30, 22]
    frames = []
    for background, length in zip(backgrounds, lengths, strict=True):
        for number in range(length):
            rgb = np.full((96, 128, 3), background, np.uint8)
            left = abs((6 * number) % 196 - 98)  # to and fro
            rgb[30:60, left : left + 30] = (255, 220, 0)
            frames.append(rgb)
    frames[80] = np.full((96, 128, 3), 20, np.uint8)
    path = write_clip(tmp_path / "scenes.mp4", frames, rate=5)
    starts = np.cumsum([0, *lengths]) / 5
    assert find_scenes(path) == [(a, b) for a, b in pairwise(starts.tolist())]
    still = write_animation(tmp_path / "one.gif", 6)
    assert find_scenes(still) == [(0.0, 0.6)]


def test_constant_motion_is_no_cut_and_a_slow_change_neither():
    near = np.full(60, 30.0)
    near[20] = 130.0
    assert find_cuts(near, near) == [20]
    assert find_cuts(np.full(40, 9.0), np.full(40, 18.0)) == []


def test_the_verb_prints_scenes(tmp_path):
    path = write_clip(tmp_path / "two.mp4", [np.full((48, 64, 3), 250 * (n > 6), np.uint8) for n in range(15)])
    ended = run_litchi(tmp_path / "out", "video", "scenes", path, "--json")
    scenes = [{"start_s": 0.0, "end_s": 0.7}, {"start_s": 0.7, "end_s": 1.5}]
    assert ended.status == 0 and json.loads(ended.out) == {"scenes": scenes}
    spoken = run_litchi(tmp_path / "out", "video", "scenes", path)
    assert spoken.out.splitlines() == ["0:00:00.000  0:00:00.700", "0:00:00.700  0:00:01.500"]
    assert run_litchi(tmp_path / "out", "video", "scenes", str(tmp_path / "no.mp4")).status == 3
