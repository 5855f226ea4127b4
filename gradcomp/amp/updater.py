"""A complete training step with a `DynamicLossScaler`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradcomp.amp.scaler import MOST, DynamicLossScaler
from gradcomp.arguments import check_integer, check_number
from gradcomp.engine.controls import Controls
from gradcomp.errors import GradcompError, UnsupportedTensor


class DynamicLossScalingUpdater:
    """Whole training step in one call of `update`: zero_grad, forward and backward, exchange,
    unscale, check, clip, decay, step.

    Args:
        optimizer: optimizer of the parameters.
        loss_fn: runs the model on a batch; returns the loss, a tensor of one element.
        data_feeder: called without arguments; returns the next batch.
        scaler: a `DynamicLossScaler`; None creates one with default arguments.
        accumulate: batches per step. Their losses are averaged, so with a mean loss n batches of
            equal size have the gradient of one batch n times as large.
        weight_decay: L2: ``weight_decay * parameter`` is added to each unscaled gradient.
        clip: called without arguments before the decay, for instance to call ``clip_grad_norm_``;
            gradients are then unscaled and finite.
        on_overflow: "retry" draws new batches and tries again at once with the smaller scale;
            "skip" returns.
        max_retries: how often one `update` tries again with "retry".
        model: a DistributedDataParallel model; all accumulated batches but the last run under its
            ``no_sync()``.
        compression: the state that `gradcomp.ddp.register` returned for `model`, or a
            `GradientAverager`, whose ``average()`` is called after the last backward pass. Create
            it with ``grad_scaler=scaler``. A skipped step does not change its residuals.

    Raises:
        ValueError: an argument out of its range, or arguments that exclude each other.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        loss_fn: Callable[[Any], Tensor],
        data_feeder: Callable[[], Any],
        *,
        scaler: DynamicLossScaler | None = None,
        accumulate: int = 1,
        weight_decay: float | None = None,
        clip: Callable[[], object] | None = None,
        on_overflow: str = "retry",
        max_retries: int = 100,
        model: torch.nn.Module | None = None,
        compression: Controls | None = None,
    ) -> None:
        check_integer("accumulate", accumulate, 1, MOST)
        check_integer("max_retries", max_retries, 0, MOST)
        if weight_decay is not None:
            check_number("weight_decay", weight_decay)
        if on_overflow not in ("retry", "skip"):
            raise ValueError(f"on_overflow must be 'retry' or 'skip', got {on_overflow!r}")
        controls = "what gradcomp.ddp.register returned, or a GradientAverager"
        for name, value, is_valid, wanted in (
            ("optimizer", optimizer, isinstance(optimizer, Optimizer), "a torch optimizer"),
            ("loss_fn", loss_fn, callable(loss_fn), "callable"),
            ("data_feeder", data_feeder, callable(data_feeder), "callable"),
            ("scaler", scaler, isinstance(scaler, DynamicLossScaler), "a DynamicLossScaler"),
            ("clip", clip, callable(clip), "callable"),
            ("model", model, hasattr(model, "no_sync"), "a model with no_sync()"),
            ("compression", compression, isinstance(compression, Controls), controls),
        ):
            may_be_none = name in ("scaler", "clip", "model", "compression")
            if not is_valid and not (value is None and may_be_none):
                raise ValueError(f"{name} must be {wanted}, got {type(value).__name__}")
        self.optimizer = optimizer
        self.scaler = scaler if scaler is not None else DynamicLossScaler()
        if compression is not None and not compression.follows(self.scaler.get_scale):
            raise ValueError(
                "compression must be made with grad_scaler=scaler, the scaler that is passed here"
            )
        self._average: Callable[[], None] | None = getattr(compression, "average", None)
        if compression is not None and self._average is None and model is None and accumulate > 1:
            raise ValueError(f"accumulate={accumulate} under DDP needs model=, for its no_sync()")
        self._loss_fn, self._data_feeder, self._clip = loss_fn, data_feeder, clip
        self._accumulate, self._weight_decay = accumulate, weight_decay
        self._fails = on_overflow == "retry"
        self._max_retries = max_retries if self._fails else 0
        self._model, self._compression = model, compression

    def update(self) -> float:
        """Run one training step; with ``on_overflow="skip"`` an overflow skips the optimizer.

        Returns:
            The mean unscaled loss of the last attempt's batches on this rank.

        Raises:
            GradcompError: the first attempt and all `max_retries` more overflowed. `update` can be
                called again.
            ValueError: a loss that is not a tensor of one element.

        Errors of `loss_fn`, `data_feeder`, the exchange and `DynamicLossScaler.unscale_` propagate.
        """
        for _ in range(self._max_retries + 1):
            loss = self._attempt()
            if not self.scaler.last_step_skipped:
                return loss
        if not self._fails:
            return loss
        times, scale = self._max_retries + 1, self.scaler.get_scale()
        raise GradcompError(
            f"the gradients overflowed {times} times in a row, the loss scale is {scale:g} now:"
            " look for NaN and Inf in the batches, the loss and the parameters"
        )

    def _attempt(self) -> float:
        """Run one step, and skip the optimizer after an overflow; return the mean loss."""
        scaler, optimizer = self.scaler, self.optimizer
        scaler.forget_step()  # an earlier attempt may have ended in an exception
        optimizer.zero_grad()
        total = 0.0
        for left in reversed(range(self._accumulate)):
            accumulating: Any = self._model if left else None
            with nullcontext() if accumulating is None else accumulating.no_sync():
                loss = self._loss_fn(self._data_feeder())
                if not isinstance(loss, Tensor) or loss.numel() != 1:
                    got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                    raise ValueError(f"loss_fn must return a tensor of one element, got {got}")
                total += float(loss.detach())
                scaler.scale(loss / self._accumulate).backward()  # type: ignore[no-untyped-call]
        if self._average is not None:
            self._average()
        scaler.unscale_(optimizer)
        if not scaler.overflowed(optimizer):
            if self._clip is not None:
                self._clip()
            if self._weight_decay:
                _decay(optimizer, self._weight_decay)
        scaler.step(optimizer)
        scaler.update()
        if scaler.last_step_skipped and self._compression is not None:
            self._compression.discard_step()
        return total / self._accumulate


@torch.no_grad()
def _decay(optimizer: Optimizer, decay: float) -> None:
    """Add ``decay * parameter`` to every gradient in place; UnsupportedTensor if one is sparse."""
    for group in optimizer.param_groups:
        parameters = [p for p in group["params"] if p.grad is not None]
        for parameter in parameters:
            if parameter.grad.layout is not torch.strided:
                raise UnsupportedTensor(
                    "gradient is sparse: weight_decay would make it dense; use the optimizer's own"
                )
        if parameters:
            torch._foreach_add_([p.grad for p in parameters], parameters, alpha=decay)
