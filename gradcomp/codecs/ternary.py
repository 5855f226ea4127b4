"""Ternary codes with error feedback: the nearest of -S, 0 and S, in two bits.

S is `step` times the root mean square of x = gradient + residual in a group. With a step of 1.8,
about 37 % of normally distributed values are not 0 (|x| > 0.9 root mean squares). No random numbers
are used. Payload and decoder are those of `TernGrad` (codes 00 = -1, 01 = 0, 10 = +1).
Residuals: Seide et al. 2014, section 2, with a decay (`gradcomp.codecs.feedback`).
"""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch

from gradcomp.codecs.feedback import FeedbackCodec
from gradcomp.kernels import Code
from gradcomp.payload.form import TERNARY

STEP = 1.8
FLOAT32 = torch.finfo(torch.float32)
# options of TernGrad, which was named Ternary until 2026-11
TERNGRADS = ("clip_sigma", "scale", "seed")


class Ternary(FeedbackCodec):
    """The nearest of -S, 0 and S: 2 bits per value plus one fp32 scale per group, with error
    feedback.

    Args:
        step: S as a multiple of the group's root mean square, above 0.
        group: elements with one scale: "row" (one output unit), "tensor", or a block of n elements.
        error_feedback: add the error of a step's codes to the next step's gradients. False saves
            the residuals, 8 bytes per value (4 under FSDP2), for FSDP2 or if memory is scarce; for
            the loss of accuracy see docs/explanation/accuracy.md.
        residual_decay: factor on the encoding error that becomes the next residual, from 0
            (``error_feedback=False``) to 1; None: chosen for the registered optimizer, else 1.
        second_phase: second phase of a reduce_scatter: "requantize" (default: this codec, with a
            residual of the owner), "block2", "block4", "block8" (means in evenly spaced levels,
            with a residual of the owner), "bf16", "fp32".

    Raises:
        ValueError: an option is out of its range, or "exact", which needs a shared scale.
        TypeError: an unknown option, e.g. one of `TernGrad`, the stochastic codec.
    """

    form = TERNARY
    reach = 1.0

    def __init__(
        self,
        *,
        step: float = STEP,
        group: str | int = "row",
        error_feedback: bool = True,
        residual_decay: float | None = None,
        second_phase: str | None = None,
        **others: Any,
    ) -> None:
        for name, value in others.items():
            if name in TERNGRADS:
                raise TypeError(
                    f"Ternary has no option {name}: write TernGrad({name}={value!r}), the"
                    " stochastic codec"
                )
            raise TypeError(f"Ternary has no option {name!r}")
        if second_phase == "exact":
            raise ValueError(
                'Ternary has no second_phase="exact": its scales are each rank\'s own;'
                ' TernGrad(second_phase="exact") has it'
            )
        if (
            isinstance(step, bool)
            or not isinstance(step, Real)
            or not FLOAT32.tiny <= step <= FLOAT32.max
        ):
            raise ValueError(f"step must be a positive number that float32 can hold, got {step!r}")
        super().__init__(group, error_feedback, second_phase, residual_decay)
        self.step: float = float(step)

    def options(self) -> dict[str, object]:
        return {"step": self.step, **super().options()}

    @property
    def code(self) -> Code:
        return Code(
            self.form.kernel, encoder="nearest", shared=False, step=self.step, decay=self.decay
        )
