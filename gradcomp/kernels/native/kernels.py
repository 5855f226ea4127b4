"""The kernels of codecs and exchanges, for tensors on the CPU
(`gradcomp.kernels.interface.Kernels`).

C's names follow a code's: ``gc_NAME_encode(src, dtype, rows, count, [value_dtype, code_bits or
step,] [residuals, kept, decay, dropped,] [means,] payload, [key,] flag)``,
``gc_NAME_sum_decode(payloads, payload_count, [option,] rows, count, out, dtype, flags, flag)``. A
new code needs no function here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradcomp.kernels.interface import NO_RESIDUALS, Code, Payloads, Residuals
from gradcomp.kernels.native.addresses import bytes_of, floats_of, payload_pointers, values_of
from gradcomp.kernels.native.library import check, ffi, lib
from gradcomp.kernels.native.threads import run, run_elements
from gradcomp.kernels.tables import BLOCK, DTYPES, Groups, Table

# outputs above this do not stay in a last-level cache: their stores bypass it
CACHE_NBYTES = 32 << 20


# ---- statistics ----------------------------------------------------------------------------------


def scratch(groups: Groups, room: Tensor | None = None) -> Tensor:
    """See `Kernels.scratch`."""
    nbytes = int(groups.blocks[-1]) * BLOCK.itemsize
    return (
        room[:nbytes]
        if room is not None and room.numel() >= nbytes
        else torch.empty(nbytes, dtype=torch.uint8)
    )


def scales(
    values: Tensor,
    table: Table,
    groups: Groups,
    clip_sigma: float | None,
    scratch: Tensor,
    out: Tensor,
) -> bool:
    """See `Kernels.scales`."""
    if not table.count:
        return False
    flag = ffi.new("uint32_t *")
    blocks = ffi.cast("gc_block *", bytes_of(scratch))
    source, dtype = values_of(values), DTYPES[values.dtype]
    run(
        "gc_block_sums",
        table,
        lambda rows, count, _: lib.gc_block_sums(source, dtype, rows, count, blocks, flag),
    )
    status = lib.gc_ternary_scales(
        blocks,
        ffi.from_buffer("uint64_t[]", groups.blocks),
        ffi.from_buffer("uint32_t[]", groups.numels),
        len(groups.numels),
        -1.0 if clip_sigma is None else clip_sigma,
        floats_of(out),
    )
    check(status, "gc_ternary_scales")
    return bool(flag[0])


# ---- encoding ------------------------------------------------------------------------------------


def encode(
    code: Code,
    values: Tensor,
    table: Table,
    payload: Tensor,
    *,
    key: tuple[int, int, int, int] | None = None,
    residuals: Residuals = NO_RESIDUALS,
    kept: Tensor | None = None,
) -> bool:
    """See `Kernels.encode`."""
    if not table.count:
        return False
    flag, source, dtype = ffi.new("uint32_t *"), values_of(values), DTYPES[values.dtype]
    encoder = code.encoder or code.kernel
    name = f"gc_{encoder}_encode"
    function = getattr(lib, name)
    head = options_of(code.dtype, code.bits, code.step)
    tail: tuple[Any, ...] = (bytes_of(payload), flag)
    if encoder == "ternary":
        tail = (tail[0], ffi.new("gc_rng_key *", key)[0], flag)
    if encoder == "onebit":
        tail = (ffi.NULL if code.means is None else ffi.new("float[2]", code.means), *tail)
    dropped = None  # one number a row
    if code.decay is not None:
        counts = residuals.counted is not None and residuals.new is not None and code.decay < 1
        dropped = ffi.new("double[]", table.count) if counts else None
        head += (floats_of(residuals.old), floats_of(residuals.new), floats_of(kept), code.decay)

    def call(rows: Any, count: int, first: int) -> int:
        into = () if code.decay is None else (ffi.NULL if dropped is None else dropped + first,)
        return int(function(source, dtype, rows, count, *head, *into, *tail))

    run(name, table, call)
    if dropped is not None and residuals.counted is not None and not flag[0]:
        residuals.counted(float(np.frombuffer(ffi.buffer(dropped), np.float64).sum()))
    return bool(flag[0])


def options_of(*options: Any) -> tuple[Any, ...]:
    """Return the options that a code has, as C takes them."""
    given = (option for option in options if option is not None)
    return tuple(DTYPES[one] if isinstance(one, torch.dtype) else one for one in given)


# ---- averages ------------------------------------------------------------------------------------


class _Prepared(NamedTuple):
    """Payloads as C takes them: the decoder with its first arguments, and the source of an
    update.
    """

    name: str
    decode: Any
    head: tuple[Any, ...]
    dtype: int
    gradients: Any
    pointers: Any  # keeps what `head` and `gradients` point to


def prepare(payloads: Payloads) -> _Prepared:
    """Return payloads as C takes them, made at the first call."""
    made: _Prepared | None = payloads.prepared.get("native")
    if made is not None:
        return made
    pointers, count = payload_pointers(payloads.tensors), len(payloads.tensors)
    code, source = payloads.code, ffi.new("gc_gradients *")
    source.payloads, source.payload_count = pointers, count
    setattr(source, "from", getattr(lib, f"GC_FROM_{code.kernel.upper()}"))
    source.dtype, source.shared = DTYPES[payloads.dtype], code.shared or 0
    head: tuple[Any, ...] = (pointers, count, *options_of(code.shared, code.dtype, code.bits))
    name = f"gc_{code.kernel}_sum_decode"
    if code.dtype is not None:
        source.value_dtype = DTYPES[code.dtype]
    if code.kernel == "block":
        source.code_bits = code.bits
    if code.kernel == "lanes":
        source.world_size, source.lane_bits = code.world_size, code.bits
        name, head = "gc_lanes_decode", (pointers[0], code.world_size, code.bits)
    payloads.prepared["native"] = made = _Prepared(
        name, getattr(lib, name), head, source.dtype, source, pointers
    )
    return made


def sum_decode(payloads: Payloads, table: Table, out: Tensor, written: int = 0) -> bool:
    """See `Kernels.sum_decode`."""
    if not table.count:
        return False
    name, decode, head, dtype, *_ = prepare(payloads)
    flag, target = ffi.new("uint32_t *"), values_of(out)
    flags = lib.GC_STREAM if max(table.numel, written) * out.element_size() > CACHE_NBYTES else 0
    run(name, table, lambda rows, count, _: decode(*head, rows, count, target, dtype, flags, flag))
    return bool(flag[0])


# ---- values --------------------------------------------------------------------------------------


def are_finite(values: Tensor) -> bool:
    """See `Kernels.are_finite`."""
    return bool(lib.gc_scales_validate(bytes_of(values), values.numel(), False) == lib.GC_OK)


# ---- units of second moments ---------------------------------------------------------------------


def divide(
    values: Tensor,
    residual: Tensor | None,
    moments: Tensor,
    floor: float,
    units: Tensor,
    out: Tensor,
) -> None:
    """See `Kernels.divide`."""
    source, owed, squares = floats_of(values), floats_of(residual), floats_of(moments)
    into, quotients = floats_of(units), floats_of(out)

    def call(first: int, count: int) -> int:
        left = owed + first if residual is not None else owed
        return int(
            lib.gc_moments_divide(
                source + first, left, squares + first, floor, count, into + first, quotients + first
            )
        )

    run_elements("gc_moments_divide", values.numel(), call)


def multiply(values: Tensor, units: Tensor) -> bool:
    """See `Kernels.multiply`."""
    flag, into, factors = ffi.new("uint32_t *"), floats_of(values), floats_of(units)
    run_elements(
        "gc_moments_multiply",
        values.numel(),
        lambda first, count: int(
            lib.gc_moments_multiply(into + first, factors + first, count, flag)
        ),
    )
    return bool(flag[0])


def follow(
    values: Tensor, inverse: float, before: Tensor | None, keep: float, gain: float, after: Tensor
) -> bool:
    """See `Kernels.follow`."""
    flag, source, old, new = (
        ffi.new("uint32_t *"),
        floats_of(values),
        floats_of(before),
        floats_of(after),
    )

    def call(first: int, count: int) -> int:
        kept = old + first if before is not None else old
        return int(
            lib.gc_moments_follow(
                source + first, inverse, kept, keep, gain, count, new + first, flag
            )
        )

    run_elements("gc_moments_follow", values.numel(), call)
    return bool(flag[0])


# ---- rotation ------------------------------------------------------------------------------------


def rotate(
    values: Tensor,
    group_numel: int,
    first: int,
    parameter: int,
    key: tuple[int, int, int, int],
    *,
    back: bool = False,
) -> None:
    """See `Kernels.rotate`."""
    drawn = ffi.new("gc_rng_key *", key)[0]
    check(
        lib.gc_rotate(
            floats_of(values), values.numel(), group_numel, first, parameter, drawn, back
        ),
        "gc_rotate",
    )


def unbias(values: Tensor, group_numel: int, first: int) -> None:
    """See `Kernels.unbias`."""
    check(lib.gc_unbias(floats_of(values), values.numel(), group_numel, first), "gc_unbias")


# ---- memory --------------------------------------------------------------------------------------


def rescale(plane: Tensor, factor: float) -> None:
    """See `Kernels.rescale`."""
    check(lib.gc_rescale(floats_of(plane), plane.numel(), factor), "gc_rescale")
