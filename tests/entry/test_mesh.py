"""Packed averages on the data-parallel dimension of a mesh, tensor-parallel layers on the other."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from _expected import Adagrad, average
from _models import bits, loss_of, minibatch
from _ranks import each_rank
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


class Mesh:
    """A two by two mesh, a sharded model and an equal one that is whole, an averager of columns.

    Attributes:
        column: place of this rank among those that hold the same shards.
    """

    def __init__(self, codec=None, **options):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        self.whole, self.tensor = Net(), mesh["tp"]
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        self.model = parallelize_module(copy.deepcopy(self.whole), mesh["tp"], plan)
        self.group, self.column = mesh["dp"].get_group(), mesh["dp"].get_local_rank()
        if codec is not None:
            self.averager = self.averager_of(self.model.named_parameters(), codec, **options)

    def averager_of(self, named, codec, **options):
        comm = TorchCommunicator(self.group, timeout_s=20)
        return GradientAverager(named, codec, comm=comm, timeout_s=20, **options)

    def backward(self, step):
        loss_of(self.model, step, self.column, features=40).backward()


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


@pytest.mark.parametrize("transform", [None, AggregateAdagrad()], ids=["plain", "adagrad"])
@pytest.mark.parametrize("codec", [Identity(), OneBit(), TernGrad()], ids=repr)
@each_rank(4)
def test_gradients_equal_the_exact_expectation(codec, transform):
    """Three steps as the reference has them, shard by shard, and the first gradients as those of
    a whole model.
    """
    mesh = Mesh(codec, min_numel=0, advanced=Advanced(transform=transform))
    optimizer = torch.optim.SGD(mesh.model.parameters(), lr=0.1)
    strategy = choose(codec, 2, owner_transform=transform is not None)
    named = dict(mesh.model.named_parameters())
    formulas = {name: Adagrad() if transform else (lambda mean: mean) for name in named}
    kept = {name: (None, None) for name in named}
    for step in range(3):
        optimizer.zero_grad()
        mesh.backward(step)
        mine = {name: local(p.grad).clone().contiguous() for name, p in named.items()}
        mesh.averager.average()
        for index, (name, p) in enumerate(named.items()):
            assert isinstance(p.grad, DTensor) == isinstance(p, DTensor)
            both = [torch.empty_like(mine[name]) for _ in range(2)]
            dist.all_gather(both, mine[name], group=mesh.group)
            wanted, *kept[name] = average(
                [g.numpy().ravel() for g in both],
                codec,
                strategy,
                step=step,
                parameter=index,
                shape=mine[name].shape,
                residuals=kept[name][0],
                owner_residuals=kept[name][1],
                transform=formulas[name],
            )
            assert np.array_equal(local(p.grad).numpy().ravel(), wanted), name
        if step == 0 and isinstance(codec, Identity) and transform is None:
            for column in range(2):
                (loss_of(mesh.whole, 0, column, features=40) / 2).backward()
            for p, q in zip(named.values(), mesh.whole.parameters(), strict=True):
                full = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                assert torch.allclose(full, q.grad, atol=1e-6)
        optimizer.step()
    mesh.averager.check_replicas()
    mesh.averager.close()
    found = [b""] * 4
    dist.all_gather_object(found, bits([local(named["up.weight"])]))
    assert found[0] == found[2] != found[1] == found[3], "columns hold the same shards"
    return bits([named["head.bias"]])


@each_rank(4)
def test_double_buffering_of_shards():
    mesh = Mesh()
    optimizer = torch.optim.SGD(mesh.model.parameters(), lr=0.1)
    comm = TorchCommunicator(mesh.group)
    with DoubleBuffer(mesh.model, optimizer, "onebit", comm=comm, min_numel=0) as buffer:
        for step in range(3):
            x, y = minibatch(step, mesh.column, features=40)
            buffer.step(lambda a, b: nn.functional.cross_entropy(mesh.model(a), b), x, y)
        buffer.check_replicas()
    assert all(bool(local(p).isfinite().all()) for p in mesh.model.parameters())


@each_rank(4)
def test_gradients_that_are_missing_or_placed_elsewhere():
    mesh = Mesh(Identity())
    mesh.backward(0)
    weight = mesh.model.up.weight
    if mesh.column == 0:
        weight.grad = None  # counts as zero, and comes back as a DTensor
    mesh.averager.average()
    assert isinstance(weight.grad, DTensor) and weight.grad.placements == weight.placements
    assert weight.grad.shape == (62, 48)
    weight.grad = weight.grad.redistribute(placements=[Replicate()])
    with pytest.raises(UnsupportedTensor, match="up.weight"):
        mesh.averager.average()
    whole = nn.Parameter(torch.zeros(64, 64))
    whole.grad = DTensor.from_local(torch.ones(64, 64), mesh.tensor, [Replicate()])
    with pytest.raises(UnsupportedTensor, match="whole"):
        mesh.averager_of([("whole", whole)], Identity()).average()
    mesh.averager.close()


def differs(call):
    """Return the field in which the ranks differ."""
    with pytest.raises(PeerMismatch) as caught:
        call()
    return caught.value.field


@each_rank(4)
def test_shards_that_are_not_the_same_are_a_mismatch():
    """Of a group that spans different shards: they have one shape, so nothing but their place
    tells them apart. And shards of as many values, cut along rows on one rank and along columns on
    the other.
    """
    mesh = Mesh()
    comm = TorchCommunicator(timeout_s=20)
    across = GradientAverager(mesh.model.named_parameters(), "onebit", comm=comm, timeout_s=20)
    mesh.backward(0)
    assert differs(across.average) == "layout"
    shape, places = (32, 64) if mesh.column else (64, 32), [Shard(1 - mesh.column)]
    p = nn.Parameter(DTensor.from_local(torch.zeros(shape), mesh.tensor, places))
    averager = mesh.averager_of([("w", p)], "terngrad")
    p.grad = DTensor.from_local(torch.ones(shape), mesh.tensor, places)
    assert differs(averager.average) == "layout"


@each_rank(4)
def test_check_replicas_looks_at_the_shards_that_are_there_now():
    mesh = Mesh(Identity())
    mesh.averager.check_replicas()
    mesh.model.double().float()  # torch swaps the tensors inside the parameters
    with torch.no_grad():
        mesh.model.up.weight.add_(mesh.column)
    assert differs(mesh.averager.check_replicas) == "parameter up.weight"
