"""Forms: how values stand in a payload. `FORMS` is the one table of codec numbers, names, bits and
scales.

Where codes stand is arithmetic on numbers of elements, never something that is read: a form says
how many bytes the codes of a run of elements fill, and at which elements its codes can be cut. A
new form is one entry here: headers, exchanges, the server, the planner and the benchmarks read it.
C finds the kernels of a form by the name of its `kernel` (``gc_NAME_encode``,
``gc_NAME_sum_decode``, ``gc_NAME_validate``, ``GC_FROM_NAME``).
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
    """How values stand in a payload: as a stream of so many bits an element.

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

    def code_nbytes(self, first: Count, last: Count) -> Count:
        """Return the bytes that the codes of elements [first, last) of a parameter fill, as a piece
        of their own.

        For a piece that is cut at a multiple of 8 they add up to those of the whole.
        """
        return ((last - first) * self.bits + 7) // 8

    def most_numel(self, nbytes: int) -> int:
        """Return the most elements whose codes fill `nbytes`."""
        return nbytes * 8 // self.bits

    def scale_nbytes(self, groups: Count) -> Count:
        """Return the bytes that the scales of so many groups fill."""
        return 4 * self.scales_per_group * groups


# fp32: Identity, small and excluded tensors
PLAIN = Form(1, "identity", bits=32, scales_per_group=0, kernel="values")
TERNARY = Form(2, "ternary", bits=2, scales_per_group=1, kernel="ternary")
ONEBIT = Form(3, "onebit", bits=1, scales_per_group=2, signed_scales=True, kernel="onebit")
# integer sums; their bits depend on the ranks
LANES = Form(4, "lanes", bits=0, scales_per_group=1, kernel="lanes")
BFLOAT16 = Form(5, "bfloat16", bits=16, scales_per_group=0, kernel="values")
BLOCKS = {  # by their bits
    2: Form(6, "block2", bits=2, scales_per_group=1, kernel="block"),
    4: Form(7, "block4", bits=4, scales_per_group=1, kernel="block"),
    8: Form(8, "block8", bits=8, scales_per_group=1, kernel="block"),
}

FORMS = {form.code: form for form in (PLAIN, TERNARY, ONEBIT, LANES, BFLOAT16, *BLOCKS.values())}

TOPK_CODE = 9  # the number of a removed form is never used again


def lanes_form(world_size: int) -> Form:
    """Return the form of exact sums of `world_size` ternary codes: ceil(log2(2N + 1)) bits an
    element.
    """
    return replace(LANES, bits=(2 * world_size).bit_length())


def form_name(code: int) -> str:
    """Return the name of a codec number, for messages."""
    return FORMS[code].name if code in FORMS else f"codec {code}"


def removal(codec: object) -> str:
    """Return "; TopK was removed: ..." for the number, name or repr of that codec, else ""."""
    if codec != TOPK_CODE and not str(codec).lower().startswith("topk"):
        return ""
    return (
        "; TopK was removed: use Ternary() with local steps (gradcomp.DiLoCo), which sends fewer"
        " bytes and lost no accuracy"
    )
