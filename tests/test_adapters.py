"""DoRA and a base in int8: a layer against an independent one, what comes out, and layouts that train alike."""

from __future__ import annotations

import copy

import pytest
import torch
from layout_job import run_all, write_rows
from processes import RunningRanks
from rendering import draw
from runs import chat_rows, logits_of, open_model, read_json, settings, train
from safetensors.torch import load_file
from torch import nn

from litchi.errors import UsageError
from litchi.model.adapters import ADAPTER, apply_trainable, fill_lora
from litchi.model.build import build_model, load_model
from litchi.model.quantize import Int8Linear, NF4Linear, weight_of
from litchi.model.scoring import score_rows
from litchi.model.weights import load_weights
from litchi.train.checkpoint import list_checkpoints
from litchi.train.export import merged_tensors

CPU = torch.device("cpu")
DORA = "trainable={language: lora, lora: {rank: 4, variant: dora}}"
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def adapted(folder, quantize="none", **parts):
    """The base with fresh DoRA layers, as a run makes them."""
    loaded = build_model(folder, dtype=torch.float32, quantize=quantize)
    words = [f"trainable.{name}={mode}" for name, mode in (parts or {"language": "lora"}).items()]
    config = settings("task=chat", "model.path=builtin:tiny", "data.train=x", "trainable.lora.variant=dora", *words)
    apply_trainable(loaded, config.trainable)
    load_weights(loaded.hf, folder, CPU)
    fill_lora(loaded.hf, 0, CPU)
    return loaded


def stir(hf):
    """Give every addition and magnitude another value."""
    draw = torch.Generator().manual_seed(1)
    for name, parameter in hf.named_parameters():
        if ".lora_" in name:
            noise = torch.randn(parameter.shape, generator=draw)
            parameter.data = parameter.data * (1 + 0.1 * noise) if "magnitude" in name else noise * 0.1


# ---- DoRA


@pytest.mark.parametrize("name", ["self_attn.q_proj", "mlp.down_proj"])
def test_a_layer_is_pefts_own(name, base_folder):
    """Outputs and gradients, with and without bias, against PEFT's forward of the same tensors."""
    from peft import LoraConfig, inject_adapter_in_model

    ours = adapted(base_folder)
    stir(ours.hf)
    layer = ours.hf.model.language_model.layers[1].get_submodule(name)
    other = nn.ModuleDict({"layer": copy.deepcopy(layer.base_layer)})
    config = LoraConfig(r=16, lora_alpha=32, use_dora=True, target_modules=["layer"])
    inject_adapter_in_model(config, other, ADAPTER)
    theirs = other["layer"]
    for part in ("lora_A", "lora_B", "lora_magnitude_vector"):
        getattr(theirs, part)[ADAPTER].weight.data = getattr(layer, part)[ADAPTER].weight.detach().clone()
    found = []
    for one in (layer, theirs):
        torch.manual_seed(0)
        x = torch.randn(3, layer.in_features, requires_grad=True)
        y = one(x)
        tensors = [x, *(getattr(one, p)[ADAPTER].weight for p in ("lora_A", "lora_B", "lora_magnitude_vector"))]
        found.append([y, *torch.autograd.grad((y * torch.randn_like(y)).sum(), tensors)])
    for mine, yours in zip(*found, strict=True):
        torch.testing.assert_close(mine, yours, atol=1e-5, rtol=1e-4)
    assert (found[0][0] - layer.base_layer(torch.zeros(3, layer.in_features))).abs().max() > 0.01


@pytest.mark.parametrize("quantize", ["none", "int8", "nf4"])
def test_a_fresh_one_is_the_base(quantize, base_folder):
    """Magnitudes begin as the rows of the base are, also of one in fewer bits."""
    loaded = adapted(base_folder, quantize)
    layer = loaded.hf.model.language_model.layers[0].mlp.up_proj
    x = torch.randn(3, layer.in_features)
    torch.testing.assert_close(layer(x), layer.base_layer(x), atol=1e-6, rtol=1e-6)
    rows = weight_of(layer.base_layer).norm(dim=1)
    torch.testing.assert_close(layer.lora_magnitude_vector[ADAPTER].weight.detach(), rows)


