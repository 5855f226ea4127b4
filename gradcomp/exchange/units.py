"""A stage that encodes a bucket in units of second moments (`gradcomp.memory.moments`).

Encoded values are (gradient + residual) / d. Residuals stay in units of the gradient: the error of
the codes is multiplied by d. So a change of loss scale, checkpoint or number of ranks affects
residuals as without this stage, whatever d becomes.
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
    """Divides the values of one bucket layout by units, multiplies averages by them, and updates
    the second moments from averages.

    Args:
        plan: plan of the exchange.
        kernels: kernel set of the bucket's device.
        moments: second moments of the compressed tensors.
        dtype: dtype of the bucket.
        encodes: whether to encode in units; False for fp32 payloads.
        observes: whether to update second moments from these averages; needs whole tensors.
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
        # shards need not be adjacent, and the memory between them is undefined
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
        """Set `Job.values` to (gradient + residual) / d in float32; uncompressed parameters are
        copied.
        """
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
        """Add residual / d to the means, which are in units of second moments."""
        if job.owner_residuals is not None and self._encodes:
            residual = job.owner_residuals[0]
            for at, residual_start, first, numel in self._owned[number]:
                shard[at : at + numel].add_(
                    residual[residual_start : residual_start + numel]
                    / self._units[first : first + numel]
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
        for _, residual_start, first, numel in pieces if self._encodes else ():
            units = self._units[first : first + numel]
            self._kernels.multiply(residual[residual_start : residual_start + numel], units)

    def _write(self, bucket: Tensor) -> bool:
        """Multiply averages by their units and write them to the bucket; return True if one is not
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
    """Return the ranges of the slots in the bucket, with adjacent ones merged."""
    runs: list[slice] = []
    for slot in slots:
        first, last = slot.offset, slot.offset + slot.numel
        if runs and runs[-1].stop == first:
            runs[-1] = slice(runs[-1].start, last)
        else:
            runs.append(slice(first, last))
    return runs
