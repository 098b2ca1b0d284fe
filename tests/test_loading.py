"""A model is loaded whole or refused, in one line that names what is wrong."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from litchi.data.processor import load_processor
from litchi.errors import UsageError
from litchi.model.build import BUILTIN, builtin_folder, load_model, resolve_model
from litchi.model.family import PARTS


@pytest.fixture
def folder(base_folder, tmp_path):
    """A copy of the base that a test may damage."""
    return shutil.copytree(base_folder, tmp_path / "model")


def refused(folder):
    with pytest.raises(UsageError) as error:
        load_model(folder, dtype=torch.float32)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)
    return str(error.value)


def change_weights(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def change_json(path, **values):
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | values), encoding="utf-8")


NAME = "model.language_model.layers.0.mlp.up_proj.weight"


def test_the_copy_loads(folder, loaded):
    """So that the refusals below come from the damage."""
    found = load_model(folder, dtype=torch.float32)
    assert found.tied and found.family.model_type == "qwen2_5_vl" and found.folder == folder
    weights = dict(loaded.hf.named_parameters())
    assert all(torch.equal(p, weights[n]) and not p.requires_grad for n, p in found.hf.named_parameters())


def saved_name(folder):
    return next(
        name for name in load_file(folder / "model.safetensors") if name.endswith("layers.0.mlp.up_proj.weight")
    )


def test_a_missing_tensor_is_named(folder):
    change_weights(folder, lambda tensors: tensors.pop(saved_name(folder)))
    message = refused(folder)
    assert "1 missing keys" in message and NAME in message


def test_an_unexpected_tensor_is_named(folder):
    change_weights(folder, lambda tensors: tensors.update({"model.surprise.weight": torch.zeros(2)}))
    message = refused(folder)
    assert "1 unexpected keys" in message and "surprise" in message


def test_a_tensor_of_another_shape_is_named(folder):
    name = saved_name(folder)
    change_weights(folder, lambda tensors: tensors.update({name: torch.zeros(3, 3)}))
    message = refused(folder)
    assert "1 mismatched keys" in message and NAME in message


def test_weights_cut_off_are_refused(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100_000])
    assert "could not be read" in refused(folder)


def test_no_weights_are_refused(folder):
    (folder / "model.safetensors").unlink()
    assert "could not be read" in refused(folder)


def test_another_model_type_is_refused_with_the_known_ones(folder):
    change_json(folder / "config.json", model_type="llama")
    message = refused(folder)
    assert "model_type is 'llama'" in message and "qwen2_5_vl, qwen2_vl" in message


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    assert f"{name} is missing" in refused(folder)


def test_missing_picture_settings_are_named(folder):
    (folder / "preprocessor_config.json").unlink()
    assert "preprocessor_config.json is missing" in refused(folder)


def test_the_tower_knows_its_windows_from_loading(loaded):
    """Layer 1 attends in full, the other in windows; an unmarked tower would attend in full everywhere."""
    assert [block.attn.windowed for block in loaded.hf.model.visual.blocks] == [True, False]


def test_every_parameter_belongs_to_a_part(loaded):
    parts = {loaded.family.part_of(name) for name, _ in loaded.hf.named_parameters()}
    assert parts == set(PARTS) - {"head"}, "the head is tied"


# ---- The pixel budget


def test_the_older_spelling_of_the_budget_wins_as_in_transformers(folder):
    from transformers import AutoImageProcessor

    picture = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
    both = picture | {"size": {"shortest_edge": 3136, "longest_edge": 3136}, "min_pixels": 6272, "max_pixels": 12544}
    (folder / "preprocessor_config.json").write_text(json.dumps(both), encoding="utf-8")
    vision = load_processor(folder).vision
    size = AutoImageProcessor.from_pretrained(folder).size
    assert (vision.min_pixels, vision.max_pixels) == (size["shortest_edge"], size["longest_edge"]) == (6272, 12544)


@pytest.mark.parametrize(
    ("asked", "budget"),
    [((None, None), (3136, 3136)), ((784, None), (784, 3136)), ((None, 784), (784, 784)), ((784, 9000), (784, 9000))],
)
def test_one_limit_alone_moves_the_other_out_of_its_way(base_folder, asked, budget):
    vision = load_processor(base_folder).with_pixels(*asked).vision
    assert (vision.min_pixels, vision.max_pixels) == budget


def test_limits_that_cross_are_refused(base_folder):
    with pytest.raises(UsageError, match=r"data.pixels.min=9000 is above data.pixels.max=784"):
        load_processor(base_folder).with_pixels(9000, 784)


# ---- Where a model is


def test_the_packaged_base_and_folders_are_found(tmp_path):
    assert resolve_model(BUILTIN) == builtin_folder() and (builtin_folder() / "config.json").is_file()
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("path", ["./models/none", "/models/none", "none", "a/b/c", "config.yaml"])
def test_what_is_neither_a_folder_nor_a_hub_id_is_refused(path):
    with pytest.raises(UsageError, match="is not a model folder"):
        resolve_model(path)


def test_all_ranks_wait_for_the_download_before_any_reads():
    """Offline the download fails; every rank has come to the meeting point by then, so none hangs."""
    from litchi.errors import MachineError

    for first in (True, False):
        waited = []
        with pytest.raises(MachineError, match="nobody/nothing could not be fetched"):
            resolve_model("nobody/nothing", first=first, wait=lambda seen=waited: seen.append(1))
        assert waited == [1]
