"""encode and decode of one tensor: what users call, on every tier, with good and bad arguments."""

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from _ranks import run_local
from hypothesis import given
from hypothesis import strategies as st
from reference import codec as ref
from reference import payload as ref_payload

import gradcomp
from gradcomp import (
    Block,
    CorruptPayload,
    Identity,
    OneBit,
    RngKey,
    Ternary,
    TernGrad,
    UnsupportedTensor,
)
from gradcomp.bench import methods
from gradcomp.fsdp import saved
from gradcomp.payload import wire

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def flat(x):
    return (
        x.reshape(-1).view(torch.uint16).numpy()
        if x.dtype == torch.bfloat16
        else x.reshape(-1).numpy()
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", ["tensor", "row", 24])
def test_payloads_are_the_references(tier, dtype, group):
    torch.manual_seed(1)
    x = torch.randn(13, 77).to(dtype)
    key = RngKey(seed=5, rank=2, step=9, parameter=4, stream=1)
    codec = TernGrad(group=group, seed=5)
    size = codec.group_numel((13, 77))
    scales = ref.ternary_scales(flat(x), ref.Piece(1001, size), 2.5)
    assert codec.encode(x, key=key).numpy().tobytes() == ref_payload.encode_ternary(
        flat(x), scales, size, ref.Key(5, 2, 9, 4, 1)
    )
    residual = torch.randn(1001)
    wanted, left = ref_payload.encode_onebit(
        flat(x), residual.numpy().copy(), size, ref.Key(0, 0, 9, 0, 0)
    )
    got = OneBit(group=group).encode(x, residual=residual, key=RngKey(step=9))
    assert got.numpy().tobytes() == wanted
    assert residual.numpy().tobytes() == left.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_identity_round_trip(dtype):
    x = torch.randn(100).to(dtype)
    assert torch.equal(Identity().decode(Identity().encode(x)), x.float())


@given(
    numel=st.integers(0, 3000),
    group=st.one_of(st.just("tensor"), st.integers(1, 700)),
    seed=st.integers(0, 2**32 - 1),
    magnitude=st.sampled_from([1e-42, 1e-30, 1.0, 1e30]),
)
def test_ternary_decodes_to_scale_times_sign(numel, group, seed, magnitude):
    x = (
        torch.from_numpy(np.random.default_rng(seed).standard_normal(numel).astype(np.float32))
        * magnitude
    )
    codec = TernGrad(group=group, clip_sigma=None, seed=seed)
    payload = codec.encode(x)
    groups = math.ceil(numel / codec.group_numel((numel,)))
    assert payload.numel() == codec.payload_nbytes(numel, groups)
    decoded = codec.decode(payload)
    size = codec.group_numel((numel,))
    for first in range(0, numel, size):
        part, whole = decoded[first : first + size], x[first : first + size]
        assert set(part.abs().tolist()) <= {0.0, whole.abs().max().item()}
        assert torch.all((part == 0) | (part.sign() == whole.sign()))


@given(
    numel=st.integers(0, 3000),
    group=st.one_of(st.just("tensor"), st.integers(1, 700)),
    seed=st.integers(0, 1000),
)
def test_onebit_conserves_exactly(numel, group, seed):
    """Promise 5: r' = fl(fl(g + r) - q), element by element."""
    rng = np.random.default_rng(seed)
    gradient = torch.from_numpy(rng.standard_normal(numel).astype(np.float32))
    residual = torch.from_numpy(rng.standard_normal(numel).astype(np.float32))
    old, codec = residual.clone(), OneBit(group=group)
    decoded = codec.decode(codec.encode(gradient, residual=residual))
    assert torch.equal(residual, (gradient + old) - decoded)


def test_onebit_means_of_a_known_vector():
    """GRACE's decoder turns this into [760, 760, 765, 765]."""
    codec = OneBit()
    assert codec.decode(codec.encode(torch.tensor([-1.0, -3.0, 2.0, 4.0]))).tolist() == [
        -2,
        -2,
        3,
        3,
    ]


@given(
    bits=st.sampled_from([2, 4, 8]),
    numel=st.integers(0, 3000),
    group=st.one_of(st.just("tensor"), st.integers(1, 700)),
    seed=st.integers(0, 1000),
)
def test_block_conserves_exactly(bits, numel, group, seed):
    """Promise 5 again; and what is left is at most half a step, but for 2 bits' outermost codes."""
    rng = np.random.default_rng(seed)
    gradient = torch.from_numpy(rng.standard_normal(numel).astype(np.float32))
    residual = torch.from_numpy(rng.standard_normal(numel).astype(np.float32))
    old, codec = residual.clone(), Block(bits, group=group)
    payload = codec.encode(gradient, residual=residual)
    decoded = codec.decode(payload)
    assert torch.equal(residual, (gradient + old) - decoded)
    assert payload.numel() == codec.payload_nbytes(
        numel, math.ceil(numel / codec.group_numel((numel,)))
    )
    size = codec.group_numel((numel,))
    for first in range(0, numel, size):
        x, left = (gradient + old)[first : first + size], residual[first : first + size]
        if bits == 2:
            step = 0.9957 * x.double().square().mean().sqrt()
            assert (left.abs()[x.abs() < 2 * step] <= 0.5001 * step).all()
        else:
            assert left.abs().max() <= 0.5001 * x.abs().max() / (7 if bits == 4 else 127)


def test_block_of_a_known_vector():
    """Root mean square 2: with 2 bits the step is 1.9914; with 4 bits it is a seventh of the
    largest.
    """
    x = torch.tensor([-2.0, 2.0, -2.0, 2.0])
    assert Block(2).decode(Block(2).encode(x)).tolist() == pytest.approx(
        [-2.9871, 2.9871, -2.9871, 2.9871], rel=1e-6
    )
    x = torch.tensor([-14.0, 0.0, 2.9, 7.1, -0.9])
    assert Block(4).decode(Block(4).encode(x)).tolist() == [-14, 0, 2, 8, 0]


@pytest.mark.parametrize("codec", [OneBit(), Block(2), Block(4), Block(8)], ids=lambda c: c.name)
def test_untouched_rows_stay_exact(codec):
    gradient, residual = torch.randn(4, 32), torch.randn(4, 32)
    gradient[2] = 0
    old = residual.clone()
    decoded = codec.decode(codec.encode(gradient, residual=residual.view(-1))).view(4, 32)
    assert torch.equal(decoded[2], torch.zeros(32)) and torch.equal(residual[2], old[2])
    assert not torch.equal(residual[1], old[1])


@pytest.mark.parametrize("scale", ["shared", "own"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_without_deviation_are_kept(tier, dtype, scale):
    """Rows of one element, and constant gradients, decoded to zeros: such a weight never
    trained.
    """
    thin = torch.randn(4096, 1, generator=torch.Generator().manual_seed(1)).to(dtype)
    codec = TernGrad(group="row", scale=scale)
    assert torch.equal(codec.decode(codec.encode(thin)), thin.flatten().float())
    for group, x in (
        (64, torch.full((640,), -0.1)),
        ("tensor", torch.full((70_000,), 5.81)),
        ("tensor", torch.ones(1)),
    ):
        codec, x = TernGrad(group=group, scale=scale), x.to(dtype)
        assert torch.equal(codec.decode(codec.encode(x)), x.float())


def test_encoding_again_without_a_key_warns_once(monkeypatch):
    """The same draws on 8 ranks: an average as noisy as one payload (std 0.458 where 8 ranks of
    their own give 0.162).
    """
    monkeypatch.setattr("gradcomp.codecs.terngrad._encodings_without_key", itertools.count())
    x, codec = torch.full((20_000,), 0.3), TernGrad(clip_sigma=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        codec.encode(x, key=RngKey(rank=1))
        first = codec.encode(x, scale=1.0)
        OneBit().encode(x), OneBit().encode(x)
    with pytest.warns(
        UserWarning, match="same random numbers at every call and on every rank"
    ) as seen:
        again = [codec.encode(x, scale=1.0) for _ in range(2)]
    assert all(torch.equal(payload, first) for payload in again)
    (mine,) = [one for one in seen if "same random numbers" in str(one.message)]
    assert mine.filename == __file__
    ranks = [codec.decode(codec.encode(x, scale=1.0, key=RngKey(rank=r))) for r in range(8)]
    assert codec.decode(first).std() > 0.45
    assert sum(ranks).div(8).std() < 0.17


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "codec",
    [TernGrad(), OneBit(), OneBit(group="tensor"), Block(2), Block(4, group="tensor")],
)
def test_not_finite_decodes_to_nan_and_leaves_residuals(codec, bad):
    x = torch.randn(5000)
    x[4999] = bad
    residual = torch.randn(5000) if codec.error_feedback else None
    old = residual.clone() if residual is not None else None
    decoded = codec.decode(codec.encode(x, residual=residual))
    assert torch.isnan(decoded).all()
    assert residual is None or torch.equal(residual, old)


@pytest.mark.parametrize("value", [3.3e38, float("nan"), float("inf")])
@pytest.mark.parametrize(
    "codec",
    [OneBit(group=100), Block(2, group=100), Block(8, group=100)],
    ids=lambda c: c.name,
)
def test_sums_that_are_not_finite_take_nothing_from_residuals(tier, codec, value):
    """`x` is finite, its sum with the residual is not: the payload is flagged, and no group
    loses what it did not send.
    """
    generator = torch.Generator().manual_seed(0)
    x, residual = torch.randn(3000, generator=generator), torch.randn(3000, generator=generator)
    x[2500] = 3.3e38
    residual[2500] = value
    before = residual.clone()
    assert torch.isnan(codec.decode(codec.encode(x, residual=residual))).all()
    assert residual.numpy().tobytes() == before.numpy().tobytes()
    residual[2500] = 0.0
    assert not torch.isnan(codec.decode(codec.encode(torch.ones(3000), residual=residual))).any()


@pytest.mark.parametrize(
    "codec",
    [TernGrad(group=64), OneBit(group=64), Block(4, group=64), Identity()],
    ids=lambda c: c.name,
)
def test_encode_into_memory_of_the_callers(codec):
    x, key = torch.randn(1000), RngKey(step=3)
    groups = 16 if codec.name != "identity" else 1
    out = torch.full((codec.payload_nbytes(1000, groups) + 16,), 0xA5, dtype=torch.uint8)
    room = out[8:-8]
    got = codec.encode(x, key=key, out=room)
    assert got.data_ptr() == room.data_ptr()
    assert torch.equal(room, codec.encode(x, key=key))
    assert (out[:8] == 0xA5).all() and (out[-8:] == 0xA5).all()
    with pytest.raises(ValueError, match=str(room.numel() + 1)):
        codec.encode(x, key=key, out=out[: room.numel() + 1])
    for bad in (torch.zeros(room.numel()), room.view(1, -1), out[::2]):
        with pytest.raises(UnsupportedTensor, match="out"):
            codec.encode(x, key=key, out=bad)


def test_encoding_with_a_residual_allocates_no_plane():
    """A fresh plane and its page faults made one encoding as dear as eight memcpys."""
    x, residual, codec = torch.randn(1 << 20), torch.zeros(1 << 20), OneBit(group=512)
    out = codec.encode(x, residual=residual)
    with torch.profiler.profile(profile_memory=True) as seen:
        codec.encode(x, residual=residual, out=out)
    assert sum(max(0, e.cpu_memory_usage) for e in seen.events()) < 4096


@pytest.mark.parametrize("dtype", DTYPES)
def test_signs_decode_to_one_and_lose_nothing(tier, dtype):
    codec, generator = OneBit(values="sign", group=64), torch.Generator().manual_seed(0)
    residual, sent, given = torch.zeros(1000), torch.zeros(1000), torch.zeros(1000)
    for _ in range(400):
        x = (torch.randn(1000, generator=generator) * 0.3 + 0.1).to(dtype)
        x[64:128] = 0  # a group without gradient says nothing and moves nothing
        before = residual.clone()
        q = codec.decode(codec.encode(x, residual=residual))
        assert torch.equal(residual, (x.float() + before) - q)
        assert (
            set(q.tolist()) == {-1.0, 0.0, 1.0}
            and (q[64:128] == 0).all()
            and q.count_nonzero() == 936
        )
        sent, given = sent + q, given + x.float()
    assert residual.abs().max() < 3
    assert (sent - given).abs().max() < 3  # of a sum of about 40: what was not sent yet


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(
    "codec",
    [TernGrad(), TernGrad(group=1000), OneBit(group=512), OneBit(group=100_003), Identity()],
)
def test_threads_change_no_bit(codec, threads):
    torch.manual_seed(0)
    x, residual = torch.randn(3_200_005), torch.randn(3_200_005)
    kept = {"residual": residual.clone()} if codec.error_feedback else {}
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        wanted, wanted_kept = codec.encode(x, **kept), {k: v.clone() for k, v in kept.items()}
        torch.set_num_threads(threads)
        kept = {"residual": residual.clone()} if codec.error_feedback else {}
        got = codec.encode(x, **kept)
        assert torch.equal(got, wanted)
        assert all(torch.equal(kept[k], wanted_kept[k]) for k in kept)
        assert torch.equal(codec.decode(got), codec.decode(wanted))
    finally:
        torch.set_num_threads(before)


def test_flush_to_zero_in_the_callers_thread_changes_no_bit():
    """torch.set_flush_denormal sets the CPU's FTZ and DAZ flags, which would turn denormal
    gradients into 0.
    """
    x = torch.full((64,), 1e-41)
    wanted = TernGrad(clip_sigma=None).encode(x)
    if not torch.set_flush_denormal(True):
        pytest.fail("this CPU cannot flush denormals")
    try:
        got = TernGrad(clip_sigma=None).encode(x)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(got, wanted)
    assert TernGrad().decode(wanted).abs().max() > 0


def test_given_scale():
    x = torch.tensor([0.5, -2.0, 0.0, 1.0])
    codec = TernGrad(clip_sigma=None)
    decoded = codec.decode(codec.encode(x, scale=1.0))
    assert decoded[1] == -1 and decoded[3] == 1 and decoded[2] == 0
    assert codec.decode(codec.encode(x, scale=0.0)).tolist() == [0.0] * 4
    rows = TernGrad(group=2, clip_sigma=None)
    assert rows.decode(rows.encode(x, scale=torch.tensor([2.0, 1.0])))[1] == -2


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: TernGrad(clip_sigma=0), "0"),
        (lambda: TernGrad(clip_sigma=-1.0), "-1.0"),
        (lambda: OneBit(values="signs"), "signs"),
        (lambda: TernGrad(clip_sigma=float("nan")), "nan"),
        (lambda: TernGrad(scale="global"), "global"),
        (lambda: TernGrad(group="column"), "column"),
        (lambda: TernGrad(group=0), "0"),
        (lambda: TernGrad(group=True), "True"),
        (lambda: TernGrad(second_phase="int8"), "int8"),
        (lambda: TernGrad(scale="own", second_phase="exact"), "own"),
        (lambda: TernGrad(seed=-1), "-1"),
        (lambda: TernGrad(seed=2**32), str(2**32)),
        (lambda: OneBit(second_phase="exact"), "exact"),
        (lambda: OneBit(group=-4), "-4"),
        (lambda: Block(3), "3"),
        (lambda: Block(True), "True"),
        (lambda: Block(2, second_phase="exact"), "exact"),
        (lambda: Block(4, group="channel"), "channel"),
        (lambda: Block(4, error_feedback=1.5), "1.5"),
        (
            lambda: Block(8, error_feedback=False).encode(torch.ones(3), residual=torch.ones(3)),
            "residual",
        ),
        (lambda: Block(2).encode(torch.ones(3), scale=1.0), "1.0"),
        (lambda: Identity("fp8"), "fp8"),
        (lambda: OneBit(error_feedback="yes"), "yes"),
        (lambda: RngKey(rank=-1), "-1"),
        (lambda: RngKey(stream=2**31), str(2**31)),
        (lambda: TernGrad().encode(torch.ones(3), scale=-1.0), "-1.0"),
        (lambda: TernGrad().encode(torch.ones(3), scale=float("inf")), "inf"),
        (lambda: TernGrad().encode(torch.ones(3), scale=torch.ones(2)), "2"),
        (lambda: TernGrad().encode(torch.ones(3), residual=torch.ones(3)), "residual"),
        (lambda: OneBit().encode(torch.ones(3), scale=1.0), "1.0"),
        (lambda: OneBit().encode(torch.ones(3), residual=torch.ones(4)), "4"),
        (
            lambda: OneBit(error_feedback=False).encode(torch.ones(3), residual=torch.ones(3)),
            "residual",
        ),
        (lambda: TernGrad().decode(TernGrad().encode(torch.ones(3)), out=torch.ones(4)), "4"),
        (lambda: TernGrad().payload_nbytes(-1), "-1"),
        (lambda: gradcomp.codecs.resolve("fp8"), "fp8"),
    ],
)
def test_wrong_arguments_are_value_errors_with_the_value(make, word):
    with pytest.raises(ValueError, match=word.replace("*", r"\*")):
        make()


