"""The arithmetic of gradcomp in NumPy, written to be read: what every C kernel must equal.

It shares no line with the C backend and no trick for speed. ``native/include/gradcomp.h`` states
the same rules for C, docs/reference/wire-format.md draws the bytes, and `reference.payload` puts
them together.

Everywhere: *source* arrays are flat, float32, float16, or uint16 with bfloat16 bit patterns (NumPy
has no bfloat16); scales are float32 in units of the gradient; elements are numbered from the start
of their parameter; packed codes are uint8; ``piece`` says which elements of a parameter an array
holds. NaN and Inf pass through (only NumPy's warnings are off) and set a flag in the header.
References: Wen et al. 2017, "TernGrad"; Seide et al. 2014, "1-bit stochastic gradient descent";
Salmon et al. 2011.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

F32, BF16, F16 = 0, 1, 2  # source dtypes, as in the header
SOURCE_DTYPES = {"float32": F32, "uint16": BF16, "float16": F16}  # by NumPy dtype
BLOCK_NUMEL, SUM_LANES = 512, 16
BLOCK = np.dtype(
    [("sum", "<f8"), ("sum_squares", "<f8"), ("absmax_bits", "<u4"), ("reserved", "<u4")]
)

Array = NDArray[Any]
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]


class Key(NamedTuple):
    """The random numbers of an encoding, as in `RngKey`; uint32 each, stream below 2**31."""

    seed: int = 0
    rank: int = 0
    step: int = 0
    parameter: int = 0
    stream: int = 0


class Piece(NamedTuple):
    """Elements [start, start + numel) of a parameter with a scale every group_numel elements."""

    numel: int
    group_numel: int
    start: int = 0

    @property
    def elements(self) -> Ints:
        """Numbers of the piece's elements within the parameter, `(numel,)`."""
        return np.arange(self.start, self.start + self.numel, dtype=np.int64)

    @property
    def group_of(self) -> Ints:
        """For each element the number of its scale among the piece's scales, `(numel,)`."""
        return self.elements // self.group_numel - self.start // self.group_numel

    def groups(self) -> list[slice]:
        """Return the piece's groups, cut to the piece, as slices of its elements."""
        edges = [0, *(np.flatnonzero(np.diff(self.group_of)) + 1).tolist(), self.numel]
        return [slice(a, b) for a, b in itertools.pairwise(edges) if a < b]


# ---- dtypes --------------------------------------------------------------------------------------
def to_float32(x: Array) -> Floats:
    """Widen a source array to float32, exactly; a float16 NaN becomes a quiet one."""
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << 16).view(np.float32)
    wide = x.astype(np.float32)
    if x.dtype == np.float16:
        wide.view(np.uint32)[np.isnan(x)] |= 0x00400000
    return wide


@np.errstate(all="ignore")
def from_float32(values: Floats, dtype: int) -> Array:
    """Round float32 values to `dtype`, nearest even; a NaN stays a NaN (any of them)."""
    if dtype != BF16:
        return values.astype(np.float16 if dtype == F16 else np.float32)
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> 16 & 1) >> 16  # a carry stops at Inf
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)


# ---- random numbers ------------------------------------------------------------------------------
def philox4x32_10(counter: Array, key: tuple[int, int]) -> NDArray[np.uint32]:
    """Return the Philox4x32-10 blocks of `(..., 4)` counters, word 0 first (Salmon et al., 3.3)."""
    c0, c1, c2, c3 = np.moveaxis(np.asarray(counter).astype(np.uint64), -1, 0)
    for r in range(10):
        k0, k1 = key[0] + r * 0x9E3779B9 & 0xFFFFFFFF, key[1] + r * 0xBB67AE85 & 0xFFFFFFFF
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 & 0xFFFFFFFF, p0 >> 32 ^ c3 ^ k1, p0 & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def random_words(block: Ints, key: Key, deep: int = 0) -> NDArray[np.uint32]:
    """Return the four words of each block that a key draws."""
    counter = [(b, key.parameter, key.step, key.stream | deep) for b in block.tolist()]
    return philox4x32_10(np.array(counter, np.uint32).reshape(-1, 4), (key.seed, key.rank))


