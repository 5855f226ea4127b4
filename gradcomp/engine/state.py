"""Checkpoints of one model's compression: what a rank needs to go on bit for bit, and whose
state it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradcomp.engine.layouts import Layouts
from gradcomp.memory.saved import check_origin, reshard

STATE_VERSION = 1


def origin(layouts: Layouts) -> dict[str, Any]:
    """Return what must be equal for a state to be of this rank."""
    comm = layouts.comm
    return {
        "version": STATE_VERSION,
        "codec": repr(layouts.codec),
        "transform": repr(layouts.options.advanced.transform),
        "precondition": repr(layouts.options.precondition),
        "strategy": str(layouts.strategy),
        "nodes": repr(layouts.route.nodes),
        "memory_order": repr(
            {layouts.parameters[i].name: order for i, order in layouts.orders.items()} or None
        ),
        "rank": comm.rank,
        "world_size": comm.world_size,
    }


def write(layouts: Layouts, step: int) -> dict[str, Any]:
    """Return the state before step `step`: tensors, numbers and strings only."""
    return {
        **origin(layouts),
        "step": step,
        "loss_scale": layouts.store.loss_scale,
        **layouts.store.state(layouts.names),
    }


def accept(layouts: Layouts, state: dict[str, Any] | Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return this rank's own state, of what may be those of all ranks; ValueError unless it can
    be loaded.
    """
    if isinstance(state, Sequence):
        state = _own(layouts, state)
    check_origin(state, origin(layouts))
    layouts.store.check(state, layouts.names)
    return state


def _own(layouts: Layouts, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return this rank's own state out of those of all ranks, brought to this number of ranks
    where it differs.
    """
    options, comm = layouts.options, layouts.comm
    if options.exchange == "hierarchical":
        raise ValueError(
            "a hierarchical exchange resumes with the state of its own rank, not with a list"
        )
    transform = options.advanced.transform
    place = transform.place if transform is not None else ""
    owns = layouts.store.owner_residuals is not None
    new = reshard(states, comm.rank, comm.world_size, owns_means=owns, place=place)
    if len(states) != comm.world_size:
        new.update(strategy=str(layouts.strategy), nodes=repr(layouts.route.nodes))
    return new
