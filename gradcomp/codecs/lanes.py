"""Integer sums of ternary codes for the "exact" second phase: k + N in ceil(log2(2N + 1)) bits, for
a sum k of N ranks.
"""

from __future__ import annotations

from torch import Tensor

from gradcomp.kernels import Code, Payloads, host
from gradcomp.payload.form import HEADER_NBYTES, lanes_form
from gradcomp.payload.layout import PayloadLayout


class Lanes:
    """Encoder of sums of the ternary codes of `world_size` ranks, which share their scales.

    Attributes:
        form: form of the sums in a payload.
        code: description of the sums for kernels.
    """

    def __init__(self, world_size: int) -> None:
        self.form = lanes_form(world_size)
        self.code = Code(self.form.kernel, bits=int(self.form.bits), world_size=world_size)

    def add(
        self,
        payloads: Payloads,
        source: PayloadLayout,
        layout: PayloadLayout,
        out: Tensor,
    ) -> None:
        """Write the scales and the sums of the compressed pieces of all payloads to `out`.

        Args:
            payloads: payloads of all ranks, with the same pieces and scales.
            source, layout: layouts of the payloads and of `out`.
            out: ``(layout.nbytes,)`` uint8, the body is written in place.
        """
        scales = 4 * layout.scale_count
        host.copy_bytes(out, HEADER_NBYTES, payloads.tensors[0], scales, HEADER_NBYTES)
        host.sum_lanes(payloads.tensors, source.packed, layout.packed, self.code, out)

    def validate_packed(self, payload: Tensor, layout: PayloadLayout) -> None:
        """Raise CorruptPayload for scales or sums that `add` does not write."""
        host.validate_scales(payload, HEADER_NBYTES, layout.scale_count, non_negative=True)
        host.validate(payload, self.code, layout.packed)
