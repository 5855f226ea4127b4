"""Runs whose codec was chosen by "auto" go on with a safer one where compression does not pay or
loses too much, all ranks after the same step.

Exchanges and errors are real; seconds are those of a clock that the test moves.
"""

import contextlib
import copy
import math
import re
import threading
from unittest import mock

import pytest
import torch
from _ranks import each_rank, logged, run_local
from _saved import bits_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp
import gradcomp.ddp
from gradcomp import Advanced, EntropyCoded, GradientAverager, OneBit, PeerLost, PeerMismatch
from gradcomp.engine import guard
from gradcomp.engine.guard import COMPRESSED, LADDER, PLAIN, UNTIMED
from gradcomp.engine.rate import shortening
from gradcomp.exchange.sizing import choose
from gradcomp.onebit_sgd import AggregateAdagrad

# steps after which there is a decision, with a faster codec and without one
TIMED, TIMED_ALONE = UNTIMED + 2 * COMPRESSED + 1 + PLAIN, UNTIMED + COMPRESSED + PLAIN
# seconds of a step with the codec, with the faster one and in bf16
PAYS, LOSES, FASTER = (1.0, 1.5, 2.0), (2.0, 1.5, 1.0), (2.0, 1.0, 1.5)
BF16, LAST = repr(LADDER[-1]), repr(guard.SENDS_RESIDUALS)


@pytest.fixture
def clock(monkeypatch):
    """Seconds of this thread's rank."""
    now = threading.local()
    monkeypatch.setattr(guard, "perf_counter", lambda: getattr(now, "seconds", 0.0))
    return now


def averager_of(comm, codec="auto", guarded=None, quality_every=0, kind=torch.optim.AdamW):
    p = nn.Parameter(torch.zeros(40, 130))
    options = {"optimizer": kind([p], lr=1e-3), "comm": comm, "timeout_s": 30}
    rare = Advanced(guard=guarded, quality_every=quality_every)
    return GradientAverager([("w", p)], codec, advanced=rare, **options), p


