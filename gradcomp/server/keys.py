"""One key as a client knows it: what is asked of which shard, and what the replies make
together.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradcomp.codecs import Codec
from gradcomp.errors import CorruptPayload
from gradcomp.payload import wire
from gradcomp.payload.form import FORMS, ONEBIT, PLAIN
from gradcomp.server.messages import Message
from gradcomp.server.raw import RawCodes
from gradcomp.server.rounds import OPEN_ROUNDS
from gradcomp.server.shards import Shards
from gradcomp.server.spec import CODECS, MAX_NBYTES, Spec, codec_of, pack_spec


class ClientKey:
    """One key.

    Args:
        key: its name.
        given: its settings as the caller has them: shape and dtype are those of pushed values.
        spec: its settings as the server has them.
        raw: wraps raw codes into payloads; None: values are pushed as they come.
        codec: of its payloads, if the caller has named one.
        value: initial values of an asynchronous key.
        shard_numel: elements of a shard; a key that may have more is cut.

    Attributes:
        shape: of an uncompressed pull; None: flat, as long as its payloads say.
        spec: with `shard_numel`, where the key is cut.
        pushes: of this client.
        steps: rounds before this server began, by its checkpoint.
        complete: rounds that are known to be.
        maximum: what the last pull with "max" has given.

    Raises:
        ValueError: a key that is too large to be whole and cannot be cut.
    """

    def __init__(
        self,
        key: str,
        given: Spec,
        spec: Spec,
        raw: RawCodes | None,
        codec: Codec | None,
        value: Tensor | None,
        shard_numel: int,
    ) -> None:
        self.key, self.given, self.raw = key, given, raw
        self.pushes = self.complete = self.steps = 0
        self.maximum: Tensor | None = None
        self.shape = (
            spec.shape if spec.dtype == "float32" else raw.shape if raw is not None else None
        )
        if value is not None:
            self.shape = tuple(value.shape)
        self.spec, self._limit, self._shards = (
            spec,
            shard_numel,
            None,
        )  # the shards, once they are known
        numel = math.prod(self.shape) if self.shape is not None else _most_elements(spec)
        if numel > shard_numel and (value is None or spec.dtype == "float32" or codec is not None):
            crc = (
                0 if value is None else zlib.crc32(value.reshape(-1).view(torch.uint8).numpy().data)
            )
            self.spec = replace(spec, shard_numel=shard_numel, value_crc=crc)
            if spec.dtype == "float32":
                self._shards = Shards.of(numel, shard_numel, PLAIN)
            elif value is not None and codec is not None:
                self._shards = Shards.of(
                    numel, shard_numel, codec.form, codec.group_numel(tuple(value.shape))
                )
        elif max(spec.nbytes, 4 * (value.numel() if value is not None else 0)) > MAX_NBYTES:
            raise ValueError(
                f"key {key!r} has more than {MAX_NBYTES} bytes and is cut only if it has a codec="
            )

    _shards: Shards | None

    @property
    def is_cut(self) -> bool:
        return self.spec.shard_numel > 0

    @property
    def may_be_early(self) -> bool:
        """Whether a server may refuse the next push, since too many rounds are open."""
        return not self.spec.asynchronous and self.pushes + 1 > self.complete + OPEN_ROUNDS

    def shards(self) -> range:
        """Return the numbers of the shards that are pushed and pulled."""
        return (
            range(1, 1 + self._shards.count)
            if self._shards is not None
            else range(0 if self.is_cut else 1)
        )

    def settings(self, value: Tensor | None) -> list[tuple[int, Tensor]]:
        """Return what makes the key, by shard."""
        if not self.is_cut:
            return [(0, pack_spec(self.spec, value))]
        return [(0, pack_spec(self.spec, None)), *self._shard_settings(value)]

    def cut(self, body: Tensor) -> tuple[list[tuple[int, Tensor]], list[tuple[int, Tensor]]]:
        """Return what makes shards that are new, and what is pushed, both by shard.

        Args:
            body: a value or payload, ``(nbytes,)`` uint8.

        Raises:
            CorruptPayload: a payload that cannot be cut.
            ValueError: a payload of another tensor, or NaN or Inf for an asynchronous key.
        """
        if not self.is_cut:
            return [], [(0, body)]
        made: list[tuple[int, Tensor]] = []
        if self.spec.dtype == "float32":
            nonfinite = self.spec.asynchronous and not bool(
                torch.isfinite(body.view(torch.float32)).all()
            )
            parts = [body[4 * first : 4 * last] for first, last in self._known_shards().bounds()]
        else:
            header = self._checked(body)
            nonfinite = self.spec.asynchronous and header.nonfinite
            group = header.group_numel if FORMS[header.codec].scales_per_group else 1
            shards = Shards.of(header.numel, self._limit, FORMS[header.codec], group)
            if self._shards is None:
                self._shards = shards
                made = self._shard_settings(None)
            elif shards != self._shards:
                raise ValueError(
                    f"key {self.key!r} is cut as {self._shards}, this payload as {shards}"
                )
            parts = shards.cut(body)
        if nonfinite:
            raise ValueError(f"a push to key {self.key!r} holds NaN or Inf; it was not applied")
        return made, list(enumerate(parts, 1))

    def rooms(self, compressed: bool) -> list[int]:
        """Return the most bytes that each shard's reply to a pull can have."""
        if self.is_cut:
            bounds = self._known_shards().bounds()
            return [
                max(4 * (last - first), self._known_shards().nbytes(first, last))
                for first, last in bounds
            ]
        if self.shape is not None and not compressed:
            return [4 * math.prod(self.shape)]
        return [4 * max(codec.form.most_numel(self.spec.nbytes) for codec in CODECS.values())]

    def join(self, replies: Sequence[Message], compressed: bool) -> Tensor:
        """Return what a pull gives.

        Raises:
            CorruptPayload: replies that cannot be a pull's.
        """
        parts = [reply.data() for reply in replies]
        if compressed:
            return parts[0].clone() if not self.is_cut else self._known_shards().join(parts)
        nbytes = [part.numel() for part in parts]
        if self.is_cut:
            wanted = [4 * (last - first) for first, last in self._known_shards().bounds()]
        else:
            wanted = nbytes if self.shape is None else [4 * math.prod(self.shape)]
        if nbytes != wanted or any(n % 4 for n in nbytes):
            raise CorruptPayload(
                "message", f"the replies to a pull of {self.key!r} have {nbytes} bytes"
            )
        pulled = torch.cat([part.view(torch.float32) for part in parts])
        return pulled if self.shape is None else pulled.view(self.shape)

    # ---- parts
    # ----------------------------------------------------------------------------------------------

    def _known_shards(self) -> Shards:
        if self._shards is None:
            raise ValueError(
                f"key {self.key!r} is cut by its first payload: push one before the first pull"
            )
        return self._shards

    def _shard_settings(self, value: Tensor | None) -> list[tuple[int, Tensor]]:
        if self._shards is None:
            return []
        flat = None if value is None else value.reshape(-1)
        out = []
        for number, (first, last) in enumerate(self._shards.bounds(), 1):
            nbytes = (
                4 * (last - first)
                if self.spec.dtype == "float32"
                else self._shards.nbytes(first, last)
            )
            spec = replace(self.spec, first=first, part_nbytes=nbytes)
            out.append((number, pack_spec(spec, None if flat is None else flat[first:last])))
        return out

    def _checked(self, payload: Tensor) -> wire.Header:
        """Return the header of a payload that can be cut: whatever it holds, it is all there."""
        header = wire.parse(payload.numpy())
        if header.segmented:
            raise CorruptPayload("segmented", "a server takes payloads of one tensor")
        codec = codec_of(self.spec, header)
        codec.check_header(header, codec._layout_of(header, payload.numel()), payload.numel())
        return header


def _most_elements(spec: Spec) -> int:
    """Return the most elements that a payload of a key's bytes can hold, those of 1 bit where
    its codec is not known.
    """
    return FORMS[spec.codec or ONEBIT.code].most_numel(spec.numel)
