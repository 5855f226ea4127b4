"""Checkpoints of all ranks of a run, loaded by another number of ranks, and lists that are no
such thing.
"""

import copy
import math

import pytest
import torch
from _golden import digest_of, tensors_in
from _ranks import run_local
from _saved import LEFT_OUT, parts_of, paths_of, with_value
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


def of_rank(states, index, **parts):
    """Return the states with other tensors of one of their ranks."""
    own = {**states[index]["ranks"][str(index)], **parts}
    return changed(states, index, ranks={str(index): own})


def kind(states, name):
    return [{**state, "origin": {**state["origin"], "kind": name}} for state in states]


def with_version(states):
    """Return what states looked like before they had a format."""
    return [{"version": 1, "rank": rank, "world_size": 3} for rank in range(len(states))]


WRONG = {
    "one twice": (lambda s: [s[0], s[0], s[2]], "one of every rank"),
    "one missing": (lambda s: s[:2], "one of every rank"),
    "one too many": (lambda s: [*s, s[0]], "one of every rank"),
    "none": (lambda s: [], "one of every rank"),
    "text": (lambda s: "abc", "a state is a dictionary"),
    "no state": (lambda s: [None], "a state is a dictionary"),
    "a double buffer's": (
        lambda s: kind(s, "DoubleBuffer"),
        "kind 'DoubleBuffer', 'gradients' expected",
    ),
    "of another size of nodes": (
        lambda s: [{**one, "origin": {**one["origin"], "nodes": "((0, 1), (2,))"}} for one in s],
        "belongs to its nodes",
    ),
    "no origin": (lambda s: without(s, "origin"), "no 'origin'"),
    "no ranks": (lambda s: without(s, "ranks"), "no 'ranks'"),
    "no format": (lambda s: without(s, "format"), "no 'format'"),
    "rank is none": (lambda s: changed(s, 1, ranks={None: {"tensors": 0}}), "a rank None of 3"),
    "rank is 3": (lambda s: changed(s, 1, ranks={"3": {"tensors": 0}}), "a rank '3' of 3 ranks"),
    "ranks is none": (lambda s: changed(s, 1, ranks=None), "ranks in these states is a dictionary"),
    "rank 1 is none": (lambda s: changed(s, 1, ranks={"1": None}), "rank 1 in this state is a"),
    "not counted": (lambda s: changed(s, 1, ranks={"1": {}}), "rank 1 .* has no 'tensors'"),
    "world_size is huge": (
        lambda s: [{**state, "world_size": 2**62} for state in s],
        "values of rank 3 are missing.*one of every rank",
    ),
    "world_size of one": (lambda s: changed(s, 0, world_size=2), "not of one run: world_size"),
    "world_size is text": (
        lambda s: [{**state, "world_size": "3"} for state in s],
        "world_size '3'",
    ),
    "another format": (lambda s: [{**state, "format": 9} for state in s], "format 9, 2 expected"),
    "from before formats": (
        with_version,
        "another version of gradcomp wrote .* go on with that version",
    ),
    "another step": (lambda s: changed(s, 1, step=7), "not of one run: step is 1 and 7"),
    "other second moments": (
        lambda s: [
            {**state, "replicated": {"tensors": 1, "second_moment": {"w": torch.full((2,), n)}}}
            for n, state in enumerate(s)
        ],
        "not of one run: replicated.second_moment.w",
    ),
    "residual is none": (lambda s: of_rank(s, 1, residual=None), "residual of rank 1 .* got None"),
    "residual is text": (
        lambda s: of_rank(s, 1, residual={"w": "x"}),
        "the residual of 'w' must be .* got x",
    ),
    "residual in float64": (
        lambda s: of_rank(s, 1, residual={"w": parts_of(s[1])["residual"]["w"].double()}),
        "float32",
    ),
    "residual in int32": (
        lambda s: of_rank(s, 1, residual={"w": parts_of(s[1])["residual"]["w"].int()}),
        "float32",
    ),
    "residual gone": (lambda s: of_rank(s, 1, residual={}), "rank 1 .* has 1 tensors of 2"),
    "residual never there": (
        lambda s: of_rank(s, 1, residual={}, tensors=1),
        "residual in this state is of some ranks only",
    ),
    "residual of another shape": (
        lambda s: of_rank(s, 1, residual={"w": torch.zeros(9)}),
        "the residual of 'w' must be .2048,. torch.float32, got .9,.",
    ),
    "residual is NaN": (
        lambda s: of_rank(s, 1, residual={"w": parts_of(s[1])["residual"]["w"] * float("nan")}),
        "has values that are not finite",
    ),
    "owner's residual gone": (
        lambda s: of_rank(s, 1, owner_residual={}, tensors=1),
        "owner_residual in this state is of some ranks only",
    ),
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
    assert torch.equal(parts_of(after)["residual"]["w"], parts_of(before)["residual"]["w"])
    assert after["step"] == before["step"] == 1


STAGES = {
    "precondition": {"precondition": True},
    "transform": {"advanced": Advanced(transform=AggregateAdagrad())},
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [2, 3])
def test_any_value_of_a_state_replaced_is_refused_or_harmless(world, stage):
    """Whatever the second of three states holds, loading raises ValueError and changes nothing, or
    `state_dict()` goes on.
    """
    options = STAGES[stage]
    states = run_local(3, lambda comm: trained(comm, **options))
    _, averager = averager_of(LocalCommunicator.group(world)[0], **options)
    averager.load_state_dict(states)
    before, refused = digest_of(*tensors_in(averager.state_dict())), 0
    damages = (LEFT_OUT, None, "x", -1, 1.5, [], {}, torch.tensor(math.nan), torch.zeros(2, 2))
    for path in paths_of(states[1]):
        for value in damages:
            given = [states[0], with_value(states[1], path, value), states[2]]
            try:
                averager.load_state_dict(given)
            except ValueError:
                refused += 1
                assert digest_of(*tensors_in(averager.state_dict())) == before, path
            else:
                averager.load_state_dict(averager.state_dict())
                averager.load_state_dict(states)
    assert refused > 100


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
        return parts_of(averager.state_dict())["transform_state"]

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
        assert torch.equal(parts_of(mine)["residual"]["w"], parts_of(found)["residual"]["w"])
        assert torch.equal(
            parts_of(mine)["owner_residual"]["w"], parts_of(found)["owner_residual"]["w"]
        )


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
    owed = torch.stack([parts_of(s)["residual"]["w"].double() for s in states]).sum(0) / 3
    owed += torch.cat([parts_of(s)["owner_residual"]["w"] for s in states])
    assert owed.abs().max() > 0.1
    p = nn.Parameter(torch.zeros(64, 32, dtype=dtype))
    averager = GradientAverager([("w", p)], "onebit", comm=LocalCommunicator.group(1)[0])
    averager.load_state_dict(states)
    assert torch.allclose(
        parts_of(averager.state_dict())["residual"]["w"].double(), owed, atol=1e-6
    )

    def average(value):
        p.grad = torch.full_like(p, value)
        averager.average()
        return p.grad.flatten().double()

    assert average(float("nan")).isnan().all()
    average(0.0)
    averager.discard_step()
    paid = average(0.0)
    left = parts_of(averager.state_dict())["residual"]["w"].double()
    assert torch.allclose(paid + left, owed, atol=1e-6)
    assert bool((left == 0).all()) is (dtype is torch.float32)
    assert torch.equal(average(1.0), left.float().add(1.0).to(dtype).double()), "paid once"
    if dtype is torch.float32:
        average(1.0)
        assert parts_of(averager.state_dict())["residual"] == {}, "and its memory is given back"


def test_one_state_with_all_ranks_is_the_same_as_a_list(states):
    merged = states[0] | {"ranks": {k: v for state in states for k, v in state["ranks"].items()}}

    def load(comm, given):
        _, averager = averager_of(comm)
        averager.load_state_dict(given)
        return parts_of(averager.state_dict())

    for world in (2, 3):
        for one, two in zip(
            run_local(world, load, merged), run_local(world, load, states), strict=True
        ):
            assert one["residual"]
            assert digest_of(*tensors_in(one)) == digest_of(*tensors_in(two))


@pytest.mark.parametrize(("world", "nodes"), [(2, [[0, 1]]), (4, [[0, 1], [2, 3]])])
def test_a_hierarchical_exchange_takes_no_other_number_of_ranks(states, world, nodes):
    def load(comm):
        _, averager = averager_of(comm, exchange="hierarchical", advanced=Advanced(nodes=nodes))
        averager.load_state_dict(states)

    with pytest.raises(ValueError, match="belongs to its nodes.*3 ranks then"):
        run_local(world, load)
