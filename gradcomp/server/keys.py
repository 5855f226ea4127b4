"""A key on the client's side: its shards, and the bodies of its requests and replies."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradcomp.codecs import Codec, TernGrad
from gradcomp.codecs.checks import check_memory
from gradcomp.errors import CorruptPayload, PeerLost
from gradcomp.payload import wire
from gradcomp.payload.form import HEADER_NBYTES, ONEBIT, PLAIN
from gradcomp.server.messages import Message
from gradcomp.server.parameters import OPEN_ROUNDS
from gradcomp.server.shards import Shards
from gradcomp.server.spec import CODECS, DTYPES, MAX_NBYTES, Spec, pack_spec, parse_payload

CODES_A_BYTE = TernGrad.form.most_numel(1)
_CODES_AT = HEADER_NBYTES + 4 * TernGrad.form.scales_per_group  # byte offset in a payload
Parts = list[tuple[int, Tensor]]  # shard numbers and bodies of requests


@dataclass(frozen=True)
class RawCodes:
    """Converts raw 2-bit codes, ternary payloads without header and scale, to payloads."""

    codes_shape: tuple[int, ...]  # of uint8, four codes per byte
    scale_key: ClientKey | None  # its last pull with "max" is the scale of the payloads; None: 1
    codec: ClassVar[Codec] = TernGrad(clip_sigma=None, scale="shared")

    def __post_init__(self) -> None:
        if math.prod(self.shape) >= 2**32:
            text = f"shape {self.codes_shape!r} holds {math.prod(self.shape)} codes"
            raise ValueError(f"{text}, not fewer than 2**32")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values, which is `codes_shape` with four times the last dimension."""
        *rows, last = self.codes_shape or (1,)
        return (*rows, CODES_A_BYTE * last)

    @property
    def payload_shape(self) -> tuple[int]:
        return (self.codec.payload_nbytes(math.prod(self.shape)),)

    def payload(self, key: str, codes: Tensor, step: int) -> Tensor:
        """Return the payload of `codes`; ValueError for a scale that is negative or not pulled."""
        scale, numel = 1.0, math.prod(self.shape)
        if self.scale_key is not None:
            if self.scale_key.maximum is None:
                first = f'pull {self.scale_key.key!r} with "max"'
                raise ValueError(f"{first} before you push to key {key!r}, which it scales")
            scale = float(self.scale_key.maximum)
        if scale < 0:
            raise ValueError(f"the scale of key {key!r} must not be negative, it is {scale}")
        nonfinite = not math.isfinite(scale)
        payload = torch.zeros(self.payload_shape, dtype=torch.uint8, device="cpu")
        if numel:
            payload[HEADER_NBYTES:_CODES_AT].view(torch.float32)[0] = 0.0 if nonfinite else scale
            payload[_CODES_AT:] = codes.view(-1)
        code, group, scales = TernGrad.form.code, max(1, numel), int(numel > 0)
        header = wire.Header(code, 0, nonfinite, numel, group, scales, step % 2**32, 0)
        wire.seal(payload.numpy(), header)
        return payload


