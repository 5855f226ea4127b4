"""Mistakes in training that no exchange sees: optimizer steps on gradients that were not averaged,
parameters that came to the model later, weights that diverge under `TernGrad`.
"""

from __future__ import annotations

import itertools
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradcomp.errors import GradcompError

logger = logging.getLogger("gradcomp")

NOT_CALLED = "gradcomp was registered but not called in this step"
OR_TWICE = "Or this is a second step on gradients that were averaged once"

GROWTH_EVERY = 20  # steps from one look at the weights to the next
GROWTH_STEPS = 1000  # after which weights may have grown for better reasons
MAX_GROWTH = 3.5  # between what was seen with and without a divergence


# ---- steps of optimizers -------------------------------------------------------------------------


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


# ---- parameters of the model ---------------------------------------------------------------------

_count = itertools.count(1)
_registered = 0  # modules and parameters in this process since the first model was watched
_watching = False


def _note_registration(*_: Any) -> None:
    global _registered
    _registered = next(_count)


def _watch_registrations() -> None:
    global _watching
    if not _watching:
        _watching = True
        modules.register_module_module_registration_hook(_note_registration)
        modules.register_module_parameter_registration_hook(_note_registration)


class Newcomers:
    """Finds trainable parameters that `model` did not have when this was made: no bucket holds
    their gradients, and every rank trains them apart.

    It does not walk through the model at every step. torch reports every module or parameter that
    is registered anywhere in the process, and only after that the model is looked through again.
    """

    def __init__(self, model: nn.Module) -> None:
        _watch_registrations()
        self._model = model
        # kept: ids are used again
        self._known = {id(parameter): parameter for parameter in model.parameters()}
        self._seen = _registered

    def refuse(self) -> None:
        """Raise GradcompError if there is one; next to nothing where no module has changed since
        the last call.
        """
        if self._seen == _registered:
            return
        seen = _registered
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._known:
                raise GradcompError(
                    f"parameter {name!r} has come to the model later: no bucket holds its gradient,"
                    " and every rank would train it apart; build the model first, then wrap it,"
                    " and register it or make its averager"
                )
        self._seen = seen


# ---- weights -------------------------------------------------------------------------------------


class Growth:
    """Looks at the norm of weights now and then, and warns once if training seems to diverge under
    `TernGrad`, whose unbiased noise narrows the range of stable learning rates.

    Noise that updates cannot average out makes weights wander: their norm grows. On a perceptron
    that trains in fp32 and diverges in `TernGrad` (docs/explanation/ternary.md has the figures) the
    norm of all compressed tensors grows by a factor of 5.7 and more within 200 steps; where either
    trains, by at most 2.6.

    Args:
        weights: what is trained, float32, bfloat16 or float16.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights, self._first, self._begun = weights, 0.0, -1

    def look(self, step: int) -> None:
        """Compare the norm of the weights with that at the first call.

        Args:
            step: number of steps taken; one in `GROWTH_EVERY` is looked at, `GROWTH_STEPS` from the
                first on.
        """
        if not self._weights or step % GROWTH_EVERY:
            return
        if self._begun < 0:
            self._first, self._begun = self._norm(), step
        elif step > self._begun + GROWTH_STEPS or not self._first:
            self._weights = ()
        elif not (grown := self._norm() / self._first) <= MAX_GROWTH:
            self._weights = ()
            logger.warning(
                f"weights have grown {grown:.1f} times in {step - self._begun} steps under"
                " 'terngrad': its noise is too large for this learning rate, and the loss diverges"
                " if it is not falling now. Take codec 'ternary', which trains at the rates of"
                " fp32, or a smaller learning rate"
            )

    @torch.no_grad()
    def _norm(self) -> float:
        norms = [float(torch.linalg.vector_norm(w, dtype=torch.float32)) for w in self._weights]
        return math.hypot(*norms)
