"""Calibrated exports: what is refused, what the calibration is given, and, where llmcompressor is, what comes out.

`LITCHI_COMPRESSOR=/path/to/python` names an interpreter that has llmcompressor; without it the last tests are skipped.
"""

import os
import sys
from dataclasses import replace

import pytest
import torch
from runs import chat_rows, open_model, read_json, read_rows, rerank_rows, train
from safetensors.torch import load_file

from litchi.data.jsonl import guess_task
from litchi.errors import MachineError, UsageError
from litchi.model.compressed import find_packed, unpack
from litchi.model.family import part
from litchi.train.export_calibrated import check_compressor, write_samples
from litchi.train.export_quant import CALIBRATED
from litchi.train.export_target import export_target
from litchi.train.measure import open_set, prepare
from litchi.train.target import open_target
from litchi.train.writing import write_lines

COMPRESSOR = os.environ.get("LITCHI_COMPRESSOR")


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    return tmp_path_factory.mktemp("calibrated")


@pytest.fixture(scope="module")
def data(room):
    return rerank_rows(room / "data", 6)


@pytest.fixture(scope="module")
def run(room, data, ranks):
    words = ("task=rerank", f"data.train={data}", "trainable.language=lora", "optim.lr=5e-3", "train.steps=3")
    return train(ranks, room / "run", *words, "train.global_batch_size=6")


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (None, UsageError, r"int4-gptq needs --compressor PYTHON: .* pip install llmcompressor"),
        ("/no/such/python", MachineError, r"--compressor /no/such/python cannot import llmcompressor: No such file"),
        (sys.executable, MachineError, r"cannot import llmcompressor: ModuleNotFoundError: No module named 'llmcomp"),
    ],
)
def test_what_cannot_be_calibrated_is_refused_at_once(run, room, ranks, given, error, said):
    with pytest.raises(error, match=said.replace("pip", r"compressor/bin/pip")):
        export_target(str(run), room / "none", (), ranks, form="int4-gptq", compressor=given)
    assert not (room / "none").exists() and not list(room.glob(".*none*"))


def test_several_ranks_are_refused(ranks):
    with pytest.raises(UsageError, match="int4-awq on 2 ranks: one process rounds it"):
        check_compressor("int4-awq", sys.executable, replace(ranks, world=2))


def test_samples_are_what_the_language_layers_get(run, room, data, ranks, tmp_path):
    """transformers, given a sample, gives the score Litchi gives that document alone."""
    import transformers

    target, config = prepare(str(run), str(data), ())
    rows = open_set(config, str(data), ranks, require_labels=True)
    wrapped = open_target(target, config, ranks)
    assert write_samples(wrapped, rows, tmp_path) == 6
    export_target(str(run), room / "merged", (), ranks)
    hf = transformers.AutoModelForImageTextToText.from_pretrained(room / "merged", dtype=torch.float32).eval()
    yes, no = wrapped.owner.words
    with torch.no_grad():
        last = [hf(**load_file(path)).logits[0, -1] for path in sorted(tmp_path.iterdir())]
    found = [float(logits[yes] - logits[no]) for logits in last]
    write_lines(str(run), str(data), (), tmp_path / "scores.jsonl", ranks, task="rerank")
    known = [line["score"] for line in read_rows(tmp_path / "scores.jsonl")]
    assert all(min(abs(score - other) for other in known) < 1e-5 for score in found)
    assert len({round(score, 4) for score in found}) > 1


def test_samples_of_chat_hold_their_pictures(room, ranks, tmp_path):
    rows = chat_rows(room / "chat", 3)
    target, config = prepare("builtin:tiny", str(rows), ())
    wrapped = open_target(target, config, ranks)
    count = write_samples(wrapped, open_set(config, str(rows), ranks, require_labels=True), tmp_path)
    assert guess_task(str(rows)) == "chat" and count == 3
    for path in tmp_path.iterdir():
        sample = load_file(path)
        tokens = sample["inputs_embeds"].shape[1]
        assert sample["inputs_embeds"].shape[0] == 1 and sample["position_ids"].shape == (3, 1, tokens)
        words = part(wrapped.owner.hf, wrapped.owner.family.embedding).weight.detach()
        no_words = (torch.cdist(sample["inputs_embeds"][0], words).min(1).values > 1e-3).sum()
        assert 1 <= no_words < tokens / 2, "features of the picture stand where its tokens were"


@pytest.mark.skipif(not COMPRESSOR, reason="LITCHI_COMPRESSOR names no Python with llmcompressor")
@pytest.mark.parametrize("form", CALIBRATED)
def test_rounded_by_what_layers_are_given(form, run, room, data, ranks):
    """Near to the trained scores, GPTQ nearer than rounding to the nearest; only language linears are packed."""
    plain = export_target(str(run), room / f"int4-{form}", (), ranks, form="int4", limit=1.0)
    figures = export_target(str(run), room / form, (), ranks, form=form, limit=1.0, compressor=COMPRESSOR)
    assert figures["largest_difference"] < (plain["largest_difference"] if form == "int4-gptq" else 0.5)
    tensors, merged = (load_file(room / name / "model.safetensors") for name in (form, "merged"))
    layers = find_packed(tensors)
    assert len(layers) == 4 * 7 and all(".layers." in name and "visual" not in name for name in layers)
    for layer, names in layers.items():
        weight = unpack({name: tensors[layer + name] for name in names})
        assert weight.shape == merged[f"{layer}weight"].shape
        if form == "int4-gptq":  # no weight is far from where it was
            scales = tensors[f"{layer}weight_scale"]
            step = scales.repeat_interleave(weight.shape[1] // scales.shape[1], 1)
            assert ((weight - merged[f"{layer}weight"]).abs() / step).mean() < 1.0
    config = read_json(room / form / "config.json")
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] == 4
    assert r"re:model\.visual\..*" in config["quantization_config"]["ignore"]
    assert not (room / form / "adapter").exists()
    assert open_model(room / form, ranks)
