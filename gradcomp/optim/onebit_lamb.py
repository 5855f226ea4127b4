"""1-bit LAMB: momenta travel, and the ratio of norms comes from the warm-up and from how variances
have moved since.

References:
    Li, Awan, Tang, Rajbhandari, He, "1-bit LAMB", HiPC 2022, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from gradcomp.errors import GradcompError
from gradcomp.optim.entries import Entry
from gradcomp.optim.lamb import SplitLAMB
from gradcomp.optim.momentum import MomentumExchange, check_floor, check_steps
from gradcomp.optim.options import number


class OneBitLamb(MomentumExchange, SplitLAMB):
    """LAMB whose variance is frozen after a warm-up, and whose momentum travels from then on (1-bit
    LAMB).

    In the warm-up the ratio of norms of each parameter is clipped to [`min_coeff`, `max_coeff`] and
    averaged with `coeff_beta`. After it the parameter's ratio is that average times a factor: the
    largest ratio, over the elements, of the roots of the frozen variance and of one fed with the
    gradients that the momenta imply, clipped to [`factor_min`, `factor_max`], and at each step
    within `factor_threshold` of the step before. Its accuracy has not been measured. Everything
    else is as of `OneBitAdam`; memory a weight: 16 bytes.

    Args:
        params, lr, betas, eps, weight_decay, freeze_step, steps, floor: as of `OneBitAdam`.
        max_coeff, min_coeff, coeff_beta, factor_max, factor_min, factor_threshold: see above;
            published values.

    Raises:
        ValueError, UnsupportedTensor, GradcompError: as `OneBitAdam`; also (`step`) a parameter
            that has had no warm-up.
    """

    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "fresh_sq")
    counters: ClassVar[tuple[str, ...]] = (*MomentumExchange.counters, "coefficient", "factor")
    settings: ClassVar[tuple[str, ...]] = (
        "freeze_step",
        "floor",
        "max_coeff",
        "min_coeff",
        "coeff_beta",
        "factor_max",
        "factor_min",
        "factor_threshold",
    )
    takes_packed = False  # the gradients that momenta imply are worked out from p.grad

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        freeze_step: int,
        steps: int | None = None,
        floor: float = 0.01,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
    ) -> None:
        self.freeze_step, self.floor = (
            check_steps("freeze_step", freeze_step, steps),
            check_floor(floor),
        )
        for low, high, names in (
            (min_coeff, max_coeff, "min_coeff, max_coeff"),
            (factor_min, factor_max, "factor_min, factor_max"),
        ):
            if not 0 < low <= high < float("inf"):
                raise ValueError(f"{names} must be positive and in order, got {low!r}, {high!r}")
        for name, value in (("coeff_beta", coeff_beta), ("factor_threshold", factor_threshold)):
            if not 0 <= value < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {value!r}")
        self.max_coeff, self.min_coeff, self.coeff_beta = max_coeff, min_coeff, coeff_beta
        self.factor_max, self.factor_min, self.factor_threshold = (
            factor_max,
            factor_min,
            factor_threshold,
        )
        super().__init__(params, lr, betas, eps, weight_decay)

    def check_options(self, group: dict[str, Any]) -> None:
        super().check_options(group)
        if group["variant"] != "lamb":
            raise ValueError(
                "OneBitLamb is of the published LAMB: variant must be 'lamb', got"
                f" {group['variant']!r}"
            )

    def wants_gradients(self, step: int) -> bool:
        """Whether an exchange is one of the warm-up."""
        return step < self.freeze_step

    def run(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if (
                self.is_frozen(entry)
                and entry.parameter.numel()
                and not float(entry.state["coefficient"])
            ):
                raise GradcompError(
                    f"{self._called(entry)} has had no warm-up: its ratio of norms is not known"
                )
        super().run(entries)

    def settle(self, entries: Sequence[Entry]) -> None:
        super().settle(entries)
        for entry in entries:
            if self.is_frozen(entry):
                self._follow(entry)

    def amend(self, entries: Sequence[Entry], rules: NDArray[Any]) -> None:
        super().amend(entries, rules)
        for row, entry in zip(rules, entries, strict=True):
            root, beta1 = self.root_of_bias2(entry), number(entry.group["betas"][0])
            row["bias1"], row["eps"] = root / (1 - beta1**entry.step), entry.group["eps"] * root

    def taken_over(self, name: str, p: Tensor, step: Tensor) -> Tensor | None:
        if name == "fresh_sq":
            return torch.zeros_like(p, dtype=torch.float32)
        return super().taken_over(name, p, step)

    def trust(self, entry: Entry, above: float, under: float) -> float:
        state = entry.state
        if self.is_frozen(entry):
            return float(state["coefficient"]) * float(state["factor"])
        ratio = min(max(super().trust(entry, above, under), self.min_coeff), self.max_coeff)
        seen = float(state["coefficient"])
        state["coefficient"].fill_(
            self.coeff_beta * seen + (1 - self.coeff_beta) * ratio if seen else ratio
        )
        return ratio

    def _follow(self, entry: Entry) -> None:
        """Take the gradient of this step into the variance that is not frozen, and find the
        factor.
        """
        state, (beta1, beta2) = entry.state, (number(b) for b in entry.group["betas"])
        frozen, fresh = state["exp_avg_sq"], state["fresh_sq"]
        if not float(state["factor"]):
            fresh.copy_(frozen)
            state["factor"].fill_(1.0)
        if not frozen.numel():
            return
        assert entry.gradient is not None
        g = entry.gradient.float()
        if self.has_momentum(
            entry
        ):  # one rounding an operation: ranks on other processors must come to the same
            g = (g - state["exp_avg"] * beta1) * (1 / (1 - beta1))
        fresh.mul_(beta2).add_(g.square().mul_(1 - beta2))
        rises = float((frozen / fresh).nan_to_num_(0.0, float("inf")).max()) ** 0.5
        last = float(state["factor"])
        factor = min(max(rises, self.factor_min), self.factor_max)
        factor = min(
            max(factor, last * (1 - self.factor_threshold)), last * (1 + self.factor_threshold)
        )
        state["factor"].fill_(factor)
