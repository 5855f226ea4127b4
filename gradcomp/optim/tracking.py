"""Access to an optimizer's trails, and the check that each still belongs to its parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from gradcomp.optim.split import checksum, join, wait, write_split

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
    """Raise ValueError unless the tensors of a parameter's state with these keys are on its
    device.
    """
    for key in keys:
        if key in state and state[key].device != p.device:
            raise ValueError(
                f"{name} is on {p.device}, its {key} on {state[key].device}: move the model before"
                " the optimizer is made, or load the optimizer's state into a new one"
            )


class TrailKeeper(torch.optim.Optimizer):
    """Base class of `SplitOptimizer` with its methods on trails, the ``state[p]["trail"]``."""

    _tracking: Tracking

    @cached_property
    def _places(self) -> dict[Tensor, tuple[dict[str, Any], str]]:
        """The group and the name in error messages of every parameter."""
        found = {}
        for where, group in enumerate(self.param_groups):
            names = group.get("param_names")
            for place, p in enumerate(group["params"]):
                name = f"{names[place]!r}" if names else f"{place} of group {where}"
                found[p] = group, f"parameter {name}"
        return found

    def _parameters(self) -> Iterator[nn.Parameter]:
        for group in self.param_groups:
            yield from group["params"]

    def trail(self, parameter: Tensor) -> Tensor | None:
        """Return a parameter's trail, int16 in its shape; None if it is fp32 or not in this
        optimizer.
        """
        return self.state[parameter].get("trail") if parameter in self.state else None

    def rounding(self, parameter: Tensor) -> str:
        """Return how the top of a parameter is made: "truncate" or "nearest".

        Raises:
            ValueError: this optimizer does not have the parameter.
        """
        if parameter not in self._places:
            raise ValueError("this optimizer does not have that parameter")
        return str(self._places[parameter][0]["rounding"])

    def fp32(self, parameter: Tensor) -> Tensor:
        """Return a parameter joined with its trail, a new float32 tensor of its shape.

        Raises:
            ValueError: the trail belongs to other weights.
        """
        trail = self.trail(parameter)
        if trail is None:
            return parameter.detach().clone()
        self._tracking.check(parameter, trail, "the parameter")
        return join(parameter.detach(), trail, rounding=self.rounding(parameter))

    @torch.no_grad()
    def set_fp32(self, parameter: Tensor, weight: Tensor) -> None:
        """Set a parameter and its trail to an fp32 weight.

        Raises:
            ValueError: the weight has another shape; the parameter was moved away from its trail.
        """
        if weight.shape != parameter.shape:
            theirs, mine = tuple(weight.shape), tuple(parameter.shape)
            raise ValueError(f"the weight has shape {theirs}, the parameter {mine}")
        trail = self.trail(parameter)
        source = torch.empty_like(parameter, dtype=torch.float32).copy_(weight)
        if trail is None:
            parameter.copy_(source)
            return
        check_moved(parameter, self.state[parameter], ["trail"], "the parameter")
        write_split(source, self.rounding(parameter), parameter, trail)
        torch.autograd.graph.increment_version(parameter)
        self._tracking.trust(parameter)

    def zero_trails(self) -> None:
        """Accept the current bf16 weights, and set all trails to zero.

        Call it after other code has changed the weights, for instance loaded or averaged them.
        """
        self.keep_trails()
        for p in self._parameters():
            if "trail" in self.state[p]:
                self.state[p]["trail"].zero_()

    def keep_trails(self) -> None:
        """Accept the current weights as those of the last step, and keep all trails.

        Call it after code that swaps weights in place and restores the old ones (weight averages,
        pruning trials).
        """
        for p in self._parameters():
            self._tracking.trust(p)

    def release(self) -> None:
        """Release the trails for the next optimizer; this one has no parameters afterwards."""
        for p in self._parameters():
            trail = self.state[p].get("trail")
            if trail is not None:
                wait(p, trail, self._tracking.checksum(p), self.rounding(p))
        for group in self.param_groups:
            group["params"] = []
        self.state.clear()
        self.__dict__.pop("_places", None)
