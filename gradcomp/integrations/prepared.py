"""What accelerate has prepared, for whoever trains with it: registered on, and watched."""

from __future__ import annotations

import warnings
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradcomp import ddp
from gradcomp.codecs import Codec
from gradcomp.ddp import CompressionState
from gradcomp.engine.options import Options
from gradcomp.errors import UnsupportedTensor
from gradcomp.integrations.called import Watch


def attach(
    accelerator: Any, model: nn.Module, codec: Codec | str, options: Options, optimizer: Any
) -> CompressionState | None:
    """As `gradcomp.integrations.accelerate.register`, but for checkpoints and the watch on
    steps.
    """
    check_device(accelerator)
    if not isinstance(model, DistributedDataParallel):
        if accelerator.num_processes > 1:
            raise TypeError(
                "model must be what accelerator.prepare(model) returns, wrapped in"
                f" DistributedDataParallel; got {type(model).__name__}"
            )
        warnings.warn(
            "gradcomp: accelerate runs one process: there is nobody to send gradients to, so"
            " nothing is compressed; start several with torchrun --nproc-per-node 2 (accelerate"
            " launch --cpu starts one)",
            stacklevel=3,
        )
        return None
    hook = getattr(accelerator.ddp_handler, "comm_hook", None)
    if getattr(hook, "value", "no") != "no":
        raise ValueError(
            f"comm_hook={hook} of DistributedDataParallelKwargs: DDP takes one communication hook;"
            " leave it out for gradcomp's"
        )
    return ddp.register(model, codec, options, optimizer=inner(optimizer))


def watch(accelerator: Any, model: Any, state: CompressionState) -> Watch:
    """Watch the prepared optimizers of a model; warn if there is none."""
    mine = {id(p) for p in model.parameters()}
    watched = [
        one
        for one in map(inner, accelerator._optimizers)
        if any(id(p) in mine for group in one.param_groups for p in group["params"])
    ]
    if not watched:
        warnings.warn(
            "gradcomp: no optimizer of this model was prepared yet, so steps without averaged"
            " gradients go unnoticed; prepare it before register",
            stacklevel=3,
        )
    return Watch(state, model, watched)


def inner(optimizer: Any) -> Any:
    """Return torch's own optimizer of one that accelerate has prepared."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def check_device(accelerator: Any) -> None:
    """Raise UnsupportedTensor unless an accelerator is on the CPU."""
    if accelerator.device.type != "cpu":
        raise UnsupportedTensor(
            f"gradcomp packs gradients on the CPU, and accelerate runs on {accelerator.device}:"
            " Accelerator(cpu=True), TrainingArguments(use_cpu=True)"
        )
