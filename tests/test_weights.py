"""Weights come from the files as transformers reads them, into any layout, and no rank holds more than it owns."""

import json
import math
import shutil

import pytest
import torch
import weights_job
from processes import RunningRanks
from safetensors.torch import load_file, save_file
from torch import nn
from weights_job import CPU, LAYOUTS, SEED, add_lora, digest

from litchi.errors import UsageError
from litchi.model.adapters import adapter_config, adapter_state, fill_lora, fill_weights, load_adapter
from litchi.model.build import build_model, load_model
from litchi.model.weights import load_weights

HEAD, TABLE = "lm_head.weight", "model.language_model.embed_tokens.weight"


def oracle(folder, dtype=torch.float32):
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=dtype)


def refold(base, folder, change, *, shards=1, **config):
    """The base with its tensors changed, in one file or several."""
    folder = shutil.copytree(base, folder)
    tensors = change(load_file(folder / "model.safetensors"))
    if shards > 1:
        (folder / "model.safetensors").unlink()
        files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
        where = {name: files[i % shards] for i, name in enumerate(sorted(tensors))}
        for file in files:
            save_file({n: t for n, t in tensors.items() if where[n] == file}, folder / file, metadata={"format": "pt"})
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def new_names(tensors):
    def rename(name):
        return f"model.{name}" if name.startswith("visual") else name.replace("model.", "model.language_model.", 1)

    return {rename(name): tensor for name, tensor in tensors.items()}


def with_head(tensors, change):
    table = tensors["model.embed_tokens.weight"]
    return tensors | {HEAD: table.clone() + change}


CHANGES = {
    "as it is": dict(change=lambda t: t),
    "new names": dict(change=new_names),
    "in shards": dict(change=lambda t: t, shards=3),
    "both of a tied pair, equal": dict(change=lambda t: with_head(t, 0)),
    "both of a tied pair, different": dict(change=lambda t: with_head(t, 1)),
    "the head of a tied pair": dict(
        change=lambda t: {n: x for n, x in with_head(t, 1).items() if n != "model.embed_tokens.weight"}
    ),
    "with a buffer of older versions": dict(
        change=lambda t: t | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    ),
    "in float32": dict(change=lambda t: {n: x.float() * 1.001 for n, x in t.items()}),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_weights_are_those_transformers_reads(kind, base_folder, tmp_path):
    """Every bit, type and name of parameters and buffers, and which are one."""
    folder = refold(base_folder, tmp_path / "model", **CHANGES[kind])
    for dtype in (torch.float32, torch.bfloat16):
        want, loaded = oracle(folder, dtype), load_model(folder, dtype=dtype)
        for kind_of in ("named_parameters", "named_buffers"):
            a, b = (dict(getattr(hf, kind_of)()) for hf in (want, loaded.hf))
            assert list(a) == list(b) and a
            assert all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype and b[n].device == CPU for n in a)
        assert loaded.tied == (loaded.hf.lm_head.weight is loaded.hf.get_parameter(TABLE))
        assert loaded.tied == (want.lm_head.weight is want.get_parameter(TABLE))
        assert want.generation_config.to_dict() == loaded.hf.generation_config.to_dict()
        assert not loaded.hf.training and not any(p.requires_grad for p in loaded.hf.parameters())


def test_only_different_tensors_untie_a_head(base_folder, tmp_path):
    tied = {
        kind: build_model(refold(base_folder, tmp_path / str(i), **CHANGES[kind]), dtype=torch.float32).tied
        for i, kind in enumerate(CHANGES)
    }
    assert [kind for kind, is_tied in tied.items() if not is_tied] == ["both of a tied pair, different"]


def test_a_built_model_has_no_weights_yet_and_real_buffers(base_folder):
    hf = build_model(base_folder, dtype=torch.float32).hf
    assert all(p.is_meta for p in hf.parameters()) and not any(b.is_meta for b in hf.buffers())


def test_damage_is_refused_before_there_is_any_weight(base_folder, tmp_path):
    folder = refold(base_folder, tmp_path / "model", lambda t: t, shards=3)
    first = sorted(folder.glob("*.safetensors"))[0]
    first.write_bytes(first.read_bytes()[:-10])
    with pytest.raises(UsageError, match=rf"could not be read .*{first.name}"):
        build_model(folder, dtype=torch.float32)
    first.unlink()
    with pytest.raises(UsageError, match=rf"could not be read .*{first.name}"):
        build_model(folder, dtype=torch.float32)
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(UsageError, match=r"index.json is damaged"):
        build_model(folder, dtype=torch.float32)


def test_weights_of_another_folder_are_not_read(base_folder, tmp_path):
    hf = build_model(base_folder, dtype=torch.float32).hf
    with pytest.raises(ValueError, match="was not built from"):
        load_weights(hf, tmp_path, CPU)


def test_a_stage_of_a_pipeline_is_filled(base_folder, hf_model):
    """Some layers under their own names, without vision and table."""
    hf = build_model(base_folder, dtype=torch.float32).hf
    layers = hf.model.language_model.layers
    hf.model.language_model.layers = nn.ModuleDict({"1": layers[1], "3": layers[3]})
    del hf.model.visual, hf.model.language_model.embed_tokens
    load_weights(hf, base_folder, CPU)
    want, have = hf_model.state_dict(), dict(hf.named_parameters())
    assert {n.split(".")[3] for n in have if ".layers." in n} == {"1", "3"} and HEAD in have
    assert all(torch.equal(want[n], have[n]) for n in have)


