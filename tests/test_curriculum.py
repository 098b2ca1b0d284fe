"""Small pictures first: the budget is a function of the step, and what a row costs under it needs no second scan."""

import json
from dataclasses import replace

import pytest
from rendering import draw, renderer_for, say
from runs import chat_rows, read_json, read_rows, train

from litchi.batch.curriculum import Curriculum, largest_spec, plan_curriculum
from litchi.batch.index import ScanRules, build_index
from litchi.batch.loader import Corpus, StepPlan, iterate_steps
from litchi.batch.schedule import EpochPlan
from litchi.batch.sources import index_sources
from litchi.config import load_config
from litchi.errors import UsageError
from litchi.train.losses import count_documents

BUDGETS = [(784, 784), (784, 3136), (3136, 12544), (3136, 50176), (20000, 30000), (3136, 10**6)]


def stages(text):
    return load_config(None, ["task=rerank", f"curriculum={text}"], need=()).curriculum


# ---- The budget of a step


def test_the_budget_is_a_function_of_the_step(processor):
    one = plan_curriculum(
        stages("[{until: 3, pixels: {max: 6272}}, {until: 0.75, pixels: {max: 12544}}]"), processor, 9
    )
    assert one.ends == (3, 7)  # 6.75, rounded up
    assert [one.at(step).max_pixels for step in range(1, 10)] == [6272] * 3 + [12544] * 4 + [50176] * 2
    assert {one.at(step).min_pixels for step in range(1, 10)} == {3136}
    assert one.lines(9) == [
        "steps 1 to 3: 3,136 to 6,272 pixels a picture",
        "steps 4 to 7: 3,136 to 12,544 pixels a picture",
        "steps 8 to 9: 3,136 to 50,176 pixels a picture",
    ]
    assert one.lines(2) == ["steps 1 to 2: 3,136 to 6,272 pixels a picture"]
    assert plan_curriculum((), processor, 9) is None
    whole = plan_curriculum(stages("[{until: 1.0, pixels: {min: 784, max: 784}}]"), processor, 7)
    assert whole.at(7).max_pixels == 784 and len(whole.lines(7)) == 1


def test_a_limit_that_crosses_the_usual_one_moves_it(processor):
    one = plan_curriculum(stages("[{until: 2, pixels: {max: 784}}]"), processor, 4)  # data.pixels.min is 3136
    assert (one.at(1).min_pixels, one.at(1).max_pixels) == (784, 784)


def test_stages_that_do_not_follow_each_other_are_refused(processor):
    for text in ("[{until: 5}, {until: 5}]", "[{until: 0.5}, {until: 3}, {until: 0.5}]"):
        with pytest.raises(UsageError, match="rise"):
            stages(text)
    with pytest.raises(UsageError, match=r"pixels\.max"):
        stages("[{until: 5, pixels: {min: 5000, max: 4000}}]")
    mixed = stages("[{until: 5}, {until: 0.5}]")
    assert plan_curriculum(mixed, processor, 20).ends == (5, 10)
    with pytest.raises(UsageError, match="stage 2 ends at step 5, the one before it at step 5"):
        plan_curriculum(mixed, processor, 10)


# ---- Costs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("curriculum")


@pytest.fixture(scope="module")
def pictures(folder):
    sizes = [(56, 56), (84, 140), (300, 200), (1000, 90), (28, 28), (640, 480)]
    return [draw(folder / f"{k}.png", *size, seed=k) for k, size in enumerate(sizes)]


def group_rows(pictures, count=8):
    """A query's picture that comes back in a document, documents that share one, pictures in a common prefix."""
    rows = []
    for n in range(count):
        p = [pictures[(n + k) % 6] for k in range(4)]
        query = {"text": "like this", "image": p[0]} if n % 2 else f"a bag{' of red' * n}"
        negatives = [{"image": p[2]}, {"text": "it", "image": p[1]}, "a hat", {"image": p[2]}, {"image": p[3]}]
        rows.append({"query": query, "pos_doc": {"text": "it", "image": p[0]}, "neg_docs": negatives[: 2 + n % 4]})
    rows.append({"query": "?", "pos_doc": {"image": pictures[5], "text": "a"}, "neg_docs": [{"image": pictures[5]}]})
    return rows


def talk_rows(pictures):
    rows = []
    for n in range(7):
        shown = [pictures[(n + k) % 6] for k in (0, 1, 0)][: n % 4]  # the third is the first again
        turns = [{"role": "user", "content": say("What?", *shown)}, {"role": "assistant", "content": "a bag"}]
        rows.append({"messages": turns})
    return rows


def scan(path, renderer, spec=None, limit=100_000):
    renderer = renderer if spec is None else replace(renderer, processor=replace(renderer.processor, vision=spec))
    return build_index(str(path), path.stem, renderer, ScanRules(max_length=limit))


