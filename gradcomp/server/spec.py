"""What a key is: dtype, shape, codec, and whether pushes wait for each other; the same at every
client.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradcomp.codecs import KINDS, Codec
from gradcomp.errors import CorruptPayload
from gradcomp.payload import wire
from gradcomp.payload.form import form_name
from gradcomp.server.messages import MAX_MESSAGE_NBYTES, METHODS

CODECS = {kind.form.code: kind for kind in reversed(KINDS)}  # the first of a form
DTYPES = {"float32": torch.float32, "uint8": torch.uint8}
MAX_NDIM = 8
FLOAT32_MAX = float(np.finfo(np.float32).max)
MAX_NBYTES = (
    MAX_MESSAGE_NBYTES - 4096
)  # of one value; the rest is room for header, key and settings
_FIXED = struct.Struct("<BBBBIIQdQQQ")
_SHARED, _FEEDBACK, _ASYNCHRONOUS = 1, 2, 4


@dataclass(frozen=True)
class Spec:
    """Settings of a key.

    Attributes:
        dtype: "float32", or "uint8" for payloads.
        shape: of what is pushed.
        codec: its number in payload headers; 0: whatever the headers say.
        shares_scale, error_feedback, seed: of that codec.
        codec_options: 64-bit hash of all its options.
        asynchronous: pushes are applied at once.
        learning_rate: factor of an asynchronous push.
        shard_numel: elements of a shard, where the key is cut into some; 0: it is whole.
        value_crc: CRC-32 of the initial values of a key that is cut.
        first, part_nbytes: a shard's first element, and the bytes that are pushed to it; 0 for the
            agreement on all shards.
    """

    dtype: str
    shape: tuple[int, ...]
    codec: int = 0
    shares_scale: bool = False
    error_feedback: bool = True
    seed: int = 0
    codec_options: int = 0
    asynchronous: bool = False
    learning_rate: float = 0.0
    shard_numel: int = 0
    value_crc: int = 0
    first: int = 0
    part_nbytes: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of what is pushed to this key, or to this shard of it."""
        if self.shard_numel:
            return self.part_nbytes
        return self.numel * DTYPES[self.dtype].itemsize

    @property
    def agrees_only(self) -> bool:
        """Whether this is not a shard of a key that is cut, but what the clients agree on about
        all of them.
        """
        return bool(self.shard_numel) and not self.part_nbytes

    def settings(self) -> dict[str, object]:
        """Return what clients must agree on, in the order in which differences are reported."""
        return {
            "dtype": self.dtype,
            "shape": str(self.shape),
            "codec": form_name(self.codec) if self.codec else "as the payloads say",
            "codec_options": self.codec_options,
            "asynchronous": self.asynchronous,
            "learning_rate": self.learning_rate,
            "shard_numel": self.shard_numel,
            "value": self.value_crc,
            "shard": f"{self.part_nbytes} bytes from element {self.first}",
        }

    def difference(self, other: Spec) -> str | None:
        """Return the name of the first setting in which two specs differ, or None."""
        theirs = other.settings()
        return next(
            (name for name, value in self.settings().items() if value != theirs[name]), None
        )

    def check_method(self, key: str, method: str | None, compressed: bool) -> None:
        """Raise ValueError unless a key like this can be pulled that way."""
        if self.asynchronous:
            if method is not None or compressed:
                raise ValueError(
                    f"key {key!r} is asynchronous: pull it without reduce_method and uncompressed, "
                    f"got reduce_method={method!r}, compressed={compressed!r}"
                )
            return
        if method is None:
            raise ValueError(
                f"key {key!r} is synchronous: reduce_method must be one of {METHODS}, got None"
            )
        if (method == "decode_average") != (self.dtype == "uint8"):
            raise ValueError(
                f"key {key!r} holds {self.dtype}, which reduce_method={method!r} does not take"
            )
        if compressed and self.dtype != "uint8":
            raise ValueError(
                f"key {key!r} holds {self.dtype}; only decode_average can be pulled compressed"
            )


