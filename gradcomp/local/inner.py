"""The optimizers of inner steps, and weights as they keep them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradcomp.engine.buckets import check_optimizer


class Inner:
    """The optimizer of a model's inner steps, or several that share its parameters out, as Muon and AdamW do.

    Args:
        given: one optimizer or a sequence of them.
        parameters: of the model.

    Raises:
        ValueError: no optimizer, one twice, or one that updates none of the parameters.
    """

    def __init__(self, given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], parameters: Iterable[Tensor]) -> None:
        self._optimizers = list(given) if isinstance(given, Sequence) else [given]
        known = list(parameters)
        if len({id(one) for one in self._optimizers}) < max(1, len(self._optimizers)):
            raise ValueError(f"inner_optimizer must be an optimizer or several different ones, got {given!r}")
        for one in self._optimizers:
            check_optimizer(one, known)
        self._stepped: set[int] = set()
        self.weights = Weights(self._optimizers)

    def before_step(self, call: Callable[..., None]) -> list[Any]:
        """Have `call` called before every step of each, with its arguments; return what removes that."""
        return [one.register_step_pre_hook(call) for one in self._optimizers]

    def after_step(self, call: Callable[[], None]) -> list[Any]:
        """Have `call` called when all of them have stepped, in any order; return what removes that."""

        def stepped(optimizer: Any, *_: Any) -> None:
            self._stepped.add(id(optimizer))
            if len(self._stepped) == len(self._optimizers):
                self._stepped.clear()
                call()

        return [one.register_step_post_hook(stepped) for one in self._optimizers]


class Weights:
    """A model's weights in fp32, whatever keeps them: plain tensors on any device, or an optimizer that keeps the lower halves.

    Args:
        optimizers: of the inner steps.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._keepers = {
            id(p): one
            for one in optimizers
            if hasattr(one, "fp32") and hasattr(one, "set_fp32")
            for group in one.param_groups
            for p in group["params"]
        }

    def read(self, parameter: Tensor) -> Tensor:
        """Return the fp32 weight on the CPU; it may be the parameter's own memory."""
        keeper = self._keepers.get(id(parameter))
        weight = parameter.detach() if keeper is None else keeper.fp32(parameter)
        if weight.is_cuda:  # memory that a GPU writes to by itself
            weight = torch.empty_like(weight, device="cpu", pin_memory=True).copy_(weight)
        return weight.to("cpu", torch.float32)

    def written(self, parameter: Tensor, weight: Tensor) -> Tensor:
        """Return what `write` makes of an fp32 weight, in fp32: rounded as the parameter is. The anchor's own bits below that are no change."""
        return weight if id(parameter) in self._keepers else weight.to(parameter.dtype).float()

    @torch.no_grad()
    def write(self, parameter: Tensor, weight: Tensor) -> None:
        """Set a parameter to an fp32 weight."""
        keeper = self._keepers.get(id(parameter))
        if keeper is None:
            parameter.copy_(weight)
        else:
            keeper.set_fp32(parameter, weight.to(parameter.device))