@pytest.mark.parametrize(
    ("tensor", "word"),
    [
        (torch.ones(3, dtype=torch.int64), "int64"),
        (torch.ones(3, dtype=torch.float64), "float64"),
        (torch.ones(3, dtype=torch.complex64), "complex64"),
        (torch.arange(32.0).view(4, 8)[:, :4].t(), "contiguous"),
        (torch.ones(8)[::2], "contiguous"),
        (torch._neg_view(torch.ones(8)), "negative view"),
        (torch.ones(3).to_sparse(), "sparse"),
        (torch.ones(3, device="meta"), "meta"),
    ],
)
@pytest.mark.parametrize("codec", [TernGrad(), OneBit(), Identity()])
def test_unsupported_tensors_are_named(codec, tensor, word):
    with pytest.raises(UnsupportedTensor, match=word):
        codec.encode(tensor)
    with pytest.raises(TypeError, match=word):
        gradcomp.all_reduce(tensor, codec, gradcomp.comm.LocalCommunicator.group(1)[0])


@pytest.mark.parametrize("kind", [Ternary, OneBit, Block])
@pytest.mark.parametrize(
    "decay", [-0.1, 1.0000000001, 2, math.nan, math.inf, -math.inf, True, "0.5", [0.5]]
)
def test_decays_outside_0_to_1_are_refused(kind, decay):
    with pytest.raises(
        ValueError, match="residual_decay must be None or a number from 0 to 1, got "
    ):
        kind(residual_decay=decay)


