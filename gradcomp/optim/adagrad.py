"""Adagrad (Duchi, Hazan and Singer 2011) on split weights, with the options of
torch.optim.Adagrad.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from gradcomp.kernels.rules import Flag, Kind
from gradcomp.optim.base import SplitOptimizer
from gradcomp.optim.entries import Entry, make_rules, run_rules
from gradcomp.optim.options import check_number, number


class SplitAdagrad(SplitOptimizer):
    """Adagrad on weights split into bf16 and trail. Memory a weight: 8 bytes.

    Args:
        params: parameters, groups, or what `split_parameters` returned; float32 and bfloat16.
        lr: learning rate, a number or a tensor of one element.
        lr_decay, weight_decay, initial_accumulator_value, eps, maximize: as in torch.optim.Adagrad.

    Raises:
        ValueError: an option out of its range.
        UnsupportedTensor: parameters of another dtype.
    """

    moments: ClassVar[tuple[str, ...]] = ("sum",)
    takes_sparse: ClassVar[bool] = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def check_options(self, group: dict[str, Any]) -> None:
        for name in ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"):
            check_number(name, group[name])

    def initial_moment(self, name: str, group: dict[str, Any]) -> float:
        return float(group["initial_accumulator_value"])

    def run(self, entries: Sequence[Entry]) -> None:
        run_rules(entries, make_rules(Kind.ADAGRAD, entries, self._numbers), self.moments)

    def _numbers(self, group: dict[str, Any], step: int, is_first: bool) -> dict[str, float]:
        return {
            "flags": bool(group["maximize"]) * Flag.MAXIMIZE,
            "step_size": -(number(group["lr"]) / (1 + (step - 1) * group["lr_decay"])),
            "weight_decay": number(group["weight_decay"]),
            "eps": group["eps"],
        }
