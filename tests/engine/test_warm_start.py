"""A warm start that is packed itself: nothing is lost on the way from one codec to the other."""

import pytest
import torch
from _ranks import run_local
from _saved import parts_of
from torch import nn

from gradcomp import Advanced, Block, GradientAverager, Identity, OneBit, TernGrad
from gradcomp.engine.options import Options
from gradcomp.optim import OneBitAdam, OneBitLamb, ZeroOneAdam

START = 4
SHAPES = {"w": (40, 60), "v": (70,)}


def gradient(name, step, rank):
    return torch.randn(
        SHAPES[name], generator=torch.Generator().manual_seed(31 * step + 7 * rank + len(name))
    )


def run(comm, codec, steps=8, first=0, state=None, **options):
    """Return sums of averages and of own gradients, bytes of every step, and the averager."""
    named = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    options = {"warmup_steps": START, "warmup_codec": Block(4), "min_numel": 0, **options}
    averager = GradientAverager(named.items(), codec, comm=comm, **options)
    if state is not None:
        averager.load_state_dict(state)
    averages, exact = (
        {name: torch.zeros(shape) for name, shape in SHAPES.items()} for _ in range(2)
    )
    sent = []
    for step in range(first, first + steps):
        for name, p in named.items():
            p.grad = gradient(name, step, comm.rank)
            exact[name] += p.grad
        before = averager.stats.bytes_sent
        averager.average()
        sent.append(averager.stats.bytes_sent - before)
        for name, p in named.items():
            averages[name] += p.grad
    return averages, exact, sent, averager


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("codec", [OneBit(), Block(2)], ids=repr)
def test_what_codes_leave_out_goes_over_to_the_codec_that_follows(codec, world):
    """Gradients = averages + residuals of all ranks + those of owners, across the change."""

    def one(comm):
        averages, exact, sent, averager = run(comm, codec)
        return averages, exact, sent, averager.state_dict()

    ranks = run_local(world, one)
    for name, shape in SHAPES.items():
        given = sum(exact[name] for _, exact, _, _ in ranks) / world
        left = sum(parts_of(state)["residual"][name] for *_, state in ranks).view(shape) / world
        owned = [
            parts_of(state)["owner_residual"][name]
            for *_, state in ranks
            if parts_of(state)["owner_residual"]
        ]
        owed = torch.cat(owned).view(shape) if owned else torch.zeros(shape)
        torch.testing.assert_close(ranks[0][0][name] + left + owed, given, atol=1e-5, rtol=0)
    sent = ranks[0][2]
    assert len(set(sent[:START])) == len(set(sent[START:])) == 1
    assert sent[START] < 0.7 * sent[0]


@pytest.mark.parametrize("codec", [OneBit(), TernGrad()], ids=repr)
@pytest.mark.parametrize(
    "options",
    [
        {"precondition": True},
        {"exchange": "hierarchical", "advanced": Advanced(nodes=[[0, 1], [2, 3]])},
    ],
    ids=str,
)
def test_it_goes_with_other_options_and_replicas_stay_equal(codec, options):
    def one(comm):
        averages, _, sent, averager = run(comm, codec, **options)
        return averages, sent, averager.describe()

    ranks = run_local(4, one)
    assert all(torch.equal(a[name], ranks[0][0][name]) for a, _, _ in ranks for name in SHAPES)
    assert sum(sent[0] for _, sent, _ in ranks) > sum(sent[-1] for _, sent, _ in ranks)
    assert f"from step {START} on ({Block(4)!r} before it)" in ranks[0][2]


def test_a_warm_start_in_identity_is_that_in_fp32():
    def one(comm):
        return (
            run(comm, OneBit(), warmup_codec=Identity())[0],
            run(comm, OneBit(), warmup_codec=None)[0],
        )

    for packed, plain in run_local(2, one):
        assert all(torch.equal(packed[name], plain[name]) for name in SHAPES)


@pytest.mark.parametrize("kind", [OneBitAdam, OneBitLamb])
def test_the_warm_up_of_an_optimizer_whose_momentum_travels(kind):
    """Packed gradients, then packed momenta; what is left out at the change is less than a step
    and is paid.
    """

    def one(comm, codec):
        p = nn.Parameter(torch.ones(40, 60))
        optimizer = kind([p], lr=0.01, freeze_step=40)
        options = {"warmup_codec": codec, "min_numel": 0, "precondition": True}
        averager = GradientAverager([("w", p)], OneBit(), comm=comm, optimizer=optimizer, **options)
        sent = []
        for step in range(60):
            p.grad = gradient("w", 0, 0) + 0.1 * gradient("w", step, comm.rank)
            before = averager.stats.bytes_sent
            averager.average()
            sent.append(averager.stats.bytes_sent - before)
            optimizer.step()
        averager.check_replicas()
        return p.detach(), sent

    packed, plain = (run_local(3, one, codec)[0] for codec in (Block(4), None))
    assert packed[1][0] < 0.2 * plain[1][0] and packed[1][-1] == plain[1][-1] < packed[1][0]
    assert float((packed[0] - plain[0]).norm()) < 0.2 * float((plain[0] - 1).norm())


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"warmup_codec=Block\(bits=4.* warmup_steps is 0"):
        Options(warmup_codec=Block(4)).under(None)
    with pytest.raises(ValueError, match="unknown codec 'block5'"):
        Options(warmup_codec="block5", warmup_steps=3)
    with pytest.raises(TypeError, match="codec must be"):
        Options(warmup_codec=3, warmup_steps=3)
    optimizer = OneBitAdam([nn.Parameter(torch.zeros(3))], freeze_step=2)
    with pytest.raises(ValueError, match="warmup_steps=3 cannot be used with OneBitAdam"):
        Options(warmup_codec="block4", warmup_steps=3).under(optimizer)
    optimizer = ZeroOneAdam([nn.Parameter(torch.zeros(3))], var_freeze_step=2)
    with pytest.raises(
        ValueError, match="cannot be used with ZeroOneAdam, which averages gradients in"
    ):
        Options(warmup_codec="block4").under(optimizer)
    assert repr(Options(warmup_codec="block4", warmup_steps=3).warmup_codec) == repr(Block(4))
