"""The parameters of an FSDP module: how they travel, and where the chunks of all ranks stand
side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradcomp.payload.parameters import Parameter
from gradcomp.payload.pieces import Slot


@dataclass(frozen=True)
class Part:
    """One parameter of an FSDP module.

    Attributes:
        parameter: how it travels.
        number: its place among all names in order.
        sharded: as ``model.parameters()`` has it.
        chunks: the shape of every rank's chunk, the largest first.
        dim: along which it is cut.
    """

    parameter: Parameter
    number: int
    sharded: nn.Parameter
    chunks: list[tuple[int, ...]]
    dim: int

    @property
    def padded_numel(self) -> int:
        """Elements that every rank's chunk takes, padding included."""
        return numel_of(self.chunks[0])

    def joined(self, rows: Tensor) -> Tensor:
        """Return values of the parameter's shape from ``(N, padded_numel)``, a row for every rank's
        chunk.
        """
        return torch.cat(
            [
                row[: numel_of(shape)].view(shape)
                for row, shape in zip(rows, self.chunks, strict=True)
            ],
            self.dim,
        )

    def split(self, whole: Tensor) -> list[Tensor]:
        """Return every rank's chunk of values of the parameter's shape."""
        return list(torch.split(whole, [shape[self.dim] for shape in self.chunks], self.dim))


def number_of(parts: Sequence[Part]) -> int:
    """Return the number of the module with these parameters in headers: from 1, and the same
    whatever else is wrapped.
    """
    return 1 + min(part.number for part in parts)


def slots_of(parts: Sequence[Part], world_size: int) -> list[list[Slot]]:
    """Return where every rank's chunks stand in a flat whole that has them rank after rank, a slot
    each: number times N plus rank.

    What codes leave out of a chunk stands at the same place of a plane.
    """
    each = sum(part.padded_numel for part in parts)
    out = []
    for rank in range(world_size):
        offset, slots = rank * each, []
        for part in parts:
            p = part.parameter
            numel = numel_of(part.chunks[rank])
            slots.append(
                Slot(
                    part.number * world_size + rank,
                    numel,
                    p.group_numel,
                    p.compressed,
                    offset,
                    offset,
                )
            )
            offset += part.padded_numel
        out.append(slots)
    return out


def numel_of(shape: Sequence[int]) -> int:
    """Return the elements of a shape."""
    return torch.Size(shape).numel()
