"""Updates straight from payloads: bit for bit the run that writes gradients first, and no way to
use local gradients.
"""

import copy
import io
import itertools

import pytest
import torch
import torch.distributed as dist
from _kinds import check_kinds
from _ranks import each_rank
from _saved import parts_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomp.ddp
from gradcomp import EntropyCoded, GradcompError, OneBit, PeerMismatch, Ternary, TernGrad
from gradcomp.amp import DynamicLossScaler
from gradcomp.optim import (
    SplitAdagrad,
    SplitAdamW,
    SplitLAMB,
    SplitSGD,
    fp32_state_dict,
    split_parameters,
)
from gradcomp.optim.placeholder import Placeholder

OPTIMIZERS = {
    "sgd": lambda p: SplitSGD(p, lr=0.1),
    "momentum": lambda p: SplitSGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adagrad": lambda p: SplitAdagrad(p, lr=0.05, weight_decay=0.01),
    "adamw": lambda p: SplitAdamW(p, lr=0.01),
    "lamb": lambda p: SplitLAMB(p, lr=0.01),
    "nvlamb": lambda p: SplitLAMB(p, lr=0.01, variant="nvlamb"),
}
CODECS = {
    "terngrad exact": (TernGrad(), "reduce_scatter"),
    "terngrad gather": (TernGrad(group="row"), "all_gather"),
    "terngrad own": (TernGrad(scale="own"), "all_gather"),
    "terngrad requantize": (TernGrad(second_phase="requantize"), "reduce_scatter"),
    "terngrad bf16": (TernGrad(second_phase="bf16"), "reduce_scatter"),
    "terngrad fp32": (TernGrad(second_phase="fp32"), "reduce_scatter"),
    "ternary gather": (Ternary(residual_decay=0.25), "all_gather"),
    "ternary scatter": (Ternary(), "reduce_scatter"),
    "onebit gather": (OneBit(), "all_gather"),
    "onebit scatter": (OneBit(group=33), "reduce_scatter"),
    "entropy gather": (EntropyCoded(2.2, residual_decay=0.25), "all_gather"),
    "entropy scatter": (EntropyCoded(1.25), "reduce_scatter"),
    "identity": ("identity", "reduce_scatter"),
    "hierarchical": (OneBit(), "hierarchical"),
}
check_kinds(CODECS, without=("block2", "block4", "block8", "bfloat16"))


class Net(nn.Module):
    """Two layers, a norm that stays fp32 (gradients of both dtypes), and one that only even
    steps use.
    """

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(30, 70), nn.LayerNorm(70)
        self.side, self.last = nn.Linear(70, 70), nn.Linear(70, 5)

    def forward(self, x, step=0):
        x = self.norm(self.first(x).relu().float()).bfloat16()
        return self.last(self.side(x) if step % 2 == 0 else x).float()


def made(make, kind=Net, predicate=lambda name, p: not name.startswith("norm"), **options):
    """Return a net and its optimizer, the same on every rank."""
    torch.manual_seed(0)
    net = kind()
    return net, OPTIMIZERS[make](split_parameters(net, predicate=predicate, **options))


def sgd_on(net, codec="onebit", **options):
    """Return DDP, optimizer and state of a net whose updates are fused."""
    model, optimizer = DDP(net), SplitSGD(net.parameters(), lr=0.5)
    options = {"optimizer": optimizer, "min_numel": 0} | options
    return model, optimizer, gradcomp.ddp.register(model, codec, **options)


def batch(step):
    return torch.randn(
        16, 30, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank())
    )


def backward(model, step, *args):
    x = batch(step)
    out = model(x.to(next(model.parameters()).dtype), *args)
    nn.functional.cross_entropy(out.float(), x[:, :5].argmax(1)).backward()


def as_bytes(state, prefix=""):
    return {f"{prefix}{k}": v.numpy().tobytes() for k, v in state.items()}


