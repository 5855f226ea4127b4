"""States that were saved: checks, made before anything is written by them, and states of one number
of ranks brought to another, so that nothing is lost that the old ranks have left out of averages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradcomp.payload.form import removal
from gradcomp.payload.pieces import ByElements

STEPS = 2**32  # what random numbers and headers can count
PARTS = ("residual", "owner_residual", "transform_state", "second_moment")


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
        fits = is_dense and tensor.shape == torch.Size(shape) and tensor.dtype in dtypes
        if not fits or tensor.is_meta:
            wanted = f"{tuple(shape)} {' or '.join(map(str, dtypes))}"
            got = f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}" if is_dense else tensor
            raise ValueError(f"the {what} of {name!r} must be {wanted}, got {got!s:.100}")
        if not bool(torch.isfinite(tensor.to(stored)).all()):
            raise ValueError(f"the {what} of {name!r} has values that are not finite in {stored}")


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


# ---- other numbers of ranks ----------------------------------------------------------------------


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


def reshard(
    states: Sequence[Mapping[str, Any]], rank: int, world_size: int, *, owns_means: bool, place: str
) -> dict[str, Any]:
    """Return the state of one of `world_size` ranks, made from the states of all ranks of a run.

    Where their number is the same it is the rank's own one. Otherwise each new rank gets the mean
    of the old ranks' residuals: what they have left out of averages so far. Owners' residuals, and
    states of an owner's transform, are joined and cut anew; where new ranks keep no owner's
    residuals these are added to everyone's. States of a local transform become their mean, second
    moments are the same on all ranks. A single rank adds its residuals to its next gradients.

    Args:
        states: from `state_dict` of every rank of one run, at the same step, in any order.
        rank, world_size: of the new run.
        owns_means: whether the new ranks keep owners' residuals.
        place: of the transform whose states are to be brought over, "" without one.

    Raises:
        ValueError: states of different runs or steps, a rank that is missing, a hierarchical
            exchange.
    """
    old = _in_rank_order(states)
    if len(old) == world_size:
        return dict(old[rank])
    residual = _mean(old, "residual")
    owned = _joined(old, "owner_residual")
    if not owns_means:
        for name, tensor in owned.items():
            residual[name] = residual[name] + tensor if name in residual else tensor
        owned = {}

    def share(part: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what this rank owns of whole tensors."""
        owner, out = ByElements(world_size), {}
        for name, tensor in part.items():
            first, last = owner.bounds(tensor.numel(), rank)
            out[name] = tensor[first:last].clone()
        return out

    if place == "owner":
        transformed = share(_joined(old, "transform_state"))
    else:
        transformed = _mean(old, "transform_state")
    return {
        **old[0],
        "rank": rank,
        "world_size": world_size,
        "residual": residual,
        "owner_residual": share(owned),
        "transform_state": transformed,
    }


def _in_rank_order(states: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return states by rank; ValueError unless they are all ranks of one run at one step."""
    for state in states:
        _check_state(state)
    old = sorted(states, key=lambda state: int(state["rank"]))
    ranks = [state["rank"] for state in old]
    if not old or old[0]["world_size"] != len(old) or ranks != list(range(len(old))):
        of = f" of {old[0]['world_size']}" if old else ""
        raise ValueError(
            f"states of ranks {ranks}{of}; one of every rank of the old run is needed, and none of"
            " another run's files"
        )
    for key in sorted(set().union(*old) - {"rank", *PARTS}, key=str):
        found = {repr(state.get(key)) for state in old}
        if len(found) > 1:
            raise ValueError(
                f"these states are not of one run: {key} is {' and '.join(sorted(found))}"
            )
    if old[0]["nodes"] != "()":
        raise ValueError(
            "states of a hierarchical exchange belong to its nodes: resume with the same ones"
        )
    return old


def _check_state(state: Mapping[str, Any]) -> None:
    """Raise ValueError unless a state could be from `Engine.state_dict`."""
    if isinstance(state, Mapping) and "averager" in state:
        raise ValueError("this is a DoubleBuffer's state: pass state['averager']")
    read_numbers(state)
    for key in ("rank", "world_size"):
        if type(state.get(key)) is not int or state[key] < 0:
            raise ValueError(f"this state has {key} {state.get(key)!r}, an integer expected")
    if "nodes" not in state:
        raise ValueError("this state has no 'nodes': it is not from gradcomp's state_dict()")
    for key in PARTS:
        part = state.get(key, {})
        values = part.values() if isinstance(part, Mapping) else [part]
        for value in values:
            if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.dim() != 1:
                raise ValueError(
                    f"this state's {key} holds {type(value).__name__}, flat float32 tensors"
                    " expected"
                )


def _mean(states: Sequence[Mapping[str, Any]], key: str) -> dict[str, Tensor]:
    """Return the mean of all ranks' values, by name; ValueError unless all ranks have the same
    tensors.
    """
    parts = [state.get(key, {}) for state in states]
    for rank, part in enumerate(parts):
        mine, first = ({name: t.numel() for name, t in p.items()} for p in (part, parts[0]))
        if mine != first:
            raise ValueError(
                f"{key} of rank {rank} does not fit that of rank 0: not the same tensors"
            )
    return {name: tensor.float() for name, tensor in mean_by_name(parts).items()}


def _joined(states: Sequence[Mapping[str, Any]], key: str) -> dict[str, Tensor]:
    """Return what ranks own, side by side, by name; ValueError unless every rank has its share."""
    names = dict.fromkeys(name for state in states for name in state.get(key, {}))
    out, nothing = {}, torch.zeros(0)
    for name in names:
        pieces = [state.get(key, {}).get(name, nothing) for state in states]
        out[name] = torch.cat(pieces)
        for rank, piece in enumerate(pieces):
            owned = ByElements(len(states)).numel(out[name].numel(), rank)
            if piece.numel() != owned:
                raise ValueError(
                    f"{key} of {name!r} on rank {rank} has {piece.numel()} values, {owned} expected"
                )
    return {} if all(t.numel() == 0 for t in out.values()) else out
