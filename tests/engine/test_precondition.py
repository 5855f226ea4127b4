"""Preconditioning: gradients encoded in units of their second moments; the formula, bad days,
checkpoints, DDP.
"""

import copy
import logging
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from _expected import average
from _ranks import run_local
from _saved import parts_of
from reference import codec as ref
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomp
import gradcomp.ddp
from gradcomp import (
    Advanced,
    Block,
    EntropyCoded,
    GradientAverager,
    Identity,
    OneBit,
    PeerMismatch,
    Precondition,
    TernGrad,
)
from gradcomp.exchange.second import owners_feed_back
from gradcomp.exchange.sizing import choose
from gradcomp.optim import SplitAdamW
from gradcomp.payload.pieces import ByElements

SHAPES = {"w": (40, 33), "b": (5,), "v": (1111,), "rare": (30, 20)}
MIN_NUMEL = 6
CODECS = {
    "block2": Block(2),
    "block4": Block(4, group=100),
    "onebit": OneBit(),
    "entropy": EntropyCoded(2.2),
    "terngrad": TernGrad(seed=3),
    "terngrad-own": TernGrad(scale="own"),
    "terngrad-block4": TernGrad(second_phase="block4"),
    "identity": Identity(),
}


def parameters(dtype=torch.float32):
    return {name: nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in SHAPES.items()}


def gradient(name, step, rank):
    """Elements of a row differ by orders of magnitude, as Adam's do; most rows of "rare" have
    none.
    """
    generator = torch.Generator().manual_seed(7919 * step + 31 * rank + len(name))
    x = torch.randn(SHAPES[name], generator=generator)
    x = x * 10.0 ** -(torch.arange(x.numel()) % 5).view_as(x)
    return x * (torch.arange(30) % 7 == step % 7).float().unsqueeze(1) if name == "rare" else x


def averages(comm, codec, steps, first=0, averager=None, scale=1.0, **options):
    """Return what `average` has given for every step and parameter, and the averager."""
    named = parameters()
    options = {"precondition": True, "min_numel": MIN_NUMEL, **options}
    if averager is None:
        averager = GradientAverager(named.items(), codec, comm=comm, **options)
    named = {source.name: source.like for source in averager._engine.sources}
    out = []
    for step in range(first, first + steps):
        for name, p in named.items():
            p.grad = gradient(name, step, comm.rank) * scale
        averager.average()
        out.append({name: p.grad.clone() for name, p in named.items()})
    return out, averager


def expected(codec, world, steps, exchange="auto"):
    """Return the same from the reference alone."""
    strategy, options = choose(codec, world, exchange), Precondition()
    out = [{} for _ in range(steps)]
    for index, (name, shape) in enumerate(SHAPES.items()):
        n = int(np.prod(shape))
        moments, owed, owners = (
            np.zeros(n, np.float32),
            [np.zeros(n, np.float32)] * world,
            np.zeros(n, np.float32),
        )
        for step in range(steps):
            grads = [gradient(name, step, k).numpy().ravel() for k in range(world)]
            if n < MIN_NUMEL or codec.name == "identity":
                out[step][name] = average(grads, Identity(), strategy)[0].reshape(shape)
                continue
            d = ref.moment_units(moments, options.floor)
            mean, left, owner_left = average(
                [(g + r) / d for g, r in zip(grads, owed)],
                codec,
                strategy,
                step=step,
                parameter=index,
                shape=shape,
                transform=(
                    (lambda m: m + owners / d)  # noqa: B023
                    if owners_feed_back(strategy.second_phase, codec)
                    else (lambda m: m)
                ),
            )
            if left is not None:
                owed = [x * d for x in left]
            if owner_left is not None:
                owners = np.concatenate(owner_left) * d
            mean = mean * d
            moments = ref.next_moments(moments, mean, options.beta, step)
            out[step][name] = mean.reshape(shape)
    return out


