"""Optimizers whose momentum travels: what is sent, a variance that stands still, bad days,
checkpoints, DDP, every transport.
"""

import copy
import itertools
import logging
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from _ranks import each_rank, run_local
from _saved import parts_of, saved_and_loaded
from reference import optim as ref
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomp.ddp
from gradcomp import Block, GradcompError, GradientAverager, Identity, OneBit, PeerMismatch
from gradcomp.amp import DynamicLossScaler
from gradcomp.memory.momentum import Momentum
from gradcomp.onebit_sgd import AggregateAdagrad, DoubleBuffer
from gradcomp.optim import (
    OneBitAdam,
    OneBitLamb,
    SplitAdamW,
    SplitLAMB,
    ZeroOneAdam,
    fp32_state_dict,
    split_parameters,
)

FREEZE = 4
KINDS = {
    "adam": (OneBitAdam, {"lr": 0.02, "weight_decay": 0.1, "freeze_step": FREEZE}),
    "zero-one": (ZeroOneAdam, {"lr": 0.02, "var_freeze_step": 9, "var_update_scaler": 2}),
    "lamb": (OneBitLamb, {"lr": 0.02, "freeze_step": FREEZE}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind, params, **options):
    cls, usual = KINDS[kind]
    return cls(params, **usual | options)


def network():
    net = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 6))
    generator = torch.Generator().manual_seed(5)
    for p in net.parameters():  # torch's own generator belongs to all threads
        p.data.normal_(0.0, 0.2, generator=generator)
    return net


def loss_of(net, step, rank):
    x = torch.randn(8, 24, generator=torch.Generator().manual_seed(100 * step + rank))
    out = net(x.to(next(net.parameters()).dtype))
    return (out.float() - x[:, :6].tanh()).square().mean()


def backward(net, step, rank, scaled=lambda loss: loss):
    net.zero_grad()
    scaled(loss_of(net, step, rank)).backward()


def begin(comm, kind, codec, options=(), **more):
    """Return a network, its optimizer and an averager."""
    net = network()
    optimizer = make(kind, net.parameters(), **more)
    options = {"optimizer": optimizer, "min_numel": 0} | dict(options)
    return net, optimizer, GradientAverager(net, codec, comm=comm, **options)


def train(comm, kind, codec, steps, options=(), first=0, state=None, **more):
    """Return a network, the optimizer and the averager after some steps."""
    run = net, optimizer, averager = begin(comm, kind, codec, options, **more)
    for one, loaded in zip(run, state or (), strict=False):
        one.load_state_dict(loaded)
    for step in range(first, first + steps):
        backward(net, step, comm.rank)
        averager.average()
        optimizer.step()
    averager.check_replicas()
    return run


def trained(steps, cls, net=None, **options):
    """Return a network and its optimizer after some steps of one rank, without an exchange."""
    net = net or network()
    optimizer = cls(net.parameters(), **options)
    for step in range(steps):
        backward(net, step, 0)
        optimizer.step()
    return net, optimizer


def bits(net):
    return [p.detach().clone() for p in net.parameters()]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ---- what is sent ---------------------------------------------------------------------------


class Source:
    def __init__(self, momenta):
        self.momenta, self.arrived = momenta, set()

    def momentum_of(self, parameter):
        return self.momenta.get(parameter)

    def wants_gradients(self, step):
        return step < 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 64.0])
def test_a_gradient_becomes_what_it_makes_of_the_momentum(dtype, scale):
    n = 40_000  # more than a chunk
    parameters = {0: nn.Parameter(torch.zeros(200, 200)), 1: nn.Parameter(torch.zeros(7))}
    m = torch.randn(200, 200)
    source = Source({parameters[0]: (m, 0.9)})  # the other is another optimizer's
    state = Momentum(source, {}).keep({0: n, 1: 7}, parameters)
    state.scale = scale
    values = (torch.randn(n + 7) * scale).to(dtype)
    before = values.clone()
    assert not state.run(values, [(0, 0, n), (1, n, 7)])
    g = before[:n].float().numpy()
    wanted = g * np.float32(0.1 / scale) + np.float32(0.9) * m.numpy().ravel()
    assert torch.equal(values[:n], torch.from_numpy(wanted * np.float32(scale)).to(dtype))
    assert torch.equal(values[n:], before[n:])
    assert source.arrived == {parameters[0]}
    values[3] = math.inf
    assert state.run(values, [(0, 0, n)])


