"""config.json and what trains -> the FLOPs of each token, pair, row and patch: the coefficients of `CostModel`.

A linear layer of n_in x n_out takes 2 n_in n_out FLOPs for a token, once for each pass it takes part in: the forward,
the gradient of its input where something trains here or below, the gradient of its weight where that trains, and the
forward again with checkpointed activations. Attention takes 4 (heads x head_dim) for a pair in the forward (queries x
keys, weights x values) and 10 in the backward, which has five such products because it computes the weights again
(FlashAttention-2, arXiv 2307.08691, section 4.1). This is the count of PaLM's appendix B (arXiv 2204.02311) with
frozen parts and real lengths, and without what `model/leaves.py` saves. Norms, activations, rope and the embedding are
left out: they take memory's time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from litchi.batch.cost import CostModel
from litchi.model.sizes import read_shape

if TYPE_CHECKING:
    from litchi.config import Trainable

BACKWARD = 2.5  # of attention, in its forwards


def read_costs(
    config: Mapping[str, Any], *, scored: bool, trainable: Trainable | None = None, checkpoint: bool = False
) -> CostModel:
    """Costs of a model's samples in a step, or in a forward.

    Args:
        config: config.json.
        scored: the head gives two words' logits (rerank), not those of the vocabulary.
        trainable: what trains; None for a forward alone. LoRA is taken to sit on all linears of its part.
        checkpoint: whether activations are computed twice.
    """
    s, vision = read_shape(config), config["vision_config"]
    modes = {name: "frozen" for name in ("vision", "merger", "language", "head")}
    rank = 0
    if trainable is not None:
        modes = {name: getattr(trainable, name).mode for name in modes}
        rank = trainable.lora.rank

    # whether a gradient flows back through each part: something trains in it or before it
    through_vision = modes["vision"] != "frozen"
    through_merger = through_vision or modes["merger"] != "frozen"
    through_language = through_merger or modes["language"] != "frozen"

    def linears(
        mode: str, through: bool, *layers: tuple[int, int], twice: bool = checkpoint, ends: bool = True
    ) -> float:
        """FLOPs of some linear layers for a token. `twice`: but for the one that `ends` the block, unless its LoRA
        comes behind it."""
        weights = [n_in * n_out for n_in, n_out in layers]
        low = rank * sum(n_in + n_out for n_in, n_out in layers) if mode == "lora" else 0
        again = twice and through
        repeated = weights[:-1] if ends and mode != "lora" else weights
        passes = (1 + through + (mode == "full")) * sum(weights) + again * sum(repeated)
        return 2.0 * (passes + (3 + again) * low)

    def attention(through: bool) -> float:
        return 1 + BACKWARD * through + (checkpoint and through)

    h, v = s.hidden, s.vision_hidden
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    kept = [(h, kv), (h, kv)]  # of the last layer for all tokens, the others only for rows that go to the head
    asking = [(h, q), (q, h), (h, s.intermediate), (h, s.intermediate), (s.intermediate, h)]
    i = s.vision_intermediate
    block = [(v, 3 * v), (v, v), *([(v, i)] if s.window is None else [(v, i), (v, i)]), (i, v)]
    whole = s.vision_depth if s.window is None else len(vision.get("fullatt_block_indexes", (7, 15, 23, 31)))
    merged = v * s.merge**2
    embeds = "full" if modes["vision"] == "full" else "frozen"  # LoRA leaves the patch embedding alone
    patch = linears(embeds, False, (3 * s.patch**2, v), twice=False)  # the frames of a still picture as one
    patch += s.vision_depth * linears(modes["vision"], through_vision, *block)
    merger = linears(modes["merger"], through_merger, (merged, merged), (merged, h), twice=False)
    head = "full" if s.tied and modes["language"] == "full" else modes["head"]
    return CostModel(
        token=(s.layers - 1) * linears(modes["language"], through_language, *kept, *asking)
        + linears(modes["language"], through_language, *kept, ends=False),
        pair=(s.layers - 1) * 4.0 * q * attention(through_language),  # the last layer's rows have few
        row=linears(modes["language"], through_language, *asking)
        + linears(head, through_language, (h, 2 if scored else s.vocabulary), twice=False),
        patch=patch + merger / s.merge**2,
        frame_pair=whole * 4.0 * v * attention(through_vision),
        window_pair=(s.vision_depth - whole) * 4.0 * v * attention(through_vision),
        window=None if s.window is None else s.window // (s.patch * s.merge) * s.merge,
    )
