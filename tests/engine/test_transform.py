"""Transforms inside the exchange: AdaGrad at the owner and before encoding, its states,
checkpoints, other world sizes.
"""

import copy
import math

import numpy as np
import pytest
import torch
from _expected import average
from _ranks import run_local
from _saved import parts_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomp
import gradcomp.ddp
from gradcomp import EntropyCoded, GradientAverager, Identity, OneBit, TernGrad
from gradcomp.exchange.sizing import choose
from gradcomp.onebit_sgd import AggregateAdagrad, LocalAdagrad, MomentumAdagrad
from gradcomp.optim import SplitSGD, split_parameters
from gradcomp.payload.pieces import ByElements
from gradcomp.plan.nbytes import predict_bytes

SHAPES = {"w": (40, 33), "b": (5,), "v": (1111,), "one": (1,)}
CODECS = [
    Identity(),
    OneBit(),
    EntropyCoded(2.2),
    TernGrad(),
    TernGrad(scale="own", second_phase="bf16"),
]


def parameters():
    return {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}


def gradient(name, step, rank):
    generator = torch.Generator().manual_seed(7919 * step + 31 * rank + len(name))
    return torch.randn(SHAPES[name], generator=generator) * 10.0 ** (rank - 1)


class Adagrad:
    """The formula in NumPy, float32 rounding at every operation."""

    def __init__(self):
        self.total = np.float32(0)

    def __call__(self, g):
        self.total = self.total + g * g
        return g / (np.sqrt(self.total) + np.float32(1e-10))


def averages(comm, codec, steps, cap=25.0, transform=None, **options):
    """Return what `average` has given for every step and parameter, and the averager."""
    named = parameters()
    averager = GradientAverager(
        named.items(),
        codec,
        comm=comm,
        bucket_cap_mb=cap,
        advanced=gradcomp.Advanced(transform=transform),
        **{"min_numel": 1024, **options},
    )
    out = []
    for step in range(steps):
        for name, p in named.items():
            p.grad = gradient(name, step, comm.rank)
        averager.average()
        out.append({name: p.grad.clone() for name, p in named.items()})
    return out, averager


def expected(codec, world, steps, min_numel):
    """Return the same from the reference and the formula alone."""
    strategy = choose(codec, world, owner_transform=True)
    out = [{} for _ in range(steps)]
    for index, (name, shape) in enumerate(SHAPES.items()):
        formula, residuals, owners = Adagrad(), None, None
        numel = int(np.prod(shape))
        own = codec if numel >= min_numel else Identity()
        for step in range(steps):
            grads = [gradient(name, step, k).numpy().ravel() for k in range(world)]
            mean, residuals, owners = average(
                grads,
                own,
                strategy,
                step=step,
                parameter=index,
                shape=shape,
                residuals=residuals,
                owner_residuals=owners,
                transform=formula,
            )
            out[step][name] = np.asarray(mean).reshape(shape)
    return out


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_the_aggregate_is_transformed_before_it_is_encoded_again(over, codec, world):
    """Every value of three steps from the reference: sums of squares see fp32 pieces and decoded
    means alike.
    """
    results = over(world, one_run, codec)
    wanted = expected(codec, world, 3, 1024)
    for got in results:
        for step in range(3):
            for name in SHAPES:
                assert np.array_equal(got[step][name], wanted[step][name]), (step, name)


def one_run(comm, codec):
    out, averager = averages(comm, codec, 3, transform=AggregateAdagrad())
    again, _ = averages(comm, codec, 3, cap=0.004, transform=AggregateAdagrad())
    assert all(torch.equal(a[n], b[n]) for a, b in zip(out, again, strict=True) for n in SHAPES), (
        "buckets change bits"
    )
    shapes = list(SHAPES.items())
    sent = predict_bytes(
        codec, shapes, comm.world_size, rank=comm.rank, min_numel=1024, owner_transform=True
    ).sent
    assert averager.stats.bytes_sent == 3 * sent
    return [{name: g.numpy() for name, g in step.items()} for step in out]


@pytest.mark.parametrize("transform", [AggregateAdagrad(), LocalAdagrad()], ids=repr)
def test_one_rank_does_the_same(transform):
    out, averager = run_local(1, averages, "onebit", 3, 25.0, transform)[0]
    for name in SHAPES:
        formula = Adagrad()
        for step in range(3):
            wanted = formula(gradient(name, step, 0).numpy())
            assert np.array_equal(out[step][name].numpy(), wanted)
    assert averager.stats.bytes_sent == 0 and "world size 1" in averager.describe()