def test_momenta_lie_as_gradients_do_also_channels_last():
    p = nn.Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last))
    optimizer = OneBitAdam([p], freeze_step=1)
    optimizer.state[p]["exp_avg"].copy_(p.detach())
    state = optimizer.transform.keep({0: p.numel()}, {0: p})
    optimizer.arrived = set()
    values = torch.zeros(p.numel())
    state.run(values, [(0, 0, p.numel())])
    torch.testing.assert_close(values, 0.9 * p.detach().permute(0, 2, 3, 1).reshape(-1))


@every_kind
@pytest.mark.parametrize("world", [1, 2, 3])
def test_uncompressed_momenta_train_as_gradients_do(kind, world):
    """The mean of momenta is the momentum of the mean gradient, but for rounding."""
    exchanged = bits(run_local(world, train, kind, Identity(), 12)[0][0])
    net = network()
    optimizer = make(kind, net.parameters())  # nobody exchanges: it goes by its own count
    for step in range(12):
        net.zero_grad()
        (sum(loss_of(net, step, rank) for rank in range(world)) / world).backward()
        optimizer.step()
    for a, b in zip(exchanged, bits(net), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


@every_kind
@pytest.mark.parametrize("codec", [OneBit(), Block(4)], ids=repr)
@pytest.mark.parametrize(
    "options", [{}, {"precondition": True}, {"exchange": "all_gather"}], ids=str
)
@each_rank(3, "local")
def test_replicas_stay_equal_and_momenta_arrive_as_they_are(comm, kind, codec, options):
    net, optimizer, averager = train(comm, kind, codec, 9, options)
    backward(net, 9, comm.rank)
    averager.average()
    arrived = [p.grad.clone() for p in net.parameters()]
    assert optimizer.arrived == set(net.parameters())
    optimizer.step()
    assert same(arrived, [optimizer.state[p]["exp_avg"] for p in net.parameters()])
    averager.check_replicas()


def test_the_steps_are_adams_and_then_those_of_a_frozen_variance():
    """Bit for bit, from the reference: warm-up, then the averages of momenta divided by what the
    warm-up has left.
    """
    g = torch.randn(6, 50) * torch.logspace(-4, 0, 50)
    p = nn.Parameter(torch.randn(50))
    w, m, v = p.detach().numpy().copy(), np.zeros(50, np.float32), np.zeros(50, np.float32)
    optimizer = OneBitAdam([p], lr=0.1, freeze_step=3, floor=1e-6)
    for step in range(6):
        p.grad = g[step].clone()
        optimizer.arrived = {p} if step >= 3 else set()
        optimizer.step()
        if step < 3:
            options = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
            w, m, v = ref.adamw(w, g[step].numpy(), m, v, step + 1, **options)
        else:
            m = g[step].numpy()
            u = (np.float32(-(0.1 / (1 - 0.9 ** (step + 1)))) * m) / (
                np.sqrt(v) / np.float32((1 - 0.999**3) ** 0.5) + np.float32(1e-8)
            )
            w = w * np.float32(1 - 0.1 * 0.01) + u
        state = optimizer.state[p]
        for found, wanted in ((p.detach(), w), (state["exp_avg"], m), (state["exp_avg_sq"], v)):
            assert np.array_equal(found.numpy(), wanted)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"var_freeze_step": 40, "var_update_scaler": 2}, [0, 1, 2, 4, 6, 10, 14, 22, 30]),
        ({"var_freeze_step": 5}, [0, 1, 2, 3, 4]),
    ],
)
def test_zero_one_adam_renews_its_variance_ever_more_rarely(options, wanted):
    optimizer = ZeroOneAdam(network().parameters(), **options)
    assert [step for step in range(100) if optimizer.wants_gradients(step)] == wanted


@every_kind
@each_rank(2, "local")
def test_fp32_is_sent_at_the_steps_that_renew_the_variance_and_bits_at_all_others(comm, kind):
    net, optimizer, averager = begin(comm, kind, Block(4))
    for step in range(12):
        backward(net, step, comm.rank)
        before = averager.stats.bytes_sent
        averager.average()
        is_fp32 = averager.stats.bytes_sent - before > 3000
        assert is_fp32 == optimizer.wants_gradients(step)
        optimizer.step()


