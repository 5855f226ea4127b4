"""Changes of gradients on their way through an exchange: before a rank encodes them, or where their
mean is owned.

A transform is elementwise and keeps one float32 a value, so what it does depends on no bucket,
chunk or number of ranks. Its memory follows the rules of residuals: a bucket with NaN on any rank,
or a step that is thrown away, leaves no trace.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from gradcomp.kernels import CPU, device_of
from gradcomp.memory.planes import Planes

# 64 KB of each of values, old and new state: they stay in the second-level cache
CHUNK_NUMEL = 1 << 14
PLACES = ("local", "owner")


class Transform(ABC):
    """An elementwise change of gradients, with one value of state an element.

    Attributes:
        place: "local": every rank changes its own gradients before they are encoded (the state is
            the rank's own); "owner": whoever owns a piece changes the mean of all ranks before it
            is encoded again (the state is shared out).
        initial: state of every element at first.
    """

    place = "owner"
    initial = 0.0

    @abstractmethod
    def apply(self, values: Tensor, old: Tensor, new: Tensor) -> None:
        """Change `values` in place and write the state after this step.

        What happens to an element may depend on nothing but its value and its state. A result or a
        state that is not finite makes the bucket's average NaN on every rank, and the states of
        before stay.

        Args:
            values: ``(n,)`` float32: gradients, without loss scale.
            old: ``(n,)`` float32: states before; not to be changed.
            new: ``(n,)`` float32: states after.
        """

    def options(self) -> Mapping[str, object]:
        """Return what must be the same on every rank, and in every part of a run that is
        resumed.
        """
        return {}

    def check_state(self, state: Tensor, name: str) -> None:
        """Raise ValueError for a state of parameter `name` that `apply` cannot have made."""

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.options().items())})"
        )


class Transforming:
    """A transform with the states of this rank's parameters.

    Args:
        transform: what to do.
        numels: elements whose state this rank keeps, by the parameter's position.
        device: of the states.

    Attributes:
        scale: loss scale of the values that `run` is given.
    """

    def __init__(
        self, transform: Transform, numels: Mapping[int, int], device: torch.device = CPU
    ) -> None:
        self.transform = transform
        what = f"state of {type(transform).__name__}"
        self.planes = Planes(numels, what, transform.initial, device=device)
        self.scale = 1.0

    def run(self, values: Tensor, spans: Iterable[tuple[int, int, int]]) -> bool:
        """Transform runs of a flat tensor in place; return True when a result or a state is not
        finite.

        Args:
            values: ``(n,)`` float32, bfloat16 or float16.
            spans: (position of the parameter, first element in `values`, elements).
        """
        bad = False
        for index, first, numel in spans:
            old, new = self.planes.pair(index)
            for at in range(0, numel, CHUNK_NUMEL):
                end = min(at + CHUNK_NUMEL, numel)
                bad |= self._run_chunk(values[first + at : first + end], old[at:end], new[at:end])
        return bad

    def check(self, state: object) -> None:
        """Raise ValueError for states that the transform cannot have made; `Planes.load` checks
        the rest.
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


def check_transform(transform: object) -> Transform | None:
    """Return a transform, or None for None.

    Raises:
        TypeError: neither.
        ValueError: a place that there is not.
    """
    if transform is None:
        return None
    if not isinstance(transform, Transform):
        raise TypeError(f"transform must be a gradcomp.Transform, got {type(transform).__name__}")
    if transform.place not in PLACES:
        raise ValueError(f"a transform's place must be one of {PLACES}, got {transform.place!r}")
    return transform


def keep_states(
    transform: Transform | None, tensors: Mapping[int, Tensor], share: Callable[[int], int]
) -> Transforming | None:
    """Return a transform with states for these tensors, of which this rank owns `share` (of each
    number of elements).
    """
    if transform is None:
        return None
    local = transform.place == "local"
    numels = {i: t.numel() if local else share(t.numel()) for i, t in tensors.items()}
    return Transforming(transform, numels, device_of(tensors.values()))
