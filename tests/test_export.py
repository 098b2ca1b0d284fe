"""What a run leaves is loaded by transformers and peft alone, in a process without Litchi, and computes the same."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from rendering import draw
from runs import chat_rows, logits_of, open_model, read_json, rerank_rows, settings, train
from safetensors.torch import load_file, save_file

from litchi.data.processor import load_processor
from litchi.errors import UserError
from litchi.model.adapters import fill_weights, load_adapter
from litchi.model.build import build_model, builtin_folder, load_model
from litchi.model.family import PARTS
from litchi.model.forward import LitchiModel
from litchi.train import export as exporting
from litchi.train.checkpoint import list_checkpoints
from litchi.train.export import export_model, merged_tensors
from litchi.train.setup import build_wrapped
from litchi.train.target import find_target

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
LORA = [f"trainable.{name}=lora" for name in PARTS]
FACTS = {"base": "builtin:tiny", "task": "chat", "template": "chat", "instruction": None, "pixels": {}, "step": 1}


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    return tmp_path_factory.mktemp("export")


@pytest.fixture(scope="module")
def bases(room):
    """The base in the key layouts that are about: the hub's older one, transformers' own, and an untied model."""
    import transformers

    old = builtin_folder()
    transformers.utils.logging.disable_progress_bar()
    hf = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(old, dtype=torch.float32)
    new = copy_processor(old, room / "new-names")
    save_file({n: p.detach().contiguous() for n, p in hf.named_parameters()}, new / "model.safetensors")
    shutil.copy(old / "config.json", new / "config.json")
    config = transformers.AutoConfig.from_pretrained(old)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = False
    torch.manual_seed(1)
    untied = transformers.Qwen2_5_VLForConditionalGeneration(config)
    untied.load_state_dict(hf.state_dict() | {"lm_head.weight": torch.randn(hf.lm_head.weight.shape) * 0.1})
    folder = copy_processor(old, room / "untied")
    untied.save_pretrained(folder)
    return {"old names": old, "new names": new, "saved by transformers": folder}


def copy_processor(old, folder):
    folder.mkdir()
    for path in old.iterdir():
        if path.name not in ("model.safetensors", "config.json"):
            shutil.copy(path, folder / path.name)
    return folder


@pytest.fixture(scope="module")
def runs(room, ranks, bases):
    """Trained in full (with a pixel budget), as LoRA on a tied and on an untied model."""
    chat, groups = chat_rows(room / "data"), rerank_rows(room / "data")
    pixels = ("data.pixels.min=6272", "data.pixels.max=12544")
    common = ("train.steps=2", "train.global_batch_size=4", "optim.lr=5e-3")
    full = [f"trainable.{name}=full" for name in PARTS]
    untied = f"model.path={bases['saved by transformers']}"
    return {
        "full": train(ranks, room / "full", "task=chat", f"data.train={chat}", *full, *pixels, *common),
        "lora": train(ranks, room / "lora", "task=rerank", f"data.train={groups}", *LORA[:3], *common),
        "untied": train(ranks, room / "untied-run", "task=chat", f"data.train={chat}", untied, *LORA, *common),
    }


@pytest.fixture(scope="module")
def questions(room):
    """Texts and pictures, larger and smaller than the budgets."""
    pictures = [draw(room / f"{w}x{h}.png", w, h, seed=w) for w, h in ((70, 300), (400, 90), (30, 30))]
    shown = [{"type": "image", "image": p} for p in pictures]
    users = [
        [{"type": "text", "text": "Which hat is red? 红色"}],
        [shown[0], {"type": "text", "text": "What is this?"}],
        [shown[1], {"type": "text", "text": "and"}, shown[2]],
    ]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "A red hat."}]}
    return [[{"role": "user", "content": user}, answer] for user in users]


@pytest.fixture(scope="module")
def elsewhere(room, runs, bases, questions):
    """What one new process computes from every folder."""
    models = {name: {"model": run / "export", "adapter": None} for name, run in runs.items()}
    for name, base in (("lora", bases["old names"]), ("untied", bases["saved by transformers"])):
        adapter = runs[name] / "export" / "adapter"
        models[f"{name} adapter"] = {"model": base, "adapter": adapter, "processor": adapter}
    models = {
        name: {key: value and str(value) for key, value in ({"processor": m["model"]} | m).items()}
        for name, m in models.items()
    }
    (room / "job.json").write_text(json.dumps({"models": models, "questions": questions}))
    script = Path(__file__).with_name("reload_job.py")
    words = [sys.executable, str(script), str(room / "job.json"), str(room / "job.pt")]
    ended = subprocess.run(words, cwd=room, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert not re.search("not initialized|newly initialized|Unexpected|MISSING", ended.stderr), ended.stderr[-3000:]
    return torch.load(room / "job.pt")


@pytest.mark.parametrize("name", ["full", "lora", "untied"])
def test_export_and_adapter_compute_what_the_run_computed(name, runs, ranks, elsewhere, questions):
    """The run's own state comes from its checkpoint, which shares no code with exports."""
    checkpoint = list_checkpoints(runs[name])[-1].folder
    wrapped, renderer = open_model(checkpoint, ranks)
    start, _ = open_model(read_json(checkpoint / "manifest.json")["base"], ranks)
    others = [name] if name == "full" else [name, f"{name} adapter"]
    for i, messages in enumerate(questions):
        ids, logits = logits_of(wrapped, renderer, {"messages": messages})
        moved = (logits - logits_of(start, renderer, {"messages": messages})[1]).abs().max()
        assert moved > 1e-2, "training changed nothing, so equality would say nothing"
        for other in others:
            answer = elsewhere[other]["answers"][i]
            assert answer["ids"] == ids, other  # so grids are the same too: they decide the picture tokens
            torch.testing.assert_close(answer["logits"], logits, **CLOSE)