@pytest.mark.parametrize("exchange", ["all_gather", "reduce_scatter"])
def test_local_adagrad_comes_before_the_codes(exchange):
    def run(comm):
        return averages(comm, Identity(), 3, transform=LocalAdagrad(), exchange=exchange)[0]

    results = run_local(3, run)
    for name in SHAPES:
        formulas = [Adagrad() for _ in range(3)]
        for step in range(3):
            changed = [f(gradient(name, step, k).numpy().ravel()) for k, f in enumerate(formulas)]
            wanted, _, _ = average(changed, Identity(), choose(Identity(), 3, exchange))
            assert all(np.array_equal(got[step][name].numpy().ravel(), wanted) for got in results)


def test_local_adagrad_and_ternary_share_the_scale_of_what_is_encoded():
    def run(comm):
        return averages(comm, TernGrad(clip_sigma=None), 1, transform=LocalAdagrad())[0]

    # after the first step every value is +-1, so every code is +-1 and nothing is lost
    for out in run_local(3, run):
        signs = sum(gradient("v", 0, k).sign() for k in range(3)) / 3
        assert torch.allclose(out[0]["v"], signs, atol=1e-6)


# ---- nothing is left of a bad step ---------------------------------------------------------------


class Poison(gradcomp.Transform):
    """Makes NaN of one value, at its second call on one rank's piece."""

    def apply(self, values, old, new):
        new.copy_(old + 1)
        if float(new[0]) == 2 and values.numel() > 300:
            values[0] = float("nan")


def poisoned(comm):
    out, averager = averages(comm, OneBit(), 2, transform=Poison())
    return (
        [{n: bool(g.isnan().all()) for n, g in step.items()} for step in out],
        parts_of(averager.state_dict())["transform_state"],
        averager.stats.nonfinite_buckets,
    )


def test_a_transform_that_makes_nan_makes_it_on_every_rank():
    for flags, states, count in run_local(3, poisoned):
        assert not any(flags[0].values()) and all(flags[1].values()) and count == 1
        assert all(bool((s == 1).all()) for s in states.values()), "the state of before stays"


class Broken(gradcomp.Transform):
    def apply(self, values, old, new):
        raise RuntimeError("no transform today")


def test_a_transform_that_raises_ends_every_rank():
    def run(comm):
        try:
            averages(comm, OneBit(), 1, transform=Broken(), timeout_s=20)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    said = run_local(2, run)
    assert any("no transform today" in text for text in said), said
    assert all("no transform today" in text or "PeerLost" in text for text in said), said


class Scaler:
    scale = 1024.0

    def get_scale(self):
        return self.scale


def overflowing(comm, transform):
    p = nn.Parameter(torch.zeros(64, 32, dtype=torch.float16))
    averager = GradientAverager(
        [("w", p)],
        Identity(),
        comm=comm,
        advanced=gradcomp.Advanced(transform=transform),
        grad_scaler=Scaler(),
    )
    p.grad = torch.full((64, 32), 100.0 if comm.rank == 0 else float("inf"), dtype=torch.float16)
    averager.average()
    states = parts_of(averager.state_dict())["transform_state"].values()
    return (
        bool(p.grad.isfinite().any()),
        averager.stats.nonfinite_buckets,
        sum(float(s.sum()) for s in states),
    )


class Exploding(gradcomp.Transform):
    """Whose state would have moved, and whose result float16 cannot hold."""

    def apply(self, values, old, new):
        new.copy_(old + 1)
        values.mul_(1e30)


@pytest.mark.parametrize("world", [1, 2])
def test_what_overflows_in_the_buckets_dtype_leaves_no_trace(world):
    for finite, count, total in run_local(world, overflowing, Exploding()):
        assert not finite and count == 1 and total == 0


# ---- checkpoints, other world sizes --------------------------------------------------------------


def test_owners_keep_their_share_of_the_sums():
    def work(comm):
        _, averager = averages(comm, OneBit(), 2, transform=AggregateAdagrad())
        return sum(t.numel() for t in parts_of(averager.state_dict())["transform_state"].values())

    numels = run_local(3, work)
    assert sum(numels) == sum(int(np.prod(s)) for s in SHAPES.values())
    assert max(numels) < 0.4 * sum(numels)


