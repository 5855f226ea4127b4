"""SGD as torch.optim.SGD computes it, on split weights: equal to it bit for bit on the joined
ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from gradcomp.kernels.rules import Flag, Kind
from gradcomp.optim.base import SplitOptimizer
from gradcomp.optim.entries import Entry, make_rules, run_rules
from gradcomp.optim.options import check_number, number


class SplitSGD(SplitOptimizer):
    """Stochastic gradient descent with momentum on weights split into bf16 and trail.

    N steps equal N steps of ``torch.optim.SGD(foreach=False)`` on the joined fp32 weights and
    ``grad.float()``, bit for bit, for every option (where torch's CPU capability is AVX2 or above).
    Memory a weight: 4 bytes, and 4 for momentum.

    Args:
        params: parameters, groups, or what `split_parameters` returned; float32 and bfloat16.
        lr: learning rate, a number or a tensor of one element.
        momentum, dampening, weight_decay, nesterov, maximize: as in torch.optim.SGD.

    Raises:
        ValueError: an option out of its range.
        UnsupportedTensor: parameters of another dtype.

    References:
        Split SGD (Intel Extension for PyTorch), "Operation Fusion": packed_add is this without
        momentum.
    """

    moments: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    takes_sparse: ClassVar[bool] = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def check_options(self, group: dict[str, Any]) -> None:
        for name in ("lr", "momentum", "weight_decay"):
            check_number(name, group[name])
        check_number("dampening", group["dampening"], low=-float("inf"))
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError(
                f"nesterov needs momentum above 0 and no dampening, got {group['momentum']} and"
                f" {group['dampening']}"
            )

    def wanted_moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self.moments if group["momentum"] else ()

    def run(self, entries: Sequence[Entry]) -> None:
        run_rules(entries, make_rules(Kind.SGD, entries, self._numbers), self.moments)

    def _numbers(self, group: dict[str, Any], step: int, is_first: bool) -> dict[str, float]:
        flags = is_first * Flag.FIRST | bool(group["nesterov"]) * Flag.NESTEROV
        return {
            "flags": flags | bool(group["maximize"]) * Flag.MAXIMIZE,
            "step_size": -number(group["lr"]),
            "momentum": group["momentum"],
            "keep": 1 - group["dampening"],
            "weight_decay": number(group["weight_decay"]),
        }
