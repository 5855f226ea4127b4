"""Register on what accelerate has prepared, for accelerate itself and for Transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from gradcomp.codecs import Codec
from gradcomp.ddp import CompressionState
from gradcomp.integrations.wrapped import attach, check_device

_GPU = "accelerate runs on", "Accelerator(cpu=True), TrainingArguments(use_cpu=True)"
_ALONE = (
    "accelerate runs one process",
    "start several with torchrun --nproc-per-node 2 (accelerate launch --cpu starts one)",
)


def attach_prepared(
    accelerator: Any,
    model: nn.Module,
    codec: Codec | str,
    optimizer: Any,
    options: Mapping[str, Any],
) -> CompressionState | None:
    """Do what `gradcomp.integrations.accelerate.register` does, without checkpoints and watch."""
    check_on_cpu(accelerator)
    hook = getattr(accelerator.ddp_handler, "comm_hook", None)
    if getattr(hook, "value", "no") != "no":
        raise ValueError(
            f"comm_hook={hook} of DistributedDataParallelKwargs: DDP takes one communication hook;"
            " leave it out for gradcomp's"
        )
    ranks, wrapper = accelerator.num_processes, "accelerator.prepare(model)"
    given = model, codec, inner(optimizer), options
    return attach(*given, ranks=ranks, wrapper=wrapper, alone=_ALONE, stacklevel=6)


def inner(optimizer: Any) -> Any:
    """Return torch's own optimizer of one that accelerate has prepared."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def check_on_cpu(accelerator: Any) -> None:
    """Raise UnsupportedTensor unless an accelerator is on the CPU."""
    check_device(accelerator.device, *_GPU)
