"""The most memory a process holds on a CPU: tensors through glibc's malloc, which gives back less than it is given.

Sizes in the order in which they are taken and freed in, resident bytes out. Pure. Habits of malloc that make a process
larger than its tensors: a hole of the very size that is wanted does not do, because aligned memory is asked for with
room to move; what is left of that room goes to small objects, which live longer than their neighbour and keep holes
from becoming one; only what is larger than the largest piece freed so far is mapped on its own and given back at once;
and of the heap only the end is given back, when much of it is free.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Any

HEADER = 16
SMALL = 64  # a small object; torch aligns to as much
SMALLS = 2  # that come with a tensor: itself and its storage
ASIDE = 2  # small pieces kept aside when they are freed: by `benchmarks/planner.py`; malloc has 7 of each size
ROOM = HEADER + SMALL + 32  # bytes more than its size that a hole must have
LEAST = 128 * 1024  # mapped on their own at first; also what is left at the end of the heap
MOST = 32 * 2**20  # mapped on their own at last
PAGE = 4096


class Heap:
    """Resident bytes of what is taken and given back; `peak` is the most of them."""

    def __init__(self) -> None:
        self.threshold = self.trim = LEAST
        self.mapped = self.top = self.touched = self.peak = 0
        self.pieces: dict[Any, tuple[int, int]] = {}  # start (below zero: mapped on its own) and size
        self.smalls: dict[Any, list[tuple[int, int]]] = {}
        self.aside: list[tuple[int, int]] = []
        self.holes: list[tuple[int, int]] = []  # size, start
        self.starts: dict[int, int] = {}  # of holes -> size
        self.ends: dict[int, int] = {}  # of holes -> start

    def take(self, key: Any, size: int) -> None:
        """A tensor: in the smallest hole that does, at the end of the heap, or on its own; and its small objects."""
        small = [self._take_small()]
        found = self._find(size + ROOM)
        if found is None and size >= self.threshold and self.top + size + ROOM > self.touched:
            self.pieces[key] = (-1, size + PAGE)
            self.mapped += size + PAGE
        else:
            start = self._cut(found, size + HEADER + SMALL)
            self.pieces[key] = (start, size + HEADER)
            self.aside.append((start + size + HEADER, SMALL))
        self.smalls[key] = small + [self._take_small() for _ in range(SMALLS - 1)]
        self._shed()
        self.peak = max(self.peak, self.touched + self.mapped)

    def give(self, key: Any) -> None:
        """It comes back."""
        start, size = self.pieces.pop(key)
        if start >= 0:
            self._free(start, size)
        else:
            self.mapped -= size
            if self.threshold < size <= MOST:
                self.threshold, self.trim = size, 2 * size
        self.aside += self.smalls.pop(key)
        self._shed()

    def follow(self, name: Any, events: Iterable[tuple[int, int]]) -> None:
        """Take and give as a `Tracker` has seen it."""
        for number, size in events:
            if size:
                self.take((name, number), size)
            else:
                self.give((name, number))

    def _take_small(self) -> tuple[int, int]:
        return self.aside.pop() if self.aside else (self._cut(self._find(SMALL), SMALL), SMALL)

    def _shed(self) -> None:
        while len(self.aside) > ASIDE:
            self._free(*self.aside.pop(0))

    def _find(self, size: int) -> tuple[int, int] | None:
        at = bisect_left(self.holes, (size, 0))
        return self.holes[at] if at < len(self.holes) else None

    def _cut(self, hole: tuple[int, int] | None, size: int) -> int:
        """The start of so many bytes, of a hole or behind all others."""
        if hole is None:
            start, self.top = self.top, self.top + size
            self.touched = max(self.touched, self.top)
            return start
        length, start = hole
        self._close(length, start)
        self._open(length - size, start + size)
        return start

    def _free(self, start: int, size: int) -> None:
        """One with the holes beside it, or with the end of the heap, which goes when it is long."""
        if (after := self.starts.get(start + size)) is not None:
            self._close(after, start + size)
            size += after
        if (before := self.ends.get(start)) is not None:
            self._close(start - before, before)
            size, start = size + start - before, before
        if start + size < self.top:
            self._open(size, start)
            return
        self.top = start
        if self.touched - start >= self.trim:
            self.touched = start + LEAST

    def _open(self, size: int, start: int) -> None:
        if size > 0:
            insort(self.holes, (size, start))
            self.starts[start], self.ends[start + size] = size, start

    def _close(self, size: int, start: int) -> None:
        del self.holes[bisect_left(self.holes, (size, start))]
        del self.starts[start], self.ends[start + size]
