"""A repository for Triton: its configuration by Triton's own schema, and what its Python model answers."""

from __future__ import annotations

import base64
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from processes import run_litchi
from rendering import draw
from runs import read_json, rerank_rows, train, write_rows

from litchi.errors import UsageError
from litchi.train.export_triton import export_triton, write_config

pytest.importorskip("tritonclient")


def schema():
    """`tritonclient.grpc` itself needs grpc; the schema does not."""
    folder = Path(importlib.util.find_spec("tritonclient").submodule_search_locations[0])
    spec = importlib.util.spec_from_file_location("model_config_pb2", folder / "grpc" / "model_config_pb2.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_the_configuration_is_of_tritons_schema():
    from google.protobuf import text_format

    pb = schema()
    config = text_format.Parse(write_config(rows=32, wait_us=700), pb.ModelConfig())
    assert (config.name, config.backend, config.max_batch_size) == ("litchi", "python", 32)
    sides = [(i.name, pb.DataType.Name(i.data_type), list(i.dims)) for i in config.input]
    assert sides == [("QUERY", "TYPE_STRING", [1]), ("DOCUMENT", "TYPE_STRING", [1])]
    (out,) = config.output
    assert (out.name, pb.DataType.Name(out.data_type), list(out.dims)) == ("SCORE", "TYPE_FP32", [1])
    assert config.HasField("dynamic_batching") and config.dynamic_batching.max_queue_delay_microseconds == 700
    with pytest.raises(text_format.ParseError):
        text_format.Parse(write_config() + "dynamic_batch {}", pb.ModelConfig())


def test_a_chat_model_is_refused(ranks, tmp_path):
    (tmp_path / "chat").mkdir()
    (tmp_path / "chat" / "litchi.json").write_text('{"task": "chat"}')
    with pytest.raises(UsageError, match="a Triton repository of a chat model"):
        export_triton(str(tmp_path / "chat"), tmp_path / "out", (), ranks)


class Backend(ModuleType):
    """The four names of Triton's Python backend that a model uses, which exist nowhere but in its server."""

    Tensor = staticmethod(lambda name, values: SimpleNamespace(name=name, values=values))
    TritonError = str

    @staticmethod
    def get_input_tensor_by_name(request, name):
        return SimpleNamespace(as_numpy=lambda: request[name])

    @staticmethod
    def InferenceResponse(output_tensors, error=None):
        return SimpleNamespace(tensors=output_tensors, error=error)


def ask(*pairs):
    """A request as Triton hands it on: bytes, [rows, 1]."""
    sides = zip(*pairs, strict=True)
    return {
        name: np.array([[s.encode()] for s in side], dtype=np.object_)
        for name, side in zip(("QUERY", "DOCUMENT"), sides, strict=True)
    }


@pytest.mark.slow
def test_its_model_gives_the_scores_of_the_run(ranks, tmp_path, monkeypatch):
    rows = rerank_rows(tmp_path / "data", 4)
    words = ("task=rerank", f"data.train={rows}", "optim.lr=5e-3", "train.steps=2", "train.global_batch_size=4")
    run = train(ranks, tmp_path / "run", *words, "data.pixels.max=50176")
    export_triton(str(run), tmp_path / "repository", (), ranks)
    home = tmp_path / "repository" / "litchi"
    assert read_json(home / "1" / "export" / "litchi.json")["parity"]["lost"] == 0
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", Backend("backend"))
    spec = importlib.util.spec_from_file_location("repository_model", home / "1" / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.TritonPythonModel()
    model.initialize({"model_repository": str(home), "model_version": "1", "model_instance_kind": "CPU"})
    picture = draw(tmp_path / "p.png", 84, 140, seed=3)
    url = f"data:image/png;base64,{base64.b64encode(Path(picture).read_bytes()).decode()}"
    shown = json.dumps({"text": "hat", "image": url})
    good = ask(("a red hat", "hat, red"), ("a red hat", shown), ("{blue", "{not json"))
    bad = ask(("a red hat", json.dumps({"image": "data:image/png;base64,AAAA"})))
    first, refused, last = model.execute([good, bad, ask(("a red hat", shown))])
    assert refused.error and not first.error and not last.error
    asked = [
        {"query": "a red hat", "documents": ["hat, red", {"text": "hat", "image": picture}], "labels": [1, 0]},
        {"query": "{blue", "documents": ["{not json"], "labels": [1]},
    ]
    out = tmp_path / "scores.jsonl"
    words = ("score", str(run), "--data", str(write_rows(tmp_path / "asked.jsonl", asked)), "--out", str(out))
    assert run_litchi(tmp_path / "score", *words).status == 0
    want = [json.loads(line)["score"] for line in out.read_text().splitlines()]
    (tensor,) = first.tensors
    assert tensor.name == "SCORE" and tensor.values.shape == (3, 1) and tensor.values.dtype == np.float32
    np.testing.assert_allclose(tensor.values[:, 0], want, atol=1e-5)
    np.testing.assert_allclose(last.tensors[0].values[0, 0], want[1], atol=1e-5)
