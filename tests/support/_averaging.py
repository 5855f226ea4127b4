"""Averages of given gradients, for tests of what a step computes and keeps."""

import torch
from _saved import parts_of
from torch import nn

from gradcomp import Advanced, GradientAverager

RARE = (
    "nodes",
    "transform",
    "slice_numel",
    "quality_every",
    "guard",
    "scale_lr",
)  # options of `Advanced`


def gradient(name, shape, step, rank):
    """Return normal values, the same for the same arguments."""
    generator = torch.Generator().manual_seed(7919 * step + 31 * rank + len(name))
    return torch.randn(shape, generator=generator)


class Scale:
    """Stands for a loss scaler, whose scale is what the test says."""

    def __init__(self, value):
        self.value = value

    def get_scale(self):
        return self.value


class Run:
    """An averager and its parameters by name.

    Args:
        shapes: of the parameters, by name.
        gradient: what makes a gradient, called as the function above.
        options: of GradientAverager and of `Advanced`, mixed.
    """

    def __init__(self, comm, codec, shapes, *, dtype=torch.float32, gradient=gradient, **options):
        self.rank, self.gradient = comm.rank, gradient
        zeros = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
        self.named = {name: nn.Parameter(zero) for name, zero in zeros.items()}
        options = {"min_numel": 0, "timeout_s": 20, **options}
        rare = Advanced(**{name: options.pop(name) for name in RARE if name in options})
        self.averager = GradientAverager(
            self.named.items(), codec, comm=comm, advanced=rare, **options
        )

    def fill(self, number, scale=1.0):
        """Give every parameter its gradient of a step."""
        for name, p in self.named.items():
            p.grad = (self.gradient(name, p.shape, number, self.rank) * scale).to(p.dtype)

    def step(self, number, scale=1.0):
        """Return the averages of a step by name."""
        self.fill(number, scale)
        self.averager.average()
        return {name: p.grad.clone() for name, p in self.named.items()}

    def steps(self, *numbers):
        """Return the averages of several steps: of `range(*numbers)`."""
        return [self.step(number) for number in range(*numbers)]

    def given(self, *numbers):
        """Return this rank's gradients of several steps: of `range(*numbers)`."""
        shapes = {name: p.shape for name, p in self.named.items()}
        return [
            {name: self.gradient(name, shape, number, self.rank) for name, shape in shapes.items()}
            for number in range(*numbers)
        ]

    def state(self):
        return self.averager.state_dict()

    def parts(self):
        """Return the tensors of this rank's state, by part and name."""
        return parts_of(self.state())


def same(one, other):
    """Whether two dictionaries hold the same tensors, to the bit."""
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
