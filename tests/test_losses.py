"""Losses of scores against values by hand and independent formulas."""

from __future__ import annotations

import math

import pytest
import torch

from litchi.config import load_config
from litchi.train.losses import LOSSES, bce, group_softmax, listwise_lambda, make_loss, pairwise

SCORES = torch.tensor([2.0, -1.0, 0.5, 0.0, 3.0])
TARGETS = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0])
GROUPS = ((0, 3), (3, 5))


def softplus(x):
    return math.log1p(math.exp(x))


def test_bce_is_the_cross_entropy_of_yes_and_no():
    by_hand = softplus(-2) + softplus(-1) + softplus(0.5) + math.log(2) + softplus(3)
    assert bce(SCORES, TARGETS, GROUPS).item() == pytest.approx(by_hand)
    logits = torch.tensor([[1.3, -0.7], [0.2, 1.2], [1.0, 0.5], [-4.0, -4.0], [3.5, 0.5]])  # of yes and no
    words = torch.nn.functional.cross_entropy(logits, (1 - TARGETS).long(), reduction="sum")
    assert bce(logits[:, 0] - logits[:, 1], TARGETS, GROUPS).item() == pytest.approx(words.item(), rel=1e-6)


def test_bce_weight_counts_positives_more():
    by_hand = 3 * softplus(-2) + softplus(-1) + softplus(0.5) + 3 * math.log(2) + softplus(3)
    assert bce(SCORES, TARGETS, GROUPS, weight=3.0).item() == pytest.approx(by_hand)


def test_bce_balanced_gives_both_sides_of_a_group_half_of_it():
    first = 3 / 2 * softplus(-2) + 3 / 4 * (softplus(-1) + softplus(0.5))  # one positive, two negatives
    second = math.log(2) + softplus(3)  # one of each: nothing to balance
    assert bce(SCORES, TARGETS, GROUPS, weight="balanced").item() == pytest.approx(first + second)


def test_bce_balanced_leaves_a_one_sided_group_alone():
    ones = torch.ones(3)
    whole = ((0, 3),)
    assert bce(SCORES[:3], ones, whole, weight="balanced") == bce(SCORES[:3], ones, whole)


def test_bce_takes_grades_above_one_as_yes():
    graded = torch.tensor([3.0, 0.0, 0.0, 2.0, 0.0])
    assert bce(SCORES, graded, GROUPS, weight=2.0) == bce(SCORES, TARGETS, GROUPS, weight=2.0)


def test_group_softmax_of_one_positive_is_its_cross_entropy():
    first = math.log(math.exp(2) + math.exp(-1) + math.exp(0.5)) - 2
    second = math.log(1 + math.exp(3))
    assert group_softmax(SCORES, TARGETS, GROUPS).item() == pytest.approx(first + second)


def test_group_softmax_divides_grades_by_their_sum():
    grades = torch.tensor([3.0, 0.0, 1.0])
    log_p = [s - math.log(sum(map(math.exp, (2, -1, 0.5)))) for s in (2, -1, 0.5)]
    by_hand = -(0.75 * log_p[0] + 0.25 * log_p[2])
    softmaxed = -sum(p * q for p, q in zip(torch.softmax(grades, 0).tolist(), log_p, strict=True))
    found = group_softmax(SCORES[:3], grades, ((0, 3),)).item()
    assert found == pytest.approx(by_hand)
    assert abs(found - softmaxed) > 0.01  # the other formula one meets is another number here


def test_group_softmax_temperature_divides_scores():
    assert group_softmax(SCORES, TARGETS, GROUPS, temperature=0.5) == group_softmax(2 * SCORES, TARGETS, GROUPS)


def test_pairwise_takes_every_pair_in_the_right_order():
    grades = torch.tensor([2.0, 0.0, 1.0])
    by_hand = softplus(-(2 + 1)) + softplus(-(2 - 0.5)) + softplus(-(0.5 + 1))
    assert pairwise(SCORES[:3], grades, ((0, 3),)).item() == pytest.approx(by_hand)


def test_pairwise_margin():
    by_hand = softplus(0.7 - 3) + softplus(0.7 - 1.5) + softplus(0.7 + 3)
    assert pairwise(SCORES, TARGETS, GROUPS, margin=0.7).item() == pytest.approx(by_hand)