def test_states_that_do_not_fit_change_nothing():
    def run(comm):
        _, averager = averages(comm, OneBit(), 1, transform=AggregateAdagrad())
        before = averager.state_dict()
        for change in ("negative", "nan", "missing"):
            bad = copy.deepcopy(before)
            if change == "missing":
                del parts_of(bad)["transform_state"]["v"]
                bad["ranks"][str(comm.rank)]["tensors"] -= 1
            else:
                parts_of(bad)["transform_state"]["v"][3] = (
                    -1.0 if change == "negative" else float("nan")
                )
            with pytest.raises(ValueError, match="'v'"):
                averager.load_state_dict(bad)
        after = averager.state_dict()
        assert all(
            torch.equal(v, parts_of(after)["transform_state"][n])
            for n, v in parts_of(before)["transform_state"].items()
        )

    run_local(2, run)


def same_on_every_rank(comm, states, steps, codec, transform):
    named = parameters()
    averager = GradientAverager(
        named.items(),
        codec,
        comm=comm,
        advanced=gradcomp.Advanced(transform=transform),
        min_numel=1024,
    )
    if states:
        averager.load_state_dict(states)
    out = []
    for step in steps:
        for name, p in named.items():
            p.grad = gradient(name, step, 0)
        averager.average()
        out.append({name: p.grad.clone() for name, p in named.items()})
    return out, averager.state_dict()


@pytest.mark.parametrize("transform", [AggregateAdagrad(), LocalAdagrad()], ids=repr)
def test_states_are_shared_out_anew_for_another_world_size(transform):
    """Where all ranks have the same gradients, 4, 2 and 1 ranks are one run (means of equal
    values are exact there).
    """
    whole = run_local(1, same_on_every_rank, None, range(6), Identity(), transform)[0][0]
    got, states = [], None
    for number, world in enumerate((4, 2, 1)):
        results = run_local(
            world,
            same_on_every_rank,
            states,
            range(2 * number, 2 * number + 2),
            Identity(),
            transform,
        )
        got += results[0][0]
        states = [state for _, state in results]
    for a, b in zip(whole, got, strict=True):
        assert all(torch.equal(a[n], b[n]) for n in SHAPES)


@pytest.mark.parametrize(("old", "new"), [(4, 3), (3, 4), (4, 2), (2, 4), (1, 3)])
def test_what_is_owed_is_owed_by_the_new_ranks(old, new):
    """Mean of residuals, plus the owners' residuals, is the same before and after, whatever
    exchange each has.
    """

    def train(comm):
        _, averager = averages(comm, OneBit(), 3)
        return averager.state_dict()

    def load(comm, states):
        averager = GradientAverager(parameters().items(), OneBit(), comm=comm, min_numel=1024)
        averager.load_state_dict(states)
        return averager.state_dict()

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
    for name in wanted:
        assert torch.allclose(
            wanted[name], got[name], rtol=0, atol=1e-5 * float(wanted[name].abs().max())
        )
    with pytest.raises(ValueError, match="one of every rank"):
        run_local(new, load, before[1:] if old > 1 else [])
    if old > 1:
        with pytest.raises(ValueError, match="not of one run: step"):
            run_local(new, load, [{**before[0], "step": 9}, *before[1:]])


# ---- warm start ----------------------------------------------------------------------------------


def test_warm_start_leaves_everything_clean():
    """Before warmup_steps gradients are plain averages; from there on it is a run that begins."""

    def run(comm, start, steps):
        named = parameters()
        averager = GradientAverager(
            named.items(),
            OneBit(),
            comm=comm,
            advanced=gradcomp.Advanced(transform=AggregateAdagrad()),
            warmup_steps=start,
            min_numel=1024,
        )
        out = []
        for step in steps:
            for name, p in named.items():
                p.grad = gradient(name, step, comm.rank)
            averager.average()
            out.append({name: p.grad.clone() for name, p in named.items()})
            if averager.step == start:
                assert not any(parts_of(averager.state_dict()).values())
        return out

    start = math.ceil(500 / 200)  # samples / samples_per_exchange
    warm, cold = run_local(3, run, start, range(6))[0], run_local(3, run, 0, range(3, 6))[0]
    for a, b in zip(warm[start:], cold, strict=True):
        assert all(torch.equal(a[n], b[n]) for n in SHAPES)
    plain, _, _ = average(
        [gradient("v", 0, k).numpy() for k in range(3)], Identity(), choose(Identity(), 3)
    )
    assert np.array_equal(warm[0]["v"].numpy(), plain)


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "options", "error", "text"),
    [
        (OneBit(), {"exchange": "all_gather"}, ValueError, "owner transform needs"),
        (TernGrad(second_phase="exact"), {}, ValueError, "exact"),
    ],
)
def test_what_cannot_be_transformed(codec, options, error, text):
    def run(comm):
        advanced = gradcomp.Advanced(transform=AggregateAdagrad())
        GradientAverager(parameters().items(), codec, comm=comm, advanced=advanced, **options)

    with pytest.raises(error, match=text):
        run_local(2, run)


