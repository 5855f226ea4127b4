"""Parallel calls over a segment table; the distribution of rows over threads changes no bit of the
result.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from gradcomp.kernels.native.library import check, ffi
from gradcomp.kernels.tables import Table

THREAD_NUMEL = 1 << 20  # elements per thread: 0.1 to 0.4 ms of work, and 0.06 ms to submit it

_pool: ThreadPoolExecutor | None = None
_pool_size = 0
_pool_lock = threading.Lock()


def thread_count() -> int:
    """Return the number of threads of a large call."""
    return max(1, torch.get_num_threads())


def _workers(wanted: int) -> ThreadPoolExecutor:
    """Return a pool of at least `wanted` threads."""
    global _pool, _pool_size
    with _pool_lock:
        if _pool is None or _pool_size < wanted:
            _pool = ThreadPoolExecutor(wanted, thread_name_prefix="gradcomp-kernel")
            _pool_size = wanted
        return _pool


def _forget() -> None:
    """In a forked child, which has no threads of its parent, start without a pool."""
    global _pool, _pool_lock
    _pool = None
    _pool_lock = threading.Lock()  # another thread of the parent may have held the old one


os.register_at_fork(after_in_child=_forget)


def run(function: str, table: Table, call: Callable[[Any, int, int], int]) -> None:
    """Run `call(segments, count, first_row)` over the rows of a table, in parallel.

    All parts finish before the first error is raised, so that no thread accesses memory afterwards.

    Args:
        function: name of the C function, for errors.
        table: the rows.
        call: calls the C function for `count` rows, and returns its status code.

    Raises:
        CorruptPayload, NativeError: as in `check`, for the first part that failed.
    """
    if not table.count:
        return None
    base = table.prepared.get("native")
    if base is None:
        base = table.prepared["native"] = ffi.from_buffer("gc_segment[]", table.rows)
    if table.numel < 2 * THREAD_NUMEL:
        return check(call(base, table.count, 0), function)
    parts = table.ranges(min(thread_count(), table.numel // THREAD_NUMEL))
    if len(parts) <= 1:
        return check(call(base, table.count, 0), function)
    return _share(function, [(base + first, count, first) for first, count in parts], call)


def run_elements(function: str, numel: int, call: Callable[[int, int], int]) -> None:
    """Run `call(first, count)` over `numel` elements, in parallel, as `run` does for rows."""
    parts = min(thread_count(), numel // THREAD_NUMEL) if numel >= 2 * THREAD_NUMEL else 1
    cuts = [numel * part // parts for part in range(parts + 1)]
    return _share(function, [(first, end - first) for first, end in itertools.pairwise(cuts)], call)


def _share(function: str, arguments: list[Any], call: Callable[..., int]) -> None:
    """Make the first call on this thread, and the others on threads of the pool, unless the
    interpreter ends.
    """
    if len(arguments) == 1:
        return check(call(*arguments[0]), function)
    pool, own = _workers(len(arguments) - 1), arguments[:1]
    futures: list[Future[int]] = []
    for each in arguments[1:]:
        try:
            futures.append(pool.submit(call, *each))
        except RuntimeError:  # the interpreter ends, and its pools take nothing any more
            own.append(each)
    try:
        statuses = [call(*each) for each in own]
    finally:
        done = [future.exception() for future in futures]
    for error in done:
        if error is not None:
            raise error
    for status in statuses + [future.result() for future in futures]:
        check(status, function)
    return None
