"""The averages of one bucket as they arrive: checked payloads, which are decoded into a tensor
or applied to weights.
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

# A sum below this cannot overflow: rounding at each of up to 32767 additions makes it larger by
# less than 1.002, and both float32 and bfloat16 reach almost 2**128.
SAFE_SUM = 2.0**127


class Averages:
    """What an exchange receives of one bucket; made once, used at every step.

    Args:
        kernels: of the bucket's device.
        plan: of the exchange.
        phases: of every slice that brings averages: those in which ranks' payloads arrive, which
            are added up, or owners' payloads, which are decoded as if they were one. Whoever keeps
            this object must keep their memory as it is.
        dtype: of the bucket.
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
        """Write the averages, of all slices or of one, to `out`, in bucket order; return True if
        one is not finite.

        Raises:
            CorruptPayload: one is not, because of a payload whose flag says that its values are.
        """
        bad = False
        for one in self._parts if phase is None else (phase,):
            if self._parts[one].decode(self._kernels, out, self._numel):
                one.refuse_unflagged()
                bad = True
        return bad

    def update(self, targets: NDArray[Any], rules: NDArray[Any]) -> None:
        """Apply the averages, rounded to the bucket's dtype, to weights: `Kernels.update` with
        targets by parameter.
        """
        for one in self._parts.values():
            for payloads, table in one.parts:
                self._kernels.update(table, targets, rules, payloads)

    def squares(self, targets: NDArray[Any], rules: NDArray[Any]) -> float:
        """Return the sum of the squares of the averages, as `update` sees them: `rules` are
        `Kind.SQUARES`. The same on every rank, to the last bit.
        """
        found: list[float] = []
        for one in self._parts.values():
            for payloads, table in one.parts:
                norms = np.zeros(2 * len(table))
                self._kernels.update(table, targets, rules, payloads, norms)
                found.extend(norms)
        return math.fsum(found)

    def are_safe(self) -> bool:
        """Tell, from scales and plain values alone, that averages are finite and their sums
        cannot overflow the bucket's dtype.
        """
        if self._dtype == torch.float16:
            return False
        for phase in self._parts:
            found = list(map(magnitude, phase.tensors, phase.layouts))
            if not (sum(found) < SAFE_SUM if self._added else all(one < SAFE_SUM for one in found)):
                return False
        return True