@pytest.mark.parametrize(
    "step", [0, -1.8, math.nan, math.inf, 1e-46, 1e39, 10**400, True, "1.8", None]
)
def test_steps_that_float32_has_not_are_refused(step):
    """Beyond its range every value was encoded as 0."""
    with pytest.raises(
        ValueError, match="step must be a positive number that float32 can hold, got "
    ):
        Ternary(step=step)


def test_numbers_of_numpy_are_numbers():
    codec = Ternary(step=np.float32(1.5), residual_decay=np.float32(0.25))
    assert codec.options() == Ternary(step=1.5, residual_decay=0.25).options()


@pytest.mark.parametrize("kind", [Ternary, OneBit, Block])
def test_a_decay_of_zero_and_no_feedback_are_the_same_codec(kind):
    assert kind(residual_decay=0).options() == kind(error_feedback=False).options()
    assert kind(residual_decay=0).options()["residual_decay"] == 0.0
    x = torch.randn(2, 64)
    assert torch.equal(kind(residual_decay=0).encode(x[0]), kind(error_feedback=False).encode(x[0]))
    averages = run_local(
        2, lambda comm: gradcomp.all_reduce(x[comm.rank].clone(), kind(residual_decay=0), comm)
    )
    assert torch.equal(averages[0], averages[1]) and bool(averages[0].abs().max() > 0)


