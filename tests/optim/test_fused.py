"""Updates straight from payloads: bit for bit the run that writes gradients first, and no way to
use local gradients.
"""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomp.ddp
from gradcomp import GradcompError, OneBit, PeerMismatch, Ternary, TernGrad
from gradcomp.amp import DynamicLossScaler
from gradcomp.optim import (
    SplitAdagrad,
    SplitAdamW,
    SplitLAMB,
    SplitSGD,
    fp32_state_dict,
    split_parameters,
)

OPTIMIZERS = {
    "sgd": lambda p: SplitSGD(p, lr=0.1),
    "momentum": lambda p: SplitSGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adagrad": lambda p: SplitAdagrad(p, lr=0.05, weight_decay=0.01),
    "adamw": lambda p: SplitAdamW(p, lr=0.01),
    "lamb": lambda p: SplitLAMB(p, lr=0.01),
    "nvlamb": lambda p: SplitLAMB(p, lr=0.01, variant="nvlamb"),
}
CODECS = {
    "terngrad exact": (lambda: TernGrad(), "reduce_scatter"),
    "terngrad gather": (lambda: TernGrad(group="row"), "all_gather"),
    "terngrad own": (lambda: TernGrad(scale="own"), "all_gather"),
    "terngrad requantize": (lambda: TernGrad(second_phase="requantize"), "reduce_scatter"),
    "terngrad bf16": (lambda: TernGrad(second_phase="bf16"), "reduce_scatter"),
    "terngrad fp32": (lambda: TernGrad(second_phase="fp32"), "reduce_scatter"),
    "ternary gather": (lambda: Ternary(residual_decay=0.25), "all_gather"),
    "ternary scatter": (lambda: Ternary(), "reduce_scatter"),
    "onebit gather": (lambda: OneBit(), "all_gather"),
    "onebit scatter": (lambda: OneBit(group=33), "reduce_scatter"),
    "identity": (lambda: "identity", "reduce_scatter"),
    "hierarchical": (lambda: OneBit(), "hierarchical"),
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
        x = self.first(x).relu()
        x = self.norm(x.float()).bfloat16()
        if step % 2 == 0:
            x = self.side(x)
        return self.last(x).float()


def batch(step, rank, numel=30):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, numel, generator=generator)
    return x.bfloat16(), x[:, :5].argmax(1)


def not_norms(name, p):
    return not name.startswith("norm")


def sgd_on(net, codec="onebit", lr=0.5):
    """Return DDP, optimizer and state of a net whose updates are fused."""
    model, optimizer = DDP(net), SplitSGD(net.parameters(), lr=lr)
    return model, optimizer, gradcomp.ddp.register(model, codec, optimizer=optimizer, min_numel=0)


def bits(net, optimizer, *, state=True):
    """Return the joined weights, and all state of the optimizer, as bytes."""
    found = {k: v.numpy().tobytes() for k, v in fp32_state_dict(net, optimizer).items()}
    for name, p in net.named_parameters() if state else ():
        found |= {f"{k} of {name}": v.numpy().tobytes() for k, v in optimizer.state[p].items()}
    return found


def backward(model, x, y, *args):
    nn.functional.cross_entropy(model(x, *args).float(), y).backward()


def train(codec, make, fused, steps, *, view=False, ddp=None, between=None, **options):
    """Train on this rank; return the joined weights, all state and residuals, and how often
    gradients were packed.
    """
    rounding, accumulate = options.pop("rounding", "truncate"), options.pop("accumulate", False)
    uses_step = options.pop("uses_step", False)
    torch.manual_seed(0)
    net = Net()
    split = split_parameters(net, rounding=rounding, predicate=not_norms)
    model = DDP(net, gradient_as_bucket_view=view, bucket_cap_mb=0.005, **(ddp or {}))
    optimizer = OPTIMIZERS[make](split)
    options |= {"optimizer": optimizer if fused else None, "min_numel": 100}
    state = gradcomp.ddp.register(model, CODECS[codec][0](), **options)
    packed = 0
    for step in range(steps):
        optimizer.zero_grad()
        if accumulate:
            with model.no_sync():
                backward(model, *batch(100 + step, state._engine.comm.rank))
        backward(model, *batch(step, state._engine.comm.rank), step if uses_step else 0)
        packed += sum(p.grad is not None and not any(p.grad.stride()) for p in net.parameters())
        if between is not None:
            between(step, net, optimizer, state)
        optimizer.step()
    state.check_replicas()
    found = bits(net, optimizer)
    found |= {
        f"residual of {k}": v.numpy().tobytes() for k, v in state.state_dict()["residual"].items()
    }
    assert state.step == steps  # every backward is one, also the first of a static graph
    sent, line = state.stats.bytes_sent, state.describe()
    state.close()
    assert optimizer._packed == []
    return found, packed, sent, line


