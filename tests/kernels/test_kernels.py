"""The C interface on every tier: what operations on host bytes give, what is added up or refused,
and the bytes around outputs untouched. `test_kernel_sets.py` has the operations of kernel sets;
known answers, copies and most refusals are in `tests/native/test_known.c`, what validators find in
`test_tiers.c` beside it.
"""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from _codes import (
    BLOCKS,
    COUNTS,
    DTYPES,
    ENTROPY,
    FAMILIES,
    NULL,
    ONEBIT,
    SEEDS,
    TERNARY,
    call_decode,
    call_encode,
    call_validate,
    check,
    flag,
    kernel_settings,
    lanes,
    random_payload,
    sum_lanes,
    table_of,
    tensor_of,
)
from _tables import (
    GUARD,
    KINDS,
    SEGMENT,
    TIERS,
    Piece,
    Table,
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
from hypothesis import given
from hypothesis import strategies as st
from reference import codec as ref

from gradcomp.kernels.native import threads


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
@pytest.mark.parametrize("numel", [1, 31, 100, 4097, 40000])
@pytest.mark.parametrize("family", ["onebit", "block", "nearest", "entropy"])
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
        payload = guarded(table.payload_nbytes)
        last = table.pointer, 2, pointer(payload, "uint8_t *"), flag()
        check(call_encode(code, pointer(tensor), ref.F32, *last, **more))
        left.append(plane)
    want = [0.75 * np.abs(left[0][table.plane(i)].astype(np.float64)).sum() for i in range(2)]
    np.testing.assert_allclose(dropped, want, rtol=1e-5)
    for i in range(2):
        same_bytes(left[1][table.plane(i)], np.float32(0.25) * left[0][table.plane(i)], number)


# ---- decoders ------------------------------------------------------------------------------------
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


# ---- validators ----------------------------------------------------------------------------------
def scale_patterns():
    """(bits, whether finite, whether not negative) of scales."""
    for bits in (0, 1, 0x007FFFFF, 0x3F800000, 0x7F7FFFFF):
        yield bits, True, True
    for bits in (0x80000000, 0x80000001, 0xBF800000, 0xFF7FFFFF):
        yield bits, True, False
    for bits in (0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000, 0xFFFFFFFF):
        yield bits, False, False


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
            assert lib.gc_scales_validate(source, count, 0) == status[finite]
            assert lib.gc_scales_validate(source, count, 1) == status[finite and positive]


# ---- units of second moments ---------------------------------------------------------------------
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
    statuses = memory.all_kernels(table.pointer, 2)
    assert set(statuses.values()) == {lib.GC_INVALID_ARGUMENT}, statuses
    memory.check_untouched(number)


def test_bad_arguments_are_refused(number):
    """Beside those of tests/native/test_known.c."""
    table = Table([Piece(0, 8, 8, 0)], 32, 2, np.random.default_rng(0))
    rows, m = table.pointer, Memory()
    nan, inf = float("nan"), float("inf")
    nearest = FAMILIES["nearest"][0]
    streams = table_of(ENTROPY[0], [Piece(0, 8, 8, 0)]).pointer

    def encodes(code, source=m.src, dtype=0, rows=rows, seen=m.seen, **more):
        return call_encode(code, source, dtype, rows, 1, m.payload, seen, **more)

    calls = {
        "null source": encodes(TERNARY, source=NULL),
        "null flag": encodes(TERNARY, seen=NULL),
        "onebit dtype": encodes(ONEBIT, dtype=9),
        **{f"decay {d}": encodes(ONEBIT, decay=d) for d in (-0.1, 0.0, 1.1, nan)},
        "decay of blocks": encodes(BLOCKS[0], decay=2.0),
        "decay of streams": encodes(ENTROPY[0], rows=streams, decay=2.0),
        **{
            f"step {step}": encodes(nearest._replace(option=(step,)))
            for step in (0.0, -1.8, nan, inf)
        },
        "means": encodes(ONEBIT, means=(nan, 1.0)),
        "groups that are no streams": encodes(ENTROPY[0]),
        "and decoded": call_decode(ENTROPY[0], m.one, 1, rows, 1, m.out, 0, 0, m.seen),
        "out dtype": call_decode(ONEBIT, m.one, 1, rows, 1, m.out, 3, 0, m.seen),
        "world 32768": lib.gc_lanes_validate(m.one[0], 32768, 17, rows, 1),
    }
    assert set(calls.values()) == {lib.GC_INVALID_ARGUMENT}, calls
    m.check_untouched(number)


def test_nothing_to_do_needs_no_memory(number):
    table, seen = Table([Piece(0, 0, 8, 0)], 32, 2, np.random.default_rng(0)), flag()
    for rows in ((table.pointer, 1), (NULL, 0)):
        check(lib.gc_block_sums(NULL, 0, *rows, NULL, seen))
        for code in ONE_OF_EACH:
            if code.name != "lanes":
                check(call_encode(code, NULL, 0, *rows, NULL, seen))
            if code.name != "values":
                check(call_validate(code, NULL, *rows))
    assert seen[0] == 0


def test_the_nonfinite_flag_is_set_and_never_cleared(number):
    table = Table([Piece(0, 8, 8, 0)], 32, 2, np.random.default_rng(0))
    m, found = Memory(), []
    for value in (1, np.nan, 0):
        m.arrays["src"][table.data(0)][3] = value
        check(lib.gc_block_sums(m.src, 0, table.pointer, 1, m.blocks, m.seen))
        found.append(m.seen[0])
    assert found == [0, 1, 1]


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


def test_a_fork_has_a_pool_of_its_own():
    """A fork while another thread made the pool waited for ever."""
    threads._workers(1)
    with threads._pool_lock:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)
            os._exit(threads._workers(1).submit(int, 7).result())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
