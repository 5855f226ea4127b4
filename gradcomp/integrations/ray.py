"""Ray Train: one call after ``prepare_model``, and checkpoints that carry every worker's
residuals.
"""

from __future__ import annotations

import os
import weakref
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
    import ray.train  # noqa: F401 - whether it is there

# models keep their watches alive
_watches: weakref.WeakKeyDictionary[CompressionState, weakref.ref[DdpWatch]] = (
    weakref.WeakKeyDictionary()
)


@takes(CommonOptions)
def register(
    model: nn.Module,
    codec: Codec | str = "ternary",
    *,
    optimizer: torch.optim.Optimizer | None = None,
    advanced: Advanced | None = None,
    **common: Unpack[CommonOptions],
) -> CompressionState | None:
    """Compress the gradients of a prepared model. Called by every worker, in the function that it
    trains with.

    ::

        model = ray.train.torch.prepare_model(model)
        state = register(model, "ternary")

    A step of an optimizer before which gradcomp was not called is a GradcompError.

    Args:
        model: what ``prepare_model`` has returned.
        codec: codec or name; "auto" with `optimizer`.
        optimizer: as `gradcomp.ddp.register` takes it.
        common, advanced: as of `gradcomp.ddp.register`.

    Returns:
        The state; None, with a warning, if there is one worker.

    Raises:
        TypeError: a model that is not wrapped in DistributedDataParallel.
        ValueError, PeerMismatch, PeerLost: as `gradcomp.ddp.register`.
    """
    state = attach(
        model,
        codec,
        optimizer,
        {**common, "advanced": advanced},
        ranks=group_size(),
        wrapper="ray.train.torch.prepare_model",
        alone=("Ray Train runs one worker", "ScalingConfig(num_workers=2) or more"),
        hint=(
            ". For fully_shard there is gradcomp.fsdp.register, for local steps, without"
            " prepare_model, gradcomp.DiLoCo"
        ),
    )
    if state is not None:
        _watches[state] = weakref.ref(DdpWatch(state, model))
    return state


def save(state: CompressionState | None, folder: str | os.PathLike[str]) -> None:
    """Write this worker's state to a file of its own in `folder`, which every worker then reports
    as its checkpoint: Ray puts all files together.

    ::

        with tempfile.TemporaryDirectory() as folder:
            if ray.train.get_context().get_world_rank() == 0:
                torch.save({"model": model.module.state_dict(), "optimizer":
                optimizer.state_dict()}, f"{folder}/train.pt")
            save(state, folder)
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))

    Args:
        state: what `register` returned; None writes nothing.
        folder: exists.
    """
    if state is not None:
        write(state, state._engine.comm, folder)


def load(state: CompressionState | None, folder: str | os.PathLike[str]) -> bool:
    """Go on from what all workers have saved, as many of them or others; return whether there was
    something. Collective.

    ::

        checkpoint = ray.train.get_checkpoint()
        if checkpoint:
            with checkpoint.as_directory() as folder:
                ...  # model and optimizer
                load(state, folder)

    Args:
        state: what `register` returned; None reads nothing.
        folder: of the checkpoint.

    Raises:
        ValueError: a file that cannot be read; states of another codec, exchange or model.
        PeerLost: "checkpoint"; a worker did not call this.
    """
    if state is None or not read(state, state._engine.comm, folder):
        return False
    watch = _watches.get(state, lambda: None)()  # a state of gradcomp.ddp.register has none
    if watch is not None:
        watch.restart()
    return True
