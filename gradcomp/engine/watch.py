"""Steps of optimizers, whoever made them: those before which gradcomp was not called, and those of an optimizer that it does not know."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

NOT_CALLED = "gradcomp was registered but not called in this step"


class Mine:
    """Tensors by identity, without keeping them alive."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._known = {id(one): weakref.ref(one) for one in tensors}

    def __contains__(self, tensor: Tensor) -> bool:
        found = self._known.get(id(tensor))
        return found is not None and found() is tensor

    def of(self, optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
        """Return those that an optimizer steps."""
        return (p for group in optimizer.param_groups for p in group["params"] if p in self)


def before_any_step(mine: Mine, call: Callable[..., None]) -> Any:
    """Have a method called, ``call(optimizer, args, kwargs)``, before each step of any optimizer of some of these parameters.

    Args:
        mine: the parameters.
        call: of an object that is not kept alive by this, and with which this ends.

    Returns:
        What ends this before: ``.remove()``.
    """
    method = weakref.WeakMethod(call, lambda _: handle.remove())

    def before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = method()
        if found is not None and any(True for _ in mine.of(optimizer)):
            found(optimizer, args, kwargs)

    handle = register_optimizer_step_pre_hook(before)
    return handle


def remove(hooks: list[Any]) -> None:
    """End what hooks call, and forget them."""
    while hooks:
        hooks.pop().remove()


class Steps:
    """Finds steps of optimizers on gradients that nobody has averaged since the step before.

    Args:
        mine: the parameters.
        now: returns what changes when gradients are averaged.
        missed: is called before a step of which that is not so.
    """

    def __init__(self, mine: Mine, now: Callable[[], object], missed: Callable[[], None]) -> None:
        self._mine, self._now, self._missed = mine, now, missed
        self._seen: dict[int, object] = {}
        self._begun = now()

    def check(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> None:
        """Look before a step of an optimizer; a hook for that. A closure makes gradients yet, and is not looked at."""
        if (kwargs or {}).get("closure") is not None or (len(args) > 1 and args[1] is not None):
            return
        now = self._now()
        if self._seen.get(id(optimizer), self._begun) == now and any(p.grad is not None for p in self._mine.of(optimizer)):
            self._missed()
        self._seen[id(optimizer)] = now

    def restart(self) -> None:
        """Take note that a state was loaded, which counts as no step."""
        self._seen.clear()
        self._begun = self._now()
