"""How a large key is cut into shards, which live on different servers, and how payloads are cut and
joined.

A function of (elements, scale groups, `shard_nbytes`) and never of the number of servers, so that
another number changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradcomp.errors import CorruptPayload
from gradcomp.payload import wire
from gradcomp.payload.form import HEADER_NBYTES, Form
from gradcomp.payload.ownership import UNIT_NUMEL

DEFAULT_SHARD_NBYTES = 1 << 24
MAX_SHARD_NBYTES = 1 << 30
MAX_SHARDS = 1 << 16  # of one key


def check_shard_nbytes(nbytes: object) -> int:
    """Return the elements of a shard of so many bytes of float32 values.

    Raises:
        ValueError: it is no number of bytes in its range.
    """
    smallest = 4 * UNIT_NUMEL
    if (
        isinstance(nbytes, bool)
        or not isinstance(nbytes, int)
        or not smallest <= nbytes <= MAX_SHARD_NBYTES
    ):
        raise ValueError(
            f"shard_nbytes must be between {smallest} and {MAX_SHARD_NBYTES} bytes, got {nbytes!r}"
        )
    return nbytes // smallest * UNIT_NUMEL


@dataclass(frozen=True)
class Shards:
    """The shards of one key, numbered from 1.

    Attributes:
        numel: elements of the key.
        unit: elements of every shard but the last.
        group_numel: elements of a scale group of whole payloads; 1 for values.
        form: of the payloads.
    """

    numel: int
    unit: int
    group_numel: int
    form: Form

    @classmethod
    def of(cls, numel: int, limit: int, form: Form, group_numel: int = 1) -> Shards:
        """Return shards of about `limit` elements: whole scale groups, unless the whole key is one.

        Raises:
            ValueError: a scale group that no message holds, or more shards than a key may have.
        """
        unit = min(limit, numel)
        if group_numel < numel or form.group_numel is not None:
            grain = math.lcm(group_numel, UNIT_NUMEL)
            unit = min(numel, grain * max(1, limit // grain))
        if 4 * unit > MAX_SHARD_NBYTES:
            raise ValueError(
                f"{unit} elements in scale groups of {group_numel} cannot be cut; use smaller"
                " groups"
            )
        if numel > MAX_SHARDS * unit:
            raise ValueError(
                f"{numel} elements are more than {MAX_SHARDS} shards of {unit}; raise shard_nbytes"
            )
        return cls(numel, unit, group_numel, form)

    @property
    def one_group(self) -> bool:
        """Whether a whole payload has one scale group, which is cut."""
        return self.form.group_numel is None and self.group_numel >= self.numel

    @property
    def count(self) -> int:
        return -(-self.numel // self.unit)

    def bounds(self) -> Iterator[tuple[int, int]]:
        """Yield the elements [first, last) of every shard."""
        for first in range(0, self.numel, self.unit):
            yield first, min(self.numel, first + self.unit)

    def groups(self, first: int, last: int) -> tuple[int, int]:
        """Return the scale groups [first, last) of some elements of a whole payload."""
        if not self.form.scales_per_group:
            return 0, 0
        return (
            (0, 1) if self.one_group else (first // self.group_numel, -(-last // self.group_numel))
        )

    def nbytes(self, first: int, last: int) -> int:
        """Return the bytes of the payload of a shard."""
        begin, end = self.groups(first, last)
        return (
            HEADER_NBYTES + self.form.scale_nbytes(end - begin) + self.form.code_nbytes(first, last)
        )

    def cut(self, payload: Tensor) -> list[Tensor]:
        """Return the payload of every shard.

        Args:
            payload: of the whole key, its header checked, ``(nbytes,)`` uint8.
        """
        if self.count == 1:
            return [payload]
        header, form = wire.parse(payload.numpy()), self.form
        codes = HEADER_NBYTES + 4 * header.scale_count
        parts = []
        for first, last in self.bounds():
            begin, end = (
                HEADER_NBYTES + form.scale_nbytes(group) for group in self.groups(first, last)
            )
            start = codes + form.code_nbytes(0, first)
            run = payload[start : start + form.code_nbytes(first, last)]
            part = torch.cat([payload[:HEADER_NBYTES], payload[begin:end], run])
            wire.seal(part.numpy(), self._header(header, last - first, (end - begin) // 4))
            parts.append(part)
        return parts

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the payload of the whole key; a group that was cut becomes one of every shard.

        Args:
            parts: a payload of every shard.

        Raises:
            CorruptPayload: they are not payloads of these shards.
        """
        if self.count == 1:
            return parts[0].clone()
        headers = [wire.parse(part.numpy()) for part in parts]
        scales, codes = [], []
        for (first, last), header, part in zip(self.bounds(), headers, parts, strict=True):
            begin, end = self.groups(first, last)
            count = self.form.scale_nbytes(end - begin) // 4
            if header[:2] + header[6:] != headers[0][:2] + headers[0][
                6:
            ] or part.numel() != self.nbytes(first, last):
                raise CorruptPayload(
                    "message",
                    f"the payload of elements {first} to {last} is not like the first shard's",
                )
            if (header.numel, header.scale_count) != (last - first, count):
                raise CorruptPayload(
                    "message", f"a shard of {header.numel} elements, {last - first} expected"
                )
            scales.append(part[HEADER_NBYTES : HEADER_NBYTES + 4 * count])
            codes.append(part[HEADER_NBYTES + 4 * count :])
        out = torch.cat([parts[0][:HEADER_NBYTES], *scales, *codes])
        flags = 0
        for header in headers:
            flags |= header.flags
        whole = self._header(headers[0], self.numel, sum(header.scale_count for header in headers))
        wire.seal(out.numpy(), whole._replace(flags=flags))
        return out

    def _header(self, like: wire.Header, numel: int, scale_count: int) -> wire.Header:
        group = (
            numel
            if not self.form.scales_per_group
            else self.unit
            if self.one_group
            else self.group_numel
        )
        return like._replace(numel=numel, group_numel=group, scale_count=scale_count)
