"""Checkpoints of all ranks of a run, loaded by another number of ranks, and lists that are no
such thing.
"""

import functools
import math

import pytest
import torch
from _averaging import Run, same
from _golden import digest_of, tensors_in
from _ranks import run_local
from _saved import LEFT_OUT, parts_of, paths_of, with_value
from hypothesis import given
from hypothesis import strategies as st

from gradcomp.comm import LocalCommunicator
from gradcomp.onebit_sgd import AggregateAdagrad

SHAPE = (64, 32)


def run(comm, shapes=None, **options):
    return Run(comm, "onebit", shapes or {"w": SHAPE}, **options)


def rank_of(world):
    """Return the first communicator of so many ranks, of which the others do nothing."""
    return LocalCommunicator.group(world)[0]


def trained(comm, shapes=None, **options):
    mine = run(comm, shapes, **options)
    mine.step(0)
    return mine.state()


def loaded(comm, states, shapes=None, **options):
    """Return the tensors of this rank after loading, by part and name."""
    mine = run(comm, shapes, **options)
    mine.averager.load_state_dict(states)
    return mine.parts()


@pytest.fixture(scope="module")
def states():
    return run_local(3, trained)


def without(key):
    return lambda states: [{k: v for k, v in state.items() if k != key} for state in states]


def all_with(**values):
    return lambda states: [{**state, **values} for state in states]


def from_origin(**values):
    return lambda states: [{**one, "origin": {**one["origin"], **values}} for one in states]


def of_one(index=1, **values):
    """Return a function that puts other values into the state of one rank."""
    return lambda states: [
        {**state, **values} if rank == index else state for rank, state in enumerate(states)
    ]


def of_rank(**parts):
    """Return a function that puts other tensors into the state of rank 1."""
    return lambda states: of_one(ranks={"1": {**states[1]["ranks"]["1"], **parts}})(states)


def residual(change):
    """Return a function that changes the residual of rank 1."""

    def changed(states):
        return of_rank(residual={"w": change(parts_of(states[1])["residual"]["w"])})(states)

    return changed


def other_moments(states):
    of = [{"tensors": 1, "second_moment": {"w": torch.full((2,), n)}} for n in range(len(states))]
    return [{**state, "replicated": mine} for state, mine in zip(states, of, strict=True)]


