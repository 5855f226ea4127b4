"""The NumPy reference against truths that do not come from it: published vectors, hand-worked
examples, exact laws.
"""

from __future__ import annotations

import functools
import json
import math
import re
import struct
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference import codec as ref
from reference import entropy
from reference import payload as ref_payload

VECTORS = Path(__file__).parents[1] / "vectors"
sys.path.insert(0, str(VECTORS))
import generate

KEY = ref.Key(seed=7, rank=1, step=3, parameter=2)
EXACT_PROBABILITY = 2.0**-24  # |x| / S is rounded to fp32, then cut at 2^-48
SIX_SIGMA = 6.0  # a mean over n draws is off by more than six of its deviations once in 5e8


encode_onebit = functools.partial(ref_payload.encode_fed_back, "onebit")


def f32(*values: float) -> Any:
    return np.array(values, np.float32)


def bits(x: Any) -> list[int]:
    """Bit patterns, so that -0.0 differs from 0.0 and NaN equals itself."""
    return [int(b) for b in np.asarray(x, np.float32).view(np.uint32)]


def from_bits(*patterns: int) -> Any:
    return np.array(patterns, np.uint32).view(np.float32)


def random_f32(n: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


# ---- the frozen vectors --------------------------------------------------------------------------
@pytest.mark.parametrize("name", generate.NAMES)
def test_reference_reproduces_frozen_vectors(name: str) -> None:
    frozen = json.loads((VECTORS / f"{name}.json").read_text())
    built = generate.build(name)
    assert frozen.keys() == built.keys()
    for section in frozen:
        if isinstance(frozen[section], list):
            for got, want in zip(built[section], frozen[section], strict=True):
                assert got == want
        else:
            assert built[section] == frozen[section]


def test_vector_files_stay_small() -> None:
    assert sum(f.stat().st_size for f in VECTORS.glob("*.json")) < 700_000


# ---- random numbers, checksum --------------------------------------------------------------------
@pytest.mark.parametrize(
    ("counter", "key", "words"),  # kat_vectors of Random123 (Salmon et al. 2011)
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    assert tuple(ref.philox4x32_10(np.array(counter), key).tolist()) == words


@pytest.mark.parametrize(
    ("data", "crc"),  # RFC 3720, appendix B.4, and the catalogue's check value
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_crc32c_known_answers(data: bytes, crc: int) -> None:
    assert ref_payload.crc32c(data) == crc
    assert ref_payload.crc32c(data[5:], ref_payload.crc32c(data[:5])) == crc


def test_each_element_has_its_own_draws() -> None:
    """64 consecutive elements share 8 blocks: all 64 half words, each once, whatever the
    element's position.
    """
    key = KEY
    for first in (0, 64, 2**32 - 128):
        blocks = 8 * (first // 64) + np.arange(8)
        counters = np.array([(b, key.parameter, key.step, key.stream) for b in blocks])
        words = ref.philox4x32_10(counters, (key.seed, key.rank))
        halves = sorted([*(words & 0xFFFF).ravel().tolist(), *(words >> 16).ravel().tolist()])
        assert sorted(ref.ternary_draws(np.arange(first, first + 64), key).tolist()) == halves


def test_draws_of_a_piece_are_those_of_the_whole() -> None:
    whole = ref.ternary_draws(np.arange(1000), KEY)
    deep = ref.deep_draws(np.arange(1000), KEY)
    for start, end in ((8, 9), (64, 200), (999, 1000)):
        assert (ref.ternary_draws(np.arange(start, end), KEY) == whole[start:end]).all()
        assert (ref.deep_draws(np.arange(start, end), KEY) == deep[start:end]).all()


@pytest.mark.parametrize("field", ref.Key._fields)
def test_every_part_of_the_key_changes_the_draws(field: str) -> None:
    """The owner's second draw must not repeat its first: with equal draws the mean of two ranks
    was off by 43 %.
    """
    other = KEY._replace(**{field: getattr(KEY, field) + 1})
    elements = np.arange(4096)
    same = (ref.ternary_draws(elements, KEY) == ref.ternary_draws(elements, other)).mean()
    assert same < 0.001  # 2^-16 expected
    assert (ref.deep_draws(elements, KEY) != ref.deep_draws(elements, other)).all()


# ---- dtypes --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("value", "want"),
    [
        (0x3F808000, 0x3F80),  # 1.00390625 is half way: to the even side, down
        (0x3F818000, 0x3F82),  # half way, up
        (0x3F808001, 0x3F81),
        (0x80000000, 0x8000),
        (0x7F7FFFFF, 0x7F80),  # the largest fp32 rounds to Inf
        (0x7F800000, 0x7F80),
        (0x00000001, 0x0000),
        (0x00008001, 0x0001),  # bf16 has denormals
    ],
)
def test_bf16_rounds_to_nearest_even(value: int, want: int) -> None:
    assert ref.from_float32(from_bits(value), ref.BF16).tolist() == [want]


@pytest.mark.parametrize("pattern", [0x7F800001, 0xFF800001, 0x7FC00000, 0xFFFFFFFF])
@pytest.mark.parametrize("dtype", [ref.BF16, ref.F16])
def test_narrowing_keeps_nan(pattern: int, dtype: int) -> None:
    narrow = ref.from_float32(from_bits(pattern), dtype)
    assert np.isnan(ref.to_float32(narrow)).all()


@pytest.mark.parametrize("dtype", [ref.BF16, ref.F16])
def test_every_narrow_value_survives_a_round_trip(dtype: int) -> None:
    patterns = np.arange(65536, dtype=np.uint16)
    narrow = patterns if dtype == ref.BF16 else patterns.view(np.float16)
    wide = ref.to_float32(narrow)
    back = ref.from_float32(wide, dtype).view(np.uint16)
    assert (back == patterns)[~np.isnan(wide)].all()


# ---- sums and scales -----------------------------------------------------------------------------
def test_block_sums_follow_the_written_order() -> None:
    """The same sum, written out one addition at a time for one block and a tail."""
    x = random_f32(700) * np.float32(1e10) ** random_f32(700, seed=1)
    table = ref.block_sums(x, ref.Piece(700, 700))
    for number, block in enumerate((x[:512], x[512:])):
        lanes = [0.0] * 16
        squares = [0.0] * 16
        for i, v in enumerate(block.tolist()):
            lanes[i % 16] += v
            squares[i % 16] += v * v
        for k in (8, 4, 2, 1):
            for j in range(k):
                lanes[j] += lanes[j + k]
                squares[j] += squares[j + k]
        assert table["sum"][number] == lanes[0]
        assert table["sum_squares"][number] == squares[0]
        assert table["absmax_bits"][number] == np.abs(block).max().view(np.uint32)


def test_groups_are_those_of_the_parameter_cut_to_the_piece() -> None:
    piece = ref.Piece(30, 25, start=16)
    assert piece.groups() == [slice(0, 9), slice(9, 30)]
    assert len(ref.Piece(26, 25, start=24).groups()) == 2
    assert len(ref.Piece(0, 25).groups()) == 0
    assert len(ref.block_sums(random_f32(1100), ref.Piece(1100, 600))) == 3  # 512 + 88, 500


def test_scale_is_the_clipped_deviation_about_the_mean() -> None:
    x = random_f32(10_000) + np.float32(1)
    x[17] = 100
    exact = 2.5 * np.std(x.astype(np.float64))
    (scale,) = ref.ternary_scales(x, ref.Piece(len(x), len(x)))
    assert scale == pytest.approx(exact, rel=1e-6)
    assert ref.ternary_scales(x, ref.Piece(len(x), len(x)), -1.0) == f32(100)
    assert ref.ternary_scales(x[:10], ref.Piece(10, 10), 100.0) == np.abs(x[:10]).max()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_nonfinite_maximum_wins(bad: float) -> None:
    x = f32(1, bad, np.inf, 2)
    (scale,) = ref.ternary_scales(x, ref.Piece(4, 4))
    assert np.isnan(scale) if math.isnan(bad) else np.isinf(scale)


@pytest.mark.parametrize("sigma", [2.5, 1.0, 0.1, -1.0])
@pytest.mark.parametrize("value", [3.0, -0.1, 1e-45, 3e38])
@pytest.mark.parametrize("numel", [1, 2, 64, 5000])
def test_group_without_deviation_keeps_its_values(numel: int, value: float, sigma: float) -> None:
    """Equal elements have no deviation about their mean, but for rounding: clipping made them
    all 0.
    """
    x = np.full(numel, value, np.float32)
    (scale,) = ref.ternary_scales(x, ref.Piece(numel, numel), sigma)
    assert scale == pytest.approx(abs(x[0]), rel=1e-7)
    assert scale == abs(x[0]) or sigma < 1


def test_clipping_leaves_the_mean_of_one_sided_gradients() -> None:
    """At mean 5.81 and deviation 0.616 everything was cut to 1.54; a mean below the deviation
    changes no scale.
    """
    x = random_f32(20_000).astype(np.float64)
    x = (x - x.mean()) / x.std()
    for mean, off in ((5.81 / 0.616, 0.005), (2.0, 0.02)):
        y = (x + mean).astype(np.float32)
        (scale,) = ref.ternary_scales(y, ref.Piece(len(y), len(y)))
        assert scale == pytest.approx(2.5 + mean - 1, rel=1e-5)
        assert np.clip(y, -scale, scale).mean() > (1 - off) * mean
    y = (x - 0.99).astype(np.float32)
    assert ref.ternary_scales(y, ref.Piece(len(y), len(y))) == pytest.approx(2.5, rel=1e-5)


# ---- ternary -------------------------------------------------------------------------------------
def test_ternary_codes_are_laid_out_as_drawn() -> None:
    """-1, 0, +1, +1, -1 is 10 10 01 00, then padding 01 01 01 and 00."""
    x = f32(-1, 0, 1, 1, -1)
    assert ref.ternary_encode(x, f32(1), ref.Piece(5, 5), KEY).tolist() == [0b10100100, 0b01010100]


def test_ternary_is_unbiased() -> None:
    n, scale = 4000, np.float32(1.5)
    x = np.clip(random_f32(64, seed=3), -1.5, 1.5)
    total = np.zeros(64)
    for seed in range(n):
        total += ref.ternary_signs(x, f32(scale), ref.Piece(64, 64), ref.Key(seed=seed))
    p = np.abs(x) / scale
    deviation = scale * np.sqrt(p * (1 - p) / n)
    off = np.abs(total * scale / n - x)
    assert (off <= SIX_SIGMA * deviation + EXACT_PROBABILITY * scale).all()


def test_ternary_is_unbiased_over_elements_of_one_encoding() -> None:
    n, p = 1 << 16, 0.3
    signs = ref.ternary_signs(np.full(n, -p, np.float32), f32(1), ref.Piece(n, n), KEY)
    assert abs(-signs.mean() - p) <= SIX_SIGMA * math.sqrt(p * (1 - p) / n)
    assert set(signs.tolist()) == {-1, 0}


@pytest.mark.parametrize(
    ("values", "scale", "signs"),
    [
        ((0.0, -0.0), 1, [0, 0]),
        ((0.0, -0.0, 1e-45, -5.0), 0, [0, 0, 0, 0]),
        ((1, -1, 1.0000001, -3e38, np.inf), 1, [1, -1, 1, -1, 1]),  # clipped to the scale
    ],
)
def test_signs_that_no_draw_decides(
    values: tuple[float, ...], scale: float, signs: list[int]
) -> None:
    piece = ref.Piece(len(values), len(values))
    assert ref.ternary_signs(f32(*values), f32(scale), piece, KEY).tolist() == signs


def test_deep_draw_decides_ties_on_both_sides() -> None:
    """A probability is built for one element that ties with its 16-bit draw, just above and just
    below its deep draw.

    All arithmetic of the expectation is in integers and fractions.
    """
    key, decided = ref.Key(seed=11), set()
    elements = np.arange(4096)
    draws, deep = ref.ternary_draws(elements, key), ref.deep_draws(elements, key)
    for e in np.flatnonzero(draws < 128)[:40]:  # below 2^-9 fp32 holds t to 2^-17 or finer
        fraction = Fraction(int(deep[e]), 2**32)
        for step in (-1, 1):
            t = np.float32(int(draws[e]) + float(fraction) + step * 2.0**-12)
            p = np.float32(float(t) / 65536)
            exact = Fraction(float(p)) * 65536
            if math.floor(exact) != draws[e]:
                continue
            want = int(deep[e]) < math.floor((exact - math.floor(exact)) * 2**32)
            x = np.zeros(4096, np.float32)
            x[e] = -p
            signs = ref.ternary_signs(x, f32(1), ref.Piece(4096, 4096), key)
            assert signs[e] == -int(want)
            decided.add((step, want))
    assert decided == {(-1, False), (1, True)}


def test_tie_with_the_deep_draw_is_not_kept() -> None:
    """Element 3876382 draws 0, and then 0xC4B61400, which fp32 holds: equal is not below."""
    piece, key = ref.Piece(1, 1, start=3876382), ref.Key(seed=1)
    assert ref.ternary_draws(piece.elements, key).tolist() == [0]
    assert ref.deep_draws(piece.elements, key).tolist() == [0xC4B61400]
    equal = np.float32(0xC4B61400 / 2.0**48)
    above = np.nextafter(equal, np.float32(1))
    assert [ref.ternary_signs(f32(p), f32(1), piece, key)[0] for p in (equal, above)] == [0, 1]


def test_tie_exactly_at_the_threshold_is_never_kept() -> None:
    """t is an integer and equals the draw: the rest is 0, and no draw is below 0."""
    elements = np.arange(512)
    draws = ref.ternary_draws(elements, KEY)
    x = (draws / 65536.0).astype(np.float32)
    assert (ref.ternary_signs(x, f32(1), ref.Piece(512, 512), KEY) == 0).all()
    above = ((draws + 1) / 65536.0).astype(np.float32)
    assert (ref.ternary_signs(above, f32(1), ref.Piece(512, 512), KEY) == 1).all()


def test_a_piece_encodes_as_it_does_within_its_parameter() -> None:
    x, group = random_f32(400), 100
    scales = ref.ternary_scales(x, ref.Piece(400, group))
    whole = ref.ternary_signs(x, scales, ref.Piece(400, group), KEY)
    piece = ref.Piece(144, group, start=88)
    assert (ref.ternary_signs(x[88:232], scales[0:3], piece, KEY) == whole[88:232]).all()


def test_shared_average_counts_and_own_average_adds() -> None:
    codes = [ref.pack_bits(np.array(s) + 1, 2, 1) for s in ([1, -1, 0], [1, 1, 0], [1, -1, -1])]
    piece = ref.Piece(3, 3)
    third = np.float32(1) / np.float32(3)
    shared = ref.ternary_sum_decode(codes, [f32(1)] * 3, piece, shared=True)
    assert bits(shared) == bits([third * np.float32(3), -third, -third])
    own = ref.ternary_sum_decode(codes, [f32(1), f32(2), f32(4)], piece, shared=False)
    assert bits(own) == bits(f32(7, -3, -4) * third)
    alone = ref.ternary_sum_decode(codes[:1], [f32(0.1)], piece, shared=False)
    assert bits(alone) == bits(f32(0.1, -0.1, 0.0))


def test_shared_average_divides_before_it_multiplies() -> None:
    """fl(fl(S / N) * k), not fl(fl(S * k) / N): here they differ in the last bit."""
    step = np.float32(1.1) / np.float32(7)
    assert step * np.float32(5) != np.float32(1.1) * np.float32(5) / np.float32(7)
    average = ref.shared_average(np.array([5, -5, 0]), f32(1.1), 7)
    assert bits(average) == bits([step * 5, step * -5, 0.0])


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 8, 127, 128])
def test_lanes_give_the_shared_average(world: int) -> None:
    assert ref.lane_bits(world) == math.ceil(math.log2(2 * world + 1))
    x, piece = random_f32(77), ref.Piece(77, 20)
    scales = ref.ternary_scales(x, piece)
    codes = [ref.ternary_encode(x, scales, piece, KEY._replace(rank=r)) for r in range(world)]
    lanes = ref.sum_lanes(codes, 77)
    assert len(lanes) == -(-77 * ref.lane_bits(world) // 8)
    average = ref.ternary_sum_decode(codes, [scales] * world, piece, shared=True)
    assert bits(ref.lanes_decode(lanes, scales, piece, world)) == bits(average)


def test_lanes_are_a_little_endian_bit_stream() -> None:
    # sums 3, -3, 0 -> lanes 6, 0, 3 of 3 bits
    codes = [ref.pack_bits(np.array([2, 0, 1]), 2, 1)] * 3
    assert ref.sum_lanes(codes, 3).tolist() == [0b11_000_110, 0b0]


# ---- 1 bit ---------------------------------------------------------------------------------------
def test_onebit_example() -> None:
    """GRACE's torch decoder turns this into [760, 760, 765, 765]."""
    payload, left = encode_onebit(f32(-1, -3, 2, 4), None, 4, KEY)
    assert ref_payload.decode(payload).tolist() == [-2, -2, 3, 3]
    assert left.tolist() == [1, -1, -1, 1]
    assert payload[-1] == 0b1100


def test_onebit_means_minimise_the_residual() -> None:
    """The mean of each class is the mean of its members, to fp32: residuals of a class cancel."""
    x = random_f32(1000)
    _, left = encode_onebit(x, None, 1000, KEY)
    for member in (x > 0, ~(x > 0)):
        assert abs(left[member].astype(np.float64).mean()) < 1e-7


def test_onebit_empty_class_has_mean_zero() -> None:
    scales, codes, left = ref.onebit_encode(f32(1, 2, 3), ref.Piece(3, 3))
    assert scales.tolist() == [[0, 2]]
    assert codes.tolist() == [0b111]
    assert left.tolist() == [-1, 0, 1]


def test_onebit_group_without_gradient_keeps_its_residual() -> None:
    """A constantly zero row would otherwise accumulate error, since a sign cannot say zero."""
    residual = f32(0.5, -0.25, 0.125, 1.0, 2.0, -1.0)
    x = f32(0.0, -0.0, 0.0, 1.0, 0.0, 0.0)
    payload, left = encode_onebit(x, residual, 3, KEY)
    assert ref_payload.decode(payload)[:3].tolist() == [0, 0, 0]
    assert left[:3].tolist() == residual[:3].tolist()
    assert (left[3:] != residual[3:]).any()
    assert payload[-1] & 0b111 == 0b101  # bits stay those of gradient + residual


def test_onebit_zero_of_either_sign_is_bit_zero() -> None:
    _, codes, left = ref.onebit_encode(f32(0.0, -0.0, 1.0), ref.Piece(3, 3))
    assert codes.tolist() == [0b100]
    assert bits(left) == bits([0.0, -0.0, 0.0])


def test_onebit_overflow_of_gradient_plus_residual_is_flagged() -> None:
    payload, _ = encode_onebit(f32(3e38, 1), f32(3e38, 0), 2, KEY)
    assert ref_payload.unpack_payload(payload)[0].flags == ref_payload.NONFINITE


def test_float_average_adds_in_payload_order() -> None:
    big, one = f32(1e8), f32(1)
    assert bits(ref.float_average([big, -big, one])) == bits(one / np.float32(3))
    assert bits(ref.float_average([one, big, -big])) == bits(f32(0))


# ---- entropy-coded codes -------------------------------------------------------------------------
@pytest.mark.parametrize("number", range(16))
def test_entropy_tables_are_prefix_codes_near_the_entropy(number: int) -> None:
    """Every bit string begins with one symbol, and a mean pair takes little more than its entropy,
    or the one bit that any symbol takes.
    """
    weights, table = entropy.WEIGHTS[number], entropy.table(number)
    single = np.array([*weights[:0:-1], *weights], float) / 2**14
    pairs = np.outer(single, single)
    lengths, escapes = table.lengths[1:16, 1:16], table.escapes[1:16, 1:16]
    assert sum(1 / 2**n for n in (*lengths[~escapes], table.lengths[0, 0])) == 1
    assert all(read[0] for read in table.read)
    assert (escapes == (pairs == 0)).all()
    assert 0 < 1 - pairs.sum() < 0.12
    bound = -(pairs[pairs > 0] * np.log2(pairs[pairs > 0])).sum()
    assert bound <= (pairs * lengths).sum() + 0.01 < max(bound + 0.25, 1.1)


def test_package_merge_of_a_worked_example() -> None:
    """Weights whose unlimited code has lengths 1, 2, 3, 4, 5, 5."""
    weights = [32, 16, 8, 4, 2, 1]
    assert entropy.code_lengths(weights, 11) == [1, 2, 3, 4, 5, 5]
    assert entropy.code_lengths(weights, 4) == [1, 2, 4, 4, 4, 4]
    assert entropy.code_lengths(weights, 3) == [2, 2, 3, 3, 3, 3]


def test_entropy_codes_are_laid_out_as_drawn() -> None:
    """Four elements are two pairs, one of each half: behind the table's number one from the first
    byte on, one from the last byte back. Table 7 knows pairs of -1, 0, 1 alone.
    """
    pairs = np.array([[0, 0], [0, -300]])
    assert entropy.pack_pairs(pairs[:1], 7).tolist() == [0]
    escape, length = (int(a[0, 0]) for a in (entropy.table(7).symbols, entropy.table(7).lengths))
    # nothing for 0; 300 = 1 0010 1100 has 9 bits, is negative, and 0010 1100 is below its top bit
    written = escape | (0 | 9 << 4 | 1 << 8 | 0b00101100 << 9) << length
    nbytes = -(-(length + 17) // 8)
    assert entropy.pack_pairs(pairs[1:], 7).tobytes() == written.to_bytes(nbytes, "little")
    found = entropy.unpack_pairs(entropy.pack_pairs(pairs, 7), 2, 7)
    assert found == [(0, False), (0, False), (0, True), (-300, True)]
    scales, codes, _ = entropy.entropy_encode(f32(-1, 0, 3, 0.2, -2), ref.Piece(5, 4096), 512)
    assert codes.tobytes() == bytes.fromhex("0DEE060005")  # the example of wire-format.md
    decoded = entropy.entropy_decode(codes, scales, ref.Piece(5, 4096), 512)
    assert bits(decoded) == bits(scales * f32(-2, 0, 6, 0, -4))


def test_entropy_tables_are_the_documented_ones() -> None:
    document = (VECTORS.parents[1] / "docs/reference/wire-format.md").read_text()
    found = re.findall(r"^\| (\d+) \|((?: \d+ \|){8})", document, re.MULTILINE)
    rows = [(int(number), tuple(map(int, row.split("|")[:8]))) for number, row in found]
    assert rows == list(enumerate(entropy.WEIGHTS))


@pytest.mark.parametrize("numel", [*range(1, 65), 500, 1000, 4095, 4096])
def test_the_largest_step_fits_whatever_the_codes(numel: int) -> None:
    """At 2^(255/32 - 4) root mean squares, codes c have sum (|c| - 1/2)^2 <= numel / step^2: so
    few are not 0 that the table for them fits them into 1 bit a value, each in a pair of its own.
    """
    step, room = 2 ** (255 / 32 - 4), entropy.stream_code_nbytes(numel, 512)
    pairs, fours = (numel + 1) // 2, numel / step**2
    for c4 in range(int(fours / 3.5**2) + 1):
        for c3 in range(int((threes := fours - c4 * 3.5**2) / 2.5**2) + 1):
            for c2 in range(int((twos := threes - c3 * 2.5**2) / 1.5**2) + 1):
                counts = np.zeros(9, np.int64)
                counts[1:5] = int((twos - c2 * 1.5**2) / 0.5**2), c2, c3, c4
                counts[0] = numel - counts.sum()
                number = int(np.argmin([counts @ entropy.table(t).costs for t in range(16)]))
                worst = [worst_bits(number, c) for c in range(5)]
                bits = (pairs - counts[1:].sum()) * worst[0] + counts[1:5] @ worst[1:]
                assert 8 + bits + 14 <= 8 * room, (counts, number)


def worst_bits(number: int, code: int) -> int:
    """Return the most bits of a pair of 0 and a code, over signs and order."""
    of = entropy.table(number)
    sizes = []
    for a, b in ((0, code), (0, -code), (code, 0), (-code, 0)):
        where = a + entropy.OUT, b + entropy.OUT
        behind = 8 + code.bit_length() if of.escapes[where] else 0
        sizes.append(int(of.lengths[where]) + behind)
    return max(sizes)


# ---- payloads ------------------------------------------------------------------------------------
def test_header_is_laid_out_as_drawn() -> None:
    payload = ref_payload.encode_ternary(random_f32(9), f32(1, 2), 5, KEY)
    assert len(payload) == 32 + 2 * 4 + 3
    assert payload[:4] == b"GCMP"
    assert list(payload[4:8]) == [2, ref_payload.TERNARY, ref.F32, 0]
    assert struct.unpack_from("<5I", payload, 8) == (9, 5, 2, KEY.step, KEY.stream)
    crc = ref_payload.crc32c(payload[32:], ref_payload.crc32c(payload[:28]))
    assert payload[28:32] == struct.pack("<I", crc)
    assert struct.unpack_from("<2f", payload, 32) == (1, 2)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_lanes_of_a_payload_that_is_not_finite_decode_to_nan(bad: float) -> None:
    inputs = f32(1, 2, 3, 4, 5), f32(1, bad, 3, 4, 5)
    scales = ref.ternary_scales(inputs[1], ref.Piece(5, 2))
    shared = [ref_payload.encode_ternary(x, scales, 2, KEY) for x in inputs]
    assert np.isnan(ref_payload.decode(ref_payload.encode_lanes(shared, KEY), 2)).all()


@pytest.mark.parametrize(
    ("check", "offset", "patch"),
    [("scale", 32, struct.pack("<f", -1.0)), ("lane", 40, b"\x05"), ("padding", 43, b"\x80")],
)
def test_lanes_that_are_not_written_are_refused(check: str, offset: int, patch: bytes) -> None:
    parts = [ref_payload.encode_ternary(random_f32(9), f32(1, 2), 5, KEY) for _ in range(2)]
    lanes = ref_payload.encode_lanes(parts, KEY)
    bad = bytearray(lanes[:offset] + patch + lanes[offset + len(patch) :])
    bad[28:32] = struct.pack("<I", ref_payload.crc32c(bad[32:], ref_payload.crc32c(bad[:28])))
    with pytest.raises(ValueError, match=f"^{check}:"):
        ref_payload.decode(bytes(bad), 2)
