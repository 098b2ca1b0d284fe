"""One model over several cards: where each layer goes on pretended ones, and what is carried between them."""

from __future__ import annotations

from itertools import combinations_with_replacement, groupby, pairwise

import pytest
import torch
from rendering import chat, draw, pack, render, renderer_for, say
from runs import chat_rows, rerank_rows, settings, train
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from litchi.errors import MachineError, UsageError
from litchi.model.adapters import apply_trainable
from litchi.model.build import load_model
from litchi.model.family import FAMILIES, part
from litchi.model.forward import LitchiModel
from litchi.model.generate import generate_greedy
from litchi.model.sizes import size_config
from litchi.parallel.placement import GIB, Unit, find_devices, list_units, plan_placement, spread_model
from litchi.train import setup

FAMILY = FAMILIES["qwen2_5_vl"]
ENDS = ["model.visual", "model.language_model.embed_tokens", "model.language_model.rotary_emb", "lm_head"]


def on_meta(name):
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig.from_dict(size_config(name)))
    return model.to(torch.bfloat16).requires_grad_(False)


def cards(count, gib):
    return {torch.device("cuda", i): gib * GIB for i in range(count)}


# -------------------------------------------------------------------------------------------------- golden maps


@pytest.mark.parametrize(
    ("name", "count", "gib", "first_layers", "used_gib"),
    [
        ("7b", 2, 24, [0, 10], [7.6, 7.8]),
        ("7b", 2, 40, [0, 10], [7.6, 7.8]),
        ("7b", 4, 24, [0, 1, 10, 19], [3.7, 3.9, 3.9, 3.9]),
        ("32b", 2, 40, [0, 30], [31.4, 30.9]),
        ("32b", 4, 24, [0, 13, 30, 47], [16.0, 15.4, 15.4, 15.4]),
    ],
)
def test_real_models_on_pretended_cards(name, count, gib, first_layers, used_gib):
    model = on_meta(name)
    placement = plan_placement(list_units(model, FAMILY), cards(count, gib))
    modules = list(placement.modules.items())
    assert [path for path, _ in modules[:4]] == ENDS and {d for _, d in modules[:4]} == {placement.main}
    assert modules[-1] == ("model.language_model.norm", modules[-2][1])
    layers = [(path.split(".")[-1], device.index) for path, device in modules[4:-1]]
    assert [next(run)[0] for _, run in groupby(layers, key=lambda one: one[1])] == [str(i) for i in first_layers]
    assert [device for device, _ in groupby(layers, key=lambda one: one[1])] == list(range(count))
    assert [round(used / GIB, 1) for used in placement.used_bytes.values()] == used_gib
    whole = sum(p.numel() * 2 for p in model.parameters())
    assert whole <= sum(placement.used_bytes.values()) < whole + 2**20  # and the buffers
    assert all(placement.device_of(n) in placement.used_bytes for n, _ in model.named_parameters())


def test_what_does_not_fit_is_refused_by_name_bytes_and_memory():
    units = list_units(on_meta("32b"), FAMILY)
    with pytest.raises(UsageError) as error:
        plan_placement(units, cards(2, 24))
    assert error.value.line() == (
        "model.placement=spread: model.language_model.layers.42 (0.91 GiB) finds no place (cuda:0 24.0 GiB free, "
        "cuda:1 24.0 GiB free): 62.3 GiB are needed, 43.2 GiB may be taken; nothing is put on disk. Take more or "
        "larger GPUs, weights of fewer bytes (model.dtype), or sharded ones (parallel.dp_shard)"
    )


def test_what_trains_takes_four_times_its_bytes_and_is_never_left_without_a_gradient():
    model = on_meta("7b")
    part(model, FAMILY.language_layers).requires_grad_(True)
    units = list_units(model, FAMILY)
    frozen = list_units(on_meta("7b"), FAMILY)
    assert [u.trains for u in units] == [False] + [True] * 28
    assert units[1].needs_bytes == 4 * frozen[1].needs_bytes and units[0] == frozen[0]
    with pytest.raises(UsageError, match=r"layers\.\d+ .* it trains, and on the disk or on meta it would get no grad"):
        plan_placement(units, cards(2, 24))


def test_a_tied_head_is_counted_once():
    model = on_meta("3b")
    (ends, *_) = list_units(model, FAMILY)
    separate = sum(p.numel() * 2 for path in ENDS[:2] for p in part(model, path).parameters())
    assert ends.paths == tuple(ENDS) and separate <= ends.needs_bytes < separate + 2**10


