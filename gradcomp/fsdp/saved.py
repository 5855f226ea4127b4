"""Checks of states that were saved, made before anything is allocated or written by them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from gradcomp.memory.saved import check_step, differing_key
from gradcomp.payload.form import removal

STATE_VERSION = 2


def check_state(state: Any, origin: Mapping[str, object], names: Collection[str]) -> None:
    """Check all of one rank's state but the tensors of its residuals (`ModelResiduals.load`).

    Args:
        state: from `FsdpState.state_dict`.
        origin: values that it must have.
        names: parameters that this rank exchanges.

    Raises:
        ValueError: the state cannot be from such a run.
    """
    if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
        raise ValueError(f"not a state of gradcomp.fsdp that this version knows: {state!r}"[:200])
    key = differing_key(state, origin)
    if key is not None:
        raise ValueError(
            f"this state has {key} {state.get(key)!r}, here it is {origin[key]!r}"
            f"{removal(state.get(key))}"
        )
    world, residual = state.get("world_size"), state.get("residual")
    if type(world) is not int or world < 1:
        raise ValueError(f"this state has world_size {world!r}, a positive integer expected")
    by_name = isinstance(residual, dict) and all(isinstance(one, dict) for one in residual.values())
    if not by_name:
        raise ValueError(f"this state has no residuals by rank and name: {residual!r}"[:200])
    _check_steps(state.get("steps"), names)


def _check_steps(given: Any, names: Collection[str]) -> None:
    try:
        steps = dict(given)
    except (TypeError, ValueError):
        steps = None
    if steps is None or len(steps) != len(given):
        said = f"this state's steps must be pairs of name and step, each name once: {given!r}"
        raise ValueError(said[:200])
    for name, step in steps.items():
        check_step(step, f" of {name!r}")
    if steps and names and steps.keys() != set(names):
        odd = min(steps.keys() ^ set(names), key=str)
        raise ValueError(f"this state is of other parameters: {odd!r} is on one side only")


def check_all_of_one_run(states: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError unless states that `check_state` accepts are of one run, at one step."""
    if not states or any(one["world_size"] != states[0]["world_size"] for one in states):
        sizes = sorted({one["world_size"] for one in states})
        raise ValueError(f"states of {sizes} ranks: those of one run are needed")
    if any(one["steps"] != states[0]["steps"] for one in states):
        raise ValueError("states of different steps: those of one run at one step are needed")


def ranks_to_load(saved: Collection[str], old: int, new: int, rank: int) -> range:
    """Return whose residuals a rank takes: its own, or the mean of all where the number of ranks
    has changed from `old` to `new`.

    Raises:
        ValueError: one of them is not among those that were saved.
    """
    wanted = range(rank, rank + 1) if old == new else range(old)
    missing = next((one for one in wanted if str(one) not in saved), None)
    if missing is not None:
        raise ValueError(
            f"residuals of rank {missing} are missing: the run had {old} ranks, this one has {new};"
            " give load_state_dict a list of all ranks' states, or load() a checkpoint of"
            " torch.distributed.checkpoint"
        )
    return wanted