def bits(net, optimizer, state=None):
    """Return the joined weights, all state of the optimizer and residuals, as bytes."""
    found = as_bytes(fp32_state_dict(net, optimizer))
    for name, p in net.named_parameters():
        found |= as_bytes(optimizer.state[p], f"{name}: ")
    if state is not None:
        found |= as_bytes(parts_of(state.state_dict())["residual"], "residual of ")
    return found


def differing(one, two):
    return [key for key in one if one[key] != two[key]]


def closed(state):
    state.check_replicas()
    state.close()


def train(
    codec, make, fused, steps, ddp=(), between=None, rounding="truncate", accumulate=False, **more
):
    """Train on this rank; return the joined weights, all state and residuals, and how often
    gradients were packed.
    """
    net, optimizer = made(make, rounding=rounding)
    model = DDP(net, bucket_cap_mb=0.005, **dict(ddp))
    options = {"optimizer": optimizer if fused else None, "min_numel": 100} | more
    state = gradcomp.ddp.register(model, CODECS[codec][0], **options)
    packed = 0
    for step in range(steps):
        optimizer.zero_grad()
        if accumulate:
            with model.no_sync():
                backward(model, 100 + step)
        backward(model, step, step if model.find_unused_parameters else 0)
        packed += sum(p.grad is not None and not any(p.grad.stride()) for p in net.parameters())
        if between is not None:
            between(step, net, optimizer, state)
        optimizer.step()
    found, sent, line = bits(net, optimizer, state), state.stats.bytes_sent, state.describe()
    assert state.step == steps  # every backward is one, also the first of a static graph
    closed(state)
    assert optimizer._packed == []
    return found, packed, sent, line


def clip(step, net, optimizer, state):
    state.materialize_gradients()
    state.materialize_gradients()  # a second time changes nothing
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)


def clip_some(step, net, optimizer, state):
    """Materialized at some steps only."""
    if step % 2:
        clip(step, net, optimizer, state)


def write_one(step, net, optimizer, state):
    """A gradient of the user's own in place of one placeholder."""
    net.side.bias.grad = torch.full_like(net.side.bias, 0.25)


VIEW, UNUSED = {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}
RUNS = {  # ranks, codec, optimizer, options, tensors that are packed at each of 5 steps
    f"{world}-{codec}": (world, codec, "momentum", {"exchange": exchange, "ddp": VIEW}, 8)
    for codec, (_, exchange) in CODECS.items()
    for world in ((2, 3) if exchange != "hierarchical" else (2, 4))
}
for make, rounding in itertools.product(OPTIMIZERS, ("truncate", "nearest")):
    least = 0 if make == "nvlamb" else 8
    RUNS[f"{rounding} {make}"] = 2, "terngrad exact", make, {"rounding": rounding}, least
for make, between in itertools.product(("momentum", "lamb"), (clip, clip_some, write_one)):
    RUNS[f"{between.__name__} {make}"] = 2, "terngrad exact", make, {"between": between}, 8
for options, least in (
    ({"ddp": UNUSED}, 6),
    ({"ddp": {"static_graph": True}}, 8),
    ({"warmup_steps": 2}, 6),
    ({"atomic_steps": True}, 8),
    ({"exclude": ["first.weight"]}, 8),
    ({"accumulate": True}, 8),
    ({"accumulate": True, "ddp": VIEW}, 8),
):
    RUNS[str(options)] = 2, "onebit gather", "momentum", options, least


def equal_unfused(codec, make, steps, options, least):
    plain, none, plain_sent, _ = train(codec, make, False, steps, **options)
    found, packed, sent, line = train(codec, make, True, steps, **options)
    assert differing(plain, found) == [] and sent == plain_sent
    assert none == 0 and packed >= least * steps and (packed > 0) is (make != "nvlamb")
    reason = "updates are not fused: SplitLAMB with these options needs the gradients twice"
    assert (reason if make == "nvlamb" else "straight from payloads") in line


