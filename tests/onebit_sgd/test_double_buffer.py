"""Double buffering: stale by one update exactly, drained where it must be, hidden as far as the
link allows.
"""

import copy
import statistics
import struct
import time

import pytest
import torch
from _models import bits
from _ranks import each_rank, run_local, with_communicator
from _saved import parts_of
from torch import nn

import gradcomp
from gradcomp import (
    GradcompError,
    GradientAverager,
    Identity,
    OneBit,
    PeerLost,
    PeerMismatch,
    Ternary,
)
from gradcomp.codecs import EntropyCoded
from gradcomp.comm import LinkCommunicator, LocalCommunicator, TorchCommunicator
from gradcomp.onebit_sgd import DoubleBuffer, OverlapReport

pytestmark = pytest.mark.usefixtures("one_thread")


def make_model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 33), nn.Tanh(), nn.Linear(33, 5))


SCALER = torch.amp.GradScaler("cpu")
MODEL, OTHER = make_model(0), make_model(1)  # threads share torch's global generator
LR, MOMENTUM = 0.1, 0.9


def fresh_model():
    torch.set_num_threads(1)  # it counts for the calling thread: ranks may be threads
    return copy.deepcopy(MODEL)


def minibatch(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(7, 20, generator=generator), torch.randint(5, (7,), generator=generator)


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)


def loss_of(net):
    dtype = next(net.parameters()).dtype
    return lambda x, y: nn.functional.cross_entropy(net(x.to(dtype)).float(), y)


def buffered(comm, codec=None, optimizer=sgd, **options):
    """Return a network, its optimizer and a buffer."""
    net = fresh_model()
    made = optimizer(net)
    options = {"min_numel": 0, "timeout_s": 60} | options
    return net, made, DoubleBuffer(net, made, codec or OneBit(), comm=comm, **options)


def steps(net, buffer, comm, first, last):
    for step in range(first, last):
        buffer.step(loss_of(net), *minibatch(step, comm.rank))


def simulate(world, steps, whole, drain_after=()):
    """Stale SGD written out: the average of a part is applied after the next part's gradients
    were computed.
    """
    net = fresh_model()
    optimizer, late, seen = sgd(net), None, []

    def apply(average):
        for p, g in zip(net.parameters(), average, strict=True):
            p.grad = g
        optimizer.step()

    for step in range(steps):
        parts = [(0, 7)] if whole else [(0, 4), (4, 7)]
        for first, last in parts:
            sums = [torch.zeros_like(p) for p in net.parameters()]
            for rank in range(world):
                x, y = minibatch(step, rank)
                net.zero_grad()
                (loss_of(net)(x[first:last], y[first:last]) * ((last - first) / 7)).backward()
                for total, p in zip(sums, net.parameters(), strict=True):
                    total += p.grad
            average = [s * torch.tensor(1 / world) for s in sums]
            if late is not None:
                apply(late)
            late = average
            seen.append(bits(net))
        if step in drain_after:
            apply(late)
            late = None
    if late is not None:
        apply(late)
    return seen, bits(net)


def stale(comm, steps, whole, drain_after=()):
    options, seen = {"whole_steps": whole, "bucket_cap_mb": 0.001}, []
    net, _, buffer = buffered(comm, Identity(), **options)

    def loss(x, y):
        seen.append(bits(net))  # the weights that this part is computed on
        return loss_of(net)(x, y)

    for step in range(steps):
        buffer.step(loss, *minibatch(step, comm.rank))
        if step in drain_after:
            assert buffer.drain() and not buffer.drain()
    buffer.drain()
    return seen, bits(net)


@pytest.mark.parametrize("whole", [False, True], ids=["halves", "whole"])
@pytest.mark.parametrize(("world", "drains"), [(1, ()), (2, ()), (3, ()), (2, (1, 3))])
def test_weights_lack_the_update_under_way_and_no_other(over, world, whole, drains):
    """Bit for bit the hand-written run; the weights of part h are those after the update of part
    h - 2, or h - 1 where the buffer was drained.
    """
    applied, last = simulate(world, 5, whole, drains)
    for seen, final in over(world, stale, 5, whole, drains):
        assert final == last
        assert len(seen) == len(applied) == (5 if whole else 10)
        assert seen[0] == bits(MODEL)
        if not drains:
            assert seen[1:] == applied[:-1]
            assert len(set(seen)) == len(seen) - 1
    assert not drains or last != simulate(world, 5, whole)[1]


