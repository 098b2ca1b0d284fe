"""Replaced leaves against the modules of transformers they stand for: forward and gradients, one switch at a time."""

from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from rendering import chat, draw, pack, render, renderer_for, sample, say
from test_attention import forests

from litchi.model.attention import PieceAttention
from litchi.model.build import build_model, builtin_folder, load_model
from litchi.model.forward import LitchiModel
from litchi.model.leaves import GatedMLP, GateDown, Leaves, RMSNorm, folds_stills, leaves_out_rows, liger_gate
from litchi.model.spans import Piece, Pieces, row_pieces, span_pieces
from litchi.model.token_loss import TokenLoss, repeated_token_loss
from litchi.model.vision import normalise_patches
from litchi.train.losses import bce

SWITCHES = [field.name for field in fields(Leaves)]
NONE = Leaves(**dict.fromkeys(SWITCHES, False))


def only(name):
    """The leaves of one switch; rows needs attention."""
    names = {name, "attention"} if name == "rows" else {name}
    return Leaves(**{switch: switch in names for switch in SWITCHES})


@pytest.fixture(scope="module")
def models():
    """The base with each of its leaves alone, with all, and with none: everything trains."""
    wanted = {"none": NONE, "all": Leaves(), **{name: only(name) for name in SWITCHES}}
    found = {name: load_model(builtin_folder(), dtype=torch.float32, leaves=leaves) for name, leaves in wanted.items()}
    for loaded in found.values():
        loaded.hf.requires_grad_(True)
    return found


@pytest.fixture(scope="module")
def batches(processor, tmp_path_factory):
    """A chat batch of three rows with pictures and two turns, and a group with a picture that all documents share."""
    folder = tmp_path_factory.mktemp("pictures")
    pictures = [draw(folder / f"{i}.png", *size, seed=i) for i, size in enumerate([(56, 84), (112, 140), (84, 84)])]
    talk, rank = renderer_for("chat", processor), renderer_for("rerank", processor)
    rows = [
        chat(talk, ("user", say("What?", pictures[0])), ("assistant", "a bag")),
        chat(talk, ("user", "Why?"), ("assistant", "so"), ("user", say("And?", pictures[1])), ("assistant", "a hat")),
        chat(talk, ("user", "a"), ("assistant", "b")),
    ]
    group = {"query": {"text": "same?", "image": pictures[1]}, "pos_doc": "a bag", "neg_docs": ["hat", "a red hat"]}
    group["neg_docs"].append({"text": "shoe", "image": pictures[2]})
    return {
        "chat": pack(talk, [render(talk, row) for row in rows]),
        "rerank": pack(rank, [render(rank, sample(rank, group))]),
    }


def outcome(loaded, processor, batch, task, dtype=None):
    """Loss, scores and gradients by name."""
    scored = {"words": (processor.word("yes"), processor.word("no")), "score_loss": bce} if task == "rerank" else {}
    model = LitchiModel(loaded.hf, loaded.family, processor.vision, **scored)
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        out = model(batch)
    parameters = dict(loaded.hf.named_parameters())
    found = torch.autograd.grad(out.loss, list(parameters.values()), allow_unused=True)
    grads = {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(parameters.items(), found, strict=True)}
    return out, grads


def distance(found, wanted):
    """Largest difference of gradients, relative to the largest entry of each tensor, or to a tenth of the largest of
    all where a tensor's own is rounding noise."""
    most = max(float(g.abs().max()) for g in wanted.values())
    return max(
        float((found[name] - g).abs().max()) / max(float(g.abs().max()), 0.1 * most) for name, g in wanted.items()
    )


@pytest.mark.parametrize("task", ["chat", "rerank"])
@pytest.mark.parametrize("name", [*SWITCHES, "all"])
def test_a_leaf_gives_what_transformers_modules_give(models, processor, batches, name, task):
    out, found = outcome(models[name], processor, batches[task], task)
    plain, wanted = outcome(models["none"], processor, batches[task], task)
    assert out.loss.item() == pytest.approx(plain.loss.item(), rel=1e-6) and plain.loss.item() > 0.1
    if task == "rerank":
        torch.testing.assert_close(out.scores, plain.scores, rtol=1e-5, atol=2e-6)
    assert distance(found, wanted) < 2e-5
    assert found.keys() == wanted.keys() and all(float(wanted[n].abs().max()) > 0 for n in wanted if "proj.w" in n)


@pytest.fixture(autouse=True)
def narrow_is_wide(monkeypatch):
    """The base's MLPs are narrower than those the gate is for."""
    monkeypatch.setattr("litchi.model.leaves.WIDE", 64)


