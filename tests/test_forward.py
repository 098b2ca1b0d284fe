"""Batch -> loss and scores: packing, sharing and de-duplication change nothing, and transformers says the same."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from rendering import chat, draw, oracle_chat, oracle_pairs, pack, pictures_of, render, renderer_for, sample, say

from litchi.batch.collate import collate
from litchi.data.processor import IMAGE_PAD
from litchi.model.build import load_model
from litchi.model.family import FAMILIES
from litchi.model.forward import LitchiModel
from litchi.train.losses import bce, count_documents
from litchi.types import IGNORE


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    sizes = [(56, 56), (84, 140), (140, 84), (112, 112)]
    return [draw(folder / f"{i}.png", *size, seed=i) for i, size in enumerate(sizes)]


def chat_model(loaded, processor, **options):
    return LitchiModel(loaded.hf, loaded.family, processor.vision, **options)


def score_model(loaded, processor):
    words = (processor.word("yes"), processor.word("no"))
    return LitchiModel(loaded.hf, loaded.family, processor.vision, words=words, score_loss=bce)


def gradients(loss, hf):
    """Gradients by name; zeros where a parameter takes no part."""
    found = torch.autograd.grad(loss, list(hf.parameters()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(hf.named_parameters(), found, strict=True)}


def assert_gradients_equal(found, wanted, tolerance=1e-5):
    """Equal relative to the largest entry of each tensor, or of them all where a tensor's own is rounding noise."""
    assert found.keys() == wanted.keys()
    most = max(float(g.abs().max()) for g in wanted.values())
    for name, gradient in wanted.items():
        largest = float(gradient.abs().max())
        error = float((found[name] - gradient).abs().max())
        assert error <= tolerance * max(largest, 0.1 * most), f"{name}: {error:.2g} of {largest:.2g}"
    for part in ("visual.blocks", "visual.merger", "language_model"):
        assert any(float(g.abs().max()) > 0 for name, g in wanted.items() if part in name), part


def assert_close(found, wanted, tolerance=1e-5):
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


# ---- Chat


def conversations(renderer, pictures):
    return [
        chat(renderer, ("user", "What colour is the sky?"), ("assistant", "blue")),
        chat(renderer, ("user", say("What is it?", pictures[1])), ("assistant", "a red bag")),
        chat(
            renderer,
            ("system", "Answer."),
            ("user", say("Which is larger?", pictures[0], pictures[2])),
            ("assistant", "the second"),
            ("user", "Why?"),
            ("assistant", "it is wider"),
        ),
    ]


def hf_chat_loss(hf_model, hf_processor, samples, examples, side="right"):
    """Sum of the token losses in transformers' padded forward of whole strings."""
    hf_processor.tokenizer.padding_side = side
    texts = [hf_processor.tokenizer.decode(oracle_chat(hf_processor, s)["input_ids"][0]) for s in samples]
    short = []  # the processor expands placeholders itself
    for text in texts:
        while IMAGE_PAD * 2 in text:
            text = text.replace(IMAGE_PAD * 2, IMAGE_PAD)
        short.append(text)
    images = [p for s in samples for p in pictures_of(s)]
    inputs = hf_processor(text=short, images=images or None, return_tensors="pt", padding=True)
    labels = torch.full_like(inputs["input_ids"], IGNORE)
    for row, example in enumerate(examples):
        real = inputs["attention_mask"][row].bool()
        assert inputs["input_ids"][row][real].tolist() == example.ids.tolist()
        labels[row][real] = torch.from_numpy(example.labels).long()
    logits = hf_model(**inputs, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE, reduction="sum")


def test_packed_samples_equal_each_alone(loaded, processor, pictures):
    renderer, model = renderer_for("chat", processor), chat_model(loaded, processor)
    examples = [render(renderer, s) for s in conversations(renderer, pictures)]
    packed = pack(renderer, examples)
    alone = [pack(renderer, [e]) for e in examples]
    assert packed.tokens == sum(b.tokens for b in alone) and packed.units == sum(b.units for b in alone) > 20
    loss, losses = model(packed).loss, [model(b).loss for b in alone]
    assert_close(loss, sum(losses))
    assert len({round(x.item(), 3) for x in losses}) == 3
    assert_gradients_equal(gradients(loss, loaded.hf), gradients(sum(losses), loaded.hf))


@pytest.mark.parametrize("side", ["left", "right"])
def test_chat_loss_and_gradients_equal_transformers(loaded, hf_model, hf_processor, processor, pictures, side):
    renderer, model = renderer_for("chat", processor), chat_model(loaded, processor)
    samples = conversations(renderer, pictures)
    examples = [render(renderer, s) for s in samples]
    batch = pack(renderer, examples)
    assert len(batch.image_at) > 20
    loss = model(batch).loss
    wanted = hf_chat_loss(hf_model, hf_processor, samples, examples, side)
    assert_close(loss, wanted)
    assert_gradients_equal(gradients(loss, loaded.hf), gradients(wanted, hf_model))


