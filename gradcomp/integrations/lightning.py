"""Lightning: ``Trainer(strategy=CompressedDDPStrategy())``, also on CPUs, where
Lightning's own DDPStrategy ignores communication hooks.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gradcomp.arguments import suggestion
from gradcomp.codecs import Codec, resolve
from gradcomp.ddp import CompressionState, register
from gradcomp.engine.options import COMMON, MOVED, RENAMED, Options, check_names
from gradcomp.integrations.checkpoints import gather_states, restore
from gradcomp.integrations.versions import imported
from gradcomp.integrations.watch import DdpWatch
from gradcomp.integrations.wrapped import warn_alone

with imported("lightning"):
    from lightning.pytorch.strategies import DDPStrategy

logger = logging.getLogger("gradcomp")
KEY = "gradcomp"  # of the states in a checkpoint
_OPTIONS = (*COMMON, "advanced")
_HOOKS = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period")


class CompressedDDPStrategy(DDPStrategy):  # type: ignore[misc]  # mypy does not see Lightning
    """DDP strategy that compresses gradients; Lightning's checkpoints include all ranks' residuals.

    ::

        strategy = CompressedDDPStrategy()
        trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=strategy)

    After the backward pass ``p.grad`` is the averaged gradient, for clipping, for hooks that read
    gradients and for split optimizers.

    Args:
        codec: codec or name; "auto", the default, chooses by all optimizers of the module.
        others: options of `gradcomp.ddp.register`, and arguments of Lightning's DDPStrategy and of
            DistributedDataParallel: ``CompressedDDPStrategy("onebit", warmup_steps=100,
            find_unused_parameters=True)``.

    Raises:
        TypeError: an argument that none of these three has.
        ValueError: an unknown codec, an option out of its range, a communication hook.

    ``trainer.fit`` raises GradcompError if gradcomp was registered but not called in a step, and
    the errors of `gradcomp.ddp.register`.
    """

    def __init__(self, codec: Codec | str = "auto", **others: Any) -> None:
        if codec != "auto":
            codec = resolve(codec)
        options = {name: others.pop(name) for name in _OPTIONS if name in others}
        _check(others)
        Options(**options)  # refuses wrong values
        self._codec, self._options = codec, options
        self._compression: CompressionState | None = None
        self._watch: DdpWatch | None = None
        super().__init__(**others)

    @property
    def compression(self) -> CompressionState | None:
        """The state, with `stats`, `describe` and `quality`; None before ``trainer.fit``. It stays
        open after ``trainer.fit``, for ``trainer.save_checkpoint``; you may `close` it.
        """
        return self._compression

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if not isinstance(self.model, DistributedDataParallel):  # validation, test, prediction
            return
        if self._compression is not None:  # of an earlier trainer.fit
            self._compression.close()
        self._compression = register(
            self.model, self._codec, optimizer=self.optimizers or None, **self._options
        )
        self._watch = DdpWatch(self._compression, self.model, automatic=False)
        if self.world_size == 1:
            warn_alone("CompressedDDPStrategy on one device", "Trainer(devices=2) or more")

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        super().post_backward(closure_loss)
        if self._compression is not None:
            self._compression.materialize_gradients()  # Lightning clips and logs gradients

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        def checked() -> Any:
            loss = closure()
            if self._watch is not None:
                self._watch.check(optimizer)
            return loss

        return super().optimizer_step(optimizer, checked, model, **kwargs)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        state = self._compression
        if state is not None and "optimizer_states" in checkpoint:  # not weights_only
            error = state._engine.error
            if error is None:
                checkpoint = {**checkpoint, KEY: gather_states(state, state._engine.comm)}
            else:
                text = "%s is saved without gradcomp's state, which has failed: %s"
                logger.warning(text, filepath, error)
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        state = self._compression
        if state is not None:
            found, remedy = checkpoint.get(KEY), f"remove its entry {KEY!r}"
            restore(state, state._engine.comm, found, "this checkpoint", remedy)

    def teardown(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        state = self._compression  # not closed: trainer.save_checkpoint() may come after fit()
        if state is not None and state._engine.error is not None:
            state.close()
        super().teardown()


def _check(others: Mapping[str, Any]) -> None:
    """Raise ValueError for a hook, TypeError for an argument that neither Lightning nor DDP has."""
    for name in _HOOKS:
        if others.get(name) is not None:
            raise ValueError(
                f"{name}={others[name]!r}: DDP takes one communication hook, here that of gradcomp"
            )
    known = set(inspect.signature(DDPStrategy).parameters) - {"kwargs"}
    known |= set(inspect.signature(DistributedDataParallel).parameters) - {"module"}
    for name in others:
        if name in MOVED or name in RENAMED:
            check_names([name], _OPTIONS, "CompressedDDPStrategy")
        if name not in known:
            raise TypeError(
                "neither gradcomp.ddp.register nor DDPStrategy nor DistributedDataParallel has an"
                f" argument {name!r}{suggestion(name, [*known, *_OPTIONS])}"
            )
