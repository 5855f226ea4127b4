"""Updates straight from payloads: bit for bit the run that writes gradients first, and no way to
use local gradients.
"""

import copy
import io

import pytest
import torch
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


def not_norms(name, p):
    return not name.startswith("norm")


def split_net(make, **options):
    """Return a net and its optimizer, the same on every rank."""
    torch.manual_seed(0)
    net = Net()
    return net, OPTIMIZERS[make](split_parameters(net, predicate=not_norms, **options))


def sgd_on(net, codec="onebit", lr=0.5, **options):
    """Return DDP, optimizer and state of a net whose updates are fused."""
    model, optimizer = DDP(net), SplitSGD(net.parameters(), lr=lr)
    options = {"optimizer": optimizer, "min_numel": 0} | options
    return model, optimizer, gradcomp.ddp.register(model, codec, **options)


def backward(model, step, *args):
    rank = torch.distributed.get_rank()
    x = torch.randn(16, 30, generator=torch.Generator().manual_seed(1000 * step + rank))
    nn.functional.cross_entropy(model(x.bfloat16(), *args).float(), x[:, :5].argmax(1)).backward()


def as_bytes(state, prefix=""):
    return {f"{prefix}{k}": v.numpy().tobytes() for k, v in state.items()}


def bits(net, optimizer):
    """Return the joined weights, and all state of the optimizer, as bytes."""
    found = as_bytes(fp32_state_dict(net, optimizer))
    for name, p in net.named_parameters():
        found |= as_bytes(optimizer.state[p], f"{name}: ")
    return found


def differing(one, two):
    return [key for key in one if one[key] != two[key]]


def train(
    codec,
    make,
    fused,
    steps,
    *,
    ddp=None,
    between=lambda *run: None,
    rounding="truncate",
    accumulate=False,
    uses_step=False,
    **options,
):
    """Train on this rank; return the joined weights, all state and residuals, and how often
    gradients were packed.
    """
    net, optimizer = split_net(make, rounding=rounding)
    model = DDP(net, bucket_cap_mb=0.005, **(ddp or {}))
    options |= {"optimizer": optimizer if fused else None, "min_numel": 100}
    state = gradcomp.ddp.register(model, CODECS[codec][0], **options)
    packed = 0
    for step in range(steps):
        optimizer.zero_grad()
        if accumulate:
            with model.no_sync():
                backward(model, 100 + step)
        backward(model, step, step if uses_step else 0)
        packed += sum(p.grad is not None and not any(p.grad.stride()) for p in net.parameters())
        between(step, net, optimizer, state)
        optimizer.step()
    state.check_replicas()
    found = bits(net, optimizer) | as_bytes(
        parts_of(state.state_dict())["residual"], "residual of "
    )
    assert state.step == steps  # every backward is one, also the first of a static graph
    sent, line = state.stats.bytes_sent, state.describe()
    state.close()
    assert optimizer._packed == []
    return found, packed, sent, line


def both(codec, make, steps, options):
    """Return what differs between the fused and the unfused run, and what `train` tells of the
    fused one.
    """
    plain, none, plain_sent, _ = train(codec, make, False, steps, **options)
    found, packed, sent, line = train(codec, make, True, steps, **options)
    assert none == 0
    return differing(plain, found), packed, sent == plain_sent, line


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


VIEW = {"gradient_as_bucket_view": True}
RUNS = {  # ranks, codec, optimizer, options, tensors that are packed at each of 5 steps
    **{
        f"{world}-{codec}": (world, codec, "momentum", {"exchange": exchange, "ddp": VIEW}, 8)
        for codec, (_, exchange) in CODECS.items()
        for world in ((2, 3) if exchange != "hierarchical" else (2, 4))
    },
    **{
        f"{rounding} {make}": (
            *(2, "terngrad exact", make, {"rounding": rounding}),
            0 if make == "nvlamb" else 8,
        )
        for make in OPTIMIZERS
        for rounding in ("truncate", "nearest")
    },
    **{
        f"{between.__name__} {make}": (2, "terngrad exact", make, {"between": between}, 8)
        for between in (clip, clip_some, write_one)
        for make in ("momentum", "lamb")
    },
    **{
        next(iter(options)) + str(number): (2, "onebit gather", "momentum", options, least)
        for number, (options, least) in enumerate(
            [
                ({"uses_step": True, "ddp": {"find_unused_parameters": True}}, 6),
                ({"ddp": {"static_graph": True}}, 8),
                ({"warmup_steps": 2}, 6),
                ({"atomic_steps": True}, 8),
                ({"exclude": ["first.weight"]}, 8),
                ({"accumulate": True}, 8),
                ({"accumulate": True, "ddp": VIEW}, 8),
            ]
        )
    },
}