def expected_of_nodes(codec, nodes, steps):
    """Return the same for a hierarchical exchange: means of nodes, which owners exchange in
    units of the moments of whole tensors.
    """
    world, size, options = sum(map(len, nodes)), len(nodes[0]), Precondition()
    strategy = choose(codec, len(nodes))
    out = [{} for _ in range(steps)]
    for index, (name, shape) in enumerate(SHAPES.items()):
        n = int(np.prod(shape))
        moments, owed, owners = (
            np.zeros(n, np.float32),
            [np.zeros(n, np.float32) for _ in nodes],
            np.zeros(n, np.float32),
        )
        for step in range(steps):
            grads = [gradient(name, step, k).numpy().ravel() for k in range(world)]
            means = [ref.float_average([grads[rank] for rank in node]) for node in nodes]
            packed = n >= MIN_NUMEL and codec.name != "identity"
            d = ref.moment_units(moments, options.floor) if packed else np.ones(n, np.float32)
            mean = np.empty(n, np.float32)
            for place in range(size):
                here = slice(*ByElements(size).bounds(n, place))
                feeds = packed and owners_feed_back(strategy.second_phase, codec)
                mean[here], left, owner_left = average(
                    [
                        (m[here] + r[here]) / d[here] if packed else m[here]
                        for m, r in zip(means, owed, strict=True)
                    ],
                    codec if packed else Identity(),
                    strategy if packed else choose(Identity(), len(nodes)),
                    step=step,
                    parameter=index,
                    shape=shape,
                    start=here.start,
                    ranks=[node[place] for node in nodes],
                    transform=((lambda m: m + owners[here] / d[here]) if feeds else (lambda m: m)),  # noqa: B023
                )
                for r, x in zip(owed, left if packed and left is not None else (), strict=False):
                    r[here] = x * d[here]
                if feeds and owner_left is not None:
                    owners[here] = np.concatenate(owner_left) * d[here]
            out[step][name] = (mean * d).reshape(shape)
            if packed:
                moments = ref.next_moments(moments, mean * d, options.beta, step)
    return out


@pytest.mark.parametrize(
    "nodes",
    [[[0, 1], [2, 3]], [[0, 2, 4], [1, 3, 5]], [[0, 1], [2, 3], [4, 5]]],
    ids=["2x2", "2x3", "3x2"],
)
@pytest.mark.parametrize("name", CODECS)
def test_averages_between_nodes_are_the_formulas(name, nodes):
    codec = CODECS[name]
    wanted = expected_of_nodes(codec, nodes, 5)
    options = {"exchange": "hierarchical", "advanced": Advanced(nodes=nodes)}
    for got, averager in run_local(
        sum(map(len, nodes)), lambda comm: averages(comm, codec, 5, **options)
    ):
        for step, averaged in enumerate(got):
            for key, tensor in averaged.items():
                assert tensor.numpy().tobytes() == wanted[step][key].tobytes(), (step, key)
        averager.close()