# Every codec runs on three or four ranks, one of them on two, too.
LATER = {run for run in RUNS if run.startswith("2-") and run != "2-terngrad exact"}


@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=[pytest.mark.long] * (run in LATER)) for run in RUNS]
)
def test_fused_runs_equal_unfused_ones(gloo, run):
    world, codec, make, options, least = RUNS[run]
    if options.get("exchange") == "hierarchical":
        nodes = [[0, 1], [2, 3]] if world == 4 else [[0], [1]]
        options = options | {"advanced": gradcomp.Advanced(nodes=nodes)}
    gloo(world, equal_unfused, codec, make, 5, options, least)


def test_over_every_transport(ranks):
    ranks(2, equal_unfused, "onebit gather", "sgd", 3, {}, 8)


# ---- clipping ------------------------------------------------------------------------------------


def clipped(optimizer_name, exchange, max_norm):
    """Compare clipped fused updates with unfused ones whose gradients are multiplied by the same
    factor, and the norms with torch's; return the norms.
    """
    runs, norms = [], []
    for fused in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 5))
        optimizer = OPTIMIZERS[optimizer_name](net.parameters())
        model = DDP(net, bucket_cap_mb=0.004)
        options = {"optimizer": optimizer if fused else None, "exchange": exchange}
        codec = OneBit(residual_decay=0.5)  # by default it depends on the optimizer
        state = gradcomp.ddp.register(model, codec, min_numel=100, **options)
        for step in range(4):
            optimizer.zero_grad()
            backward(model, step)
            if fused:
                assert any(isinstance(p.grad, Placeholder) for p in net.parameters())
                norms.append(state.clip_grad_norm_(max_norm))
            else:
                total = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()])
                torch.testing.assert_close(total, norms[step], rtol=1e-5, atol=0.0)
                for p in net.parameters():
                    p.grad.mul_(min(max_norm / (float(norms[step]) + 1e-6), 1.0))
            optimizer.step()
        closed(state)
        runs.append(bits(net, optimizer))
    assert differing(*runs) == []
    return [float(norm).hex() for norm in norms]


@pytest.mark.parametrize("exchange", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "nvlamb"])
def test_packed_gradients_are_clipped(gloo, optimizer, exchange):
    """One factor for all ranks, which the update multiplies gradients by; nothing changes where
    the norm is small.
    """
    one, other = gloo(2, clipped, optimizer, exchange, 0.05)
    assert one == other and max(map(float.fromhex, one)) > 0.05
    gloo(2, clipped, optimizer, exchange, 1e4)


@each_rank(2)
def test_gradients_that_are_not_packed_are_clipped_by_torch():
    net = nn.Linear(4, 3)
    model, optimizer = DDP(net), SplitSGD(net.parameters(), lr=0.5)
    state = gradcomp.ddp.register(model, "onebit", min_numel=0)
    model(torch.ones(1, 4)).sum().backward()
    twin = copy.deepcopy(net)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        q.grad = p.grad.clone()
    wanted = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    assert float(state.clip_grad_norm_(0.1)) == pytest.approx(float(wanted), rel=1e-6)
    optimizer.step()
    state.close()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=0)


@each_rank(2)
def test_clipping_twice_beside_written_gradients_and_nan():
    """Of 12 weights and 3 biases with gradients of 1."""
    net = nn.Linear(4, 3)
    model, _, state = sgd_on(net)
    x, root, rest = torch.ones(1, 4), 15**0.5, (12 / 15) ** 0.5

    def close(found, wanted):
        return float(found) == pytest.approx(wanted, abs=1e-4)

    model(x).sum().backward()
    for limit in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="max_norm must not be negative"):
            state.clip_grad_norm_(limit)
    assert close(state.clip_grad_norm_(2.0), root)
    assert close(state.clip_grad_norm_(1.0), 2.0)  # of what the first has left
    net.bias.grad.zero_()  # a written gradient beside packed ones
    assert close(state.clip_grad_norm_(100.0), rest)
    state.materialize_gradients()
    assert close(net.weight.grad.norm(), rest)
    assert close(state.clip_grad_norm_(0.5), rest)
    assert close(net.weight.grad.norm(), 0.5)
    model.zero_grad()
    model(x).sum().backward()  # the factor is of one backward
    assert close(state.clip_grad_norm_(100.0), root)
    model.zero_grad()
    model(x * float("nan")).sum().backward()
    with pytest.raises(RuntimeError, match="the norm of the gradients is nan"):
        state.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert state.clip_grad_norm_(1.0).isnan()
    state.close()


