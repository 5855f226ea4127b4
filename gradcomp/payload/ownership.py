"""Who owns which elements of a parameter: what a rank averages in a reduce_scatter, and whose
states it keeps.

Ownership is a function of (parameter, world size) and never of bucket boundaries, so bucket
rebuilds change no owner.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gradcomp.payload.pieces import Piece, Slot

# bounds are multiples of this, so that codes of whole bits begin on a byte wherever a piece begins
UNIT_NUMEL = 8


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
