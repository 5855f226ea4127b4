"""LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning", algorithm 2) on split
weights.

The published algorithm: phi is the identity, every parameter adapts (also without weight decay),
gradients are not clipped. NVLAMB divides all gradients by max(1, their common norm) first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradcomp.kernels.rules import Flag, Kind
from gradcomp.optim.adamw import MOMENTS, adam_numbers
from gradcomp.optim.base import SplitOptimizer
from gradcomp.optim.entries import Entry, make_rules, run_rules
from gradcomp.optim.options import check_betas, check_number, number

VARIANTS = ("lamb", "nvlamb")


class SplitLAMB(SplitOptimizer):
    """LAMB on weights split into bf16 and trail. Memory a weight: 12 bytes.

    With m and v Adam's bias-corrected moments, u = m / (sqrt(v) + eps) + weight_decay * w for each
    parameter, and w = w - lr * (||w|| / ||u||) * u; the ratio is 1 where either norm is 0.

    Args:
        params: parameters, groups, or what `split_parameters` returned; float32 and bfloat16.
        lr: learning rate, a number or a tensor of one element.
        betas, eps, weight_decay: as in Adam.
        variant: "lamb", as published; "nvlamb": all gradients of this optimizer are first divided
            by max(1, g), g their common L2 norm. It takes no gradients straight from payloads,
            since that norm needs them twice.
        maximize: go up instead of down.

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
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        variant: str = "lamb",
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "variant": variant,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    @property
    def takes_packed(self) -> bool:  # type: ignore[override]
        """Whether every group can be updated straight from payloads."""
        return all(group["variant"] == "lamb" for group in self.param_groups)

    def check_options(self, group: dict[str, Any]) -> None:
        for name in ("lr", "eps", "weight_decay"):
            check_number(name, group[name])
        check_betas(group["betas"])
        if group["variant"] not in VARIANTS:
            raise ValueError(f"variant must be one of {VARIANTS}, got {group['variant']!r}")

    def run(self, entries: Sequence[Entry]) -> None:
        rules = make_rules(Kind.LAMB_START, entries, self._numbers)
        self.amend(entries, rules)
        self._prescale(entries, rules)
        if any(entry.packed is not None for entry in entries):  # sums need whole parameters
            rules["kind"] = Kind.MOMENTS
            run_rules(entries, rules, MOMENTS)
            rules["kind"] = Kind.LAMB_NORMS
            norms = run_rules(entries, rules, MOMENTS, gradients=False)
        else:
            norms = run_rules(entries, rules, MOMENTS)
        rules["kind"] = Kind.LAMB_APPLY
        for row, entry, (above, under) in zip(rules, entries, norms, strict=True):
            row["step_size"] = -number(entry.group["lr"]) * self.trust(
                entry, float(above), float(under)
            )
        run_rules(entries, rules, MOMENTS, gradients=False)

    def trust(self, entry: Entry, above: float, under: float) -> float:
        """Return what the rate of a parameter is multiplied by: ``|w| / |u|``, or 1 where either
        is 0.
        """
        return above / under if above > 0 and under > 0 else 1.0

    def _numbers(self, group: dict[str, Any], step: int, is_first: bool) -> dict[str, float]:
        self.check_options(group)  # a misspelt variant would be plain LAMB
        beta1, beta2 = (number(b) for b in group["betas"])
        root = (1 - beta2**step) ** 0.5
        return {
            **adam_numbers(group),
            "weight_decay": number(group["weight_decay"]),
            "bias1": root / (1 - beta1**step),
            "eps": group["eps"] * root,
        }

    def _prescale(self, entries: Sequence[Entry], rules: NDArray[Any]) -> None:
        """Have the gradients of NVLAMB groups divided by max(1, their common norm)."""
        mine = [k for k, e in enumerate(entries) if e.group["variant"] == "nvlamb"]
        if not mine:
            return
        chosen, squares = [entries[k] for k in mine], rules[mine]
        squares["kind"] = Kind.SQUARES
        total = float(
            np.sqrt(sum(float(n) ** 2 for n in run_rules(chosen, squares, MOMENTS)[:, 0]))
        )
        if total > 1:
            rules["flags"][mine] |= np.uint32(Flag.PRESCALE)
            rules["prescale"][mine] = 1 / total
