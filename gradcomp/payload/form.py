"""Forms: formats of values in a payload. `FORMS` is the only table of codec numbers, names, bits,
scales.

Offsets in a payload are computed from numbers of elements, and never read from the payload: a form
gives the bytes that the codes of a range of elements need, and says whether codes can be split. A
new form is one entry here: headers, exchanges, the server, the planner and the benchmarks use it.
Its kernels in C are found by the name of its `kernel` (``gc_NAME_encode``, ``gc_NAME_sum_decode``,
``gc_NAME_validate``, ``GC_FROM_NAME``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

HEADER_NBYTES = 32
STREAM_NUMEL = 4096  # elements of a stream of entropy-coded codes (GC_STREAM_NUMEL)
STREAM_NBYTES = 512, 2048  # min and max bytes of a stream (GC_STREAM_NBYTES_LEAST, _MOST)

Count = TypeVar("Count", int, NDArray[np.int64])


@dataclass(frozen=True, slots=True)
class Form:
    """The format of values in a payload, with a fixed number of bits per element.

    Attributes:
        code: number in the header.
        name: name of the codec, for users.
        bits: bits per element.
        scales_per_group: number of fp32 scales per group.
        signed_scales: whether a scale may be negative.
        kernel: name of the kernels that encode and decode this form.
        cuts: whether the codes of a piece are a part of the codes of a larger piece. If so, several
            pieces can be encoded together and sent separately; if not, each is encoded by itself.
        reach: largest |decoded value|, as a multiple of the scale.
        group_numel: elements of a scale group if all payloads have the same; 0: see the header.
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
        """Return the number of bytes of the codes of elements [first, last) of a parameter, encoded
        as one piece.

        If `cuts`, the bytes of pieces that are cut at multiples of 8 elements add up to those of
        the whole.
        """
        return ((last - first) * int(self.bits) + 7) // 8

    def most_numel(self, nbytes: int) -> int:
        """Return the largest number of elements whose codes fit into `nbytes` bytes."""
        return int(nbytes * 8 // self.bits)

    def of_payload(self, numel: int, nbytes: int) -> Form:
        """Return the form of a payload whose codes of `numel` elements have `nbytes` bytes: this
        form, unless its codecs choose their own number of bits.
        """
        return self

    def scale_nbytes(self, groups: Count) -> Count:
        """Return the number of bytes of the scales of `groups` groups."""
        return 4 * self.scales_per_group * groups


@dataclass(frozen=True, slots=True)
class StreamForm(Form):
    """Entropy-coded codes, in streams of a fixed number of bytes.

    Every group of `STREAM_NUMEL` elements of a parameter, or the part of it that is in a piece, is
    one stream. `bits` includes scales. With its scale, a whole stream has
    ``bits * STREAM_NUMEL / 8`` bytes, and a shorter one of n elements ``bits * n / 8``, rounded up,
    plus 8.
    """

    @property
    def stream_nbytes(self) -> int:
        """Bytes of a whole stream, including its scale."""
        return int(self.bits * STREAM_NUMEL) // 8

    def code_nbytes(self, first: Count, last: Count) -> Count:
        whole = last // STREAM_NUMEL - -(-first // STREAM_NUMEL)
        head, tail = -first % STREAM_NUMEL, last % STREAM_NUMEL
        inside = whole < 0  # the piece is inside one stream, and reaches neither end
        whole, head = whole + inside, head * (1 - inside)
        tail = tail * (1 - inside) + (last - first) * inside
        out: Count = whole * (self.stream_nbytes - 4) + self._short(head) + self._short(tail)
        return out

    def most_numel(self, nbytes: int) -> int:
        return (nbytes // (self.stream_nbytes - 4) + 1) * STREAM_NUMEL

    def of_payload(self, numel: int, nbytes: int) -> StreamForm:
        """Return the form with the fewest bits whose codes of `numel` elements have `nbytes` bytes,
        or `self` if there is none. Forms that give the same number of bytes give the same codes.
        """
        low, high = STREAM_NBYTES
        while low < high:
            middle = (low + high) // 2
            if stream_form(middle).code_nbytes(0, numel) < nbytes:
                low = middle + 1
            else:
                high = middle
        form = stream_form(low)
        return form if form.code_nbytes(0, numel) == nbytes else self

    def _short(self, numel: Count) -> Count:
        """Return the number of bytes of the codes of a partial stream, 0 for 0 elements."""
        out: Count = (numel * self.stream_nbytes + STREAM_NUMEL - 1) // STREAM_NUMEL + 4 * (
            numel > 0
        )
        return out


# fp32: Identity, small and excluded tensors
PLAIN = Form(1, "identity", bits=32, scales_per_group=0, kernel="values")
TERNARY = Form(2, "ternary", bits=2, scales_per_group=1, kernel="ternary")
ONEBIT = Form(3, "onebit", bits=1, scales_per_group=2, signed_scales=True, kernel="onebit")
# integer sums; their bits depend on the number of ranks
LANES = Form(4, "lanes", bits=0, scales_per_group=1, kernel="lanes")
BFLOAT16 = Form(5, "bfloat16", bits=16, scales_per_group=0, kernel="values")
# evenly spaced levels, by bits; the outermost are at most `reach` steps from 0
BLOCKS = {
    2: Form(6, "block2", bits=2, scales_per_group=1, kernel="block", reach=1.5),
    4: Form(7, "block4", bits=4, scales_per_group=1, kernel="block", reach=7.5),
    8: Form(8, "block8", bits=8, scales_per_group=1, kernel="block", reach=127.5),
}
# codecs choose their own bits; here 2.2, rounded down to a whole number of bytes per stream
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

TOPK_CODE = 9  # a removed form; its number is never used again


def lanes_form(world_size: int) -> Form:
    """Return the form of exact sums of ternary codes of N = `world_size` ranks, which need
    ceil(log2(2N + 1)) bits per element.
    """
    return replace(LANES, bits=(2 * world_size).bit_length())


def stream_form(nbytes: int) -> StreamForm:
    """Return the form of entropy-coded codes with `nbytes` bytes per whole stream."""
    return replace(ENTROPY, bits=8 * nbytes / STREAM_NUMEL)


def form_name(code: int) -> str:
    """Return the name for a codec number, for messages."""
    return FORMS[code].name if code in FORMS else f"codec {code}"


def removal(codec: object) -> str:
    """Return "; TopK was removed: ..." for the number, name or repr of TopK, else ""."""
    if codec != TOPK_CODE and not str(codec).lower().startswith("topk"):
        return ""
    return (
        "; TopK was removed: use TernGrad() with local steps (gradcomp.DiLoCo), which sends fewer"
        " bytes and lost no accuracy"
    )
