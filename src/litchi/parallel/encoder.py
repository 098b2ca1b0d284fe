"""Vision on ranks of its own: they run the frozen tower ahead of time and send features to the ranks that learn.

The last `parallel.vision_ranks` ranks hold the tower and its merger and nothing else; the others hold everything else,
decode no pixels, and find the features of their micro-batches on the way. Who encodes for whom is planned alike on all
ranks (`batch/encoders.py`). Between two ranks features travel in the order of the plan: there is nothing else to tell
them apart by.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from litchi.batch.cost import Grid
from litchi.batch.loader import Share
from litchi.model.forward import LitchiModel
from litchi.parallel.mesh import Layout
from litchi.parallel.pipeline import take_out
from litchi.types import Batch

Encode = Callable[[Tensor, Sequence[Grid]], Tensor]


def keep_part(owner: LitchiModel, *, encodes: bool) -> None:
    """Take out what the ranks of the other kind hold, in place and before it has values."""
    family = owner.family
    for path in (family.language, family.head) if encodes else (family.vision,):
        take_out(owner.hf, path)


@dataclass(frozen=True)
class RemotePictures:
    """How a rank that learns gets the features of its batch's pictures. The owner asks it.

    Args:
        first: the first vision rank.
        merge: patches on a side of a token.
        width: of a feature.
        dtype: features travel in: the embedded tokens', which they go among.
        device: this rank's.
    """

    first: int
    merge: int
    width: int
    dtype: torch.dtype
    device: torch.device
    share: ClassVar[Share] = (0, 0)  # no picture is decoded here

    def encode(self, batch: Batch, encode: Encode) -> Tensor:
        """Features of all pictures of a batch, in the batch's order, from the vision rank that encodes them."""
        count = sum(t * h * w for t, h, w in batch.grids) // self.merge**2
        features = torch.empty(count, self.width, dtype=self.dtype, device=self.device)
        dist.recv(features, src=self.first + batch.peer)
        return features


@dataclass
class Encoder:
    """What a vision rank does: encode pictures and send the features off.

    Args:
        owner: with the tower alone.
        receivers: the ranks that want the features of each data rank's pictures.
        dtype: features travel in.

    Features of the next step are kept back until it begins. So what is on its way is always wanted next by whoever it
    goes to, evaluations and the end of a run find nothing on its way, and no rank can wait for another in a circle.
    """

    owner: LitchiModel
    receivers: Sequence[Sequence[int]]
    dtype: torch.dtype
    kept: list[tuple[int, Tensor]] = field(default_factory=list)  # (data rank, features) of the next step
    sent: deque[tuple[list[dist.Work | None], Tensor]] = field(default_factory=deque)

    def take_step(self, batches: Sequence[Batch]) -> None:
        """Send what was kept for this step, then encode some micro-batches; those of the next step are kept.

        Args:
            batches: with all their pixels.
        """
        self._wait(besides=0)
        due, self.kept = self.kept, []
        for peer, features in due:
            self._send(peer, features)
        for batch in batches:
            if batch.grids and batch.ahead:
                self.kept.append((batch.peer, self._encode(batch)))
            elif batch.grids:
                self._send(batch.peer, self._encode(batch))

    def serve(self, batch: Batch) -> None:
        """Encode and send the features of one micro-batch of an evaluation, in which ranks wait for nothing else."""
        self._wait(besides=2 * len(self.receivers))
        if batch.grids:
            self._send(batch.peer, self._encode(batch))

    @torch.no_grad()
    def _encode(self, batch: Batch) -> Tensor:
        return self.owner.encode(batch.pixels, batch.grids).to(self.dtype).contiguous()

    def _send(self, peer: int, features: Tensor) -> None:
        works = [dist.isend(features, dst=rank) for rank in self.receivers[peer]]
        self.sent.append((works, features))

    def _wait(self, *, besides: int) -> None:
        """Until all features have arrived but for the last few. Until then they must not be let go of."""
        while len(self.sent) > besides:
            for work in self.sent.popleft()[0]:
                assert work is not None
                work.wait()


def list_receivers(layout: Layout) -> list[list[int]]:
    """By data rank: the ranks of the first stage, which put features among the tokens."""
    receivers: list[list[int]] = [[] for _ in range(layout.data_ranks)]
    for rank in range(layout.ranks):
        if layout.place(rank).pp == 0:
            receivers[layout.data_rank(rank)].append(rank)
    return receivers
