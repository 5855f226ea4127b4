"""Transformers: `CompressedTrainer`, or the mixin `Compressed` before another subclass of Trainer,
since Trainer has no argument for a communication hook.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gradcomp.codecs import Codec, resolve
from gradcomp.ddp import CompressionState
from gradcomp.engine.options import COMMON, Options, check_names
from gradcomp.integrations.checkpoints import read, write
from gradcomp.integrations.versions import imported
from gradcomp.integrations.watch import DdpWatch
from gradcomp.integrations.wrapped import attach, inner, prepared_by

with imported("transformers"):
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint


class Compressed:
    """Mixin for a Trainer that compresses gradients. The Trainer's checkpoints include every rank's
    residuals.

    ::

        class MyTrainer(Compressed, Seq2SeqTrainer): ...

        trainer = MyTrainer(model, args, train_dataset=data)

    After the backward pass ``p.grad`` is the averaged gradient, for clipping and norms. An
    optimizer step raises GradcompError if gradcomp was not called since the step before.

    Args:
        args, kwargs: arguments of the Trainer.
        codec: codec or name; "auto", the default, chooses by the optimizer.
        compression: options of `gradcomp.ddp.register`, as a dictionary: ``{"warmup_steps": 100}``,
            ``{"advanced": gradcomp.Advanced(quality_every=2)}``.

    Raises:
        TypeError: `compression` is not a dictionary, or has an unknown option.
        ValueError: an unknown codec, or an option out of its range.

    ``train()`` raises ValueError for a checkpoint whose state does not fit, and the errors of
    `gradcomp.ddp.register`.
    """

    def __init__(
        self,
        *args: Any,
        codec: Codec | str = "auto",
        compression: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        codec, options = codec if codec == "auto" else resolve(codec), compression or {}
        if not isinstance(options, Mapping):
            raise TypeError(
                "compression must be a dictionary of options of gradcomp.ddp.register, got"
                f" {type(options).__name__}"
            )
        check_names(options, (*COMMON, "advanced"), type(self).__name__)
        Options(**options)  # refuses wrong values
        self._gradcomp = _Compression(self, codec, options)  # one attribute, to avoid name clashes
        super().__init__(*args, **kwargs)
        self.add_callback(self._gradcomp)  # type: ignore[attr-defined]  # Trainer's

    @property
    def compression(self) -> CompressionState | None:
        """The state, with `stats`, `describe` and `quality`; None before ``train()`` and in a run
        of one process. The next ``train()`` uses it again if the wrapped model is the same.
        """
        return self._gradcomp.state

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self._gradcomp.begins(resume_from_checkpoint, trial)
        return super().train(resume_from_checkpoint, trial, *args, **kwargs)  # type: ignore[misc]

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        if self.compression is not None:
            self.compression.materialize_gradients()  # the Trainer clips them
        return loss


class CompressedTrainer(Compressed, Trainer):  # type: ignore[misc]  # not seen by mypy
    """A Trainer that compresses gradients; see `Compressed`."""


class _Compression(TrainerCallback):  # type: ignore[misc]
    """Callback of a trainer: registers when training begins, and saves every rank's state."""

    def __init__(self, trainer: Any, codec: Codec | str, options: Mapping[str, Any]) -> None:
        self._trainer, self._codec, self._options = trainer, codec, options
        self.state: CompressionState | None = None
        self._model: Any = None  # the registered one
        self._watch: DdpWatch | None = None
        self._resume: str | None = None
        self._trial: Any = None

    def begins(self, resume: str | bool | None, trial: Any) -> None:
        """Store the checkpoint and the trial that were passed to ``train()``."""
        if resume is True:
            resume = get_last_checkpoint(self._trainer.args.output_dir)
        self._resume, self._trial = str(resume) if resume else None, trial

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Register on a wrapped model that is new; load the states to resume from."""
        self.on_train_end()
        trainer, model = self._trainer, self._trainer.model_wrapped
        if self._model is not model:
            if self.state is not None:
                self.state.close()
            given = model, self._codec, inner(trainer.optimizer), self._options
            self.state, self._model = attach(*given, **prepared_by(trainer.accelerator)), model
        if self.state is not None:
            if self._resume is not None:
                read(self.state, self.state._engine.comm, self._resume)
            self._watch = DdpWatch(self.state, model)

    def on_save(self, *_: Any, **__: Any) -> None:
        """Write this rank's state to the Trainer's checkpoint, unless that has only the model."""
        if self.state is not None and not self._trainer.args.save_only_model:
            folder = self._trainer._get_output_dir(trial=self._trial)
            name = f"{PREFIX_CHECKPOINT_DIR}-{self._trainer.state.global_step}"
            write(self.state, self.state._engine, Path(folder, name))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Stop watching the optimizers."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
