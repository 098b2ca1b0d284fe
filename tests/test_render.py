"""Chat rows as tokens: what is learnt is known by construction, ordinary rows are what transformers makes of them."""

import pytest
from rendering import chat, draw, oracle_chat, render, renderer_for, sample, say

from litchi.data.processor import END_OF_TURN, IMAGE_PAD
from litchi.data.values import RowError
from litchi.types import IGNORE


@pytest.fixture(scope="module")
def renderer(processor):
    return renderer_for("chat", processor)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    sizes = [(56, 56), (84, 140), (196, 112)]
    return [draw(folder / f"{i}.png", *size, seed=i) for i, size in enumerate(sizes)]


def learnt(renderer, example):
    """The trained runs of an example as texts, with their control tokens written out."""
    runs, before = [], False
    for token in example.labels.tolist():
        if token != IGNORE:
            runs = runs if before else [*runs, []]
            runs[-1].append(token)
        before = token != IGNORE
    return [renderer.processor._full.decode(run, skip_special_tokens=False) for run in runs]


def answer(text):
    return text + END_OF_TURN + "\n"


CASES = {
    "one turn": ([("user", "What is this?"), ("assistant", "A red dress.")], ["A red dress."]),
    "many turns": (
        [("user", "Colour?"), ("assistant", "red"), ("user", "And now?"), ("assistant", "still red")],
        ["red", "still red"],
    ),
    "system": ([("system", "Answer in one word."), ("user", "Colour?"), ("assistant", "red")], ["red"]),
    "not trained": (
        [("user", "a"), ("assistant", "first", False), ("user", "b"), ("assistant", "second")],
        ["second"],
    ),
    "last not trained": (
        [("user", "a"), ("assistant", "first"), ("user", "b"), ("assistant", "second", False)],
        ["first"],
    ),
    "the answer stands in the question": ([("user", "red or red or blue?"), ("assistant", "red")], ["red"]),
    "the answer is a role": ([("user", "assistant"), ("assistant", "assistant")], ["assistant"]),
    "spaces and a newline": ([("user", "a"), ("assistant", "  two leading spaces\n")], ["  two leading spaces\n"]),
    "begins with newlines": ([("user", "a"), ("assistant", "\n\nred")], ["\n\nred"]),
    "only newlines": ([("user", "a"), ("assistant", "\n\n")], ["\n\n"]),
    "empty": ([("user", "a"), ("assistant", "")], [""]),
    "empty between": ([("user", "a"), ("assistant", ""), ("user", "b"), ("assistant", "red")], ["", "red"]),
    "nothing asked": ([("user", ""), ("assistant", "red")], ["red"]),
    "no question at all": ([("assistant", "red")], ["red"]),
    "two answers in a row": ([("user", "a"), ("assistant", "red"), ("assistant", "blue")], ["red", "blue"]),
    "in parts": ([("user", "a"), ("assistant", [{"type": "text", "text": t} for t in ("re", "d")])], ["red"]),
    "Chinese": ([("user", "是什么颜色？"), ("assistant", "红色。")], ["红色。"]),
    "braces and placeholders": ([("user", "{{ x }} {query} \ue0000\ue001"), ("assistant", "{% y %}")], ["{% y %}"]),
    "a mark in an answer": ([("user", "a"), ("assistant", "an <image> mark")], ["an <image> mark"]),
    "control tokens in an answer": (
        [("user", "a"), ("assistant", "x<|im_end|>\n<|image_pad|>y")],
        ["x<|im_end|>\n<|image_pad|>y"],
    ),
}


@pytest.mark.parametrize(("turns", "answers"), CASES.values(), ids=CASES)
def test_what_is_learnt_is_each_trained_answer_with_its_end(renderer, turns, answers):
    example = render(renderer, chat(renderer, *turns))
    # neighbouring answers make one run only where nothing stands between them; a header always does
    assert learnt(renderer, example) == [answer(text) for text in answers]
    trained = example.labels != IGNORE
    assert (example.labels[trained] == example.ids[trained]).all()
    assert example.spans == ((0, example.tokens, -1),)


def test_nothing_to_learn_is_refused(renderer):
    with pytest.raises(RowError) as error:
        render(renderer, chat(renderer, ("user", "a"), ("assistant", "first", False)))
    assert error.value.code == "nothing_to_learn"


TYPED = "<|im_end|> <|im_start|>assistant <|image_pad|><|vision_start|> <|endoftext|>"


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_control_tokens_typed_by_a_user_are_letters(renderer, role):
    turns = [("system", "s"), ("user", "u"), ("assistant", "a")]
    plain = render(renderer, chat(renderer, *turns))
    typed = render(renderer, chat(renderer, *((r, TYPED if r == role else text) for r, text in turns)))
    controls = set(renderer.processor.controls.values())
    assert [i for i in typed.ids if i in controls] == [i for i in plain.ids if i in controls] != []
    assert renderer.processor.control(IMAGE_PAD) not in typed.ids and typed.media == ()
    text = renderer.processor._full.decode(typed.ids.tolist(), skip_special_tokens=False)
    assert TYPED in text


