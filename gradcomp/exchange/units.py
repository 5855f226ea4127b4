"""A stage that encodes a bucket in units of second moments (`gradcomp.memory.moments`).

Residuals stay in units of the gradient: (gradient + residual) / d is encoded, and what the codes
leave out is multiplied by d. So residuals follow loss scales, checkpoints and other numbers of
ranks as they always do, whatever becomes of d.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradcomp.exchange.sizing import BucketPlan
from gradcomp.exchange.stages import Job, Stage
from gradcomp.kernels import Kernels
from gradcomp.memory.moments import SecondMoments
from gradcomp.payload.pieces import Slot


class Units(Stage):
    """Divides what is encoded of one bucket layout, multiplies averages, and observes them.

    Args:
        plan: of the exchange.
        kernels: of the bucket's device.
        moments: of the compressed tensors.
        dtype: of the bucket.
        encodes: whether values are encoded in units; those that travel in fp32 are not.
        observes: whether the moments take in these averages, which needs whole tensors.
    """

    def __init__(
        self,
        plan: BucketPlan,
        kernels: Kernels,
        moments: SecondMoments,
        dtype: torch.dtype,
        *,
        encodes: bool,
        observes: bool,
    ) -> None:
        self._kernels, self._moments, self._slots = kernels, moments, plan.slots
        self._encodes, self._observes = encodes, observes
        self.takes_residuals, self.needs_averages = encodes, encodes or observes
        # shards need not lie side by side, and the memory between them is undefined
        self._runs = _runs(plan.slots)
        numel = self._runs[-1].stop if self._runs and encodes else 0
        self._units, self._values = kernels.empty(numel).fill_(1.0), kernels.empty(numel)
        if encodes and dtype != torch.float32:
            self.averages = kernels.empty(numel)
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

    def before_encode(self, job: Job) -> bool:
        """Encode (gradient + residual) / d, float32; fp32 pieces as they are."""
        if not self._encodes:
            return False
        values = job.bucket if job.bucket.dtype == torch.float32 else job.bucket.float()
        residual = job.residuals[0] if job.residuals is not None else None
        for slot in self._slots:
            if slot.compressed and slot.numel:
                self._moments.divide(slot, values, residual, self._units, self._values)
            else:
                span = slice(slot.offset, slot.offset + slot.numel)
                self._values[span] = values[span]
        job.values, job.units = self._values, self._units
        return False

    def after_encode(self, residual: Tensor) -> None:
        self._multiply(residual, self._first)

    def before_owner_encode(self, job: Job, number: int, shard: Tensor) -> bool:
        """Turn means, which are in units of moments, into mean + residual / d."""
        if job.owner_residuals is not None and self._encodes:
            residual = job.owner_residuals[0]
            for at, kept, first, numel in self._owned[number]:
                shard[at : at + numel].add_(
                    residual[kept : kept + numel] / self._units[first : first + numel]
                )
        return False

    def after_owner_encode(self, number: int, residual: Tensor) -> None:
        self._multiply(residual, self._owned[number])

    def after_decode(self, job: Job) -> bool:
        bad = self._write(job.bucket) if self._encodes else False
        if self._observes and not bad:
            bad = self._moments.observe(self._slots, job.bucket, job.step)
            job.written[self._moments.planes] = [s.index for s in self._slots if s.compressed]
        return bad

    def _multiply(self, residual: Tensor, pieces: Sequence[tuple[int, int, int, int]]) -> None:
        for _, kept, first, numel in pieces if self._encodes else ():
            units = self._units[first : first + numel]
            self._kernels.multiply(residual[kept : kept + numel], units)

    def _write(self, bucket: Tensor) -> bool:
        """Write averages in units of the gradient to the bucket; return True if one is not
        finite.
        """
        values = bucket if self.averages is None else self.averages
        bad = False
        for run in self._runs:
            bad |= self._kernels.multiply(values[run], self._units[run])
            if values is not bucket:
                bucket[run].copy_(values[run])
                bad |= not self._kernels.are_finite(bucket[run].float())
        return bad


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