@pytest.mark.parametrize("how", ["forward", "state_dict"])
@pytest.mark.parametrize("codec", [Identity(), OneBit(), Ternary()], ids=repr)
@each_rank(3, "over")
def test_one_rank_drains_alone_and_replicas_stay_equal(comm, codec, how):
    """Rank 0 evaluates in the middle, with a schedule going on; the other ranks do not. An update
    is made with the learning rate of when it was sent, whenever a rank applies it.
    """
    net, optimizer, buffer = buffered(comm, codec)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    for step in range(6):
        steps(net, buffer, comm, step, step + 1)
        if comm.rank == 0 and step in (1, 4):
            before = bits(net)
            if how == "forward":
                net.eval()
                with torch.inference_mode():
                    net(minibatch(step, 9)[0])
                net.train()
            else:
                buffer.state_dict()
            assert bits(net) != before
        scheduler.step()
    buffer.check_replicas()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(LR * 0.7**6)
    return bits(net)


@each_rank(2, "local")
def test_one_rank_drains_alone_after_a_roll_back_under_auto(comm):
    """Replicas were compared only five exchanges after `compare` had loaded their state, while one
    of them was an update ahead.
    """
    net, _, buffer = buffered(comm, "auto", whole_steps=True)
    steps(net, buffer, comm, 0, 2)
    buffer.compare(loss_of(net), *minibatch(2, comm.rank), steps=1)
    for step in range(2, 14):
        steps(net, buffer, comm, step, step + 1)
        if comm.rank == 0:
            buffer.drain()
    buffer.check_replicas()
    buffer.close()


@pytest.mark.parametrize(
    ("codec", "whole"),
    [(OneBit(), False), (OneBit(), True), (Ternary(), False)],
    ids=["onebit-halves", "onebit-whole", "ternary-halves"],
)
@each_rank(2, "over")
def test_resume_equals_the_uninterrupted_drained_run(comm, codec, whole):
    net, _, buffer = buffered(comm, codec, whole_steps=whole)
    for first, last in ((0, 3), (3, 6)):
        steps(net, buffer, comm, first, last)
        buffer.drain()
    wanted = bits(net)

    net, optimizer, buffer = buffered(comm, codec, whole_steps=whole)
    steps(net, buffer, comm, 0, 3)
    states = buffer.state_dict(), net.state_dict(), optimizer.state_dict()
    states = copy.deepcopy(states)
    net, optimizer, buffer = buffered(comm, codec, whole_steps=whole)
    steps(net, buffer, comm, 0, 1)  # an exchange is under way: it is dropped
    for target, state in zip((buffer, net, optimizer), states, strict=True):
        target.load_state_dict(state)
    steps(net, buffer, comm, 3, 6)
    buffer.drain()
    assert bits(net) == wanted


def saved_by_all(comm):
    net, _, buffer = buffered(comm)
    steps(net, buffer, comm, 0, 2)
    return buffer.state_dict()


def loaded_by_fewer(comm, states):
    with buffered(comm)[2] as buffer:
        with pytest.raises(ValueError, match="this one has 2|one of every rank"):
            buffer.load_state_dict(states[comm.rank])
        buffer.load_state_dict(states)
        state = buffer.state_dict()
    assert all(residual.any() for residual in parts_of(state)["residual"].values())
    assert (state["world_size"], state["step"]) == (2, 4)


def test_states_of_all_ranks_resume_on_fewer():
    """Three ranks took two minibatches, four exchanges; two go on with what the three owe."""
    run_local(2, loaded_by_fewer, run_local(3, saved_by_all))