def both(codec, make, steps, **options):
    """Return whether the fused run equals the unfused one, and what `train` tells of the fused
    one.
    """
    plain, none, plain_sent, _ = train(codec, make, False, steps, **options)
    found, packed, sent, line = train(codec, make, True, steps, **options)
    assert none == 0
    differ = [k for k in plain if plain[k] != found[k]]
    return differ, packed, sent == plain_sent, line


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_codec_and_exchange(gloo, codec, world_size):
    exchange = CODECS[codec][1]
    options = {"exchange": exchange}
    if exchange == "hierarchical":
        if world_size == 3:
            world_size = 4
        options["nodes"] = [[0, 1], [2, 3]] if world_size == 4 else [[0], [1]]
    for differ, packed, same_bytes, line in gloo(
        world_size, _both, codec, "momentum", 4, {"view": True, **options}
    ):
        assert differ == []
        assert packed == 4 * 8
        assert same_bytes
        assert "straight from payloads" in line


def _both(codec, make, steps, options):
    return both(codec, make, steps, **options)


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("rounding", ["truncate", "nearest"])
def test_every_optimizer(gloo, make, rounding):
    for differ, packed, _, line in gloo(
        2, _both, "terngrad exact", make, 4, {"rounding": rounding}
    ):
        assert differ == []
        assert packed == (0 if make == "nvlamb" else 4 * 8)
        assert (
            "updates are not fused: SplitLAMB with these options needs the gradients twice" in line
        ) == (make == "nvlamb")


def test_over_every_transport(ranks):
    for differ, packed, _, _ in ranks(2, _both, "onebit gather", "sgd", 3, {}):
        assert differ == []
        assert packed == 24


@pytest.mark.parametrize(
    "options",
    [
        {"ddp": {"find_unused_parameters": True}, "uses_step": True},
        {"ddp": {"static_graph": True}},
        {"start_step": 2},
        {"transactional": True},
        {"exclude": ["first.weight"]},
        {"accumulate": True},
        {"accumulate": True, "view": True},
    ],
    ids=lambda o: next(iter(o)),
)
def test_every_way_of_ddp(gloo, options):
    for differ, packed, same_bytes, _ in gloo(2, _both, "onebit gather", "momentum", 5, options):
        assert differ == []
        assert same_bytes
        assert packed >= 5 * 6


# ---- gradients that are looked at ----------------------------------------------------------------


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


@pytest.mark.parametrize("between", [clip, clip_some, write_one])
@pytest.mark.parametrize("make", ["momentum", "lamb"])
def test_materialized_and_replaced_gradients(gloo, between, make):
    for differ, _, _, _ in gloo(2, _both, "terngrad exact", make, 4, {"between": between}):
        assert differ == []


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
    if step == 2:
        optimizer.zero_grad(set_to_none=False)
        assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in params)
    if step == 3:
        optimizer.step()  # and once more after this, from the same payloads


def after(step, net, optimizer, state):
    if step == 2:
        optimizer.zero_grad(set_to_none=False)
    if step == 3:
        optimizer.step()


def _bad_days():
    first = train("onebit gather", "momentum", False, 5, between=after)
    second = train("onebit gather", "momentum", True, 5, between=bad_day)
    return [k for k in first[0] if first[0][k] != second[0][k]]


def test_placeholders_cannot_be_used(gloo):
    assert gloo(2, _bad_days) == [[], []]


# ---- gradients that are zeroed -------------------------------------------------------------------


def _no_grads_left(model, optimizer):
    for p in model.parameters():
        p.grad = None


def _each(zero):
    """Return a way to zero that does the same to every gradient that is there."""

    def zeroes(model, optimizer):
        for p in model.parameters():
            if p.grad is not None:
                zero(p.grad)

    return zeroes


