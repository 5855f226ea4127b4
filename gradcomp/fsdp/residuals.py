"""Residuals of a rank's unsharded gradients. They are as large as these, so there is only one copy
of them, in 32 or 16 bits; two with a loss scaler, which may skip a step and so undo its commits.
They are in units of the unscaled gradient.

An exchange reads and writes float32 planes. A module with a reduce-scatter in progress borrows a
pair of them from a pool: the first is filled with the stored residuals before encoding, and a
commit stores the second. Until then the stored residuals do not change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gradcomp.codecs.checks import dtype_name
from gradcomp.exchange.gather import BufferPool
from gradcomp.fsdp.parts import Part
from gradcomp.kernels import device_of, of
from gradcomp.memory.planes import Planes
from gradcomp.memory.saved import check_tensors, mean_by_name

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class ModuleResiduals(Planes):
    """Residuals of one module's gradients, with a slot for each rank's chunk of each parameter.

    Args:
        parts: parameters of the module; only compressed ones have residuals.
        dtype: dtype of the stored residuals.
        pool: lends float32 planes during a reduce-scatter.
        count: 1, or 2 copies of the residuals, so that `discard` undoes commits.

    Attributes:
        parts: the compressed parameters.
        loss_scale: scale of the gradients that are exchanged.
    """

    def __init__(
        self, parts: Iterable[Part], dtype: torch.dtype, pool: BufferPool, count: int = 1
    ) -> None:
        self.parts = [part for part in parts if part.parameter.compressed]
        numels = {
            index: math.prod(shape)
            for part in self.parts
            for index, shape in zip(part.slot_indices, part.chunks, strict=True)
        }
        super().__init__(numels, dtype=dtype, count=count)
        self.loss_scale, self._pool = 1.0, pool
        self._lent: Tensor | None = None

    def tensors(self, indices: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Return two float32 planes of all slots, ``(numel,)`` each; the first has the stored
        residuals, scaled. They are lent until `commit` or `discard`.
        """
        if self._lent is None:
            nbytes = 2 * self.numel * torch.float32.itemsize
            empty = of(self._allocate()[0].device).empty
            self._lent = self._pool.take(nbytes, lambda count: empty(count, torch.uint8))
        old, new = self._lent_planes(self._lent)
        for part in self.parts:
            run = self._run(part)
            old[run].copy_(self._stored(part))
        if self.loss_scale != 1:
            old.mul_(self.loss_scale)
        return old, new

    def commit(self, indices: Iterable[int]) -> None:
        """Store the new residuals of these slots, unless they were discarded."""
        if self._lent is None:
            return
        _, new = self._lent_planes(self._lent)
        written = set(indices)
        for part in self.parts:
            if part.slot_indices[0] in written:  # then all slots are; frozen ones are never written
                run = self._run(part)
                if self._count > 1 and part.slot_indices[0] not in self._committed:
                    super().commit(part.slot_indices)  # the other copy stays as it is
                scaled = self.loss_scale != 1
                self._stored(part).copy_(new[run].div_(self.loss_scale) if scaled else new[run])
        self._give_back()

    def discard(self) -> None:
        """Return the lent planes to the pool, and undo commits since `begin_step` where there are
        two copies.
        """
        self._give_back()
        super().discard()

    def whole(self, part: Part) -> Tensor:
        """Return a copy of a parameter's residuals, in its unsharded shape."""
        return part.joined([self.current(index) for index in part.slot_indices])

    def _give_back(self) -> None:
        if self._lent is not None:
            self._pool.give(self._lent)
            self._lent = None

    def _stored(self, part: Part) -> Tensor:
        side = self._current[part.slot_indices[0]]  # that of all its slots
        return self._allocate()[side][self._run(part)]

    def _run(self, part: Part) -> slice:
        """Return where the residuals of a parameter are in a plane."""
        first, last = part.slot_indices[0], part.slot_indices[-1]
        return slice(self.offset(first), self.offset(last) + self.numels[last])

    def _allocate(self) -> tuple[Tensor, ...]:
        if not self.begun:  # weights may have been on the meta device at construction
            self._device = device_of(part.sharded for part in self.parts)
        return super()._allocate()

    def _lent_planes(self, lent: Tensor) -> tuple[Tensor, Tensor]:
        old, new = lent.view(torch.float32)[: 2 * self.numel].view(2, self.numel)
        return old, new


class ModelResiduals:
    """Residuals of all modules of a model, by parameter name.

    Args:
        dtype: "fp32" or "float32", "bf16" or "bfloat16": dtype of the stored residuals.
        can_discard: whether commits can be undone; takes twice the memory.

    Attributes:
        dtype: "fp32" or "bf16".
        can_discard: the argument.

    Raises:
        ValueError: another dtype.
    """

    def __init__(self, dtype: str, *, can_discard: bool = False) -> None:
        name = dtype_name(dtype)
        if name not in DTYPES:
            raise ValueError(f"residuals must be one of {sorted(DTYPES)}, got {dtype!r}")
        self.dtype, self.can_discard, self._pool = str(name), can_discard, BufferPool()
        self._modules: list[ModuleResiduals] = []

    def add(self, parts: Sequence[Part]) -> ModuleResiduals:
        """Add a module and return its residuals, which are zero at first."""
        count = 1 + self.can_discard
        self._modules.append(ModuleResiduals(parts, DTYPES[self.dtype], self._pool, count))
        return self._modules[-1]

    def begin_step(self) -> None:
        """Make earlier commits final: `discard` no longer undoes them."""
        for module in self._modules:
            module.begin_step()

    def scale_by(self, loss_scale: float) -> None:
        """Set the scale of the gradients that are exchanged from now on."""
        for module in self._modules:
            module.loss_scale = loss_scale

    def discard(self) -> None:
        """Undo every commit since `begin_step`, if `can_discard`."""
        for module in self._modules:
            module.discard()

    @property
    def nbytes(self) -> int:
        """Bytes of all stored residuals."""
        each = DTYPES[self.dtype].itemsize * (1 + self.can_discard)
        return each * sum(module.numel for module in self._modules)

    def state(self) -> dict[str, Tensor]:
        """Return copies of all residuals by name, each in its parameter's unsharded shape."""
        return {part.parameter.name: module.whole(part) for module, part in self._items()}

    def load(self, states: Iterable[Mapping[str, Tensor]]) -> None:
        """Set the residuals to the mean of several ranks' residuals, or to zero if there are none.
        A reduce-scatter in progress will not change them. After an error nothing is changed.

        Args:
            states: residuals of each rank by name, in unsharded shapes.

        Raises:
            ValueError: other parameters, shapes or dtypes, or a value that is not finite.
        """
        mean = mean_by_name(map(self._checked, states))
        for module in self._modules:
            values: dict[int, Tensor] = {}
            for part in module.parts if mean else ():
                chunks = part.split(mean[part.parameter.name])
                values.update(zip(part.slot_indices, chunks, strict=True))
            module.replace(values)

    def _checked(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        shapes = {part.parameter.name: part.parameter.shape for _, part in self._items()}
        stored = DTYPES[self.dtype]
        check_tensors(state, shapes, "residual", tuple(DTYPES.values()), stored)
        return state

    def _items(self) -> Iterator[tuple[ModuleResiduals, Part]]:
        return ((module, part) for module in self._modules for part in module.parts)
