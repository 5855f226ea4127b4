"""The parameters of an FSDP module: how they travel, and where the chunks of all ranks stand
side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradcomp.memory.planes import Planes
from gradcomp.payload.parameters import Parameter
from gradcomp.payload.pieces import Slot


@dataclass(frozen=True)
class Part:
    """One parameter of an FSDP module.

    Attributes:
        parameter: how it travels.
        number: its place among all names in order.
        owner: torch's own object for it.
        chunks: the shape of every rank's chunk, the largest first.
        dim: along which it is cut.
    """

    parameter: Parameter
    number: int
    owner: Any
    chunks: list[tuple[int, ...]]
    dim: int

    @property
    def sharded(self) -> nn.Parameter:
        """The parameter as ``model.parameters()`` has it, also after ``load_state_dict(...,
        assign=True)``.
        """
        return self.owner.sharded_param  # type: ignore[no-any-return]

    @property
    def padded_numel(self) -> int:
        """Elements that every rank's chunk takes, padding included."""
        return numel_of(self.chunks[0])

    @property
    def slot_indices(self) -> range:
        """Positions of every rank's chunk among slots: number times N plus rank."""
        first = self.number * len(self.chunks)
        return range(first, first + len(self.chunks))

    def joined(self, chunks: Iterable[Tensor]) -> Tensor:
        """Return a copy of the parameter's shape from every rank's chunk, ``(numel,)`` each."""
        shaped = [flat.view(shape) for flat, shape in zip(chunks, self.chunks, strict=True)]
        return torch.cat(shaped, self.dim)

    def split(self, whole: Tensor) -> list[Tensor]:
        """Return every rank's chunk of values of the parameter's shape."""
        return list(torch.split(whole, [shape[self.dim] for shape in self.chunks], self.dim))


def number_of(parts: Sequence[Part]) -> int:
    """Return the number of the module with these parameters in headers: from 1, and the same
    whatever else is wrapped.
    """
    return 1 + min(part.number for part in parts)


def slots_of(
    parts: Sequence[Part], world_size: int, residuals: Planes | None = None
) -> list[list[Slot]]:
    """Return where every rank's chunks stand in a flat whole that has them rank after rank, a slot
    each, and what codes leave out of them in the planes of `residuals`.
    """
    each = sum(part.padded_numel for part in parts)
    out = []
    for rank in range(world_size):
        offset, slots = rank * each, []
        for part in parts:
            p = part.parameter
            index, numel = part.slot_indices[rank], numel_of(part.chunks[rank])
            residual = residuals.offset(index) if residuals is not None and p.compressed else 0
            slots.append(Slot(index, numel, p.group_numel, p.compressed, offset, residual))
            offset += part.padded_numel
        out.append(slots)
    return out


def numel_of(shape: Sequence[int]) -> int:
    """Return the elements of a shape."""
    return torch.Size(shape).numel()