@pytest.mark.parametrize("task", ["rerank", "chat"])
def test_a_row_under_another_budget_is_what_a_scan_under_it_finds(folder, pictures, processor, task):
    path = folder / f"{task}.jsonl"
    rows = group_rows(pictures) if task == "rerank" else talk_rows(pictures)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    renderer = renderer_for(task, processor)
    found = scan(path, renderer)
    assert len({row.tokens for row in found.rows}) > 3
    for low, high in BUDGETS:
        spec = replace(processor.vision, min_pixels=low, max_pixels=high)
        there = scan(path, renderer, spec)
        assert [row.at(spec) for row in found.rows] == list(there.rows)
        corpus = Corpus((found,), (renderer,), spec)
        for number, row in enumerate(there.rows):
            chosen = row.chosen(0, 0, 2)
            example = corpus.example(number, chosen)
            work = corpus.find(number)[1].work(chosen)
            assert work.tokens >= example.tokens if chosen else work.tokens == example.tokens
            assert sorted(work.grids) == sorted(m.grid for m in example.media) and len(work.pictures) == len(work.grids)
    largest = largest_spec([replace(processor.vision, min_pixels=low, max_pixels=high) for low, high in BUDGETS])
    assert (largest.min_pixels, largest.max_pixels) == (20000, 10**6)
    for row in found.rows:
        specs = [replace(processor.vision, min_pixels=low, max_pixels=high) for low, high in BUDGETS]
        assert row.at(largest).tokens >= max(row.at(spec).tokens for spec in specs)


def test_rows_are_judged_at_the_largest_budget(folder, pictures, processor):
    path = folder / "talks.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in talk_rows(pictures)), encoding="utf-8")
    words = ["task=chat", f"data.train={path}", "data.pixels={min: 3136, max: 6272}", "data.max_length=100"]

    def rows(*more, **how):
        config = load_config(None, [*words, *more], need=())
        return index_sources(config, config.data.train, processor, **how)

    grows = "curriculum=[{until: 0.5, pixels: {max: 100000}}]"
    plain, grown = rows(by_curriculum=True), rows(grows, by_curriculum=True)
    assert len(grown.sources[0].rows) < len(plain.sources[0].rows)
    assert {f.code for f in grown.sources[0].findings} == {"too_long"}
    assert rows(grows).sources[0].rows == plain.sources[0].rows, "what is measured has data.pixels"
    assert plain.spec is None and grown.spec.max_pixels == 6272 == grown.renderers[0].processor.vision.max_pixels
    small = rows("curriculum=[{until: 0.5, pixels: {max: 784}}]", by_curriculum=True)
    assert small.sources[0].rows == plain.sources[0].rows


# ---- Steps


def steps(plan, first, last):
    return [b for _, b, _ in iterate_steps(plan, first, last, workers=0, count_units=count_documents)]


def test_steps_follow_their_budget_from_any_step_on_and_on_any_ranks(folder, pictures, processor):
    path = folder / "groups.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in group_rows(pictures)), encoding="utf-8")
    renderer = renderer_for("rerank", processor)
    corpus = Corpus((scan(path, renderer),), (renderer,), processor.vision)
    small = replace(processor.vision, min_pixels=784, max_pixels=3136)
    curriculum = Curriculum((2, 4), (small, replace(small, max_pixels=12544)), processor.vision)
    whole = StepPlan(corpus, EpochPlan(corpus.sizes, (1.0,), 0, 3), 2, 400, 0, 1, curriculum=curriculum)
    made = steps(whole, 1, 6)
    for step, batches in enumerate(made, 1):
        most = {1: 3136, 2: 3136, 3: 12544, 4: 12544}.get(step, 50176)
        areas = [h * w * 14 * 14 for batch in batches for _, h, w in batch.grids]
        assert areas and most / 4 < max(areas) <= most
        assert all(batch.tokens <= 400 or len(batch.samples) == 1 for batch in batches)
        tokens = sum(batch.tokens for batch in batches)
        planned = [
            whole.corpus_at(step).find(row)[1].work(chosen).tokens
            for micro in whole.micro_batches(step)
            for row, chosen in micro
        ]
        assert tokens <= sum(planned) <= tokens + 20
    counts = [len(batches) for batches in made]
    assert counts[0] < counts[4], "fewer micro-batches while pictures are small"
    for batches, again in zip(made[2:], steps(whole, 3, 6), strict=True):  # a start in the middle
        assert [b.grids for b in batches] == [b.grids for b in again]
        assert all((a.pixels == b.pixels).all() for a, b in zip(batches, again, strict=True))
    halves = [steps(replace(whole, rank=rank, ranks=2), 1, 6) for rank in range(2)]
    for step, batches in enumerate(made):
        there = {s: g for half in halves for b in half[step] for s, g in zip(b.samples, [b.grids] * 9, strict=False)}
        assert sorted(there) == sorted(s for b in batches for s in b.samples)
        grids = {g for half in halves for b in half[step] for g in b.grids}
        assert grids == {g for b in batches for g in b.grids}


def test_a_run_grows_its_pictures_and_exports_the_full_budget(tmp_path, ranks):
    rows = chat_rows(tmp_path, 4)
    words = ("task=chat", f"data.train={rows}", "data.pixels={min: 784, max: 12544}", "train.steps=3")
    grown = train(
        ranks,
        tmp_path / "grown",
        *(*words, "train.global_batch_size=4", "curriculum=[{until: 0.5, pixels: {min: 784, max: 3136}}]"),
    )
    pixels = [row["pixels"] for row in read_rows(grown / "metrics.jsonl")]
    assert pixels == [1568 + 2352, 1568 + 2352, 6272 + 9408]
    assert read_json(grown / "export" / "litchi.json")["pixels"] == {"min": 784, "max": 12544}
