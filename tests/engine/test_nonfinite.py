"""Values that are not finite, or nearly so: no way for them into weights, packed or decoded,
flagged or not.
"""

import numpy as np
import pytest
import torch
from _averaging import Run
from _ranks import run_local
from _saved import bits_of
from _tables import flushing

from gradcomp import Block, CorruptPayload, Identity, OneBit, PeerLost, TernGrad
from gradcomp.exchange.bucket import BucketExchange, ExchangeOptions
from gradcomp.exchange.routes import run_stages
from gradcomp.exchange.sizing import BucketPlan, Strategy
from gradcomp.exchange.stats import Stats
from gradcomp.memory import moments
from gradcomp.payload import wire
from gradcomp.payload.pieces import Slot

SCATTER = {
    "identity": (Identity(), "fp32"),
    "onebit": (OneBit(), "requantize"),
    "bf16": (OneBit(second_phase="bf16"), "bf16"),
    "terngrad": (TernGrad(), "exact"),
}


def exchange_of(comm, codec, strategy, dtype=torch.float32, keeps_packed=True):
    """Return an exchange of 512 values that are encoded and 64 that are not."""
    slots = [Slot(0, 512, codec.group_numel((512,)), True, 0), Slot(1, 64, 64, False, 512)]
    plan = BucketPlan(codec, slots, strategy, comm.world_size, comm.rank)
    options = ExchangeOptions(dtype, Stats(), timeout_s=60, keeps_packed=keeps_packed)
    return BucketExchange(plan, comm, options)


def averaged(comm, codec, values, strategy, dtype=torch.float32, keeps_packed=True):
    """Exchange one bucket; return (flagged, kept packed, the averages as float32)."""
    exchange = exchange_of(comm, codec, strategy, dtype, keeps_packed)
    value = values[comm.rank] if isinstance(values, list) else values
    bucket = torch.full((576,), value).to(dtype)
    run_stages(exchange, bucket, 0)
    flagged, kept = exchange.flagged, exchange.averages is not None
    exchange.unpack()
    return flagged, kept, bucket.float()


# ---- finite values whose sum overflows -----------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", [Identity(), OneBit()], ids=lambda c: c.name)
@pytest.mark.parametrize("world", [2, 3, 4, 5, 8])
def test_a_packed_sum_overflows_exactly_where_a_decoded_one_does(world, codec, dtype):
    """At 5 and 8 ranks each payload was small enough, their sum was not: Inf went into weights,
    and nothing was flagged.
    """
    strategy = Strategy("all_gather")
    for flagged, kept, packed in run_local(world, averaged, codec, 8e37, strategy, dtype):
        assert flagged == (world > 4)  # the sum reaches 3.4e38
        assert flagged or torch.isfinite(packed).all()
        assert not (flagged and kept)
    plain = run_local(world, averaged, codec, 8e37, strategy, dtype, False)
    assert [flagged for flagged, _, _ in plain] == [world > 4] * world


def around(bound, world):
    """Return values of all ranks whose sum is the last float32 below `bound`, and values whose
    sum is `bound`.
    """
    share = np.float32(bound / world)
    less = np.nextafter(share, np.float32(0))
    return [[float(less)] + [float(share)] * (world - 1), [float(share)] * world]


@pytest.mark.parametrize("world", [2, 4, 8])
def test_averages_stay_packed_up_to_the_bound_and_not_at_it(world):
    """2**127 for the sum over ranks, whatever their number: at 2**128 it would overflow."""
    for values, keeps in zip(around(2.0**127, world), (True, False), strict=True):
        found = run_local(world, averaged, Identity(), values, Strategy("all_gather"))
        for flagged, kept, average in found:
            assert (flagged, kept) == (False, keeps)
            assert torch.isfinite(average).all()


@pytest.mark.parametrize("name", SCATTER)
def test_owners_means_are_bounded_one_by_one(name):
    """Of a reduce_scatter each average arrives as one payload, so eight large ones are no reason
    to unpack.
    """
    codec, second = SCATTER[name]
    strategy = Strategy("reduce_scatter", second)
    for flagged, kept, average in run_local(3, averaged, codec, 2e37, strategy):
        assert (flagged, kept) == (False, True)
        assert torch.isfinite(average).all()


# ---- a peer that sends NaN and does not say so ---------------------------------------------------


def unflagged(comm, codec, value, strategy, keeps_packed):
    """Rank 1's encoder hides from its header that `value` stands among its plain values."""
    codec = type(codec)(**codec.options())
    if comm.rank == 1:
        encode = codec.encode_body

        def encode_and_hide(*arguments):
            encode(*arguments)
            return False

        codec.encode_body = encode_and_hide
    exchange = exchange_of(comm, codec, strategy, keeps_packed=keeps_packed)
    bucket = torch.ones(576)
    bucket[515] = value if comm.rank == 1 else 1.0
    try:
        run_stages(exchange, bucket, 0)
    except CorruptPayload as error:
        return error.check, "rank 1" in error.detail, exchange.averages is None
    return exchange.flagged, exchange.averages, bucket


@pytest.mark.parametrize("keeps_packed", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "codec", [Identity(), OneBit(error_feedback=False), TernGrad()], ids=lambda c: c.name
)
def test_a_plain_nan_without_a_flag_is_corrupt(codec, value, keeps_packed):
    """max(x, nan) is x, so a NaN passed for a small value: the packed bucket was kept, and
    weights became NaN.
    """
    results = run_local(2, unflagged, codec, value, Strategy("all_gather"), keeps_packed)
    assert results == [("value", True, True)] * 2