def test_a_head_is_scored_by_the_rows_that_are_asked_for(base_folder, hf_model):
    loaded = adapted(base_folder, language="lora")
    head = load_model(base_folder, dtype=torch.float32).hf.lm_head
    head.weight = nn.Parameter(head.weight.detach().clone())  # untied
    loaded.hf.lm_head, loaded.tied = head, False
    again = settings("task=chat", "model.path=builtin:tiny", "data.train=x", "trainable.head=lora")
    from litchi.model.adapters import add_lora

    del loaded.hf.peft_config
    add_lora(loaded, ["head"], again.trainable.lora.model_copy(update={"variant": "dora"}))
    stir(loaded.hf)
    hidden = torch.randn(5, head.in_features)
    logits = loaded.hf.lm_head(hidden)
    torch.testing.assert_close(score_rows(loaded.hf.lm_head, hidden, (7, 3)), logits[:, 7] - logits[:, 3], **CLOSE)


def test_merging_changes_no_output(base_folder):
    """Of every part, and out of int8."""
    loaded = adapted(base_folder, "int8", language="lora", vision="lora", merger="lora")
    stir(loaded.hf)
    merged = dict(merged_tensors(loaded.hf, torch.float32))
    seen = 0
    for name, layer in loaded.hf.named_modules():
        if hasattr(layer, "lora_magnitude_vector"):
            x = torch.randn(3, layer.in_features)
            want = nn.functional.linear(x, merged[f"{name}.weight"], merged.get(f"{name}.bias"))
            torch.testing.assert_close(layer(x), want, **CLOSE)
            seen += 1
    assert seen > 28 and not any(".lora_" in name for name in merged)


def test_rows_that_are_cut_have_no_norm():
    with pytest.raises(UsageError, match=r"lora\.variant is dora.*parallel\.tp"):
        settings("task=chat", "model.path=builtin:tiny", "data.train=x", DORA, "parallel.tp=2")


def test_peft_alone_reads_the_adapter(ranks, base_folder, tmp_path):
    """It finds every key, and computes what the run computed."""
    import transformers
    from peft import PeftModel

    rows = chat_rows(tmp_path / "data", 4)
    words = ("task=chat", f"data.train={rows}", DORA, "trainable.merger=lora", "optim.lr=5e-3")
    run = train(ranks, tmp_path / "run", *words, "train.steps=2", "train.global_batch_size=4")
    adapter = run / "export" / "adapter"
    assert read_json(adapter / "adapter_config.json")["use_dora"] is True
    hf = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(base_folder, dtype=torch.float32).eval()
    base = copy.deepcopy(hf)
    model = PeftModel.from_pretrained(hf, adapter)
    known = {name.replace(f".{ADAPTER}", "") for name in model.state_dict() if ".lora_" in name}
    assert {name.removesuffix(".weight") for name in known} == {
        name.removesuffix(".weight") for name in load_file(adapter / "adapter_model.safetensors")
    }
    wrapped, renderer = open_model(list_checkpoints(run)[-1].folder, ranks)
    exported, _ = open_model(run / "export", ranks)
    again, _ = open_model(adapter, ranks)
    for text in ("Which hat is red?", "红色"):
        row = {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "A red hat."}]}
        ids, logits = logits_of(wrapped, renderer, row)
        with torch.no_grad():
            theirs, before = (m(input_ids=torch.tensor([ids])).logits[0] for m in (model, base))
        torch.testing.assert_close(theirs, logits, **CLOSE)
        for other in (exported, again):
            torch.testing.assert_close(logits_of(other, renderer, row)[1], logits, **CLOSE)
        assert (before - logits).abs().max() > 1e-2


# ---- int8


