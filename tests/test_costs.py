"""What axes cost, against arithmetic by hand, and the page that shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from litchi.model.sizes import MEMBERS, count_parameters, read_shape, size_config
from litchi.parallel.costs import (
    EIGHT,
    RECIPES,
    Work,
    bubble,
    count_linears,
    count_lora,
    fill_tables,
    state_bytes,
    traffic_bytes,
    working_bytes,
)
from litchi.parallel.mesh import Layout, gradients_wait

PAGE = Path(__file__).parents[1] / "docs" / "parallelism.md"
P7 = 8_292_166_656
SEVEN = size_config("7b")


def test_the_page_shows_what_the_formulas_give():
    """To renew it: the command at its top."""
    text = PAGE.read_text(encoding="utf-8")
    assert fill_tables(text) == text
    assert all(f"<!-- {name}:begin -->" in text for name in ("sizes", "bytes", "memory", "traffic", "layouts"))
    assert text.count("| 72B |") == 2 + 2 * len(EIGHT)


@pytest.mark.parametrize("name", MEMBERS)
def test_lora_and_linears_are_those_of_the_class(name):
    import torch
    from transformers import Qwen2_5_VLConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLDecoderLayer

    config = Qwen2_5_VLConfig.from_dict(size_config(name)).text_config
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        layer = Qwen2_5_VLDecoderLayer(config, 0)
    linears = [m for m in layer.modules() if isinstance(m, torch.nn.Linear)]
    shape = read_shape(size_config(name))
    assert len(linears) == 7
    assert count_lora(shape, 8) == sum(8 * (m.in_features + m.out_features) for m in linears)
    assert count_linears(shape) == sum(m.weight.numel() for m in linears)


def test_state_by_hand():
    assert state_bytes(SEVEN, "full", Layout()) == 16 * P7
    assert state_bytes(SEVEN, "full", Layout(dp_replicate=8)) == 16 * P7
    assert state_bytes(SEVEN, "full", Layout(dp_shard=8)) == 16 * P7 / 8
    assert state_bytes(SEVEN, "full", Layout(dp_shard=2, cp=4)) == 16 * P7 / 8
    assert state_bytes(SEVEN, "full", Layout(dp_replicate=2, dp_shard=4)) == 16 * P7 / 4
    lora = 28 * 16 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
    assert state_bytes(SEVEN, "lora", Layout()) == 2 * P7 + 16 * lora
    linears = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    nf4 = state_bytes(SEVEN, "nf4", Layout())
    assert nf4 == pytest.approx(2 * (P7 - linears) + (0.5 + 1 / 64 + 4 / 16384) * linears + 16 * lora)


def test_state_of_cut_layers_and_stages():
    counted = count_parameters(SEVEN)
    layers = counted["language"] - 152064 * 3584 - 3584
    ends = P7 - layers
    assert state_bytes(SEVEN, "full", Layout(tp=4)) == pytest.approx(16 * (layers / 4 + ends))
    first = layers / 4 + counted["vision"] + counted["merger"] + 152064 * 3584 + 3584
    assert state_bytes(SEVEN, "full", Layout(pp=4)) == pytest.approx(16 * first)  # it has more than the last
    whole = sum(count_parameters(size_config("3b")).values())
    assert state_bytes(size_config("3b"), "full", Layout()) == 16 * whole


def test_whole_gradients_wait_between_micro_batches():
    once = Work(step_tokens=8 * 16384)
    several = Work(step_tokens=16 * 16384)
    layout = Layout(dp_shard=8)
    assert (once.micro_batches(layout), several.micro_batches(layout)) == (1, 2)
    small = size_config("3b")
    more = working_bytes(small, "full", layout, several) - working_bytes(small, "full", layout, once)
    assert more == 0  # 15 GB are more than an eighth of 80 GB, so they do not wait
    lora = working_bytes(SEVEN, "lora", layout, several) - working_bytes(SEVEN, "lora", layout, once)
    assert lora == pytest.approx(4 * 40_370_176)
    assert gradients_wait(2.5e9, 80e9) and not gradients_wait(2.6e9, 80e9)


def test_traffic_by_hand():
    work = Work(step_tokens=8 * 4 * 1000, micro_batch_tokens=1000)
    assert traffic_bytes(SEVEN, "full", Layout(dp_replicate=8), work) == {
        **dict.fromkeys(("all-gather", "reduce-scatter", "all-to-all", "point-to-point"), 0.0),
        "all-reduce": pytest.approx(2 * 7 / 8 * 4 * P7),
    }
    counted = count_parameters(SEVEN)
    ends = counted["vision"] + counted["merger"] + 2 * 152064 * 3584 + 3584
    shards = traffic_bytes(SEVEN, "full", Layout(dp_shard=8), work)
    assert shards["all-gather"] == pytest.approx(4 * 7 / 8 * 2 * (2 * (P7 - ends) + ends))
    assert shards["reduce-scatter"] == pytest.approx(4 * 7 / 8 * 4 * P7)  # in each of four micro-batches
    both = traffic_bytes(SEVEN, "full", Layout(dp_replicate=2, dp_shard=4), work)
    assert both["all-reduce"] == pytest.approx(4 * 2 * 1 / 2 * 4 * P7 / 4)
    tensor = traffic_bytes(SEVEN, "full", Layout(tp=4), Work(4000, 1000, checkpoint=False))
    assert tensor["all-reduce"] == pytest.approx(4 * 28 * 4 * 2 * 3 / 4 * 1000 * 3584 * 2)
    stages = traffic_bytes(SEVEN, "full", Layout(pp=4), Work(4000, 1000))
    assert stages["point-to-point"] == 4 * 2 * 1000 * 3584 * 2


def test_keys_that_cannot_be_dealt_out_are_repeated():
    work = Work(4000, 1000, checkpoint=False)
    dealt = traffic_bytes(SEVEN, "full", Layout(cp=4), work)["all-to-all"]
    assert dealt == pytest.approx(4 * 28 * 2 * 3 / 4 * 250 * 2 * (2 * 3584 + 2 * 512))
    repeated = traffic_bytes(SEVEN, "full", Layout(cp=7), work)["all-to-all"]
    assert repeated == pytest.approx(4 * 28 * 2 * 6 / 7 * 1000 / 7 * 2 * 4 * 3584)


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_process_sends_nothing(recipe):
    assert sum(traffic_bytes(SEVEN, recipe, Layout(), Work()).values()) == 0
    assert bubble(Layout(), Work()) == 0


def test_the_bubble_of_the_page():
    assert bubble(EIGHT["PP 4 x FSDP2 2"], Work()) == pytest.approx(3 / 11)
