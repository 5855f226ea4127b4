"""Put a training back to where it was, bit for bit: weights, optimizer, residuals, random
numbers.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import nn

from gradcomp.errors import GradcompError
from gradcomp.onebit_sgd.groups import read_options, write_options


class Checkpoint:
    """What a training holds now, in memory. At the end of each ``with`` block it is put back.

    It has parameters and buffers of every module (the tensors themselves and their bits), training
    modes, the optimizer's options and state, the state of `others`, and the generators of torch
    (CPU), Python and NumPy. Gradients become None. Memory: one more copy of all of it. An average
    that a `DoubleBuffer` among `others` has under way is applied first.

    Args:
        model: a module, in DDP or not.
        optimizer: of its parameters.
        others: with ``state_dict()`` and ``load_state_dict(state)``.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, others: Sequence[Any]
    ) -> None:
        # first: a buffer among them drains
        self._others = [(other, copy.deepcopy(other.state_dict())) for other in others]
        self._modules = [
            (m, m.training, dict(m._parameters), dict(m._buffers)) for m in model.modules()
        ]
        tensors = [*model.parameters(), *model.buffers()]
        self._tensors = [(t, t.detach().clone()) for t in tensors]
        self._optimizer, self._options = optimizer, read_options(optimizer)
        # A split optimizer loads itself: it knows which weights its trails belong to. torch's own
        # load_state_dict casts state to its parameter's dtype.
        self._loads = type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict
        self._state: Any = (
            copy.deepcopy(optimizer.state_dict())
            if self._loads
            else [(p, state, copy.deepcopy(state)) for p, state in optimizer.state.items()]
        )
        self._generators = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def __enter__(self) -> None:
        """Do nothing: what counts is what was held when this was made."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # what ended the block may have ended an exchange, which has raised that already
        with suppress(*([GradcompError] if kind is not None else [])):
            self._restore()

    def _restore(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for module, training, parameters, buffers in self._modules:
                module.training = training
                for there, kept in ((module._parameters, parameters), (module._buffers, buffers)):
                    there.clear()  # also of what was replaced or added
                    there.update(kept)  # type: ignore[arg-type]
            for tensor, bits in self._tensors:
                tensor.copy_(bits)
                tensor.grad = None
            if self._loads:
                self._optimizer.load_state_dict(copy.deepcopy(self._state))
            else:
                self._optimizer.state.clear()
                for parameter, state, kept in self._state:
                    state.clear()
                    state.update(copy.deepcopy(kept))
                    self._optimizer.state[parameter] = state
            write_options(self._optimizer, self._options)
        torch.set_rng_state(self._generators[0])
        random.setstate(self._generators[1])
        np.random.set_state(self._generators[2])
        for other, state in self._others:
            other.load_state_dict(copy.deepcopy(state))
