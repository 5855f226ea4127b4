"""What is trained: the workloads of `gradcomp.bench.accuracy`, larger ones, and tensors of any
size without a task.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradcomp.bench.accuracy import workloads as smaller
from gradcomp.bench.accuracy.workloads import Images, Settings, Text, Workload
from gradcomp.bench.models import ByteGPT, SmallResNet


class Noise(Workload):
    """Random inputs and targets: time and bytes without a task.

    Args:
        name: for tables.
        make: returns a new model of `width` inputs.
        width: of an input.
        batch: samples of a rank and step.
    """

    measure, lower_is_better = "", True

    def __init__(self, name: str, make: Callable[[], nn.Module], width: int, batch: int) -> None:
        self.name, self._make, self._width = name, make, width
        self.settings = Settings(30, batch, None, 0.0, {"sgd": 1e-3, "adamw": 1e-4})

    def model(self) -> nn.Module:
        return self._make()

    def minibatch(self, generator: torch.Generator, count: int) -> Tensor:
        return torch.randn(count, self._width, generator=generator)

    def loss(self, model: nn.Module, minibatch: Any) -> Tensor:
        out: Tensor = model(minibatch)
        return out.square().mean()

    def test(self, model: nn.Module, *, quick: bool = False) -> float:
        return float("nan")


def mlp() -> nn.Module:
    """Return a perceptron of 25,214,986 values, 16.8 million of them in one tensor."""
    return nn.Sequential(
        nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)
    )


def random(numel: int) -> nn.Module:
    """Return layers of 1024 x 1024, as many as make up `numel` values, the last one smaller."""
    side = 1024
    layers = [nn.Linear(side, side, bias=False) for _ in range(numel // side**2)]
    rest = numel % side**2 // side
    return nn.Sequential(*layers, *([nn.Linear(side, rest, bias=False)] if rest else []))


def _gpt25(folder: Path) -> Workload:
    model = smaller.WORKLOADS["gpt-6m"](folder)
    assert isinstance(model, Text)
    model.name = "gpt-25m"
    model.model = lambda: ByteGPT(width=512, layers=8, heads=8, context=128)  # type: ignore[method-assign]
    model.settings = Settings(300, 4, 1.0, 0.05, {"adamw": 6e-4, "sgd": 0.3})
    return model


def _resnet18(folder: Path) -> Workload:
    images = smaller.WORKLOADS["resnet"](folder)
    assert isinstance(images, Images)
    images.name = "resnet-11m"
    images.model = lambda: SmallResNet(width=64)  # type: ignore[method-assign]
    return images


WORKLOADS: dict[str, Callable[[Path], Workload]] = {
    **smaller.WORKLOADS,
    "gpt-25m": _gpt25,
    "resnet-11m": _resnet18,
    "mlp": lambda folder: Noise("mlp", mlp, 2048, 16),
}
OPTIMIZER = {
    "lenet": "sgd",
    "resnet": "sgd",
    "resnet-11m": "sgd",
    "mlp": "sgd",
}  # the others' is AdamW


def find(name: str, folder: Path, batch: int | None = None) -> Workload:
    """Return a workload by its name, or ``random:N`` for N values without a task.

    Args:
        name: of it.
        folder: with its data.
        batch: samples of a rank's minibatch; None: as many as it usually has.

    Raises:
        ValueError: there is none of that name, or N is too small.
        FileNotFoundError: its data is not in the folder.
    """
    found = _find(name, folder)
    if batch is not None:
        found.settings = replace(found.settings, batch=batch, shared=False)
    return found


def _find(name: str, folder: Path) -> Workload:
    word, _, count = name.partition(":")
    if word == "random":
        if not count.isdigit() or int(count) < 1024:
            raise ValueError(f"random:N takes a number of values of at least 1024, got {name!r}")
        return Noise(name, lambda: random(int(count)), 1024, 16)
    if name not in WORKLOADS:
        raise ValueError(
            f"no workload named {name!r}; there are {', '.join(WORKLOADS)} and random:N"
        )
    return WORKLOADS[name](folder)