@every_kind
def test_split_weights_are_those_of_fp32(kind):
    ends = []
    for splits in (True, False):
        net = network()
        optimizer = make(kind, split_parameters(net) if splits else net.parameters())
        for p in net.parameters():
            p.grad = torch.full_like(p, 0.01).bfloat16().to(p.dtype)
        optimizer.step()
        optimizer.arrived = set(net.parameters())
        optimizer.step()
        ends.append(list(fp32_state_dict(net, optimizer).values()))
    assert same(*ends)


def test_lamb_keeps_the_ratio_of_its_warm_up_times_a_factor_that_moves_slowly():
    net = network()
    optimizer = OneBitLamb(net.parameters(), freeze_step=2, max_coeff=0.5, factor_threshold=0.1)
    p = next(net.parameters())
    factors = []
    for step in range(8):
        backward(net, step, 0)
        # what follows the warm-up is smaller: the fresh variance sinks below the frozen one
        p.grad *= 10.0 ** -(step >= 2)
        optimizer.step()
        factors.append(float(optimizer.state[p]["factor"]))
        assert float(optimizer.state[p]["coefficient"]) <= 0.5
    assert factors[:2] == [0.0, 0.0] and factors[-1] > 1.0
    moves = itertools.pairwise([1.0, *factors[2:]])
    assert all(1.0 <= later / earlier <= 1.1 + 1e-6 for earlier, later in moves)


# ---- DDP ------------------------------------------------------------------------------------


def exchanged(kind, options, by_hook):
    """Train under DDP or with an averager; return the weights, and what DDP's state says."""
    net = DDP(network()) if by_hook else network()
    optimizer = make(kind, net.parameters())
    register = gradcomp.ddp.register if by_hook else GradientAverager
    state = register(net, OneBit(), optimizer=optimizer, min_numel=0, **options)
    line = state.describe()
    for step in range(9):
        backward(net, step, dist.get_rank())
        if not by_hook:
            state.average()
        optimizer.step()
    state.check_replicas()
    state.close()
    return b"".join(p.numpy().tobytes() for p in bits(net)), line


@every_kind
@pytest.mark.parametrize("options", [{}, {"precondition": True}], ids=str)
def test_ddp_and_the_averager_give_the_same_bits(kind, options, ranks):
    runs = [w for hook in (True, False) for w, _ in ranks(2, exchanged, kind, options, hook)]
    assert len(set(runs)) == 1


def test_the_line_says_what_travels_and_updates_are_fused(gloo):
    line = gloo(2, exchanged, "adam", {}, True)[0][1]
    assert re.search(r"Momentum\(optimizer='OneBitAdam', freeze_step=4, floor=0.01\)", line)
    assert "updates go straight from payloads" in line
    assert "are not fused: OneBitLamb" in gloo(2, exchanged, "lamb", {}, True)[0][1]


# ---- bad days -------------------------------------------------------------------------------


def one(cls, **options):
    """Return a call that makes an optimizer with one group; what its class does not take goes into
    the group.
    """
    group = {"params": list(network().parameters())}
    group |= {name: options.pop(name) for name in ("maximize", "variant") if name in options}
    return lambda comm: cls([group], **options)


def adam(**options):
    return one(OneBitAdam, **{"freeze_step": 1} | options)


def averager(**options):
    return lambda comm: begin(comm, "adam", OneBit(), options)


def loads_nvlamb(comm):
    saved = SplitLAMB(network().parameters(), variant="nvlamb").state_dict()
    OneBitLamb(network().parameters(), freeze_step=2).load_state_dict(saved)


def late(comm):
    net, _, averager = begin(comm, "adam", OneBit())
    backward(net, 0, comm.rank)
    averager.average_delayed()


def buffered(comm):
    net = network()
    DoubleBuffer(net, make("adam", net.parameters()), OneBit(), comm=comm)


def sparse(comm):
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = OneBitAdam(table.parameters(), freeze_step=1)
    table(torch.tensor([1, 2])).sum().backward()
    optimizer.step()


