"""Losses of scores: sums, with the units they are divided by. To add one: a function, its units, a line in `LOSSES`.

Every loss takes scores [R], fp32 or fp64, targets fp32 [R] and groups [(a, b)] (rows of each query) and returns a sum;
its units function counts on the CPU, before the forward, what the sums of all ranks are divided by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from litchi.batch.cutting import Cuts

if TYPE_CHECKING:
    from litchi.config import Loss

Groups = Sequence[tuple[int, int]]


def bce(scores: Tensor, targets: Tensor, groups: Groups, *, weight: float | str = 1.0) -> Tensor:
    """Binary cross entropy of each document on logit(yes) - logit(no): the cross entropy of the two words.

    Args:
        weight: of positives; "balanced" gives a group's positives together the weight of its negatives.

    Source: arXiv 2510.14824, equation 3. Units: documents.
    """
    each = F.binary_cross_entropy_with_logits(scores, targets.clamp(max=1.0).to(scores), reduction="none")
    if weight == 1.0:
        return each.sum()
    scale = torch.ones_like(scores)
    for a, b in groups:
        positive = targets[a:b] > 0
        count, yes = b - a, int(positive.sum())
        if weight != "balanced":
            scale[a:b][positive] = float(weight)
        elif 0 < yes < count:
            scale[a:b] = torch.where(positive, count / (2 * yes), count / (2 * (count - yes)))
    return (each * scale).sum()


def group_softmax(scores: Tensor, targets: Tensor, groups: Groups, *, temperature: float = 1.0) -> Tensor:
    """Cross entropy of a group's softmax against labels / sum of labels (not softmax of the labels).

    Source: ListNet, Cao et al. 2007, with the target normalised by its sum. Units: groups.
    """
    total = scores.sum() * 0.0
    for a, b in groups:
        target = targets[a:b] / targets[a:b].sum()
        total = total - (target * F.log_softmax(scores[a:b] / temperature, dim=0)).sum()
    return total


def pairwise(scores: Tensor, targets: Tensor, groups: Groups, *, margin: float = 0.0) -> Tensor:
    """softplus(margin - (s_i - s_j)) over all pairs of a group with label_i > label_j.

    Source: RankNet, Burges et al. 2005. Units: pairs.
    """
    total = scores.sum() * 0.0
    for a, b in groups:
        s, t = scores[a:b], targets[a:b]
        above = t[:, None] > t[None, :]
        total = total + F.softplus(margin - (s[:, None] - s[None, :]))[above].sum()
    return total


def listwise_lambda(scores: Tensor, targets: Tensor, groups: Groups) -> Tensor:
    """Pairs as in `pairwise`, each weighted by what exchanging its two documents would change nDCG by.

    sum over label_i > label_j of |label_i - label_j| |1 / d_i - 1 / d_j| / ideal x softplus(-(s_i - s_j)), where
    d = log2(1 + rank) under the scores as they are now, without a gradient, and ideal is the group's best DCG. The gain
    is linear, as in the metric `ndcg`. Where scores tie, the lower label is taken to stand first: so a group of equal
    scores learns, and documents of one label and score weigh alike together.

    Source: LambdaRank, Burges 2010 (MSR-TR-2010-82), section 4; as a loss, Wang et al. 2018 (LambdaLoss, CIKM).
    Units: groups.
    """
    total = scores.sum() * 0.0
    for a, b in groups:
        s, t = scores[a:b], targets[a:b]
        by_label = torch.argsort(t, stable=True)
        order = by_label[torch.argsort(s.detach()[by_label], descending=True, stable=True)]
        discount = 1 / torch.log2(torch.arange(2, b - a + 2, device=s.device, dtype=s.dtype))
        share = torch.empty_like(discount)
        share[order] = discount
        ideal = (t.sort(descending=True).values * discount).sum()
        better, worse = torch.nonzero(t[:, None] > t[None, :], as_tuple=True)
        weight = (t[better] - t[worse]) * (share[better] - share[worse]).abs() / ideal
        total = total + (weight * F.softplus(s[worse] - s[better])).sum()
    return total


def count_documents(targets: Tensor, groups: Groups) -> int:
    """Units of a loss that is a sum over documents."""
    return len(targets)


def count_groups(targets: Tensor, groups: Groups) -> int:
    """Units of one over groups."""
    return len(groups)


def count_pairs(targets: Tensor, groups: Groups) -> int:
    """Units of one over pairs of which the first has the higher label."""
    return sum(int((targets[a:b, None] > targets[None, a:b]).sum()) for a, b in groups)


@dataclass(frozen=True)
class ScoreLoss:
    """A loss, what it is divided by, and the settings it takes."""

    loss: Callable[..., Tensor]
    units: Callable[[Tensor, Groups], int]
    settings: tuple[str, ...] = ()
    apart: bool = False  # a sum over documents: a group may be cut without knowing its other scores


LOSSES = {
    "bce": ScoreLoss(bce, count_documents, ("weight",), apart=True),
    "group_softmax": ScoreLoss(group_softmax, count_groups, ("temperature",)),
    "pairwise": ScoreLoss(pairwise, count_pairs, ("margin",)),
    "listwise_lambda": ScoreLoss(listwise_lambda, count_groups),
}


def cutting(loss: Loss, *, vision_ranks: int = 0) -> Cuts:
    """How a group that exceeds a micro-batch may be cut. Vision ranks send the features of a micro-batch once."""
    if loss.name == "ce":
        return "never"
    if LOSSES[loss.name].apart and loss.weight != "balanced":
        return "free"
    return "never" if vision_ranks else "together"


def make_loss(loss: Loss) -> tuple[Callable[[Tensor, Tensor, Groups], Tensor] | None, Callable | None]:
    """The loss of the settings with its settings bound, and its units; (None, None) for chat's token loss."""
    if loss.name == "ce":
        return None, None
    kind = LOSSES[loss.name]
    return partial(kind.loss, **{name: getattr(loss, name) for name in kind.settings}), kind.units