@pytest.mark.parametrize("exchange", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", CODECS)
def test_averages_are_the_formulas(name, world, exchange):
    codec = CODECS[name]
    wanted = expected(codec, world, 5, exchange)
    for got, _ in run_local(world, lambda comm: averages(comm, codec, 5, exchange=exchange)):
        for step, averaged in enumerate(got):
            for key, tensor in averaged.items():
                assert tensor.numpy().tobytes() == wanted[step][key].tobytes(), (step, key)


def test_small_elements_beside_large_ones_keep_their_direction():
    """Every other element is a tenth of its neighbours: divided by the root of the second moment,
    as Adam does, these elements are noise ten times over without units of their own.
    """
    size = torch.where(torch.arange(500) % 2 == 0, 1.0, 0.1)

    def cosine(comm, codec, precondition):
        p = nn.Parameter(torch.zeros(20, 500))
        averager = GradientAverager([("p", p)], codec, comm=comm, precondition=precondition)
        exact, sent = [], []
        for step in range(150):
            grads = [
                torch.randn(20, 500, generator=torch.Generator().manual_seed(2 * step + k)) * size
                for k in range(2)
            ]
            p.grad = grads[comm.rank].clone()
            averager.average()
            exact.append((grads[0] + grads[1]) / 2 / size)
            sent.append(p.grad / size)
        return float(
            torch.cosine_similarity(
                torch.stack(exact[100:]).flatten(), torch.stack(sent[100:]).flatten(), dim=0
            )
        )

    for codec, least, most in (
        (Block(2), 0.8, 0.4),
        (TernGrad(scale="own", clip_sigma=None), 0.4, 0.3),
    ):
        plain, units = (
            run_local(2, lambda comm, c=codec, p=p: cosine(comm, c, p))[0] for p in (None, True)
        )
        assert units > least and plain < most, (codec, plain, units)


@pytest.mark.parametrize("codec", [Block(2), OneBit()], ids=lambda c: c.name)
def test_nothing_is_lost(codec):
    """Averages so far and what is owed make up the exact averages so far, in units of gradients."""

    def run(comm):
        got, averager = averages(comm, codec, 30, exchange="reduce_scatter")
        state = averager.state_dict()
        return (
            sum(g["v"].double() for g in got),
            parts_of(state)["residual"]["v"],
            parts_of(state)["owner_residual"]["v"],
        )

    ranks = run_local(2, run)
    owed = sum(r[1].double() for r in ranks) / 2 + torch.cat([r[2] for r in ranks]).double()
    exact = sum(gradient("v", step, k).double() for step in range(30) for k in range(2)) / 2
    assert torch.allclose(ranks[0][0] + owed, exact, atol=1e-4)


FLAT, NODES = (
    (2, {}),
    (4, {"exchange": "hierarchical", "advanced": Advanced(nodes=[[0, 1], [2, 3]])}),
)


def test_moments_go_to_another_number_of_ranks():
    states = run_local(4, lambda comm: averages(comm, Block(2), 3)[1].state_dict())

    def run(comm):
        fresh = GradientAverager(
            parameters().items(), Block(2), comm=comm, precondition=True, min_numel=MIN_NUMEL
        )
        fresh.load_state_dict(states)
        return parts_of(fresh.state_dict())["second_moment"]

    for moments in run_local(2, run):
        assert all(
            torch.equal(moments[name], tensor)
            for name, tensor in parts_of(states[0])["second_moment"].items()
        )


def test_moments_that_differ_are_found():
    """Units come from moments: ranks with other ones would decode the same payloads to other
    averages.
    """

    def run(comm):
        _, averager = averages(comm, Block(2), 2)
        averager.check_replicas()
        state = averager.state_dict()
        if comm.rank == 1:
            parts_of(state)["second_moment"]["v"][3] *= 2
        averager.load_state_dict(state)
        with pytest.raises(PeerMismatch, match="second moment of v"):
            averager.check_replicas()

    run_local(2, run)


def wrong_moments(comm, codec, who, live):
    """Train two steps; rank 1 loads a state of another run at that step; load the right one and
    go on.
    """
    wanted, right = averages(comm, codec, 3)
    state = averages(comm, codec, 2)[1].state_dict()
    other = averages(
        comm, codec, 2, scale=torch.arange(1, 5).repeat_interleave(5)[comm.rank].item()
    )[1].state_dict()
    parts_of(other)["second_moment"]["v"][3] *= 2
    averager = averages(comm, codec, 2 if live else 0)[1]
    for rank in who:
        if rank == comm.rank:
            averager.load_state_dict(other if rank else state)
    with pytest.raises(PeerMismatch) as caught:
        averages(comm, codec, 1, first=2, averager=averager)
    averager.reset()
    averager.load_state_dict(state)
    found = averages(comm, codec, 1, first=2, averager=averager)[0]
    same = all(torch.equal(found[0][name], wanted[2][name]) for name in SHAPES)
    return caught.value.field, caught.value.rank, str(caught.value.got)[:20], same, right.step


@pytest.mark.parametrize(
    ("codec", "who", "live", "field", "got"),
    [
        (Block(2), (0, 1), True, "second moment of v", "(1111,) float32, sum"),
        (Block(2), (0, 1), False, "second moment of v", "(1111,) float32, sum"),
        (TernGrad(seed=3), (1,), True, "loaded", "a state loaded since"),
        (OneBit(), (1,), True, "loaded", "a state loaded since"),
    ],
)
def test_moments_that_one_rank_loads_wrongly_are_a_mismatch(over, codec, who, live, field, got):
    """Ranks would decode the same payloads to other averages, and their weights would drift
    apart, silently.
    """
    assert over(2, wrong_moments, codec, who, live) == [(field, 1, got, True, 3)] * 2


def test_a_warm_start_takes_moments_in():
    """Steps in fp32 are exact; the first packed one already has units."""

    def run(comm):
        got, averager = averages(comm, Block(2), 2, warmup_steps=2)
        return got, parts_of(averager.state_dict())["second_moment"]["v"]

    for got, moments in run_local(2, run):
        wanted = np.zeros(1111, np.float32)
        for step in range(2):
            exact = ref.float_average([gradient("v", step, k).numpy() for k in range(2)])
            assert got[step]["v"].numpy().tobytes() == exact.tobytes()
            wanted = ref.next_moments(wanted, exact, 0.95, step)
        assert moments.numpy().tobytes() == wanted.tobytes()


def in_bfloat16(comm):
    named = parameters(torch.bfloat16)
    averager = GradientAverager(
        named.items(), Block(2), comm=comm, precondition=True, min_numel=MIN_NUMEL
    )
    out = []
    for step in range(3):
        for name, p in named.items():
            p.grad = gradient(name, step, comm.rank).bfloat16()
        averager.average()
        out.append({name: p.grad.clone() for name, p in named.items()})
    return out


def test_gradients_of_bfloat16():
    """Sums and units are fp32; the average is rounded once, at the end. So it differs from fp32
    by inputs and that rounding.
    """
    ranks = run_local(2, in_bfloat16)
    exact = run_local(2, lambda comm: averages(comm, Block(2), 1)[0])[0]
    for name in SHAPES:
        assert torch.equal(ranks[0][2][name], ranks[1][2][name])
        assert torch.allclose(ranks[0][0][name].float(), exact[0][name], rtol=0.02, atol=1e-3)


def with_ddp(fused):
    torch.manual_seed(0)
    net = DDP(nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 10)).bfloat16())
    optimizer = SplitAdamW(net.parameters(), lr=1e-3)
    state = gradcomp.ddp.register(
        net,
        Block(2, residual_decay=1),
        min_numel=100,
        precondition=True,
        scale_lr=False,
        optimizer=optimizer if fused else None,
    )
    for step in range(4):
        torch.manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        net(torch.randn(16, 40).bfloat16()).float().square().mean().backward()
        optimizer.step()
    line = state.describe() if hasattr(state, "describe") else ""
    state.check_replicas()
    weights = b"".join(p.detach().view(torch.int16).numpy().tobytes() for p in net.parameters())
    state.close()
    return weights, line


