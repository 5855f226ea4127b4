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
STREAM_NUMEL = 4096  # elements of a stream of entropy-coded codes (GC_STREAM_NUMEL)
STREAM_NBYTES = 512, 2048  # of it, at least and at most (GC_STREAM_NBYTES_LEAST, _MOST)

Count = TypeVar("Count", int, NDArray[np.int64])


@dataclass(frozen=True, slots=True)
class Form:
    """How values stand in a payload: in so many bits an element.

    Attributes:
        code: number in the header.
        name: of the codec, for people.
        bits: of an element.
        scales_per_group: fp32 scales of a group.
        signed_scales: whether a scale may be negative.
        kernel: name of the kernels that read and write it.
        cuts: the codes of a piece are a part of those of a larger one, so that what is encoded as
            one can be sent as several; else it is encoded in pieces.
        reach: decoded values, in scales, at most.
        group_numel: elements of a scale group, where all payloads have the same; 0: as their
            headers say.
    """

    code: int
    name: str
    bits: float
    scales_per_group: int
    signed_scales: bool = False
    kernel: str = ""
    cuts: bool = True
    reach: float = 1.0
    group_numel: int = 0

    def code_nbytes(self, first: Count, last: Count) -> Count:
        """Return the bytes that the codes of elements [first, last) of a parameter fill, as a piece
        of their own.

        Where `cuts`, they add up to those of the whole for pieces that are cut at a multiple of 8.
        """
        return ((last - first) * int(self.bits) + 7) // 8

    def most_numel(self, nbytes: int) -> int:
        """Return the most elements whose codes fill `nbytes`."""
        return int(nbytes * 8 // self.bits)

    def of_payload(self, numel: int, nbytes: int) -> Form:
        """Return the form of a payload whose codes of `numel` elements fill `nbytes`: this one,
        unless its bits are a codec's own.
        """
        return self

    def scale_nbytes(self, groups: Count) -> Count:
        """Return the bytes that the scales of so many groups fill."""
        return 4 * self.scales_per_group * groups


@dataclass(frozen=True, slots=True)
class StreamForm(Form):
    """Entropy-coded codes: a stream of a fixed number of bytes for every group of `STREAM_NUMEL`
    elements of a parameter, and for what a piece has of one.

    `bits` includes scales. A whole stream takes ``bits * STREAM_NUMEL / 8`` bytes with its scale, a
    shorter one of n elements ``bits * n / 8``, rounded up, and 8.
    """

    @property
    def stream_nbytes(self) -> int:
        """Bytes of a whole stream, its scale included."""
        return int(self.bits * STREAM_NUMEL) // 8

    def code_nbytes(self, first: Count, last: Count) -> Count:
        whole = last // STREAM_NUMEL - -(-first // STREAM_NUMEL)
        head, tail = -first % STREAM_NUMEL, last % STREAM_NUMEL
        inside = whole < 0  # of one stream, whose ends it does not reach
        whole, head = whole + inside, head * (1 - inside)
        tail = tail * (1 - inside) + (last - first) * inside
        out: Count = whole * (self.stream_nbytes - 4) + self._short(head) + self._short(tail)
        return out

    def most_numel(self, nbytes: int) -> int:
        return (nbytes // (self.stream_nbytes - 4) + 1) * STREAM_NUMEL

    def of_payload(self, numel: int, nbytes: int) -> StreamForm:
        """Return the form with the fewest bits that make the codes of `numel` elements so many
        bytes, `self` if no bits do. Bits that make no difference to sizes make none to codes.
        """
        low, high = STREAM_NBYTES
        while low < high:
            middle = (low + high) // 2
            if stream_form(middle).code_nbytes(0, numel) < nbytes:
                low = middle + 1
            else:
                high = middle
        found = stream_form(low)
        return found if found.code_nbytes(0, numel) == nbytes else self

    def _short(self, numel: Count) -> Count:
        """Return the bytes of the codes of a stream that is not whole."""
        out: Count = (numel * self.stream_nbytes + STREAM_NUMEL - 1) // STREAM_NUMEL + 4 * (
            numel > 0
        )
        return out


# fp32: Identity, small and excluded tensors
PLAIN = Form(1, "identity", bits=32, scales_per_group=0, kernel="values")
TERNARY = Form(2, "ternary", bits=2, scales_per_group=1, kernel="ternary")
ONEBIT = Form(3, "onebit", bits=1, scales_per_group=2, signed_scales=True, kernel="onebit")
# integer sums; their bits depend on the ranks
LANES = Form(4, "lanes", bits=0, scales_per_group=1, kernel="lanes")
BFLOAT16 = Form(5, "bfloat16", bits=16, scales_per_group=0, kernel="values")
# evenly spaced levels, by their bits: 2**bits of them, (2**bits - 1) / 2 steps on each side of 0
BLOCKS = {
    2: Form(6, "block2", bits=2, scales_per_group=1, kernel="block", reach=1.5),
    4: Form(7, "block4", bits=4, scales_per_group=1, kernel="block", reach=7.5),
    8: Form(8, "block8", bits=8, scales_per_group=1, kernel="block", reach=127.5),
}
# the bits are a codec's own: these are 2.2, rounded down to a whole number of bytes
ENTROPY = StreamForm(
    10,
    "entropy",
    bits=8 * 1126 / STREAM_NUMEL,
    scales_per_group=1,
    kernel="entropy",
    cuts=False,
    reach=2.0**15,
    group_numel=STREAM_NUMEL,
)

FORMS = {
    form.code: form for form in (PLAIN, TERNARY, ONEBIT, LANES, BFLOAT16, *BLOCKS.values(), ENTROPY)
}

TOPK_CODE = 9  # the number of a removed form is never used again


def lanes_form(world_size: int) -> Form:
    """Return the form of exact sums of `world_size` ternary codes: ceil(log2(2N + 1)) bits an
    element.
    """
    return replace(LANES, bits=(2 * world_size).bit_length())


def stream_form(nbytes: int) -> StreamForm:
    """Return the form of entropy-coded codes whose whole streams take so many bytes."""
    return replace(ENTROPY, bits=8 * nbytes / STREAM_NUMEL)


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