REFUSED = [
    (adam(freeze_step=0), "freeze_step must be an integer of at least 1, got 0"),
    (adam(freeze_step=2.5), "freeze_step must be an integer"),
    (adam(freeze_step=9, steps=9), "freeze_step=9 is not below steps=9: the run would end before"),
    (one(ZeroOneAdam, var_freeze_step=9, steps=8), "var_freeze_step=9 is not below steps=8"),
    (one(ZeroOneAdam, var_freeze_step=9, var_update_scaler=0), "var_update_scaler must be"),
    (adam(floor=0.0), "floor must be a finite number above 0 and at most 1, got 0.0"),
    (adam(betas=(0.9, 1.0)), "betas"),
    (adam(maximize=True), "maximize must be False"),
    (one(OneBitLamb, freeze_step=1, min_coeff=2, max_coeff=1), r"max_coeff .* at least 2, got 1"),
    (one(OneBitLamb, freeze_step=1, coeff_beta=1.0), "coeff_beta"),
    (one(OneBitLamb, freeze_step=1, variant="nvlamb"), "variant must be 'lamb', got 'nvlamb'"),
    (loads_nvlamb, "nvlamb"),
    (averager(warmup_steps=5), "warmup_steps=5 cannot be used with OneBitAdam"),
    (
        averager(advanced=gradcomp.Advanced(transform=AggregateAdagrad())),
        "AggregateAdagrad.* cannot be used with OneBitAdam",
    ),
    (averager(exchange="hierarchical"), "hierarchical"),
    *((averager(optimizer=bad), "optimizer must be an optimizer") for bad in (5, "adam", [])),
    (averager(optimizer=make("adam", network().parameters())), "updates no parameter of this mod"),
    (buffered, "DoubleBuffer averages one step late"),
    (late, "one step late"),
    (sparse, "sparse"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_what_is_refused(call, words):
    with pytest.raises((ValueError, TypeError, GradcompError), match=words):
        run_local(1, call)


def test_a_variance_that_is_still_zero_is_named_and_nothing_is_changed():
    net = network()
    optimizer = OneBitAdam(net.named_parameters(), freeze_step=1)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    net[2].weight.grad = torch.zeros_like(net[2].weight)
    optimizer.step()
    before = bits(net)
    optimizer.step()  # no gradient yet: nothing to divide
    net[2].weight.grad = torch.ones_like(net[2].weight)
    assert not same(before, bits(net))
    before = bits(net)
    words = r"variance of parameter '2.weight' is still zero after \d steps of warm-up"
    with pytest.raises(GradcompError, match=words):
        optimizer.step()
    assert same(before, bits(net))


def test_elements_without_a_gradient_in_the_warm_up_are_not_divided_by_eps():
    p = nn.Parameter(torch.zeros(64))
    optimizer = OneBitAdam([p], lr=1.0, freeze_step=1, weight_decay=0.0, floor=0.01)
    p.grad = torch.cat([torch.ones(32), torch.zeros(32)])
    optimizer.step()
    before = p.detach().clone()
    optimizer.arrived = {p}
    p.grad = torch.full((64,), 0.1)
    optimizer.step()
    moved = (p.detach() - before).abs()
    assert float(moved.max()) < 200 * float(moved[:32].max())  # 1e6 without a floor
    seen = optimizer.state[p]["exp_avg_sq"].clone()
    optimizer.step()
    assert torch.equal(seen, optimizer.state[p]["exp_avg_sq"])  # raised once


@each_rank(2, "local")
def test_a_closure_may_exchange(comm):
    net, optimizer, averager = begin(comm, "adam", OneBit())
    for step in range(8):

        def closure(step=step):
            backward(net, step, comm.rank)
            averager.average()
            return step

        assert optimizer.step(closure) == step
    assert same(bits(net), bits(train(comm.duplicate(30), "adam", OneBit(), 8)[0]))


def with_uneven_inputs():
    net = DDP(network())
    optimizer = make("adam", net.parameters())
    state = gradcomp.ddp.register(net, OneBit(), optimizer=optimizer, min_numel=0, timeout_s=20)
    try:
        with net.join():
            for step in range(9 if dist.get_rank() == 0 else 6):
                backward(net, step, dist.get_rank())
                optimizer.step()
    except (GradcompError, RuntimeError) as error:
        return str(error)
    finally:
        state.close()
    return "went on"


def test_a_rank_that_has_run_out_of_data_is_refused(gloo):
    first, second = gloo(2, with_uneven_inputs)
    assert "Join: a rank that has run out of data steps no more" in first + second
    assert "went on" not in (first, second)


@each_rank(2, "local")
def test_ranks_with_other_warm_ups_hear_of_it(comm):
    with pytest.raises(PeerMismatch, match="transform"):
        train(comm, "adam", OneBit(), 3, freeze_step=4 + comm.rank)


@pytest.mark.parametrize(("steps", "says"), [(3, 1), (5, 0)])
def test_a_run_that_ended_in_its_warm_up_says_so(caplog, steps, says):
    with caplog.at_level(logging.WARNING, "gradcomp"):
        run_local(2, lambda comm: train(comm, "adam", OneBit(), steps)[2].close())
    found = [r.getMessage() for r in caplog.records]
    assert sum("nothing was compressed" in text for text in found) == says, found


def test_steps_that_a_loss_scaler_skips_leave_no_trace():
    """Also: momenta of scaled gradients are those of gradients, where the scale is a power of 2."""

    def run(comm, spoiled):
        scaler = DynamicLossScaler(2.0**10)
        net, optimizer, averager = begin(comm, "adam", Block(4), {"grad_scaler": scaler})
        for step in range(8):
            for attempt in range(1 + (step in spoiled)):
                backward(net, step, comm.rank, scaler.scale)
                if step in spoiled and attempt == 0 and comm.rank == 1:
                    net[0].weight.grad[3, 3] = math.nan
                averager.average()
                scaler.step(optimizer)
                scaler.update()
                if scaler.last_step_skipped:
                    averager.discard_step()
        assert all(float(optimizer.state[p]["step"]) == 8.0 for p in net.parameters())
        return bits(net)

    good, bad = run_local(2, run, ())[0], run_local(2, run, (6,))[0]
    for a, b in zip(good, bad, strict=True):
        # random draws there are none: only the rounding of another scale
        torch.testing.assert_close(a, b)


# ---- checkpoints ----------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("first", [2, 7])
def test_a_run_resumes_bit_for_bit_in_the_warm_up_and_after_it(kind, first):
    given = kind, OneBit()

    def halves(comm):
        run = train(comm, *given, first, {"precondition": True})
        state = saved_and_loaded([part.state_dict() for part in run])
        return bits(train(comm, *given, 12 - first, {"precondition": True}, first, state)[0])

    whole = run_local(2, train, *given, 12, {"precondition": True})[0][0]
    assert same(bits(whole), run_local(2, halves)[0])


@pytest.mark.parametrize("theirs", [torch.optim.AdamW, SplitAdamW])
def test_a_checkpoint_of_adam_is_taken_over_and_back(theirs):
    net, adam = trained(5, theirs, lr=0.02)
    own = OneBitAdam(net.parameters(), freeze_step=2)
    own.load_state_dict(adam.state_dict())
    for p in net.parameters():
        assert torch.equal(own.state[p]["exp_avg_sq"], adam.state[p]["exp_avg_sq"])
        assert float(own.state[p]["variance_steps"]) == 5.0 == float(own.state[p]["step"])
    own.arrived = set(net.parameters())
    own.step()  # frozen at once: the variance is there
    back = theirs(net.parameters(), lr=0.02)
    back.load_state_dict(own.state_dict())
    for p in net.parameters():
        assert torch.equal(own.state[p]["exp_avg"], back.state[p]["exp_avg"])
    back.step()


def test_a_checkpoint_of_lamb_is_taken_over_and_needs_some_warm_up():
    net, lamb = trained(1, SplitLAMB, lr=0.02)
    own, momenta = OneBitLamb(net.named_parameters(), freeze_step=2), set(net.parameters())
    own.load_state_dict(lamb.state_dict())
    own.arrived = momenta
    words = r"parameter '0.weight' has had no warm-up: its ratio of norms is not known"
    with pytest.raises(GradcompError, match=words):
        own.step()
    for arrived in (set(), momenta):
        own.arrived = arrived
        own.step()
    back = SplitLAMB(net.parameters(), lr=0.02)
    back.load_state_dict(own.state_dict())
    back.step()
    truncated = own.state_dict()
    del truncated["state"][0]["fresh_sq"]
    with pytest.raises(ValueError, match="fresh_sq"):
        OneBitLamb(net.parameters(), freeze_step=2).load_state_dict(truncated)


@every_kind
def test_copies_and_pickles_go_on(kind):
    cls, options = KINDS[kind]
    run = trained(6, cls, **options)
    runs = run, copy.deepcopy(run), saved_and_loaded(run, weights_only=False)
    for net, optimizer in runs:
        backward(net, 6, 0)
        optimizer.step()
    assert all(same(bits(run[0]), bits(net)) for net, _ in runs)


def move(net, optimizer, step):
    """Make a step; return how far it went."""
    before = bits(net)
    backward(net, step, 0)
    optimizer.step()
    return math.hypot(*(float((a - b).norm()) for a, b in zip(before, bits(net), strict=True)))


@pytest.mark.parametrize(
    ("theirs", "plain"),
    [(SplitAdamW, False), (torch.optim.AdamW, True), (torch.optim.AdamW, False)],
)
def test_adam_goes_on_with_steps_of_the_same_size_and_back(theirs, plain):
    """Its bias correction is by its steps, and the variance has seen the warm-up only. torch's own
    keeps the counters that it does not know; they are not believed.
    """
    small = {"lr": 0.01, "weight_decay": 0.0}
    net, own = trained(60, OneBitAdam, freeze_step=5, **small)
    adam, kept = theirs(net.parameters(), **small), copy.deepcopy(net)
    adam.load_state_dict(own.plain_state_dict() if plain else own.state_dict())
    mine = OneBitAdam(kept.parameters(), freeze_step=5, **small)
    mine.load_state_dict(own.state_dict())
    moved = move(net, adam, 60)
    if plain or theirs is SplitAdamW:
        assert moved == pytest.approx(move(kept, mine, 60), rel=0.05)
    back = OneBitAdam(net.parameters(), freeze_step=5)
    back.load_state_dict(adam.state_dict())
    p = next(net.parameters())
    assert float(back.state[p]["variance_steps"]) == 61.0 == float(back.state[p]["step"])
    assert torch.equal(back.state[p]["exp_avg_sq"], adam.state[p]["exp_avg_sq"])


# ---- exchanges and steps that are not one for one ------------------------------------------------


@each_rank(2, "local")
def test_a_step_that_no_exchange_precedes_is_of_gradients(comm):
    net, optimizer, averager = train(comm, "adam", Identity(), 6)
    averager.close()
    p = next(net.parameters())
    m = optimizer.state[p]["exp_avg"].clone()
    backward(net, 6, 0)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], 0.9 * m + 0.1 * p.grad)


