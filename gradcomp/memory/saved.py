"""Checks of states that were saved, made before anything is written by them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    if type(step) is not int or not 0 <= step < STEPS:
        raise ValueError(
            f"this state has step {step!r}, an integer of at least 0 and below 2^32 expected"
        )
    if type(scale) is not float or not 0 < scale < float("inf"):
        raise ValueError(f"this state has loss_scale {scale!r}, a positive number expected")
    return step, scale


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
    for key, value in wanted.items():
        if key == "codec" and same_codec(state.get(key), str(value)):
            continue
        if key == "memory_order" and state.get(key, "None") != value:
            raise ValueError(
                f"this state has residuals in memory order {state.get(key)}, this model {value}:"
                " give it the memory format (channels_last, say) that it had"
            )
        if state.get(key, "None") != value:
            raise ValueError(
                f"this state has {key} {state.get(key)!r}, {value!r} expected: residuals belong to"
                " one rank (for another world size, load a list of the states of all ranks)"
                f"{removal(state.get(key))}"
            )
