"""Ranks that go on among others: what each of them has left out so far is sent later, by itself."""

import pytest
import torch
from _averaging import Run
from _averaging import gradient as normal
from _kinds import check_kinds
from _ranks import run_local

from gradcomp import Block, OneBit, PeerLost, Ternary
from gradcomp.comm.base import Channel
from gradcomp.comm.local import LocalCommunicator
from gradcomp.payload.pieces import ByElements

SHAPES = {"w": (64, 40), "odd": (7, 211)}
CODECS = {
    "onebit": OneBit(residual_decay=1.0),
    "ternary": Ternary(residual_decay=1.0),
    "block2": Block(2, residual_decay=1.0),
}
check_kinds(CODECS, without=("terngrad", "block4", "block8", "entropy", "identity", "bfloat16"))
SIGNS = OneBit(residual_decay=1.0, values="sign")  # -1 and +1: with `eighths`, sums are exact


def eighths(name, shape, step, rank):
    return (4 * normal(name, shape, step, rank)).round().clamp(-8, 8) / 8


def owed(engine, ranks):
    """Return what averages of so many ranks lack of this one, by name, float64."""
    store, names = engine.store, engine.layouts.names
    missing = {name: t.double() / ranks for name, t in store.residuals.state(names).items()}
    if store.owner_residuals is not None and store.owner_residuals.begun:
        bounds = ByElements(engine.comm.world_size).bounds
        for name, part in store.owner_residuals.state(names).items():
            first, last = bounds(missing[name].numel(), engine.comm.rank)
            missing[name][first:last] += part
    return missing


class Gone(Exception):
    """The rank that leaves has ended."""


def leave_at(phase, comm):
    """Have a rank end where it starts a phase of a step."""
    calls, start = [], {"first": "_start_all_to_all"}.get(phase, "_start_all_gather")
    before = getattr(comm, start)

    def ends(*args):
        if args[-1] is not Channel.SCALE:
            calls.append(args)
        if len(calls) == 1 + (phase == "outcome"):
            comm.abort()
            raise Gone
        return before(*args)

    setattr(comm, start, ends)


def work(comm, others, codec, exchange, phase):
    """Take steps as one of all ranks, then, all but the last, as one of the others."""
    gradient = eighths if codec is SIGNS else normal
    run = Run(comm, codec, SHAPES, gradient=gradient, exchange=exchange, atomic_steps=True)
    engine, stay = run.averager._engine, len(others)
    together = run.steps(3), run.given(3), owed(engine, comm.world_size)
    before = owed(engine, stay)
    if comm.rank >= stay:
        if phase:
            leave_at(phase, comm)
            with pytest.raises(Gone):
                run.step(3)
        return together
    if phase:
        with pytest.raises(PeerLost, match="rank"):
            run.step(3)
    engine.move(others[comm.rank])
    after, averages = owed(engine, stay), run.steps(3, 7)
    given, left = run.given(3, 7), owed(engine, stay)
    run.averager.close()
    return *together, before, after, averages, given, left


def total(steps, name):
    return sum(step[name].double().flatten() for step in steps)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("world", "exchange", "phase"),
    [
        (4, "reduce_scatter", ""),
        (4, "reduce_scatter", "first"),
        (4, "reduce_scatter", "second"),
        (4, "reduce_scatter", "outcome"),
        (3, "all_gather", ""),
        (3, "all_gather", "gather"),
        (3, "all_gather", "outcome"),
    ],
)
def test_no_sum_is_lost_where_a_rank_leaves(world, exchange, phase, codec):
    """Averages and what is owed in the end are the gradients since then and what was owed before,
    by the ranks that stay. A step in which one is lost is made again. What is lost with a rank is
    what it owed, which no other rank knows.
    """
    conserved(world, world - 1, CODECS[codec], exchange, phase, atol=1e-4)


@pytest.mark.parametrize(
    ("exchange", "phase"),
    [
        *(("reduce_scatter", phase) for phase in ("", "first", "second", "outcome")),
        *(("all_gather", phase) for phase in ("", "gather", "outcome")),
    ],
)
def test_sums_are_exact_where_two_of_four_ranks_leave(exchange, phase):
    """Of codes and gradients that fp32 adds and divides without rounding."""
    conserved(4, 2, SIGNS, exchange, phase, atol=0)


def conserved(world, stay, codec, exchange, phase, atol):
    """Look at the sums before and after the last ranks leave, when `stay` go on."""
    others = LocalCommunicator.group(stay)
    found = run_local(world, work, others, codec, exchange, phase)
    averages, given, owing = zip(*(one[:3] for one in found), strict=True)
    for name in SHAPES:
        assert owing[stay][name].abs().sum() > 0, "nothing is lost"
        wanted = sum(total(steps, name) for steps in given) / world
        ended = total(averages[0], name) + total(owing, name)
        torch.testing.assert_close(ended, wanted, rtol=0, atol=atol / 10)
    before, after, averages, given, left = zip(*(one[3:] for one in found[:stay]), strict=True)
    for name in SHAPES:
        assert total(before, name).abs().sum() > 0
        torch.testing.assert_close(total(after, name), total(before, name), rtol=0, atol=atol / 10)
        wanted = total(before, name) + sum(total(steps, name) for steps in given) / stay
        found = total(averages[0], name) + total(left, name)
        torch.testing.assert_close(found, wanted, rtol=0, atol=atol)


def alone_and_back(comm, again):
    run = Run(comm, OneBit(residual_decay=1.0), SHAPES)
    engine = run.averager._engine
    run.steps(2)
    engine.move(LocalCommunicator.group(1)[0])
    left = owed(engine, 1)
    averages = run.step(2)
    for name, shape in SHAPES.items():
        wanted = run.gradient(name, shape, 2, comm.rank).double().flatten() + left[name]
        torch.testing.assert_close(averages[name].double().flatten(), wanted, rtol=0, atol=1e-5)
        assert not owed(engine, 1)[name].any()
    engine.move(again[comm.rank])
    out = run.steps(3, 5)
    run.averager.close()
    return out


def test_a_rank_goes_on_alone_and_comes_back():
    found = run_local(2, alone_and_back, LocalCommunicator.group(2))
    for one, other in zip(*found, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in SHAPES)
