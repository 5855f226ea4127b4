"""What every stage between a gradient and its codes keeps to: a row of `STAGES` for each option
that changes what is encoded, a test for each promise. Formulas are in the files of the stages.
"""

import pytest
import torch
from _ranks import run_local
from _saved import parts_of
from torch import nn

from gradcomp import Advanced, Block, GradientAverager, OneBit, PeerMismatch, Ternary, TernGrad
from gradcomp.onebit_sgd import AggregateAdagrad, LocalAdagrad

SHAPES = {"w": (40, 33), "b": (5,), "v": (1111,), "one": (1,)}
RARE = ("nodes", "transform", "slice_numel", "quality_every")  # options of `Advanced`
NODES = {"exchange": "hierarchical", "nodes": [[0, 1], [2, 3]]}
# codec, number of ranks, options; the same with another value, which ranks must not mix
STAGES = {
    "none": ((OneBit(), 3, {}), {"min_numel": 7}),
    "decay": ((Ternary(residual_decay=0.25), 3, {}), {"warmup_steps": 9}),
    "aggregate": (
        (OneBit(), 3, {"transform": AggregateAdagrad()}),
        {"transform": AggregateAdagrad(eps=1e-8)},
    ),
    "local": ((OneBit(), 3, {"transform": LocalAdagrad()}), {"transform": None}),
    "precondition": ((Block(2), 3, {"precondition": True}), {"precondition": None}),
    "precondition-nodes": ((Block(2), 4, {"precondition": True, **NODES}), {"precondition": None}),
    "warm start": (
        (OneBit(), 3, {"warmup_steps": 2, "warmup_codec": Block(4)}),
        {"warmup_steps": 2, "warmup_codec": Block(8)},
    ),
    "rotate": ((OneBit(rotate=True), 3, {}), {"min_numel": 7}),
    "nodes": ((OneBit(), 4, NODES), {"nodes": [[0, 2], [1, 3]]}),
    "nodes-ternary": (
        (TernGrad(second_phase="requantize"), 4, {**NODES, "warmup_steps": 1}),
        {"nodes": [[0, 2], [1, 3]]},
    ),
}
each_stage = pytest.mark.parametrize("stage", STAGES)


class Scaler:
    def __init__(self, scale):
        self.scale = scale

    def get_scale(self):
        return self.scale


class Run:
    """An averager and what it was given."""

    def __init__(self, comm, stage, dtype=torch.float32, **changes):
        (codec, _, options), _ = STAGES[stage]
        self.rank = comm.rank
        self.named = {
            name: nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in SHAPES.items()
        }
        options = {"min_numel": 6, "timeout_s": 20, **options, **changes}
        advanced = Advanced(**{name: options.pop(name) for name in RARE if name in options})
        self.averager = GradientAverager(
            self.named.items(), codec, comm=comm, advanced=advanced, **options
        )

    def step(self, number, bad=False, scale=1.0):
        """Return the averages of a step; with `bad`, rank 1 has a NaN among its gradients."""
        for name, p in self.named.items():
            generator = torch.Generator().manual_seed(7919 * number + 31 * self.rank + len(name))
            p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)
        if bad and self.rank == 1:
            self.named["v"].grad[7] = float("nan")
        self.averager.average()
        return {name: p.grad.clone() for name, p in self.named.items()}

    def held(self):
        """Return all tensors of the state, by part and name."""
        parts = parts_of(self.averager.state_dict())
        return {(part, name): t for part, values in parts.items() for name, t in values.items()}


def over_ranks(stage, work):
    return run_local(STAGES[stage][0][1], lambda comm: work(comm, stage))


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


WAYS = [
    {},
    {"bucket_cap_mb": 0.004},
    {"slice_numel": 300, "quality_every": 2},
    {"slice_numel": 300, "atomic_steps": True},
]


@each_stage
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_ranks_have_the_same_averages_whatever_the_buckets_and_slices(stage, dtype):
    def work(comm, stage):
        runs = [Run(comm, stage, dtype, **way) for way in WAYS]
        found = [[run.step(step) for step in range(4)] for run in runs]
        sent = [run.averager.stats.bytes_sent for run in runs]
        assert all(same(runs[0].held(), run.held()) for run in runs)
        assert sent[0] < sent[2], "slices have headers of their own"
        return found

    whole, *others = over_ranks(stage, work)
    for step, wanted in enumerate(whole[0]):
        assert all(same(wanted, run[step]) for runs in (whole, *others) for run in runs)


