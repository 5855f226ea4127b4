"""Put a training back to where it was, bit for bit: weights, optimizer, residuals, random
numbers.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import nn

from gradcomp.errors import GradcompError
from gradcomp.onebit_sgd.groups import read_options, write_options


@contextmanager
def rolled_back(
    model: nn.Module, optimizer: torch.optim.Optimizer, others: Sequence[Any]
) -> Iterator[None]:
    """Put back at the end of the block what a training held at its start, from memory.

    That is: parameters and buffers of every module (the tensors themselves and their bits),
    training modes, the optimizer's options and state, the state of `others`, and the generators of
    torch (CPU), Python and NumPy. Gradients become None. Memory: one more copy of all of it. An
    average that a `DoubleBuffer` among `others` has under way is applied first.

    Args:
        model: a module, in DDP or not.
        optimizer: of its parameters.
        others: with ``state_dict()`` and ``load_state_dict(state)``.
    """
    states = [copy.deepcopy(other.state_dict()) for other in others]  # first: a buffer drains
    modules = [(m, m.training, dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    tensors = [(t, t.detach().clone()) for t in (*model.parameters(), *model.buffers())]
    options = read_options(optimizer)
    # A split optimizer loads itself: it knows which weights its trails belong to. torch's own
    # load_state_dict casts state to its parameter's dtype, so here the tensors are put back.
    loads = type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict
    state: Any = optimizer.state_dict() if loads else list(optimizer.state.items())
    kept: Any = copy.deepcopy(state if loads else [held for _, held in state])
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def restore() -> None:
        with torch.inference_mode(False), torch.no_grad():
            for module, training, parameters, buffers in modules:
                module.training = training
                for there, held in ((module._parameters, parameters), (module._buffers, buffers)):
                    there.clear()  # also of what was replaced or added
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
        torch.set_rng_state(generators[0])
        random.setstate(generators[1])
        np.random.set_state(generators[2])
        for other, held in zip(others, states, strict=True):
            other.load_state_dict(held)

    try:
        yield
    except BaseException:
        # what ended the block may have ended an exchange, which has raised that already
        with suppress(GradcompError):
            restore()
        raise
    restore()
