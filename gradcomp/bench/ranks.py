"""Start N ranks of a gloo process group on this machine, run a function in each, and hear from them
on the way.

Processes are forked from a server that has imported torch and what DDP pulls in, which takes a
process of its own three seconds.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import queue as queues
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

Emit = Callable[[Any], None]
RANK_ERRORS = (ProcessRaisedException, ProcessExitedException)
IMPORTED = ["torch._dynamo", "gradcomp.ddp"]  # before ranks are forked; DDP imports the first
_POLL_S = 0.1
_STARTING = threading.Lock()  # threads that start ranks change the environment in turns


def warm_context(*modules: str) -> Any:
    """Return the context of `multiprocessing` whose processes are new, but have imported torch,
    gradcomp and `modules`.

    The first thing that such a process does is `become_rank`.
    """
    if sys.platform != "linux":  # elsewhere torch does not bear forking
        return multiprocessing.get_context("spawn")
    with _STARTING:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__", *IMPORTED, *modules])
        before = os.environ.get("PYTHONPATH")
        # the server imports what this process would
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        try:
            _start_server()
        except OSError:  # a TMPDIR too long for the address of its socket
            pass
        else:
            return context
        finally:
            os.environ.pop("PYTHONPATH")
            if before is not None:
                os.environ["PYTHONPATH"] = before
    return multiprocessing.get_context("spawn")


def _start_server() -> None:
    """Start the server with interrupts blocked: it ignores them, but not before it has imported
    all.

    An interrupt of this program meanwhile comes when the server is known, so that `_end_server` can
    end it.
    """
    atexit.register(_end_server)
    resource_tracker.ensure_running()  # which would unblock them
    came: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    # torch's threads do not have the mask, and what one of them receives Python raises in this
    # thread
    handler = (
        signal.signal(signal.SIGINT, lambda number, _: came.append(number)) if is_main else None
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


def _end_server() -> None:
    """End the server with this program: while it imports, for seconds, it would not notice that
    nobody needs it.
    """
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def become_rank(variables: Mapping[str, str]) -> None:
    """Make this process, forked from a server that others have in common, one of its own.

    It ends with the program that has started it, can be interrupted, has `variables` as its
    environment, and NumPy draws other numbers than in its siblings.
    """
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(
        target=_end_with, args=(multiprocessing.parent_process(),), daemon=True
    ).start()
    os.environ.clear()
    os.environ.update(variables)
    np.random.seed()


def _end_with(parent: Any) -> None:
    if parent is not None:
        parent.join()
        os._exit(1)


def run_ranks(
    world_size: int, body: Callable[..., None], *args: Any, on_message: Callable[[Any], None]
) -> None:
    """Run ``body(rank, emit, *args)`` in ``world_size`` new processes, one torch thread each, and
    wait for all of them.

    The ranks find each other through a store in this process on a port that the system chose, so
    that two runs at the same time cannot meet.

    Args:
        world_size: number of ranks.
        body: a module-level function; a default gloo process group exists while it runs.
        *args: handed to it; picklable.
        on_message: called in this process with everything that a rank passed to ``emit``
            (picklable), in its order.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank raised; the message carries its
            traceback.
        torch.multiprocessing.ProcessExitedException: a rank was killed; the others have been ended.
    """
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
    warm = warm_context(body.__module__)
    messages: Any = warm.Queue()
    try:
        context = start_processes(  # type: ignore[no-untyped-call]
            _rank_main,
            args=(world_size, store.port, messages, body, args, dict(os.environ)),
            nprocs=world_size,
            join=False,
            daemon=True,
            start_method=warm.get_start_method(),
        )
        while not context.join(timeout=0):
            _drain(messages, on_message)
        _drain(messages, on_message)
    except KeyboardInterrupt:
        for process in multiprocessing.active_children():
            process.kill()
        raise


def _drain(messages: Any, on_message: Callable[[Any], None]) -> None:
    while True:
        try:
            message = messages.get(timeout=_POLL_S)
        except queues.Empty:
            return
        on_message(message)


def _rank_main(
    rank: int,
    world_size: int,
    port: int,
    messages: Any,
    body: Callable[..., None],
    args: tuple[Any, ...],
    variables: Mapping[str, str],
) -> None:
    become_rank(variables)
    if hasattr(signal, "pthread_sigmask"):  # Ctrl-C is for the program, which ends its ranks
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name need not resolve
    store = dist.TCPStore("127.0.0.1", port, None, False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        body(rank, messages.put, *args)
    finally:
        # a model in a reference cycle would keep gloo's threads until the interpreter ends
        gc.collect()
        dist.destroy_process_group()
