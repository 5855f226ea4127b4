"""AdaGrad in the three places that the 1-bit SGD paper tried: before encoding, on the aggregate,
after momentum.

AdaGrad (Duchi, Hazan, Singer 2011) divides every gradient by the root of the sum of its squares so
far:

    s' = s + g * g,    g' = g / (sqrt(s') + eps)

in float32, each operation rounded on its own, so that the result is the same on every machine. On
the aggregate, before it is encoded again, was best (Seide et al. 2014, section 3.3): it sees what
all ranks mean together, codes and all, and every rank holds the sums of its own share only.

References:
    Seide, Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent", Interspeech 2014.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradcomp.memory.transform import Transform


def _check(name: str, value: float, *, positive: bool = False) -> float:
    """Return a number as float; ValueError unless it is finite and not negative (or positive)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")
    rounded = float(np.float32(value)) if value <= 3e38 else math.inf
    if rounded == math.inf or (positive and rounded == 0):
        raise ValueError(
            f"{name} must be {'positive' if positive else 'finite'} in float32, got {value!r}"
        )
    return float(value)


class _Adagrad(Transform):
    def __init__(self, *, eps: float = 1e-10, initial_accumulator_value: float = 0.0) -> None:
        self.eps = _check("eps", eps, positive=True)
        self.initial = _check("initial_accumulator_value", initial_accumulator_value)

    def apply(self, values: Tensor, old: Tensor, new: Tensor) -> None:
        g, total = values.numpy(), new.numpy()
        with np.errstate(all="ignore"):
            np.multiply(g, g, out=total)
            np.add(old.numpy(), total, out=total)
            root = np.sqrt(total)
            np.add(root, np.float32(self.eps), out=root)
            np.divide(g, root, out=g)

    def options(self) -> dict[str, object]:
        return {"eps": self.eps, "initial_accumulator_value": self.initial}

    def check_state(self, state: Tensor, name: str) -> None:
        if bool((state < 0).any()):
            raise ValueError(f"sum of squares of {name!r} is negative")


class AggregateAdagrad(_Adagrad):
    """AdaGrad where the mean of a piece is owned, between the sum and the second encoding.

    For ``transform=`` of `gradcomp.ddp.register`, `gradcomp.GradientAverager` and `DoubleBuffer`,
    with any codec and a plain SGD behind it, whose learning rate is then that of AdaGrad. It forces
    ``exchange="reduce_scatter"``.

    Args:
        eps: added to the root.
        initial_accumulator_value: of the sum of squares.

    Raises:
        ValueError: an argument out of its range.
    """

    place = "owner"


class LocalAdagrad(_Adagrad):
    """AdaGrad on each rank's own gradients, before they are encoded; arguments as of
    `AggregateAdagrad`.

    Sums differ from rank to rank, and each rank holds those of the whole model.
    """

    place = "local"


class MomentumAdagrad(torch.optim.Optimizer):
    """AdaGrad after momentum: an optimizer that divides the smoothed gradient.

    ``m' = momentum * m + g``, ``s' = s + m' * m'``, ``w' = w - lr * m' / (sqrt(s') + eps)``.

    Args:
        params: iterable of parameters, or of dictionaries with groups of them.
        lr: learning rate.
        momentum: share of the smoothed gradient that stays, at least 0 and below 1.
        weight_decay: times the weight is added to the gradient.
        eps: added to the root.
        initial_accumulator_value: of the sum of squares.

    Raises:
        ValueError: an argument out of its range; float16 parameters.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.01,
        momentum: float = 0.9,
        *,
        weight_decay: float = 0.0,
        eps: float = 1e-10,
        initial_accumulator_value: float = 0.0,
    ) -> None:
        if not _check("momentum", momentum) < 1:
            raise ValueError(f"momentum must be below 1, got {momentum!r}")
        defaults = {
            "lr": _check("lr", lr),
            "momentum": float(momentum),
            "weight_decay": _check("weight_decay", weight_decay),
            "eps": _check("eps", eps, positive=True),
            "initial_accumulator_value": _check(
                "initial_accumulator_value", initial_accumulator_value
            ),
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; ValueError for float16 parameters, in which sums of squares vanish."""
        super().add_param_group(param_group)
        if any(p.dtype == torch.float16 for p in self.param_groups[-1]["params"]):
            del self.param_groups[-1]
            raise ValueError(
                "MomentumAdagrad takes no torch.float16 parameters: sums of squares vanish in it"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        """Update every parameter that has a gradient; return what `closure` returns.

        Raises:
            ValueError: a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would bring sums to the parameters' dtype: they stay float32."""
        super().load_state_dict(state_dict)
        saved = state_dict["state"]
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        for index, p in zip(
            indices, (p for group in self.param_groups for p in group["params"]), strict=True
        ):
            for name, value in saved.get(index, {}).items():
                self.state[p][name] = value.to(torch.float32, copy=True)

    def _update(self, p: Tensor, group: dict[str, Any]) -> None:
        assert p.grad is not None
        if p.grad.is_sparse:
            raise ValueError("MomentumAdagrad takes no sparse gradients")
        grad = p.grad.add(p, alpha=group["weight_decay"]) if group["weight_decay"] else p.grad
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p, dtype=torch.float32)
            state["sum"] = torch.full_like(
                p, group["initial_accumulator_value"], dtype=torch.float32
            )
        smoothed = state["momentum_buffer"].mul_(group["momentum"]).add_(grad)
        root = state["sum"].addcmul_(smoothed, smoothed).sqrt().add_(group["eps"])
        p.addcdiv_(smoothed, root, value=-group["lr"])
