"""The averages of one bucket in received payloads: decoded into a tensor, or applied to weights
without decoding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradcomp.codecs.base import MixedPayloads
from gradcomp.codecs.magnitude import magnitude
from gradcomp.exchange.phase import Phase
from gradcomp.exchange.sizing import BucketPlan
from gradcomp.kernels import Kernels
from gradcomp.payload.layout import joined_rows

# A sum below this cannot overflow. Rounding in up to 32767 additions enlarges it by a factor below
# 1.002, and the largest float32 and bfloat16 numbers are just below 2**128.
SAFE_SUM = 2.0**127


class Averages:
    """The received averages of one bucket; created once and used at every step.

    Args:
        kernels: kernel set of the bucket's device.
        plan: plan of the exchange.
        phases: for every slice with averages, the phase that receives them. In an all_gather these
            are all ranks' payloads, which are summed; in a reduce_scatter the owners' payloads,
            which are decoded side by side. Their memory is read, not copied: the payloads must not
            be overwritten while this object is in use.
        dtype: dtype of the bucket.
    """

    def __init__(
        self, kernels: Kernels, plan: BucketPlan, phases: Sequence[Phase], dtype: torch.dtype
    ) -> None:
        self._kernels, self._dtype, self._numel = kernels, dtype, plan.numel
        self._added = not plan.scatters
        self._parts = {phase: self._payloads(plan, phase) for phase in phases}

    def _payloads(self, plan: BucketPlan, phase: Phase) -> MixedPayloads:
        if self._added:
            return MixedPayloads(phase.tensors, plan.codec.code, self._dtype, phase.layouts[0])
        rows = joined_rows(phase.layouts, phase.stride)
        return MixedPayloads([phase.recv], plan.second_phase.code, self._dtype, rows)

    def decode(self, out: Tensor, phase: Phase | None = None) -> bool:
        """Write averages to `out`; return True if one is not finite.

        Args:
            out: ``(numel,)``, in bucket order.
            phase: phase of the slice to decode; all slices by default.

        Raises:
            CorruptPayload: a value is not finite, but its payload has no non-finite flag.
        """
        bad = False
        for received in self._parts if phase is None else (phase,):
            if self._parts[received].decode(self._kernels, out, self._numel):
                received.refuse_unflagged()
                bad = True
        return bad

    def update(self, targets: NDArray[Any], rules: NDArray[Any]) -> None:
        """Apply the averages, rounded to the bucket's dtype, to weights.

        Args:
            targets: from `Kernels.targets`, one per parameter position.
            rules: see `Kernels.update`.
        """
        for received in self._parts.values():
            for payloads, table in received.parts:
                self._kernels.update(table, targets, rules, payloads)

    def squares(self, targets: NDArray[Any], rules: NDArray[Any]) -> float:
        """Return the sum of squares of the averages as rounded by `update`, bitwise equal on all
        ranks. For the arguments see there; rules of `Kind.SQUARES`.
        """
        sums: list[float] = []
        for received in self._parts.values():
            for payloads, table in received.parts:
                norms = np.zeros(2 * len(table))
                self._kernels.update(table, targets, rules, payloads, norms)
                sums.extend(norms)
        return math.fsum(sums)

    def are_safe(self) -> bool:
        """Whether all averages are certainly finite in the bucket's dtype. Decided from scales and
        fp32 values, without decoding; always False for float16.
        """
        if self._dtype == torch.float16:
            return False
        for phase in self._parts:
            bounds = list(map(magnitude, phase.tensors, phase.layouts))
            if not (
                sum(bounds) < SAFE_SUM if self._added else all(bound < SAFE_SUM for bound in bounds)
            ):
                return False
        return True