def _zero_some_views(model, optimizer):
    """Views of a whole gradient, whatever their shape."""
    for number, p in enumerate(model.parameters()):
        if p.grad is not None:
            (p.grad.view(-1), p.grad[...], p.grad.detach(), p.grad.data)[number % 4].zero_()


def _zero_at_once(model, optimizer):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if grads:
        torch._foreach_zero_(grads)


ZEROS = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer to zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model to zeros": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "module to zeros": lambda model, optimizer: model.module.zero_grad(set_to_none=False),
    "another optimizer": (
        lambda model, optimizer: torch.optim.SGD(model.parameters()).zero_grad(set_to_none=False)
    ),
    "another one at once": (
        lambda model, optimizer: torch.optim.SGD(model.parameters(), foreach=True).zero_grad(
            set_to_none=False
        )
    ),
    "at once": _zero_at_once,
    "zero_": _each(lambda grad: grad.zero_()),
    "data.zero_": _each(lambda grad: grad.data.zero_()),
    "fill_": _each(lambda grad: grad.fill_(0)),
    "data.fill_": _each(lambda grad: grad.data.fill_(0.0)),
    "views": _zero_some_views,
    "none": _no_grads_left,
    "never": lambda model, optimizer: None,
}


def _linear(zero, after_step, accumulate):
    """Return the weight after each of four steps of rate 1, whose gradient is -2 (-4 if two
    backwards add up).
    """
    net = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(net.weight)
    model, optimizer, state = sgd_on(net, "identity", lr=1.0)
    weights = []
    for _ in range(4):
        if not after_step:
            ZEROS[zero](model, optimizer)
        if accumulate:
            with model.no_sync():
                (-2.0 * model(torch.ones(1, 4))).sum().backward()
        (-2.0 * model(torch.ones(1, 4))).sum().backward()
        optimizer.step()
        if after_step:
            ZEROS[zero](model, optimizer)
        weights.append(net.weight[0, 3].item())
    state.close()
    return weights


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("after_step", [False, True])
@pytest.mark.parametrize("zero", [zero for zero in ZEROS if zero != "never"])
def test_zeroed_gradients_do_not_come_back(gloo, zero, after_step, accumulate):
    """Averages were written over placeholders that had been zeroed, and added up: 2, 6, 12, 20."""
    wanted = [4.0, 8.0, 12.0, 16.0] if accumulate else [2.0, 4.0, 6.0, 8.0]
    assert gloo(2, _linear, zero, after_step, accumulate) == [wanted] * 2


def _zeroed(zero, make, codec, find, accumulate):
    """Weights and state after four steps without gradcomp, unfused and fused, as bytes; "side"
    is used by even steps only.
    """
    rank, out = torch.distributed.get_rank(), []
    for how in ("plain", "unfused", "fused"):
        torch.manual_seed(0)
        net = Net()
        split = split_parameters(net, predicate=not_norms)
        model = DDP(net, bucket_cap_mb=0.005, find_unused_parameters=find)
        optimizer = OPTIMIZERS[make](split)
        state = None
        if how == "plain":
            model.register_comm_hook(None, _in_rank_order)
        else:
            options = {"optimizer": optimizer if how == "fused" else None, "min_numel": 100}
            state = gradcomp.ddp.register(model, codec, exchange="all_gather", **options)
        for step in range(4):
            ZEROS[zero](model, optimizer)
            if accumulate:
                with model.no_sync():
                    backward(model, *batch(100 + step, rank))
            backward(model, *batch(step, rank), step if find else 0)
            optimizer.step()
        out.append(bits(net, optimizer))
        if state is not None:
            state.check_replicas()
            state.close()
    plain, unfused, fused = out
    return [
        [k for k in one if one[k] != two[k]] for one, two in ((plain, unfused), (unfused, fused))
    ]


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


