"""Transforms inside the exchange: AdaGrad at the owner and before encoding, its states,
checkpoints, other world sizes.
"""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from _averaging import Run, Scale, same
from _expected import Adagrad, average
from _kinds import check_kinds
from _models import bits, small_model, train
from _ranks import each_rank, run_local
from _saved import parts_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomp
import gradcomp.ddp
from gradcomp import Block, EntropyCoded, Identity, OneBit, TernGrad
from gradcomp.exchange.sizing import choose
from gradcomp.onebit_sgd import AggregateAdagrad, LocalAdagrad, MomentumAdagrad
from gradcomp.optim import SplitSGD, split_parameters
from gradcomp.payload.pieces import ByElements
from gradcomp.plan.nbytes import predict_bytes

SHAPES = {"w": (40, 33), "b": (5,), "v": (1111,), "one": (1,)}
MIN_NUMEL = 1024
CODECS = [
    Identity(),
    OneBit(),
    EntropyCoded(2.2),
    TernGrad(),
    TernGrad(scale="own", second_phase="bf16"),
]
check_kinds(CODECS, without=("ternary", "block2", "block4", "block8", "bfloat16"))


def gradient(name, shape, step, rank):
    generator = torch.Generator().manual_seed(7919 * step + 31 * rank + len(name))
    return torch.randn(shape, generator=generator) * 10.0 ** (rank - 1)


def of(name, step, rank):
    return gradient(name, SHAPES[name], step, rank).numpy().ravel()


def run(comm, codec="onebit", transform=None, **options):
    options = {"min_numel": MIN_NUMEL, "gradient": gradient, **options}
    return Run(comm, codec, SHAPES, transform=transform, **options)


def expected(codec, world, steps):
    """Yield the averages of a step by name, from the reference and the formula alone."""
    strategy, formulas = choose(codec, world, owner_transform=True), {}
    for step in range(steps):
        out = {}
        for index, (name, shape) in enumerate(SHAPES.items()):
            formula, *kept = formulas.get(name, (Adagrad(), None, None))
            mean, *kept = average(
                [of(name, step, k) for k in range(world)],
                codec if np.prod(shape) >= MIN_NUMEL else Identity(),
                strategy,
                step=step,
                parameter=index,
                shape=shape,
                residuals=kept[0],
                owner_residuals=kept[1],
                transform=formula,
            )
            out[name], formulas[name] = torch.from_numpy(mean).view(shape), (formula, *kept)
        yield out


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
@each_rank(by="over")
def test_the_aggregate_is_transformed_before_it_is_encoded_again(comm, codec, world):
    """Every value of three steps from the reference: sums of squares see fp32 pieces and decoded
    means alike.
    """
    whole = run(comm, codec, AggregateAdagrad())
    cut = run(comm, codec, AggregateAdagrad(), bucket_cap_mb=0.004)
    found = whole.steps(3)
    assert all(map(same, found, cut.steps(3))), "buckets change bits"
    for step, wanted in enumerate(expected(codec, world, 3) if comm.rank == 0 else ()):
        assert same(found[step], wanted), step
    options = {"rank": comm.rank, "min_numel": MIN_NUMEL, "owner_transform": True}
    sent = predict_bytes(codec, list(SHAPES.items()), comm.world_size, **options).sent
    assert whole.averager.stats.bytes_sent == 3 * sent
    return bits([average for averages in found for average in averages.values()])


@pytest.mark.parametrize("transform", [AggregateAdagrad(), LocalAdagrad()], ids=repr)
@each_rank(1, "local")
def test_one_rank_does_the_same(comm, transform):
    alone, formulas = run(comm, transform=transform), {name: Adagrad() for name in SHAPES}
    for step in range(3):
        for name, got in alone.step(step).items():
            assert np.array_equal(got.numpy().ravel(), formulas[name](of(name, step, 0)))
    assert alone.averager.stats.bytes_sent == 0 and "world size 1" in alone.averager.describe()


@pytest.mark.parametrize("exchange", ["all_gather", "reduce_scatter"])
@each_rank(3, "local")
def test_local_adagrad_comes_before_the_codes(comm, exchange):
    mine = run(comm, Identity(), LocalAdagrad(), exchange=exchange)
    formulas = {name: [Adagrad() for _ in range(3)] for name in SHAPES}
    for step in range(3):
        for name, got in mine.step(step).items():
            changed = [f(of(name, step, k)) for k, f in enumerate(formulas[name])]
            wanted, _, _ = average(changed, Identity(), choose(Identity(), 3, exchange))
            assert np.array_equal(got.numpy().ravel(), wanted)


