"""Triton programs that split, join and update weights: the arithmetic of
native/src/portable/update.c, with one rounding per operation, and `tl.fma` where C calls fmaf.

One launch updates the parameters of all rules of one kind. Their addresses and numbers are rows of
`RECORD`, copied to the device in one piece. Dtypes, roundings and flags are read from there and
select values and masks, so there is one binary per kind, which the self-check has tested.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from gradcomp.kernels.cuda.programs import ABS, INF_BITS, LANES, bits_of, canonical, lanes_total
from gradcomp.kernels.cuda.records import ADDRESSES, COLUMNS, INTEGERS, NUMBERS, RECORD
from gradcomp.kernels.rules import Flag, Kind

SGD = tl.constexpr(int(Kind.SGD))
ADAGRAD = tl.constexpr(int(Kind.ADAGRAD))
ADAMW = tl.constexpr(int(Kind.ADAMW))
MOMENTS = tl.constexpr(int(Kind.MOMENTS))
LAMB_START = tl.constexpr(int(Kind.LAMB_START))
LAMB_NORMS = tl.constexpr(int(Kind.LAMB_NORMS))
LAMB_APPLY = tl.constexpr(int(Kind.LAMB_APPLY))
SQUARES = tl.constexpr(int(Kind.SQUARES))
MAXIMIZE = tl.constexpr(int(Flag.MAXIMIZE))
FIRST = tl.constexpr(int(Flag.FIRST))
NESTEROV = tl.constexpr(int(Flag.NESTEROV))
PRESCALE = tl.constexpr(int(Flag.PRESCALE))
SIGN = tl.constexpr(-0x80000000)
RECORD_NBYTES = tl.constexpr(RECORD.itemsize)
RANGE = tl.constexpr(COLUMNS)


def _offset(name: str) -> Any:
    assert RECORD.fields is not None
    return tl.constexpr(RECORD.fields[name][1])


WEIGHT, TRAIL, GRADIENT, STATE0, STATE1 = map(_offset, ADDRESSES)
DTYPE, KIND_AT, FLAGS, ROUNDING = map(_offset, INTEGERS)
STEP_SIZE, WEIGHT_DECAY, DECAY, MOMENTUM, KEEP, KEEP2 = map(_offset, NUMBERS[:6])
BETA2, BIAS1, BIAS2, EPS, PRESCALE_BY = map(_offset, NUMBERS[6:])


# ---- storage -------------------------------------------------------------------------------------
@triton.jit
def joined(top, trail, nearest):
    """Return the weights of bfloat16 tops and trails, whose bits are int32; nearest: 1 or 0."""
    is_nan = (top & 0x7FFF) > 0x7F80
    top = tl.where(is_nan, top, top - ((trail >> 15) & nearest))
    return ((top << 16) | trail).to(tl.float32, bitcast=True)


@triton.jit
def top_of(bits, nearest):
    """Return the bits of the bfloat16 tops of weights as int16."""
    high = bits >> 16
    is_nan = (bits & ABS) > INF_BITS
    rounded = tl.where(is_nan, high | 0x40, high + ((bits >> 15) & 1))
    return tl.where(nearest != 0, rounded, high).to(tl.int16)


@triton.jit
def load_half(pointer, mask):
    return tl.load(pointer, mask=mask, other=0).to(tl.int32) & 0xFFFF


@triton.jit(
    do_not_specialize=["nearest", "count"],
    do_not_specialize_on_alignment=["weights", "top", "trail"],
)
def split_values(weights, top, trail, nearest, count, E: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * E + tl.arange(0, E)
    live = i < count
    bits = tl.load(weights + i, mask=live, other=0)
    tl.store(top + i, top_of(bits, nearest), mask=live)
    tl.store(trail + i, bits.to(tl.int16), mask=live)


@triton.jit(
    do_not_specialize=["nearest", "count"],
    do_not_specialize_on_alignment=["top", "trail", "weights"],
)
def join_values(top, trail, weights, nearest, count, E: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * E + tl.arange(0, E)
    live = i < count
    joint = joined(load_half(top + i, live), load_half(trail + i, live), nearest)
    tl.store(weights + i, bits_of(joint), mask=live)


# ---- a record ------------------------------------------------------------------------------------
@triton.jit
def address(record, NAME: tl.constexpr):
    return tl.load((record + NAME).to(tl.pointer_type(tl.int64)))


@triton.jit
def integer(record, NAME: tl.constexpr):
    return tl.load((record + NAME).to(tl.pointer_type(tl.int32)))


@triton.jit
def number(record, NAME: tl.constexpr):
    return tl.load((record + NAME).to(tl.pointer_type(tl.float32)))


@triton.jit
def wide(address, i):
    return address.to(tl.pointer_type(tl.float32)) + i


@triton.jit
def half(address, i):
    return address.to(tl.pointer_type(tl.int16)) + i


@triton.jit
def is_of(record, KIND: tl.constexpr):
    """Return whether a launch for KIND updates a parameter."""
    kind = integer(record, KIND_AT)
    mine = kind == KIND
    if KIND == MOMENTS or KIND == LAMB_NORMS:
        mine = mine | (kind == LAMB_START)
    return mine


@triton.jit
def load_weight(weight, trail, nearest, i, live):
    is_split = trail != 0
    plain = tl.load(wide(weight, i), mask=live & (trail == 0), other=0.0)
    top = load_half(half(weight, i), live & is_split)
    low = load_half(half(trail, i), live & is_split)
    return tl.where(is_split, joined(top, low, nearest), plain)


@triton.jit
def store_weight(weight, trail, nearest, i, w, live):
    w = canonical(w)
    bits = bits_of(w)
    tl.store(wide(weight, i), w, mask=live & (trail == 0))
    tl.store(half(weight, i), top_of(bits, nearest), mask=live & (trail != 0))
    tl.store(half(trail, i), bits.to(tl.int16), mask=live & (trail != 0))


@triton.jit
def load_gradient(gradient, dtype, flags, prescale, i, live):
    plain = tl.load(wide(gradient, i), mask=live & (dtype == 0), other=0.0)
    word = load_half(half(gradient, i), live & (dtype == 1))
    g = tl.where(dtype == 1, (word << 16).to(tl.float32, bitcast=True), plain)
    minus = (bits_of(g) ^ SIGN).to(tl.float32, bitcast=True)
    g = tl.where((flags & MAXIMIZE) != 0, minus, g)
    return tl.where((flags & PRESCALE) != 0, g * prescale, g)


# ---- rules ---------------------------------------------------------------------------------------
@triton.jit
def decayed(weight_decay, w, x):
    """Return x plus w times the weight decay, unless that is 0."""
    return tl.where(weight_decay != 0, tl.fma(weight_decay, w, x), x)


@triton.jit
def direction(first, second, bias1, eps, weight_decay, w, live):
    """Return LAMB's u. first, second: pointers to the moments."""
    m = tl.load(first, mask=live, other=0.0)
    v = tl.load(second, mask=live, other=0.0)
    u = tl.div_rn(bias1 * m, tl.sqrt_rn(v) + eps)
    return decayed(weight_decay, w, u)