def grads_of(net, step, rank):
    return torch.autograd.grad(loss_of(net, step, rank), list(net.parameters()))


TWICE = r"p\.grad holds the momentum of the exchange before"


def exchange_twice(net, averager, rank):
    before = bits(net)
    backward(net, 10, rank)
    averager.average()
    for again in (loss_of(net, 11, rank).backward, averager.average):
        with pytest.raises(GradcompError, match=TWICE):
            again()
    assert same(before, bits(net))
    net.zero_grad()


def leave_out(net, averager, rank, how):
    backward(net, 99, rank)
    averager.average()
    grads_of(net, 98, rank)  # adds to no p.grad
    if how == "data":
        for p in net.parameters():
            p.grad.data.zero_()
    elif how != "another gradient":
        net.zero_grad(set_to_none=how == "none")


@every_kind
@pytest.mark.parametrize("how", ["twice", "none", "zeros", "data", "another gradient"])
def test_an_exchange_without_a_step(kind, how):
    """A second one took the momentum that the first had left in p.grad for a gradient, without a
    word; it is refused. Gradients that were dropped or zeroed after an exchange are none of its
    momenta, whoever did it.
    """

    def run(comm, how, after):
        net, optimizer, averager = train(comm, kind, Identity(), 10)
        net.zero_grad()
        if how == "twice":
            exchange_twice(net, averager, comm.rank)
        elif how:
            leave_out(net, averager, comm.rank, how)
        for step in range(12, 14):  # all is well after it
            if after == "another gradient":
                own = grads_of(net, step, comm.rank)
                for p, gradient in zip(net.parameters(), own, strict=True):
                    p.grad = gradient
            else:
                loss_of(net, step, comm.rank).backward()
            averager.average()
            optimizer.step()
            net.zero_grad()
        averager.check_replicas()
        return bits(net)

    assert same(run_local(2, run, how, how)[0], run_local(2, run, "", how)[0])