def test_every_leaf_is_in_place_and_none_without_its_switch(models):
    kinds = {name: {type(m) for m in models[name].hf.modules()} for name in models}
    for name in [*SWITCHES, "all"]:
        changed = kinds[name] - kinds["none"]
        assert changed and {k.__name__ for k in changed} <= {k.__name__ for k in kinds["none"]}, name
    tower, layers = models["all"].hf.model.visual, models["all"].hf.model.language_model.layers
    assert folds_stills(tower) and [leaves_out_rows(layer) for layer in layers] == [False, False, False, True]
    norms = [m for m in models["all"].hf.modules() if "RMSNorm" in type(m).__name__]
    assert len(norms) == 2 * 2 + 1 + 2 * 4 + 1 and all(isinstance(m, RMSNorm) for m in norms)
    assert sum(isinstance(m, GatedMLP) for m in models["all"].hf.modules()) == 2 + 4
    names = [list(dict(models[name].hf.named_parameters())) for name in ("none", "all")]
    assert names[0] == names[1]


@pytest.mark.parametrize("task", ["chat", "rerank"])
def test_bf16_is_as_close_to_fp32_as_transformers_modules_are(models, processor, batches, task):
    exact, wanted = outcome(models["none"], processor, batches[task], task)
    errors = {}
    for name in ("none", "all"):
        out, found = outcome(models[name], processor, batches[task], task, torch.bfloat16)
        errors[name] = abs(out.loss.item() / exact.loss.item() - 1), distance(found, wanted)
    assert errors["all"][0] < 0.01 and errors["all"][1] < 2 * errors["none"][1]
    assert 1e-4 < errors["none"][1] < 0.5


def test_a_plain_forward_is_the_one_of_transformers(models, hf_model):
    """Without a plan, as after `from_pretrained`: causal attention, all rows."""
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        found, wanted = models["all"].hf(ids, use_cache=False).logits, hf_model(ids, use_cache=False).logits
    assert found.shape == (1, 20, 869)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_patches_of_differing_frames_take_both_frames(models, processor):
    """As a video's: [P, 3 x 2 x 14 x 14], of which no half may be left out; equal halves are the folded still."""
    spec = processor.vision
    embeds = {name: models[name].hf.model.visual.patch_embed for name in ("none", "all")}
    frames = torch.randint(0, 256, (8, 3, 2, spec.patch**2), dtype=torch.uint8)
    values = normalise_patches(frames.flatten(1), spec)
    with torch.no_grad():
        torch.testing.assert_close(embeds["all"](values), embeds["none"](values), rtol=1e-5, atol=1e-5)
        still = frames[:, :, 0].flatten(1)
        folded = embeds["all"](normalise_patches(still, spec, fold=True))
        torch.testing.assert_close(folded, embeds["none"](normalise_patches(still, spec)), rtol=1e-5, atol=1e-5)
        assert (folded - embeds["all"](values)).abs().max() > 0.01


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
def test_roles_are_classes_of_transformers(model_type):
    """Each role of a family names a class that the model really has."""
    import transformers

    from litchi.model.family import FAMILIES

    family = FAMILIES[model_type]
    kind = getattr(transformers, family.architecture)
    with torch.device("meta"):
        config = kind.config_class()
        config.text_config.num_hidden_layers = config.vision_config.depth = 1
        present = {type(m).__name__ for m in kind._from_config(config).modules()}
    assert {name for name, _ in family.roles} <= present


# ---- Rows of a layer


@settings(max_examples=60, deadline=None)
@given(forests(), st.data())
def test_rows_alone_are_the_rows_of_the_whole(spans, data):
    tokens = spans[-1][1]
    rows = sorted(data.draw(st.sets(st.integers(0, tokens - 1))))
    generator = torch.Generator().manual_seed(len(rows))
    q, k, v = (torch.randn(tokens, heads, 16, generator=generator).requires_grad_() for heads in (4, 2, 2))
    grad = torch.randn(len(rows), 4, 16, generator=generator)
    some = PieceAttention.apply(q[rows], k, v, row_pieces(spans, rows), 0.25)
    whole = PieceAttention.apply(q, k, v, span_pieces(spans), 0.25)[rows]
    torch.testing.assert_close(some, whole, atol=2e-6, rtol=2e-5)
    found, wanted = (torch.autograd.grad(out, (q, k, v), grad) for out in (some, whole))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_last_rows_of_equal_siblings_are_one_piece():
    spans = [(0, 5, -1), (5, 8, 0), (8, 11, 0), (11, 13, 0)]
    assert row_pieces(spans, [7, 10, 12]) == [
        Piece(0, 2, 5, 11, False, 2),
        Piece(2, 3, 11, 13, False),
        Piece(0, 3, 0, 5, False, 1, False),
    ]
    assert row_pieces(spans, [2, 3]) == [Piece(0, 2, 2, 4, True), Piece(0, 2, 0, 2, False, 1, False)]


