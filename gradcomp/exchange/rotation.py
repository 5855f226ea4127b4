"""A stage that rotates a bucket at random before it is encoded, and averages back.

1-bit codes of values that have been rotated are unbiased once they are scaled for it
(tests/reference/rotation.py), and their error is noise of about one size all over a scale group. So
there are no residuals. The rotation of a step is the same on all ranks, so that averages are made
of rotated values; owners rotate means once more before they encode them again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradcomp.exchange.sizing import BucketPlan
from gradcomp.exchange.stages import Job, Stage
from gradcomp.kernels import Kernels
from gradcomp.payload.pieces import Slot
from gradcomp.payload.rng import STREAM_OWNED, STREAM_ROTATION


class Rotation(Stage):
    """Rotates one bucket layout.

    Args:
        plan: of the exchange.
        kernels: of the bucket's device.
        dtype: of the bucket.
        seed: of the random signs.
    """

    takes_residuals = True  # rotated codecs keep no residuals
    needs_averages = True

    def __init__(self, plan: BucketPlan, kernels: Kernels, dtype: torch.dtype, seed: int) -> None:
        self._plan, self._kernels, self._seed, self._step = plan, kernels, seed, 0
        numel = max((s.offset + s.numel for s in plan.slots), default=0)
        self._slots = [s for s in plan.slots if s.numel]
        self._values = kernels.empty(numel)
        self.averages = None if dtype == torch.float32 else kernels.empty(numel)
        self._requantizes = plan.scatters and plan.strategy.second_phase == "requantize"
        owned = (
            [layout for one in plan.slices for layout in one.second] if self._requantizes else []
        )
        self._pieces = [
            p for layout in owned for p in layout.pieces if p.slot.compressed and p.numel
        ]

    def before_encode(self, job: Job) -> bool:
        """Encode rotated values, float32; fp32 pieces as they are."""
        self._step = job.step
        for slot in self._slots:
            mine = self._values[slot.offset : slot.offset + slot.numel]
            mine.copy_(job.bucket[slot.offset : slot.offset + slot.numel])
            if slot.compressed:
                self._rotate(mine, slot, slot.start, STREAM_ROTATION)
                self._kernels.unbias(mine, slot.group_numel, slot.start)
        job.values = job.target = self._values
        return False

    def before_owner_encode(self, job: Job, number: int, shard: Tensor) -> bool:
        """Rotate means once more if they are encoded in 1 bit: sums of a few ranks' codes have few
        values, of which 1-bit codes are not unbiased.
        """
        owned = self._plan.slices[number].own_second
        for p in owned.pieces if self._requantizes and owned is not None else []:
            if p.slot.compressed:
                mine = shard[p.data : p.data + p.numel]
                self._rotate(mine, p.slot, p.start, STREAM_OWNED)
                self._kernels.unbias(mine, p.slot.group_numel, p.start)
        return False

    def after_owned_average(self, shard: Tensor) -> None:
        for p in self._plan.own_second.pieces:
            if p.slot.compressed:
                mine = shard[p.data : p.data + p.numel]
                self._rotate(mine, p.slot, p.start, STREAM_ROTATION, back=True)

    def after_decode(self, job: Job) -> bool:
        bad, averages = False, job.bucket if self.averages is None else self.averages
        for p in self._pieces:
            mine = averages[p.data : p.data + p.numel]
            self._rotate(mine, p.slot, p.start, STREAM_OWNED, back=True)
        for slot in self._slots:
            place = slice(slot.offset, slot.offset + slot.numel)
            mine = averages[place]
            if slot.compressed:
                self._rotate(mine, slot, slot.start, STREAM_ROTATION, back=True)
                bad |= not self._kernels.are_finite(mine)
            if self.averages is not None:
                job.bucket[place].copy_(mine)
                bad |= not self._kernels.are_finite(job.bucket[place].float())
        return bad

    def _rotate(
        self, values: Tensor, slot: Slot, first: int, stream: int, *, back: bool = False
    ) -> None:
        key = self._seed, 0, self._step, stream
        self._kernels.rotate(values, slot.group_numel, first, slot.index, key, back=back)