NOT_ALL = "one of every rank"
WRONG = {
    "one twice": (lambda s: [s[0], s[0], s[2]], NOT_ALL),
    "one missing": (lambda s: s[:2], NOT_ALL),
    "one too many": (lambda s: [*s, s[0]], NOT_ALL),
    "none": (lambda s: [], NOT_ALL),
    "text": (lambda s: "abc", "a state is a dictionary"),
    "no state": (lambda s: [None], "a state is a dictionary"),
    "a double buffer's": (from_origin(kind="DoubleBuffer"), "kind 'DoubleBuffer', 'gradients' exp"),
    "of another size of nodes": (from_origin(nodes="((0, 1), (2,))"), "belongs to its nodes"),
    "no origin": (without("origin"), "no 'origin'"),
    "no ranks": (without("ranks"), "no 'ranks'"),
    "no format": (without("format"), "no 'format'"),
    "rank is none": (of_one(ranks={None: {"tensors": 0}}), "a rank None of 3"),
    "rank is 3": (of_one(ranks={"3": {"tensors": 0}}), "a rank '3' of 3 ranks"),
    "ranks is none": (of_one(ranks=None), "ranks in these states is a dictionary"),
    "rank 1 is none": (of_one(ranks={"1": None}), "rank 1 in this state is a"),
    "not counted": (of_one(ranks={"1": {}}), "rank 1 .* has no 'tensors'"),
    "world_size is huge": (all_with(world_size=2**62), f"values of rank 3 are missing.*{NOT_ALL}"),
    "world_size of one": (of_one(0, world_size=2), "not of one run: world_size"),
    "world_size is text": (all_with(world_size="3"), "world_size '3', a positive integer"),
    "world_size is 0": (all_with(world_size=0), "world_size 0"),
    "world_size is a fraction": (all_with(world_size=3.0), "world_size 3.0"),
    "world_size is a truth": (all_with(world_size=True), "world_size True"),
    "another format": (all_with(format=9), "format 9, 2 expected"),
    "from before formats": (
        lambda s: [{"version": 1, "rank": rank, "world_size": 3} for rank in range(3)],
        "another version of gradcomp wrote .* go on with that version",
    ),
    "another step": (of_one(step=7), "not of one run: step is 1 and 7"),
    "other second moments": (other_moments, "not of one run: replicated.second_moment.w"),
    "residual is none": (of_rank(residual=None), "residual of rank 1 .* got None"),
    "residual is text": (residual(lambda r: "x"), "the residual of 'w' must be .* got x"),
    "residual in float64": (residual(torch.Tensor.double), "float32"),
    "residual in int32": (residual(torch.Tensor.int), "float32"),
    "residual gone": (of_rank(residual={}), "rank 1 .* has 1 tensors of 2"),
    "residual never there": (
        of_rank(residual={}, tensors=1),
        "only some ranks' states have residual",
    ),
    "residual of another shape": (
        residual(lambda r: r[:9]),
        "the residual of 'w' must be .2048,. torch.float32, got .9,.",
    ),
    "residual is NaN": (residual(lambda r: r * math.nan), "has values that are not finite"),
    "owner's residual gone": (
        of_rank(owner_residual={}, tensors=1),
        "only some ranks' states have owner_residual",
    ),
    "of another model": (lambda s: run_local(3, trained, {"w": (64, 16)}), "'w'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_lists_that_are_not_all_states_of_one_run_change_nothing(states, name):
    make, text = WRONG[name]
    mine = run(rank_of(2))
    mine.averager.load_state_dict(states)
    before, given = mine.parts(), make(states)
    with pytest.raises(ValueError, match=text):
        mine.averager.load_state_dict(given)
    assert same(mine.parts()["residual"], before["residual"]) and mine.state()["step"] == 1


STAGES = {"precondition": {"precondition": True}, "transform": {"transform": AggregateAdagrad()}}


@functools.cache
def resumed(world, stage):
    """Return one of so many ranks after a step and a load, and the states of three that it read."""
    options, shapes = STAGES[stage], {"w": (16, 8)}
    states = run_local(3, lambda comm: trained(comm, shapes, **options))
    mine = run(rank_of(world), shapes, **options)
    mine.averager.load_state_dict(states)
    return mine, states


def is_refused(mine, states, second):
    """Whether a value is refused as the second of three states. Loading raises ValueError and
    changes nothing, or `state_dict()` goes on.
    """
    before = digest_of(*tensors_in(mine.state()))
    try:
        mine.averager.load_state_dict([states[0], second, states[2]])
    except ValueError:
        assert digest_of(*tensors_in(mine.state())) == before
        return True
    mine.averager.load_state_dict(mine.state())
    mine.averager.load_state_dict(states)
    return False


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [2, 3])
def test_any_value_of_a_state_replaced_is_refused_or_harmless(world, stage):
    mine, states = resumed(world, stage)
    damages = (LEFT_OUT, None, "x", -1, 1.5, [], {}, torch.tensor(math.nan), torch.zeros(2, 2))
    damaged = (with_value(states[1], path, d) for path in paths_of(states[1]) for d in damages)
    assert sum(is_refused(mine, states, one) for one in damaged) > 100


TENSORS = st.builds(
    lambda shape, dtype, value: torch.full(shape, value).to(dtype),
    st.lists(st.sampled_from([0, 1, 8, 16, 128]), max_size=2),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]),
    st.floats(width=32),
)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
VALUES = st.recursive(
    PLAIN | TENSORS | st.just(LEFT_OUT),
    lambda of: st.lists(of, max_size=2) | st.dictionaries(st.text(max_size=3) | st.none(), of),
    max_leaves=3,
)