@triton.jit
def update_values(ranges, records, KIND: tl.constexpr, E: tl.constexpr):
    """Update one range of at most E elements, if its parameter has a rule of KIND.

    ranges: ``(ranges, COLUMNS)`` int64. records: a `RECORD` per parameter.
    """
    # fields of the record are tensors of one element: the interpreter's scalars are no masks
    at = ranges + (tl.program_id(0) + tl.arange(0, 1)).to(tl.int64) * RANGE
    record = records + tl.load(at) * RECORD_NBYTES
    k = tl.arange(0, E)
    live = (k < tl.load(at + 3)) & is_of(record, KIND)
    i = tl.load(at + 1) + k
    if KIND != LAMB_APPLY:
        g = load_gradient(
            address(record, GRADIENT),
            integer(record, DTYPE),
            integer(record, FLAGS),
            number(record, PRESCALE_BY),
            tl.load(at + 2) + k,
            live,
        )
    if KIND != MOMENTS:
        weight, trail = address(record, WEIGHT), address(record, TRAIL)
        nearest = integer(record, ROUNDING)
        w = load_weight(weight, trail, nearest, i, live)
        step_size = number(record, STEP_SIZE)
    if KIND != SGD:
        eps = number(record, EPS)
    first = wide(address(record, STATE0), i)
    if KIND == SGD or KIND == ADAGRAD:
        g = decayed(number(record, WEIGHT_DECAY), w, g)
    if KIND == SGD:
        momentum, flags = number(record, MOMENTUM), integer(record, FLAGS)
        is_first = (flags & FIRST) != 0
        moves = live & (momentum != 0)
        before = tl.load(first, mask=moves & ((flags & FIRST) == 0), other=0.0)
        buffer = tl.where(is_first, g, tl.fma(number(record, KEEP), g, momentum * before))
        tl.store(first, canonical(buffer), mask=moves)
        ahead = tl.where((flags & NESTEROV) != 0, tl.fma(momentum, buffer, g), buffer)
        w = tl.fma(step_size, tl.where(momentum != 0, ahead, g), w)
    if KIND == ADAGRAD:
        total = tl.fma(g, g, tl.load(first, mask=live, other=0.0))
        tl.store(first, canonical(total), mask=live)
        w = w + tl.div_rn(step_size * g, tl.sqrt_rn(total) + eps)
    if KIND == ADAMW or KIND == MOMENTS:
        second = wide(address(record, STATE1), i)
        keep = number(record, KEEP)
        m = tl.load(first, mask=live, other=0.0)
        v = tl.load(second, mask=live, other=0.0)
        factor, onto = tl.where(keep < 0.5, keep, keep - 1.0), tl.where(keep < 0.5, m, g)
        m = canonical(tl.fma(factor, g - m, onto))
        v = canonical(tl.fma(number(record, KEEP2) * g, g, v * number(record, BETA2)))
        tl.store(first, m, mask=live)
        tl.store(second, v, mask=live)
    if KIND == ADAMW:
        decay = number(record, DECAY)
        w = tl.where(decay != 1, w * decay, w)
        below = tl.div_rn(tl.sqrt_rn(v), number(record, BIAS2)) + eps
        w = w + tl.div_rn(step_size * m, below)
    if KIND == LAMB_APPLY:
        bias1, weight_decay = number(record, BIAS1), number(record, WEIGHT_DECAY)
        second = wide(address(record, STATE1), i)
        w = tl.fma(step_size, direction(first, second, bias1, eps, weight_decay, w, live), w)
    if KIND != MOMENTS:
        store_weight(weight, trail, nearest, i, w, live)