@pytest.mark.parametrize(("find", "accumulate"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("zero", ZEROS)
def test_every_way_to_zero(gloo, zero, find, accumulate):
    world_size = 3 if zero == "model to zeros" else 2
    found = gloo(world_size, _zeroed, zero, "momentum", "identity", find, accumulate)
    assert found == [[[], []]] * world_size


@pytest.mark.parametrize("make", ["adamw", "adagrad", "lamb"])
@pytest.mark.parametrize("zero", ["optimizer to zeros", "model to zeros", "data.zero_"])
def test_unused_parameters_step_with_zeros(gloo, zero, make):
    """An unused parameter was skipped where plain DDP steps it with zero: 15 % off under AdamW."""
    assert gloo(2, _zeroed, zero, make, "identity", True, False) == [[[], []]] * 2


def _written(write, then):
    inputs = 1 if write in ONE_ELEMENT else 4
    net = nn.Linear(inputs, 1 if write in ONE_ELEMENT else 3, bias=inputs > 1)
    model, optimizer, state = sgd_on(net)
    model(torch.ones(1, inputs)).sum().backward()
    assert net.weight.grad.isnan().all()
    before = net.weight.detach().clone()
    (WRITES | ONE_ELEMENT)[write](net.weight.grad)
    calls = {
        "step": optimizer.step,
        "forward": lambda: model(torch.ones(1, inputs)),
        "clip": state.materialize_gradients,
    }
    with pytest.raises(GradcompError, match=r"'weight' was written to while it was still packed"):
        calls[then]()
    assert torch.equal(before, net.weight)
    model.zero_grad(set_to_none=False)  # all is well after it
    model(torch.ones(1, inputs)).sum().backward()
    optimizer.step()
    moved = (before - net.weight).unique().tolist()
    state.close()
    return moved


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
def test_a_gradient_that_is_written_to_is_refused(gloo, write, then):
    """A placeholder has one element: a zero in a row of it must not pass for a gradient of
    zeros, or be overlooked.
    """
    assert gloo(2, _written, write, then) == [[0.5]] * 2


def _copied():

    net = nn.Linear(4, 3)
    model, optimizer, state = sgd_on(net)
    model(torch.ones(1, 4)).sum().backward()
    file = io.BytesIO()
    torch.save(net.weight.grad, file)
    file.seek(0)
    for one in (
        copy.deepcopy(net.weight.grad),
        net.weight.grad.clone(),
        torch.load(file),
        net.weight.grad * 2,
        net.weight.grad.double(),
    ):
        assert type(one) is torch.Tensor
        assert one.isnan().all()
        one.zero_()
    assert net.weight.grad.to_sparse().layout == torch.sparse_coo
    assert net.weight.grad.to("meta").is_meta
    before = net.weight.detach().clone()
    optimizer.step()
    moved = (before - net.weight).unique().tolist()
    state.close()
    return moved


def test_copies_of_a_placeholder_are_plain_tensors(gloo):
    assert gloo(2, _copied) == [[0.5]] * 2


# ---- several backwards before a step -------------------------------------------------------------


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.heads = (
            nn.Linear(30, 40),
            nn.ModuleList([nn.Linear(40, 5), nn.Linear(40, 5)]),
        )

    def forward(self, x, heads):
        x = self.trunk(x).relu()
        return sum(self.heads[h](x).float() for h in heads)


def _several(plan, view, find):
    """Backwards of `plan`, one list of heads each, all of them synchronized, before every step."""
    out = []
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
                backward(model, *batch(10 * step + number, state._engine.comm.rank), heads)
            optimizer.step()
        state.check_replicas()
        out.append(bits(net, optimizer, state=False))
        state.close()
    return [k for k in out[0] if out[0][k] != out[1][k]]


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize(
    ("plan", "find"), [([[0, 1], [0, 1]], False), ([[0], [1]], True), ([[0, 1], [1], [0]], True)]
)
def test_backwards_that_add_up(gloo, view, plan, find):
    assert gloo(2, _several, plan, view, find) == [[], []]


def _exchange_fails():

    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    net = nn.Linear(64, 1)
    optimizer = SplitSGD(net.parameters(), lr=1.0)
    model = DDP(net)
    state = gradcomp.ddp.register(model, "onebit", optimizer=optimizer, timeout_s=60)
    before = net.weight.detach().clone()
    state._engine.step += rank  # as if this rank had been resumed from another checkpoint
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


def test_no_local_gradient_is_left_after_an_exchange_that_failed(pools):
    assert pools("gloo", 2, _exchange_fails) == [True, True]


def _closed_state():

    net = nn.Linear(1, 1)
    model, optimizer, state = sgd_on(net)
    model(torch.ones(1, 1)).sum().backward()
    state.close()
    with pytest.raises(GradcompError, match="is gone"):
        optimizer.step()
    return bool(torch.isfinite(net.weight).all())


def test_placeholders_of_a_closed_state_are_not_gradients(gloo):
    assert gloo(2, _closed_state) == [True, True]


def _joined():

    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    net = nn.Linear(30, 5)
    optimizer = SplitSGD(split_parameters(net), lr=0.1)
    model = DDP(net)
    gradcomp.ddp.register(model, "onebit", optimizer=optimizer, min_numel=1, timeout_s=30)

    def step(number):
        optimizer.zero_grad()
        backward(model, *batch(number, rank))
        optimizer.step()

    with model.join():
        for number in range(3 + 2 * rank):
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


# ---- values that are not finite ------------------------------------------------------------------


def _poisoned(codec, value, exchange):
    """The loss of one rank explodes at step 1; NaN and Inf reach the weights as they do unfused,
    residuals stay.
    """
    out = []
    for fused in (False, True):
        torch.manual_seed(0)
        net = nn.Linear(40, 30, bias=False)
        optimizer = SplitSGD(split_parameters(net), lr=1e-39)
        model = DDP(net)
        state = gradcomp.ddp.register(
            model, codec, optimizer=optimizer if fused else None, min_numel=0, exchange=exchange
        )
        rank = state._engine.comm.rank
        found = []
        for step in range(3):
            optimizer.zero_grad()
            x = torch.ones(1, 40).bfloat16()
            scale = value if step == 1 and (rank == 0 or value < 1e39) else 1.0
            (model(x).float().sum() * torch.tensor(scale, dtype=torch.float32)).backward()
            optimizer.step()
            found.append(fp32_state_dict(net, optimizer)["weight"].numpy().tobytes())
            residuals = state.state_dict()["residual"]
            found.append({k: v.numpy().tobytes() for k, v in residuals.items()})
        found.append(state.stats.nonfinite_buckets)
        state.close()
        out.append(found)
    return out[0] == out[1], out[1][-1]


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


# ---- registering, checking, resuming -------------------------------------------------------------


def _lines():

    def line(optimizer_of, **options):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 2))
        model = DDP(net)
        state = gradcomp.ddp.register(
            model, "terngrad", optimizer=optimizer_of(net), min_numel=0, **options
        )
        text = state.describe()
        state.close()
        return text

    torch.manual_seed(0)
    return [
        line(lambda net: torch.optim.SGD(net.parameters(), lr=0.1)),
        line(lambda net: SplitSGD(net[0].parameters(), lr=0.1)),
        line(
            lambda net: SplitSGD(net.parameters(), lr=0.1), grad_scaler=torch.amp.GradScaler("cpu")
        ),
        line(lambda net: SplitSGD(net.parameters(), lr=0.1)),
    ]


