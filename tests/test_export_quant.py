"""Rounded exports: what other libraries read in them, what they cost, what is refused, and that figures are kept."""

import json
import math
import shutil

import pytest
import torch
from runs import chat_rows, logits_of, open_model, read_json, read_rows, rerank_rows, train
from safetensors.torch import load_file

from litchi.data.processor import load_processor
from litchi.errors import UserError
from litchi.model.build import build_model, builtin_folder
from litchi.model.compressed import RoundedLinear, find_packed, pack_int4, pack_int8, unpack
from litchi.train import export_quant
from litchi.train.checkpoint import list_checkpoints
from litchi.train.export_target import export_target
from litchi.train.measure import measure_one
from litchi.train.writing import write_lines

FORMATS = ("merged", "int8", "int4", "nf4", "score")
LORA = ("trainable.vision=lora", "trainable.merger=lora", "trainable.language=lora")
PIXELS = ("data.pixels.min=6272", "data.pixels.max=12544")


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    return tmp_path_factory.mktemp("quant")


@pytest.fixture(scope="module")
def data(room):
    return rerank_rows(room / "data", 6)


@pytest.fixture(scope="module")
def run(room, data, ranks):
    words = ("task=rerank", f"data.train={data}", *LORA, *PIXELS, "optim.lr=5e-3", "train.steps=3")
    return train(ranks, room / "run", *words, "train.global_batch_size=6")


@pytest.fixture(scope="module")
def exports(room, run, ranks):
    """Folders and figures of every format, without a limit."""
    return {
        form: (room / form, export_target(str(run), room / form, (), ranks, form=form, limit=1.0)) for form in FORMATS
    }


@pytest.fixture(scope="module")
def chat(room, ranks):
    """It has learnt its rows by heart, so that whatever is taken from it shows. Not tied."""
    import transformers

    rows, base = chat_rows(room / "chat", 4), room / "untied"
    config = transformers.AutoConfig.from_pretrained(builtin_folder())
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = False
    hf = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(builtin_folder(), dtype=torch.float32)
    untied = transformers.Qwen2_5_VLForConditionalGeneration(config)
    head = {"lm_head.weight": hf.lm_head.weight + 0.01 * torch.randn(hf.lm_head.weight.shape)}
    untied.load_state_dict(hf.state_dict() | head)
    base.mkdir()
    for path in builtin_folder().iterdir():
        if path.name not in ("model.safetensors", "config.json"):
            shutil.copy(path, base / path.name)
    untied.save_pretrained(base)
    words = ("task=chat", f"data.train={rows}", f"model.path={base}", "trainable.language=lora", "trainable.head=lora")
    return train(ranks, room / "chat-run", *words, "optim.lr=5e-3", "train.steps=12", "train.global_batch_size=4")


# ---- numbers, by hand


def test_int8_has_a_scale_per_row_and_errs_by_half_a_step_at_most():
    weight = torch.tensor([[127.5, -127.5, 0.4, 63.6], [0.0, 0.0, 0.0, 0.0], [2.55, 0.0, -1.0, 0.01]])
    parts = pack_int8(weight)
    assert parts["weight_scale"].flatten().tolist() == pytest.approx([1.0, 1.0, 0.02])
    assert parts["weight"].tolist() == [[127, -128, 0, 64], [0, 0, 0, 0], [127, 0, -50, 0]]
    assert (unpack(parts) - weight).abs().max() <= 0.5 + 1e-6


def test_int4_packs_eight_to_a_word_the_first_lowest():
    weight = torch.arange(-8.0, 8.0).repeat(2)[None] * 7.5 / 8  # scale 1: each rounds to the nearest
    parts = pack_int4(weight, 32)
    assert parts["weight_packed"].shape == (1, 4) and parts["weight_shape"].tolist() == [1, 32]
    expected = [round(v) for v in weight[0].tolist()]
    word = int(parts["weight_packed"][0, 0]) % 2**32
    assert [(word >> 4 * i & 15) - 8 for i in range(8)] == expected[:8]
    assert unpack(parts)[0].tolist() == expected


