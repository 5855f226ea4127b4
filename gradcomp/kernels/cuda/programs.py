"""The Triton kernels: the arithmetic of native/src/portable, with one rounding per operation.

Sums are float64 in the order that gradcomp.h defines: 16 lanes inside a block of 512 elements, a
tree over the lanes, blocks in runs of 512, then the runs in sequence. Programs are launched with
`enable_fp_fusion=False`, so that a product and a sum are never fused into one rounding.

Triton does not specialize on sizes or on the alignment of values, so training runs the binaries
that the self-check has tested.

A *segment* is a row of `plan.COLUMNS`. A *chunk*, (segment, first element), has the elements that
one program encodes or decodes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gradcomp.kernels.cuda.plan import COLUMNS

COLUMN_COUNT = tl.constexpr(len(COLUMNS))
LANES = tl.constexpr(16)
BLOCK = tl.constexpr(512)
ABS = tl.constexpr(0x7FFFFFFF)
INF_BITS = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)
SMALLEST = tl.constexpr(2.0**-126)  # smallest normal number
LARGEST = tl.constexpr((2 - 2.0**-23) * 2.0**127)
MAGIC = tl.constexpr(1.5 * 2.0**23)  # adding it rounds 0 <= t < 2^22 to nearest even

# terms of the sums of `add_blocks`
SQUARES = tl.constexpr(0)
CLASSES = tl.constexpr(1)
MOMENTS = tl.constexpr(2)
# kinds of encoders
NEAREST = tl.constexpr(0)
LEVELS = tl.constexpr(1)
SIGNS = tl.constexpr(2)
# kinds of decoders
TERNARY = tl.constexpr(3)
SHARED = tl.constexpr(4)
LANE_SUMS = tl.constexpr(5)
PLAIN = tl.constexpr(6)
ENTROPY = tl.constexpr(7)


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def nan_like(x):
    return (tl.zeros_like(x).to(tl.int32) + NAN_BITS).to(tl.float32, bitcast=True)


@triton.jit
def is_nan(x):
    return (bits_of(x) & ABS) > INF_BITS


@triton.jit
def canonical(x):
    return tl.where(is_nan(x), nan_like(x), x)


@triton.jit
def halves(lanes, B: tl.constexpr, K: tl.constexpr):
    """Add lane j + K to lane j: ``(B, 2 K)`` to ``(B, K)``."""
    return tl.sum(tl.reshape(lanes, (B, 2, K)), axis=1)


@triton.jit
def lanes_total(lanes, B: tl.constexpr):
    lanes = halves(lanes, B, 8)
    lanes = halves(lanes, B, 4)
    lanes = halves(lanes, B, 2)
    return tl.reshape(halves(lanes, B, 1), (B,))


@triton.jit
def load_float(pointer, mask, FROM: tl.constexpr):
    """Load float32 (FROM 0), bfloat16 (1) or float16 (2), the latter two as int16."""
    if FROM == 0:
        return tl.load(pointer, mask=mask, other=0.0)
    half = tl.load(pointer, mask=mask, other=0).to(tl.int32) & 0xFFFF
    if FROM == 1:
        return (half << 16).to(tl.float32, bitcast=True)
    sign, exponent, mantissa = (half & 0x8000) << 16, (half >> 10) & 31, half & 0x3FF
    small = bits_of(mantissa.to(tl.float32) * 2.0**-24)
    special = INF_BITS | (mantissa << 13) | tl.where(mantissa > 0, 0x00400000, 0)
    bits = tl.where(exponent == 31, special, ((exponent + 112) << 23) | (mantissa << 13))
    bits = tl.where(exponent == 0, small, bits)
    return (sign | bits).to(tl.float32, bitcast=True)


@triton.jit
def column(segments, row, number: tl.constexpr):
    return tl.load(segments + row * COLUMN_COUNT + number)


@triton.jit
def store_as(pointer, x, mask, OUT: tl.constexpr):
    """Store float32 unchanged (OUT 0), or rounded to nearest even as the bits of bfloat16 (1) or
    float16 (2); return whether the stored value is not finite.
    """
    x = canonical(x)
    bits = bits_of(x)
    if OUT == 0:
        tl.store(pointer, x, mask=mask)
        special = (bits & ABS) >= INF_BITS
    elif OUT == 1:
        word = bits.to(tl.uint32, bitcast=True)
        half = ((word + 0x7FFF + ((word >> 16) & 1)) >> 16).to(tl.int32)
        half = tl.where(is_nan(x), 0x7FC0, half)
        tl.store(pointer, half.to(tl.int16), mask=mask)
        special = (half & 0x7F80) == 0x7F80
    else:
        magnitude = bits & ABS
        sign = (bits >> 16) & 0x8000
        small = (
            (magnitude.to(tl.float32, bitcast=True) + 0.5).to(tl.int32, bitcast=True)
        ) - 0x3F000000
        large = ((magnitude + 0xFFF + ((magnitude >> 13) & 1)) >> 13) - (112 << 10)
        half = tl.where(magnitude < 0x38800000, small, large)
        half = tl.where(magnitude >= 0x477FF000, 0x7C00, half)
        half = tl.where(is_nan(x), 0x7E00, sign | half)
        tl.store(pointer, half.to(tl.int16), mask=mask)
        special = (half & 0x7C00) == 0x7C00
    return special & mask


# ---- statistics ----------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["values", "old"])
def add_blocks(
    values,
    old,
    blocks,
    count,
    sums,
    counts,
    FROM: tl.constexpr,
    KIND: tl.constexpr,
    HAS_OLD: tl.constexpr,
    B: tl.constexpr,
):
    """Write the sums of B blocks per program.

    blocks: ``(count, 3)``: first element in `values`, in `old`, number of elements. sums: ``(2,
    count)`` float64: sums of squares, or of x by class, or of x and of squares. counts: ``(3,
    count)``: largest bits of |x| and of |g|, number of elements with x > 0.
    """
    b = tl.program_id(0) * B + tl.arange(0, B)
    live = b < count
    data = tl.load(blocks + 3 * b, mask=live, other=0)
    residual = tl.load(blocks + 3 * b + 1, mask=live, other=0)
    numel = tl.load(blocks + 3 * b + 2, mask=live, other=0)
    lane = tl.arange(0, LANES)
    first = tl.zeros((B, LANES), tl.float64)
    second = tl.zeros((B, LANES), tl.float64)
    largest = tl.zeros((B, LANES), tl.int32)
    gradient = tl.zeros((B, LANES), tl.int32)
    above = tl.zeros((B, LANES), tl.int32)
    for i in range(0, BLOCK, LANES):
        j = i + lane
        mask = live[:, None] & (j[None, :] < numel[:, None])
        g = load_float(values + data[:, None] + j[None, :], mask, FROM)
        x = g
        if HAS_OLD:
            x = g + tl.load(old + residual[:, None] + j[None, :], mask=mask, other=0.0)
        largest = tl.maximum(largest, bits_of(x) & ABS)
        gradient = tl.maximum(gradient, bits_of(g) & ABS)
        wide = x.to(tl.float64)
        if KIND == CLASSES:
            first += tl.where(x > 0, 0.0, wide)
            second += tl.where(x > 0, wide, 0.0)
            above += (x > 0).to(tl.int32)
        if KIND == SQUARES:
            first += wide * wide
        if KIND == MOMENTS:
            first += wide
            second += wide * wide
    tl.store(sums + b, lanes_total(first, B), mask=live)
    tl.store(sums + count + b, lanes_total(second, B), mask=live)
    tl.store(counts + b, tl.max(largest, axis=1), mask=live)
    tl.store(counts + count + b, tl.max(gradient, axis=1), mask=live)
    tl.store(counts + 2 * count + b, tl.sum(above, axis=1), mask=live)


@triton.jit(do_not_specialize=["parts", "count", "most"])
def add_in_order(sums, counts, parts, spans, count, most, into_sums, into_counts, B: tl.constexpr):
    """Write the sums of spans of `parts` sums, added in order. spans: ``(count, 2)``, first entry
    and length of each, at most `most`.
    """
    b = tl.program_id(0) * B + tl.arange(0, B)
    live = b < count
    start = tl.load(spans + 2 * b, mask=live, other=0)
    numel = tl.load(spans + 2 * b + 1, mask=live, other=0)
    first = tl.zeros((B,), tl.float64)
    second = tl.zeros((B,), tl.float64)
    largest = tl.zeros((B,), tl.int32)
    gradient = tl.zeros((B,), tl.int32)
    above = tl.zeros((B,), tl.int32)
    for i in range(most):
        mask = live & (i < numel)
        at = start + i
        first += tl.load(sums + at, mask=mask, other=0.0)
        second += tl.load(sums + parts + at, mask=mask, other=0.0)
        largest = tl.maximum(largest, tl.load(counts + at, mask=mask, other=0))
        gradient = tl.maximum(gradient, tl.load(counts + parts + at, mask=mask, other=0))
        above += tl.load(counts + 2 * parts + at, mask=mask, other=0)
    tl.store(into_sums + b, first, mask=live)
    tl.store(into_sums + count + b, second, mask=live)
    tl.store(into_counts + b, largest, mask=live)
    tl.store(into_counts + count + b, gradient, mask=live)
    tl.store(into_counts + 2 * count + b, above, mask=live)


@triton.jit(do_not_specialize=["count"])
def measure_scales(
    sums,
    counts,
    numels,
    count,
    step,
    zero,
    most,
    mean0,
    mean1,
    scales,
    flag,
    KIND: tl.constexpr,
    OF_SQUARES: tl.constexpr,
    HAS_MEANS: tl.constexpr,
    B: tl.constexpr,
):
    """Write the scale of every group, or the two means of SIGNS; flag groups that are not finite.

    step: one float64, the scale in root mean squares if OF_SQUARES; zero: the divisor of the
    largest |x| otherwise; most: largest scale.
    """
    b = tl.program_id(0) * B + tl.arange(0, B)
    live = b < count
    largest = tl.load(counts + b, mask=live, other=0)
    gradient = tl.load(counts + count + b, mask=live, other=0)
    numel = tl.load(numels + b, mask=live, other=1)
    special = live & (largest >= INF_BITS)
    tl.store(flag + b * 0, tl.full((B,), 1, tl.int32), mask=special)
    first = tl.load(sums + b, mask=live, other=0.0)
    if KIND == SIGNS:
        second = tl.load(sums + count + b, mask=live, other=0.0)
        above = tl.load(counts + 2 * count + b, mask=live, other=0)
        below = numel - above
        if HAS_MEANS:
            low, high = tl.where(live, mean0, mean0), tl.where(live, mean1, mean1)
        else:
            low = (first / tl.where(below > 0, below, 1).to(tl.float64)).to(tl.float32)
            high = (second / tl.where(above > 0, above, 1).to(tl.float64)).to(tl.float32)
            low = tl.where(below > 0, canonical(low), 0.0)
            high = tl.where(above > 0, canonical(high), 0.0)
        tl.store(scales + 2 * b, tl.where(gradient == 0, 0.0, low), mask=live)
        tl.store(scales + 2 * b + 1, tl.where(gradient == 0, 0.0, high), mask=live)
    else:
        if OF_SQUARES:
            scale = (tl.load(step) * tl.sqrt(first / numel.to(tl.float64))).to(tl.float32)
        else:
            finite = tl.where(special, 0, largest)
            scale = tl.div_rn(finite.to(tl.float32, bitcast=True), zero)
        unused = (gradient == 0) | (scale < SMALLEST)
        scale = tl.where(unused, 0.0, tl.where(scale < most, scale, most))
        tl.store(scales + b, tl.where(special, nan_like(scale), scale), mask=live)


# ---- encoding ------------------------------------------------------------------------------------
@triton.jit
def packed(code, BITS: tl.constexpr, E: tl.constexpr):
    """Pack ``(E,)`` codes into bytes, the first code in the lowest bits."""
    PER: tl.constexpr = 8 // BITS
    if PER == 1:
        return code.to(tl.uint8)
    shift = (tl.arange(0, PER) * BITS)[None, :]
    return tl.sum(tl.reshape(code, (E // PER, PER)) << shift, axis=1).to(tl.uint8)


@triton.jit
def store_codes(codes, code, first, numel, BITS: tl.constexpr, E: tl.constexpr):
    PER: tl.constexpr = 8 // BITS
    byte = first // PER + tl.arange(0, E // PER)
    tl.store(codes + byte, packed(code, BITS, E), mask=byte * PER < numel)


@triton.jit
def group_of(segments, row, i):
    """Return the group numbers of elements of a segment."""
    cut, size = column(segments, row, 4), column(segments, row, 6)
    return column(segments, row, 7) + ((cut + i).to(tl.uint32) // size.to(tl.uint32)).to(tl.int64)


@triton.jit(do_not_specialize_on_alignment=["values", "old", "new", "kept"])
def encode_codes(
    values,
    old,
    new,
    kept,
    chunks,
    segments,
    scales,
    codes,
    dropped,
    decay,
    zero,
    FROM: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    PADDING: tl.constexpr,
    HAS_OLD: tl.constexpr,
    HAS_NEW: tl.constexpr,
    KEEPS: tl.constexpr,
    COUNTS: tl.constexpr,
    E: tl.constexpr,
):
    """Write the codes of a chunk, its new residuals, and the sum of |error|."""
    chunk = tl.program_id(0)
    row, first = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    numel, plane = column(segments, row, 5), column(segments, row, 1)
    i = first + tl.arange(0, E)
    live = i < numel
    x = load_float(values + column(segments, row, 0) + i, live, FROM)
    if HAS_OLD:
        residual = tl.load(old + plane + i, mask=live, other=0.0)
        if KEEPS:
            tl.store(kept + plane + i, residual, mask=live)
        x = x + residual
    group = group_of(segments, row, i)
    if KIND == SIGNS:
        bit = x > 0
        code = bit.to(tl.int32)
        value = tl.load(scales + 2 * group + code, mask=live, other=0.0)
    else:
        scale = tl.load(scales + group, mask=live, other=0.0)
        known = scale > 0  # not 0, not NaN
        if KIND == NEAREST:
            half = tl.where(known, scale * 0.5, float("inf"))
            code = 1 + (x > half).to(tl.int32) - (x < -half).to(tl.int32)
            value = (code.to(tl.float32) - 1.0) * scale
        else:
            inverse = tl.where(known, tl.div_rn(1.0, tl.where(known, scale, 1.0)), 0.0)
            t = x * inverse + zero
            t = tl.where(t > 0, t, 0.0)
            t = tl.where(t < 2 * zero, t, 2 * zero)
            code = bits_of(t + MAGIC) & 0xFF
            value = (code.to(tl.float32) - zero) * scale
    store_codes(
        codes + column(segments, row, 2), tl.where(live, code, PADDING), first, numel, BITS, E
    )
    left = x - value
    if HAS_NEW:
        tl.store(new + plane + i, tl.where(is_nan(left), nan_like(left), decay * left), mask=live)
    if COUNTS:
        tl.store(dropped + chunk, tl.sum(tl.where(live, tl.abs(left), 0.0).to(tl.float64)))


@triton.jit(do_not_specialize_on_alignment=["values"])
def draw_codes(
    values,
    chunks,
    segments,
    scales,
    codes,
    words,
    flag,
    FROM: tl.constexpr,
    E: tl.constexpr,
):
    """Write random ternary codes of a chunk (Wen et al. 2017, equations 3 and 4). words: int64,
    seed and rank in one word, step, stream.
    """
    seed = tl.load(words)
    step, stream = tl.load(words + 1).to(tl.uint32), tl.load(words + 2).to(tl.uint32)
    chunk = tl.program_id(0)
    row, first = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    numel = column(segments, row, 5)
    i = first + tl.arange(0, E)
    live = i < numel
    x = load_float(values + column(segments, row, 0) + i, live, FROM)
    scale = tl.load(scales + group_of(segments, row, i), mask=live, other=0.0)
    known = scale > 0
    p = tl.div_rn(tl.abs(x), tl.where(known, scale, 1.0))
    element = (column(segments, row, 3) + i).to(tl.uint32)
    parameter = (element * 0) + column(segments, row, 8).to(tl.uint32)
    steps = (element * 0) + step
    block = element // 64 * 8 + element % 8
    c0, c1, c2, c3 = tl.philox(seed, block, parameter, steps, element * 0 + stream)
    which = element % 64 // 16
    word = tl.where(which == 0, c0, tl.where(which == 1, c1, tl.where(which == 2, c2, c3)))
    draw = tl.where(element // 8 % 2 == 0, word & 0xFFFF, word >> 16)
    inside = p < 1
    t = tl.where(inside, p, 0.0) * 65536.0
    threshold = t.to(tl.uint32)
    taken = draw < threshold
    tie = (draw == threshold) & inside & known & live
    if tl.max(tie.to(tl.int32)) > 0:
        deep = element * 0 + (stream | 0x80000000)
        d0, d1, d2, d3 = tl.philox(seed, element // 4, parameter, steps, deep)
        which = element % 4
        word = tl.where(which == 0, d0, tl.where(which == 1, d1, tl.where(which == 2, d2, d3)))
        rest = (t - threshold.to(tl.float32)) * 4294967296.0
        taken = taken | (tie & (word < rest.to(tl.uint32)))
    taken = (taken & inside) | (p >= 1)
    sign = tl.where(bits_of(x) < 0, 0, 2)
    code = tl.where(known & taken & live, sign, 1)
    store_codes(codes + column(segments, row, 2), code, first, numel, 2, E)
    special = live & ((bits_of(x) & ABS) >= INF_BITS)
    tl.store(flag + i * 0, tl.full((E,), 1, tl.int32), mask=special)


@triton.jit(do_not_specialize_on_alignment=["values"])
def encode_values(
    values,
    chunks,
    segments,
    codes,
    flag,
    FROM: tl.constexpr,
    WIDE: tl.constexpr,
    E: tl.constexpr,
):
    """Write the values of a chunk as float32 (WIDE) or bfloat16 to the words of a payload."""
    chunk = tl.program_id(0)
    row, first = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    i = first + tl.arange(0, E)
    live = i < column(segments, row, 5)
    bits = bits_of(load_float(values + column(segments, row, 0) + i, live, FROM))
    place = codes + column(segments, row, 2)
    if WIDE:
        tl.store(place.to(tl.pointer_type(tl.int32)) + i, bits, mask=live)
        special = (bits & ABS) >= INF_BITS
    else:
        word = bits.to(tl.uint32, bitcast=True)
        half = ((word + 0x7FFF + ((word >> 16) & 1)) >> 16).to(tl.int32)
        half = tl.where((bits & ABS) > INF_BITS, ((word >> 16) | 0x40).to(tl.int32), half)
        tl.store(place.to(tl.pointer_type(tl.int16)) + i, half.to(tl.int16), mask=live)
        special = (half & 0x7F80) == 0x7F80
    tl.store(flag + i * 0, tl.full((E,), 1, tl.int32), mask=live & special)


# ---- averages ------------------------------------------------------------------------------------
@triton.jit
def code_at(codes, i, live, BITS: tl.constexpr):
    bit = i * BITS
    byte = tl.load(codes + bit // 8, mask=live, other=0).to(tl.int32)
    return (byte >> (bit % 8).to(tl.int32)) & ((1 << BITS) - 1)


@triton.jit
def decoded(
    payload,
    read,
    scales,
    place,
    element,
    group,
    i,
    live,
    zero,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
):
    """Return the decoded values of elements from one payload."""
    # a single return, because Triton also compiles the code after a branch that returns
    codes = payload + place
    table = (payload + scales).to(tl.pointer_type(tl.float32))
    if KIND == PLAIN and BITS == 32:
        value = tl.load(codes.to(tl.pointer_type(tl.float32)) + i, mask=live, other=0.0)
    elif KIND == PLAIN:
        half = tl.load(codes.to(tl.pointer_type(tl.int16)) + i, mask=live, other=0)
        value = (half.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif KIND == ENTROPY:
        number = tl.load(read + element + i, mask=live, other=0)
        value = number.to(tl.float32) * tl.load(table + group, mask=live, other=0.0)
    elif KIND == SIGNS:
        code = code_at(codes, i, live, BITS)
        value = tl.load(table + 2 * group + code, mask=live, other=0.0)
    else:
        code = code_at(codes, i, live, BITS)
        scale = tl.load(table + group, mask=live, other=0.0)
        value = (code.to(tl.float32) - zero) * scale
    return value


@triton.jit(
    do_not_specialize=["stride", "total", "count", "scales", "codes"],
    do_not_specialize_on_alignment=["out"],
)
def decode_average(
    payloads,
    stride,
    read,
    total,
    count,
    scales,
    codes,
    chunks,
    segments,
    out,
    factor,
    zero,
    flag,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    OUT: tl.constexpr,
    E: tl.constexpr,
):
    """Write averages of `count` payloads, `stride` bytes apart, with scales and codes from bytes
    `scales` and `codes` on. read: codes of streams (`streams.read_streams`), `total` per payload.
    """
    chunk = tl.program_id(0)
    row, first = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    i = first + tl.arange(0, E)
    live = i < column(segments, row, 5)
    place = codes + column(segments, row, 2)
    element = column(segments, row, 9)
    group = i
    if KIND != PLAIN:
        group = group_of(segments, row, i)
    if KIND == SHARED or KIND == LANE_SUMS:
        table = (payloads + scales).to(tl.pointer_type(tl.float32))
        step = tl.div_rn(tl.load(table + group, mask=live, other=0.0), zero)
        total = tl.zeros((E,), tl.int32)
        if KIND == SHARED:
            for p in range(count):
                total += code_at(payloads + tl.cast(p, tl.int64) * stride + place, i, live, 2) - 1
        else:
            bit = i * BITS
            at = payloads + place + bit // 8
            shift = (bit % 8).to(tl.int32)
            last = (shift + BITS - 1) // 8
            window = tl.load(at, mask=live, other=0).to(tl.int32)
            more = tl.load(at + 1, mask=live & (last >= 1), other=0).to(tl.int32)
            most = tl.load(at + 2, mask=live & (last >= 2), other=0).to(tl.int32)
            window = window | (more << 8) | (most << 16)
            total = ((window >> shift) & ((1 << BITS) - 1)) - count
        mean = step * total.to(tl.float32)
    else:
        mean = decoded(payloads, read, scales, place, element, group, i, live, zero, KIND, BITS)
        for p in range(1, count):
            there, at = payloads + tl.cast(p, tl.int64) * stride, element
            if KIND == ENTROPY:
                at = element + tl.cast(p, tl.int64) * total
            mean = mean + decoded(there, read, scales, place, at, group, i, live, zero, KIND, BITS)
        mean = mean * factor
    special = store_as(out + column(segments, row, 0) + i, mean, live, OUT)
    tl.store(flag + i * 0, tl.full((E,), 1, tl.int32), mask=special)
