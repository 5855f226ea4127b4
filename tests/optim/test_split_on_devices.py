"""Split optimizers on an accelerator: torch operations update weights, trails and moments to the
bits of the C kernels.

What torch operations do to one parameter is in `tests/kernels/test_update.py`; entry points that
train split weights are in `tests/entry/test_accelerator.py`.
"""

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
from _ranks import each_rank
from _saved import bits_of
from torch import nn

from gradcomp import UnsupportedTensor, kernels
from gradcomp.kernels.weights import TorchWeights
from gradcomp.optim import (
    SplitAdagrad,
    SplitAdamW,
    SplitLAMB,
    SplitSGD,
    fp32_state_dict,
    join,
    load_fp32_state_dict,
    packed_add,
    split,
    split_parameters,
)
from gradcomp.optim.split import check_dense, checksum, wait

MAKERS = {
    "sgd": lambda p: SplitSGD(p, lr=0.1),
    "sgd, weight decay": lambda p: SplitSGD(p, lr=0.1, weight_decay=0.01, maximize=True),
    "sgd, momentum": lambda p: SplitSGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "sgd, nesterov": lambda p: SplitSGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: SplitAdagrad(p, lr=0.1),
    "adagrad, all": lambda p: SplitAdagrad(
        p, lr=0.1, lr_decay=0.01, weight_decay=0.01, initial_accumulator_value=0.1, maximize=True
    ),
    "adamw": lambda p: SplitAdamW(p, lr=0.01, weight_decay=0.1, maximize=True),
    "adamw, small betas": lambda p: SplitAdamW(p, lr=0.01, betas=(0.3, 0.6), weight_decay=0.0),
    "lamb": lambda p: SplitLAMB(p, lr=0.01),
    "lamb, no decay": lambda p: SplitLAMB(p, lr=0.01, weight_decay=0.0, maximize=True),
    "nvlamb": lambda p: SplitLAMB(p, lr=0.01, variant="nvlamb"),
}
SHAPES = (1,), (0, 3), (13, 7), (70_001,), (16, 8, 3, 3)
SPECIAL = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, -1e-40, 3e38, 2**-126])


class Model(nn.Module):
    """Parameters of many sizes: one channels-last, one with all pairs of special values."""

    def __init__(self):
        super().__init__()
        draws = torch.Generator().manual_seed(0)
        tensors = [torch.randn(shape, generator=draws) for shape in SHAPES]
        tensors[-1] = tensors[-1].to(memory_format=torch.channels_last)
        pairs = list(itertools.product(SPECIAL, SPECIAL))
        self.parts = nn.ParameterList([*tensors, torch.stack([a for a, _ in pairs])])
        self._special = torch.stack([b for _, b in pairs])

    def give_gradients(self, step):
        draws = torch.Generator().manual_seed(step + 1)
        for p in self.parts:
            g = 10 * torch.randn(p.shape, generator=draws)  # contiguous; NVLAMB divides it
            g = self._special if p is self.parts[-1] and step == 1 else g
            p.grad = g.to(p.device, p.dtype)


def trained(make, rounding, *, wide=(), device="cpu", steps=3):
    """Return a model and its optimizer after some steps; `wide`: parts that stay fp32."""
    model = Model().to(device)
    parameters = split_parameters(
        model, predicate=lambda name, p: name not in wide, rounding=rounding
    )
    optimizer = make(parameters)
    for step in range(steps):
        go_on(model, optimizer, step)
    return model, optimizer


def go_on(model, optimizer, step):
    model.give_gradients(step)
    optimizer.step()


def bits(model, optimizer):
    """Return the bits of weights, joined and not, and of the optimizer's state."""
    state = [optimizer.state[p] for p in model.parameters()]
    return bits_of([list(model.parameters()), state, dict(fp32_state_dict(model, optimizer))])


