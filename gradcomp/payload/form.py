"""Forms: how values stand in a payload. `FORMS` is the one table of codec numbers, names, bits and scales.

A new form is one entry here: headers, exchanges, the server, the planner and the benchmarks read it. C finds the kernels of
a form by the name of its `kernel` (``gc_NAME_encode``, ``gc_NAME_sum_decode``, ``gc_NAME_validate``, ``GC_FROM_NAME``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

HEADER_NBYTES = 32

Count = TypeVar("Count", int, NDArray[np.int64])


@dataclass(frozen=True, slots=True)
class Form:
    """How values stand in a payload.

    Attributes:
        code: number in the header.
        name: of the codec, for people.
        bits: of an element.
        scales_per_group: fp32 scales of a group.
        signed_scales: whether a scale may be negative.
        kernel: name of the kernels that read and write it.
    """

    code: int
    name: str
    bits: int
    scales_per_group: int
    signed_scales: bool = False
    kernel: str = ""

    def code_nbytes(self, numel: Count) -> Count:
        """Return the bytes that the codes of `numel` elements fill."""
        return (numel * self.bits + 7) // 8

    def scale_nbytes(self, groups: Count) -> Count:
        """Return the bytes that the scales of so many groups fill."""
        return 4 * self.scales_per_group * groups


PLAIN = Form(1, "identity", bits=32, scales_per_group=0, kernel="values")  # fp32: Identity, small and excluded tensors
TERNARY = Form(2, "ternary", bits=2, scales_per_group=1, kernel="ternary")
ONEBIT = Form(3, "onebit", bits=1, scales_per_group=2, signed_scales=True, kernel="onebit")
LANES = Form(4, "lanes", bits=0, scales_per_group=1, kernel="lanes")  # integer sums; their bits depend on the ranks
BFLOAT16 = Form(5, "bfloat16", bits=16, scales_per_group=0, kernel="values")
BLOCKS = {  # by their bits
    2: Form(6, "block2", bits=2, scales_per_group=1, kernel="block"),
    4: Form(7, "block4", bits=4, scales_per_group=1, kernel="block"),
    8: Form(8, "block8", bits=8, scales_per_group=1, kernel="block"),
}

FORMS = {form.code: form for form in (PLAIN, TERNARY, ONEBIT, LANES, BFLOAT16, *BLOCKS.values())}


def lanes_form(world_size: int) -> Form:
    """Return the form of exact sums of `world_size` ternary codes: ceil(log2(2N + 1)) bits an element."""
    return replace(LANES, bits=(2 * world_size).bit_length())


def form_name(code: int) -> str:
    """Return the name of a codec number, for messages."""
    return FORMS[code].name if code in FORMS else f"codec {code}"
