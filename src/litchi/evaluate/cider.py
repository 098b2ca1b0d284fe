"""CIDEr-D: how much of a reference's telling words a caption has. Tokens in, a score for each caption out.

Vedantam, Zitnick and Parikh, "CIDEr: Consensus-based Image Description Evaluation", CVPR 2015, section 6, with counts
and constants as in the authors' program, whose figures are the published ones: n-grams of 1 to 4 tokens, each weighted
by its count and by the log of how rare it is among the references; a caption's weights are clipped to the reference's;
another length is punished by a bell curve 6 tokens wide; 10 is the most. Words are taken as they are, without stems.

What is rare is learnt from the references at hand, so figures of two sets cannot be compared, and with a single
reference nothing is rare and the score is 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

LONGEST = 4  # tokens of an n-gram
WIDTH = 6.0  # of the bell curve, in tokens
Grams = Counter[tuple[str, ...]]
Vector = Mapping[tuple[str, ...], float]


def cider_d(answers: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> list[float]:
    """Score captions, 0..10 each, against one reference each.

    Args:
        answers, references: their tokens.
    """
    expected = [_count(tokens) for tokens in references]
    seen = Counter(gram for grams in expected for counts in grams for gram in counts)
    rarity = {gram: math.log(len(references)) - math.log(count) for gram, count in seen.items()}
    unseen = math.log(len(references)) if references else 0.0

    def weigh(counts: Grams) -> Vector:
        return {gram: count * rarity.get(gram, unseen) for gram, count in counts.items()}

    scores = []
    for answer, reference, grams in zip(answers, references, expected, strict=True):
        likeness = [_likeness(weigh(a), weigh(b)) for a, b in zip(_count(answer), grams, strict=True)]
        apart = len(answer) - len(reference)
        scores.append(10 * math.exp(-(apart**2) / (2 * WIDTH**2)) * sum(likeness) / LONGEST)
    return scores


def _count(tokens: Sequence[str]) -> list[Grams]:
    """n-grams by their length, from 1."""
    return [Counter(zip(*(tokens[i:] for i in range(n)), strict=False)) for n in range(1, LONGEST + 1)]


def _likeness(answer: Vector, reference: Vector) -> float:
    """Cosine of the two, the answer's weights clipped to the reference's."""
    norm = math.hypot(*answer.values()) * math.hypot(*reference.values())
    if norm == 0:
        return 0.0
    shared = [(weight, reference[gram]) for gram, weight in answer.items() if gram in reference]
    return sum(min(ours, theirs) * theirs for ours, theirs in shared) / norm
