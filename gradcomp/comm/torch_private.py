"""All private names of torch that gradcomp uses.

torch 2.8 to 2.15 have all of them. A torch version without one raises GradcompError with the name.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gradcomp.errors import GradcompError

# (numel, dtype, device) -> uninitialised flat tensor
Allocate = Callable[[int, torch.dtype, torch.device], torch.Tensor]

FALLBACK_TIMEOUT_S = 300.0  # for a process group whose timeout cannot be read
LONGEST_TIMEOUT_S = 1e6  # eleven days; longer ones overflow gloo's clocks


def default_store() -> Any:
    """Return the store of the default process group."""
    return _named(dist.distributed_c10d, "_get_default_store")()


def store_below(store: Any, prefix: str) -> Any:
    """Return a view of `store` that adds `prefix` to every key."""
    return _named(dist.distributed_c10d, "PrefixStore")(prefix, store)


def _store_sockets(store: Any) -> Iterator[socket.socket]:
    """Yield the connections of this process with the host of a TCPStore; none outside Linux."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    port = getattr(store, "port", None)
    if port is None or not os.path.isdir("/proc/self/fd"):
        return
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                peer = one.getpeername()
                if one.family in (socket.AF_INET, socket.AF_INET6) and peer[1] == port:
                    yield one


def store_is_gone(store: Any) -> bool:
    """Return whether the host of a store is known to have closed its connection."""
    for one in _store_sockets(store):
        try:
            if not one.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                return True
        except BlockingIOError:
            continue
        except OSError:
            return True
    return False


def limit_store(store: Any, seconds: float) -> None:
    """Make later calls of a store fail if its host does not answer within `seconds`."""
    for one in _store_sockets(store):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), 0))


def leave_store(store: Any) -> None:
    """Close the connections with the host of a store. Current and later calls fail."""
    for one in _store_sockets(store):
        one.shutdown(socket.SHUT_RDWR)


def group_timeout_s(process_group: Any) -> float:
    """Return the timeout of torch's own collectives on a process group, in seconds."""
    for device in ("cpu", "cuda"):
        try:
            timeout: timedelta = process_group._get_backend(torch.device(device)).options._timeout
            return min(timeout.total_seconds(), LONGEST_TIMEOUT_S)
        except (AttributeError, RuntimeError):
            continue
    return FALLBACK_TIMEOUT_S


def default_timeout_s() -> float:
    """Return the default timeout of torch's collectives over gloo, in seconds."""
    seconds: float = _named(dist.constants, "default_pg_timeout").total_seconds()
    return seconds


def make_gloo(store: Any, rank: int, world_size: int, connect_s: float, timeout_s: float) -> Any:
    """Connect the ranks of `store` and return a gloo group with timeout `timeout_s` (seconds).

    The group is not registered with torch.distributed; deleting it closes its sockets and ends its
    threads. Raises RuntimeError if a rank did not connect within `connect_s` seconds.
    """
    group = _named(dist, "ProcessGroupGloo")(store, rank, world_size, timedelta(seconds=connect_s))
    _named(group, "_set_default_timeout")(timedelta(seconds=min(timeout_s, LONGEST_TIMEOUT_S)))
    return group


def start_max(group: Any, values: torch.Tensor) -> Any:
    """Start an in-place all_reduce with MAX on a group of `make_gloo`."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    return _named(group, "allreduce")([values], options)


def start_all_gather(group: Any, recv: torch.Tensor, send: torch.Tensor) -> Any:
    """Start an all_gather of `send` into `recv` on a group of `make_gloo`."""
    return _named(group, "_allgather_base")(recv, send)


def start_all_to_all(
    group: Any, recv: torch.Tensor, send: torch.Tensor, counts: tuple[list[int], list[int]]
) -> Any:
    """Start an all_to_all on a group of `make_gloo`; `counts` are bytes (from, to) each rank."""
    return _named(group, "alltoall_base")(recv, send, *counts)


def _named(where: Any, name: str) -> Any:
    try:
        return getattr(where, name)
    except AttributeError:
        owner = getattr(where, "__name__", type(where).__name__)
        raise GradcompError(
            f"torch {torch.__version__} has no {owner}.{name}, which gradcomp needs: take a version"
            " that gradcomp was tried with (docs/reference/torch-versions.md)"
        ) from None


# ---- DistributedDataParallel and autograd --------------------------------------------------------


def graph_task() -> int:
    """Return the ID of the backward pass that runs in this thread; -1 if there is none."""
    return int(_named(torch._C, "_current_graph_task_id")())


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of this backward pass; ``backward()`` raises its exceptions."""
    _named(torch.autograd.Variable._execution_engine, "queue_callback")(callback)


def bucket_dtypes(model: Any) -> list[str] | None:
    """Return the C++ names of the dtypes that DDP averages; None if torch does not report them."""
    data: dict[str, Any] = getattr(model, "_get_ddp_logging_data", dict)()
    dtypes = data.get("dtypes")
    return None if dtypes is None else str(dtypes).split(", ")


