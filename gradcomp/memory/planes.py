"""Float values kept per parameter from step to step, with commit, roll-back and checkpoints.

Two planes store an old and a new value for every element. A step reads the current plane and writes
the other one; only `commit` makes the new values current. So values are unchanged if a bucket has
NaN on some rank, an optimizer step is skipped, or a step fails half-way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from gradcomp import kernels
from gradcomp.memory.saved import check_tensors
from gradcomp.payload.pieces import round_up


class Planes:
    """Old and new values of a set of tensors.

    Args:
        numels: number of elements to keep of each tensor, by the parameter's position.
        what: name of the values, for error messages.
        initial: initial value of every element.
        dtype: dtype of the planes.
        count: number of planes: two, or one in a subclass that borrows the other for a step.
        device: device of the planes.

    Attributes:
        numels: as given.
        numel: number of elements of a plane, in which each tensor begins at a multiple of 16.
    """

    def __init__(
        self,
        numels: Mapping[int, int],
        what: str = "residual",
        initial: float = 0.0,
        dtype: torch.dtype = torch.float32,
        count: int = 2,
        device: torch.device = kernels.CPU,
    ) -> None:
        self.numels, self.numel = dict(numels), 0
        self._offsets: dict[int, int] = {}
        for index, numel in numels.items():
            self._offsets[index] = self.numel
            self.numel += round_up(numel, 16)
        self._what, self._initial, self._dtype, self._count = what, initial, dtype, count
        self._device = device
        self._planes: tuple[Tensor, ...] = ()  # allocated at the first use
        self._current = dict.fromkeys(numels, 0)
        self._committed: list[int] = []  # parameters that `discard` would roll back

    def knows(self, index: int) -> bool:
        """Return whether values of this parameter are kept."""
        return index in self.numels

    def offset(self, index: int) -> int:
        """Return the first element of a parameter in a plane."""
        return self._offsets[index]

    def tensors(self, indices: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Return the plane to read and the plane to write for the parameters of one bucket."""
        planes = self._allocate()
        members = list(indices)
        side = self._current[members[0]] if members else 0
        # after a bucket rebuild, the current values of one bucket may be in different planes
        for index in members:
            if self._current[index] != side:
                self._view(side, index).copy_(self._view(1 - side, index))
                self._current[index] = side
                if index in self._committed:
                    self._committed.remove(index)
        return planes[side], planes[1 - side]

    def pair(self, index: int) -> tuple[Tensor, Tensor]:
        """Return views of a parameter's values to read and to write, ``(numel,)`` each."""
        return self.current(index), self._view(1 - self._current[index], index)

    def current(self, index: int) -> Tensor:
        """Return a view of a parameter's current values, ``(numel,)``."""
        return self._view(self._current[index], index)

    def commit(self, indices: Iterable[int]) -> None:
        """Make the newly written values of these parameters current."""
        for index in indices:
            self._current[index] ^= 1
            self._committed.append(index)

    @property
    def begun(self) -> bool:
        """Whether the planes are allocated; if not, every value is the initial one."""
        return bool(self._planes)

    def free_unused(self) -> None:
        """Free the planes if every value is the initial one again."""
        if self.begun and all(
            bool((self.current(index) == self._initial).all()) for index in self.numels
        ):
            self._planes = ()

    def begin_step(self) -> None:
        """Make earlier commits final: `discard` no longer rolls them back."""
        self._committed.clear()

    def discard(self) -> None:
        """Roll back every commit since `begin_step`."""
        for index in self._committed:
            self._current[index] ^= 1
        self._committed.clear()

    def rescale(self, factor: float) -> None:
        """Multiply all values of both planes by `factor`, in place. Products beyond the range of
        the dtype become its largest number: Inf would make every later step non-finite.
        """
        for plane in self._planes:
            kernels.of(plane.device).rescale(plane, factor)
            if factor > 1:
                largest = torch.finfo(plane.dtype).max
                plane.clamp_(-largest, largest)

    def state(self, names: Mapping[int, str]) -> dict[str, Tensor]:
        """Return copies of all current values by parameter name; empty if nothing was written."""
        if not self.begun and self.numel:
            return {}
        return {names[index]: self.current(index).clone() for index in self.numels}

    def check(self, state: object, names: Mapping[int, str]) -> None:
        """Raise ValueError unless a state is empty, or finite float32 values of every parameter."""
        if isinstance(state, Mapping) and not state:
            return
        check_tensors(state, {names[i]: (numel,) for i, numel in self.numels.items()}, self._what)

    def load(self, state: Mapping[str, Tensor], names: Mapping[int, str]) -> None:
        """Load a state that `check` accepts; an empty state resets all values to the initial."""
        index_of = {names[index]: index for index in self.numels}
        self.replace({index_of[name]: tensor for name, tensor in state.items()})

    def replace(self, values: Mapping[int, Tensor]) -> None:
        """Replace all current values; parameters without a value are reset to the initial one.

        Commits since `begin_step` are rolled back first, and cannot be rolled back afterwards.

        Args:
            values: tensors of any shape by the parameter's position, copied.
        """
        self.discard()
        if not values and not self.begun:
            return
        for plane in self._allocate():
            plane.fill_(self._initial)
        for index, tensor in values.items():
            self.current(index).copy_(tensor.reshape(-1))

    def _allocate(self) -> tuple[Tensor, ...]:
        if not self._planes:
            empty = kernels.of(self._device).empty
            self._planes = tuple(
                empty(self.numel, self._dtype).fill_(self._initial) for _ in range(self._count)
            )
        return self._planes

    def _view(self, side: int, index: int) -> Tensor:
        first = self._offsets[index]
        return self._allocate()[side][first : first + self.numels[index]]
