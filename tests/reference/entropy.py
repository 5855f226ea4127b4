"""Entropy-coded codes in NumPy: the tables, a stream's step, its bytes, and back.

The rules are those of `gc_entropy_encode` in ``native/include/gradcomp.h``; docs/reference/
wire-format.md draws the bytes. A stream is a group of 4,096 elements of a parameter, or what a
piece has of one. Larmore and Hirschberg 1990, "A fast algorithm for optimal length-limited Huffman
codes".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from reference.codec import (
    FLT_MAX,
    FLT_MIN,
    Array,
    Bytes,
    Floats,
    Ints,
    Piece,
    lane_sums,
    ordered_sum,
    to_float32,
)

STREAM_NUMEL = 4096
LEAST_NBYTES, MOST_NBYTES = 512, 2048  # of a whole stream, its scale included
LARGEST_CODE, LARGEST_STEP = 32767, FLT_MAX / np.float32(32768)
WINDOW = 11  # bits of a symbol, at most
OUT = 8  # stands for every code of which no pair has a symbol
ZEROS_TABLE = 7
STEPS = 256  # of a stream, to choose from

# How often a code is 0, 1, ... 7, in 1/2^14; and -1, ... -7 as often. Pairs with 0 have no symbol.
WEIGHTS = (
    (4918, 3706, 1585, 384, 53, 0, 0, 0),
    (6790, 3962, 782, 51, 0, 0, 0, 0),
    (7917, 3809, 414, 10, 0, 0, 0, 0),
    (3602, 2804, 1738, 961, 487, 229, 101, 42),
    (4951, 3318, 1534, 589, 196, 58, 15, 0),
    (7713, 3492, 727, 103, 11, 0, 0, 0),
    (10585, 2728, 165, 0, 0, 0, 0, 0),
    (16351, 16, 0, 0, 0, 0, 0, 0),
    (3908, 2622, 1520, 881, 511, 296, 172, 99),
    (6885, 3153, 1060, 356, 120, 40, 0, 0),
    (10355, 2606, 353, 48, 0, 0, 0, 0),
    (14167, 1088, 20, 0, 0, 0, 0, 0),
    (5423, 3420, 1247, 440, 178, 82, 42, 24),
    (5351, 2248, 1102, 646, 413, 279, 196, 141),
    (7341, 2374, 936, 468, 262, 157, 99, 65),
    (10354, 2074, 548, 204, 90, 44, 0, 0),
)


# ---- tables --------------------------------------------------------------------------------------
class Table(NamedTuple):
    """One Huffman code of pairs of codes.

    Attributes:
        symbols, lengths: ``(17, 17)`` by a + 8 and b + 8: bits of a pair's symbol, the first one
            lowest, and their number.
        escapes: ``(17, 17)``, whether that is the escape symbol.
        read: by the next 11 bits: the symbol's bits, a, b, whether it is the escape.
        costs, pair_costs: ``(9,)`` and ``(9, 9)`` in 1/64 bit by |code|, 8 for all above 7; they
            choose the step and the table.
    """

    symbols: Ints
    lengths: Ints
    escapes: Array
    read: list[tuple[int, int, int, bool]]
    costs: Ints
    pair_costs: Ints


def code_lengths(weights: list[int], most: int = WINDOW) -> list[int]:
    """Return the lengths of an optimal prefix code, at most `most` bits, by package-merge.

    Of equal weights symbols come before packages, and lower numbers before higher ones.
    """
    symbols = [(w, (n,)) for w, n in sorted((w, n) for n, w in enumerate(weights))]
    level: list[tuple[int, tuple[int, ...]]] = list(symbols)
    for _ in range(most - 1):
        pairs = zip(level[::2], level[1::2], strict=False)
        packages = [(a[0] + b[0], a[1] + b[1]) for a, b in pairs]
        level = sorted([*symbols, *packages], key=lambda item: item[0])
    times = Counter(n for _, inside in level[: 2 * len(weights) - 2] for n in inside)
    return [times[n] for n in range(len(weights))]


def canonical_symbols(lengths: list[int]) -> list[int]:
    """Return the bits of every symbol: codes count up by length, then number; first bit lowest."""
    out, code, before = [0] * len(lengths), 0, 0
    for length, number in sorted((length, number) for number, length in enumerate(lengths)):
        code <<= length - before
        out[number] = int(f"{code:0{length}b}"[::-1], 2)
        code, before = code + 1, length
    assert code == 1 << before, "every bit string begins with a symbol"
    return out


@cache
def table(number: int) -> Table:
    """Return one of the 16 tables."""
    often = {k: w for k, w in enumerate(WEIGHTS[number]) if w}
    signed = {sign * k: w for k, w in often.items() for sign in (-1, 1)}
    pairs = [(a, b) for a in sorted(signed) for b in sorted(signed)]
    weights = [signed[a] * signed[b] for a, b in pairs]
    lengths = code_lengths([*weights, 2**28 - sum(weights)])
    bits = canonical_symbols(lengths)
    symbols, sizes = np.full((17, 17), bits[-1]), np.full((17, 17), lengths[-1])
    escapes = np.ones((17, 17), bool)
    read = [(0, 0, 0, False)] * (1 << WINDOW)
    for (a, b), symbol, length in zip([*pairs, (0, 0)], bits, lengths, strict=True):
        is_escape = symbol == bits[-1] and length == lengths[-1]
        for rest in range(1 << (WINDOW - length)):
            read[symbol | rest << length] = length, a, b, is_escape
        if not is_escape:
            where = a + OUT, b + OUT
            symbols[where], sizes[where], escapes[where] = symbol, length, False
    costs, pair_costs = find_costs(often, sizes, escapes)
    return Table(symbols, sizes, escapes, read, costs, pair_costs)


def find_costs(often: dict[int, int], lengths: Ints, escapes: Array) -> tuple[Ints, Ints]:
    """Return `Table.costs` and `Table.pair_costs`.

    A pair costs its mean bits over signs; behind an escape, codes above 7 cost as much as 8 to 15.
    A code costs a mean pair with it, less half of the mean over all pairs, rounded down.
    """
    magnitude = np.abs(np.arange(-OUT, OUT + 1))
    behind = 4 + sum((magnitude >= k).astype(np.int64) for k in (1, 2, 4, 8))
    sizes = lengths + np.where(escapes, behind[:, None] + behind[None, :], 0)
    upper, lower = sizes[OUT:], sizes[OUT::-1]
    pairs = 16 * (upper[:, OUT:] + upper[:, OUT::-1] + lower[:, OUT:] + lower[:, OUT::-1])
    weights = np.zeros(9, np.int64)
    weights[list(often)] = [w if k == 0 else 2 * w for k, w in often.items()]
    weights[max(often) + 1] = 2**14 - weights.sum()
    rows = pairs @ weights
    return (rows - (weights @ rows) // 2**15) // 2**14, pairs


# ---- the step ------------------------------------------------------------------------------------
def step_of(rms: float, j: int) -> np.float32:
    """Return step number `j`: 2^(j/32 - 4) root mean squares, cut to what cannot overflow."""
    with np.errstate(over="ignore"):
        return min(np.float32(rms * 2.0 ** (j % 32 / 32) * 2.0 ** (j // 32 - 4)), LARGEST_STEP)


def codes_of(x: Floats, step: np.float32) -> Ints:
    """Return x / step by way of the inverse, rounded to nearest even and cut to +-32767."""
    rounded = np.rint(x * (np.float32(1) / step))
    return np.clip(rounded, -LARGEST_CODE, LARGEST_CODE).astype(np.int64)


class Choice(NamedTuple):
    """A step, the table that codes it best, and what that is expected to take, in 1/64 bit."""

    j: int
    step: np.float32
    table: int
    size: int


def divided(a: int, b: int) -> int:
    """Return a / b cut to an integer, as C divides."""
    return abs(a) // b * (1 if a >= 0 else -1)


class Stream:
    """The values of a stream, and how its step is chosen.

    Args:
        x: gradient + residual, ``(numel,)``, finite.
        rms: root mean square, not 0.
        code_nbytes: that its codes must fill.
    """

    def __init__(self, x: Floats, rms: float, code_nbytes: int) -> None:
        self.x, self.rms, self.code_nbytes, self.numel = x, rms, code_nbytes, len(x)
        self.sample = x.reshape(-1, 512)[:, :128].ravel() if len(x) == STREAM_NUMEL else None

    def choice(self, j: int, x: Floats) -> Choice:
        """Return the best table of a step for values `x`, by the counts of their codes."""
        step = step_of(self.rms, j)
        counts = np.bincount(np.minimum(np.abs(codes_of(x, step)), 8), minlength=9)
        sizes = [int(counts @ table(t).costs) for t in range(16)]
        best = int(np.argmin(sizes))
        size = int(counts @ table(best).pair_costs @ counts) // (2 * len(x))
        return Choice(j, step, best, size)

    def search(self, limit: int, waste: int, j: int, x: Floats) -> Choice:
        """Return the smallest step that is found in 8 tries whose codes take at most `limit`.

        It begins at step `j` and ends where one leaves less than `waste`; the next one to try lies
        where a line through what is known says that the limit is. All sizes in 1/64 bit.
        """
        slope = len(x) * 3 // 2
        low, high, excess, spare = -1, STEPS, 0, 0
        found: Choice | None = None
        for _ in range(8):
            now = self.choice(j, x)
            if now.size > limit:
                low, excess = j, now.size - limit
            else:
                high, spare, found = j, limit - now.size, now
                if spare < waste:
                    break
            if found is None:
                j = low + 1 + excess // slope
            elif low < 0:
                j = high - 1 - spare // slope
            else:
                j = high - spare * (high - low) // (spare + excess)
            if not low < j < high:
                if low < 0 or found is None:
                    j = (low + high) // 2
                else:
                    j = low + 1 if j <= low else high - 1
            if j in (low, high):
                break
        return found if found is not None else self.choice(min(low + 16, STEPS - 1), x)

    def find(self, limit: int) -> Choice:
        """Search on a sample of a whole stream, then on all of it."""
        centibits = self.code_nbytes * 800 // self.numel
        j = min(max(143 - divided((centibits - 160) * 35, 100), 0), STEPS - 1)
        waste = self.numel * 3 // 2
        if self.sample is not None:
            j = self.search(divided(limit, 4), 2 * waste // 4, j, self.sample).j
        return self.search(limit, waste, j, self.x)

    def encode(self) -> tuple[np.float32, Ints, Bytes]:
        """Return the step, the codes and their bytes; step 0 where no step's codes fit."""
        limit = (8 * (self.code_nbytes - 1) - 8) * 64
        now = self.find(limit)
        halves = self.halves(now)
        spare = (self.code_nbytes - self.needed(halves)) * 8 * 64
        if spare < 0 or spare > 4 * self.numel:
            again = self.find(limit + now.size - (self.needed(halves) - 1) * 8 * 64)
            if again.j != now.j:
                now, halves = again, self.halves(again)
        while self.needed(halves) > self.code_nbytes and now.j < STEPS - 1:
            now = self.choice(now.j + 1, self.x)
            halves = self.halves(now)
        if self.needed(halves) > self.code_nbytes:
            return np.float32(0), np.zeros(self.numel, np.int64), zero_codes(self.code_nbytes)
        out = np.zeros(self.code_nbytes, np.uint8)
        front, back = halves
        out[0] = now.table
        out[1 : 1 + len(front)] = front
        out[self.code_nbytes - len(back) :] = back[::-1]
        return now.step, codes_of(self.x, now.step), out

    def halves(self, choice: Choice) -> tuple[Bytes, Bytes]:
        """Return the bytes of the first half of the pairs, and of the rest."""
        codes = np.append(codes_of(self.x, choice.step), np.zeros(self.numel % 2, np.int64))
        pairs = codes.reshape(-1, 2)
        first = (len(pairs) + 1) // 2
        return pack_pairs(pairs[:first], choice.table), pack_pairs(pairs[first:], choice.table)

    @staticmethod
    def needed(halves: tuple[Bytes, Bytes]) -> int:
        return 1 + sum(map(len, halves))


