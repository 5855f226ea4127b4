"""Detection of mistakes in training that an exchange cannot see: optimizer steps on gradients that
were not averaged, parameters added to the model later, weights that diverge under `TernGrad`.
"""

from __future__ import annotations

import itertools
import logging
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gradcomp.engine.buckets import local_part
from gradcomp.errors import GradcompError

logger = logging.getLogger("gradcomp")

NOT_CALLED = "gradcomp was registered but not called in this step"
OR_TWICE = "Or this is a second step on gradients that were averaged once"

GROWTH_EVERY = 20  # steps between two checks of the weights
GROWTH_STEPS = 1000  # no check after so many steps: weights may then grow for other reasons
MAX_GROWTH = 3.5  # between the growth measured with and without divergence


# ---- steps of optimizers -------------------------------------------------------------------------


class Mine:
    """A set of tensors, compared by identity.

    It has strong references: a weak reference to a parameter would make
    `torch.utils.swap_tensors`, and so ``to_empty``, fail.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._known = {id(tensor): tensor for tensor in tensors}

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._known

    def of(self, optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
        """Return the tensors of this set that an optimizer updates."""
        return (p for group in optimizer.param_groups for p in group["params"] if p in self)


_watchers: OrderedDict[int, Callable[..., None]] = OrderedDict()
# the handle of the one hook of this process: torch iterates over its own list of hooks, which must
# not change meanwhile
_hook_handles: list[Any] = []


def _before(*step: Any) -> None:
    for watcher in tuple(_watchers.values()):
        watcher(*step)


def before_any_step(mine: Mine, call: Callable[..., None]) -> RemovableHandle:
    """Call ``call(optimizer, args, kwargs)`` before each step of any optimizer that updates some of
    these parameters.

    Args:
        mine: the parameters, as a weak reference: the method's object must keep them.
        call: a bound method, as a weak reference. Calls end when its object is garbage-collected.

    Returns:
        A handle; its ``.remove()`` ends the calls.
    """
    if not _hook_handles:
        _hook_handles.append(register_optimizer_step_pre_hook(_before))
    handle = RemovableHandle(_watchers)
    known, method = weakref.ref(mine), weakref.WeakMethod(call, lambda _: handle.remove())

    def watcher(optimizer: torch.optim.Optimizer, *step: Any) -> None:
        bound, watched = method(), known()
        if bound is not None and watched is not None and any(True for _ in watched.of(optimizer)):
            bound(optimizer, *step)

    _watchers[handle.id] = watcher
    return handle


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that calls a bound method as long as its object is alive."""
    weak = weakref.WeakMethod(method)

    def hook(*args: Any) -> None:
        bound = weak()
        if bound is not None:
            bound(*args)

    return hook


def remove(hooks: list[Any]) -> None:
    """Remove all hooks of a list, and empty the list."""
    while hooks:
        hooks.pop().remove()


def _changes_nothing(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether all learning rates are 0: torch.distributed.checkpoint makes such a step, with
    its own gradients, to initialize the optimizer's state.
    """
    return all("lr" in group and float(group["lr"]) == 0 for group in optimizer.param_groups)


class Steps:
    """Detects optimizer steps on gradients that were not averaged since the previous step.

    Args:
        mine: the parameters.
        now: returns a value that changes when gradients are averaged.
        missed: called before a step on gradients that were not averaged.
        late: whether averages are computed after each step. Then the first step is allowed, and
            steps with a closure are checked too.
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
        """Check a step before it runs; an optimizer step pre-hook.

        Unless `late`, a step with a closure is not checked: the closure computes its gradients.
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
        """Forget all steps so far. Call this after a state was loaded."""
        self._seen.clear()
        self._begun = None if self._late else self._now()


# ---- parameters of the model ---------------------------------------------------------------------

_count = itertools.count(1)
_registered = 0  # modules and parameters registered since the first model was watched
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
    """Detects trainable parameters that were added to `model` after this object was made. Their
    gradients are in no bucket, so every rank would train them separately.

    The model is not traversed at every step. torch hooks report every module or parameter that is
    registered anywhere in the process, and only then is the model traversed again.
    """

    def __init__(self, model: nn.Module) -> None:
        _watch_registrations()
        self._model = model
        # strong references, because Python reuses the ids of freed objects
        self._known = {id(parameter): parameter for parameter in model.parameters()}
        self._seen = _registered

    def refuse(self) -> None:
        """Raise GradcompError if the model has a new trainable parameter.

        This costs almost nothing if no module has changed since the last call.
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
    """Checks the norm of the weights, and warns once if training seems to diverge under `TernGrad`,
    whose unbiased noise narrows the range of stable learning rates.

    Noise that updates cannot average out makes weights drift: their norm grows. On an MLP
    that trains in fp32 and diverges in `TernGrad` (docs/explanation/ternary.md has the figures),
    the norm of all compressed tensors grows by a factor of at least 5.7 within 200 steps. In runs
    that do not diverge it grows by at most 2.6.

    Args:
        weights: function that returns the trained tensors, float32, bfloat16 or float16; of sharded
            ones this rank's part is watched. None: nothing is.
    """

    def __init__(self, weights: Callable[[], Iterable[Tensor]] | None) -> None:
        self._weights, self._first, self._begun = weights, 0.0, -1

    def look(self, step: int) -> None:
        """Compare the norm of the weights with the norm at the first call, every `GROWTH_EVERY`
        steps, up to `GROWTH_STEPS` after the first.
        """
        if self._weights is None or step % GROWTH_EVERY:
            return
        norm = _norm(self._weights())
        if self._begun < 0:
            self._first, self._begun = norm, step
        elif step > self._begun + GROWTH_STEPS or not self._first:
            self._weights = None
        elif not (grown := norm / self._first) <= MAX_GROWTH:
            self._weights = None
            logger.warning(
                f"weights have grown {grown:.1f} times in {step - self._begun} steps under"
                " 'terngrad': its noise is too large for this learning rate, and the loss diverges"
                " if it is not falling now. Take codec 'ternary', which trains at the rates of"
                " fp32, or a smaller learning rate"
            )


@torch.no_grad()
def _norm(weights: Iterable[Tensor]) -> float:
    parts = map(local_part, weights)
    return math.hypot(*(float(torch.linalg.vector_norm(w, dtype=torch.float32)) for w in parts))
