"""Ternary codes rounded to the nearest level: -S, 0 or S, the nearest to x, in two bits, with error
feedback.

S is `step` times the root mean square of x = gradient + residual over a group. With a step of 1.8
about 37 % of a normal distribution get a sign (|x| > 0.9 root mean squares). There are no random
numbers. The payload is that of `TernGrad` (codes 00 = -1, 01 = 0, 10 = +1), and so is the decoder.
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
# options of the stochastic codec, which had this name until 2026-11
TERNGRADS = ("clip_sigma", "scale", "seed")


class Ternary(FeedbackCodec):
    """-S, 0 or S, whichever is nearest: 2 bits a value plus one fp32 scale a group, with error
    feedback.

    Args:
        step: S in root mean squares of the group, above 0.
        group: what shares a scale: "row" (one output unit), "tensor", or a block of n elements.
        error_feedback: carry what a step's codes leave out into the next step. False keeps no
            residuals, which take 8 bytes a value (4 under FSDP2): for FSDP2 and where memory is
            tight; docs/explanation/accuracy.md has what it costs.
        residual_decay: what a residual keeps for the next step, from 0 (``error_feedback=False``)
            to 1; None: by the optimizer that is registered with it, 1 without one.
        second_phase: of a reduce_scatter: "requantize" (the default; the owner keeps a residual
            too), "block2", "block4", "block8" (means in evenly spaced levels, of which the owner
            keeps residuals), "bf16", "fp32".

    Raises:
        ValueError: an option out of its range; "exact", which needs a scale that all ranks share.
        TypeError: an option of `TernGrad`, the stochastic codec.
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
