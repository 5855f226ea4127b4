"""Entropy-coded codes: a uniform quantizer in any number of bits a value from 1 to 4, fractions
included, with error feedback.

Levels are multiples of a step, 0 among them; x = gradient + residual is rounded to the nearest.
Most codes of a gradient are near 0, so they are written with Huffman codes of pairs, from static
tables. Every stream of 4,096 elements has a fixed number of bytes and takes the smallest step
whose codes fit into them. Residuals: Seide et al. 2014, section 2, with a decay
(`gradcomp.codecs.feedback`); docs/reference/wire-format.md has the bytes.
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
    """Multiples of a step, entropy-coded in a given number of bits a value, with error feedback.

    Args:
        bits: a value, scales included: any number from 1 to 4; it is rounded down to 1/512.
            Tensors of fewer than 4,096 elements, and what a tensor has beyond a multiple of
            that, take 8 bytes more.
        error_feedback: carry what a step's codes leave out into the next step. False saves a
            fp32 plane of residuals, and rounding is then a bias.
        residual_decay: what a residual keeps for the next step, from 0 (``error_feedback=False``)
            to 1; None: by the optimizer that is registered with it, 1 without one.
        second_phase: of a reduce_scatter: "requantize" (the default; the owner keeps a residual
            too), "block2", "block4", "block8" (means in evenly spaced levels, of which the owner
            keeps residuals), "bf16", "fp32".

    Raises:
        ValueError: an option out of its range; "exact", which needs a scale that all ranks share.
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
