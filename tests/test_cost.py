"""What a sample costs: the formula against torch's count of FLOPs, and attention against the pieces that are run."""

from types import SimpleNamespace

import pytest
import torch
from rendering import chat, draw, pack, render, renderer_for, sample, say
from torch.utils.flop_counter import FlopCounterMode

from litchi.batch.cost import BY_TOKENS, CostModel, Work, forest_pairs
from litchi.config import load_config
from litchi.model.adapters import apply_trainable
from litchi.model.build import builtin_folder, load_model, read_config
from litchi.model.flops import BACKWARD, read_costs
from litchi.model.forward import LitchiModel
from litchi.model.sizes import size_config
from litchi.model.spans import row_pieces, span_pieces
from litchi.model.vision import vision_layout
from litchi.train.losses import bce


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    return [draw(folder / f"{i}.png", *size, seed=i) for i, size in enumerate([(140, 140), (300, 200), (84, 224)])]


def batches(task, processor, pictures):
    """A few batches with the work of each: chat and groups, with pictures, alone and packed."""
    renderer = renderer_for(task, processor)
    if task == "chat":
        one = chat(renderer, ("user", "Which colour is it? " * 12), ("assistant", "red and blue " * 6))
        two = chat(renderer, ("user", say("What is it? " * 9, *pictures[:2])), ("assistant", "a bag " * 9))
        rows = [[two], [one, two]]
    else:
        docs = [{"text": "a bag of red " * 5, "image": p} for p in pictures[1:]]
        one = sample(renderer, {"query": "a red bag " * 9, "pos_doc": docs[0], "neg_docs": [docs[1], "a hat " * 20]})
        two = sample(renderer, {"query": {"text": "hats", "image": pictures[0]}, "pos_doc": "hat", "neg_docs": ["bag"]})
        rows = [[one], [one, two]]
    for samples in rows:
        examples = [render(renderer, s) for s in samples]
        batch = pack(renderer, examples)
        pairs = sum(forest_pairs(e.spans[0][1], [b - a for a, b, _ in e.spans[1:]]) for e in examples)
        yield batch, Work(batch.tokens, pairs, len(batch.rows), batch.grids)


