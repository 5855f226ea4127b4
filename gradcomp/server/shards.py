"""Shards of a large key, which are owned by different servers, and cutting and joining of payloads.

Shards depend on the number of elements, scale groups and `shard_nbytes`. They do not depend on the
number of servers, so results are bit for bit the same for any number of servers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradcomp.arguments import check_integer
from gradcomp.errors import CorruptPayload
from gradcomp.payload import wire
from gradcomp.payload.form import HEADER_NBYTES, Form
from gradcomp.payload.pieces import UNIT_NUMEL

DEFAULT_SHARD_NBYTES = 1 << 24
MAX_SHARD_NBYTES = 1 << 30
MAX_SHARDS = 1 << 16  # of one key


def check_shard_nbytes(nbytes: int) -> int:
    """Return the elements of a shard of `nbytes` bytes of float32; ValueError if out of range."""
    check_integer("shard_nbytes", nbytes, 4 * UNIT_NUMEL, MAX_SHARD_NBYTES)
    return nbytes // (4 * UNIT_NUMEL) * UNIT_NUMEL


@dataclass(frozen=True)
class Shards:
    """The shards of one key, numbered from 1."""

    numel: int  # elements of the key
    unit: int  # elements of every shard but the last
    group_numel: int  # elements of a scale group of whole payloads; 1 without scales
    form: Form  # form of the payloads

    @classmethod
    def of(cls, numel: int, limit: int, form: Form, group_numel: int = 1) -> Shards:
        """Return shards of about `limit` elements.

        A shard has whole scale groups, unless the key is a single group whose codes can be cut.

        Raises:
            ValueError: a scale group is too large for a message, or there are too many shards.
        """
        unit = min(limit, numel)
        if not form.scales_per_group:
            group_numel = 1
        if group_numel < numel or not form.cuts:
            grain = math.lcm(group_numel, UNIT_NUMEL)
            unit = min(numel, grain * max(1, limit // grain))
        if 4 * unit > MAX_SHARD_NBYTES:
            text = f"{unit} elements in scale groups of {group_numel} cannot be cut"
            raise ValueError(f"{text}; use smaller groups")
        if numel > MAX_SHARDS * unit:
            text = f"{numel} elements are more than {MAX_SHARDS} shards of {unit}"
            raise ValueError(f"{text}; raise shard_nbytes")
        # equal shards for all forms that give equal payloads
        form = form.of_payload(numel, form.code_nbytes(0, numel))
        return cls(numel, unit, group_numel, form)

    @property
    def one_group(self) -> bool:
        """Whether a whole payload has one scale group, which shards cut."""
        return self.group_numel >= self.numel

    @property
    def count(self) -> int:
        return -(-self.numel // self.unit)

    def bounds(self) -> list[tuple[int, int]]:
        """Return the range [first, last) of elements of every shard."""
        starts = range(0, self.numel, self.unit)
        return [(first, min(self.numel, first + self.unit)) for first in starts]

    def scales(self, first: int, last: int) -> slice:
        """Return the byte range, in a whole payload, of the scales of elements [first, last)."""
        begin, end = first // self.group_numel, -(-last // self.group_numel)
        if self.one_group:
            begin, end = 0, 1
        start, stop = (HEADER_NBYTES + self.form.scale_nbytes(group) for group in (begin, end))
        return slice(start, stop)

    def scales_end(self, first: int, last: int) -> int:
        """Return the byte offset of the end of the scales in the payload of a shard."""
        scales = self.scales(first, last)
        end: int = HEADER_NBYTES + scales.stop - scales.start
        return end

    def nbytes(self, first: int, last: int) -> int:
        """Return the size of the payload of a shard, in bytes."""
        return self.scales_end(first, last) + self.form.code_nbytes(first, last)

    def cut(self, payload: Tensor) -> list[Tensor]:
        """Return the payload of every shard of a payload whose header has been checked."""
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
        """Return the payload of the whole key. A scale group that was cut becomes one group for
        each shard.

        Raises:
            CorruptPayload: `parts` are not payloads of these shards.
        """
        if self.count == 1:
            return parts[0].clone()
        headers = [wire.parse(part.numpy()) for part in parts]
        free = {"flags": 0, "group_numel": 0}  # fields that may differ between shards
        scales, codes, flags, scale_count = [], [], 0, 0
        for (first, last), header, part in zip(self.bounds(), headers, parts, strict=True):
            end = self.scales_end(first, last)
            sizes = {"numel": last - first, "scale_count": (end - HEADER_NBYTES) // 4}
            like = headers[0]._replace(**sizes, **free)
            if header._replace(**free) != like or part.numel() != self.nbytes(first, last):
                text = f"the payload of elements {first} to {last} is not like the first shard's"
                raise CorruptPayload("message", text)
            scales.append(part[HEADER_NBYTES:end])
            codes.append(part[end:])
            flags |= header.flags
            scale_count += header.scale_count
        out = torch.cat([parts[0][:HEADER_NBYTES], *scales, *codes])
        whole = self._header(headers[0], self.numel, scale_count)
        wire.seal(out.numpy(), whole._replace(flags=flags))
        return out

    def _header(self, like: wire.Header, numel: int, scale_count: int) -> wire.Header:
        group = self.group_numel
        if not self.form.scales_per_group:
            group = numel
        elif self.one_group:
            group = self.unit
        return like._replace(numel=numel, group_numel=group, scale_count=scale_count)