def test_pixel_limits_travel_in_the_processor(runs, elsewhere):
    export = runs["full"] / "export"
    picture, pad = read_json(export / "preprocessor_config.json"), read_json(export / "config.json")["image_token_id"]
    assert picture["size"] == {"shortest_edge": 6272, "longest_edge": 12544}
    pads = [[a["ids"].count(pad) for a in elsewhere[name]["answers"]] for name in ("full", "lora")]
    assert pads[0] != pads[1] and 0 < pads[0][1] <= 12544 // 784, "another budget gives other grids"


def test_generation_stops_at_the_end_of_a_turn(elsewhere):
    assert all("<|im_end|>" in what["stop"] for what in elsewhere.values())


def test_every_folder_of_a_run_opens_with_its_limits(runs, elsewhere):
    """Checkpoints too: whoever picks one up sees the pictures that were trained on."""
    from transformers import AutoProcessor

    folders = [*(c.folder for c in list_checkpoints(runs["full"])), runs["full"] / "export"]
    for folder in [*folders, runs["lora"] / "export" / "adapter"]:
        found = AutoProcessor.from_pretrained(folder, local_files_only=True)
        size = found.image_processor.size
        if folder in folders:
            assert (size["shortest_edge"], size["longest_edge"]) == (6272, 12544), folder
        assert found.chat_template and "<|im_start|>" in found.chat_template
        assert read_json(folder / "generation_config.json")["eos_token_id"] == 849
    manifest = read_json(runs["lora"] / "export" / "adapter" / "litchi.json")
    assert manifest["base_files"].keys() == {"revision", "config", "weights", "bytes"}


@pytest.mark.parametrize("before, after", [(847, [849, 847]), ([847, 849], [847, 849]), (None, [849])])
def test_others_stop_where_a_turn_ends(before, after, base_folder, loaded, tmp_path):
    """Whatever the base stopped at: its answers ran on in other programs."""
    base, out = shutil.copytree(base_folder, tmp_path / "base"), tmp_path / "out"
    (base / "generation_config.json").write_text(json.dumps({} if before is None else {"eos_token_id": before}))
    out.mkdir()
    exporting.copy_processor(base, out, LitchiModel(loaded.hf, loaded.family, loaded.processor.vision))
    assert read_json(out / "generation_config.json")["eos_token_id"] == after