@each_rank(3, "local")
def test_local_adagrad_and_ternary_share_the_scale_of_what_is_encoded(comm):
    """After the first step every value is +-1, so every code is +-1 and nothing is lost."""
    found = run(comm, TernGrad(clip_sigma=None), LocalAdagrad()).step(0)["v"]
    signs = sum(np.sign(of("v", 0, k)) for k in range(3)) / 3
    assert np.allclose(found, signs, atol=1e-6)


# ---- nothing is left of a bad step ---------------------------------------------------------------


class Poison(gradcomp.Transform):
    """Makes NaN of one value, at its second call on one rank's piece."""

    def apply(self, values, old, new):
        new.copy_(old + 1)
        if float(new[0]) == 2 and values.numel() > 300:
            values[0] = float("nan")


@each_rank(3, "local")
def test_a_transform_that_makes_nan_makes_it_on_every_rank(comm):
    mine = run(comm, OneBit(), Poison())
    assert not any(bool(g.isnan().any()) for g in mine.step(0).values())
    assert all(bool(g.isnan().all()) for g in mine.step(1).values())
    assert mine.averager.stats.nonfinite_buckets == 1
    states = mine.parts()["transform_state"].values()
    assert all(bool((s == 1).all()) for s in states), "the state of before stays"


class Broken(gradcomp.Transform):
    def apply(self, values, old, new):
        raise RuntimeError("no transform today")


@pytest.mark.parametrize("codec", ["terngrad", Block(8, error_feedback=False)], ids=repr)
@each_rank(2, "local")
def test_a_warm_up_with_the_codec_of_the_run_applies_no_transform(comm, codec):
    """A name stands for one object, which may be given twice, too."""
    mine = run(comm, codec, LocalAdagrad(), warmup_steps=2, warmup_codec=codec)
    seen = []
    for _ in range(3):
        mine.steps(1)
        seen.append(any(state.any() for state in mine.parts()["transform_state"].values()))
    assert seen == [False, False, True]


@each_rank(4, "local")
def test_a_warm_up_sends_second_phases_in_slices_though_the_owner_transforms_later(comm):
    options = {"slice_numel": 1024, "exchange": "reduce_scatter", "warmup_steps": 1}
    mine = run(comm, "onebit", AggregateAdagrad(), warmup_codec="terngrad", **options)
    alike = run(comm, "terngrad", exchange="reduce_scatter")
    assert same(mine.step(0), alike.step(0))
    mine.step(1)


def test_a_transform_that_raises_ends_every_rank():
    def work(comm):
        try:
            run(comm, OneBit(), Broken()).step(0)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    said = run_local(2, work)
    assert any("no transform today" in text for text in said), said
    assert all("no transform today" in text or "PeerLost" in text for text in said), said


class Exploding(gradcomp.Transform):
    """Whose state would have moved, and whose result float16 cannot hold."""

    def apply(self, values, old, new):
        new.copy_(old + 1)
        values.mul_(1e30)


@pytest.mark.parametrize("world", [1, 2])
@each_rank(by="local")
def test_what_overflows_in_the_buckets_dtype_leaves_no_trace(comm, world):
    options = {"transform": Exploding(), "grad_scaler": Scale(1024.0), "dtype": torch.float16}
    mine = Run(comm, Identity(), {"w": (64, 32)}, **options)
    assert not mine.step(0, 100.0 if comm.rank == 0 else float("inf"))["w"].isfinite().any()
    assert mine.averager.stats.nonfinite_buckets == 1
    assert not any(state.any() for state in mine.parts()["transform_state"].values())


# ---- checkpoints, other world sizes --------------------------------------------------------------


def test_owners_keep_their_share_of_the_sums():
    def work(comm):
        mine = run(comm, transform=AggregateAdagrad())
        mine.steps(2)
        return sum(t.numel() for t in mine.parts()["transform_state"].values())

    numels = run_local(3, work)
    assert sum(numels) == sum(int(np.prod(s)) for s in SHAPES.values())
    assert max(numels) < 0.4 * sum(numels)