def test_inputs_are_rounded_as_integer_kernels_do():
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(32, 16), torch.randn(5, 32)
    parts = pack_int8(layer.weight.detach())
    layer.weight.data = unpack(parts)
    layer.__class__ = RoundedLinear
    step = x.abs().amax(1) / 127.5
    whole = (x / step[:, None]).round().clamp(-128, 127).long() @ parts["weight"].long().T
    expected = whole.double() * step[:, None] * parts["weight_scale"].T + layer.bias
    torch.testing.assert_close(layer(x).double(), expected.detach(), atol=1e-5, rtol=1e-5)


# ---- folders


@pytest.mark.parametrize("form", ["int8", "int4", "nf4"])
def test_other_libraries_read_the_same_weights(form, exports, ranks):
    """With compressed-tensors or bitsandbytes transformers gives our logits, but for what their kernels round."""
    pytest.importorskip("compressed_tensors" if form != "nf4" else "bitsandbytes")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    folder, _ = exports[form]
    wrapped, renderer = open_model(folder, ranks)
    model, info = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, local_files_only=True
    )
    assert not any(info.values()), info
    fields = {"messages": [{"role": "user", "content": "Which hat?"}, {"role": "assistant", "content": "A red one."}]}
    ids, ours = logits_of(wrapped, renderer, fields)
    if form == "nf4":  # looked at before the forward, in which it may lay them out anew for its kernel
        from bitsandbytes.functional import dequantize_4bit

        mine = dict(wrapped.owner.hf.named_parameters())
        layers = {n: m.weight for n, m in model.named_modules() if hasattr(getattr(m, "weight", None), "quant_state")}
        assert len(layers) == 4 * 7
        for name, weight in layers.items():
            theirs = dequantize_4bit(weight.data, weight.quant_state).float()
            torch.testing.assert_close(theirs, mine[f"{name}.weight"].float(), atol=1e-6, rtol=1e-6)
    with torch.no_grad():
        theirs = model.eval()(input_ids=torch.tensor([ids])).logits[0].float()
    # int8: whether inputs are rounded is up to the library; nf4: its kernel on a CPU computes in half precision
    torch.testing.assert_close(ours, theirs, atol=1e-4 if form == "int4" else 0.5, rtol=1e-4)


@pytest.mark.parametrize("form", ["int8", "int4", "nf4"])
def test_only_linears_of_the_language_layers_are_rounded(form, exports):
    tensors, plain = (
        load_file(exports[form][0] / "model.safetensors"),
        load_file(exports["merged"][0] / "model.safetensors"),
    )
    layers = find_packed(tensors)
    assert len(layers) == 4 * 7 and all(".layers." in n and "visual" not in n for n in layers)
    rest = {k for k in plain if not any(k == f"{layer}weight" for layer in layers)}
    assert rest <= tensors.keys() and all(torch.equal(tensors[k], plain[k]) for k in rest)
    config = read_json(exports[form][0] / "config.json")["quantization_config"]
    ignored = config.get("ignore") or config["llm_int8_skip_modules"]
    assert any("model" in i and "visual" in i for i in ignored) and any("lm_head" in i for i in ignored)
    assert any("visual" in i and "model" not in i for i in ignored), "the older layout of names too"


