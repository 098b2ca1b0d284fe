"""The vision tower in ONNX: ONNX Runtime computes what the trained model's tower does, on pictures of any size."""

from __future__ import annotations

import importlib.util
import subprocess

import numpy as np
import pytest
import torch

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

from runs import chat_rows, open_model, read_json, train  # noqa: E402

from litchi.errors import UserError  # noqa: E402
from litchi.model.build import builtin_folder, load_model  # noqa: E402
from litchi.model.family import part  # noqa: E402
from litchi.model.forward import LitchiModel  # noqa: E402
from litchi.model.vision import normalise_patches, vision_layout  # noqa: E402
from litchi.parallel.mesh import Layout  # noqa: E402
from litchi.train import export_onnx  # noqa: E402
from litchi.train.checkpoint import list_checkpoints  # noqa: E402
from litchi.train.export_target import export_target  # noqa: E402
from litchi.train.vision_inputs import vision_inputs  # noqa: E402

GRIDS = [((1, 2, 2),), ((1, 22, 6),), ((1, 10, 34), (2, 6, 4))]  # none of those the export itself tries


@pytest.mark.parametrize("grids", GRIDS)
def test_inputs_are_the_arrangement_of_the_model(grids, processor):
    """Windows hold the same tokens as in `model/vision.py`, and rows and columns are the same."""
    spec = processor.vision
    ours, layout = vision_inputs(grids), vision_layout(grids, spec)
    assert np.array_equal(ours["positions"], layout.coordinates.numpy())
    assert np.array_equal(ours["order"][ours["back"]], np.arange(len(ours["order"])))
    patches_of = [np.flatnonzero(ours["windows"] == number) for number in sorted(set(ours["windows"]))]
    mine = {frozenset(ours["order"][np.unique(patches // 4)]) for patches in patches_of}
    order, theirs = layout.order.numpy(), set()
    for piece in layout.plan.window:
        size = (piece.q1 - piece.q0) // piece.count // 4
        starts = range(piece.q0 // 4, piece.q1 // 4, size)
        theirs |= {frozenset(order[start : start + size]) for start in starts}
    assert mine == theirs and len(mine) == len(patches_of)
    assert len(set(ours["frames"])) == sum(t for t, _, _ in grids)


@pytest.fixture(scope="module")
def trained(ranks, tmp_path_factory):
    """A run whose tower has learnt by LoRA, and its graph."""
    room = tmp_path_factory.mktemp("onnx")
    words = ("task=chat", f"data.train={chat_rows(room / 'data', 2)}", "trainable.vision=lora", "optim.lr=1e-2")
    words = (*words, "trainable.merger=full", "data.pixels.max=50176", "train.steps=1", "train.export=never")
    run = train(ranks, room / "run", *words, "train.global_batch_size=2")
    checkpoint = list_checkpoints(run)[-1].folder
    figures = export_target(str(checkpoint), room / "graph", (), ranks, form="onnx-vision")
    return checkpoint, room / "graph", figures


def test_it_computes_what_the_trained_tower_does(trained, ranks):
    checkpoint, folder, figures = trained
    spec = importlib.util.spec_from_file_location("apart", folder / "vision_inputs.py")
    apart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(apart)
    session = onnxruntime.InferenceSession(str(folder / "vision.onnx"))
    wrapped, _ = open_model(checkpoint, ranks)
    base, _ = open_model("builtin:tiny", ranks)
    width = 3 * 14 * 14
    for grids in GRIDS:
        count = sum(t * h * w for t, h, w in grids)
        pixels = torch.randint(
            0, 256, (count, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(count)
        )
        given = normalise_patches(pixels, wrapped.owner.spec).numpy()
        (found,) = session.run(["features"], {"pixels": given, **apart.vision_inputs(grids)})
        with torch.no_grad():
            want, before = (one.owner.encode(pixels, grids) for one in (wrapped, base))
        torch.testing.assert_close(torch.from_numpy(found), want, atol=1e-4, rtol=1e-4)
        assert (want - before).abs().max() > 1e-2, "training moved the tower"
    assert 0 < figures["largest_difference"] <= 1e-4


def test_the_folder_says_how_it_is_used(trained):
    _, folder, figures = trained
    assert read_json(folder / "litchi.json")["parity"] == figures
    assert read_json(folder / "preprocessor_config.json")["size"]["longest_edge"] == 50176
    script = folder / "build_tensorrt.sh"
    assert subprocess.run(["sh", "-n", script], check=False).returncode == 0
    text = script.read_text()
    assert "--maxShapes=pixels:256x1176,order:64,back:64,positions:256x2,windows:256,frames:256" in text


def test_a_graph_that_computes_something_else_is_refused(ranks, tmp_path, monkeypatch):
    loaded = load_model(builtin_folder(), dtype=torch.float32)
    owner = LitchiModel(loaded.hf, loaded.family, loaded.processor.vision)
    attend = export_onnx.Graph.attend
    monkeypatch.setattr(export_onnx.Graph, "attend", lambda self, *a: attend(self, *a) * 1.01)
    with pytest.raises(UserError, match=r"the graph's features are .* off: 0\.0001 is allowed"):
        export_onnx.export_vision(owner, builtin_folder(), tmp_path / "out", ranks, {}, Layout())
    assert not list(tmp_path.iterdir())
    assert part(loaded.hf, loaded.family.vision) is loaded.hf.model.visual