@each_rank(2, "local")
def test_states_that_do_not_fit_change_nothing(comm):
    mine = run(comm, transform=AggregateAdagrad())
    mine.step(0)
    before = mine.state()
    for value in (-1.0, float("nan")):
        bad = copy.deepcopy(before)
        parts_of(bad)["transform_state"]["v"][3] = value
        with pytest.raises(ValueError, match="'v'"):
            mine.averager.load_state_dict(bad)
    assert same(mine.parts()["transform_state"], parts_of(before)["transform_state"])


@pytest.mark.parametrize("transform", [AggregateAdagrad(), LocalAdagrad()], ids=repr)
def test_states_are_shared_out_anew_for_another_world_size(transform):
    """Where all ranks have the same gradients, 4, 2 and 1 ranks are one run (means of equal
    values are exact there).
    """

    def work(comm, states, first, last):
        mine = run(comm, Identity(), transform, gradient=lambda *of: gradient(*of[:3], 0))
        if states:
            mine.averager.load_state_dict(states)
        return mine.steps(first, last), mine.state()

    whole = run_local(1, work, None, 0, 6)[0][0]
    got, states = [], None
    for number, world in enumerate((4, 2, 1)):
        results = run_local(world, work, states, 2 * number, 2 * number + 2)
        got += results[0][0]
        states = [state for _, state in results]
    assert all(same(a, b) for a, b in zip(whole, got, strict=True))


@pytest.mark.parametrize(("old", "new"), [(4, 3), (3, 4), (4, 2), (2, 4), (1, 3)])
def test_what_is_owed_is_owed_by_the_new_ranks(old, new):
    """Mean of residuals, plus the owners' residuals, is the same before and after, whatever
    exchange each has.
    """

    def train(comm):
        mine = run(comm, OneBit())
        mine.steps(3)
        return mine.state()

    def load(comm, states):
        mine = run(comm, OneBit())
        mine.averager.load_state_dict(states)
        return mine.state()

    def owed(states):
        total = {}
        for name in parts_of(states[0])["residual"]:
            total[name] = sum(parts_of(s)["residual"][name].double() for s in states) / len(states)
            for rank, s in enumerate(states):
                if name in parts_of(s)["owner_residual"]:
                    first, last = ByElements(len(states)).bounds(total[name].numel(), rank)
                    total[name][first:last] += parts_of(s)["owner_residual"][name]
        return total

    before = run_local(old, train)
    after = run_local(new, load, before)
    assert all(s["step"] == 3 and s["world_size"] == new for s in after)
    wanted, got = owed(before), owed(after)
    assert wanted.keys() == got.keys() and (old == 1 or "v" in wanted)
    for name, values in wanted.items():
        assert (values - got[name]).abs().max() <= 1e-5 * values.abs().max()


def test_warm_start_leaves_everything_clean():
    """Before warmup_steps gradients are plain averages; from there on it is a run that begins."""

    def work(comm, warmup_steps, first):
        mine, out = run(comm, OneBit(), AggregateAdagrad(), warmup_steps=warmup_steps), []
        for step in range(first, 6):
            out.append(mine.step(step))
            if mine.averager.step == warmup_steps:
                assert not any(mine.parts().values())
        return out

    warm, cold = run_local(3, work, 3, 0)[0], run_local(3, work, 0, 3)[0]
    assert all(same(a, b) for a, b in zip(warm[3:], cold, strict=True))
    plain, _, _ = average([of("v", 0, k) for k in range(3)], Identity(), choose(Identity(), 3))
    assert np.array_equal(warm[0]["v"].numpy(), plain)


# ---- refusals ------------------------------------------------------------------------------------


class Nowhere(AggregateAdagrad):
    place = "nowhere"


