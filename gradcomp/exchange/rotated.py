"""A bucket rotated at random: what is encoded instead of gradients, and the way back.

1-bit codes of values that have been rotated are unbiased once they are scaled for it
(tests/reference/rotation.py), and what they get wrong is noise of about one size all over a scale
group. So nothing is carried on: there are no residuals. The rotation of a step is the same on all
ranks, so that averages are made of rotated values, which are turned back where they arrive; owners
turn means by another one before they encode them again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradcomp.exchange.sizing import BucketPlan
from gradcomp.kernels import Kernels
from gradcomp.payload.pieces import Slot
from gradcomp.payload.rng import STREAM_OWNED, STREAM_ROTATION


class Rotated:
    """One bucket layout's memory for what is encoded.

    Args:
        plan: of the exchange.
        kernels: of the bucket's device.
        dtype: of the bucket.
        seed: of the random signs.

    Attributes:
        averages: ``(n,)`` float32 for decoded averages, rotated; None where the bucket itself
            serves.
    """

    def __init__(self, plan: BucketPlan, kernels: Kernels, dtype: torch.dtype, seed: int) -> None:
        self._plan, self._kernels, self._seed, self._step = plan, kernels, seed, 0
        numel = max((s.offset + s.numel for s in plan.slots), default=0)
        self._slots = [s for s in plan.slots if s.numel]
        self._values = torch.empty(numel)
        self.averages = None if dtype == torch.float32 else torch.empty(numel)
        self._requantizes = plan.scatters and plan.strategy.second_phase == "requantize"
        owned = (
            [layout for one in plan.slices for layout in one.second] if self._requantizes else []
        )
        self._pieces = [
            p for layout in owned for p in layout.pieces if p.slot.compressed and p.numel
        ]

    def divide(self, buffer: Tensor, residual: Tensor | None, step: int) -> Tensor:
        """Return what is encoded of ``(n,)`` at a step, float32; fp32 pieces are as they are."""
        self._step = step
        for slot in self._slots:
            mine = self._values[slot.offset : slot.offset + slot.numel]
            mine.copy_(buffer[slot.offset : slot.offset + slot.numel])
            if slot.compressed:
                self._turn(mine, slot, slot.start, STREAM_ROTATION)
                self._kernels.unbias(mine, slot.group_numel, slot.start)
        return self._values

    def probed(self, buffer: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return with what decoded values are compared, and their units."""
        return self._values, None

    def divide_owned(self, number: int, shard: Tensor, residual: Tensor | None) -> None:
        """Rotate the means that this rank owns of a slice once more, and scale them, if they are
        encoded in 1 bit.

        Once more, because sums of a few ranks' codes have few values, of which 1-bit codes are not
        unbiased.
        """
        owned = self._plan.slices[number].own_second
        for p in owned.pieces if self._requantizes and owned is not None else []:
            if p.slot.compressed:
                mine = shard[p.data : p.data + p.numel]
                self._turn(mine, p.slot, p.start, STREAM_OWNED)
                self._kernels.unbias(mine, p.slot.group_numel, p.start)

    def leave(self, residual: Tensor | None, *, owned: int | None = None) -> None:
        """Do nothing: there are no residuals."""

    def multiply(self, buffer: Tensor) -> bool:
        """Turn averages back and write them to the bucket; True: one is not finite."""
        bad, averages = False, buffer if self.averages is None else self.averages
        for p in self._pieces:
            self._turn(
                averages[p.data : p.data + p.numel], p.slot, p.start, STREAM_OWNED, back=True
            )
        for slot in self._slots:
            place = slice(slot.offset, slot.offset + slot.numel)
            mine = averages[place]
            if slot.compressed:
                self._turn(mine, slot, slot.start, STREAM_ROTATION, back=True)
                bad |= not self._kernels.are_finite(mine)
            if self.averages is not None:
                buffer[place].copy_(mine)
                bad |= not self._kernels.are_finite(buffer[place].float())
        return bad

    def multiply_owned(self, shard: Tensor) -> None:
        """Turn back the means of whole slots that stay with this rank."""
        for p in self._plan.own_second.pieces:
            if p.slot.compressed:
                self._turn(
                    shard[p.data : p.data + p.numel], p.slot, p.start, STREAM_ROTATION, back=True
                )

    def _turn(
        self, values: Tensor, slot: Slot, first: int, stream: int, *, back: bool = False
    ) -> None:
        key = self._seed, 0, self._step, stream
        self._kernels.rotate(values, slot.group_numel, first, slot.index, key, back=back)