def refuses(comm, ranks):
    net, _, buffer = buffered(comm)
    state = buffer.state_dict()
    steps(net, buffer, comm, 0, 1)
    if comm.rank in ranks:
        with pytest.raises(ValueError, match="a rank '7' of 2 ranks"):
            buffer.load_state_dict({**state, "ranks": {"7": {"tensors": 0}}})
    buffer.check_replicas()
    return bits(net)


@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
def test_a_refused_state_drops_no_average_that_is_under_way(ranks):
    assert run_local(2, refuses, ranks) == run_local(2, refuses, ())


@each_rank(2, "over")
def test_a_rank_that_skips_takes_part_with_zero(comm):
    net, _, buffer = buffered(comm, Identity())
    mine = 3 if comm.rank else 2
    longest = buffer.most(mine)
    steps(net, buffer, comm, 0, mine)
    for _ in range(longest - mine):
        buffer.skip()
    buffer.check_replicas()
    for _ in range(2):
        buffer.close()


def stops_calling(comm):
    net, _, buffer = buffered(comm, Identity(), timeout_s=4)
    steps(net, buffer, comm, 0, 2)
    if comm.rank == 0:
        time.sleep(6)
        return
    for step in (2, 9):
        with pytest.raises(PeerLost) as caught:  # the first half is sent, the second is told
            buffer.step(loss_of(net), *minibatch(step, 1))
        assert all(p.grad.isnan().all() for p in net.parameters())
    assert caught.value.phase in ("first_phase", "scale_round", "second_phase")
    assert buffer.state_dict()["step"] == 4  # the state before the exchange that failed
    buffer.close()  # what has been raised is not raised again
    assert all(p.isfinite().all() for p in net.parameters())


@each_rank(2, "local")
def test_close_raises_what_the_last_exchange_failed_with(comm):
    net, _, buffer = buffered(comm, whole_steps=True, timeout_s=4)
    steps(net, buffer, comm, 0, 1)
    if comm.rank == 0:  # the other one does not answer
        steps(net, buffer, comm, 1, 2)
        while buffer._engine.error is None:
            time.sleep(0.01)
        with pytest.raises(PeerLost):
            buffer.close()
        buffer.close()


def test_a_rank_that_stops_calling_is_peer_lost_on_the_others(gloo):
    run_local(2, stops_calling)
    gloo(2, with_communicator, "gloo", stops_calling)


@each_rank(2, "local")
def test_zero_gradients_of_a_skip_are_divided_by_all_ranks(comm):
    net = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(net.weight)
    buffer = DoubleBuffer(net, torch.optim.SGD(net.parameters(), lr=1.0), Identity(), comm=comm)
    if comm.rank == 0:
        buffer.step(lambda x: net(x).mean(), torch.ones(4, 3))
    else:
        buffer.skip()
    buffer.close()
    assert net.weight.detach().unique().tolist() == [-0.5]


def split_sgd(net):
    weights = gradcomp.optim.split_parameters(net)
    return gradcomp.optim.SplitSGD(weights, lr=LR, momentum=MOMENTUM)


@pytest.mark.parametrize("drains", [False, True])
@each_rank(2, "local")
def test_split_optimizers_are_stepped(comm, drains):
    net, optimizer, buffer = buffered(comm, optimizer=split_sgd)
    steps(net, buffer, comm, 0, 3)
    if comm.rank == 0 and drains:
        buffer.drain()
    steps(net, buffer, comm, 3, 5)
    buffer.check_replicas()
    assert bits(net) != bits(copy.deepcopy(MODEL).bfloat16())
    return bits(net), [optimizer.trail(p).numpy().tobytes() for p in net.parameters()]


# ---- the averager's rotate -----------------------------------------------------------------------


