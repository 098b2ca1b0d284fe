"""The pictures of a batch shared out over ranks that work on the same batch, and their features brought together.

Ranks of tp and cp hold the same batch. Instead of each encoding all its pictures, each encodes some and all gather
the features. (A tower that tp cuts needs all pictures on all its ranks; there it is shared out over cp alone.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from litchi.batch.balance import share_pictures
from litchi.parallel.collectives import Group
from litchi.types import Batch

Grid = tuple[int, int, int]
Encode = Callable[[Tensor, Sequence[Grid]], Tensor]


@dataclass(frozen=True)
class SharedPictures:
    """How a rank gets the features of its batch's pictures. The owner asks it."""

    group: Group
    merge: int

    @property
    def share(self) -> tuple[int, int]:
        """Of the pictures that is decoded here: which of how many."""
        return self.group.rank, self.group.size

    def encode(self, batch: Batch, encode: Encode) -> Tensor:
        """Features of all pictures of a batch, in the batch's order. [N, hidden]

        Args:
            batch: its pixels are those of this rank's share, which is all the loader decoded.
            encode: (pixels, grids) -> features, called once with the share, which may be empty.
        """
        if not batch.grids:
            return encode(batch.pixels, ())
        shares = share_pictures(batch.grids, self.group.size)
        features = [t * h * w // self.merge**2 for t, h, w in batch.grids]
        mine = encode(batch.pixels, [batch.grids[n] for n in shares[self.group.rank]])
        got = self.group.gather(mine, [sum(features[n] for n in share) for share in shares])
        came = [n for share in shares for n in share]  # the order in which they lie side by side now
        starts = dict(zip(came, np.cumsum([0, *(features[n] for n in came)]), strict=False))
        order = np.concatenate([np.arange(starts[n], starts[n] + features[n]) for n in range(len(features))])
        return got[torch.from_numpy(order).to(got.device)]
