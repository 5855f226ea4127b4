"""The options in an optimizer's groups: read them, and step with those of another moment."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def read_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return copies of every group's options, parameters left out."""
    return [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def write_options(optimizer: torch.optim.Optimizer, options: list[dict[str, Any]]) -> None:
    """Set groups to options that `read_options` returned; tensors are written in place, options
    made since go.
    """
    for group, saved in zip(optimizer.param_groups, options, strict=True):
        for key in group.keys() - saved.keys() - {"params"}:
            del group[key]
        for key, value in saved.items():
            there = group.get(key)
            if (
                isinstance(value, Tensor)
                and isinstance(there, Tensor)
                and there.shape == value.shape
            ):
                with torch.no_grad():
                    there.copy_(value)
            else:
                group[key] = copy.deepcopy(value)


@contextmanager
def apply_options(
    optimizer: torch.optim.Optimizer, options: list[dict[str, Any]]
) -> Iterator[None]:
    """Have groups hold `options` inside; outside again what they hold now, but for what was
    changed inside.
    """
    groups, now = optimizer.param_groups, read_options(optimizer)
    if _same(now, options) or len(options) != len(groups):
        yield
        return
    write_options(optimizer, options)
    try:
        yield
    finally:
        for group, before, used in zip(groups, now, options, strict=False):
            for key, value in before.items():
                if key in group and key in used and not _same(group[key], used[key]):
                    continue  # set by a hook of the step
                if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value


def _same(a: Any, b: Any) -> bool:
    """Whether two options, or groups of them, are equal."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
