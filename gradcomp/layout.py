"""How a flat bucket maps to parameters, scale groups, shards and the bytes of a payload.

Everything here is arithmetic on sizes, done once per bucket layout: which elements of a parameter a rank owns, where the
scales and codes of each piece stand in a message, and the segment tables that the C kernels walk (`gc_segment` in
native/include/gradcomp.h). It is a function of (parameter, world size) and never of bucket boundaries, so bucket rebuilds
change no bit and no owner.
"""

from __future__ import annotations

import fnmatch
import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

HEADER_NBYTES = 32
BLOCK_NUMEL = 512  # elements in one float64 partial sum (GC_BLOCK_NUMEL)
CHUNK_NUMEL = 1 << 16  # elements in one unit of work: 256 KB of fp32, small against L2, large against a call
OWNERSHIP_NUMEL = 8  # shard bounds are multiples of this, so that 1-bit codes of a piece start on a byte

SEGMENT = np.dtype(
    [
        ("data", "<u8"),
        ("residual", "<u8"),
        ("codes", "<u8"),
        ("scales", "<u8"),
        ("block", "<u8"),
        ("start", "<u4"),
        ("numel", "<u4"),
        ("group_numel", "<u4"),
        ("parameter", "<u4"),
    ]
)
BLOCK = np.dtype([("sum", "<f8"), ("sum_squares", "<f8"), ("absmax_bits", "<u4"), ("reserved", "<u4")])
COPY_RANGE = np.dtype([("dst", "<u8"), ("src", "<u8"), ("nbytes", "<u8")])


@dataclass(frozen=True, slots=True)
class Form:
    """How codes stand in a payload: the codec number of the header, bits per element, fp32 scales per group."""

    code: int
    bits: int
    scales_per_group: int

    def code_nbytes(self, numel: int) -> int:
        """Return the bytes that the codes of `numel` elements fill."""
        return (numel * self.bits + 7) // 8


PLAIN = Form(code=1, bits=32, scales_per_group=0)  # fp32 values: Identity, small and excluded tensors
BFLOAT16 = Form(code=5, bits=16, scales_per_group=0)


def lanes_form(world_size: int) -> Form:
    """Return the form of exact sums of `world_size` ternary codes: ceil(log2(2N + 1)) bits an element."""
    return Form(code=4, bits=(2 * world_size).bit_length(), scales_per_group=1)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a model: position in ``named_parameters()``, name, shape, and how its gradient travels."""

    index: int
    name: str
    shape: tuple[int, ...]
    numel: int
    group_numel: int
    compressed: bool


def describe_parameters(
    shapes: Iterable[tuple[str, tuple[int, ...]]],
    group_numel: Callable[[tuple[int, ...]], int],
    min_numel: int,
    exclude: Sequence[str],
) -> list[Parameter]:
    """Return how each parameter travels: compressed, or as fp32 if it is small or excluded.

    Args:
        shapes: (name, shape) pairs in the order of ``named_parameters()``.
        group_numel: elements of a scale group of a parameter of some shape.
        min_numel: smaller tensors travel as fp32.
        exclude: names or shell patterns of tensors that travel as fp32.

    Raises:
        ValueError: an `exclude` entry that matches no name.
    """
    out, unused = [], set(exclude)
    for index, (name, shape) in enumerate(shapes):
        hits = {e for e in exclude if e == name or fnmatch.fnmatchcase(name, e)}
        unused -= hits
        numel = int(np.prod(shape, dtype=np.int64))
        out.append(Parameter(index, name, shape, numel, group_numel(shape), numel >= min_numel and not hits))
    if unused:
        example = f"; names look like {out[0].name!r}" if out else ""
        raise ValueError(f"exclude={min(unused)!r} matches no parameter name{example}")
    return out


def assign_buckets(nbytes: Sequence[int], cap_nbytes: int, first_cap_nbytes: int | None = None) -> list[list[int]]:
    """Share tensors out over buckets, last tensor first, as torch's reducer does once it has seen a backward.

    Args:
        nbytes: of each tensor, in the order of the forward pass.
        cap_nbytes: a bucket that has reached this is closed.
        first_cap_nbytes: the same for the first bucket (DDP: 1 MiB); `cap_nbytes` when None.

    Returns:
        Positions of the tensors, bucket by bucket.
    """
    cap = cap_nbytes if first_cap_nbytes is None else first_cap_nbytes
    buckets: list[list[int]] = []
    members: list[int] = []
    size = 0
    for index in reversed(range(len(nbytes))):
        members.append(index)
        size += nbytes[index]
        if size >= cap:
            buckets.append(members)
            members, size, cap = [], 0, cap_nbytes
    return [*buckets, members] if members else buckets


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
    """Elements [start, start + numel) of a parameter, lying at `data` in a flat tensor and at `residual` in a plane."""

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


def shard_bounds(numel: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return the elements [first, last) of a parameter of `numel` elements that `rank` owns."""
    unit = OWNERSHIP_NUMEL * world_size
    first = rank * numel // unit * OWNERSHIP_NUMEL
    last = numel if rank == world_size - 1 else (rank + 1) * numel // unit * OWNERSHIP_NUMEL
    return first, last