@given(
    kind=st.tuples(st.sampled_from([2, 3]), st.sampled_from(sorted(STAGES))),
    changes=st.lists(st.tuples(st.integers(0, 99), VALUES), min_size=1, max_size=3),
)
def test_any_values_of_a_state_replaced_are_refused_or_harmless(kind, changes):
    mine, states = resumed(*kind)
    second = states[1]
    for number, value in changes:
        paths = list(paths_of(second))
        if paths:
            second = with_value(second, paths[number % len(paths)], value)
    is_refused(mine, states, second)


def test_ranks_that_own_nothing_have_states_too():
    """Four ranks share six values: only one of them owns any."""
    shapes = {"weight": (2, 2), "bias": (2,)}
    options = {
        "transform": AggregateAdagrad(),
        "gradient": lambda name, shape, *_: torch.ones(shape),
    }
    for old, new in ((4, 2), (4, 3), (2, 4)):
        before = run_local(old, lambda comm: trained(comm, shapes, **options))
        found = run_local(new, lambda comm, s=before: loaded(comm, s, shapes, **options))
        for name, numel in (("weight", 4), ("bias", 2)):
            whole = torch.cat([parts["transform_state"][name] for parts in found])
            assert torch.equal(whole, torch.ones(numel))


def test_a_list_with_as_many_ranks_is_ones_own_state(states):
    for state, found in zip(states, run_local(3, loaded, states[::-1]), strict=True):
        for part in ("residual", "owner_residual"):
            assert same(parts_of(state)[part], found[part])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_single_rank_pays_what_the_others_owed(dtype):
    """Promise 5: nothing is lost, whatever number of ranks goes on; NaN and a step thrown away
    leave the debt.
    """
    states = run_local(3, lambda comm: trained(comm, dtype=dtype))
    owed = torch.stack([parts_of(s)["residual"]["w"].double() for s in states]).sum(0) / 3
    owed += torch.cat([parts_of(s)["owner_residual"]["w"] for s in states])
    assert owed.abs().max() > 0.1
    mine = run(rank_of(1), dtype=dtype, gradient=lambda name, shape, *_: torch.ones(shape))
    mine.averager.load_state_dict(states)
    assert torch.allclose(mine.parts()["residual"]["w"].double(), owed, atol=1e-6)

    def average(value):
        return mine.step(0, value)["w"].flatten().double()

    assert average(math.nan).isnan().all()
    average(0.0)
    mine.averager.discard_step()
    paid = average(0.0)
    left = mine.parts()["residual"]["w"].double()
    assert torch.allclose(paid + left, owed, atol=1e-6)
    assert bool((left == 0).all()) is (dtype is torch.float32)
    assert torch.equal(average(1.0), left.float().add(1.0).to(dtype).double()), "paid once"
    if dtype is torch.float32:
        average(1.0)
        assert mine.parts()["residual"] == {}, "and its memory is given back"


@pytest.mark.parametrize("world", [2, 3])
def test_one_state_with_all_ranks_is_the_same_as_a_list(states, world):
    merged = states[0] | {"ranks": {k: v for state in states for k, v in state["ranks"].items()}}
    one, two = (run_local(world, loaded, given) for given in (merged, states))
    assert all(parts["residual"] for parts in one)
    assert digest_of(*tensors_in(one)) == digest_of(*tensors_in(two))


@pytest.mark.parametrize(("world", "nodes"), [(2, [[0, 1]]), (4, [[0, 1], [2, 3]])])
def test_a_hierarchical_exchange_takes_no_other_number_of_ranks(states, world, nodes):
    options = {"exchange": "hierarchical", "nodes": nodes}
    with pytest.raises(ValueError, match="belongs to its nodes.*3 ranks then"):
        run_local(world, lambda comm: loaded(comm, states, **options))