# ---- gradients that are looked at, written to, copied --------------------------------------------


def bad_day(step, net, optimizer, state):
    """What users do to gradients between backward and step."""
    params = list(net.parameters())
    assert all(p.grad.shape == p.shape and p.grad.dtype == p.dtype for p in params)
    assert all(torch.isnan(p.grad).all() for p in params)
    assert torch.isnan(torch.nn.utils.get_total_norm([p.grad for p in params]))
    before = [p.detach().clone() for p in params]
    for write in (
        lambda: torch.nn.utils.clip_grad_norm_(params, 1.0),
        lambda: params[0].grad.mul_(0.5),
    ):
        with pytest.raises(RuntimeError, match="single memory location"):
            write()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError):  # or it would skip for ever
        scaler.unscale_(optimizer)
    assert all(torch.equal(a, p) for a, p in zip(before, params, strict=True))
    after(step, net, optimizer, state)
    assert step != 2 or not any(p.grad.any() for p in params)


def after(step, net, optimizer, state):
    if step == 2:
        optimizer.zero_grad(set_to_none=False)
    if step == 3:
        optimizer.step()  # and once more after this, from the same payloads


@each_rank(2)
def test_placeholders_cannot_be_used():
    plain, *_ = train("onebit gather", "momentum", False, 5, between=after)
    found, *_ = train("onebit gather", "momentum", True, 5, between=bad_day)
    assert differing(plain, found) == []


WRITES = {
    "row": lambda grad: grad[0].zero_(),
    "rows": lambda grad: grad.data[:2].zero_(),
    "element": lambda grad: grad.__setitem__((0, 0), 0.0),
    "mask": lambda grad: grad.masked_fill_(torch.tensor([True, False, False, False]), 0),
    "indices": lambda grad: grad.data.__setitem__(torch.tensor([0, 2]), 0),
    "fill": lambda grad: grad.data.fill_(0.5),
    "data": lambda grad: setattr(grad, "data", torch.ones(3, 4)),
    "numpy": lambda grad: grad.numpy().fill(0),
}
# torch lets one element be written to, and NaN times 0.5 is NaN: the scaling was lost
ONE_ELEMENT = {
    "scaled data": lambda grad: grad.data.mul_(0.5),
    "scaled": lambda grad: grad.mul_(0.5),
    "negated": lambda grad: grad.data.neg_(),
    "divided": lambda grad: torch._foreach_div_([grad.data], 2.0),
}


@pytest.mark.parametrize("then", ["step", "forward", "clip"])
@pytest.mark.parametrize("write", WRITES | ONE_ELEMENT)
@each_rank(2)
def test_a_gradient_that_is_written_to_is_refused(write, then):
    """A placeholder has one element: a zero in a row of it must not pass for a gradient of
    zeros, or be overlooked.
    """
    inputs, outputs = (1, 1) if write in ONE_ELEMENT else (4, 3)
    net = nn.Linear(inputs, outputs, bias=inputs > 1)
    model, optimizer, state = sgd_on(net)
    x = torch.ones(1, inputs)
    model(x).sum().backward()
    before = net.weight.detach().clone()
    (WRITES | ONE_ELEMENT)[write](net.weight.grad)
    clip = state.materialize_gradients
    call = {"step": optimizer.step, "forward": lambda: model(x), "clip": clip}[then]
    with pytest.raises(GradcompError, match=r"'weight' was written to while it was still packed"):
        call()
    assert torch.equal(before, net.weight)
    model.zero_grad(set_to_none=False)  # all is well after it
    model(x).sum().backward()
    optimizer.step()
    state.close()
    assert (before - net.weight).unique().tolist() == [0.5]


