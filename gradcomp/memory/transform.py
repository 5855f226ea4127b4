"""Transforms: elementwise changes of gradients before encoding, or of means at their owner.

A transform is elementwise and has one float32 of state per element. So its result does not depend
on buckets, chunks or the number of ranks. Its states commit and roll back as residuals do: a bucket
with NaN on any rank, or a discarded step, leaves them unchanged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from gradcomp.kernels import CPU
from gradcomp.memory.planes import Planes

# 64 KB each of values, old and new states: they fit into the L2 cache
CHUNK_NUMEL = 1 << 14
PLACES = ("local", "owner")


class Transform(ABC):
    """An elementwise change of gradients, with one float32 of state per element.

    Attributes:
        place: "local": every rank changes its own gradients before they are encoded (every rank has
            its own state of all elements); "owner": the owner of a piece changes the mean of all
            ranks before it is encoded again (the state is sharded).
        initial: initial state of every element.
    """

    place = "owner"
    initial = 0.0

    @abstractmethod
    def apply(self, values: Tensor, old: Tensor, new: Tensor) -> None:
        """Change `values` in place, and write the new states.

        The result for an element must depend only on its value and its state. If a result or a
        state is not finite, the bucket's average is NaN on every rank and the old states are kept.

        Args:
            values: ``(n,)`` float32: gradients or means without loss scale, overwritten.
            old: ``(n,)`` float32: states before this step; must not be changed.
            new: ``(n,)`` float32: states after this step, written.
        """

    def options(self) -> Mapping[str, object]:
        """Return the options that must be equal on every rank, and when a run is resumed."""
        return {}

    def check_state(self, state: Tensor, name: str) -> None:
        """Raise ValueError if `apply` cannot produce this state of parameter `name`."""

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.options().items())})"
        )


class Transforming:
    """A transform with the states of this rank's parameters.

    Args:
        transform: the transform.
        numels: number of elements whose state this rank keeps, by the parameter's position.
        device: device of the states.

    Attributes:
        transform: as given.
        planes: the states.
        scale: loss scale of the values that are passed to `run`.
    """

    def __init__(
        self, transform: Transform, numels: Mapping[int, int], device: torch.device = CPU
    ) -> None:
        self.transform = transform
        what = f"state of {type(transform).__name__}"
        self.planes = Planes(numels, what, transform.initial, device=device)
        self.scale = 1.0

    def run(self, values: Tensor, spans: Iterable[tuple[int, int, int]]) -> bool:
        """Transform spans of a flat tensor in place; return True if a result or a state is not
        finite.

        Args:
            values: ``(n,)`` float32, bfloat16 or float16.
            spans: (position of the parameter, first element in `values`, number of elements).
        """
        bad = False
        for index, first, numel in spans:
            old, new = self.planes.pair(index)
            for at in range(0, numel, CHUNK_NUMEL):
                end = min(at + CHUNK_NUMEL, numel)
                bad |= self._run_chunk(values[first + at : first + end], old[at:end], new[at:end])
        return bad

    def check(self, state: object) -> None:
        """Raise ValueError if the transform cannot produce these states; `Planes.check` checks the
        rest.
        """
        for name, tensor in state.items() if isinstance(state, Mapping) else ():
            if isinstance(tensor, Tensor):
                self.transform.check_state(tensor, name)

    def _run_chunk(self, chunk: Tensor, old: Tensor, new: Tensor) -> bool:
        x = chunk if chunk.dtype == torch.float32 else chunk.float()
        if self.scale != 1.0:
            x.div_(self.scale)
        self.transform.apply(x, old, new)
        if self.scale != 1.0:
            x.mul_(self.scale)
        if x is not chunk:
            chunk.copy_(x)
        return not bool(torch.isfinite(chunk).all() and torch.isfinite(new).all())


def check_transform(transform: object) -> None:
    """Raise unless `transform` is None or a transform.

    Raises:
        TypeError: it is of another type.
        ValueError: its place is unknown.
    """
    if transform is None:
        return
    if not isinstance(transform, Transform):
        raise TypeError(f"transform must be a gradcomp.Transform, got {type(transform).__name__}")
    if transform.place not in PLACES:
        raise ValueError(f"a transform's place must be one of {PLACES}, got {transform.place!r}")
