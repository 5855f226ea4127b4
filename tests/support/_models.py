"""A small model, its minibatches, and how it is trained, for tests of entry points."""

import copy

import torch
from _saved import bits_of
from torch import nn

from gradcomp import GradientAverager


def small_model(dtype=torch.float32, seed=0):
    """Return three layers of 64, 128, 64 and 10 units, the same for every call.

    Ranks that are threads share torch's generator: they copy a model that was made before.
    """
    torch.manual_seed(seed)
    layers = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    return nn.Sequential(*layers).to(dtype)


MODEL = small_model()


def minibatch(step, rank, dtype=torch.float32, features=64, classes=10):
    """Return 8 inputs and classes."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, features, generator=generator).to(dtype)
    return x, torch.randint(classes, (8,), generator=generator)


def loss_of(model, step, rank, **sizes):
    """Return the model's loss for a rank's minibatch."""
    x, y = minibatch(step, rank, next(model.parameters()).dtype, **sizes)
    return nn.functional.cross_entropy(model(x).float(), y)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model, optimizer, rank, steps, after_backward=lambda: None, **sizes):
    """Take an optimizer's step for each number of `steps`."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, rank, **sizes).backward()
        after_backward()
        optimizer.step()


def bits(tensors):
    """Return the bytes of tensors, or of a model's parameters."""
    tensors = tensors.parameters() if isinstance(tensors, nn.Module) else tensors
    return b"".join(raw for _, _, raw in map(bits_of, tensors))


def averager_of(comm, codec="terngrad", model=MODEL, **options):
    """Return a copy of a model, and its averager; 20 s are its timeout unless it says another."""
    model = copy.deepcopy(model)
    return model, GradientAverager(model, codec, comm=comm, **{"timeout_s": 20, **options})


def filled(model, value):
    """Give every parameter a gradient that is this value everywhere."""
    for p in model.parameters():
        p.grad = torch.full_like(p, value)
