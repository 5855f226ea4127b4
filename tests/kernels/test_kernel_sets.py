"""Every kernel set against the NumPy reference, byte for byte, by way of the protocol that all of
them have (`gradcomp.kernels.Kernels`); the bytes around their output stay as they were.

The CPU's set is a row for each tier. Another kernel set is another row of `_codes.SETS`. Weight
updates and splits are in `test_update.py`.
"""

from __future__ import annotations

import ctypes
import itertools
import platform

import numpy as np
import pytest
import torch
from _codes import (
    COMPILED,
    COUNTS,
    DTYPES,
    FAMILIES,
    ONEBIT,
    SEEDS,
    SETS,
    TERNARY,
    VALUES,
    WORDS,
    Code,
    average,
    code_for,
    code_of,
    decode,
    encode,
    encoded,
    kernel_settings,
    lanes,
    on,
    one_piece,
    random_payload,
    rows_of,
    running,
    sum_lanes,
    table_of,
    tensor,
    tensor_of,
)
from _far import FAR, at_place
from _tables import (
    ARRAY_DTYPES,
    GUARD,
    KINDS,
    SPECIAL,
    Piece,
    Table,
    canonical,
    flushing,
    guarded,
    pieces,
    same_bytes,
    values,
)
from hypothesis import given
from hypothesis import strategies as st
from reference import codec as ref
from reference import entropy, rotation

from gradcomp.kernels import check, host
from gradcomp.kernels.tables import Groups
from gradcomp.payload.rng import STREAM_ROTATION

NEAREST_OF_ONE = Code("nearest", 2, 1, 2, 3, (1.0,))


