"""1-bit Adam, 0/1 Adam and 1-bit LAMB: momenta travel, and the variance comes from a warm-up or
from a few steps in fp32.

References:
    Tang, Gan, Awan, Rajbhandari, Li, Lian, Liu, Zhang, He, "1-bit Adam", ICML 2021, algorithm 1.
    Lu, Li, Zhang, De Sa, He, "Maximizing Communication Efficiency for Large-scale Training via 0/1
    Adam", ICLR 2023.
    Li, Awan, Tang, Rajbhandari, He, "1-bit LAMB", HiPC 2022, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import inf
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradcomp.arguments import check_number
from gradcomp.errors import GradcompError
from gradcomp.optim.entries import Entry, number
from gradcomp.optim.momentum import MomentumExchange, check_steps
from gradcomp.optim.split_optimizers import Ranges, SplitAdamW, SplitLAMB, one_of


class OneBitAdam(MomentumExchange, SplitAdamW):
    """AdamW whose variance is frozen after a warm-up, and whose momentum travels from then on
    (1-bit Adam).

    Give it to ``gradcomp.ddp.register(model, codec, optimizer=)`` or
    ``gradcomp.GradientAverager(..., optimizer=)``. Exchanges before `freeze_step` are fp32 (or as
    `Options.warmup_codec` says); later ones send momenta with `codec` and residuals. ``p.grad``
    holds the averaged momentum then, so clipping it clips the momentum. A byte GPT ended 0.034 nats
    below AdamW's fp32 with `OneBit`, ``precondition=True`` and 4 bits in the warm-up, 0.006 above
    its own fp32 (docs/explanation/accuracy.md). Weights are split or fp32, as in `SplitAdamW`,
    whose checkpoints it loads.

    Args:
        params: parameters, groups, or what `split_parameters` returned; float32 and bfloat16.
        lr: learning rate, a number or a tensor of one element.
        betas, eps, weight_decay: as in torch.optim.AdamW.
        freeze_step: exchanges of the warm-up. Published runs took 15 to 20 % of all steps, with the
            learning rate's own warm-up inside.
        steps: length of the whole run, to refuse a warm-up that is longer; None: not checked.
        floor: smallest root of a frozen variance's elements, as a fraction of their tensor's
            typical one.

    Raises:
        ValueError: an option out of its range, `freeze_step` not below `steps`.
        UnsupportedTensor: parameters of another dtype.
        GradcompError: (`step`) a variance that is 0 everywhere when it should freeze; the message
            names the parameter.
    """

    ranges: ClassVar[Ranges] = SplitAdamW.ranges | {"maximize": one_of(False)}

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        freeze_step: int,
        steps: int | None = None,
        floor: float = 0.01,
    ) -> None:
        self.freeze_step = check_steps("freeze_step", freeze_step, steps)
        self.floor = check_number("floor", floor, high=1.0, ends="(]")
        super().__init__(params, lr, betas, eps, weight_decay)


class ZeroOneAdam(MomentumExchange, SplitAdamW):
    """AdamW whose variance is renewed ever more rarely, and whose momentum travels in between (0/1
    Adam's variance policy).

    The variance sees the averages of exchange k(j), k(0) = 0 and k(j + 1) = k(j) + 2 ** (j //
    var_update_scaler), as long as these are below `var_freeze_step`. Those exchanges are fp32, all
    others send momenta with the codec. There is no warm-up. 0/1 Adam's local steps are not
    implemented, and its accuracy was not measured. The rest is as in `OneBitAdam`.

    Args:
        params, lr, betas, eps, weight_decay, floor: as in `OneBitAdam`.
        var_freeze_step: first exchange from which the variance stands still.
        var_update_scaler: renewals between two doublings of the interval.
        steps: length of the whole run, to refuse a `var_freeze_step` beyond it; None: not checked.

    Raises:
        ValueError, UnsupportedTensor, GradcompError: as `OneBitAdam`.
    """

    ranges: ClassVar[Ranges] = OneBitAdam.ranges
    settings: ClassVar[tuple[str, ...]] = ("var_freeze_step", "var_update_scaler", "floor")
    packs_warm_up: ClassVar[bool] = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        var_freeze_step: int,
        var_update_scaler: int = 16,
        steps: int | None = None,
        floor: float = 0.01,
    ) -> None:
        self.var_freeze_step = check_steps("var_freeze_step", var_freeze_step, steps)
        self.var_update_scaler = check_steps("var_update_scaler", var_update_scaler)
        self.floor = check_number("floor", floor, high=1.0, ends="(]")
        super().__init__(params, lr, betas, eps, weight_decay)

    def wants_gradients(self, step: int) -> bool:
        """Whether the variance is renewed at an exchange."""
        return step in self._renewals

    @cached_property
    def _renewals(self) -> frozenset[int]:
        steps: list[int] = []
        at = 0
        while at < self.var_freeze_step:
            at += 2 ** (len(steps) // self.var_update_scaler)
            steps.append(at)
        return frozenset([0, *steps[:-1]])


class OneBitLamb(MomentumExchange, SplitLAMB):
    """LAMB whose variance is frozen after a warm-up, and whose momentum travels from then on (1-bit
    LAMB).

    In the warm-up the ratio of norms of each parameter is clipped to [`min_coeff`, `max_coeff`] and
    averaged with `coeff_beta`. After it the parameter's ratio is that average times a factor: the
    largest ratio, over the elements, of the roots of the frozen variance and of one fed with the
    gradients that the momenta imply, clipped to [`factor_min`, `factor_max`], and at each step
    within `factor_threshold` of the step before. Its accuracy was not measured. The rest is as in
    `OneBitAdam`; memory per weight: 16 bytes.

    Args:
        params, lr, betas, eps, weight_decay, freeze_step, steps, floor: as in `OneBitAdam`.
        max_coeff, min_coeff, coeff_beta, factor_max, factor_min, factor_threshold: see above;
            the defaults are the published values.

    Raises:
        ValueError, UnsupportedTensor, GradcompError: as `OneBitAdam`; also (`step`) a parameter
            that has had no warm-up.
    """

    ranges: ClassVar[Ranges] = OneBitAdam.ranges | {"variant": one_of("lamb")}
    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "fresh_sq")
    counters: ClassVar[tuple[str, ...]] = (*MomentumExchange.counters, "coefficient", "factor")
    settings: ClassVar[tuple[str, ...]] = (
        *MomentumExchange.settings,
        *("max_coeff", "min_coeff", "coeff_beta", "factor_max", "factor_min", "factor_threshold"),
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
        self.freeze_step = check_steps("freeze_step", freeze_step, steps)
        self.floor = check_number("floor", floor, high=1.0, ends="(]")
        self.min_coeff = check_number("min_coeff", min_coeff, ends="()")
        self.max_coeff = check_number("max_coeff", max_coeff, low=min_coeff)
        self.factor_min = check_number("factor_min", factor_min, ends="()")
        self.factor_max = check_number("factor_max", factor_max, low=factor_min)
        self.coeff_beta = check_number("coeff_beta", coeff_beta, high=1.0)
        self.factor_threshold = check_number("factor_threshold", factor_threshold, high=1.0)
        super().__init__(params, lr, betas, eps, weight_decay)

    def prepare(self, entries: Sequence[Entry]) -> None:
        for e in entries:
            is_new = e.parameter.numel() and not float(e.state["coefficient"])
            if is_new and self.is_frozen(e):
                raise GradcompError(
                    f"{self.name_of(e.parameter)} has had no warm-up: its ratio of norms is not"
                    " known"
                )
        super().prepare(entries)
        for entry in entries:
            if self.is_frozen(entry):
                self._follow(entry)

    def taken_over(self, name: str, p: Tensor, step: Tensor) -> Tensor | None:
        if name == "fresh_sq":
            return torch.zeros_like(p, dtype=torch.float32)
        return super().taken_over(name, p, step)

    def trust(self, entry: Entry, above: float, under: float) -> float:
        state = entry.state
        seen = float(state["coefficient"])
        if self.is_frozen(entry):
            return seen * float(state["factor"])
        ratio = min(max(super().trust(entry, above, under), self.min_coeff), self.max_coeff)
        mean = self.coeff_beta * seen + (1 - self.coeff_beta) * ratio if seen else ratio
        state["coefficient"].fill_(mean)
        return ratio

    def _follow(self, entry: Entry) -> None:
        """Feed the variance that is not frozen with this step's gradient, and find the factor."""
        state, (beta1, beta2) = entry.state, (number(b) for b in entry.group["betas"])
        frozen, fresh = state["exp_avg_sq"], state["fresh_sq"]
        if not float(state["factor"]):
            fresh.copy_(frozen)
            state["factor"].fill_(1.0)
        if not frozen.numel():
            return
        assert entry.gradient is not None
        g = entry.gradient.float()
        if self.has_momentum(entry):
            # one rounding an operation: ranks on other processors must come to the same
            g = (g - state["exp_avg"] * beta1) * (1 / (1 - beta1))
        fresh.mul_(beta2).add_(g.square().mul_(1 - beta2))
        rises = float((frozen / fresh).nan_to_num_(0.0, inf).max()) ** 0.5
        last, limit = float(state["factor"]), self.factor_threshold
        factor = min(max(rises, self.factor_min), self.factor_max)
        state["factor"].fill_(min(max(factor, last * (1 - limit)), last * (1 + limit)))