# --------------------------------------------------------------------------------------------------- the best cut


def best_by_trying(needs, rooms):
    """The smallest share of the fullest device, over all ways to cut."""
    shares = []
    for inner in combinations_with_replacement(range(len(needs) + 1), len(rooms) - 1):
        runs = pairwise((0, *inner, len(needs)))
        shares.append(max(sum(needs[a:b]) / room for (a, b), room in zip(runs, rooms, strict=True)))
    return min(shares)


@pytest.mark.parametrize("seed", range(8))
def test_the_cut_is_the_best_there_is(seed):
    drawn = torch.Generator().manual_seed(seed)
    needs = torch.randint(1, 50, (9,), generator=drawn).tolist()
    rooms = torch.randint(60, 300, (2 + seed % 3,), generator=drawn).tolist()
    units = [Unit((f"m{i}",), n, False) for i, n in enumerate(needs)]
    best = best_by_trying(needs, rooms)
    free = {torch.device("cuda", i): room for i, room in enumerate(rooms)}
    if best > 1:
        with pytest.raises(UsageError, match="finds no place"):
            plan_placement(units, free, room=1.0)
        return
    placement = plan_placement(units, free, room=1.0)
    assert max(placement.used_bytes[d] / room for d, room in free.items()) == best
    order = [device.index for device in placement.modules.values()]
    assert order == sorted(order) and list(placement.modules) == [u.paths[0] for u in units]


# -------------------------------------------------------------------------------------- what is carried, on the CPU


@pytest.fixture(scope="module")
def batch(processor, tmp_path_factory):
    folder = tmp_path_factory.mktemp("placement")
    renderer = renderer_for("chat", processor)
    shown = draw(folder / "a.png", 84, 56)
    rows = [("What is it?", [shown]), ("And why is that?", [])]
    examples = [
        render(renderer, chat(renderer, ("user", say(text, *pictures)), ("assistant", "A red hat.")))
        for text, pictures in rows
    ]
    return pack(renderer, examples)


def owner_on(base_folder, processor, *, spread):
    """The packaged base with the hooks of a second device that is the first by another name, or without."""
    loaded = load_model(base_folder, dtype=torch.float32)
    loaded.hf.requires_grad_(True)
    if spread:
        units = list_units(loaded.hf, loaded.family)
        whole = sum(u.needs_bytes for u in units)
        # the first is the larger one: with ends as heavy as here all layers would go to the second
        placement = plan_placement(units, {torch.device("cpu"): 2 * whole, torch.device("cpu", 0): whole}, room=1.0)
        spread_model(loaded.hf, loaded.family, placement)
    return LitchiModel(loaded.hf, loaded.family, processor.vision), loaded


def test_hooks_leave_logits_gradients_and_plans_alone(base_folder, processor, batch):
    plain, _ = owner_on(base_folder, processor, spread=False)
    spread, loaded = owner_on(base_folder, processor, spread=True)
    hooked = [n for n, m in loaded.hf.named_modules() if hasattr(m, "_hf_hook")]
    layers = [n for n in hooked if ".layers." in n]
    assert 0 < len(layers) < 4 and {"model.language_model", "model.language_model.norm"} < set(hooked)
    seen = []
    for layer in part(loaded.hf, loaded.family.language_layers):
        layer.self_attn.register_forward_pre_hook(lambda m, a, kw: seen.append(kw["plan"]), with_kwargs=True)
    losses = []
    for owner in (plain, spread):
        out = owner(batch)
        out.loss.backward()
        losses.append(out.loss)
    assert torch.equal(*losses) and losses[0] > 0
    assert len(seen) == 4 and all(plan is seen[0] for plan in seen)
    other = dict(spread.named_parameters())
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter.grad, other[name].grad)


def test_hooks_leave_answers_alone(base_folder, processor, batch):
    stop = [-1]
    plain, _ = owner_on(base_folder, processor, spread=False)
    spread, _ = owner_on(base_folder, processor, spread=True)
    answers = [generate_greedy(owner, batch, stop=stop, max_new_tokens=4) for owner in (plain, spread)]
    assert answers[0] == answers[1] and all(len(a.ids) == 4 for a in answers[0])


