"""AdaGrad in the three places of the 1-bit SGD paper: before encoding, on the aggregate, after
momentum.

AdaGrad (Duchi, Hazan, Singer 2011) divides every gradient by the root of the sum of its squares so
far:

    s' = s + g * g,    g' = g / (sqrt(s') + eps)

in float32, each operation rounded on its own, so that the result is the same on every machine. The
aggregate, before it is encoded again, was the best place (Seide et al. 2014, section 3.3): it is
the mean of all ranks, with the errors of their codes, and every rank holds the sums of its own
share only.

References:
    Seide, Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent", Interspeech 2014.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from gradcomp.arguments import check_number
from gradcomp.kernels import of
from gradcomp.memory.transform import Transform

SMALLEST, LARGEST = 2.0**-149, 3e38  # in float32, above 0 and below Inf


def _check(name: str, value: Any, low: float = 0.0) -> float:
    return check_number(f"{name} in float32", value, low, LARGEST)


class _Adagrad(Transform):
    def __init__(self, *, eps: float = 1e-10, initial_accumulator_value: float = 0.0) -> None:
        self.eps = _check("eps", eps, SMALLEST)
        self.initial = _check("initial_accumulator_value", initial_accumulator_value)

    def apply(self, values: Tensor, old: Tensor, new: Tensor) -> None:
        torch.mul(values, values, out=new)
        new.add_(old)
        kernels, numel = of(values.device), values.numel()
        root, quotients = kernels.empty(numel), kernels.empty(numel)
        # torch's own root is MKL's, which rounds some wrongly
        kernels.divide(values, None, new, self.eps, root, quotients)
        values.copy_(quotients)

    def options(self) -> dict[str, object]:
        return {"eps": self.eps, "initial_accumulator_value": self.initial}

    def check_state(self, state: Tensor, name: str) -> None:
        if bool((state < 0).any()):
            raise ValueError(f"sum of squares of {name!r} is negative")


class AggregateAdagrad(_Adagrad):
    """AdaGrad on the mean of all ranks, at its owner, between the sum and the second encoding.

    For ``advanced=gradcomp.Advanced(transform=...)`` of `gradcomp.ddp.register`,
    `gradcomp.GradientAverager` and `DoubleBuffer`, with any codec, and a plain SGD whose learning
    rate is then that of AdaGrad. It requires ``exchange="reduce_scatter"``.

    Args:
        eps: added to the root.
        initial_accumulator_value: the sum of squares before the first gradient.

    Raises:
        ValueError: an argument out of its range.
    """

    place = "owner"


class LocalAdagrad(_Adagrad):
    """AdaGrad on each rank's own gradients, before they are encoded; the same arguments.

    Every rank has sums of its own, for the whole model.
    """

    place = "local"


class MomentumAdagrad(torch.optim.Optimizer):
    """AdaGrad after momentum: an optimizer that divides the smoothed gradient.

    ``m' = momentum * m + g``, ``s' = s + m' * m'``, ``w' = w - lr * m' / (sqrt(s') + eps)``.

    Args:
        params: iterable of parameters, or of dictionaries with groups of them.
        lr: learning rate.
        momentum: factor of the smoothed gradient, at least 0 and below 1.
        weight_decay: the gradient gets this times the weight.
        eps: added to the root.
        initial_accumulator_value: the sum of squares before the first gradient.

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
        initial = _check("initial_accumulator_value", initial_accumulator_value)
        defaults = {
            "lr": _check("lr", lr),
            "momentum": check_number("momentum", momentum, high=1.0),
            "weight_decay": _check("weight_decay", weight_decay),
            "eps": _check("eps", eps, SMALLEST),
            "initial_accumulator_value": initial,
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
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would cast momentum and sums to the parameters' dtype: they stay
        float32.
        """
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        for index, p in zip(indices, parameters, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                self.state[p][name] = value.to(p.device, torch.float32, copy=True)

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if grad.is_sparse:
            raise ValueError("MomentumAdagrad takes no sparse gradients")
        if group["weight_decay"]:
            grad = grad.add(p, alpha=group["weight_decay"])
        state = self.state[p]
        if not state:
            initial = group["initial_accumulator_value"]
            state["momentum_buffer"] = torch.zeros_like(p, dtype=torch.float32)
            state["sum"] = torch.full_like(p, initial, dtype=torch.float32)
        smoothed = state["momentum_buffer"].mul_(group["momentum"]).add_(grad)
        root = state["sum"].addcmul_(smoothed, smoothed).sqrt().add_(group["eps"])
        p.addcdiv_(smoothed, root, value=-group["lr"])