def test_the_order_of_samples_changes_nothing(loaded, processor, pictures):
    renderer, model = renderer_for("chat", processor), chat_model(loaded, processor)
    examples = [render(renderer, s) for s in conversations(renderer, pictures)]
    with torch.no_grad():
        losses = [model(pack(renderer, e)).loss for e in (examples, examples[::-1])]
    assert_close(*losses)


def test_loss_in_chunks_of_rows_is_the_whole_loss(loaded, processor, monkeypatch):
    model = chat_model(loaded, processor)
    hidden = torch.randn(7, 128, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(7) * 11
    whole = model.token_loss(hidden, targets)
    monkeypatch.setattr("litchi.model.token_loss.rows_at_once", lambda vocabulary, device: 3)
    assert_close(model.token_loss(hidden, targets), whole)
    assert whole > 1


# ---- Rerank


def groups(renderer, pictures):
    rows = [
        {"query": "a red bag", "pos_doc": {"image": pictures[1]}, "neg_docs": [{"image": p} for p in pictures[2:]]},
        {
            "query": {"text": "the same?", "image": pictures[0]},
            "pos_doc": "a red bag",
            "neg_docs": ["(blue) hat", {"text": "shoe", "image": pictures[3]}, "a red hat"],
        },
        {"query": "hat?", "pos_doc": "a hat", "neg_docs": ["\na bag"], "instruction": "Find the product."},
    ]
    return [sample(renderer, row, number) for number, row in enumerate(rows, 1)]


def pairs(renderer, group):
    """Each document of a group with the query to itself."""
    return [render(renderer, group, [number]) for number in range(len(group.documents))]


def test_a_shared_prefix_equals_independent_pairs(loaded, processor, pictures):
    renderer, model = renderer_for("rerank", processor), score_model(loaded, processor)
    found = [render(renderer, g) for g in groups(renderer, pictures)]
    independent = [e for g in groups(renderer, pictures) for e in pairs(renderer, g)]
    together, apart = pack(renderer, found, count_documents), [pack(renderer, [e]) for e in independent]
    assert together.tokens < 0.7 * sum(b.tokens for b in apart) and len(together.image_at) > 20
    assert together.units == 9 and together.groups == ((0, 3), (3, 7), (7, 9))
    one, many = model(together), [model(b) for b in apart]
    assert_close(one.scores, torch.cat([o.scores for o in many]))
    assert one.scores.std() > 1e-3
    loss = bce(torch.cat([o.scores for o in many]), together.targets, together.groups)
    assert_close(one.loss, loss)
    assert_gradients_equal(gradients(one.loss, loaded.hf), gradients(loss, loaded.hf), 2e-5)


def test_a_score_does_not_depend_on_neighbours_order_or_batch_size(loaded, processor, pictures):
    renderer, model = renderer_for("rerank", processor), score_model(loaded, processor)
    parsed = groups(renderer, pictures)
    with torch.no_grad():
        scores = {}
        for chosen in ([0], [1], [2], [0, 1, 2], [2, 0, 1], [1, 1]):
            batch = pack(renderer, [render(renderer, parsed[n]) for n in chosen])
            found = model(batch).scores
            for n, (a, b) in zip(chosen, batch.groups, strict=True):
                scores.setdefault(n, []).append(found[a:b])
        for several in scores.values():
            for other in several[1:]:
                assert_close(other, several[0])
        order = [3, 0, 2, 1]
        shuffled = model(pack(renderer, [render(renderer, parsed[1], order)])).scores
        assert_close(shuffled, scores[1][0][order])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("template", ["lychee", "mono_qwen2_vl"])
def test_scores_equal_transformers_logits_at_the_last_real_token(
    loaded, hf_model, hf_processor, processor, pictures, side, template
):
    renderer = renderer_for("rerank", processor, template)
    words = tuple(processor.word(w) for w in (renderer.template.yes, renderer.template.no))
    model = LitchiModel(loaded.hf, loaded.family, processor.vision, words=words)
    for group in groups(renderer, pictures):
        inputs = oracle_pairs(hf_processor, group, range(len(group.documents)), side=side, template=template)
        mask = inputs["attention_mask"]
        last = [int(row.nonzero().max()) for row in mask]
        with torch.no_grad():
            scores = model(pack(renderer, [render(renderer, group)])).scores
            logits = hf_model(**inputs, use_cache=False).logits[range(len(last)), last]
        assert_close(scores, logits[:, words[0]] - logits[:, words[1]])
        assert len(mask) < 3 or bool((mask == 0).any()), "nothing was padded"


# ---- Pictures


def test_a_repeated_picture_is_encoded_once_and_counts_every_time(loaded, processor, pictures, tmp_path):
    """A copy under another name is another picture to Litchi: the long way to the same loss and gradients."""
    copies = [str(shutil.copy(pictures[1], tmp_path / f"copy-{k}.png")) for k in range(2)]
    renderer, model = renderer_for("chat", processor), chat_model(loaded, processor)

    def batch(second, third):
        asked = [(say("What?", pictures[1], second), "a bag"), (say("And?", third), "a hat")]
        rows = [chat(renderer, ("user", question), ("assistant", answer)) for question, answer in asked]
        return pack(renderer, [render(renderer, row) for row in rows])

    once, thrice = batch(pictures[1], pictures[1]), batch(*copies)
    assert len(once.grids) == 1 and len(thrice.grids) == 3 and len(thrice.pixels) == 3 * len(once.pixels) > 0
    assert torch.equal(once.ids, thrice.ids) and len(once.image_at) == 45
    a, b = model(once).loss, model(thrice).loss
    assert_close(a, b)
    assert_gradients_equal(gradients(a, loaded.hf), gradients(b, loaded.hf))


def test_another_picture_gives_another_loss(loaded, processor, pictures):
    renderer, model = renderer_for("chat", processor), chat_model(loaded, processor)
    rows = [chat(renderer, ("user", say("What?", p)), ("assistant", "a bag")) for p in pictures[:2]]
    with torch.no_grad():
        one, other = (model(pack(renderer, [render(renderer, row)])).loss for row in rows)
    assert abs(one - other) > 1e-3


@pytest.mark.parametrize("task", ["chat", "rerank"])
def test_an_empty_batch_takes_part_without_moving_anything(loaded, processor, task):
    options = {"words": (3, 4), "score_loss": bce} if task == "rerank" else {}
    model = chat_model(loaded, processor, always_vision=True, **options)
    empty = collate([], {}, processor)
    assert empty.units == 0 and empty.tokens == 1
    loss = model(empty).loss
    assert loss.item() == 0.0
    found = torch.autograd.grad(loss, list(loaded.hf.parameters()), allow_unused=True)
    assert all(g is not None and not g.any() for g in found)


def test_text_alone_leaves_the_tower_out_unless_ranks_must_agree(loaded, processor):
    renderer = renderer_for("chat", processor)
    batch = pack(renderer, [render(renderer, chat(renderer, ("user", "a"), ("assistant", "b")))])
    tower = list(loaded.hf.model.visual.parameters())
    losses = [chat_model(loaded, processor, always_vision=always)(batch).loss for always in (False, True)]
    assert losses[0].item() == losses[1].item() > 0
    without, with_blank = (torch.autograd.grad(loss, tower, allow_unused=True) for loss in losses)
    assert all(g is None for g in without)
    assert all(g is not None and not g.any() for g in with_blank)


# ---- Other members of the family


def small_config(kind, tokens):
    """A random member of the family with three heads' worth of everything, its head not tied to the embedding."""
    import transformers

    text = {
        "vocab_size": max(tokens.values()) + 1,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    }
    names = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    ids = {f"{key}_token_id": tokens[f"<|{name}|>"] for key, name in names.items()}
    if kind == "qwen2_vl":
        vision = {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2}
        return transformers.Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
    vision = {"depth": 3, "hidden_size": 64, "out_hidden_size": 64, "num_heads": 4, "intermediate_size": 96}
    vision |= {"fullatt_block_indexes": [1], "window_size": 56}
    return transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def relative(request, base_folder, processor, tmp_path_factory):
    """(transformers' model, Litchi's) of a random member saved to a folder with the base's processor files."""
    import transformers

    kind = getattr(transformers, FAMILIES[request.param].architecture)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    model = kind(small_config(request.param, processor.controls)).eval()
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "chat_template.jinja"):
        shutil.copy(base_folder / name, folder)
    found = load_model(folder, dtype=torch.float32)
    found.hf.requires_grad_(True)
    return model, found


