"""AdamW (Loshchilov and Hutter 2019, algorithm 2) on split weights, with the options of
torch.optim.AdamW.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from gradcomp.kernels.rules import Flag, Kind
from gradcomp.optim.base import SplitOptimizer
from gradcomp.optim.entries import Entry, make_rules, run_rules
from gradcomp.optim.options import check_betas, check_number, number

MOMENTS = ("exp_avg", "exp_avg_sq")


def adam_numbers(group: dict[str, Any]) -> dict[str, float]:
    """Return what the running means of a gradient and of its square are made with."""
    beta1, beta2 = (number(b) for b in group["betas"])
    flags = bool(group["maximize"]) * Flag.MAXIMIZE
    return {"flags": flags, "keep": 1 - beta1, "keep2": 1 - beta2, "beta2": beta2}


class SplitAdamW(SplitOptimizer):
    """Adam with decoupled weight decay on weights split into bf16 and trail. Memory a weight: 12
    bytes.

    One step from the same state is within 1 ulp of ``torch.optim.AdamW(foreach=False)``.

    Args:
        params: parameters, groups, or what `split_parameters` returned; float32 and bfloat16.
        lr: learning rate, a number or a tensor of one element.
        betas, eps, weight_decay, maximize: as in torch.optim.AdamW.

    Raises:
        ValueError: an option out of its range.
        UnsupportedTensor: parameters of another dtype.
    """

    moments: ClassVar[tuple[str, ...]] = MOMENTS

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def check_options(self, group: dict[str, Any]) -> None:
        for name in ("lr", "eps", "weight_decay"):
            check_number(name, group[name])
        check_betas(group["betas"])

    def run(self, entries: Sequence[Entry]) -> None:
        rules = make_rules(Kind.ADAMW, entries, self._numbers)
        self.amend(entries, rules)
        run_rules(entries, rules, MOMENTS)

    def _numbers(self, group: dict[str, Any], step: int, is_first: bool) -> dict[str, float]:
        lr, (beta1, beta2) = number(group["lr"]), (number(b) for b in group["betas"])
        return {
            **adam_numbers(group),
            "step_size": -(lr / (1 - beta1**step)),
            "decay": 1 - lr * number(group["weight_decay"]),
            "bias2": (1 - beta2**step) ** 0.5,
            "eps": group["eps"],
        }