def test_vocabulary_is_never_shrunk(base_folder, elsewhere):
    rows = read_json(base_folder / "config.json")["text_config"]["vocab_size"]
    assert {what["rows"] for what in elsewhere.values()} == {rows}


def test_config_says_what_was_written(runs):
    for run in runs.values():
        config = read_json(run / "export" / "config.json")
        assert config["architectures"] == ["Qwen2_5_VLForConditionalGeneration"]
        kinds = {t.dtype for t in load_file(run / "export" / "model.safetensors").values()}
        said = {config["dtype"], config["text_config"]["dtype"], config["vision_config"]["dtype"]}
        assert kinds == {torch.float32} and said == {"float32"}
        assert read_json(run / "export" / "litchi.json")["dtype"] == "float32"


def test_processor_files_are_the_bases_own(runs, base_folder):
    for folder in (runs["full"] / "export", runs["lora"] / "export" / "adapter"):
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
            assert (folder / name).read_bytes() == (base_folder / name).read_bytes()


def test_manifest_names_what_a_score_depends_on(runs):
    for folder in (runs["full"] / "export", runs["lora"] / "export", runs["lora"] / "export" / "adapter"):
        manifest = read_json(folder / "litchi.json")
        assert {"task", "template", "instruction", "pixels", "settings", "step", "base", "dtype"} <= manifest.keys()
    assert read_json(runs["full"] / "export" / "litchi.json")["pixels"] == {"min": 6272, "max": 12544}


def test_adapter_config_is_complete(runs, base_folder):
    config = read_json(runs["lora"] / "export" / "adapter" / "adapter_config.json")
    assert config["base_model_name_or_path"] == "builtin:tiny" and config["r"] == 16 and config["lora_alpha"] == 32
    assert config["inference_mode"] and config["peft_type"] == "LORA"
    keys = load_file(runs["lora"] / "export" / "adapter" / "adapter_model.safetensors").keys()
    assert {k.removeprefix("base_model.model.").split(".lora_")[0] for k in keys} == set(config["target_modules"])


# ---- files, without a run


def built(base, ranks, *words):
    """A model as a run builds it before its first step."""
    config = settings(f"model.path={base}", "task=chat", "data.train=none.jsonl", *words)
    loaded = load_model(Path(base), dtype=torch.float32)
    return build_wrapped(config, loaded, load_processor(base), ranks, "fp32").owner


def learn(owner):
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in owner.hf.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.05)


def keys_of(folder):
    return {key for path in folder.glob("*.safetensors") for key in load_file(path)}


@pytest.mark.parametrize("kind", ["old names", "new names", "saved by transformers"])
@pytest.mark.parametrize("mode", ["full", "lora"])
def test_keys_are_those_of_the_bases_files(kind, mode, bases, ranks, tmp_path):
    owner = built(bases[kind], ranks, f"trainable.language={mode}", f"trainable.vision={mode}")
    learn(owner)
    assert export_model(owner, bases[kind], tmp_path / "out", ranks, FACTS) == (mode == "lora")
    assert keys_of(tmp_path / "out") == keys_of(bases[kind])
    assert ("lm_head.weight" in keys_of(tmp_path / "out")) == (kind == "saved by transformers")
    assert load_model(tmp_path / "out", dtype=torch.float32).tied == (kind != "saved by transformers")


def test_layouts_of_keys_are_really_different(bases):
    names = [keys_of(bases[kind]) for kind in bases]
    assert any(k.startswith("visual.") for k in names[0]) and any(k.startswith("model.visual.") for k in names[1])


def test_shards_and_their_index(bases, ranks, tmp_path):
    owner = built(bases["old names"], ranks, "trainable.language=full")
    export_model(owner, bases["old names"], tmp_path / "one", ranks, FACTS)
    export_model(owner, bases["old names"], tmp_path / "many", ranks, FACTS, shard_bytes=1_000_000)
    whole = load_file(tmp_path / "one" / "model.safetensors")
    index = read_json(tmp_path / "many" / "model.safetensors.index.json")
    files = sorted(p.name for p in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3 and files == sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in whole.values())
    parts = {name: load_file(tmp_path / "many" / name) for name in files}
    assert index["weight_map"].keys() == whole.keys()
    assert all(torch.equal(parts[file][key], whole[key]) for key, file in index["weight_map"].items())
    again = dict(load_model(tmp_path / "many", dtype=torch.float32).hf.named_parameters())
    assert all(torch.equal(p, again[n]) for n, p in owner.hf.named_parameters())


