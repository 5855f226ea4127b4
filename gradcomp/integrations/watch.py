"""Check before an optimizer step that gradients were exchanged: frameworks may drop hooks, wrap
models again, or never leave `no_sync`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from gradcomp.ddp import CompressionState
from gradcomp.engine.watch import NOT_CALLED, OR_TWICE, Mine, Steps, before_any_step, remove
from gradcomp.errors import GradcompError


class Watch(Steps):
    """Check that raises GradcompError before an optimizer step if nothing was exchanged since the
    step before.

    Args:
        parameters: every optimizer of at least one of these is watched.
        now: returns a value that changes with every exchange.
        why: returns the cause and the remedy, for the error message.
        automatic: check every step until `close`, as long as this object lives. False: the caller
            calls `check` before a step.
        late: whether exchanges come after steps instead of before.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        now: Callable[[], object],
        why: Callable[[], str],
        *,
        automatic: bool = True,
        late: bool = False,
    ) -> None:
        self._why, mine = why, Mine(parameters)
        super().__init__(mine, now, self._refuse, late=late)
        self._hooks: list[Any] = [before_any_step(mine, self.check)] if automatic else []

    def close(self) -> None:
        """Stop watching. Closing twice has no effect."""
        remove(self._hooks)

    def _refuse(self) -> None:
        raise GradcompError(f"{NOT_CALLED}: {self._why()}. The optimizer has changed nothing yet")


class DdpWatch(Watch):
    """A watch for a DistributedDataParallel model; a hook of the model keeps the watch alive.

    It counts exchanges itself, since loading a state changes ``state.step``.
    """

    def __init__(
        self, state: CompressionState, model: nn.Module, *, automatic: bool = True
    ) -> None:
        self._exchanges = self._forwards = self._synced = 0
        super().__init__(
            model.parameters(), lambda: self._exchanges, self._cause, automatic=automatic
        )
        self._hooks.append(model.register_forward_pre_hook(_Forward(self)))
        self._reports = cast("list[Any]", state._engine.reports)
        self._reports.append(self)

    def step(self, _: int) -> None:
        """Count an exchange; the engine calls this after each one."""
        self._exchanges += 1
        self._forwards = self._synced = 0

    def close(self) -> None:
        super().close()
        if self in self._reports:
            self._reports.remove(self)

    def _cause(self) -> str:
        if not self._forwards:
            return (
                "no forward pass went through the DistributedDataParallel model that it is"
                " registered on, so every rank would train on its own gradients. The loop calls the"
                " module inside (model.module), or the framework has wrapped the model again: call"
                f" the wrapped model, and register on the one that trains. {OR_TWICE}: run forward"
                " and backward before each"
            )
        if not self._synced:
            return (
                "every forward pass since the last step ran under no_sync (gradient accumulation),"
                " so these gradients are of this rank alone: leave no_sync for the last minibatch"
                " before optimizer.step()"
            )
        return (
            "DistributedDataParallel ran, but called another hook or none: the framework has"
            " replaced or dropped it, or the gradients are of a loss that does not come from this"
            " model. Register gradcomp last, on the model that trains"
        )


class _Forward:
    """Hook that counts forward passes; in a copied or saved model it does nothing."""

    def __init__(self, watch: DdpWatch | None = None) -> None:
        self._watch = watch

    def __call__(self, module: Any, _: Any) -> None:
        if self._watch is not None and torch.is_grad_enabled():
            self._watch._forwards += 1
            self._watch._synced += bool(module.require_backward_grad_sync)

    def __reduce__(self) -> tuple[type[_Forward], tuple[()]]:
        return type(self), ()