def test_control_tokens_typed_into_a_rerank_row_are_letters(processor):
    renderer = renderer_for("rerank", processor)
    row = {"query": TYPED, "pos_doc": TYPED, "neg_docs": ["red"], "instruction": TYPED}
    plain = {"query": "q", "pos_doc": "d", "neg_docs": ["red"], "instruction": "i"}
    typed, other = (render(renderer, sample(renderer, r)) for r in (row, plain))
    controls = set(processor.controls.values())
    counts = [sum(i in controls for i in example.ids.tolist()) for example in (typed, other)]
    assert counts[0] == counts[1] > 0


# ---- Against transformers


def ordinary(pictures):
    return [
        [("user", "What is this?"), ("assistant", "A red dress.")],
        [("system", "Answer in one word."), ("user", "Colour?"), ("assistant", "red\n")],
        [("user", "多少钱？"), ("assistant", "  二十。"), ("user", "ok (then)"), ("assistant", "Bye")],
        [("user", say("What is it?", pictures[0])), ("assistant", "a bag")],
        [("user", say("Compare: ", *pictures)), ("assistant", "the third"), ("user", "Why?"), ("assistant", "size")],
        [
            ("user", say("", pictures[1])),
            ("assistant", "a hat"),
            ("user", say("?\n", pictures[2], pictures[1])),
            ("assistant", ": red"),
        ],
    ]


def test_ordinary_rows_have_the_ids_of_transformers(renderer, hf_processor, pictures):
    tokens = []
    for turns in ordinary(pictures):
        one = chat(renderer, *turns)
        example = render(renderer, one)
        inputs = oracle_chat(hf_processor, one)
        assert example.ids.tolist() == inputs["input_ids"][0].tolist()
        tokens.append(int((example.ids == renderer.processor.control(IMAGE_PAD)).sum()))
        grids = [list(example.media[number].grid) for number, _ in example.media_at]
        assert grids == (inputs["image_grid_thw"].tolist() if "image_grid_thw" in inputs else [])
    assert len(set(tokens)) == 4 and tokens[0] == 0


def test_the_prompt_of_an_answer_is_the_row_up_to_it(renderer, hf_processor, pictures):
    for turns in ordinary(pictures):
        one = chat(renderer, *turns)
        whole = render(renderer, one)
        grids = {placed.media.key: placed.grid for placed in whole.media}
        prompt, wanted = renderer.render_prompt(one, lambda media, grids=grids: grids[media.key])
        assert wanted == turns[-1][1]
        assert prompt.ids.tolist() == oracle_chat(hf_processor, one, prompt=True)["input_ids"][0].tolist()
        assert prompt.ids.tolist() == whole.ids[: prompt.tokens].tolist()


def test_a_prompt_without_a_turn_is_refused(renderer):
    with pytest.raises(RowError) as error:
        renderer.render_prompt(chat(renderer, ("assistant", "red")), lambda media: (1, 2, 2))
    assert error.value.code == "chat_template"


def test_interleaved_pictures_stand_where_they_were_put(renderer, pictures):
    marks = {"role": "user", "content": "a <image> b <image> c <image>"}
    row = {"messages": [marks, {"role": "assistant", "content": "x"}], "images": [pictures[k] for k in (1, 0, 1)]}
    example = render(renderer, sample(renderer, row))
    assert [placed.media.path for placed in example.media] == [pictures[1], pictures[0]]
    assert [number for number, _ in example.media_at] == [0, 1, 0], "the repeated picture is one picture"
    pad = renderer.processor.control(IMAGE_PAD)
    counts = [example.media[number].tokens(2) for number, _ in example.media_at]
    assert counts == [15, 4, 15]
    for (_, start), count in zip(example.media_at, counts, strict=True):
        assert (example.ids[start : start + count] == pad).all()
        assert example.ids[start - 1] != pad != example.ids[start + count]
    assert (example.ids == pad).sum() == sum(counts)


def test_a_video_stands_as_its_own_tokens(renderer):
    """Three frames of the grid of 2 x 1 tokens, placed without opening the file."""
    turns = ("user", [{"type": "video", "video": "/film.mp4", "fps": 1}, {"type": "text", "text": "?"}])
    example = renderer.render(chat(renderer, turns, ("assistant", "x")), lambda media: (3, 4, 2, 1.5))
    start, pad, end = (
        renderer.processor.control(f"<|{name}|>") for name in ("vision_start", "video_pad", "vision_end")
    )
    (place,) = example.media_at
    assert example.ids[place[1] - 1 : place[1] + 7].tolist() == [start, *[pad] * 6, end]
    assert example.media[0].step_s == 1.5 and example.media[0].grid == (3, 4, 2)
