"""What the parts of a split optimizer may ask of it: the type that sparse gradients and
checkpoints are written against.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor

from gradcomp.optim.entries import Entry


class Updates(Protocol):
    """A split optimizer, as `gradcomp.optim.sparse` and `gradcomp.optim.checkpoint` see it."""

    moments: ClassVar[tuple[str, ...]]  # names of fp32 state, in the order of gc_target
    counters: ClassVar[tuple[str, ...]]  # names of single numbers kept beside "step"
    takes_sparse: ClassVar[bool]
    defaults: dict[str, Any]
    param_groups: list[dict[str, Any]]

    def check_options(self, group: dict[str, Any]) -> None:
        """Raise ValueError for hyperparameters out of their range."""

    def run(self, entries: Sequence[Entry]) -> None:
        """Update parameters whose steps have been counted."""

    def wanted_moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the fp32 state that a group needs."""

    def taken_over(self, name: str, p: Tensor, step: Tensor) -> Tensor | None:
        """Return state for a parameter that comes from the optimizer that this one derives from;
        None: it is refused.
        """

    def name_of(self, group: dict[str, Any], where: int, place: int) -> str:
        """Return what a message calls a parameter."""

    def new_moment(self, p: Tensor, name: str, group: dict[str, Any]) -> Tensor:
        """Return fp32 state of a parameter before its first step."""
