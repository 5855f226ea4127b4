"""Checkpoints of one number of ranks brought to another: nothing that the old ranks have left
out of averages is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradcomp.memory.saved import mean_by_name, read_numbers
from gradcomp.memory.store import PARTS
from gradcomp.payload.pieces import ByElements


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
    for key in (
        "version",
        "codec",
        "strategy",
        "nodes",
        "world_size",
        "step",
        "loss_scale",
        "transform",
        "precondition",
        "memory_order",
    ):
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