@each_rank(2, "over")
def test_rotate_hands_back_the_averages_of_the_call_before(comm):
    net = nn.Linear(4, 4)
    nn.init.zeros_(net.weight), nn.init.zeros_(net.bias)
    averager = GradientAverager(net.named_parameters(), Identity(), comm=comm)
    assert averager.flush() is False

    def put(value):
        net.weight.grad = torch.full_like(net.weight, value * (comm.rank + 1))
        net.bias.grad = None if comm.rank else torch.full_like(net.bias, value)

    def got():
        return net.weight.grad.unique().tolist(), net.bias.grad.unique().tolist()

    put(1.0)
    assert averager.average_delayed() is False
    # no local gradient that a step could take
    assert net.weight.grad is None and net.bias.grad is None
    for call in (averager.average, averager.state_dict, averager.discard_step):
        with pytest.raises(GradcompError, match="flush"):
            call()
    for value, wanted in ((2.0, ([1.5], [0.5])), (4.0, ([3.0], [1.0]))):
        put(value)
        assert averager.average_delayed() is True and got() == wanted
    assert averager.flush() is True and got() == ([6.0], [2.0])
    assert averager.flush() is False
    assert averager.stats.steps == averager.step == 3
    put(8.0)
    averager.average()
    assert got() == ([12.0], [4.0])
    averager.state_dict()


def test_rotate_takes_no_loss_scale():
    net, comm = nn.Linear(4, 4), LocalCommunicator.group(1)[0]
    averager = GradientAverager(net, Identity(), comm=comm, grad_scaler=SCALER)
    with pytest.raises(GradcompError, match="loss scale"):
        averager.average_delayed()


# ---- what it refuses, what it takes --------------------------------------------------------------


def buffer_of_one(net=None, optimizer=None, **options):
    net = net if net is not None else fresh_model()
    optimizer = optimizer or sgd(MODEL if net == "net" else net)
    comm = LocalCommunicator.group(1)[0]
    return net, DoubleBuffer(net, optimizer, "onebit", comm=comm, **options)


X, Y = minibatch(0, 0)
LOOSE = nn.Linear(2, 2)  # of no model here


def loads_whole_steps(net, buffer):
    buffer_of_one(whole_steps=True)[1].load_state_dict(buffer.state_dict())


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (ValueError, "1 samples", lambda net, buffer: buffer.step(loss_of(net), X[:1], Y[:1])),
        (ValueError, r"\[6, 7\]", lambda net, buffer: buffer.step(loss_of(net), X, Y[:6])),
        (ValueError, "holds no tensor", lambda net, buffer: buffer.step(lambda: None)),
        (ValueError, r"is \(\)", lambda net, buffer: buffer.step(len, X, torch.tensor(3))),
        (TypeError, "got str", lambda net, buffer: buffer.step(len, X, ["a"] * 7)),
        (TypeError, "must be a function, got int", lambda net, buffer: buffer.step(1, X)),
        (TypeError, "float", lambda net, buffer: buffer.step(lambda x: 1.0, X)),
        (ValueError, r"\(4, 20\)", lambda net, buffer: buffer.step(lambda x: x, X)),
        (ValueError, "-1", lambda net, buffer: buffer.most(-1)),
        (ValueError, "timeout_s", lambda *_: buffer_of_one(timeout_s=0)),
        (ValueError, "whole_steps", lambda *_: buffer_of_one(whole_steps=1)),
        (TypeError, "grad_scaler", lambda *_: buffer_of_one(grad_scaler=SCALER)),
        (ValueError, "min_numel", lambda *_: buffer_of_one(min_numel=-1)),
        (TypeError, "must be a torch.nn.Module", lambda *_: buffer_of_one("net")),
        (ValueError, "updates no parameter", lambda *_: buffer_of_one(fresh_model(), sgd(LOOSE))),
        (ValueError, "not from", lambda net, buffer: buffer.load_state_dict({"step": 3})),
        (ValueError, "whole_steps", loads_whole_steps),
        (RuntimeError, "closed", lambda net, buffer: (buffer.close(), buffer.skip())),
    ],
)
def test_wrong_arguments(error, text, call):
    net, buffer = buffer_of_one()
    with pytest.raises(error, match=text):
        call(net, buffer)
    assert bits(net) == bits(MODEL)


