"""What codes have left out of a rank's gradients: as large as these, so stored once, in 32 or 16
bits.

An exchange reads and writes float32 planes. Modules in flight borrow a pair each: it is filled from
what is stored before a module's gradients are encoded, and a commit writes it back. Until then what
is stored stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gradcomp.exchange.gather import BufferPool
from gradcomp.fsdp.parts import Part, numel_of
from gradcomp.kernels import device_of, of
from gradcomp.memory.planes import Planes
from gradcomp.memory.saved import check_tensors, mean_by_name

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class ModuleResiduals(Planes):
    """Residuals of one module's gradients, by the slots of every rank's chunks.

    Args:
        parts: of the module; residuals are kept of those that are compressed.
        dtype: in which they are stored.
        pool: lends float32 planes while the module is in flight.

    Attributes:
        parts: the compressed ones.
    """

    def __init__(self, parts: Iterable[Part], dtype: torch.dtype, pool: BufferPool) -> None:
        self.parts = [part for part in parts if part.parameter.compressed]
        numels = {
            index: numel_of(shape)
            for part in self.parts
            for index, shape in zip(part.slot_indices, part.chunks, strict=True)
        }
        super().__init__(numels, dtype=dtype, count=1)
        self._pool = pool
        self._lent: Tensor | None = None

    def tensors(self, indices: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Return two float32 planes of all slots, the first with the stored values; lent until
        `commit` or `discard`.
        """
        if self._lent is None:
            nbytes = 2 * self.numel * torch.float32.itemsize
            empty = of(self._allocate()[0].device).empty
            self._lent = self._pool.take(nbytes, lambda count: empty(count, torch.uint8))
        old, new = self._lent_planes(self._lent)
        old.copy_(self._allocate()[0])
        return old, new

    def commit(self, indices: Iterable[int]) -> None:
        """Store what was written of these slots, unless it was discarded."""
        if self._lent is None:
            return
        stored, (_, new) = self._allocate()[0], self._lent_planes(self._lent)
        written = set(indices)
        for part in self.parts:
            first, last = part.slot_indices[0], part.slot_indices[-1]
            if first in written:  # and so are all others; frozen parameters have no slots
                run = slice(self.offset(first), self.offset(last) + self.numels[last])
                stored[run].copy_(new[run])
        self.discard()

    def discard(self) -> None:
        """Give the lent planes back and leave what is stored as it is."""
        if self._lent is not None:
            self._pool.give(self._lent)
            self._lent = None

    def whole(self, part: Part) -> Tensor:
        """Return a parameter's residuals in its shape, a copy."""
        return part.joined([self.current(index) for index in part.slot_indices])

    def _allocate(self) -> tuple[Tensor, ...]:
        if not self.begun:  # the weights may have had no memory before
            self._device = device_of(part.sharded for part in self.parts)
        return super()._allocate()

    def _lent_planes(self, lent: Tensor) -> tuple[Tensor, Tensor]:
        old, new = lent.view(torch.float32)[: 2 * self.numel].view(2, self.numel)
        return old, new


class ModelResiduals:
    """Residuals of all modules of a model, by parameter name.

    Args:
        dtype: "fp32" or "bf16", in which they are stored.

    Attributes:
        dtype: as given.

    Raises:
        ValueError: another dtype.
    """

    def __init__(self, dtype: str) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"residuals must be one of {sorted(DTYPES)}, got {dtype!r}")
        self.dtype, self._pool = dtype, BufferPool()
        self._modules: list[ModuleResiduals] = []

    def add(self, parts: Sequence[Part]) -> ModuleResiduals:
        """Return residuals for one module more, zero at first."""
        self._modules.append(ModuleResiduals(parts, DTYPES[self.dtype], self._pool))
        return self._modules[-1]

    @property
    def nbytes(self) -> int:
        """Of everything that is stored."""
        return DTYPES[self.dtype].itemsize * sum(module.numel for module in self._modules)

    def state(self) -> dict[str, Tensor]:
        """Return copies by name, each of its parameter's shape."""
        return {part.parameter.name: module.whole(part) for module, part in self._items()}

    def load(self, states: Iterable[Mapping[str, Tensor]]) -> None:
        """Take the mean of several ranks' residuals, by name and of the parameters' shapes, zero of
        none; nothing is taken from some that do not fit. What is in flight leaves no residuals.

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
