"""Ray Train: one call after ``prepare_model``, and checkpoints that carry every worker's
residuals.
"""

from __future__ import annotations

import os
import warnings
import weakref
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradcomp import ddp
from gradcomp.codecs import Codec
from gradcomp.comm.torchdist import group_size
from gradcomp.ddp import CompressionState
from gradcomp.engine.options import Options
from gradcomp.errors import UnsupportedTensor
from gradcomp.integrations.called import Watch
from gradcomp.integrations.checkpoints import read, write
from gradcomp.integrations.versions import missing, warn_unless_tried

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    from gradcomp.engine.options import Changes

try:
    import ray.train  # noqa: F401 - whether it is there
except ImportError as error:
    raise missing("ray", error) from error

warn_unless_tried("ray")
_watches: weakref.WeakKeyDictionary[CompressionState, weakref.ref[Watch]] = (
    weakref.WeakKeyDictionary()
)  # the model keeps them


def register(
    model: nn.Module,
    codec: Codec | str = "ternary",
    options: Options | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    **changes: Unpack[Changes],
) -> CompressionState | None:
    """Compress the gradients of a prepared model. Called by every worker, in the function that it
    trains with.

    ::

        model = ray.train.torch.prepare_model(model)
        state = register(model, "ternary")

    A step of an optimizer before which gradcomp was not called is a GradcompError.

    Args:
        model: what ``prepare_model`` has returned, of workers on CPUs.
        codec: codec or name; "auto" with `optimizer`.
        options: see `gradcomp.Options`.
        optimizer: as `gradcomp.ddp.register` takes it.
        changes: fields of `gradcomp.Options` to set.

    Returns:
        The state; None, with a warning, if there is one worker.

    Raises:
        TypeError: a model that is not wrapped in DistributedDataParallel.
        UnsupportedTensor: workers with GPUs.
        ValueError, PeerMismatch, PeerLost: as `gradcomp.ddp.register`.
    """
    devices = {p.device.type for p in model.parameters()} - {"cpu"}
    if devices:
        raise UnsupportedTensor(
            f"gradcomp packs gradients on the CPU, and this model is on {min(devices)}:"
            " ScalingConfig(use_gpu=False)"
        )
    if not isinstance(model, DistributedDataParallel):
        if group_size() > 1:
            raise TypeError(
                "model must be what ray.train.torch.prepare_model returns, wrapped in"
                f" DistributedDataParallel; got {type(model).__name__}. For fully_shard there is"
                " gradcomp.fsdp.compress, for local steps, without prepare_model, gradcomp.DiLoCo"
            )
        warnings.warn(
            "gradcomp: Ray Train runs one worker: there is nobody to send gradients to, so nothing"
            " is compressed; ScalingConfig(num_workers=2) or more",
            stacklevel=2,
        )
        return None
    state = ddp.register(model, codec, options, optimizer=optimizer, **changes)
    _watches[state] = weakref.ref(Watch(state, model, None))
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

    Raises:
        ValueError: a file that cannot be read; states of another codec, exchange or model.
        PeerLost: "checkpoint"; a worker did not call this.
    """
    if state is None or not read(state, state._engine.comm, folder):
        return False
    watch = _watches[state]()
    if watch is not None:
        watch.restart()
    return True
