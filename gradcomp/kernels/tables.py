"""The tables that C kernels iterate over: segments (`gc_segment` in native/include/gradcomp.h),
block sums, byte ranges.

A row has the offsets of a range of elements of one parameter in a tensor, in a residual plane and
in a payload. Rows are distributed over threads, which changes no bit of the result.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

# dtype of values -> number in headers and in C
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
TORCH_DTYPES = {number: dtype for dtype, number in DTYPES.items()}
BLOCK_NUMEL = 512  # elements in one float64 partial sum (GC_BLOCK_NUMEL)
MAX_NUMEL = 2**32 - 4096  # max elements of a segment, and so of a parameter (GC_MAX_NUMEL)
# elements in one unit of work: 256 KB of fp32, which fits into L2 and hides the cost of a call
CHUNK_NUMEL = 1 << 16

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
BLOCK = np.dtype(
    [("sum", "<f8"), ("sum_squares", "<f8"), ("absmax_bits", "<u4"), ("reserved", "<u4")]
)
COPY_RANGE = np.dtype([("dst", "<u8"), ("src", "<u8"), ("nbytes", "<u8")])


class Table:
    """Segments for one C call, and their distribution over threads.

    Attributes:
        rows, count: ``(count,)`` array of `SEGMENT`, and its length.
        numel: number of elements in all rows.
        prepared: data that kernel sets cache at their first call, by the name of the set.
    """

    def __init__(self, rows: Sequence[tuple[int, ...]] | NDArray[Any]) -> None:
        self.rows = np.array(rows, dtype=SEGMENT)
        self.count = len(self.rows)
        self.prepared: dict[str, Any] = {}
        self.numel = int(self.rows["numel"].sum(dtype=np.uint64))
        self._ranges: dict[int, list[tuple[int, int]]] = {}

    def __len__(self) -> int:
        return self.count

    def ranges(self, parts: int) -> list[tuple[int, int]]:
        """Return at most `parts` ranges of rows, (first, count) pairs, with about the same number
        of elements each.
        """
        if parts not in self._ranges:
            ends = np.cumsum(self.rows["numel"], dtype=np.uint64)
            wanted = [self.numel * (p + 1) // parts for p in range(parts)]
            cuts = [0, *(int(c) for c in np.searchsorted(ends, wanted, side="left") + 1)]
            cuts[-1] = len(self.rows)
            cuts = [min(c, len(self.rows)) for c in cuts]
            self._ranges[parts] = [(a, b - a) for a, b in itertools.pairwise(cuts) if b > a]
        return self._ranges[parts]


class Groups(NamedTuple):
    """The scale groups of a payload.

    Attributes:
        blocks: ``(groups + 1,)`` uint64, first entry of every group in the table of block sums,
            then the number of entries.
        numels: ``(groups,)`` uint32, elements of every group.
    """

    blocks: NDArray[np.uint64]
    numels: NDArray[np.uint32]


class CopyTable:
    """Byte ranges for `gc_copy`: rows of (first byte in the destination, first byte in the source,
    number of bytes).
    """

    def __init__(self, rows: Sequence[tuple[int, int, int]]) -> None:
        self.rows = np.array(rows, dtype=COPY_RANGE)
