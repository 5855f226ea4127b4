"""Every C kernel on every tier against the NumPy reference, byte for byte, and the bytes around
its output untouched.
"""

from __future__ import annotations

import ctypes
import platform

import numpy as np
import pytest
import torch
from _codes import (
    BLOCKS,
    FAMILIES,
    NULL,
    ONEBIT,
    TERNARY,
    VALUES,
    average,
    call_decode,
    call_encode,
    call_validate,
    check,
    code_of,
    decode,
    encode,
    encoded,
    flag,
    lanes,
    one_piece,
    padding_of,
    random_codes,
    random_payload,
    table_of,
    tensor_of,
)
from _tables import (
    ARRAY_DTYPES,
    GUARD,
    KINDS,
    LENGTHS,
    SEGMENT,
    SPECIAL,
    TIERS,
    Piece,
    Table,
    canonical,
    ffi,
    guarded,
    lib,
    pieces,
    pointer,
    pointers,
    same_bytes,
    tier,
    values,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import codec as ref
from reference import payload as ref_payload

DTYPES = [ref.F32, ref.BF16, ref.F16]
SEEDS = st.integers(0, 2**32 - 1)
WORDS = st.sampled_from([0, 1, 2**31 - 1, 2**32 - 1]) | SEEDS
COUNTS = st.sampled_from([1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33])

kernel_settings = settings(database=None, suppress_health_check=list(HealthCheck))


# ---- statistics ----------------------------------------------------------------------------------
@kernel_settings
@given(parts=pieces(), dtype=st.sampled_from(DTYPES), kind=st.sampled_from(KINDS), seed=SEEDS)
def test_block_sums(parts, dtype, kind, seed):
    rng = np.random.default_rng(seed)
    table = Table(parts, 2, 1, rng)
    tensor = tensor_of(table, kind, dtype, rng)
    want, bad = guarded(table.block_count, ref.BLOCK), False
    for i, piece in enumerate(parts):
        x = tensor[table.data(i)]
        blocks = ref.block_sums(x, piece.ref)
        for name in ("sum", "sum_squares"):
            blocks[name][np.isnan(blocks[name])] = np.nan
        first = int(table.rows["block"][i])
        want[first : first + len(blocks)] = blocks
        bad |= not np.isfinite(ref.to_float32(x)).all()
    for number in TIERS:
        got, seen = guarded(table.block_count, ref.BLOCK), flag()
        rows, out = (table.pointer, len(parts)), pointer(got, "gc_block *")
        with tier(number):
            check(lib.gc_block_sums(pointer(tensor), dtype, *rows, out, seen))
        same_bytes(got, want, number)
        assert seen[0] == bad


@kernel_settings
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 511, 512, 513, 1500]), max_size=6),
    sigma=st.sampled_from([2.5, 1.0, 0.001, 1e300, 0.0, -1.0]),
    kind=st.sampled_from(KINDS),
    seed=SEEDS,
)
def test_ternary_scales(lengths, sigma, kind, seed):
    rng = np.random.default_rng(seed)
    groups = [values(kind, n, ref.F32, rng) for n in lengths]
    tables = [ref.block_sums(x, ref.Piece(len(x), max(1, len(x)))) for x in groups]
    blocks = np.concatenate([np.zeros(0, ref.BLOCK), *tables])
    edges = np.cumsum([0, *(len(t) for t in tables)]).astype(np.uint64)
    numels = np.array(lengths, np.uint32)
    want = guarded(len(lengths), np.float32)
    want[: len(lengths)] = [
        ref.group_scale(t, len(x), sigma) for t, x in zip(tables, groups, strict=True)
    ]
    given_blocks = pointer(blocks, "gc_block *"), pointer(edges, "uint64_t *")
    for number in TIERS:
        got = guarded(len(lengths), np.float32)
        groups_of = pointer(numels, "uint32_t *"), len(lengths), sigma, pointer(got, "float *")
        with tier(number):
            check(lib.gc_ternary_scales(*given_blocks, *groups_of))
        same_bytes(got, want, number)


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
    family,
    parts,
    dtype,
    kind,
    scaling,
    words,
    residuals,
    residual_kind,
    means,
    decay,
    keeps,
    seed,
):
    """Codes, scales, new residuals and those that are kept.

    `scaling`, `words`: of ternary codes. `residuals` to `keeps`: of codes with error feedback,
    whose planes are given or not, or are one ("same").
    """
    rng = np.random.default_rng(seed)
    code = code_of(family, rng)
    table = Table(parts, code.bits, code.per_group, rng)
    tensor = tensor_of(
        table, "normal" if (family, kind) == ("values", "bits") else kind, dtype, rng
    )
    old = guarded(table.plane_numel, np.float32)
    for i, piece in enumerate(parts):
        old[table.plane(i)] = values(residual_kind, piece.numel, ref.F32, rng)
        if code.feeds_back and rng.random() < 0.5:  # a group without gradient beside others
            tensor[table.data(i)][: min(piece.numel, piece.group_numel)] = 0
    has_in = code.feeds_back and residuals in ("in", "both", "same")
    has_out = code.feeds_back and residuals in ("out", "both", "same")
    empty = guarded(table.payload_nbytes)
    want, want_left = empty.copy(), guarded(table.plane_numel, np.float32)
    if residuals == "same":
        want_left = old.copy()
    bad, key = False, ref.Key(seed=words[0], rank=words[1], step=words[2], stream=words[3])
    for i, piece in enumerate(parts):
        x, before = tensor[table.data(i)], old[table.plane(i)] if has_in else None
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
    for number in TIERS:
        payload = guarded(table.payload_nbytes, misalign=number)
        payload[: len(empty)] = empty[: len(payload)]
        plane_in = old.copy()
        plane_out = plane_in if residuals == "same" else guarded(table.plane_numel, np.float32)
        kept, want_kept = (guarded(table.plane_numel, np.float32, seed % 4) for _ in range(2))
        for i in range(len(parts) * (keeps and has_in)):
            want_kept[table.plane(i)] = old[table.plane(i)]
        planes = (
            pointer(plane_in, "float *") if has_in else NULL,
            pointer(plane_out, "float *") if has_out else NULL,
            pointer(kept, "float *") if keeps else NULL,
        )
        with tier(number):
            seen = encode(
                code,
                table,
                tensor,
                dtype,
                payload,
                planes=planes,
                decay=decay,
                means=means,
                key=key,
            )
        same_bytes(payload, want[: len(payload)], number)
        same_bytes(kept, want_kept, number)
        if has_out:
            same_bytes(plane_out, want_left, number)
        elif residuals != "same":
            assert (plane_out.view(np.uint8) == GUARD).all()
        assert seen == bad


