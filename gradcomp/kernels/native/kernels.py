"""The kernels of codecs and exchanges. Pointers are plain integers; the caller keeps the memory alive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradcomp.kernels.native.library import check, ffi, lib
from gradcomp.kernels.native.threads import run
from gradcomp.kernels.tables import CopyTable, Table

STREAM_NBYTES = 32 << 20  # outputs above this do not stay in a last-level cache anyway

# ---- kernels -------------------------------------------------------------------------------------------------------


def _bytes(address: int) -> Any:
    return ffi.cast("uint8_t *", address)


def payload_pointers(addresses: Sequence[int]) -> Any:
    return ffi.new("const uint8_t *[]", [ffi.cast("const uint8_t *", a) for a in addresses])


def _stream(layout_numel: int, dtype: int) -> int:
    return int(lib.GC_STREAM) if layout_numel * (4 if dtype == 0 else 2) > STREAM_NBYTES else 0


def ternary_scales(
    src: int,
    dtype: int,
    table: Table,
    group_blocks: NDArray[np.uint64],
    group_numels: NDArray[np.uint32],
    blocks: NDArray[Any],
    clip_sigma: float | None,
    scales: int,
) -> bool:
    """Compute every group's scale; return True when a value is not finite.

    Args:
        src: address of a tensor of `dtype` whose groups `table` describes.
        group_blocks: ``(groups + 1,)``, first entry of every group in `blocks`, and their number at the end.
        group_numels: ``(groups,)``, elements of every group.
        blocks: scratch, ``(group_blocks[-1],)`` of `tables.BLOCK`.
        scales: address of ``(groups,)`` float32.
    """
    flag = ffi.new("uint32_t *")
    block = ffi.from_buffer("gc_block[]", blocks)
    source = ffi.cast("const void *", src)
    run(
        "gc_block_sums",
        table,
        lambda rows, count, _: lib.gc_block_sums(source, dtype, rows, count, block, flag),
    )
    status = lib.gc_ternary_scales(
        block,
        ffi.from_buffer("uint64_t[]", group_blocks),
        ffi.from_buffer("uint32_t[]", group_numels),
        len(group_numels),
        -1.0 if clip_sigma is None else clip_sigma,
        ffi.cast("float *", scales),
    )
    check(status, "gc_ternary_scales")
    return bool(flag[0])


def ternary_encode(src: int, dtype: int, table: Table, payload: int, key: tuple[int, int, int, int]) -> bool:
    """Encode with the scales that stand in the payload; `key` is (seed, rank, step, stream). True: not finite."""
    flag = ffi.new("uint32_t *")
    source, out, rng = ffi.cast("const void *", src), _bytes(payload), ffi.new("gc_rng_key *", key)[0]
    run(
        "gc_ternary_encode",
        table,
        lambda rows, count, _: lib.gc_ternary_encode(source, dtype, rows, count, out, rng, flag),
    )
    return bool(flag[0])


def ternary_sum_lanes(payloads: Sequence[int], source: Table, target: Table, lane_bits: int, out: int) -> None:
    """Write the integer sums of ternary payloads as lanes; `source` and `target` are parallel tables."""
    pointers, number, bytes_out = payload_pointers(payloads), len(payloads), _bytes(out)
    rows_out = ffi.cast("const gc_segment *", target.address)
    run(
        "gc_ternary_sum_lanes",
        source,
        lambda rows, count, first: lib.gc_ternary_sum_lanes(
            pointers, number, rows, rows_out + first, count, lane_bits, bytes_out
        ),
    )


def onebit_encode(src: int, dtype: int, table: Table, residual_in: int, residual_out: int, payload: int) -> bool:
    """Encode with error feedback (address 0: none); True when a value is not finite."""
    flag, source, out = ffi.new("uint32_t *"), ffi.cast("const void *", src), _bytes(payload)
    old, new = ffi.cast("const float *", residual_in), ffi.cast("float *", residual_out)
    run(
        "gc_onebit_encode",
        table,
        lambda rows, count, _: lib.gc_onebit_encode(source, dtype, rows, count, old, new, out, flag),
    )
    return bool(flag[0])


def values_encode(src: int, dtype: int, table: Table, value_dtype: int, payload: int) -> bool:
    """Copy values into a payload as float32 (0) or bfloat16 (1); True when one is not finite."""
    if not len(table):
        return False
    flag, source, out = ffi.new("uint32_t *"), ffi.cast("const void *", src), _bytes(payload)
    run(
        "gc_values_encode",
        table,
        lambda rows, count, _: lib.gc_values_encode(source, dtype, rows, count, value_dtype, out, flag),
    )
    return bool(flag[0])


class Payloads(NamedTuple):
    """Where averages come from: payloads of one form.

    Attributes:
        addresses: of the payloads.
        source: "ternary", "onebit", "values" or "lanes" (sums in one payload).
        dtype: that averages are rounded to: float32 (0), bfloat16 (1) or float16 (2).
        shared: (ternary) whether all payloads have the scales of the first.
        value_dtype: (values) float32 (0) or bfloat16 (1).
        world_size, lane_bits: (lanes) ranks in a sum, bits of one.
    """

    addresses: Sequence[int]
    source: str
    dtype: int
    shared: bool = False
    value_dtype: int = 0
    world_size: int = 1
    lane_bits: int = 2


def sum_decode(payloads: Payloads, table: Table, out: int) -> bool:
    """Write the averages, in payload order, to a tensor of their dtype; True when a value written is not finite."""
    if not len(table):
        return False
    flag, pointers, target = ffi.new("uint32_t *"), payload_pointers(payloads.addresses), ffi.cast("void *", out)
    number, dtype, stream = len(payloads.addresses), payloads.dtype, _stream(table.numel, payloads.dtype)
    head: tuple[Any, ...]
    if payloads.source == "ternary":
        function, head = "gc_ternary_sum_decode", (pointers, number, payloads.shared)
    elif payloads.source == "onebit":
        function, head = "gc_onebit_sum_decode", (pointers, number)
    elif payloads.source == "lanes":
        function, head = "gc_lanes_decode", (pointers[0], payloads.world_size, payloads.lane_bits)
    else:
        function, head = "gc_values_sum_decode", (pointers, number, payloads.value_dtype)
    decode = getattr(lib, function)
    run(function, table, lambda rows, count, _: decode(*head, rows, count, target, dtype, stream, flag))
    return bool(flag[0])


# ---- checks, copies ------------------------------------------------------------------------------------------------


def ternary_validate(payload: int, table: Table) -> None:
    """Raise CorruptPayload for a code 11 or wrong padding."""
    source = _bytes(payload)
    run("gc_ternary_validate", table, lambda rows, count, _: lib.gc_ternary_validate(source, rows, count))


def onebit_validate(payload: int, table: Table) -> None:
    """Raise CorruptPayload for padding other than 0."""
    source = _bytes(payload)
    run("gc_onebit_validate", table, lambda rows, count, _: lib.gc_onebit_validate(source, rows, count))


def lanes_validate(payload: int, world_size: int, lane_bits: int, table: Table) -> None:
    """Raise CorruptPayload for a lane above 2 * world_size or padding other than 0."""
    source = _bytes(payload)
    run(
        "gc_lanes_validate",
        table,
        lambda rows, count, _: lib.gc_lanes_validate(source, world_size, lane_bits, rows, count),
    )


def scales_are_finite(scales: int, scale_count: int) -> bool:
    """Return whether all float32 at an address are finite."""
    return bool(lib.gc_scales_validate(_bytes(scales), scale_count, False) == lib.GC_OK)


def scales_validate(scales: int, scale_count: int, *, non_negative: bool) -> None:
    """Raise CorruptPayload unless every scale is finite and, if asked for, not negative."""
    check(lib.gc_scales_validate(_bytes(scales), scale_count, non_negative), "gc_scales_validate")


def crc32c(data: NDArray[np.uint8], crc: int = 0) -> int:
    """Return the CRC-32C of contiguous bytes, continuing `crc`."""
    return int(lib.gc_crc32c(crc, ffi.from_buffer("uint8_t[]", data), data.size))


def copy(dst: int, src: int, table: CopyTable) -> None:
    """Copy every byte range of a table."""
    rows = ffi.cast("const gc_copy_range *", table.address)
    check(lib.gc_copy(_bytes(dst), _bytes(src), rows, len(table.rows)), "gc_copy")


def bytes_at(address: int, nbytes: int) -> NDArray[np.uint8]:
    """Return the bytes at an address as an array that shares them."""
    return np.frombuffer(ffi.buffer(ffi.cast("char *", address), nbytes), np.uint8)


def copy_bytes(dst: int, src: int, nbytes: int) -> None:
    """Copy `nbytes` bytes between two addresses that do not overlap."""
    ffi.memmove(_bytes(dst), _bytes(src), nbytes)
