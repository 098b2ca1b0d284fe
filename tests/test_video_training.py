"""Videos from a row to a loss: transformers says the same, and every layout gives the numbers of one process."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from clips import cut_file, write_animation, write_clip
from layout_job import run_all
from processes import RunningRanks, run_litchi
from rendering import chat, draw, pack, render, renderer_for, sample

from litchi.batch.collate import join_patches
from litchi.batch.index import ScanRules, build_index
from litchi.batch.loader import Corpus
from litchi.data.features import FeatureStore
from litchi.data.video import _taken
from litchi.model.forward import LitchiModel
from litchi.model.vision import encode_pictures
from litchi.train.losses import bce
from litchi.types import Media

FRAMES = (3136, 12_544)  # of a video's frame: up to 16 tokens


@pytest.fixture(scope="module")
def budget(processor):
    return processor.with_video(min_pixels=FRAMES[0], max_pixels=FRAMES[1])


@pytest.fixture(scope="module")
def films(tmp_path_factory):
    folder = tmp_path_factory.mktemp("films")
    noise = np.random.default_rng(0).integers(0, 256, (20, 4, 6, 3), np.uint8).repeat(28, 1).repeat(28, 2)
    return [
        write_clip(folder / "noise.mp4", list(noise)),  # 2 s
        write_animation(folder / "long.gif", 12, pause_ms=500),  # 6 s
        draw(folder / "still.png", 84, 56),
    ]


def video(path, **cut):
    return {"type": "video", "video": path, **cut}


def text(words):
    return {"type": "text", "text": words}


def conversations(renderer, films):
    """A video; a picture, a part of a video and text; the first video again."""
    noise, long, still = films
    parts = [text("Both: "), {"type": "image", "image": still}, video(long, start=1, end=5, fps=2), text("So?")]
    return [
        chat(renderer, ("user", [video(noise, fps=4), text("What moves?")]), ("assistant", "the dots")),
        chat(renderer, ("user", parts), ("assistant", "a red bag")),
        chat(renderer, ("user", [text("Again "), video(noise, fps=4)]), ("assistant", "the dots again")),
    ]


def frames_of(placed) -> torch.Tensor:
    """The frames that were taken of a video, as transformers takes them."""
    taken = list(_taken(placed.media, placed.grid[0] * 2))
    return torch.from_numpy(np.stack(taken)).permute(0, 3, 1, 2)


def video_processor():
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    size = {"shortest_edge": FRAMES[0], "longest_edge": FRAMES[1]}
    return Qwen2VLVideoProcessor(size=size, cap_pixels_per_frame=True, do_sample_frames=False)


def oracle_inputs(hf_processor, example, batch):
    """What transformers is given for an example: its own pixels, our ids and positions."""
    from PIL import Image

    shown = [example.media[number] for number, _ in example.media_at]
    inputs: dict = {"input_ids": batch.ids[None], "position_ids": batch.positions[:, None]}
    stills = [Image.open(p.media.path) for p in shown if p.media.kind == "image"]
    if stills:
        made = hf_processor.image_processor(stills, return_tensors="pt")
        inputs |= {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]}
    films = [frames_of(p) for p in shown if p.media.kind == "video"]
    if films:
        made = video_processor()(films, return_tensors="pt")
        inputs |= {"pixel_values_videos": made["pixel_values_videos"], "video_grid_thw": made["video_grid_thw"]}
        assert made["video_grid_thw"].tolist() == [list(p.grid) for p in shown if p.media.kind == "video"]
    return inputs


def test_losses_equal_transformers(loaded, hf_model, hf_processor, budget, films):
    renderer = renderer_for("chat", budget)
    examples = [render(renderer, one) for one in conversations(renderer, films)]
    batch = pack(renderer, examples)
    assert [g[0] for g in batch.grids] == [4, 1, 4] and batch.pixels.shape[1] == 1176  # the first video once
    model = LitchiModel(loaded.hf, loaded.family, budget.vision)
    total = 0.0
    for example in examples:
        one = pack(renderer, [example])
        with torch.no_grad():
            logits = hf_model(**oracle_inputs(hf_processor, example, one), use_cache=False).logits[0]
        wanted = F.cross_entropy(logits[one.rows], one.targets, reduction="sum").item()
        assert model(one).loss.item() == pytest.approx(wanted, rel=2e-6)
        total += wanted
    assert model(batch).loss.item() == pytest.approx(total, rel=2e-6) and total > 10


def test_time_reaches_the_positions(budget, films):
    """The same clip at 1, 2 and 4 frames per second: 2, 1 and 0.5 s a grid, at 4 positions a second."""
    renderer = renderer_for("chat", budget)
    found = {}
    for fps in (1, 2, 4):
        turn = ("user", [video(films[1], fps=fps), text("?")])
        example = render(renderer, chat(renderer, turn, ("assistant", "x")))
        ((_, at),), (placed,) = example.media_at, example.media
        batch = pack(renderer, [example])
        tokens = placed.tokens(2)
        times = batch.positions[0, at : at + tokens].reshape(placed.grid[0], -1)[:, 0] - at
        assert batch.positions[0, at + tokens] == batch.positions[:, at : at + tokens].max() + 1
        found[fps] = placed.step_s, times.tolist()
    assert found[1] == (2.0, [0, 8, 16])
    assert found[2] == (1.0, [0, 4, 8, 12, 16, 20]) and found[4] == found[2]  # it has two frames a second


def test_features_equal_transformers_and_a_still_beside_a_video_is_itself(loaded, hf_model, budget, films):
    renderer = renderer_for("chat", budget)
    example = render(renderer, conversations(renderer, films)[1])
    still, film = example.media
    batch = pack(renderer, [example])
    tower = loaded.hf.model.visual
    with torch.no_grad():
        found = encode_pictures(tower, batch.pixels, batch.grids, budget.vision)
        made = video_processor()([frames_of(film)], return_tensors="pt")
        wanted = hf_model.model.visual(made["pixel_values_videos"], made["video_grid_thw"]).pooler_output
        torch.testing.assert_close(found[still.tokens(2) :], wanted, rtol=1e-4, atol=1e-5)
        wide = encode_pictures(tower, batch.pixels[: still.patches], [still.grid], budget.vision)
        narrow = encode_pictures(
            tower, batch.pixels[: still.patches].view(-1, 3, 2, 196)[:, :, 0].flatten(1), [still.grid], budget.vision
        )
    assert torch.equal(wide, narrow) and wanted.abs().max() > 0.1


def test_patches_of_stills_are_doubled_beside_a_video():
    still, film = np.arange(588, dtype=np.uint8)[None] % 251, np.zeros((2, 1176), np.uint8)
    joined = join_patches([still, film])
    frames = joined.reshape(3, 3, 2, 196)
    assert (frames[0, :, 0] == still.reshape(3, 196)).all() and (frames[0, :, 1] == frames[0, :, 0]).all()
    assert join_patches([still, still]).shape == (2, 588) and join_patches([]).shape == (0, 0)


def test_scores_of_video_documents_equal_each_pair_alone(loaded, hf_model, hf_processor, budget, films):
    renderer = renderer_for("rerank", budget)
    noise, long, _ = films
    row = {
        "query": {"text": "a red bag", "video": {"video": noise, "fps": 2}},
        "pos_doc": [{"text": "moving", "video": long, "start": 1, "end": 4}],
        "neg_docs": ["nothing", {"video": {"video": noise, "fps": 2}}],
    }
    group = sample(renderer, row)
    words = (budget.word("yes"), budget.word("no"))
    model = LitchiModel(loaded.hf, loaded.family, budget.vision, words=words, score_loss=bce)
    with torch.no_grad():
        whole = pack(renderer, [render(renderer, group)])
        scores = model(whole).scores
        assert len(whole.grids) == 2  # the query's video is a document too
        for number in range(3):
            example = render(renderer, group, [number])
            one = pack(renderer, [example])
            inputs = oracle_inputs(hf_processor, example, one)
            logits = hf_model(**inputs, use_cache=False).logits[0, -1]
            assert scores[number].item() == pytest.approx((logits[words[0]] - logits[words[1]]).item(), abs=2e-5)
    assert len({round(s, 3) for s in scores.tolist()}) == 3


# ---- The index, the checks


def write_lines(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def turns(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": "a red bag"}]}


@pytest.mark.parametrize("verify", ["decoded", "headers"])
def test_costs_of_the_index_are_those_of_the_batch(budget, films, tmp_path, verify):
    rows = [turns(video(films[0], fps=fps), text("?")) for fps in (1, 3, 8)]
    rows += [turns(video(films[1], start=2, end=4.6)), turns(video([films[2]] * 3, fps=1), text("!"))]
    renderer = renderer_for("chat", budget)
    index = build_index(write_lines(tmp_path / "a.jsonl", rows), "a", renderer, ScanRules(4096, verify=verify))
    assert len(index.rows) == len(rows) and not index.findings
    corpus = Corpus((index,), (renderer,))
    for number, cost in enumerate(index.rows):
        example = corpus.example(number, None)
        batch = pack(renderer, [example])
        assert (cost.tokens, cost.grids) == (batch.tokens, batch.grids)
        assert cost.patches == len(batch.pixels)
        assert render(renderer, corpus.load(number)).media == example.media  # also the seconds
    assert [cost.grids[0][0] for cost in index.rows] == [2, 3, 8, 2, 2]


def test_data_check_names_file_and_line(films, tmp_path):
    cut = cut_file(write_clip(tmp_path / "film.mp4", 60, movflags="+faststart"), 0.6)
    raw = write_clip(tmp_path / "raw.mjpeg", 6, codec="mjpeg")
    ask = text("?")
    rows = [turns(video(p), ask) for p in (films[0], cut, "gone.mp4", raw)] + [turns(video(films[0], start=9), ask)]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    ended = run_litchi(tmp_path / "out", "data", "check", path, "--task", "chat", "--json", "model.path=builtin:tiny")
    assert ended.status == 3, ended.err
    report = json.loads(ended.out)
    found = {(f["line"], f["severity"], f["code"]) for f in report["findings"]}
    wanted = {(2, "truncated_video"), (3, "media_missing"), (5, "empty_video")}
    assert found == {(line, "error", code) for line, code in wanted} | {(4, "warning", "no_frame_rate")}
    assert (report["rows"], report["usable"]) == (5, 2)


# ---- Layouts

ROWS = "vptvtpvvtp"  # video, picture, text
LAYOUTS = {"DDP": "dp_replicate: 2", "FSDP2": "dp_shard: 2", "cp": "cp: 2", "tp": "tp: 2"}
TRAINED = {
    "all": "trainable={vision: full, merger: full, language: full}",
    "LoRA": "trainable={language: lora, lora: {rank: 4}}",
}


@pytest.fixture(scope="module")
def ran(films, tmp_path_factory):
    """name -> what each rank says; names are "what trains/layout", or of one process "what trains"."""
    folder = tmp_path_factory.mktemp("layouts")
    noise, long, still = films
    kinds = {"v": [video(noise), video(long, start=1, end=5)], "p": [{"type": "image", "image": still}], "t": []}
    rows = []
    for number, kind in enumerate(ROWS):
        shown = kinds[kind][number % len(kinds[kind])] if kinds[kind] else None
        words = text(f"What is number {number}?")
        rows.append(turns(shown, words) if shown else turns(words))
        rows[-1]["messages"][1]["content"] = "red apple " * (1 + number % 3)
    chat_words = [
        *("task=chat", f"data.train={write_lines(folder / 'chat.jsonl', rows)}", "train.micro_batch_tokens=128"),
        *("train.global_batch_size=5", "train.steps=4", "data.video.frame_pixels.max=12544"),
    ]
    one = {name: [*chat_words, words] for name, words in TRAINED.items()}
    two = {
        f"{name}/{layout}": [*one[name], f"parallel={{{axes}}}"]
        for (name, (layout, axes)) in product(TRAINED, LAYOUTS.items())
    }
    one |= {f"LoRA/{how}": [*one["LoRA"], f"train.features={how}"] for how in ("cache", "precompute")}
    running = RunningRanks(folder / "two", 2, run_all, two), RunningRanks(folder / "one", 1, run_all, one)
    pair, alone = (some.results() for some in running)
    return {name: [alone[0][name]] for name in one} | {name: [rank[name] for rank in pair] for name in two}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("trained", TRAINED)
def test_videos_pictures_and_text_in_every_layout(ran, trained, layout):
    (alone,), ranks = ran[trained], ran[f"{trained}/{layout}"]
    assert ranks[0]["losses"] == ranks[1]["losses"] and len(alone["losses"]) == 4
    assert ranks[0]["losses"] == pytest.approx(alone["losses"], rel=1e-6)
    assert ranks[0]["norms"] == pytest.approx(alone["norms"], rel=1e-4) and min(alone["norms"]) > 0.1
    assert ranks[0]["weights"] == ranks[1]["weights"] and sum(alone["pictures"]) >= 8
    assert (alone["travel"]["vision"] > 0) == (trained == "all")


@pytest.mark.parametrize("how", ["cache", "precompute"])
def test_kept_features_of_videos_change_nothing(ran, how):
    assert ran[f"LoRA/{how}"][0]["losses"] == pytest.approx(ran["LoRA"][0]["losses"], rel=1e-6)


def test_kept_features_tell_parts_of_a_video_apart(tmp_path, films):
    store = FeatureStore(tmp_path / "store", width=4, dtype=torch.float32)
    parts = [Media("video", films[0], fps=4), Media("video", films[0], fps=4, start_s=1.0)]
    names = [store.name(part, (2, 4, 4)) for part in parts]
    assert names[0].content != names[1].content and names[0].stamp != names[1].stamp
    data = Media("video", data=Path(films[0]).read_bytes())
    store.keep([store.name(data, (2, 4, 4))], [torch.zeros(8, 4)])
    assert store.find_media(data, (2, 4, 4)) is not None and store.find_media(parts[0], (2, 4, 4)) is None
