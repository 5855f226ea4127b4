"""scale_lr: Adam's steps are as long with codes as without."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from _kinds import check_kinds
from _ranks import each_rank, run_local
from torch import nn

from gradcomp import (
    Advanced,
    Block,
    EntropyCoded,
    GradientAverager,
    Identity,
    OneBit,
    Ternary,
    TernGrad,
)
from gradcomp.codecs import RngKey
from gradcomp.engine import guard
from gradcomp.engine.rate import LongerSteps, divides_by_squares, shortening
from gradcomp.exchange.sizing import Strategy, choose
from gradcomp.optim import SplitAdamW, SplitLAMB

CODECS = [EntropyCoded(1.25), EntropyCoded(2.2), Ternary(), Block(4), OneBit(), TernGrad()]
check_kinds(CODECS, without=("block2", "block8", "identity", "bfloat16"))


def parameter():
    return nn.Parameter(torch.zeros(64, 128))


def rates_of(optimizer):
    """Return a list to which every later step adds its learning rate."""
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(optimizer.param_groups[0]["lr"]))
    return seen


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: f"{c.name}-{getattr(c, 'bits', '')}")
def test_the_factor_is_what_noise_takes_from_steps(codec):
    """Encodes gradients of two ranks, noise with a small drift of either sign, and compares Adam's
    quotient, mean over root of mean square, with that of exact means.
    """
    generator = torch.Generator().manual_seed(7)
    drift = 0.1 * torch.randint(0, 2, (1 << 19,), generator=generator).mul(2).sub(1)
    exact, coded = torch.zeros_like(drift), torch.zeros_like(drift)
    for rank in range(2):
        x = torch.randn(drift.shape, generator=generator) + drift
        exact += x
        coded += codec.decode(codec.encode(x.view(-1, 128), key=RngKey(rank=rank)))
    before, after = (float((v * drift).mean() / v.square().mean().sqrt()) for v in (exact, coded))
    assert shortening(codec, choose(codec, 2)) == pytest.approx(before / after, rel=0.05)


def test_both_phases_count():
    for codec, second in ((Ternary(), Ternary()), (Ternary(second_phase="block4"), Block(4))):
        one = shortening(codec, Strategy("all_gather"))
        both = shortening(codec, choose(codec, 4))
        assert both == pytest.approx(one * shortening(second, Strategy("all_gather")), abs=2e-4)
    exact = TernGrad(second_phase="exact")
    assert shortening(exact, choose(exact, 4)) == shortening(exact, Strategy("all_gather"))


def test_what_loses_nothing_has_no_factor():
    assert shortening(Identity("bf16"), choose(Identity("bf16"), 4)) == 1
    assert shortening(Block(8), choose(Block(8), 4)) == pytest.approx(1, abs=2e-4)


def test_optimizers():
    of = torch.optim
    dividing = [of.Adam, of.AdamW, of.NAdam, of.RMSprop, SplitAdamW]
    for kind in [*dividing, of.SGD, of.Adamax, of.Adagrad, SplitLAMB]:
        model = nn.Linear(4, 4).to(torch.bfloat16 if kind in (SplitAdamW, SplitLAMB) else None)
        found = divides_by_squares(kind(model.parameters(), lr=0.1))
        assert found is (kind in dividing), kind


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_step_has_the_rate_and_gives_it_back(decoupled):
    """By hand: AdamW's decay stays as it is, Adam's is part of the gradient."""
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    weights = [nn.Parameter(torch.linspace(1, 2, 100)) for _ in range(2)]
    decay = 0.1 / 1.25 if decoupled else 0.1
    plain = kind([weights[0]], lr=0.0125, weight_decay=decay)
    scaled = kind([weights[1]], lr=0.01, weight_decay=0.1)
    longer = LongerSteps([scaled], 1.25, 0)
    for step in range(3):
        for w in weights:
            w.grad = torch.sin(torch.arange(100.0) + step)
        longer.steps = step + 1
        plain.step()
        scaled.step()
        assert scaled.param_groups[0]["lr"] == 0.01
        assert scaled.param_groups[0]["weight_decay"] == 0.1
    assert torch.allclose(*weights, rtol=1e-6, atol=1e-8)
    longer.close()
    scaled.step()
    assert not torch.allclose(*weights, rtol=1e-6, atol=1e-8)


def test_every_optimizer_of_a_model_has_longer_steps():
    pair = [torch.optim.AdamW([parameter()], lr=0.1), torch.optim.Adam([parameter()], lr=0.2)]
    made = [LongerSteps(pair, 2.0, 0), LongerSteps(pair[:1], 3.0, 0)]
    assert made[0].describe() == "learning rate of AdamW and Adam x 2 in steps"
    seen = [rates_of(one) for one in pair]
    while True:
        for longer in made:
            longer.steps = 1
        for one in pair:
            one.step()
        if not made:
            break
        made.pop().close()
    assert seen == [pytest.approx([0.3, 0.2, 0.1]), pytest.approx([0.4, 0.4, 0.2])]


def test_a_step_that_raises_leaves_a_rate_that_the_next_one_mends():
    p = parameter()
    optimizer = torch.optim.AdamW([p], lr=0.1)
    longer = LongerSteps([optimizer], 2.0, 0)
    longer.steps = 1

    def closure():
        raise KeyError("mine")

    with pytest.raises(KeyError):
        optimizer.step(closure)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_after_a_warm_up_it_follows_the_average_of_squares():
    """v of 5 exact squares and k noisy ones, as Adam averages them."""
    longer = LongerSteps([torch.optim.AdamW([parameter()])], 1.5, 5)
    for beta in (0.5, 0.95, 0.999):
        v = 0.0
        for step in range(1, 60):
            v = beta * v + (1 - beta) * (1.0 if step <= 5 else 1.5**2)
            longer.steps = step
            wanted = math.sqrt(v / (1 - beta**step))
            assert longer.factor({"betas": (0.9, beta)}) == pytest.approx(wanted)
    longer.coded = 1.0
    assert longer.factor({"betas": (0.9, 0.95)}) == 1


def averager_of(comm, p, codec="ternary", make=torch.optim.AdamW, **options):
    optimizer = make([p], lr=0.01)
    return GradientAverager([("w", p)], codec, optimizer=optimizer, comm=comm, **options), optimizer


def moved(comm, steps=120, **options):
    """Return how far a step moves the weights, root mean square of the last ones."""
    p = parameter()
    averager, optimizer = averager_of(comm, p, precondition=True, **options)
    lengths = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * step + comm.rank)
        p.grad = torch.randn(p.shape, generator=generator) + 0.3
        averager.average()
        before = p.detach().clone()
        optimizer.step()
        lengths.append(float((before - p.detach()).mean()))
    return np.mean(lengths[-20:]), averager.describe()


@pytest.mark.parametrize("world_size", [2, 4])
def test_steps_are_as_long_as_without_codes(world_size):
    """Drift of weights under AdamW: gradients are noise with a mean."""
    (exact, _), *_ = run_local(world_size, partial(moved, warmup_steps=1000))
    (scaled, line), *_ = run_local(world_size, moved)
    (plain, other), *_ = run_local(world_size, partial(moved, advanced=Advanced(scale_lr=False)))
    factor = shortening(Ternary(), choose(Ternary(), world_size))
    assert f"learning rate of AdamW x {factor:.3g} in steps" in line
    assert "learning rate" not in other
    assert scaled == pytest.approx(plain * factor, rel=1e-3)
    assert plain < 0.9 * exact
    assert scaled == pytest.approx(exact, rel=0.02)


def test_off_in_bf16(monkeypatch):
    """Once the guard has taken a run to bf16 there is no noise to make up for."""
    monkeypatch.setattr(guard, "perf_counter", lambda: 0.0)

    def run(comm):
        p = parameter()
        averager, optimizer = averager_of(comm, p, precondition=True, advanced=Advanced(guard=True))
        averager._engine.guard.level = len(guard.LADDER)
        averager._engine._correct_rate()
        p.grad = torch.ones_like(p)
        seen = rates_of(optimizer)
        averager.average()
        optimizer.step()
        return seen

    assert run_local(2, run) == [[0.01]] * 2


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.AdamW, {"precondition": None}),  # units are not shared
        (torch.optim.SGD, {}),
        (torch.optim.AdamW, {"advanced": Advanced(scale_lr=False)}),
        (torch.optim.AdamW, {"exclude": "*"}),  # every tensor travels in fp32
        # all ranks are on one node: nothing is compressed
        (torch.optim.AdamW, {"exchange": "hierarchical", "advanced": Advanced(nodes=[[0, 1]])}),
    ],
)
@each_rank(2, "local")
def test_the_rate_stays(comm, make, options):
    """Nobody asked for another one, or averages are exact."""
    averager, _ = averager_of(comm, parameter(), make=make, **{"precondition": True, **options})
    said = averager.describe()
    assert "learning rate" not in said, said


@each_rank(4, "local")
def test_the_factor_of_1_bit_is_for_those_who_ask(comm):
    """It loses more with it (docs/explanation/accuracy.md)."""
    for asked in (None, True):
        options = {"precondition": True, "advanced": Advanced(scale_lr=asked)}
        averager, _ = averager_of(comm, parameter(), "onebit", **options)
        assert ("learning rate of AdamW x 1.55" in averager.describe()) is bool(asked)


@each_rank(2, "local")
def test_bad_options(comm):
    asked = {"advanced": Advanced(scale_lr=True)}
    for options, why in (
        (asked, "requires precondition=True"),
        ({**asked, "precondition": True, "make": torch.optim.SGD}, "got SGD"),
    ):
        with pytest.raises(ValueError, match=why):
            averager_of(comm, parameter(), **options)


def test_of_several_for_one_optimizer_the_newest_changes_rates():
    """Two models with one optimizer, or a registration that nobody has closed: factors multiplied,
    and the rate grew from step to step.
    """
    optimizer = torch.optim.AdamW([parameter()], lr=0.1)
    longer = [LongerSteps([optimizer], factor, 0) for factor in (2.0, 3.0, 4.0)]
    seen = rates_of(optimizer)
    for step in range(6):
        for one in longer:
            one.steps = step + 1
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] == 0.1
        if step == 1:
            longer.pop().close()
        elif step == 3:
            del longer[-1], one
    assert seen == pytest.approx([0.4, 0.4, 0.3, 0.3, 0.2, 0.2])
