"""A base in 4 bits: bitsandbytes' own numbers, every layout alike, and an export that computes what was trained."""

import logging
import sys

import pytest
import torch
from layout_job import run_all, write_rows
from processes import RunningRanks
from rendering import draw
from runs import chat_rows, logits_of, open_model, train
from torch import nn

from litchi.errors import MachineError
from litchi.model.build import build_model
from litchi.model.quantize import NF4Linear
from litchi.model.weights import load_weights
from litchi.train.checkpoint import list_checkpoints

CPU = torch.device("cpu")
LORA = "trainable={language: lora, lora: {rank: 4}}"
LAYOUTS = {
    "DDP": ["parallel.dp_replicate=2"],
    "FSDP2, checkpointed": ["parallel.dp_shard=2", "train.checkpoint_activations=true"],
    "context parallel": ["parallel.cp=2"],
    "pipeline": ["parallel.pp=2"],
}


def load_nf4(folder, dtype=torch.float32):
    hf = build_model(folder, dtype=dtype, quantize="nf4").hf
    load_weights(hf, folder, CPU)
    return hf


@pytest.fixture(scope="module")
def packed(base_folder):
    return load_nf4(base_folder)


def test_linears_of_the_language_layers_are_packed_and_nothing_else(packed, hf_model):
    ours = {name for name, module in packed.named_modules() if isinstance(module, NF4Linear)}
    linears = {n for n, m in hf_model.named_modules() if isinstance(m, nn.Linear)}
    assert ours == {name for name in linears if ".language_model.layers." in name} and len(ours) == 4 * 7
    whole = dict(hf_model.named_parameters())
    for name, parameter in packed.named_parameters():
        if name.removesuffix(".weight") in ours:
            assert parameter.dtype == torch.uint8 and parameter.numel() == whole[name].numel() / 2
            assert not parameter.requires_grad
        else:
            assert torch.equal(parameter, whole[name])
    layer = packed.model.language_model.layers[0].mlp.up_proj
    scales = sum(b.numel() * b.element_size() for n, b in layer.named_buffers() if "code" not in n)
    assert scales <= layer.weight.numel() / 32 + 16


def test_a_layer_is_bitsandbytes_own(packed, hf_model):
    """Bytes, outputs and gradients, every bit; with and without bias; and it is not the base."""
    import bitsandbytes

    for name in ("self_attn.q_proj", "mlp.down_proj"):
        old = hf_model.model.language_model.layers[1].get_submodule(name)
        new = packed.model.language_model.layers[1].get_submodule(name)
        own = bitsandbytes.nn.Linear4bit(
            old.in_features, old.out_features, old.bias is not None, compress_statistics=True, quant_type="nf4"
        )
        own.load_state_dict(old.state_dict())
        own = own.to("cpu")
        assert torch.equal(own.weight.flatten(), new.weight)
        out = []
        for layer in (own, new, old):
            torch.manual_seed(0)
            x = torch.randn(3, old.in_features, requires_grad=True)
            y = layer(x)
            out.append((y.detach(), torch.autograd.grad((y * torch.randn_like(y)).sum(), x)[0]))
        assert all(torch.equal(a, b) for a, b in zip(out[0], out[1], strict=True))
        off = (out[1][0] - out[2][0]).norm() / out[2][0].norm()
        assert 0.02 < off < 0.2, "4 bits cost something, and not much"


def test_autocast_computes_in_its_type(packed):
    layer = packed.model.language_model.layers[0].self_attn.q_proj
    x = torch.randn(3, layer.in_features)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    torch.testing.assert_close(layer(x.bfloat16()).float(), layer(x), atol=0.05, rtol=0.05)


def test_without_bitsandbytes_it_is_refused_by_name(base_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MachineError, match=r"model.quantize=nf4: .* pip install 'litchi\[quant\]'"):
        build_model(base_folder, dtype=torch.float32, quantize="nf4")


# ---- training


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nf4")
    picture = draw(folder / "p.png", 84, 56, seed=1)
    rows = write_rows(folder / "rows.jsonl", [picture, None, None, picture])
    job = ["task=chat", f"data.train={rows}", "train.global_batch_size=2", "train.steps=2", LORA]
    nf4 = [*job, "model.quantize=nf4"]
    one = {"nf4": nf4, "none": [*job, "train.steps=1"]}
    two = {name: [*nf4, *layout] for name, layout in LAYOUTS.items()}
    two["FSDP2, bf16"] = [*nf4, "parallel.dp_shard=2", "train.precision=bf16"]
    running = RunningRanks(folder / "two", 2, run_all, two), RunningRanks(folder / "one", 1, run_all, one)
    (pair, _), (alone,) = running[0].results(), running[1].results()
    return {**alone, **pair}


def test_the_library_is_silent():
    """It warns of missing kernels when it, or peft, is imported."""
    assert not logging.getLogger("bitsandbytes.backends.cpu.ops").isEnabledFor(logging.WARNING)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_alike(name, results):
    want, have = results["nf4"], results[name]
    assert have["losses"] == pytest.approx(want["losses"], rel=1e-6)
    assert have["norms"] == pytest.approx(want["norms"], rel=1e-5) and min(have["norms"]) > 0
    assert have["wrapper"] == {"pipeline": "none", "FSDP2, checkpointed": "FSDP2"}.get(name, "DDP")
    assert have["travel"]["language"] == have["travel"]["vision"] == 0 < have["travel"]["lora"]


def test_four_bits_are_another_model(results):
    assert results["nf4"]["losses"][0] != pytest.approx(results["none"]["losses"][0], rel=1e-4)
    assert results["nf4"]["losses"][-1] < results["nf4"]["losses"][0]


def test_packed_weights_are_not_rounded_with_the_others(results):
    """FSDP2 gathers in bf16 what is a number, and bytes as they are."""
    assert results["FSDP2, bf16"]["losses"] == pytest.approx(results["nf4"]["losses"], rel=0.02)


# ---- what comes out


def test_export_computes_what_was_trained(ranks, base_folder, tmp_path):
    """transformers alone loads the merged weights, out of 4 bits and with LoRA in them."""
    import transformers

    words = ("task=chat", f"data.train={chat_rows(tmp_path / 'data')}", LORA, "model.quantize=nf4", "optim.lr=5e-3")
    run = train(ranks, tmp_path / "run", *words, "train.steps=2", "train.global_batch_size=4")
    export = run / "export"
    wrapped, renderer = open_model(list_checkpoints(run)[-1].folder, ranks)
    assert any(isinstance(m, NF4Linear) for m in wrapped.owner.modules()), "a checkpoint opens as it was trained"
    merged = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(export, dtype=torch.float32).eval()
    base, _ = open_model(str(base_folder), ranks)
    for text in ("Which hat is red?", "红色"):
        row = {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "A red hat."}]}
        ids, logits = logits_of(wrapped, renderer, row)
        with torch.no_grad():
            want = merged(input_ids=torch.tensor([ids])).logits[0]
        torch.testing.assert_close(logits, want, atol=1e-5, rtol=1e-5)
        assert (logits_of(base, renderer, row)[1] - logits).abs().max() > 0.05
