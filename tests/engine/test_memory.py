"""Checkpoints of all ranks of a run, loaded by another number of ranks, and lists that are no
such thing.
"""

import copy

import pytest
import torch
from _ranks import run_local
from torch import nn

from gradcomp import Advanced, GradientAverager
from gradcomp.comm import LocalCommunicator
from gradcomp.onebit_sgd import AggregateAdagrad


def averager_of(comm, shape=(64, 32), **options):
    p = nn.Parameter(torch.zeros(shape))
    return p, GradientAverager([("w", p)], "onebit", comm=comm, timeout_s=20, **options)


def trained(comm, shape=(64, 32), **options):
    p, averager = averager_of(comm, shape, **options)
    p.grad = torch.randn(shape, generator=torch.Generator().manual_seed(comm.rank))
    averager.average()
    return averager.state_dict()


@pytest.fixture(scope="module")
def states():
    return run_local(3, trained)


def without(states, key):
    return [{k: v for k, v in state.items() if k != key} for state in states]


def changed(states, index, **values):
    return [*states[:index], {**states[index], **values}, *states[index + 1 :]]


WRONG = {
    "one twice": (lambda s: [s[0], s[0], s[2]], "one of every rank"),
    "one missing": (lambda s: s[:2], "one of every rank"),
    "one too many": (lambda s: [*s, s[0]], "one of every rank"),
    "none": (lambda s: [], "one of every rank"),
    "text": (lambda s: "abc", "a state is a dictionary"),
    "no state": (lambda s: [None], "a state is a dictionary"),
    "a double buffer's": (lambda s: [{"averager": state} for state in s], r"state\['averager'\]"),
    "no nodes": (lambda s: without(s, "nodes"), "no 'nodes'"),
    "no owner_residual": (lambda s: without(s, "owner_residual"), "no 'owner_residual'"),
    "rank is none": (lambda s: changed(s, 1, rank=None), "rank None"),
    "world_size is huge": (lambda s: changed(s, 0, world_size=2**62), "one of every rank"),
    "world_size is text": (lambda s: changed(s, 1, world_size="3"), "world_size '3'"),
    "another version": (lambda s: [{**state, "version": 9} for state in s], "version 9"),
    "another step": (lambda s: changed(s, 1, step=7), "not of one run: step"),
    "residual is none": (lambda s: changed(s, 1, residual=None), "residual holds NoneType"),
    "residual is text": (lambda s: changed(s, 1, residual={"w": "x"}), "residual holds str"),
    "residual in float64": (
        lambda s: changed(s, 1, residual={"w": s[1]["residual"]["w"].double()}),
        "float32",
    ),
    "residual in int32": (
        lambda s: changed(s, 1, residual={"w": s[1]["residual"]["w"].int()}),
        "float32",
    ),
    "residual gone": (lambda s: changed(s, 1, residual={}), "residual of rank 1 does not fit"),
    "residual of another shape": (
        lambda s: changed(s, 1, residual={"w": torch.zeros(9)}),
        "residual of rank 1 does not fit",
    ),
    "residual is NaN": (
        lambda s: changed(s, 1, residual={"w": s[1]["residual"]["w"] * float("nan")}),
        "has values that are not finite",
    ),
    "owner's residual gone": (lambda s: changed(s, 1, owner_residual={}), "owner_residual of 'w'"),
    "of another model": (lambda s: run_local(3, trained, (64, 16)), "'w'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_lists_that_are_not_all_states_of_one_run_change_nothing(states, name):
    make, text = WRONG[name]
    _, averager = averager_of(LocalCommunicator.group(2)[0])
    averager.load_state_dict(states)
    before = averager.state_dict()
    with pytest.raises(ValueError, match=text):
        averager.load_state_dict(make(states))
    after = averager.state_dict()
    assert torch.equal(after["residual"]["w"], before["residual"]["w"])
    assert after["step"] == before["step"] == 1


def test_ranks_that_own_nothing_have_states_too():
    """Four ranks share six values: only one of them owns any."""
    layer = nn.Linear(2, 2)

    def run(comm):
        m = copy.deepcopy(layer)
        averager = GradientAverager(
            m.named_parameters(),
            "onebit",
            comm=comm,
            advanced=Advanced(transform=AggregateAdagrad()),
            timeout_s=20,
        )
        for p in m.parameters():
            p.grad = torch.ones_like(p)
        averager.average()
        return averager.state_dict()

    def load(comm, states):
        m = copy.deepcopy(layer)
        averager = GradientAverager(
            m.named_parameters(),
            "onebit",
            comm=comm,
            advanced=Advanced(transform=AggregateAdagrad()),
            timeout_s=20,
        )
        averager.load_state_dict(states)
        return averager.state_dict()["transform_state"]

    for old, new in ((4, 2), (4, 3), (2, 4)):
        found = run_local(new, load, run_local(old, run))
        for name, numel in (("weight", 4), ("bias", 2)):
            assert torch.equal(torch.cat([state[name] for state in found]), torch.ones(numel))


def test_a_list_with_as_many_ranks_is_ones_own_state(states):
    def load(comm):
        _, averager = averager_of(comm)
        averager.load_state_dict(states[::-1])
        return averager.state_dict()

    for mine, found in zip(states, run_local(3, load), strict=True):
        assert torch.equal(mine["residual"]["w"], found["residual"]["w"])
        assert torch.equal(mine["owner_residual"]["w"], found["owner_residual"]["w"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_single_rank_pays_what_the_others_owed(dtype):
    """Promise 5: nothing is lost, whatever number of ranks goes on; NaN and a step thrown away
    leave the debt.
    """

    def run(comm):
        p = nn.Parameter(torch.zeros(64, 32, dtype=dtype))
        averager = GradientAverager([("w", p)], "onebit", comm=comm, timeout_s=20)
        p.grad = torch.randn(64, 32, generator=torch.Generator().manual_seed(comm.rank)).to(dtype)
        averager.average()
        return averager.state_dict()

    states = run_local(3, run)
    owed = torch.stack([s["residual"]["w"].double() for s in states]).sum(0) / 3
    owed += torch.cat([s["owner_residual"]["w"] for s in states])
    assert owed.abs().max() > 0.1
    p = nn.Parameter(torch.zeros(64, 32, dtype=dtype))
    averager = GradientAverager([("w", p)], "onebit", comm=LocalCommunicator.group(1)[0])
    averager.load_state_dict(states)
    assert torch.allclose(averager.state_dict()["residual"]["w"].double(), owed, atol=1e-6)

    def average(value):
        p.grad = torch.full_like(p, value)
        averager.average()
        return p.grad.flatten().double()

    assert average(float("nan")).isnan().all()
    average(0.0)
    averager.discard_step()
    paid = average(0.0)
    left = averager.state_dict()["residual"]["w"].double()
    assert torch.allclose(paid + left, owed, atol=1e-6)
    assert bool((left == 0).all()) is (dtype is torch.float32)
    assert torch.equal(average(1.0), left.float().add(1.0).to(dtype).double()), "paid once"
    if dtype is torch.float32:
        average(1.0)
        assert averager.state_dict()["residual"] == {}, "and its memory is given back"


@pytest.mark.parametrize(("world", "nodes"), [(2, [[0, 1]]), (4, [[0, 1], [2, 3]])])
def test_a_hierarchical_exchange_takes_no_list(states, world, nodes):
    def load(comm):
        _, averager = averager_of(comm, exchange="hierarchical", advanced=Advanced(nodes=nodes))
        averager.load_state_dict(states)

    with pytest.raises(ValueError, match="not with a list"):
        run_local(world, load)
