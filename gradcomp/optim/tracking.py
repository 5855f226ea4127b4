"""Whether parameters are still those that their trails belong to."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gradcomp.optim.split import checksum

REMEDY = (
    "load a checkpoint of model and optimizer, or call zero_trails() to take the weights as they"
    " stand"
)


class Tracking:
    """What an optimizer remembers of its parameters beside their state.

    Where a trail came from elsewhere (a split, a checkpoint) the checksum of its top is compared at
    the next step. After that it is enough to see that nobody moved the parameter or wrote to it
    since the last step.
    """

    def __init__(self) -> None:
        self.expected: dict[
            Tensor, tuple[int, str]
        ] = {}  # checksum, and what to say if it is another
        self._strides: dict[Tensor, tuple[int, ...]] = {}
        self._stood: dict[Tensor, tuple[int, int]] = {}  # address and version after the last step

    def __getstate__(self) -> dict[str, object]:
        return {"expected": self.expected}  # copies lie elsewhere

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__()  # type: ignore[misc]
        self.__dict__.update(state)

    def begin(self, p: Tensor) -> None:
        """Take a parameter as it lies in memory now."""
        self._strides[p] = p.stride()
        self._stood.pop(p, None)

    def expect(self, p: Tensor, checksum: int, story: str) -> None:
        """Have the next step check that a top is the one that a trail belongs to."""
        self.begin(p)
        self.expected[p] = checksum, story

    def trust(self, p: Tensor) -> None:
        """Take a parameter as it is for the one that its trail belongs to."""
        self.begin(p)
        self.expected.pop(p, None)

    def checksum(self, p: Tensor) -> int:
        """Return the checksum of the top that a trail belongs to, whether or not that top is
        there yet.
        """
        return self.expected[p][0] if p in self.expected else checksum(p)

    def check(self, p: Tensor, trail: Tensor | None, name: str) -> None:
        """Raise ValueError unless a parameter is still what its state was made for."""
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
        if p in self.expected:
            wanted, story = self.expected[p]
            if checksum(p) != wanted:
                raise ValueError(
                    f"the trail of {name} belongs to other weights: {story}. Load model and"
                    " optimizer from one checkpoint, split after loading and with equal seeds on"
                    f" all ranks; or {REMEDY}"
                )
        if p not in self._stood:
            return
        address, version = self._stood[p]
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
        """Remember where parameters stand after a step that changed them."""
        params = list(params)
        torch.autograd.graph.increment_version(params)
        for p in params:
            self.expected.pop(p, None)
            self._stood[p] = p.data_ptr(), p._version
