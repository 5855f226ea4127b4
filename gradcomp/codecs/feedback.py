"""What codecs with error feedback have in common: scale groups that are encoded whole, and which second phases they have."""

from __future__ import annotations

from gradcomp.codecs.base import Codec
from gradcomp.codecs.checks import check_group, check_second_phase, resolve_group


class FeedbackCodec(Codec):
    """A codec whose codes leave residuals.

    Args:
        group: what shares scales: "row" (one output unit), "tensor", or a block of n elements.
        error_feedback: carry what a step's codes leave out into the next step.
        second_phase: of a reduce_scatter; None: requantize.

    Raises:
        ValueError: an option out of its range; "exact", which needs a scale that all ranks share.
    """

    whole_groups = True

    def __init__(self, group: str | int, error_feedback: bool, second_phase: str | None) -> None:
        check_group(group, ("row", "tensor"))
        check_second_phase(second_phase)
        if second_phase == "exact":
            raise ValueError(
                f'second_phase="exact" needs integer sums; codes of {type(self).__name__} have scales of a rank and group'
            )
        if error_feedback not in (True, False):
            raise ValueError(f"error_feedback must be True or False, got {error_feedback!r}")
        self.group = group
        self.error_feedback = bool(error_feedback)
        self.second_phase = second_phase

    def options(self) -> dict[str, object]:
        return {"group": self.group, "error_feedback": self.error_feedback, "second_phase": self.second_phase}

    def group_numel(self, shape: tuple[int, ...]) -> int:
        return resolve_group(self.group, shape)
