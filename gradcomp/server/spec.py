"""Settings of a key, equal on every client: dtype, shape, codec, synchronous or asynchronous."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from gradcomp.codecs import KINDS, Codec
from gradcomp.codecs.checks import check_alone
from gradcomp.errors import CorruptPayload
from gradcomp.payload import wire
from gradcomp.payload.form import HEADER_NBYTES, form_name
from gradcomp.payload.layout import PayloadLayout
from gradcomp.payload.pieces import round_up
from gradcomp.server.messages import MAX_MESSAGE_NBYTES, METHODS, as_bytes

CODECS = {kind.form.code: kind for kind in reversed(KINDS)}  # the first one of each form
CLASSES = {type(kind).__name__: type(kind) for kind in KINDS}
DTYPES = {"float32": torch.float32, "uint8": torch.uint8}
MAX_NDIM = 8
FLOAT32_MAX = float(np.finfo(np.float32).max)
MAX_NBYTES = MAX_MESSAGE_NBYTES - 4096  # of one value; leaves room for header, key and settings
MAX_TEXT_NBYTES = 1024  # of codec and initial values, in words
_FIXED = struct.Struct("<BBBxIIIdQQQ")


@dataclass(frozen=True)
class Spec:
    """Settings of a key, or of one shard of it."""

    dtype: str  # "float32", or "uint8" for payloads
    shape: tuple[int, ...]  # of pushed values
    codec_text: str = ""  # JSON of the codec's class and options; "": any, as in payload headers
    asynchronous: bool = False
    learning_rate: float = 0.0
    shard_numel: int = 0  # most elements of a shard; 0 for a key that is not cut
    value_crc: int = 0  # CRC-32 of the initial values of a cut key
    value_text: str = ""  # some of these values, for people
    first: int = 0  # first element of a shard
    part_nbytes: int = 0  # bytes of a push to a shard; 0 for the settings of a cut key

    @property
    def codec(self) -> Codec | None:
        return _parse_codec(self.codec_text) if self.codec_text else None

    @property
    def shares_scale(self) -> bool:
        return self.codec is not None and self.codec.shares_scale

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
            "codec": repr(self.codec) if self.codec else "as the payloads say",
            "asynchronous": self.asynchronous,
            "learning_rate": self.learning_rate,
            "shard_numel": self.shard_numel,
            "value": f"{self.value_text or 'none'}, CRC-32 {self.value_crc:#010x}",
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
    if codec is not None and type(codec) is not CLASSES.get(type(codec).__name__):
        raise ValueError(f"the server has the codecs {', '.join(CLASSES)}, not {codec!r}")
    text = "" if codec is None else json.dumps([type(codec).__name__, codec.options()])
    return Spec(dtype, shape, text, asynchronous, float(rate))


@lru_cache
def _parse_codec(text: str) -> Codec:
    """Return the codec of a `Spec.codec_text`; CorruptPayload "message" if there is none."""
    try:
        name, options = json.loads(text)
        codec = CLASSES[name](**options)
        check_alone(codec)
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise CorruptPayload("message", f"settings with codec {text!r:.100}: {error}") from error
    return codec


def pack_spec(spec: Spec, value: Tensor | None = None) -> Tensor:
    """Return the body of an INIT request: settings, shape, and initial values, if any."""
    dtype, ndim = list(DTYPES).index(spec.dtype), len(spec.shape)
    texts = [text.encode() for text in (spec.codec_text, spec.value_text)]
    settings = (spec.asynchronous, spec.value_crc, *map(len, texts), spec.learning_rate)
    shard = (spec.shard_numel, spec.first, spec.part_nbytes)
    fixed = _FIXED.pack(dtype, ndim, *settings, *shard) + struct.pack(f"<{ndim}Q", *spec.shape)
    words = b"".join(texts)
    head = as_bytes(fixed + words.ljust(round_up(len(words), 4), b"\0"))
    return head if value is None else torch.cat([head, value.reshape(-1).view(torch.uint8)])


def parse_spec(body: Tensor) -> tuple[Spec, Tensor | None]:
    """Return settings and initial values (a view) of an INIT request; CorruptPayload "message"."""
    head = body[: _FIXED.size].numpy().tobytes()
    if len(head) < _FIXED.size:
        raise CorruptPayload("message", f"settings of {len(head)} bytes")
    fixed = _FIXED.unpack(head)
    dtype, ndim, at_once, crc, codec_nbytes, value_nbytes, rate, *shard = fixed
    shard_numel, first, part_nbytes = shard
    words, end = _FIXED.size + 8 * ndim, codec_nbytes + value_nbytes
    start = words + round_up(end, 4)
    if ndim > MAX_NDIM or end > MAX_TEXT_NBYTES or body.numel() < start:
        raise CorruptPayload("message", f"settings of {body.numel()} bytes, {ndim} dimensions")
    if dtype >= len(DTYPES) or at_once > 1:
        raise CorruptPayload("message", f"settings with {dtype=}, asynchronous={at_once}")
    name, text = list(DTYPES)[dtype], body[words:start].numpy().tobytes()
    if _FIXED.pack(*fixed) != head or any(text[end:]):
        raise CorruptPayload("message", "settings whose padding is not 0")
    if not abs(rate) <= FLOAT32_MAX or (rate and not at_once) or (codec_nbytes and name != "uint8"):
        raise CorruptPayload("message", f"settings with {rate=}, {name=}, {text=}")
    if not shard_numel and (crc or value_nbytes or first or part_nbytes):
        raise CorruptPayload("message", "settings of a shard of a key that is not cut")
    shape = struct.unpack(f"<{ndim}Q", body[_FIXED.size : words].numpy().tobytes())
    try:
        codec, value = text[:codec_nbytes].decode(), text[codec_nbytes:end].decode()
    except UnicodeDecodeError as error:
        raise CorruptPayload("message", f"settings with {text=}: {error}") from None
    if codec:
        _parse_codec(codec)
    spec = Spec(
        name, shape, codec, bool(at_once), rate, shard_numel, crc, value, first, part_nbytes
    )
    rest, has_value = body[start:], at_once and not spec.agrees_only
    wanted = spec.nbytes if has_value else 0
    fits = rest.numel() == wanted or (has_value and name == "uint8")
    if spec.nbytes > MAX_NBYTES or rest.numel() % 4 or not fits:
        raise CorruptPayload("message", f"{rest.numel()} bytes of values for {name} of {shape}")
    return spec, rest.view(torch.float32) if has_value else None


def parse_payload(spec: Spec, payload: Tensor) -> tuple[wire.Header, Codec, PayloadLayout]:
    """Return header, codec and layout of a payload, without checking its scales and codes.

    The codec decodes the payloads of a key, whose scales may differ, and encodes their averages. It
    never clips, as the owner of a reduce_scatter does (`Codec.requantizer`).

    Raises:
        CorruptPayload: the key does not take such payloads, or their header is wrong.
    """
    view = payload.numpy()
    header = wire.parse(view)
    if header.segmented:
        raise CorruptPayload("segmented", "a server takes payloads of one tensor")
    got = form_name(header.codec)
    if spec.codec is None:
        if header.codec not in CODECS:
            text = f"a {got} payload; the server takes those of Codec.encode"
            raise CorruptPayload("codec", text)
        codec = CODECS[header.codec]
    else:
        codec = spec.codec
        if codec.form.code != header.codec:
            raise CorruptPayload("codec", f"a {got} payload, the key takes {codec.form.name}")
    codec = codec.of_groups(header.group_numel)
    code_nbytes = view.size - HEADER_NBYTES - 4 * header.scale_count
    codec = codec.with_form(codec.form.of_payload(header.numel, code_nbytes))
    layout = codec._layout_of(header, view.size)
    codec.check_header(header, layout, view.size)
    return header, codec, layout