# ---- statistics ----------------------------------------------------------------------------------
@kernel_settings
@given(
    parts=pieces(),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(KINDS),
    sigma=st.sampled_from([None, 2.5, 1.0, 0.001]),
    seed=SEEDS,
)
def test_scales(parts, dtype, kind, sigma, seed):
    rng = np.random.default_rng(seed)
    table = Table(parts, 2, 1, rng)
    source = tensor_of(table, kind, dtype, rng)
    edges, numels, want, bad = [0], [], [], False
    for i, piece in enumerate(parts):
        table.rows["block"][i] = edges[-1]
        numels += [g.stop - g.start for g in piece.ref.groups()]
        edges += [edges[-1] + n for n in np.cumsum([-(-n // 512) for n in numels[len(want) :]])]
        x = source[table.data(i)]
        want += list(ref.ternary_scales(x, piece.ref, -1.0 if sigma is None else sigma))
        bad |= not np.isfinite(ref.to_float32(x)).all()
    groups = Groups(np.array(edges, np.uint64), np.array(numels, np.uint32))
    for row in SETS:
        out = guarded(len(want), np.float32)
        with running(row) as kernels:
            into, blocks = tensor(out[: len(want)]), kernels.scratch(groups)
            with on(kernels, source) as (x,):
                seen = kernels.scales(x, rows_of(table), groups, sigma, blocks, into)
        same_bytes(out[: len(want)], np.array(want, np.float32), row.tier)
        assert (out[len(want) :].view(np.uint8) == GUARD).all()
        assert seen == bad


# ---- encoders ------------------------------------------------------------------------------------
def scales_of(kind, x, piece, rng):
    """Return what TernGrad's encoder is given: scales as it measures them, and others."""
    if kind in ("max", "clip"):
        return ref.ternary_scales(x, piece, 1.0 if kind == "clip" else -1.0)
    if kind == "special":
        return rng.choice(np.abs(SPECIAL), len(piece.groups()))
    fixed = {"zero": 0.0, "denormal": 1e-45, "huge": 3e38}
    scale = fixed[kind] if kind in fixed else rng.choice([np.inf, np.nan])
    return np.full(len(piece.groups()), scale, np.float32)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "lanes"])
@kernel_settings
@given(
    parts=pieces(),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(KINDS),
    scaling=st.sampled_from(
        ["max", "max", "clip", "special", "zero", "denormal", "huge", "nonfinite"]
    ),
    words=st.tuples(WORDS, WORDS, WORDS, st.sampled_from([0, 1, 3, 2**31 - 1])),
    residuals=st.sampled_from(["none", "in", "out", "both", "same", "same"]),
    residual_kind=st.sampled_from(["normal", "normal", "zeros", "huge", "special", "nonfinite"]),
    means=st.sampled_from([None, None, (-1.0, 1.0), (-0.0, 3e38)]),
    decay=st.sampled_from([1.0, 1.0, 0.25, 0.3, 1e-30]),
    keeps=st.booleans(),
    seed=SEEDS,
)
def test_encode(
    family, parts, dtype, kind, scaling, words, residuals, residual_kind, means, decay, keeps, seed
):
    """Codes, scales, new residuals and those that are kept.

    `scaling`, `words`: of ternary codes. `residuals` to `keeps`: of codes with error feedback,
    whose planes are given or not, or are one ("same").
    """
    rng = np.random.default_rng(seed)
    code = code_of(family, rng)
    table = table_of(code, parts, rng)
    parts = table.pieces
    source = tensor_of(
        table, "normal" if (family, kind) == ("values", "bits") else kind, dtype, rng
    )
    old = guarded(table.plane_numel, np.float32)
    for i, piece in enumerate(parts):
        old[table.plane(i)] = values(residual_kind, piece.numel, ref.F32, rng)
        if code.feeds_back and rng.random() < 0.5:  # a group without gradient beside others
            source[table.data(i)][: min(piece.numel, piece.group_numel)] = 0
    has_in = code.feeds_back and residuals in ("in", "both", "same")
    has_out = code.feeds_back and residuals in ("out", "both", "same")
    empty = guarded(table.payload_nbytes)
    want, want_left = empty.copy(), guarded(table.plane_numel, np.float32)
    if residuals == "same":
        want_left = old.copy()
    bad, key = False, ref.Key(seed=words[0], rank=words[1], step=words[2], stream=words[3])
    for i, piece in enumerate(parts):
        x, before = source[table.data(i)], old[table.plane(i)] if has_in else None
        scales, named = (), key._replace(parameter=piece.parameter)
        if family == "ternary":
            scales = scales_of(scaling, x, piece.ref, rng)
            table.put_scales(empty, i, scales)
        scales, codes, left, odd = encoded(
            code, x, piece.ref, scales=scales, key=named, before=before, means=means, decay=decay
        )
        want[table.codes(i)] = codes
        table.put_scales(want, i, scales if family != "ternary" else table.get_scales(empty, i))
        want_left[table.plane(i)] = left
        bad |= odd
    for row in SETS:
        payload = guarded(table.payload_nbytes, misalign=row.tier)
        payload[: len(empty)] = empty[: len(payload)]
        plane_in = old.copy()
        plane_out = plane_in if residuals == "same" else guarded(table.plane_numel, np.float32)
        kept, want_kept = (guarded(table.plane_numel, np.float32, seed % 4) for _ in range(2))
        for i in range(len(parts) * (keeps and has_in)):
            want_kept[table.plane(i)] = old[table.plane(i)]
        given = (has_in, plane_in), (has_out, plane_out), (keeps, kept)
        planes = tuple(plane if is_given else None for is_given, plane in given)
        options = {"planes": planes, "decay": decay, "means": means, "key": key}
        with running(row) as kernels:
            seen = encode(kernels, code, table, source, payload, **options)
        same_bytes(payload, want[: len(payload)], row.tier)
        same_bytes(kept, want_kept, row.tier)
        if has_out:
            same_bytes(plane_out, want_left, row.tier)
        elif residuals != "same":
            assert (plane_out.view(np.uint8) == GUARD).all()
        assert seen == bad


def tie_of_runs(code):
    """Return values whose scale is exactly between two float32 if the sums of their blocks are
    added one after the other (the first block's is so large that no other changes it), and above if
    a run of 262,144 elements is summed by itself.
    """
    if code is ONEBIT:  # the mean of the positive ones is 2^24 + 1 times a power of two
        x = np.full(1 << 20, 2.0**-40, np.float32)
        x[:2] = 2.0**24, 1.0
        return x
    # a root mean square of 2^24 + 1: the squares of four values add up to its square times 2^20
    large = np.float32([2.0**34, 2.0**22, 2.0**22, 2.0**10])
    half = np.full(1 << 20, 2.0**2, np.float32)
    half[:4] = large
    return half if code is not TERNARY else np.stack([half, -half], axis=1).ravel()


@pytest.mark.parametrize(
    "code", [ONEBIT, TERNARY, NEAREST_OF_ONE], ids=["1 bit", "TernGrad", "nearest"]
)
def test_groups_are_summed_in_runs(code, row):
    x = tie_of_runs(code)
    if code is TERNARY:
        table, source = one_piece(code, x)
        table.rows["block"] = 0
        groups = Groups(np.array([0, len(x) // 512], np.uint64), np.array([len(x)], np.uint32))
        out = guarded(1, np.float32)[:1]
        with on(row.kernels, source) as (given,):
            scratch = row.kernels.scratch(groups)
            row.kernels.scales(given, rows_of(table), groups, 1.0, scratch, tensor(out))
        seen, want = out[0], ref.ternary_scales(x, table.pieces[0].ref, 1.0)[0]
    else:
        table, source = one_piece(code, x)
        payload = guarded(table.payload_nbytes)
        encode(row.kernels, code, table, source, payload)
        seen = np.ravel(table.get_scales(payload, 0))[-1]
        want = encoded(code, x, table.pieces[0].ref, scales=(), key=ref.Key(), before=None,
                       means=None, decay=1.0)[0][-1]  # fmt: skip
    assert seen == want
    assert np.frexp(seen)[0] == np.frexp(np.float32(2**24 + 2))[0]


def encode_alone(code, x, row, scales=None, **more):
    """Return whether a value of one piece was not finite, and its codes."""
    table, source = one_piece(code, x, **more.pop("piece", {}))
    payload = guarded(table.payload_nbytes)
    if scales is not None:
        table.put_scales(payload, 0, scales)
    with running(row) as kernels:
        seen = encode(kernels, code, table, source, payload, **more)
    return seen, payload[table.codes(0)]


@pytest.mark.parametrize("scale", [1.0, 3.0, 0.7, 1e-30, 6.1e37])
def test_ternary_encode_of_ties_only(scale, row):
    """Every 16-bit draw ties: the thresholds are the draws, and the rests stand just below and
    above the deep draws.

    fp32 holds a threshold plus a multiple of 1/256 exactly, so what must come out is known without
    a reference. Values are chosen whose quotient by the scale is that row; elements without such
    a value are 0. A tier that multiplies by the inverse of the scale gets some of these wrong by
    one.
    """
    n, key = 20_003, ref.Key(seed=3, rank=1, step=2, parameter=5)
    elements, divisor = np.arange(n), np.float32(scale)
    draws, deep = ref.ternary_draws(elements, key), ref.deep_draws(elements, key)
    below = deep >> 24  # in 1/256: rest * 2^32 <= deep
    for rest, kept in ((below, 0), (below + 1, 1)):
        p = ((draws + rest / 256) / 65536).astype(np.float32)
        x, near = np.zeros(n, np.float32), (p.astype(np.float64) * divisor).astype(np.float32)
        down, up = np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(np.inf))
        for candidate in (near, down, up):
            x = np.where((x == 0) & (candidate / divisor == p), candidate, x)
        assert (x != 0).mean() > 0.6
        x = np.where(elements % 3 == 0, -x, x)
        _, codes = encode_alone(TERNARY, x, row, divisor, key=key, piece={"parameter": 5})
        same_bytes(codes, ref.pack_bits((np.sign(x) * kept).astype(int) + 1, 2, 1), row.tier)


@pytest.mark.parametrize(
    "far", [16383.0, 16384.0, 32767.0, 32768.0, 65536.0, 1e9, 3e38, np.inf, np.nan]
)
@pytest.mark.parametrize("group", [5000, 100])
def test_ternary_encode_far_above_the_scale(group, far, row):
    """Thresholds that no 32-bit integer holds: such elements are +-1 for sure, and their
    neighbours what they were.
    """
    n, key = 5000, ref.Key(seed=3, rank=1, step=2, parameter=5)
    x = (np.random.default_rng(1).random(n) * 2 - 1).astype(np.float32)
    x[::997] = far
    x[1::997] = -far
    scales, piece = np.ones(-(-n // group), np.float32), {"group": group, "parameter": 5}
    seen, codes = encode_alone(TERNARY, x, row, scales, key=key, piece=piece)
    assert seen == (not np.isfinite(far))
    same_bytes(codes, ref.ternary_encode(x, scales, ref.Piece(n, group), key), row.tier)


def test_ternary_encode_of_a_tie_with_the_deep_draw(row):
    """One of the rare elements with draw 0 and a deep draw that fp32 holds: equal is not below."""
    key, element = ref.Key(seed=1), 3876382
    at = np.array([element])
    deep = int(ref.deep_draws(at, key)[0])
    assert (ref.ternary_draws(at, key)[0], deep) == (0, 0xC4B61400)
    equal, here = np.float32(deep / 2.0**48), np.arange(16) == 6
    above, below = np.nextafter(equal, np.float32(1)), np.nextafter(equal, np.float32(0))
    for p, code in ((equal, 1), (above, 2), (below, 1)):
        x, piece = np.where(here, p, np.float32(0)), {"group": 2**32 - 1, "start": element - 6}
        _, codes = encode_alone(TERNARY, x, row, 1.0, key=key, piece=piece)
        same_bytes(codes, ref.pack_bits(np.where(here, code, 1), 2), row.tier)


@pytest.mark.parametrize("code", VALUES)
def test_every_16_bit_pattern_converts_alike(code, row):
    """All bf16 and f16 sources, NaN patterns included, encode as on the portable tier; numbers
    as in the reference.
    """
    value_dtype, patterns = int(code.option[0]), np.arange(65536, dtype=np.uint16)
    for dtype in (ref.BF16, ref.F16):
        x = patterns.view(ARRAY_DTYPES[dtype])
        wide = ref.to_float32(x)
        portable, codes = (
            encode_alone(code, x, each)[1].view(ARRAY_DTYPES[value_dtype])
            for each in (SETS[0], row)
        )
        same_bytes(codes, portable, row.tier)
        got, is_number = ref.to_float32(codes), ~np.isnan(wide)
        want = ref.to_float32(ref.from_float32(wide, value_dtype))
        same_bytes(got[is_number], want[is_number], row.tier)
        assert np.isnan(got[~is_number]).all()


# ---- decoders ------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "nearest"])
@kernel_settings
@given(
    parts=pieces(),
    count=COUNTS,
    shared=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    stream=st.booleans(),
    seed=SEEDS,
)
def test_sum_decode(family, parts, count, shared, dtype, stream, seed):
    rng = np.random.default_rng(seed)
    code = code_of(family, rng)
    table = table_of(code, parts, rng)
    parts = table.pieces
    payloads = [random_payload(code, table, rng) for _ in range(count)]
    offset = int(rng.integers(0, 16))
    want, bad = guarded(table.tensor_numel, ARRAY_DTYPES[dtype], offset), False
    for i, piece in enumerate(parts):
        codes = [p[table.codes(i)] for p in payloads]
        x = average(code, codes, [table.get_scales(p, i) for p in payloads], piece.ref, shared)
        want[table.data(i)] = ref.from_float32(canonical(x), dtype)
        bad |= not np.isfinite(ref.to_float32(want[table.data(i)])).all()
    for row in SETS:
        out = guarded(table.tensor_numel, ARRAY_DTYPES[dtype], offset)
        with running(row) as kernels:
            if family != "values":
                host.validate(tensor(payloads[0]), code_for(code), rows_of(table))
            seen = decode(kernels, code, table, payloads, out, streams=stream, shared=shared)
        same_bytes(out, want, row.tier)
        assert seen == bad


@kernel_settings
@given(parts=pieces(), count=st.sampled_from([1, 2, 3]), misalign=st.integers(0, 7), seed=SEEDS)
def test_any_bytes_of_streams_decode_alike(parts, count, misalign, seed):
    """Tables that do not exist are those modulo 16; what is read beyond a stream is 0, so that
    the bytes behind it count for nothing. The sign of a code times a scale of 0 is not pinned.
    """
    rng = np.random.default_rng(seed)
    code = code_of("entropy", rng)
    table = table_of(code, parts, rng)
    payloads = [guarded(table.payload_nbytes, misalign=misalign) for _ in range(count)]
    for payload, (i, piece) in itertools.product(payloads, enumerate(table.pieces)):
        payload[table.codes(i)] = rng.choice([0, 255, 77, 200], len(payload[table.codes(i)]))
        if rng.random() < 0.5:
            payload[table.codes(i)] = rng.integers(0, 256, len(payload[table.codes(i)]))
        scales = rng.choice(
            np.float32([0, 1, 1e-40, entropy.LARGEST_STEP]), len(piece.ref.groups())
        )
        table.put_scales(payload, i, scales)
    want, first = guarded(table.tensor_numel, np.float32), None
    for i, piece in enumerate(table.pieces):
        codes = [p[table.codes(i)] for p in payloads]
        scales = [table.get_scales(p, i) for p in payloads]
        want[table.data(i)] = average(code, codes, scales, piece.ref, False)
    for row in SETS:
        out = guarded(table.tensor_numel, np.float32)
        with running(row) as kernels:
            decode(kernels, code, table, payloads, out)
        first = out if first is None else first
        same_bytes(out, first, row.tier)
        same_bytes(out + np.float32(0), want + np.float32(0), row.tier)


@pytest.mark.parametrize("row", COMPILED, ids=str, indirect=True)
@pytest.mark.parametrize("count", [64, 127, 128, 255, 256, 300, 32767])
def test_ternary_sums_of_many_payloads_do_not_wrap(count, row):
    """All +1, all -1 and all 0 in turn: sums reach +-count, in values and in lanes."""
    piece, code = Piece(8, 75, 75, 0), lanes(count)
    table, sums = table_of(TERNARY, [piece]), table_of(code, [piece])
    payload = guarded(table.payload_nbytes)
    payload[table.codes(0)] = ref.pack_bits(np.arange(75) % 3, 2, 1)
    table.put_scales(payload, 0, [0.7, 0.3])
    total = (np.arange(75) % 3 - 1) * count
    scales = np.array([0.7, 0.3], np.float32)[piece.ref.group_of]
    out = guarded(table.tensor_numel, np.float32)
    decode(row.kernels, TERNARY, table, [payload] * count, out, shared=True)
    lane = sum_lanes([payload] * count, table, sums, code)
    same_bytes(out[table.data(0)], ref.shared_average(total, scales, count), row.tier)
    same_bytes(lane[sums.codes(0)], ref.pack_bits(total + count, code.bits), row.tier)


@pytest.mark.parametrize("dtype", [ref.BF16, ref.F16])
def test_outputs_round_to_nearest_even(dtype, row):
    """Every output value, its neighbours in fp32 and the half-way points between outputs."""
    patterns = np.arange(65536, dtype=np.uint16)
    wide = ref.to_float32(patterns.view(ARRAY_DTYPES[dtype]))
    wide = wide[np.isfinite(wide)].view(np.uint32)
    half = np.uint32(0x8000 if dtype == ref.BF16 else 0x1000)
    around = [(wide + d).astype(np.uint32) for d in (0, 1, half - 1, half, half + 1)]
    x = np.concatenate(around).view(np.float32)
    table, _ = one_piece(VALUES[0], x)
    payload, out = guarded(table.payload_nbytes), guarded(table.tensor_numel, ARRAY_DTYPES[dtype])
    payload[table.codes(0)] = np.frombuffer(x.tobytes(), np.uint8)
    decode(row.kernels, VALUES[0], table, [payload], out)
    same_bytes(out[table.data(0)], ref.from_float32(canonical(x), dtype), row.tier)


@pytest.mark.parametrize(
    ("dtype", "largest"), [(ref.F32, 0x7F7FFFFF), (ref.BF16, 0x7F7F7FFF), (ref.F16, 0x477FEFFF)]
)
@pytest.mark.parametrize("code", [VALUES[0], TERNARY], ids=lambda code: code.name)
def test_overflow_of_the_output_dtype_is_flagged(code, dtype, largest, row):
    """The largest fp32 value that rounds to a finite output, and the next one, which is half way
    or Inf.
    """
    for bits in (largest, largest + 1):
        x = np.zeros(24, np.float32)
        x[5] = -np.array([bits], np.uint32).view(np.float32)[0]
        table, _ = one_piece(code, x)
        payload, out = guarded(table.payload_nbytes), guarded(200, ARRAY_DTYPES[dtype])
        if code == TERNARY:  # whose scales are finite
            table.put_scales(payload, 0, np.abs(x[5]) if np.isfinite(x[5]) else 3e38)
            codes = ref.pack_bits(np.sign(x).astype(int) + 1, 2, 1)
        else:
            codes = np.frombuffer(x.tobytes(), np.uint8)
        payload[table.codes(0)] = codes
        seen = decode(row.kernels, code, table, [payload], out)
        assert seen == (bits > largest and not (code == TERNARY and dtype == ref.F32))


# ---- units of second moments ---------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [0, 1, 7, 16, 33, 1000])
def test_moments(n, kind, row):
    """As numpy rounds, one operation after the other; what is not finite is flagged, bytes
    behind the end stay.
    """
    rng = np.random.default_rng(n)
    x, r, v = (values(kind, n, ref.F32, rng) for _ in range(3))
    v = np.abs(v)
    floor, inverse, keep, gain = (float(c) for c in np.float32([0.01, 1.7, 0.95, 0.05]))
    with np.errstate(all="ignore"):
        units = np.sqrt(v) + np.float32(floor)
        squares = (x * np.float32(inverse)) * (x * np.float32(inverse)) * np.float32(gain)
        follow = {True: squares + v * np.float32(keep), False: squares + np.float32(keep)}
        quotients, products = {True: (x + r) / units, False: x / units}, x * units
    memory = {name: guarded(n, np.float32) for name in ("units", "out", "after", "values")}

    def same(name, wanted):
        same_bytes(canonical(memory[name][:n]), canonical(wanted.astype(np.float32)), row.tier)
        assert (memory[name][n:].view(np.uint8) == GUARD).all()

    for whole in (True, False):
        residual, before = (r, v) if whole else (None, None)
        into = memory["units"], memory["out"]
        with on(row.kernels, x, residual, v, *into) as (given, added, moments, d, out):
            row.kernels.divide(given, added, moments, floor, d[:n], out[:n])
        same("units", units)
        same("out", quotients[whole])
        with on(row.kernels, x, before, memory["after"]) as (given, moments, after):
            seen = row.kernels.follow(given, inverse, moments, keep, gain, after[:n])
        same("after", follow[whole])
        assert seen == (not np.isfinite(follow[whole]).all())
    memory["values"][:n] = x
    with on(row.kernels, memory["values"], memory["units"]) as (given, d):
        seen = row.kernels.multiply(given[:n], d[:n])
    same("values", products)
    assert seen == (not np.isfinite(products).all())


@pytest.mark.parametrize("n", [0, 1, 7, 33, 1000])
def test_are_finite(n, row):
    """Also the largest numbers; one value that is not finite anywhere is found."""
    x = np.resize(SPECIAL, n).astype(np.float32)
    with on(row.kernels, x) as (given,):
        assert row.kernels.are_finite(given)
    for at, value in zip(range(0, n, 1 + n // 10), [np.nan, np.inf, -np.inf] * 4, strict=False):
        before, x[at] = x[at], value
        with on(row.kernels, x) as (given,):
            assert not row.kernels.are_finite(given)
        x[at] = before


# ---- rotation ------------------------------------------------------------------------------------
TURN = 7, 0, 3, STREAM_ROTATION  # seed, rank, step, stream


def turned(row, x, group, first=0, parameter=11, key=TURN, *, back=False):
    """Return values that a kernel set has rotated."""
    out = x.copy()
    with on(row.kernels, out) as (given,):
        row.kernels.rotate(given, group, first, parameter, key, back=back)
    return out


def unbiased(row, x, group, first=0):
    out = x.copy()
    with on(row.kernels, out) as (given,):
        row.kernels.unbias(given, group, first)
    return out


@pytest.mark.parametrize(
    ("numel", "group", "first"),
    [
        (1, 5, 0),
        (2, 2, 0),
        (3, 3, 0),
        (7, 100, 0),
        (300, 300, 0),
        (384, 128, 0),
        (1000, 96, 0),
        (5000, 5000, 0),
        (2048, 1024, 512),
        (100, 33, 40),
    ],
)
def test_rotation(numel, group, first, row):
    rng = np.random.default_rng(numel)
    x = (rng.standard_normal(numel) * 10.0 ** rng.integers(-3, 4, numel)).astype(np.float32)
    key = ref.Key(7, 0, 3, 11, STREAM_ROTATION)
    there = turned(row, x, group, first)
    same_bytes(there, rotation.rotate(x, group, first, key), row.tier)
    assert np.isclose(np.linalg.norm(there), np.linalg.norm(x), rtol=1e-5)
    same_bytes(unbiased(row, there, group, first), rotation.unbias(there, group, first), row.tier)
    back = turned(row, there, group, first, back=True)
    same_bytes(back, rotation.rotate(there, group, first, key, back=True), row.tier)
    assert np.allclose(back, x, rtol=1e-4, atol=1e-4 * np.abs(x).max())


def test_other_steps_and_parameters_are_rotated_otherwise(row):
    x = np.arange(256, dtype=np.float32)
    keys = [(0, 0, 0, 4), (0, 0, 1, 4), (1, 0, 0, 4), (0, 0, 0, 1)]
    seen = {turned(row, x, 256, parameter=0, key=key).tobytes() for key in keys}
    seen.add(turned(row, x, 256, parameter=1, key=keys[0]).tobytes())
    assert len(seen) == 5


def test_rotation_of_values_that_are_special(row):
    assert not unbiased(row, np.zeros(100, np.float32), 10).any()
    bad = np.ones(64, np.float32)
    bad[3] = np.nan
    assert np.isnan(unbiased(row, turned(row, bad, 64), 64)).all()


# ---- residuals -----------------------------------------------------------------------------------
@pytest.mark.parametrize("row", COMPILED, ids=str, indirect=True)
def test_rescaling_keeps_denormals(row):
    """As a torch operation it flushed where the thread does, and residuals became 0."""
    plane = guarded(100, np.float32)
    plane[:100] = 2.0**-130
    with flushing(True), on(row.kernels, plane) as (given,):
        row.kernels.rescale(given[:100], 0.25)
    assert (plane[:100].view(np.uint32) == np.float32(2.0**-132).view(np.uint32)).all()
    assert (plane[100:].view(np.uint8) == GUARD).all()


# ---- every operation -----------------------------------------------------------------------------
FE_UPWARD = {"x86_64": 0x800, "aarch64": 0x400000}.get(platform.machine())


@pytest.mark.skipif(FE_UPWARD is None, reason="knows the rounding modes of x86-64 and AArch64 only")
@pytest.mark.parametrize("row", COMPILED, ids=str, indirect=True)
@pytest.mark.parametrize("code", [TERNARY, ONEBIT], ids=lambda code: code.name)
def test_results_do_not_depend_on_the_floating_point_environment(code, row):
    """Rounding upwards and flushing denormals in the calling thread change nothing, and stay set
    after the call.
    """
    libm, rng = ctypes.CDLL("libm.so.6"), np.random.default_rng(1)
    n, key, piece = 200, ref.Key(seed=1), ref.Piece(200, 25)
    x, residual = (values("tiny", n, ref.F32, rng) for _ in range(2))
    x[::3] = rng.standard_normal(len(x[::3])).astype(np.float32)
    given_scales = ref.ternary_scales(x, piece, -1.0)
    given_scales[::2] = 1e-44
    before = residual if code.feeds_back else None
    scales, codes, left, _ = encoded(
        code, x, piece, scales=given_scales, key=key, before=before, means=None, decay=1.0
    )
    mean = average(code, [codes] * 3, [scales] * 3, piece, shared=False)
    table, source = one_piece(code, x, group=25)
    out, payload = guarded(table.tensor_numel, np.float32), guarded(table.payload_nbytes)
    old, new = (guarded(table.plane_numel, np.float32) for _ in range(2))
    old[table.plane(0)] = residual
    table.put_scales(payload, 0, scales if code == TERNARY else 0 * scales)
    planes = old, new, None
    with flushing(True):
        mode = libm.fegetround()
        assert libm.fesetround(FE_UPWARD) == 0
        encode(row.kernels, code, table, source, payload, planes=planes, key=key)
        decode(row.kernels, code, table, [payload] * 3, out)
        after = libm.fegetround()
        libm.fesetround(mode)
        assert float(torch.tensor(1e-40) * 0.5) == 0.0
    assert after == FE_UPWARD
    same_bytes(payload[table.codes(0)], codes, row.tier)
    same_bytes(table.get_scales(payload, 0), scales, row.tier)
    same_bytes(out[table.data(0)], mean, row.tier)
    if code.feeds_back:
        same_bytes(new[table.plane(0)], left, row.tier)


@pytest.mark.parametrize("name", check.CODES)
@pytest.mark.parametrize(
    "row", [one for one in SETS if one.name != "shadow"], ids=str, indirect=True
)
def test_places_beyond_two_to_the_31_are_those_of_small_numbers(row, name, tmp_path):
    """In tensors, planes and payloads; a 32-bit offset would end elsewhere. The shadow set copies
    whole tensors.
    """
    far, near = (at_place(row.kernels, name, place, tmp_path) for place in (FAR, 0))
    assert far == near