def test_pieces_know_whether_they_tile_the_stream():
    spans = [(0, 5, -1), (5, 8, 0), (8, 11, 0)]
    assert span_pieces(spans).tiled == 11
    assert row_pieces(spans, [7, 10]).tiled == 0
    assert Pieces([Piece(0, 4, 0, 4, False, 2), Piece(4, 6, 4, 6, False)]).tiled == 6


# ---- The loss of tokens


@pytest.mark.parametrize("train_weight", [True, False])
def test_the_loss_in_pieces_is_the_loss_of_all_logits(train_weight):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(10, 16, generator=generator).requires_grad_()
    weight = torch.randn(50, 16, generator=generator).requires_grad_(train_weight)
    targets = torch.randint(0, 50, (10,), generator=generator)
    head = torch.nn.Linear(16, 50, bias=False)
    head.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
    asked = [hidden, weight] if train_weight else [hidden]
    wanted = 3 * F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    for rows in (4, 10, 99):
        loss = 3 * TokenLoss.apply(hidden, weight, targets, rows)
        torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
        found, expected = torch.autograd.grad(loss, asked), torch.autograd.grad(wanted, asked, retain_graph=True)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    again = 3 * repeated_token_loss(head, hidden, targets, 2**24 // 4)
    torch.testing.assert_close(again, wanted, rtol=1e-6, atol=0)


def test_the_loss_says_when_it_is_back_propagated_twice():
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
    loss = TokenLoss.apply(hidden, weight, torch.arange(4), 2)
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="one backward"):
        loss.backward()


def test_no_tensor_of_the_size_of_all_logits_is_made():
    """64 rows of 4,096 logits in pieces of 16: the largest tensor that autograd or the loss holds is a fourth."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                Largest.numbers = max(Largest.numbers, out.numel())
            return out

    hidden, weight = torch.randn(64, 8, requires_grad=True), torch.randn(4096, 8)
    with Largest():
        TokenLoss.apply(hidden, weight, torch.zeros(64, dtype=torch.long), 16).backward()
    assert Largest.numbers == 16 * 4096 and hidden.grad is not None


def test_a_model_on_meta_has_its_leaves_before_its_weights():
    loaded = build_model(builtin_folder(), dtype=torch.float32)
    assert next(loaded.hf.parameters()).is_meta and folds_stills(loaded.hf.model.visual)


@pytest.mark.needs_gpu
def test_the_gate_on_a_gpu():
    """Needs a GPU: silu(gate) * up and its gradients by the kernels taken there (liger-kernel's where it is
    installed) against the plain formula in fp32 on the CPU."""
    draw = torch.Generator().manual_seed(0)
    gate, up, grad = (torch.randn(37, 2048, generator=draw) for _ in range(3))
    found = []
    for device, combine in (("cpu", lambda a, b: torch.nn.functional.silu(a) * b), ("cuda", liger_gate().apply)):
        a, b = (t.to(device).requires_grad_() for t in (gate, up))
        out = combine(a, b)
        out.backward(grad.to(device))
        found.append([t.detach().cpu() for t in (out, a.grad, b.grad)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert one.abs().sum() > 0


@pytest.mark.parametrize("bias", [True, False])
def test_the_gate_with_the_layer_behind_it(bias):
    """Value and gradients of down(silu(gate) * up), with frozen weights too, against autograd's own of the formula."""
    draw = torch.Generator().manual_seed(0)
    gate, up, weight, shift = (
        torch.randn(*s, generator=draw, dtype=torch.double) for s in ((5, 7), (5, 7), (3, 7), (3,))
    )
    shift = shift if bias else None
    given = [t.requires_grad_() for t in (gate, up, weight, shift) if t is not None]
    assert torch.autograd.gradcheck(lambda *t: GateDown.apply(*t, *[None] * (4 - len(t))), given)
    plain = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, weight, shift)
    torch.testing.assert_close(GateDown.apply(gate, up, weight, shift), plain)
    weight.requires_grad_(False)
    of_gate = torch.autograd.grad(GateDown.apply(gate, up, weight, shift).square().sum(), gate)[0]
    torch.testing.assert_close(of_gate, torch.autograd.grad(plain.square().sum(), gate)[0])
