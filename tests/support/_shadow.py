"""A kernel set that stands for a device: its memory cannot be read or written but in calls of the
set and in torch operations, and it counts these.

The values are those of the CPU's set, to the last bit. Memory comes in pages of its own that
mprotect closes; ``.numpy()``, ``.tolist()``, ``data_ptr()``, collectives and any other kernel set
are refused before they touch it.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import inspect
import mmap
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from gradcomp import kernels
from gradcomp.ddp import CompressionState
from gradcomp.kernels import Kernels, Payloads, Residuals
from gradcomp.kernels.native import NativeKernels
from gradcomp.kernels.tables import BLOCK, Groups, Table

TENSORS = "weight", "trail", "gradient", "state0", "state1"  # of a target
OPEN, CLOSED = mmap.PROT_READ | mmap.PROT_WRITE, 0
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class Memory:
    """Pages that are closed but for the time in which somebody has them open; all ones at first,
    which is NaN.

    Attributes:
        address, nbytes: where they are.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._pages = mmap.mmap(-1, self.nbytes)
        self._pages[:] = b"\xff" * self.nbytes
        self._uses, self._lock = 0, threading.Lock()
        self.bytes = torch.frombuffer(self._pages, dtype=torch.uint8)
        self.address = self.bytes.data_ptr()
        self._protect(CLOSED)

    def use(self, count: int) -> None:
        """Count users, +1 or -1: the pages are open while there are any."""
        with self._lock:
            before, self._uses = self._uses, self._uses + count
            if not before or not self._uses:
                self._protect(OPEN if self._uses else CLOSED)

    def _protect(self, access: int) -> None:
        if _libc.mprotect(self.address, self.nbytes, access):
            raise OSError(ctypes.get_errno(), "mprotect")


@contextlib.contextmanager
def opened(memories: Iterable[Memory]) -> Iterator[None]:
    used = set(memories)
    for memory in used:
        memory.use(1)
    try:
        yield
    finally:
        for memory in used:
            memory.use(-1)


class Shadow(Tensor):
    """A tensor in closed memory, for torch operations: what they return is closed as well."""

    memory: Memory
    owner: ShadowKernels
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "c10d" not in func.namespace, f"{func} of values: payloads are host memory"
        given = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
        closed = [one for one in given if isinstance(one, Shadow)]
        owner, memories = closed[0].owner, {one.memory.address: one.memory for one in closed}
        owner.count("torch operations")
        with opened(memories.values()):
            with torch._C._DisableTorchDispatch():
                out = func(*args, **(kwargs or {}))
            return tree_map(lambda one: owner.adopt(one, given, memories), out)

    def data_ptr(self) -> int:
        raise AssertionError("the address of values is taken outside their kernel set")

    def cpu(self) -> Tensor:  # type: ignore[override]
        """Return a copy in host memory."""
        self.owner.count("copies to the host")
        with opened([self.memory]), torch._C._DisableTorchDispatch():
            return self.detach().clone()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.cpu().__reduce_ex__(protocol)


