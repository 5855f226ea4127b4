"""Index tables for Triton programs: computed from a segment table with NumPy once, then kept on the
device.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradcomp.kernels.tables import BLOCK_NUMEL, CopyTable, Table

# columns of a segment: first element in the values and in the residual plane, first byte of its
# codes among all codes, first element in the parameter, and in its group; elements; elements of a
# group; number of its first group; parameter; elements in the segments before it
COLUMNS = (
    "data",
    "residual",
    "codes",
    "start",
    "cut",
    "numel",
    "group_numel",
    "group",
    "parameter",
    "element",
)
# columns of a stream of entropy-coded codes: first element in the values and in the plane,
# elements, first byte of its codes on the device, bytes of the codes, elements in the streams
# before it, and the step where the search begins
STREAM_COLUMNS = ("data", "residual", "numel", "codes", "nbytes", "element", "first_step")
RUN_BLOCKS = 512  # blocks that are summed sequentially (GC_RUN_NUMEL)
STREAM_NUMEL = 4096  # max elements of a stream
CHUNK = 2048  # elements that one program encodes or decodes
ALIGNED = 16  # parts of a packed buffer begin at multiples of this number of bytes


class Spans(NamedTuple):
    """Ranges of a table: `rows` is ``(number, 2)`` int64 on the device, first entry and length;
    `most` is the largest length.
    """

    rows: Tensor
    number: int
    most: int


class Packed(NamedTuple):
    """Layout of a packed payload on a device: a flag, scales, codes.

    Attributes:
        scales, codes: first byte of the scales, and of the codes.
        nbytes: total number of bytes.
        up, scales_up: copies of a payload, or of its scales only, to the packed bytes.
        down, codes_down: copies of packed scales and codes, or of codes only, to a payload.
    """

    scales: int
    codes: int
    nbytes: int
    up: CopyTable
    scales_up: CopyTable
    down: CopyTable
    codes_down: CopyTable


def _packed(
    scales: NDArray[Any], scale_nbytes: NDArray[Any], codes: NDArray[Any], code_nbytes: NDArray[Any]
) -> Packed:
    """Return the packed layout of scales and codes that begin at these bytes of a payload."""
    scale_offsets, all_scale_nbytes = ALIGNED + _starts(scale_nbytes), int(scale_nbytes.sum())
    first_code = ALIGNED + int(_aligned(all_scale_nbytes))
    code_offsets = first_code + _starts(_aligned(code_nbytes))
    scale_rows = np.stack([scale_offsets, scales, scale_nbytes], 1)
    code_rows = np.stack([code_offsets, codes, code_nbytes], 1)
    both = np.concatenate([scale_rows, code_rows])
    tables = [both, scale_rows, both[:, [1, 0, 2]], code_rows[:, [1, 0, 2]]]
    # programs that read whole words may read beyond the last code
    nbytes = first_code + int(_aligned(code_nbytes).sum()) + ALIGNED
    return Packed(ALIGNED, first_code, nbytes, *map(_copies, tables))


def _copies(rows: NDArray[Any]) -> CopyTable:
    return CopyTable([(int(to), int(source), int(n)) for to, source, n in rows if n])


class Plan:
    """Groups, blocks and chunks of a table, on a device.

    Args:
        table: the segments.
        bits: bits per code; 0 for entropy-coded codes.
        per_group: number of scales per group.
        device: device of the tensors.
        stream_nbytes: bytes of a whole stream of entropy-coded codes, including its scale.

    Attributes:
        segments: ``(count, len(COLUMNS))`` int64.
        chunks: ``(chunk_count, 2)`` int64, segment and first element of every chunk.
        group_count: number of scale groups.
        numel: number of elements of all segments.
        packed: layout of the packed payload.
    """

    def __init__(
        self,
        table: Table,
        bits: int,
        per_group: int,
        device: torch.device,
        stream_nbytes: int = 0,
    ) -> None:
        self._device, self._stream_nbytes = device, stream_nbytes
        self._rows = rows = table.rows.astype(
            [(name, np.int64) for name in table.rows.dtype.names or ()]
        )
        start, numel, group_numel = rows["start"], rows["numel"], rows["group_numel"]
        self._cut = cut = start % group_numel
        # groups of every segment, 0 where it is empty
        self._groups = np.where(numel > 0, (cut + numel - 1) // group_numel + 1, 0)
        self._first_group = _starts(self._groups)
        self.group_count = int(self._groups.sum())
        code_nbytes = (numel * bits + 7) // 8
        if stream_nbytes:
            segment, _, numels = self._group_arrays()
            code_nbytes = self._by_segment(segment, self._stream_code_nbytes(numels))
        self._offsets = offsets = _starts(_aligned(code_nbytes))
        scale_nbytes = 4 * per_group * self._groups
        self.packed = _packed(rows["scales"], scale_nbytes, rows["codes"], code_nbytes)
        columns = {name: rows[name] for name in rows.dtype.names or ()}
        columns |= {"codes": offsets, "cut": cut, "group": self._first_group}
        columns |= {"element": _starts(numel)}
        self.numel = int(numel.sum())
        self.segments = self._put(np.stack([columns[name] for name in COLUMNS], 1))
        chunks = -(-numel // CHUNK)
        segment = np.repeat(np.arange(len(rows)), chunks)
        first = (np.arange(len(segment)) - np.repeat(_starts(chunks), chunks)) * CHUNK
        self.chunk_count = len(segment)
        self.chunks = self._put(np.stack([segment, first], 1))
        self._blocks: tuple[Tensor, Spans, Spans, Tensor] | None = None
        self._streams: Tensor | None = None

    def blocks(self) -> tuple[Tensor, Spans, Spans, Tensor]:
        """Return the blocks, ``(count, 3)`` int64 (first element in the values and in the plane,
        number of elements), the runs of blocks, the groups of runs, and the elements of each group.
        """
        if self._blocks is None:
            segment, first, numel = self._group_arrays()
            counts = -(-numel // BLOCK_NUMEL)
            group = np.repeat(np.arange(len(numel)), counts)
            at = (np.arange(len(group)) - np.repeat(_starts(counts), counts)) * BLOCK_NUMEL
            of, begin = segment[group], first[group] + at
            blocks = [
                self._rows["data"][of] + begin,
                self._rows["residual"][of] + begin,
                np.minimum(BLOCK_NUMEL, numel[group] - at),
            ]
            runs = -(-counts // RUN_BLOCKS)
            owner = np.repeat(np.arange(len(runs)), runs)
            ahead = (np.arange(len(owner)) - np.repeat(_starts(runs), runs)) * RUN_BLOCKS
            spans = _starts(counts)[owner] + ahead, np.minimum(RUN_BLOCKS, counts[owner] - ahead)
            self._blocks = (
                self._put(np.stack(blocks, 1)),
                self._spans(*spans),
                self._spans(_starts(runs), runs),
                self._put(numel),
            )
        return self._blocks

    def streams(self) -> Tensor:
        """Return the ``(group_count, len(STREAM_COLUMNS))`` int64 table of the streams."""
        if self._streams is None:
            segment, first, numel = self._group_arrays()
            nbytes = self._stream_code_nbytes(numel)
            before = _starts(nbytes) - _starts(self._by_segment(segment, nbytes))[segment]
            centibits = nbytes * 800 // numel
            # rounded towards 0, as C does
            lower = np.trunc((centibits - 160) * 35 / 100).astype(np.int64)
            columns = {
                "data": self._rows["data"][segment] + first,
                "residual": self._rows["residual"][segment] + first,
                "numel": numel,
                "codes": self.packed.codes + self._offsets[segment] + before,
                "nbytes": nbytes,
                "element": _starts(numel),
                "first_step": np.clip(143 - lower, 0, 255),
            }
            self._streams = self._put(np.stack([columns[name] for name in STREAM_COLUMNS], 1))
        return self._streams

    def _stream_code_nbytes(self, numel: NDArray[Any]) -> NDArray[Any]:
        """Return the number of bytes of the codes of each stream (gc_stream_code_nbytes)."""
        whole, nbytes = numel == STREAM_NUMEL, self._stream_nbytes
        return np.where(whole, nbytes - 4, -(-numel * nbytes // STREAM_NUMEL) + 4)

    @functools.cached_property
    def block_rows(self) -> NDArray[Any]:
        """Row of every block in the table of block sums."""
        segment, _, numel = self._group_arrays()
        counts = self._by_segment(segment, -(-numel // BLOCK_NUMEL))
        first: NDArray[Any] = np.repeat(self._rows["block"] - _starts(counts), counts)
        return first + np.arange(len(first))

    def _by_segment(self, segment: NDArray[Any], numbers: NDArray[Any]) -> NDArray[Any]:
        """Return the sum over the groups of each segment.

        Args:
            segment, numbers: segment and value of every group.
        """
        return np.bincount(segment, numbers, minlength=len(self._rows)).astype(np.int64)

    def _group_arrays(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return the segment of every group, its first element in it, and its elements."""
        segment = np.repeat(np.arange(len(self._rows)), self._groups)
        number = np.arange(len(segment)) - self._first_group[segment]
        size, cut = self._rows["group_numel"][segment], self._cut[segment]
        first = np.maximum(number * size - cut, 0)
        last = np.minimum((number + 1) * size - cut, self._rows["numel"][segment])
        return segment, first, last - first

    def _spans(self, first: NDArray[Any], count: NDArray[Any]) -> Spans:
        return Spans(self._put(np.stack([first, count], 1)), len(first), int(count.max(initial=0)))

    def _put(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(self._device)


def _starts(counts: NDArray[Any]) -> NDArray[Any]:
    """Return the exclusive cumulative sum."""
    ends: NDArray[np.int64] = np.cumsum(counts, dtype=np.int64)
    before: NDArray[np.int64] = ends - counts
    return before


def _aligned(nbytes: Any) -> Any:
    return -(-nbytes // ALIGNED) * ALIGNED
