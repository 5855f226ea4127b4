"""Settings of a key, equal on every client: dtype, shape, codec, synchronous or asynchronous."""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gradcomp.codecs import KINDS, Codec
from gradcomp.errors import CorruptPayload
from gradcomp.payload import wire
from gradcomp.payload.form import HEADER_NBYTES, form_name
from gradcomp.payload.layout import PayloadLayout
from gradcomp.server.messages import MAX_MESSAGE_NBYTES, METHODS, as_bytes

CODECS = {kind.form.code: kind for kind in reversed(KINDS)}  # the first one of each form
DTYPES = {"float32": torch.float32, "uint8": torch.uint8}
MAX_NDIM = 8
FLOAT32_MAX = float(np.finfo(np.float32).max)
MAX_NBYTES = MAX_MESSAGE_NBYTES - 4096  # of one value; leaves room for header, key and settings
_FIXED = struct.Struct("<BBBBIIQdQQQ")
_FLAGS = ("shares_scale", "error_feedback", "asynchronous")  # from bit 0


@dataclass(frozen=True)
class Spec:
    """Settings of a key, or of one shard of it."""

    dtype: str  # "float32", or "uint8" for payloads
    shape: tuple[int, ...]  # of pushed values
    codec: int = 0  # its number in payload headers; 0: any codec, as in the headers
    shares_scale: bool = False
    error_feedback: bool = True
    seed: int = 0
    codec_options: int = 0  # 64-bit hash of all options of the codec
    asynchronous: bool = False
    learning_rate: float = 0.0
    shard_numel: int = 0  # most elements of a shard; 0 for a key that is not cut
    value_crc: int = 0  # CRC-32 of the initial values of a cut key
    first: int = 0  # first element of a shard
    part_nbytes: int = 0  # bytes of a push to a shard; 0 for the settings of a cut key

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of a push to this key or shard, in bytes."""
        return self.part_nbytes if self.shard_numel else self.numel * DTYPES[self.dtype].itemsize

    @property
    def agrees_only(self) -> bool:
        """Whether these are the settings of a cut key, to which nothing is pushed."""
        return bool(self.shard_numel) and not self.part_nbytes

    def settings(self) -> dict[str, object]:
        """Return the settings that must be equal on all clients, in the order of comparison."""
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

    def check_method(self, key: str, method: str | None, compressed: bool) -> None:
        """Raise ValueError unless a key with these settings supports such a pull."""
        packed = self.dtype == "uint8" and not self.asynchronous
        allowed = (None,) if self.asynchronous else METHODS[3:] if packed else METHODS[:3]
        if method not in allowed or (compressed and not packed):
            kind = "asynchronous" if self.asynchronous else "synchronous"
            raise ValueError(
                f"key {key!r} is {kind} and holds {self.dtype}: reduce_method must be one of"
                f" {allowed}, compressed {'True or False' if packed else 'False'}; got"
                f" reduce_method={method!r}, compressed={compressed!r}"
            )


def make_spec(
    shape: tuple[int, ...],
    dtype: str,
    codec: Codec | None,
    asynchronous: bool = False,
    learning_rate: float | None = None,
) -> Spec:
    """Check the arguments of `init_parameter` and return the settings; ValueError if wrong."""
    rate = 0.0 if learning_rate is None else learning_rate
    dims_fit = all(type(d) is int and 0 <= d < 2**63 for d in shape) and len(shape) <= MAX_NDIM
    rate_fits = type(rate) in (int, float) and abs(rate) <= FLOAT32_MAX
    for is_right, rule, got in (
        (dtype in DTYPES, f"dtype must be one of {tuple(DTYPES)}", dtype),
        (dims_fit, f"shape must have at most {MAX_NDIM} dimensions in [0, 2**63)", shape),
        (codec is None or dtype == "uint8", 'a codec needs dtype="uint8"', (codec, dtype)),
        (isinstance(asynchronous, bool), "asynchronous must be True or False", asynchronous),
        (
            asynchronous == (learning_rate is not None),
            "asynchronous=True and learning_rate must be given together",
            (asynchronous, learning_rate),
        ),
        (rate_fits, "learning_rate must be a finite number", learning_rate),
    ):
        if not is_right:
            raise ValueError(f"{rule}, got {got!r}")
    spec = Spec(dtype, shape, asynchronous=asynchronous, learning_rate=float(rate))
    if codec is None:
        return spec
    digest = hashlib.blake2b(repr(codec.options()).encode(), digest_size=8).digest()
    return replace(
        spec,
        codec=codec.form.code,
        shares_scale=codec.shares_scale,
        error_feedback=codec.error_feedback,
        seed=codec.seed,
        codec_options=int.from_bytes(digest, "little"),
    )


def pack_spec(spec: Spec, value: Tensor | None = None) -> Tensor:
    """Return the body of an INIT request: settings, shape, and initial values, if any."""
    dtype, ndim = list(DTYPES).index(spec.dtype), len(spec.shape)
    flags = sum(getattr(spec, name) << bit for bit, name in enumerate(_FLAGS))
    settings = (spec.seed, spec.value_crc, spec.codec_options, spec.learning_rate)
    shard = (spec.shard_numel, spec.first, spec.part_nbytes)
    fixed = _FIXED.pack(dtype, ndim, spec.codec, flags, *settings, *shard)
    head = as_bytes(fixed + struct.pack(f"<{ndim}Q", *spec.shape))
    return head if value is None else torch.cat([head, value.reshape(-1).view(torch.uint8)])


def parse_spec(body: Tensor) -> tuple[Spec, Tensor | None]:
    """Return settings and initial values (a view) of an INIT request; CorruptPayload "message"."""
    head = body[: _FIXED.size].numpy().tobytes()
    if len(head) < _FIXED.size:
        raise CorruptPayload("message", f"settings of {len(head)} bytes")
    dtype, ndim, code, flags, seed, crc, options, rate, *shard = _FIXED.unpack(head)
    shard_numel, first, part_nbytes = shard
    start = _FIXED.size + 8 * ndim
    if ndim > MAX_NDIM or body.numel() < start:
        raise CorruptPayload("message", f"settings of {body.numel()} bytes, {ndim} dimensions")
    if dtype >= len(DTYPES) or flags >> len(_FLAGS) or code not in (0, *CODECS):
        raise CorruptPayload("message", f"settings with {dtype=}, {flags=}, {code=}")
    name = list(DTYPES)[dtype]
    shares, feedback, at_once = (bool(flags & bit) for bit in (1, 2, 4))
    if not abs(rate) <= FLOAT32_MAX or (rate and not at_once) or (code and name != "uint8"):
        raise CorruptPayload("message", f"settings with {rate=}, {code=}, {name=}")
    if not shard_numel and (crc or first or part_nbytes):
        raise CorruptPayload("message", "settings of a shard of a key that is not cut")
    shape = struct.unpack(f"<{ndim}Q", body[_FIXED.size : start].numpy().tobytes())
    codec = (code, shares, feedback, seed, options)
    spec = Spec(name, shape, *codec, at_once, rate, shard_numel, crc, first, part_nbytes)
    rest, has_value = body[start:], at_once and not spec.agrees_only
    wanted = spec.nbytes if has_value else 0
    fits = rest.numel() == wanted or (has_value and name == "uint8")
    if spec.nbytes > MAX_NBYTES or rest.numel() % 4 or not fits:
        raise CorruptPayload("message", f"{rest.numel()} bytes of values for {name} of {shape}")
    return spec, rest.view(torch.float32) if has_value else None


def codec_of(spec: Spec, header: wire.Header, nbytes: int, *, shares_scale: bool = False) -> Codec:
    """Return the codec that decodes payloads of a key and encodes their averages.

    It never clips, as the owner of a reduce_scatter does (`Codec.requantizer`).

    Args:
        spec: settings of the key.
        header: header of the payloads, which determines the scale groups.
        nbytes: size of a payload, which determines the bits of a code if the codec has a choice.
        shares_scale: whether all payloads have equal scales.

    Raises:
        CorruptPayload: check "codec"; `Codec.encode` does not produce such payloads.
    """
    code, feedback = spec.codec or header.codec, spec.error_feedback
    if code not in CODECS:
        text = f"a {form_name(code)} payload; the server takes those of Codec.encode"
        raise CorruptPayload("codec", text)
    alike = [k for k in KINDS if k.form.code == spec.codec and k.error_feedback == feedback]
    codec = (alike or [CODECS[code]])[0].of_groups(
        max(1, header.group_numel),
        shares_scale=shares_scale,
        error_feedback=feedback,
        seed=spec.seed,
    )
    code_nbytes = nbytes - HEADER_NBYTES - 4 * header.scale_count
    return codec.with_form(codec.form.of_payload(header.numel, code_nbytes))


def parse_payload(spec: Spec, payload: Tensor) -> tuple[wire.Header, Codec, PayloadLayout]:
    """Return header, codec and layout of a payload, without checking its scales and codes."""
    view = payload.numpy()
    header = wire.parse(view)
    if header.segmented:
        raise CorruptPayload("segmented", "a server takes payloads of one tensor")
    if spec.codec not in (0, header.codec):
        got, wanted = form_name(header.codec), form_name(spec.codec)
        raise CorruptPayload("codec", f"a {got} payload, the key takes {wanted}")
    codec = codec_of(spec, header, view.size)
    layout = codec._layout_of(header, view.size)
    codec.check_header(header, layout, view.size)
    return header, codec, layout
