"""Entropy-coded codes: a uniform quantizer with error feedback and 1 to 4 bits per value, fractions
included.

Levels are multiples of a step, including 0; x = gradient + residual is rounded to nearest. Most
codes of a gradient are near 0, so pairs of codes are Huffman-coded with static tables. Every stream
of 4,096 elements has a fixed number of bytes, and uses the smallest step whose codes fit.
Residuals: Seide et al. 2014, section 2, with a decay (`gradcomp.codecs.feedback`).
docs/reference/wire-format.md has the bytes.
"""

from __future__ import annotations

from numbers import Real

import torch
from typing_extensions import Self

from gradcomp.codecs.feedback import FeedbackCodec
from gradcomp.kernels import Code
from gradcomp.payload.form import (
    ENTROPY,
    STREAM_NBYTES,
    STREAM_NUMEL,
    Form,
    stream_form,
)

LEAST_BITS, MOST_BITS = (8 * nbytes / STREAM_NUMEL for nbytes in STREAM_NBYTES)


class EntropyCoded(FeedbackCodec):
    """Multiples of a step, entropy-coded with a given number of bits, with error feedback.

    Args:
        bits: bits per value, including scales: any number from 1 to 4, rounded down to a multiple
            of 1/512. A payload's header of 32 bytes is extra, and 8 bytes for a tensor whose number
            of elements is no multiple of 4,096.
        error_feedback: add the error of a step's codes to the next step's gradients. False saves
            the fp32 residuals, but rounding is then biased.
        residual_decay: factor on the encoding error that becomes the next residual, from 0
            (``error_feedback=False``) to 1; None: chosen for the registered optimizer, else 1.
        second_phase: second phase of a reduce_scatter: "requantize" (default: this codec, with a
            residual of the owner), "block2", "block4", "block8" (means in evenly spaced levels,
            with a residual of the owner), "bf16", "fp32".

    Raises:
        ValueError: an option is out of its range, or "exact", which needs a shared scale.
    """

    form = ENTROPY
    most = torch.tensor(torch.finfo(torch.float32).max / ENTROPY.reach).item()

    def __init__(
        self,
        bits: float = 2.2,
        *,
        error_feedback: bool = True,
        residual_decay: float | None = None,
        second_phase: str | None = None,
    ) -> None:
        number = isinstance(bits, Real) and not isinstance(bits, bool)
        if not number or not LEAST_BITS <= bits <= MOST_BITS:
            raise ValueError(
                f"bits must be a number from {LEAST_BITS:g} to {MOST_BITS:g}, got {bits!r};"
                " Block(8) has more"
            )
        super().__init__(STREAM_NUMEL, error_feedback, second_phase, residual_decay)
        self.bits = float(bits)
        self.form = stream_form(int(self.bits * STREAM_NUMEL) // 8)

    def options(self) -> dict[str, object]:
        shared = super().options()
        del shared["group"]
        return {"bits": self.bits, **shared}

    @property
    def code(self) -> Code:
        return Code(self.form.kernel, stream_nbytes=self.form.stream_nbytes, decay=self.decay)

    def with_form(self, form: Form) -> Self:
        out = super().with_form(form)
        out.bits = form.bits
        return out

    def group_numel(self, shape: tuple[int, ...]) -> int:
        return STREAM_NUMEL