@each_stage
@pytest.mark.parametrize("atomic_steps", [False, True])
def test_a_value_that_is_not_finite_leaves_no_trace(stage, atomic_steps):
    """Of a whole step nothing stays, in whatever bucket the value is; else, of its bucket."""

    def work(comm, stage):
        cap = 0.004 if atomic_steps else 25
        run = Run(comm, stage, atomic_steps=atomic_steps, bucket_cap_mb=cap)
        run.step(0), run.step(1), run.step(2)
        before = run.held()
        spoilt = run.step(3, bad=True)
        after = run.held()
        return before, spoilt, after, run.step(4)

    for before, spoilt, after, good in over_ranks(stage, work):
        assert spoilt["v"].isnan().all() and same(before, after)
        assert all(bool(tensor.isfinite().all()) for tensor in good.values())


@each_stage
def test_a_discarded_step_leaves_no_trace(stage):
    def work(comm, stage):
        run = Run(comm, stage)
        run.step(0), run.step(1), run.step(2)
        before = run.held()
        run.step(3)
        changed = run.held()
        run.averager.discard_step()
        return before, changed, run.held()

    for before, changed, after in over_ranks(stage, work):
        keeps = stage not in ("rotate", "nodes-ternary")  # from one step to the next
        assert same(before, after) and same(before, changed) != keeps


@each_stage
@pytest.mark.parametrize("middle", [1, 2, 4])
def test_a_resumed_run_is_the_uninterrupted_one(stage, middle, tmp_path):
    def work(comm, stage):
        run = Run(comm, stage)
        for step in range(middle):
            run.step(step)
        file = tmp_path / f"{comm.rank}.pt"
        torch.save(run.averager.state_dict(), file)
        whole = [run.step(step) for step in range(middle, middle + 3)]
        again = Run(comm, stage)
        again.averager.load_state_dict(torch.load(file, weights_only=True))
        resumed = [again.step(step) for step in range(middle, middle + 3)]
        return whole, resumed, run.held(), again.held()

    for whole, resumed, held, again in over_ranks(stage, work):
        assert all(same(a, b) for a, b in zip(whole, resumed, strict=True)) and same(held, again)


@pytest.mark.parametrize(
    "stage", ["aggregate", "local", "precondition", "precondition-nodes", "nodes"]
)
def test_a_state_of_other_options_is_refused_and_changes_nothing(stage):
    def work(comm, stage):
        other = Run(comm, stage, **STAGES[stage][1])
        other.step(0)
        run = Run(comm, stage)
        run.step(0)
        before = run.held()
        with pytest.raises(ValueError) as caught:
            run.averager.load_state_dict(other.averager.state_dict())
        return str(caught.value), same(before, run.held())

    for said, unchanged in over_ranks(stage, work):
        assert unchanged and said


@each_stage
@pytest.mark.parametrize("scales", [(1024.0, 256.0, 64.0), (8.0, 8.0, 8.0)])
def test_values_are_those_without_the_loss_scale(stage, scales):
    """Scales are powers of two, so what comes back is the same bits times the scale."""

    def work(comm, stage):
        scaler = Scaler(scales[0])
        plain, scaled = Run(comm, stage), Run(comm, stage, grad_scaler=scaler)
        pairs = []
        for step, scaler.scale in enumerate(scales):
            got = scaled.step(step, scale=scaler.scale)
            back = {name: tensor / scaler.scale for name, tensor in got.items()}
            pairs.append((plain.step(step), back))
        return pairs

    for pairs in over_ranks(stage, work):
        assert all(same(plain, back) for plain, back in pairs)


@each_stage
def test_ranks_with_other_options_are_a_mismatch(stage):
    changes = STAGES[stage][1]

    def work(comm, stage):
        with pytest.raises(PeerMismatch) as caught:  # of nodes already when averagers are made
            Run(comm, stage, **(changes if comm.rank == 1 else {})).step(0)
        return caught.value.field, caught.value.rank

    field = "warmup_steps" if "warmup_steps" in changes else next(iter(changes))
    assert over_ranks(stage, work) == [(field, 1)] * STAGES[stage][0][1]