@pytest.fixture
def in_torch(monkeypatch):
    """Return a function that makes torch operations update the CPU's weights, too."""
    return lambda: monkeypatch.setattr(kernels, "of_weights", TorchWeights)


# ---- the arithmetic, on the CPU ------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("rounding", ["truncate", "nearest"])
@pytest.mark.parametrize("wide", [(), ("parts.2", "parts.5")], ids=["split", "mixed"])
def test_steps_are_those_of_c(name, rounding, wide, in_torch):
    expected = bits(*trained(MAKERS[name], rounding, wide=wide))
    in_torch()
    assert bits(*trained(MAKERS[name], rounding, wide=wide)) == expected


@pytest.mark.parametrize("rounding", ["truncate", "nearest"])
def test_split_join_and_packed_add_are_those_of_c(rounding, in_torch):
    def results():
        found = []
        for weight in (*Model().parts, torch.zeros(())):
            top, trail = split(weight.detach(), rounding=rounding)
            found += [top.clone(), trail.clone(), join(top, trail, rounding=rounding)]
            delta = torch.full(weight.shape, 0.3, dtype=torch.bfloat16)
            found += [packed_add(top, trail, delta, alpha=0.1, rounding=rounding), trail]
        return bits_of(found)

    expected = results()
    in_torch()
    assert results() == expected


@pytest.mark.parametrize("make", [MAKERS["sgd"], MAKERS["adagrad"]], ids=["sgd", "adagrad"])
def test_sparse_steps_are_those_of_c(make, in_torch):
    def results():
        torch.manual_seed(0)
        net = nn.Embedding(20, 7, sparse=True)
        optimizer = make(split_parameters(net))
        for step in range(3):
            net(torch.tensor([3, 5, 6 + step])).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return bits(net, optimizer)

    expected = results()
    in_torch()
    assert results() == expected


# ---- on a device ---------------------------------------------------------------------------------


@each_rank(1, "accelerator")
def test_bits_on_a_device_are_those_of_the_cpu():
    device = torch.accelerator.current_accelerator().type
    for number, name in enumerate(("sgd", "sgd, nesterov", "adagrad, all", "adamw", "nvlamb")):
        rounding = ("truncate", "nearest")[number % 2]
        wide = ("parts.2",)
        expected = bits(*trained(MAKERS[name], rounding, wide=wide))
        model, optimizer = trained(MAKERS[name], rounding, wide=wide, device=device)
        assert bits(model, optimizer) == expected, name
        state = [t for p in model.parameters() for t in optimizer.state[p].items()]
        assert all(t.is_cpu == (key in ("step", "top_checksum")) for key, t in state)
    with torch.device(device):  # whose steps are counted on the host all the same
        p = nn.Parameter(torch.zeros(3))
        assert SplitSGD([p]).state[p]["step"].is_cpu and not p.is_cpu


@each_rank(1, "accelerator")
def test_parameters_on_several_devices_are_one_step():
    device = torch.accelerator.current_accelerator().type
    last = torch.accelerator.device_count() - 1
    for name in ("sgd, momentum", "lamb", "nvlamb"):
        model, optimizer = trained(MAKERS[name], "nearest", steps=0)
        found = Model()
        for part, p in enumerate(found.parts):
            there = ("cpu", f"{device}:0", f"{device}:{last}")[part % 3]
            found.parts[part] = nn.Parameter(p.detach().to(there))
        split_over = MAKERS[name](split_parameters(found, rounding="nearest"))
        for step in range(2):
            go_on(model, optimizer, step)
            go_on(found, split_over, step)
        assert bits(found, split_over) == bits(model, optimizer)


