"""How one bucket's exchange is cut into slices, which follow one another through the pipeline.

While a slice is encoded, the one before it is on the wire and the one before that is decoded. A
slice takes its share of what every owner owns, so that no link waits for another. Slices change no
value: scales are measured over whole groups before anything is encoded, and where the scales of a
second phase belong to groups that slices cut, that phase goes in one piece behind the last.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gradcomp.kernels.tables import Table
from gradcomp.payload.layout import PayloadLayout, Rows
from gradcomp.payload.pieces import Piece

SLICE_NUMEL = 1 << 21  # docs/explanation/exchange.md has how it was measured
UNIT_NUMEL = 64  # slices are cut at multiples of it where they can be
MESSAGE_NUMEL = 1 << 17  # to one owner, at least: 16 KB of 1 bit, beside which a header is nothing


@dataclass(frozen=True, slots=True)
class Slicing:
    """How buckets are cut.

    Attributes:
        numel: elements of a slice, at least; None: `SLICE_NUMEL`, and `MESSAGE_NUMEL` a rank; 0:
            buckets go in one piece.
        whole_second: second phases go in one piece, even where they could be cut.
    """

    numel: int | None = None
    whole_second: bool = False

    def count(self, numel: int, world_size: int) -> int:
        """Return into how many slices a bucket of `numel` elements is cut among so many ranks."""
        least = max(SLICE_NUMEL, MESSAGE_NUMEL * world_size) if self.numel is None else self.numel
        return max(1, numel // least) if least else 1


WHOLE = Slicing(0)


@dataclass(frozen=True, eq=False)
class Slice:
    """What travels together.

    Attributes:
        encoded: rows of the bucket's own payload that are encoded before this slice leaves (and
            after those of slices before it).
        messages: what this rank sends: to every rank, or (all_gather) one to all.
        second: every owner's second payload; empty where the second phase travels with a
            later slice, or not at all.
        own_first, own_second: this rank's part of both phases, in coordinates of its shard.
    """

    encoded: Rows | PayloadLayout
    messages: list[PayloadLayout]
    second: list[PayloadLayout] = field(default_factory=list)
    own_first: PayloadLayout | None = None
    own_second: PayloadLayout | None = None

    @property
    def second_nbytes(self) -> int:
        """Bytes of the largest second payload: what every owner sends."""
        return max((one.nbytes for one in self.second), default=0)


def cut(pieces: Sequence[Piece], count: int, *, whole_groups: bool = False) -> list[list[Piece]]:
    """Return `count` runs of about as many elements, one after the other; pieces are cut between
    scale groups where these are small.

    Cuts are at multiples of `UNIT_NUMEL` elements of a parameter where they can be, of 8 always
    where codes are cut. A run may be empty.

    Args:
        pieces: one after the other.
        count: of runs.
        whole_groups: never cut inside a scale group, however few elements there are.
    """
    total = sum(p.numel for p in pieces)
    bounds = [total * j // count for j in range(1, count)]
    out: list[list[Piece]] = [[] for _ in range(count)]
    before = 0
    for piece in pieces:
        group = piece.slot.group_numel if piece.slot.compressed else 1
        # codes of 8 elements are whole bytes
        units = (math.lcm(UNIT_NUMEL, group), math.lcm(8, group))
        small = units[1] if whole_groups else UNIT_NUMEL
        unit = next((u for u in units if u * count <= total), small)
        first = bisect_right(bounds, before)  # the slice that the piece begins in
        inner = bounds[first : bisect_left(bounds, before + piece.numel)]
        ends = [max((piece.start + b - before) // unit * unit - piece.start, 0) for b in inner]
        at = 0
        for number, end in enumerate([*ends, piece.numel]):
            if end > at:
                out[first + number].append(
                    Piece(
                        piece.slot, piece.start + at, end - at, piece.data + at, piece.residual + at
                    )
                )
                at = end
        before += piece.numel
    return out


def cuts_groups(slices: Sequence[Sequence[Piece]]) -> bool:
    """Whether a scale group lies in more than one slice."""
    began: dict[int, int] = {}  # parameter: end of what slices before this one have of it
    for pieces in slices:
        for p in pieces:
            if (
                p.slot.compressed
                and began.get(p.slot.index) == p.start
                and p.start % p.slot.group_numel
            ):
                return True
            began[p.slot.index] = p.start + p.numel
    return False


def rows_of(layout: PayloadLayout, slices: Sequence[Sequence[Piece]]) -> list[Rows]:
    """Return which rows of a bucket's payload to encode for each slice: those that it is the
    first to need.
    """
    starts: dict[int, list[int]] = {}
    needs: dict[int, list[int]] = {}
    for start, index, number in sorted(
        (p.start, p.slot.index, n) for n, pieces in enumerate(slices) for p in pieces
    ):
        starts.setdefault(index, []).append(start)
        needs.setdefault(index, []).append(number)

    def share(table: Table) -> list[Table]:
        first = np.empty(table.count, np.int64)
        for n, row in enumerate(table.rows):
            index, start, end = (
                int(row["parameter"]),
                int(row["start"]),
                int(row["start"]) + int(row["numel"]),
            )
            places = starts[index]
            first[n] = min(needs[index][bisect_right(places, start) - 1 : bisect_left(places, end)])
        return [Table(table.rows[first == n]) for n in range(len(slices))]

    return [
        Rows(packed, plain)
        for packed, plain in zip(share(layout.packed), share(layout.plain), strict=True)
    ]
