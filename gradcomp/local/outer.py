"""Outer optimizers, which update the anchors with averaged pseudo-gradients. `SplitSGD` on fp32
anchors equals torch's SGD, in a single pass over memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from gradcomp.memory.transform import Transform
from gradcomp.optim import SplitSGD

Outer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
LR, MOMENTUM = 0.7, 0.9  # DiLoCo, section 3


def options_of(optimizer: torch.optim.Optimizer) -> str:
    """Return a text of an optimizer and its options, including those missing from its repr."""
    shown = {
        key: value
        for key, value in vars(optimizer).items()
        if key not in ("state", "param_groups") and _is_plain(value)
    }
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__} {groups} {shown}"


def _is_plain(value: object) -> bool:
    """Whether a value consists of numbers and strings only, so that equal values have equal reprs
    on all ranks.
    """
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def nesterov(anchors: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return DiLoCo's outer optimizer: SGD with learning rate 0.7 and Nesterov momentum 0.9."""
    return SplitSGD(anchors, lr=LR, momentum=MOMENTUM, nesterov=True)


def mean(anchors: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an outer optimizer that sets the anchors to the mean of all ranks' parameters."""
    return SplitSGD(anchors, lr=1.0)


class OwnedMomentum(Transform):
    """SGD with momentum on the means that a rank owns, before they are encoded for the other ranks.
    So every rank has only its shard of the momentum.

    ``m' = momentum * m + d``, ``d' = lr * (d + momentum * m')`` with Nesterov momentum, otherwise
    ``d' = lr * m'``, as torch.optim.SGD in fp32.

    Args:
        lr, momentum, nesterov: see `torch.optim.SGD`.
    """

    place = "owner"

    def __init__(self, lr: float, momentum: float, nesterov: bool) -> None:
        self.lr, self.momentum, self.nesterov = lr, momentum, nesterov

    def apply(self, values: Tensor, old: Tensor, new: Tensor) -> None:
        torch.mul(old, self.momentum, out=new).add_(values)
        if self.nesterov:
            values.add_(new, alpha=self.momentum)
        else:
            values.copy_(new)
        values.mul_(self.lr)

    def options(self) -> dict[str, object]:
        return {"lr": self.lr, "momentum": self.momentum, "nesterov": self.nesterov}


def at_owners(outer: Outer, count: int) -> tuple[OwnedMomentum, Outer]:
    """Return the transform that applies an outer optimizer at owners, and the outer optimizer that
    then adds the averaged steps to the anchors.

    Args:
        outer: creates the optimizer; its learning rate is read once.
        count: number of anchors.

    Raises:
        ValueError: not SGD, or more than one learning rate or momentum.
    """
    optimizer = outer([nn.Parameter(torch.zeros(1, device="cpu")) for _ in range(count)])
    group = optimizer.param_groups[0]
    plain = type(optimizer) in (torch.optim.SGD, SplitSGD) and not (
        group["weight_decay"] or group["dampening"] or group["maximize"]
    )
    if not plain or len(optimizer.param_groups) > 1 or isinstance(group["lr"], Tensor):
        raise ValueError(
            "shard_outer shares out the momentum of torch.optim.SGD(lr, momentum, nesterov), the"
            f" same for all anchors; this is {optimizer!r}"
        )
    return OwnedMomentum(group["lr"], group["momentum"], group["nesterov"]), mean
