"""Integer sums of ternary codes, k + N in ceil(log2(2N + 1)) bits: what the "exact" second phase
sends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradcomp.codecs.base import SumForm
from gradcomp.kernels import HOST, Kernels, Payloads
from gradcomp.payload.form import HEADER_NBYTES, lanes_form
from gradcomp.payload.layout import PayloadLayout


class Lanes(SumForm):
    """Sums of the ternary codes of `world_size` ranks, with the scales that they share."""

    def __init__(self, world_size: int) -> None:
        self.form = lanes_form(world_size)
        self._world_size = world_size

    def add(
        self,
        kernels: Kernels,
        payloads: Payloads,
        source: PayloadLayout,
        layout: PayloadLayout,
        out: Tensor,
    ) -> None:
        kernels.copy_bytes(
            out, HEADER_NBYTES, payloads.tensors[0], 4 * layout.scale_count, HEADER_NBYTES
        )
        kernels.sum_lanes(payloads, source.packed, layout.packed, self.form.bits, out)

    def payloads(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Payloads:
        return Payloads(
            tensors, self.form.kernel, dtype, world_size=self._world_size, lane_bits=self.form.bits
        )

    def validate_packed(self, payload: Tensor, layout: PayloadLayout) -> None:
        HOST.validate_scales(payload, HEADER_NBYTES, layout.scale_count, non_negative=True)
        HOST.validate(payload, self.form.kernel, layout.packed, self._world_size, self.form.bits)
