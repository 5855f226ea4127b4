"""Packed averages on the data-parallel dimension of a mesh, tensor-parallel layers on the other."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from _expected import average
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gradcomp import (
    Advanced,
    GradientAverager,
    Identity,
    OneBit,
    PeerMismatch,
    TernGrad,
    UnsupportedTensor,
)
from gradcomp.comm import TorchCommunicator
from gradcomp.exchange.sizing import choose
from gradcomp.onebit_sgd import AggregateAdagrad, DoubleBuffer


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(40, 48)
        self.up = nn.Linear(48, 62)
        self.down = nn.Linear(62, 48)
        self.head = nn.Linear(48, 10)

    def forward(self, x):
        return self.head(self.down(self.up(self.first(x).relu()).relu()))


def batch(step, column):
    generator = torch.Generator().manual_seed(100 * step + column)
    return torch.randn(8, 40, generator=generator), torch.randint(10, (8,), generator=generator)


def start():
    """Return mesh, the sharded model, and an equal one that is whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    whole = Net()
    model = parallelize_module(
        copy.deepcopy(whole), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )
    return mesh, model, whole


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


def loss(model, step, column):
    x, y = batch(step, column)
    return nn.functional.cross_entropy(model(x), y)


def against_the_expectation(codec, transform):
    """Compare three steps with the reference, shard by shard, and the first gradients with those
    of a whole model.
    """
    mesh, model, whole = start()
    group, column = mesh["dp"].get_group(), mesh["dp"].get_local_rank()
    averager = GradientAverager(
        model.named_parameters(),
        codec,
        comm=TorchCommunicator(group),
        min_numel=0,
        advanced=Advanced(transform=transform),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = choose(codec, 2, owner_transform=transform is not None)
    formulas = {
        name: Squares() if transform else (lambda mean: mean)
        for name, _ in model.named_parameters()
    }
    kept = {name: (None, None) for name in formulas}
    for step in range(3):
        optimizer.zero_grad()
        loss(model, step, column).backward()
        mine = {name: local(p.grad).clone() for name, p in model.named_parameters()}
        averager.average()
        for index, (name, p) in enumerate(model.named_parameters()):
            assert isinstance(p.grad, DTensor) == isinstance(p, DTensor)
            both = [torch.empty_like(mine[name]) for _ in range(2)]
            dist.all_gather(both, mine[name].contiguous(), group=group)
            residuals, owners = kept[name]
            wanted, *kept[name] = average(
                [g.numpy().ravel() for g in both],
                codec,
                strategy,
                step=step,
                parameter=index,
                shape=mine[name].shape,
                residuals=residuals,
                owner_residuals=owners,
                transform=formulas[name],
            )
            assert np.array_equal(local(p.grad).numpy().ravel(), wanted), name
        if step == 0 and isinstance(codec, Identity) and transform is None:
            for column_of in range(2):
                (loss(whole, 0, column_of) / 2).backward()
            for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
                full = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                assert torch.allclose(full, q.grad, atol=1e-6), name
        optimizer.step()
    averager.check_replicas()
    averager.close()
    return {name: local(p).detach().numpy().tobytes() for name, p in model.named_parameters()}


class Squares:
    def __init__(self):
        self.total = np.float32(0)

    def __call__(self, g):
        self.total = self.total + g * g
        return g / (np.sqrt(self.total) + np.float32(1e-10))


@pytest.mark.parametrize("transform", [None, AggregateAdagrad()], ids=["plain", "adagrad"])
@pytest.mark.parametrize("codec", [Identity(), OneBit(), TernGrad()], ids=repr)
def test_gradients_equal_the_exact_expectation(gloo, codec, transform):
    states = gloo(4, against_the_expectation, codec, transform)
    assert states[0] == states[2] and states[1] == states[3], (
        "columns of the mesh hold the same shards"
    )
    assert (
        states[0]["up.weight"] != states[1]["up.weight"]
        and states[0]["head.bias"] == states[1]["head.bias"]
    )


def double_buffered():
    mesh, model, _ = start()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group, column = mesh["dp"].get_group(), mesh["dp"].get_local_rank()
    with DoubleBuffer(
        model, optimizer, "onebit", comm=TorchCommunicator(group), min_numel=0
    ) as buffer:
        for step in range(3):
            x, y = batch(step, column)
            buffer.step(lambda a, b: nn.functional.cross_entropy(model(a), b), x, y)
        buffer.check_replicas()
    assert all(bool(local(p).isfinite().all()) for p in model.parameters())
    return local(model.up.weight).detach().numpy().tobytes()


def test_double_buffering_of_shards(gloo):
    a, b, c, d = gloo(4, double_buffered)
    assert a == c and b == d and a != b


def missing_and_wrong():
    mesh, model, _ = start()
    group, column = mesh["dp"].get_group(), mesh["dp"].get_local_rank()
    averager = GradientAverager(model.named_parameters(), Identity(), comm=TorchCommunicator(group))
    loss(model, 0, column).backward()
    if column == 0:
        model.up.weight.grad = None  # counts as zero, and comes back as a DTensor
    averager.average()
    assert (
        isinstance(model.up.weight.grad, DTensor)
        and model.up.weight.grad.placements == model.up.weight.placements
    )
    assert model.up.weight.grad.shape == (62, 48)
    model.up.weight.grad = model.up.weight.grad.redistribute(placements=[Replicate()])
    with pytest.raises(UnsupportedTensor, match="up.weight"):
        averager.average()
    whole = nn.Parameter(torch.zeros(64, 64))
    whole.grad = DTensor.from_local(torch.ones(64, 64), mesh["tp"], [Replicate()])
    other = GradientAverager([("whole", whole)], Identity(), comm=TorchCommunicator(group))
    with pytest.raises(UnsupportedTensor, match="whole"):
        other.average()
    other.close()
    averager.close()


def test_gradients_that_are_missing_or_placed_elsewhere(gloo):
    gloo(4, missing_and_wrong)


def mismatch(call):
    """Return the field in which the ranks differ."""
    try:
        call()
    except PeerMismatch as error:
        return error.field
    return "nothing"


def across_shards():
    _, model, _ = start()
    averager = GradientAverager(
        model.named_parameters(), "onebit", comm=TorchCommunicator(timeout_s=20), timeout_s=20
    )
    loss(model, 0, 0).backward()
    return mismatch(averager.average)


def test_a_group_that_spans_different_shards_is_a_mismatch(gloo):
    """Shards have one shape, so nothing but their place tells them apart."""
    assert gloo(4, across_shards) == ["layout"] * 4


def other_cuts():
    """Shards of as many values, cut along rows on one rank and along columns on the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    group, column = mesh["dp"].get_group(), mesh["dp"].get_local_rank()
    shape = (32, 64) if column else (64, 32)
    p = nn.Parameter(DTensor.from_local(torch.zeros(shape), mesh["tp"], [Shard(1 - column)]))
    averager = GradientAverager(
        [("w", p)], "terngrad", comm=TorchCommunicator(group, timeout_s=20), timeout_s=20
    )
    p.grad = DTensor.from_local(torch.ones(shape), mesh["tp"], [Shard(1 - column)])
    return mismatch(averager.average)


def test_shards_cut_along_other_dimensions_are_a_mismatch(gloo):
    assert gloo(4, other_cuts) == ["layout"] * 4


def tensors_swapped():
    mesh, model, _ = start()
    group, column = mesh["dp"].get_group(), mesh["dp"].get_local_rank()
    averager = GradientAverager(model.named_parameters(), Identity(), comm=TorchCommunicator(group))
    averager.check_replicas()
    model.double().float()  # torch swaps the tensors inside the parameters
    with torch.no_grad():
        model.up.weight.add_(column)
    return mismatch(averager.check_replicas)


def test_check_replicas_looks_at_the_shards_that_are_there_now(gloo):
    assert gloo(4, tensors_swapped) == ["parameter up.weight"] * 4
