"""One key as a client knows it: which shards it has, and what is pushed to and pulled from them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradcomp.codecs import Codec, TernGrad
from gradcomp.errors import CorruptPayload
from gradcomp.payload import wire
from gradcomp.payload.form import FORMS, HEADER_NBYTES, ONEBIT, PLAIN
from gradcomp.server.messages import Message
from gradcomp.server.parameters import OPEN_ROUNDS
from gradcomp.server.reduce import parse_payload
from gradcomp.server.shards import Shards
from gradcomp.server.spec import CODECS, MAX_NBYTES, Spec, pack_spec

CODES_A_BYTE = 8 // TernGrad.form.bits
_CODES_AT = HEADER_NBYTES + 4 * TernGrad.form.scales_per_group  # in a payload


class RawCodes:
    """Makes payloads of raw 2-bit codes, which a trainer has packed itself: the bytes of ternary
    payloads without header and scale.

    Args:
        shape: of the bytes.
        scale_key: key whose maximum is the scale; None: the scale is 1.

    Attributes:
        codec, payload_shape: of the payloads.
        shape: of the values: four times the last dimension of the bytes.

    Raises:
        ValueError: more codes than a payload holds.
    """

    codec = TernGrad(clip_sigma=None, scale="shared")

    def __init__(self, shape: tuple[int, ...], scale_key: str | None) -> None:
        self.scale_key = scale_key
        self.shape = (*shape[:-1], CODES_A_BYTE * (shape[-1] if shape else 1))
        self._numel = math.prod(self.shape)
        if self._numel >= 2**32:
            raise ValueError(
                f"shape {shape!r} holds {self._numel} codes; a payload holds fewer than 2**32"
            )
        self.payload_shape = (self.codec.payload_nbytes(self._numel),)

    def payload(self, codes: Tensor, scale: float, step: int) -> Tensor:
        """Return the payload of codes (uint8) with that value of code +1 and that step in its
        header; it is flagged as non-finite if the scale is.
        """
        numel, nonfinite = self._numel, not math.isfinite(scale)
        payload = torch.zeros(self.payload_shape, dtype=torch.uint8)
        if numel:
            payload[HEADER_NBYTES:_CODES_AT].view(torch.float32)[0] = 0.0 if nonfinite else scale
            payload[_CODES_AT:] = codes.view(-1)
        flags, scales = nonfinite * wire.FLAG_NONFINITE, int(numel > 0)
        code, group = TernGrad.form.code, max(1, numel)
        header = wire.Header(code, 0, flags, numel, group, scales, step % 2**32, 0)
        wire.seal(payload.numpy(), header)
        return payload


class ClientKey:
    """One key.

    Args:
        key: its name.
        given: its settings as the caller has them: shape and dtype are those of pushed values.
        spec: its settings as the server has them.
        raw: makes payloads of raw codes; None: values are pushed as they are.
        codec: of its payloads, where it is known.
        value: initial values of an asynchronous key.
        shard_numel: elements of a shard; a key that may have more is cut.

    Attributes:
        shape: of an uncompressed pull; None: flat, as long as its payloads say.
        spec: with `shard_numel`, where the key is cut.
        pushes: of this client.
        steps: rounds before this server began, by its checkpoint.
        complete: the newest round that is known to be complete.
        maximum: what the last pull with "max" returned.

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
        self.key, self.given, self.spec, self.raw = key, given, spec, raw
        self.pushes = self.complete = self.steps = 0
        self.maximum: Tensor | None = None
        self._limit, self._shards = shard_numel, None
        is_float = spec.dtype == "float32"
        self.shape = spec.shape if is_float else raw.shape if raw is not None else None
        if value is not None:
            self.shape = tuple(value.shape)
        # the most elements that a payload of so many bytes can hold, where its shape is not known
        most = FORMS[spec.codec or ONEBIT.code].most_numel(spec.numel)
        numel = most if self.shape is None else math.prod(self.shape)
        if numel > shard_numel and (value is None or is_float or codec is not None):
            crc = 0
            if value is not None:
                crc = zlib.crc32(value.reshape(-1).view(torch.uint8).numpy().data)
            self.spec = replace(spec, shard_numel=shard_numel, value_crc=crc)
            if is_float:
                self._shards = Shards.of(numel, shard_numel, PLAIN)
            elif value is not None and codec is not None:
                group = codec.group_numel(tuple(value.shape))
                self._shards = Shards.of(numel, shard_numel, codec.form, group)
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

    def settings(self, value: Tensor | None = None) -> list[tuple[int, Tensor]]:
        """Return the bodies of the INIT requests that make the key, by shard; of a key that is cut
        those shards that are known.
        """
        if not self.is_cut:
            return [(0, pack_spec(self.spec, value))]
        made = [(0, pack_spec(self.spec))]
        bounds = [] if self._shards is None else self._shards.bounds()
        for number, (first, last) in enumerate(bounds, 1):
            nbytes = 4 * (last - first)
            if self._shards is not None and self.spec.dtype != "float32":
                nbytes = self._shards.nbytes(first, last)
            part = None if value is None else value.reshape(-1)[first:last]
            spec = replace(self.spec, first=first, part_nbytes=nbytes)
            made.append((number, pack_spec(spec, part)))
        return made

    def pushed(self, body: Tensor) -> tuple[list[tuple[int, Tensor]], list[tuple[int, Tensor]]]:
        """Return the bodies of the requests of a push, INIT and PUSH, by shard.

        INIT goes to new shards, and to the settings of any cut key, so that this client gets an
        error if other clients use the key with different settings.

        Args:
            body: a value or payload, ``(nbytes,)`` uint8.

        Raises:
            CorruptPayload: a payload that cannot be cut.
            ValueError: a payload of another tensor, or NaN or Inf for an asynchronous key.
        """
        if not self.is_cut:
            return [], [(0, body)]
        made = [(0, pack_spec(self.spec))]
        if self.spec.dtype == "float32":
            values = body.view(torch.float32)
            nonfinite = self.spec.asynchronous and not bool(values.isfinite().all())
            parts = [body[4 * first : 4 * last] for first, last in self._known_shards().bounds()]
        else:
            header, *_ = parse_payload(self.spec, body)
            nonfinite, form = header.nonfinite, FORMS[header.codec]
            group = header.group_numel if form.scales_per_group else 1
            shards = Shards.of(header.numel, self._limit, form, group)
            if self._shards is None:
                self._shards = shards
                made = self.settings()
            elif shards != self._shards:
                raise ValueError(
                    f"key {self.key!r} is cut as {self._shards}, this payload as {shards}"
                )
            parts = shards.cut(body)
        if nonfinite and self.spec.asynchronous:
            raise ValueError(f"a push to key {self.key!r} holds NaN or Inf; it was not applied")
        return made, list(enumerate(parts, 1))

    def pulled(self, compressed: bool) -> list[tuple[int, int]]:
        """Return the shards that a pull asks, and the most bytes that each one's reply can have."""
        if self.is_cut:
            shards = self._known_shards()
            rooms = [
                max(4 * (end - start), shards.nbytes(start, end)) for start, end in shards.bounds()
            ]
            return list(enumerate(rooms, 1))
        if self.shape is not None and not compressed:
            return [(0, 4 * math.prod(self.shape))]
        return [(0, 4 * max(kind.form.most_numel(self.spec.nbytes) for kind in CODECS.values()))]

    def join(self, replies: Sequence[Message], compressed: bool) -> Tensor:
        """Return the result of a pull.

        Raises:
            CorruptPayload: replies that do not answer it.
        """
        parts = [reply.data() for reply in replies]
        if compressed:
            return parts[0].clone() if not self.is_cut else self._known_shards().join(parts)
        nbytes = [part.numel() for part in parts]
        wanted = nbytes if self.shape is None else [4 * math.prod(self.shape)]
        if self.is_cut:
            wanted = [4 * (last - first) for first, last in self._known_shards().bounds()]
        if nbytes != wanted or any(n % 4 for n in nbytes):
            raise CorruptPayload(
                "message", f"the replies to a pull of {self.key!r} have {nbytes} bytes"
            )
        pulled = torch.cat([part.view(torch.float32) for part in parts])
        return pulled if self.shape is None else pulled.view(self.shape)

    def _known_shards(self) -> Shards:
        if self._shards is None:
            raise ValueError(
                f"key {self.key!r} is cut by its first payload: push one before the first pull"
            )
        return self._shards
