"""What attends to what: a forest of spans -> the (queries, keys) blocks that attention runs on.

A span attends causally to itself and fully to each of its ancestors. Where only some rows of a layer's output are
needed, their queries lie side by side and the keys stay where they are (`row_pieces`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

Span = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Piece:
    """`count` equal blocks side by side: queries [q0, q1) against keys [k0, k1), both cut into `count` parts.

    `first` marks the piece that opens its queries; the others are merged into what is there.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool
    count: int = 1
    first: bool = True


class Pieces(list[Piece]):
    """The pieces of one forward, which all its layers walk, with what is worked out of them once.

    `kernel` is `model.attention`: what computes them (`model/kernels.py`).
    """

    kernel = "auto"

    @cached_property
    def tiled(self) -> int:
        """How many tokens the pieces that open queries tile by blocks on the diagonal, end to end; 0: they do not.

        Each query and each key of the stream is then in one of them, and gradients need no zeros to be added to.
        """
        at = 0
        for p in self:
            if p.first:
                if not p.q0 == p.k0 == at or p.q1 != p.k1:
                    return 0
                at = p.q1
        return at

    @cached_property
    def made(self) -> dict[object, Any]:
        """What a kernel makes of the pieces, by device: made in the first layer, taken in the others."""
        return {}


@dataclass
class Plan:
    """What attends to what in one forward. An opaque object, so that FSDP's and checkpointing's walks skip it.

    `full` are the pieces of ordinary layers, `window` those of the vision tower's windowed layers; `cache` is the
    `KeyValueCache` while generating (`model/generate.py`); `sequence` trades tokens for heads where several ranks
    hold the stream (`parallel/sequence.py`). `rows` are those needed of the last layer, where it leaves out the
    others, and `last` its pieces.
    """

    full: Sequence[Piece]
    window: Sequence[Piece] | None = None
    cache: object | None = field(default=None, repr=False)
    sequence: Any = field(default=None, repr=False)
    rows: Tensor | None = None
    last: Sequence[Piece] | None = None

    def choose(self, kernel: str) -> Plan:
        """Have all pieces computed by what `model.attention` says."""
        for pieces in (self.full, self.window, self.last):
            if isinstance(pieces, Pieces):
                pieces.kernel = kernel
        return self


def span_pieces(spans: Sequence[Span]) -> Pieces:
    """Pieces of a forest: each span's own causal block (equal neighbours stacked), then span against ancestor.

    Siblings that lie side by side attend to their ancestor in one piece.
    """
    own = Pieces()
    meeting = _Ancestors(spans)
    for number, (start, end, _) in enumerate(spans):
        last = own[-1] if own else None
        size = end - start
        if last is not None and last.q1 == start and (last.q1 - last.q0) == size * last.count:
            own[-1] = Piece(last.q0, end, last.q0, end, True, last.count + 1)
        else:
            own.append(Piece(start, end, start, end, True))
        meeting.add(number, start, end)
    own += meeting.pieces
    return own


def row_pieces(spans: Sequence[Span], rows: Iterable[int]) -> Pieces:
    """Pieces of some rows of a forest, whose queries lie side by side; keys are those of the whole stream.

    A run of neighbouring rows attends causally to itself and fully to what is before it in its span; a row alone,
    such as a prompt's last, to both in one piece.

    Args:
        rows: ascending.
    """
    own, before, meeting = Pieces(), [], _Ancestors(spans)
    span, at = 0, 0
    for a, b in _runs(rows, [end for _, end, _ in spans]):
        while spans[span][1] <= a:
            span += 1
        start, q0, q1 = spans[span][0], at, at + b - a
        if b - a == 1:
            stack(own, Piece(q0, q1, start, b, False))
        else:
            own.append(Piece(q0, q1, a, b, True))
            if a > start:
                before.append(Piece(q0, q1, start, a, False, 1, False))
        meeting.add(span, q0, q1)
        at = q1
    own += before
    own += meeting.pieces
    return own


def _runs(rows: Iterable[int], ends: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of neighbouring rows [a, b), cut where a span ends."""
    runs: list[tuple[int, int]] = []
    cuts = set(ends)
    for row in rows:
        if runs and runs[-1][1] == row and row not in cuts:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
    return runs


def stack(pieces: Pieces, piece: Piece) -> None:
    """Put a piece without causal order behind the others, into the last where it is its equal neighbour."""
    last = pieces[-1] if pieces else None
    if (
        last is not None
        and not last.causal
        and (last.q1, last.k1) == (piece.q0, piece.k0)
        and (last.q1 - last.q0) * piece.count == (piece.q1 - piece.q0) * last.count
        and (last.k1 - last.k0) * piece.count == (piece.k1 - piece.k0) * last.count
    ):
        pieces[-1] = Piece(last.q0, piece.q1, last.k0, piece.k1, False, last.count + piece.count)
    else:
        pieces.append(piece)


class _Ancestors:
    """Gathers the pieces of spans against their ancestors."""

    def __init__(self, spans: Sequence[Span]):
        self.spans = spans
        self.pieces: list[Piece] = []
        self.open_runs: dict[int, int] = {}  # ancestor -> number in `pieces` of the run that may still grow

    def add(self, span: int, q0: int, q1: int) -> None:
        """Let queries [q0, q1) of a span attend to all its ancestors."""
        parent = self.spans[span][2]
        while parent >= 0:
            k0, k1, above = self.spans[parent]
            run = self.open_runs.get(parent)
            if run is not None and self.pieces[run].q1 == q0:
                self.pieces[run] = Piece(self.pieces[run].q0, q1, k0, k1, False, 1, False)
            else:
                self.open_runs[parent] = len(self.pieces)
                self.pieces.append(Piece(q0, q1, k0, k1, False, 1, False))
            parent = above