@each_rank(2)
def test_ddp_is_refused_and_the_default_group_is_used():
    wrapped = nn.parallel.DistributedDataParallel(fresh_model())
    with pytest.raises(TypeError, match=r"model\.module"):
        DoubleBuffer(wrapped, sgd(wrapped), "onebit")
    net = wrapped.module
    with DoubleBuffer(net, sgd(net), "onebit") as buffer:  # over the default group
        buffer.step(loss_of(net), *minibatch(0, 0))
    assert not net._forward_pre_hooks


@each_rank(2, "local")
def test_replicas_that_start_apart_are_a_mismatch(comm):
    net = copy.deepcopy(MODEL if comm.rank == 0 else OTHER)
    with pytest.raises(PeerMismatch, match=r"parameter 0\.weight"):
        DoubleBuffer(net, sgd(net), "onebit", comm=comm, timeout_s=20)


def test_containers_are_cut_and_the_loss_is_the_minibatch_mean():
    net, buffer = buffer_of_one()
    x, y = minibatch(0, 0)
    shapes = []

    def loss(inputs, pair, nothing):
        shapes.append((len(inputs["x"]), len(pair[0]), nothing))
        return loss_of(net)(inputs["x"], pair[0])

    got = buffer.step(loss, {"x": x}, (y, [x]), None)
    assert shapes == [(4, 4, None), (3, 3, None)]
    # both halves before the first update
    torch.testing.assert_close(got, loss_of(MODEL)(x, y).detach())
    assert not got.requires_grad


def test_evaluation_drains_and_a_step_in_evaluation_mode_does_not():
    net, buffer = buffer_of_one()
    batch = minibatch(0, 0)
    buffer.step(loss_of(net), *batch)
    stale = bits(net)
    net(batch[0])  # training mode: nothing happens
    assert bits(net) == stale
    copied = copy.deepcopy(net).eval()
    copied(batch[0])  # a copy is nobody's to drain
    assert bits(net) == stale
    net.eval()
    net(batch[0])
    assert bits(net) != stale
    before, held = buffer.report().exchanges, []

    def loss(x, y):
        out = loss_of(net)(x, y)
        held.append(bits(net))
        return out

    buffer.step(loss, *batch)  # frozen normalisation: the model stays in evaluation mode
    assert held[0] == held[1]  # the first half's update was not waited for
    assert buffer.report().exchanges == before + 1  # the second half is still under way
    buffer.close()
    assert buffer.report().exchanges == before + 2


def test_momentum_made_in_inference_mode_is_an_ordinary_tensor():
    net, buffer = buffer_of_one(whole_steps=True)
    buffer.step(loss_of(net), *minibatch(0, 0))
    net.eval()
    with torch.inference_mode():
        net(minibatch(0, 0)[0])  # the optimizer's first step
    net.train()
    buffer.step(loss_of(net), *minibatch(1, 0))
    assert buffer.drain()


@each_rank(2, "local")
def test_an_exception_closes_without_waiting_for_peers(comm):
    net, begun = fresh_model(), time.monotonic()
    with (
        pytest.raises(ZeroDivisionError),
        DoubleBuffer(net, sgd(net), "onebit", comm=comm, timeout_s=60) as buffer,
    ):
        buffer._averager.average_delayed(), buffer._averager.flush()
        if comm.rank == 0:
            buffer._averager.average_delayed()  # nobody will answer
        raise ZeroDivisionError
    assert time.monotonic() - begun < 20


def test_options_set_by_a_hook_of_the_step_stay():
    net, used = fresh_model(), []
    optimizer = sgd(net)
    buffer = buffer_of_one(net, optimizer)[1]
    optimizer.register_step_pre_hook(lambda o, a, k: used.append(o.param_groups[0]["lr"]))
    optimizer.register_step_post_hook(lambda o, a, k: o.param_groups[0].update(momentum=0.5))
    buffer.step(loss_of(net), *minibatch(0, 0))
    optimizer.param_groups[0]["lr"] = 0.01
    buffer.step(loss_of(net), *minibatch(1, 0))
    buffer.drain()
    assert used == [0.1, 0.1, 0.01, 0.01]
    assert optimizer.param_groups[0]["momentum"] == 0.5 and optimizer.param_groups[0]["lr"] == 0.01