def test_values_are_read_again_into_real_parameters(base_folder):
    """In place: whoever holds a parameter sees it."""
    hf = load_model(base_folder, dtype=torch.float32).hf
    before = {n: (p, p.detach().clone()) for n, p in hf.named_parameters()}
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.zero_()
    load_weights(hf, base_folder, CPU)
    assert all(p is before[n][0] and torch.equal(p, before[n][1]) for n, p in hf.named_parameters())


# ---- LoRA


def lora_of(hf):
    return {n: p for n, p in hf.named_parameters() if ".lora_" in n}


@pytest.fixture
def adapted(base_folder):
    """With LoRA, in bf16, and no values yet."""
    loaded = build_model(base_folder, dtype=torch.bfloat16)
    add_lora(loaded)
    return loaded


def test_a_draw_follows_the_seed_and_the_name_alone(adapted, base_folder):
    fill_weights(adapted.hf, base_folder, adapter=None, seed=SEED, device=CPU)
    drawn = {n: p.detach().clone() for n, p in lora_of(adapted.hf).items()}
    assert {t.dtype for t in drawn.values()} == {torch.float32}, "beside a base in bf16"
    up = {n: t for n, t in drawn.items() if ".lora_A." in n}
    assert len(up) == len(drawn) / 2 and not any(t.any() for n, t in drawn.items() if n not in up)
    for tensor in up.values():  # uniform, as PEFT draws: within 1 / sqrt(inputs)
        bound = 1 / math.sqrt(tensor.shape[1])
        assert 0.9 * bound < tensor.abs().max() <= bound and abs(tensor.mean()) < 0.2 * bound
    assert len({digest({"": t}) for t in up.values()}) == len(up)
    other = load_model(base_folder, dtype=torch.float32)  # where values are there at once, torch's seed counts
    torch.manual_seed(SEED)
    add_lora(other)
    assert digest(lora_of(other.hf)) == digest(drawn)
    fill_lora(adapted.hf, SEED + 1, CPU)
    assert all(not torch.equal(p, drawn[n]) for n, p in lora_of(adapted.hf).items() if n in up)


def test_an_adapter_is_filled_in_afterwards(adapted, base_folder, tmp_path):
    fill_weights(adapted.hf, base_folder, adapter=None, seed=SEED, device=CPU)
    with torch.no_grad():
        for name, parameter in lora_of(adapted.hf).items():
            parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    body = {n: t.detach().contiguous() for n, t in adapter_state(dict(adapted.hf.named_parameters())).items()}
    save_file(body, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(
        json.dumps(adapter_config(adapted.hf, lora_of(adapted.hf), str(base_folder)), default=list)
    )
    late, early = build_model(base_folder, dtype=torch.bfloat16), load_model(base_folder, dtype=torch.bfloat16)
    for loaded in (late, early):
        load_adapter(loaded, tmp_path)
    assert all(p.is_meta for p in late.hf.parameters())
    fill_weights(late.hf, base_folder, adapter=tmp_path, seed=0, device=CPU)
    for loaded in (late, early):
        assert digest(lora_of(loaded.hf)) == digest(lora_of(adapted.hf))
        assert all(torch.equal(p, loaded.hf.get_parameter(n)) for n, p in adapted.hf.named_parameters())


# ---- ranks


@pytest.fixture(scope="module")
def layouts(base_folder, tmp_path_factory):
    return RunningRanks(tmp_path_factory.mktemp("ranks"), 4, weights_job.check_layouts, str(base_folder)).results()


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_holds_what_cutting_whole_weights_would_give_it(name, layouts, base_folder):
    whole = load_model(base_folder, dtype=torch.float32)
    torch.manual_seed(SEED)
    add_lora(whole)
    _, shards, tensor = LAYOUTS[name]
    for facts in (rank[name] for rank in layouts):
        assert facts["odd"] == facts["trained"] == [] and facts["tied"]
        assert facts["whole"] == digest(dict(whole.hf.named_parameters()))
        assert facts["share"] == pytest.approx(1 / shards, rel=0.2 if tensor == 1 else 0.5)
        assert ("_StridedShard" in str(facts["placements"])) == (tensor > 1)


@pytest.mark.slow
def test_loading_costs_each_rank_its_share(base_folder, tmp_path):
    """500 MB on 4 ranks: each grows by its quarter and a tensor on the way, files that all ranks map not counted."""
    import transformers

    folder = shutil.copytree(base_folder, tmp_path / "large")
    config = transformers.AutoConfig.from_pretrained(folder)
    text = config.text_config
    text.num_hidden_layers, text.intermediate_size, text.hidden_size = 16, 4096, 1024
    text.num_attention_heads, text.num_key_value_heads, config.vision_config.out_hidden_size = 64, 32, 1024
    text.layer_types = ["full_attention"] * 16
    torch.manual_seed(0)
    transformers.Qwen2_5_VLForConditionalGeneration(config).bfloat16().save_pretrained(folder)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert size > 380e6, size
    for facts in RunningRanks(tmp_path / "ranks", 4, weights_job.measure_memory, str(folder)).results():
        assert facts["local"] == pytest.approx(size / 4, rel=0.05)
        assert facts["local"] < facts["added"] < facts["local"] + 60e6, facts
