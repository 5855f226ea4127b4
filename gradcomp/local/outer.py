"""The outer optimizers: what moves the anchors by averaged pseudo-gradients. `SplitSGD` on fp32
anchors is torch's SGD in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from gradcomp.memory.transform import Transform
from gradcomp.optim import SplitSGD

Outer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
LR, MOMENTUM = 0.7, 0.9  # DiLoCo, section 3


def options_of(optimizer: torch.optim.Optimizer) -> str:
    """Return a text of an optimizer and its options, those too that its repr does not show."""
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
    """Whether a value is made of numbers and texts alone, so that its repr is the same on every
    rank.
    """
    if isinstance(value, (list, tuple, dict)):
        return all(
            map(_is_plain, [*value.keys(), *value.values()] if isinstance(value, dict) else value)
        )
    return value is None or isinstance(value, (bool, int, float, str))


def nesterov(anchors: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return DiLoCo's outer optimizer: SGD, 0.7, Nesterov momentum 0.9."""
    return SplitSGD(anchors, lr=LR, momentum=MOMENTUM, nesterov=True)


def mean(anchors: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return what makes the anchors the mean of the ranks' parameters."""
    return SplitSGD(anchors, lr=1.0)


class OwnedMomentum(Transform):
    """SGD with momentum on the mean of what a rank owns, before it is encoded for the others: each
    has its share of the state.

    ``m' = momentum * m + d``, ``d' = lr * (d + momentum * m')`` with Nesterov's, ``d' = lr * m'``
    without, as torch.optim.SGD in fp32.

    Args:
        lr, momentum, nesterov: as of `torch.optim.SGD`.
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
    """Return what owners do to means in place of an outer optimizer, and what then moves the
    anchors: by what arrives.

    Args:
        outer: makes the optimizer; its rate is read once.
        count: of anchors.

    Raises:
        ValueError: an optimizer other than SGD with one rate and momentum for all.
    """
    made = outer([nn.Parameter(torch.zeros(1, device="cpu")) for _ in range(count)])
    group = made.param_groups[0]
    plain = type(made) in (torch.optim.SGD, SplitSGD) and not (
        group["weight_decay"] or group["dampening"] or group["maximize"]
    )
    if not plain or len(made.param_groups) > 1 or isinstance(group["lr"], Tensor):
        raise ValueError(
            "shard_outer shares out the momentum of torch.optim.SGD(lr, momentum, nesterov), the"
            f" same for all anchors; this is {made!r}"
        )
    return OwnedMomentum(group["lr"], group["momentum"], group["nesterov"]), mean