# ---- bits ----------------------------------------------------------------------------------------
def bit_lengths(magnitudes: Ints) -> Ints:
    """Return the bits of integers from 0 to 2^15 - 1."""
    out: Ints = (magnitudes[:, None] >> np.arange(15) > 0).sum(axis=1)
    return out


def pack_pairs(pairs: Ints, number: int) -> Bytes:
    """Return the bytes of ``(n, 2)`` codes in a table's symbols, the last one filled with 0."""
    of = table(number)
    cut = np.where(np.abs(pairs) < OUT, pairs, OUT) + OUT
    where = cut[:, 0], cut[:, 1]
    bits, sizes = of.symbols[where], of.lengths[where]
    for code in pairs.T:
        magnitude, escaped = np.abs(code), of.escapes[where]
        length = bit_lengths(magnitude)
        below = magnitude & ((1 << np.maximum(length - 1, 0)) - 1)
        number_bits = length | ((code < 0) | below << 1) << 4
        bits = np.where(escaped, bits | number_bits << sizes, bits)
        sizes = np.where(escaped, sizes + 4 + length, sizes)
    places = np.arange(WINDOW + 2 * (4 + 15))
    each = bits[:, None] >> places & 1
    return np.packbits(each[places < sizes[:, None]].astype(np.uint8), bitorder="little")


