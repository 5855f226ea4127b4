"""Learning rate correction that keeps the length of Adam's steps under compression.

Codes add noise to the squares that Adam averages, and Adam divides by the root of that average. A
phase that decodes x to q multiplies Adam's average of gradients by s = E[qx] / E[x^2], and the root
of its average of squares by sqrt(E[q^2] / E[x^2]). So each phase shortens steps by a factor of
sqrt(E[q^2] E[x^2]) / E[qx]. With ``precondition=True`` this factor is about the same for all
elements, so a larger learning rate corrects it: the rate is multiplied during each step.

The factor is computed for normally distributed x. It assumes that gradients are mostly noise, as in
small minibatches. Otherwise errors of the first phase partly average out over the ranks, and the
factor is too large. Measurements: docs/explanation/accuracy.md, "Entropy-coded codes".
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradcomp.codecs import Codec, OneBit
from gradcomp.engine.optimizers import name_of, unwrapped
from gradcomp.engine.watch import remove, weakly
from gradcomp.exchange.second import codec_of
from gradcomp.exchange.sizing import Strategy
from gradcomp.payload.rng import RngKey

# Substrings of class names: optimizers that divide by the root of an average of squares, and those
# among them whose step length is determined in another way.
DIVIDES, OTHERS = ("adam", "rmsprop"), ("adamax", "lamb", "muon", "onebit", "zeroone")
# `_normal`: side of the square, and an odd stride, which visits every number once
SIDE, STRIDE = 128, 6151


def divides_by_squares(optimizer: Optimizer) -> bool:
    """Return whether noise shortens an optimizer's steps, judged by the names of its classes."""
    names = [kind.__name__.lower() for kind in type(unwrapped(optimizer)).__mro__]
    divides, other = (
        any(word in name for name in names for word in words) for words in (DIVIDES, OTHERS)
    )
    return divides and not other


def gains(codec: Codec) -> bool:
    """Return whether training with a codec is better with steps as long as those of fp32.

    It is not with 1-bit codes: a byte-level GPT ended 0.04 nats higher
    (docs/explanation/accuracy.md, "The length of Adam's steps").
    """
    return not isinstance(codec, OneBit)


def shortening(codec: Codec, strategy: Strategy) -> float:
    """Return the factor by which an exchange of gradients shortens steps, rounded to four
    digits.
    """
    phases = [codec]
    if strategy.second_phase and strategy.second_phase != "exact":
        phases.append(codec_of(strategy.second_phase, codec))
    return round(math.prod(of_normal(phase).shortens for phase in phases), 4)


class Noise(NamedTuple):
    """Error of a codec on normally distributed numbers.

    Attributes:
        shortens: factor by which one phase shortens steps.
        error: norm of the encoding error / norm of the numbers.
    """

    shortens: float
    error: float


@lru_cache(maxsize=16)
def of_normal(codec: Codec) -> Noise:
    """Measure the error of a codec on normally distributed numbers."""
    x = _normal()
    q = codec.decode(codec.encode(x, key=RngKey())).view(x.shape).double()
    x = x.double()
    shortens = float(torch.sqrt(q.square().sum() * x.square().sum()) / (q * x).sum())
    return Noise(shortens, float((x - q).norm() / x.norm()))


@lru_cache(maxsize=1)
def _normal() -> Tensor:
    """Return ``(SIDE, SIDE)`` float32 normal numbers, shuffled, the same on every machine."""
    n = SIDE * SIDE
    values = [NormalDist().inv_cdf((i * STRIDE % n + 0.5) / n) for i in range(n)]
    return torch.tensor(values, dtype=torch.float32, device="cpu").view(SIDE, SIDE)


# By optimizer, newest last. Only the newest changes rates, or factors would multiply.
_BY_OPTIMIZER: weakref.WeakKeyDictionary[Optimizer, list[weakref.ref[LongerSteps]]] = (
    weakref.WeakKeyDictionary()
)


class LongerSteps:
    """Optimizer hooks that multiply learning rates during each step, and restore them after it.

    If several objects exist for one optimizer, only the newest is active. Decoupled weight decay
    (`AdamW`), which is a multiple of the rate, is not changed. The optimizer holds weak references
    only, so the hooks do nothing once this object is garbage-collected.

    Args:
        optimizers: optimizers of the model whose steps codes shorten.
        factor: factor for an exchange that uses codes (`shortening`).
        begun: number of exchanges before the first with codes, i.e. of the warm-up.

    Attributes:
        steps: number of exchanges so far, including that of this step; set by the engine.
        coded: `shortening` of the codec that the guard has decided for; set by the engine.
    """

    def __init__(self, optimizers: Sequence[Any], factor: float, begun: int) -> None:
        self.coded, self._begun, self.steps = factor, begun, 0
        self._name = name_of(optimizers)
        self._originals: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._hooks: list[Any] = []
        for optimizer in map(unwrapped, optimizers):
            self._hooks.append(optimizer.register_step_pre_hook(weakly(self._before)))
            self._hooks.append(optimizer.register_step_post_hook(weakly(self._after)))
            _BY_OPTIMIZER.setdefault(optimizer, []).append(weakref.ref(self))

    def factor(self, group: Mapping[str, Any]) -> float:
        """Return the factor of a parameter group in this step.

        Squares from exchanges before the first with codes have no noise. Their weight in the
        average decays with the optimizer's beta.
        """
        beta = group["betas"][1] if "betas" in group else group.get("alpha", 0.0)
        coded = self.steps - self._begun
        if self.coded == 1 or coded <= 0:
            return 1.0
        clean = (beta**coded - beta**self.steps) / (1 - beta**self.steps)
        return math.sqrt(clean + (1 - clean) * self.coded**2)

    def describe(self) -> str:
        """Return the factor as text."""
        return f"learning rate of {self._name} x {self.coded:.3g} in steps"

    def close(self) -> None:
        """Remove the hooks."""
        remove(self._hooks)
        for refs in _BY_OPTIMIZER.values():
            refs[:] = [ref for ref in refs if ref() not in (None, self)]

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        self._after(optimizer)  # restore rates that a step has changed before it raised
        refs = reversed(_BY_OPTIMIZER[optimizer])
        if next(alive for ref in refs if (alive := ref()) is not None) is not self:
            return
        for group in optimizer.param_groups:
            factor = self.factor(group)
            changed = {"lr": group["lr"] * factor}
            if group.get("decoupled_weight_decay") or "AdamW" in type(optimizer).__name__:
                changed["weight_decay"] = group["weight_decay"] / factor
            self._originals.append((group, {key: group[key] for key in changed}))
            group.update(changed)

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        while self._originals:
            group, originals = self._originals.pop()
            group.update(originals)