@each_rank(1, "accelerator")
def test_a_state_goes_from_a_device_to_the_cpu_and_back():
    device, make = torch.accelerator.current_accelerator().type, MAKERS["adamw"]
    model, optimizer = trained(make, "nearest", device=device)
    for there in ("cpu", device, "cpu"):
        again, resumed = trained(make, "nearest", device=there, steps=1)
        again.load_state_dict(model.state_dict())
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        go_on(again, resumed, 3)
        by_fp32, loaded = trained(make, "nearest", device=there, steps=0)
        load_fp32_state_dict(by_fp32, loaded, fp32_state_dict(model, optimizer))
        assert bits_of(dict(fp32_state_dict(by_fp32, loaded))) == bits_of(
            dict(fp32_state_dict(model, optimizer))
        )
        model, optimizer = trained(make, "nearest", device=device)
        go_on(model, optimizer, 3)
        assert bits(again, resumed) == bits(model, optimizer)
        assert {p.device.type for p in again.parameters()} == {there}
        model, optimizer = trained(make, "nearest", device=device)


@each_rank(1, "accelerator")
def test_a_model_that_is_moved_after_the_split_takes_its_trails_along():
    """``model.cuda()`` keeps the parameters' objects, so a trail waits in host memory. The device
    for tests gets new objects, so their trails are registered here.
    """
    device = torch.accelerator.current_accelerator().type
    split_here, model = Model(), Model()
    first = SplitSGD(split_parameters(split_here, rounding="nearest"), lr=0.1)
    for part, p in enumerate(split_here.parts):
        model.parts[part] = nn.Parameter(p.detach().to(device))
        wait(model.parts[part], first.trail(p), checksum(p), "nearest")
    optimizer = SplitSGD(model.parameters(), lr=0.1)
    assert bits_of(dict(fp32_state_dict(model, optimizer))) == bits_of(dict(Model().state_dict()))
    go_on(model, optimizer, 0)
    assert bits(model, optimizer) == bits(*trained(MAKERS["sgd"], "nearest", steps=1))


@each_rank(1, "accelerator")
def test_a_model_that_is_moved_away_from_its_optimizer_is_refused():
    """``model.cuda()`` moves the parameters that an optimizer has, and not its state. On the device
    for tests the state is moved.
    """
    device = torch.accelerator.current_accelerator().type
    for here, there in (("cpu", device), (device, "cpu")):
        for make, dtype, key in (
            (MAKERS["sgd"], torch.bfloat16, "trail"),
            (MAKERS["sgd, momentum"], torch.float32, "momentum_buffer"),
        ):
            model = nn.Linear(3, 2, bias=False, dtype=dtype).to(there)
            optimizer = make(model.parameters())
            state = optimizer.state[model.weight]
            state[key] = state[key].to(here)
            model.weight.grad = torch.ones_like(model.weight)
            text = f"parameter 0 of group 0 is on {there}.*, its {key} on {here}.*: move the model"
            before = bits_of(model.weight)
            with pytest.raises(ValueError, match=text):
                optimizer.step()
            if key == "trail":
                with pytest.raises(ValueError, match=f"its trail on {here}"):
                    optimizer.set_fp32(model.weight, torch.ones(2, 3))
                joined = join(model.weight.detach(), optimizer.trail(model.weight))
                assert joined.device.type == there
                with pytest.raises(UnsupportedTensor, match=f"trail is on {here}"):
                    trail = optimizer.trail(model.weight)
                    packed_add(model.weight, trail, torch.ones_like(model.weight))
            assert bits_of(model.weight) == before


# ---- what is refused -----------------------------------------------------------------------------


def test_devices_that_are_refused(monkeypatch):
    with pytest.raises(UnsupportedTensor, match="parameter 0 of the group is on meta: not supp"):
        SplitSGD([nn.Parameter(torch.zeros(4, device="meta"))])
    monkeypatch.setattr(kernels, "check_device", print)
    with pytest.raises(UnsupportedTensor, match="w is on mps:0, which has no float64, .* the CPU"):
        check_dense(SimpleNamespace(device=torch.device("mps", 0)), "w")
    with pytest.raises(UnsupportedTensor, match="on cpu are not updated from payloads yet"):
        TorchWeights(kernels.CPU).update(None, None, None, payloads=[])
