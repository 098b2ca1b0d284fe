"""Scores in fp32 from two rows of the head, where half precision would make ties."""

import pytest
import torch
from torch import nn

from litchi.model.scoring import HeadRows, ask_rows, score_rows

LOGITS = [9.0, 9.01, 9.02, 9.03, 18.0, 18.05]  # of yes, against 0 for no


def head_and_hidden(dtype):
    """A head whose yes row adds up the entries of a hidden state, each of which bf16 can hold."""
    head = nn.Linear(4, 5, bias=False)
    with torch.no_grad():
        head.weight.zero_()
        head.weight[3] = 1.0  # yes; no is row 1
    hidden = torch.zeros(len(LOGITS), 4)
    hidden[:, 0] = torch.tensor(LOGITS).floor()
    hidden[:, 1] = torch.tensor(LOGITS) - hidden[:, 0]
    return head.to(dtype), hidden.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_scores_stay_apart_where_probabilities_do_not(dtype, autocast):
    head, hidden = head_and_hidden(dtype)
    ask_rows(head)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        scores = score_rows(head, hidden, (3, 1))
    assert scores.dtype == torch.float32
    assert torch.allclose(scores, torch.tensor(LOGITS), atol=1e-3)
    assert scores.argsort().tolist() == list(range(6)) and len(scores.unique()) == 6
    for half in (torch.bfloat16, torch.float16):  # what ranking by probabilities in half precision would see
        assert (scores.to(half).sigmoid() == 1.0).all()
    assert len(scores.sigmoid().unique()) < 6, "not even fp32 probabilities tell them all apart"


def test_two_rows_are_the_columns_of_the_whole_head():
    head = nn.Linear(16, 50, bias=False)
    hidden = torch.randn(6, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    wanted = head(hidden)[:, 7] - head(hidden)[:, 41]
    names = [name for name, _ in head.named_parameters()]
    ask_rows(head)
    found = score_rows(head, hidden, (7, 41))
    assert [name for name, _ in head.named_parameters()] == names and isinstance(head, HeadRows)
    torch.testing.assert_close(found, wanted)
    gradients = [torch.autograd.grad((s * torch.arange(6)).sum(), (hidden, head.weight)) for s in (found, wanted)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
        assert other.abs().sum() > 0
    assert torch.equal(head(hidden), nn.Linear.forward(head, hidden))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_with_lora_is_scored_in_fp32_too(dtype):
    from peft import LoraConfig, inject_adapter_in_model

    head, hidden = head_and_hidden(dtype)
    ask_rows(head)
    owner = nn.ModuleDict({"lm_head": head})
    inject_adapter_in_model(LoraConfig(r=2, lora_alpha=3, target_modules=["lm_head"]), owner)
    wrapped = owner["lm_head"]
    before = score_rows(wrapped, hidden, (3, 1))
    assert torch.allclose(before, torch.tensor(LOGITS), atol=1e-3) and len(before.unique()) == 6
    with torch.no_grad():
        wrapped.lora_B["default"].weight.normal_(generator=torch.Generator().manual_seed(0))
    after = score_rows(wrapped, hidden, (3, 1))
    whole = wrapped.float()(hidden.float())
    torch.testing.assert_close(after, whole[:, 3] - whole[:, 1], atol=1e-4, rtol=1e-4)
    assert (after - before).abs().max() > 0.1
