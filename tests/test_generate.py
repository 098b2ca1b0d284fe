"""Greedy answers: token for token what transformers generates, whatever shares the batch."""

import random

import pytest
import torch
from rendering import chat, oracle_chat, pack, renderer_for, say

from litchi.batch.collate import collate
from litchi.batch.loader import media_grid
from litchi.model.forward import LitchiModel
from litchi.model.generate import generate_greedy
from litchi.prepare.catalogue import draw, split

QUESTIONS = ["What is in the picture?", "Main colour?", "Which pattern, and why?\nOne word.", "是什么？"]
PROMPTS, LONGEST = 50, 8


@pytest.fixture(scope="module")
def model(loaded, processor):
    return LitchiModel(loaded.hf, loaded.family, processor.vision).eval()


@pytest.fixture(scope="module")
def prompts(processor, tmp_path_factory):
    """Chat samples whose last answer is wanted: one or two pictures of different sizes, some text alone, some turns."""
    folder, rng = tmp_path_factory.mktemp("catalogue"), random.Random(0)
    renderer, samples = renderer_for("chat", processor), []
    for number in range(PROMPTS):
        pictures = []
        for k in range(1 + (number % 9 == 0)):
            path = folder / f"{number}-{k}.png"
            draw(rng.choice(split().train), seed=number + k, side=rng.choice((56, 84, 112))).save(path)
            pictures.append(str(path))
        turns = [("user", say(rng.choice(QUESTIONS), *(pictures if number % 5 else [])))]
        if number % 7 == 0:
            turns += [("assistant", "a bag"), ("user", "Sure?")]
        samples.append(chat(renderer, *turns, ("assistant", "")))
    return renderer, samples


@pytest.fixture(scope="module")
def examples(prompts):
    renderer, samples = prompts
    return [renderer.render_prompt(s, lambda media: media_grid(media, renderer))[0] for s in samples]


@pytest.fixture(scope="module")
def free(model, prompts, examples):
    """What each prompt gives when nothing stops it."""
    answers = generate_greedy(model, pack(prompts[0], examples), stop=(), max_new_tokens=LONGEST)
    assert all(len(a.ids) == LONGEST and not a.finished for a in answers)
    return [a.ids for a in answers]


@pytest.fixture(scope="module")
def stop(free):
    """A token at which about half of the answers end, and most of those not at once."""
    counts = {t: sum(t in ids[1:] for ids in free) for ids in free for t in ids}
    return min(counts, key=lambda t: (abs(counts[t] - PROMPTS // 2), t))


def hf_answer(hf_model, hf_processor, one, stop):
    inputs = oracle_chat(hf_processor, one, prompt=True)
    options = {"do_sample": False, "max_new_tokens": LONGEST, "eos_token_id": stop, "pad_token_id": 0}
    with torch.no_grad():
        return hf_model.generate(**inputs, **options)[0, inputs["input_ids"].shape[1] :].tolist()


def cut(ids, stop):
    return ids[: ids.index(stop)] if stop in ids else ids


def test_tokens_equal_transformers_generate(model, hf_model, hf_processor, prompts, examples, stop):
    renderer, samples = prompts
    answers = generate_greedy(model, pack(renderer, examples), stop=(stop,), max_new_tokens=LONGEST)
    wanted = [hf_answer(hf_model, hf_processor, s, stop) for s in samples]
    assert [a.ids for a in answers] == [cut(w, stop) for w in wanted]
    assert [a.finished for a in answers] == [stop in w for w in wanted]
    assert 5 < sum(a.finished for a in answers) < PROMPTS - 5
    assert len({tuple(w) for w in wanted}) > 5, "the pictures and questions matter"


def test_an_answer_does_not_depend_on_its_batch(model, prompts, examples, free):
    renderer = prompts[0]
    for chosen in ([3], [0, 3], list(range(12, 0, -1)), [3, 3]):
        batch = pack(renderer, [examples[n] for n in chosen])
        found = generate_greedy(model, batch, stop=(), max_new_tokens=LONGEST)
        assert [a.ids for a in found] == [free[n] for n in chosen]


def test_stopping_cuts_each_answer_where_its_own_stop_is(model, prompts, examples, free, stop):
    found = generate_greedy(model, pack(prompts[0], examples), stop=(stop, 0), max_new_tokens=LONGEST)
    assert [a.ids for a in found] == [cut(ids, stop) for ids in free]
    assert len({len(a.ids) for a in found}) > 2, "stops stand at different places"


@pytest.mark.parametrize("longest", [0, 1, 3])
def test_no_answer_is_longer_than_asked(model, prompts, examples, free, longest):
    found = generate_greedy(model, pack(prompts[0], examples[:4]), stop=(), max_new_tokens=longest)
    assert [a.ids for a in found] == [ids[:longest] for ids in free[:4]]


def test_a_rank_without_prompts_steps_along(model, processor):
    """With sharded weights every rank runs every pass: one that has nothing goes on while another is alive."""
    asked = []

    def anyone_alive(here):
        asked.append(here)
        return len(asked) < 4

    assert (
        generate_greedy(model, collate([], {}, processor), stop=(), max_new_tokens=9, anyone_alive=anyone_alive) == []
    )
    assert asked == [False] * 4


def test_a_rank_that_is_done_steps_along_without_changing_its_answers(model, prompts, examples, free):
    batch, asked = pack(prompts[0], examples[:3]), []

    def anyone_alive(here):
        asked.append(here)
        return len(asked) < LONGEST

    found = generate_greedy(
        model, batch, stop=(free[0][1], free[1][1], free[2][1]), max_new_tokens=LONGEST, anyone_alive=anyone_alive
    )
    assert len(asked) == LONGEST and not asked[-1] and all(a.finished and len(a.ids) < 2 for a in found)
    alone = generate_greedy(model, batch, stop=(free[0][1], free[1][1], free[2][1]), max_new_tokens=LONGEST)
    assert found == alone
