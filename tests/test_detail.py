"""Pixels by detail: what is measured, how a budget is shared out, and that all who show a row show it alike."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont
from rendering import renderer_for
from serving import data_url

from litchi.batch.curriculum import plan_curriculum
from litchi.batch.index import ScanRules, build_index, scan_rows
from litchi.batch.loader import make_batch
from litchi.batch.sources import by_detail, index_sources, make_renderer
from litchi.config import load_config
from litchi.data.boxes import Frame, restore_boxes
from litchi.data.detail import (
    CALM,
    LEVELS,
    TILE,
    WHOLE,
    Budget,
    Shown,
    list_media,
    measure_detail,
    needed_pixels,
    share_pixels,
)
from litchi.data.features import FeatureStore, stamp_of
from litchi.data.formats import UnfitError, map_media, refuse_places, write_litchi
from litchi.data.jsonl import RowError, parse_fields
from litchi.data.media import MediaError, decode_image, grid_of, read_header
from litchi.errors import UsageError
from litchi.types import Box, Media, Source

RULES = ScanRules(max_length=2048)
SIDE = 28  # of a token


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LITCHI_CACHE", str(tmp_path / "cache"))


def page(path, size=(300, 200), code="", seed=0, **save):
    """A large shape, and a code in small print."""
    picture, rng = Image.new("RGB", size, "white"), random.Random(seed)
    pen = ImageDraw.Draw(picture)
    x, y = rng.randrange(20), rng.randrange(20)
    pen.ellipse((x, y, x + size[0] // 2, y + size[1] // 2), fill=(90, 20 * seed % 256, 160))
    pen.text((size[0] * 2 // 3, size[1] * 3 // 4), code, fill="black", font=ImageFont.load_default(10))
    picture.save(path, **save)
    return str(path)


def turned(path, size, orientation, **more):
    """A picture whose file lies turned: people see it `size` wide and high."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return page(path, size[::-1] if orientation >= 5 else size, exif=exif, **more)


# ---- Detail


