"""The layout of a payload, and the split of a bucket's payload into messages.

A layout has the offsets of the scales and codes of each piece, and the segment tables that kernels
iterate over. It is computed from sizes, once per bucket layout. Pieces depend on (parameter, world
size) and never on bucket boundaries, so bucket rebuilds change no bit.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gradcomp.kernels.tables import BLOCK_NUMEL, CHUNK_NUMEL, CopyTable, Groups, Table
from gradcomp.payload.form import HEADER_NBYTES, PLAIN, Form
from gradcomp.payload.pieces import Piece


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a layout's segment tables that are encoded together: `packed` has the compressed
    pieces, `plain` the fp32 pieces.
    """

    packed: Table
    plain: Table


class PayloadLayout:
    """The offsets of scales and codes in one payload made of `pieces`.

    Args:
        form: form of the compressed pieces; the others are fp32 (`PLAIN`).
        pieces: the pieces, in the order of the payload.
        segmented: False only for a payload of exactly one whole tensor, compressed or plain.
        whole_groups: never split a scale group into two rows (1-bit encoding needs a whole group).

    Attributes:
        packed, plain: segment tables of the compressed and of the fp32 pieces.
        numel, group_count, scale_count, nbytes: elements, scale groups, scales and bytes of the
            payload, header included.
        group_numel: value for the header, 0 for segmented payloads.
        scale_offsets, code_offsets: bytes from the start of the payload, one per piece.
    """

    def __init__(
        self,
        form: Form,
        pieces: Sequence[Piece],
        *,
        segmented: bool = True,
        whole_groups: bool = False,
    ) -> None:
        self.form = form
        self.pieces = list(pieces)
        self.segmented = segmented
        self.numel = sum(p.numel for p in self.pieces)
        groups = [p.group_count if p.slot.compressed else 0 for p in self.pieces]
        self.group_count = sum(groups)
        self.scale_count = self.group_count * form.scales_per_group
        self.scale_offsets, self.code_offsets = [], []
        scales, codes = HEADER_NBYTES, HEADER_NBYTES + 4 * self.scale_count
        for piece, count in zip(self.pieces, groups, strict=True):
            self.scale_offsets.append(scales)
            self.code_offsets.append(codes)
            scales += 4 * form.scales_per_group * count
            codes += self.form_of(piece).code_nbytes(piece.start, piece.start + piece.numel)
        self.nbytes = codes
        self.group_numel = (
            0 if segmented else (self.pieces[0].slot.group_numel if self.pieces else 1)
        )
        self._whole_groups = whole_groups

    def form_of(self, piece: Piece) -> Form:
        """Return the form of the codes of `piece` in this payload."""
        return self.form if piece.slot.compressed else PLAIN

    @cached_property
    def packed(self) -> Table:
        return self._table(compressed=True)

    @cached_property
    def plain(self) -> Table:
        return self._table(compressed=False)

    @cached_property
    def group_numels(self) -> NDArray[np.uint32]:
        """``(group_count,)``, elements of every scale group of the payload, in order."""
        parts = [np.zeros(0, np.int64)]
        for piece in self.pieces:
            if piece.slot.compressed and piece.numel:
                size, end = piece.slot.group_numel, piece.start + piece.numel
                inner = np.arange(
                    piece.start // size + 1, piece.start // size + piece.group_count, dtype=np.int64
                )
                parts.append(np.diff(np.concatenate(([piece.start], inner * size, [end]))))
        return np.concatenate(parts).astype(np.uint32)

    @cached_property
    def group_blocks(self) -> NDArray[np.uint64]:
        """``(group_count + 1,)``, first entry of every group in the table of block sums, then the
        length of the table.
        """
        blocks = -(-self.group_numels.astype(np.int64) // BLOCK_NUMEL)
        return np.concatenate(([0], np.cumsum(blocks))).astype(np.uint64)

    @cached_property
    def groups(self) -> Groups:
        return Groups(self.group_blocks, self.group_numels)

    def _table(self, *, compressed: bool) -> Table:
        rows: list[tuple[int, ...]] = []
        first_group = 0
        for number, piece in enumerate(self.pieces):
            if piece.slot.compressed is not compressed or not piece.numel:
                continue
            form, size = self.form_of(piece), piece.slot.group_numel
            cuts = _cuts(piece, self._whole_groups and compressed)
            for start, end in itertools.pairwise(cuts):
                skipped, group = start - piece.start, start // size - piece.start // size
                block = 0
                if compressed and form.scales_per_group:
                    inside = start - max(start // size * size, piece.start)
                    block = int(self.group_blocks[first_group + group]) + inside // BLOCK_NUMEL
                rows.append(
                    (
                        piece.data + skipped,
                        piece.residual + skipped,
                        self.code_offsets[number] + form.code_nbytes(piece.start, start),
                        self.scale_offsets[number] + 4 * form.scales_per_group * group,
                        block,
                        start,
                        end - start,
                        size,
                        piece.slot.index,
                    )
                )
            first_group += piece.group_count if compressed else 0
        return Table(rows)


def _cuts(piece: Piece, whole_groups: bool) -> list[int]:
    """Return where to cut a piece into rows of about CHUNK_NUMEL elements, with its first element
    and its end.

    Cuts are multiples of 8 elements. Inside a group, they are multiples of BLOCK_NUMEL from the
    first element of the group that is in the piece.
    """
    start, end, size = piece.start, piece.start + piece.numel, piece.slot.group_numel
    one_group = piece.group_count == 1
    if piece.numel <= CHUNK_NUMEL or (whole_groups and one_group):
        return [start, end]
    if size >= CHUNK_NUMEL and not whole_groups and (size % 8 == 0 or one_group):
        cuts: list[int] = []
        while start < end:
            group_end = min(end, (start // size + 1) * size)
            cuts += range(start, group_end, CHUNK_NUMEL)
            start = group_end
        return [*cuts, end]
    unit = size if size % 8 == 0 else 8 * size
    unit *= max(1, CHUNK_NUMEL // unit)
    return [start, *range(start // unit * unit + unit, end, unit), end]


def joined_rows(layouts: Sequence[PayloadLayout], stride: int) -> Rows:
    """Return the rows of several payloads, which begin every `stride` bytes, as those of one
    payload.
    """

    def join(tables: Sequence[Table]) -> Table:
        rows = []
        for number, table in enumerate(tables):
            moved = table.rows.copy()
            moved["codes"] += number * stride
            moved["scales"] += number * stride
            rows.append(moved)
        return Table(np.concatenate(rows))

    return Rows(join([each.packed for each in layouts]), join([each.plain for each in layouts]))


def message_copies(
    source: PayloadLayout, messages: Sequence[PayloadLayout], offsets: Sequence[int]
) -> CopyTable:
    """Return the copies that split an encoded bucket into the messages of a reduce_scatter.

    Args:
        source: layout of the encoded bucket.
        messages: layouts of the messages.
        offsets: first byte of each message.
    """
    numbers: dict[int, list[int]] = {}  # numbers of a parameter's pieces, in order of their starts
    for number, piece in enumerate(source.pieces):
        numbers.setdefault(piece.slot.index, []).append(number)
    rows = []
    for message, base in zip(messages, offsets, strict=True):
        for number, piece in enumerate(message.pieces):
            form, candidates = message.form_of(piece), numbers[piece.slot.index]
            after = bisect_right(candidates, piece.start, key=lambda n: source.pieces[n].start)
            origin = candidates[after - 1]
            begin = source.pieces[origin].start
            if form.scales_per_group:
                group = piece.start // piece.slot.group_numel - begin // piece.slot.group_numel
                width = 4 * form.scales_per_group
                rows.append(
                    (
                        base + message.scale_offsets[number],
                        source.scale_offsets[origin] + width * group,
                        width * piece.group_count,
                    )
                )
            rows.append(
                (
                    base + message.code_offsets[number],
                    source.code_offsets[origin] + form.code_nbytes(begin, piece.start),
                    form.code_nbytes(piece.start, piece.start + piece.numel),
                )
            )
    return CopyTable(rows)
