"""The record by which ranks see, before the first byte moves, that they are about to do the same
thing.

A record is `SLOTS` u64, whatever is compared: integers as they are, everything else as a 64-bit
hash of its text. So ranks that call different things compare records of one size. The values
themselves stay on the rank, as words for the error message.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence

FIELDS = (
    "wire_version",
    "call",  # 0 for buckets
    "optimizer",  # of a call to register; 0 for buckets
    "codec",
    "codec_options",
    "transform",
    "precondition",
    "exchange",
    "second_phase",
    "slice_numel",
    "start_step",
    "min_numel",
    "exclude",
    "dtype",
    "numel",
    "layout",
    "step",
    "world_size",
    "transactional",
    "parameter_count",
    "loaded",
    "state",
    "bucket",
)
SLOTS = 24
_RECORD = struct.Struct(f"<{SLOTS}Q")
NBYTES = _RECORD.size
WORD_NUMEL = 200  # characters of a value in an error message, about
_BEFORE_NUMEL = 40  # of them, characters before the first difference of two long ones
_VERSIONS = range(1, 256)  # wire versions; anything else is bytes of another collective

Words = Mapping[str, object]


class Record:
    """What a rank is about to do: a value for each field, compared by `packed`, and in words for
    people.

    Args:
        values: by field; a field of `FIELDS` without a value is 0. An int is compared as it is.
        words: what a message says of a field, where its value says less: a text, or a function that
            returns one.
        call: what every rank has to call, for a record with fields of its own: "" for those of
            `FIELDS`.

    Attributes:
        fields: names by slot.
        packed: `NBYTES` bytes, little-endian.

    Raises:
        ValueError: more fields than slots, or one that is not in `FIELDS`.
    """

    def __init__(
        self, values: Mapping[str, object], words: Words | None = None, *, call: str = ""
    ) -> None:
        self.fields = (
            ("wire_version", "call", *(f for f in values if f != "wire_version"))
            if call
            else FIELDS
        )
        unknown = values.keys() - set(self.fields)
        if unknown or len(self.fields) > SLOTS:
            raise ValueError(
                f"fields {sorted(unknown)} are unknown, or more than {SLOTS}: {self.fields}"
            )
        self._values = {"call": (call, self.fields) if call else 0, **values}
        self._words = {
            "call": call or "an exchange of gradients",
            "optimizer": "none",
            **(words or {}),
        }
        numbers = [_number(self._values.get(field, 0)) for field in self.fields]
        self.packed = _RECORD.pack(*numbers, *[0] * (SLOTS - len(numbers)))

    def word(self, field: str) -> str:
        """Return what a message says of this rank's value."""
        word = self._words.get(field, self._values.get(field, 0))
        word = word() if callable(word) else word
        return word if isinstance(word, str) else repr(word)


def difference(
    records: Sequence[bytes], ignored: int | None = None
) -> tuple[int | None, int] | None:
    """Return (slot, rank) of the first slot in which ranks differ and the first rank that differs
    from rank 0.

    Args:
        records: every rank's, in rank order.
        ignored: a slot that may differ.

    Returns:
        None where all are alike; the slot is None where a rank sent no record.
    """
    everyone = [_RECORD.unpack(record) for record in records]
    for rank, theirs in enumerate(everyone):
        if theirs[0] not in _VERSIONS:
            return None, rank
    for slot in range(SLOTS):
        for rank, theirs in enumerate(everyone):
            if theirs[slot] != everyone[0][slot] and slot != ignored:
                return slot, rank
    return None


def version_of(record: bytes) -> int:
    """Return the wire version that a rank has."""
    return int(_RECORD.unpack(record)[0])


def apart(one: str, other: str) -> tuple[str, str]:
    """Return two texts, cut to the part where they differ if they are long."""
    if max(len(one), len(other)) <= WORD_NUMEL:
        return one, other
    same = next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    first = max(0, same - _BEFORE_NUMEL)
    return _cut(one, first), _cut(other, first)


def _cut(text: str, first: int) -> str:
    end = first + WORD_NUMEL
    return f"{'... ' if first else ''}{text[first:end]}{' ...' if len(text) > end else ''}"


def _number(value: object) -> int:
    if isinstance(value, int):
        return value
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little")
