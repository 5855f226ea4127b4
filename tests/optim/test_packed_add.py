"""`packed_add` against its reference, and what split optimizers do with hooks, Dynamo, slices
and closures.
"""

import numpy as np
import pytest
import torch
from reference import optim as reference
from torch import nn

from gradcomp.errors import UnsupportedTensor
from gradcomp.onebit_sgd.adagrad import MomentumAdagrad
from gradcomp.optim import SplitAdagrad, SplitSGD, join, packed_add, split, split_parameters


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rounding", ["truncate", "nearest"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0,), (1,), (5000, 3), (16, 8, 3, 3)])
def test_packed_add_is_its_reference(rounding, dtype, shape):
    weight, delta = numbers(*shape), numbers(*shape, seed=1).to(dtype)
    if len(shape) == 4:
        weight = weight.to(memory_format=torch.channels_last)  # delta lies otherwise
    top, trail = split(weight, rounding=rounding)
    flat = [
        t.contiguous().view(-1).view(kind).numpy()
        for t, kind in ((top, torch.uint16), (trail, torch.uint16))
    ]
    values = delta.float().contiguous().view(-1).numpy()
    want = reference.packed_add(*(f.copy() for f in flat), values, -0.1, rounding)
    assert packed_add(top, trail, delta, alpha=-0.1, rounding=rounding) is top
    for found, wanted in zip((top, trail), want, strict=True):
        assert np.array_equal(found.contiguous().view(-1).view(torch.uint16).numpy(), wanted)


def test_a_rule_of_ones_own_trains_in_place():
    """Small steps that bf16 alone would lose add up in the trail."""
    net = nn.Linear(64, 64, bias=False)
    before = net.weight.detach().clone()
    optimizer = SplitSGD(split_parameters(net), lr=1.0)
    p, step = net.weight, torch.full((64, 64), 2.0**-20)
    for _ in range(4):
        packed_add(p, optimizer.trail(p), step)
    optimizer.keep_trails()
    torch.testing.assert_close(optimizer.fp32(p), before + 2.0**-18, rtol=0, atol=1e-7)
    p.grad = torch.ones_like(p)
    optimizer.step()


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"top": torch.zeros(4)}, UnsupportedTensor, "top is torch.float32"),
        ({"trail": torch.zeros(4)}, UnsupportedTensor, "trail is torch.float32"),
        (
            {"delta": torch.zeros(4, dtype=torch.float16)},
            UnsupportedTensor,
            "delta is torch.float16",
        ),
        ({"delta": torch.zeros(5)}, ValueError, "shape"),
        ({"trail": torch.zeros(8, dtype=torch.int16)[::2]}, UnsupportedTensor, "fill its memory"),
        ({"rounding": "up"}, ValueError, "rounding"),
    ],
)
def test_what_packed_add_refuses(change, error, text):
    given = {
        "top": torch.zeros(4).bfloat16(),
        "trail": torch.zeros(4, dtype=torch.int16),
        "delta": torch.ones(4),
    } | change
    with pytest.raises(error, match=text):
        packed_add(given.pop("top"), given.pop("trail"), given.pop("delta"), **given)


def test_hooks_may_add_to_the_state():
    """As torch's own tests of optimizers do: a number under a name that is no parameter's."""
    p = nn.Parameter(numbers(8).bfloat16())
    optimizer = SplitSGD([p], lr=0.1, momentum=0.9)
    optimizer.register_state_dict_pre_hook(lambda o: o.state.__setitem__("mine", 1))
    p.grad = torch.ones(8).bfloat16()
    optimizer.step()
    saved = optimizer.state_dict()
    assert saved["state"]["mine"] == 1 and "trail" in saved["state"][0]
    optimizer.keep_trails()
    optimizer.zero_trails()
    again = SplitSGD([p], lr=0.1, momentum=0.9)
    again.load_state_dict(saved)
    assert again.state["mine"] == 1 and torch.equal(again.trail(p), saved["state"][0]["trail"])
    again.step()


def test_compiled_steps_run_as_they_are():
    weights = []
    for compiled in (False, True):
        p = nn.Parameter(numbers(32).bfloat16())
        optimizer = SplitSGD([p], lr=0.1, momentum=0.9)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for _ in range(3):
            p.grad = numbers(32, seed=2).bfloat16()
            step()
        weights.append(join(p.detach(), optimizer.trail(p)))
    assert torch.equal(*weights)


def test_a_parameter_that_is_a_slice_is_refused_with_the_way_out():
    p = nn.Parameter(torch.zeros(8, 8)[:, :4])
    with pytest.raises(
        UnsupportedTensor, match=r"parameter 0 .* slice .*p\.data = p\.data\.contiguous\(\)"
    ):
        SplitSGD([p], lr=0.1)
    p.data = p.data.contiguous()
    SplitSGD([p], lr=0.1)


@pytest.mark.parametrize(
    "options", [{}, {"lr_decay": 0.1, "weight_decay": 0.01}, {"maximize": True, "eps": 1e-3}]
)
def test_closures_give_what_torchs_adagrad_gives(options):
    runs = []
    for kind in (torch.optim.Adagrad, SplitAdagrad):
        p, q = nn.Parameter(numbers(64)), nn.Parameter(numbers(16, seed=3))
        optimizer = kind([{"params": [p]}, {"params": [q], "lr": 1e-2}], lr=0.1, **options)

        def closure(p=p, q=q, optimizer=optimizer):
            optimizer.zero_grad()
            loss = p.square().sum() + (q - 1).square().sum() * p[0]
            loss.backward()
            return loss

        runs.append([optimizer.step(closure).item() for _ in range(5)] + [*p.tolist(), *q.tolist()])
    assert runs[1] == pytest.approx(runs[0], rel=1e-6, abs=1e-7)


def test_momentum_adagrad_keeps_its_sums_in_fp32():
    """In bfloat16 a sum stops growing once it is 512 times what is added."""
    p = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = MomentumAdagrad([p], lr=1e-3, momentum=0.0)
    for _ in range(700):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert torch.equal(optimizer.state[p]["sum"], torch.full((4,), 700.0))
    again = MomentumAdagrad([p], lr=1e-3, momentum=0.0)
    again.load_state_dict(optimizer.state_dict())
    assert (
        torch.equal(again.state[p]["sum"], torch.full((4,), 700.0))
        and again.state[p]["sum"].dtype == torch.float32
    )