def test_weights_of_another_type_are_said_so(bases, ranks, tmp_path):
    owner = built(bases["old names"], ranks)
    learn(owner)
    export_model(owner, bases["old names"], tmp_path / "out", ranks, FACTS, dtype=torch.bfloat16)
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    assert read_json(tmp_path / "out" / "config.json")["dtype"] == "bfloat16"


def test_a_fresh_adapter_changes_no_byte_and_is_refused(bases, ranks, tmp_path):
    """All B are zero: the merged model is the base, bit for bit, and is not written under another name."""
    owner = built(bases["old names"], ranks, *LORA[:3])
    base = dict(load_model(bases["old names"], dtype=torch.float32).hf.named_parameters())
    merged = dict(merged_tensors(owner.hf, torch.float32))
    assert merged.keys() == base.keys() and all(torch.equal(merged[n], base[n]) for n in base)
    with pytest.raises(UserError, match="every LoRA B matrix is zero"):
        export_model(owner, bases["old names"], tmp_path / "out", ranks, FACTS)
    assert not list(tmp_path.iterdir())


def test_an_adapter_that_is_lost_in_rounding_is_refused(bases, ranks, tmp_path):
    """B is not zero, and yet the merged weights are the base's in the type that is written."""
    owner = built(bases["old names"], ranks, "trainable.language=lora")
    with torch.no_grad():
        for name, parameter in owner.hf.named_parameters():
            if ".lora_B." in name:
                parameter.fill_(1e-12)
    with pytest.raises(UserError, match="lost when the merged weights are rounded to bfloat16"):
        export_model(owner, bases["old names"], tmp_path / "out", ranks, FACTS, dtype=torch.bfloat16)
    assert not list(tmp_path.iterdir())


def test_full_parts_beside_lora_give_no_adapter(bases, ranks, tmp_path):
    """An adapter folder could not hold them, and would compute something else."""
    owner = built(bases["old names"], ranks, "trainable.vision=full")
    learn(owner)
    assert not export_model(owner, bases["old names"], tmp_path / "out", ranks, FACTS)
    assert not (tmp_path / "out" / "adapter").exists()


def test_a_merger_and_a_head_in_full_are_saved_in_the_adapter(bases, ranks, tmp_path, questions):
    """As PEFT's `modules_to_save`: it reads them, and so does a run that goes on from there."""
    import transformers
    from peft import PeftModel

    base = bases["saved by transformers"]
    owner = built(base, ranks, "trainable.merger=full", "trainable.head=full")
    learn(owner)
    with torch.no_grad():
        for module in (owner.hf.model.visual.merger, owner.hf.lm_head):
            for parameter in module.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.02)
    assert export_model(owner, base, tmp_path / "out", ranks, FACTS | {"base": str(base), "settings": {}})
    adapter = tmp_path / "out" / "adapter"
    assert read_json(adapter / "adapter_config.json")["modules_to_save"] == ["model.visual.merger", "lm_head"]
    plain = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(base, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(plain, adapter).eval()
    merged = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "out", dtype=torch.float32)
    processor = transformers.AutoProcessor.from_pretrained(adapter)
    picture = Image.open(questions[1][0]["content"][0]["image"])
    text = processor.apply_chat_template(questions[1], tokenize=False)
    inputs = processor(text=[text], images=[picture], return_tensors="pt")
    with torch.no_grad():
        want, found = merged.eval()(**inputs).logits, theirs(**inputs).logits
    torch.testing.assert_close(found, want, **CLOSE)
    loaded = build_model(base, dtype=torch.float32)
    load_adapter(loaded, adapter)
    fill_weights(loaded.hf, base, adapter=adapter, seed=0, device=torch.device("cpu"))
    ours, own = dict(loaded.hf.named_parameters()), dict(owner.hf.named_parameters())
    assert ours.keys() == own.keys() and all(torch.equal(ours[name], own[name]) for name in ours)
    assert loaded.hf.saved_modules == ("model.visual.merger", "lm_head")