def test_what_is_refused():
    for codec, options, text in (
        (OneBit(), {"exchange": "all_gather"}, "owner transform needs"),
        (TernGrad(second_phase="exact"), {}, "exact"),
        (OneBit(), {"transform": Nowhere()}, "nowhere"),
    ):
        given = {"transform": AggregateAdagrad(), **options}
        with pytest.raises(ValueError, match=text):
            run_local(2, lambda comm, c=codec, o=given: run(comm, c, **o))
    p = nn.Parameter(torch.zeros(3))
    tiny, huge = {"eps": 1e-50}, {"initial_accumulator_value": 1e39}  # 0 and Inf in float32
    of_both = [{"eps": 0}, tiny, huge]
    of_aggregates = [{"eps": -1.0}, {"eps": float("nan")}, {"eps": "x"}]
    of_aggregates.append({"initial_accumulator_value": -1})
    of_momenta = [{"lr": -1}, {"momentum": 1.0}, {"momentum": -0.1}, {"weight_decay": float("inf")}]
    for make, wrong in (
        (AggregateAdagrad, of_both + of_aggregates),
        (lambda **options: MomentumAdagrad([p], **options), of_both + of_momenta),
    ):
        for options in wrong:
            said = "float32" if options in (tiny, huge) else next(iter(options))
            with pytest.raises(ValueError, match=said):
                make(**options)
    optimizer = MomentumAdagrad([p])
    with pytest.raises(ValueError, match="float16"):
        optimizer.add_param_group({"params": [nn.Parameter(p.detach().half())]})
    assert len(optimizer.param_groups) == 1
    p.grad = torch.zeros(3).to_sparse()
    with pytest.raises(ValueError, match="sparse"):
        optimizer.step()


# ---- DDP, split optimizers -----------------------------------------------------------------------


def trained(codec, dtype=torch.float32, fused=None, transform=True):
    """Return the weights after three steps; `fused`: whether an optimizer of split weights takes
    packed averages, None for SGD.
    """
    net = small_model(dtype)
    if fused is None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    else:
        optimizer = SplitSGD(split_parameters(net), lr=0.05)
    wrapped = DDP(net)
    options = {"min_numel": 0, "optimizer": optimizer if fused else None}
    advanced = gradcomp.Advanced(transform=AggregateAdagrad() if transform else None)
    with gradcomp.ddp.register(wrapped, codec, advanced=advanced, **options) as state:
        train(wrapped, optimizer, dist.get_rank(), range(3))
        state.check_replicas()
        assert ("AggregateAdagrad" in state.describe()) == transform
        assert ("on the aggregate" in state.describe()) == transform
    return bits(net)


@pytest.mark.parametrize("codec", [OneBit(), TernGrad(), Identity()], ids=repr)
@each_rank(3)
def test_under_ddp_with_every_weight_format(codec):
    plain, packed = (trained(codec, fused=fused) for fused in (False, True))
    assert plain == packed
    return [plain, *(trained(codec, dtype) for dtype in (torch.float32, torch.bfloat16))]


@each_rank(1)
def test_ddp_of_one_rank_transforms():
    assert trained(OneBit()) != trained(OneBit(), transform=False)


# ---- after momentum ------------------------------------------------------------------------------


def test_momentum_adagrad_is_its_formula():
    p = nn.Parameter(torch.randn(50, generator=torch.Generator().manual_seed(1)))
    options = {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.01, "eps": 1e-3}
    optimizer = MomentumAdagrad([p], **options, initial_accumulator_value=0.5)
    w, m, s = p.detach().double(), torch.zeros(50).double(), torch.full((50,), 0.5).double()
    for step in range(5):
        g = torch.randn(50, generator=torch.Generator().manual_seed(step + 2))
        p.grad = g.clone()
        optimizer.step()
        m = 0.8 * m + g + 0.01 * w
        s = s + m * m
        w = w - 0.1 * m / (s.sqrt() + 1e-3)
        assert torch.equal(p.grad, g)
    assert torch.allclose(p.detach().double(), w, atol=1e-6)
    again = MomentumAdagrad([p], lr=0.1)
    again.load_state_dict(optimizer.state_dict())
    assert torch.equal(again.state[p]["sum"], optimizer.state[p]["sum"])


def test_momentum_and_sums_are_loaded_to_the_device_of_the_parameter():
    """They stayed in host memory, to which checkpoints are often read: the next step failed."""
    p, elsewhere = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, device="meta"))
    p.grad = torch.ones(3)
    optimizer, again = MomentumAdagrad([p]), MomentumAdagrad([elsewhere])
    optimizer.step()
    again.load_state_dict(optimizer.state_dict())
    assert {value.device.type for value in again.state[elsewhere].values()} == {"meta"}