def ternary_draws(elements: Ints, key: Key) -> NDArray[np.uint32]:
    """Return the 16-bit draw of every element: 64 share 8 blocks, for eight 32-bit SIMD lanes."""
    words = random_words(8 * (elements // 64) + elements % 8, key)
    word = words[np.arange(len(elements)), elements % 64 // 16]
    return np.where(elements // 8 % 2 == 0, word & 0xFFFF, word >> 16).astype(np.uint32)


def deep_draws(elements: Ints, key: Key) -> NDArray[np.uint32]:
    """Return the 32-bit draw that decides an element whose 16-bit draw ties with its threshold."""
    return random_words(elements // 4, key, 0x80000000)[np.arange(len(elements)), elements % 4]


# ---- sums and scales -----------------------------------------------------------------------------
@np.errstate(all="ignore")
def sum_in_lanes(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Add `(rows, lanes, ...)` row by row, then lane j and the lane half their number behind it,
    until one is left.
    """
    lanes = np.zeros(rows.shape[1:])
    for row in rows:
        lanes = lanes + row
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    total: NDArray[np.float64] = lanes[0]
    return total


def padded(x: NDArray[np.float64], numel: int) -> NDArray[np.float64]:
    """Append zeros up to a multiple of `numel`; a lane is never -0.0, so these change no sum."""
    rest = np.zeros((-len(x) % numel, *x.shape[1:]))
    return np.concatenate([x, rest])


def lane_sums(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum every 512 of a group: element i to lane i % 16, then lanes j and j + 8, 4, 2, 1."""
    blocks = padded(x, BLOCK_NUMEL).reshape(-1, BLOCK_NUMEL // SUM_LANES, SUM_LANES)
    return sum_in_lanes(np.moveaxis(blocks, 0, -1))


def ordered_sum(blocks: Array) -> float:
    """Add block sums in runs of 512, one after the other, from 0.0, as `cumsum` does and `sum` does
    not; then the runs in the same way.
    """
    runs = [np.cumsum([0.0, *blocks[b : b + 512]])[-1] for b in range(0, len(blocks), 512)]
    return float(np.cumsum([0.0, *runs])[-1])


@np.errstate(all="ignore")
def block_sums(x: Array, piece: Piece) -> Array:
    """Return sums and absolute maximum of every block of every group, `(blocks,)` of BLOCK."""
    tables = [np.zeros(0, BLOCK)]
    for v in (to_float32(x)[group] for group in piece.groups()):
        table, wide = np.zeros(-(-len(v) // BLOCK_NUMEL), BLOCK), v.astype(np.float64)
        table["sum"] = lane_sums(wide)
        table["sum_squares"] = lane_sums(wide * wide)  # exact: products of two float32
        bits, starts = v.view(np.uint32) & 0x7FFFFFFF, np.arange(0, len(v), BLOCK_NUMEL)
        table["absmax_bits"] = np.maximum.reduceat(bits, starts)
        tables.append(table)
    return np.concatenate(tables)


@np.errstate(all="ignore")
def group_scale(blocks: Array, numel: int, clip_sigma: float) -> np.float32:
    """Return min(max|x|, clip_sigma * std + max(0, |mean| - std)) of one group from its blocks.

    Wen et al. 2017, section 3.3, has clip_sigma * std alone, for gradients whose mean is about
    zero. A maximum that is not finite is the scale, so that it wins the scale round; `clip_sigma`
    <= 0 does not clip.
    """
    absmax: np.float32 = blocks["absmax_bits"].max(initial=0).view(np.float32)
    if numel == 0 or clip_sigma <= 0 or not np.isfinite(absmax):
        return absmax
    mean = ordered_sum(blocks["sum"]) / numel
    std = np.sqrt(max(0.0, ordered_sum(blocks["sum_squares"]) / numel - mean * mean))
    return min(absmax, np.float32(clip_sigma * std + max(0.0, abs(mean) - std)))


def ternary_scales(x: Array, piece: Piece, clip_sigma: float = 2.5) -> Floats:
    """Return the scale of every group of `piece`, `(groups,)` float32."""
    parts = [(x[g], Piece(g.stop - g.start, piece.group_numel)) for g in piece.groups()]
    scales = [group_scale(block_sums(v, part), part.numel, clip_sigma) for v, part in parts]
    return np.array(scales, np.float32)


# ---- bits ----------------------------------------------------------------------------------------
def pack_bits(values: Array, bits: int, padding: int = 0) -> Bytes:
    """Pack integers of `bits` bits into a little-endian stream; `padding` fills the last byte."""
    room = -(-len(values) * bits // 8) * 8 // bits
    padded = np.concatenate([values, np.full(room - len(values), padding)]).astype(np.int64)
    return np.packbits(padded[:, None] >> np.arange(bits) & 1, bitorder="little")


def unpack_bits(packed: Bytes, numel: int, bits: int) -> Ints:
    """Undo `pack_bits`: `(numel,)` integers."""
    rows = np.unpackbits(packed, bitorder="little")[: numel * bits].reshape(numel, bits)
    return rows @ (1 << np.arange(bits))


# ---- ternary, and exact sums of ternary codes ----------------------------------------------------
@np.errstate(all="ignore")
def ternary_signs(x: Array, scales: Floats, piece: Piece, key: Key) -> Ints:
    """Return sign(x) with probability |x| / S, else 0 (Wen et al. 2017, equations 3 and 4).

    S is the scale of the element's group, not negative. The probability is off by at most 2**-25
    (rounding of |x| / S) plus 2**-48.
    """
    values, scale = to_float32(x), scales[piece.group_of]
    p = np.abs(values) / np.where(scale > 0, scale, np.float32(np.inf))  # S = 0 gives probability 0
    t = np.where(p > 0, np.minimum(p, 1), 0).astype(np.float64) * 65536  # exact; 1 is always kept
    threshold, draws = np.floor(t), ternary_draws(piece.elements, key)
    tied = deep_draws(piece.elements, key) < np.floor((t - threshold) * 2.0**32)
    kept = (draws < threshold) | (draws == threshold) & tied
    return np.where(kept, np.where(np.signbit(values), -1, 1), 0)


def ternary_encode(x: Array, scales: Floats, piece: Piece, key: Key) -> Bytes:
    """Return the packed codes, 00 = -1, 01 = 0, 10 = +1, ceil(numel / 4) bytes, padding 01."""
    return pack_bits(ternary_signs(x, scales, piece, key) + 1, 2, padding=1)


@np.errstate(all="ignore")
def shared_average(total: Ints, scale: Floats, count: int) -> Floats:
    """Return fl(fl(S / count) * k), k an element's integer sum of signs over `count` payloads."""
    return scale / np.full_like(scale, count) * total.astype(np.float32)


@np.errstate(all="ignore")
def float_average(decoded: Sequence[Floats]) -> Floats:
    """Add decoded values in fp32 in payload order; multiply several by fl(1 / count)."""
    total = decoded[0]
    for values in decoded[1:]:
        total = total + values
    return total if len(decoded) == 1 else total * (np.float32(1) / np.float32(len(decoded)))


def ternary_sum_decode(
    codes: Sequence[Bytes], scales: Sequence[Floats], piece: Piece, shared: bool
) -> Floats:
    """Return the average of payloads `codes[i]`, `scales[i]` (equation 5), `(numel,)` float32."""
    signs = [unpack_bits(c, piece.numel, 2) - 1 for c in codes]
    if shared:
        return shared_average(np.sum(signs, axis=0), scales[0][piece.group_of], len(codes))
    pairs = zip(signs, scales, strict=True)
    return float_average([k.astype(np.float32) * s[piece.group_of] for k, s in pairs])


def lane_bits(world_size: int) -> int:
    """Return ceil(log2(2 * world_size + 1)), the bits that hold 0 .. 2 * world_size."""
    return (2 * world_size).bit_length()


def sum_lanes(codes: Sequence[Bytes], numel: int) -> Bytes:
    """Return the packed lanes k + len(codes), k the sum of the signs of an element, padding 0."""
    total = np.sum([unpack_bits(c, numel, 2) for c in codes], axis=0)
    return pack_bits(total, lane_bits(len(codes)))


def lanes_decode(lanes: Bytes, scales: Floats, piece: Piece, world_size: int) -> Floats:
    """Return the average that packed lanes stand for, `(numel,)` float32."""
    lane = unpack_bits(lanes, piece.numel, lane_bits(world_size))
    return shared_average(lane - world_size, scales[piece.group_of], world_size)


# ---- 1 bit with error feedback -------------------------------------------------------------------
@np.errstate(all="ignore")
def onebit_encode(
    x: Array,
    piece: Piece,
    means: tuple[float, float] | None = None,
    residual: Floats | None = None,
    decay: float = 1.0,
) -> tuple[Floats, Bytes, Floats]:
    """Encode gradient + residual with two class means a group (Seide et al. 2014, section 2).

    Args:
        x, piece: source array, `(numel,)`, in whole groups.
        means: values of bit 0 and bit 1 in place of the class means; (-1, 1) for signs.
        residual: what earlier steps left out, `(numel,)` float32; None is no residual.
        decay: factor of the new residual, in [0, 1].

    Returns:
        The means of bit 0 and of bit 1, `(groups, 2)` float32; the packed bits, padding 0; the new
        residual fl(decay * fl(fl(g + r) - q)), `(numel,)` float32 (the paper omits r in print).
    """
    g = to_float32(x)
    v = g if residual is None else g + residual
    bit = v > 0
    scales = np.zeros((len(piece.groups()), 2), np.float32)
    for scale, group in zip(scales, piece.groups(), strict=True):
        if not (g[group] != 0).any():
            continue  # a group without gradient decodes to 0 and keeps its residual
        for b in (0, 1):
            member = bit[group] == b
            if means is not None:
                scale[b] = means[b]
            elif member.any():
                kept = np.where(member, v[group], 0).astype(np.float64)
                scale[b] = ordered_sum(lane_sums(kept)) / member.sum()
    left = v - scales[piece.group_of, bit.astype(np.int64)]
    return scales, pack_bits(bit, 1), np.float32(decay) * left


def onebit_decode(bits: Bytes, scales: Floats, piece: Piece) -> Floats:
    """Return the values of one payload, `(numel,)` float32; `float_average` averages several."""
    return scales.reshape(-1, 2)[piece.group_of, unpack_bits(bits, piece.numel, 1)]


# ---- evenly spaced levels with error feedback ----------------------------------------------------
BLOCK_ZEROS = {2: 1.5, 4: 7.0, 8: 127.0}  # by bits: the (half) code that stands for 0
BLOCK2_STEP = 0.9957  # Max 1960, table II: four evenly spaced levels for a normal distribution
FLT_MIN, FLT_MAX = np.finfo(np.float32).tiny, np.finfo(np.float32).max


@np.errstate(all="ignore")
def block_scale(g: Floats, v: Floats, bits: int, step: float | None = None) -> Any:
    """Return the distance of two levels of a group, from its root mean square (2 bits) or max|v|.

    `g` is the gradient, `v` gradient + residual, `step` the distance in root mean squares for
    ternary codes (None: four levels).
    """
    zero = np.float32(BLOCK_ZEROS[bits])
    most = FLT_MAX / (2 * zero) if step is None else FLT_MAX
    scale = np.float32(0)
    if not np.isfinite(v).all():
        scale = np.float32(np.nan)
    elif (g != 0).any() and bits == 2:
        sum_squares = ordered_sum(lane_sums(v.astype(np.float64) ** 2))
        scale = np.float32((BLOCK2_STEP if step is None else step) * np.sqrt(sum_squares / len(v)))
    elif (g != 0).any():
        scale = np.abs(v).max() / zero
    return np.where(scale < FLT_MIN, np.float32(0), np.minimum(scale, most))[()]


@np.errstate(all="ignore")
def block_encode(
    x: Array, piece: Piece, bits: int, residual: Floats | None = None, decay: float = 1.0
) -> tuple[Floats, Bytes, Floats]:
    """Encode gradient + residual by the nearest of 4, 15 or 255 evenly spaced levels.

    Arguments are those of `onebit_encode`. Returns a scale a group, `(groups,)` float32; the packed
    codes, padding 0; the new residual, `(numel,)` float32.
    """
    g = to_float32(x)
    v = g if residual is None else g + residual
    zero = np.float32(BLOCK_ZEROS[bits])
    scales = np.array([block_scale(g[s], v[s], bits) for s in piece.groups()], np.float32)
    inverses = np.where(scales > 0, np.float32(1) / scales, np.float32(0))
    t = v * inverses[piece.group_of] + zero
    codes = np.rint(np.where(t > 0, np.minimum(t, 2 * zero), 0))  # halves go to the even code
    left = v - (codes - zero).astype(np.float32) * scales[piece.group_of]
    return scales, pack_bits(codes.astype(np.int64), bits), np.float32(decay) * left


@np.errstate(all="ignore")
def nearest_encode(
    x: Array, piece: Piece, step: float = 1.8, residual: Floats | None = None, decay: float = 1.0
) -> tuple[Floats, Bytes, Floats]:
    """Encode gradient + residual by the nearest of -S, 0, S, with S = step * a group's rms.

    As `block_encode`, but the codes are ternary ones, padding 01.
    """
    g = to_float32(x)
    v = g if residual is None else g + residual
    scales = np.array([block_scale(g[s], v[s], 2, step) for s in piece.groups()], np.float32)
    half = np.where(scales == 0, np.float32(np.inf), scales * np.float32(0.5))[piece.group_of]
    codes = (v > half).astype(np.int64) - (v < -half)
    left = v - codes.astype(np.float32) * scales[piece.group_of]
    return scales, pack_bits(codes + 1, 2, 1), np.float32(decay) * left


def block_decode(codes: Bytes, scales: Floats, piece: Piece, bits: int) -> Floats:
    """Return the values of one payload, `(numel,)` float32; `float_average` averages several."""
    steps = (unpack_bits(codes, piece.numel, bits) - BLOCK_ZEROS[bits]).astype(np.float32)
    return steps * scales[piece.group_of]


# ---- units of second moments ---------------------------------------------------------------------
@np.errstate(all="ignore")
def moment_units(moments: Floats, floor: float) -> Floats:
    """Return the units of preconditioned encoding: sqrt(v) + floor; 1 before any moments."""
    if not moments.any():
        return np.ones_like(moments)
    units: Floats = np.sqrt(moments) + np.float32(floor)
    return units


def next_moments(moments: Floats, averages: Floats, beta: float, step: int) -> Floats:
    """Return relative second moments after exchange number `step`: b * v + (1 - b) * (g / t)^2.

    b = min(beta, (step + 1) / (step + 2)), t = `typical(averages)`; v is 1 before the first
    exchange, and stays where t is 0 or its inverse is not a normal number.
    """
    b = min(beta, (step + 1) / (step + 2))
    before = moments if moments.any() else np.ones_like(moments)
    with np.errstate(all="ignore"):
        inverse = np.float32(1) / typical(averages)
    if not np.isfinite(inverse) or inverse < np.finfo(np.float32).tiny:
        return moments
    x = averages * inverse
    squares: Floats = x * x * np.float32(1.0 - b) + before * np.float32(b)
    return squares


def typical(x: Floats) -> np.float32:
    """Return min(max|x|, max(standard deviation, |mean|)) of one tensor."""
    return group_scale(block_sums(x, Piece(len(x), max(1, len(x)))), len(x), 1.0)
