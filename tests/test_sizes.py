"""Shapes of the real members against transformers' class on meta, and the sizes an axis may have."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from litchi.errors import UsageError
from litchi.model.sizes import (
    AXES,
    MEMBERS,
    allowed_sizes,
    check_axes,
    count_parameters,
    format_table,
    read_shape,
    size_config,
)

TOTALS = {"3b": 3_754_622_976, "7b": 8_292_166_656, "32b": 33_452_718_336, "72b": 73_410_777_344}


def parts_on_meta(config):
    """Parameters by part of the class itself."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    from litchi.model.family import FAMILIES

    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig.from_dict(config))
    found = dict.fromkeys(("vision", "merger", "language", "head"), 0)
    for name, parameter in model.named_parameters():
        found[FAMILIES["qwen2_5_vl"].part_of(name)] += parameter.numel()
    return found


@pytest.mark.parametrize("name", MEMBERS)
def test_parameters_are_those_of_the_class(name):
    found = count_parameters(size_config(name))
    assert found == parts_on_meta(size_config(name))
    assert sum(found.values()) == TOTALS[name]  # pinned: a slip in a shape would move both sides alike
    assert (found["head"] == 0) == (name == "3b")


def test_parameters_of_the_packaged_base(base_folder):
    config = json.loads((base_folder / "config.json").read_text())
    assert count_parameters(config) == parts_on_meta(config)


def test_both_forms_of_a_config_are_one_shape():
    nested = size_config("7b")
    flat = {**nested, **nested["text_config"], "model_type": "qwen2_5_vl"}
    del flat["text_config"]
    assert read_shape(flat) == read_shape(nested)
    old = {**flat, "model_type": "qwen2_vl", "vision_config": {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4,
           "num_heads": 16, "hidden_size": 3584}}  # fmt: skip
    assert (read_shape(old).vision_hidden, read_shape(old).vision_intermediate) == (1280, 5120)


def test_allowed_sizes_by_hand():
    tp = {name: allowed_sizes(size_config(name), "tp") for name in MEMBERS}
    # common divisors of heads, key-value heads and MLP: 16, 2, 11008; 28, 4, 18944; 40, 8, 27648; 64, 8, 29568
    assert tp == {"3b": [1, 2], "7b": [1, 2, 4], "32b": [1, 2, 4, 8], "72b": [1, 2, 4, 8]}
    cp = {name: allowed_sizes(size_config(name), "cp") for name in MEMBERS}
    assert cp["7b"] == [1, 2, 4, 7, 14, 28] and cp["32b"] == [1, 2, 4, 5, 8, 10, 20, 40]
    assert allowed_sizes(size_config("7b"), "cp", tp=4) == [1, 7]
    assert allowed_sizes(size_config("7b"), "pp") == list(range(1, 29))
    assert allowed_sizes(size_config("7b"), "dp_shard", limit=3) == [1, 2, 3]
    with pytest.raises(ValueError, match="ep is no axis"):
        allowed_sizes(size_config("7b"), "ep")


def test_a_tower_that_trains_is_cut_too():
    """3420 = 4 x 855: a wider model with the small tower stops at 4, where the frozen tower would let it go to 8."""
    config = size_config("32b")
    config["vision_config"]["intermediate_size"] = 3420
    assert allowed_sizes(config, "tp") == [1, 2, 4, 8]
    assert allowed_sizes(config, "tp", vision_trains=True) == [1, 2, 4]
    check_axes(config, tp=8)
    with pytest.raises(UsageError, match=r"tp=8: a vision MLP of 3,420 cannot be cut in 8 .*allowed are 1, 2, 4"):
        check_axes(config, tp=8, vision_trains=True)


@pytest.mark.parametrize(
    ("axes", "line"),
    [
        (
            {"tp": 3},
            "parallel.tp=3: 28 attention heads, 4 key-value heads, an MLP of 18,944 cannot be cut in 3 "
            "(Qwen2.5-VL-7B): allowed are 1, 2, 4. ",
        ),
        ({"tp": 7}, "parallel.tp=7: 4 key-value heads, an MLP of 18,944 cannot be cut in 7 (Qwen2.5-VL-7B): "),
        ({"cp": 8}, "parallel.cp=8: 28 attention heads cannot be cut in 8 (Qwen2.5-VL-7B): allowed are 1, 2, 4, 7, "),
        (
            {"tp": 4, "cp": 2},
            "parallel.cp=2: 7 attention heads left by tp=4 cannot be cut in 2 (Qwen2.5-VL-7B): allowed are 1, 7. ",
        ),
        ({"pp": 29}, "parallel.pp=29: 28 layers are fewer than 29 stages (Qwen2.5-VL-7B): allowed are 1 to 28. "),
    ],
)
def test_refused_by_name_with_what_is_allowed(axes, line):
    with pytest.raises(UsageError) as error:
        check_axes(size_config("7b"), **axes)
    assert error.value.line().startswith(line)
    assert "parallel.dp_shard" in error.value.remedy


@pytest.mark.parametrize("name", MEMBERS)
def test_what_is_allowed_is_not_refused_and_the_rest_is(name):
    config = size_config(name)
    for axis in ("tp", "cp", "pp"):
        allowed = allowed_sizes(config, axis, limit=100)
        for size in range(1, 101):
            if size in allowed:
                check_axes(config, **{axis: size})
            else:
                with pytest.raises(UsageError, match=f"parallel.{axis}={size}"):
                    check_axes(config, **{axis: size})


def test_a_model_of_no_name_is_described(base_folder):
    config = json.loads((base_folder / "config.json").read_text())
    with pytest.raises(UsageError, match=r"\(4 layers of 128\)"):
        check_axes(config, tp=3)
    assert all(1 in allowed_sizes(config, axis) for axis in AXES)


def test_unknown_size():
    with pytest.raises(UsageError, match=r"'8b'.*3b, 7b, 32b, 72b"):
        size_config("8b")


def test_the_table_has_a_row_for_each_member():
    rows = format_table().splitlines()
    assert len(rows) == 2 + len(MEMBERS) and len({row.count("|") for row in rows}) == 1
    assert rows[3] == "| 7B | 28 | 4 | 28 | 1, 2, 4 | 1, 2, 4 | 1, 2, 4, 7, 14, 28 | 28 | 1 to 28 | any |"


def test_reading_shapes_does_not_import_torch():
    code = "import sys, litchi.model.sizes; sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
