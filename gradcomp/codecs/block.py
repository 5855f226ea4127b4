"""2, 4 or 8 bits a value: evenly spaced levels around 0, one scale a group, error feedback.

With 2 bits all four codes are used: -1.5, -0.5, 0.5 and 1.5 steps, the step 0.9957 of the root of
the group's mean square, which is best for a normal distribution (Max 1960, "Quantizing for minimum
distortion", table II). With 4 and 8 bits there are 15 and 255 levels, 0 among them, and the largest
|x| of the group is the outermost. Rounding is to nearest; what it leaves is carried into the next
step (Seide et al. 2014, section 2). A group whose local gradient is exactly zero decodes to zero
and keeps its residual.
"""

from __future__ import annotations

import torch

from gradcomp.codecs.feedback import FeedbackCodec
from gradcomp.kernels import Code
from gradcomp.payload.form import BLOCKS


class Block(FeedbackCodec):
    """Evenly spaced levels with error feedback: 2, 4 or 8 bits a value plus one fp32 scale a group.

    Args:
        bits: 2, 4 or 8.
        group: what shares a scale: "row" (one output unit), "tensor", or a block of n elements.
        error_feedback: carry what a step's codes leave out into the next step. False saves a fp32
            plane of residuals, and rounding is then a bias.
        residual_decay: what a residual keeps for the next step, from 0 (``error_feedback=False``)
            to 1; None: by the optimizer that is registered with it, 1 without one.
        second_phase: of a reduce_scatter: "requantize" (the default; the owner keeps a residual
            too), "block2", "block4", "block8" (means in evenly spaced levels, of which the owner
            keeps residuals), "bf16", "fp32".

    Raises:
        ValueError: an option out of its range; "exact", which needs a shared scale.
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