def test_an_export_appears_whole_or_not_at_all(bases, ranks, tmp_path):
    """A writer that fails half-way leaves the former export; the next one replaces it."""
    owner = built(bases["old names"], ranks, "trainable.language=full")
    out = tmp_path / "out"
    export_model(owner, bases["old names"], out, ranks, FACTS)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    incomplete = copy_processor(bases["old names"], tmp_path / "base")  # without config.json, which is copied last
    with pytest.raises(FileNotFoundError):
        export_model(owner, incomplete, out, ranks, FACTS)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    with torch.no_grad():
        owner.hf.lm_head.weight.add_(1.0)
    export_model(owner, bases["old names"], out, ranks, FACTS)
    assert (out / "model.safetensors").read_bytes() != before["model.safetensors"]
    assert {p.name for p in out.iterdir()} == before.keys()


# ---- the adapter as a start


def test_training_goes_on_from_an_adapter(runs, room, ranks, questions):
    """model.adapter: the same layers learn on, the first loss is that of the adapter, the new adapter has its shape."""
    words = ("task=rerank", f"data.train={room / 'data' / 'rerank.jsonl'}", *LORA[:3], "train.steps=1")
    adapter = runs["lora"] / "export" / "adapter"
    on = train(ranks, room / "on", *words, f"model.adapter={adapter}", "optim.lr=1e-3")
    fresh = train(ranks, room / "fresh", *words, "optim.lr=1e-3")
    losses = [json.loads((run / "metrics.jsonl").read_text())["loss"] for run in (on, fresh)]
    assert abs(losses[0] - losses[1]) > 1e-3
    old, new = (load_file(f / "adapter_model.safetensors") for f in (adapter, on / "export" / "adapter"))
    assert old.keys() == new.keys() and any(not torch.equal(old[k], new[k]) for k in old)
    assert all((old[k] - new[k]).abs().max() < 5e-3 for k in old), "one small step away from where it started"
    resumed, renderer = open_model(list_checkpoints(on)[-1].folder, ranks)
    merged, _ = open_model(on, ranks)
    for messages in questions:
        a, b = (logits_of(w, renderer, {"messages": messages})[1] for w in (resumed, merged))
        torch.testing.assert_close(a, b, **CLOSE)


def test_an_adapter_for_other_parts_is_refused(runs, room, ranks):
    data = f"data.train={room / 'data' / 'rerank.jsonl'}"
    with pytest.raises(UserError, match=r"trainable\.merger is not lora"):
        train(ranks, room / "odd", "task=rerank", data, f"model.adapter={runs['lora'] / 'export' / 'adapter'}")


def test_an_adapter_of_another_model_is_refused_with_counts(runs, ranks, tmp_path):
    folder = shutil.copytree(runs["lora"] / "export" / "adapter", tmp_path / "adapter")
    tensors = load_file(folder / "adapter_model.safetensors")
    first, second = sorted(tensors)[:2]
    tensors["base_model.model.nowhere.lora_A.weight"] = tensors.pop(first)
    tensors[second] = tensors[second][:1].contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(UserError, match="1 missing keys, 1 unexpected ones and 1 of another shape"):
        open_model(folder, ranks)


def test_target_kinds_are_recognised(runs, base_folder):
    run = runs["lora"]
    checkpoint = list_checkpoints(run)[-1].folder
    assert find_target("builtin:tiny").facts == {}
    assert find_target(str(base_folder)).manifest is None
    assert find_target(str(run)).base == str(run / "export")
    assert find_target(str(checkpoint)).checkpoint.step == 2
    assert find_target(str(run / "export")).base == str(run / "export")
    assert find_target(str(run / "export" / "adapter")).adapter == run / "export" / "adapter"
    facts = [find_target(str(t)).facts for t in (run, checkpoint, run / "export", run / "export" / "adapter")]
    assert all(f == facts[0] for f in facts) and facts[0]["data.template"] == "lychee"
