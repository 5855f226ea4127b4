"""Whole payloads in NumPy, written to be read: header, checksum, scales, codes, and every reason to
refuse one.

docs/reference/wire-format.md draws the bytes; the arithmetic is that of `gradcomp.reference.codec`.
Only tests import it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gradcomp.reference.codec import (
    BF16,
    BLOCK_ZEROS,
    F16,
    F32,
    SOURCE_DTYPES,
    Array,
    Bytes,
    Floats,
    Key,
    Piece,
    block_decode,
    block_encode,
    from_float32,
    lane_bits,
    lanes_decode,
    nearest_encode,
    onebit_decode,
    onebit_encode,
    pack_bits,
    sum_lanes,
    ternary_encode,
    ternary_sum_decode,
    to_float32,
    unpack_bits,
)
from gradcomp.reference.topk import GROUP_NUMEL, code_nbytes, topk_decode, topk_encode

IDENTITY, TERNARY, ONEBIT, LANES, BF16_VALUES = 1, 2, 3, 4, 5  # codecs, as in the header
BLOCKS = {6: 2, 7: 4, 8: 8}  # those of evenly spaced levels, with their bits
TOPK = 9
SCALES_PER_GROUP = {
    IDENTITY: 0,
    TERNARY: 1,
    ONEBIT: 2,
    LANES: 1,
    BF16_VALUES: 0,
    **dict.fromkeys(BLOCKS, 1),
    TOPK: 2,
}
CODE_BITS = {
    IDENTITY: 32,
    TERNARY: 2,
    ONEBIT: 1,
    BF16_VALUES: 16,
    **BLOCKS,
}  # those of LANES depend on the world size
NONFINITE, SEGMENTED = 1, 2  # header flags
MAGIC, VERSION = 0x504D4347, 2  # the bytes "GCMP"
HEADER = struct.Struct("<IBBBBIIIIII")  # 32 bytes; the last field is the checksum
MAX_NUMEL = 2**32 - 4096


def _remainder(byte: int) -> int:
    """Return what a byte leaves of its division by the polynomial, bit by bit."""
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_REMAINDERS = [_remainder(byte) for byte in range(256)]


def crc32c(data: bytes, crc: int = 0) -> int:
    """Return the CRC-32C of `data`, continuing `crc`; b"123456789" gives 0xE3069283."""
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _REMAINDERS[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


class Header(NamedTuple):
    """The fields of a payload's header after magic and version, before the checksum.

    Bits 0 to 7 of `stream` number the random numbers, bits 8 to 30 the FSDP module.
    """

    codec: int
    dtype: int
    flags: int
    numel: int
    group_numel: int
    scale_count: int
    step: int
    stream: int


def pack_payload(header: Header, scales: Array, codes: Array) -> bytes:
    """Return header, fp32 scales and codes as one payload with its checksum."""
    body = scales.astype("<f4").tobytes() + codes.tobytes()
    first = HEADER.pack(MAGIC, VERSION, *header, 0)[:28]
    return first + struct.pack("<I", crc32c(body, crc32c(first))) + body


def unpack_payload(payload: bytes, world_size: int = 1) -> tuple[Header, Floats, Bytes]:
    """Check an unsegmented payload whole and return its header, scales and code bytes.

    `world_size` is the number of summed payloads, which lanes alone need. Raises ValueError("check:
    detail") with a check's name from docs/reference/wire-format.md.
    """

    def require(check: str, ok: object, got: object) -> None:
        if not ok:
            raise ValueError(f"{check}: {got}")

    require("truncated", len(payload) >= HEADER.size, len(payload))
    magic, version, *fields, checksum = HEADER.unpack_from(payload)
    header = Header(*fields)
    codec, dtype, flags, numel, group_numel, scale_count, _, stream = header
    require("magic", magic == MAGIC, hex(magic))
    require("version", version == VERSION, version)
    require("crc", crc32c(payload[HEADER.size :], crc32c(payload[:28])) == checksum, hex(checksum))
    require("codec", codec in SCALES_PER_GROUP, codec)
    require("dtype", dtype <= F16, dtype)
    require("flags", flags & ~(NONFINITE | SEGMENTED) == 0, flags)
    require("group_numel", (group_numel == 0) == bool(flags & SEGMENTED), group_numel)
    require("segmented", not flags & SEGMENTED, "needs a layout")
    require("stream", stream < 2**31, stream)
    require("numel", numel <= MAX_NUMEL, numel)
    per_group, bits = SCALES_PER_GROUP[codec], CODE_BITS.get(codec) or lane_bits(world_size)
    require(
        "group_numel", codec != TOPK or group_numel == (GROUP_NUMEL if numel else 1), group_numel
    )
    require("group_numel", group_numel == max(numel, 1) or (per_group and numel), group_numel)
    require("scale_count", scale_count == -(-numel // group_numel) * per_group, scale_count)
    codes_start = HEADER.size + 4 * scale_count
    piece = Piece(numel, group_numel)
    size = codes_start + (code_nbytes(piece) if codec == TOPK else (numel * bits + 7) // 8)
    require("truncated", len(payload) >= size, len(payload))
    require("trailing", len(payload) <= size, len(payload))
    scales = np.frombuffer(payload, "<f4", scale_count, HEADER.size)
    codes = np.frombuffer(payload, np.uint8, offset=codes_start)
    if flags & NONFINITE:  # nothing is taken from the body of a flagged payload
        return header, scales, codes
    if not per_group:
        require(
            "value",
            np.isfinite(to_float32(codes.view("<f4" if codec == IDENTITY else "<u2"))).all(),
            "NaN or Inf",
        )
    else:
        require(
            "scale",
            np.isfinite(scales).all() and (codec == ONEBIT or not np.signbit(scales).any()),
            scales,
        )
        if codec in BLOCKS:
            most = np.finfo(np.float32).max / np.float32(2 * BLOCK_ZEROS[BLOCKS[codec]])
            require("scale", (scales <= most).all(), scales)
        if codec == TOPK:
            topk_decode(codes, scales, piece)  # it checks what it reads
            return header, scales, codes
        values = unpack_bits(codes, numel, bits)
        require("code", codec != TERNARY or (values < 3).all(), "11")
        require(
            "code",
            bits == 2 or codec not in BLOCKS or (values < 2**bits - 1).all(),
            "a code above the outermost level",
        )
        require("lane", codec != LANES or (values <= 2 * world_size).all(), values)
        require(
            "padding",
            pack_bits(values, bits, int(codec == TERNARY)).tobytes() == codes.tobytes(),
            codes[-1:],
        )
    return header, scales, codes


def _payload(
    codec: int, x: Array, seen: Array, group: int, scales: Array, codes: Array, key: Key
) -> bytes:
    flags = 0 if np.isfinite(seen).all() and np.isfinite(scales).all() else NONFINITE
    dtype, group = SOURCE_DTYPES[x.dtype.name], group if len(x) else 1
    return pack_payload(
        Header(codec, dtype, flags, len(x), group, scales.size, key.step, key.stream), scales, codes
    )


def encode_values(x: Array, codec: int, key: Key) -> bytes:
    """Return a payload of the values themselves, fp32 (IDENTITY) or bf16 (BF16_VALUES)."""
    values = from_float32(to_float32(x), F32 if codec == IDENTITY else BF16)
    return _payload(codec, x, to_float32(values), len(x), np.zeros(0), values, key)


def encode_ternary(x: Array, scales: Floats, group_numel: int, key: Key) -> bytes:
    """Return a ternary payload with one scale for every `group_numel` elements (`ternary_scales`
    computes them).
    """
    codes = ternary_encode(x, scales, Piece(len(x), group_numel), key)
    return _payload(TERNARY, x, to_float32(x), group_numel, scales, codes, key)


def encode_onebit(
    x: Array,
    residual: Floats | None,
    group_numel: int,
    key: Key,
    means: tuple[float, float] | None = None,
    decay: float = 1.0,
) -> tuple[bytes, Floats]:
    """Return a 1-bit payload and the new residual; it is flagged when gradient + residual is not
    finite.
    """
    scales, bits, left = onebit_encode(
        x, Piece(len(x), group_numel), residual, means, decay
    )  # left is finite exactly when they are
    return _payload(ONEBIT, x, left, group_numel, scales, bits, key), left


def encode_nearest(
    x: Array,
    residual: Floats | None,
    group_numel: int,
    key: Key,
    step: float = 1.8,
    decay: float = 1.0,
) -> tuple[bytes, Floats]:
    """Return a payload of ternary codes rounded to the nearest level, and the new residual;
    flagged as `encode_onebit`'s.
    """
    scales, codes, left = nearest_encode(x, Piece(len(x), group_numel), step, residual, decay)
    return _payload(TERNARY, x, left, group_numel, scales, codes, key), left


def encode_block(
    x: Array, residual: Floats | None, group_numel: int, key: Key, codec: int, decay: float = 1.0
) -> tuple[bytes, Floats]:
    """Return a payload of evenly spaced levels and the new residual; it is flagged when gradient
    + residual is not finite.
    """
    scales, codes, left = block_encode(
        x, Piece(len(x), group_numel), BLOCKS[codec], residual, decay
    )
    return _payload(codec, x, left, group_numel, scales, codes, key), left


def encode_topk(x: Array, residual: Floats | None, key: Key) -> tuple[bytes, Floats]:
    """Return a top-k payload and the new residual; it is flagged when gradient + residual is not
    finite.
    """
    scales, codes, left = topk_encode(x, Piece(len(x), GROUP_NUMEL), residual)
    return _payload(TOPK, x, left, GROUP_NUMEL, scales, codes, key), left


def encode_lanes(payloads: Sequence[bytes], key: Key) -> bytes:
    """Return the exact sum of shared-scale ternary payloads as lanes, with the scales of the
    first.
    """
    headers, scales, codes = zip(*(unpack_payload(p) for p in payloads), strict=True)
    header = headers[0]._replace(
        codec=LANES, flags=max(h.flags for h in headers), step=key.step, stream=key.stream
    )
    return pack_payload(header, scales[0], sum_lanes(codes, header.numel))


def decode(payload: bytes, world_size: int = 1) -> Floats:
    """Return the values of one unsegmented payload, `(numel,)` float32; a flagged one is NaN
    throughout.
    """
    header, scales, codes = unpack_payload(payload, world_size)
    piece = Piece(header.numel, header.group_numel)
    if header.flags & NONFINITE:
        return np.full(header.numel, np.nan, np.float32)
    if header.codec == TERNARY:
        return ternary_sum_decode([codes], [scales], piece, shared=False)
    if header.codec == ONEBIT:
        return onebit_decode(codes, scales, piece)
    if header.codec in BLOCKS:
        return block_decode(codes, scales, piece, BLOCKS[header.codec])
    if header.codec == TOPK:
        return topk_decode(codes, scales, piece)
    if header.codec == LANES:
        return lanes_decode(codes, scales, piece, world_size)
    return to_float32(codes.view("<f4" if header.codec == IDENTITY else "<u2"))