def name_hook(model: Any, name: str) -> None:
    """Set the name of the communication hook in DDP's logging data."""
    setter = getattr(getattr(model, "logger", None), "_set_comm_hook_name", None)
    if setter is not None:
        setter(name)


def taken_hook(model: Any) -> str:
    """Return a description of the torch feature that uses DDP's only hook; "" if it is free."""
    if getattr(model, "mixed_precision", None) is not None:
        what = "mixed_precision= of DistributedDataParallel casts gradients in it"
        return f"{what}; convert the model or use autocast"
    if any(hasattr(p, "_in_backward_optimizers") for p in model.parameters()):
        what = "optimizers in backward (_apply_optimizer_in_backward) step in it"
        return f"{what}; step after backward"
    if getattr(model, "_use_python_reducer", False):
        what = 'torch._dynamo.config.optimize_ddp = "python_reducer" hands it single gradients'
        return f"{what}; set it to True, and leave compiled autograd out"
    return ""


def hook_states(model: Any) -> list[object]:
    """Return the states of the hooks registered on a model, or on the model it was copied from."""
    return [state for _, state in getattr(model, "_comm_hooks", ())]


def joins_by_active_ranks(model: Any) -> bool:
    """Return whether DDP is in a `Join` context that averages over ranks that still have data."""
    is_joining = getattr(getattr(model, "_join_config", None), "enable", False)
    return is_joining and not getattr(model, "_divide_by_initial_world_size", True)


# ---- FSDP2 ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sharded:
    """Parameters that one module of a `fully_shard` model reduce-scatters.

    Lists have one entry for each parameter, in the order in which gradients are reduce-scattered.
    """

    module: Any  # an FSDPModule
    group: Any  # process group over which the parameters are sharded
    parameters: list[torch.nn.Parameter]  # sharded, as in model.parameters()
    shapes: list[tuple[int, ...]]  # before sharding
    chunks: list[list[tuple[int, ...]]]  # shape of every rank's chunk, the largest first
    dims: list[int]  # dimension that is sharded
    owners: list[Any]  # FSDPParam; its `sharded_param` is replaced when weights are assigned
    is_split: bool  # some are also sharded by tensor parallelism; `shapes` are those local shapes


