"""Integer sums of ternary codes, k + N in ceil(log2(2N + 1)) bits: what the "exact" second phase
sends.
"""

from __future__ import annotations

from torch import Tensor

from gradcomp.kernels import Code, Payloads, host
from gradcomp.payload.form import HEADER_NBYTES, lanes_form
from gradcomp.payload.layout import PayloadLayout


class Lanes:
    """Sums of the ternary codes of `world_size` ranks, with the scales that they share.

    Attributes:
        form: how they stand in a payload.
        code: how kernels write and read them.
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
        """Write scales and sums of the compressed pieces of all payloads to `out`, a payload of
        `layout`.

        Args:
            payloads: of all ranks, with the same pieces (`source`).
            source, layout: where the pieces stand in the payloads and in `out`.
            out: ``(layout.nbytes,)`` uint8.
        """
        scales = 4 * layout.scale_count
        host.copy_bytes(out, HEADER_NBYTES, payloads.tensors[0], scales, HEADER_NBYTES)
        host.sum_lanes(payloads.tensors, source.packed, layout.packed, self.code, out)

    def validate_packed(self, payload: Tensor, layout: PayloadLayout) -> None:
        """Raise CorruptPayload for scales and sums that `add` does not write."""
        host.validate_scales(payload, HEADER_NBYTES, layout.scale_count, non_negative=True)
        host.validate(payload, self.code, layout.packed)