def test_ddp_with_and_without_an_optimizer_that_takes_packed_averages(gloo):
    runs = {weights for fused in (True, False) for weights, _ in gloo(2, with_ddp, fused)}
    assert len(runs) == 1


def what_register_says(codec, kind, options):
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log = logging.getLogger("gradcomp")
    log.addHandler(handler)
    try:
        net = DDP(nn.Linear(64, 64))
        optimizer = kind(net.parameters(), lr=0.1) if kind is not None else None
        gradcomp.ddp.register(net, codec, optimizer=optimizer, **options).close()
    finally:
        log.removeHandler(handler)
    return [text for text in said if "a byte GPT lost" in text]


@pytest.mark.parametrize(
    ("codec", "kind", "options", "says"),
    [
        ("onebit", torch.optim.AdamW, {}, "0.41 nats.* precondition=True, warmup_steps="),
        ("onebit", torch.optim.NAdam, {"warmup_steps": 10}, "precondition=True keeps"),
        ("block2", SplitAdamW, {}, r"Block\(bits=2.*under SplitAdamW.* 0.09 nats"),
        ("block2", torch.optim.Adam, {"precondition": True}, None),
        ("block4", torch.optim.Adam, {}, None),
        ("onebit", torch.optim.SGD, {}, None),
        ("onebit", None, {}, None),
    ],
)
def test_a_codec_that_is_known_to_lose_says_so(gloo, codec, kind, options, says):
    first, second = gloo(2, what_register_says, codec, kind, options)
    assert second == []  # rank 0 speaks for all
    assert len(first) == (says is not None)
    assert says is None or re.search(says, first[0]), first


@pytest.mark.parametrize(
    "settings", [{"beta": 1.0}, {"beta": -0.1}, {"beta": "x"}, {"floor": 0.0}, {"floor": 1.5}]
)
def test_settings_out_of_range(settings):
    with pytest.raises(ValueError, match=str(next(iter(settings.values())))):
        Precondition(**settings)


def test_beta_may_be_zero_and_false_is_off():
    assert Precondition(beta=0.0, floor=1.0) == copy.copy(Precondition(0, 1))
    assert gradcomp.engine.options.Options(precondition=False).precondition is None