def load_topk_state():
    (comm,) = gradcomp.comm.LocalCommunicator.group(1)
    with gradcomp.GradientAverager(
        [("w", torch.nn.Parameter(torch.ones(8)))], "ternary", comm
    ) as a:
        a.load_state_dict({**a.state_dict(), "codec": "TopK(error_feedback=True)"})


def decode_topk_payload():
    payload = Ternary().encode(torch.ones(8)).numpy()
    wire.seal(payload, wire.parse(payload)._replace(codec=9))
    Ternary().decode(torch.from_numpy(payload))


@pytest.mark.parametrize(
    ("use", "error"),
    [
        (lambda: gradcomp.TopK, AttributeError),
        (lambda: gradcomp.codecs.resolve("topk"), ValueError),
        (lambda: gradcomp.plan.costs.find_method("topk all_gather"), ValueError),
        (lambda: methods.parse("topk:every=30"), ValueError),
        (lambda: methods.parse("fsdp2:topk"), ValueError),
        (
            lambda: saved.check_state({"version": 2, "codec": "TopK()"}, {"codec": "x"}, ()),
            ValueError,
        ),
        (load_topk_state, ValueError),
        (decode_topk_payload, CorruptPayload),
    ],
)
def test_topk_was_removed_and_says_what_to_use(use, error):
    with pytest.raises(error, match=r"TopK was removed: use Ternary\(\) with local steps"):
        use()