def test_the_log_line_says_whether_updates_are_fused(gloo):
    wanted = [
        "SGD is no split optimizer",
        "'1.weight' is not in the optimizer",
        "a grad_scaler needs the gradients",
    ]
    for *lines, fused in gloo(2, _lines):
        assert [line.split("updates are not fused: ")[1] for line in lines] == wanted
        assert fused.endswith("updates go straight from payloads to weights")


def _different(how):
    """DDP gives all ranks rank 0's tops; trails, or other state, are each rank's own."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank if how == "seed" else 0)
    net = nn.Linear(9, 9)
    split = split_parameters(net)
    model = DDP(net)
    optimizer = SplitSGD(split, lr=0.1, momentum=0.9 if how == "momentum" and rank else 0.0)
    if how == "passed":
        with pytest.raises(PeerMismatch, match="optimizer"):
            gradcomp.ddp.register(
                model, "terngrad", optimizer=optimizer if rank else None, timeout_s=60
            )
            model(torch.ones(1, 9).bfloat16()).sum().backward()
        return "passed"
    with pytest.raises(PeerMismatch) as error:
        gradcomp.ddp.register(model, "terngrad", optimizer=optimizer)
    return error.value.field


@pytest.mark.parametrize("how", ["seed", "momentum", "passed"])
def test_ranks_with_other_trails_or_optimizers_are_refused(pools, how):
    """Replicas that only look alike: their tops are equal and every later step would draw them
    apart.
    """
    assert (
        pools("gloo", 2, _different, how)
        == [{"seed": "optimizer", "momentum": "optimizer"}.get(how, how)] * 2
    )


def _split_too_late():

    net = nn.Linear(9, 9)
    model = DDP(net)
    with pytest.raises(TypeError, match="must come before DistributedDataParallel"):
        split_parameters(model)
    split_parameters(net)  # which cannot know
    with pytest.raises(
        ValueError,
        match=r"'weight' has become torch.bfloat16 after DistributedDataParallel was made",
    ):
        gradcomp.ddp.register(model, "terngrad")


def test_a_split_after_ddp_is_refused(gloo):
    """DDP listens to what it found when it was made: gradients of the new dtype would stay
    local, without a word.
    """
    gloo(2, _split_too_late)


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
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(30, 70), nn.ReLU(), nn.Linear(70, 5))
        optimizer = SplitAdamW(split_parameters(net), lr=0.01)
        model = DDP(net, bucket_cap_mb=0.005)
        options = {"optimizer": optimizer, "min_numel": 0}
        return net, optimizer, model, gradcomp.ddp.register(model, CODECS[codec][0](), **options)

    def go(run, steps):
        _, optimizer, model, state = run
        for step in steps:
            optimizer.zero_grad()
            backward(model, *batch(step, state._engine.comm.rank))
            optimizer.step()

    one = begin()
    go(one, range(3))
    saved = copy.deepcopy([one[0].state_dict(), one[1].state_dict(), one[3].state_dict()])
    go(one, range(3, 6))
    two = begin()
    for target, state in zip((two[0], two[1], two[3]), saved, strict=True):
        target.load_state_dict(state)
    go(two, range(3, 6))
    weights = [bits(n, o, state=False) for n, o, _, _ in (one, two)]
    for run in (one, two):
        run[3].close()
    return weights[0] == weights[1]


@pytest.mark.parametrize("codec", ["terngrad exact", "onebit gather"])
def test_a_resumed_fused_run_equals_the_uninterrupted_one(gloo, codec):
    assert gloo(2, _resumed, codec) == [True, True]


# ---- loss scaling --------------------------------------------------------------------------------


def _overflows(kind, codec, make):
    """bf16 weights and trails under a loss scaler; one rank overflows at steps 0, 3, 4 and 5."""
    torch.manual_seed(0)
    net = Net()
    split = split_parameters(net, predicate=not_norms)
    model, optimizer = DDP(net, bucket_cap_mb=0.005), OPTIMIZERS[make](split)
    scaler = (
        torch.amp.GradScaler("cpu", init_scale=64.0) if kind == "torch" else DynamicLossScaler(64.0)
    )
    state = gradcomp.ddp.register(
        model, codec, optimizer=optimizer, grad_scaler=scaler, min_numel=100
    )
    rank = state._engine.comm.rank

    def everything():
        saved = state.state_dict()  # residuals are in units of the loss scale, a power of two here
        residual = {
            k: (v / saved["loss_scale"]).numpy().tobytes()
            for k, v in saved["residual"].items()
            if v.any()
        }
        return bits(net, optimizer), residual

    unchanged, scales = [], []
    for step in range(9):
        optimizer.zero_grad()
        x, y = batch(step, rank)
        loss = nn.functional.cross_entropy(model(x), y)
        before = everything()
        bad = rank == 1 and step in (0, 3, 4, 5)
        scaler.scale(loss * (float("inf") if bad else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        after = everything()
        unchanged.append((before[0] == after[0], before[1] == after[1]))
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
            assert weights is (step in (0, 3, 4, 5)), step
            assert residual is (step in (0, 3, 4, 5) or codec == "terngrad"), step
        assert scales == [32.0] * 3 + [16.0, 8.0, 4.0] + [4.0] * 3


def _scaler_that_nobody_told():

    (model, optimizer, state), scaler = sgd_on(nn.Linear(9, 9), "terngrad"), DynamicLossScaler()
    scaler.scale(model(torch.ones(2, 9)).sum()).backward()
    before = model.module.weight.detach().clone()
    with pytest.raises(GradcompError, match=r"materialize_gradients\(\)"):
        scaler.step(optimizer)
    state.materialize_gradients()
    assert torch.equal(before, model.module.weight)
    state.close()


def test_a_scaler_on_packed_gradients_is_told_what_to_do(gloo):
    gloo(2, _scaler_that_nobody_told)
