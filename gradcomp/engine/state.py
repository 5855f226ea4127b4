"""State dicts of one model's compression, from which a rank resumes bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gradcomp.engine.guard import check_state
from gradcomp.engine.layouts import Layouts
from gradcomp.memory.saved import Parts, Saved, reshard
from gradcomp.memory.saved import write as write_parts


def origin(layouts: Layouts, entry: Mapping[str, object]) -> dict[str, object]:
    """Return the settings that must be the same when a state is saved and when it is loaded;
    `entry` are those of the entry point, such as its kind.
    """
    return {
        **entry,
        "codec": repr(layouts.codec),
        "transform": repr(layouts.options.advanced.transform),
        "precondition": repr(layouts.options.precondition),
        "strategy": str(layouts.strategy),
        "nodes": repr(layouts.route.nodes),
        "memory_order": repr(
            {layouts.parameters[i].name: order for i, order in layouts.orders.items()} or None
        ),
    }


def write(
    layouts: Layouts, entry: Mapping[str, object], step: int, **extra: object
) -> dict[str, Any]:
    """Return this rank's state dict; `step` is the next step, `extra` is the same on all ranks."""
    own = layouts.store.state(layouts.names)
    moments = own.pop("second_moment")
    return write_parts(
        origin(layouts, entry),
        layouts.comm.rank,
        layouts.comm.world_size,
        step,
        own,
        loss_scale=layouts.store.loss_scale,
        replicated={"second_moment": moments},
        **extra,
    )


class Accepted(NamedTuple):
    """A checked state from which an engine resumes, resharded for this rank and world size;
    `guard` is for `gradcomp.engine.guard.Guard.load`.
    """

    step: int
    loss_scale: float
    parts: Parts
    guard: dict[str, int] | None


def accept(layouts: Layouts, entry: Mapping[str, object], given: object) -> Accepted:
    """Check this rank's state dict, or those of all ranks, and return what this rank resumes from.

    Raises:
        ValueError: the state does not fit this rank, model or its settings.
    """
    saved, wanted, comm = Saved.of(given), origin(layouts, entry), layouts.comm
    if saved.world_size == comm.world_size:
        saved.check_origin(wanted)
        (own,) = saved.of_ranks(comm.rank, comm.world_size)
    else:
        if layouts.options.exchange == "hierarchical" or saved.origin.get("nodes") != "()":
            raise ValueError(
                "the state of a hierarchical exchange belongs to its nodes: resume with the same"
                f" ones ({saved.world_size} ranks then, {comm.world_size} now)"
            )
        # these depend on the number of ranks
        kept = {key: saved.origin.get(key) for key in ("strategy", "nodes")}
        saved.check_origin(wanted | kept)
        transform = layouts.options.advanced.transform
        trained = [p for p in layouts.parameters if p.index in layouts.trained]
        compressed = {p.name: p.numel for p in trained if p.compressed}
        own = reshard(
            list(saved.of_ranks(comm.rank, comm.world_size)),
            comm.rank,
            comm.world_size,
            {
                "residual": compressed,
                "owner_residual": compressed,
                "transform_state": {p.name: p.numel for p in trained},
            },
            owns_means=layouts.store.owner_residuals is not None,
            place=transform.place if transform is not None else "",
        )
    parts = {**own, **saved.replicated}
    layouts.store.check(parts, layouts.names)
    guard = check_state(saved.extra.get("guard"))
    if saved.world_size != comm.world_size:
        guard = None  # the time of a step depends on the number of ranks
    return Accepted(saved.step, saved.loss_scale, parts, guard)
