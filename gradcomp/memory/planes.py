"""Values that gradients leave behind from step to step, keyed by parameter, with commit, roll-back
and checkpoints.

Two planes hold an old and a new value for every element. A step reads the current plane and writes
the other; only `commit` makes the new one current. So a bucket that turns out to hold NaN on some
rank, an optimizer step that is skipped, or an error half-way leaves everything exactly as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradcomp import kernels
from gradcomp.payload.pieces import round_up


@dataclass(frozen=True, slots=True)
class _Span:
    offset: int
    numel: int


class Planes:
    """Old and new float32 values of a set of tensors.

    Args:
        numels: elements kept of each tensor, by the parameter's position.
        what: is kept, for error messages.
        initial: value of every element at first.
    """

    def __init__(
        self, numels: Mapping[int, int], what: str = "residual", initial: float = 0.0
    ) -> None:
        self._spans: dict[int, _Span] = {}
        total = 0
        for index, numel in numels.items():
            self._spans[index] = _Span(total, numel)
            total += round_up(numel, 16)
        self._what, self._initial = what, initial
        self._planes: tuple[Tensor, Tensor] | None = None
        self._total = total
        self._current = dict.fromkeys(self._spans, 0)
        self._committed: list[int] = []  # what discard would flip back

    def knows(self, index: int) -> bool:
        """Whether there are values for a parameter."""
        return index in self._spans

    def offset(self, index: int) -> int:
        """Return where a parameter's values begin in a plane (elements)."""
        return self._spans[index].offset

    def tensors(self, indices: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Return the plane to read and the plane to write for these parameters."""
        planes = self._allocate()
        wanted = list(indices)
        if not wanted:
            return planes
        side = self._current[wanted[0]]
        # after a bucket rebuild, tensors of one bucket may stand on different planes
        for index in wanted:
            if self._current[index] != side:
                self._view(side, index).copy_(self._view(1 - side, index))
                self._current[index] = side
                if index in self._committed:
                    self._committed.remove(index)
        return planes[side], planes[1 - side]

    def pair(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a parameter's values to read and to write, ``(numel,)`` float32 each."""
        return self.current(index), self._view(1 - self._current[index], index)

    def current(self, index: int) -> Tensor:
        """Return a view of a parameter's current values, ``(numel,)`` float32."""
        return self._view(self._current[index], index)

    def commit(self, indices: Iterable[int]) -> None:
        """Make the written plane current for these parameters."""
        for index in indices:
            self._current[index] ^= 1
            self._committed.append(index)

    @property
    def begun(self) -> bool:
        """Whether any value has ever been other than the initial one."""
        return self._planes is not None

    def free_unused(self) -> None:
        """Give the memory back if every value is the initial one again."""
        if self._planes is not None and all(
            bool((self.current(i) == self._initial).all()) for i in self._spans
        ):
            self._planes = None

    def begin_step(self) -> None:
        """Forget what `discard` could undo."""
        self._committed.clear()

    def discard(self) -> None:
        """Undo every commit since `begin_step`."""
        for index in self._committed:
            self._current[index] ^= 1
        self._committed.clear()

    def rescale(self, factor: float) -> None:
        """Multiply all values, of both planes, by `factor`."""
        for plane in self._planes or ():
            kernels.of(plane.device).rescale(plane, factor)

    def multiply(self, factor: Callable[[int], float]) -> None:
        """Multiply every parameter's current values by its factor."""
        if self._planes is not None:
            for index in self._spans:
                self.current(index).mul_(factor(index))

    def state(self, names: Mapping[int, str]) -> dict[str, Tensor]:
        """Return copies of all current values by parameter name; empty before the first step."""
        if self._planes is None and self._total:
            return {}
        return {names[index]: self.current(index).clone() for index in self._spans}

    def check(self, state: object, names: Mapping[int, str]) -> None:
        """Raise ValueError for a state with a missing, unknown or differently sized entry, or
        with NaN or Inf.
        """
        if not isinstance(state, Mapping):
            raise ValueError(  # noqa: TRY004
                f"{self._what}s are a dictionary by parameter name, got {type(state).__name__}"
            )
        wanted = {names[index]: index for index in self._spans}
        if state and state.keys() != wanted.keys():
            odd = min(state.keys() ^ wanted.keys(), key=str)
            raise ValueError(f"{self._what}s do not fit this model: {odd!r} is on one side only")
        for name, tensor in state.items():
            numel = self._spans[wanted[name]].numel
            if (
                not isinstance(tensor, Tensor)
                or tensor.dtype != torch.float32
                or tensor.numel() != numel
            ):
                got = (
                    f"{tensor.numel()} x {tensor.dtype}"
                    if isinstance(tensor, Tensor)
                    else type(tensor).__name__
                )
                raise ValueError(
                    f"{self._what} of {name!r} is {got}, {numel} x torch.float32 expected"
                )
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{self._what} of {name!r} holds NaN or Inf")

    def load(self, state: Mapping[str, Tensor], names: Mapping[int, str]) -> None:
        """Take values from a checkpoint that `check` accepts; an empty state is the initial
        value everywhere.
        """
        self.check(state, names)
        wanted = {names[index]: index for index in self._spans}
        if not state and self._planes is None:
            return
        for plane in self._allocate():
            plane.fill_(self._initial)
        self._committed.clear()
        for name, tensor in state.items():
            self.current(wanted[name]).copy_(tensor.reshape(-1))

    def _allocate(self) -> tuple[Tensor, Tensor]:
        if self._planes is None:
            self._planes = (
                torch.full((self._total,), self._initial),
                torch.full((self._total,), self._initial),
            )
        return self._planes

    def _view(self, side: int, index: int) -> Tensor:
        span = self._spans[index]
        return self._allocate()[side][span.offset : span.offset + span.numel]
