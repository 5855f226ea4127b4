"""Preconditioning: gradients are divided by the root of their second moment before encoding.

Codes of few bits have one scale for many elements. So an element with small gradients gets noise as
large as that of the other elements in its group. SGD averages this noise out; Adam does not,
because it divides by the root of the second moment. Therefore g / d is encoded, where d is the root
of an exponential average of the squares of *decoded averages*. These are equal on every rank, so d
is not sent. Decoded averages are multiplied by d, so every optimizer gets gradients as usual.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from gradcomp.arguments import check_number
from gradcomp.kernels import CPU, host, of
from gradcomp.memory.planes import Planes
from gradcomp.payload.form import BLOCKS
from gradcomp.payload.layout import PayloadLayout
from gradcomp.payload.pieces import Slot, whole_pieces

SMALLEST = 2.0**-126  # smallest normal float32


@dataclass(frozen=True)
class Precondition:
    """Options of preconditioning; every rank must pass the same values.

    Args:
        beta: decay of the average of squares, like Adam's second beta. Exchange number k, from 0,
            uses at most (k + 1) / (k + 2), so that the first exchanges set the units.
        floor: added to each unit, relative to the typical unit of its tensor, which is 1. Limits
            how much the gradients of elements with rare gradients are magnified.

    Raises:
        ValueError: `beta` is not in [0, 1), or `floor` not in (0, 1].
    """

    beta: float = 0.95
    floor: float = 0.01

    def __post_init__(self) -> None:
        check_number("beta", self.beta, 0, 1)
        check_number("floor", self.floor, 0, 1, "(]")


def check_precondition(given: object) -> Precondition | None:
    """Return the value of option `precondition`: None for None or False, the defaults for True.

    Raises:
        TypeError: `given` is neither a bool, None nor a `Precondition`.
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
    """Second moments of averages, relative to the magnitude of their tensor; equal on all ranks.

    They are relative because codes depend on ratios within a scale group only: a step whose
    gradients are ten times as large as before has the same weight as any other step. Every
    operation is one correctly rounded operation per element, so that ranks on different processors
    agree bit for bit. Sums use the kernels, which have a fixed order of additions.

    Args:
        options: see `Precondition`.
        numels: number of elements of each compressed tensor, by position.
        device: device of the tensors.
    """

    def __init__(
        self, options: Precondition, numels: Mapping[int, int], device: torch.device = CPU
    ) -> None:
        self.options = options
        self.planes = Planes(numels, "second moment", device=device)

    def divide(
        self, slot: Slot, values: Tensor, residual: Tensor | None, units: Tensor, out: Tensor
    ) -> None:
        """Write the units of a compressed tensor, or of a shard of one, to `units`, and
        (values + residual) / units to `out`.

        A unit is sqrt(v) + floor, or 1 before the first average.

        Args:
            slot: the tensor or shard.
            values, units, out: ``(n,)`` float32 each, a bucket.
            residual: ``(n,)`` float32 plane, which `Slot.residual` indexes, or None.
        """
        span = slice(slot.offset, slot.offset + slot.numel)
        grad, d, x, old = values[span], units[span], out[span], self.planes.pair(slot.index)[0]
        carried = (
            residual[slot.residual : slot.residual + slot.numel] if residual is not None else None
        )
        # all moments of the tensor, even if the slot is a shard of it
        floor = self.options.floor if any_bits(old) else 1.0
        of(x.device).divide(grad, carried, old[slot.start : slot.start + slot.numel], floor, d, x)

    def observe(self, slots: Sequence[Slot], averages: Tensor, step: int) -> bool:
        """Update the moments from the averages of a bucket of whole tensors; the caller commits.

        v becomes b * v + (1 - b) * (g / t)^2. Here t is the larger of mean and standard deviation
        of the tensor's averages, and b the smaller of beta and (step + 1) / (step + 2). v is 1
        before the first average; it is unchanged if t is 0 or 1 / t is no normal fp32 number. One
        decoded average says little about the size of an element, so the first average gets the same
        weight as the initial value.

        Args:
            slots: the tensors of the bucket.
            averages: ``(n,)`` of any floating dtype, a bucket.
            step: number of the exchange, from 0.

        Returns:
            True if a moment is not finite.
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
    """Return whether any moment is not 0; fast in the usual case that one of the first is not."""
    bits = moments.view(torch.int32)  # compare bits: a thread may flush denormals to 0
    return bool(bits[:1024].any() or bits.any())


def typical(values: Tensor) -> float:
    """Return the larger of mean and standard deviation of ``(n,)`` float32 values, but at most the
    largest |value|.
    """
    kernels, layout = of(values.device), _one_group(values.numel())
    scratch, out = kernels.scratch(layout.groups), host.empty(1, torch.float32)
    kernels.scales(values, layout.packed, layout.groups, 1.0, scratch, out)
    return _exact(int(out.view(torch.int32)))


def _exact(bits: int) -> float:
    """Return the value of a float32 from its bits, also if the thread flushes denormals; the sign
    bit must be 0.
    """
    exponent, fraction = bits >> 23, bits & 0x7FFFFF
    if exponent == 255:
        return math.nan if fraction else math.inf
    return math.ldexp(fraction | (0x800000 if exponent else 0), max(exponent, 1) - 150)


def _inverse(value: float) -> float:
    """Return 1 / value rounded to float32; 0.0 if the result is not a normal number."""
    # float64 has enough bits that rounding twice gives the same result as rounding once
    exact = 1.0 / value if value else math.inf
    if not SMALLEST <= exact < math.inf:
        return 0.0
    with np.errstate(over="ignore"):
        inverse = float(np.float32(exact))
    return inverse if inverse < math.inf else 0.0


@lru_cache(maxsize=256)
def _one_group(numel: int) -> PayloadLayout:
    """Return the layout of a tensor that is one group. It is cached, because building the tables
    takes longer than summing a small tensor.
    """
    return PayloadLayout(BLOCKS[8], whole_pieces([Slot(0, numel, numel, True, 0)]))
