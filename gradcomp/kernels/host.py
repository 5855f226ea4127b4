"""Operations on the bytes of payloads: allocation, copies, checksums, validation, integer sums of
codes. Payloads are in host memory for every device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradcomp.kernels.interface import Code
from gradcomp.kernels.native.kernels import options_of
from gradcomp.kernels.native.library import check, ffi, lib, pointer, pointers_of
from gradcomp.kernels.native.threads import run
from gradcomp.kernels.tables import CopyTable, Table


def empty(numel: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return an uninitialized ``(numel,)`` tensor in host memory, for payloads or scales."""
    return torch.empty(numel, dtype=dtype, device="cpu")


def crc32c(data: NDArray[np.uint8], crc: int = 0) -> int:
    """Return the CRC-32C of a contiguous uint8 array, continuing from `crc`."""
    return int(lib.gc_crc32c(crc, ffi.from_buffer("uint8_t[]", data), data.size))


def copy(dst: Tensor, src: Tensor, table: CopyTable) -> None:
    """Copy every byte range of a table from `src` to `dst`, both uint8."""
    rows = ffi.from_buffer("gc_copy_range[]", table.rows)
    check(
        lib.gc_copy(pointer(dst, "uint8_t"), pointer(src, "uint8_t"), rows, len(table.rows)),
        "gc_copy",
    )


def copy_bytes(dst: Tensor, first: int, src: Tensor, nbytes: int, src_first: int = 0) -> None:
    """Copy `nbytes` bytes from byte `src_first` of `src` to byte `first` of `dst`; the ranges must
    not overlap.
    """
    ffi.memmove(pointer(dst, "uint8_t") + first, pointer(src, "uint8_t") + src_first, nbytes)


def validate(payload: Tensor, code: Code, table: Table) -> None:
    """Raise CorruptPayload for codes or padding that no encoder writes; uncompressed values are
    always valid.
    """
    if table.count and code.kernel != "values":
        source, name = pointer(payload, "uint8_t"), f"gc_{code.kernel}_validate"
        function = getattr(lib, name)
        limits = options_of(code.world_size, code.bits, code.stream_nbytes)
        run(name, table, lambda rows, count, _: function(source, *limits, rows, count))


def validate_scales(
    payload: Tensor, first: int, count: int, *, non_negative: bool, most: float = math.inf
) -> None:
    """Raise CorruptPayload unless the `count` fp32 scales from byte `first` on are finite, at most
    `most` and, if `non_negative`, not negative.
    """
    check(
        lib.gc_scales_validate(pointer(payload, "uint8_t") + first, count, non_negative),
        "gc_scales_validate",
    )
    if most < math.inf and count:
        # NumPy, because the scales may begin at an unaligned address
        scales = payload.numpy()[first : first + 4 * count].view(np.float32)
        if scales.max() > most:
            check(lib.GC_BAD_SCALE, "gc_scales_validate")


def are_finite(scales: Tensor) -> bool:
    """Return whether all float32 scales are finite."""
    return bool(
        lib.gc_scales_validate(pointer(scales, "uint8_t"), scales.numel(), False) == lib.GC_OK
    )


def sum_lanes(
    payloads: Sequence[Tensor], source: Table, target: Table, lanes: Code, out: Tensor
) -> None:
    """Write the integer sums of the ternary codes of `payloads` as lanes to the payload `out`.

    Args:
        payloads: uint8 payloads of all ranks.
        source, target: tables of the payloads and of `out`, with the same rows.
        lanes: code of the sums.
        out: uint8 payload, written in place.
    """
    pointers, bytes_out = pointers_of(payloads), pointer(out, "uint8_t")
    rows_out = ffi.from_buffer("gc_segment[]", target.rows)
    run(
        "gc_ternary_sum_lanes",
        source,
        lambda rows, count, first: lib.gc_ternary_sum_lanes(
            pointers, len(payloads), rows, rows_out + first, count, lanes.bits, bytes_out
        ),
    )
