"""Steps of optimizers, whoever made them: those before which gradcomp was not called, and those
of an optimizer that it does not know.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

NOT_CALLED = "gradcomp was registered but not called in this step"
OR_TWICE = "Or this is a second step on gradients that were averaged once"


class Mine:
    """Tensors by identity. It keeps them: a weak reference to a parameter would keep
    `torch.utils.swap_tensors`, and with it ``to_empty``, from working.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._known = {id(one): one for one in tensors}

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._known

    def of(self, optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
        """Return those that an optimizer steps."""
        return (p for group in optimizer.param_groups for p in group["params"] if p in self)


class Watcher:
    """A method that is called before steps of optimizers of some parameters; neither is kept
    alive by this, and with its object this ends.
    """

    def __init__(self, mine: Mine, call: Callable[..., None]) -> None:
        self._mine = weakref.ref(mine)
        self._method = weakref.WeakMethod(call, lambda _: self.remove())

    def before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Call it, if the step is of its parameters."""
        method, mine = self._method(), self._mine()
        if method is not None and mine is not None and any(True for _ in mine.of(optimizer)):
            method(optimizer, args, kwargs)

    def remove(self) -> None:
        """End this; twice is harmless."""
        _watchers.pop(id(self), None)


_watchers: dict[int, Watcher] = {}
_global: list[Any] = []
# the one hook of this process: torch walks through its own list, which nobody may change
# meanwhile


def _before(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    for watcher in tuple(_watchers.values()):
        watcher.before(optimizer, args, kwargs)


def before_any_step(mine: Mine, call: Callable[..., None]) -> Watcher:
    """Have a method called, ``call(optimizer, args, kwargs)``, before each step of any optimizer of
    some of these parameters.

    Args:
        mine: the parameters, which the method's object keeps.
        call: of an object that is not kept alive by this, and with which this ends.

    Returns:
        What ends this before: ``.remove()``.
    """
    if not _global:
        _global.append(register_optimizer_step_pre_hook(_before))
    watcher = Watcher(mine, call)
    _watchers[id(watcher)] = watcher
    return watcher


def remove(hooks: list[Any]) -> None:
    """End what hooks call, and forget them."""
    while hooks:
        hooks.pop().remove()


def _changes_nothing(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether a step is of rate 0: torch.distributed.checkpoint makes one, on gradients of
    its own, for the sake of the optimizer's state.
    """
    return all("lr" in group and float(group["lr"]) == 0 for group in optimizer.param_groups)


class Steps:
    """Finds steps of optimizers on gradients that nobody has averaged since the step before.

    Args:
        mine: the parameters.
        now: returns what changes when gradients are averaged.
        missed: is called before a step of which that is not so.
        late: whether averages are made after each step: the first one is allowed, and it does not
            matter that a closure makes the gradients.
    """

    def __init__(
        self,
        mine: Mine,
        now: Callable[[], object],
        missed: Callable[[], None],
        *,
        late: bool = False,
    ) -> None:
        self._mine, self._now, self._missed, self._late = mine, now, missed, late
        self._seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, object] = (
            weakref.WeakKeyDictionary()
        )
        self.restart()

    def check(
        self,
        optimizer: torch.optim.Optimizer,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Look before a step of an optimizer; a hook for that. A closure makes gradients yet,
        and is not looked at.
        """
        closure = (kwargs or {}).get("closure", args[1] if len(args) > 1 else None)
        if closure is not None and not self._late:
            return
        now = self._now()
        if (
            self._seen.get(optimizer, self._begun) == now
            and any(p.grad is not None for p in self._mine.of(optimizer))
            and not _changes_nothing(optimizer)
        ):
            self._missed()
        self._seen[optimizer] = now

    def restart(self) -> None:
        """Take note that a state was loaded, which counts as no step."""
        self._seen.clear()
        self._begun = None if self._late else self._now()
