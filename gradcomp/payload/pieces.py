"""Slots of parameters in a bucket, pieces of them in a message, and which rank owns which elements.

The owner of elements averages them in a reduce_scatter, and keeps their states. Ownership depends
on (parameter, world size) and never on bucket boundaries, so bucket rebuilds change no owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

# bounds of ownership are multiples of this, so that the codes of every piece begin at a whole byte
UNIT_NUMEL = 8


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter inside a bucket.

    Attributes:
        index: position in ``named_parameters()``.
        numel: number of elements.
        group_numel: elements of one scale group, at least 1.
        compressed: False for small and excluded tensors, which are sent as fp32.
        offset: first element in the bucket.
        residual: first element in the residual plane.
        start: first element within the parameter, if the slot is a shard of it.
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
    """Elements [start, start + numel) of a parameter. The first is element `data` of a flat tensor
    and element `residual` of a residual plane.
    """

    slot: Slot
    start: int
    numel: int
    data: int
    residual: int

    @property
    def group_count(self) -> int:
        """Number of scale groups of the piece, including partial groups at its ends."""
        size = self.slot.group_numel
        return (self.start + self.numel - 1) // size - self.start // size + 1 if self.numel else 0


def whole_pieces(slots: Iterable[Slot]) -> list[Piece]:
    """Return every slot as one piece, in bucket coordinates."""
    return [Piece(s, s.start, s.numel, s.offset, s.residual) for s in slots]


class Shard(NamedTuple):
    """Pieces that are contiguous, up to alignment, in a flat tensor of `numel` elements."""

    pieces: list[Piece]
    numel: int


def shard_pieces(
    pieces: Sequence[Piece], residuals: Sequence[int], *, plain_only: bool = False
) -> Shard:
    """Return a shard of these pieces, each at a multiple of 16 elements.

    Args:
        pieces: the pieces in their order.
        residuals: first element of each piece in the residual plane.
        plain_only: reserve no memory for compressed pieces (their averages are never fp32).
    """
    out, data, numel = [], 0, 0
    for piece, residual in zip(pieces, residuals, strict=True):
        stored = not (plain_only and piece.slot.compressed)
        out.append(Piece(piece.slot, piece.start, piece.numel, data if stored else 0, residual))
        if stored:
            numel = data + piece.numel
            data += round_up(piece.numel, 16)
    return Shard(out, numel)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


class Ownership(Protocol):
    """Assignment of the elements of parameters to ranks; every element has one owner."""

    @property
    def world_size(self) -> int:
        """Number of ranks that own elements."""

    def bounds(self, numel: int, rank: int) -> tuple[int, int]:
        """Return the elements [first, last) of a parameter of `numel` elements that `rank` owns."""

    def numel(self, numel: int, rank: int) -> int:
        """Return how many elements of a parameter of `numel` elements `rank` owns."""

    def starts(self, numel: int) -> NDArray[np.int64]:
        """Return ``(world_size + 1,)``: the first element that each rank owns, then `numel`."""

    def pieces(self, slots: Iterable[Slot], rank: int) -> list[Piece]:
        """Return the non-empty pieces of slots that `rank` owns, in bucket coordinates."""

    def __hash__(self) -> int:
        """Return the hash: equal ownerships are one key in caches."""


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
    """Rank i mod N owns the whole slot i."""

    world_size: int

    def bounds(self, numel: int, rank: int) -> tuple[int, int]:
        return 0, numel

    def numel(self, numel: int, rank: int) -> int:
        return numel

    def starts(self, numel: int) -> NDArray[np.int64]:
        raise NotImplementedError("whose a slot is depends on its number and not on its size")

    def pieces(self, slots: Iterable[Slot], rank: int) -> list[Piece]:
        owned = (s for s in slots if s.index % self.world_size == rank and s.numel)
        return [Piece(s, s.start, s.numel, s.offset, s.residual) for s in owned]
