"""Rerank prompts token by token: equal to transformers' real Qwen2.5 tokenizer on the whole prompt.

`golden/templates.json` was written by `golden/make_templates.py`, in which no code of Litchi's renderer takes part.
The tokenizer beside it knows the pieces of these prompts only; `real_ids` says what they are in the real one.
"""

import importlib.util
import json
from pathlib import Path

import pytest

from litchi.data.processor import IMAGE_PAD, Processor
from litchi.data.render import Renderer, common_prefix
from litchi.data.templates import TEMPLATES, find_template
from litchi.errors import UsageError
from litchi.types import Content, Document, Media, RerankSample, Source, VisionSpec

GOLDEN = Path(__file__).parent / "golden"
VISION = VisionSpec(14, 2, 2, 112, 3136, 3136, (0.5,) * 3, (0.5,) * 3)
ONE_TOKEN = (1, 2, 2)  # a grid of one token, so that a picture is as long as its placeholder in the golden prompt


@pytest.fixture(scope="module")
def golden():
    return json.loads((GOLDEN / "templates.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def processor():
    return Processor((GOLDEN / "tokenizer.json").read_text(encoding="utf-8"), None, VISION)


def content(text, pictures, name):
    return Content(text, tuple(Media("image", path=f"/{name}-{i}.png") for i in range(pictures)))


def group(case, documents):
    query = content(*case["query"], "query")
    listed = tuple(Document(f"d{i}", content(*d, f"d{i}"), 0.0) for i, d in enumerate(documents))
    return RerankSample(Source("rows.jsonl", 1), "q", query, listed, case["instruction"])


def render(processor, case, documents, chosen=None):
    renderer = Renderer("rerank", processor, find_template(case["template"]))
    return renderer.render(group(case, documents), lambda media: ONE_TOKEN, chosen)


def test_every_prompt_has_the_ids_of_the_real_tokenizer(golden, processor):
    seen = set()
    for case in golden["cases"]:
        example = render(processor, case, [case["document"]])
        assert [golden["real_ids"][i] for i in example.ids] == case["ids"], case
        seen.add((case["template"], case["query"][1] > 0, case["document"][1] > 0))
    assert seen == {(name, q, d) for name in TEMPLATES for q in (False, True) for d in (False, True)}


def test_the_golden_prompts_are_hard(golden, processor):
    """A prompt put together from pieces tokenised on their own would have other ids."""
    other = 0
    for case in golden["cases"]:
        template = find_template(case["template"])
        if case["query"][1] or case["document"][1]:
            continue
        pieces = template.text.replace("{document}", "\0{document}\0").replace("{query}", "\0{query}\0").split("\0")
        slots = {"{query}": case["query"][0], "{document}": case["document"][0]}
        instruction = case["instruction"] or template.instruction
        texts = [slots.get(p, p).replace("{instruction}", instruction) for p in pieces]
        controls = [part for text in texts for part in enumerate(processor.split_controls(text))]
        ids = [i for odd, part in controls for i in ([processor.control(part)] if odd % 2 else processor.encode(part))]
        other += [golden["real_ids"][i] for i in ids] != case["ids"]
    assert other > 20


@pytest.mark.parametrize("name", TEMPLATES)
def test_label_words_are_one_token_each(name, golden, processor):
    words = (TEMPLATES[name].yes, TEMPLATES[name].no)
    real = [[golden["real_ids"][processor.word(word)]] for word in words]
    assert real == [golden["words"][word] for word in words]
    assert real[0] != real[1]


def test_a_label_word_of_several_tokens_is_refused(processor):
    with pytest.raises(UsageError, match=r"'yes\?' is 2 tokens"):
        processor.word("yes?")


def test_an_unknown_template_names_the_known_ones():
    with pytest.raises(UsageError, match=r"data.template is 'lichee': known templates: .*lychee"):
        find_template("lichee")


# ---- The shared prefix


def whole_prompts(golden, case):
    """Golden prompts of one query, and what each has as its document."""
    same = ("template", "instruction", "query")
    return [c for c in golden["cases"] if all(c[k] == case[k] for k in same)]


def prompt_of(example, number):
    """Prefix and one child put together."""
    (start, end, _), (a, b, _) = example.spans[0], example.spans[number + 1]
    return [*example.ids[start:end].tolist(), *example.ids[a:b].tolist()]


def test_prefix_and_child_are_the_whole_prompt_and_the_prefix_is_the_longest(golden, processor):
    shared = []
    for case in [c for c in golden["cases"] if c["template"] == "lychee"]:
        prompts = [c for c in whole_prompts(golden, case) if c["document"][1] == 0]
        if len(prompts) < 2:
            continue
        example = render(processor, case, [c["document"] for c in prompts])
        ids = [[golden["real_ids"][i] for i in prompt_of(example, n)] for n in range(len(prompts))]
        assert ids == [c["ids"] for c in prompts]
        prefix = example.spans[0][1]
        differ = {c["ids"][prefix] for c in prompts}
        assert len(differ) > 1, "one more token could have been shared"
        shared.append(prefix)
    assert len(shared) > 10 and min(shared) > 40


def test_documents_that_begin_alike_share_their_beginning(golden, processor):
    case = next(c for c in golden["cases"] if c["template"] == "lychee")
    both = [["the same start, then one", 0], ["the same start, then another", 0]]
    apart = render(processor, case, [["A red dress of cotton.", 0], *both])
    together = render(processor, case, both)
    assert together.spans[0][1] >= apart.spans[0][1] + 4
    assert prompt_of(together, 0) == prompt_of(apart, 1)


def test_chosen_documents_are_rendered_in_that_order(golden, processor):
    case = next(c for c in golden["cases"] if c["template"] == "lychee")
    documents = [["red", 0], ["a dress", 0], ["two", 0]]
    example = render(processor, case, documents, chosen=(2, 0))
    assert example.doc_ids == ("d2", "d0")
    assert [prompt_of(example, n) for n in (0, 1)] == [
        prompt_of(render(processor, case, [documents[k]]), 0) for k in (2, 0)
    ]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_prefix_never_cuts_a_picture(name, processor):
    """Two documents that begin with the same picture share all of it, different pictures of one size share none."""
    grid = (1, 4, 6)
    pad = processor.control(IMAGE_PAD)
    renderer = Renderer("rerank", processor, find_template(name))
    one, other = (Content("red", (Media("image", path=p),)) for p in ("/a.png", "/b.png"))
    for documents, in_prefix in (((one, Content("two", one.media)), 6), ((one, other), 0)):
        listed = tuple(Document(f"d{i}", d, 0.0) for i, d in enumerate(documents))
        sample = RerankSample(Source("rows.jsonl", 1), "q", Content("a dress"), listed)
        example = renderer.render(sample, lambda media: grid)
        spans = [example.ids[a:b] for a, b, _ in example.spans]
        counts = [int((ids == pad).sum()) for ids in spans]
        assert counts == [in_prefix, 6 - in_prefix, 6 - in_prefix]
        for number, start in example.media_at:
            assert (example.ids[start : start + 6] == pad).all()
            assert any(a <= start and start + 6 <= b for a, b, _ in example.spans)
            assert example.media[number].tokens(2) == 6


def test_common_prefix_leaves_every_prompt_a_token():
    assert common_prefix([[1, 2, 3], [1, 2, 3, 4]]) == 2
    assert common_prefix([[1, 2, 3], [1, 2, 4]]) == 2
    assert common_prefix([[1, 2, 3]]) == 2
    assert common_prefix([[1, 5, 3], [1, 2, 3], [1, 5, 3]]) == 1


# ---- The golden files themselves


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("dashscope") is None, reason="needs dashscope, which brings qwen.tiktoken")
def test_the_reduced_tokenizer_is_a_part_of_the_full_one(golden, processor, monkeypatch):
    monkeypatch.syspath_prepend(GOLDEN.parents[1] / "recipes" / "tiny_base")
    import tokenizer as recipe

    folder = Path(importlib.util.find_spec("dashscope").submodule_search_locations[0]) / "resources"
    full = Processor(json.dumps(recipe.tokenizer_json(*recipe.read(folder))), None, VISION)
    cases = [c for c in golden["cases"] if c["template"] == "lychee"]
    for case in cases:
        assert render(full, case, [case["document"]]).ids.tolist() == case["ids"]
    assert cases
