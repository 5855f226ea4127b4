"""Keeps the length of Adam's steps: codes add noise to the squares that Adam averages, and Adam
divides by their root.

A phase that decodes x to q multiplies what Adam averages of gradients by s = E[qx] / E[x^2], and
the root of what it averages of squares by sqrt(E[q^2] / E[x^2]). So steps are shorter by a factor
of sqrt(E[q^2] E[x^2]) / E[qx] for each phase. With ``precondition=True`` that is about the same for
all elements, and a larger learning rate undoes it: the rate is multiplied during each step.

The factor is that of normally distributed x. It takes gradients to be mostly noise, as those of
small minibatches are; otherwise errors of the first phase partly average out over the ranks, and it
is too large. Measurements: docs/explanation/accuracy.md, "Entropy-coded codes".
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from functools import lru_cache
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradcomp.codecs import Codec, OneBit
from gradcomp.exchange.second import codec_of
from gradcomp.exchange.sizing import Strategy
from gradcomp.payload.rng import RngKey

# Parts of class names: of optimizers that divide by the root of an average of squares, and of such
# that do something else, too, by which their steps have a length of their own.
DIVIDES, OTHERS = ("adam", "rmsprop"), ("adamax", "lamb", "onebit", "zeroone")
SIDE, STRIDE = 128, 6151  # of a square of normal numbers; odd, so that every one comes once


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer that makes the steps: another one inside torch's
    `ZeroRedundancyOptimizer` and what accelerate, Lightning and torchft wrap around an optimizer.
    """
    for name in ("optim", "optimizer"):
        wrapped = getattr(optimizer, name, None)
        if hasattr(wrapped, "param_groups"):
            return unwrapped(wrapped)
    return optimizer


def divides_by_squares(optimizer: Optimizer) -> bool:
    """Whether noise shortens the steps of an optimizer, by the names of its class and bases."""
    names = [kind.__name__.lower() for kind in type(unwrapped(optimizer)).__mro__]
    divides, other = (
        any(word in name for name in names for word in words) for words in (DIVIDES, OTHERS)
    )
    return divides and not other


def gains(codec: Codec) -> bool:
    """Whether steps of the length of fp32's are better with a codec. Not with 1 bit: a byte GPT
    ended 0.04 nats higher with them (docs/explanation/accuracy.md, "The length of Adam's steps").
    """
    return not isinstance(codec, OneBit)


def shortening(codec: Codec, strategy: Strategy) -> float:
    """Return the factor by which an exchange shortens steps, to four digits.

    Args:
        codec: of the gradients.
        strategy: of the exchange.
    """
    phases = [codec]
    if strategy.second_phase and strategy.second_phase != "exact":
        phases.append(codec_of(strategy.second_phase, codec))
    return round(math.prod(of_normal(phase).shortens for phase in phases), 4)


class Noise(NamedTuple):
    """What a codec does to normally distributed numbers.

    Attributes:
        shortens: factor by which one phase shortens steps.
        error: norm of what codes leave out over norm of the numbers.
    """

    shortens: float
    error: float


def of_normal(codec: Codec) -> Noise:
    """Return what a codec does to normally distributed numbers."""
    x = _normal()
    q = codec.decode(codec.encode(x, key=RngKey())).view(x.shape).double()
    x = x.double()
    shortens = float(torch.sqrt(q.square().sum() * x.square().sum()) / (q * x).sum())
    return Noise(shortens, float((x - q).norm() / x.norm()))


@lru_cache(maxsize=1)
def _normal() -> Tensor:
    """Return ``(SIDE, SIDE)`` float32 numbers, the same on every machine, in no order."""
    n = SIDE * SIDE
    values = [NormalDist().inv_cdf((i * STRIDE % n + 0.5) / n) for i in range(n)]
    return torch.tensor(values, dtype=torch.float32, device="cpu").view(SIDE, SIDE)


# of an optimizer, the newest last: only that one changes rates, or factors would multiply
_OF: weakref.WeakKeyDictionary[Optimizer, list[weakref.ref[LongerSteps]]] = (
    weakref.WeakKeyDictionary()
)


class LongerSteps:
    """Multiplies the rates of an optimizer during its steps; between them they are as they were.
    Of several for one optimizer the newest does, as long as it lives.

    Decoupled weight decay (`AdamW`), which is a multiple of the rate, stays as it is. The optimizer
    does not keep this alive, and with it this ends.

    Args:
        optimizer: of the model.
        factor: of codes in every exchange.
        begun: number of exchanges before the first one with codes: a warm-up.

    Attributes:
        steps: exchanges so far, the one of this step included; to be kept up to date.
        off: whether exchanges have no codes any more.
    """

    def __init__(self, optimizer: Optimizer, factor: float, begun: int) -> None:
        self._factor, self._begun = factor, begun
        self.steps, self.off = 0, False
        self._kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
        before, after = weakref.WeakMethod(self._before), weakref.WeakMethod(self._after)

        def call(method: weakref.WeakMethod[Any]) -> Any:
            def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
                found = method()
                if found is not None:
                    found(optimizer)

            return hook

        self._hooks = [
            optimizer.register_step_pre_hook(call(before)),
            optimizer.register_step_post_hook(call(after)),
        ]
        self._all = _OF.setdefault(optimizer, [])
        self._all.append(weakref.ref(self))

    def factor(self, group: Mapping[str, Any]) -> float:
        """Return the factor of a group of parameters in this step.

        Squares of exchanges before the first one with codes have no noise, and are part of the
        average for as long as its beta says.
        """
        beta = group["betas"][1] if "betas" in group else group.get("alpha", 0.0)
        coded = self.steps - self._begun
        if self.off or coded <= 0:
            return 1.0
        clean = (beta**coded - beta**self.steps) / (1 - beta**self.steps)
        return math.sqrt(clean + (1 - clean) * self._factor**2)

    def close(self) -> None:
        """End this."""
        while self._hooks:
            self._hooks.pop().remove()
        self._all[:] = [one for one in self._all if one() not in (None, self)]

    def _before(self, optimizer: Optimizer) -> None:
        self._after(optimizer)  # a step that raised has left them
        if next(one for ref in reversed(self._all) if (one := ref()) is not None) is not self:
            return
        for group in optimizer.param_groups:
            factor = self.factor(group)
            changed = {"lr": group["lr"] * factor}
            if group.get("decoupled_weight_decay") or "AdamW" in type(optimizer).__name__:
                changed["weight_decay"] = group["weight_decay"] / factor
            self._kept.append((group, {key: group[key] for key in changed}))
            group.update(changed)

    def _after(self, optimizer: Optimizer) -> None:
        while self._kept:
            group, kept = self._kept.pop()
            group.update(kept)
