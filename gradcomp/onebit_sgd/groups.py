"""The options in an optimizer's groups: read them, and step with those of another moment."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Options = list[dict[str, Any]]


def read_options(optimizer: torch.optim.Optimizer) -> Options:
    """Return copies of every group's options, without the parameters."""
    return [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def write_options(optimizer: torch.optim.Optimizer, options: Options) -> None:
    """Set the groups to what `read_options` returned; options added since are deleted."""
    for group, saved in zip(optimizer.param_groups, options, strict=True):
        for key in group.keys() - saved.keys() - {"params"}:
            del group[key]
        for key, value in saved.items():
            _set(group, key, value)


@contextmanager
def apply_options(optimizer: torch.optim.Optimizer, options: Options) -> Iterator[None]:
    """Give the groups `options` inside, and what they have now afterwards, except for what a hook
    of the step has changed. With another number of groups than then, change nothing.
    """
    now = read_options(optimizer)
    if len(options) == len(now):
        write_options(optimizer, options)
    try:
        yield
    finally:
        for group, before, used in zip(optimizer.param_groups, now, options, strict=False):
            for key, value in before.items():
                if key not in group or key not in used or _same(group[key], used[key]):
                    _set(group, key, value)


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    """Set one option; write to a tensor in place, since schedulers and graphs hold it."""
    there = group.get(key)
    if isinstance(value, Tensor) and isinstance(there, Tensor) and there.shape == value.shape:
        with torch.no_grad():
            there.copy_(value)
    else:
        group[key] = copy.deepcopy(value)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    return bool(a == b)
