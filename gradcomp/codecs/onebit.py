"""1-bit codes with error feedback: the sign of gradient + residual, and two class means per group.

Implements Seide, Fu, Droppo, Li, Yu 2014, "1-bit stochastic gradient descent", section 2.
Deviations: groups are rows of a weight matrix (the paper's columns: the weights of one output
unit), or tensors or blocks; the residual includes the old residual (as CNTK's code does; the
printed formula omits it); a group whose local gradient is exactly zero decodes to zero and keeps
its residual. `rotate=True` is another algorithm with the same bytes: Vargaftik et al. 2021, "DRIVE:
one-bit distributed mean estimation" (no feedback). `values="sign"` reconstructs -1 and +1, the
paper's first example of a quantizer, instead of class means.
"""

from __future__ import annotations

from gradcomp.codecs.feedback import FeedbackCodec
from gradcomp.kernels import Code
from gradcomp.payload.form import ONEBIT


class OneBit(FeedbackCodec):
    """1-bit SGD: one bit per value plus two fp32 means per group.

    Args:
        group: elements with the same two means: "row" (one output unit), "tensor", or a block of n
            elements.
        error_feedback: add the error of a step's codes to the next step's gradients. Default: True,
            or False with `rotate`. Without both, training diverges; False is for experiments.
        residual_decay: factor on the encoding error that becomes the next residual, from 0
            (``error_feedback=False``) to 1 (the paper); None: chosen for the registered optimizer,
            else 1.
        second_phase: second phase of a reduce_scatter: "requantize" (default: this codec, with a
            residual of the owner), "block2", "block4", "block8" (means in evenly spaced levels,
            with a residual of the owner), "bf16", "fp32".
        values: decoded values. "means": the mean of the bit's class in the group, with the smallest
            residuals. "sign": -1 or +1, in units of the encoded gradient (loss scale included), for
            updates that ignore magnitudes, such as AdaGrad on the average. Residuals are then about
            as large as 1, for gradients of any size.
        rotate: rotate each group at random before taking signs, with the same rotation on all ranks
            and another one at every step, and scale its means so that averages are unbiased. There
            are no residuals, and errors are equally large in a whole group. For trainings with few
            exchanges, such as local steps (docs/explanation/accuracy.md); in exchanges only.

    Raises:
        ValueError: an option is out of its range, or "exact", which needs integer sums.
    """

    form = ONEBIT

    def __init__(
        self,
        *,
        group: str | int = "row",
        error_feedback: bool | None = None,
        residual_decay: float | None = None,
        second_phase: str | None = None,
        values: str = "means",
        rotate: bool = False,
    ) -> None:
        if rotate not in (True, False):
            raise ValueError(f"rotate must be True or False, got {rotate!r}")
        if rotate and (error_feedback or values != "means"):
            raise ValueError(
                "rotate=True is unbiased by itself: use it with values='means' and without"
                " error_feedback"
            )
        feedback = not rotate if error_feedback is None else error_feedback
        super().__init__(group, feedback, second_phase, residual_decay)
        self.rotates = bool(rotate)
        if values not in ("means", "sign"):
            raise ValueError(f'values must be "means" or "sign", got {values!r}')
        self.values = values
        self._means = (-1.0, 1.0) if values == "sign" else None

    def options(self) -> dict[str, object]:
        options = super().options()
        options |= {"values": self.values} if self.values != "means" else {}
        return options | ({"rotate": True} if self.rotates else {})

    @property
    def code(self) -> Code:
        return Code(self.form.kernel, means=self._means, decay=self.decay)
