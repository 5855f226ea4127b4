"""Roll back training bit for bit: the options of an optimizer's groups alone, or weights,
optimizer, residuals and random number generators.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradcomp.errors import GradcompError

GroupOptions = list[dict[str, Any]]


def read_options(optimizer: torch.optim.Optimizer) -> GroupOptions:
    """Return a copy of every group's options, without the parameters."""
    return [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def write_options(optimizer: torch.optim.Optimizer, options: GroupOptions) -> None:
    """Restore the options that `read_options` returned; options added since are deleted."""
    for group, saved in zip(optimizer.param_groups, options, strict=True):
        for key in group.keys() - saved.keys() - {"params"}:
            del group[key]
        for key, value in saved.items():
            _set(group, key, value)


@contextmanager
def apply_options(
    optimizer: torch.optim.Optimizer, options: GroupOptions, later: GroupOptions
) -> Iterator[None]:
    """Set the groups to `options` inside the block, and restore their options afterwards, except
    for those that the step or a hook of it has changed, such as a count of steps. These are written
    to `later`, too, the options of the next block. If the number of groups differs, `options` are
    ignored.
    """
    now = read_options(optimizer)
    if len(options) == len(now):
        write_options(optimizer, options)
    try:
        yield
    finally:
        groups = optimizer.param_groups
        for group, used, following in zip(groups, options, later, strict=False):
            for key in group.keys() - {"params"}:
                if key not in used or not _same(group[key], used[key]):
                    following[key] = copy.deepcopy(group[key])
        for group, before, used in zip(groups, now, options, strict=False):
            for key, value in before.items():
                if key not in group or key not in used or _same(group[key], used[key]):
                    _set(group, key, value)


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    """Set one option; a tensor is written in place, since schedulers and graphs refer to it."""
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


@contextmanager
def rolled_back(
    model: nn.Module, optimizer: torch.optim.Optimizer, others: Sequence[Any]
) -> Iterator[None]:
    """Roll back training at the end of the block to its state at the start, from a copy in memory.

    This restores parameters and buffers of every module (the tensor objects and their bits),
    training modes, the optimizer's options and state, the state of `others`, and the random number
    generators of torch (CPU and the model's devices), Python and NumPy. Gradients become None. The
    copy needs as much memory as all of these. If a `DoubleBuffer` is among `others`, it drains at
    the start. After an exception in the block, a GradcompError of the roll back is suppressed.
    """
    states = [copy.deepcopy(other.state_dict()) for other in others]  # first: this drains a buffer
    modules = [(m, m.training, dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    tensors = [(t, t.detach().clone()) for t in (*model.parameters(), *model.buffers())]
    options = read_options(optimizer)
    # A split optimizer must load its own state, since it checks the trails against the weights.
    # torch's load_state_dict casts state to the parameter's dtype, so tensors are restored instead.
    loads = type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict
    state: Any = optimizer.state_dict() if loads else list(optimizer.state.items())
    kept: Any = copy.deepcopy(state if loads else [held for _, held in state])
    drawn, drawn_by_numpy = random.getstate(), np.random.get_state()
    devices = {torch.device("cpu"), *(tensor.device for tensor, _ in tensors)}

    def restore() -> None:
        with torch.inference_mode(False), torch.no_grad():
            for module, training, parameters, buffers in modules:
                module.training = training
                for there, held in ((module._parameters, parameters), (module._buffers, buffers)):
                    there.clear()  # tensors may have been replaced or added
                    there.update(held)  # type: ignore[arg-type]
            for tensor, bits in tensors:
                tensor.copy_(bits)
                tensor.grad = None
            if loads:
                optimizer.load_state_dict(kept)
            else:
                optimizer.state.clear()
                for (parameter, own), held in zip(state, kept, strict=True):
                    own.clear()
                    own.update(held)
                    optimizer.state[parameter] = own
            write_options(optimizer, options)
        random.setstate(drawn)
        np.random.set_state(drawn_by_numpy)
        for other, held in zip(others, states, strict=True):
            other.load_state_dict(held)

    try:
        with ExitStack() as generators:
            for device in devices:  # fork_rng restores the CPU's generator, too
                draws = hasattr(getattr(torch, device.type, None), "get_rng_state")
                generators.enter_context(
                    torch.random.fork_rng([device] if draws else [], device_type=device.type)
                )
            yield
    except BaseException:
        # the exception may come from a failed exchange, whose error restore() would raise again
        with suppress(GradcompError):
            restore()
        raise
    restore()
