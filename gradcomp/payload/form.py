"""Forms: how values stand in a payload, codes and scales alike; the header's size."""

from __future__ import annotations

from dataclasses import dataclass

HEADER_NBYTES = 32


@dataclass(frozen=True, slots=True)
class Form:
    """How codes stand in a payload: the codec number of the header, bits per element, fp32 scales per group."""

    code: int
    bits: int
    scales_per_group: int

    def code_nbytes(self, numel: int) -> int:
        """Return the bytes that the codes of `numel` elements fill."""
        return (numel * self.bits + 7) // 8


PLAIN = Form(code=1, bits=32, scales_per_group=0)  # fp32 values: Identity, small and excluded tensors
BFLOAT16 = Form(code=5, bits=16, scales_per_group=0)


def lanes_form(world_size: int) -> Form:
    """Return the form of exact sums of `world_size` ternary codes: ceil(log2(2N + 1)) bits an element."""
    return Form(code=4, bits=(2 * world_size).bit_length(), scales_per_group=1)