def lost_in(tile):
    """By the definition, in floating point: shares that are lost at a half, a quarter, ... of the sides."""
    whole = tile.var() + CALM
    sides = [2**level for level in range(1, LEVELS + 1)]
    blocks = [tile.reshape(TILE // s, s, TILE // s, s).transpose(0, 2, 1, 3).reshape(-1, s * s) for s in sides]
    return np.array([b.var(axis=1).mean() / whole for b in blocks])


def test_detail_is_the_share_of_variance_within_blocks():
    """A picture of four tiles: their own layer, and one half a tile further out, which covers each place otherwise."""
    grey = np.random.default_rng(0).integers(0, 256, (2 * TILE, 2 * TILE), dtype=np.uint8)
    grey[:TILE] = np.arange(2 * TILE) // 8 * 15  # without detail above a quarter
    half = TILE // 2
    wide = np.pad(grey.astype(float), half, mode="edge")
    found = np.zeros(LEVELS)
    for y in range(0, 2 * TILE, half):
        for x in range(0, 2 * TILE, half):
            ours = lost_in(grey.astype(float)[y // TILE * TILE :, x // TILE * TILE :][:TILE, :TILE])
            top, left = (y + half) // TILE * TILE, (x + half) // TILE * TILE
            found = np.maximum(found, np.minimum(ours, lost_in(wide[top:, left:][:TILE, :TILE])))
    assert measure_detail(np.stack([grey] * 3, 2)) == tuple(np.floor(found * WHOLE).astype(int))


def test_detail_of_patterns_by_hand():
    def stripes(width):
        levels = (np.arange(64) // width % 2 * 200).astype(np.uint8)
        return np.broadcast_to(levels[None, :, None], (96, 64, 3)).copy()

    all_of_it = 10_000 * WHOLE // (10_000 + CALM)  # the variance of 0 and 200 is 100 squared
    assert measure_detail(stripes(1)) == (all_of_it,) * 4
    assert measure_detail(stripes(4)) == (0, 0, all_of_it, all_of_it)
    assert measure_detail(np.full((5, 7, 3), 130, np.uint8)) == (0, 0, 0, 0)


def test_an_edge_is_not_print(tmp_path):
    plain, printed = (
        measure_detail(decode_image(Media("image", page(tmp_path / "a.png", code=c)))) for c in ("", "73")
    )
    assert plain[0] < 200_000 < printed[0] and all(a <= b for a, b in zip(plain, printed, strict=True))


def test_needed_pixels_by_hand():
    detail = (200_000, 200_000, 600_000, 1_000_000)
    wanted = {0: None, 100_000: 2500, 200_000: 250, 400_000: 156, 600_000: 62, 800_000: 39, WHOLE: 15}
    assert {lost: needed_pixels(50, 80, detail, lost) for lost in wanted} == wanted
    assert needed_pixels(50, 80, (0, 0, 0, 0), 0) == 15  # nothing is lost at a sixteenth
    assert needed_pixels(4096, 4096, detail, 0) is None and needed_pixels(4096, 4096, (0,) * 4, 0) == 2**22 // 256


@pytest.mark.parametrize("seed", range(4))
def test_a_budget_is_kept_and_goes_by_detail(seed):
    rng = random.Random(seed)
    some = [
        Shown(rng.randrange(30, 900), rng.randrange(30, 900), tuple(sorted(rng.randrange(WHOLE) for _ in range(4))))
        for _ in range(rng.randrange(1, 7))
    ]
    some += [Shown(rng.randrange(30, 300), rng.randrange(30, 300), None)] * (seed % 2)
    free = Budget(784, 100_000, SIDE)
    wanted = sum(free.area(one, None) for one in some)
    least = sum(free.area(one, 784) for one in some)
    for total in (wanted, wanted // 2, wanted // 4, least, 1):
        budget = replace(free, total=total)
        shares = share_pixels(some, budget)
        assert sum(budget.area(one, share) for one, share in zip(some, shares, strict=True)) <= max(total, least)
        assert shares == share_pixels(some, budget)
    assert share_pixels(some, replace(free, total=wanted)) == [None] * len(some)


def test_equal_pictures_get_alike_and_finer_ones_more():
    fine, coarse = (800_000,) * 4, (0, 100_000, 200_000, 900_000)
    budget = Budget(784, 10**6, SIDE, total=300_000)
    a, b, c = share_pixels([Shown(500, 400, d) for d in (fine, coarse, fine)], budget)
    areas = [budget.area(Shown(500, 400, None), share) for share in (a, b, c)]
    assert a == c and areas[0] > 2 * areas[1] and sum(areas) > 250_000
    kept = replace(budget, total=None, lost=200_000)
    assert share_pixels([Shown(500, 400, coarse)], kept) == [3125]


def test_regions_come_before_the_pictures_they_are_of():
    budget = Budget(784, 10**6, SIDE, total=56 * 84 + 84 * 84)
    whole, region = Shown(840, 840, (250_000, 500_000, 750_000, 950_000)), Shown(84, 56, None)
    shares = share_pixels([whole, region], budget)
    small, full = budget.area(whole, shares[0]), budget.area(region, shares[1])
    assert full == 84 * 56 and small == 84 * 84
    shares = share_pixels([whole, region], replace(budget, total=784 * 2))
    assert [budget.area(whole, shares[0]), budget.area(region, shares[1])] == [784, 784]


# ---- Regions


def test_a_region_is_a_cut_of_what_people_see(tmp_path, processor):
    for orientation in range(1, 9):
        path = turned(tmp_path / f"{orientation}.jpg", (120, 90), orientation, code="41")
        whole = Media("image", path)
        region = replace(whole, region=(60, 10, 116, 66))
        assert (read_header(region).width, read_header(region).height) == (56, 56)
        assert np.array_equal(decode_image(region), decode_image(whole)[10:66, 60:116])
        outside = replace(whole, region=(100, 10, 121, 66))
        for look in (read_header, decode_image):
            with pytest.raises(MediaError, match=r"\[100, 10, 121, 66\] reaches out of its 120 x 90") as error:
                look(outside)
            assert error.value.code == "region_outside"
    assert len({m.key for m in (whole, region, outside, replace(region, pixels=784))}) == 4


def test_features_of_a_region_are_not_those_of_its_picture(tmp_path):
    import torch

    path = page(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    store = FeatureStore(tmp_path / "store", width=8, dtype=torch.float32)
    for whole in (Media("image", path), Media("image", data=data)):
        some = [whole, replace(whole, region=(0, 0, 28, 28)), replace(whole, region=(0, 0, 28, 56))]
        assert len({store.name(one, (1, 2, 2)).content for one in some}) == 3
        assert store.name(some[1], (1, 2, 2)) == store.name(replace(some[1], pixels=784), (1, 2, 2))
    assert stamp_of(Media("image", path)) != stamp_of(replace(Media("image", path), region=(0, 0, 28, 28)))


def parse(fields, task="chat", root="/data"):
    return parse_fields(fields, task=task, source=Source("rows.jsonl", 1), media_root=root, require_labels=False)[0]


def test_rows_name_regions(tmp_path):
    part = {"type": "image", "image": "a.png", "regions": [[0, 0, 9, 9], [3, 4, 50, 60]]}
    row = {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]}
    whole = Media("image", "/data/a.png")
    wanted = [whole, replace(whole, region=(0, 0, 9, 9)), replace(whole, region=(3, 4, 50, 60))]
    assert list_media(parse(row)) == wanted
    shown = [{"image": "a.png", "regions": [[3, 4, 50, 60]]}, "b.png"]
    sample = parse({"query": {"image": shown}, "pos_doc": "x"}, "rerank")
    assert list_media(sample) == [wanted[0], wanted[2], Media("image", "/data/b.png")]
    moved = map_media({"query": {"image": shown}, "images": ["c.png"]}, lambda path: f"x/{path}")
    assert moved == {"query": {"image": [shown[0] | {"image": "x/a.png"}, "x/b.png"]}, "images": ["x/c.png"]}
    for one, task in ((parse(row), "chat"), (sample, "rerank")):
        (again,) = write_litchi(one, lambda media: media.path, set())
        assert list_media(parse(json.loads(json.dumps(again)), task)) == list_media(one)
        with pytest.raises(UnfitError, match="regions"):
            refuse_places(one)


@pytest.mark.parametrize("wrong", [7, [[1, 2, 3]], [[5, 0, 5, 9]], [[0, 9, 9, 0]], [[0, 0, 1.5, 9]], [[-1, 0, 9, 9]]])
def test_wrong_regions_are_named(wrong):
    part = {"type": "image", "image": "a.png", "regions": wrong}
    with pytest.raises(RowError, match="regions") as error:
        parse({"messages": [{"role": "user", "content": [part]}]})
    assert error.value.code == "wrong_region"


# ---- The same pixels for all


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def ask(*parts, answer="7"):
    user = {"role": "user", "content": [*parts, {"type": "text", "text": "Which code?"}]}
    return {"messages": [user, {"role": "assistant", "content": answer}]}


def image(path, **more):
    return {"type": "image", "image": path, **more}


@pytest.fixture
def rows(tmp_path):
    """Conversations and groups about pages, of which some have print, one is given twice, and some have regions."""
    plain, printed, other = (
        page(tmp_path / f"{n}.png", code=code, seed=n) for n, code in enumerate(("", "4711", "0815"))
    )
    region = [190, 130, 246, 186]
    chat = [
        ask(image(plain), image(printed)),
        ask(image(printed, regions=[region]), image(other)),
        ask(image(plain), image(plain), image(other, regions=[region, [0, 0, 28, 28]])),
        ask(),
    ]
    query = {"text": "this", "image": [{"image": printed, "regions": [region]}, plain]}
    rerank = [
        {"query": query, "pos_doc": {"image": [other, plain]}, "neg_docs": [{"image": printed}, "a hat"]},
        {"query": "4711", "pos_doc": {"image": printed}, "neg_docs": [{"image": plain}, {"image": [printed, other]}]},
    ]
    return {"chat": write(tmp_path / "chat.jsonl", chat), "rerank": write(tmp_path / "rerank.jsonl", rerank)}


WORDS = ("data.pixels={min: 784, max: 50176, total: 20000}", "data.workers=0", "data.max_length=2048")


def opened(task, path, processor, *words):
    config = load_config(None, [f"task={task}", f"data.eval={path}", *(words or WORDS)], need=())
    return config, index_sources(config, config.data.eval, processor)


@pytest.mark.parametrize("task", ["chat", "rerank"])
def test_tokens_of_the_index_are_those_that_are_used(task, rows, processor):
    config, corpus = opened(task, rows[task], processor)
    _, free = opened(task, rows[task], processor, "data.pixels={min: 784, max: 50176}", "data.workers=0")
    (index,), renderer = corpus.sources, corpus.renderers[0]
    assert not index.findings and index.tokens < free.sources[0].tokens
    for number, row in enumerate(index.rows):
        example = corpus.example(number, None)
        batch = make_batch(corpus, [(number, None)])
        assert example.tokens == row.tokens == batch.tokens and example.patches == row.patches == len(batch.pixels)
        if task == "chat":
            assert row.patches * 14 * 14 <= config.data.pixels.total
            assert corpus.prompt(number).tokens < row.tokens
    again = build_index(rows[task], "again", renderer, RULES)
    assert again.rows == index.rows
    headers = replace(RULES, verify="headers")
    assert scan_rows(index.lines, range(len(index.lines)), renderer, headers)[0] == list(index.rows)
    grids = {m.media.name: m.grid for m in corpus.example(0, None).media if m.media.region is None}
    assert len(set(grids.values())) > 1, "print and no print get alike"


def test_the_detail_alone_sizes_each_picture_by_itself(rows, processor):
    limits = "data.pixels={min: 784, max: 50176, detail: 0.75}"
    _, corpus = opened("chat", rows["chat"], processor, limits, "data.workers=0")
    found = {}
    for number in range(4):
        for one in corpus.example(number, None).media:
            assert found.setdefault((one.media.path, one.media.region), one.grid) == one.grid
    plain, printed = (grid for (path, region), grid in found.items() if region is None and path[-5] in "01")
    assert np.prod(plain) * 3 < np.prod(printed)


def test_a_stage_of_the_curriculum_only_makes_them_smaller(rows, processor):
    _, corpus = opened("chat", rows["chat"], processor)
    stages = load_config(None, ["task=chat", "curriculum=[{until: 2, pixels: {max: 3136}}]"], need=()).curriculum
    plan = plan_curriculum(stages, corpus.renderers[0].processor, 4)
    for step, most in ((1, 3136), (4, 50176)):
        staged = replace(corpus, spec=plan.at(step))
        for number in range(4):
            assert staged.example(number, None).tokens == staged.find(number)[1].tokens
            whole = corpus.example(number, None).media
            for now, full in zip(staged.example(number, None).media, whole, strict=True):
                assert now.patches == full.patches if step == 4 else now.patches <= min(full.patches, most // 196)


def test_data_check_counts_the_same(rows, processor):
    from litchi.prepare.check import check_files, check_report

    config = load_config(None, ["task=chat", f"data.train={rows['chat']}", *WORDS], need=())
    report = check_report(check_files(config, processor))
    (index,) = opened("chat", rows["chat"], processor)[1].sources
    assert (report["tokens"], report["pixels"]) == (index.tokens, index.patches * 14 * 14)


def test_a_bad_picture_takes_its_document_only(rows, tmp_path, processor):
    (tmp_path / "cut.png").write_bytes((tmp_path / "1.png").read_bytes()[:900])
    good = str(tmp_path / "1.png")
    bad = [{"image": [good, str(tmp_path / "cut.png")]}, {"image": [{"image": good, "regions": [[0, 0, 900, 9]]}]}]
    row = {"query": {"image": good}, "pos_doc": {"image": good}, "neg_docs": [*bad, {"image": good}]}
    _, corpus = opened("rerank", write(tmp_path / "bad.jsonl", [row]), processor)
    (index,) = corpus.sources
    assert [f.code for f in index.findings] == ["unreadable_media", "region_outside"]
    assert index.rows[0].documents == (0, 3) and corpus.example(0, (0, 3)).tokens == index.rows[0].tokens


@pytest.mark.parametrize("task", ["chat", "rerank"])
def test_a_server_shows_what_was_trained_on(task, rows, processor):
    from litchi.config.serve import Serve
    from litchi.serve.batcher import Budget as BatchBudget
    from litchi.serve.memory import FeatureMemory
    from litchi.serve.preparing import Preparer
    from litchi.serve.requests import parse_chat, parse_rerank

    config, corpus = opened(task, rows[task], processor)
    with ThreadPoolExecutor(2) as threads:
        limits = BatchBudget(10**6, 10**6, 0.0)
        renderers = {task: make_renderer(config, processor, ".")}
        preparer = Preparer(renderers, 2048, limits, Serve(), FeatureMemory(0), threads)
        for number, row in enumerate(corpus.sources[0].rows):
            fields = json.loads(corpus.sources[0].lines.read(row.line))
            if task == "chat":
                body = {"messages": [sent(fields["messages"][0])]}
                (work,) = preparer.prepare(1, parse_chat(body, Serve()).job, 0.0)
                assert work.load.example.tokens == corpus.prompt(number).tokens
                planned = corpus.prompt(number)
            else:
                documents = [sent(d) for d in (fields["pos_doc"], *fields["neg_docs"])]
                body = {"query": sent(fields["query"]), "documents": documents}
                (work,) = preparer.prepare(1, parse_rerank(body, Serve()).job, 0.0)
                planned = corpus.example(number, None)
                assert work.load.example.tokens == row.tokens
            assert [m.grid for m in work.load.example.media] == [m.grid for m in planned.media]
            batch = make_batch(corpus, [(number, None)])
            patches = [work.load.patches[m.media.key] for m in work.load.example.media]
            assert not patches or np.array_equal(np.concatenate(patches), batch.pixels.numpy())


def sent(value):
    """The same with the bytes of its pictures."""
    if isinstance(value, list):
        return [sent(one) for one in value]
    if isinstance(value, dict):
        return {key: sent(one) for key, one in value.items()}
    return data_url(Path(value).read_bytes()) if isinstance(value, str) and value.endswith(".png") else value


def test_settings_say_how(processor):
    config = load_config(None, ["task=chat", "data.pixels={detail: 0.9, total: 90000}"], need=())
    assert by_detail(config.data, processor.vision) == Budget(3136, 50176, SIDE, 100_000, 90_000)
    assert by_detail(load_config(None, ["task=chat"], need=()).data, processor.vision) is None
    for wrong in ("{detail: 0}", "{detail: 1.1}", "{total: 0}", "{min: 3136, total: 3000}"):
        with pytest.raises(UsageError, match=r"data\.pixels"):
            load_config(None, ["task=chat", f"data.pixels={wrong}"], need=())


def test_a_target_has_them_with_it():
    from litchi.train.target import Target, target_config

    settings = load_config(None, ["task=chat", "data.video.detail=0.8"], need=()).model_dump(mode="json")
    pixels = {"min": 784, "max": 50176, "detail": 0.9, "total": 90000}
    manifest = {"task": "chat", "settings": settings, "instruction": None, "pixels": pixels, "template": "chat"}
    data = target_config(Target("run", "builtin:tiny", manifest=manifest), []).data
    assert data.pixels.model_dump() == pixels and data.video.detail == 0.8


# ---- Boxes


def talk(path, boxes, text="Where is <box>?", answer='{"bbox_2d": <box>}', **more):
    user = {"role": "user", "content": [image(path, **more), {"type": "text", "text": text}]}
    return {"messages": [user, {"role": "assistant", "content": answer}], "boxes": boxes}


BUDGETS = [(784, 3136), (3136, 12544), (784, 10**6)]


def test_boxes_by_hand(tmp_path, processor):
    """200 x 100 as people see it, shown as 112 x 56."""
    renderer = renderer_for("chat", processor.with_pixels(784, 6272))
    for orientation in (1, 6):
        path = turned(tmp_path / f"{orientation}.jpg", (200, 100), orientation)
        sample = parse(talk(path, [[100, 50, 200, 100], [50, 25]]))
        example = renderer.render(sample, lambda media: grid_of(read_header(media), renderer.processor.vision))
        assert example.media[0].grid == (1, 4, 8)
        text = renderer.processor.decode(example.ids.tolist())
        assert "Where is [56, 28, 112, 56]?" in text and '{"bbox_2d": [28, 14]}' in text


@pytest.mark.parametrize("orientation", [1, 3, 6, 7])
@pytest.mark.parametrize("budget", BUDGETS)
def test_no_budget_turn_or_region_moves_a_box(orientation, budget, tmp_path, processor):
    """What is said stays within half a pixel of what is meant, at the size that is shown, and comes back as it was."""
    size, rng = (411, 187), random.Random(orientation)
    path = turned(tmp_path / "a.jpg", size, orientation)
    boxes = []
    for _ in range(20):
        (x0, x1), (y0, y1) = (sorted(rng.sample(range(side + 1), 2)) for side in size)
        boxes.append([x0, y0, x1, y1])
    regions = {"regions": [[300, 20, 400, 120]]} if orientation > 3 else {}
    answer = " ".join(["<box>"] * len(boxes))
    file = write(tmp_path / "rows.jsonl", [talk(path, boxes, text="All?", answer=answer, **regions)])
    limits = f"data.pixels={{min: {budget[0]}, max: {budget[1]}, total: {budget[1]}}}"
    _, corpus = opened("chat", file, processor, limits, "data.workers=0", "data.max_length=8192")
    frame, said = corpus.frame(0), corpus.reference(0)
    assert frame.own == size and corpus.example(0, None).tokens == corpus.sources[0].rows[0].tokens
    places = [json.loads(one + "]") for one in said.split("] ")[:-1]] + [json.loads(said.split("] ")[-1])]
    for box, place in zip(boxes, places, strict=True):
        for i, (x, y) in enumerate(zip(box, place, strict=True)):
            assert abs(y - x * frame.shown[i % 2] / size[i % 2]) <= 0.5
    back = [json.loads(one) for one in restore_boxes(said, frame).replace("] [", "]\n[").split("\n")]
    slack = np.array([0.5 + 0.5 * size[i % 2] / frame.shown[i % 2] for i in range(4)])
    assert (np.abs(np.array(back) - np.array(boxes)) <= slack).all()


def test_an_answer_comes_back_in_the_pictures_own_pixels():
    frame = Frame((100, 50), (1000, 1000))
    assert (
        restore_boxes('[{"bbox_2d": [10, 5, 20, 10]}] [1.5,2]', frame) == '[{"bbox_2d": [100, 100, 200, 200]}] [15, 40]'
    )
    assert restore_boxes("[-3, 0, 900, 50] [1, 2, 3] [a] 4, 5", frame) == "[0, 0, 1000, 1000] [1, 2, 3] [a] 4, 5"


@pytest.mark.parametrize(
    ("boxes", "code"),
    [
        (7, "wrong_box"),
        ([[1, 2, 3, 4]], "box_marks"),
        ([[1, 2, 3, 4]] * 3, "box_marks"),
        ([[1, 2, 3], [1, 2]], "wrong_box"),
        ([[9, 2, 3, 4], [1, 2]], "wrong_box"),
        ([[-1, 2], [1, 2]], "wrong_box"),
        ([{"box": [1, 2], "image": 1}, [1, 2]], "wrong_box"),
        ([{"box": [1, 2], "picture": 0}, [1, 2]], "wrong_box"),
        ([["1", 2], [1, 2]], "wrong_box"),
    ],
)
def test_wrong_boxes_are_named(boxes, code):
    with pytest.raises(RowError, match="box") as error:
        parse(talk("a.png", boxes))
    assert error.value.code == code


def test_boxes_name_their_picture_and_survive_writing(tmp_path, processor):
    a, b = page(tmp_path / "a.png", (100, 50)), page(tmp_path / "b.png", (60, 90))
    row = ask(image(a, regions=[[0, 0, 50, 50]]), image(b), answer="<box> and <box>")
    row["boxes"] = [{"box": [1, 2, 3, 4], "image": 1}, {"box": [5, 6], "image": 0}]
    sample = parse(row)
    assert sample.turns[1].parts == (Box(Media("image", b), (1, 2, 3, 4)), " and ", Box(Media("image", a), (5, 6)))
    (again,) = write_litchi(sample, lambda media: media.path, set())
    assert again["boxes"] == row["boxes"] and parse(again) == sample
    with pytest.raises(UnfitError, match="boxes"):
        refuse_places(sample)
    assert parse(ask(image(a), answer="a <box>")).turns[1].parts == ("a <box>",)  # without boxes it is text
    file = write(tmp_path / "rows.jsonl", [row | {"boxes": [{"box": [1, 2, 61, 4], "image": 1}, row["boxes"][1]]}])
    (index,) = opened("chat", file, processor)[1].sources
    assert [f.code for f in index.findings] == ["box_outside"] and not index.rows


def test_boxes_in_a_curriculum_have_exact_tokens(tmp_path, processor):
    """A box of larger numbers is longer, in the question and in the answer."""
    path = page(tmp_path / "a.png", (400, 400))
    file = write(tmp_path / "rows.jsonl", [talk(path, [[100, 100, 399, 399], [20, 30, 200, 396]])])
    words = [
        f"data.train={file}",
        "curriculum=[{until: 2, pixels: {max: 3136}}]",
        "data.pixels={min: 784, max: 156800}",
    ]
    config = load_config(None, ["task=chat", "data.workers=0", *words], need=())
    corpus = index_sources(config, config.data.train, processor, by_curriculum=True)
    plan = plan_curriculum(config.curriculum, corpus.renderers[0].processor, 4)
    tokens = []
    for step in (1, 4):
        staged = replace(corpus, spec=plan.at(step))
        example, cost = staged.example(0, None), staged.find(0)[1]
        assert example.tokens == cost.tokens and int((example.labels[1:] >= 0).sum()) == cost.rows
        tokens.append(example.tokens - sum(m.tokens(2) for m in example.media))
    assert tokens[0] < tokens[1]


# ---- End to end


@pytest.mark.slow
def test_a_video_gets_what_its_finest_frame_needs(tmp_path, processor):
    """The clip as a whole: its frames are alike, and of a moving pattern more is shown than of a grey field."""
    from clips import write_clip

    noise = np.random.default_rng(0).integers(0, 256, (160, 240, 3), dtype=np.uint8)
    flat = np.full_like(noise, 120)
    clips = {name: write_clip(tmp_path / f"{name}.mp4", frames) for name, frames in (
        ("flat", [flat] * 8), ("noise", [flat] * 3 + [noise] * 5)
    )}  # fmt: skip
    file = write(tmp_path / "rows.jsonl", [ask({"type": "video", "video": clip}) for clip in clips.values()])
    budget = "data.video={frame_pixels: {min: 784, max: 50176}, detail: 0.8, cache_mb: 0}"
    _, corpus = opened("chat", file, processor, budget, "data.workers=0")
    flat, noisy = (corpus.example(number, None).media[0].grid for number in range(2))
    assert flat[0] == noisy[0] and flat[1:] == (2, 2) and np.prod(noisy) > 10 * np.prod(flat)
    for number in range(2):
        batch = make_batch(corpus, [(number, None)])
        row = corpus.sources[0].rows[number]
        assert (batch.tokens, len(batch.pixels)) == (row.tokens, row.patches)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_was_learnt_at_a_budget_is_answered_in_the_pictures_pixels(tmp_path, ranks):
    """A run on places, its export, answers to a file and over HTTP: the same tokens, and the row's own boxes."""
    from runs import read_json, read_rows, train
    from serving import serving

    from litchi.train.writing import write_lines

    rows = []
    for number, (box, orientation) in enumerate((([40, 20, 220, 90], 1), ([200, 60, 290, 180], 6))):
        path = turned(tmp_path / f"{number}.jpg", (300, 200), orientation, code="47" * number, seed=9 * number)
        rows.append({"id": f"r{number}"} | talk(path, [box], text="Where?", answer='{"bbox_2d": <box>}'))
    data = write(tmp_path / "rows.jsonl", rows)
    words = [f"data.train={data}", "data.pixels={min: 784, max: 50176, total: 12544, detail: 0.9}", "train.steps=120"]
    words += ["train.global_batch_size=2", "optim.lr=2e-3", "trainable={vision: full, merger: full, language: full}"]
    run = train(ranks, tmp_path / "run", "task=chat", *words)
    pixels = {"min": 784, "max": 50176, "detail": 0.9, "total": 12544}
    assert read_json(run / "export" / "litchi.json")["pixels"] == pixels
    write_lines(str(run), data, ["data.workers=0"], tmp_path / "a.jsonl", ranks, task="chat", restore=True)
    _, corpus = opened("chat", data, make_processor(), *words[1:2], "data.workers=0")
    answers = [row["text"] for row in read_rows(tmp_path / "a.jsonl")]
    for number, (text, row) in enumerate(zip(answers, rows, strict=True)):
        frame = corpus.frame(number)
        slack = np.array([1 + size / shown for size, shown in zip(frame.own * 2, frame.shown * 2, strict=True)])
        assert (np.abs(np.array(json.loads(text)["bbox_2d"]) - row["boxes"][0]) <= slack).all()
    with serving(tmp_path, str(run)) as server:
        assert server.get("/v1/models").json()["data"][0]["pixels"] == pixels
        for number in range(2):
            url = data_url((tmp_path / f"{number}.jpg").read_bytes())
            content = [{"type": "image_url", "image_url": {"url": url}}]
            content.append({"type": "text", "text": "Where?"})
            body = {"messages": [{"role": "user", "content": content}], "restore_boxes": True, "max_tokens": 64}
            reply = server.post("/v1/chat/completions", body).json()
            assert reply["choices"][0]["message"]["content"] == answers[number]
            assert reply["usage"]["prompt_tokens"] == corpus.prompt(number).tokens
        twice = body | {"messages": [{"role": "user", "content": content[:1] * 2 + content[1:]}]}
        assert server.post("/v1/chat/completions", twice | {"stream": True}).status_code == 400


def make_processor():
    from litchi.data.processor import load_processor
    from litchi.model.build import builtin_folder

    return load_processor(builtin_folder())
