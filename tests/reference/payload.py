"""Whole payloads in NumPy, written to be read: header, checksum, scales, codes, every refusal.

docs/reference/wire-format.md draws the bytes; `reference.codec` has the arithmetic.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from reference import codec as ref
from reference import entropy
from reference.codec import BF16, F16, F32, Array, Bytes, Floats, Key, Piece, to_float32

IDENTITY, TERNARY, ONEBIT, LANES, BF16_VALUES = 1, 2, 3, 4, 5  # codecs, as in the header
BLOCKS = {6: 2, 7: 4, 8: 8}  # those of evenly spaced levels, with their bits
ENTROPY = 10
SCALES_PER_GROUP = {IDENTITY: 0, BF16_VALUES: 0, TERNARY: 1, LANES: 1, ONEBIT: 2, ENTROPY: 1}
SCALES_PER_GROUP |= dict.fromkeys(BLOCKS, 1)
CODE_BITS = {IDENTITY: 32, TERNARY: 2, ONEBIT: 1, BF16_VALUES: 16, **BLOCKS}  # LANES: lane_bits
NONFINITE, SEGMENTED = 1, 2  # header flags
MAGIC, VERSION = 0x504D4347, 2  # the bytes "GCMP"
HEADER = struct.Struct("<IBBBBIIIIII")  # 32 bytes; the last field is the checksum
MAX_NUMEL = 2**32 - 4096


# What each byte leaves of a division by the polynomial: eight steps, one a bit.
REMAINDERS = range(256)
for _ in range(8):
    REMAINDERS = [r >> 1 ^ (0x82F63B78 if r & 1 else 0) for r in REMAINDERS]


def crc32c(data: bytes, crc: int = 0) -> int:
    """Return the CRC-32C of `data`, continuing `crc`; b"123456789" gives 0xE3069283."""
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ REMAINDERS[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


class Header(NamedTuple):
    """The header between version and checksum; bits 8 to 30 of `stream` are the FSDP module."""

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
    per_group, bits = SCALES_PER_GROUP[codec], CODE_BITS.get(codec) or ref.lane_bits(world_size)
    require("group_numel", group_numel == max(numel, 1) or (per_group and numel), group_numel)
    fixed = entropy.STREAM_NUMEL if codec == ENTROPY and numel else group_numel
    require("group_numel", group_numel == fixed, group_numel)
    require("scale_count", scale_count == -(-numel // group_numel) * per_group, scale_count)
    codes_start = HEADER.size + 4 * scale_count
    if codec == ENTROPY:
        nbytes = entropy.stream_nbytes(numel, len(payload) - codes_start)
        size = codes_start + entropy.whole_nbytes(numel, nbytes)
    else:
        size = codes_start + (numel * bits + 7) // 8
    require("truncated", len(payload) >= size, len(payload))
    require("trailing", len(payload) <= size, len(payload))
    scales = np.frombuffer(payload, "<f4", scale_count, HEADER.size)
    codes = np.frombuffer(payload, np.uint8, offset=codes_start)
    if flags & NONFINITE:  # nothing is taken from the body of a flagged payload
        return header, scales, codes
    if not per_group:
        values = to_float32(codes.view("<f4" if codec == IDENTITY else "<u2"))
        require("value", np.isfinite(values).all(), "NaN or Inf")
        return header, scales, codes
    signed = codec != ONEBIT and np.signbit(scales).any()
    require("scale", np.isfinite(scales).all() and not signed, scales)
    if codec in BLOCKS:
        most = np.finfo(np.float32).max / np.float32(2 * ref.BLOCK_ZEROS[BLOCKS[codec]])
        require("scale", (scales <= most).all(), scales)
    if codec == ENTROPY:
        require("scale", (scales <= entropy.LARGEST_STEP).all(), scales)
        tables = entropy.tables_of(codes, Piece(numel, group_numel), nbytes)
        require("code", all(number < 16 for number in tables), tables)
        return header, scales, codes
    values = ref.unpack_bits(codes, numel, bits)
    odd = codec == TERNARY or (codec in BLOCKS and bits > 2)  # 2**bits - 1 levels
    require("code", not odd or (values < 2**bits - 1).all(), "a code without a level")
    require("lane", codec != LANES or (values <= 2 * world_size).all(), values)
    packed = ref.pack_bits(values, bits, int(codec == TERNARY))
    require("padding", packed.tobytes() == codes.tobytes(), codes[-1:])
    return header, scales, codes


def _payload(
    codec: int, x: Array, seen: Array, group: int, scales: Array, codes: Array, key: Key
) -> bytes:
    flags = 0 if np.isfinite(seen).all() and np.isfinite(scales).all() else NONFINITE
    dtype, group = ref.SOURCE_DTYPES[x.dtype.name], group if len(x) else 1
    header = Header(codec, dtype, flags, len(x), group, scales.size, key.step, key.stream)
    return pack_payload(header, scales, codes)


def encode_values(x: Array, codec: int, key: Key) -> bytes:
    """Return a payload of the values themselves, fp32 (IDENTITY) or bf16 (BF16_VALUES)."""
    values = ref.from_float32(to_float32(x), F32 if codec == IDENTITY else BF16)
    return _payload(codec, x, to_float32(values), len(x), np.zeros(0), values, key)


def encode_ternary(x: Array, scales: Floats, group_numel: int, key: Key) -> bytes:
    """Return a ternary payload with one scale every `group_numel` elements (`ternary_scales`)."""
    codes = ref.ternary_encode(x, scales, Piece(len(x), group_numel), key)
    return _payload(TERNARY, x, to_float32(x), group_numel, scales, codes, key)


# Codes with error feedback, by the names of their kernels: how they are encoded and decoded. Both
# take an option: the means of 1-bit codes (None: measured), the step of ternary codes, the bits of
# evenly spaced levels, the bytes of streams.
FED_BACK: dict[str, tuple[Callable[..., Any], Callable[..., Floats]]] = {
    "onebit": (ref.onebit_encode, lambda codes, s, piece, _: ref.onebit_decode(codes, s, piece)),
    "nearest": (
        ref.nearest_encode,
        lambda codes, s, piece, _: ref.ternary_sum_decode([codes], [s], piece, shared=False),
    ),
    "block": (ref.block_encode, ref.block_decode),
    "entropy": (entropy.entropy_encode, entropy.entropy_decode),
}


def encode_fed_back(
    kind: str,
    x: Array,
    residual: Floats | None,
    group: int,
    key: Key,
    option: Any = None,
    decay: float = 1.0,
) -> tuple[bytes, Floats]:
    """Return a payload of codes of `FED_BACK` and the new residual.

    The payload is flagged if the new residual is not finite, which it is exactly where gradient +
    residual is not.
    """
    encode, _ = FED_BACK[kind]
    scales, codes, left = encode(x, Piece(len(x), group), option, residual, decay)
    codec = {"onebit": ONEBIT, "nearest": TERNARY, "entropy": ENTROPY}.get(kind)
    if codec is None:
        (codec,) = (number for number, bits in BLOCKS.items() if bits == option)
    return _payload(codec, x, left, group, scales, codes, key), left


def encode_lanes(payloads: Sequence[bytes], key: Key) -> bytes:
    """Return the exact sum of shared-scale ternary payloads as lanes, with the first's scales."""
    headers, scales, codes = zip(*(unpack_payload(p) for p in payloads), strict=True)
    flags, header = max(h.flags for h in headers), headers[0]
    header = header._replace(codec=LANES, flags=flags, step=key.step, stream=key.stream)
    return pack_payload(header, scales[0], ref.sum_lanes(codes, header.numel))


def decode(payload: bytes, world_size: int = 1) -> Floats:
    """Return the values of one unsegmented payload, `(numel,)` float32; all NaN if flagged."""
    header, scales, codes = unpack_payload(payload, world_size)
    piece = Piece(header.numel, header.group_numel)
    if header.flags & NONFINITE:
        return np.full(header.numel, np.nan, np.float32)
    if header.codec == TERNARY:
        return ref.ternary_sum_decode([codes], [scales], piece, shared=False)
    if header.codec == ONEBIT:
        return ref.onebit_decode(codes, scales, piece)
    if header.codec in BLOCKS:
        return ref.block_decode(codes, scales, piece, BLOCKS[header.codec])
    if header.codec == ENTROPY:
        nbytes = entropy.stream_nbytes(header.numel, len(codes))
        return entropy.entropy_decode(codes, scales, piece, nbytes)
    if header.codec == LANES:
        return ref.lanes_decode(codes, scales, piece, world_size)
    return to_float32(codes.view("<f4" if header.codec == IDENTITY else "<u2"))