@each_rank(2)
def test_copies_of_a_placeholder_are_plain_tensors():
    net = nn.Linear(4, 3)
    model, optimizer, state = sgd_on(net)
    model(torch.ones(1, 4)).sum().backward()
    grad, file = net.weight.grad, io.BytesIO()
    torch.save(grad, file)
    file.seek(0)
    for one in (copy.deepcopy(grad), grad.clone(), torch.load(file), grad * 2, grad.double()):
        assert type(one) is torch.Tensor and one.isnan().all()
        one.zero_()
    assert grad.to_sparse().layout == torch.sparse_coo and grad.to("meta").is_meta
    before = net.weight.detach().clone()
    optimizer.step()
    state.close()
    assert (before - net.weight).unique().tolist() == [0.5]


# ---- gradients that are zeroed -------------------------------------------------------------------


def _each(zero):
    """Return a way to zero that does the same to every gradient that is there."""

    def zeroes(model, optimizer):
        for number, p in enumerate(model.parameters()):
            if p.grad is not None:
                zero(p, number)

    return zeroes


def _at_once(model, optimizer):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if grads:
        torch._foreach_zero_(grads)


def _by_another(**options):
    return lambda model, optimizer: torch.optim.SGD(model.parameters(), **options).zero_grad(
        set_to_none=False
    )


def _view(p, number):
    """One of the views of a whole gradient, whatever their shape."""
    return (p.grad.view(-1), p.grad[...], p.grad.detach(), p.grad.data)[number % 4]


ZEROS = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer to zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model to zeros": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "module to zeros": lambda model, optimizer: model.module.zero_grad(set_to_none=False),
    "another optimizer": _by_another(),
    "another one at once": _by_another(foreach=True),
    "at once": _at_once,
    "zero_": _each(lambda p, number: p.grad.zero_()),
    "data.zero_": _each(lambda p, number: p.grad.data.zero_()),
    "fill_": _each(lambda p, number: p.grad.fill_(0)),
    "data.fill_": _each(lambda p, number: p.grad.data.fill_(0.0)),
    "views": _each(lambda p, number: _view(p, number).zero_()),
    "none": _each(lambda p, number: setattr(p, "grad", None)),
    "never": lambda model, optimizer: None,
}
HOW = {  # finds unused parameters, accumulates, zeroes after the step
    "": (False, False, False),
    "after": (False, False, True),
    "accumulated": (False, True, False),
    "accumulated after": (False, True, True),
    "unused": (True, False, False),
}


def _in_rank_order(state, bucket):
    """Average in fp32: sums in rank order, times 1 / N."""
    mine = bucket.buffer()
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    mine.copy_(sum(part.float() for part in parts) * (1 / len(parts)))
    future = torch.futures.Future()
    future.set_result(mine)
    return future


def _zeroed(zero, make, find, accumulate, after_step):
    """Train four steps without gradcomp, unfused and fused; "side" is used by even steps only."""
    runs = []
    for how in ("plain", "unfused", "fused"):
        net, optimizer = made(make)
        model = DDP(net, bucket_cap_mb=0.005, find_unused_parameters=find)
        if how == "plain":
            model.register_comm_hook(None, _in_rank_order)
        else:
            options = {"optimizer": optimizer if how == "fused" else None, "min_numel": 100}
            state = gradcomp.ddp.register(model, "identity", exchange="all_gather", **options)
        for step in range(4):
            if not after_step:
                ZEROS[zero](model, optimizer)
            if accumulate:
                with model.no_sync():
                    backward(model, 100 + step)
            backward(model, step, step if find else 0)
            optimizer.step()
            if after_step:
                ZEROS[zero](model, optimizer)
        runs.append(bits(net, optimizer))
        if how != "plain":
            closed(state)
    assert [differing(*pair) for pair in itertools.pairwise(runs)] == [[], []]


