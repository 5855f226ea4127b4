"""Triton kernels of entropy-coded streams: entropy_encode.c and entropy_read.h on a device.

A program encodes one stream: it searches for the step, then adds the bits of all pairs to zeroed
memory. To decode, every lane reads half a stream, and `programs.decode_average` converts the codes
to values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gradcomp.kernels.cuda.plan import STREAM_COLUMNS
from gradcomp.kernels.cuda.programs import (
    INF_BITS,
    MAGIC,
    SMALLEST,
    bits_of,
    is_nan,
    load_float,
    nan_like,
)

STREAM_COLUMN_COUNT = tl.constexpr(len(STREAM_COLUMNS))
MAGIC_BITS = tl.constexpr(0x4B400000)
LARGEST_CODE = tl.constexpr(32767)
LARGEST_STEP = tl.constexpr(((2 - 2.0**-23) * 2.0**127) / 32768)
STREAM = tl.constexpr(4096)
STEPS = tl.constexpr(256)
SAMPLE_EVERY = tl.constexpr(512)
SAMPLED = tl.constexpr(128)
ZEROS_TABLE = tl.constexpr(7)


# ---- the step ------------------------------------------------------------------------------------
@triton.jit
def rounded(x, inverse):
    """Return the code of x, rounded to nearest even."""
    t = x * inverse
    t = tl.where(t > -LARGEST_CODE, t, -1.0 * LARGEST_CODE)
    t = tl.where(t < LARGEST_CODE, t, 1.0 * LARGEST_CODE)
    return bits_of(t + MAGIC) - MAGIC_BITS


@triton.jit
def step_of(rms, j, octave):
    """Return step j, 2^(j / 32 - 4) root mean squares."""
    step = rms * tl.load(octave + j % 32)
    step = step * ((1 << (j // 32)).to(tl.float64) / 16)
    return tl.where(step < LARGEST_STEP, step, LARGEST_STEP).to(tl.float32)


@triton.jit
def choice_at(x, i, numel, rms, j, octave, costs, pair_costs, PART: tl.constexpr):
    """Return the scale of step j, the best table for the first PART of every 512 codes, and the
    size of these codes in 1/64 bit.
    """
    scale = step_of(rms, j, octave)
    code = tl.abs(rounded(x, tl.div_rn(1.0, scale)))
    counted = (i < numel) & (i % SAMPLE_EVERY < PART)
    counts = tl.histogram(tl.where(counted, tl.minimum(code, 8), 15), 16)
    k = tl.arange(0, 16)
    counts = tl.where(k < 9, counts, 0)
    at = k[:, None] * 16 + k[None, :]
    known = k[:, None] + 0 * k[None, :] < 9
    cost = tl.load(costs + at, mask=known, other=0)
    table = tl.argmin(tl.sum(counts[:, None] * cost, axis=0), axis=0)
    cost = tl.load(pair_costs + table * 144 + at, mask=known, other=0)
    size = tl.sum(counts.to(tl.int64) * tl.sum(counts[:, None] * cost, axis=0).to(tl.int64), axis=0)
    return scale, table, size // (2 * tl.sum(counts, axis=0).to(tl.int64))


@triton.jit
def divided(a, b):
    """Return a / b rounded towards 0, for b > 0."""
    return tl.where(a < 0, -(-a // b), a // b)


@triton.jit
def search(
    x, i, numel, rms, limit, j, octave, costs, pair_costs, WASTE: tl.constexpr, PART: tl.constexpr
):
    """Search from step j for the smallest step whose codes are expected to need at most `limit`, or
    a slightly larger one (search in entropy_encode.c). Return step, scale, table, size.
    """
    slope = numel // (SAMPLE_EVERY // PART) * 3 // 2
    limit = divided(limit, SAMPLE_EVERY // PART)
    low, high = j * 0 - 1, j * 0 + STEPS
    excess, spare = limit * 0, limit * 0
    found_scale = (rms * 0).to(tl.float32)
    found_table = (j * 0).to(tl.int32)
    found_size = limit * 0
    looks = j * 0
    going = looks == 0
    while going:
        scale, table, size = choice_at(x, i, numel, rms, j, octave, costs, pair_costs, PART)
        fits = size <= limit
        low = tl.where(fits, low, j)
        high = tl.where(fits, j, high)
        excess = tl.where(fits, excess, size - limit)
        spare = tl.where(fits, limit - size, spare)
        found_scale = tl.where(fits, scale, found_scale)
        found_table = tl.where(fits, table, found_table)
        found_size = tl.where(fits, size, found_size)
        looks += 1
        ends = fits & (spare < WASTE * slope)
        upwards = low + 1 + excess // slope
        downwards = high - 1 - spare // slope
        both = spare + excess
        between = high - spare * (high - low) // tl.where(both > 0, both, 1)
        j = tl.where(high == STEPS, upwards, tl.where(low < 0, downwards, between))
        outside = (j <= low) | (j >= high)
        middle = (low + high) // 2
        nearer = tl.where(j <= low, low + 1, high - 1)
        inside = tl.where((low < 0) | (high == STEPS), middle, nearer)
        j = tl.where(outside, inside, j)
        going = (looks < 8) & (j != low) & (j != high) & (ends == 0)
    j = high
    if high == STEPS:
        j = tl.minimum(low + 16, STEPS - 1)
        found_scale, found_table, found_size = choice_at(
            x, i, numel, rms, j, octave, costs, pair_costs, PART
        )
    return j, found_scale, found_table.to(tl.int32), found_size


@triton.jit
def find_step(x, i, numel, rms, limit, j, octave, costs, pair_costs):
    if numel == STREAM:
        j, _, _, _ = search(x, i, numel, rms, limit, j, octave, costs, pair_costs, 2, SAMPLED)
    return search(x, i, numel, rms, limit, j, octave, costs, pair_costs, 1, SAMPLE_EVERY)


# ---- pairs ---------------------------------------------------------------------------------------
@triton.jit
def bit_length(x):
    """Return the bit length of 0 <= x < 2^24."""
    exponent = (bits_of(x.to(tl.float32)) >> 23) - 126
    return tl.where(x > 0, exponent, 0)


@triton.jit
def pairs_of(x, i, numel, scale, table, symbols, tops):
    """Return the bits of pairs of codes, least significant first, and the numbers of bits."""
    code = tl.where(i < numel, rounded(x, tl.div_rn(1.0, scale)), 0)
    a, b = tl.split(tl.reshape(code, (STREAM // 2, 2)))
    far, other = tl.abs(a), tl.abs(b)
    index = tl.where((far > 7) | (other > 7), 0, (a + 8) * 16 + b + 8)
    symbol = tl.load(symbols + table * 256 + index)
    top = tl.load(tops + table)
    escaped = (far > top) | (other > top)
    length = symbol >> 16
    bits = (symbol & 0xFFFF).to(tl.int64)
    long_a, long_b = bit_length(far), bit_length(other)
    rest_a = ((far & ((1 << tl.maximum(long_a - 1, 0)) - 1)) << 1) | (a < 0).to(tl.int32)
    rest_b = ((other & ((1 << tl.maximum(long_b - 1, 0)) - 1)) << 1) | (b < 0).to(tl.int32)
    more = (long_a | (rest_a << 4)).to(tl.int64)
    last = (long_b | (rest_b << 4)).to(tl.int64)
    more = more | (last << (4 + long_a).to(tl.int64))
    bits = tl.where(escaped, bits | (more << length.to(tl.int64)), bits)
    length = tl.where(escaped, length + 8 + long_a + long_b, length)
    pair = tl.arange(0, STREAM // 2)
    return bits, tl.where(pair < (numel + 1) // 2, length, 0)


@triton.jit
def nbytes_of(length, numel):
    """Return the bytes of pairs of `length` bits: one for the table, and those of both halves."""
    ahead = tl.arange(0, STREAM // 2) < ((numel + 1) // 2 + 1) // 2
    head, every = tl.sum(tl.where(ahead, length, 0), axis=0), tl.sum(length, axis=0)
    return 1 + (head + 7) // 8 + (every - head + 7) // 8


@triton.jit
def put_word(words, at, part, mask):
    """Add 32 bits to zeroed memory."""
    part = part.to(tl.uint32).to(tl.int32, bitcast=True)
    tl.atomic_or(words + at, part, mask=mask & (part != 0), sem="relaxed")


@triton.jit
def put_bits(words, place, bits, mask):
    """Add 64 bits to zeroed memory from bit `place` on; bits before the start of the memory must be
    0. If `place` is no multiple of 8, only 56 bits may be set.
    """
    shift = (place % 32 + 32) % 32
    word = (place - shift) // 32
    bits, up = bits.to(tl.uint64, bitcast=True), shift.to(tl.uint64)
    moved = bits << up
    put_word(words, word, moved & 0xFFFFFFFF, mask)
    put_word(words, word + 1, moved >> 32, mask)
    over = tl.where(shift > 0, bits >> (64 - tl.maximum(up, 1)), 0)
    put_word(words, word + 2, over, mask)


@triton.jit
def swapped(x):
    """Return 64-bit words with their bytes in reverse order."""
    x = x.to(tl.uint64, bitcast=True)
    x = ((x & 0x00FF00FF00FF00FF) << 8) | ((x >> 8) & 0x00FF00FF00FF00FF)
    x = ((x & 0x0000FFFF0000FFFF) << 16) | ((x >> 16) & 0x0000FFFF0000FFFF)
    return (x << 32) | (x >> 32)


# ---- a stream ------------------------------------------------------------------------------------
@triton.jit(
    do_not_specialize=["count"], do_not_specialize_on_alignment=["values", "old", "new", "kept"]
)
def encode_streams(
    values,
    old,
    new,
    kept,
    streams,
    count,
    sums,
    counts,
    octave,
    costs,
    pair_costs,
    symbols,
    tops,
    scales,
    words,
    dropped,
    flag,
    decay,
    FROM: tl.constexpr,
    HAS_OLD: tl.constexpr,
    HAS_NEW: tl.constexpr,
    KEEPS: tl.constexpr,
    COUNTS: tl.constexpr,
):
    """Encode one stream with the smallest step whose codes fit; write its new residuals, and the
    sum of |error|.

    sums, counts: those of the groups (`add_in_order`). words: packed memory, with zeroed codes.
    """
    stream = tl.program_id(0)
    row = streams + stream * STREAM_COLUMN_COUNT
    plane, numel = tl.load(row + 1), tl.load(row + 2)
    place, nbytes = tl.load(row + 3), tl.load(row + 4)
    i = tl.arange(0, STREAM)
    live = i < numel
    x = load_float(values + tl.load(row) + i, live, FROM)
    if HAS_OLD:
        residual = tl.load(old + plane + i, mask=live, other=0.0)
        if KEEPS:
            tl.store(kept + plane + i, residual, mask=live)
        x = x + residual
    special = tl.load(counts + stream) >= INF_BITS
    rms = tl.sqrt(tl.load(sums + stream) / numel.to(tl.float64))
    used = (special == 0) & (tl.load(counts + count + stream) > 0)
    used = used & (step_of(rms, numel * 0, octave) >= SMALLEST)
    scale = (rms * 0).to(tl.float32)
    if special:
        scale = nan_like(scale)
        tl.store(flag, 1)
    table = (numel * 0 + ZEROS_TABLE).to(tl.int32)
    if used:
        # rounding to whole bytes wastes at most seven bits, in each half
        limit = (8 * (nbytes - 1) - 8) * 64
        j, scale, table, size = find_step(
            x, i, numel, rms, limit, tl.load(row + 6), octave, costs, pair_costs
        )
        bits, length = pairs_of(x, i, numel, scale, table, symbols, tops)
        needed = nbytes_of(length, numel).to(tl.int64)
        if (needed > nbytes) | ((nbytes - needed) * 512 > numel * 4):
            limit = limit + size - (needed - 1) * 512
            j, scale, table, size = find_step(
                x, i, numel, rms, limit, tl.load(row + 6), octave, costs, pair_costs
            )
            bits, length = pairs_of(x, i, numel, scale, table, symbols, tops)
            needed = nbytes_of(length, numel).to(tl.int64)
        while (needed > nbytes) & (j < STEPS - 1):
            j += 1
            scale, chosen, size = choice_at(
                x, i, numel, rms, j, octave, costs, pair_costs, SAMPLE_EVERY
            )
            table = chosen.to(tl.int32)
            bits, length = pairs_of(x, i, numel, scale, table, symbols, tops)
            needed = nbytes_of(length, numel).to(tl.int64)
        if needed <= nbytes:
            pair = tl.arange(0, STREAM // 2)
            pairs = (numel + 1) // 2
            ahead = pair < (pairs + 1) // 2
            before = (tl.cumsum(length, axis=0) - length).to(tl.int64)
            put_bits(words, 8 * (place + 1) + before, bits, ahead)
            before -= tl.sum(tl.where(ahead, length, 0), axis=0)
            moved = bits << (before % 8)
            end = 8 * (place + nbytes - 8 - before // 8)
            behind = (ahead == 0) & (pair < pairs)
            put_bits(words, end, swapped(moved), behind)
        else:
            scale = scale * 0
            table = table * 0 + ZEROS_TABLE
    tl.store(scales + stream, scale)
    tl.atomic_or(words + place // 4, table << (place % 4 * 8).to(tl.int32), sem="relaxed")
    if HAS_NEW or COUNTS:
        known = scale > 0
        code = rounded(x, tl.where(known, tl.div_rn(1.0, tl.where(known, scale, 1.0)), 0.0))
        left = x - code.to(tl.float32) * scale
        if HAS_NEW:
            kept_of = tl.where(is_nan(scale), nan_like(left), decay * left)
            tl.store(new + plane + i, kept_of, mask=live)
        if COUNTS:
            tl.store(dropped + stream, tl.sum(tl.where(live, tl.abs(left), 0.0).to(tl.float64)))


# ---- decoding ------------------------------------------------------------------------------------
@triton.jit
def escaped_code(word):
    """Return the code after an escape symbol, and its number of bits."""
    length = (word & 15).to(tl.int32)
    below = (word >> 5).to(tl.int32) & ((1 << tl.maximum(length - 1, 0)) - 1)
    magnitude = tl.where(length > 0, (1 << tl.maximum(length - 1, 0)) | below, 0)
    return tl.where((word & 16) != 0, -magnitude, magnitude), 4 + length


@triton.jit
def next_bytes(codes, at, nbytes, backwards, mask, COUNT: tl.constexpr):
    """Return COUNT bytes from byte `at` on, counted from the stream's start, or from its end if
    `backwards`; 0 beyond the stream.
    """
    word = at * 0
    for b in tl.static_range(COUNT):
        where = tl.where(backwards, nbytes - 1 - at - b, 1 + at + b)
        byte = tl.load(codes + where, mask=mask & (at + b < nbytes - 1), other=0)
        word = word | (byte.to(tl.int64) << (8 * b))
    return word


@triton.jit(do_not_specialize=["stride", "count", "payload_count", "total"])
def read_streams(
    payloads, stride, streams, count, payload_count, read, total, decode, B: tl.constexpr
):
    """Decode streams to codes: every lane reads half a stream, pair by pair.

    read: ``(payload_count, total)`` int16. decode: ``(16, 2048)``, pairs by the next 11 bits.
    """
    lane = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    live = lane < 2 * count * payload_count
    payload, rest = lane // (2 * count), lane % (2 * count)
    row = streams + rest // 2 * STREAM_COLUMN_COUNT
    backwards = rest % 2 == 1
    numel = tl.load(row + 2, mask=live, other=0)
    start = payload * stride + tl.load(row + 3, mask=live, other=0)
    nbytes = tl.load(row + 4, mask=live, other=1)
    into = payload * total + tl.load(row + 5, mask=live, other=0)
    table = tl.load(payloads + start, mask=live, other=0).to(tl.int64) % 16 * 2048
    pairs = (numel + 1) // 2
    front = (pairs + 1) // 2
    first = tl.where(backwards, front, 0)
    wanted = tl.where(backwards, pairs - front, front)
    place = lane * 0
    for k in range(tl.max(tl.where(live, wanted, 0), axis=0).to(tl.int32)):
        on = live & (k < wanted)
        word = next_bytes(payloads + start, place // 8, nbytes, backwards, on, 3) >> (place % 8)
        found = tl.load(decode + table + (word & 2047), mask=on, other=0)
        length = (found >> 16) & 15
        a, b = found << 24 >> 24, found << 16 >> 24
        escaped = (found >> 24) > 0
        if tl.max(escaped.to(tl.int32), axis=0) > 0:
            word = next_bytes(payloads + start, place // 8, nbytes, backwards, on & escaped, 7)
            word = word >> (place % 8 + length)
            far, more = escaped_code(word)
            other, last = escaped_code(word >> more.to(tl.int64))
            a, b = tl.where(escaped, far, a), tl.where(escaped, other, b)
            length = tl.where(escaped, length + more + last, length)
        one = 2 * (first + k)
        tl.store(read + into + one, a.to(tl.int16), mask=on & (one < numel))
        tl.store(read + into + one + 1, b.to(tl.int16), mask=on & (one + 1 < numel))
        place += length
