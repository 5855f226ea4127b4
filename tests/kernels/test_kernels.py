"""Every C kernel on every tier against the NumPy reference, byte for byte, and the bytes around
its output untouched.
"""

from __future__ import annotations

import ctypes
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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
    guarded,
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

from gradcomp import _gc

ffi, lib = _gc.ffi, _gc.lib
VECTORS = Path(__file__).parents[1] / "vectors"
DTYPES = [ref.F32, ref.BF16, ref.F16]
SEEDS = st.integers(0, 2**32 - 1)
WORDS = st.sampled_from([0, 1, 2**31 - 1, 2**32 - 1]) | SEEDS
COUNTS = st.sampled_from([1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33])

kernel_settings = settings(database=None, suppress_health_check=list(HealthCheck))


def flag() -> Any:
    return ffi.new("uint32_t *")


def check(status: int) -> None:
    assert ffi.string(lib.gc_status_name(status)) == b"GC_OK"


def tensor_of(table: Table, kind: str, dtype: int, rng: np.random.Generator) -> Any:
    """Return a source tensor that starts anywhere in memory."""
    tensor = guarded(table.tensor_numel, ARRAY_DTYPES[dtype], int(rng.integers(0, 8)))
    for i in range(len(table.pieces)):
        tensor[table.data(i)] = values(kind, table.pieces[i].numel, dtype, rng)
    return tensor


def random_codes(bits: int, top: int, numel: int, rng: np.random.Generator) -> Any:
    """Return packed random codes 0 .. top with the format's padding."""
    return ref.pack_bits(rng.integers(0, top + 1, numel), bits, int(bits == 2 and top == 2))


def random_scales(count: int, rng: np.random.Generator, *, signed: bool) -> Any:
    scales = np.where(
        rng.random(count) < 0.2, rng.choice(np.abs(SPECIAL), count), rng.random(count) * 3
    )
    return (scales * rng.choice([-1, 1], count) if signed else scales).astype(np.float32)


def random_payload(
    table: Table, top: int, rng: np.random.Generator, *, signed: bool = False
) -> Any:
    payload = guarded(table.payload_nbytes, misalign=int(rng.integers(0, 8)))
    for i, piece in enumerate(table.pieces):
        payload[table.codes(i)] = random_codes(table.bits, top, piece.numel, rng)
        count = table.per_group * len(piece.ref.groups())
        table.put_scales(payload, i, random_scales(count, rng, signed=signed))
    return payload


def expect_decoded(table: Table, decoded: list[Any], out: Any, dtype: int) -> bool:
    """Put decoded values into `out` as a kernel would; return whether one is not finite."""
    bad = False
    for i, x in enumerate(decoded):
        out[table.data(i)] = ref.from_float32(canonical(x), dtype)
        bad |= not np.isfinite(ref.to_float32(out[table.data(i)])).all()
    return bad


# ---- statistics ----------------------------------------------------------------------------------
@kernel_settings
@given(parts=pieces(), dtype=st.sampled_from(DTYPES), kind=st.sampled_from(KINDS), seed=SEEDS)
def test_block_sums(parts: list[Piece], dtype: int, kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = Table(parts, 2, 1, rng)
    tensor = tensor_of(table, kind, dtype, rng)
    want = guarded(table.block_count, ref.BLOCK)
    for i, piece in enumerate(parts):
        blocks = ref.block_sums(tensor[table.data(i)], piece.ref)
        for name in ("sum", "sum_squares"):
            blocks[name][np.isnan(blocks[name])] = np.nan
        first = int(table.rows["block"][i])
        want[first : first + len(blocks)] = blocks
    bad = any(
        not np.isfinite(ref.to_float32(tensor[table.data(i)])).all() for i in range(len(parts))
    )
    for number in TIERS:
        got, seen = guarded(table.block_count, ref.BLOCK), flag()
        with tier(number):
            check(
                lib.gc_block_sums(
                    pointer(tensor),
                    dtype,
                    table.pointer,
                    len(parts),
                    pointer(got, "gc_block *"),
                    seen,
                )
            )
        same_bytes(got, want, number)
        assert seen[0] == bad


@kernel_settings
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 511, 512, 513, 1500]), max_size=6),
    sigma=st.sampled_from([2.5, 1.0, 0.001, 1e300, 0.0, -1.0]),
    kind=st.sampled_from(KINDS),
    seed=SEEDS,
)
def test_ternary_scales(lengths: list[int], sigma: float, kind: str, seed: int) -> None:
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
    for number in TIERS:
        got = guarded(len(lengths), np.float32)
        with tier(number):
            check(
                lib.gc_ternary_scales(
                    pointer(blocks, "gc_block *"),
                    pointer(edges, "uint64_t *"),
                    pointer(numels, "uint32_t *"),
                    len(lengths),
                    sigma,
                    pointer(got, "float *"),
                )
            )
        same_bytes(got, want, number)


# ---- ternary -------------------------------------------------------------------------------------
def encode_ternary(
    table: Table, tensor: Any, dtype: int, payload: Any, key: ref.Key, number: int
) -> bool:
    seen, rng_key = flag(), ffi.new("gc_rng_key *", (key.seed, key.rank, key.step, key.stream))[0]
    out = pointer(payload, "uint8_t *")
    with tier(number):
        check(
            lib.gc_ternary_encode(
                pointer(tensor), dtype, table.pointer, len(table.pieces), out, rng_key, seen
            )
        )
    return bool(seen[0])