def encode_alone(code, x, number, scales=None, **more):
    """Return whether a value of one piece was not finite, and its codes."""
    table, tensor = one_piece(code, x, **more.pop("piece", {}))
    payload = guarded(table.payload_nbytes)
    if scales is not None:
        table.put_scales(payload, 0, scales)
    with tier(number):
        seen = encode(code, table, tensor, ref.SOURCE_DTYPES[x.dtype.name], payload, **more)
    return seen, payload[table.codes(0)]


@pytest.mark.parametrize("number", TIERS)
@pytest.mark.parametrize("scale", [1.0, 3.0, 0.7, 1e-30, 6.1e37])
def test_ternary_encode_of_ties_only(scale, number):
    """Every 16-bit draw ties: the thresholds are the draws, and the rests stand just below and
    above the deep draws.

    fp32 holds a threshold plus a multiple of 1/256 exactly, so what must come out is known without
    a reference. Values are chosen whose quotient by the scale is that number; elements without such
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
        _, codes = encode_alone(TERNARY, x, number, divisor, key=key, piece={"parameter": 5})
        same_bytes(codes, ref.pack_bits((np.sign(x) * kept).astype(int) + 1, 2, 1), number)


@pytest.mark.parametrize("number", TIERS)
@pytest.mark.parametrize(
    "far", [16383.0, 16384.0, 32767.0, 32768.0, 65536.0, 1e9, 3e38, np.inf, np.nan]
)
@pytest.mark.parametrize("group", [5000, 100])
def test_ternary_encode_far_above_the_scale(group, far, number):
    """Thresholds that no 32-bit integer holds: such elements are +-1 for sure, and their
    neighbours what they were.
    """
    n, key = 5000, ref.Key(seed=3, rank=1, step=2, parameter=5)
    x = (np.random.default_rng(1).random(n) * 2 - 1).astype(np.float32)
    x[::997] = far
    x[1::997] = -far
    scales, piece = np.ones(-(-n // group), np.float32), {"group": group, "parameter": 5}
    seen, codes = encode_alone(TERNARY, x, number, scales, key=key, piece=piece)
    assert seen == (not np.isfinite(far))
    same_bytes(codes, ref.ternary_encode(x, scales, ref.Piece(n, group), key), number)


@pytest.mark.parametrize("number", TIERS)
def test_ternary_encode_of_a_tie_with_the_deep_draw(number):
    """One of the rare elements with draw 0 and a deep draw that fp32 holds: equal is not below."""
    key, element = ref.Key(seed=1), 3876382
    at = np.array([element])
    deep = int(ref.deep_draws(at, key)[0])
    assert (ref.ternary_draws(at, key)[0], deep) == (0, 0xC4B61400)
    equal, here = np.float32(deep / 2.0**48), np.arange(16) == 6
    above, below = np.nextafter(equal, np.float32(1)), np.nextafter(equal, np.float32(0))
    for p, code in ((equal, 1), (above, 2), (below, 1)):
        x, piece = np.where(here, p, np.float32(0)), {"group": 2**32 - 1, "start": element - 6}
        _, codes = encode_alone(TERNARY, x, number, 1.0, key=key, piece=piece)
        same_bytes(codes, ref.pack_bits(np.where(here, code, 1), 2), number)


@pytest.mark.parametrize("number", TIERS)
@pytest.mark.parametrize("numel", [1, 31, 100, 4097, 40000])
@pytest.mark.parametrize("family", ["onebit", "block", "nearest"])
def test_encoders_add_up_what_a_decay_drops(family, numel, number):
    """(1 - d) * sum |r|, a number a segment; r is what the same call leaves with a decay of 1."""
    code = FAMILIES[family][0]
    x = np.random.default_rng(numel).standard_normal(2 * numel).astype(np.float32)
    table = table_of(code, [Piece(0, numel, 700, 0), Piece(0, numel, numel, 1)])
    tensor, left = guarded(table.tensor_numel, np.float32), []
    for i in range(2):
        tensor[table.data(i)] = x[i * numel : (i + 1) * numel]
    for decay in (1.0, 0.25):
        plane, dropped = guarded(table.plane_numel, np.float32), np.zeros(2)
        planes = NULL, pointer(plane, "float *"), NULL
        more = {"planes": planes, "decay": decay, "dropped": pointer(dropped, "double *")}
        with tier(number):
            encode(code, table, tensor, ref.F32, guarded(table.payload_nbytes), **more)
        left.append(plane)
    want = [0.75 * np.abs(left[0][table.plane(i)].astype(np.float64)).sum() for i in range(2)]
    np.testing.assert_allclose(dropped, want, rtol=1e-5)
    for i in range(2):
        same_bytes(left[1][table.plane(i)], np.float32(0.25) * left[0][table.plane(i)], number)


@pytest.mark.parametrize("number", TIERS)
@pytest.mark.parametrize("code", VALUES)
def test_every_16_bit_pattern_converts_alike(code, number):
    """All bf16 and f16 sources, NaN patterns included, encode as on the portable tier; numbers
    as in the reference.
    """
    value_dtype, patterns = int(code.option[0]), np.arange(65536, dtype=np.uint16)
    for dtype in (ref.BF16, ref.F16):
        x = patterns.view(ARRAY_DTYPES[dtype])
        wide = ref.to_float32(x)
        portable, codes = (
            encode_alone(code, x, each)[1].view(ARRAY_DTYPES[value_dtype])
            for each in (TIERS[0], number)
        )
        same_bytes(codes, portable, number)
        got, is_number = ref.to_float32(codes), ~np.isnan(wide)
        want = ref.to_float32(ref.from_float32(wide, value_dtype))
        same_bytes(got[is_number], want[is_number], number)
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
    table = Table(parts, code.bits, code.per_group, rng)
    payloads = [random_payload(code, table, rng) for _ in range(count)]
    offset = int(rng.integers(0, 16))
    want, bad = guarded(table.tensor_numel, ARRAY_DTYPES[dtype], offset), False
    for i, piece in enumerate(parts):
        codes = [p[table.codes(i)] for p in payloads]
        x = average(code, codes, [table.get_scales(p, i) for p in payloads], piece.ref, shared)
        want[table.data(i)] = ref.from_float32(canonical(x), dtype)
        bad |= not np.isfinite(ref.to_float32(want[table.data(i)])).all()
    for number in TIERS:
        out = guarded(table.tensor_numel, ARRAY_DTYPES[dtype], offset)
        with tier(number):
            if family != "values":
                one = pointer(payloads[0], "const uint8_t *")
                check(call_validate(code, one, table.pointer, len(parts)))
            seen = decode(code, table, payloads, out, dtype, stream, shared)
        same_bytes(out, want, number)
        assert seen == bad


@kernel_settings
@given(parts=pieces(), count=st.sampled_from([1, 2, 5]), shared=st.booleans(), seed=SEEDS)
def test_forbidden_codes_decode_within_bounds(parts, count, shared, seed):
    """Values are unspecified; the elements around them stay as they were."""
    rng = np.random.default_rng(seed)
    table = Table(parts, 2, 1, rng)
    payloads = [rng.integers(0, 256, table.payload_nbytes, np.uint8) for _ in range(count)]
    untouched = np.ones(len(guarded(table.tensor_numel, np.float32)), bool)
    for i in range(len(parts)):
        untouched[table.data(i)] = False
    for number in TIERS:
        out = guarded(table.tensor_numel, np.float32)
        with tier(number):
            decode(TERNARY, table, payloads, out, shared=shared)
        assert (out[untouched].view(np.uint8) == GUARD).all()


@kernel_settings
@given(parts=pieces(), count=COUNTS | st.sampled_from([63, 64, 127, 128]), seed=SEEDS)
def test_ternary_sum_lanes(parts, count, seed):
    rng = np.random.default_rng(seed)
    code = lanes(count)
    source, target = Table(parts, 2, 1, rng), Table(parts, code.bits, 1, rng)
    payloads = [random_payload(TERNARY, source, rng) for _ in range(count)]
    want = guarded(target.payload_nbytes)
    for i, piece in enumerate(parts):
        want[target.codes(i)] = ref.sum_lanes([p[source.codes(i)] for p in payloads], piece.numel)
    for number in TIERS:
        with tier(number):
            same_bytes(sum_lanes(payloads, source, target, code), want, number)


def sum_lanes(payloads, source, target, code):
    """Return a payload of the sums of ternary codes."""
    out = guarded(target.payload_nbytes)
    rows = source.pointer, target.pointer, len(source.pieces), code.bits, pointer(out, "uint8_t *")
    check(lib.gc_ternary_sum_lanes(pointers(payloads), len(payloads), *rows))
    return out


@pytest.mark.parametrize("number", TIERS)
@pytest.mark.parametrize("count", [64, 127, 128, 255, 256, 300, 32767])
def test_ternary_sums_of_many_payloads_do_not_wrap(count, number):
    """All +1, all -1 and all 0 in turn: sums reach +-count, in values and in lanes."""
    piece, code = Piece(8, 75, 75, 0), lanes(count)
    table, sums = table_of(TERNARY, [piece]), table_of(code, [piece])
    payload = guarded(table.payload_nbytes)
    payload[table.codes(0)] = ref.pack_bits(np.arange(75) % 3, 2, 1)
    table.put_scales(payload, 0, [0.7, 0.3])
    total = (np.arange(75) % 3 - 1) * count
    scales = np.array([0.7, 0.3], np.float32)[piece.ref.group_of]
    out = guarded(table.tensor_numel, np.float32)
    with tier(number):
        decode(TERNARY, table, [payload] * count, out, shared=True)
        lane = sum_lanes([payload] * count, table, sums, code)
    same_bytes(out[table.data(0)], ref.shared_average(total, scales, count), number)
    same_bytes(lane[sums.codes(0)], ref.pack_bits(total + count, code.bits), number)


@pytest.mark.parametrize("number", TIERS)
@pytest.mark.parametrize("dtype", [ref.BF16, ref.F16])
def test_outputs_round_to_nearest_even(dtype, number):
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
    with tier(number):
        decode(VALUES[0], table, [payload], out, dtype)
    same_bytes(out[table.data(0)], ref.from_float32(canonical(x), dtype), number)


@pytest.mark.parametrize("number", TIERS)
@pytest.mark.parametrize(
    ("dtype", "largest"), [(ref.F32, 0x7F7FFFFF), (ref.BF16, 0x7F7F7FFF), (ref.F16, 0x477FEFFF)]
)
@pytest.mark.parametrize("code", [VALUES[0], TERNARY], ids=lambda code: code.name)
def test_overflow_of_the_output_dtype_is_flagged(code, dtype, largest, number):
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
        with tier(number):
            seen = decode(code, table, [payload], out, dtype)
        assert seen == (bits > largest and not (code == TERNARY and dtype == ref.F32))


# ---- validators ----------------------------------------------------------------------------------
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("nearest", "values")])
@kernel_settings
@given(numel=st.sampled_from([*LENGTHS[1:], 1000, 1030]), start=st.sampled_from([0, 8]), seed=SEEDS)
def test_validators_find_a_single_bad_bit(family, numel, start, seed):
    """A code that is not written, every padding bit; anywhere, in the second of two segments."""
    rng = np.random.default_rng(seed)
    code = code_of(family, rng)
    table = Table([Piece(0, 64, 64, 0), Piece(start, numel, 7, 1)], code.bits, 1, rng)
    payload = guarded(table.payload_nbytes, misalign=int(rng.integers(0, 8)))
    codes = rng.integers(0, code.top + 1, numel)

    def statuses():
        found = set()
        for number in TIERS:
            with tier(number):
                source = pointer(payload, "const uint8_t *")
                found.add(call_validate(code, source, table.pointer, 2))
        return found

    payload[table.codes(0)] = random_codes(code, 64, rng)
    payload[table.codes(1)] = ref.pack_bits(codes, code.bits, padding_of(code))
    assert statuses() == {lib.GC_OK}
    used = numel * code.bits % 8
    if used:
        payload[table.codes(1).stop - 1] ^= 1 << int(rng.integers(used, 8))
        assert statuses() == {lib.GC_BAD_PADDING}
    if code.forbidden >= 0:
        codes[int(rng.integers(0, numel))] = code.forbidden
        payload[table.codes(1)] = ref.pack_bits(codes, code.bits, padding_of(code))
        assert statuses() == {lib.GC_LANE_RANGE if family == "lanes" else lib.GC_FORBIDDEN_CODE}


def scale_patterns():
    """(bits, whether finite, whether not negative) of scales."""
    for bits in (0, 1, 0x007FFFFF, 0x3F800000, 0x7F7FFFFF):
        yield bits, True, True
    for bits in (0x80000000, 0x80000001, 0xBF800000, 0xFF7FFFFF):
        yield bits, True, False
    for bits in (0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000, 0xFFFFFFFF):
        yield bits, False, False


@pytest.mark.parametrize("number", TIERS)
@pytest.mark.parametrize("count", [1, 2, 8, 9, 33])
def test_scales_validate(count, number):
    status = {True: lib.GC_OK, False: lib.GC_BAD_SCALE}
    for bits, finite, positive in scale_patterns():
        for at in {0, count // 2, count - 1}:
            memory = guarded(4 * count, misalign=3)
            scales = np.full(count, 0x3F800000, np.uint32)
            scales[at] = bits
            memory[: 4 * count] = np.frombuffer(scales.tobytes(), np.uint8)
            source = pointer(memory, "const uint8_t *")
            with tier(number):
                assert lib.gc_scales_validate(source, count, 0) == status[finite]
                assert lib.gc_scales_validate(source, count, 1) == status[finite and positive]


# ---- units of second moments ---------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [0, 1, 7, 16, 33, 1000])
def test_moments(n, kind):
    """As numpy rounds, one operation after the other; what is not finite is flagged, bytes
    behind the end stay.
    """
    rng = np.random.default_rng(n)
    x, r, v = (values(kind, n, ref.F32, rng) for _ in range(3))
    v = np.abs(v)
    floor, inverse, keep, gain = np.float32([0.01, 1.7, 0.95, 0.05])
    with np.errstate(all="ignore"):
        units = np.sqrt(v) + floor
        squares = (x * inverse) * (x * inverse) * gain
        follow = {True: squares + v * keep, False: squares + keep}
        quotients, products = {True: (x + r) / units, False: x / units}, x * units
    memory = {name: guarded(n, np.float32) for name in ("units", "out", "after", "values")}
    into = {name: pointer(memory[name], "float *") for name in memory}
    source, owed, squares = (pointer(a, "const float *") for a in (x, r, v))

    def same(name, wanted):
        same_bytes(canonical(memory[name][:n]), canonical(wanted.astype(np.float32)), 0)
        assert (memory[name][n:].view(np.uint8) == GUARD).all()

    for whole in (True, False):
        left, old, seen = owed if whole else NULL, squares if whole else NULL, flag()
        check(lib.gc_moments_divide(source, left, squares, floor, n, into["units"], into["out"]))
        same("units", units)
        same("out", quotients[whole])
        check(lib.gc_moments_follow(source, inverse, old, keep, gain, n, into["after"], seen))
        same("after", follow[whole])
        assert seen[0] == (not np.isfinite(follow[whole]).all())
    memory["values"][:n], seen = x, flag()
    check(lib.gc_moments_multiply(into["values"], into["units"], n, seen))
    same("values", products)
    assert seen[0] == (not np.isfinite(products).all())


def test_moments_refuse_what_overlaps_or_is_missing():
    memory = [guarded(64) for _ in range(4)]
    a, b, c, d = (pointer(array, "float *") for array in memory)
    seen = flag()
    calls = [
        lib.gc_moments_divide(NULL, NULL, b, 0.1, 4, c, d),
        lib.gc_moments_divide(a, NULL, NULL, 0.1, 4, c, d),
        lib.gc_moments_divide(a, NULL, b, 0.1, 4, NULL, d),
        lib.gc_moments_divide(a, NULL, b, 0.1, 4, c, a),
        lib.gc_moments_multiply(a, NULL, 4, seen),
        lib.gc_moments_multiply(a, b, 4, NULL),
        lib.gc_moments_follow(a, 1.0, b, 0.5, 0.5, 4, a, seen),
        lib.gc_moments_follow(a, 1.0, b, 0.5, 0.5, 4, b, seen),
        lib.gc_moments_follow(a, 1.0, b, 0.5, 0.5, 4, c, NULL),
    ]
    assert set(calls) == {lib.GC_INVALID_ARGUMENT}
    assert all((array == GUARD).all() for array in memory)
    check(lib.gc_moments_divide(NULL, NULL, NULL, 0.1, 0, NULL, NULL))
    check(lib.gc_moments_multiply(NULL, NULL, 0, seen))
    check(lib.gc_moments_follow(NULL, 1.0, NULL, 0.5, 0.5, 0, NULL, seen))


# ---- checksum, copies, random numbers ------------------------------------------------------------
@kernel_settings
@given(data=st.binary(max_size=700), cut=st.integers(0, 700), misalign=st.integers(0, 15))
def test_crc32c(data, cut, misalign):
    memory = guarded(len(data), misalign=misalign)
    memory[: len(data)] = np.frombuffer(data, np.uint8)
    cut = min(cut, len(data))
    for number in TIERS:
        base = pointer(memory, "const uint8_t *")
        with tier(number):
            first = lib.gc_crc32c(0, base, cut)
            assert lib.gc_crc32c(first, base + cut, len(data) - cut) == ref_payload.crc32c(data)


@pytest.mark.parametrize("number", TIERS)
def test_crc32c_of_long_data(number):
    """Around multiples of the stretches that a fast tier works on side by side, and continued."""
    data = np.random.default_rng(0).integers(0, 256, 40_000, np.uint8)
    base, want, done = pointer(data, "uint8_t *"), 0, 0
    with tier(number):
        for nbytes in (4095, 4096, 12287, 12288, 12289, 24576, 24583, 36864, 40000):
            want, done = ref_payload.crc32c(data[done:nbytes].tobytes(), want), nbytes
            assert lib.gc_crc32c(0, base, nbytes) == want
            assert lib.gc_crc32c(lib.gc_crc32c(0, base, 777), base + 777, nbytes - 777) == want


def test_copy_moves_ranges_and_nothing_else():
    source = np.arange(200, dtype=np.uint8)
    ranges = np.array([(10, 100, 7), (40, 0, 1), (60, 3, 0), (64, 50, 90)], "<u8")
    rows, count = pointer(ranges, "const gc_copy_range *"), len(ranges)
    for number in TIERS:
        target = guarded(160)
        want = target.copy()
        for dst, src, nbytes in ranges.tolist():
            want[dst : dst + nbytes] = source[src : src + nbytes]
        with tier(number):
            both = pointer(target, "uint8_t *"), pointer(source, "uint8_t *")
            check(lib.gc_copy(*both, rows, count))
        same_bytes(target, want, number)


@kernel_settings
@given(counter=st.tuples(WORDS, WORDS, WORDS, WORDS), key=st.tuples(WORDS, WORDS))
def test_philox(counter, key):
    out = ffi.new("uint32_t[4]")
    lib.gc_philox4x32_10(list(counter), list(key), out)
    assert list(out) == ref.philox4x32_10(np.array(counter), key).tolist()


# ---- promises that hold for every kernel ---------------------------------------------------------
ONE_OF_EACH = [family[0] for family in FAMILIES.values()]


class Memory:
    """Arrays that any kernel may be given, their addresses, and what was in them."""

    def __init__(self, numel=64):
        self.arrays = {name: guarded(numel, np.float32) for name in ("src", "out", "plane")}
        self.arrays["src"][:numel] = 1
        self.arrays["plane"][:numel] = 0
        self.arrays["payload"] = guarded(40 + 4 * numel)
        self.arrays["in"] = np.zeros(400 + 4 * numel, np.uint8)
        self.arrays["blocks"] = guarded(numel, ref.BLOCK)
        self.before = {name: array.copy() for name, array in self.arrays.items()}
        self.src, self.out = (pointer(self.arrays[name]) for name in ("src", "out"))
        self.payload = pointer(self.arrays["payload"], "uint8_t *")
        self.plane = pointer(self.arrays["plane"], "float *")
        self.blocks = pointer(self.arrays["blocks"], "gc_block *")
        self.one, self.seen = pointers([self.arrays["in"]]), flag()

    def check_untouched(self, number):
        for name, array in self.arrays.items():
            same_bytes(array, self.before[name], number)

    def all_kernels(self, rows, count):
        """Call every kernel of segments once and return the statuses."""
        planes = {"planes": (self.plane, self.plane, NULL), "decay": 0.5}
        status = {
            "sums": lib.gc_block_sums(self.src, 0, rows, count, self.blocks, self.seen),
            "to lanes": lib.gc_ternary_sum_lanes(self.one, 1, rows, rows, count, 2, self.payload),
        }
        for code in ONE_OF_EACH:
            into = rows, count, self.out, 0, 0, self.seen
            status[f"decode {code.name}"] = call_decode(code, self.one, 1, *into)
            if code.name != "lanes":
                into = rows, count, self.payload, self.seen
                status[f"encode {code.name}"] = call_encode(code, self.src, 0, *into, **planes)
            if code.name != "values":
                status[f"validate {code.name}"] = call_validate(code, self.one[0], rows, count)
        return status


@pytest.mark.parametrize("number", TIERS)
@pytest.mark.parametrize(
    "fault",
    [
        {"start": 4},
        {"group_numel": 0},
        {"start": 2**32 - 8, "numel": 8},  # the end
        {"start": 0, "numel": 2**32 - 4095},  # steps past 2**32
    ],
)
def test_bad_segments_are_refused_before_anything_is_written(fault, number):
    table = Table([Piece(0, 8, 8, 0)] * 2, 32, 2, np.random.default_rng(0))
    for name, value in fault.items():
        table.rows[name][1] = value
    memory = Memory()
    with tier(number):
        statuses = memory.all_kernels(table.pointer, 2)
    assert set(statuses.values()) == {lib.GC_INVALID_ARGUMENT}, statuses
    memory.check_untouched(number)


@pytest.mark.parametrize("number", TIERS)
def test_bad_arguments_are_refused(number):
    table = Table([Piece(0, 8, 8, 0)], 32, 2, np.random.default_rng(0))
    rows, m = table.pointer, Memory()
    one, out, seen = m.one, m.out, m.seen
    many = pointers([m.arrays["in"]] * 32768)
    nan, inf = float("nan"), float("inf")

    def encodes(code, source=m.src, dtype=0, rows=rows, payload=m.payload, seen=seen, **more):
        return call_encode(code, source, dtype, rows, 1, payload, seen, **more)

    def decodes(code, payloads=one, count=1, out=out, dtype=0, flags=0):
        return call_decode(code, payloads, count, rows, 1, out, dtype, flags, seen, True)

    with tier(number):
        calls = {
            "dtype 3": lib.gc_block_sums(m.src, 3, rows, 1, m.blocks, seen),
            "dtype -1": encodes(TERNARY, dtype=-1),
            "stream": encodes(TERNARY, key=ref.Key(stream=2**31)),
            "null source": encodes(TERNARY, source=NULL),
            "null payload": encodes(TERNARY, payload=NULL),
            "null flag": encodes(TERNARY, seen=NULL),
            "null rows": encodes(TERNARY, rows=NULL),
            "onebit dtype": encodes(ONEBIT, dtype=9),
            **{f"decay {d}": encodes(ONEBIT, decay=d) for d in (-0.1, 0.0, 1.1, nan)},
            **{
                f"step {step}": encodes(FAMILIES["nearest"][0]._replace(option=(step,)))
                for step in (0.0, -1.8, nan, inf)
            },
            "means": encodes(ONEBIT, means=(nan, 1.0)),
            "decay of blocks": encodes(BLOCKS[0], decay=2.0),
            "bits of a block": encodes(BLOCKS[0]._replace(option=(3,))),
            "bits of a decoded block": decodes(BLOCKS[0]._replace(option=(16,))),
            "value dtype": encodes(VALUES[0]._replace(option=(2,))),
            "value dtype decoded": decodes(VALUES[0]._replace(option=(2,))),
            "no payload": decodes(TERNARY, count=0),
            "32768 payloads": decodes(TERNARY, many, 32768),
            "unknown flag": decodes(TERNARY, flags=2),
            "out dtype": decodes(ONEBIT, dtype=3),
            "null out": decodes(ONEBIT, out=NULL),
            "lane bits": lib.gc_ternary_sum_lanes(one, 1, rows, rows, 1, 3, m.payload),
            "lane bits decoded": decodes(lanes(2)._replace(option=(2, 2))),
            "world 0": decodes(lanes(1)._replace(option=(0, 2))),
            "world 32768": lib.gc_lanes_validate(one[0], 32768, 17, rows, 1),
            "null scales": lib.gc_scales_validate(NULL, 1, 0),
            "null copy": lib.gc_copy(m.payload, m.payload, NULL, 1),
        }
    assert set(calls.values()) == {lib.GC_INVALID_ARGUMENT}, calls
    m.check_untouched(number)


@pytest.mark.parametrize("number", TIERS)
def test_nothing_to_do_needs_no_memory(number):
    table, seen = Table([Piece(0, 0, 8, 0)], 32, 2, np.random.default_rng(0)), flag()
    with tier(number):
        for rows in ((table.pointer, 1), (NULL, 0)):
            check(lib.gc_block_sums(NULL, 0, *rows, NULL, seen))
            for code in ONE_OF_EACH:
                if code.name != "lanes":
                    check(call_encode(code, NULL, 0, *rows, NULL, seen))
                if code.name != "values":
                    check(call_validate(code, NULL, *rows))
        check(lib.gc_scales_validate(NULL, 0, 1))
        check(lib.gc_copy(NULL, NULL, NULL, 0))
        assert lib.gc_crc32c(5, NULL, 0) == 5
    assert seen[0] == 0


@pytest.mark.parametrize("number", TIERS)
def test_the_nonfinite_flag_is_set_and_never_cleared(number):
    table = Table([Piece(0, 8, 8, 0)], 32, 2, np.random.default_rng(0))
    m, found = Memory(), []
    with tier(number):
        for value in (1, np.nan, 0):
            m.arrays["src"][table.data(0)][3] = value
            check(lib.gc_block_sums(m.src, 0, table.pointer, 1, m.blocks, m.seen))
            found.append(m.seen[0])
    assert found == [0, 1, 1]


FE_UPWARD = {"x86_64": 0x800, "aarch64": 0x400000}.get(platform.machine())


@pytest.mark.skipif(FE_UPWARD is None, reason="knows the rounding modes of x86-64 and AArch64 only")
@pytest.mark.parametrize("number", TIERS)
@pytest.mark.parametrize("code", [TERNARY, ONEBIT], ids=lambda code: code.name)
def test_results_do_not_depend_on_the_floating_point_environment(code, number):
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
    table, tensor = one_piece(code, x, group=25)
    out, payload = guarded(table.tensor_numel, np.float32), guarded(table.payload_nbytes)
    old, new = (guarded(table.plane_numel, np.float32) for _ in range(2))
    old[table.plane(0)] = residual
    table.put_scales(payload, 0, scales if code == TERNARY else 0 * scales)
    planes = pointer(old, "float *"), pointer(new, "float *"), NULL
    flushes = torch.set_flush_denormal(True)
    try:
        with tier(number):
            mode = libm.fegetround()
            assert libm.fesetround(FE_UPWARD) == 0
            encode(code, table, tensor, ref.F32, payload, planes=planes, key=key)
            decode(code, table, [payload] * 3, out)
            after = libm.fegetround()
            libm.fesetround(mode)
        if flushes:
            assert float(torch.tensor(1e-40) * 0.5) == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert after == FE_UPWARD
    same_bytes(payload[table.codes(0)], codes, number)
    same_bytes(table.get_scales(payload, 0), scales, number)
    same_bytes(out[table.data(0)], mean, number)
    if code.feeds_back:
        same_bytes(new[table.plane(0)], left, number)


def test_tiers():
    assert lib.gc_tier_supported(0) == 1
    assert ffi.string(lib.gc_tier_name(0)) == b"portable"
    for outside in (-1, lib.gc_tier_count()):
        assert lib.gc_tier_name(outside) == NULL
        assert lib.gc_tier_supported(outside) == 0
        assert lib.gc_tier_select(outside) != lib.GC_OK
    for number in TIERS:
        with tier(number):
            assert lib.gc_tier_current() == number


def test_status_names():
    names = "OK INVALID_ARGUMENT UNSUPPORTED_TIER FORBIDDEN_CODE BAD_PADDING LANE_RANGE BAD_SCALE"
    for number, name in enumerate(names.split()):
        assert ffi.string(lib.gc_status_name(number)).decode() == f"GC_{name}"
    for other in (-1, len(names.split()), 1000):
        assert ffi.string(lib.gc_status_name(other)) == b"GC_UNKNOWN_STATUS"


def test_structs_have_the_sizes_of_the_contract():
    assert ffi.sizeof("gc_segment") == SEGMENT.itemsize == 56
    assert ffi.sizeof("gc_block") == ref.BLOCK.itemsize == 24
    assert [name for name, _ in ffi.typeof("gc_segment").fields] == list(SEGMENT.names)