@each_rank(2, "local")
def test_exchanges_of_the_warm_up_add_up(comm):
    net, _, averager = begin(comm, "adam", Identity())
    found = []
    for steps in ((0,), (1,), (0, 1)):
        net.zero_grad()
        for step in steps:
            loss_of(net, step, comm.rank).backward()
            averager.average()
        found.append([p.grad.clone() for p in net.parameters()])
    for first, second, together in zip(*found, strict=True):
        torch.testing.assert_close(together, first + second)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("view", [True, False])
@each_rank(2)
def test_two_backwards_under_ddp_before_a_step_are_refused(fused, view):
    net, rank = network(), dist.get_rank()
    optimizer = make("adam", split_parameters(net))
    model = DDP(net, gradient_as_bucket_view=view)
    unfused = {"advanced": gradcomp.Advanced(transform=optimizer.transform)}
    given = {"optimizer": optimizer} if fused else unfused
    state = gradcomp.ddp.register(model, "identity", min_numel=0, **given)
    for step in range(FREEZE + 1):
        backward(model, step, rank)
        optimizer.step()
    backward(model, FREEZE + 1, rank)
    with pytest.raises(GradcompError, match="holds the momentum of the exchange before"):
        loss_of(model, FREEZE + 2, rank).backward()
    state.close()