def test_sizes_are_as_computed(exports):
    plain = load_file(exports["merged"][0] / "model.safetensors")
    layers = find_packed(load_file(exports["int8"][0] / "model.safetensors"))
    shapes = [plain[f"{layer}weight"].shape for layer in layers]
    rest = sum(t.nbytes for t in plain.values()) - sum(math.prod(s) * 4 for s in shapes)
    expected = {
        "int8": rest + sum(o * i + o * 4 for o, i in shapes),
        "int4": rest + sum(o * i // 2 + o * (i // 128) * 4 + 16 for o, i in shapes),
    }
    for form, size in expected.items():
        folder, figures = exports[form]
        assert sum(t.nbytes for t in load_file(folder / "model.safetensors").values()) == size
        assert size < figures["bytes"][1] < size + 40_000 and figures["bytes"][0] == sum(
            t.nbytes for t in plain.values()
        )


# ---- figures


def test_merged_and_score_give_the_trained_scores(exports, run, ranks, data, room):
    """The trained model is the run's checkpoint, which shares no code with exports."""
    for form in ("merged", "score"):
        assert exports[form][1]["largest_difference"] < 1e-5 and exports[form][1]["lost"] == 0
    found = []
    for i, name in enumerate((list_checkpoints(run)[-1].folder, exports["score"][0])):
        write_lines(str(name), str(data), (), room / f"{i}.jsonl", ranks, task="rerank")
        found.append([line["score"] for line in read_rows(room / f"{i}.jsonl")])
    assert found[1] == pytest.approx(found[0], abs=1e-5)


@pytest.mark.parametrize("form", ["int8", "int4", "nf4"])
def test_what_is_evaluated_later_is_what_was_written_down(form, exports, data, ranks):
    folder, figures = exports[form]
    assert read_json(folder / "litchi.json")["parity"] == json.loads(json.dumps(figures))
    again = measure_one(str(folder), str(data), (), ranks)
    assert again.metrics["mrr@10"] == figures["after"]
    assert 1e-4 < figures["largest_difference"] < 1.5, "rounding shows, and no more than that"


def test_a_layer_that_was_lost_is_refused_with_the_figure(chat, room, ranks, monkeypatch):
    out, pack = room / "lost", export_quant.pack_int8
    figures = export_target(str(chat), room / "whole", (), ranks, form="int8")
    assert figures["metric"] == "loss" and figures["before"] < 0.5 and figures["lost"] < 0.05
    left = iter(range(1000))
    monkeypatch.setattr(export_quant, "pack_int8", lambda w: pack(w * (next(left) != 6)))  # the first down_proj
    with pytest.raises(UserError, match=r"the export lost \d\.\d+ of loss, from 0") as error:
        export_target(str(chat), out, (), ranks, form="int8")
    assert error.value.status == 1 and not out.exists()
    kept = read_json(room / "lost.refused" / "litchi.json")["parity"]
    assert kept["lost"] > kept["limit"] == 0.05 and f"{kept['lost']:.4f}" in str(error.value)


def test_merging_an_untied_head_changes_no_logit(chat, room, ranks):
    figures = export_target(str(chat), room / "untied-merged", (), ranks)
    assert figures["largest_difference"] < 1e-5 * 30 and abs(figures["lost"]) < 1e-6  # of logits up to 30
    assert "lm_head.weight" in load_file(room / "untied-merged" / "model.safetensors")


@pytest.mark.parametrize("form", FORMATS)
def test_every_folder_is_complete(form, exports, run):
    """Its processor opens from the folder alone and cuts pictures as in training."""
    folder, _ = exports[form]
    processor = load_processor(folder)
    assert (processor.vision.min_pixels, processor.vision.max_pixels) == (6272, 12544)
    for name in ("chat_template.jinja", "tokenizer.json", "generation_config.json"):
        assert (folder / name).read_bytes() == (builtin_folder() / name).read_bytes()
    text = (folder / "README.md").read_text()
    assert "vllm serve" in text and "**not run here**" in text and "mrr@10" in text and "<Document>" in text
    assert ("classifier_from_token" in text) == (form != "score")


# ---- refusals


def test_what_was_rounded_does_not_train(exports, data, ranks, room):
    for form in ("int8", "score"):
        with pytest.raises(UserError, match="this export does not train"):
            words = (f"model.path={exports[form][0]}", "task=rerank", f"data.train={data}", "train.steps=1")
            train(ranks, room / "again", *words)
    with pytest.raises(UserError, match="in fewer bits already"):
        build_model(exports["int8"][0], dtype=torch.float32, quantize="nf4")


def test_a_form_that_is_not_read_is_refused(exports, tmp_path):
    folder = shutil.copytree(exports["int8"][0], tmp_path / "x")
    config = read_json(folder / "config.json")
    config["quantization_config"]["quant_method"] = "awq"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="quant_method is awq"):
        build_model(folder, dtype=torch.float32)


def test_a_tensor_that_is_not_there_is_an_error(exports, tmp_path):
    from safetensors.torch import save_file

    folder = shutil.copytree(exports["int4"][0], tmp_path / "x")
    tensors = load_file(folder / "model.safetensors")
    del tensors[next(k for k in tensors if k.endswith("weight_scale"))]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"unexpected keys|missing keys"):
        build_model(folder, dtype=torch.float32)


def test_a_chat_model_has_no_score_and_a_model_without_rows_is_not_rounded(chat, room, ranks):
    with pytest.raises(UserError, match="a score head is made of yes and no"):
        export_target(str(chat), room / "none", (), ranks, form="score")
    with pytest.raises(UserError, match="no rows to compare the int8 export on"):
        export_target("builtin:tiny", room / "none", (), ranks, form="int8")
    assert not (room / "none").exists()
