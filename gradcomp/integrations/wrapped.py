"""Register on a model that a framework has wrapped in DistributedDataParallel."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradcomp import ddp
from gradcomp.codecs import Codec
from gradcomp.ddp import CompressionState
from gradcomp.engine.options import Options
from gradcomp.errors import UnsupportedTensor


def attach(
    model: nn.Module,
    codec: Codec | str,
    options: Options,
    optimizer: torch.optim.Optimizer | None,
    *,
    ranks: int,
    wrapper: str,
    alone: tuple[str, str],
    hint: str = "",
) -> CompressionState | None:
    """Register on a wrapped model; return None, with a warning, if there is one rank and no DDP.

    Args:
        ranks: that the framework runs.
        wrapper: what returns the wrapped model, for the message of a TypeError.
        alone: as of `warn_alone`.
        hint: the end of that message.
    """
    if isinstance(model, DistributedDataParallel):
        return ddp.register(model, codec, options, optimizer=optimizer)
    if ranks > 1:
        raise TypeError(
            f"model must be what {wrapper} returns, wrapped in DistributedDataParallel; got"
            f" {type(model).__name__}{hint}"
        )
    warn_alone(*alone, stacklevel=5)
    return None


def warn_alone(what: str, remedy: str, *, stacklevel: int = 3) -> None:
    """Warn that a run of one rank compresses nothing."""
    warnings.warn(
        f"gradcomp: {what}: there is nobody to send gradients to, so nothing is compressed;"
        f" {remedy}",
        stacklevel=stacklevel,
    )


def check_device(device: torch.device, what: str, remedy: str) -> None:
    """Raise UnsupportedTensor unless a device is the CPU."""
    if device.type != "cpu":
        raise UnsupportedTensor(
            f"gradcomp packs gradients on the CPU, and {what} {device}: {remedy}"
        )
