"""Ray Train: one call after ``prepare_model``, and checkpoints that include every worker's
residuals.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from torch import nn

from gradcomp.codecs import Codec
from gradcomp.comm.torchdist import group_size
from gradcomp.ddp import CompressionState
from gradcomp.engine.options import Advanced, CommonOptions, takes
from gradcomp.integrations.checkpoints import read, write
from gradcomp.integrations.versions import imported
from gradcomp.integrations.watch import DdpWatch
from gradcomp.integrations.wrapped import attach

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

with imported("ray"):
    import ray.train  # noqa: F401 - checks that it is installed


@takes(CommonOptions)
def register(
    model: nn.Module,
    codec: Codec | str = "auto",
    *,
    optimizer: torch.optim.Optimizer | None = None,
    advanced: Advanced | None = None,
    **common: Unpack[CommonOptions],
) -> CompressionState | None:
    """Compress the gradients of a prepared model. Collective: every worker calls this in its
    training function.

    ::

        model = ray.train.torch.prepare_model(model)
        state = register(model, optimizer=optimizer)

    An optimizer step raises GradcompError if gradcomp has exchanged no gradients since the step
    before.

    Args:
        model: the model that ``prepare_model`` returned.
        codec: codec or name; "auto", the default, chooses by `optimizer`; without one it is
            `Block(8)`.
        optimizer: see `gradcomp.ddp.register`.
        common, advanced: see `gradcomp.ddp.register`.

    Returns:
        The state; None, with a warning, if there is one worker.

    Raises:
        TypeError: a model that is not wrapped in DistributedDataParallel.
        ValueError, PeerMismatch, PeerLost: see `gradcomp.ddp.register`.
    """
    state = attach(
        model,
        codec,
        optimizer,
        {**common, "advanced": advanced},
        ranks=group_size(),
        wrapper="ray.train.torch.prepare_model",
        alone=("Ray Train runs one worker", "ScalingConfig(num_workers=2) or more"),
    )
    if state is not None:
        DdpWatch(state, model)  # lives as long as the model
    return state


def save(state: CompressionState | None, folder: str | os.PathLike[str]) -> None:
    """Write this worker's state to its own file in `folder`. Every worker then reports the folder
    as its checkpoint, and Ray merges the files. Collective, unless `state` has failed or is closed.

    ::

        with tempfile.TemporaryDirectory() as folder:
            if ray.train.get_context().get_world_rank() == 0:
                torch.save({"model": model.module.state_dict(), "optimizer":
                optimizer.state_dict()}, f"{folder}/train.pt")
            save(state, folder)
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))

    Args:
        state: the result of `register`; None writes nothing.
        folder: an existing folder.

    Raises:
        OSError: on every worker: a worker could not write its file.
        PeerLost: "checkpoint"; a worker did not call this.
    """
    if state is not None:
        write(state, state._engine, folder)


def load(state: CompressionState | None, folder: str | os.PathLike[str]) -> bool:
    """Load the states that all workers saved, also those of another number of workers; return
    whether there were any. Collective.

    ::

        checkpoint = ray.train.get_checkpoint()
        if checkpoint:
            with checkpoint.as_directory() as folder:
                ...  # model and optimizer
                load(state, folder)

    Args:
        state: the result of `register`; None reads nothing.
        folder: the folder of the checkpoint.

    Raises:
        ValueError: a file that cannot be read; states of another codec, exchange or model.
        PeerLost: "checkpoint"; a worker did not call this.
    """
    return state is not None and read(state, state._engine.comm, folder)
