"""The option ``optimizer=`` of the entry points: one optimizer, or several for different parameters
of one model, such as Muon and AdamW.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor


def listed(given: Any) -> list[Any]:
    """Return the optimizers of the option as a list, empty for None.

    Raises:
        TypeError: a class, a name, another object without ``param_groups``, or an empty list.
    """
    if given is None:
        return []
    optimizers = list(given) if isinstance(given, (list, tuple)) else [given]
    names = [
        one.__name__ if isinstance(one, type) else type(one).__name__
        for one in optimizers
        if isinstance(one, type) or not hasattr(one, "param_groups")
    ]
    if names or not optimizers:
        raise TypeError(
            "optimizer must be an optimizer, such as torch.optim.AdamW(...), or a list of them, got"
            f" {', '.join(names) or 'an empty list'}"
        )
    return optimizers


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer that updates the weights: the inner one of torch's
    `ZeroRedundancyOptimizer` and of the wrappers of accelerate, Lightning and torchft.
    """
    for name in ("optim", "optimizer"):
        wrapped = getattr(optimizer, name, None)
        if hasattr(wrapped, "param_groups"):
            return unwrapped(wrapped)
    return optimizer


def name_of(optimizers: Sequence[Any]) -> str:
    """Return the class names of optimizers, as text."""
    return " and ".join(type(unwrapped(one)).__name__ for one in optimizers)


def check_optimizers(optimizers: Sequence[Any], parameters: Iterable[Tensor]) -> None:
    """Raise ValueError if an optimizer is named twice or updates none of the given parameters."""
    known = {id(p) for p in parameters}
    for number, one in enumerate(optimizers):
        if any(one is other for other in optimizers[:number]):
            raise ValueError(f"optimizer has the same {name_of([one])} twice")
        if not known & _updated([one]):
            raise ValueError(
                f"optimizer updates no parameter of this model ({name_of([one])}); pass the"
                " optimizer that trains it"
            )


def left_out(optimizers: Sequence[Any], named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return the names of trained parameters that no optimizer updates."""
    known = _updated(optimizers)
    return [name for name, p in named if p.requires_grad and id(p) not in known]


def _updated(optimizers: Sequence[Any]) -> set[int]:
    return {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