def unpack_pairs(data: Bytes, count: int, number: int) -> list[tuple[int, bool]]:
    """Return the codes of `count` pairs, each with whether it was behind an escape symbol; what
    lies beyond the end of `data` is 0.
    """
    bits = np.append(np.unpackbits(data, bitorder="little"), np.zeros(64, np.uint8))
    window = np.convolve(bits.astype(np.int64), 1 << np.arange(WINDOW)[::-1])[WINDOW - 1 :]
    words, read, codes, at, end = window.tolist(), table(number).read, [], 0, len(bits) - 1

    def take(length: int) -> int:
        nonlocal at
        value = sum(int(bits[min(at + k, end)]) << k for k in range(length))
        at += length
        return value

    for _ in range(count):
        length, a, b, is_escape = read[words[min(at, end)]]
        at += length
        if is_escape:
            a, b = (escaped(take) for _ in range(2))
        codes += [(a, is_escape), (b, is_escape)]
    return codes


def escaped(take: Callable[[int], int]) -> int:
    """Read one number behind an escape symbol: its bits, its sign, what is below its top bit."""
    length = take(4)
    if not length:
        return 0
    sign, below = take(1), take(length - 1)
    return (-1 if sign else 1) * (1 << (length - 1) | below)


def zero_codes(nbytes: int) -> Bytes:
    """Return so many bytes of codes 0: a table whose zero bits are pairs of 0, and zero bits."""
    return np.array([ZEROS_TABLE] + (nbytes - 1) * [0], np.uint8)


