"""Checks of states that were saved, made before anything is written by them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradcomp.payload.form import removal

STEPS = 2**32  # what random numbers and headers can count


def read_numbers(state: Mapping[str, Any]) -> tuple[int, float]:
    """Return step and loss scale of a state; ValueError for anything that `Engine.state_dict`
    does not make.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"a state is a dictionary, got {type(state).__name__}")  # noqa: TRY004
    missing = {"step", "loss_scale", "residual", "owner_residual"} - state.keys()
    if missing:
        raise ValueError(
            f"this state has no {min(missing)!r}: it is not from gradcomp's state_dict()"
        )
    step, scale = state["step"], state["loss_scale"]
    check_step(step)
    if type(scale) is not float or not 0 < scale < float("inf"):
        raise ValueError(f"this state has loss_scale {scale!r}, a positive number expected")
    return step, scale


def check_step(step: object, of: str = "") -> None:
    """Raise ValueError for what is no number of steps, `of` a parameter, say."""
    if type(step) is not int or not 0 <= step < STEPS:
        raise ValueError(
            f"this state has step {step!r}{of}, an integer of at least 0 and below 2^32 expected"
        )


def check_tensors(
    state: object,
    shapes: Mapping[str, Sequence[int]],
    what: str,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    stored: torch.dtype = torch.float32,
) -> None:
    """Raise ValueError unless a state has a tensor for each name.

    Args:
        state: by name.
        shapes: which tensors are expected.
        what: they are, for messages.
        dtypes: which they may have.
        stored: dtype in which they are kept, and must be finite.
    """
    if not isinstance(state, Mapping):
        raise ValueError(  # noqa: TRY004
            f"{what}s are a dictionary by parameter name, got {type(state).__name__}"
        )
    if state.keys() != shapes.keys():
        odd = min(state.keys() ^ shapes.keys(), key=str)
        raise ValueError(f"{what}s do not fit this model and codec: {odd!r} is on one side only")
    for name, shape in shapes.items():
        tensor = state[name]
        is_dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided
        if not is_dense or tensor.shape != torch.Size(shape):
            got = f"one of {tuple(tensor.shape)}" if is_dense else repr(tensor)
            said = f"the {what} of {name!r} must be a tensor of {tuple(shape)}, got {got}"
            raise ValueError(said[:200])
        if tensor.dtype not in dtypes or tensor.is_meta:
            expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ValueError(
                f"the {what} of {name!r} is {tensor.dtype} on {tensor.device}; {expected} expected"
            )
        if not bool(torch.isfinite(tensor.to(stored)).all()):
            raise ValueError(f"the {what} of {name!r} has values that are not finite in {stored}")


def mean_by_name(states: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the means of several ranks' tensors, float64; they have the same names and shapes."""
    total: dict[str, Tensor] = {}
    count = 0
    for state in states:
        count += 1
        for name, tensor in state.items():
            if name in total:
                total[name].add_(tensor)
            else:
                total[name] = tensor.to(torch.float64, copy=True)
    return {name: tensor.div_(count) for name, tensor in total.items()}


def differing_key(state: Mapping[str, Any], wanted: Mapping[str, object]) -> str | None:
    """Return the first key whose `wanted` value a state does not have."""
    for key, value in wanted.items():
        if key == "codec" and same_codec(state.get(key), str(value)):
            continue
        if state.get(key, "None") != value:
            return key
    return None


def same_codec(saved: object, codec: str) -> bool:
    """Whether a saved codec's repr is this one; one from before ``residual_decay`` had a decay
    of 1, or no residuals.
    """
    return saved in (
        codec,
        codec.replace(", residual_decay=1.0", ""),
        codec.replace(", residual_decay=0.0", ""),
    )


def check_origin(state: Mapping[str, Any], wanted: Mapping[str, object]) -> None:
    """Raise ValueError unless a state has the `wanted` values, and was made by a `state_dict` at
    all.
    """
    read_numbers(state)
    key = differing_key(state, wanted)
    if key == "memory_order":
        raise ValueError(
            f"this state has residuals in memory order {state.get(key)}, this model {wanted[key]}:"
            " give it the memory format (channels_last, say) that it had"
        )
    if key is not None:
        raise ValueError(
            f"this state has {key} {state.get(key)!r}, {wanted[key]!r} expected: residuals belong"
            " to one rank (for another world size, load a list of the states of all ranks)"
            f"{removal(state.get(key))}"
        )
