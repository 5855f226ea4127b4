"""Whether the hook was called before an optimizer steps: frameworks drop hooks, wrap models
anew, or never leave `no_sync`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from gradcomp.ddp import CompressionState
from gradcomp.engine.watch import NOT_CALLED, OR_TWICE, Mine, Steps, before_any_step
from gradcomp.errors import GradcompError

if TYPE_CHECKING:
    from torch import nn


class Watch:
    """Raises before an optimizer steps on gradients that gradcomp has not averaged.

    Args:
        state: of `model`.
        model: wrapped in DistributedDataParallel.
        optimizers: whose steps are watched from now on; of others call `check`. None: all that have
            parameters of `model`.
    """

    def __init__(
        self,
        state: CompressionState,
        model: nn.parallel.DistributedDataParallel,
        optimizers: Sequence[torch.optim.Optimizer] | None = (),
    ) -> None:
        self._state, self._forwards, self._synced = state, 0, 0
        mine = Mine(model.parameters())
        self._steps = Steps(mine, self._now, self._missed)
        self._hooks: list[Any] = [model.register_forward_pre_hook(self._forward)]
        if optimizers is None:
            self._hooks.append(before_any_step(mine, self.check))
        else:
            self._hooks += [one.register_step_pre_hook(self.check) for one in optimizers]

    def check(self, optimizer: torch.optim.Optimizer, *step: Any) -> None:
        """Raise GradcompError if gradients have been made since this optimizer's last step, and
        the hook was not called.
        """
        self._steps.check(optimizer, *step)
        self._forwards = self._synced = 0

    def restart(self) -> None:
        """Take note that the state was loaded, which counts as no step."""
        self._steps.restart()

    def close(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()

    def _now(self) -> tuple[int, int]:
        return (
            self._state.step,
            self._state.stats.steps,
        )  # the second may be reset, the first loaded

    def _forward(self, module: Any, _: Any) -> None:
        if torch.is_grad_enabled():
            self._forwards += 1
            self._synced += bool(module.require_backward_grad_sync)

    def _missed(self) -> None:
        raise GradcompError(f"{NOT_CALLED}: {self._why()}. The optimizer has changed nothing yet")

    def _why(self) -> str:
        if not self._forwards:
            return (
                "no forward pass went through the DistributedDataParallel model that it is"
                " registered on, so every rank would train apart. The loop calls the module inside"
                " (model.module), or the framework has wrapped the model anew: call the wrapped"
                f" model, and register on the one that trains. {OR_TWICE}: run forward and backward"
                " before each"
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
