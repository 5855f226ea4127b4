"""Registration on a model that a framework has wrapped in DistributedDataParallel."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradcomp import ddp
from gradcomp.codecs import Codec
from gradcomp.ddp import CompressionState
from gradcomp.engine.options import Options


def attach(
    model: nn.Module,
    codec: Codec | str,
    optimizer: torch.optim.Optimizer | None,
    options: Mapping[str, Any],
    *,
    ranks: int,
    wrapper: str,
    alone: tuple[str, str],
) -> CompressionState | None:
    """Register on a wrapped model; return None, with a warning, if there is one rank and no DDP.

    `wrapper` names the function that returns the wrapped model; `alone` is for `warn_alone`.

    Raises:
        TypeError: several ranks, and a model that is not wrapped in DistributedDataParallel.
        ValueError, PeerMismatch, PeerLost: see `gradcomp.ddp.register`.
    """
    Options(**options)  # checks the values in a run of one rank, too
    if isinstance(model, DistributedDataParallel):
        return ddp.register(model, codec, optimizer=optimizer, **options)
    if ranks > 1:
        raise TypeError(
            f"model must be what {wrapper} returns, wrapped in DistributedDataParallel; got"
            f" {type(model).__name__}. For fully_shard there is gradcomp.fsdp.register, for local"
            " steps of a plain module gradcomp.DiLoCo"
        )
    warn_alone(*alone, stacklevel=5)  # the call of the integration's `register`
    return None


def prepared_by(accelerator: Any) -> dict[str, Any]:
    """Return the last three arguments of `attach` for a model that accelerate has prepared, for
    accelerate itself and for Transformers.

    Raises:
        ValueError: accelerate has registered a communication hook.
    """
    hook = getattr(accelerator.ddp_handler, "comm_hook", None)
    if getattr(hook, "value", "no") != "no":
        raise ValueError(
            f"comm_hook={hook} of DistributedDataParallelKwargs: DDP takes one communication hook;"
            " leave it out for gradcomp's"
        )
    remedy = "start several with torchrun --nproc-per-node 2 (accelerate launch --cpu starts one)"
    return {
        "ranks": accelerator.num_processes,
        "wrapper": "accelerator.prepare(model)",
        "alone": ("accelerate runs one process", remedy),
    }


def inner(optimizer: Any) -> Any:
    """Return the torch optimizer (or optimizers) that accelerate has wrapped."""
    from accelerate.optimizer import AcceleratedOptimizer

    if isinstance(optimizer, (list, tuple)):
        return [inner(one) for one in optimizer]
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def warn_alone(what: str, remedy: str, *, stacklevel: int = 3) -> None:
    """Warn that a run of one rank compresses nothing."""
    warnings.warn(
        f"gradcomp: {what}: world size is 1, so nothing is compressed; {remedy}",
        stacklevel=stacklevel,
    )
