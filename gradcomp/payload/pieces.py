"""Where a parameter lies in a bucket, ranges of its elements in a message, and which rank owns
which: what a rank averages in a reduce_scatter, and whose states it keeps.

Ownership is a function of (parameter, world size) and never of bucket boundaries, so bucket
rebuilds change no owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

# bounds of ownership are multiples of this, so that codes of whole bits begin on a byte wherever a
# piece begins
UNIT_NUMEL = 8


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter inside a bucket.

    Attributes:
        index: position in ``named_parameters()``.
        numel: elements.
        group_numel: elements of one scale group, at least 1.
        compressed: False for small and excluded tensors, which travel as fp32.
        offset: first element in the bucket.
        residual: first element in the residual plane.
        start: first element within the parameter, where the slot is a shard of one.
    """

    index: int
    numel: int
    group_numel: int
    compressed: bool
    offset: int
    residual: int = 0
    start: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, start + numel) of a parameter, lying at `data` in a flat tensor and at
    `residual` in a plane.
    """

    slot: Slot
    start: int
    numel: int
    data: int
    residual: int

    @property
    def group_count(self) -> int:
        """Scale groups that the piece touches, those it cuts included."""
        size = self.slot.group_numel
        return (self.start + self.numel - 1) // size - self.start // size + 1 if self.numel else 0


def whole_pieces(slots: Iterable[Slot]) -> list[Piece]:
    """Return every slot as one piece, in bucket coordinates."""
    return [Piece(s, s.start, s.numel, s.offset, s.residual) for s in slots]


class Shard(NamedTuple):
    """Pieces side by side in a flat tensor of `numel` elements."""

    pieces: list[Piece]
    numel: int


def shard_pieces(
    pieces: Sequence[Piece], residuals: Sequence[int], *, plain_only: bool = False
) -> Shard:
    """Return pieces laid side by side, each at a multiple of 16 elements.

    With `plain_only` the compressed pieces take no memory there (their averages are never fp32).
    """
    out, data, numel = [], 0, 0
    for piece, residual in zip(pieces, residuals, strict=True):
        kept = not (plain_only and piece.slot.compressed)
        out.append(Piece(piece.slot, piece.start, piece.numel, data if kept else 0, residual))
        if kept:
            numel = data + piece.numel
            data += round_up(piece.numel, 16)
    return Shard(out, numel)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


class Ownership(Protocol):
    """How the elements of parameters are shared out over ranks; every element has one owner."""

    @property
    def world_size(self) -> int:
        """Ranks that own something."""

    def bounds(self, numel: int, rank: int) -> tuple[int, int]:
        """Return the elements [first, last) of a parameter of `numel` elements that `rank` owns."""

    def numel(self, numel: int, rank: int) -> int:
        """Return how many elements of such a parameter `rank` owns."""

    def starts(self, numel: int) -> NDArray[np.int64]:
        """Return the first element that each rank owns, and `numel` at the end: ``(world_size +
        1,)``.
        """

    def pieces(self, slots: Iterable[Slot], rank: int) -> list[Piece]:
        """Return what `rank` owns of slots, in bucket coordinates; pieces without elements are
        left out.
        """

    def __hash__(self) -> int:
        """Equal ownerships are one key of what is kept between calls."""


@dataclass(frozen=True, slots=True)
class ByElements:
    """Rank k owns elements [k * n / N, (k + 1) * n / N) of each parameter, rounded down to
    multiples of 8.
    """

    world_size: int

    def bounds(self, numel: int, rank: int) -> tuple[int, int]:
        unit = UNIT_NUMEL * self.world_size
        first = rank * numel // unit * UNIT_NUMEL
        last = numel if rank == self.world_size - 1 else (rank + 1) * numel // unit * UNIT_NUMEL
        return first, last

    def numel(self, numel: int, rank: int) -> int:
        first, last = self.bounds(numel, rank)
        return last - first

    def starts(self, numel: int) -> NDArray[np.int64]:
        ranks = np.arange(self.world_size + 1, dtype=np.int64)
        starts: NDArray[np.int64] = ranks * numel // (UNIT_NUMEL * self.world_size) * UNIT_NUMEL
        starts[-1] = numel
        return starts

    def pieces(self, slots: Iterable[Slot], rank: int) -> list[Piece]:
        pieces = []
        for slot in slots:
            first, last = self.bounds(slot.numel, rank)
            if last > first:
                pieces.append(
                    Piece(
                        slot,
                        slot.start + first,
                        last - first,
                        slot.offset + first,
                        slot.residual + first,
                    )
                )
        return pieces


@dataclass(frozen=True, slots=True)
class BySlots:
    """Every slot is one rank's: number i that of rank i mod N."""

    world_size: int

    def bounds(self, numel: int, rank: int) -> tuple[int, int]:
        return 0, numel

    def numel(self, numel: int, rank: int) -> int:
        return numel

    def starts(self, numel: int) -> NDArray[np.int64]:
        raise NotImplementedError("whose a slot is depends on its number and not on its size")

    def pieces(self, slots: Iterable[Slot], rank: int) -> list[Piece]:
        mine = (s for s in slots if s.index % self.world_size == rank and s.numel)
        return [Piece(s, s.start, s.numel, s.offset, s.residual) for s in mine]