def a_third(rows):
    """Mark all rows but every third one `long`."""
    return [
        pytest.param(*row, marks=[pytest.mark.long] * (k % 3 > 0)) for k, row in enumerate(rows)
    ]


@pytest.mark.parametrize(
    ("zero", "make", "how"),
    [
        *a_third(itertools.product(ZEROS, ["momentum"], HOW)),
        *itertools.product(
            ["optimizer to zeros", "model to zeros", "data.zero_"],
            ["adamw", "adagrad", "lamb"],
            ["unused"],
        ),
    ],
)
def test_zeroed_gradients_do_not_come_back(gloo, zero, make, how):
    """Averages were written over placeholders that had been zeroed, and added up. An unused
    parameter was skipped where plain DDP steps it with zero: 15 % off under AdamW.
    """
    gloo(3 if zero == "model to zeros" else 2, _zeroed, zero, make, *HOW[how])


# ---- several backwards before a step, exchanges that failed --------------------------------------


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(30, 40)
        self.heads = nn.ModuleList([nn.Linear(40, 5), nn.Linear(40, 5)])

    def forward(self, x, heads):
        x = self.trunk(x).relu()
        return sum(self.heads[h](x).float() for h in heads)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize(
    ("plan", "find"), [([[0, 1], [0, 1]], False), ([[0], [1]], True), ([[0, 1], [1], [0]], True)]
)
@each_rank(2)
def test_backwards_that_add_up(plan, find, view):
    """Backwards of `plan`, one list of heads each, all of them synchronized, before every step."""
    runs = []
    for fused in (False, True):
        net, optimizer = made("sgd", Heads)
        model = DDP(net, find_unused_parameters=find, gradient_as_bucket_view=view)
        given = optimizer if fused else None
        state = gradcomp.ddp.register(model, "onebit", optimizer=given, min_numel=1)
        for step in range(3):
            optimizer.zero_grad()
            for number, heads in enumerate(plan):
                backward(model, 10 * step + number, heads)
            optimizer.step()
        runs.append(bits(net, optimizer))
        closed(state)
    assert differing(*runs) == []


@each_rank(2)
def test_no_local_gradient_is_left_after_a_failure():
    torch.manual_seed(0)
    net = nn.Linear(64, 1)
    model, optimizer, state = sgd_on(net, timeout_s=60)
    before = net.weight.detach().clone()
    # as if this rank had been resumed from another checkpoint
    state._engine.step += dist.get_rank()
    with pytest.raises(PeerMismatch):
        model(torch.randn(4, 64)).square().mean().backward()
    with pytest.raises(GradcompError, match="or from one that failed"):
        optimizer.step()
    optimizer.zero_grad(set_to_none=False)  # what a step can take again
    assert not net.weight.grad.any() and type(net.weight.grad) is torch.Tensor
    optimizer.step()
    state.close()
    assert torch.equal(before, net.weight)


@each_rank(2)
def test_no_local_gradient_is_left_after_a_close():
    net = nn.Linear(1, 1)
    model, optimizer, state = sgd_on(net)
    before = net.weight.detach().clone()
    model(torch.ones(1, 1)).sum().backward()
    state.close()
    with pytest.raises(GradcompError, match="is gone"):
        optimizer.step()
    assert torch.equal(before, net.weight)