@kernel_settings
@given(
    parts=pieces(),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(KINDS),
    scaling=st.sampled_from(
        ["max", "max", "clip", "special", "zero", "denormal", "huge", "nonfinite"]
    ),
    words=st.tuples(WORDS, WORDS, WORDS, st.sampled_from([0, 1, 3, 2**31 - 1])),
    seed=SEEDS,
)
def test_ternary_encode(
    parts: list[Piece], dtype: int, kind: str, scaling: str, words: tuple[int, ...], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    table = Table(parts, 2, 1, rng)
    tensor = tensor_of(table, kind, dtype, rng)
    empty = guarded(table.payload_nbytes, misalign=int(rng.integers(0, 8)))
    want = empty.copy()
    key = ref.Key(seed=words[0], rank=words[1], step=words[2], stream=words[3])
    for i, piece in enumerate(parts):
        x, count = tensor[table.data(i)], len(piece.ref.groups())
        fixed = {
            "zero": 0.0,
            "denormal": 1e-45,
            "huge": 3e38,
            "nonfinite": rng.choice([np.inf, np.nan]),
        }
        if scaling in ("max", "clip"):
            scales = ref.ternary_scales(x, piece.ref, 1.0 if scaling == "clip" else -1.0)
        elif scaling == "special":
            scales = rng.choice(np.abs(SPECIAL), count)
        else:
            scales = np.full(count, fixed[scaling], np.float32)
        for payload in (empty, want):
            table.put_scales(payload, i, scales)
        want[table.codes(i)] = ref.ternary_encode(
            x, scales, piece.ref, key._replace(parameter=piece.parameter)
        )
    bad = any(
        not np.isfinite(ref.to_float32(tensor[table.data(i)])).all() for i in range(len(parts))
    )
    for number in TIERS:
        payload = guarded(table.payload_nbytes, misalign=number)
        payload[: len(empty)] = empty[: len(payload)]
        assert encode_ternary(table, tensor, dtype, payload, key, number) == bad
        same_bytes(payload, want[: len(payload)], number)


@pytest.mark.parametrize("number", TIERS)
@pytest.mark.parametrize("scale", [1.0, 3.0, 0.7, 1e-30, 6.1e37])
def test_ternary_encode_of_ties_only(scale: float, number: int) -> None:
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
    table = Table([Piece(0, n, n, 5)], 2, 1, np.random.default_rng(0))
    below = deep >> 24  # in 1/256: rest * 2^32 <= deep
    for rest, kept in ((below, 0), (below + 1, 1)):
        p = ((draws + rest / 256) / 65536).astype(np.float32)
        x, near = np.zeros(n, np.float32), (p.astype(np.float64) * divisor).astype(np.float32)
        for candidate in (
            near,
            np.nextafter(near, np.float32(0)),
            np.nextafter(near, np.float32(np.inf)),
        ):
            x = np.where((x == 0) & (candidate / divisor == p), candidate, x)
        assert (x != 0).mean() > 0.6
        x = np.where(elements % 3 == 0, -x, x)
        tensor = guarded(table.tensor_numel, np.float32)
        tensor[table.data(0)] = x
        payload = guarded(table.payload_nbytes)
        table.put_scales(payload, 0, divisor)
        encode_ternary(table, tensor, ref.F32, payload, key, number)
        want = ref.pack_bits((np.sign(x) * kept).astype(int) + 1, 2, 1)
        same_bytes(payload[table.codes(0)], want, number)


@pytest.mark.parametrize("number", TIERS)
@pytest.mark.parametrize(
    "far", [16383.0, 16384.0, 32767.0, 32768.0, 65536.0, 1e9, 3e38, np.inf, np.nan]
)
@pytest.mark.parametrize("group", [5000, 100])
def test_ternary_encode_far_above_the_scale(group: int, far: float, number: int) -> None:
    """Thresholds that no 32-bit integer holds: such elements are +-1 for sure, and their
    neighbours what they were.
    """
    n, key = 5000, ref.Key(seed=3, rank=1, step=2, parameter=5)
    piece = Piece(0, n, group, 5)
    table, rng = Table([piece], 2, 1, np.random.default_rng(0)), np.random.default_rng(1)
    x = (rng.random(n) * 2 - 1).astype(np.float32)
    x[::997] = far
    x[1::997] = -far
    scales = np.ones(-(-n // group), np.float32)
    tensor = guarded(table.tensor_numel, np.float32)
    tensor[table.data(0)] = x
    payload = guarded(table.payload_nbytes)
    table.put_scales(payload, 0, scales)
    assert encode_ternary(table, tensor, ref.F32, payload, key, number) == (not np.isfinite(far))
    same_bytes(payload[table.codes(0)], ref.ternary_encode(x, scales, piece.ref, key), number)


@pytest.mark.parametrize("number", TIERS)
def test_ternary_encode_of_a_tie_with_the_deep_draw(number: int) -> None:
    """One of the rare elements with draw 0 and a deep draw that fp32 holds: equal is not below."""
    key, element = ref.Key(seed=1), 3876382
    start, at = element - 6, np.array([element])
    deep = int(ref.deep_draws(at, key)[0])
    assert (ref.ternary_draws(at, key)[0], deep) == (0, 0xC4B61400)
    table = Table([Piece(start, 16, 2**32 - 1, 0)], 2, 1, np.random.default_rng(0))
    equal = np.float32(deep / 2.0**48)
    for p, code in (
        (equal, 1),
        (np.nextafter(equal, np.float32(1)), 2),
        (np.nextafter(equal, np.float32(0)), 1),
    ):
        tensor = guarded(table.tensor_numel, np.float32)
        tensor[table.data(0)] = np.where(np.arange(16) == 6, p, np.float32(0))
        payload = guarded(table.payload_nbytes)
        table.put_scales(payload, 0, 1.0)
        encode_ternary(table, tensor, ref.F32, payload, key, number)
        same_bytes(
            payload[table.codes(0)], ref.pack_bits(np.where(np.arange(16) == 6, code, 1), 2), number
        )


@kernel_settings
@given(
    parts=pieces(),
    count=COUNTS,
    shared=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    stream=st.booleans(),
    seed=SEEDS,
)
def test_ternary_sum_decode(
    parts: list[Piece], count: int, shared: bool, dtype: int, stream: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    table = Table(parts, 2, 1, rng)
    payloads = [random_payload(table, 2, rng) for _ in range(count)]
    offset = int(rng.integers(0, 16))
    want = guarded(table.tensor_numel, ARRAY_DTYPES[dtype], offset)
    decoded = [
        ref.ternary_sum_decode(
            [p[table.codes(i)] for p in payloads],
            [table.get_scales(p, i) for p in payloads],
            piece.ref,
            shared,
        )
        for i, piece in enumerate(parts)
    ]
    bad = expect_decoded(table, decoded, want, dtype)
    for number in TIERS:
        out, seen = guarded(table.tensor_numel, ARRAY_DTYPES[dtype], offset), flag()
        with tier(number):
            check(
                lib.gc_ternary_sum_decode(
                    pointers(payloads),
                    count,
                    shared,
                    table.pointer,
                    len(parts),
                    pointer(out),
                    dtype,
                    stream,
                    seen,
                )
            )
        same_bytes(out, want, number)
        assert seen[0] == bad


@pytest.mark.parametrize("number", TIERS)
@pytest.mark.parametrize("count", [64, 127, 128, 255, 256, 300, 32767])
def test_ternary_sums_of_many_payloads_do_not_wrap(count: int, number: int) -> None:
    """All +1, all -1 and all 0 in turn: sums reach +-count, in values and in lanes."""
    piece = Piece(8, 75, 75, 0)
    rng = np.random.default_rng(0)
    table = Table([piece], 2, 1, rng)
    bits = ref.lane_bits(count)
    lanes = Table([piece], bits, 1, rng)
    payload = guarded(table.payload_nbytes)
    payload[table.codes(0)] = ref.pack_bits(np.arange(75) % 3, 2, 1)
    table.put_scales(payload, 0, [0.7, 0.3])
    total = (np.arange(75) % 3 - 1) * count
    scales = np.array([0.7, 0.3], np.float32)[piece.ref.group_of]
    out, seen = guarded(table.tensor_numel, np.float32), flag()
    sums = guarded(lanes.payload_nbytes)
    many = pointers([payload] * count)
    with tier(number):
        check(
            lib.gc_ternary_sum_decode(
                many, count, 1, table.pointer, 1, pointer(out), ref.F32, 0, seen
            )
        )
        check(
            lib.gc_ternary_sum_lanes(
                many, count, table.pointer, lanes.pointer, 1, bits, pointer(sums, "uint8_t *")
            )
        )
    same_bytes(out[table.data(0)], ref.shared_average(total, scales, count), number)
    same_bytes(sums[lanes.codes(0)], ref.pack_bits(total + count, bits), number)


@kernel_settings
@given(parts=pieces(), count=st.sampled_from([1, 2, 5]), shared=st.booleans(), seed=SEEDS)
def test_forbidden_codes_decode_within_bounds(
    parts: list[Piece], count: int, shared: bool, seed: int
) -> None:
    """Values are unspecified; the elements around them stay as they were."""
    rng = np.random.default_rng(seed)
    table = Table(parts, 2, 1, rng)
    payloads = [rng.integers(0, 256, table.payload_nbytes, np.uint8) for _ in range(count)]
    untouched = np.ones(len(guarded(table.tensor_numel, np.float32)), bool)
    for i in range(len(parts)):
        untouched[table.data(i)] = False
    for number in TIERS:
        out = guarded(table.tensor_numel, np.float32)
        before = out.copy()
        with tier(number):
            check(
                lib.gc_ternary_sum_decode(
                    pointers(payloads),
                    count,
                    shared,
                    table.pointer,
                    len(parts),
                    pointer(out),
                    ref.F32,
                    0,
                    flag(),
                )
            )
        same_bytes(out[untouched], before[untouched], number)


# ---- lanes ---------------------------------------------------------------------------------------
@kernel_settings
@given(parts=pieces(), count=COUNTS | st.sampled_from([63, 64, 127, 128]), seed=SEEDS)
def test_ternary_sum_lanes(parts: list[Piece], count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    bits = ref.lane_bits(count)
    source, target = Table(parts, 2, 1, rng), Table(parts, bits, 1, rng)
    payloads = [random_payload(source, 2, rng) for _ in range(count)]
    want = guarded(target.payload_nbytes)
    for i, piece in enumerate(parts):
        want[target.codes(i)] = ref.sum_lanes([p[source.codes(i)] for p in payloads], piece.numel)
    for number in TIERS:
        out = guarded(target.payload_nbytes)
        bytes_out = pointer(out, "uint8_t *")
        with tier(number):
            check(
                lib.gc_ternary_sum_lanes(
                    pointers(payloads),
                    count,
                    source.pointer,
                    target.pointer,
                    len(parts),
                    bits,
                    bytes_out,
                )
            )
        same_bytes(out, want, number)


WORLDS = st.sampled_from([1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 63, 64, 127, 128, 1000, 16384, 32767])


@kernel_settings
@given(
    parts=pieces(), world=WORLDS, dtype=st.sampled_from(DTYPES), stream=st.booleans(), seed=SEEDS
)
def test_lanes_decode(parts: list[Piece], world: int, dtype: int, stream: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    bits = ref.lane_bits(world)
    table = Table(parts, bits, 1, rng)
    payload = guarded(table.payload_nbytes, misalign=int(rng.integers(0, 8)))
    for i, piece in enumerate(parts):
        payload[table.codes(i)] = ref.pack_bits(rng.integers(0, 2 * world + 1, piece.numel), bits)
        table.put_scales(payload, i, random_scales(len(piece.ref.groups()), rng, signed=False))
    offset = int(rng.integers(0, 16))
    want = guarded(table.tensor_numel, ARRAY_DTYPES[dtype], offset)
    decoded = [
        ref.lanes_decode(payload[table.codes(i)], table.get_scales(payload, i), piece.ref, world)
        for i, piece in enumerate(parts)
    ]
    bad = expect_decoded(table, decoded, want, dtype)
    source = pointer(payload, "const uint8_t *")
    for number in TIERS:
        out, seen = guarded(table.tensor_numel, ARRAY_DTYPES[dtype], offset), flag()
        with tier(number):
            check(lib.gc_lanes_validate(source, world, bits, table.pointer, len(parts)))
            check(
                lib.gc_lanes_decode(
                    source,
                    world,
                    bits,
                    table.pointer,
                    len(parts),
                    pointer(out),
                    dtype,
                    stream,
                    seen,
                )
            )
        same_bytes(out, want, number)
        assert seen[0] == bad


# ---- 1 bit ---------------------------------------------------------------------------------------
DECAYS = st.sampled_from([1.0, 1.0, 0.25, 0.3, 1e-30])


@kernel_settings
@given(
    parts=pieces(),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(KINDS),
    residuals=st.sampled_from(["none", "in", "out", "both", "same", "same"]),
    residual_kind=st.sampled_from(["normal", "normal", "zeros", "huge", "special", "nonfinite"]),
    means=st.sampled_from([None, None, (-1.0, 1.0), (-0.0, 3e38)]),
    decay=DECAYS,
    keeps=st.booleans(),
    seed=SEEDS,
)
def test_onebit_encode(
    parts: list[Piece],
    dtype: int,
    kind: str,
    residuals: str,
    residual_kind: str,
    means: tuple[float, float] | None,
    decay: float,
    keeps: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    table = Table(parts, 1, 2, rng)
    tensor = tensor_of(table, kind, dtype, rng)
    old = guarded(table.plane_numel, np.float32)
    for i, piece in enumerate(parts):
        old[table.plane(i)] = values(residual_kind, piece.numel, ref.F32, rng)
        if rng.random() < 0.5 and piece.numel:  # a group without gradient beside others
            size = min(piece.numel, piece.group_numel)
            tensor[table.data(i)][:size] = 0
    want, want_left = guarded(table.payload_nbytes), guarded(table.plane_numel, np.float32)
    if residuals == "same":
        want_left = old.copy()
    has_in, bad = residuals in ("in", "both", "same"), False
    for i, piece in enumerate(parts):
        x, before = tensor[table.data(i)], old[table.plane(i)] if has_in else None
        scales, codes, left = ref.onebit_encode(x, piece.ref, before, means, decay)
        want[table.codes(i)] = codes
        table.put_scales(want, i, canonical(scales).ravel())
        want_left[table.plane(i)] = canonical(left)
        seen_by_encoder = ref.to_float32(x) if before is None else ref.to_float32(x) + before
        bad |= not np.isfinite(seen_by_encoder).all()
    for number in TIERS:
        payload, seen = guarded(table.payload_nbytes), flag()
        plane_in = old.copy()
        plane_out = plane_in if residuals == "same" else guarded(table.plane_numel, np.float32)
        kept, want_kept = (
            guarded(table.plane_numel, np.float32, seed % 4),
            guarded(table.plane_numel, np.float32, seed % 4),
        )
        for i in range(len(parts) * (keeps and has_in)):
            want_kept[table.plane(i)] = old[table.plane(i)]
        with tier(number):
            check(
                lib.gc_onebit_encode(
                    pointer(tensor),
                    dtype,
                    table.pointer,
                    len(parts),
                    pointer(plane_in, "float *") if has_in else ffi.NULL,
                    (
                        pointer(plane_out, "float *")
                        if residuals in ("out", "both", "same")
                        else ffi.NULL
                    ),
                    pointer(kept, "float *") if keeps else ffi.NULL,
                    decay,
                    ffi.NULL,
                    ffi.NULL if means is None else ffi.new("float[2]", means),
                    pointer(payload, "uint8_t *"),
                    seen,
                )
            )
        same_bytes(payload, want, number)
        same_bytes(kept, want_kept, number)
        if residuals in ("out", "both", "same"):
            same_bytes(plane_out, want_left, number)
        else:
            assert (plane_out.view(np.uint8) == GUARD).all()
        assert seen[0] == bad


@kernel_settings
@given(
    parts=pieces(), count=COUNTS, dtype=st.sampled_from(DTYPES), stream=st.booleans(), seed=SEEDS
)
def test_onebit_sum_decode(
    parts: list[Piece], count: int, dtype: int, stream: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    table = Table(parts, 1, 2, rng)
    payloads = [random_payload(table, 1, rng, signed=True) for _ in range(count)]
    offset = int(rng.integers(0, 16))
    want = guarded(table.tensor_numel, ARRAY_DTYPES[dtype], offset)
    decoded = [
        ref.float_average(
            [
                ref.onebit_decode(p[table.codes(i)], table.get_scales(p, i), piece.ref)
                for p in payloads
            ]
        )
        for i, piece in enumerate(parts)
    ]
    bad = expect_decoded(table, decoded, want, dtype)
    for number in TIERS:
        out, seen = guarded(table.tensor_numel, ARRAY_DTYPES[dtype], offset), flag()
        with tier(number):
            check(
                lib.gc_onebit_sum_decode(
                    pointers(payloads),
                    count,
                    table.pointer,
                    len(parts),
                    pointer(out),
                    dtype,
                    stream,
                    seen,
                )
            )
        same_bytes(out, want, number)
        assert seen[0] == bad


# ---- blocks --------------------------------------------------------------------------------------
BITS = st.sampled_from([2, 4, 8])


@kernel_settings
@given(
    parts=pieces(),
    form=st.sampled_from([2, 4, 8, 1.8, 0.3, 1e30]),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(KINDS),
    residuals=st.sampled_from(["none", "in", "out", "both", "same", "same"]),
    residual_kind=st.sampled_from(["normal", "normal", "zeros", "huge", "special", "nonfinite"]),
    decay=DECAYS,
    keeps=st.booleans(),
    seed=SEEDS,
)
def test_block_encode(
    parts: list[Piece],
    form: float,
    dtype: int,
    kind: str,
    residuals: str,
    residual_kind: str,
    decay: float,
    keeps: bool,
    seed: int,
) -> None:
    """`form`: bits of blocks, or, where it is no integer of these, the step of ternary codes."""
    ternary = form not in (2, 4, 8)
    bits = 2 if ternary else int(form)
    encode = lib.gc_nearest_encode if ternary else lib.gc_block_encode
    rng = np.random.default_rng(seed)
    table = Table(parts, bits, 1, rng)
    tensor = tensor_of(table, kind, dtype, rng)
    old = guarded(table.plane_numel, np.float32)
    for i, piece in enumerate(parts):
        old[table.plane(i)] = values(residual_kind, piece.numel, ref.F32, rng)
        if rng.random() < 0.5 and piece.numel:  # a group without gradient beside others
            tensor[table.data(i)][: min(piece.numel, piece.group_numel)] = 0
    want, want_left = guarded(table.payload_nbytes), guarded(table.plane_numel, np.float32)
    if residuals == "same":
        want_left = old.copy()
    has_in, has_out, bad = (
        residuals in ("in", "both", "same"),
        residuals in ("out", "both", "same"),
        False,
    )
    for i, piece in enumerate(parts):
        x, before = tensor[table.data(i)], old[table.plane(i)] if has_in else None
        of = ref.nearest_encode if ternary else ref.block_encode
        scales, codes, left = of(x, piece.ref, form, before, decay)
        want[table.codes(i)] = codes
        table.put_scales(want, i, canonical(scales))
        want_left[table.plane(i)] = canonical(left)
        bad |= not np.isfinite(
            ref.to_float32(x) if before is None else ref.to_float32(x) + before
        ).all()
    for number in TIERS:
        payload, seen, plane_in = guarded(table.payload_nbytes), flag(), old.copy()
        plane_out = plane_in if residuals == "same" else guarded(table.plane_numel, np.float32)
        kept, want_kept = (guarded(table.plane_numel, np.float32, seed % 4) for _ in range(2))
        for i in range(len(parts) * (keeps and has_in)):
            want_kept[table.plane(i)] = old[table.plane(i)]
        with tier(number):
            check(
                encode(
                    pointer(tensor),
                    dtype,
                    table.pointer,
                    len(parts),
                    form,
                    pointer(plane_in, "float *") if has_in else ffi.NULL,
                    pointer(plane_out, "float *") if has_out else ffi.NULL,
                    pointer(kept, "float *") if keeps else ffi.NULL,
                    decay,
                    ffi.NULL,
                    pointer(payload, "uint8_t *"),
                    seen,
                )
            )
        same_bytes(payload, want, number)
        same_bytes(kept, want_kept, number)
        if has_out:
            same_bytes(plane_out, want_left, number)
        else:
            assert (plane_out.view(np.uint8) == GUARD).all()
        assert seen[0] == bad


@kernel_settings
@given(
    parts=pieces(),
    bits=BITS,
    count=COUNTS,
    dtype=st.sampled_from(DTYPES),
    stream=st.booleans(),
    seed=SEEDS,
)
def test_block_sum_decode(
    parts: list[Piece], bits: int, count: int, dtype: int, stream: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    table = Table(parts, bits, 1, rng)
    payloads = [random_payload(table, 2**bits - 1, rng, signed=True) for _ in range(count)]
    offset = int(rng.integers(0, 16))
    want = guarded(table.tensor_numel, ARRAY_DTYPES[dtype], offset)
    decoded = []
    for i, piece in enumerate(parts):
        of_one = [
            ref.block_decode(p[table.codes(i)], table.get_scales(p, i), piece.ref, bits)
            for p in payloads
        ]
        decoded.append(ref.float_average(of_one))
    bad = expect_decoded(table, decoded, want, dtype)
    for number in TIERS:
        out, seen = guarded(table.tensor_numel, ARRAY_DTYPES[dtype], offset), flag()
        with tier(number):
            check(
                lib.gc_block_sum_decode(
                    pointers(payloads),
                    count,
                    bits,
                    table.pointer,
                    len(parts),
                    pointer(out),
                    dtype,
                    stream,
                    seen,
                )
            )
        same_bytes(out, want, number)
        assert seen[0] == bad


@pytest.mark.parametrize("number", TIERS)
@pytest.mark.parametrize("numel", [1, 31, 100, 4097, 40000])
def test_encoders_add_up_what_a_decay_drops(number: int, numel: int) -> None:
    """(1 - d) * sum |r|, a number a segment; r is what the same call leaves with a decay of 1."""
    x = (np.random.default_rng(numel).standard_normal(2 * numel)).astype(np.float32)
    parts = [Piece(0, numel, 700, 0), Piece(0, numel, numel, 1)]
    table = Table(parts, 2, 2, np.random.default_rng(1))
    tensor = guarded(table.tensor_numel, np.float32)
    for i in range(2):
        tensor[table.data(i)] = x[i * numel : (i + 1) * numel]
    for name, more in (("onebit", (ffi.NULL,)), ("block", ()), ("nearest", ())):
        head = {"onebit": (), "block": (2,), "nearest": (1.8,)}[name]
        left = []
        for decay in (1.0, 0.25):
            plane, dropped = guarded(table.plane_numel, np.float32), np.zeros(2)
            payload = pointer(guarded(table.payload_nbytes), "uint8_t *")
            with tier(number):
                check(
                    getattr(lib, f"gc_{name}_encode")(
                        pointer(tensor),
                        0,
                        table.pointer,
                        2,
                        *head,
                        ffi.NULL,
                        pointer(plane, "float *"),
                        ffi.NULL,
                        decay,
                        pointer(dropped, "double *"),
                        *more,
                        payload,
                        flag(),
                    )
                )
            left.append(plane)
        want = [0.75 * np.abs(left[0][table.plane(i)].astype(np.float64)).sum() for i in range(2)]
        np.testing.assert_allclose(dropped, want, rtol=1e-5)
        for i in range(2):
            same_bytes(left[1][table.plane(i)], np.float32(0.25) * left[0][table.plane(i)], number)


# ---- values --------------------------------------------------------------------------------------
@kernel_settings
@given(
    parts=pieces(),
    dtype=st.sampled_from(DTYPES),
    value_dtype=st.sampled_from([ref.F32, ref.BF16]),
    kind=st.sampled_from([k for k in KINDS if k != "bits"]),
    seed=SEEDS,
)
def test_values_encode(
    parts: list[Piece], dtype: int, value_dtype: int, kind: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    table = Table(parts, 32 if value_dtype == ref.F32 else 16, 0, rng)
    tensor = tensor_of(table, kind, dtype, rng)
    want, bad = guarded(table.payload_nbytes), False
    for i in range(len(parts)):
        narrow = ref.from_float32(ref.to_float32(tensor[table.data(i)]), value_dtype)
        want[table.codes(i)] = np.frombuffer(narrow.tobytes(), np.uint8)
        bad |= not np.isfinite(ref.to_float32(narrow)).all()
    for number in TIERS:
        payload, seen = guarded(table.payload_nbytes), flag()
        out = pointer(payload, "uint8_t *")
        with tier(number):
            check(
                lib.gc_values_encode(
                    pointer(tensor), dtype, table.pointer, len(parts), value_dtype, out, seen
                )
            )
        same_bytes(payload, want, number)
        assert seen[0] == bad


@kernel_settings
@given(
    parts=pieces(),
    count=COUNTS,
    value_dtype=st.sampled_from([ref.F32, ref.BF16]),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(KINDS),
    stream=st.booleans(),
    seed=SEEDS,
)
def test_values_sum_decode(
    parts: list[Piece], count: int, value_dtype: int, dtype: int, kind: str, stream: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    table = Table(parts, 32 if value_dtype == ref.F32 else 16, 0, rng)
    payloads = [
        guarded(table.payload_nbytes, misalign=int(rng.integers(0, 8))) for _ in range(count)
    ]
    want, decoded = guarded(table.tensor_numel, ARRAY_DTYPES[dtype]), []
    for i, piece in enumerate(parts):
        narrow = [values(kind, piece.numel, value_dtype, rng) for _ in payloads]
        for payload, x in zip(payloads, narrow, strict=True):
            payload[table.codes(i)] = np.frombuffer(x.tobytes(), np.uint8)
        decoded.append(ref.float_average([ref.to_float32(x) for x in narrow]))
    bad = expect_decoded(table, decoded, want, dtype)
    for number in TIERS:
        out, seen = guarded(table.tensor_numel, ARRAY_DTYPES[dtype]), flag()
        with tier(number):
            check(
                lib.gc_values_sum_decode(
                    pointers(payloads),
                    count,
                    value_dtype,
                    table.pointer,
                    len(parts),
                    pointer(out),
                    dtype,
                    stream,
                    seen,
                )
            )
        same_bytes(out, want, number)
        assert seen[0] == bad


@pytest.mark.parametrize("number", TIERS)
@pytest.mark.parametrize("value_dtype", [ref.F32, ref.BF16])
def test_every_16_bit_pattern_converts_alike(value_dtype: int, number: int) -> None:
    """All bf16 and f16 sources, NaN patterns included, encode as on the portable tier; numbers
    as in the reference.
    """
    piece = Piece(0, 65536, 65536, 0)
    table = Table([piece], 32 if value_dtype == ref.F32 else 16, 0, np.random.default_rng(0))
    for dtype in (ref.BF16, ref.F16):
        tensor = guarded(table.tensor_numel, np.uint16)
        tensor[table.data(0)] = np.arange(65536)
        wide = ref.to_float32(tensor[table.data(0)].view(ARRAY_DTYPES[dtype]))
        codes = []
        for each in (TIERS[0], number):
            payload = guarded(table.payload_nbytes)
            with tier(each):
                check(
                    lib.gc_values_encode(
                        pointer(tensor),
                        dtype,
                        table.pointer,
                        1,
                        value_dtype,
                        pointer(payload, "uint8_t *"),
                        flag(),
                    )
                )
            codes.append(
                payload[table.codes(0)].view(np.float32 if value_dtype == ref.F32 else np.uint16)
            )
        same_bytes(codes[1], codes[0], number)
        got = ref.to_float32(codes[1])
        number_mask = ~np.isnan(wide)
        want = ref.to_float32(ref.from_float32(wide, value_dtype))
        same_bytes(got[number_mask], want[number_mask], number)
        assert np.isnan(got[~number_mask]).all()


@pytest.mark.parametrize("number", TIERS)
@pytest.mark.parametrize("dtype", [ref.BF16, ref.F16])
def test_outputs_round_to_nearest_even(dtype: int, number: int) -> None:
    """Every output value, its neighbours in fp32 and the half-way points between outputs."""
    patterns = np.arange(65536, dtype=np.uint16)
    wide = ref.to_float32(patterns.view(ARRAY_DTYPES[dtype]))
    wide = wide[np.isfinite(wide)].view(np.uint32)
    half = np.uint32(0x8000 if dtype == ref.BF16 else 0x1000)
    x = np.concatenate(
        [(wide + d).astype(np.uint32) for d in (0, 1, half - 1, half, half + 1)]
    ).view(np.float32)
    table = Table([Piece(0, len(x), len(x), 0)], 32, 0, np.random.default_rng(0))
    payload = guarded(table.payload_nbytes)
    payload[table.codes(0)] = np.frombuffer(x.tobytes(), np.uint8)
    out = guarded(table.tensor_numel, ARRAY_DTYPES[dtype])
    with tier(number):
        check(
            lib.gc_values_sum_decode(
                pointers([payload]), 1, ref.F32, table.pointer, 1, pointer(out), dtype, 0, flag()
            )
        )
    same_bytes(out[table.data(0)], ref.from_float32(canonical(x), dtype), number)


@pytest.mark.parametrize("number", TIERS)
@pytest.mark.parametrize(
    ("dtype", "largest"), [(ref.F32, 0x7F7FFFFF), (ref.BF16, 0x7F7F7FFF), (ref.F16, 0x477FEFFF)]
)
def test_overflow_of_the_output_dtype_is_flagged(dtype: int, largest: int, number: int) -> None:
    """The largest fp32 value that rounds to a finite output, and the next one, which is half way
    or Inf.
    """
    n = 24
    for bits in (largest, largest + 1):
        x = np.zeros(n, np.float32)
        x[5] = -np.array([bits], np.uint32).view(np.float32)[0]
        tables = [
            Table([Piece(0, n, n, 0)], width, per, np.random.default_rng(0))
            for width, per in ((32, 0), (2, 1))
        ]
        values_payload, ternary = (guarded(table.payload_nbytes) for table in tables)
        values_payload[tables[0].codes(0)] = np.frombuffer(x.tobytes(), np.uint8)
        ternary[tables[1].codes(0)] = ref.pack_bits(np.sign(x).astype(int) + 1, 2, 1)
        tables[1].put_scales(ternary, 0, np.abs(x[5]) if np.isfinite(x[5]) else 3e38)
        out, seen, seen_ternary = guarded(200, ARRAY_DTYPES[dtype]), flag(), flag()
        one, rows = pointers([values_payload]), tables[0].pointer
        with tier(number):
            check(lib.gc_values_sum_decode(one, 1, ref.F32, rows, 1, pointer(out), dtype, 0, seen))
            assert seen[0] == (bits > largest)
            one, rows = pointers([ternary]), tables[1].pointer
            check(
                lib.gc_ternary_sum_decode(one, 1, 0, rows, 1, pointer(out), dtype, 0, seen_ternary)
            )
            assert seen_ternary[0] == (bits > largest and dtype != ref.F32)


# ---- validators ----------------------------------------------------------------------------------
@kernel_settings
@given(numel=st.sampled_from([*LENGTHS[1:], 1000, 1030]), start=st.sampled_from([0, 8]), seed=SEEDS)
def test_validators_find_a_single_bad_bit(numel: int, start: int, seed: int) -> None:
    """TernGrad `11`, every padding bit, a lane just above the range; anywhere, in the second of
    two segments.
    """
    rng = np.random.default_rng(seed)
    parts = [Piece(0, 64, 64, 0), Piece(start, numel, 7, 1)]
    world = int(rng.choice([1, 2, 3, 5, 9, 60, 100, 129, 300, 32767]))
    bits = ref.lane_bits(world)
    at = int(rng.integers(0, numel))
    # validator, bits of a code, largest code, what stands in its place
    cases: list[tuple[str, int, int, int]] = []
    cases.append(("ternary", 2, 2, 3))
    cases.append(("lanes", bits, 2 * world, 2 * world + 1 if 2 * world + 1 < 1 << bits else -1))
    cases.append(("onebit", 1, 1, -1))
    cases += [("block", 2, 3, -1), ("block", 4, 14, 15), ("block", 8, 254, 255)]
    for name, width, top, forbidden in cases:
        table = Table(parts, width, 1, rng)
        payload = guarded(table.payload_nbytes, misalign=int(rng.integers(0, 8)))
        codes = rng.integers(0, top + 1, numel)
        payload[table.codes(0)] = random_codes(width, top, 64, rng)
        payload[table.codes(1)] = ref.pack_bits(codes, width, int(name == "ternary"))

        def status(
            name: str = name, width: int = width, table: Table = table, payload: Any = payload
        ) -> set[int]:
            source, found = pointer(payload, "const uint8_t *"), set()
            for number in TIERS:
                with tier(number):
                    if name == "lanes":
                        found.add(lib.gc_lanes_validate(source, world, width, table.pointer, 2))
                    elif name == "block":
                        found.add(lib.gc_block_validate(source, width, table.pointer, 2))
                    else:
                        found.add(getattr(lib, f"gc_{name}_validate")(source, table.pointer, 2))
            return found

        assert status() == {lib.GC_OK}
        used = numel * width % 8
        if used:
            last = table.codes(1).stop - 1
            payload[last] ^= 1 << int(rng.integers(used, 8))
            assert status() == {lib.GC_BAD_PADDING}
            payload[table.codes(1)] = ref.pack_bits(codes, width, int(name == "ternary"))
        if forbidden >= 0:
            codes[at] = forbidden
            payload[table.codes(1)] = ref.pack_bits(codes, width, int(name == "ternary"))
            assert status() == {lib.GC_LANE_RANGE if name == "lanes" else lib.GC_FORBIDDEN_CODE}


@pytest.mark.parametrize("number", TIERS)
def test_scales_validate(number: int) -> None:
    cases = [(b, True, True) for b in (0, 1, 0x007FFFFF, 0x3F800000, 0x7F7FFFFF)]
    cases += [(b, True, False) for b in (0x80000000, 0x80000001, 0xBF800000, 0xFF7FFFFF)]
    cases += [
        (b, False, False) for b in (0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000, 0xFFFFFFFF)
    ]
    for bits, finite, positive in cases:
        for count in (1, 2, 8, 9, 33):
            for at in {0, count // 2, count - 1}:
                memory = guarded(4 * count, misalign=3)
                scales = np.full(count, 0x3F800000, np.uint32)
                scales[at] = bits
                memory[: 4 * count] = np.frombuffer(scales.tobytes(), np.uint8)
                with tier(number):
                    source = pointer(memory, "const uint8_t *")
                    assert (lib.gc_scales_validate(source, count, 0) == lib.GC_OK) == finite
                    assert (lib.gc_scales_validate(source, count, 1) == lib.GC_OK) == (
                        finite and positive
                    )
                    if not finite:
                        assert lib.gc_scales_validate(source, count, 0) == lib.GC_BAD_SCALE


# ---- units of second moments ---------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [0, 1, 7, 16, 33, 1000])
def test_moments(n: int, kind: str) -> None:
    """As numpy rounds, one operation after the other; what is not finite is flagged, bytes
    behind the end stay.
    """
    rng = np.random.default_rng(n)
    x, r, v = (values(kind, n, ref.F32, rng) for _ in range(3))
    v = np.abs(v)
    floor, inverse, keep, gain = (
        np.float32(0.01),
        np.float32(1.7),
        np.float32(0.95),
        np.float32(0.05),
    )
    with np.errstate(all="ignore"):
        units = np.sqrt(v) + floor
        follow = {
            True: (x * inverse) * (x * inverse) * gain + v * keep,
            False: (x * inverse) * (x * inverse) * gain + keep,
        }
        quotients, products = {True: (x + r) / units, False: x / units}, x * units
    memory = {name: guarded(4 * n) for name in ("units", "out", "after", "values")}

    def same(name: str, wanted: Any) -> None:
        same_bytes(
            canonical(memory[name][: 4 * n].view(np.float32)),
            canonical(wanted.astype(np.float32)),
            0,
        )
        assert (memory[name][4 * n :] == GUARD).all()

    source, owed, squares = (pointer(a, "const float *") for a in (x, r, v))
    into = {name: pointer(memory[name], "float *") for name in memory}
    for whole in (True, False):
        check(
            lib.gc_moments_divide(
                source, owed if whole else ffi.NULL, squares, floor, n, into["units"], into["out"]
            )
        )
        same("units", units)
        same("out", quotients[whole])
        seen = flag()
        old = squares if whole else ffi.NULL
        check(lib.gc_moments_follow(source, inverse, old, keep, gain, n, into["after"], seen))
        same("after", follow[whole])
        assert seen[0] == (not np.isfinite(follow[whole]).all())
    memory["values"][: 4 * n] = x.view(np.uint8)
    seen = flag()
    check(lib.gc_moments_multiply(into["values"], into["units"], n, seen))
    same("values", products)
    assert seen[0] == (not np.isfinite(products).all())


def test_moments_refuse_what_overlaps_or_is_missing() -> None:
    m = {name: guarded(64) for name in "abcd"}
    a, b, c, d = (pointer(m[name], "float *") for name in "abcd")
    null, seen = ffi.NULL, flag()
    calls = [
        lib.gc_moments_divide(null, null, b, 0.1, 4, c, d),
        lib.gc_moments_divide(a, null, null, 0.1, 4, c, d),
        lib.gc_moments_divide(a, null, b, 0.1, 4, null, d),
        lib.gc_moments_divide(a, null, b, 0.1, 4, c, a),
        lib.gc_moments_multiply(a, null, 4, seen),
        lib.gc_moments_multiply(a, b, 4, null),
        lib.gc_moments_follow(a, 1.0, b, 0.5, 0.5, 4, a, seen),
        lib.gc_moments_follow(a, 1.0, b, 0.5, 0.5, 4, b, seen),
        lib.gc_moments_follow(a, 1.0, b, 0.5, 0.5, 4, c, null),
    ]
    assert set(calls) == {lib.GC_INVALID_ARGUMENT}
    assert all((array == GUARD).all() for array in m.values())
    check(lib.gc_moments_divide(null, null, null, 0.1, 0, null, null))
    check(lib.gc_moments_multiply(null, null, 0, seen))
    check(lib.gc_moments_follow(null, 1.0, null, 0.5, 0.5, 0, null, seen))


# ---- checksum, copies, random numbers ------------------------------------------------------------
@kernel_settings
@given(data=st.binary(max_size=700), cut=st.integers(0, 700), misalign=st.integers(0, 15))
def test_crc32c(data: bytes, cut: int, misalign: int) -> None:
    memory = guarded(len(data), misalign=misalign)
    memory[: len(data)] = np.frombuffer(data, np.uint8)
    cut = min(cut, len(data))
    for number in TIERS:
        base = pointer(memory, "const uint8_t *")
        with tier(number):
            first = lib.gc_crc32c(0, base, cut)
            assert lib.gc_crc32c(first, base + cut, len(data) - cut) == ref_payload.crc32c(data)


@pytest.mark.parametrize("number", TIERS)
def test_crc32c_of_long_data(number: int) -> None:
    """Around multiples of the stretches that a fast tier works on side by side, and continued."""
    data = np.random.default_rng(0).integers(0, 256, 40_000, np.uint8)
    base, want, done = pointer(data, "uint8_t *"), 0, 0
    with tier(number):
        for nbytes in (4095, 4096, 12287, 12288, 12289, 24576, 24583, 36864, 40000):
            want, done = ref_payload.crc32c(data[done:nbytes].tobytes(), want), nbytes
            assert lib.gc_crc32c(0, base, nbytes) == want
            assert lib.gc_crc32c(lib.gc_crc32c(0, base, 777), base + 777, nbytes - 777) == want


def test_copy_moves_ranges_and_nothing_else() -> None:
    source = np.arange(200, dtype=np.uint8)
    ranges = np.array([(10, 100, 7), (40, 0, 1), (60, 3, 0), (64, 50, 90)], "<u8")
    for number in TIERS:
        target = guarded(160)
        want = target.copy()
        for dst, src, nbytes in ranges.tolist():
            want[dst : dst + nbytes] = source[src : src + nbytes]
        with tier(number):
            rows = pointer(ranges, "const gc_copy_range *")
            check(
                lib.gc_copy(
                    pointer(target, "uint8_t *"), pointer(source, "uint8_t *"), rows, len(ranges)
                )
            )
        same_bytes(target, want, number)


@kernel_settings
@given(counter=st.tuples(WORDS, WORDS, WORDS, WORDS), key=st.tuples(WORDS, WORDS))
def test_philox(counter: tuple[int, ...], key: tuple[int, int]) -> None:
    out = ffi.new("uint32_t[4]")
    lib.gc_philox4x32_10(list(counter), list(key), out)
    assert list(out) == ref.philox4x32_10(np.array(counter), key).tolist()


# ---- promises that hold for every kernel ---------------------------------------------------------
def all_kernels(table: Table, memory: dict[str, Any]) -> dict[str, int]:
    """Call every kernel once over a table of ternary, 1-bit or value codes and return the
    statuses.
    """
    rows, n, seen = table.pointer, len(table.pieces), flag()
    src, out, bytes_out = (
        pointer(memory["src"]),
        pointer(memory["out"]),
        pointer(memory["payload"], "uint8_t *"),
    )
    one, key = pointers([memory["in"]]), ffi.new("gc_rng_key *", (1, 2, 3, 0))[0]
    plane, blocks = pointer(memory["plane"], "float *"), pointer(memory["blocks"], "gc_block *")
    return {
        "gc_block_sums": lib.gc_block_sums(src, 0, rows, n, blocks, seen),
        "gc_ternary_encode": lib.gc_ternary_encode(src, 0, rows, n, bytes_out, key, seen),
        "gc_ternary_sum_decode": lib.gc_ternary_sum_decode(one, 1, 1, rows, n, out, 0, 0, seen),
        "gc_ternary_sum_lanes": lib.gc_ternary_sum_lanes(one, 1, rows, rows, n, 2, bytes_out),
        "gc_lanes_decode": lib.gc_lanes_decode(one[0], 1, 2, rows, n, out, 0, 0, seen),
        "gc_onebit_encode": lib.gc_onebit_encode(
            src, 0, rows, n, plane, plane, ffi.NULL, 0.5, ffi.NULL, ffi.NULL, bytes_out, seen
        ),
        "gc_onebit_sum_decode": lib.gc_onebit_sum_decode(one, 1, rows, n, out, 0, 0, seen),
        "gc_block_encode": lib.gc_block_encode(
            src, 0, rows, n, 4, plane, plane, ffi.NULL, 0.5, ffi.NULL, bytes_out, seen
        ),
        "gc_nearest_encode": lib.gc_nearest_encode(
            src, 0, rows, n, 1.8, plane, plane, ffi.NULL, 0.5, ffi.NULL, bytes_out, seen
        ),
        "gc_block_sum_decode": lib.gc_block_sum_decode(one, 1, 4, rows, n, out, 0, 0, seen),
        "gc_block_validate": lib.gc_block_validate(one[0], 4, rows, n),
        "gc_values_encode": lib.gc_values_encode(src, 0, rows, n, 0, bytes_out, seen),
        "gc_values_sum_decode": lib.gc_values_sum_decode(one, 1, 0, rows, n, out, 0, 0, seen),
        "gc_ternary_validate": lib.gc_ternary_validate(one[0], rows, n),
        "gc_onebit_validate": lib.gc_onebit_validate(one[0], rows, n),
        "gc_lanes_validate": lib.gc_lanes_validate(one[0], 1, 2, rows, n),
    }


def kernel_memory(numel: int = 64) -> dict[str, Any]:
    memory = {name: guarded(numel, np.float32) for name in ("src", "out", "plane")}
    memory["src"][:numel] = 1
    memory["plane"][:numel] = 0
    memory |= {"payload": guarded(40 + 4 * numel), "in": np.zeros(400 + 4 * numel, np.uint8)}
    memory["blocks"] = guarded(numel, ref.BLOCK)
    return memory


BAD_ROWS = {
    "start": {"start": 4},
    "group_numel": {"group_numel": 0},
    "end": {"start": 2**32 - 8, "numel": 8},
    "steps past 2**32": {"start": 0, "numel": 2**32 - 4095},
}


@pytest.mark.parametrize("number", TIERS)
@pytest.mark.parametrize("fault", list(BAD_ROWS))
def test_bad_segments_are_refused_before_anything_is_written(fault: str, number: int) -> None:
    table = Table([Piece(0, 8, 8, 0)] * 2, 32, 2, np.random.default_rng(0))
    for name, value in BAD_ROWS[fault].items():
        table.rows[name][1] = value
    memory = kernel_memory()
    before = {name: array.copy() for name, array in memory.items()}
    with tier(number):
        statuses = all_kernels(table, memory)
    assert set(statuses.values()) == {lib.GC_INVALID_ARGUMENT}, statuses
    for name, array in memory.items():
        same_bytes(array, before[name], number)


@pytest.mark.parametrize("number", TIERS)
def test_bad_arguments_are_refused(number: int) -> None:
    table = Table([Piece(0, 8, 8, 0)], 32, 2, np.random.default_rng(0))
    rows, m, seen = table.pointer, kernel_memory(), flag()
    src, out, payload = pointer(m["src"]), pointer(m["out"]), pointer(m["payload"], "uint8_t *")
    one, key, null = pointers([m["in"]]), ffi.new("gc_rng_key *", (0, 0, 0, 0))[0], ffi.NULL
    deep = ffi.new("gc_rng_key *", (0, 0, 0, 2**31))[0]
    many = pointers([m["in"]] * 32768)
    blocks = pointer(m["blocks"], "gc_block *")
    before = {name: array.copy() for name, array in m.items()}
    with tier(number):
        calls = {
            "dtype 3": lib.gc_block_sums(src, 3, rows, 1, blocks, seen),
            "dtype -1": lib.gc_ternary_encode(src, -1, rows, 1, payload, key, seen),
            "stream": lib.gc_ternary_encode(src, 0, rows, 1, payload, deep, seen),
            "null source": lib.gc_ternary_encode(null, 0, rows, 1, payload, key, seen),
            "null payload": lib.gc_ternary_encode(src, 0, rows, 1, null, key, seen),
            "null flag": lib.gc_ternary_encode(src, 0, rows, 1, payload, key, null),
            "null rows": lib.gc_ternary_encode(src, 0, null, 1, payload, key, seen),
            "onebit dtype": lib.gc_onebit_encode(
                src, 9, rows, 1, null, null, null, 1.0, null, null, payload, seen
            ),
            **{
                f"decay {decay}": lib.gc_onebit_encode(
                    src, 0, rows, 1, null, null, null, decay, null, null, payload, seen
                )
                for decay in (-0.1, 0.0, 1.1, float("nan"))
            },
            **{
                f"step {step}": lib.gc_nearest_encode(
                    src, 0, rows, 1, step, null, null, null, 1.0, null, payload, seen
                )
                for step in (0.0, -1.8, float("nan"), float("inf"))
            },
            "decay of blocks": lib.gc_block_encode(
                src, 0, rows, 1, 2, null, null, null, 2.0, null, payload, seen
            ),
            "bits of a block": lib.gc_block_encode(
                src, 0, rows, 1, 3, null, null, null, 1.0, null, payload, seen
            ),
            "bits of a decoded block": lib.gc_block_sum_decode(
                one, 1, 16, rows, 1, out, 0, 0, seen
            ),
            "value dtype": lib.gc_values_encode(src, 0, rows, 1, 2, payload, seen),
            "value dtype decoded": lib.gc_values_sum_decode(one, 1, 2, rows, 1, out, 0, 0, seen),
            "no payload": lib.gc_ternary_sum_decode(one, 0, 1, rows, 1, out, 0, 0, seen),
            "32768 payloads": lib.gc_ternary_sum_decode(many, 32768, 1, rows, 1, out, 0, 0, seen),
            "unknown flag": lib.gc_ternary_sum_decode(one, 1, 1, rows, 1, out, 0, 2, seen),
            "out dtype": lib.gc_onebit_sum_decode(one, 1, rows, 1, out, 3, 0, seen),
            "null out": lib.gc_onebit_sum_decode(one, 1, rows, 1, null, 0, 0, seen),
            "lane bits": lib.gc_ternary_sum_lanes(one, 1, rows, rows, 1, 3, payload),
            "lane bits decoded": lib.gc_lanes_decode(one[0], 2, 2, rows, 1, out, 0, 0, seen),
            "world 0": lib.gc_lanes_decode(one[0], 0, 2, rows, 1, out, 0, 0, seen),
            "world 32768": lib.gc_lanes_validate(one[0], 32768, 17, rows, 1),
            "null scales": lib.gc_scales_validate(null, 1, 0),
            "null copy": lib.gc_copy(payload, payload, null, 1),
        }
    assert set(calls.values()) == {lib.GC_INVALID_ARGUMENT}, calls
    for name, array in m.items():
        same_bytes(array, before[name], number)


@pytest.mark.parametrize("number", TIERS)
def test_nothing_to_do_needs_no_memory(number: int) -> None:
    table = Table([Piece(0, 0, 8, 0)], 32, 2, np.random.default_rng(0))
    null, seen, key = ffi.NULL, flag(), ffi.new("gc_rng_key *", (0, 0, 0, 0))[0]
    with tier(number):
        for rows, count in ((table.pointer, 1), (null, 0)):
            check(lib.gc_block_sums(null, 0, rows, count, null, seen))
            check(lib.gc_ternary_encode(null, 0, rows, count, null, key, seen))
            check(
                lib.gc_onebit_encode(
                    null, 0, rows, count, null, null, null, 1.0, null, null, null, seen
                )
            )
            check(lib.gc_ternary_validate(null, rows, count))
        check(lib.gc_scales_validate(null, 0, 1))
        check(lib.gc_copy(null, null, null, 0))
        assert lib.gc_crc32c(5, null, 0) == 5
    assert seen[0] == 0


@pytest.mark.parametrize("number", TIERS)
def test_the_nonfinite_flag_is_set_and_never_cleared(number: int) -> None:
    table = Table([Piece(0, 8, 8, 0)], 32, 2, np.random.default_rng(0))
    m, seen = kernel_memory(), flag()
    blocks = pointer(m["blocks"], "gc_block *")
    with tier(number):
        check(lib.gc_block_sums(pointer(m["src"]), 0, table.pointer, 1, blocks, seen))
        assert seen[0] == 0
        m["src"][table.data(0)][3] = np.nan
        check(lib.gc_block_sums(pointer(m["src"]), 0, table.pointer, 1, blocks, seen))
        assert seen[0] == 1
        m["src"][table.data(0)][3] = 0
        check(lib.gc_block_sums(pointer(m["src"]), 0, table.pointer, 1, blocks, seen))
    assert seen[0] == 1


FE_UPWARD = {"x86_64": 0x800, "aarch64": 0x400000}.get(platform.machine())


@pytest.mark.skipif(FE_UPWARD is None, reason="knows the rounding modes of x86-64 and AArch64 only")
@pytest.mark.parametrize("number", TIERS)
def test_results_do_not_depend_on_the_floating_point_environment(number: int) -> None:
    """Rounding upwards and flushing denormals in the calling thread change nothing, and stay set
    after the call.
    """
    libm = ctypes.CDLL("libm.so.6")
    n = 200
    rng = np.random.default_rng(1)
    ternary, onebit = Table([Piece(0, n, 25, 0)], 2, 1, rng), Table([Piece(0, n, 25, 0)], 1, 2, rng)
    x = values("tiny", n, ref.F32, rng)
    x[::3] = rng.standard_normal(len(x[::3])).astype(np.float32)
    scales = ref.ternary_scales(x, ref.Piece(n, 25), -1.0)
    scales[::2] = 1e-44
    key, r = ref.Key(seed=1), values("tiny", n, ref.F32, rng)
    want_codes = ref.ternary_encode(x, scales, ref.Piece(n, 25), key)
    want_means, want_bits, want_left = ref.onebit_encode(x, ref.Piece(n, 25), r)
    want_mean = ref.ternary_sum_decode([want_codes] * 3, [scales] * 3, ref.Piece(n, 25), False)
    src, out, plane, left = (
        guarded(m, np.float32) for m in (ternary.tensor_numel, ternary.tensor_numel, 999, 999)
    )
    src_bits = guarded(onebit.tensor_numel, np.float32)
    src[ternary.data(0)], src_bits[onebit.data(0)], plane[onebit.plane(0)] = x, x, r
    p2, p1 = guarded(ternary.payload_nbytes), guarded(onebit.payload_nbytes)
    ternary.put_scales(p2, 0, scales)
    c_key, seen, three = ffi.new("gc_rng_key *", (1, 0, 0, 0))[0], flag(), pointers([p2] * 3)
    p_src, p_bits, p_out = pointer(src), pointer(src_bits), pointer(out)
    p_plane, p_left = pointer(plane, "float *"), pointer(left, "float *")
    b2, b1 = pointer(p2, "uint8_t *"), pointer(p1, "uint8_t *")
    rows2, rows1 = ternary.pointer, onebit.pointer
    flushes = torch.set_flush_denormal(True)
    try:
        with tier(number):
            before = libm.fegetround()
            assert libm.fesetround(FE_UPWARD) == 0
            statuses = [
                lib.gc_ternary_encode(p_src, 0, rows2, 1, b2, c_key, seen),
                lib.gc_ternary_sum_decode(three, 3, 0, rows2, 1, p_out, 0, 0, seen),
                lib.gc_onebit_encode(
                    p_bits,
                    0,
                    rows1,
                    1,
                    p_plane,
                    p_left,
                    ffi.NULL,
                    1.0,
                    ffi.NULL,
                    ffi.NULL,
                    b1,
                    seen,
                ),
            ]
            after = libm.fegetround()
            libm.fesetround(before)
        if flushes:
            assert float(torch.tensor(1e-40) * 0.5) == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert statuses == [lib.GC_OK] * 3
    assert after == FE_UPWARD
    same_bytes(p2[ternary.codes(0)], want_codes, number)
    same_bytes(out[ternary.data(0)], want_mean, number)
    same_bytes(p1[onebit.codes(0)], want_bits, number)
    same_bytes(onebit.get_scales(p1, 0), want_means.ravel(), number)
    same_bytes(left[onebit.plane(0)], want_left, number)


def test_tiers() -> None:
    assert lib.gc_tier_supported(0) == 1
    assert ffi.string(lib.gc_tier_name(0)) == b"portable"
    for outside in (-1, lib.gc_tier_count()):
        assert lib.gc_tier_name(outside) == ffi.NULL
        assert lib.gc_tier_supported(outside) == 0
        assert lib.gc_tier_select(outside) != lib.GC_OK
    for number in TIERS:
        with tier(number):
            assert lib.gc_tier_current() == number


def test_status_names() -> None:
    names = [
        "OK",
        "INVALID_ARGUMENT",
        "UNSUPPORTED_TIER",
        "FORBIDDEN_CODE",
        "BAD_PADDING",
        "LANE_RANGE",
        "BAD_SCALE",
    ]
    for number, name in enumerate(names):
        assert ffi.string(lib.gc_status_name(number)).decode() == f"GC_{name}"
    for other in (-1, len(names), 1000):
        assert ffi.string(lib.gc_status_name(other)) == b"GC_UNKNOWN_STATUS"


def test_structs_have_the_sizes_of_the_contract() -> None:
    assert ffi.sizeof("gc_segment") == SEGMENT.itemsize == 56
    assert ffi.sizeof("gc_block") == ref.BLOCK.itemsize == 24
    assert [name for name, _ in ffi.typeof("gc_segment").fields] == list(SEGMENT.names)


# ---- the frozen vectors --------------------------------------------------------------------------
def frozen(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    content = json.loads((VECTORS / f"{name}.json").read_text())
    inputs = {
        key: np.frombuffer(bytes.fromhex(entry["data"]), entry["dtype"])
        for key, entry in content["inputs"].items()
    }
    return content, inputs


def layout_of(case: dict[str, Any], bits: int, per_group: int) -> tuple[Any, int]:
    """Return the segment of an unsegmented payload and its number of scales."""
    row = np.zeros(1, SEGMENT)
    count = -(-case["numel"] // case.get("group_numel", 1)) * per_group
    row["numel"], row["group_numel"] = case["numel"], case.get("group_numel", 1)
    row["scales"], row["codes"] = 32, 32 + 4 * count
    row["parameter"], row["start"] = case.get("key", {}).get("parameter", 0), case.get("start", 0)
    return row, count


def frozen_source(case: dict[str, Any], inputs: dict[str, Any]) -> tuple[Any, int]:
    x = inputs[case["input"]][case["first"] : case["first"] + case["numel"]].copy()
    return x, ref.SOURCE_DTYPES[x.dtype.name]


def crc_of(array: Any) -> int:
    data = np.frombuffer(array.tobytes(), np.uint8)
    return int(lib.gc_crc32c(0, pointer(data, "uint8_t *"), len(data)))


def check_checksum(payload: Any) -> None:
    base = pointer(payload, "uint8_t *")
    crc = lib.gc_crc32c(lib.gc_crc32c(0, base, 28), base + 32, len(payload) - 32)
    assert crc.to_bytes(4, "little") == payload[28:32].tobytes()


@pytest.mark.parametrize("number", TIERS)
def test_frozen_ternary(number: int) -> None:
    content, inputs = frozen("ternary")
    for case in content["payloads"] + content["pieces"]:
        x, dtype = frozen_source(case, inputs)
        row, count = layout_of(case, 2, 1)
        rows, seen, k = pointer(row, "gc_segment *"), flag(), case["key"]
        if "payload" in case:
            want = np.frombuffer(bytes.fromhex(case["payload"]), np.uint8).copy()
        else:
            want = np.frombuffer(
                bytes(32) + bytes.fromhex(case["scales"] + case["codes"]), np.uint8
            ).copy()
            row["codes"] = 32 + len(case["scales"]) // 2
        payload = np.zeros(len(want), np.uint8)
        first_code = int(row["codes"][0])
        payload[:first_code] = want[:first_code]
        key = ffi.new("gc_rng_key *", (k["seed"], k["rank"], k["step"], k["stream"]))[0]
        with tier(number):
            check(
                lib.gc_ternary_encode(
                    pointer(x), dtype, rows, 1, pointer(payload, "uint8_t *"), key, seen
                )
            )
            same_bytes(payload, want, number)
            if "payload" not in case:
                continue
            assert seen[0] == want[7]
            check_checksum(payload)
            if "scales" not in case:
                scales = np.zeros(count, np.float32)
                piece = ref.Piece(len(x), case["group_numel"])
                sizes = np.array([g.stop - g.start for g in piece.groups()], np.uint32)
                edges = np.cumsum([0, *((sizes + 511) // 512)]).astype(np.uint64)
                blocks = np.zeros(int(edges[-1]), ref.BLOCK)
                table = pointer(blocks, "gc_block *")
                check(lib.gc_block_sums(pointer(x), dtype, rows, 1, table, flag()))
                check(
                    lib.gc_ternary_scales(
                        table,
                        pointer(edges, "uint64_t *"),
                        pointer(sizes, "uint32_t *"),
                        count,
                        case["clip_sigma"],
                        pointer(scales, "float *"),
                    )
                )
                same_bytes(scales.view(np.uint8), want[32:first_code], number)
            if not seen[0]:
                out = np.zeros(len(x), np.float32)
                check(
                    lib.gc_ternary_sum_decode(
                        pointers([payload]), 1, 0, rows, 1, pointer(out), 0, 0, flag()
                    )
                )
                assert crc_of(out) == case["decoded_crc"]


@pytest.mark.parametrize("number", TIERS)
def test_frozen_onebit(number: int) -> None:
    content, inputs = frozen("onebit")
    for case in content["payloads"]:
        x, dtype = frozen_source(case, inputs)
        row, _ = layout_of(case, 1, 2)
        rows, seen, n = pointer(row, "gc_segment *"), flag(), case["numel"]
        want = np.frombuffer(bytes.fromhex(case["payload"]), np.uint8).copy()
        payload, left, out = (
            np.zeros(len(want), np.uint8),
            np.zeros(n, np.float32),
            np.zeros(n, np.float32),
        )
        payload[:32] = want[:32]
        old = inputs[case["residual"]][:n].copy() if case["residual"] else None
        source = pointer(old, "float *") if old is not None else ffi.NULL
        target, bytes_out = pointer(left, "float *"), pointer(payload, "uint8_t *")
        with tier(number):
            means = ffi.new("float[2]", case["means"]) if "means" in case else ffi.NULL
            decay = case.get("decay", 1.0)
            how = source, target, ffi.NULL, decay, ffi.NULL, means, bytes_out, seen
            check(lib.gc_onebit_encode(pointer(x), dtype, rows, 1, *how))
            same_bytes(payload, want, number)
            check_checksum(payload)
            assert seen[0] == want[7]
            assert crc_of(left) == case["residual_crc"]
            if not seen[0]:
                check(
                    lib.gc_onebit_sum_decode(
                        pointers([payload]), 1, rows, 1, pointer(out), 0, 0, flag()
                    )
                )
                assert crc_of(out) == case["decoded_crc"]


@pytest.mark.parametrize("name", ["block", "nearest"])
@pytest.mark.parametrize("number", TIERS)
def test_frozen_levels(number: int, name: str) -> None:
    content, inputs = frozen(name)
    for case in content["payloads"]:
        x, dtype = frozen_source(case, inputs)
        bits = ref_payload.BLOCKS[case["codec"]] if name == "block" else 2
        row, _ = layout_of(case, bits, 1)
        rows, seen, n = pointer(row, "gc_segment *"), flag(), case["numel"]
        want = np.frombuffer(bytes.fromhex(case["payload"]), np.uint8).copy()
        payload, left, out = (
            np.zeros(len(want), np.uint8),
            np.zeros(n, np.float32),
            np.zeros(n, np.float32),
        )
        payload[:32] = want[:32]
        old = inputs[case["residual"]][:n].copy() if case["residual"] else None
        source = pointer(old, "float *") if old is not None else ffi.NULL
        target, bytes_out = pointer(left, "float *"), pointer(payload, "uint8_t *")
        with tier(number):
            how = source, target, ffi.NULL, case.get("decay", 1.0), ffi.NULL, bytes_out, seen
            if name == "block":
                check(lib.gc_block_encode(pointer(x), dtype, rows, 1, bits, *how))
            else:
                check(lib.gc_nearest_encode(pointer(x), dtype, rows, 1, case["step"], *how))
            same_bytes(payload, want, number)
            check_checksum(payload)
            assert seen[0] == want[7]
            assert crc_of(left) == case["residual_crc"]
            if not seen[0]:
                decode = lib.gc_block_sum_decode if name == "block" else lib.gc_ternary_sum_decode
                option = bits if name == "block" else 0
                check(decode(pointers([payload]), 1, option, rows, 1, pointer(out), 0, 0, flag()))
                assert crc_of(out) == case["decoded_crc"]


@pytest.mark.parametrize("number", TIERS)
def test_frozen_identity(number: int) -> None:
    content, inputs = frozen("identity")
    for case in content["payloads"]:
        x, dtype = frozen_source(case, inputs)
        row, _ = layout_of(case, 32, 0)
        value_dtype = ref.F32 if case["codec"] == ref_payload.IDENTITY else ref.BF16
        rows, seen = pointer(row, "gc_segment *"), flag()
        want = np.frombuffer(bytes.fromhex(case["payload"]), np.uint8).copy()
        payload, out = np.zeros(len(want), np.uint8), np.zeros(len(x), np.float32)
        payload[:32] = want[:32]
        with tier(number):
            check(
                lib.gc_values_encode(
                    pointer(x), dtype, rows, 1, value_dtype, pointer(payload, "uint8_t *"), seen
                )
            )
            same_bytes(payload, want, number)
            check_checksum(payload)
            assert seen[0] == want[7]
            if not seen[0]:
                one = pointers([payload])
                check(
                    lib.gc_values_sum_decode(
                        one, 1, value_dtype, rows, 1, pointer(out), 0, 0, flag()
                    )
                )
                assert crc_of(out) == case["decoded_crc"]


@pytest.mark.parametrize("number", TIERS)
def test_frozen_lanes(number: int) -> None:
    content, _ = frozen("lanes")
    for case in content["payloads"]:
        world, n = case["world_size"], case["numel"]
        bits, (row, count) = ref.lane_bits(world), layout_of(case, 2, 1)
        target = row.copy()
        source = row.copy()
        source["codes"] = 0
        width = -(-n // 4)
        codes = np.frombuffer(bytes.fromhex(case["codes"]), np.uint8).copy()
        parts = [codes[k * width : (k + 1) * width] for k in range(world)]
        want = np.frombuffer(bytes.fromhex(case["payload"]), np.uint8).copy()
        payload, out = np.zeros(len(want), np.uint8), np.zeros(n, np.float32)
        payload[: 32 + 4 * count] = want[: 32 + 4 * count]
        rows_in, rows_out = pointer(source, "gc_segment *"), pointer(target, "gc_segment *")
        bytes_out = pointer(payload, "uint8_t *")
        with tier(number):
            check(
                lib.gc_ternary_sum_lanes(
                    pointers(parts), world, rows_in, rows_out, 1, bits, bytes_out
                )
            )
            same_bytes(payload, want, number)
            check_checksum(payload)
            check(
                lib.gc_lanes_decode(bytes_out, world, bits, rows_out, 1, pointer(out), 0, 0, flag())
            )
        same_bytes(
            out.view(np.uint8), np.frombuffer(bytes.fromhex(case["decoded"]), np.uint8), number
        )


@pytest.mark.parametrize("number", TIERS)
def test_frozen_crc32c(number: int) -> None:
    for case in json.loads((VECTORS / "crc32c.json").read_text())["cases"]:
        data = np.frombuffer(bytes.fromhex(case["data"]), np.uint8)
        with tier(number):
            assert crc_of(data) == case["crc"]


def test_frozen_philox() -> None:
    for case in json.loads((VECTORS / "rng.json").read_text())["blocks"]:
        out = ffi.new("uint32_t[4]")
        lib.gc_philox4x32_10(case["counter"], case["key"], out)
        assert list(out) == case["words"]


@pytest.mark.parametrize("number", TIERS)
def test_frozen_draws(number: int) -> None:
    """Draws show in codes: |x| / S just above draw / 65536 is kept, just below is not."""
    for case in json.loads((VECTORS / "rng.json").read_text())["draws"]:
        draws = np.frombuffer(bytes.fromhex(case["draws"]), "<u2").astype(np.float32)
        n, k = case["numel"], case["key"]
        row = np.zeros(1, SEGMENT)
        row["start"], row["numel"], row["parameter"] = case["start"], n, k["parameter"]
        row["group_numel"], row["codes"] = 2**32 - 1, 4
        key = ffi.new("gc_rng_key *", (k["seed"], k["rank"], k["step"], k["stream"]))[0]
        for x, code in (((draws + 1) / 65536, 2), (draws / 65536, 1)):
            x = x.astype(np.float32)
            payload = np.zeros(4 + -(-n // 4), np.uint8)
            payload[:4] = np.frombuffer(np.float32(1).tobytes(), np.uint8)
            with tier(number):
                out = pointer(payload, "uint8_t *")
                check(
                    lib.gc_ternary_encode(
                        pointer(x), 0, pointer(row, "gc_segment *"), 1, out, key, flag()
                    )
                )
            same_bytes(payload[4:], ref.pack_bits(np.full(n, code), 2, 1), number)