def test_other_members_equal_transformers(relative, hf_processor, pictures):
    hf_model, found = relative
    assert not found.tied
    processor = found.processor.with_pixels(3136, 50176)
    assert processor.vision.window == (56 if found.family.windowed else None)
    renderer, model = renderer_for("chat", processor), chat_model(found, processor)
    samples = conversations(renderer, pictures)
    examples = [render(renderer, s) for s in samples]
    loss = model(pack(renderer, examples)).loss
    wanted = hf_chat_loss(hf_model, hf_processor, samples, examples)
    assert_close(loss, wanted)
    assert_gradients_equal(gradients(loss, found.hf), gradients(wanted, hf_model), 2e-5)


def test_untied_scores_equal_transformers(relative, hf_processor, pictures):
    hf_model, found = relative
    processor = found.processor.with_pixels(3136, 50176)
    renderer, model = renderer_for("rerank", processor), score_model(found, processor)
    group = groups(renderer, pictures)[1]
    inputs = oracle_pairs(hf_processor, group, range(4), side="left")
    with torch.no_grad():
        scores = model(pack(renderer, [render(renderer, group)])).scores
        logits = hf_model(**inputs, use_cache=False).logits[:, -1]
    assert_close(scores, logits[:, model.words[0]] - logits[:, model.words[1]])
    assert scores.abs().min() > 0