def _joined():
    net, optimizer = made("sgd", lambda: nn.Linear(30, 5))
    model = DDP(net)
    gradcomp.ddp.register(model, "onebit", optimizer=optimizer, min_numel=1, timeout_s=30)

    def step(number):
        optimizer.zero_grad()
        backward(model, number)
        optimizer.step()

    with model.join():
        for number in range(3 + 2 * dist.get_rank()):
            step(number)
    try:
        step(9)
    except ValueError as error:
        return "in place" in str(error)
    finally:
        optimizer.zero_trails()
        dist.barrier()


def test_weights_that_join_hands_out_are_noticed(gloo):
    """DDP's join gives everybody the tops of the rank that went on longest, and nobody its
    trails.
    """
    assert any(gloo(2, _joined))


# ---- values that are not finite, loss scaling ----------------------------------------------------


@pytest.mark.parametrize("exchange", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize(
    ("codec", "world"),
    [("terngrad", 2), ("onebit", 2), ("identity", 2), ("block2", 3), ("block4", 3), ("block8", 2)],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38, 3.3e38])
@each_rank()
def test_values_that_are_not_finite_or_nearly(codec, world, exchange, value):
    """The loss of one rank explodes at step 1; NaN and Inf reach the weights as they do unfused,
    residuals stay. Values of blocks reach 127 scales, and sums that overflowed were Inf in fused
    weights, without a count.
    """
    runs = []
    for fused in (False, True):
        torch.manual_seed(0)
        net = nn.Linear(40, 30, bias=False)
        optimizer, model = SplitSGD(split_parameters(net), lr=1e-39), DDP(net)
        given = {"optimizer": optimizer if fused else None, "min_numel": 0, "exchange": exchange}
        state, found = gradcomp.ddp.register(model, codec, **given), []
        for step in range(3):
            optimizer.zero_grad()
            explodes = step == 1 and (dist.get_rank() == 0 or value < 1e39)
            scale = torch.tensor(value if explodes else 1.0, dtype=torch.float32)
            (model(torch.ones(1, 40).bfloat16()).float().sum() * scale).backward()
            optimizer.step()
            found.append(bits(net, optimizer, state))
        runs.append([*found, state.stats.nonfinite_buckets])
        state.close()
    assert runs[0] == runs[1]
    # sums of the others overflow
    assert runs[1][-1] == (0 if codec == "terngrad" and value < 1e39 else 1)


# ---- registering, checking, resuming -------------------------------------------------------------


@each_rank(2)
def test_a_scaler_that_is_not_registered_is_told_to_unpack():
    (model, optimizer, state), scaler = sgd_on(nn.Linear(9, 9), "terngrad"), DynamicLossScaler()
    scaler.scale(model(torch.ones(2, 9)).sum()).backward()
    before = model.module.weight.detach().clone()
    with pytest.raises(GradcompError, match=r"materialize_gradients\(\)"):
        scaler.step(optimizer)
    state.materialize_gradients()
    assert torch.equal(before, model.module.weight)
    state.close()


@each_rank(2)
def test_a_variant_that_needs_the_gradients_twice_is_refused_while_they_are_packed():
    """A loaded NVLAMB, or one set later, was plain LAMB."""
    net, optimizer = made("lamb")
    _, saved = made("nvlamb")
    model = DDP(net)
    options = {"optimizer": optimizer, "min_numel": 0}
    with gradcomp.ddp.register(model, "onebit", **options) as state:
        optimizer.load_state_dict(saved.state_dict())
        backward(model, 0)
        before = bits(net, optimizer)
        with pytest.raises(GradcompError, match=r"'nvlamb'.*materialize_gradients\(\)"):
            optimizer.step()
        assert bits(net, optimizer) == before
        state.materialize_gradients()
        optimizer.step()
        assert bits(net, optimizer) != before


