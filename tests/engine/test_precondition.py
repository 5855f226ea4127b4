"""Preconditioning: gradients encoded in units of their second moments; the formula, bad days,
checkpoints, DDP.
"""

import copy
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from _averaging import Run, same
from _expected import average
from _kinds import check_kinds
from _models import bits, small_model, train
from _ranks import each_rank, logged, run_local
from _saved import parts_of
from reference import codec as ref
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomp
import gradcomp.ddp
from gradcomp import Block, EntropyCoded, Identity, OneBit, PeerMismatch, Precondition, TernGrad
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
check_kinds(CODECS, without=("ternary", "block8", "bfloat16"))


def gradient(name, shape, step, rank):
    """Elements of a row differ by orders of magnitude, as Adam's do; most rows of "rare" have
    none.
    """
    generator = torch.Generator().manual_seed(7919 * step + 31 * rank + len(name))
    x = torch.randn(shape, generator=generator)
    x = x * 10.0 ** -(torch.arange(x.numel()) % 5).view_as(x)
    return x * (torch.arange(30) % 7 == step % 7).float().unsqueeze(1) if name == "rare" else x


def of(name, step, rank):
    return gradient(name, SHAPES[name], step, rank).numpy().ravel()


def run(comm, codec=None, **options):
    options = {"precondition": True, "min_numel": MIN_NUMEL, "gradient": gradient, **options}
    return Run(comm, codec or Block(2), SHAPES, **options)


class Expected:
    """Averages of one parameter from the reference alone: means of nodes, which owners exchange
    in units of the moments of the whole tensor. Without nodes every rank is one.
    """

    def __init__(self, codec, nodes, index, exchange="auto"):
        (self.name, self.shape), self.index = list(SHAPES.items())[index], index
        n = int(np.prod(self.shape))
        self.packed = n >= MIN_NUMEL and codec.name != "identity"
        self.codec, self.nodes = codec if self.packed else Identity(), nodes
        self.strategy = choose(self.codec, len(nodes), exchange)
        self.feeds = owners_feed_back(self.strategy.second_phase, self.codec)
        self.moments, self.owners = np.zeros((2, n), np.float32)
        self.owed = np.zeros((len(nodes), n), np.float32)

    def step(self, step):
        means = [ref.float_average([of(self.name, step, r) for r in node]) for node in self.nodes]
        units = np.ones_like(self.moments)
        if self.packed:
            units = ref.moment_units(self.moments, Precondition().floor)
        mean, size = np.empty_like(units), len(self.nodes[0])
        for place in range(size):
            here = slice(*ByElements(size).bounds(len(mean), place))
            d, owner = units[here], self.owners[here]
            given = [m[here] for m in means]
            if self.packed:
                given = [(g + r[here]) / d for g, r in zip(given, self.owed, strict=True)]
            mean[here], left, owner_left = average(
                given,
                self.codec,
                self.strategy,
                step=step,
                parameter=self.index,
                shape=self.shape,
                start=here.start,
                ranks=[node[place] for node in self.nodes],
                transform=(lambda m: m + owner / d) if self.feeds else (lambda m: m),  # noqa: B023
            )
            if left is not None:
                self.owed[:, here] = np.array(left) * d
            if owner_left is not None:
                owner[:] = np.concatenate(owner_left) * d
        if self.packed:
            mean = mean * units
            self.moments = ref.next_moments(self.moments, mean, Precondition().beta, step)
        return mean.reshape(self.shape)


NODES = [[[0, 1], [2, 3]], [[0, 2, 4], [1, 3, 5]], [[0, 1], [2, 3], [4, 5]]]
WAYS = [(nodes, "hierarchical") for nodes in NODES]
WAYS += [
    ([[rank] for rank in range(world)], exchange)
    for world, exchange in ((2, "all_gather"), (3, "reduce_scatter"), (4, "reduce_scatter"))
]


@pytest.mark.parametrize(("nodes", "exchange"), WAYS, ids=str)
@pytest.mark.parametrize("name", CODECS)
def test_averages_are_the_formulas(name, nodes, exchange):
    codec, flat = CODECS[name], exchange != "hierarchical"
    expected = [Expected(codec, nodes, i, exchange if flat else "auto") for i in range(len(SHAPES))]
    wanted = [{one.name: one.step(step) for one in expected} for step in range(4)]

    def work(comm):
        mine = run(comm, codec, exchange=exchange, nodes=None if flat else nodes)
        for step in range(4):
            for key, tensor in mine.step(step).items():
                assert tensor.numpy().tobytes() == wanted[step][key].tobytes(), (step, key)
        mine.averager.close()

    run_local(sum(map(len, nodes)), work)


def test_small_elements_beside_large_ones_keep_their_direction():
    """Every other element is a tenth of its neighbours: divided by the root of the second moment,
    as Adam does, these elements are noise ten times over without units of their own.
    """
    size = torch.where(torch.arange(500) % 2 == 0, 1.0, 0.1)

    def of_rank(name, shape, step, rank):
        return torch.randn(shape, generator=torch.Generator().manual_seed(2 * step + rank)) * size

    def cosine(comm, codec, precondition):
        mine = Run(comm, codec, {"p": (8, 500)}, precondition=precondition, gradient=of_rank)
        sent = torch.stack([averages["p"] / size for averages in mine.steps(120)[80:]])
        exact = [sum(of_rank("p", (8, 500), n, k) for k in range(2)) / 2 for n in range(80, 120)]
        return float(torch.cosine_similarity((torch.stack(exact) / size).ravel(), sent.ravel(), 0))

    own = TernGrad(scale="own", clip_sigma=None)
    for codec, least, most in ((Block(2), 0.8, 0.4), (own, 0.4, 0.3)):
        plain, units = (run_local(2, cosine, codec, p)[0] for p in (None, True))
        assert units > least and plain < most, (codec, plain, units)


