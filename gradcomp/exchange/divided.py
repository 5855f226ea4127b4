"""A bucket in units of second moments (`gradcomp.memory.moments`): what is encoded instead of
gradients, and the way back.

Residuals stay in units of the gradient: (gradient + residual) / d is encoded, and what the codes
leave out is multiplied by d. So residuals follow loss scales, checkpoints and other numbers of
ranks as they always do, whatever becomes of d.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradcomp.exchange.sizing import BucketPlan
from gradcomp.kernels import HOST
from gradcomp.memory.moments import SecondMoments
from gradcomp.payload.pieces import Slot


class Divided:
    """One bucket layout's divisors and the memory for what is encoded.

    Args:
        plan: of the exchange.
        moments: of the compressed tensors.
        dtype: of the bucket.

    Attributes:
        units: ``(n,)`` float32, in which elements are encoded at this step; 1 for what is not
            compressed.
        values: ``(n,)`` float32: what is encoded.
        averages: ``(n,)`` float32 for decoded averages in these units; None where the bucket itself
            serves.
    """

    def __init__(self, plan: BucketPlan, moments: SecondMoments, dtype: torch.dtype) -> None:
        self._moments, self._slots = moments, plan.slots
        # shards need not lie side by side, and what lies between is anything
        self._runs = _runs(plan.slots)
        numel = self._runs[-1].stop if self._runs else 0
        self.units, self.values = torch.ones(numel), torch.empty(numel)
        self.averages = None if dtype == torch.float32 else torch.empty(numel)
        self._first = [
            (s.offset, s.residual, s.offset, s.numel) for s in plan.slots if s.compressed
        ]
        self._owned = [
            [
                (p.data, p.residual, p.slot.offset + p.start - p.slot.start, p.numel)
                for p in (one.own_second.pieces if one.own_second is not None else [])
                if p.slot.compressed
            ]
            for one in plan.slices
        ]

    def divide(self, buffer: Tensor, residual: Tensor | None, step: int) -> Tensor:
        """Return (buffer + residual) / d, ``(n,)`` float32; fp32 pieces are as they are."""
        values = buffer if buffer.dtype == torch.float32 else buffer.float()
        for slot in self._slots:
            if slot.compressed and slot.numel:
                self._moments.divide(slot, values, residual, self.units, self.values)
            else:
                span = slice(slot.offset, slot.offset + slot.numel)
                self.values[span] = values[span]
        return self.values

    def probed(self, buffer: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return with what decoded values are compared, and their units."""
        return buffer, self.units

    def divide_owned(self, number: int, shard: Tensor, residual: Tensor | None) -> None:
        """Turn the means that this rank owns of a slice, which are in units of moments, into
        mean + residual / d.
        """
        if residual is None:
            return
        for at, kept, first, numel in self._owned[number]:
            shard[at : at + numel].add_(
                residual[kept : kept + numel] / self.units[first : first + numel]
            )

    def leave(self, residual: Tensor | None, *, owned: int | None = None) -> None:
        """Bring what the codes have left out, in `residual`, back to units of the gradient: of
        the bucket, or what is owned of a slice.
        """
        if residual is None:
            return
        for _, kept, first, numel in self._first if owned is None else self._owned[owned]:
            HOST.multiply(residual[kept : kept + numel], self.units[first : first + numel])

    def multiply(self, buffer: Tensor) -> bool:
        """Write averages of an exchange in units of the gradient to the bucket; True: one is not
        finite.
        """
        values = buffer if self.averages is None else self.averages
        bad = False
        for run in self._runs:
            bad |= HOST.multiply(values[run], self.units[run])
            if values is not buffer:
                buffer[run].copy_(values[run])
                bad |= not HOST.are_finite(buffer[run].float())
        return bad

    def observe(self, averages: Tensor, step: int) -> bool:
        """Take in averages in units of the gradient; True: a moment is not finite."""
        return self._moments.observe(self._slots, averages, step)

    def commit(self) -> None:
        """Make the moments that this step wrote current."""
        self._moments.planes.commit(s.index for s in self._slots if s.compressed)


def _runs(slots: Sequence[Slot]) -> list[slice]:
    """Return where slots lie, those side by side as one."""
    runs: list[slice] = []
    for slot in slots:
        first, last = slot.offset, slot.offset + slot.numel
        if runs and runs[-1].stop == first:
            runs[-1] = slice(runs[-1].start, last)
        else:
            runs.append(slice(first, last))
    return runs