def test_listwise_lambda_weighs_pairs_by_what_they_change_ndcg_by():
    """Scores 2, -1, 0.5 rank the documents 1, 3, 2; grades 1, 3, 0."""
    grades = torch.tensor([1.0, 3.0, 0.0])
    d = [1.0, 1 / math.log2(3), 0.5]  # discounts of ranks 1, 2, 3
    ideal = 3 * d[0] + 1 * d[1]
    by_hand = (
        2 * (d[0] - d[2]) / ideal * softplus(-(-1 - 2))  # document 1 above document 0: it stands last
        + 3 * (d[1] - d[2]) / ideal * softplus(-(-1 - 0.5))
        + 1 * (d[0] - d[1]) / ideal * softplus(-(2 - 0.5))
    )
    assert listwise_lambda(SCORES[:3], grades, ((0, 3),)).item() == pytest.approx(by_hand, rel=1e-6)


def ndcg(scores, grades):
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    gain = sum(grades[i] / math.log2(r + 2) for r, i in enumerate(order))
    return gain / sum(g / math.log2(r + 2) for r, g in enumerate(sorted(grades, reverse=True)))


def test_listwise_lambda_weights_are_the_changes_of_the_metric():
    """Exchanging the scores of two documents changes nDCG by just the weight of their pair."""
    scores, grades = [0.3, -0.2, 1.1, 0.7], [2.0, 0.0, 1.0, 0.0]
    by_hand = 0.0
    for i in range(4):
        for j in range(4):
            if grades[i] > grades[j]:
                swapped = list(scores)
                swapped[i], swapped[j] = scores[j], scores[i]
                change = abs(ndcg(swapped, grades) - ndcg(scores, grades))
                by_hand += change * softplus(-(scores[i] - scores[j]))
    found = listwise_lambda(torch.tensor(scores), torch.tensor(grades), ((0, 4),))
    assert found.item() == pytest.approx(by_hand, rel=1e-5) and by_hand > 0.1


def test_listwise_lambda_learns_from_ties_and_leaves_one_sided_groups():
    scores = torch.zeros(4, requires_grad=True)
    listwise_lambda(scores, torch.tensor([0.0, 1.0, 0.0, 0.0]), ((0, 4),)).backward()
    assert scores.grad[1] < 0 and (scores.grad[[0, 2, 3]] >= 0).all() and scores.grad.sum().abs() < 1e-6
    shuffled = listwise_lambda(torch.zeros(4), torch.tensor([1.0, 0.0, 0.0, 0.0]), ((0, 4),))
    assert shuffled.item() == pytest.approx(listwise_lambda(torch.zeros(4), torch.eye(4)[3], ((0, 4),)).item())
    for grade in (0.0, 1.0):
        scores = SCORES[:3].clone().requires_grad_()
        loss = listwise_lambda(scores, torch.full((3,), grade), ((0, 3),))
        loss.backward()
        assert loss == 0 and not scores.grad.any()


@pytest.mark.parametrize("name, units", [("bce", 8), ("group_softmax", 2), ("pairwise", 9), ("listwise_lambda", 2)])
def test_units(name, units):
    grades = torch.tensor([2.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    groups = ((0, 3), (3, 8))  # pairs: three of the first, twice three of the second
    assert LOSSES[name].units(grades, groups) == units


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_a_sum_over_groups(name):
    """So groups may be shared out over micro-batches and ranks."""
    loss = LOSSES[name].loss
    parts = loss(SCORES[:3], TARGETS[:3], ((0, 3),)) + loss(SCORES[3:], TARGETS[3:], ((0, 2),))
    assert loss(SCORES, TARGETS, GROUPS).item() == pytest.approx(parts.item(), rel=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_agree_with_differences(name):
    scores = SCORES.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda s: LOSSES[name].loss(s, TARGETS.double(), GROUPS), (scores,))


def test_settings_reach_the_loss():
    settings = load_config(None, ["task=rerank", "loss={name: pairwise, margin: 0.7}"], need=())
    loss, units = make_loss(settings.loss)
    assert loss(SCORES, TARGETS, GROUPS) == pairwise(SCORES, TARGETS, GROUPS, margin=0.7)
    assert units(TARGETS, GROUPS) == 3
    assert make_loss(load_config(None, ["task=chat"], need=()).loss) == (None, None)