class ClientKey:
    """A key of a client, which is cut into shards if it may have more than `shard_numel` elements.

    `raw` converts raw codes to payloads (None: values are pushed unchanged); `value` are the
    initial values of an asynchronous key.
    """

    def __init__(
        self, key: str, spec: Spec, raw: RawCodes | None, value: Tensor | None, shard_numel: int
    ) -> None:
        self.key, self.spec, self._raw = key, spec, raw
        self._dtype = DTYPES[spec.dtype]  # dtype and shape of pushed values
        self._push_shape = spec.shape if raw is None else raw.codes_shape
        self.pushes = 0  # number of pushes of this client
        self.steps = 0  # number of rounds in the checkpoint of the server
        self.complete = 0  # newest round known to be complete
        self.maximum: Tensor | None = None  # result of the last pull with "max"
        self.lost: PeerLost | None = None  # error of a push that some shards may have got
        self._shards: Shards | None = None
        codec, is_float = spec.codec, spec.dtype == "float32"
        # shape of an uncompressed pull; None: (numel,), with numel as in its payloads
        self.shape = spec.shape if is_float else raw.shape if raw is not None else None
        if value is not None:
            self.shape = value.shape
        # if the shape is unknown, the most elements that a payload of this size can have
        most = (ONEBIT if codec is None else codec.form).most_numel(spec.numel)
        numel = most if self.shape is None else math.prod(self.shape)
        if numel > shard_numel and (value is None or is_float or codec is not None):
            start = b"" if value is None else value.reshape(-1).view(torch.uint8).numpy().data
            self.spec = replace(
                spec,
                shard_numel=shard_numel,
                value_crc=zlib.crc32(start),
                value_text="" if value is None else _summary(value),
            )
            if is_float:
                self._shards = Shards.of(numel, shard_numel, PLAIN)
            elif value is not None and codec is not None:
                group = codec.group_numel(tuple(value.shape))
                self._shards = Shards.of(numel, shard_numel, codec.form, group)
        elif max(spec.nbytes, 4 * (value.numel() if value is not None else 0)) > MAX_NBYTES:
            text = f"key {key!r} has more than {MAX_NBYTES} bytes"
            raise ValueError(f"{text} and is cut only if it has a codec=")

    def is_made_like(self, other: ClientKey) -> bool:
        """Return whether both have the same settings, checkpoint steps and scale key."""
        return (self.spec, self.steps, self._raw) == (other.spec, other.steps, other._raw)

    @property
    def is_cut(self) -> bool:
        return self.spec.shard_numel > 0

    @property
    def may_be_early(self) -> bool:
        """Whether a server may reject the next push because too many rounds are open."""
        return not self.spec.asynchronous and self.pushes + 1 > self.complete + OPEN_ROUNDS

    def settings(self, value: Tensor | None = None) -> Parts:
        """Return the bodies of the INIT requests that create the key and its known shards."""
        if not self.is_cut:
            return [(0, pack_spec(self.spec, value))]
        made = [(0, pack_spec(self.spec))]
        if self._shards is not None:
            for number, (first, last) in enumerate(self._shards.bounds(), 1):
                is_float = self.spec.dtype == "float32"
                nbytes = 4 * (last - first) if is_float else self._shards.nbytes(first, last)
                part = None if value is None else value.reshape(-1)[first:last]
                spec = replace(self.spec, first=first, part_nbytes=nbytes)
                made.append((number, pack_spec(spec, part)))
        return made

    def body(self, value: Any) -> Tensor:
        """Check a pushed value; return it, or the payload of raw codes, as ``(nbytes,)`` uint8."""
        dtype, shape = self._dtype, self._push_shape
        tensor = value if isinstance(value, Tensor) else self._tensor_of(value)
        check_memory(tensor, "value")
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            got = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            raise ValueError(f"key {self.key!r} takes {dtype} of shape {shape}, got {got}")
        tensor = tensor.detach().cpu()
        if self._raw is not None:
            tensor = self._raw.payload(self.key, tensor, self.steps + self.pushes)
        return tensor.reshape(-1).view(torch.uint8)

    def _tensor_of(self, value: object) -> Tensor:
        """Return numbers as a tensor. A key of one element also accepts a single number."""
        try:
            numbers = torch.as_tensor(value, device="cpu")
            tensor = numbers.to(self._dtype)
        except (TypeError, ValueError, RuntimeError) as error:
            text = f"value of key {self.key!r} must be a tensor or numbers, got {value!r}"
            raise ValueError(text) from error
        if self._dtype == torch.uint8 and not torch.equal(numbers, tensor.to(numbers.dtype)):
            shown = f"{numbers.tolist()!r:.100}"
            raise ValueError(f"value of key {self.key!r} must be bytes, got {shown}")
        is_one = not tensor.dim() and math.prod(self._push_shape) == 1
        return tensor.view(self._push_shape) if is_one else tensor

    def pushed(self, body: Tensor) -> tuple[Parts, Parts]:
        """Return the bodies of the INIT requests and of the PUSH requests of a push.

        INIT requests are sent for new shards. For a cut key, one is always sent for its settings,
        so that this client gets an error if other clients use the key with different settings.
        """
        if not self.is_cut:
            return [], [(0, body)]
        made = [(0, pack_spec(self.spec))]
        if self.spec.dtype == "float32":
            values = body.view(torch.float32)
            nonfinite = self.spec.asynchronous and not bool(values.isfinite().all())
            parts = [body[4 * first : 4 * last] for first, last in self._known_shards().bounds()]
        else:
            header, codec, _ = parse_payload(self.spec, body)
            nonfinite = header.nonfinite
            shards = Shards.of(header.numel, self.spec.shard_numel, codec.form, header.group_numel)
            if self._shards is None:
                self._shards = shards
                made = self.settings()
            elif shards != self._shards:
                text = f"key {self.key!r} is cut as {self._shards}, this payload as {shards}"
                raise ValueError(text)
            parts = shards.cut(body)
        if nonfinite and self.spec.asynchronous:
            raise ValueError(f"a push to key {self.key!r} holds NaN or Inf; it was not applied")
        return made, list(enumerate(parts, 1))

    def shards(self) -> range:
        """Return the numbers of the shards that a pull requests."""
        return range(1, self._known_shards().count + 1) if self.is_cut else range(1)

    def reply_nbytes(self) -> int:
        """Return the largest size of a reply to a pull, in bytes; 0 while shards are unknown."""
        if self.is_cut and self._shards is None:
            return 0
        if self._shards is not None:  # the last shard is no longer than the first
            first, last = self._shards.bounds()[0]
            return max(4 * (last - first), self._shards.nbytes(first, last))
        numel = 0 if self.shape is None else math.prod(self.shape)
        if self.spec.dtype == "uint8" and not self.spec.asynchronous:
            numel = max(kind.form.most_numel(self.spec.nbytes) for kind in CODECS.values())
        return 4 * numel

    def join(self, replies: Sequence[Message], compressed: bool) -> Tensor:
        """Return the result of a pull; CorruptPayload if the replies have unexpected sizes."""
        parts = [reply.body for reply in replies]
        if compressed:
            return parts[0].clone() if not self.is_cut else self._known_shards().join(parts)
        nbytes = [part.numel() for part in parts]
        wanted = nbytes if self.shape is None else [4 * math.prod(self.shape)]
        if self.is_cut:
            wanted = [4 * (last - first) for first, last in self._known_shards().bounds()]
        if nbytes != wanted or any(n % 4 for n in nbytes):
            text = f"the replies to a pull of {self.key!r} have {nbytes} bytes"
            raise CorruptPayload("message", text)
        pulled = torch.cat([part.view(torch.float32) for part in parts])
        return pulled if self.shape is None else pulled.view(self.shape)

    def _known_shards(self) -> Shards:
        if self._shards is None:
            text = f"key {self.key!r} is cut by its first payload"
            raise ValueError(f"{text}: push one before the first pull")
        return self._shards


def _summary(value: Tensor) -> str:
    flat = value.reshape(-1)
    first = ", ".join(f"{x:.6g}" for x in flat[:3].tolist())
    return f"{flat.numel()} values from {first} on with a sum of {float(flat.double().sum()):.9g}"


def check_initial(spec: Spec, value: Tensor | None) -> Tensor | None:
    """Return finite float32 initial values on the CPU, or None for a synchronous key."""
    given = None if value is None else f"{value.dtype} of shape {tuple(value.shape)}"
    if spec.asynchronous != (value is not None):
        text = "value and asynchronous=True must be given together"
        raise ValueError(f"{text}, got {given} with asynchronous={spec.asynchronous}")
    if value is None:
        return None
    check_memory(value, "value")
    fits = spec.dtype == "uint8" or tuple(value.shape) == spec.shape
    if value.dtype != torch.float32 or not fits:
        raise ValueError(f"value must be float32 of the key's shape {spec.shape}, got {given}")
    if not bool(torch.isfinite(value).all()):
        raise ValueError("value holds NaN or Inf")
    return value.detach().cpu()