def make_spec(
    shape: tuple[int, ...],
    dtype: str,
    codec: Codec | None,
    asynchronous: bool,
    learning_rate: float | None,
) -> Spec:
    """Return the spec that a client asks for.

    Raises:
        ValueError: settings that do not go together.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {tuple(DTYPES)}, got {dtype!r}")
    if len(shape) > MAX_NDIM or any(
        isinstance(d, bool) or not isinstance(d, int) or d < 0 for d in shape
    ):
        raise ValueError(
            f"shape must have at most {MAX_NDIM} dimensions of at least 0, got {shape!r}"
        )
    if any(d >= 2**63 for d in shape):
        raise ValueError(f"shape {shape!r} has more elements than memory has bytes")
    if codec is not None and dtype != "uint8":
        raise ValueError(f'a codec needs dtype="uint8", got dtype={dtype!r} with {codec!r}')
    if asynchronous is not True and asynchronous is not False:
        raise ValueError(f"asynchronous must be True or False, got {asynchronous!r}")
    if asynchronous == (learning_rate is None):
        raise ValueError(
            f"learning_rate goes with asynchronous=True, got {learning_rate!r} with"
            f" {asynchronous!r}"
        )
    number = isinstance(learning_rate, (int, float)) and not isinstance(learning_rate, bool)
    if learning_rate is not None and not (number and abs(learning_rate) <= FLOAT32_MAX):
        raise ValueError(f"learning_rate must be a finite number, got {learning_rate!r}")
    rate = 0.0 if learning_rate is None else float(learning_rate)
    if codec is None:
        return Spec(dtype, shape, asynchronous=asynchronous, learning_rate=rate)
    digest = hashlib.blake2b(repr(codec.options()).encode(), digest_size=8).digest()
    options = int.from_bytes(digest, "little")
    feedback = codec.error_feedback
    return Spec(
        dtype,
        shape,
        codec.form.code,
        codec.shares_scale,
        feedback,
        codec.seed,
        options,
        asynchronous,
        rate,
    )


def pack_spec(spec: Spec, value: Tensor | None) -> Tensor:
    """Return the body of an INIT request: settings, dimensions, and the initial values of an
    asynchronous key.
    """
    flags = (
        spec.shares_scale * _SHARED
        | spec.error_feedback * _FEEDBACK
        | spec.asynchronous * _ASYNCHRONOUS
    )
    dtype, ndim = list(DTYPES).index(spec.dtype), len(spec.shape)
    settings = (spec.seed, spec.value_crc, spec.codec_options, spec.learning_rate)
    fixed = _FIXED.pack(
        dtype, ndim, spec.codec, flags, *settings, spec.shard_numel, spec.first, spec.part_nbytes
    )
    head = torch.frombuffer(
        bytearray(fixed + struct.pack(f"<{ndim}Q", *spec.shape)), dtype=torch.uint8
    )
    return head if value is None else torch.cat([head, value.reshape(-1).view(torch.uint8)])


def parse_spec(body: Tensor) -> tuple[Spec, Tensor | None]:
    """Return the settings in the body of an INIT request, and the initial values of an asynchronous
    key (a view).

    Raises:
        CorruptPayload: "message": a body that no client writes.
    """
    raw = body.numpy()
    if raw.size < _FIXED.size:
        raise CorruptPayload("message", f"settings of {raw.size} bytes")
    dtype, ndim, codec, flags, seed, crc, options, rate, *shard = _FIXED.unpack(
        raw[: _FIXED.size].tobytes()
    )
    start = _FIXED.size + 8 * ndim
    if ndim > MAX_NDIM or raw.size < start:
        raise CorruptPayload("message", f"settings of {raw.size} bytes with {ndim} dimensions")
    if (
        dtype >= len(DTYPES)
        or flags > (_SHARED | _FEEDBACK | _ASYNCHRONOUS)
        or codec not in (0, *CODECS)
    ):
        raise CorruptPayload(
            "message", f"settings with dtype {dtype}, flags {flags}, codec {codec}"
        )
    name, waits = list(DTYPES)[dtype], not flags & _ASYNCHRONOUS
    if not abs(rate) <= FLOAT32_MAX or (waits and rate) or (codec and name != "uint8"):
        raise CorruptPayload(
            "message", f"settings with learning rate {rate}, codec {codec}, dtype {name}"
        )
    shape = struct.unpack(f"<{ndim}Q", raw[_FIXED.size : start].tobytes())
    shares, feedback = bool(flags & _SHARED), bool(flags & _FEEDBACK)
    spec = Spec(
        name,
        shape,
        codec,
        shares,
        feedback,
        seed,
        options,
        not waits,
        rate,
        shard[0],
        crc,
        *shard[1:],
    )
    if not spec.shard_numel and (crc or any(shard)):
        raise CorruptPayload("message", f"settings of a shard {shard} of a key that is not cut")
    rest = body[start:]
    waits |= spec.agrees_only
    fits = (
        not rest.numel()
        if waits
        else not rest.numel() % 4 and (name == "uint8" or rest.numel() == spec.nbytes)
    )
    if spec.nbytes > MAX_NBYTES or not fits:
        raise CorruptPayload(
            "message", f"{rest.numel()} bytes of values for {name} of shape {shape}"
        )
    return spec, None if waits else rest.view(torch.float32)


def codec_of(spec: Spec, header: wire.Header, *, shares_scale: bool = False) -> Codec:
    """Return the codec that decodes payloads with that header, and encodes averages of them again.

    Its scale groups are the header's and it never clips, as the owner of a reduce_scatter does
    (`Codec.requantizer`).

    Args:
        spec: of the key.
        header: of one of its payloads.
        shares_scale: whether all payloads have one scale a group.

    Raises:
        CorruptPayload: "codec": not one that `Codec.encode` writes.
    """
    code = spec.codec or header.codec
    if code not in CODECS:
        raise CorruptPayload(
            "codec", f"a {form_name(code)} payload; the server takes those of Codec.encode"
        )
    feedback = spec.error_feedback
    alike = [
        kind
        for kind in KINDS
        if kind.form.code == code and spec.codec and kind.error_feedback == feedback
    ]
    return (alike or [CODECS[code]])[0].of_groups(
        max(1, header.group_numel),
        shares_scale=shares_scale,
        error_feedback=feedback,
        seed=spec.seed,
    )