LINES = [
    (lambda net: torch.optim.SGD(net.parameters(), lr=0.1), {}, "SGD is no split optimizer"),
    (lambda net: OPTIMIZERS["sgd"](net[0].parameters()), {}, "'1.weight' is not in the optimizer"),
    (
        lambda net: [OPTIMIZERS["sgd"](part.parameters()) for part in net],
        {},
        "SplitSGD and SplitSGD are several optimizers",
    ),
    (
        lambda net: OPTIMIZERS["sgd"](net.parameters()),
        {"grad_scaler": torch.amp.GradScaler("cpu")},
        "a grad_scaler needs the gradients",
    ),
    (
        lambda net: OPTIMIZERS["sgd"](net.parameters()),
        {},
        "updates go straight from payloads to weights",
    ),
]


@each_rank(2)
def test_the_line_says_why_updates_are_not_fused():
    for optimizer_of, options, wanted in LINES:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 2))
        options = {"optimizer": optimizer_of(net), "min_numel": 0} | options
        with gradcomp.ddp.register(DDP(net), "terngrad", **options) as state:
            line = state.describe().split("; ")[-1]
        assert line.removeprefix("updates are not fused: ") == wanted


@each_rank(2)
def test_weights_split_after_ddp_are_refused():
    """DDP listens to what it found when it was made: new gradients would stay local."""
    net = nn.Linear(9, 9)
    model = DDP(net)
    with pytest.raises(TypeError, match="must come before DistributedDataParallel"):
        split_parameters(model)
    split_parameters(net)  # which cannot know
    text = r"'weight' has become torch.bfloat16 after DistributedDataParallel was made"
    with pytest.raises(ValueError, match=text):
        gradcomp.ddp.register(model, "terngrad")


@pytest.mark.parametrize("how", ["seed", "momentum", "passed"])
@each_rank(2)
def test_ranks_with_other_trails_or_optimizers_are_refused(how):
    """DDP gives all ranks rank 0's tops; trails, or other state, are each rank's own. Replicas
    that only look alike: every later step would draw them apart.
    """
    rank = dist.get_rank()
    torch.manual_seed(rank if how == "seed" else 0)
    net = nn.Linear(9, 9)
    split = split_parameters(net)
    model = DDP(net)
    optimizer = SplitSGD(split, lr=0.1, momentum=0.9 if how == "momentum" and rank else 0.0)
    given = optimizer if how != "passed" or rank else None
    with pytest.raises(PeerMismatch, match="optimizer") as error:
        gradcomp.ddp.register(model, "terngrad", optimizer=given, timeout_s=60)
        model(torch.ones(1, 9).bfloat16()).sum().backward()
    assert how == "passed" or error.value.field == "optimizer"


@each_rank(2)
def test_check_replicas_sees_trails():
    net, optimizer = made("sgd", lambda: nn.Linear(9, 9))
    state = gradcomp.ddp.register(DDP(net), "terngrad", optimizer=optimizer)
    state.check_replicas()
    if dist.get_rank():
        optimizer.trail(net.bias)[3] += 1
    with pytest.raises(PeerMismatch) as error:
        state.check_replicas()
    state.close()
    assert error.value.field == "trail of bias"


@pytest.mark.parametrize("codec", ["terngrad exact", "onebit gather"])
@each_rank(2)
def test_a_resumed_fused_run_equals_the_uninterrupted_one(codec):
    def begin():
        net, optimizer = made("adamw")
        options = {"optimizer": optimizer, "min_numel": 0}
        model = DDP(net, bucket_cap_mb=0.005)
        return net, optimizer, gradcomp.ddp.register(model, CODECS[codec][0], **options), model

    def go(run, steps):
        for step in steps:
            run[1].zero_grad()
            backward(run[3], step)
            run[1].step()

    one = begin()
    go(one, range(3))
    saved = copy.deepcopy([part.state_dict() for part in one[:3]])
    go(one, range(3, 6))
    two = begin()
    for target, state in zip(two[:3], saved, strict=True):
        target.load_state_dict(state)
    go(two, range(3, 6))
    assert differing(bits(*one[:2]), bits(*two[:2])) == []
    for run in (one, two):
        run[2].close()
