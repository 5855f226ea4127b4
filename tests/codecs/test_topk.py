"""Top-k: kernels against the reference, hostile codes, exchanges, servers, what is refused, and
what it sends.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from _expected import average, hierarchical
from _ranks import run_local
from _tables import (
    ARRAY_DTYPES,
    GUARD,
    KINDS,
    TIERS,
    Piece,
    Table,
    canonical,
    ffi,
    guarded,
    lib,
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
from reference import topk as ref_topk

import gradcomp
from gradcomp import (
    Block,
    CorruptPayload,
    Feedback,
    GradientAverager,
    OneBit,
    Options,
    TernGrad,
    TopK,
)
from gradcomp.codecs import KINDS as CODECS
from gradcomp.codecs import resolve
from gradcomp.exchange.bucket import BucketExchange
from gradcomp.exchange.interface import run_stages
from gradcomp.exchange.sizing import BucketPlan, choose, predict_bytes
from gradcomp.exchange.slices import WHOLE, Slicing
from gradcomp.exchange.stats import Stats
from gradcomp.onebit_sgd import AggregateAdagrad
from gradcomp.payload.form import HEADER_NBYTES, TOPK
from gradcomp.payload.layout import PayloadLayout, message_copies
from gradcomp.payload.pieces import Slot, whole_pieces
from gradcomp.plan.accuracy import FAMILIES, within
from gradcomp.plan.models import MODELS

GROUP = ref_topk.GROUP_NUMEL
LENGTHS = [0, 1, 2, 8, 63, 64, 65, 127, 1000, 4095, 4096, 4097, 5000, 8200]
LONG = [32767, 32768, 32769, 40000, 70000]
topk_settings = settings(database=None, suppress_health_check=list(HealthCheck))
SEEDS = st.integers(0, 2**32 - 1)


class TopKTable(Table):
    """Segments of top-k codes."""

    def __init__(self, parts, rng):
        super().__init__(parts, 0, 2, rng)

    def code_nbytes(self, i):
        return ref_topk.code_nbytes(self.pieces[i].ref)


@st.composite
def pieces(draw):
    out = []
    for _ in range(draw(st.integers(1, 3))):
        numel = draw(st.sampled_from(LENGTHS if out else [*LENGTHS, *LONG]))
        start = 8 * draw(
            st.sampled_from([0, 0, 1, 511, 512, 4096, 5000])
            | st.integers(0, 9000)
            | st.just((2**32 - 1 - numel) // 8)
        )
        out.append(Piece(start, numel, GROUP, 0))
    return out


def flag():
    return ffi.new("uint32_t *")


def check(status):
    assert ffi.string(lib.gc_status_name(status)) == b"GC_OK"


# ---- kernels -------------------------------------------------------------------------------------


@topk_settings
@given(
    parts=pieces(),
    dtype=st.sampled_from([ref.F32, ref.F32, ref.BF16, ref.F16]),
    kind=st.sampled_from([*KINDS, "steps"]),
    residuals=st.sampled_from(["none", "in", "out", "both", "same"]),
    keeps=st.booleans(),
    seed=SEEDS,
)
@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value")
def test_encode(parts, dtype, kind, residuals, keeps, seed):
    """Many equal magnitudes ("steps", "constant", "sparse"), cut blocks, groups without
    gradient, values that are not finite.
    """
    rng = np.random.default_rng(seed)
    table = TopKTable(parts, rng)
    tensor = guarded(table.tensor_numel, ARRAY_DTYPES[dtype], int(rng.integers(0, 8)))
    old = guarded(table.plane_numel, np.float32)
    for i, piece in enumerate(parts):
        x = values("normal" if kind == "steps" else kind, piece.numel, dtype, rng)
        if kind == "steps":
            x = ref.from_float32(np.round(ref.to_float32(x)), dtype)
        tensor[table.data(i)] = x
        old[table.plane(i)] = values("normal", piece.numel, ref.F32, rng)
        if rng.random() < 0.4 and piece.numel:
            tensor[table.data(i)][: GROUP - piece.start % GROUP] = 0
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
        scales, codes, left = ref_topk.topk_encode(x, piece.ref, before)
        assert (
            len(codes)
            == table.code_nbytes(i)
            == TOPK.code_nbytes(piece.start, piece.start + piece.numel)
        )
        want[table.codes(i)] = codes
        table.put_scales(want, i, scales)
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
                lib.gc_topk_encode(
                    pointer(tensor),
                    dtype,
                    table.pointer,
                    len(parts),
                    pointer(plane_in, "float *") if has_in else ffi.NULL,
                    pointer(plane_out, "float *") if has_out else ffi.NULL,
                    pointer(kept, "float *") if keeps else ffi.NULL,
                    pointer(payload, "uint8_t *"),
                    seen,
                )
            )
            assert (
                lib.gc_topk_validate(pointer(payload, "uint8_t *"), table.pointer, len(parts))
                == lib.GC_OK
            )
        same_bytes(payload, want, number)
        same_bytes(kept, want_kept, number)
        if has_out:
            same_bytes(plane_out, want_left, number)
        else:
            assert (plane_out.view(np.uint8) == GUARD).all()
        assert seen[0] == bad


@topk_settings
@given(
    parts=pieces(),
    count=st.sampled_from([1, 1, 2, 3, 9]),
    dtype=st.sampled_from([ref.F32, ref.BF16, ref.F16]),
    seed=SEEDS,
)
def test_sum_decode(parts, count, dtype, seed):
    """Also of scales so large that sums overflow, and of those that are 0."""
    rng = np.random.default_rng(seed)
    table = TopKTable(parts, rng)
    payloads = [
        guarded(table.payload_nbytes, misalign=int(rng.integers(0, 8))) for _ in range(count)
    ]
    offset, bad = int(rng.integers(0, 16)), False
    want = guarded(table.tensor_numel, ARRAY_DTYPES[dtype], offset)
    for i, piece in enumerate(parts):
        decoded = []
        for payload in payloads:
            _, codes, _ = ref_topk.topk_encode(
                values(str(rng.choice(["normal", "steps", "zeros"])), piece.numel, ref.F32, rng),
                piece.ref,
            )
            scales = np.float32(
                rng.choice([0, 1, 3e38, 1e-45, 65520], (len(piece.ref.groups()), 2))
            ) * np.float32(rng.random())
            payload[table.codes(i)] = codes
            table.put_scales(payload, i, scales)
            decoded.append(ref_topk.topk_decode(codes, scales, piece.ref))
        with np.errstate(all="ignore"):
            want[table.data(i)] = ref.from_float32(canonical(ref.float_average(decoded)), dtype)
        bad |= not np.isfinite(ref.to_float32(want[table.data(i)])).all()
    for number in TIERS:
        out, seen = guarded(table.tensor_numel, ARRAY_DTYPES[dtype], offset), flag()
        with tier(number):
            check(
                lib.gc_topk_sum_decode(
                    pointers(payloads),
                    count,
                    table.pointer,
                    len(parts),
                    pointer(out),
                    dtype,
                    0,
                    seen,
                )
            )
        same_bytes(out, want, number)
        assert seen[0] == bad


def said(codes, piece):
    """Return what the reference says of codes: a status, and the values if it is well."""
    scales = np.full((len(piece.ref.groups()), 2), [1, 2], np.float32)
    try:
        return lib.GC_OK, ref_topk.topk_decode(codes, scales, piece.ref)
    except ValueError as error:
        return (
            lib.GC_FORBIDDEN_CODE if str(error).startswith("code:") else lib.GC_BAD_PADDING
        ), None


def check_codes(codes, piece, rng):
    """The validator says what the reference says; what is decoded all the same touches nothing
    else, and is right where it is well.
    """
    table = TopKTable([piece], rng)
    payload = guarded(table.payload_nbytes)
    payload[table.codes(0)] = codes
    table.put_scales(payload, 0, np.full((len(piece.ref.groups()), 2), [1, 2], np.float32))
    status, wanted = said(codes, piece)
    for number in TIERS[:1]:  # one implementation in all
        out, seen = guarded(table.tensor_numel, np.float32), flag()
        before = out.copy()
        with tier(number):
            assert lib.gc_topk_validate(pointer(payload, "uint8_t *"), table.pointer, 1) == status
            check(
                lib.gc_topk_sum_decode(
                    pointers([payload]), 1, table.pointer, 1, pointer(out), 0, 0, seen
                )
            )
        got = out[table.data(0)].copy()
        out[table.data(0)] = before[table.data(0)]
        same_bytes(out, before, number)
        assert not seen[0] and set(np.abs(got).tolist()) <= {0.0, 1.0, 2.0}
        if wanted is not None:
            same_bytes(got, wanted, number)
    return status


def test_every_flipped_bit_of_codes_is_judged_as_by_the_reference():
    rng, found = np.random.default_rng(0), []
    for piece in (Piece(0, 1, GROUP, 0), Piece(8, 70, GROUP, 0), Piece(4088, 600, GROUP, 0)):
        _, codes, _ = ref_topk.topk_encode(values("normal", piece.numel, ref.F32, rng), piece.ref)
        for bit in range(8 * len(codes)):
            bad = codes.copy()
            bad[bit // 8] ^= 1 << bit % 8
            found.append(check_codes(bad, piece, rng))
    assert set(found) == {lib.GC_OK, lib.GC_FORBIDDEN_CODE, lib.GC_BAD_PADDING}


@topk_settings
@given(
    piece=pieces().map(lambda parts: parts[0]),
    share=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    ones=st.booleans(),
    seed=SEEDS,
)
def test_hostile_codes(piece, share, ones, seed):
    """Random bytes, ones throughout (a gap without end), good codes with some bytes changed."""
    rng = np.random.default_rng(seed)
    _, codes, _ = ref_topk.topk_encode(values("normal", piece.numel, ref.F32, rng), piece.ref)
    bad = rng.random(len(codes)) < share
    check_codes(
        np.where(bad, 255 if ones else rng.integers(0, 256, len(codes)), codes).astype(np.uint8),
        piece,
        rng,
    )


def test_the_longest_gap():
    """What is kept stands at the very end of a block: the quotients add up to 63, and one bit is
    left.
    """
    x = np.zeros(4096, np.float32)
    x[-64:] = 1
    scales, codes, _ = ref_topk.topk_encode(x, ref.Piece(4096, GROUP))
    bits = np.unpackbits(codes[:64], bitorder="little")
    assert bits[:63].all() and not bits[63] and scales.tolist() == [[1, 0]]
    codec = TopK()
    assert torch.equal(codec.decode(codec.encode(torch.from_numpy(x))), torch.from_numpy(x))


@pytest.mark.parametrize("number", TIERS)
def test_frozen(number):
    content = json.loads((Path(__file__).parents[1] / "vectors/topk.json").read_text())
    inputs = {
        n: np.frombuffer(bytes.fromhex(a["data"]), np.dtype(a["dtype"]))
        for n, a in content["inputs"].items()
    }
    codec, dtypes = (
        TopK(),
        {
            "float32": torch.float32,
            "float16": torch.float16,
            "uint16": torch.bfloat16,
        },
    )
    for case in content["payloads"]:
        x, old = (
            inputs[n][: case["numel"]] if n else None for n in (case["input"], case["residual"])
        )
        x, old = (repeated(a, case["repeat"]) if a is not None else None for a in (x, old))
        values_in = torch.from_numpy(x.view(np.int16 if x.itemsize == 2 else np.int32).copy()).view(
            dtypes[x.dtype.name]
        )
        key = gradcomp.RngKey(**case["key"])
        want = bytes.fromhex(case["payload"])
        with tier(number):
            left = None if old is None else torch.from_numpy(old.copy())
            payload = codec.encode(values_in, residual=left, key=key)
            assert payload.numpy().tobytes() == want
            if not want[7]:
                assert (
                    left is None
                    or ref_payload.crc32c(left.numpy().tobytes()) == case["residual_crc"]
                )
                assert (
                    ref_payload.crc32c(codec.decode(payload).numpy().tobytes())
                    == case["decoded_crc"]
                )


def repeated(x, count):
    """As tests/vectors/generate.py makes long inputs of short ones."""
    scales = [
        np.float32(0.5 ** (i % 3)) if x.dtype == np.float32 else x.dtype.type(1)
        for i in range(count)
    ]
    return (
        np.concatenate([np.roll(x, 37 * i) * s for i, s in enumerate(scales)]) if count > 1 else x
    )


def test_wrong_arguments_are_refused_before_anything_is_written():
    memory = guarded(200)
    before, null, seen = memory.copy(), ffi.NULL, flag()
    src, payload = pointer(np.ones(64, np.float32)), pointer(memory, "uint8_t *")
    row = np.zeros(1, Table([Piece(0, 8, 8, 0)], 32, 2, np.random.default_rng(0)).rows.dtype)
    one, rows = pointers([memory]), pointer(row, "const gc_segment *")
    for changes in (
        {"group_numel": 4096},
        {"group_numel": 0},
        {"start": 4},
        {"numel": 2**32 - 4095},
    ):
        row["numel"], row["group_numel"], row["start"] = 16, GROUP, 0
        for name, value in changes.items():
            row[name] = value
        assert (
            lib.gc_topk_encode(src, 0, rows, 1, null, null, null, payload, seen)
            == lib.GC_INVALID_ARGUMENT
        )
        assert (
            lib.gc_topk_sum_decode(one, 1, rows, 1, payload, 0, 0, seen) == lib.GC_INVALID_ARGUMENT
        )
        assert lib.gc_topk_validate(payload, rows, 1) == lib.GC_INVALID_ARGUMENT
    row["numel"], row["group_numel"], row["start"] = 16, GROUP, 0
    assert (
        lib.gc_topk_encode(src, 3, rows, 1, null, null, null, payload, seen)
        == lib.GC_INVALID_ARGUMENT
    )
    assert (
        lib.gc_topk_encode(src, 0, rows, 1, null, null, null, null, seen) == lib.GC_INVALID_ARGUMENT
    )
    assert lib.gc_topk_sum_decode(one, 1, rows, 1, null, 0, 0, seen) == lib.GC_INVALID_ARGUMENT
    assert lib.gc_topk_sum_decode(one, 1, rows, 1, payload, 0, 2, seen) == lib.GC_INVALID_ARGUMENT
    assert lib.gc_topk_validate(null, rows, 1) == lib.GC_INVALID_ARGUMENT
    row["numel"] = 0
    check(lib.gc_topk_encode(null, 0, rows, 1, null, null, null, null, seen))
    check(lib.gc_topk_validate(null, rows, 1))
    same_bytes(memory, before, 0)


# ---- sizes and layouts ---------------------------------------------------------------------------


def test_bytes_are_arithmetic():
    """Of numbers and of arrays alike; pieces that are cut at blocks add up; a payload holds no
    more elements than its bytes say.
    """
    rng = np.random.default_rng(0)
    first = rng.integers(0, 40_000, 300) // 8 * 8
    last = first + rng.integers(0, 20_000, 300)
    found = TOPK.code_nbytes(first, last)
    for a, b, nbytes in zip(first.tolist(), last.tolist(), found.tolist(), strict=True):
        assert nbytes == TOPK.code_nbytes(a, b) == ref_topk.code_nbytes(ref.Piece(b - a, GROUP, a))
        middle = (a // 4096 + 1) * 4096
        assert b <= middle or TOPK.code_nbytes(a, middle) + TOPK.code_nbytes(middle, b) == nbytes
        assert TOPK.most_numel(TOPK.code_nbytes(0, b - a)) >= b - a
    assert TOPK.code_nbytes(0, 4096) == 80 and TOPK.code_nbytes(0, 2**32 - 4096) == (2**20 - 1) * 80


@pytest.mark.parametrize(("numel", "nbytes"), [(1_000_000, 19_812), (25_000_000, 494_418)])
def test_message_sizes(numel, nbytes):
    """202 times smaller than fp32, header included."""
    assert TopK().payload_nbytes(numel, math.ceil(numel / GROUP)) == nbytes
    assert 201.5 < 4 * numel / nbytes < 202.3


@pytest.mark.parametrize(
    ("codec", "ranks"),
    [
        (OneBit(), 13),
        (TernGrad(second_phase="requantize"), 26),
        (Block(2), 26),
        (TernGrad(), 38),
        (Block(4), 51),
    ],
    ids=str,
)
def test_from_how_many_ranks_on_dense_codecs_send_less(codec, ranks):
    """All ranks get all payloads, so bytes grow with ranks: docs/howto/local-steps.md has these
    numbers.
    """
    shapes = [("w", (4096, 4096))]
    more = [
        n
        for n in range(2, 60)
        if predict_bytes(TopK(), shapes, n).sent > predict_bytes(codec, shapes, n).sent
    ]
    assert more == list(range(ranks, 60))


def test_beside_so_few_bytes_vectors_count():
    """The ratios of docs/howto/local-steps.md, to an fp32 ring between two ranks."""
    found = [
        predict_bytes(TopK(), MODELS["ResNet-50"](), 2, min_numel=least) for least in (None, 0)
    ]
    assert [round(n.baseline / n.sent) for n in found] == [142, 202]


def test_messages_of_slices_are_cut_at_blocks():
    """What is copied of a payload encoded whole is what the piece alone would be."""
    numel, codec = 100_000, TopK()
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    slot = Slot(0, numel, GROUP, True, 0)
    plan = BucketPlan(codec, [slot], choose(codec, 3), 3, 0, slicing=Slicing(2000))
    assert (
        len(plan.slices) == 50 and 20 < sum(bool(s.messages[0].pieces) for s in plan.slices) <= 25
    )
    whole = codec.encode(x)
    for one in plan.slices:
        (message,) = one.messages
        for piece in message.pieces:
            assert piece.start % 4096 == 0
            target = torch.zeros(message.nbytes, dtype=torch.uint8)
            for dst, src, nbytes in message_copies(
                PayloadLayout(codec.form, whole_pieces([slot])), [message], [0]
            ).rows.tolist():
                target[dst : dst + nbytes] = whole[src : src + nbytes]
            out = torch.zeros(numel)
            codec.decode_body(gradcomp.kernels.HOST, [target], message, out)
            assert torch.equal(
                out[piece.start : piece.start + piece.numel],
                codec.decode(whole)[piece.start : piece.start + piece.numel],
            )


# ---- codec ---------------------------------------------------------------------------------------


@given(numel=st.integers(0, 50_000), seed=st.integers(0, 1000))
def test_conserves_exactly(numel, seed):
    """Promise 5; and what is kept are the largest of every block."""
    rng = np.random.default_rng(seed)
    gradient, residual = (
        torch.from_numpy(rng.standard_normal(numel).astype(np.float32)) for _ in range(2)
    )
    old, codec = residual.clone(), TopK()
    payload = codec.encode(gradient, residual=residual)
    decoded, x = codec.decode(payload), gradient + old
    assert torch.equal(residual, x - decoded) and payload.numel() == codec.payload_nbytes(
        numel, math.ceil(numel / GROUP)
    )
    for first in range(0, numel, 4096):
        block, kept = x[first : first + 4096].abs(), decoded[first : first + 4096] != 0
        assert int(kept.sum()) == math.ceil(block.numel() / 64)
        assert kept.all() or block[kept].min() >= block[~kept].max()
    assert all(len(set(decoded[g : g + GROUP].abs().tolist())) <= 3 for g in range(0, numel, GROUP))


def test_a_known_vector():
    """One of 64 is kept, two of 65 to 128: the mean of 4 and 2 is 3, so that 2 is inner and 4
    outer.
    """
    x = torch.zeros(128)
    x[5], x[100], x[101] = -2.0, 4.0, 1.0
    payload = TopK().encode(x)
    assert TopK().decode(payload)[[5, 100, 101]].tolist() == [-2, 4, 0]
    scales = payload[HEADER_NBYTES : HEADER_NBYTES + 8].view(torch.float32).tolist()
    assert scales == [2, 4] and payload[HEADER_NBYTES + 8 :].tolist() == [
        0b10001010,
        0b00111100,
        0b1001,
    ]  # gaps 5 and 94 = 64 + 30


def test_classes_are_told_apart_in_double():
    """1 + 1 ulp and 1 + 2 ulp have a mean that float32 rounds to the larger, which is above it
    all the same.
    """
    x = np.zeros(128, np.float32)
    x[[3, 70]] = np.float32(1) + np.float32(2**-23) * np.array([1, 2], np.float32)
    scales, codes, left = ref_topk.topk_encode(x, ref.Piece(128, GROUP))
    assert scales.tolist() == [[x[3], x[70]]] and not left.any()
    payload = TopK().encode(torch.from_numpy(x)).numpy()
    assert np.array_equal(payload[-len(codes) :], codes) and payload[32:40].view(
        np.float32
    ).tolist() == [x[3], x[70]]


def test_groups_without_gradient_keep_their_residuals():
    gradient, residual = torch.randn(3 * GROUP), torch.randn(3 * GROUP)
    gradient[GROUP : 2 * GROUP] = 0
    old = residual.clone()
    decoded = TopK().decode(TopK().encode(gradient, residual=residual))
    assert not decoded[GROUP : 2 * GROUP].any() and decoded[:GROUP].any()
    assert torch.equal(residual[GROUP : 2 * GROUP], old[GROUP : 2 * GROUP])


def test_all_is_sent_in_the_end():
    """With feedback the mean of what was decoded comes to the gradient; without, 63 of 64 values
    never arrive.
    """
    x, codec = torch.randn(8192, generator=torch.Generator().manual_seed(0)), TopK()
    residual, total = torch.zeros(8192), torch.zeros(8192)
    for _ in range(1000):
        total += codec.decode(codec.encode(x, residual=residual))
    assert (total / 1000 - x).norm() < 0.12 * x.norm()
    plain = TopK(error_feedback=False)
    assert (plain.decode(plain.encode(x)) - x).norm() > 0.9 * x.norm()


def test_headers_that_lie():
    payload = TopK().encode(torch.randn(100))
    for field, value, name in (
        (12, 100, "group_numel"),
        (12, 65536, "group_numel"),
        (8, 101, None),
        (8, 129, "truncated|padding"),
        (16, 4, "scale_count"),
    ):
        bad = payload.clone()
        bad[field : field + 4] = torch.tensor([value], dtype=torch.int32).view(torch.uint8)
        raw = bad.numpy().tobytes()
        crc = ref_payload.crc32c(raw[:28] + raw[32:])
        bad[28:32] = torch.frombuffer(bytearray(crc.to_bytes(4, "little")), dtype=torch.uint8)
        if name is None:  # one element more in the same block: the bytes do not say so
            assert TopK().decode(bad).numel() == 101
            continue
        with pytest.raises(CorruptPayload) as error:
            TopK().decode(bad)
        assert error.value.check in name


# ---- exchanges -----------------------------------------------------------------------------------

SHAPE = (300, 331)  # three groups and a bit


def gradient(rank, step=0):
    return (np.random.default_rng([rank, step]).standard_normal(SHAPE) * 0.1).astype(np.float32)


def average_over(comm, steps):
    feedback, out = Feedback({7: math.prod(SHAPE)}), []
    for step in range(steps):
        tensor = torch.from_numpy(gradient(comm.rank, step))
        out.append(
            gradcomp.all_reduce(tensor, "topk", comm, key=7, feedback=feedback).flatten().numpy()
        )
    return out


@pytest.mark.parametrize("world", [2, 3])
def test_average_is_the_references(over, world):
    results, residuals = over(world, average_over, 3), None
    for step in range(3):
        grads = [gradient(r, step).reshape(-1) for r in range(world)]
        wanted, residuals, owners = average(
            grads,
            TopK(),
            choose(TopK(), world),
            step=step,
            parameter=7,
            shape=SHAPE,
            residuals=residuals,
        )
        assert owners is None and all(
            results[rank][step].tobytes() == wanted.tobytes() for rank in range(world)
        )


@pytest.mark.parametrize("slice_numel", [None, 64, 5000])
def test_hierarchical_averages_are_the_references(slice_numel):
    """Owners' shares begin anywhere: their blocks are counted from the parameter's start, so the
    first is cut.
    """
    nodes = [[0, 2], [1, 3]]

    def work(comm):
        p = torch.nn.Parameter(torch.zeros(SHAPE))
        averager = GradientAverager(
            [("p", p)], TopK(), comm, exchange="hierarchical", nodes=nodes, slice_numel=slice_numel
        )
        out = []
        for step in range(2):
            p.grad = torch.from_numpy(gradient(comm.rank, step))
            averager.average()
            out.append(p.grad.flatten().numpy().copy())
        averager.close()
        return out

    found, state = run_local(4, work), None
    for step in range(2):
        grads = [gradient(r, step).reshape(-1) for r in range(4)]
        wanted, state = hierarchical(grads, TopK(), nodes, step=step, shape=SHAPE, state=state)
        assert all(one[step].tobytes() == wanted.tobytes() for one in found)


def test_slices_change_no_bit():
    numel = math.prod(SHAPE)

    def work(comm, slicing):
        plan = BucketPlan(
            TopK(),
            [Slot(0, numel, GROUP, True, 0)],
            choose(TopK(), 3),
            3,
            comm.rank,
            slicing=slicing,
        )
        kept = Feedback({0: numel})
        made = BucketExchange(plan, comm, torch.float32, Stats(), timeout_s=30, feedback=kept)
        out = []
        for step in range(3):
            out.append(torch.from_numpy(gradient(comm.rank, step)).flatten())
            run_stages(made, out[-1], step)
        return [*out, *kept.state({0: "p"}).values()]

    whole = run_local(3, work, WHOLE)
    for slices in (2, 5, 40):
        sliced = run_local(3, work, Slicing(numel // slices))
        assert all(
            torch.equal(a, b)
            for one, other in zip(whole, sliced, strict=True)
            for a, b in zip(one, other, strict=True)
        )


def test_what_needs_a_second_phase_is_refused():
    """With what to use instead, before anything is sent."""
    for exchange, owns in (("reduce_scatter", False), ("auto", True), ("all_gather", True)):
        with pytest.raises(ValueError, match=r"TopK\(.*not sparse.*'all_gather' or 'auto'"):
            choose(TopK(), 4, exchange, owner_transform=owns)
    assert str(choose(TopK(), 64)) == str(choose(TopK(), 2, "all_gather")) == "all_gather"
    with pytest.raises(ValueError, match="no second phase, got 'bf16'"):
        TopK().with_second_phase("bf16")
    with pytest.raises(ValueError, match="error_feedback must be True or False, got 2"):
        TopK(error_feedback=2)
    with pytest.raises(ValueError, match=r"start_codec=TopK.*groups of its own.*Block\(4\)"):
        Options(start_step=3, start_codec="topk")

    def refused(comm):
        p = torch.nn.Parameter(torch.zeros(64, 64))
        for options in ({"exchange": "reduce_scatter"}, {"transform": AggregateAdagrad()}):
            with pytest.raises(ValueError, match="not sparse"):
                GradientAverager([("p", p)], TopK(), comm, **options)
        with pytest.raises(ValueError, match="not sparse"):
            gradcomp.all_reduce(torch.zeros(64), TopK(), comm, exchange="reduce_scatter")
        return True

    assert run_local(2, refused) == [True] * 2


@pytest.mark.parametrize(
    "options",
    [{"precondition": True}, {"start_step": 2, "start_codec": "block4"}, {"transactional": True}],
    ids=str,
)
def test_other_options_go_with_it(options):
    """Ranks hold the same averages; a state resumes bit for bit."""

    def work(comm, first, last, states):
        p, out = torch.nn.Parameter(torch.zeros(SHAPE)), []
        averager = GradientAverager([("p", p)], TopK(), comm, **options)
        if states is not None:
            averager.load_state_dict(states[comm.rank])
        for step in range(first, last):
            p.grad = torch.from_numpy(gradient(comm.rank, step))
            averager.average()
            out.append(p.grad.numpy().tobytes())
        state = averager.state_dict()
        averager.close()
        return out, state

    (one, _), (two, _) = run_local(2, work, 0, 6, None)
    before = run_local(2, work, 0, 3, None)
    after = run_local(2, work, 3, 6, [state for _, state in before])
    assert one == two == before[0][0] + after[0][0]


# ---- what recommends codecs ----------------------------------------------------------------------


def test_it_is_a_codec_by_name_and_no_choice_of_the_librarys():
    """What it costs in accuracy was not measured, and ``codec="auto"`` takes nothing that was
    not.
    """
    assert isinstance(resolve("topk"), TopK) and "topk" in {kind.name for kind in CODECS}
    assert all(row.codec.name != "topk" for family in FAMILIES for row in within(family))
