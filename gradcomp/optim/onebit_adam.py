"""1-bit Adam and 0/1 Adam: momenta travel, the variance comes from a warm-up or from a few steps in
fp32.

References:
    Tang, Gan, Awan, Rajbhandari, Li, Lian, Liu, Zhang, He, "1-bit Adam", ICML 2021, algorithm 1.
    Lu, Li, Zhang, De Sa, He, "Maximizing Communication Efficiency for Large-scale Training via 0/1
    Adam", ICLR 2023.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from gradcomp.optim.adamw import SplitAdamW
from gradcomp.optim.momentum import MomentumExchange, check_floor, check_steps


class OneBitAdam(MomentumExchange, SplitAdamW):
    """AdamW whose variance is frozen after a warm-up, and whose momentum travels from then on
    (1-bit Adam).

    Give it to ``gradcomp.ddp.register(model, codec, optimizer=)`` or
    ``gradcomp.GradientAverager(..., optimizer=)``: exchanges before `freeze_step` are fp32 (or as
    `Options.start_codec` says), and those after it send momenta with `codec` and residuals.
    ``p.grad`` holds the averaged momentum then, so clipping it clips the momentum. A byte GPT ended
    0.034 nats below AdamW's fp32 with `OneBit`, ``precondition=True`` and 4 bits in the warm-up,
    0.006 above its own fp32 (docs/explanation/accuracy.md). Weights are split or fp32, as of
    `SplitAdamW`, whose state it takes over.

    Args:
        params: parameters, groups, or what `split_parameters` returned; float32 and bfloat16.
        lr: learning rate, a number or a tensor of one element.
        betas, eps, weight_decay: as in torch.optim.AdamW.
        freeze_step: exchanges of the warm-up; published runs had 15 to 20 % of all steps, and the
            rate's own warm-up in it.
        steps: of the whole run, to refuse a warm-up that is longer; None: not checked.
        floor: least root of an element's variance once it stands still, in parts of the root of its
            tensor's typical one.

    Raises:
        ValueError: an option out of its range, `freeze_step` not below `steps`.
        UnsupportedTensor: parameters of another dtype.
        GradcompError: (`step`) a variance that is 0 everywhere when it is to stand still; the
            message names the parameter.
    """

    settings: ClassVar[tuple[str, ...]] = ("freeze_step", "floor")

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
        self.freeze_step, self.floor = (
            check_steps("freeze_step", freeze_step, steps),
            check_floor(floor),
        )
        super().__init__(params, lr, betas, eps, weight_decay)

    def wants_gradients(self, step: int) -> bool:
        """Whether an exchange is one of the warm-up."""
        return step < self.freeze_step


class ZeroOneAdam(MomentumExchange, SplitAdamW):
    """AdamW whose variance is renewed ever more rarely, and whose momentum travels in between (0/1
    Adam's variance policy).

    The variance sees the averages of exchange k(j), k(0) = 0 and k(j + 1) = k(j) + 2 ** (j //
    var_update_scaler), as long as these are below `var_freeze_step`; those are fp32, all others
    send momenta with the codec. There is no warm-up. Local steps, the other half of 0/1 Adam, are
    not here; nor has its accuracy been measured. Everything else is as of `OneBitAdam`.

    Args:
        params, lr, betas, eps, weight_decay, floor: as of `OneBitAdam`.
        var_freeze_step: first exchange from which the variance stands still.
        var_update_scaler: renewals between two doublings of the interval.
        steps: of the whole run, to refuse a `var_freeze_step` beyond it; None: not checked.

    Raises:
        ValueError, UnsupportedTensor, GradcompError: as `OneBitAdam`.
    """

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
        self.var_update_scaler = check_steps("var_update_scaler", var_update_scaler, None)
        self.floor = check_floor(floor)
        super().__init__(params, lr, betas, eps, weight_decay)

    def wants_gradients(self, step: int) -> bool:
        """Whether the variance is renewed at an exchange."""
        return step in self._renewals

    @cached_property
    def _renewals(self) -> frozenset[int]:
        steps, at, count = set(), 0, 0
        while at < self.var_freeze_step:
            steps.add(at)
            at += 2 ** (count // self.var_update_scaler)
            count += 1
        return frozenset(steps)