def sharded_modules(model: Any) -> list[Sharded]:
    """Return the `Sharded` of every `fully_shard` module with parameters of its own; ValueError if
    one shards them over several meshes.
    """
    from torch.distributed.fsdp import FSDPModule

    out = []
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state = _named(module, "_get_fsdp_state")()
        if len(getattr(state, "_fsdp_param_groups", ())) > 1:
            what = f"{type(module).__name__} shares its parameters out over several meshes"
            raise ValueError(f"{what}; gradcomp packs modules with one")
        one = _named(state, "_fsdp_param_group")
        if one is None:  # all of its parameters are in modules of their own
            continue
        group = _named(one, "_reduce_scatter_process_group")
        world, inside = group.size(), _named(one, "fsdp_params")
        shapes, chunks, dims = [], [], []
        for p in inside:
            full, dim = tuple(_named(p, "_orig_size")), _named(p, "fsdp_placement").dim
            rows = -(-full[dim] // world)  # torch.chunk's, the last of them fewer or none
            counts = [max(0, min(rows, full[dim] - rank * rows)) for rank in range(world)]
            shapes.append(full)
            chunks.append([(*full[:dim], count, *full[dim + 1 :]) for count in counts])
            dims.append(dim)
        parameters = [_named(p, "sharded_param") for p in inside]
        split = any(_named(p, "is_dtensor") for p in inside)
        out.append(Sharded(module, group, parameters, shapes, chunks, dims, inside, split))
    return out


class ReusedTensors:
    """A cache of flat tensors of `allocate`, each reused after all references to its storage are
    gone. torch allocates buffers of whole modules in every step, and new memory costs page faults.
    """

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self._made: dict[tuple[int, torch.dtype, torch.device], list[tuple[torch.Tensor, int]]] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised tensor ``(numel,)``. This method is an `Allocate`."""
        made = self._made.setdefault((numel, dtype, device), [])
        for tensor, idle in made:
            if _storage_uses(tensor) <= idle:
                return tensor.view(-1)
        tensor = self._allocate(numel, dtype, device)
        uses = _storage_uses(tensor)
        if uses:
            made.append((tensor, uses))
        return tensor.view(-1)


def _storage_uses(tensor: torch.Tensor) -> int:
    """Return how many tensors and views share the storage; 0 if torch does not report it."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return 0 if count is None else int(count(tensor.untyped_storage()._cdata))


def _collective(kind: str, call: Callable[..., Any], allocate: Allocate) -> Any:
    """Return a collective of FSDP2's interface `kind` that runs `call`, in memory of `allocate`."""
    from torch.distributed.fsdp._fully_shard import _fsdp_api

    class Called(_named(_fsdp_api, kind)):  # type: ignore[misc]
        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return allocate(size[0], dtype, device)

        def __call__(  # torch passes these by name
            self,
            output_tensor: Any,
            input_tensor: Any,
            group: Any,
            op: Any = None,
            async_op: Any = 0,
        ) -> Any:
            return call(output_tensor, input_tensor, group, op)

    return Called()


def reduce_scatter_by(
    module: Any, call: Callable[[torch.Tensor, torch.Tensor, Any, Any], None], allocate: Allocate
) -> None:
    """Make a `fully_shard` module reduce-scatter by ``call(output, input, group, op)``."""
    module.set_custom_reduce_scatter(_collective("ReduceScatter", call, allocate))


def reduce_scatter_as_before(module: Any) -> None:
    """Restore torch's own reduce-scatter of a `fully_shard` module."""
    module.set_custom_reduce_scatter(_torchs_own("DefaultReduceScatter"))


def all_gather_as_before(module: Any) -> None:
    """Restore torch's own all_gather of a `fully_shard` module."""
    _named(module, "set_custom_all_gather")(_torchs_own("DefaultAllGather"))


def _torchs_own(kind: str) -> Any:
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    return _named(_fsdp_collectives, kind)()


def leaves_shards_alone(module: Any, dtype: torch.dtype) -> bool:
    """Return whether torch reads no result of a `fully_shard` module's reduce-scatter in `dtype`
    before the backward pass is over; False if torch does not report it.
    """
    try:
        one = module._get_fsdp_state()._fsdp_param_group
        reduces = one._is_hsdp or one._all_reduce_hook is not None
        casts = one._orig_dtype not in (None, dtype)
        return not reduces and not casts and all(_only_given(p) for p in one.fsdp_params)
    except AttributeError:
        return False


def _only_given(p: Any) -> bool:
    """Return whether a gradient shard is assigned without offload, accumulation or a hook."""
    hooked = bool(getattr(p.sharded_param, "_post_accumulate_grad_hooks", None))
    return not p.offload_to_cpu and p.sharded_param.grad is None and not hooked


def reshards_after_forward(module: Any) -> bool:
    """Return whether a `fully_shard` module re-gathers weights for backward from the same ranks."""
    one = module._get_fsdp_state()._fsdp_param_group
    elsewhere = getattr(one, "_use_post_forward_mesh", False)
    return bool(_named(one, "_reshard_after_forward")) and not elsewhere


def all_gather_by(
    module: Any,
    call: Callable[[torch.Tensor, torch.Tensor, Any], Callable[[], None] | None],
    allocate: Allocate,
) -> None:
    """Make a `fully_shard` module gather weights by ``call(output, input, group)``.

    `call` may return a function, which is then called when the weights are needed.
    """

    def gather(output: torch.Tensor, given: torch.Tensor, group: Any, op: Any) -> Any:
        finish = call(output, given, group)
        return None if finish is None else _arriving(finish)

    _named(module, "set_custom_all_gather")(_collective("AllGather", gather, allocate))


def follow_all_gather(
    module: Any, call: Callable[[Callable[[], Any], Any], Callable[[], None]]
) -> bool:
    """Make a `fully_shard` module's own all_gather, of weights in host memory, run by
    ``call(start, group)``, which returns a function that waits for it. Return False, with nothing
    changed, if another all_gather is set, or this version of torch lets none be set.
    """
    try:
        own = type(_torchs_own("DefaultAllGather"))
        replace = _named(module, "set_custom_all_gather")
    except GradcompError:
        return False
    one = module._get_fsdp_state()._fsdp_param_group
    if type(getattr(one, "_all_gather_comm", None)) is not own:
        return False

    class Followed(own):  # type: ignore[misc, valid-type]
        def __call__(
            self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
        ) -> Any:
            start = partial(
                super().__call__,
                output_tensor=output_tensor,
                input_tensor=input_tensor,
                group=group,
            )
            if not input_tensor.is_cpu:
                return start(async_op=async_op)
            finish = call(partial(start, async_op=True), group)
            return _arriving(finish) if async_op else finish()

    replace(Followed())
    return True


def _arriving(finish: Callable[[], None]) -> Any:
    """Return a handle of an all_gather of weights whose `wait` calls `finish`."""

    class Arriving(dist.Work):
        def wait(self, *_: Any, **__: Any) -> bool:
            finish()
            return True

    return Arriving()


# ---- profiler ------------------------------------------------------------------------------------


def is_profiling() -> bool:
    """Return whether a profiler records this thread."""
    return bool(getattr(torch.autograd, "_profiler_enabled", bool)())


def record_until(name: str, future: torch.futures.Future[Any]) -> torch.futures.Future[Any]:
    """Record a profiler range `name` until `future` completes, and return a future to use instead.

    Without this feature in torch, the range ends immediately and the result is `future` itself.
    """
    with torch.profiler.record_function(name) as span:
        ended = getattr(span, "_call_end_callbacks_on_future", None)
        return future if ended is None else ended(future)


def stage_range(name: str) -> Any:
    """Return a context manager that records a profiler range (0.2 us without a profiler)."""
    fast = getattr(torch._C._profiler, "_RecordFunctionFast", None)
    return contextlib.nullcontext() if fast is None else fast(name)
