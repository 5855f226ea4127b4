"""What gradcomp needs of torch and torch does not promise: every such name is in this file.

torch 2.8 to 2.15 have them all; a torch that has moved one gives a GradcompError with the name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradcomp.errors import GradcompError

FALLBACK_TIMEOUT_S = 300.0  # where a process group does not tell its own
LONGEST_TIMEOUT_S = 1e6  # eleven days; longer ones overflow gloo's clocks


def store_at(prefix: str) -> Any:
    """Return the store over which the ranks of the default process group have met, with keys below `prefix` only."""
    return store_below(_named(dist.distributed_c10d, "_get_default_store")(), prefix)


def store_below(store: Any, prefix: str) -> Any:
    """Return a store with the keys of `store` below `prefix` only."""
    return _named(dist.distributed_c10d, "PrefixStore")(prefix, store)


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


# ---- of DistributedDataParallel and autograd -------------------------------------------------------------------------


def graph_task() -> int:
    """Return the number of the backward pass that runs in this thread, -1 outside of one."""
    return int(_named(torch._C, "_current_graph_task_id")())


def after_backward(callback: Callable[[], None]) -> None:
    """Have the backward pass that runs now call `callback` at its end; what that raises comes out of ``backward()``."""
    _named(torch.autograd.Variable._execution_engine, "queue_callback")(callback)


def bucket_dtypes(model: Any) -> list[str] | None:
    """Return the names, in C++, of the dtypes of the parameters that DDP averages; None where torch does not tell."""
    data: dict[str, Any] = getattr(model, "_get_ddp_logging_data", dict)()
    dtypes = data.get("dtypes")
    return None if dtypes is None else str(dtypes).split(", ")


def name_hook(model: Any, name: str) -> None:
    """Call the communication hook `name` in DDP's logging data."""
    setter = getattr(getattr(model, "logger", None), "_set_comm_hook_name", None)
    if setter is not None:
        setter(name)


def taken_hook(model: Any) -> str:
    """Return what has taken DDP's only communication hook before any user could; "" for none."""
    if getattr(model, "mixed_precision", None) is not None:
        return "mixed_precision= of DistributedDataParallel casts gradients in it; convert the model or use autocast"
    if any(hasattr(p, "_in_backward_optimizers") for p in model.parameters()):
        return "optimizers in backward (_apply_optimizer_in_backward) step in it; step after backward"
    return ""


def joins_by_active_ranks(model: Any) -> bool:
    """Whether DDP is in a `Join` that wants averages over the ranks that still have data."""
    config = getattr(model, "_join_config", None)
    return getattr(config, "enable", False) and not getattr(model, "_divide_by_initial_world_size", True)


# ---- of the profiler -------------------------------------------------------------------------------------------------


def is_profiling() -> bool:
    """Whether a profiler records this thread."""
    return bool(getattr(torch.autograd, "_profiler_enabled", bool)())


def record_until(name: str, future: torch.futures.Future[Any]) -> torch.futures.Future[Any]:
    """Show in a profile that a range `name` goes on until `future` is complete; return a future that ends with it."""
    with torch.profiler.record_function(name) as span:
        ended = getattr(span, "_call_end_callbacks_on_future", None)
        return future if ended is None else ended(future)


def stage_range(name: str) -> Any:
    """Return a context manager that is a range in the profile of its thread, for a fifth of a microsecond without one."""
    fast = getattr(torch._C._profiler, "_RecordFunctionFast", None)
    return contextlib.nullcontext() if fast is None else fast(name)
