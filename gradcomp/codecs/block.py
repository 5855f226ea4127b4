"""Block codes with 2, 4 or 8 bits per value: evenly spaced levels around 0, one scale per group,
error feedback.

With 2 bits, the four codes are -1.5, -0.5, 0.5 and 1.5 steps. A step is 0.9957 times the root mean
square of the group, which is optimal for a normal distribution (Max 1960, "Quantizing for minimum
distortion", table II). With 4 and 8 bits there are 15 and 255 levels including 0, and the outermost
is the largest |x| of the group. Values are rounded to nearest, and the error is added in the next
step (Seide et al. 2014, section 2). A group whose local gradient is exactly zero decodes to zero
and keeps its residual.
"""

from __future__ import annotations

import torch

from gradcomp.codecs.feedback import FeedbackCodec
from gradcomp.kernels import Code
from gradcomp.payload.form import BLOCKS


class Block(FeedbackCodec):
    """Evenly spaced levels with error feedback: 2, 4 or 8 bits per value, one fp32 scale per group.

    Args:
        bits: bits per value, 2, 4 or 8.
        group: elements with one scale: "row" (one output unit), "tensor", or a block of n elements.
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

    def __init__(
        self,
        bits: int = 4,
        *,
        group: str | int = "row",
        error_feedback: bool = True,
        residual_decay: float | None = None,
        second_phase: str | None = None,
    ) -> None:
        if isinstance(bits, bool) or bits not in BLOCKS:
            raise ValueError(f"bits must be one of {sorted(BLOCKS)}, got {bits!r}")
        super().__init__(group, error_feedback, second_phase, residual_decay)
        self.bits = bits
        self.form = BLOCKS[bits]
        self.reach = {2: 2.0, 4: 7.5, 8: 127.5}[bits]  # half a step beyond the outermost level
        top = 2 * self.reach - 1
        self.most = torch.tensor(torch.finfo(torch.float32).max / top).item()

    def options(self) -> dict[str, object]:
        return {"bits": self.bits, **super().options()}

    @property
    def code(self) -> Code:
        return Code(self.form.kernel, bits=self.bits, decay=self.decay)
