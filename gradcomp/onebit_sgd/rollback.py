"""Put a training back to where it was, bit for bit: weights, optimizer, residuals, random
numbers.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradcomp.onebit_sgd.groups import read_options, write_options


class Checkpoint:
    """What a training holds now, kept in memory; `restore` puts it back as often as asked.

    Kept are parameters and buffers of every module (the tensors themselves and their bits),
    training modes, the optimizer's options and state, the state of `others`, and the generators of
    torch (CPU), Python and NumPy. Gradients are dropped. Memory: one more copy of all of it. An
    average that a `DoubleBuffer` among `others` has under way is applied first.

    Args:
        model: a module, in DDP or not.
        optimizer: of its parameters.
        others: with ``state_dict()`` and ``load_state_dict(state)``.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, others: Sequence[Any]
    ) -> None:
        self._optimizer = optimizer
        self._others = [
            (other, copy.deepcopy(other.state_dict())) for other in others
        ]  # these drain: before the rest
        self._modules = [
            (m, m.training, dict(m._parameters), dict(m._buffers)) for m in model.modules()
        ]
        tensors = {
            id(t): t
            for _, _, p, b in self._modules
            for t in (*p.values(), *b.values())
            if t is not None
        }
        self._tensors = [(t, t.detach().clone()) for t in tensors.values()]
        self._options = read_options(optimizer)
        self._loads = type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict
        if self._loads:  # a split optimizer: it knows which weights its trails belong to
            self._state = copy.deepcopy(optimizer.state_dict())
        else:  # torch's own load_state_dict casts state to its parameter's dtype
            self._entries = [(p, state, _copy_state(state)) for p, state in optimizer.state.items()]
        self._torch, self._python, self._numpy = (
            torch.get_rng_state(),
            random.getstate(),
            np.random.get_state(),
        )

    def restore(self) -> None:
        """Put everything back."""
        with torch.inference_mode(False), torch.no_grad():
            for module, training, parameters, buffers in self._modules:
                module.training = training
                module._parameters.clear()  # what the trial replaced or added goes
                module._parameters.update(parameters)
                module._buffers.clear()
                module._buffers.update(buffers)
            for tensor, bits in self._tensors:
                tensor.copy_(bits)
                tensor.grad = None
            self._restore_optimizer()
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        for other, state in self._others:
            other.load_state_dict(copy.deepcopy(state))

    def _restore_optimizer(self) -> None:
        optimizer = self._optimizer
        if self._loads:
            optimizer.load_state_dict(copy.deepcopy(self._state))
        else:
            optimizer.state.clear()
            for parameter, state, kept in self._entries:
                state.clear()
                state.update(_copy_state(kept))
                optimizer.state[parameter] = state
        write_options(optimizer, self._options)


def _copy_state(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: v.detach().clone() if isinstance(v, Tensor) else copy.deepcopy(v)
        for key, v in state.items()
    }
