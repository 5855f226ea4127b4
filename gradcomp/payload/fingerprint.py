"""The record by which ranks see, before the first byte of a bucket moves, that they all mean the same thing.

Twenty u64: numbers as they are, everything else as a 64-bit hash of its text. It is all-gathered for every new bucket
layout; the first field that differs from rank 0's is named on every rank.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from gradcomp.errors import PeerMismatch

FIELDS = (
    "wire_version",
    "optimizer",  # of a call to register; 0 for buckets
    "codec",
    "codec_options",
    "transform",
    "precondition",
    "exchange",
    "second_phase",
    "slice_numel",
    "dtype",
    "numel",
    "layout",
    "start_step",
    "min_numel",
    "exclude",
    "step",
    "world_size",
    "transactional",
    "parameter_count",
    "bucket",
)
_RECORD = struct.Struct(f"<{len(FIELDS)}Q")
NBYTES = _RECORD.size


def record(**values: object) -> list[int]:
    """Return the record of these values, one for each of `FIELDS`; a field without a value is 0."""
    return [value if isinstance(value := values.get(field, 0), int) else _digest(value) for field in FIELDS]


def pack(values: Sequence[int]) -> bytes:
    """Return a record as `NBYTES` bytes, little-endian."""
    return _RECORD.pack(*values)


def compare(records: Sequence[bytes], but: str = "") -> None:
    """Raise PeerMismatch, naming field and rank, unless all ranks' records are alike.

    Args:
        records: every rank's packed record, in rank order.
        but: a field that may differ.
    """
    everyone = [_RECORD.unpack(r) for r in records]
    for rank, theirs in enumerate(everyone):
        if not 0 < theirs[0] < 256:  # bytes of something else
            raise PeerMismatch("call", rank, "the same call as here", "another one")
    for number, field in enumerate(FIELDS):
        for rank, theirs in enumerate(everyone):
            if theirs[number] != everyone[0][number] and field != but:
                raise PeerMismatch(field, rank, everyone[0][number], theirs[number])


def _digest(value: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little")
