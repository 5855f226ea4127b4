"""The parameters of an FSDP module, and the layout of all ranks' chunks in one flat tensor."""

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
        parameter: name, unsharded shape, and whether it is compressed.
        number: position of its name among all names in sorted order.
        owner: the ``FSDPParam`` of torch.
        chunks: shape of every rank's chunk, the largest first.
        dim: dimension along which the parameter is sharded.
    """

    parameter: Parameter
    number: int
    owner: Any
    chunks: list[tuple[int, ...]]
    dim: int

    @property
    def sharded(self) -> nn.Parameter:
        """The sharded parameter in ``model.parameters()``, also after ``load_state_dict(...,
        assign=True)``.
        """
        return self.owner.sharded_param  # type: ignore[no-any-return]

    @property
    def padded_numel(self) -> int:
        """Number of elements of every rank's chunk, padding included."""
        return numel_of(self.chunks[0])

    @property
    def slot_indices(self) -> range:
        """Slot positions of the chunks, by rank: number * N + rank."""
        first = self.number * len(self.chunks)
        return range(first, first + len(self.chunks))

    def joined(self, chunks: Iterable[Tensor]) -> Tensor:
        """Return the chunks of all ranks, ``(numel,)`` each, joined to a new tensor of the
        parameter's shape.
        """
        shaped = [flat.view(shape) for flat, shape in zip(chunks, self.chunks, strict=True)]
        return torch.cat(shaped, self.dim)

    def split(self, whole: Tensor) -> list[Tensor]:
        """Return the chunk of each rank of a tensor of the parameter's shape, as views."""
        return list(torch.split(whole, [shape[self.dim] for shape in self.chunks], self.dim))


def number_of(parts: Sequence[Part]) -> int:
    """Return the number in headers of the module with these parameters: at least 1, and independent
    of how other modules are wrapped.
    """
    return 1 + min(part.number for part in parts)


def slots_of(
    parts: Sequence[Part], world_size: int, residuals: Planes | None = None
) -> list[list[Slot]]:
    """Return for every rank the slots of its chunks, one per parameter. Slots have offsets in a
    flat tensor with the chunks of all ranks in rank order, and in the planes of `residuals`.
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
    """Return the number of elements of a shape."""
    return torch.Size(shape).numel()