@pytest.mark.parametrize("run", RUNS)
def test_fused_runs_equal_unfused_ones(gloo, run):
    world, codec, make, options, least = RUNS[run]
    if options.get("exchange") == "hierarchical":
        options = options | {
            "advanced": gradcomp.Advanced(nodes=[[0, 1], [2, 3]] if world == 4 else [[0], [1]])
        }
    reason = "updates are not fused: SplitLAMB with these options needs the gradients twice"
    for differ, packed, same_bytes, line in gloo(world, both, codec, make, 5, options):
        assert differ == []
        assert same_bytes
        assert packed >= 5 * least and (packed > 0) is (make != "nvlamb")
        assert (reason if make == "nvlamb" else "straight from payloads") in line


def test_over_every_transport(ranks):
    for differ, packed, _, _ in ranks(2, both, "onebit gather", "sgd", 3, {}):
        assert differ == []
        assert packed == 24


# ---- clipping ------------------------------------------------------------------------------------


def clipped(optimizer_name, exchange, max_norm):
    """Return whether clipped fused updates equal unfused ones whose gradients are multiplied by
    the same factor, whether the norms fit torch's, and the last factor.
    """
    made, factors, norms = [], [], []
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
            rank = torch.distributed.get_rank()
            x = torch.randn(16, 30, generator=torch.Generator().manual_seed(1000 * step + rank))
            nn.functional.cross_entropy(model(x), x[:, :5].argmax(1)).backward()
            if fused:
                assert any(isinstance(p.grad, Placeholder) for p in net.parameters())
                norm = state.clip_grad_norm_(max_norm)
                norms.append(norm)
                factors.append(min(max_norm / (float(norm) + 1e-6), 1.0))
            else:
                total = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()])
                torch.testing.assert_close(total, norms[step], rtol=1e-5, atol=0.0)
                for p in net.parameters():
                    p.grad.mul_(factors[step])
            optimizer.step()
        state.check_replicas()
        state.close()
        made.append(bits(net, optimizer))
    return differing(*made), min(factors) < 1, [float(norm).hex() for norm in norms]


@pytest.mark.parametrize("exchange", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "nvlamb"])
def test_packed_gradients_are_clipped(gloo, optimizer, exchange):
    """One factor for all ranks, which the update multiplies gradients by; nothing changes where
    the norm is small.
    """
    one, other = gloo(2, clipped, optimizer, exchange, 0.05)
    assert one == other
    assert one[:2] == ([], True)
    one, other = gloo(2, clipped, optimizer, exchange, 1e4)
    assert one[:2] == ([], False)


def clipped_unpacked():
    net = nn.Linear(4, 3)
    model, optimizer = DDP(net), SplitSGD(net.parameters(), lr=0.5)
    state = gradcomp.ddp.register(model, "onebit", min_numel=0)
    model(torch.ones(1, 4)).sum().backward()
    grads = [p.grad.clone().requires_grad_() for p in net.parameters()]
    for wanted in grads:
        wanted.grad = wanted.detach().clone()
    norms = [state.clip_grad_norm_(0.1), torch.nn.utils.clip_grad_norm_(grads, 0.1)]
    optimizer.step()
    state.close()
    same = [torch.equal(p.grad, g.grad) for p, g in zip(net.parameters(), grads, strict=True)]
    return [norm.item() for norm in norms], same


def test_gradients_that_are_not_packed_are_clipped_by_torch(gloo):
    (norms, same), _ = gloo(2, clipped_unpacked)
    assert norms[0] == norms[1]
    assert all(same)


def clipped_otherwise():
    net = nn.Linear(4, 3)
    model, _, state = sgd_on(net)
    x, seen = torch.ones(1, 4), []
    model(x).sum().backward()
    for limit in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="max_norm must not be negative"):
            state.clip_grad_norm_(limit)
    seen.append(float(state.clip_grad_norm_(2.0)))
    seen.append(float(state.clip_grad_norm_(1.0)))  # of what the first has left
    net.bias.grad.zero_()  # a written gradient beside packed ones
    seen.append(float(state.clip_grad_norm_(100.0)))
    state.materialize_gradients()
    seen.append(float(net.weight.grad.norm()))
    seen.append(float(state.clip_grad_norm_(0.5)))
    seen.append(float(net.weight.grad.norm()))
    model.zero_grad()
    model(x).sum().backward()  # the factor is of one backward
    seen.append(float(state.clip_grad_norm_(100.0)))
    model.zero_grad()
    model(x * float("nan")).sum().backward()
    with pytest.raises(RuntimeError, match="the norm of the gradients is nan"):
        state.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert state.clip_grad_norm_(1.0).isnan()
    state.close()
    return [round(number, 4) for number in seen]


