"""The check that each trail of an optimizer still belongs to its parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gradcomp.optim.split import checksum

REMEDY = (
    "load a checkpoint of model and optimizer, or call zero_trails() to take the weights as they"
    " stand"
)


NO_CHECKSUM = -1
WRITTEN = "it was written to in place after the last step"


class Tracking:
    """Record of an optimizer's parameters after a step, to detect changes from outside.

    The first step after a split or a load compares the checksum of each top. Later steps only check
    whether a parameter was moved or written to since the step before.
    """

    def __init__(self) -> None:
        self.expected: dict[Tensor, tuple[int, str]] = {}  # checksum, and why it may differ
        self._strides: dict[Tensor, tuple[int, ...]] = {}
        self._stood: dict[Tensor, tuple[int, int]] = {}  # address and version after the last step

    def __getstate__(self) -> dict[str, object]:
        written = {p: (NO_CHECKSUM, WRITTEN) for p in self._stood if not self._stands(p)}
        return {"expected": self.expected | written}  # copies have other addresses

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.__dict__.update(state)

    def begin(self, p: Tensor) -> None:
        """Record a parameter's strides; accept any address and version until the next step."""
        self._strides[p] = p.stride()
        self._stood.pop(p, None)

    def expect(self, p: Tensor, checksum: int, story: str) -> None:
        """Make the next step compare the checksum of a top; `story` is the reason in the error."""
        self.begin(p)
        self.expected[p] = checksum, story

    def trust(self, p: Tensor) -> None:
        """Accept a parameter's current values as those that its trail belongs to."""
        self.begin(p)
        self.expected.pop(p, None)

    def checksum(self, p: Tensor) -> int:
        """Return the checksum of the top that a trail belongs to, even if that top is not loaded
        yet; NO_CHECKSUM if the top was moved or written to after the last step.
        """
        if p in self.expected:
            return self.expected[p][0]
        return checksum(p) if self._stands(p) else NO_CHECKSUM

    def fits(self, p: Tensor) -> bool:
        """Return whether a parameter is the top that its trail belongs to."""
        return self.checksum(p) == checksum(p)

    def _stands(self, p: Tensor) -> bool:
        """Return whether a parameter was neither moved nor written to since the last step."""
        now = p.data_ptr(), p._version
        return self._stood.get(p, now) == now

    def check(self, p: Tensor, trail: Tensor | None, name: str) -> None:
        """Raise ValueError unless a parameter still matches its state and its trail."""
        if (trail is None) != (p.dtype == torch.float32) or (
            trail is not None and trail.shape != p.shape
        ):
            raise ValueError(
                f"{name} is now {p.dtype} {tuple(p.shape)}: it was replaced after the optimizer was"
                " made"
            )
        if self._strides.setdefault(p, p.stride()) != p.stride():
            raise ValueError(
                f"{name} now has strides {p.stride()}, its state {self._strides[p]}: convert the"
                " model, for example .to(memory_format=...), before the optimizer is made"
            )
        wanted, story = self.expected.get(p, (None, ""))
        if wanted is not None and checksum(p) != wanted:
            raise ValueError(
                f"the trail of {name} belongs to other weights: {story}. Load model and optimizer"
                " from one checkpoint, split after loading and with equal seeds on all ranks; or"
                f" {REMEDY}"
            )
        address, version = self._stood.get(p, (p.data_ptr(), p._version))
        if address != p.data_ptr():
            raise ValueError(
                f"{name} was replaced after the last step (its memory is another): {REMEDY}"
            )
        if trail is not None and version != p._version:
            raise ValueError(
                f"{name} was written to in place after the last step, its trail belongs to the old"
                f" values: {REMEDY}; if the old values are back, call keep_trails()"
            )

    def stepped(self, params: Iterable[Tensor]) -> None:
        """Increment the versions of updated parameters; record them with the addresses."""
        params = list(params)
        torch.autograd.graph.increment_version(params)
        for p in params:
            self.expected.pop(p, None)
            self._stood[p] = p.data_ptr(), p._version


def check_moved(p: Tensor, state: dict[str, Any], keys: Iterable[str], name: str) -> None:
    """Raise ValueError unless these tensors of a parameter's state are on its device."""
    for key in keys:
        if key in state and state[key].device != p.device:
            raise ValueError(
                f"{name} is on {p.device}, its {key} on {state[key].device}: move the model before"
                " the optimizer is made, or load the optimizer's state into a new one"
            )
