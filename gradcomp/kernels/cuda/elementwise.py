"""Elementwise Triton kernels: units of second moments, checks for NaN and Inf, scaling."""

from __future__ import annotations

import triton
import triton.language as tl

from gradcomp.kernels.cuda.programs import ABS, INF_BITS, bits_of


@triton.jit(
    do_not_specialize=["count"],
    do_not_specialize_on_alignment=["values", "residual", "moments", "units", "out"],
)
def divide_values(
    values, residual, moments, floor, units, out, count, HAS_RESIDUAL: tl.constexpr, E: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * E + tl.arange(0, E)
    live = i < count
    x = tl.load(values + i, mask=live, other=0.0)
    if HAS_RESIDUAL:
        x = x + tl.load(residual + i, mask=live, other=0.0)
    unit = tl.sqrt_rn(tl.load(moments + i, mask=live, other=1.0)) + floor
    tl.store(units + i, unit, mask=live)
    tl.store(out + i, tl.div_rn(x, unit), mask=live)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["values", "units"])
def multiply_values(values, units, flag, count, E: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * E + tl.arange(0, E)
    live = i < count
    x = tl.load(values + i, mask=live, other=0.0) * tl.load(units + i, mask=live, other=0.0)
    tl.store(values + i, x, mask=live)
    special = live & ((bits_of(x) & ABS) >= INF_BITS)
    tl.store(flag + i * 0, tl.full((E,), 1, tl.int32), mask=special)


@triton.jit(
    do_not_specialize=["count"], do_not_specialize_on_alignment=["values", "before", "after"]
)
def follow_squares(
    values,
    inverse,
    before,
    keep,
    gain,
    after,
    flag,
    count,
    HAS_BEFORE: tl.constexpr,
    E: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * E + tl.arange(0, E)
    live = i < count
    x = tl.load(values + i, mask=live, other=0.0) * inverse
    kept = tl.zeros((E,), tl.float32) + keep
    if HAS_BEFORE:
        kept = tl.load(before + i, mask=live, other=0.0) * keep
    moment = x * x * gain + kept
    tl.store(after + i, moment, mask=live)
    special = live & ((bits_of(moment) & ABS) >= INF_BITS)
    tl.store(flag + i * 0, tl.full((E,), 1, tl.int32), mask=special)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["values"])
def scale_values(values, factor, count, E: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * E + tl.arange(0, E)
    live = i < count
    tl.store(values + i, tl.load(values + i, mask=live, other=0.0) * factor, mask=live)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["values"])
def find_special(values, flag, count, E: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * E + tl.arange(0, E)
    live = i < count
    bits = tl.load(values + i, mask=live, other=0)
    tl.store(flag + i * 0, tl.full((E,), 1, tl.int32), mask=live & ((bits & ABS) >= INF_BITS))
