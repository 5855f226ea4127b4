"""Slices of a bucket: which elements travel together, and that no value depends on it."""

import itertools
import math

import pytest
import torch
from _kinds import check_kinds
from _ranks import each_rank, run_local
from _saved import bits_of

import gradcomp
import gradcomp.allreduce
from gradcomp import Block, CorruptPayload, Identity, OneBit, PeerMismatch, Ternary, TernGrad
from gradcomp.codecs import EntropyCoded
from gradcomp.exchange.bucket import BucketExchange, ExchangeOptions
from gradcomp.exchange.routes import run_stages
from gradcomp.exchange.sizing import BucketPlan, Strategy, choose
from gradcomp.exchange.slices import SLICE_NUMEL, WHOLE, Slicing, cut, cuts_groups
from gradcomp.exchange.stats import Stats
from gradcomp.memory.planes import Planes
from gradcomp.memory.store import StateStore
from gradcomp.payload.pieces import Slot, round_up, whole_pieces

NAMES = dict(enumerate("abcd"))
CODECS = {
    "terngrad": TernGrad(seed=3),
    "ternary": Ternary(residual_decay=0.25),
    "terngrad-own": TernGrad(scale="own"),
    "terngrad-row": TernGrad(group="row", second_phase="requantize"),
    "terngrad-block4": TernGrad(second_phase="block4"),
    "terngrad-bf16": TernGrad(second_phase="bf16"),
    "onebit": OneBit(),
    "onebit-tensor": OneBit(group="tensor"),
    "onebit-sign": OneBit(values="sign"),
    "block2": Block(2),
    "block4": Block(4, group=24),
    "entropy": EntropyCoded(2.2),
    "entropy-block4": EntropyCoded(1.25, second_phase="block4", residual_decay=0.25),
    "identity": Identity(),
    "bf16": Identity("bf16"),
}
check_kinds(CODECS, without=("block8",))
SHAPES = [(125, 300), (77,), (40, 251), (3, 8)]  # 77 and 24 values in fp32
NUMEL, SLICES = sum(math.prod(shape) for shape in SHAPES), 5


def slots_of(codec):
    """Return slots whose residuals lie as in `Planes`."""
    slots, offset, residual = [], 0, 0
    for index, shape in enumerate(SHAPES):
        numel = math.prod(shape)
        slots.append(Slot(index, numel, codec.group_numel(shape), numel >= 1024, offset, residual))
        offset, residual = offset + numel, residual + round_up(numel, 16)
    return slots


def plan_of(codec, exchange, world, rank, slicing, owners=None):
    return BucketPlan(
        codec, slots_of(codec), choose(codec, world, exchange), world, rank, owners, slicing=slicing
    )


def exchange_of(comm, plan, state=None):
    options = ExchangeOptions(torch.float32, Stats(), state or StateStore(), timeout_s=30)
    return BucketExchange(plan, comm, options)


