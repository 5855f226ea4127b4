"""AdaGrad in the three places of the 1-bit SGD paper: before encoding, on the aggregate, after
momentum.

AdaGrad (Duchi, Hazan, Singer 2011) divides every gradient by the root of the sum of its squares so
far:

    s' = s + g * g,    g' = g / (sqrt(s') + eps)

All arithmetic is float32, and each operation is rounded separately, so that the result is the same
on every machine. The best place was the aggregate before the second phase encodes it (Seide et al.
2014, section 3.3). The aggregate is the mean over ranks, with quantization error; each rank keeps
the sums of squares of the slices that it owns.

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
        # torch's sqrt is MKL's, which does not round every result correctly
        kernels.divide(values, None, new, self.eps, root, quotients)
        values.copy_(quotients)

    def options(self) -> dict[str, object]:
        return {"eps": self.eps, "initial_accumulator_value": self.initial}

    def check_state(self, state: Tensor, name: str) -> None:
        if bool((state < 0).any()):
            raise ValueError(f"sum of squares of {name!r} is negative")


class AggregateAdagrad(_Adagrad):
    """AdaGrad on the mean over ranks, applied by its owner before the second phase encodes it.

    Pass it as ``advanced=gradcomp.Advanced(transform=...)`` to `gradcomp.ddp.register`,
    `gradcomp.GradientAverager` or `DoubleBuffer`, with any codec. Train with plain SGD; its
    learning rate becomes AdaGrad's. It requires ``exchange="reduce_scatter"``.

    Args:
        eps: added to the root of the sum of squares.
        initial_accumulator_value: the sum of squares before the first gradient.

    Raises:
        ValueError: an argument out of its range.
    """

    place = "owner"


class LocalAdagrad(_Adagrad):
    """AdaGrad on each rank's local gradients, before they are encoded.

    Arguments are those of `AggregateAdagrad`. Every rank keeps its own sums of squares, for the
    whole model.
    """

    place = "local"


class MomentumAdagrad(torch.optim.Optimizer):
    """AdaGrad after momentum: an optimizer that applies AdaGrad to the smoothed gradient.

    ``m' = momentum * m + g``, ``s' = s + m' * m'``, ``w' = w - lr * m' / (sqrt(s') + eps)``.

    Args:
        params: iterable of parameters, or of parameter groups.
        lr: learning rate.
        momentum: factor of the smoothed gradient in each step, at least 0 and below 1.
        weight_decay: ``weight_decay * w`` is added to the gradient.
        eps: added to the root of the sum of squares.
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
        """Add a parameter group, as in torch; raise ValueError for float16 parameters, in which
        sums of squares underflow.
        """
        super().add_param_group(param_group)
        if any(p.dtype == torch.float16 for p in self.param_groups[-1]["params"]):
            del self.param_groups[-1]
            raise ValueError(
                "MomentumAdagrad takes no torch.float16 parameters: sums of squares vanish in it"
            )

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Tensor] | None = None
    ) -> Tensor | None:
        """Update every parameter that has a gradient; return the value of `closure`, or None.

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
        """Load a state dict, as in torch, but keep momentum and sums of squares in float32; torch
        would cast them to the parameters' dtype.
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