def test_only_linears_of_the_language_layers_are_in_eight_bits(base_folder, hf_model):
    hf = build_model(base_folder, dtype=torch.float32, quantize="int8").hf
    load_weights(hf, base_folder, CPU)
    layers = {name: m for name, m in hf.named_modules() if isinstance(m, Int8Linear)}
    assert len(layers) == 4 * 7 and all(".language_model.layers." in name for name in layers)
    assert not any(isinstance(m, NF4Linear) for m in hf.modules())
    whole = dict(hf_model.named_parameters())
    for name, parameter in hf.named_parameters():
        layer = layers.get(name.removesuffix(".weight"))
        if layer is None:
            assert torch.equal(parameter, whole[name])
            continue
        assert parameter.dtype == torch.int8 and parameter.shape == whole[name].shape and not parameter.requires_grad
        off = (weight_of(layer) - whole[name]).abs()
        assert off.max() > 0 and bool((off <= whole[name].abs().amax(1, keepdim=True) / 127 / 2 * 1.001).all())


@pytest.mark.parametrize("autocast", [False, True])
def test_a_product_is_that_of_the_weight_it_stands_for(autocast, base_folder):
    hf = build_model(base_folder, dtype=torch.float32, quantize="int8").hf
    load_weights(hf, base_folder, CPU)
    layer = hf.model.language_model.layers[0].self_attn.q_proj
    assert layer.bias is not None
    found = []
    for compute in (layer, lambda x: nn.functional.linear(x, weight_of(layer), layer.bias)):
        torch.manual_seed(0)
        x = torch.randn(2, 3, layer.in_features, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = compute(x)
        assert y.dtype == (torch.bfloat16 if autocast else torch.float32)
        found.append((y, *torch.autograd.grad((y.float() * torch.randn(y.shape)).sum(), x)))
    near = {"atol": 0.03, "rtol": 0.03} if autocast else CLOSE
    for mine, plain in zip(*found, strict=True):
        torch.testing.assert_close(mine, plain, **near)


# ---- layouts

KINDS = {
    "dora": [DORA, "trainable.vision=lora"],
    "int8": ["trainable={language: lora, lora: {rank: 4}}", "model.quantize=int8"],
    "dora on int8": [DORA, "model.quantize=int8"],
}
LAYOUTS = {
    "FSDP2": ["parallel.dp_shard=2", "train.checkpoint_activations=true"],
    "DDP": ["parallel.dp_replicate=2"],
    "pipeline": ["parallel.pp=2"],
}


@pytest.mark.slow
def test_every_layout_trains_alike(tmp_path):
    picture = draw(tmp_path / "p.png", 84, 56, seed=1)
    rows = write_rows(tmp_path / "rows.jsonl", [picture, None, None, picture])
    job = ["task=chat", f"data.train={rows}", "train.global_batch_size=2", "train.steps=2"]
    one = {kind: [*job, *words] for kind, words in KINDS.items()}
    two = {f"{kind}, {name}": [*one[kind], *layout] for kind in KINDS for name, layout in LAYOUTS.items()}
    running = RunningRanks(tmp_path / "two", 2, run_all, two), RunningRanks(tmp_path / "one", 1, run_all, one)
    (pair, _), (alone,) = running[0].results(), running[1].results()
    for name, have in pair.items():
        kind, layout = name.rsplit(", ", 1)
        want = alone[kind]
        assert have["losses"] == pytest.approx(want["losses"], rel=1e-6), name
        assert have["norms"] == pytest.approx(want["norms"], rel=1e-5) and min(have["norms"]) > 0, name
        assert have["wrapper"] == ("none" if layout == "pipeline" else layout)
        assert have["travel"]["language"] == 0 < have["travel"]["lora"]
    losses = {kind: alone[kind]["losses"][0] for kind in KINDS}
    assert losses["int8"] != losses["dora"] and losses["int8"] == pytest.approx(losses["dora"], rel=0.05)
