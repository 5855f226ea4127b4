"""The outer optimizers: what moves the anchors by averaged pseudo-gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

Outer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
LR, MOMENTUM = 0.7, 0.9  # DiLoCo, section 3


def nesterov(anchors: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return DiLoCo's outer optimizer: SGD, 0.7, Nesterov momentum 0.9."""
    return torch.optim.SGD(anchors, lr=LR, momentum=MOMENTUM, nesterov=True)


def mean(anchors: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return what makes the anchors the mean of the ranks' parameters."""
    return torch.optim.SGD(anchors, lr=1.0)