@each_rank(2, "local")
def test_a_step_has_the_rate_of_the_exchange_whose_averages_it_applies(comm):
    """Of `scale_lr`, also where rank 0 drains alone, and where fp32 averages of the warm-up are
    applied after the first exchange with codes has begun.
    """
    net, rates = fresh_model(), []
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    buffer = DoubleBuffer(
        net,
        optimizer,
        EntropyCoded(1.25),
        comm=comm,
        min_numel=0,
        precondition=True,
        warmup_steps=3,
        timeout_s=60,
    )
    optimizer.register_step_pre_hook(lambda o, a, k: rates.append(o.param_groups[0]["lr"]))
    for step in range(4):
        steps(net, buffer, comm, step, step + 1)
        if comm.rank == 0:
            buffer.state_dict()
    buffer.drain()
    buffer.check_replicas()
    assert rates[:3] == [0.01] * 3 and rates[3:] == sorted(rates[3:]) and rates[3] > 0.0101
    return rates


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, as schedule-free optimizers do."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


@pytest.mark.parametrize("drains", [False, True])
def test_what_an_optimizer_counts_in_its_groups_goes_on(drains):
    net = fresh_model()
    optimizer = Counting(net.parameters(), lr=LR)
    buffer = buffer_of_one(net, optimizer)[1]
    for step in range(4):
        buffer.step(loss_of(net), *minibatch(step, 0))
        if drains and step == 1:
            buffer.drain()
    buffer.drain()
    assert optimizer.param_groups[0]["k"] == 8


# ---- what is hidden ------------------------------------------------------------------------------


WIDE = 1024


def heavy():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE))


def calc_seconds(net, samples):
    """Median seconds of forward and backward of half a minibatch."""
    x, times = torch.randn(samples // 2, WIDE), []
    for _ in range(9):
        begun = time.perf_counter()
        net.zero_grad()
        net(x).square().mean().backward()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[2:])


def hidden_shares(whole, ratio, samples=1024, steps=8):
    """Return (median hidden share of a step, T_comm / T_calc of an exchange, report) behind a link
    made for this `ratio`.
    """
    comm = TorchCommunicator(timeout_s=60)
    net = heavy()
    mine = struct.pack("<d", calc_seconds(net, samples))
    slowest = max(struct.unpack("<d", one)[0] for one in comm.all_gather_bytes(mine, 60))
    named = [(n, tuple(p.shape)) for n, p in net.named_parameters()]
    sizes = gradcomp.plan.nbytes.predict_bytes(OneBit(), named, comm.world_size, rank=comm.rank)
    link = LinkCommunicator(comm, bits_per_s=8 * sizes.sent / (ratio * slowest))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    x, shares, taken = torch.randn(samples, WIDE), [], []
    with DoubleBuffer(net, optimizer, OneBit(), comm=link, whole_steps=whole) as buffer:
        last = buffer.report()
        for _ in range(steps):
            buffer.step(lambda x: net(x).square().mean(), x)
            now = buffer.report()
            count, exchange = now.exchanges - last.exchanges, now.exchange_s - last.exchange_s
            if count:
                shares.append(1 - (now.waited_s - last.waited_s) / exchange)
                computing = (now.compute_s - last.compute_s) / (1 if whole else 2)
                taken.append(exchange / count / computing)
            last = now
        report = buffer.report()
    return statistics.median(shares[1:]), statistics.median(taken[1:]), str(report)


@pytest.mark.timed
@pytest.mark.parametrize("whole", [False, True], ids=["halves", "whole"])
def test_at_least_80_percent_is_hidden_where_an_exchange_takes_half_of_computing(gloo, whole):
    for _ in range(3):  # on a machine that others use
        results = gloo(2, hidden_shares, whole, 0.5)
        worst, ratio = min(r[0] for r in results), min(r[1] for r in results)
        if worst >= 0.8 and ratio > 0.3:
            break
    print("hidden, T_comm / T_calc, report:", results)
    assert worst >= 0.8 and (whole or ratio > 0.3)
    assert all("hidden" in r[2] for r in results)


