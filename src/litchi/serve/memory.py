"""Features of pictures in memory, found by what a picture is, up to so many bytes; what was used last stays.

It answers what `model/features.py` asks of a store: find, read, keep. A name carries the hash of the picture's bytes
and its grid, so the same picture in another request, or under another pixel budget, is told apart.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from litchi.data.features import PictureName


@dataclass(frozen=True, eq=False)
class Held:
    """Features of one picture, [rows, hidden]. Whoever has it may use it, also after it has left the memory."""

    features: Tensor

    @property
    def rows(self) -> int:
        return len(self.features)

    @property
    def held_bytes(self) -> int:
        return self.features.nbytes


class FeatureMemory:
    """The features met last, for several threads."""

    def __init__(self, limit_bytes: int):
        self.limit_bytes, self.held_bytes = limit_bytes, 0
        self.held: dict[PictureName, Held] = {}  # what was used last stands last
        self.found = self.asked = 0
        self.lock = threading.Lock()

    def look(self, name: PictureName) -> Held | None:
        """As `find`, and counted."""
        held = self.find(name)
        self.asked, self.found = self.asked + 1, self.found + (held is not None)
        return held

    def find(self, name: PictureName) -> Held | None:
        """Features that are held; they are then the last to go."""
        with self.lock:
            held = self.held.pop(name, None)
            if held is not None:
                self.held[name] = held
            return held

    def read(self, entries: Sequence[Held]) -> tuple[Tensor, list[int]]:
        """Features end to end, and the numbers of those that are damaged: none."""
        return torch.cat([entry.features for entry in entries]), []

    def keep(self, names: Sequence[PictureName], features: Sequence[Tensor]) -> None:
        """Keep features as copies: what comes is a view of a whole batch."""
        with self.lock:
            for name, one in zip(names, features, strict=True):
                known = self.held.pop(name, None)
                held = known or Held(one.detach().clone())
                self.held[name] = held
                self.held_bytes += 0 if known else held.held_bytes
            while self.held_bytes > self.limit_bytes:
                self.held_bytes -= self.held.pop(next(iter(self.held))).held_bytes
