"""What gradcomp needs of torch.distributed and torch does not promise: every such name is in this file.

torch 2.8 to 2.15 have them all; a torch that has moved one gives a GradcompError with the name.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradcomp.errors import GradcompError

FALLBACK_TIMEOUT_S = 300.0  # where a process group does not tell its own
LONGEST_TIMEOUT_S = 1e6  # eleven days; longer ones overflow gloo's clocks


def store_at(place: str) -> Any:
    """Return the store over which the ranks of the default process group have met, with keys below `place` only."""
    return store_below(_named(dist.distributed_c10d, "_get_default_store")(), place)


def store_below(store: Any, place: str) -> Any:
    """Return a store with the keys of `store` below `place` only."""
    return _named(dist.distributed_c10d, "PrefixStore")(place, store)


def group_timeout_s(process_group: Any) -> float:
    """Return how long torch's own collectives on a process group wait for a peer, in seconds."""
    for device in ("cpu", "cuda"):
        try:
            timeout: timedelta = process_group._get_backend(torch.device(device)).options._timeout
            return min(timeout.total_seconds(), LONGEST_TIMEOUT_S)
        except (AttributeError, RuntimeError):
            continue
    return FALLBACK_TIMEOUT_S


def make_gloo(store: Any, rank: int, world_size: int, connect_s: float, timeout_s: float) -> Any:
    """Connect the ranks of `store` with each other; collectives on the result fail after `timeout_s`.

    The result is no process group that torch knows of: dropping it closes its sockets and ends its threads.

    Raises:
        RuntimeError: a rank did not connect within `connect_s`.
    """
    group = _named(dist, "ProcessGroupGloo")(store, rank, world_size, timedelta(seconds=connect_s))
    _named(group, "_set_default_timeout")(timedelta(seconds=min(timeout_s, LONGEST_TIMEOUT_S)))
    return group


def start_max(group: Any, values: torch.Tensor) -> Any:
    """Begin an all_reduce with MAX in place, on a group of `make_gloo`."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    return _named(group, "allreduce")([values], options)


def start_all_gather(group: Any, recv: torch.Tensor, send: torch.Tensor) -> Any:
    """Begin to gather `send` of all ranks into `recv`, on a group of `make_gloo`."""
    return _named(group, "_allgather_base")(recv, send)


def start_all_to_all(
    group: Any, recv: torch.Tensor, send: torch.Tensor, recv_counts: list[int], send_counts: list[int]
) -> Any:
    """Begin an all_to_all of runs of the first dimension, on a group of `make_gloo`."""
    return _named(group, "alltoall_base")(recv, send, recv_counts, send_counts)


def _named(where: Any, name: str) -> Any:
    try:
        return getattr(where, name)
    except AttributeError:
        raise GradcompError(
            f"torch {torch.__version__} has no {where.__name__ if hasattr(where, '__name__') else type(where).__name__}"
            f".{name}, which gradcomp needs: take a version that gradcomp was tried with (docs/reference/api.md)"
        ) from None