def pretend(model: nn.Module, device_of) -> None:
    """Give a model parameters and buffers that only know their shape and their card."""
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, tensor in list(module.named_parameters(recurse=False)):
            empty = made.get(id(tensor))
            if empty is None:
                empty = nn.Parameter(torch.empty(tensor.shape, dtype=tensor.dtype, device=device_of(f"{path}.{name}")))
            made[id(tensor)] = module._parameters[name] = empty
        for name, tensor in list(module.named_buffers(recurse=False)):
            module._buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device_of(f"{path}.{name}"))


@pytest.mark.parametrize("hooks", [True, False])
def test_no_operation_meets_two_cards(base_folder, processor, monkeypatch, hooks):
    """Under torch's fake tensors, which refuse operands on different devices and need neither of the two cards."""
    renderer = renderer_for("chat", processor)
    text = pack(renderer, [render(renderer, chat(renderer, ("user", "Why?"), ("assistant", "So.")))])
    loaded = load_model(base_folder, dtype=torch.float32)
    apply_trainable(loaded, settings("model.path=builtin:tiny", "data.train=x", "task=chat").trainable)
    units = list_units(loaded.hf, loaded.family)
    whole = sum(u.needs_bytes for u in units)
    placement = plan_placement(units, {torch.device("cuda", i): whole for i in range(2)})
    monkeypatch.setattr(nn.Module, "to", lambda module, device: module)  # they are there already
    monkeypatch.setattr(type(loaded.hf), "to", lambda module, device: module)
    with FakeTensorMode(allow_non_fake_inputs=True):
        pretend(loaded.hf, placement.device_of)
        assert {p.device for p in loaded.hf.parameters()} == set(placement.used_bytes)
        owner = LitchiModel(loaded.hf, loaded.family, processor.vision)
        if not hooks:
            with pytest.raises(RuntimeError, match="same device"):
                owner(text)
            return
        spread_model(loaded.hf, loaded.family, placement)
        assert owner(text).loss.device == placement.main == owner.device


# -------------------------------------------------------------------------------------------------- by the setting


def test_other_ranks_are_refused():
    with pytest.raises(UsageError, match=r"model.placement=spread \(2 ranks\): .*leave model.placement at one"):
        find_devices(2)


def test_one_card_is_no_spread(monkeypatch):
    for count, shown in ((0, "0 are visible"), (1, "1 is visible")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda n=count: n)
        with pytest.raises(MachineError, match=shown):
            find_devices(1)


def test_the_setting_spreads_what_trains(tmp_path, ranks, monkeypatch):
    """With a second device that is the first by another name: the same run, bit by bit, through hooks."""
    words = ("task=chat", f"data.train={chat_rows(tmp_path, 4)}", "train.steps=2", "trainable.language=full")
    plain = train(ranks, tmp_path / "plain", *words)
    devices = {torch.device("cpu"): 2**30, torch.device("cpu", 0): 2**30}
    monkeypatch.setattr(setup, "find_devices", lambda world: devices)
    placed = []
    monkeypatch.setattr(setup, "spread_model", lambda *given: (placed.append(given[2]), spread_model(*given)))
    spread = train(ranks, tmp_path / "spread", *words, "model.placement=spread")
    assert {d.index for d in placed[0].modules.values()} == {None, 0}
    shown = [(run / "export" / "model.safetensors").read_bytes() for run in (plain, spread)]
    assert shown[0] == shown[1]


@pytest.mark.needs_gpu
def test_two_cards(base_folder, processor, batch, tmp_path, ranks):
    """Needs two GPUs: logits, answers and a training step on two cards, in fp32, beside one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU")
    plain, _ = owner_on(base_folder, processor, spread=False)
    plain.to("cuda:0")
    loaded = load_model(base_folder, dtype=torch.float32)
    placement = plan_placement(list_units(loaded.hf, loaded.family), dict.fromkeys(find_devices(1), 2**30))
    spread_model(loaded.hf, loaded.family, placement)
    spread = LitchiModel(loaded.hf, loaded.family, processor.vision)
    assert {p.device for p in spread.parameters()} == {torch.device("cuda", 0), torch.device("cuda", 1)}
    with torch.no_grad():
        assert torch.allclose(plain.hidden(batch), spread.hidden(batch), atol=1e-5)
    answers = [generate_greedy(owner, batch, stop=[-1], max_new_tokens=4) for owner in (plain, spread)]
    assert answers[0] == answers[1]
    words = ("task=rerank", f"data.train={rerank_rows(tmp_path, 4)}", "train.steps=2", "train.precision=fp32")
    train(ranks, tmp_path / "spread", *words, "model.placement=spread")
