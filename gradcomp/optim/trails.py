"""The trails of an optimizer's parameters: what they stand for together, set and given away."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from gradcomp.optim.split import _split, join, wait
from gradcomp.optim.tracking import Tracking


class TrailKeeper(torch.optim.Optimizer):
    """What `SplitOptimizer` can do with trails, which are in ``state[p]["trail"]``."""

    _tracking: Tracking

    def trail(self, parameter: Tensor) -> Tensor | None:
        """Return the trail of a parameter, int16 in its shape; None for fp32 and for parameters
        of other optimizers.
        """
        return self.state[parameter].get("trail") if parameter in self.state else None

    def rounding(self, parameter: Tensor) -> str:
        """Return how the top of a parameter is made: "truncate" or "nearest"."""
        for group in self.param_groups:
            if any(p is parameter for p in group["params"]):
                return str(group["rounding"])
        raise ValueError("this optimizer does not have that parameter")

    def fp32(self, parameter: Tensor) -> Tensor:
        """Return the fp32 weight that a parameter stands for, as a new tensor; ValueError if its
        trail is of another.
        """
        trail = self.trail(parameter)
        if trail is None:
            return parameter.detach().clone()
        self._tracking.check(parameter, trail, "the parameter")
        return join(parameter.detach(), trail, rounding=self.rounding(parameter))

    @torch.no_grad()
    def set_fp32(self, parameter: Tensor, weight: Tensor) -> None:
        """Set a parameter to an fp32 weight of its shape, trail included."""
        if weight.shape != parameter.shape:
            raise ValueError(
                f"the weight has shape {tuple(weight.shape)}, the parameter"
                f" {tuple(parameter.shape)}"
            )
        trail = self.trail(parameter)
        source = torch.empty_like(parameter, dtype=torch.float32).copy_(weight)
        if trail is None:
            parameter.copy_(source)
            return
        _split(source, self.rounding(parameter), parameter, trail)
        torch.autograd.graph.increment_version(parameter)
        self._tracking.trust(parameter)

    def zero_trails(self) -> None:
        """Take the weights as they now stand in bf16: all trails become zero.

        For parameters that were changed by other means than this optimizer (loaded, replaced,
        averaged).
        """
        for p in chain.from_iterable(group["params"] for group in self.param_groups):
            if "trail" in self.state[p]:
                self.state[p]["trail"].zero_()
            self._tracking.trust(p)

    def keep_trails(self) -> None:
        """Take the weights as they now stand for those of the last step, whoever wrote them there
        in the meantime.

        For code that exchanges weights in place and puts the old ones back (weight averages,
        pruning trials).
        """
        for p in chain.from_iterable(group["params"] for group in self.param_groups):
            self._tracking.trust(p)

    def release(self) -> None:
        """Hand the trails to the next optimizer that is made for these parameters, and step no
        more.
        """
        for group in self.param_groups:
            for p in group["params"]:
                trail = self.state[p].get("trail")
                if trail is not None:
                    wait(p, trail, self._tracking.checksum(p), group["rounding"])
            group["params"] = []
        self.state.clear()