def test_clipping_twice_beside_written_gradients_and_nan(gloo):
    root = 15**0.5  # 12 weights and 3 biases of gradient 1
    rest = (12 / 15) ** 0.5
    wanted = [root, 2.0, rest, rest, rest, 0.5, root]
    assert gloo(2, clipped_otherwise) == [[round(number, 4) for number in wanted]] * 2


# ---- gradients that are looked at, written to, copied --------------------------------------------


def bad_day(step, net, optimizer, state):
    """What users do to gradients between backward and step."""
    params = list(net.parameters())
    assert all(p.grad.shape == p.shape and p.grad.dtype == p.dtype for p in params)
    assert all(torch.isnan(p.grad).all() for p in params)
    assert torch.isnan(torch.nn.utils.get_total_norm([p.grad for p in params]))
    before = [p.detach().clone() for p in params]
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.nn.utils.clip_grad_norm_(params, 1.0)
    with pytest.raises(RuntimeError, match="single memory location"):
        params[0].grad.mul_(0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError):  # or it would skip for ever
        scaler.unscale_(optimizer)
    assert all(torch.equal(a, p) for a, p in zip(before, params, strict=True))
    after(step, net, optimizer, state)
    if step == 2:
        assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in params)


def after(step, net, optimizer, state):
    if step == 2:
        optimizer.zero_grad(set_to_none=False)
    if step == 3:
        optimizer.step()  # and once more after this, from the same payloads


def _bad_days():
    runs = [("onebit gather", "momentum", fused, 5) for fused in (False, True)]
    plain, found = (
        train(*run, between=between)[0] for run, between in zip(runs, (after, bad_day), strict=True)
    )
    return differing(plain, found)


def test_placeholders_cannot_be_used(gloo):
    assert gloo(2, _bad_days) == [[], []]


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


def _written(write, then):
    inputs, outputs = (1, 1) if write in ONE_ELEMENT else (4, 3)
    net = nn.Linear(inputs, outputs, bias=inputs > 1)
    model, optimizer, state = sgd_on(net)
    x = torch.ones(1, inputs)
    model(x).sum().backward()
    before = net.weight.detach().clone()
    (WRITES | ONE_ELEMENT)[write](net.weight.grad)
    calls = {
        "step": optimizer.step,
        "forward": lambda: model(x),
        "clip": state.materialize_gradients,
    }
    with pytest.raises(GradcompError, match=r"'weight' was written to while it was still packed"):
        calls[then]()
    assert torch.equal(before, net.weight)
    model.zero_grad(set_to_none=False)  # all is well after it
    model(x).sum().backward()
    optimizer.step()
    state.close()
    return (before - net.weight).unique().tolist()


@pytest.mark.parametrize("then", ["step", "forward", "clip"])
@pytest.mark.parametrize("write", WRITES | ONE_ELEMENT)
def test_a_gradient_that_is_written_to_is_refused(gloo, write, then):
    """A placeholder has one element: a zero in a row of it must not pass for a gradient of
    zeros, or be overlooked.
    """
    assert gloo(2, _written, write, then) == [[0.5]] * 2


def _copied():
    net = nn.Linear(4, 3)
    model, optimizer, state = sgd_on(net)
    model(torch.ones(1, 4)).sum().backward()
    grad, file = net.weight.grad, io.BytesIO()
    torch.save(grad, file)
    file.seek(0)
    for one in (copy.deepcopy(grad), grad.clone(), torch.load(file), grad * 2, grad.double()):
        assert type(one) is torch.Tensor
        assert one.isnan().all()
        one.zero_()
    assert grad.to_sparse().layout == torch.sparse_coo
    assert grad.to("meta").is_meta
    before = net.weight.detach().clone()
    optimizer.step()
    state.close()
    return (before - net.weight).unique().tolist()


def test_copies_of_a_placeholder_are_plain_tensors(gloo):
    assert gloo(2, _copied) == [[0.5]] * 2


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


