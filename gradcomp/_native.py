"""The only door to the C kernels: pointers, lengths, status -> exception, and chunking over threads.

Pointers are plain integers (``tensor.data_ptr()``, ``array.ctypes.data``); the caller keeps the memory alive. Kernels run
without the GIL. A call over a segment table is shared out over at most ``torch.get_num_threads()`` threads; which thread
does which row changes no bit of the result. No thread is started before the first call that is worth sharing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gradcomp._gc import ffi, lib
from gradcomp.errors import CorruptPayload, NativeError

if TYPE_CHECKING:
    from gradcomp.layout import CopyTable, PayloadLayout, Table

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
TORCH_DTYPES = {code: dtype for dtype, code in DTYPES.items()}
THREAD_NUMEL = 1 << 20  # elements a thread: 0.1 to 0.4 ms of work, against 0.06 ms to hand it over
STREAM_NBYTES = 32 << 20  # outputs above this do not stay in a last-level cache anyway
DISABLE_VARIABLE = "GRADCOMP_DISABLE_CPU_FEATURES"

_CHECKS = {
    "GC_FORBIDDEN_CODE": ("code", "a ternary code 11"),
    "GC_BAD_PADDING": ("padding", "padding bits are not what the format pins"),
    "GC_LANE_RANGE": ("lane", "an integer lane above 2 * world_size"),
    "GC_BAD_SCALE": ("scale", "a scale that is not finite, or negative"),
}

_pool: ThreadPoolExecutor | None = None
_pool_size = 0
_pool_pid = 0
_pool_lock = threading.Lock()


def _check(status: int, function: str) -> None:
    """Raise what a status code stands for: the one place that does."""
    if status == lib.GC_OK:
        return
    name = ffi.string(lib.gc_status_name(status)).decode()
    if name in _CHECKS:
        raise CorruptPayload(*_CHECKS[name])
    raise NativeError(name, function)


# ---- tiers ---------------------------------------------------------------------------------------------------------


def tiers() -> list[str]:
    """Return the names of the tiers that this build and this CPU can run, slowest first."""
    return [_tier_name(t) for t in range(lib.gc_tier_count()) if lib.gc_tier_supported(t)]


def tier() -> str:
    """Return the name of the tier in use."""
    return _tier_name(lib.gc_tier_current())


def select_tier(name: str) -> None:
    """Use another tier; not while kernels run.

    Raises:
        ValueError: a name that this machine does not have.
    """
    for number in range(lib.gc_tier_count()):
        if _tier_name(number) == name and lib.gc_tier_supported(number):
            _check(lib.gc_tier_select(number), "gc_tier_select")
            return
    raise ValueError(f"unknown or unsupported tier {name!r}; this machine has {tiers()}")


def _tier_name(number: int) -> str:
    return str(ffi.string(lib.gc_tier_name(number)).decode())


def _select_from_environment(value: str) -> None:
    """Take the best tier that needs none of the comma-separated features in `value`."""
    needs = {"portable": set[str](), "avx2": {"avx2", "fma", "f16c", "sse4.2"}}
    off = {word.strip().lower() for word in value.split(",") if word.strip()}
    known = set[str]().union(*needs.values())
    if off - known:
        raise ValueError(
            f"{DISABLE_VARIABLE}={value!r}: unknown feature {min(off - known)!r}, known are {sorted(known)}"
        )
    select_tier([name for name in tiers() if not needs[name] & off][-1])


_select_from_environment(os.environ.get(DISABLE_VARIABLE, ""))


# ---- threads -------------------------------------------------------------------------------------------------------


def thread_count() -> int:
    """Return how many threads a large call uses."""
    return max(1, torch.get_num_threads())


def _workers(wanted: int) -> ThreadPoolExecutor:
    """Return a pool of at least `wanted` threads that belongs to this process (a fork starts without threads)."""
    global _pool, _pool_size, _pool_pid
    with _pool_lock:
        if _pool is None or _pool_size < wanted or _pool_pid != os.getpid():
            _pool = ThreadPoolExecutor(wanted, thread_name_prefix="gradcomp-kernel")
            _pool_size, _pool_pid = wanted, os.getpid()
        return _pool


def _run(function: str, table: Table, call: Callable[[Any, int, int], int], second: Table | None = None) -> None:
    """Run `call(segments, count, first_row)` over a table, shared out over threads.

    Every part runs to its end before the first error is raised, so that no thread touches memory afterwards.
    """
    if not len(table):
        return
    base = ffi.cast("const gc_segment *", table.address)
    wanted = 1 if table.numel < 2 * THREAD_NUMEL else min(thread_count(), table.numel // THREAD_NUMEL)
    parts = table.ranges(wanted) if wanted > 1 else []
    if len(parts) <= 1:
        return _check(call(base, len(table), 0), function)
    pool = _workers(len(parts) - 1)
    futures = [pool.submit(call, base + first, count, first) for first, count in parts[1:]]
    try:
        statuses = [call(base, parts[0][1], 0)]
    finally:
        done = [future.exception() for future in futures]
    for error in done:
        if error is not None:
            raise error
    for status in statuses + [future.result() for future in futures]:
        _check(status, function)
    return None


# ---- kernels -------------------------------------------------------------------------------------------------------


def _bytes(address: int) -> Any:
    return ffi.cast("uint8_t *", address)


def _payloads(addresses: Sequence[int]) -> Any:
    return ffi.new("const uint8_t *[]", [ffi.cast("const uint8_t *", a) for a in addresses])


def _stream(layout_numel: int, dtype: int) -> int:
    return int(lib.GC_STREAM) if layout_numel * (4 if dtype == 0 else 2) > STREAM_NBYTES else 0


def ternary_scales(
    src: int, dtype: int, layout: PayloadLayout, blocks: NDArray[Any], clip_sigma: float | None, scales: int
) -> bool:
    """Compute every group's scale; return True when a value is not finite.

    Args:
        src: address of a tensor of `dtype` that `layout` describes.
        blocks: scratch, ``(layout.group_blocks[-1],)`` of `layout.BLOCK`.
        scales: address of ``(layout.group_count,)`` float32.
    """
    flag = ffi.new("uint32_t *")
    block = ffi.cast("gc_block *", blocks.ctypes.data)
    source = ffi.cast("const void *", src)
    _run(
        "gc_block_sums",
        layout.packed,
        lambda rows, count, _: lib.gc_block_sums(source, dtype, rows, count, block, flag),
    )
    status = lib.gc_ternary_scales(
        block,
        ffi.cast("const uint64_t *", layout.group_blocks.ctypes.data),
        ffi.cast("const uint32_t *", layout.group_numels.ctypes.data),
        layout.group_count,
        -1.0 if clip_sigma is None else clip_sigma,
        ffi.cast("float *", scales),
    )
    _check(status, "gc_ternary_scales")
    return bool(flag[0])


def ternary_encode(src: int, dtype: int, table: Table, payload: int, key: tuple[int, int, int, int]) -> bool:
    """Encode with the scales that stand in the payload; `key` is (seed, rank, step, stream). True: not finite."""
    flag = ffi.new("uint32_t *")
    source, out, rng = ffi.cast("const void *", src), _bytes(payload), ffi.new("gc_rng_key *", key)[0]
    _run(
        "gc_ternary_encode",
        table,
        lambda rows, count, _: lib.gc_ternary_encode(source, dtype, rows, count, out, rng, flag),
    )
    return bool(flag[0])


def ternary_sum_decode(payloads: Sequence[int], shared: bool, table: Table, out: int, dtype: int) -> bool:
    """Average payloads into a tensor of `dtype`; True when a value written is not finite."""
    flag, pointers, target = ffi.new("uint32_t *"), _payloads(payloads), ffi.cast("void *", out)
    number, stream = len(payloads), _stream(table.numel, dtype)
    _run(
        "gc_ternary_sum_decode",
        table,
        lambda rows, count, _: lib.gc_ternary_sum_decode(
            pointers, number, shared, rows, count, target, dtype, stream, flag
        ),
    )
    return bool(flag[0])


def ternary_sum_lanes(payloads: Sequence[int], source: Table, target: Table, lane_bits: int, out: int) -> None:
    """Write the integer sums of ternary payloads as lanes; `source` and `target` are parallel tables."""
    pointers, number, bytes_out = _payloads(payloads), len(payloads), _bytes(out)
    rows_out = ffi.cast("const gc_segment *", target.address)
    _run(
        "gc_ternary_sum_lanes",
        source,
        lambda rows, count, first: lib.gc_ternary_sum_lanes(
            pointers, number, rows, rows_out + first, count, lane_bits, bytes_out
        ),
    )


def lanes_decode(payload: int, world_size: int, lane_bits: int, table: Table, out: int, dtype: int) -> bool:
    """Turn integer sums into averages; True when a value written is not finite."""
    flag, source, target = ffi.new("uint32_t *"), _bytes(payload), ffi.cast("void *", out)
    stream = _stream(table.numel, dtype)
    _run(
        "gc_lanes_decode",
        table,
        lambda rows, count, _: lib.gc_lanes_decode(
            source, world_size, lane_bits, rows, count, target, dtype, stream, flag
        ),
    )
    return bool(flag[0])


def onebit_encode(src: int, dtype: int, table: Table, residual_in: int, residual_out: int, payload: int) -> bool:
    """Encode with error feedback (address 0: none); True when a value is not finite."""
    flag, source, out = ffi.new("uint32_t *"), ffi.cast("const void *", src), _bytes(payload)
    old, new = ffi.cast("const float *", residual_in), ffi.cast("float *", residual_out)
    _run(
        "gc_onebit_encode",
        table,
        lambda rows, count, _: lib.gc_onebit_encode(source, dtype, rows, count, old, new, out, flag),
    )
    return bool(flag[0])


def onebit_sum_decode(payloads: Sequence[int], table: Table, out: int, dtype: int) -> bool:
    """Average payloads into a tensor of `dtype`; True when a value written is not finite."""
    flag, pointers, target = ffi.new("uint32_t *"), _payloads(payloads), ffi.cast("void *", out)
    number, stream = len(payloads), _stream(table.numel, dtype)
    _run(
        "gc_onebit_sum_decode",
        table,
        lambda rows, count, _: lib.gc_onebit_sum_decode(pointers, number, rows, count, target, dtype, stream, flag),
    )
    return bool(flag[0])


def values_encode(src: int, dtype: int, table: Table, value_dtype: int, payload: int) -> bool:
    """Copy values into a payload as float32 (0) or bfloat16 (1); True when one is not finite."""
    flag, source, out = ffi.new("uint32_t *"), ffi.cast("const void *", src), _bytes(payload)
    _run(
        "gc_values_encode",
        table,
        lambda rows, count, _: lib.gc_values_encode(source, dtype, rows, count, value_dtype, out, flag),
    )
    return bool(flag[0])


def values_sum_decode(payloads: Sequence[int], value_dtype: int, table: Table, out: int, dtype: int) -> bool:
    """Average plain values in payload order; True when a value written is not finite."""
    flag, pointers, target = ffi.new("uint32_t *"), _payloads(payloads), ffi.cast("void *", out)
    number, stream = len(payloads), _stream(table.numel, dtype)
    _run(
        "gc_values_sum_decode",
        table,
        lambda rows, count, _: lib.gc_values_sum_decode(
            pointers, number, value_dtype, rows, count, target, dtype, stream, flag
        ),
    )
    return bool(flag[0])


class Payloads(NamedTuple):
    """Where the averages of an update come from: payloads of one form, as the decoders above take them.

    Attributes:
        addresses: of the payloads.
        source: "ternary", "onebit", "values" or "lanes".
        dtype: that averages are rounded to, float32 (0) or bfloat16 (1).
        shared, value_dtype, world_size, lane_bits: as the decoder of `source` has them.
    """

    addresses: Sequence[int]
    source: str
    dtype: int
    shared: bool = False
    value_dtype: int = 0
    world_size: int = 1
    lane_bits: int = 2


_SOURCES = {name: number for number, name in enumerate(("tensors", "ternary", "onebit", "values", "lanes"))}


def update(
    table: Table,
    targets: NDArray[Any],
    rules: NDArray[Any],
    payloads: Payloads | None = None,
    norms: NDArray[np.float64] | None = None,
) -> bool:
    """Update weights in place, from gradient tensors or straight from payloads; True: an average is not finite.

    Args:
        table: which elements of which parameters.
        targets: `rules.TARGET`, by the parameter numbers of the table.
        rules: `rules.RULE`, by the rule numbers of the targets.
        norms: ``(2 * len(table),)``, what rules that add up write, two a row.
    """
    flag, gradients = ffi.new("uint32_t *"), ffi.new("gc_gradients *")
    if payloads is not None:
        pointers = _payloads(payloads.addresses)
        gradients.payloads, gradients.payload_count = pointers, len(payloads.addresses)
        setattr(gradients, "from", _SOURCES[payloads.source])
        gradients.dtype, gradients.shared = payloads.dtype, payloads.shared
        gradients.value_dtype, gradients.world_size = payloads.value_dtype, payloads.world_size
        gradients.lane_bits = payloads.lane_bits
    target, rule = ffi.cast("const gc_target *", targets.ctypes.data), ffi.cast("const gc_rule *", rules.ctypes.data)
    sums = ffi.cast("double *", norms.ctypes.data) if norms is not None else ffi.NULL
    _run(
        "gc_update",
        table,
        lambda rows, count, first: lib.gc_update(
            gradients,
            rows,
            count,
            target,
            len(targets),
            rule,
            len(rules),
            sums + 2 * first if norms is not None else sums,
            flag,
        ),
    )
    return bool(flag[0])


def split(weights: int, numel: int, nearest: bool, top: int, trail: int) -> None:
    """Split fp32 numbers into bf16 tops and 16-bit trails."""
    bits, high, low = ffi.cast("uint32_t *", weights), ffi.cast("uint16_t *", top), ffi.cast("uint16_t *", trail)
    _check(lib.gc_split(bits, numel, nearest, high, low), "gc_split")


def join(top: int, trail: int, numel: int, nearest: bool, weights: int) -> None:
    """Join bf16 tops and 16-bit trails to the fp32 numbers they were split from."""
    bits, high, low = ffi.cast("uint32_t *", weights), ffi.cast("uint16_t *", top), ffi.cast("uint16_t *", trail)
    _check(lib.gc_join(high, low, numel, nearest, bits), "gc_join")


# ---- checks, copies ------------------------------------------------------------------------------------------------


def ternary_validate(payload: int, table: Table) -> None:
    """Raise CorruptPayload for a code 11 or wrong padding."""
    source = _bytes(payload)
    _run("gc_ternary_validate", table, lambda rows, count, _: lib.gc_ternary_validate(source, rows, count))


def onebit_validate(payload: int, table: Table) -> None:
    """Raise CorruptPayload for padding other than 0."""
    source = _bytes(payload)
    _run("gc_onebit_validate", table, lambda rows, count, _: lib.gc_onebit_validate(source, rows, count))


def lanes_validate(payload: int, world_size: int, lane_bits: int, table: Table) -> None:
    """Raise CorruptPayload for a lane above 2 * world_size or padding other than 0."""
    source = _bytes(payload)
    _run(
        "gc_lanes_validate",
        table,
        lambda rows, count, _: lib.gc_lanes_validate(source, world_size, lane_bits, rows, count),
    )


def scales_validate(scales: int, scale_count: int, *, non_negative: bool) -> None:
    """Raise CorruptPayload unless every scale is finite and, if asked for, not negative."""
    _check(lib.gc_scales_validate(_bytes(scales), scale_count, non_negative), "gc_scales_validate")


def crc32c(data: NDArray[np.uint8], crc: int = 0) -> int:
    """Return the CRC-32C of contiguous bytes, continuing `crc`."""
    return int(lib.gc_crc32c(crc, _bytes(data.ctypes.data), data.size))


def copy(dst: int, src: int, table: CopyTable) -> None:
    """Copy every byte range of a table."""
    rows = ffi.cast("const gc_copy_range *", table.address)
    _check(lib.gc_copy(_bytes(dst), _bytes(src), rows, len(table.rows)), "gc_copy")


def copy_bytes(dst: int, src: int, nbytes: int) -> None:
    """Copy `nbytes` bytes between two addresses that do not overlap."""
    ffi.memmove(_bytes(dst), _bytes(src), nbytes)