@pytest.mark.parametrize("codec", [Block(2), OneBit()], ids=lambda c: c.name)
def test_nothing_is_lost(codec):
    """Averages so far and what is owed make up the exact averages so far, in units of gradients."""

    def work(comm):
        mine = run(comm, codec, exchange="reduce_scatter")
        total, parts = sum(averages["v"].double() for averages in mine.steps(30)), mine.parts()
        return total, parts["residual"]["v"], parts["owner_residual"]["v"]

    ranks = run_local(2, work)
    owed = sum(r[1].double() for r in ranks) / 2 + torch.cat([r[2] for r in ranks]).double()
    exact = sum(of("v", step, k).astype(np.float64) for step in range(30) for k in range(2)) / 2
    assert np.allclose(ranks[0][0] + owed, exact, atol=1e-4)


def after(comm, steps, codec=None, **options):
    """Return the state after so many steps."""
    mine = run(comm, codec, **options)
    mine.steps(steps)
    return mine.state()


def test_moments_go_to_another_number_of_ranks():
    states = run_local(4, after, 3)
    wanted = parts_of(states[0])["second_moment"]

    def load(comm):
        mine = run(comm)
        mine.averager.load_state_dict(states)
        return same(mine.parts()["second_moment"], wanted)

    assert wanted and run_local(2, load) == [True, True]


@pytest.mark.parametrize(
    ("codec", "who", "live", "field", "got"),
    [
        (Block(2), (0, 1), True, "second moment of v", "(1111,) float32, sum"),
        (Block(2), (0, 1), False, "second moment of v", "(1111,) float32, sum"),
        (TernGrad(seed=3), (1,), True, "loaded", "a state loaded since"),
        (OneBit(), (1,), True, "loaded", "a state loaded since"),
    ],
)
@each_rank(2, "over")
def test_moments_that_one_rank_loads_wrongly_are_a_mismatch(comm, codec, who, live, field, got):
    """Ranks would decode the same payloads to other averages, and their weights would drift
    apart, silently. Then all load the right state and go on.
    """
    wanted, state = run(comm, codec).steps(3), after(comm, 2, codec)
    other = copy.deepcopy(state)
    parts_of(other)["second_moment"]["v"][3] *= 2
    mine = run(comm, codec)
    mine.steps(2 if live else 0)
    if comm.rank in who:
        mine.averager.load_state_dict(other if comm.rank else state)
    with pytest.raises(PeerMismatch, match="second moment of v"):
        mine.averager.check_replicas()
    with pytest.raises(PeerMismatch) as caught:
        mine.step(2)
    assert (caught.value.field, caught.value.rank) == (field, 1)
    assert str(caught.value.got).startswith(got)
    mine.averager.reset()
    mine.averager.load_state_dict(state)
    assert same(mine.step(2), wanted[2])


@each_rank(2, "local")
def test_a_warm_start_takes_moments_in(comm):
    """Steps in fp32 are exact; the first packed one already has units."""
    mine, wanted = run(comm, warmup_steps=2), np.zeros(1111, np.float32)
    for step in range(2):
        exact = ref.float_average([of("v", step, k) for k in range(2)])
        assert np.array_equal(mine.step(step)["v"].numpy(), exact)
        wanted = ref.next_moments(wanted, exact, 0.95, step)
    assert np.array_equal(mine.parts()["second_moment"]["v"].numpy(), wanted)


@each_rank(2, "local")
def test_gradients_of_bfloat16(comm):
    """Sums and units are fp32; the average is rounded once, at the end. So it differs from fp32
    by inputs and that rounding.
    """
    half = run(comm, dtype=torch.bfloat16).steps(3)
    exact = run(comm.duplicate(60.0)).step(0)
    for name in SHAPES:
        assert torch.allclose(half[0][name].float(), exact[name], rtol=0.02, atol=1e-3)
    return bits(half[2].values())


@each_rank(2)
def test_ddp_with_and_without_an_optimizer_that_takes_packed_averages():
    found = []
    for fused in (True, False):
        net = DDP(small_model(torch.bfloat16))
        optimizer = SplitAdamW(net.parameters(), lr=1e-3)
        options = {"min_numel": 100, "precondition": True}
        options["advanced"] = gradcomp.Advanced(scale_lr=False)
        options["optimizer"] = optimizer if fused else None
        with gradcomp.ddp.register(net, Block(2, residual_decay=1), **options) as state:
            train(net, optimizer, dist.get_rank(), range(4))
            state.check_replicas()
        found.append(bits(net))
    assert found[0] == found[1]
    return found


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
@each_rank(2)
def test_a_codec_that_is_known_to_lose_says_so(codec, kind, options, says):
    net = DDP(nn.Linear(64, 64))
    optimizer = kind(net.parameters(), lr=0.1) if kind is not None else None
    with logged("a byte GPT lost") as said:
        gradcomp.ddp.register(net, codec, optimizer=optimizer, **options).close()
    assert len(said) == (says is not None and dist.get_rank() == 0)  # rank 0 speaks for all
    assert not said or re.search(says, said[0]), said


def test_settings():
    for wrong in ({"beta": 1.0}, {"beta": -0.1}, {"beta": "x"}, {"floor": 0.0}, {"floor": 1.5}):
        with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
            Precondition(**wrong)
    assert Precondition(beta=0.0, floor=1.0) == copy.copy(Precondition(0, 1))
    assert gradcomp.engine.options.Options(precondition=False).precondition is None