@pytest.mark.timed
def test_a_link_four_times_slower_than_computing_hides_little(gloo):
    for share, ratio, _ in gloo(2, hidden_shares, False, 4.0, 512, 5):
        assert share < 0.6 and ratio > 2


@pytest.mark.parametrize(
    ("report", "hidden", "text"),
    [
        (OverlapReport(False, 10, 20, 1.2, 0.084, 0.1, 0.2, 4.0), 0.93, "93 % of 1.2 s in 20 exch"),
        (OverlapReport(True, 10, 9, 0.09, 0.009, 0.0, 0.2, 1.0), 0.9, "90 % of 90.0 ms in 9 exch"),
        (OverlapReport(False, 10, 20, 2.0, 2.1, 0.0, 0.2, 1.0), 0.0, "hidden 0 % of 2.0 s"),
        (OverlapReport(False, 10, 20, 0.0, 0.0, 0.0, 0.1, 1.0), 0.0, "nothing was exchanged"),
        (OverlapReport(False, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0), 0.0, "nothing was exchanged"),
    ],
)
def test_the_report_says_what_was_hidden_and_leaves_the_verdict_to_compare(report, hidden, text):
    assert report.hidden == pytest.approx(hidden) and text in str(report)
    assert ("compare()" in str(report)) is bool(report.exchange_s)


@pytest.mark.timed
@each_rank(2, "local")
def test_seconds_are_counted(comm):
    link = LinkCommunicator(comm, bits_per_s=1e9, latency_s=0.02)
    net, _, buffer = buffered(link, Identity())
    buffer.step(loss_of(net), *minibatch(0, comm.rank))
    buffer.drain()
    report = buffer.report()
    assert report.minibatches == 1 and report.exchanges == 2
    assert report.exchange_s >= 0.04 and 0.02 <= report.waited_s <= report.exchange_s + 0.05
    assert report.update_s > 0 and report.compute_s > 0


def everything(net, optimizer, buffer):
    state, momenta = buffer.state_dict(), optimizer.state_dict()["state"].values()
    tensors = [*(m["momentum_buffer"] for m in momenta), *parts_of(state)["residual"].values()]
    return bits(net), state["step"], [t.numpy().tobytes() for t in tensors]


def compared(comm, bits_per_s, whole):
    """Return what `compare` says over a link; it leaves no trace."""
    link = LinkCommunicator(comm, bits_per_s=bits_per_s)
    net, optimizer, buffer = buffered(link, whole_steps=whole)
    x, y = minibatch(0, comm.rank)
    buffer.step(loss_of(net), x, y)
    before = everything(net, optimizer, buffer)

    def loss(a, b):
        time.sleep(0.05 * len(a) / len(x))  # what computing takes
        return loss_of(net)(a, b)

    found = buffer.compare(loss, x, y, steps=3)
    assert everything(net, optimizer, buffer) == before
    for bad in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="steps must be"):
            buffer.compare(loss, x, y, steps=bad)
    buffer.close()
    return found


@pytest.mark.timed
@pytest.mark.parametrize("whole", [False, True], ids=["halves", "whole"])
def test_compare_measures_both_ways_and_leaves_no_trace(whole):
    """Over a link whose exchanges fit behind computing it pays; where sending takes six times as
    long, halves send twice.
    """
    nbytes = sum(
        OneBit().payload_nbytes(p.numel(), groups=p.shape[0] if p.dim() > 1 else 1)
        for p in MODEL.parameters()
    )
    fast, also = run_local(2, compared, 8 * nbytes / 0.02, whole)
    assert fast == also and fast.pays and fast.plain_s > 0.06 and "pays here" in str(fast), fast
    if not whole:
        slow = run_local(2, compared, 8 * nbytes / 0.3, whole)[0]
        assert slow.plain_s > 0.25 and slow.overlapped_s > 0.45, slow
        assert not slow.pays and "does not pay here" in str(slow), slow