@pytest.mark.parametrize("second", ["fp32", "exact"])
def test_an_owner_refuses_a_plain_nan_without_a_flag(second):
    """Rank 0 owns the first half of every tensor; it must not hand the NaN on as a mean."""

    def work(comm):
        codec = Identity() if second == "fp32" else TernGrad()
        try:
            return unflagged(comm, codec, float("nan"), Strategy("reduce_scatter", second), True)
        except PeerLost:
            return "lost"
        finally:
            comm.abort()

    assert run_local(2, work) == [("value", True, True), "lost"]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_decode_refuses_a_value_that_no_flag_announces(value):
    codec = Identity()
    payload = codec.encode(torch.ones(100))
    data = payload.numpy()
    data[32:].view("<f4")[99] = value
    wire.seal(data, wire.parse(codec.encode(torch.ones(100)).numpy()))
    with pytest.raises(CorruptPayload, match="non-finite flag") as error:
        codec.decode(payload)
    assert error.value.check == "value"


# ---- threads that flush denormals to zero --------------------------------------------------------


def denormal(name, shape, step, rank, dtype=torch.float32):
    generator = torch.Generator().manual_seed(2 * step + rank)
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    return torch.randint(1, 100, shape, generator=generator, dtype=kind).view(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("exchange", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("codec", [Identity(), TernGrad(), OneBit()], ids=lambda c: c.name)
def test_averages_do_not_depend_on_flushing_denormals(codec, exchange, dtype):
    """Kernels keep denormals whatever the caller's thread has set."""

    def work(comm, flushes):
        options = {"min_numel": 100, "exchange": exchange, "dtype": dtype}
        mine = Run(comm, codec, {"w": (40, 30), "b": (10,)}, **options)
        found = []
        with flushing(flushes):
            for step in range(3):
                for name, p in mine.named.items():
                    p.grad = denormal(name, p.shape, step, comm.rank, dtype)
                mine.averager.average()
                found += [p.grad.clone() for p in mine.named.values()]
        return bits_of([*found, *mine.parts()["residual"].values()])

    kept, flushed = (run_local(2, work, flushes) for flushes in (False, True))
    assert kept == flushed
    assert any(set(average) != {0} for _, _, average in kept[0])


def tiny_tensors(comm, codec, flushes):
    """Average gradients of which a tensor's typical one is denormal, then ordinary ones, in
    units of second moments.
    """

    def given(name, shape, step, rank):
        generator = torch.Generator().manual_seed(2 * step + rank)
        if step >= 2:
            return torch.randn(shape, generator=generator)
        limits = 1 << 22, 1 << 23  # 5.9e-39 and up
        drawn = torch.randint(*limits, shape, generator=generator, dtype=torch.int32)
        return drawn.view(torch.float32)

    options = {"min_numel": 100, "precondition": True, "gradient": given}
    mine = Run(comm, codec, {"w": (40, 30), "v": (2000,)}, **options)
    with flushing(comm.rank in flushes):
        found = []
        for step in range(4):
            for name, p in mine.named.items():
                p.grad = given(name, p.shape, step, comm.rank)
            mine.averager.average()
            found += [p.grad.clone() for p in mine.named.values()]
    return bits_of([*found, *mine.parts()["second_moment"].values()])


@pytest.mark.parametrize(
    "codec", [Identity(), TernGrad(), OneBit(), Block(2)], ids=lambda c: c.name
)
def test_second_moments_do_not_depend_on_flushing_denormals(codec):
    """On a rank that flushed them the typical value of a tensor was 0: its moments stood still
    there, and averages differed.
    """
    kept, mixed = (run_local(2, tiny_tensors, codec, flushes) for flushes in ((), (1,)))
    assert kept[0] == kept[1] == mixed[0] == mixed[1]


@pytest.mark.parametrize("flushes", [False, True])
def test_the_inverse_of_a_typical_value_is_one_rounding(flushes):
    values = [2.0**-149, 2.0**-128, 2.9387e-39, 1e-38, 2.0**-126, 1.1, 3.0, 2.0**126, 8e37]
    values += (torch.rand(500, generator=torch.Generator().manual_seed(0)) * 3 + 1e-3).tolist()
    values = np.array(values, np.float32)
    with np.errstate(all="ignore"):
        wanted = [float(np.float32(1) / v) for v in values]
    with flushing(flushes):
        found, none = (
            [moments._inverse(moments._exact(b)) for b in given]
            for given in (values.view(np.int32).tolist(), (0, 0x7F800000, 0x7FC00000, 0x7F7FFFFF))
        )
    assert found == [v if v < float("inf") else 0.0 for v in wanted] and none == [0.0] * 4


def test_denormals_count_where_the_thread_flushes_them():
    """Moments are not 0, and neither is a given scale, which torch's operations made 0."""
    given = [torch.full((n,), value) for n in (3, 5000) for value in (0.0, 2.0**-140)]
    scale = torch.full((1,), 2.0**-130)
    with flushing(True):
        found = [moments.any_bits(values) for values in given]
        payload = TernGrad().encode(torch.ones(8), scale=scale)
    assert found == [False, True] * 2
    assert TernGrad().decode(payload).eq(2.0**-130).all()