class ShadowKernels(Kernels):
    """The CPU's kernels on closed memory.

    Attributes:
        counts: of what has been done, by its name: "empty" (calls), "kernels", "torch operations",
            "new tensors" (that these have returned), "copies to the host", "host values" (arguments
            of kernels that should be values of this set, and are host memory).
    """

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._kernels, self._lock = NativeKernels(), threading.Lock()
        self._memories: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()

    def count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1

    def empty(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        self.count("empty")
        return self.closed(numel, dtype)

    def closed(self, numel: int, dtype: torch.dtype) -> Tensor:
        """As `empty`, uncounted: for tests."""
        memory = self._new_memory(numel * dtype.itemsize)
        return self._wrapped(memory.bytes.view(dtype)[:numel], memory)

    def scratch(self, groups: Groups, free: Tensor | None = None) -> Tensor:
        return self.empty(int(groups.blocks[-1]) * BLOCK.itemsize, torch.uint8)

    def targets(self, **tensors: Sequence[Tensor | None]) -> NDArray[Any]:
        plain = {name: [_plain(one) for one in found] for name, found in tensors.items()}
        return self._kernels.targets(**plain)

    def update(
        self,
        table: Table,
        targets: NDArray[Any],
        rules: NDArray[Any],
        payloads: Payloads | None = None,
        norms: NDArray[Any] | None = None,
    ) -> bool:
        self.count("kernels")
        with opened(self._memories_at(targets)):
            return self._kernels.update(table, targets, rules, payloads, norms)

    def adopt(self, value: Any, given: Sequence[Tensor], memories: Mapping[int, Memory]) -> Any:
        """Return what an operation has returned: a tensor that it was given, one in the memories
        of these, or else a copy in memory of its own.
        """
        if not isinstance(value, Tensor) or any(value is one for one in given):
            return value
        storage = value.untyped_storage()
        memory = memories.get(storage.data_ptr())
        if memory is None:
            self.count("new tensors")
            memory = self._new_memory(storage.nbytes())
            with opened([memory]):
                layout = value.shape, value.stride(), value.storage_offset()
                value = memory.bytes.view(value.dtype).as_strided(*layout).copy_(value)
        return self._wrapped(value, memory)

    def _call(self, name: str, values: Mapping[str, Any], others: Mapping[str, Any]) -> Any:
        """Call a kernel: with tensors of values, and with what is no tensor or in host memory."""
        self.count("kernels")
        given = tree_flatten(dict(values))[0]
        tensors = [one for one in given if isinstance(one, Tensor)]
        for _ in (one for one in tensors if not isinstance(one, Shadow)):
            self.count("host values")
        for one in tree_flatten(dict(others))[0]:
            assert not isinstance(one, Shadow), f"{name}: payloads and scales are host memory"
        with opened(one.memory for one in tensors if isinstance(one, Shadow)):
            plain = {key: tree_map(_plain, value) for key, value in values.items()}
            return getattr(self._kernels, name)(**plain, **others)

    def _new_memory(self, nbytes: int) -> Memory:
        memory = Memory(nbytes)
        with self._lock:
            self._memories[memory.address] = memory
        return memory

    def _memories_at(self, targets: NDArray[Any]) -> list[Memory]:
        """Return the memories in which targets of an update lie."""
        with self._lock:
            memories = list(self._memories.values())
        places = np.concatenate([targets[name] for name in TENSORS])
        return [
            one
            for one in memories
            if ((one.address <= places) & (places < one.address + one.nbytes)).any()
        ]

    def _wrapped(self, plain: Tensor, memory: Memory) -> Tensor:
        made = Tensor._make_subclass(Shadow, plain)
        made.memory, made.owner = memory, self
        return made


def _plain(value: Any) -> Any:
    """Return a tensor as the CPU's kernels take it; anything else as it is."""
    if not isinstance(value, Shadow):
        return value
    with torch._C._DisableTorchDispatch():
        return value.detach()


def _kernel(name: str, host: Sequence[str] = ()) -> Callable[..., Any]:
    """Return a method that calls a kernel of the CPU.

    Args:
        host: arguments that are host memory.
    """
    signature = inspect.signature(getattr(Kernels, name))

    def method(self: ShadowKernels, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        values = {
            key: value
            for key, value in given.items()
            if isinstance(value, (Tensor, Residuals)) and key not in host
        }
        others = {key: value for key, value in given.items() if key not in {"self", *values}}
        return self._call(name, values, others)

    return method


for _name in ("sum_decode", "are_finite", "divide", "multiply", "follow", "rotate", "unbias"):
    setattr(ShadowKernels, _name, _kernel(_name))
for _name in ("rescale", "split", "join"):
    setattr(ShadowKernels, _name, _kernel(_name))
ShadowKernels.scales = _kernel("scales", ["out"])  # type: ignore[method-assign]
ShadowKernels.encode = _kernel("encode", ["payload"])  # type: ignore[method-assign]


# ---- in place of the CPU's set -------------------------------------------------------------------


@contextlib.contextmanager
def shadowed() -> Iterator[ShadowKernels]:
    """Run what is built in a ``with`` block on a shadow set; DDP's buckets go through it as well.

    DDP makes its buckets itself: here they are copied to memory of the set and back.
    """
    made = ShadowKernels()
    handle = CompressionState.handle

    def handle_copy(state: CompressionState, bucket: Any) -> Any:
        there = bucket.buffer()
        values = made.closed(there.numel(), there.dtype).copy_(there)
        future = handle(state, _Bucket(bucket, values))
        return future.then(lambda done: there.copy_(done.value()))

    before = kernels.install("cpu", lambda _: made)
    try:
        with mock.patch.object(CompressionState, "handle", handle_copy):
            yield made
    finally:
        kernels.install("cpu", before)


class _Bucket:
    """A bucket of DDP with other memory."""

    def __init__(self, bucket: Any, values: Tensor) -> None:
        self._bucket, self._values = bucket, values

    def buffer(self) -> Tensor:
        return self._values

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket, name)
