"""What optimizers share whose momentum travels instead of gradients: a variance that stands still
meanwhile.

In a warm-up gradients are averaged in fp32 and the optimizer is the one of its name. After it, or
between the steps that renew the variance, every rank sends what its gradient makes of the common
momentum, in few bits with residuals, and the average is the next momentum
(`gradcomp.memory.momentum`). Divided by a variance that does not see these averages, they cannot
spoil it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradcomp.errors import GradcompError
from gradcomp.memory.moments import SMALLEST, any_bits, typical
from gradcomp.memory.momentum import Momentum
from gradcomp.optim.base import SplitOptimizer
from gradcomp.optim.checkpoint import COUNTED_AT, seen_by_all_steps
from gradcomp.optim.entries import Entry
from gradcomp.optim.options import check_number, number


class MomentumExchange(SplitOptimizer):
    """Base of those optimizers, beside the one whose moments they have; not to be used itself.

    `gradcomp.ddp.register(..., optimizer=)` and `gradcomp.GradientAverager(..., optimizer=)` take
    `transform` from it. Without either it steps from gradients by its own count of steps: what
    compression is compared with.

    Attributes:
        arrived: parameters in whose ``p.grad`` the last exchange has left a momentum; None if there
            has been no exchange.
    """

    counters: ClassVar[tuple[str, ...]] = ("variance_steps", "floored_at")
    settings: ClassVar[tuple[str, ...]] = (
        "floor",
    )  # arguments that are the same for all parameters
    packs_warm_up: ClassVar[bool] = True
    floor: float
    arrived: set[Tensor] | None = None

    def check_options(self, group: dict[str, Any]) -> None:
        super().check_options(group)  # type: ignore[safe-super]
        if group.get("maximize"):
            raise ValueError(f"{type(self).__name__} goes down: maximize must be False")

    def wants_gradients(self, step: int) -> bool:
        """Whether the variance is renewed at this exchange, from averages in fp32."""
        raise NotImplementedError

    @cached_property
    def transform(self) -> Momentum:
        """What sends momenta: the ``transform`` of an exchange."""
        own = {"optimizer": type(self).__name__} | {
            name: getattr(self, name) for name in self.settings
        }
        return Momentum(self, own, packs_warm_up=self.packs_warm_up)

    def betas(self) -> list[float]:
        """Return every beta of a momentum, sorted."""
        return sorted({number(group["betas"][0]) for group in self.param_groups})

    def momentum_of(self, parameter: Tensor) -> tuple[Tensor, float] | None:
        """Return a parameter's momentum and its beta; None for parameters of other optimizers."""
        group = self._group_of.get(parameter)
        return (
            None if group is None else (self.state[parameter]["exp_avg"], number(group["betas"][0]))
        )

    @cached_property
    def _group_of(self) -> dict[Tensor, dict[str, Any]]:
        return {p: group for group in self.param_groups for p in group["params"]}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self.__dict__.pop("_group_of", None)

    def release(self) -> None:
        super().release()
        self.__dict__.pop("_group_of", None)

    # ---- a step
    # ----------------------------------------------------------------------------------------------

    def has_momentum(self, entry: Entry) -> bool:
        """Whether a momentum stands in ``p.grad``."""
        return self.arrived is not None and entry.parameter in self.arrived

    def is_frozen(self, entry: Entry) -> bool:
        """Whether this step leaves the variance as it is."""
        if self.arrived is not None:
            return entry.parameter in self.arrived
        return not self.wants_gradients(entry.step - 1)

    def settle(self, entries: Sequence[Entry]) -> None:
        """Have every variance that is to stand still fit to be divided by, and count those that are
        renewed.

        Elements whose variance is less than `floor` squared times the tensor's typical one get
        that: the codes of an element whose gradients have been 0 so far are not, and would be
        divided by eps.

        Raises:
            GradcompError: a variance that is 0 everywhere; nothing is changed then.
        """
        new: list[Entry] = []
        blank: list[Entry] = []
        for entry in entries:
            state = entry.state
            if (
                self.is_frozen(entry)
                and float(state["floored_at"]) != float(state["variance_steps"]) + 1
            ):
                (new if _is_known(state["exp_avg_sq"]) else blank).append(entry)
        for entry in blank:
            seen = entry.gradient if entry.gradient is not None else entry.state["exp_avg"]
            if bool(seen.any()):
                raise GradcompError(
                    f"the variance of {self._called(entry)} is still zero after"
                    f" {int(entry.state['variance_steps'])} steps of warm-up: it had no gradient in"
                    " them; take a longer warm-up, or leave it out of this optimizer"
                )
        for entry in (
            blank
        ):  # a momentum that is packed and not 0 moves nothing, and is found at the next step
            entry.state["exp_avg_sq"].fill_(float("inf"))
        for entry in new:
            variance = entry.state["exp_avg_sq"]
            flat = variance.as_strided((variance.numel(),), (1,), variance.storage_offset())
            least = float(np.float32(typical(flat)) * np.float32(self.floor) ** 2)
            flat.clamp_(
                min=max(least, SMALLEST)
            )  # below, it would depend on whether the thread flushes denormals
            entry.state["floored_at"].copy_(entry.state["variance_steps"] + 1)
        for entry in entries:
            if not self.is_frozen(entry):
                if not _is_known(entry.state["exp_avg_sq"]):
                    entry.state["exp_avg_sq"].zero_()
                entry.state["variance_steps"] += 1

    def run(self, entries: Sequence[Entry]) -> None:
        self.settle(entries)
        super().run(entries)  # type: ignore[safe-super]
        self.arrived = (
            None  # a step that no exchange precedes is of gradients, and goes by its own count
        )

    def amend(self, entries: Sequence[Entry], rules: NDArray[Any]) -> None:
        """Have a momentum taken as it is, and a variance that stands still take nothing."""
        rules["bias2"] = [self.root_of_bias2(entry) for entry in entries]
        for row, entry in zip(rules, entries, strict=True):
            if self.has_momentum(entry):
                row["keep"] = 1.0
            if self.is_frozen(entry):
                row["keep2"], row["beta2"] = 0.0, 1.0

    def root_of_bias2(self, entry: Entry) -> float:
        """Return what the root of the variance is divided by: it has seen fewer steps than the
        momentum.
        """
        beta2 = number(entry.group["betas"][1])
        return float((1 - beta2 ** max(1.0, float(entry.state["variance_steps"]))) ** 0.5)

    def _called(self, entry: Entry) -> str:
        for where, group in enumerate(self.param_groups):
            for place, p in enumerate(group["params"]):
                if p is entry.parameter:
                    return self.name_of(group, where, place)
        return "a parameter"

    # ---- checkpoints
    # ----------------------------------------------------------------------------------------------

    def taken_over(self, name: str, p: Tensor, step: Tensor) -> Tensor | None:
        """Return state for a parameter that comes from Adam (LAMB): its variance has seen all
        steps.
        """
        if name in self.counters:
            return step if name == "variance_steps" else torch.zeros(())
        return None

    def state_dict(self) -> dict[str, Any]:
        """As `SplitOptimizer`'s; beside the counters stands the step at which they were saved:
        another optimizer may go on with the moments, and bring the counters back as they were.
        """
        saved = super().state_dict()
        for index, state in saved["state"].items():
            if isinstance(state, dict) and "variance_steps" in state:
                saved["state"][index] = state | {COUNTED_AT: state["step"].clone()}
        return saved

    def plain_state_dict(self) -> dict[str, Any]:
        """Return the state for torch's optimizer of the name: its moments alone, and a variance
        as if it had seen all steps.
        """
        saved = super().state_dict()
        for group in saved["param_groups"]:
            group.pop("rounding", None)
            for index in group["params"]:
                kept = {
                    name: saved["state"][index][name] for name in ("step", "exp_avg", "exp_avg_sq")
                }
                seen = float(saved["state"][index]["variance_steps"])
                kept["exp_avg_sq"] = seen_by_all_steps(
                    kept["exp_avg_sq"], group, seen, float(kept["step"])
                )
                saved["state"][index] = kept
        return saved

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self.settings}}


def _is_known(variance: Tensor) -> bool:
    """Whether a variance has seen a gradient: it is neither 0 everywhere nor infinite in place
    of that, and not empty.
    """
    flat = variance.flatten()
    return any_bits(flat) and not bool(torch.isinf(flat[0]))


def check_steps(name: str, value: object, steps: object) -> int:
    """Return the length of a warm-up.

    Raises:
        ValueError: it is no number of steps, or as long as the run of `steps` that it is part of.
    """
    for what, given in ((name, value), ("steps", steps)):
        if (given is not None or what == name) and (
            isinstance(given, bool) or not isinstance(given, int) or given < 1
        ):
            raise ValueError(f"{what} must be an integer of at least 1, got {given!r}")
    assert isinstance(value, int)
    if isinstance(steps, int) and value >= steps:
        raise ValueError(
            f"{name}={value} is not below steps={steps}: the run would end before anything is"
            " compressed"
        )
    return value


def check_floor(floor: object) -> float:
    """Return a floor of the variance; ValueError unless it is above 0 and at most 1."""
    check_number("floor", floor, below=1.0 + 1e-9)
    if not number(floor) > 0:
        raise ValueError(f"floor must be above 0, got {floor!r}")
    return number(floor)
