"""The modules of a model that `fully_shard` has wrapped, and the state that compresses each."""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from gradcomp.comm import torch_private
from gradcomp.kernels import check_device

# the `FsdpState` that compresses the gradients of each FSDP module
_owners: MutableMapping[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def sharded_modules(model: nn.Module) -> list[torch_private.Sharded]:
    """Return the modules that `fully_shard` has wrapped; TypeError if there are none."""
    sharded = torch_private.sharded_modules(model)
    if not sharded:
        kinds = {type(module).__name__ for module in model.modules()}
        first = (
            "FullyShardedDataParallel is FSDP1: wrap with"
            if "FullyShardedDataParallel" in kinds
            else "no module of this model is wrapped by"
        )
        raise TypeError(
            f"{first} torch.distributed.fsdp.fully_shard; for DDP there is gradcomp.ddp.register"
        )
    devices = {p.device for one in sharded for p in one.parameters}
    for device in devices - {torch.device("meta")}:
        check_device(device, "the model")
    return sharded


def owner_of(module: nn.Module) -> Any:
    """Return the state that compresses the gradients of a module, None if there is none."""
    return _owners[module]() if module in _owners else None


def claim(sharded: Sequence[torch_private.Sharded], state: Any) -> None:
    """Register `state` for these modules; ValueError if another state is registered."""
    for one in sharded:
        owner = owner_of(one.module)
        if owner is not None:
            raise ValueError(
                f"gradcomp.fsdp.register has been called for this model"
                f" ({type(one.module).__name__}) before, with codec {owner.codec!r}: close() the"
                " state that it returned first"
            )
    for one in sharded:
        _owners[one.module] = weakref.ref(state)


def release(state: Any) -> None:
    """Undo `claim` for a state."""
    for module in [module for module, owner in _owners.items() if owner() is state]:
        del _owners[module]