def _zeroed(zero, make, find, accumulate, after_step):
    """Train four steps without gradcomp, unfused and fused; "side" is used by even steps only.
    Return what differs, of weights and state.
    """
    runs = []
    for how in ("plain", "unfused", "fused"):
        net, optimizer = split_net(make)
        model, state = DDP(net, bucket_cap_mb=0.005, find_unused_parameters=find), None
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
        if state is not None:
            state.check_replicas()
            state.close()
    return [differing(runs[0], runs[1]), differing(runs[1], runs[2])]


def _in_rank_order(state, bucket):
    """Average in fp32: sums in rank order, times 1 / N."""
    mine = bucket.buffer()
    parts = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, mine)
    total = parts[0].float()
    for part in parts[1:]:
        total += part.float()
    mine.copy_(total * (1 / len(parts)))
    future = torch.futures.Future()
    future.set_result(mine)
    return future


@pytest.mark.parametrize(
    ("find", "accumulate", "after_step"),
    [
        (False, False, False),
        (False, False, True),
        (False, True, False),
        (False, True, True),
        (True, False, False),
    ],
)
@pytest.mark.parametrize("zero", ZEROS)
def test_zeroed_gradients_do_not_come_back(gloo, zero, find, accumulate, after_step):
    """Averages were written over placeholders that had been zeroed, and added up."""
    world_size = 3 if zero == "model to zeros" else 2
    found = gloo(world_size, _zeroed, zero, "momentum", find, accumulate, after_step)
    assert found == [[[], []]] * world_size


@pytest.mark.parametrize("make", ["adamw", "adagrad", "lamb"])
@pytest.mark.parametrize("zero", ["optimizer to zeros", "model to zeros", "data.zero_"])
def test_unused_parameters_step_with_zeros(gloo, zero, make):
    """An unused parameter was skipped where plain DDP steps it with zero: 15 % off under AdamW."""
    assert gloo(2, _zeroed, zero, make, True, False, False) == [[[], []]] * 2


# ---- several backwards before a step, exchanges that failed --------------------------------------


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(30, 40)
        self.heads = nn.ModuleList([nn.Linear(40, 5), nn.Linear(40, 5)])

    def forward(self, x, heads):
        x = self.trunk(x).relu()
        return sum(self.heads[h](x).float() for h in heads)


def _several(plan, view, find):
    """Backwards of `plan`, one list of heads each, all of them synchronized, before every step."""
    runs = []
    for fused in (False, True):
        torch.manual_seed(0)
        net = Heads()
        optimizer = SplitSGD(split_parameters(net), lr=0.1)
        model = DDP(net, find_unused_parameters=find, gradient_as_bucket_view=view)
        given = optimizer if fused else None
        state = gradcomp.ddp.register(model, "onebit", optimizer=given, min_numel=1)
        for step in range(3):
            optimizer.zero_grad()
            for number, heads in enumerate(plan):
                backward(model, 10 * step + number, heads)
            optimizer.step()
        state.check_replicas()
        runs.append(as_bytes(fp32_state_dict(net, optimizer)))
        state.close()
    return differing(*runs)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize(
    ("plan", "find"), [([[0, 1], [0, 1]], False), ([[0], [1]], True), ([[0, 1], [1], [0]], True)]
)
def test_backwards_that_add_up(gloo, view, plan, find):
    assert gloo(2, _several, plan, view, find) == [[], []]


def _exchange_fails():
    torch.manual_seed(0)
    net = nn.Linear(64, 1)
    model, optimizer, state = sgd_on(net, timeout_s=60)
    before = net.weight.detach().clone()
    # as if this rank had been resumed from another checkpoint
    state._engine.step += torch.distributed.get_rank()
    with pytest.raises(PeerMismatch):
        model(torch.randn(4, 64)).square().mean().backward()
    with pytest.raises(GradcompError, match="or from one that failed"):
        optimizer.step()
    optimizer.zero_grad(set_to_none=False)  # what a step can take again
    assert torch.equal(net.weight.grad, torch.zeros_like(net.weight))
    assert type(net.weight.grad) is torch.Tensor
    optimizer.step()
    state.close()
    return torch.equal(before, net.weight)


def _closed_state():
    net = nn.Linear(1, 1)
    model, optimizer, state = sgd_on(net)
    before = net.weight.detach().clone()
    model(torch.ones(1, 1)).sum().backward()
    state.close()
    with pytest.raises(GradcompError, match="is gone"):
        optimizer.step()
    return torch.equal(before, net.weight)


