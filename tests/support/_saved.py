"""What tests look at in a saved state, and how they save and damage one."""

import copy
import io

import numpy as np
import torch
from torch.utils._pytree import tree_map

LEFT_OUT = object()


def parts_of(state):
    """Return the tensors of a state of one rank, by part and name."""
    (own,) = state["ranks"].values()
    return {k: v for k, v in (state["replicated"] | own).items() if k != "tensors"}


def bits_of(value):
    """Return everything in nested containers, tensors as their bytes."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        return str(value.dtype), tuple(value.shape), raw
    if isinstance(value, np.ndarray):
        return value.tobytes()
    return tree_map(bits_of, value) if isinstance(value, (dict, list, tuple)) else value


def saved_and_loaded(value, weights_only=True):
    """Return what torch.load reads of what torch.save has written."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def with_value(state, path, value):
    """Return a copy of a nested state with another value at a path, or without it."""
    state = copy.deepcopy(state)
    place = state
    for key in path[:-1]:
        place = place[key]
    if value is LEFT_OUT:
        del place[path[-1]]
    else:
        place[path[-1]] = value(place[path[-1]]) if callable(value) else value
    return state


def paths_of(state, here=()):
    """Yield the path of every value of a nested state."""
    indices = range(len(state)) if isinstance(state, list) else ()
    for key in state if isinstance(state, dict) else indices:
        yield (*here, key)
        yield from paths_of(state[key], (*here, key))
