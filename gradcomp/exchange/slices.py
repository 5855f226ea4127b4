"""Slices of a bucket, which follow one another through the pipeline.

While one slice is encoded, the previous one is sent and the one before that is decoded. Each slice
has an equal share of every owner's pieces, so no link waits for another. Slices change no value:
scales are measured over whole groups before encoding starts. If a second phase has scales for
groups that slices cut, it is sent in one piece with the last slice.
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

SLICE_NUMEL = 1 << 21  # docs/explanation/exchange.md has the measurement
UNIT_NUMEL = 64  # slices are cut at multiples of this number where possible
MESSAGE_NUMEL = 1 << 17  # least elements of a message: 16 KB at 1 bit, much more than a header


@dataclass(frozen=True, slots=True)
class Slicing:
    """Options for cutting buckets into slices.

    Attributes:
        numel: least elements of a slice. None: `SLICE_NUMEL`, but at least `MESSAGE_NUMEL` per
            rank. 0: a bucket is one slice.
        whole_second: send second phases in one piece, even if they could be cut.
    """

    numel: int | None = None
    whole_second: bool = False

    def count(self, numel: int, world_size: int) -> int:
        """Return the number of slices of a bucket of `numel` elements."""
        least = max(SLICE_NUMEL, MESSAGE_NUMEL * world_size) if self.numel is None else self.numel
        return max(1, numel // least) if least else 1


WHOLE = Slicing(0)


@dataclass(frozen=True, eq=False)
class Slice:
    """The layouts of one slice.

    Attributes:
        encoded: rows of the bucket's payload to encode before this slice is sent, except for those
            of earlier slices.
        messages: layouts of the messages that this rank sends: one per rank, or (all_gather) one
            for all ranks.
        second: layout of every owner's second payload; empty if a later slice sends it, or no
            slice does.
        own_first, own_second: (reduce_scatter) layouts of this rank's owned pieces in both phases,
            with offsets in the shard.
    """

    encoded: Rows | PayloadLayout
    messages: list[PayloadLayout]
    second: list[PayloadLayout] = field(default_factory=list)
    own_first: PayloadLayout | None = None
    own_second: PayloadLayout | None = None

    @property
    def second_nbytes(self) -> int:
        """Bytes of the largest second payload, which every owner sends (padded)."""
        return max((one.nbytes for one in self.second), default=0)


def slice_bounds(
    first: NDArray[np.int64],
    last: NDArray[np.int64],
    groups: Sequence[int],
    count: int,
    *,
    whole_groups: bool,
) -> NDArray[np.int64]:
    """Return the bounds of `count` runs of similar size for each rank's pieces, both ends included:
    ``(pieces, count + 1, ranks)``.

    Cuts are at multiples of `UNIT_NUMEL` elements of a parameter if possible, always at multiples
    of 8 if codes are cut, and between scale groups if these are small. A run may be empty.

    Args:
        first, last: ``(pieces, ranks)``: consecutive pieces, with elements [first, last) of their
            parameters.
        groups: elements of a scale group for each piece; 1 if it is not compressed.
        count: number of runs.
        whole_groups: never cut inside a scale group, however few elements there are.
    """
    total, ends = (last - first).sum(axis=0), np.cumsum(last - first, axis=0)
    wanted = total * np.arange(count + 1)[:, None] // count  # offsets from the first piece
    sizes = np.array(groups, np.int64)[:, None]
    large, small = np.lcm(UNIT_NUMEL, sizes), np.lcm(8, sizes)  # codes of 8 are whole bytes
    unit = np.where(small * count <= total, small, small if whole_groups else UNIT_NUMEL)
    unit = np.where(large * count <= total, large, unit)[:, None]
    first, last, at = first[:, None], last[:, None], (last - ends)[:, None] + wanted
    out: NDArray[np.int64] = np.where(at < last, np.maximum(at // unit * unit, first), last)
    out[:, :1] = first
    return out


def cut(pieces: Sequence[Piece], count: int, *, whole_groups: bool = False) -> list[list[Piece]]:
    """Cut pieces into `count` consecutive runs of similar size; see `slice_bounds`."""
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
    """Whether any scale group is in more than one slice."""
    first: dict[int, int] = {}  # by parameter position: first element in any slice
    return any(
        p.start != first.setdefault(p.slot.index, p.start)
        and p.slot.compressed
        and p.start % p.slot.group_numel > 0
        for one in slices
        for p in one
    )


def rows_of(layout: PayloadLayout, slices: Sequence[Sequence[Piece]]) -> list[Rows]:
    """Return for each slice the rows of a bucket's payload that it is the first to need."""
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