@pytest.mark.parametrize("how", [_exchange_fails, _closed_state])
def test_no_local_gradient_is_left_after_a_failure_or_a_close(pools, how):
    assert pools("gloo", 2, how) == [True, True]


def _joined():
    torch.manual_seed(0)
    net = nn.Linear(30, 5)
    optimizer = SplitSGD(split_parameters(net), lr=0.1)
    model = DDP(net)
    gradcomp.ddp.register(model, "onebit", optimizer=optimizer, min_numel=1, timeout_s=30)

    def step(number):
        optimizer.zero_grad()
        backward(model, number)
        optimizer.step()

    with model.join():
        for number in range(3 + 2 * torch.distributed.get_rank()):
            step(number)
    noticed = []
    try:
        step(9)
    except ValueError as error:
        noticed.append("in place" in str(error))
    optimizer.zero_trails()
    torch.distributed.barrier()
    return noticed


def test_weights_that_join_hands_out_are_noticed(pools):
    """DDP's join gives everybody the tops of the rank that went on longest, and nobody its
    trails.
    """
    assert any(pools("gloo", 2, _joined))


# ---- values that are not finite, loss scaling ----------------------------------------------------


def _poisoned(codec, value, exchange):
    """The loss of one rank explodes at step 1; NaN and Inf reach the weights as they do unfused,
    residuals stay.
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
            explodes = step == 1 and (torch.distributed.get_rank() == 0 or value < 1e39)
            scale = torch.tensor(value if explodes else 1.0, dtype=torch.float32)
            (model(torch.ones(1, 40).bfloat16()).float().sum() * scale).backward()
            optimizer.step()
            found.append(as_bytes(fp32_state_dict(net, optimizer)))
            found.append(as_bytes(parts_of(state.state_dict())["residual"]))
        runs.append([*found, state.stats.nonfinite_buckets])
        state.close()
    return runs[0] == runs[1], runs[1][-1]


@pytest.mark.parametrize("exchange", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize(
    ("codec", "world_size"),
    [("terngrad", 2), ("onebit", 2), ("identity", 2), ("block2", 3), ("block4", 3), ("block8", 2)],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38, 3.3e38])
def test_values_that_are_not_finite_or_nearly(gloo, codec, world_size, exchange, value):
    """Values of blocks reach 127 scales, and sums that overflowed were Inf in fused weights,
    without a count.
    """
    for equal, buckets in gloo(world_size, _poisoned, codec, value, exchange):
        assert equal
        # sums of the others overflow
        assert buckets == (0 if codec == "terngrad" and value < 1e39 else 1)


OVERFLOWS = (0, 3, 4, 5)  # steps at which one rank overflows


def _overflows(kind, codec, make):
    """Train bf16 weights and trails under a loss scaler; return what each step has left alone."""
    net, optimizer = split_net(make)
    model = DDP(net, bucket_cap_mb=0.005)
    ours = DynamicLossScaler(64.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if kind == "torch" else ours
    options = {"optimizer": optimizer, "grad_scaler": scaler, "min_numel": 100}
    state = gradcomp.ddp.register(model, codec, **options)

    def everything():
        saved = state.state_dict()  # residuals are in units of the loss scale, a power of two here
        units = {
            k: v / saved["loss_scale"] for k, v in parts_of(saved)["residual"].items() if v.any()
        }
        return bits(net, optimizer), as_bytes(units)

    unchanged, scales = [], []
    for step in range(9):
        optimizer.zero_grad()
        before = everything()
        bad = torch.distributed.get_rank() == 1 and step in OVERFLOWS
        x = torch.randn(16, 30, generator=torch.Generator().manual_seed(step)).bfloat16()
        loss = model(x).square().mean()
        scaler.scale(loss * (float("inf") if bad else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        unchanged.append([a == b for a, b in zip(before, everything(), strict=True)])
        scales.append(scaler.get_scale())
    state.check_replicas()
    state.close()
    return unchanged, scales


@pytest.mark.parametrize("kind", ["torch", "ours"])
@pytest.mark.parametrize("make", ["momentum", "adamw", "lamb"])
@pytest.mark.parametrize("codec", ["onebit", "terngrad"])
def test_overflows_leave_weights_trails_state_and_residuals(gloo, kind, make, codec):
    for unchanged, scales in gloo(2, _overflows, kind, codec, make):
        for step, (weights, residual) in enumerate(unchanged):
            assert weights is (step in OVERFLOWS), step
            assert residual is (step in OVERFLOWS or codec == "terngrad"), step
        assert scales == [32.0] * 3 + [16.0, 8.0, 4.0] + [4.0] * 3


def _scaler_that_is_not_registered():
    (model, optimizer, state), scaler = sgd_on(nn.Linear(9, 9), "terngrad"), DynamicLossScaler()
    scaler.scale(model(torch.ones(2, 9)).sum()).backward()
    before = model.module.weight.detach().clone()
    with pytest.raises(GradcompError, match=r"materialize_gradients\(\)"):
        scaler.step(optimizer)
    state.materialize_gradients()
    assert torch.equal(before, model.module.weight)
    state.close()


# ---- registering, checking, resuming -------------------------------------------------------------


def _lines():
    def line(optimizer_of, **options):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 2))
        options = {"optimizer": optimizer_of(net), "min_numel": 0} | options
        with gradcomp.ddp.register(DDP(net), "terngrad", **options) as state:
            return state.describe().split("; ")[-1].removeprefix("updates are not fused: ")

    def sgd(net):
        return SplitSGD(net.parameters(), lr=0.1)

    assert [
        line(lambda net: torch.optim.SGD(net.parameters(), lr=0.1)),
        line(lambda net: sgd(net[0])),
        line(sgd, grad_scaler=torch.amp.GradScaler("cpu")),
        line(sgd),
    ] == [
        "SGD is no split optimizer",
        "'1.weight' is not in the optimizer",
        "a grad_scaler needs the gradients",
        "updates go straight from payloads to weights",
    ]


def _split_too_late():
    """DDP listens to what it found when it was made: new gradients would stay local."""
    net = nn.Linear(9, 9)
    model = DDP(net)
    with pytest.raises(TypeError, match="must come before DistributedDataParallel"):
        split_parameters(model)
    split_parameters(net)  # which cannot know
    text = r"'weight' has become torch.bfloat16 after DistributedDataParallel was made"
    with pytest.raises(ValueError, match=text):
        gradcomp.ddp.register(model, "terngrad")


@pytest.mark.parametrize("what", [_scaler_that_is_not_registered, _lines, _split_too_late])
def test_messages_say_what_to_do(gloo, what):
    gloo(2, what)


def _different(how):
    """DDP gives all ranks rank 0's tops; trails, or other state, are each rank's own."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank if how == "seed" else 0)
    net = nn.Linear(9, 9)
    split = split_parameters(net)
    model = DDP(net)
    optimizer = SplitSGD(split, lr=0.1, momentum=0.9 if how == "momentum" and rank else 0.0)
    given = optimizer if how != "passed" or rank else None
    with pytest.raises(PeerMismatch, match="optimizer") as error:
        gradcomp.ddp.register(model, "terngrad", optimizer=given, timeout_s=60)
        model(torch.ones(1, 9).bfloat16()).sum().backward()
    return error.value.field