# ---- pieces --------------------------------------------------------------------------------------
def stream_code_nbytes(numel: int, stream_nbytes: int) -> int:
    """Return the bytes of the codes of a stream of `numel` elements."""
    if numel == STREAM_NUMEL:
        return stream_nbytes - 4
    return -(-numel * stream_nbytes // STREAM_NUMEL) + 4


def code_nbytes(piece: Piece, stream_nbytes: int) -> int:
    """Return the bytes of a piece's codes."""
    return sum(stream_code_nbytes(g.stop - g.start, stream_nbytes) for g in piece.groups())


def whole_nbytes(numel: int, stream_nbytes: int) -> int:
    """Return the bytes of the codes of a whole parameter."""
    rest = numel % STREAM_NUMEL
    last = stream_code_nbytes(rest, stream_nbytes) if rest else 0
    return numel // STREAM_NUMEL * (stream_nbytes - 4) + last


def stream_nbytes(numel: int, nbytes: int) -> int:
    """Return the smallest size of whole streams with which the codes of `numel` elements fill at
    least `nbytes`, the largest there is where they fill fewer.

    A payload says by its size how large its streams are; sizes that make no difference to the size
    of a payload make none to its bytes.
    """
    sizes = range(LEAST_NBYTES, MOST_NBYTES)
    return next((one for one in sizes if whole_nbytes(numel, one) >= nbytes), MOST_NBYTES)


def tables_of(codes: Bytes, piece: Piece, stream_nbytes: int) -> list[int]:
    """Return the number of every stream's table."""
    sizes = [stream_code_nbytes(g.stop - g.start, stream_nbytes) for g in piece.groups()]
    return [int(codes[first]) for first in np.cumsum([0, *sizes])[:-1].tolist()]


@np.errstate(all="ignore")
def entropy_encode(
    x: Array, piece: Piece, stream_nbytes: int, residual: Floats | None = None, decay: float = 1.0
) -> tuple[Floats, Bytes, Floats]:
    """Encode gradient + residual in streams of `stream_nbytes`.

    `piece` has groups of 4,096; the other arguments are those of `onebit_encode`. Returns a scale a
    stream, ``(streams,)`` float32; the codes' bytes; the new residual, ``(numel,)`` float32.
    """
    g = to_float32(x)
    v = g if residual is None else g + residual
    left, scales, packed = v.copy(), [], [np.zeros(0, np.uint8)]
    for group in piece.groups():
        values, nbytes = v[group], stream_code_nbytes(group.stop - group.start, stream_nbytes)
        rms = np.sqrt(ordered_sum(lane_sums(values.astype(np.float64) ** 2)) / len(values))
        step, out = np.float32(0), zero_codes(nbytes)
        if not np.isfinite(values).all():
            step, left[group] = np.float32(np.nan), np.nan
        elif (g[group] != 0).any() and step_of(rms, 0) >= FLT_MIN:
            step, codes, out = Stream(values, rms, nbytes).encode()
            left[group] = values - codes.astype(np.float32) * step
        scales.append(step)
        packed.append(out)
    return np.array(scales, np.float32), np.concatenate(packed), np.float32(decay) * left


@np.errstate(all="ignore")
def entropy_decode(codes: Bytes, scales: Floats, piece: Piece, stream_nbytes: int) -> Floats:
    """Return the values of one payload, ``(numel,)`` float32, of any bytes; `float_average`
    averages several.
    """
    out, first = np.zeros(piece.numel, np.float32), 0
    for group, scale in zip(piece.groups(), scales, strict=True):
        numel = group.stop - group.start
        nbytes = stream_code_nbytes(numel, stream_nbytes)
        number, data = int(codes[first]) % 16, codes[first + 1 : first + nbytes]
        pairs, front = (numel + 1) // 2, ((numel + 1) // 2 + 1) // 2
        found = unpack_pairs(data, front, number)
        found += unpack_pairs(data[::-1], pairs - front, number)
        values, escapes = np.array(found[:numel], np.float32).reshape(-1, 2).T
        # what is behind an escape symbol is added to a 0, so that no such value is -0
        out[group] = np.where(escapes == 1, values * scale + 0 * scale, values * scale)
        first += nbytes
    return out
