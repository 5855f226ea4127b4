"""How a large key is cut into shards, which live on different servers, and how payloads are cut and
joined.

Shards depend on elements, scale groups and `shard_nbytes`, and never on the number of servers, so
that another number changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

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
        ValueError: not a number of bytes in its range.
    """
    low, high = 4 * UNIT_NUMEL, MAX_SHARD_NBYTES
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or not low <= nbytes <= high:
        raise ValueError(f"shard_nbytes must be between {low} and {high} bytes, got {nbytes!r}")
    return nbytes // low * UNIT_NUMEL


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
        if group_numel < numel:
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
        return self.group_numel >= self.numel

    @property
    def count(self) -> int:
        return -(-self.numel // self.unit)

    def bounds(self) -> list[tuple[int, int]]:
        """Return the elements [first, last) of every shard."""
        starts = range(0, self.numel, self.unit)
        return [(first, min(self.numel, first + self.unit)) for first in starts]

    def scales(self, first: int, last: int) -> slice:
        """Return where a whole payload has the scales of some elements, in bytes."""
        begin, end = first // self.group_numel, -(-last // self.group_numel)
        if self.one_group:
            begin, end = 0, 1
        start, stop = (HEADER_NBYTES + self.form.scale_nbytes(group) for group in (begin, end))
        return slice(start, stop)

    def nbytes(self, first: int, last: int) -> int:
        """Return the bytes of the payload of a shard."""
        scales = self.scales(first, last)
        nbytes: int = HEADER_NBYTES + scales.stop - scales.start
        return nbytes + self.form.code_nbytes(first, last)

    def cut(self, payload: Tensor) -> list[Tensor]:
        """Return the payload of every shard.

        Args:
            payload: of the whole key, its header checked, ``(nbytes,)`` uint8.
        """
        if self.count == 1:
            return [payload]
        header, parts = wire.parse(payload.numpy()), []
        start = HEADER_NBYTES + 4 * header.scale_count
        for first, last in self.bounds():
            scales, codes = payload[self.scales(first, last)], self.form.code_nbytes(first, last)
            part = torch.cat([payload[:HEADER_NBYTES], scales, payload[start : start + codes]])
            wire.seal(part.numpy(), self._header(header, last - first, scales.numel() // 4))
            parts.append(part)
            start += codes
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
            end = self.nbytes(first, last) - self.form.code_nbytes(first, last)
            like = headers[0]._replace(
                flags=header.flags, numel=last - first, scale_count=(end - HEADER_NBYTES) // 4
            )
            group = header.group_numel
            if header != like._replace(group_numel=group) or part.numel() != self.nbytes(
                first, last
            ):
                raise CorruptPayload(
                    "message",
                    f"the payload of elements {first} to {last} is not like the first shard's",
                )
            scales.append(part[HEADER_NBYTES:end])
            codes.append(part[end:])
        out = torch.cat([parts[0][:HEADER_NBYTES], *scales, *codes])
        scale_count = sum(header.scale_count for header in headers)
        whole = self._header(headers[0], self.numel, scale_count)
        flags = reduce(or_, (header.flags for header in headers))
        wire.seal(out.numpy(), whole._replace(flags=flags))
        return out

    def _header(self, like: wire.Header, numel: int, scale_count: int) -> wire.Header:
        group = self.group_numel
        if not self.form.scales_per_group:
            group = numel
        elif self.one_group:
            group = self.unit
        return like._replace(numel=numel, group_numel=group, scale_count=scale_count)