@triton.jit(do_not_specialize=["count"])
def add_squares(
    ranges, records, count, sums, KIND: tl.constexpr, B: tl.constexpr, STEPS: tl.constexpr
):
    """Write the sums of squares of B ranges per program whose parameters have a rule of KIND.

    ranges: ``(count, COLUMNS)`` int64. sums: ``(2, count)`` float64, of w and u, or of g and 0.
    Element i is added to lane i % LANES, then lanes j and j + 8, 4, 2, 1.
    """
    b = tl.program_id(0) * B + tl.arange(0, B)
    at = (ranges + b.to(tl.int64) * RANGE)[:, None]
    live = (b < count)[:, None]
    record = records + tl.load(at, mask=live, other=0) * RECORD_NBYTES
    live = live & is_of(record, KIND)
    numel = tl.load(at + 3, mask=live, other=0)
    one = tl.zeros((B, LANES), tl.float64)
    other = tl.zeros((B, LANES), tl.float64)
    lane = tl.arange(0, LANES)[None, :]
    if KIND == SQUARES:
        first = tl.load(at + 2, mask=live, other=0)
        gradient, dtype = address(record, GRADIENT), integer(record, DTYPE)
        flags, prescale = integer(record, FLAGS), number(record, PRESCALE_BY)
    else:
        first = tl.load(at + 1, mask=live, other=0)
        weight, trail = address(record, WEIGHT), address(record, TRAIL)
        nearest = integer(record, ROUNDING)
        state0, state1 = address(record, STATE0), address(record, STATE1)
        bias1, eps = number(record, BIAS1), number(record, EPS)
        weight_decay = number(record, WEIGHT_DECAY)
    for start in range(0, tl.max(numel), LANES * STEPS):
        for k in tl.static_range(STEPS):
            j = start + k * LANES + lane
            i, inside = first + j, j < numel
            if KIND == SQUARES:
                x = load_gradient(gradient, dtype, flags, prescale, i, inside)
            else:
                x = load_weight(weight, trail, nearest, i, inside)
                u = direction(wide(state0, i), wide(state1, i), bias1, eps, weight_decay, x, inside)
                u64 = tl.where(inside, u, 0.0).to(tl.float64)
                other += u64 * u64
            x64 = tl.where(inside, x, 0.0).to(tl.float64)
            one += x64 * x64
    b = b[:, None]
    # numel is 0 where the sums are another kind's or nobody's
    written = numel > 0
    tl.store(sums + b, tl.reshape(lanes_total(one, B), (B, 1)), mask=written)
    tl.store(sums + count + b, tl.reshape(lanes_total(other, B), (B, 1)), mask=written)
