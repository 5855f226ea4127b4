"""Base of the optimizers that send momenta in place of gradients.

In a warm-up gradients are averaged in fp32, and the optimizer is plain AdamW or LAMB. After it, or
between the steps that renew the variance, every rank adds its gradient to the common momentum and
sends the result, in few bits with residuals; the average is the next momentum
(`gradcomp.memory.momentum`). The variance stands still meanwhile: it does not see the coarse
averages that it divides, so they cannot spoil it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradcomp.arguments import check_integer
from gradcomp.errors import GradcompError
from gradcomp.memory.moments import SMALLEST, any_bits, typical
from gradcomp.memory.momentum import Momentum
from gradcomp.optim.base import SplitOptimizer
from gradcomp.optim.entries import Entry, number
from gradcomp.optim.state import COUNTED_AT, seen_by_all_steps


class MomentumExchange(SplitOptimizer):
    """Base of those optimizers, beside `SplitAdamW` or `SplitLAMB`; not to be used itself.

    `gradcomp.ddp.register(..., optimizer=)` and `gradcomp.GradientAverager(..., optimizer=)` take
    `transform` from it. Without either it steps from gradients by its own count of steps, as a
    baseline for comparisons.
    """

    counters: ClassVar[tuple[str, ...]] = ("variance_steps", "floored_at")
    settings: ClassVar[tuple[str, ...]] = ("freeze_step", "floor")  # the same for all parameters
    packs_warm_up: ClassVar[bool] = True
    freeze_step: int
    floor: float
    # parameters in whose p.grad the last exchange has left a momentum; None without an exchange
    arrived: set[Tensor] | None = None

    def wants_gradients(self, step: int) -> bool:
        """Whether gradients are averaged in fp32 at this exchange, and renew the variance."""
        return step < self.freeze_step

    @cached_property
    def transform(self) -> Momentum:
        """What sends momenta: the ``transform`` of an exchange."""
        own = {name: getattr(self, name) for name in self.settings}
        named = {"optimizer": type(self).__name__} | own
        return Momentum(self, named, packs_warm_up=self.packs_warm_up)

    def betas(self) -> list[float]:
        """Return every beta of a momentum, sorted."""
        return sorted({number(group["betas"][0]) for group in self.param_groups})

    def momentum_of(self, parameter: Tensor) -> tuple[Tensor, float] | None:
        """Return a parameter's momentum and its beta; None for parameters of other optimizers."""
        if parameter not in self._places:
            return None
        beta1 = self._places[parameter][0]["betas"][0]
        return self.state[parameter]["exp_avg"], number(beta1)

    # ---- a step -----------------------------------------------------------------------------

    def has_momentum(self, entry: Entry) -> bool:
        """Whether ``p.grad`` holds a momentum."""
        return self.arrived is not None and entry.parameter in self.arrived

    def is_frozen(self, entry: Entry) -> bool:
        """Whether this step leaves the variance as it is."""
        if self.arrived is not None:
            return entry.parameter in self.arrived
        return not self.wants_gradients(entry.step - 1)

    def prepare(self, entries: Sequence[Entry]) -> None:
        """Raise the smallest elements of variances that stand still from now on, and count the
        renewals of the others.

        An element below `floor` squared times its tensor's typical variance gets that. An element
        whose gradients have been 0 so far would be divided by eps alone, but its codes are not 0.
        GradcompError, and nothing is changed, for a variance that is 0 everywhere.
        """
        new = [e for e in entries if self.is_frozen(e) and not _is_floored(e.state)]
        for entry in new:
            seen = entry.gradient if entry.gradient is not None else entry.state["exp_avg"]
            if not _is_known(entry.state["exp_avg_sq"]) and bool(seen.any()):
                raise GradcompError(
                    f"the variance of {self.name_of(entry.parameter)} is still zero after"
                    f" {int(entry.state['variance_steps'])} steps of warm-up: it had no gradient in"
                    " them; take a longer warm-up, or leave it out of this optimizer"
                )
        for entry in new:
            variance = entry.state["exp_avg_sq"]
            if not _is_known(variance):  # if a packed momentum is not 0, the next step raises
                variance.fill_(float("inf"))
                continue
            flat = variance.as_strided((variance.numel(),), (1,), variance.storage_offset())
            least = float(np.float32(typical(flat)) * np.float32(self.floor) ** 2)
            flat.clamp_(min=max(least, SMALLEST))  # denormals depend on the thread's mode
            entry.state["floored_at"].copy_(entry.state["variance_steps"] + 1)
        for entry in entries:
            if not self.is_frozen(entry):
                if not _is_known(entry.state["exp_avg_sq"]):
                    entry.state["exp_avg_sq"].zero_()
                entry.state["variance_steps"] += 1
            entry.seen = max(1.0, float(entry.state["variance_steps"]))

    def run(self, entries: Sequence[Entry]) -> None:
        self.prepare(entries)
        super().run(entries)
        self.arrived = None  # without an exchange the next step is of gradients, by its own count

    def rules(self, entries: Sequence[Entry]) -> NDArray[Any]:
        """Return rules that take a momentum as it is, and leave a frozen variance alone."""
        rules = super().rules(entries)
        for row, entry in zip(rules, entries, strict=True):
            if self.has_momentum(entry):
                row["keep"] = 1.0
            if self.is_frozen(entry):
                row["keep2"], row["beta2"] = 0.0, 1.0
        return rules

    # ---- checkpoints ------------------------------------------------------------------------

    def taken_over(self, name: str, p: Tensor, step: Tensor) -> Tensor | None:
        """Return state of a parameter from Adam or LAMB, whose variance has seen all steps."""
        if name in self.counters:
            return step if name == "variance_steps" else torch.zeros(())
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return `SplitOptimizer`'s state, with the step beside the counters: another optimizer may
        go on from the moments, and then bring the counters back as they were.
        """
        saved = super().state_dict()
        for index, state in saved["state"].items():
            if isinstance(state, dict) and "variance_steps" in state:
                saved["state"][index] = state | {COUNTED_AT: state["step"].clone()}
        return saved

    def plain_state_dict(self) -> dict[str, Any]:
        """Return the state for torch's optimizer of the same name: its moments alone, the variance
        as if it had seen all steps.
        """
        saved = super().state_dict()
        for group in saved["param_groups"]:
            group.pop("rounding", None)
            for index in group["params"]:
                own = saved["state"][index]
                seen, step = float(own["variance_steps"]), float(own["step"])
                variance = seen_by_all_steps(own["exp_avg_sq"], group, seen, step)
                kept = {"step": own["step"], "exp_avg": own["exp_avg"], "exp_avg_sq": variance}
                saved["state"][index] = kept
        return saved

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self.settings}}


def _is_floored(state: dict[str, Any]) -> bool:
    """Whether a variance has been raised to its floor since its last renewal."""
    return float(state["floored_at"]) == float(state["variance_steps"]) + 1


def _is_known(variance: Tensor) -> bool:
    """Whether a variance has seen a gradient: it is neither all 0 nor Inf in place of that."""
    flat = variance.flatten()
    return any_bits(flat) and not bool(torch.isinf(flat[0]))


def check_steps(name: str, value: Any, steps: Any = None) -> int:
    """Return a number of steps; ValueError unless it is at least 1 and below those of the run."""
    check_integer(name, value, 1)
    if steps is not None:
        check_integer("steps", steps, 1)
        if value >= steps:
            raise ValueError(
                f"{name}={value} is not below steps={steps}: the run would end before anything is"
                " compressed"
            )
    return int(value)
