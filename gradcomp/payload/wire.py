"""The 32-byte payload header: writing it, and rejecting headers that no encoder writes.

docs/reference/wire-format.md has the bytes and every rejection, with the names of the checks that
are used here.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradcomp.errors import CorruptPayload
from gradcomp.kernels import host
from gradcomp.payload.form import FORMS, HEADER_NBYTES, removal

MAGIC = 0x504D4347  # "GCMP"
VERSION = 2
MODULE_SHIFT = 8  # bits of `stream` below the module's number
FLAG_NONFINITE = 1
FLAG_SEGMENTED = 2
_FIELDS = struct.Struct("<IBBBBIIIII")  # bytes 0-27
_CRC = struct.Struct("<I")  # bytes 28-31

Bytes = NDArray[np.uint8]


class Header(NamedTuple):
    """The header of a payload.

    Attributes:
        codec: number of a form (`gradcomp.payload.form.FORMS`).
        dtype: dtype of the source: 0 float32, 1 bfloat16, 2 float16.
        flags: bitwise or of FLAG_NONFINITE and FLAG_SEGMENTED.
        numel: number of elements in the payload.
        group_numel: elements of a scale group; 0: segmented, decoding needs a layout.
        scale_count: number of fp32 scales at the beginning of the body.
        step: training step of the sender (modulo 2**32).
        stream: bits 0 to 7: 0 first phase, 1 second phase, 2 server; bits 8 to 30: the FSDP
            module's number, 0 elsewhere.
    """

    codec: int
    dtype: int
    flags: int
    numel: int
    group_numel: int
    scale_count: int
    step: int
    stream: int

    @property
    def nonfinite(self) -> bool:
        return bool(self.flags & FLAG_NONFINITE)

    @property
    def segmented(self) -> bool:
        return bool(self.flags & FLAG_SEGMENTED)

    @property
    def module(self) -> int:
        return self.stream >> MODULE_SHIFT


def seal(payload: Bytes, header: Header) -> None:
    """Write the header, with its CRC, to a payload whose body is already in ``payload[32:]``.

    Args:
        payload: ``(nbytes,)`` uint8, contiguous, the whole payload; bytes 0 to 31 are overwritten.
        header: the fields.
    """
    fields = _FIELDS.pack(MAGIC, VERSION, *header)
    payload[: _FIELDS.size] = np.frombuffer(fields, np.uint8)
    payload[_FIELDS.size : HEADER_NBYTES] = np.frombuffer(_CRC.pack(_crc(payload)), np.uint8)


def parse(payload: Bytes) -> Header:
    """Return the header of a payload, after all checks that do not depend on the expected layout.

    Args:
        payload: ``(nbytes,)`` uint8, contiguous.

    Raises:
        CorruptPayload: "truncated", "magic", "version", "crc", "codec", "dtype", "flags",
            "group_numel", "stream".
    """
    if payload.size < HEADER_NBYTES:
        raise CorruptPayload(
            "truncated", f"{payload.size} bytes, a header alone has {HEADER_NBYTES}"
        )
    magic, version, *rest = _FIELDS.unpack(payload[: _FIELDS.size].tobytes())
    if magic != MAGIC:
        raise CorruptPayload(
            "magic", f"{magic:#010x} is not {MAGIC:#010x}; these bytes are no gradcomp payload"
        )
    if version != VERSION:
        raise CorruptPayload("version", f"wire version {version}, this gradcomp speaks {VERSION}")
    (stored,) = _CRC.unpack(payload[_FIELDS.size : HEADER_NBYTES].tobytes())
    computed = _crc(payload)
    if stored != computed:
        raise CorruptPayload(
            "crc", f"stored CRC-32C {stored:#010x}, the bytes give {computed:#010x}"
        )
    header = Header(*rest)
    if header.codec not in FORMS:
        raise CorruptPayload("codec", f"unknown codec {header.codec}{removal(header.codec)}")
    if header.dtype > 2:
        raise CorruptPayload("dtype", f"unknown source dtype {header.dtype}")
    if header.flags & ~(FLAG_NONFINITE | FLAG_SEGMENTED):
        raise CorruptPayload("flags", f"unknown flag bits {header.flags:#04x}")
    if header.segmented != (header.group_numel == 0):
        raise CorruptPayload(
            "group_numel", f"{header.group_numel} with segmented = {header.segmented}"
        )
    if header.stream >= 2**31:
        raise CorruptPayload("stream", f"{header.stream} is not below 2**31")
    return header


def _crc(payload: Bytes) -> int:
    return host.crc32c(payload[HEADER_NBYTES:], host.crc32c(payload[: _FIELDS.size]))
