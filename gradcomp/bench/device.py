"""Devices on which ranks of a benchmark train: the CPU, or an accelerator that they may share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

CPU = "cpu"


def find_device(word: str) -> str:
    """Return the kind of device for "cpu", "auto" or an accelerator such as "cuda".

    Raises:
        ValueError: torch finds no such device, or cannot exchange its tensors.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    there = CPU if found is None else found.type
    kind = there if word == "auto" else word
    if kind not in (CPU, there):
        has = "no accelerator" if found is None else f"{there} and no other accelerator"
        raise ValueError(
            f"--device {word}: torch {torch.__version__} finds {has} here: install a torch that is"
            f" built for {word} and check its driver, or take --device cpu or auto"
        )
    if not backend_of(kind):
        raise ValueError(
            f"--device {word}: torch.distributed has no backend here for tensors on {kind}, with"
            " which DDP starts and fp32 is averaged: take --device cpu"
        )
    return kind


def backend_of(kind: str) -> str:
    """Return the backend of torch's default process group for a kind of device, "" if there is
    none: gloo where it takes such tensors, because NCCL refuses two ranks on one device.
    """
    gloo = dist.Backend.GLOO
    if kind in dist.Backend.backend_capability[gloo]:
        return gloo
    own = dist.Backend.default_device_backend_map.get(kind, gloo)
    return "" if own == gloo else f"{CPU}:{gloo},{kind}:{own}"


def device_of_rank(kind: str, rank: int) -> torch.device:
    """Return the device of a rank, which becomes the current device: ranks take them in turn."""
    if kind == CPU:
        return torch.device(CPU)
    index = rank % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


def moved(values: Any, device: torch.device) -> Any:
    """Return a tensor or a tuple of tensors on a device."""
    if isinstance(values, tuple):
        return tuple(one.to(device) for one in values)
    return values.to(device)