def test_places_and_arguments():
    class Nowhere(AggregateAdagrad):
        place = "nowhere"

    with pytest.raises(ValueError, match="nowhere"):
        run_local(1, averages, OneBit(), 1, 25.0, Nowhere())
    tiny, huge = {"eps": 1e-50}, {"initial_accumulator_value": 1e39}  # 0 and Inf in float32
    for bad in (
        {"eps": 0},
        {"eps": -1.0},
        {"eps": float("nan")},
        {"initial_accumulator_value": -1},
        {"eps": "x"},
        tiny,
        huge,
    ):
        with pytest.raises(ValueError, match=next(iter(bad))):
            AggregateAdagrad(**bad)


# ---- DDP, split optimizers -----------------------------------------------------------------------


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4)
    ).to(dtype)


def under_ddp(codec, dtype, fused, steps=3):
    rank = torch.distributed.get_rank()
    net = model()
    if dtype == "split":
        optimizer = SplitSGD(split_parameters(net), lr=0.05)
    else:
        net = net.to(dtype)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    kind = next(net.parameters()).dtype
    wrapped = DDP(net)
    state = gradcomp.ddp.register(
        wrapped,
        codec,
        advanced=gradcomp.Advanced(transform=AggregateAdagrad()),
        min_numel=0,
        optimizer=optimizer if fused else None,
    )
    for step in range(steps):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(10 * step + rank)).to(kind)
        optimizer.zero_grad()
        wrapped(x).float().square().mean().backward()
        optimizer.step()
    state.check_replicas()
    line = state.describe()
    assert "AggregateAdagrad" in line and "on the aggregate" in line
    state.close()
    return b"".join(p.detach().view(torch.uint8).numpy().tobytes() for p in net.parameters())


@pytest.mark.parametrize("codec", [OneBit(), TernGrad(), Identity()], ids=repr)
def test_under_ddp_with_every_weight_format(ranks, codec):
    for dtype in (torch.float32, torch.bfloat16):
        assert len(set(ranks(2, under_ddp, codec, dtype, False))) == 1
    assert (
        len(
            set(
                ranks(3, under_ddp, codec, "split", False)
                + ranks(3, under_ddp, codec, "split", True)
            )
        )
        == 1
    )


def test_ddp_of_one_rank_transforms(gloo):
    assert gloo(1, under_ddp, OneBit(), torch.float32, False) != gloo(1, without_transform)


def without_transform():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(3):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(10 * step))
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    return b"".join(p.detach().view(torch.uint8).numpy().tobytes() for p in net.parameters())


# ---- after momentum ------------------------------------------------------------------------------


def test_momentum_adagrad_is_its_formula():
    p = nn.Parameter(torch.randn(50, generator=torch.Generator().manual_seed(1)))
    optimizer = MomentumAdagrad(
        [p], lr=0.1, momentum=0.8, weight_decay=0.01, eps=1e-3, initial_accumulator_value=0.5
    )
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


def test_momentum_adagrad_refuses():
    p = nn.Parameter(torch.zeros(3))
    for bad in (
        {"lr": -1},
        {"momentum": 1.0},
        {"momentum": -0.1},
        {"eps": 0},
        {"weight_decay": float("inf")},
    ):
        with pytest.raises(ValueError, match=next(iter(bad))):
            MomentumAdagrad([p], **bad)
    for bad in ({"eps": 1e-50}, {"initial_accumulator_value": 1e39}):
        with pytest.raises(ValueError, match="float32"):
            MomentumAdagrad([p], **bad)
    half = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    optimizer = MomentumAdagrad([p])
    with pytest.raises(ValueError, match="float16"):
        optimizer.add_param_group({"params": [half]})
    assert len(optimizer.param_groups) == 1
    p.grad = torch.zeros(3).to_sparse()
    with pytest.raises(ValueError, match="sparse"):
        MomentumAdagrad([p]).step()