def normal(seed, numel=NUMEL):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("world", [2, 8])
@pytest.mark.parametrize("exchange", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("name", CODECS)
def test_slices_change_no_bit(name, exchange, world):
    """Averages and residuals, step after step, are those of the whole bucket."""
    codec = CODECS[name]

    def work(comm, slicing):
        owner = {s.index: s.residual for s in slots_of(codec)}
        plan = plan_of(codec, exchange, comm.world_size, comm.rank, slicing, owner)
        sizes = {s.index: s.numel for s in plan.slots}
        state = StateStore(
            Planes(sizes) if codec.error_feedback and "block4" not in name else None,
            Planes(sizes) if codec.error_feedback or "block4" in name else None,
        )
        made = exchange_of(comm, plan, state)
        assert len(made.slices) == (1 if slicing is WHOLE else SLICES)
        buckets = [normal(100 * step + comm.rank) for step in range(3)]
        for step, bucket in enumerate(buckets):
            run_stages(made, bucket, step)
            assert not made.flagged
        return bits_of([buckets, state.state(NAMES)])

    assert run_local(world, work, WHOLE) == run_local(world, work, Slicing(NUMEL // SLICES))


@pytest.mark.parametrize("exchange", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("name", ["terngrad", "onebit", "terngrad-block4", "entropy"])
@pytest.mark.parametrize("where", [0, NUMEL // 2, NUMEL - 1])
def test_one_bad_value_in_any_slice_is_everyones_verdict(name, exchange, where):
    """The whole bucket is NaN on all ranks, residuals stay, and the next step is as if nothing
    had been.
    """
    codec = CODECS[name]

    def work(comm):
        sizes = {s.index: s.numel for s in slots_of(codec)}
        state = StateStore(Planes(sizes) if codec.error_feedback else None)
        plan = plan_of(codec, exchange, 3, comm.rank, Slicing(NUMEL // SLICES))
        made, out = exchange_of(comm, plan, state), []
        for step in range(3):
            bucket = normal(comm.rank)
            if (step, comm.rank) == (1, 1):
                bucket[where] = float("inf")
            run_stages(made, bucket, step)
            out.append((made.flagged, bucket, state.state(NAMES)["residual"]))
        return out

    for first, second, third in run_local(3, work):
        assert [first[0], second[0], third[0]] == [False, True, False]
        assert bool(second[1].isnan().all())
        assert bool(third[1].isfinite().all())
        assert all(torch.equal(first[2][k], second[2][k]) for k in first[2])


@each_rank(2, "local")
def test_an_overflow_in_a_late_slice_is_nan_everywhere(comm):
    """Means that overflow bf16 in the last slice alone: what earlier slices have written is NaN,
    too.
    """
    slots, strategy = [Slot(0, 4096, 4096, True, 0)], choose(Identity(), 2)
    plan = BucketPlan(Identity(), slots, strategy, 2, comm.rank, slicing=Slicing(512))
    made, bucket = exchange_of(comm, plan), torch.ones(4096)
    bucket[-1] = 3e38
    run_stages(made, bucket, 0)
    assert made.flagged and bucket.isnan().all()


@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_a_cut_covers_every_element_once(count):
    """In order, at multiples of 8, between groups where groups are small, and evenly."""
    slots = [
        Slot(0, 5000, 5000, True, 0),
        Slot(1, 77, 1, False, 5000),
        Slot(2, 40_040, 10, True, 5077),
        Slot(3, 0, 1, True, 45_117),
    ]
    runs = cut(whole_pieces(slots), count)
    assert len(runs) == count
    at = 0
    for p in itertools.chain(*runs):
        assert p.numel > 0 and p.data == at == p.slot.offset + p.start
        at += p.numel
        assert p.start % 8 == 0 and p.residual == p.slot.residual + p.start
        assert p.slot.index != 2 or p.start % p.slot.group_numel == 0
    assert at == 45_117
    sizes = [sum(p.numel for p in one) for one in runs]
    assert max(sizes) - min(sizes) <= 2 * 320
    assert cuts_groups(runs) is (count > 10)  # the one group of the first tensor
    assert not cuts_groups(cut(whole_pieces(slots[2:]), 7))


def test_second_phases_whose_scales_span_slices_go_whole():
    """So that no value depends on slices: a tensor's one scale of means needs all of them."""
    slicing, counts = Slicing(10_000), {}
    names = "terngrad terngrad-own terngrad-block4 terngrad-row terngrad-bf16 onebit block2"
    for name in [*names.split(), "onebit-tensor"]:
        plan = plan_of(CODECS[name], "reduce_scatter", 4, 0, slicing)
        counts[name] = [len(one.second) for one in plan.slices]
    last_alone = [0] * (len(counts["terngrad"]) - 1) + [4]
    assert {name for name, found in counts.items() if found == last_alone} == {
        "terngrad-own",
        "terngrad-block4",
        "onebit-tensor",
    }
    assert all(set(found) == {4} for name, found in counts.items() if found != last_alone)
    strategy, slicing = Strategy("reduce_scatter", "requantize"), Slicing(10_000, whole_second=True)
    owner = BucketPlan(OneBit(), slots_of(OneBit()), strategy, 4, 0, slicing=slicing)
    assert [len(one.second) for one in owner.slices] == last_alone


def test_slices_cost_less_than_a_percent_and_small_buckets_none():
    """Headers and scales of slices as large as they are by default, at up to 64 ranks."""
    numels = 0, 1, 2 * SLICE_NUMEL - 1, 2 * SLICE_NUMEL, 16 * SLICE_NUMEL
    assert [Slicing().count(numel, 2) for numel in numels] == [1, 1, 1, 2, 16]
    numel = 16 * SLICE_NUMEL
    for codec, world in itertools.product((TernGrad(), OneBit(), Block(2), Identity()), (2, 8, 64)):
        slot = Slot(0, numel, codec.group_numel((4096, 4096)), True, 0)
        whole, sliced = (
            BucketPlan(codec, [slot], choose(codec, world), world, 0, slicing=s).sent_nbytes
            for s in (WHOLE, Slicing())
        )
        assert whole < sliced < 1.01 * whole, (codec, world)


def test_run_stages_overlaps_slices():
    """A slice is encoded after the one before it has left and before that one's answer is waited
    for; each in its order.
    """
    order = []

    class Recorder:
        flagged = True

        def begin(self, buffer, step, bucket):
            self.slices = tuple(
                tuple(lambda n=n, s=s: order.append((n, s)) for s in range(4)) for n in range(3)
            )

    run_stages(Recorder(), torch.zeros(1), 0)
    assert len(order) == 12
    for n, s in order:
        assert s == 0 or order.index((n, s - 1)) < order.index((n, s))
        assert n == 0 or order.index((n - 1, s)) < order.index((n, s))
    assert order.index((1, 1)) < order.index((0, 2)) and order.index((2, 1)) < order.index((1, 2))


@pytest.mark.parametrize("value", [0, -1, 63, 1.5, True, "1m"])
def test_a_slice_of_nothing_is_refused(value):
    with pytest.raises(ValueError, match="slice_numel must be None or an integer of at least 64"):
        gradcomp.Advanced(slice_numel=value)


def test_all_reduce_goes_in_slices():
    """The functional door cuts large tensors, too, on the caller's thread alone."""
    numel = 2 * SLICE_NUMEL + 77

    def work(comm):
        tensor = normal(comm.rank, numel)
        gradcomp.all_reduce(tensor, TernGrad(), comm=comm, timeout_s=60)
        call = comm.kept["all_reduce", 0]
        return tensor, [len(made.slices) for made in call.exchanges.values()]

    found = run_local(2, work)
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == [2]

    def whole(comm):
        tensor, slot = normal(comm.rank, numel), Slot(0, numel, numel, True, 0)
        plan = BucketPlan(TernGrad(), [slot], choose(TernGrad(), 2), 2, comm.rank)
        run_stages(exchange_of(comm, plan), tensor, 0)
        return tensor

    assert torch.equal(run_local(2, whole)[0], found[0][0])


def test_all_reduce_without_residuals_sends_exact_sums_at_every_size():
    """Means of 4 bits lean to one side where nobody keeps what they leave out: not by default."""

    def work(comm, codec):
        tensor = normal(comm.rank, 4096)
        gradcomp.all_reduce(tensor, codec, comm=comm, timeout_s=60)
        return tensor

    exact, found, four = (
        run_local(8, work, c)[0]
        for c in (TernGrad(second_phase="exact"), TernGrad(), TernGrad(second_phase="block4"))
    )
    assert torch.equal(exact, found) and not torch.equal(exact, four)


def test_a_failed_all_reduce_keeps_no_buffers(monkeypatch):
    """A slice behind the one that failed may still be arriving in them; ranks that do not agree
    have begun none.
    """

    def run(exchange, values, step):
        run_stages(exchange, values, step)
        if step == 8:
            raise CorruptPayload("crc", "as if it had arrived so")

    monkeypatch.setattr(gradcomp.allreduce, "run_stages", run)

    def work(comm):
        def average(step=None, comm=comm):
            tensor = normal(comm.rank, 2 * SLICE_NUMEL)
            gradcomp.all_reduce(tensor, TernGrad(), comm=comm, timeout_s=60, step=step)
            return tensor

        average()
        kept = comm.kept["all_reduce", 0].exchanges
        with pytest.raises(PeerMismatch):
            average(5 + comm.rank)
        assert len(kept) == 1
        with pytest.raises(CorruptPayload):
            average(8)
        assert not comm.kept["all_reduce", 0].exchanges
        return average(9, comm.duplicate())  # `comm` has failed

    a, b = run_local(2, work)
    assert torch.equal(a, b) and bool(a.abs().max() > 0.5)
