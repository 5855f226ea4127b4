"""What a rank remembers between steps, by parameter: residuals, the owner's residuals, states of a
transform, second moments.

All of it commits, rolls back and is checkpointed together (`gradcomp.memory.reshard`: for another
number of ranks).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gradcomp.memory.moments import SecondMoments
from gradcomp.memory.residuals import Feedback
from gradcomp.memory.transform import Transforming
from gradcomp.payload.form import removal

STEPS = 2**32  # what random numbers and headers can count
PARTS = ("residual", "owner_residual", "transform_state", "second_moment")


class Memory:
    """The parts that are there, under the names that a checkpoint has for them.

    Attributes:
        feedback: residuals of this rank's gradients.
        owner_feedback: residuals of the means that this rank owns; they follow `feedback`.
        transform: a transform and its states.
        moments: second moments of the averages, which are the same on every rank.
    """

    def __init__(
        self,
        feedback: Feedback | None,
        owner_feedback: Feedback | None,
        transform: Transforming | None,
        moments: SecondMoments | None = None,
    ) -> None:
        self.feedback, self.owner_feedback, self.transform, self.moments = (
            feedback,
            owner_feedback,
            transform,
            moments,
        )

    def begin_step(self) -> None:
        """Forget what `discard` could undo."""
        if self.feedback is not None:
            self.feedback.begin_step()
        if self.transform is not None:
            self.transform.begin_step()
        if self.moments is not None:
            self.moments.planes.begin_step()

    def free_unused(self) -> None:
        """Free the memory of residuals that are all 0."""
        if self.feedback is not None:
            self.feedback.free_unused()

    def discard(self) -> None:
        """Undo every commit since `begin_step`."""
        if self.feedback is not None:
            self.feedback.discard()
        if self.transform is not None:
            self.transform.planes.discard()
        if self.moments is not None:
            self.moments.planes.discard()

    def begin_transform(self) -> None:
        """The warm-up of a transform is over: residuals of its gradients become those of what it
        sends.
        """
        if self.transform is not None and self.feedback is not None:
            self.feedback.share(self.transform.share_of)

    def rescale(self, old: float, new: float) -> None:
        """Gradients carry the loss scale `new` instead of `old`."""
        if self.feedback is not None:
            self.feedback.rescale(new / old)
        if self.transform is not None:
            self.transform.scale = new

    def state(self, names: Mapping[int, str]) -> dict[str, dict[str, Tensor]]:
        """Return copies of everything; empty parts before the first step."""
        planes = [part.state(names) if part is not None else {} for part in self._planes()]
        return dict(zip(PARTS, planes, strict=True))

    def load(self, state: Mapping[str, Any], names: Mapping[int, str]) -> None:
        """Take everything from a checkpoint that `check` accepts."""
        for part, key in zip(self._planes(), PARTS, strict=True):
            if part is not None:
                part.load(state.get(key, {}), names)

    def check(self, state: Mapping[str, Any], names: Mapping[int, str]) -> None:
        """Raise ValueError for a checkpoint that does not fit this model, or that the transform
        cannot have made.
        """
        for part, key in zip(self._planes(), PARTS, strict=True):
            if part is not None:
                part.check(state.get(key, {}), names)
        if self.transform is not None:
            self.transform.check(state.get(PARTS[2], {}))

    def _planes(self) -> list[Any]:
        states = self.transform.planes if self.transform is not None else None
        return [
            self.feedback,
            self.owner_feedback,
            states,
            self.moments.planes if self.moments is not None else None,
        ]


def read_numbers(state: Mapping[str, Any]) -> tuple[int, float]:
    """Return step and loss scale of a state; ValueError for anything that `Engine.state_dict`
    does not make.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"a state is a dictionary, got {type(state).__name__}")  # noqa: TRY004
    missing = {"step", "loss_scale", "residual", "owner_residual"} - state.keys()
    if missing:
        raise ValueError(
            f"this state has no {min(missing)!r}: it is not from gradcomp's state_dict()"
        )
    step, scale = state["step"], state["loss_scale"]
    if type(step) is not int or not 0 <= step < STEPS:
        raise ValueError(
            f"this state has step {step!r}, an integer of at least 0 and below 2^32 expected"
        )
    if type(scale) is not float or not 0 < scale < float("inf"):
        raise ValueError(f"this state has loss_scale {scale!r}, a positive number expected")
    return step, scale


def same_codec(saved: object, codec: str) -> bool:
    """Whether a saved codec's repr is this one; one from before ``residual_decay`` had a decay
    of 1, or no residuals.
    """
    return saved in (
        codec,
        codec.replace(", residual_decay=1.0", ""),
        codec.replace(", residual_decay=0.0", ""),
    )


def check_origin(state: Mapping[str, Any], wanted: Mapping[str, object]) -> None:
    """Raise ValueError unless a state has the `wanted` values, and was made by a `state_dict` at
    all.
    """
    read_numbers(state)
    for key, value in wanted.items():
        if key == "codec" and same_codec(state.get(key), str(value)):
            continue
        if key == "memory_order" and state.get(key, "None") != value:
            raise ValueError(
                f"this state has residuals in memory order {state.get(key)}, this model {value}:"
                " give it the memory format (channels_last, say) that it had"
            )
        if state.get(key, "None") != value:
            raise ValueError(
                f"this state has {key} {state.get(key)!r}, {value!r} expected: residuals belong to"
                " one rank (for another world size, load a list of the states of all ranks)"
                f"{removal(state.get(key))}"
            )
