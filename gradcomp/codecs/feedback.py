"""Base class of codecs with error feedback: whole groups, residuals with decay, second phases.

The encoding error of a step is r = fl(fl(gradient + residual) - decoded). The next step's residual
is fl(decay * r). With a decay of 1 no error is lost (Seide et al. 2014, section 2). Optimizers that
divide by second moments train better with a smaller decay, because old residuals belong to weights
that have moved on (docs/explanation/accuracy.md).
"""

from __future__ import annotations

import copy
from numbers import Real
from typing import TypeVar

import numpy as np
from typing_extensions import Self

from gradcomp.codecs.base import Codec
from gradcomp.codecs.checks import check_group, check_second_phase, resolve_group

Feedback = TypeVar("Feedback", bound="FeedbackCodec")


class FeedbackCodec(Codec):
    """Base class of codecs with residuals.

    Args:
        group: elements with common scales: "row" (one output unit), "tensor", or a block of n
            elements.
        error_feedback: add the error of a step's codes to the next step's gradients.
        second_phase: second phase of a reduce_scatter; None: requantize.
        residual_decay: factor on the encoding error that becomes the next residual, in [0, 1]; 0 is
            ``error_feedback=False``. None: 1, unless the codec is registered with an optimizer for
            which another value was measured.

    Raises:
        ValueError: an option is out of its range, or "exact", which needs a shared scale.
    """

    whole_groups = True

    def __init__(
        self,
        group: str | int,
        error_feedback: bool,
        second_phase: str | None,
        residual_decay: float | None = None,
    ) -> None:
        check_group(group, ("row", "tensor"))
        second_phase = check_second_phase(second_phase)
        if second_phase == "exact":
            raise ValueError(
                f'second_phase="exact" needs integer sums; codes of {type(self).__name__} have'
                " scales of a rank and group"
            )
        if error_feedback not in (True, False):
            raise ValueError(f"error_feedback must be True or False, got {error_feedback!r}")
        number = isinstance(residual_decay, Real) and not isinstance(residual_decay, bool)
        if residual_decay is not None and not (number and 0 <= residual_decay <= 1):
            raise ValueError(
                f"residual_decay must be None or a number from 0 to 1, got {residual_decay!r}"
            )
        if residual_decay is not None and not np.float32(float(residual_decay)):
            residual_decay = 0.0  # too small for float32, in which kernels take it
        self.group = group
        self.error_feedback = bool(error_feedback) and residual_decay != 0
        self.second_phase = second_phase
        self.residual_decay = None if residual_decay is None else float(residual_decay)

    @property
    def decay(self) -> float:
        # a decay of 0 means no error feedback, so kernels have no residual to multiply
        return self.residual_decay or 1.0

    def with_decay(self, residual_decay: float) -> Self:
        """Return a copy of this codec with another residual decay, in (0, 1]."""
        out = copy.copy(self)
        out.residual_decay = residual_decay
        return out

    def of_groups(
        self,
        group_numel: int,
        *,
        shares_scale: bool = False,
    ) -> Codec:
        out = copy.copy(self)
        out.group, out.second_phase = group_numel, None
        return out

    def options(self) -> dict[str, object]:
        return {
            "group": self.group,
            "error_feedback": self.error_feedback,
            "residual_decay": self.decay if self.error_feedback else 0.0,  # equivalent settings
            "second_phase": self.second_phase,
        }

    def group_numel(self, shape: tuple[int, ...]) -> int:
        return resolve_group(self.group, shape)
