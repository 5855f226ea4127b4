"""Top-k in NumPy: the largest of every block, positions Rice coded, two magnitudes a group."""

from __future__ import annotations

import itertools

import numpy as np

from reference import codec as ref
from reference.codec import Array, Bytes, Floats, Ints, Piece, pack_bits, to_float32, unpack_bits

BLOCK_NUMEL = 4096  # elements of a block, counted from the parameter's first
GROUP_NUMEL = 32768  # of a scale group
DENSITY = 64  # one of so many is kept, and what a gap's quotient counts


def kept_count(numel: int) -> int:
    """Return how many elements are kept of a block of `numel`."""
    return -(-numel // DENSITY)


def block_sizes(piece: Piece) -> list[int]:
    """Return the elements of every block of `piece`, cut to it."""
    start, end = piece.start, piece.start + piece.numel
    inner = range((start // BLOCK_NUMEL + 1) * BLOCK_NUMEL, end, BLOCK_NUMEL)
    return [b - a for a, b in itertools.pairwise([start, *inner, end]) if b > a]


def code_nbytes(piece: Piece) -> int:
    """Return the bytes of a piece's codes: a byte a kept element, and two bits."""
    return sum(kept_count(m) + -(-kept_count(m) // 4) for m in block_sizes(piece))


def kept_positions(v: Floats, piece: Piece) -> Ints:
    """Return the positions that the piece keeps, in order: of equal magnitudes the first."""
    magnitudes, first = v.view(np.uint32) & 0x7FFFFFFF, 0
    found = [np.zeros(0, np.int64)]
    for numel in block_sizes(piece):
        largest = np.argsort(~magnitudes[first : first + numel], kind="stable")[: kept_count(numel)]
        found.append(first + np.sort(largest))
        first += numel
    return np.concatenate(found)


def write_gaps(positions: Ints, numel: int) -> Bytes:
    """Return a block's gaps between kept positions: gap / 64 ones, a zero, gap % 64 in 6 bits."""
    bits: list[int] = []
    for gap in np.diff(positions, prepend=-1) - 1:
        bits += [1] * (gap // DENSITY) + [0] + [gap % DENSITY >> b & 1 for b in range(6)]
    room = 8 * kept_count(numel)
    return pack_bits(np.array(bits + [0] * (room - len(bits))), 1)


def read_gaps(codes: Bytes, numel: int) -> Ints:
    """Undo `write_gaps`. Bytes that it does not write raise ValueError "code: " or "padding: "."""
    bits, at, position = unpack_bits(codes, 8 * len(codes), 1).tolist(), 0, -1
    found = []
    for _ in range(kept_count(numel)):
        quotient = 0
        while at < len(bits) and bits[at]:
            at, quotient = at + 1, quotient + 1
        low = bits[at + 1 : at + 7]
        at += 7
        position += 1 + quotient * DENSITY + sum(bit << b for b, bit in enumerate(low))
        if at > len(bits) or position >= numel:
            raise ValueError(f"code: a gap to {position} of {numel}, bit {at} of {len(bits)}")
        found.append(position)
    if any(bits[at:]):
        raise ValueError("padding: bits behind the last gap")
    return np.array(found, np.int64)


def group_means(magnitudes: Floats) -> tuple[float, list[float]]:
    """Return the mean of a group's kept magnitudes, and the means of those up to and above it."""

    def mean_of(x: Array) -> float:
        return ref.ordered_sum(x) / len(x) if len(x) else 0.0

    x = magnitudes.astype(np.float64)
    mean = mean_of(x)
    return mean, [mean_of(x[x <= mean]), mean_of(x[x > mean])]


@np.errstate(all="ignore")
def topk_encode(
    x: Array, piece: Piece, residual: Floats | None = None
) -> tuple[Floats, Bytes, Floats]:
    """Encode the largest of gradient + residual, in whole groups of `GROUP_NUMEL`.

    Returns inner and outer magnitude, `(groups, 2)` float32; the codes; the new residual
    fl(fl(g + r) - q), `(numel,)` float32.
    """
    g = to_float32(x)
    v = g if residual is None else g + residual
    v = np.where(np.isnan(v), np.float32(np.nan), v)
    scales = np.zeros((len(piece.groups()), 2), np.float32)
    positions, q = kept_positions(v, piece), np.zeros(piece.numel, np.float32)
    values = np.zeros(piece.numel, np.int64)
    for scale, group in zip(scales, piece.groups(), strict=True):
        mine = positions[(positions >= group.start) & (positions < group.stop)]
        magnitudes = np.abs(v[mine])
        mean, means = group_means(magnitudes)
        outer = 1 * (magnitudes.astype(np.float64) > mean)  # the mean must not become float32
        if np.isfinite(v[group]).all() and (g[group] != 0).any():
            scale[:] = means
        values[mine] = np.signbit(v[mine]) + 2 * outer
        q[mine] = np.where(np.signbit(v[mine]), 0 - scale[outer], scale[outer])
    codes, first = [np.zeros(0, np.uint8)], 0
    for numel in block_sizes(piece):
        mine = positions[(positions >= first) & (positions < first + numel)]
        codes += [write_gaps(mine - first, numel), pack_bits(values[mine], 2)]
        first += numel
    return scales, np.concatenate(codes), v - q


def topk_decode(codes: Bytes, scales: Floats, piece: Piece) -> Floats:
    """Return the values of one payload, `(numel,)` float32; raises what `read_gaps` raises."""
    out, first, at = np.zeros(piece.numel, np.float32), 0, 0
    group_of, pairs = piece.group_of, scales.reshape(-1, 2)
    for numel in block_sizes(piece):
        count = kept_count(numel)
        positions = first + read_gaps(codes[at : at + count], numel)
        packed = codes[at + count : at + count + -(-count // 4)]
        if unpack_bits(packed, 4 * len(packed), 2)[count:].any():
            raise ValueError("padding: bits behind the last value")
        values = unpack_bits(packed, count, 2)
        magnitudes = pairs[group_of[positions], values >> 1]
        out[positions] = np.where(values & 1, 0 - magnitudes, magnitudes)
        first, at = first + numel, at + count + len(packed)
    return out
