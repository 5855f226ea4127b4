"""Steps of any optimizer on parameters that somebody watches: torch tells of them all, whoever made the optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook


def remove(hooks: list[Any]) -> None:
    """End what hooks call, and forget them."""
    while hooks:
        hooks.pop().remove()


def before_any_step(parameters: Iterable[Tensor], call: Callable[..., None]) -> Any:
    """Have a method called, ``call(optimizer, args, kwargs)``, before each step of any optimizer of some of these parameters.

    Args:
        parameters: that live as long as the method's object does.
        call: of an object that is not kept alive by this, and with which this ends.

    Returns:
        What ends this before: ``.remove()``.
    """
    mine = {id(p) for p in parameters}
    method = weakref.WeakMethod(call, lambda _: handle.remove())

    def before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = method()
        if found is not None and any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            found(optimizer, args, kwargs)

    handle = register_optimizer_step_pre_hook(before)
    return handle