@pytest.mark.parametrize("how", ["seed", "momentum", "passed"])
def test_ranks_with_other_trails_or_optimizers_are_refused(pools, how):
    """Replicas that only look alike: their tops are equal and every later step would draw them
    apart.
    """
    found = pools("gloo", 2, _different, how)
    assert how == "passed" or found == ["optimizer"] * 2


def _replicas():
    torch.manual_seed(0)
    net = nn.Linear(9, 9)
    optimizer = SplitSGD(split_parameters(net), lr=0.1)
    state = gradcomp.ddp.register(DDP(net), "terngrad", optimizer=optimizer)
    state.check_replicas()
    if torch.distributed.get_rank():
        optimizer.trail(net.bias)[3] += 1
    with pytest.raises(PeerMismatch) as error:
        state.check_replicas()
    state.close()
    return error.value.field


def test_check_replicas_sees_trails(gloo):
    assert gloo(2, _replicas) == ["trail of bias"] * 2


def _resumed(codec):
    def begin():
        net, optimizer = split_net("adamw")
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
    found = differing(bits(*one[:2]), bits(*two[:2]))
    for run in (one, two):
        run[2].close()
    return found


@pytest.mark.parametrize("codec", ["terngrad exact", "onebit gather"])
def test_a_resumed_fused_run_equals_the_uninterrupted_one(gloo, codec):
    assert gloo(2, _resumed, codec) == [[], []]
