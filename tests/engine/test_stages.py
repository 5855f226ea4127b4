"""What every stage between a gradient and its codes keeps to: a row of `STAGES` for each option
that changes what is encoded, a test for each promise. Formulas are in the files of the stages.
"""

import pytest
import torch
from _averaging import Run, Scale, same
from _ranks import run_local

from gradcomp import Block, OneBit, Ternary, TernGrad
from gradcomp.onebit_sgd import AggregateAdagrad, LocalAdagrad

SHAPES = {"w": (40, 33), "b": (5,), "v": (1111,), "one": (1,)}
NODES = {"exchange": "hierarchical", "nodes": [[0, 1], [2, 3]]}
PACKED_START = {"warmup_steps": 2, "warmup_codec": Block(4)}
# codec, number of ranks, options
STAGES = {
    "none": (OneBit(), 3, {}),
    "decay": (Ternary(residual_decay=0.25), 3, {}),
    "aggregate": (OneBit(), 3, {"transform": AggregateAdagrad()}),
    "local": (OneBit(), 3, {"transform": LocalAdagrad()}),
    "precondition": (Block(2), 3, {"precondition": True}),
    "precondition-nodes": (Block(2), 4, {"precondition": True, **NODES}),
    "warm start": (OneBit(), 3, PACKED_START),
    "rotate": (OneBit(rotate=True), 3, {}),
    "nodes": (OneBit(), 4, NODES),
    "nodes-ternary": (TernGrad(second_phase="requantize"), 4, {**NODES, "warmup_steps": 1}),
}
# options with which a state does not fit; those that ranks compare are in entry/test_mismatch.py
OTHERS = {
    "aggregate": {"transform": AggregateAdagrad(eps=1e-8)},
    "local": {"transform": None},
    "precondition": {"precondition": None},
    "precondition-nodes": {"precondition": None},
    "nodes": {"nodes": [[0, 2], [1, 3]]},
}
each_stage = pytest.mark.parametrize("stage", STAGES)


def run(comm, stage, **changes):
    codec, _, options = STAGES[stage]
    return Run(comm, codec, SHAPES, **{"min_numel": 6, **options, **changes})


def held(run):
    """Return all tensors of a state, by part and name."""
    return {(part, name): t for part, of in run.parts().items() for name, t in of.items()}


def over_ranks(stage, work):
    return run_local(STAGES[stage][1], work)


WAYS = [
    {},
    {"bucket_cap_mb": 0.004},
    {"slice_numel": 300, "quality_every": 2},
    {"slice_numel": 300, "atomic_steps": True},
]


@each_stage
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_ranks_have_the_same_averages_whatever_the_buckets_and_slices(stage, dtype):
    def work(comm):
        runs = [run(comm, stage, dtype=dtype, **way) for way in WAYS]
        found = [one.steps(4) for one in runs]
        sent = [one.averager.stats.bytes_sent for one in runs]
        assert all(same(held(runs[0]), held(one)) for one in runs)
        assert sent[0] < sent[2], "slices have headers of their own"
        return found

    whole, *others = over_ranks(stage, work)
    for step, wanted in enumerate(whole[0]):
        assert all(same(wanted, one[step]) for runs in (whole, *others) for one in runs)


@each_stage
@pytest.mark.parametrize("atomic_steps", [False, True])
def test_a_value_that_is_not_finite_leaves_no_trace(stage, atomic_steps):
    """Of a whole step nothing stays, in whatever bucket the value is; else, of its bucket."""

    def work(comm):
        cap = 0.004 if atomic_steps else 25
        mine = run(comm, stage, atomic_steps=atomic_steps, bucket_cap_mb=cap)
        mine.steps(3)
        before = held(mine)
        mine.fill(3)
        if comm.rank == 1:
            mine.named["v"].grad[7] = float("nan")
        mine.averager.average()
        assert mine.named["v"].grad.isnan().all() and same(before, held(mine))
        assert all(bool(tensor.isfinite().all()) for tensor in mine.step(4).values())

    over_ranks(stage, work)


@each_stage
def test_a_discarded_step_leaves_no_trace(stage):
    def work(comm):
        mine = run(comm, stage)
        mine.steps(3)
        before = held(mine)
        mine.step(3)
        changed = held(mine)
        mine.averager.discard_step()
        keeps = stage not in ("rotate", "nodes-ternary")  # from one step to the next
        assert same(before, held(mine)) and same(before, changed) != keeps

    over_ranks(stage, work)


@each_stage
@pytest.mark.parametrize("middle", [1, 2, 4])
def test_a_resumed_run_is_the_uninterrupted_one(stage, middle, tmp_path):
    def work(comm):
        mine, file = run(comm, stage), tmp_path / f"{comm.rank}.pt"
        mine.steps(middle)
        torch.save(mine.state(), file)
        whole = mine.steps(middle, middle + 3)
        again = run(comm, stage)
        again.averager.load_state_dict(torch.load(file, weights_only=True))
        for wanted, got in zip(whole, again.steps(middle, middle + 3), strict=True):
            assert same(wanted, got)
        assert same(held(mine), held(again))

    over_ranks(stage, work)


@pytest.mark.parametrize("stage", OTHERS)
def test_a_state_of_other_options_is_refused_and_changes_nothing(stage):
    def work(comm):
        other, mine = run(comm, stage, **OTHERS[stage]), run(comm, stage)
        for one in (other, mine):
            one.step(0)
        before = held(mine)
        with pytest.raises(ValueError, match="."):
            mine.averager.load_state_dict(other.state())
        assert same(before, held(mine))

    over_ranks(stage, work)


@each_stage
@pytest.mark.parametrize("scales", [(1024.0, 256.0, 64.0), (8.0, 8.0, 8.0)])
def test_values_are_those_without_the_loss_scale(stage, scales):
    """Scales are powers of two, so what comes back is the same bits times the scale."""

    def work(comm):
        scaler = Scale(scales[0])
        plain, scaled = run(comm, stage), run(comm, stage, grad_scaler=scaler)
        for step, scaler.value in enumerate(scales):
            got, wanted = scaled.step(step, scaler.value), plain.step(step)
            assert same(wanted, {name: tensor / scaler.value for name, tensor in got.items()})

    over_ranks(stage, work)
