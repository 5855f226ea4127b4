"""How ranks compare settings and tensors, before they exchange gradients or beside it.

`agree` compares a record of `NBYTES` bytes, one u64 a field: small integers as they are, everything
else by a 64-bit hash of its repr. Values stay on their rank; only after a difference ranks send
them, as text for the error. `agree_on_tensors` compares tensors by digests, `gather` collects a few
bytes of each rank. All of them send `NBYTES` first, since gloo ends the process where lengths
differ: ranks that have called different things get a PeerMismatch ("call").
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradcomp.codecs import Codec
from gradcomp.comm.base import Channel, Communicator
from gradcomp.errors import PeerMismatch, peers_answer
from gradcomp.payload import wire

# of every record that may meet a bucket's, in the order in which differences are reported
EXCHANGE_FIELDS = (
    "wire_version",
    "call",
    "optimizer",  # of a call to register
    "codec",
    "codec_options",
    "transform",
    "precondition",
    "exchange",
    "second_phase",
    "slice_numel",
    "guard",
    "warmup_steps",
    "min_numel",
    "exclude",
    "dtype",
    "numel",
    "layout",
    "step",
    "world_size",
    "atomic_steps",
    "parameter_count",
    "loaded",
    "state",
    "bucket",
)
SLOTS = 24
_RECORD = struct.Struct(f"<{SLOTS}Q")
NBYTES = _RECORD.size
_VERSIONS = range(1, 256)  # wire versions; anything else is bytes of another collective
_HEAD_NBYTES = 8  # of what `gather` sends: which phase it is
DIGEST_NBYTES = 16
WORDS_NBYTES = 4096  # of a value as text, from each rank, after a mismatch
WORDS_S = 10.0  # longest wait for the texts: the mismatch is certain without them
_WORD_NUMEL = 200  # characters of a value in an error message, about
_BEFORE_NUMEL = 40  # of them, characters before the first difference of two long ones
# name, and a tensor or a value that its repr tells from others
Named = Sequence[tuple[str, object]]


@dataclass(frozen=True)
class Shown:
    """A value to compare whose text in an error message is not its repr.

    Attributes:
        value: what is compared.
        text: what a message shows of it, or a function that returns that.
    """

    value: object
    text: str | Callable[[], str]


UNSET = Shown(0, "None")  # of a field without a value
_NOT_CALLED = {"call": Shown(0, "an exchange of gradients"), "optimizer": Shown(0, "none")}


def agree(
    comm: Communicator,
    values: Mapping[str, object],
    timeout_s: float,
    *,
    called: str = "",
    fields: Sequence[str] = (),
    ignored: str = "",
    phase: str = "fingerprint",
    bucket: int = -1,
    channel: Channel = Channel.SCALE,
) -> list[tuple[int, ...]]:
    """Compare values over the ranks; return the records of all. Collective.

    Args:
        values: by field, `Shown` where a message should show something else than the repr; a text
            is shown without quotes.
        called: what every rank has to call: for the message when a rank does not answer, and
            compared where `fields` are not given.
        fields: `EXCHANGE_FIELDS` where the record may meet one of a bucket; otherwise `values` are
            arguments of `called`, the same names in the same order on every rank.
        ignored: a field that may differ.
        phase, bucket: for the message when a rank does not answer.
        channel: SCALE for who has claimed the channels of exchanges; CONTROL where an exchange may
            be under way: from the main thread, in the same order on every rank.

    Raises:
        PeerMismatch: on every rank, naming the first field and rank that differ, and what both
            have; "call" where ranks have called different things.
        PeerLost: `phase`; a rank did not answer within `timeout_s` seconds, or is gone.
        ValueError: more fields than slots, or one that is not in `fields`.
    """
    names = tuple(fields) or ("wire_version", "call", *values)
    if len(names) > SLOTS or not values.keys() <= set(names):
        raise ValueError(
            f"fields {sorted(values.keys() - set(names))} are unknown, or more than {SLOTS}:"
            f" {names}"
        )
    mine = dict.fromkeys(names, UNSET) | {
        "wire_version": wire.VERSION,
        **(_NOT_CALLED if fields else {"call": Shown((called, names), called)}),
        **values,
    }
    numbers = [_number(value) for value in mine.values()]
    packed = _RECORD.pack(*numbers, *[0] * (SLOTS - len(numbers)))
    with peers_answer(phase, bucket, called=called):
        everyone = [
            _RECORD.unpack(record) for record in comm.all_gather_bytes(packed, timeout_s, channel)
        ]
    for rank, theirs in enumerate(everyone):
        if theirs[0] not in _VERSIONS:  # it may be in another collective, and would not answer
            raise PeerMismatch("call", rank, _text(mine["call"]), "another call", first=comm.rank)
    for name, column in zip(names, zip(*everyone, strict=True), strict=False):
        others = [rank for rank, number in enumerate(column) if number != column[0]]
        if others and name == "wire_version":
            raise PeerMismatch(name, others[0], column[0], column[others[0]])
        if others and name != ignored:
            raise _mismatch(comm, name, others[0], _text(mine[name]), timeout_s, channel)
    return everyone


def codec_fields(codec: Codec) -> dict[str, object]:
    """Return what to compare of a codec: its name, and its options."""
    return {
        "codec": Shown(codec.name, lambda: repr(codec)),
        "codec_options": Shown(codec.options(), lambda: repr(codec)),
    }


def agree_on_tensors(
    comm: Communicator,
    named: Named,
    timeout_s: float,
    *,
    called: str,
    phase: str,
    channel: Channel = Channel.SCALE,
    settings: Mapping[str, object] | None = None,
    shards: Sequence[object] = (),
) -> None:
    """Raise PeerMismatch unless ranks hold the same names, shapes and bits. Collective.

    One record goes round first; digests of each tensor follow only where it shows that bits differ.

    Args:
        called, phase, channel: see `agree`.
        settings: what must not differ either, by name.
        shards: which part of each value a rank holds, where it holds a part.

    Raises:
        PeerMismatch: a field of `settings`; "layout"; the name of the first value that differs from
            rank 0's.
        PeerLost: a rank did not answer.
    """
    mine = digests(named)
    layout = "; ".join(f"{name} {_kind(value)}" for name, value in named)
    layout += f"; shards {list(shards)}" if any(shard is not None for shard in shards) else ""
    values = {**(settings or {}), "layout": layout, "bits": mine}
    try:
        agree(comm, values, timeout_s, called=called, phase=phase, channel=channel)
        return
    except PeerMismatch as found:
        if found.field != "bits":
            raise
    # names and shapes are alike: as many bytes on every rank
    with peers_answer(phase, called=called):
        everyone = comm.all_gather_bytes(mine, timeout_s, channel)
    for number, (name, value) in enumerate(named):
        part = slice(DIGEST_NBYTES * number, DIGEST_NBYTES * (number + 1))
        others = [rank for rank, its in enumerate(everyone) if its[part] != everyone[0][part]]
        if others:
            raise _mismatch(comm, name, others[0], _describe(value), timeout_s, channel)


def digests(named: Named) -> bytes:
    """Return DIGEST_NBYTES for each value: of a tensor of the bytes of its elements in order,
    else of its repr.
    """
    out = b""
    for _, value in named:
        if isinstance(value, Tensor):
            raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        else:
            raw = np.frombuffer(repr(value).encode(), np.uint8)
        out += hashlib.blake2b(raw.data, digest_size=DIGEST_NBYTES).digest()
    return out


def gather(
    comm: Communicator,
    data: bytes,
    phase: str,
    timeout_s: float,
    channel: Channel = Channel.CONTROL,
    *,
    called: str,
) -> list[bytes]:
    """Return every rank's `data`, of the same length on every rank that calls this for the same
    `phase`. Collective.

    Args:
        phase: compared too: a rank that gathers for another one, or is in `agree`, is a mismatch.
        channel: see `agree`.
        called: what every rank has to call, for messages.

    Raises:
        PeerMismatch: "call"; on every rank.
        PeerLost: `phase`; a rank did not answer within `timeout_s` seconds, or is gone.
    """
    head = hashlib.blake2b(phase.encode(), digest_size=_HEAD_NBYTES).digest()
    framed = (head + data).ljust(NBYTES, b"\0")
    with peers_answer(phase, called=called):
        everyone = comm.all_gather_bytes(framed, timeout_s, channel)
    for rank, theirs in enumerate(everyone):
        if theirs[:_HEAD_NBYTES] != head:
            raise PeerMismatch("call", rank, called, "another call", first=comm.rank)
    return [theirs[_HEAD_NBYTES : _HEAD_NBYTES + len(data)] for theirs in everyone]


# ---- texts of an error message -------------------------------------------------------------------


def _mismatch(
    comm: Communicator, field: str, rank: int, text: str, timeout_s: float, channel: Channel
) -> PeerMismatch:
    """Return the error for a field in which `rank` is the first to differ from rank 0; `text` is
    of this rank's value. Collective; the other texts are left out where a rank is silent.
    """
    data = text.encode()[:WORDS_NBYTES].ljust(WORDS_NBYTES, b"\0")
    try:
        everyone = comm.all_gather_bytes(data, min(timeout_s, WORDS_S), channel)
    except (TimeoutError, ConnectionError):
        if comm.rank == rank:
            return PeerMismatch(field, rank, "something else", text)
        return PeerMismatch(field, rank, text, "something else", first=comm.rank)
    one, other = (everyone[n].rstrip(b"\0").decode(errors="ignore") for n in (0, rank))
    expected, got = _shorten(one, other)
    if expected == got:
        got += " (the difference does not show in this text)"
    return PeerMismatch(field, rank, expected, got)


def _number(value: object) -> int:
    value = value.value if isinstance(value, Shown) else value
    if type(value) is int and 0 <= value < 2**64:  # True is not 1: their texts differ
        return value
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little")


def _text(value: object) -> str:
    if isinstance(value, Shown):
        return value.text() if callable(value.text) else value.text
    return value if isinstance(value, str) else repr(value)


def _shorten(one: str, other: str) -> tuple[str, str]:
    """Return two texts, cut to the part where they differ if they are long."""
    if max(len(one), len(other)) <= _WORD_NUMEL:
        return one, other
    same = next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    first = max(0, same - _BEFORE_NUMEL)
    return _cut(one, first), _cut(other, first)


def _cut(text: str, first: int) -> str:
    end = first + _WORD_NUMEL
    return f"{'... ' if first else ''}{text[first:end]}{' ...' if len(text) > end else ''}"


def _describe(value: object) -> str:
    """Return a text that tells a value from others."""
    if not isinstance(value, Tensor):
        return repr(value)
    flat = value.detach().cpu().double().reshape(-1)
    total = f"sum {float(flat.sum())!r}" if flat.numel() else "no elements"
    return f"{_kind(value)}, {total}, first values {flat[:3].tolist()}"


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return type(value).__name__