def whole_pieces(slots: Iterable[Slot]) -> list[Piece]:
    """Return every slot as one piece, in bucket coordinates."""
    return [Piece(s, s.start, s.numel, s.offset, s.residual) for s in slots]


def owned_pieces(slots: Iterable[Slot], world_size: int, rank: int) -> list[Piece]:
    """Return the pieces that `rank` owns, in bucket coordinates; pieces without elements are left out."""
    pieces = []
    for slot in slots:
        first, last = shard_bounds(slot.numel, world_size, rank)
        if last > first:
            pieces.append(Piece(slot, slot.start + first, last - first, slot.offset + first, slot.residual + first))
    return pieces


def shard_pieces(
    pieces: Sequence[Piece], residuals: Sequence[int] | None = None, *, plain_only: bool = False
) -> list[Piece]:
    """Return the same pieces laid side by side in a shard buffer, each at a multiple of 16 elements.

    With `plain_only` the compressed pieces take no room there (their averages never stand in fp32).
    """
    out, data = [], 0
    for number, piece in enumerate(pieces):
        residual = residuals[number] if residuals is not None else 0
        kept = not (plain_only and piece.slot.compressed)
        out.append(Piece(piece.slot, piece.start, piece.numel, data if kept else 0, residual))
        data += round_up(piece.numel, 16) if kept else 0
    return out


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


