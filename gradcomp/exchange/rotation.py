"""A stage that applies a random rotation to a bucket before encoding, and inverts it on averages.

1-bit codes of rotated values are unbiased with a suitable scale (tests/reference/rotation.py), and
their error is noise of similar size across a scale group. So there are no residuals. All ranks use
the same rotation in a step, so rotated values can be averaged. Owners rotate means a second time
before they encode them in 1 bit.
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
    """The rotation of one bucket layout.

    Args:
        plan: plan of the exchange.
        kernels: kernel set of the bucket's device.
        dtype: dtype of the bucket.
        seed: seed of the random signs.
    """

    takes_residuals = True  # codecs that rotate have no residuals
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
        """Set `Job.values` to a float32 copy of the bucket with compressed parameters rotated."""
        self._step = job.step
        for slot in self._slots:
            values = self._values[slot.offset : slot.offset + slot.numel]
            values.copy_(job.bucket[slot.offset : slot.offset + slot.numel])
            if slot.compressed:
                self._rotate(values, slot, slot.start, STREAM_ROTATION)
                self._kernels.unbias(values, slot.group_numel, slot.start)
        job.values = job.target = self._values
        return False

    def before_owner_encode(self, job: Job, number: int, shard: Tensor) -> bool:
        """Rotate owned means a second time if they are encoded in 1 bit. Means of a few ranks'
        codes take few distinct values, whose 1-bit codes would be biased.
        """
        owned = self._plan.slices[number].own_second
        for p in owned.pieces if self._requantizes and owned is not None else []:
            if p.slot.compressed:
                values = shard[p.data : p.data + p.numel]
                self._rotate(values, p.slot, p.start, STREAM_OWNED)
                self._kernels.unbias(values, p.slot.group_numel, p.start)
        return False

    def after_owned_average(self, shard: Tensor) -> None:
        for p in self._plan.own_second.pieces:
            if p.slot.compressed:
                values = shard[p.data : p.data + p.numel]
                self._rotate(values, p.slot, p.start, STREAM_ROTATION, back=True)

    def after_decode(self, job: Job) -> bool:
        bad, averages = False, job.bucket if self.averages is None else self.averages
        for p in self._pieces:
            values = averages[p.data : p.data + p.numel]
            self._rotate(values, p.slot, p.start, STREAM_OWNED, back=True)
        for slot in self._slots:
            place = slice(slot.offset, slot.offset + slot.numel)
            values = averages[place]
            if slot.compressed:
                self._rotate(values, slot, slot.start, STREAM_ROTATION, back=True)
                bad |= not self._kernels.are_finite(values)
            if self.averages is not None:
                job.bucket[place].copy_(values)
                bad |= not self._kernels.are_finite(job.bucket[place].float())
        return bad

    def _rotate(
        self, values: Tensor, slot: Slot, first: int, stream: int, *, back: bool = False
    ) -> None:
        key = self._seed, 0, self._step, stream
        self._kernels.rotate(values, slot.group_numel, first, slot.index, key, back=back)