def test_one_optimizer_for_two_models():
    def run(comm, apart):
        nets = [network(), network()]
        params = [p for net in nets for p in net.parameters()]
        optimizer = OneBitAdam(params, lr=0.02, freeze_step=2)
        parts = [[(f"{k}.{n}", p) for n, p in net.named_parameters()] for k, net in enumerate(nets)]
        comms = [comm, comm.duplicate(30)] if apart else [comm]
        groups = parts if apart else [parts[0] + parts[1]]
        averagers = [
            GradientAverager(g, Identity(), comm=c, optimizer=optimizer, min_numel=0)
            for g, c in zip(groups, comms, strict=True)
        ]
        for step in range(6):
            for k, net in enumerate(nets):
                backward(net, 10 * k + step, comm.rank)
            for averager in averagers:
                averager.average()
            optimizer.step()
        return [p for net in nets for p in bits(net)]

    assert same(run_local(2, run, True)[0], run_local(2, run, False)[0])


@every_kind
@each_rank(2, "local")
def test_tensors_without_a_gradient_or_without_elements_do_no_harm(comm, kind):
    net = network()
    values = {"still": torch.ones(20), "empty": torch.ones(0, 4), "late": torch.zeros(20)}
    more = {name: nn.Parameter(value) for name, value in values.items()}
    optimizer = make(kind, [*net.parameters(), *more.values()])
    named = [*net.named_parameters(), *more.items()]
    averager = GradientAverager(named, OneBit(), comm=comm, optimizer=optimizer, min_numel=0)
    for step in range(9):
        backward(net, step, comm.rank)
        for name, p in more.items():
            p.grad = torch.full_like(p, float(name == "late"))
        averager.average()
        optimizer.step()
    averager.check_replicas()
    assert all(bool(torch.isfinite(p).all()) for _, p in named)


def test_a_packed_momentum_of_a_tensor_that_had_no_gradient_is_found_before_it_moves_anything():
    p = nn.Parameter(torch.ones(20))
    optimizer = OneBitAdam([("late", p)], freeze_step=1, weight_decay=0.0)
    entry = SimpleNamespace(gradient=None, parameter=p, state=optimizer.state[p], step=2)
    optimizer.arrived = {p}
    optimizer.prepare([entry])
    assert bool(torch.isinf(optimizer.state[p]["exp_avg_sq"]).all())
    optimizer.prepare([entry])  # it was 0, then
    optimizer.state[p]["exp_avg"].fill_(0.1)
    with pytest.raises(GradcompError, match="variance of parameter 'late' is still zero"):
        optimizer.prepare([entry])
    optimizer.arrived = set()
    optimizer.prepare([entry])  # averaged in fp32 again: it is learnt
    assert not bool(optimizer.state[p]["exp_avg_sq"].any())


def test_one_rank_pays_what_momenta_owe_in_full():
    states = run_local(2, lambda comm: train(comm, "adam", OneBit(), 8)[2].state_dict())
    owed = sum(parts_of(state)["residual"]["0.weight"] for state in states) / 2
    net, _, averager = run_local(1, begin, "adam", OneBit())[0]
    averager.load_state_dict(states)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    averager.average()
    torch.testing.assert_close(net[0].weight.grad.reshape(-1), owed.reshape(-1))


@each_rank(2, "local")
def test_a_beta_that_a_schedule_has_moved_resumes_and_ranks_compare_it(comm):
    state = train(comm, "adam", OneBit(), 6)[2].state_dict()
    begin(comm, "adam", OneBit(), betas=(0.85, 0.999))[2].load_state_dict(state)
    with pytest.raises(PeerMismatch, match="transform"):
        train(comm, "adam", OneBit(), 1, betas=(0.9 - 0.01 * comm.rank, 0.999))