class Table:
    """Segments for one C call: rows of `SEGMENT`, and how to share them out over threads."""

    def __init__(self, rows: Sequence[tuple[int, ...]]) -> None:
        self.rows = np.array(rows, dtype=SEGMENT)
        self.address = self.rows.ctypes.data
        self.numel = int(self.rows["numel"].sum(dtype=np.uint64))
        self._ranges: dict[int, list[tuple[int, int]]] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def ranges(self, parts: int) -> list[tuple[int, int]]:
        """Return at most `parts` runs of rows (first, count) with about the same number of elements each."""
        if parts not in self._ranges:
            ends = np.cumsum(self.rows["numel"], dtype=np.uint64)
            wanted = [self.numel * (p + 1) // parts for p in range(parts)]
            cuts = [0, *(int(c) for c in np.searchsorted(ends, wanted, side="left") + 1)]
            cuts[-1] = len(self.rows)
            cuts = [min(c, len(self.rows)) for c in cuts]
            self._ranges[parts] = [(a, b - a) for a, b in itertools.pairwise(cuts) if b > a]
        return self._ranges[parts]


class PayloadLayout:
    """Where everything stands in one payload made of `pieces`.

    Args:
        form: form of the compressed pieces; the others are fp32 (`PLAIN`).
        pieces: in the order in which they stand in the payload.
        segmented: False only for a payload of exactly one compressed whole tensor (or one plain one).
        whole_groups: never split a scale group over two rows (1-bit encoding needs a group at once).

    Attributes:
        packed, plain: segment tables of the compressed and of the fp32 pieces.
        numel, scale_count, nbytes: of the payload.
        group_numel: what the header says, 0 for segmented payloads.
        scale_offsets, code_offsets: bytes from the payload's start, one a piece.
    """

    def __init__(
        self, form: Form, pieces: Sequence[Piece], *, segmented: bool = True, whole_groups: bool = False
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
            codes += self.form_of(piece).code_nbytes(piece.numel)
        self.nbytes = codes
        self.group_numel = 0 if segmented else (self.pieces[0].slot.group_numel if self.pieces else 1)
        self._whole_groups = whole_groups

    def form_of(self, piece: Piece) -> Form:
        """Return how the codes of `piece` stand in this payload."""
        return self.form if piece.slot.compressed else PLAIN

    @cached_property
    def packed(self) -> Table:
        return self._table(compressed=True)

    @cached_property
    def plain(self) -> Table:
        return self._table(compressed=False)

    @cached_property
    def group_numels(self) -> NDArray[np.uint32]:
        """Elements of every scale group of the payload, in order."""
        parts = [np.zeros(0, np.int64)]
        for piece in self.pieces:
            if piece.slot.compressed and piece.numel:
                size, end = piece.slot.group_numel, piece.start + piece.numel
                inner = np.arange(piece.start // size + 1, piece.start // size + piece.group_count, dtype=np.int64)
                parts.append(np.diff(np.concatenate(([piece.start], inner * size, [end]))))
        return np.concatenate(parts).astype(np.uint32)

    @cached_property
    def group_blocks(self) -> NDArray[np.uint64]:
        """First entry of every group in the table of block sums, and the table's length at the end."""
        blocks = -(-self.group_numels.astype(np.int64) // BLOCK_NUMEL)
        return np.concatenate(([0], np.cumsum(blocks))).astype(np.uint64)

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
                        self.code_offsets[number] + skipped * form.bits // 8,
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
    """Return where to cut a piece into rows of about CHUNK_NUMEL, first and last element included.

    Cuts are multiples of 8 elements; inside a group they are multiples of BLOCK_NUMEL from the group's (cut) start.
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


class CopyTable:
    """Byte ranges for `gc_copy`: how one encoded bucket is cut into the messages of a reduce_scatter."""

    def __init__(self, source: PayloadLayout, messages: Sequence[PayloadLayout], offsets: Sequence[int]) -> None:
        by_slot = {p.slot.index: n for n, p in enumerate(source.pieces)}
        rows = []
        for message, base in zip(messages, offsets, strict=True):
            for number, piece in enumerate(message.pieces):
                form, home = message.form_of(piece), by_slot[piece.slot.index]
                begin = source.pieces[home].start
                if form.scales_per_group:
                    group = piece.start // piece.slot.group_numel - begin // piece.slot.group_numel
                    width = 4 * form.scales_per_group
                    rows.append(
                        (
                            base + message.scale_offsets[number],
                            source.scale_offsets[home] + width * group,
                            width * piece.group_count,
                        )
                    )
                rows.append(
                    (
                        base + message.code_offsets[number],
                        source.code_offsets[home] + (piece.start - begin) * form.bits // 8,
                        form.code_nbytes(piece.numel),
                    )
                )
        self.rows = np.array(rows, dtype=COPY_RANGE)
        self.address = self.rows.ctypes.data


def layout_digest(slots: Iterable[Slot], dtype: str, shards: Sequence[object] = ()) -> int:
    """Return a 64-bit hash of what every rank must agree on about a bucket; `shards`: each slot's shape and place."""
    text = repr([(s.index, s.numel, s.group_numel, s.compressed, s.offset) for s in slots]) + dtype
    text += repr(shards)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
