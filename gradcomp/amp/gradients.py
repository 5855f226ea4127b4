"""An optimizer's gradients: read, checked and unscaled in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradcomp.errors import GradcompError, UnsupportedTensor


def gradients(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the values of every gradient of an optimizer; sparse ones are coalesced first.

    Raises:
        UnsupportedTensor: a gradient in a compressed sparse layout.
        GradcompError: a gradient that is still packed.
    """
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        grad = parameter.grad
        if grad is None:
            continue
        if grad.layout is torch.sparse_coo:  # a sum of finite duplicates may overflow
            grad = parameter.grad = grad.coalesce()
            grad = grad._values()
        if grad.layout is not torch.strided:
            raise UnsupportedTensor(f"gradient is {grad.layout}: not supported by the loss scaler")
        strides = (s for s, n in zip(grad.stride(), grad.shape, strict=True) if n > 1)
        if grad.numel() > 1 and not any(strides):
            raise GradcompError(
                "gradients are still packed: call state.materialize_gradients() before unscaling"
            )
        yield grad


@torch.no_grad()
def unscale(grads: Iterable[Tensor], factor: float) -> bool:
    """Multiply tensors in place by a factor; return whether any value is NaN or Inf, before or
    after.

    The kernel of torch's own GradScaler checks and multiplies in one pass. It tests each value
    that it reads (a norm would overflow), so a factor above 1 takes a second look at the results.
    """
    places: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        places.setdefault((grad.device, grad.dtype), []).append(grad)
    flags = []
    for (device, _), tensors in places.items():
        flags.append(torch.zeros((), device=device))
        for multiplier in (factor, 1.0) if factor > 1 else (factor,):
            there = torch.tensor(multiplier, dtype=torch.float32, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(tensors, flags[-1], there)
    return any(bool(flag) for flag in flags)
