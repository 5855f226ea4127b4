"""How one bucket's exchange is cut into slices, which follow one another through the pipeline.

While a slice is encoded, the one before it is on the wire and the one before that is decoded. A
slice takes its share of what every owner owns, so that no link waits for another. Slices change no
value: scales are measured over whole groups before anything is encoded, and where the scales of a
second phase belong to groups that slices cut, that phase goes in one piece behind the last.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

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


def slice_bounds(
    first: NDArray[np.int64],
    last: NDArray[np.int64],
    groups: Sequence[int],
    count: int,
    *,
    whole_groups: bool,
) -> NDArray[np.int64]:
    """Return where each rank's pieces are cut into `count` runs of about as many elements, both
    ends included: ``(pieces, count + 1, ranks)``.

    Cuts are at multiples of `UNIT_NUMEL` elements of a parameter where they can be, of 8 always
    where codes are cut, and between scale groups where these are small. A run may be empty.

    Args:
        first, last: elements [first, last) of a parameter, of pieces one after the other:
            ``(pieces, ranks)``.
        groups: elements of a scale group of each piece, 1 where it is not compressed.
        count: of runs.
        whole_groups: never cut inside a scale group, however few elements there are.
    """
    total, ends = (last - first).sum(axis=0), np.cumsum(last - first, axis=0)
    wanted = total * np.arange(count + 1)[:, None] // count  # counted from the first piece on
    sizes = np.array(groups, np.int64)[:, None]
    large, small = np.lcm(UNIT_NUMEL, sizes), np.lcm(8, sizes)  # codes of 8 are whole bytes
    unit = np.where(small * count <= total, small, small if whole_groups else UNIT_NUMEL)
    unit = np.where(large * count <= total, large, unit)[:, None]
    first, last, at = first[:, None], last[:, None], (last - ends)[:, None] + wanted
    out: NDArray[np.int64] = np.where(at < last, np.maximum(at // unit * unit, first), last)
    out[:, :1] = first
    return out


def cut(pieces: Sequence[Piece], count: int, *, whole_groups: bool = False) -> list[list[Piece]]:
    """Return `count` runs of about as many elements, one after the other, as of `slice_bounds`."""
    first = np.array([p.start for p in pieces], np.int64)[:, None]
    last = first + np.array([p.numel for p in pieces], np.int64)[:, None]
    groups = [p.slot.group_numel if p.slot.compressed else 1 for p in pieces]
    bounds = slice_bounds(first, last, groups, count, whole_groups=whole_groups)[..., 0].tolist()
    runs: list[list[Piece]] = [[] for _ in range(count)]
    for p, edges in zip(pieces, bounds, strict=True):
        for run, (at, end) in zip(runs, pairwise(edges), strict=True):
            if end > at:
                more = at - p.start
                run.append(Piece(p.slot, at, end - at, p.data + more, p.residual + more))
    return runs


def cuts_groups(slices: Sequence[Sequence[Piece]]) -> bool:
    """Whether a scale group lies in more than one slice."""
    first: dict[int, int] = {}  # parameter: where the slices' elements of it begin
    return any(
        p.start != first.setdefault(p.slot.index, p.start)
        and p.slot.compressed
        and p.start % p.slot.group_numel > 0
        for one in slices
        for p in one
    )


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
