"""Slots and pieces: where a parameter lies in a bucket, and ranges of its elements in a message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter inside a bucket.

    Attributes:
        index: position in ``named_parameters()``.
        numel: elements.
        group_numel: elements of one scale group, at least 1.
        compressed: False for small and excluded tensors, which travel as fp32.
        offset: first element in the bucket.
        residual: first element in the residual plane.
        start: first element within the parameter, where the slot is a shard of one.
    """

    index: int
    numel: int
    group_numel: int
    compressed: bool
    offset: int
    residual: int = 0
    start: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, start + numel) of a parameter, lying at `data` in a flat tensor and at
    `residual` in a plane.
    """

    slot: Slot
    start: int
    numel: int
    data: int
    residual: int

    @property
    def group_count(self) -> int:
        """Scale groups that the piece touches, those it cuts included."""
        size = self.slot.group_numel
        return (self.start + self.numel - 1) // size - self.start // size + 1 if self.numel else 0


def whole_pieces(slots: Iterable[Slot]) -> list[Piece]:
    """Return every slot as one piece, in bucket coordinates."""
    return [Piece(s, s.start, s.numel, s.offset, s.residual) for s in slots]


class Shard(NamedTuple):
    """Pieces side by side in a flat tensor of `numel` elements."""

    pieces: list[Piece]
    numel: int


def shard_pieces(
    pieces: Sequence[Piece], residuals: Sequence[int], *, plain_only: bool = False
) -> Shard:
    """Return pieces laid side by side, each at a multiple of 16 elements.

    With `plain_only` the compressed pieces take no room there (their averages never stand in fp32).
    """
    out, data, numel = [], 0, 0
    for piece, residual in zip(pieces, residuals, strict=True):
        kept = not (plain_only and piece.slot.compressed)
        out.append(Piece(piece.slot, piece.start, piece.numel, data if kept else 0, residual))
        if kept:
            numel = data + piece.numel
            data += round_up(piece.numel, 16)
    return Shard(out, numel)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