def pairs_of(pieces):
    """Pairs of queries and keys that pieces compute, the masked half of a causal one left out."""
    total = 0
    for p in pieces:
        q, k = (p.q1 - p.q0) // p.count, (p.k1 - p.k0) // p.count
        total += p.count * (q * (q + 1) // 2 if p.causal else q * k)
    return total


def attention_flops(batch, spec, *, language: int, tower: int, checkpoint: bool = False):
    """By hand, of the tiny model (4 layers, 2 blocks of which the second attends in full, 128 wide): what torch does
    not count because it happens in a function of ours. `language`, `tower`: whether they have a backward."""
    plan = vision_layout(batch.grids, spec).plan if batch.grids else SimpleNamespace(full=(), window=())
    vision = 4 * 128 * (pairs_of(plan.full) + pairs_of(plan.window))
    rows = row_pieces(batch.spans, batch.rows.tolist())
    text = 4 * 128 * (3 * pairs_of(span_pieces(batch.spans)) + pairs_of(rows))
    return text * (1 + language * (BACKWARD + checkpoint)) + vision * (1 + tower * (BACKWARD + checkpoint))


TRAINED = {
    "language": ("trainable.language=full", "trainable.vision=frozen", "trainable.merger=frozen"),
    "lora": ("trainable.language=lora", "trainable.vision=frozen", "trainable.merger=frozen"),
    "merger": ("trainable.language=frozen", "trainable.vision=frozen", "trainable.merger=full"),
    "all": ("trainable.language=full", "trainable.vision=full", "trainable.merger=full"),
    "all by lora": ("trainable.language=lora", "trainable.vision=lora", "trainable.merger=lora"),
}


@pytest.mark.parametrize(
    ("trained", "task", "checkpoint"),
    [
        ("language", "chat", False),
        ("lora", "rerank", False),
        ("lora", "chat", True),
        ("merger", "chat", False),
        ("all", "chat", False),
        ("all", "rerank", True),
        ("all by lora", "chat", True),
    ],
)
def test_costs_are_the_flops_torch_counts(processor, pictures, task, trained, checkpoint):
    words = [*TRAINED[trained], "model.path=builtin:tiny", f"task={task}"]
    trainable = load_config(None, words, need=()).trainable
    loaded = load_model(builtin_folder(), dtype=torch.float32)
    apply_trainable(loaded, trainable)
    if checkpoint:
        loaded.hf.activation_checkpointing_enable({"use_reentrant": False})
        loaded.hf.disable_input_require_grads()  # which would send a gradient through a frozen tower
    scored = {"words": (processor.word("yes"), processor.word("no")), "score_loss": bce} if task == "rerank" else {}
    model = LitchiModel(loaded.hf, loaded.family, processor.vision, **scored).train()
    costs = read_costs(
        read_config(builtin_folder()), scored=task == "rerank", trainable=trainable, checkpoint=checkpoint
    )
    tower = trainable.vision.mode != "frozen"
    for batch, work in batches(task, processor, pictures):
        with FlopCounterMode(display=False) as counter:
            model(batch).loss.backward()
        by_hand = attention_flops(batch, processor.vision, language=True, tower=tower, checkpoint=checkpoint)
        found, counted = costs.cost(work), counter.get_total_flops()
        assert found == pytest.approx(counted + by_hand, rel=0.03), f"{found / (counted + by_hand):.4f}"
        assert by_hand > 0.02 * found


@pytest.mark.parametrize("task", ["chat", "rerank"])
def test_a_forward_costs_what_torch_counts(loaded, processor, pictures, task):
    scored = {"words": (processor.word("yes"), processor.word("no"))} if task == "rerank" else {}
    model = LitchiModel(loaded.hf, loaded.family, processor.vision, **scored)
    costs = read_costs(loaded.hf.config.to_dict(), scored=task == "rerank")
    for batch, work in batches(task, processor, pictures):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(batch)
        whole = counter.get_total_flops() + attention_flops(batch, processor.vision, language=0, tower=0)
        assert costs.cost(work) == pytest.approx(whole, rel=0.02)


# ---- The shape of the formula


def test_windows_and_frames_are_those_of_the_tower(processor):
    """Grids that windows do not divide, and one of two frames."""
    spec = processor.vision
    for grid in ((1, 4, 6), (1, 18, 26), (2, 10, 22), (1, 8, 8)):
        plan = vision_layout([grid], spec).plan
        one = Work(0, 0, 0, (grid,))
        assert CostModel(window_pair=1.0, window=spec.window // spec.patch).cost(one) == pairs_of(plan.window)
        assert CostModel(frame_pair=1.0).cost(one) == pairs_of(plan.full)
        assert CostModel(patch=1.0).cost(one) == grid[0] * grid[1] * grid[2]


def test_without_a_model_cost_is_tokens():
    assert BY_TOKENS.cost(Work(7, 28, 3, ((1, 4, 4),))) == 7


def trainable_of(*words):
    return load_config(None, ["task=chat", "model.path=builtin:tiny", *words], need=()).trainable


def test_a_frozen_tower_costs_a_third_and_lora_two_passes():
    config = size_config("7b")
    frozen, forward = read_costs(config, scored=False, trainable=trainable_of()), read_costs(config, scored=False)
    full = read_costs(config, scored=False, trainable=trainable_of(*TRAINED["all"]))
    assert frozen.frame_pair == forward.frame_pair and full.frame_pair == 3.5 * forward.frame_pair
    assert frozen.patch == pytest.approx(forward.patch, rel=1e-6)
    assert full.patch == pytest.approx(3 * forward.patch, rel=0.01)
    assert 2 < frozen.token / forward.token < 2.05 and full.token == 3 * forward.token
    layers = forward.token + forward.row - 2 * 3584 * 152064
    assert layers == pytest.approx(2 * 6.53e9, rel=0.01), "two for each weight of the layers of 7B"


def test_the_other_member_attends_in_full_and_has_no_gate():
    config = {
        "model_type": "qwen2_vl",
        **{"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
        **{"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
        "vision_config": {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "hidden_size": 1536},
    }
    costs = read_costs(config, scored=True)
    assert costs.window is None and costs.window_pair == 0 and costs.frame_pair == 32 * 4 * 1280
    block = 1280 * 4 * 1280 + 2 * 1280 * 5120
    merger = (5120 * 5120 + 5120 * 1536) / 4
    assert costs.patch == 2 * (3 * 14 * 14 * 1280 + 32 * block + merger)
