"""Preconditioning: gradients are encoded in units of the root of their second moment, which every
rank knows.

Codes of few bits have one scale for many elements, so an element whose gradients are small next to
its group's gets noise as large as the group's. SGD averages that out; Adam divides by the root of
the second moment and does not. What is encoded here is therefore g / d, with d the root of an
exponential average of the squares of *decoded averages*: these are equal on every rank, so nothing
has to be sent for it. Decoded averages are multiplied by d, so every optimizer sees gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from gradcomp.kernels import CPU, host, of
from gradcomp.memory.planes import Planes
from gradcomp.payload.form import BLOCKS
from gradcomp.payload.layout import PayloadLayout
from gradcomp.payload.pieces import Slot, whole_pieces

SMALLEST = 2.0**-126  # normal float32


@dataclass(frozen=True)
class Precondition:
    """How gradients are preconditioned; every rank needs the same.

    Args:
        beta: what a step keeps of the average of squares, as Adam's second beta; exchange number k,
            from 0, keeps at most (k + 1) / (k + 2), so that units are learnt at once.
        floor: no element's unit is smaller than this part of its tensor's typical one (which is 1):
            bounds how far gradients of elements that rarely have one are magnified.

    Raises:
        ValueError: `beta` not in [0, 1), `floor` not in (0, 1].
    """

    beta: float = 0.95
    floor: float = 0.01

    def __post_init__(self) -> None:
        for name, low, high in (("beta", -math.ulp(0.0), 1.0), ("floor", 0.0, 1.0 + 1e-9)):
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not low < value < high
            ):
                bounds = "at least 0 and below 1" if name == "beta" else "above 0 and at most 1"
                raise ValueError(f"{name} must be a number {bounds}, got {value!r}")


def check_precondition(given: object) -> Precondition | None:
    """Return what an option says: None for None and False, the defaults for True.

    Raises:
        TypeError: something else.
    """
    if given is None or given is False:
        return None
    if given is True:
        return Precondition()
    if not isinstance(given, Precondition):
        raise TypeError(
            "precondition must be True, False or a gradcomp.Precondition, got"
            f" {type(given).__name__}"
        )
    return given


class SecondMoments:
    """Averages of squares of the decoded averages, relative to those of their tensor, the same on
    every rank.

    Relative, because only ratios within a scale group matter to codes: a step whose gradients are
    ten times as large as those before it says as much about them as any other. Every operation is
    one correctly rounded operation an element, so that ranks on different processors agree bit for
    bit; sums are those of the kernels, whose order is pinned.

    Args:
        options: see `Precondition`.
        numels: elements of the compressed tensors, by position.
        device: of the tensors.
    """

    def __init__(
        self, options: Precondition, numels: Mapping[int, int], device: torch.device = CPU
    ) -> None:
        self.options = options
        self.planes = Planes(numels, "second moment", device=device)

    def divide(
        self, slot: Slot, values: Tensor, residual: Tensor | None, units: Tensor, out: Tensor
    ) -> None:
        """Write units of a compressed tensor or a shard of one, sqrt(v) + floor or 1 before the
        first average, and (values + residual) / units.

        Args:
            values, units, out: ``(n,)`` float32, a bucket.
            residual: ``(n,)`` float32, where `Slot.residual` counts.
        """
        span = slice(slot.offset, slot.offset + slot.numel)
        given, d, x, old = values[span], units[span], out[span], self.planes.pair(slot.index)[0]
        left_out = (
            residual[slot.residual : slot.residual + slot.numel] if residual is not None else None
        )
        # of the whole tensor, also where the slot is a shard of it
        floor = self.options.floor if any_bits(old) else 1.0
        of(x.device).divide(given, left_out, old[slot.start : slot.start + slot.numel], floor, d, x)

    def observe(self, slots: Sequence[Slot], averages: Tensor, step: int) -> bool:
        """Take in the averages of a bucket of whole tensors; to be committed. Returns True if a
        moment is not finite.

        v becomes b * v + (1 - b) * (g / t)^2, with t the larger of mean and standard deviation of
        the tensor's averages and b the smaller of beta and (step + 1) / (step + 2); it is 1 before
        the first average, and stays as it is where t is 0, or 1 / t no normal fp32 number. One
        decoded average says little about the size of an element, so the first counts as much as
        knowing nothing does.

        Args:
            averages: ``(n,)`` of any floating dtype.
            step: number of the exchange, from 0.
        """
        keep, bad = min(self.options.beta, (step + 1) / (step + 2)), False
        for slot in slots:
            if not (slot.compressed and slot.numel):
                continue
            old, new = self.planes.pair(slot.index)
            g = averages[slot.offset : slot.offset + slot.numel].float()
            inverse = _inverse(typical(g))
            if not inverse:
                new.copy_(old)
                continue
            bad |= of(g.device).follow(
                g, inverse, old if any_bits(old) else None, keep, 1.0 - keep, new
            )
        return bad


def any_bits(moments: Tensor) -> bool:
    """Whether any moment is not 0; soon where, as nearly always, one of the first is."""
    bits = moments.view(torch.int32)  # denormals are 0 as numbers where the thread flushes them
    return bool(bits[:1024].any() or bits.any())


def typical(values: Tensor) -> float:
    """Return the larger of mean and standard deviation of ``(n,)`` float32, or the largest
    |value| if that is smaller.
    """
    kernels, layout = of(values.device), _one_group(values.numel())
    scratch, out = kernels.scratch(layout.groups), host.empty(1, torch.float32)
    kernels.scales(values, layout.packed, layout.groups, 1.0, scratch, out)
    return _exact(int(out.view(torch.int32)))


def _exact(bits: int) -> float:
    """Return the number that the bits of a float32, not negative, stand for: also where the
    thread flushes denormals.
    """
    exponent, fraction = bits >> 23, bits & 0x7FFFFF
    if exponent == 255:
        return math.nan if fraction else math.inf
    return math.ldexp(fraction | (0x800000 if exponent else 0), max(exponent, 1) - 150)


def _inverse(value: float) -> float:
    """Return 1 / value rounded to float32; 0.0 where that is not a normal number."""
    # float64 has bits enough for one rounding after the other to be one
    exact = 1.0 / value if value else math.inf
    if not SMALLEST <= exact < math.inf:
        return 0.0
    with np.errstate(over="ignore"):
        inverse = float(np.float32(exact))
    return inverse if inverse < math.inf else 0.0


@lru_cache(maxsize=256)
def _one_group(numel: int) -> PayloadLayout:
    """Return the layout of a tensor that is one group; making its tables takes longer than a
    small tensor's sums.
    """
    return PayloadLayout(BLOCKS[8], whole_pieces([Slot(0, numel, numel, True, 0)]))