def gradient(p, step, rank):
    """Return normal values, and the generator that has drawn them."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(p.shape, generator=generator), generator


def steps(clock, averager, p, count, seconds=PAYS, sparse=False, noise=(0.0,)):
    """Average `count` gradients; return the codec of every step."""
    engine, seen = averager._engine, []
    for _ in range(count):
        codec = engine.guard and engine.guard.fallback(engine.step)
        now = 0 if codec is None else 2 if codec is LADDER[-1] else 1
        took = seconds[now] + noise[engine.step % len(noise)]
        clock.seconds = getattr(clock, "seconds", 0.0) + took
        p.grad, generator = gradient(p, engine.step, engine.comm.rank)
        if sparse:
            p.grad *= torch.rand(p.shape, generator=generator) < 0.1
        averager.average()
        seen.append(repr(engine.layouts.fallback or engine.codec))
    return seen


def after(comm, clock, count):
    """Return the state after steps in which compression does not pay."""
    averager, p = averager_of(comm)
    steps(clock, averager, p, count, LOSES)
    return averager.state_dict()


def resumed(comm, clock, states, count, seconds=PAYS):
    """Load the states of as many or of other ranks, and return the codec of every step since."""
    averager, p = averager_of(comm)
    averager.load_state_dict(states[comm.rank] if len(states) == comm.world_size else states)
    return steps(clock, averager, p, count, seconds)


def test_bf16_where_compression_does_not_pay(clock):
    def run(comm):
        averager, p = averager_of(comm)
        mine, other = repr(averager._engine.codec), repr(averager._engine.guard._faster)
        seen = steps(clock, averager, p, TIMED + guard.SENDING + 1, LOSES)
        tried = [mine] * (UNTIMED + COMPRESSED) + [other] * (COMPRESSED + 1) + [BF16] * PLAIN
        assert seen == [*tried, *[LAST] * guard.SENDING, BF16], "what was timed; bf16 stays"
        assert f"now {BF16}" in averager.describe()
        given = [
            gradient(p, TIMED + guard.SENDING, rank)[0].bfloat16().float() for rank in range(2)
        ]
        assert torch.equal(p.grad, sum(given) / 2)
        return averager.state_dict()

    with logged("gradients are sent as") as found:
        states = run_local(2, run)
    (said,) = found
    assert f"from step {TIMED + guard.SENDING} on gradients are sent as bf16: " in said
    assert "2000.0 ms" in said and "1000.0 ms in bf16" in said and "1500.0 ms with Tern" in said
    assert run_local(2, resumed, clock, states, 3) == [[BF16] * 3] * 2


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_faster_codec_where_it_takes_less_time(clock, world_size):
    """`Ternary` under AdamW: with its own groups, its own factor of the rate, the same residuals;
    resumed, too.
    """

    def run(comm):
        averager, p = averager_of(comm)
        engine = averager._engine
        one = engine._longer.coded
        steps(clock, averager, p, TIMED, FASTER)
        again = engine._longer.coded
        before = averager.state_dict()["ranks"][str(comm.rank)]["residual"]["w"].clone()
        seen = steps(clock, averager, p, 3, FASTER)
        assert seen == [repr(engine.guard._faster)] * 3
        (exchange,) = {id(e): e for kind, e in engine.layouts._exchanges.items()}.values()
        assert {slot.group_numel for slot in exchange.plan.slots} == {130}, "rows of Ternary"
        assert engine._longer.coded < one
        assert again == engine._longer.coded, "from the decision on"
        assert f"x {engine._longer.coded:.3g} in steps" in averager.describe()
        after = averager.state_dict()["ranks"][str(comm.rank)]["residual"]["w"]
        assert before.any() and after.any() and not torch.equal(before, after)
        return averager.state_dict()

    with logged("gradients are sent as") as found:
        states = run_local(world_size, run)
    (said,) = found
    assert f"from step {TIMED} on" in said and "1000.0 ms with Ternary" in said
    for seen in run_local(world_size, resumed, clock, states, 2, PAYS):
        assert all("Ternary" in one for one in seen)


@pytest.mark.parametrize(
    ("seconds", "noise", "level"),
    [
        ((1.2, 1.2, 1.0), (0.0,), len(LADDER)),
        # another program that is busy during some steps decides nothing
        ((1.2, 1.2, 1.0), (0.0, 0.6), 0),
        ((1.2, 1.0, 2.0), (0.0,), -1),
        # nor does one step that a pause has made longer
        ((1.2, 1.0, 2.0), (0.0, 0.0, 0.4), -1),
        ((1.2, 1.0, 2.0), (0.0, 0.4), 0),
        # a faster codec that is not fast enough is faster than bf16 all the same
        ((1.0, 0.97, 0.98), (0.0,), 0),
    ],
)
@each_rank(2, "local")
def test_the_codec_changes_if_nearly_all_steps_are_clearly_shorter(
    comm, clock, seconds, noise, level
):
    averager, p = averager_of(comm)
    steps(clock, averager, p, TIMED, seconds, noise=noise)
    assert averager._engine.guard.level == level


def test_a_state_with_a_faster_codec_that_is_no_longer_tried(clock):
    def run(comm):
        averager, _ = averager_of(comm, OneBit(), True)
        averager._engine.guard.load({"level": -1, "first": 0, "bad": 0}, 50)
        return averager._engine.guard.fallback(50)

    assert run_local(2, run) == [None] * 2


def test_a_run_resumed_at_the_first_timed_step_decides_nothing(clock):
    """That step has no beginning to measure from."""
    states = run_local(2, after, clock, UNTIMED)
    for seen in run_local(2, resumed, clock, states, TIMED - UNTIMED + 2, LOSES):
        assert "EntropyCoded" in seen[-1]


@each_rank(2, "local")
def test_it_stays_on_where_it_pays_for_most_ranks(comm, clock):
    averager, p = averager_of(comm)
    seconds = (1.0, 1.1, 1.1) if comm.rank else (1.0, 0.9, 0.95)
    with logged("gradients are sent as") as found:
        seen = steps(clock, averager, p, TIMED + 2, seconds)
    assert seen[-2:] == [repr(averager._engine.codec)] * 2
    assert not found


@each_rank(2, "local")
def test_timing_leaves_what_the_codec_keeps(comm, clock):
    """Steps in bf16 take no part in residuals: they are those of the steps before."""
    averager, p = averager_of(comm)
    steps(clock, averager, p, TIMED - PLAIN)
    before = averager.state_dict()["ranks"][str(comm.rank)]["residual"]["w"].clone()
    steps(clock, averager, p, PLAIN)
    after = averager.state_dict()["ranks"][str(comm.rank)]["residual"]["w"]
    assert before.any()
    assert torch.equal(before, after)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_switch_to_bf16_loses_no_residuals(clock, world_size):
    """Averages add up to the gradients, but for rounding to bf16 and 8 bits."""

    def run(comm):
        averager, p = averager_of(comm, OneBit(residual_decay=1), True)
        total, sent = torch.zeros_like(p), torch.zeros_like(p)
        for step in range(TIMED_ALONE + guard.SENDING + 1):
            steps(clock, averager, p, 1, LOSES)
            sent += p.grad
            total += sum(gradient(p, step, rank)[0] for rank in range(comm.world_size))
            kept = (sent - total / comm.world_size).abs().max()
            if step < TIMED_ALONE:
                assert kept > 0.3, "1 bit leaves out much"
        assert kept < 0.1
        return averager.state_dict()["ranks"][str(comm.rank)]["residual"]["w"].abs().max()

    assert max(run_local(world_size, run)) < 0.1


@pytest.mark.parametrize("lost", [1, 0])
def test_a_state_saved_at_the_switch_has_the_residuals_to_send(clock, lost):
    """Saved after the decision, and after a step that did not count."""

    def run(comm):
        averager, p = averager_of(comm, OneBit(residual_decay=1), True)
        steps(clock, averager, p, TIMED_ALONE, LOSES)
        kept = averager.state_dict()["ranks"][str(comm.rank)]["residual"]["w"].abs().max()
        if lost:
            steps(clock, averager, p, 1, LOSES)
            averager.discard_step()
        again, p = averager_of(comm, OneBit(residual_decay=1), True)
        again.load_state_dict(averager.state_dict())
        assert steps(clock, again, p, 1) == [LAST]
        return kept, again.state_dict()["ranks"][str(comm.rank)]["residual"]["w"].abs().max()

    for before, after in run_local(2, run):
        assert before > 0.3 and after < 0.1


def test_ranks_that_start_again_before_the_decision_have_one_codec(clock):
    """It failed on one rank alone."""

    def run(comm):
        averager, p = averager_of(comm)
        state = averager.state_dict()
        steps(clock, averager, p, TIMED - 1, LOSES)
        look = averager._engine.guard.look
        failing = mock.Mock(side_effect=[PeerLost("guard", -1, 1.0)])
        averager._engine.guard.look = failing if comm.rank else look
        with contextlib.suppress(PeerLost):
            steps(clock, averager, p, 1, LOSES)
        averager._engine.guard.load(state["extra"]["guard"], 0)
        return [averager._engine.guard.fallback(step) for step in range(TIMED + 5)]

    one, other = run_local(2, run)
    assert list(map(repr, one)) == list(map(repr, other))


def test_errors_lead_down_the_ladder(clock):
    """1 bit leaves out four fifths of numbers of which a tenth are not zero: three looks later they
    travel in 8 bits, which leave out 1 %.
    """
    looks = guard.IN_A_ROW * guard.EVERY

    def run(comm):
        averager, p = averager_of(comm, OneBit(residual_decay=0.25), True, quality_every=50)
        seen = steps(clock, averager, p, looks, sparse=True)
        assert seen[-1] == repr(averager._engine.codec)
        assert averager._engine.layouts.probe.error() > averager._engine.guard._limit
        steps(clock, averager, p, 1, sparse=True)
        seen = steps(clock, averager, p, looks + guard.EVERY, sparse=True)
        assert set(seen) == {repr(LADDER[0])}
        assert averager._engine.layouts.probe.error() < 0.02
        assert averager.quality().rows["w"].cosine > 0.999

    with logged("gradients are sent as") as found:
        run_local(2, run)
    (said,) = found
    assert f"from step {looks + 1} on" in said
    assert re.search(r"leaves out [89]\d%", said), said


def test_residuals_that_grow_without_bound_lead_down_at_once(clock):
    def run(comm):
        averager, p = averager_of(comm, OneBit(), True)
        steps(clock, averager, p, 1)
        if comm.rank:
            averager._engine.layouts.probe._warned.add(0)  # what a probe keeps of such a parameter
        return steps(clock, averager, p, guard.EVERY + 1)[-2:]

    mine = OneBit(residual_decay=0.25)  # what AdamW's table makes of OneBit()
    assert run_local(2, run) == [[repr(mine), repr(LADDER[0])]] * 2


@pytest.mark.parametrize("codec, guarded", [("auto", False), (OneBit(), None)])
@each_rank(2, "local")
def test_off(comm, clock, codec, guarded):
    averager, p = averager_of(comm, codec, guarded)
    seen = steps(clock, averager, p, TIMED + 1, LOSES)
    assert len(set(seen)) == 1 and averager._engine.guard is None
    assert "extra" not in averager.state_dict()


def test_a_run_resumed_while_it_was_timed_keeps_its_codec(clock):
    states = run_local(2, after, clock, UNTIMED + 2)
    for seen in run_local(2, resumed, clock, states, TIMED, LOSES):
        assert seen[-1] not in map(repr, LADDER)


def test_with_other_ranks_it_is_timed_again(clock):
    states = run_local(2, after, clock, TIMED + 1)
    wanted = [False] * (TIMED - PLAIN) + [True] * PLAIN + [False]
    for seen in run_local(3, resumed, clock, states, TIMED + 1):
        assert [one == BF16 for one in seen] == wanted


@each_rank(2, "local")
def test_a_rank_that_is_lost_before_the_decision(comm, clock):
    averager, p = averager_of(comm)
    steps(clock, averager, p, TIMED - 1)
    if comm.rank:
        comm.close()
        return
    with pytest.raises(PeerLost):
        steps(clock, averager, p, 1)
    with pytest.raises(PeerLost):
        averager.average()


@each_rank(2, "local")
def test_a_step_whose_decision_fails_commits_nothing(comm, clock, monkeypatch):
    """Its residuals were new, its number and the weights were not."""
    averager, p = averager_of(comm, "onebit", guarded=True)
    steps(clock, averager, p, 2)
    before = averager.state_dict()
    lost = PeerLost("guard", -1, 1.0)
    monkeypatch.setattr(averager._engine.guard, "look", mock.Mock(side_effect=lost))
    with pytest.raises(PeerLost):
        steps(clock, averager, p, 1)
    assert bits_of(averager.state_dict()) == bits_of(before)


@pytest.mark.parametrize(
    "wrong",
    [{"level": 3, "first": 0, "bad": 0}, {"level": 0}, {"level": 0.5, "first": 0, "bad": 0}, 7],
)
@each_rank(2, "local")
def test_foreign_states(comm, wrong):
    averager, _ = averager_of(comm)
    state = averager.state_dict()
    assert state["extra"]["guard"] == {"level": 0, "first": 0, "bad": 0}
    state["extra"]["guard"] = wrong
    with pytest.raises(ValueError, match="guard"):
        averager.load_state_dict(state)


@pytest.mark.parametrize(
    ("kind", "who", "live", "change", "field"),
    [
        (torch.optim.SGD, (0, 1), False, {"level": 1}, "layout"),
        (torch.optim.SGD, (0, 1), False, {"first": 2}, "guard"),
        (torch.optim.SGD, (0, 1), True, {"level": 1}, "guard"),
        (torch.optim.SGD, (0, 1), True, {"first": 2}, "guard"),
        (torch.optim.SGD, (0, 1), True, {"bad": 1}, "guard"),
        (torch.optim.AdamW, (1,), True, {"level": 2}, "loaded"),
        (torch.optim.AdamW, (0, 1), True, {"bad": 1}, "guard"),
    ],
)
@each_rank(2, "over")
def test_a_guard_that_one_rank_loads_wrongly_is_a_mismatch(comm, kind, who, live, change, field):
    """Both ranks waited for the whole timeout and got PeerLost. Then all load the right state and
    go on.
    """

    def averaged(averager, p, step):
        p.grad = gradient(p, step, comm.rank)[0]
        averager.average()
        return p.grad.clone()

    mine = averager_of(comm, kind=kind)
    for step in range(3):
        averaged(*mine, step)
    state = copy.deepcopy(mine[0].state_dict())
    other = averager_of(comm, kind=kind)
    other[0].load_state_dict(state)
    wanted = averaged(*other, 3)
    averager, p = mine if live else averager_of(comm, kind=kind)
    wrong = copy.deepcopy(state)
    wrong["extra"]["guard"] |= change
    if comm.rank in who:
        averager.load_state_dict(wrong if comm.rank else state)
    has = "level {level}), steps counted from {first}".format
    one, two = (re.escape(has(**{"level": 0, "first": 0} | one)) for one in ({}, change))
    text = f"rank 0 has .*{one}.*, rank 1 has .*{two}"
    with pytest.raises(PeerMismatch, match=f"guard: {text}"):
        averager.check_replicas()
    with pytest.raises(PeerMismatch, match="scale groups" if field == "layout" else text) as caught:
        averaged(averager, p, 3)
    assert (caught.value.field, caught.value.rank) == (field, 1)
    averager.reset()
    averager.load_state_dict(state)
    assert torch.equal(averaged(averager, p, 3), wanted)


@each_rank(2)
def test_a_guard_that_one_rank_loads_wrongly_is_a_mismatch_under_ddp():
    def registered():
        model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, gradcomp.ddp.register(model, "auto", optimizer=optimizer, timeout_s=60)

    x = torch.ones(2, 64)
    model, state = registered()
    with state:
        for _ in range(3):
            model(x).sum().backward()
        saved = state.state_dict()
    saved["extra"]["guard"]["level"] = torch.distributed.get_rank()
    model, state = registered()
    with state:
        state.load_state_dict(saved)
        with pytest.raises(PeerMismatch, match="scale groups"):
            model(x).sum().backward()


def test_options():
    with pytest.raises(ValueError, match="guard must be None, True or False"):
        Advanced(guard=1.5)
    with pytest.raises(ValueError, match="cannot be used with"):
        Advanced(guard=True, transform=AggregateAdagrad())


@each_rank(2, "local")
def test_no_sample_is_no_error(comm):
    averager, _ = averager_of(comm)
    assert math.isnan(averager._engine.layouts.probe.error())


@each_rank(2)
def test_auto_under_ddp():
    """Past the decision: whatever the machine makes of it, ranks agree, replicas stay equal, and
    it trains.
    """
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rates, codecs, losses = set(), [], []
    with gradcomp.ddp.register(model, "auto", optimizer=optimizer, timeout_s=60) as state:
        optimizer.register_step_pre_hook(lambda *_: rates.add(optimizer.param_groups[0]["lr"]))
        engine, batches = state._engine, torch.Generator().manual_seed(torch.distributed.get_rank())
        for _ in range(TIMED + 4):
            x = torch.randn(16, 64, generator=batches)
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            codecs.append(repr(engine.layouts.fallback or engine.codec))
            losses.append(loss.item())
        assert optimizer.param_groups[0]["lr"] == 1e-3
        assert state.check_replicas() == (0, 1)
        line = state.describe()
    mine, first = codecs[0], UNTIMED + COMPRESSED
    other = codecs[first]
    assert losses[-1] < losses[0]
    assert codecs[:first] == [mine] * first and "Ternary" in other
    assert codecs[first:TIMED] == [other] * (COMPRESSED + 1) + [BF16] * PLAIN
    assert codecs[TIMED:] in ([mine] * 4, [other] * 4, [*[LAST] * guard.SENDING, BF16])
    factor = shortening(EntropyCoded(1.25), choose(EntropyCoded(1.25), 2))
    assert max(rates) == pytest.approx(1e-3 * factor, rel=0.01)
    return line, codecs, sorted(rates)
