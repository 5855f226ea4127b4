"""Comparison of settings and tensors over the ranks, before or during training.

`agree` all-gathers a record of `NBYTES` bytes with one u64 per field: an integer as it is, any
other value as a 64-bit hash of its repr. The values themselves are sent only after a difference, as
text for the error message. `agree_on_tensors` compares digests of tensors, `gather` all-gathers a
few bytes. All three start with a message of `NBYTES` bytes, since gloo ends the process if message
lengths differ. So ranks that have called different functions get a PeerMismatch ("call"). Where
there is room, these messages end with the name of the call.
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
from gradcomp.comm.base import Channel, Communicator, first_line
from gradcomp.errors import PeerMismatch, peers_answer
from gradcomp.payload import wire

# fields of every record that a bucket's fingerprint may be compared with, in order of reporting
EXCHANGE_FIELDS = (
    "wire_version",
    "call",
    "optimizer",  # only in a call to register
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
# fields that do not depend on whether a bucket's layout is new
_BEFORE_LAYOUTS = ("wire_version", "call", "optimizer", "loaded", "state")
SLOTS = 24
_RECORD = struct.Struct(f"<{SLOTS}Q")
NBYTES = _RECORD.size
_VERSIONS = range(1, 256)  # wire versions; any other number is from another collective
_HEAD_NBYTES = 8  # hash of the phase, at the start of each message of `gather`
DIGEST_NBYTES = 16
WORDS_NBYTES = 4096  # size of a value as text, sent by each rank after a mismatch
WORDS_S = 10.0  # longest wait for these texts, in seconds; the error is raised without them, too
_WORD_NUMEL = 200  # characters of a value in an error message, about
_BEFORE_NUMEL = 40  # characters of these before the first difference between two long values
# (name, value) pairs; a value is a tensor or has a repr that identifies it
Named = Sequence[tuple[str, object]]


@dataclass(frozen=True)
class Shown:
    """A value to compare, with a text of its own for error messages.

    Attributes:
        value: the value that is compared.
        text: text for the error message in place of the repr, or a function that returns it.
    """

    value: object
    text: str | Callable[[], str]


UNSET = Shown(0, "None")  # value of a field that is not given
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
    """Compare values over the ranks; return the records of all ranks. Collective.

    Args:
        values: values by field; `Shown` to put a text other than the repr into error messages.
            Strings are shown without quotes.
        timeout_s: longest wait for a rank, in seconds.
        called: the function that every rank has to call. Named in the error if a rank does not
            answer; compared if `fields` is empty.
        fields: `EXCHANGE_FIELDS` if another rank may send a bucket's record at the same time.
            Otherwise `values` are arguments of `called`: same names and order on every rank.
        ignored: a field that may differ.
        phase, bucket: named in the error if a rank does not answer.
        channel: SCALE if the caller has claimed the channels of exchanges. CONTROL if an exchange
            may be in progress: only from the main thread, in the same order on every rank.

    Raises:
        PeerMismatch: on every rank, with the first field and rank that differ, and both values;
            "call" if ranks have called different functions.
        PeerLost: in `phase`; a rank did not answer within `timeout_s`, or is gone.
        ValueError: too many fields, or a value whose field is not in `fields`.
    """
    names = tuple(fields) or ("wire_version", "call", *values)
    if len(names) > SLOTS or not values.keys() <= set(names):
        raise ValueError(
            f"fields {sorted(values.keys() - set(names))} are unknown, or more than {SLOTS}:"
            f" {names}"
        )
    own_values = dict.fromkeys(names, UNSET) | {
        "wire_version": wire.VERSION,
        **(_NOT_CALLED if fields else {"call": Shown((called, names), called)}),
        **values,
    }
    numbers = [_number(value) for value in own_values.values()]
    packed = _framed(struct.pack(f"<{len(numbers)}Q", *numbers), called)
    with peers_answer(phase, bucket, called=called):
        messages = comm.all_gather_bytes(packed, timeout_s, channel)
    records = [_RECORD.unpack(message) for message in messages]
    for rank, peer_record in enumerate(records):
        # a rank in another collective would not answer `_mismatch`
        if peer_record[0] not in _VERSIONS:
            mine = _text(own_values["call"])
            raise PeerMismatch("call", rank, mine, _call_of(messages[rank]), first=comm.rank)
    columns = dict(zip(names, zip(*records, strict=True), strict=False))
    # a state loaded by some ranks may be why they alone have a new bucket layout
    odd = bool(fields) and len({number == 0 for number in columns["codec"]}) > 1
    for name in sorted(names, key=lambda name: odd and name not in _BEFORE_LAYOUTS):
        column = columns[name]
        others = [rank for rank, number in enumerate(column) if number != column[0]]
        if others and name == "wire_version":
            raise PeerMismatch(name, others[0], column[0], column[others[0]])
        if others and name != ignored:
            raise _mismatch(comm, name, others[0], _text(own_values[name]), timeout_s, channel)
    return records


def codec_fields(codec: Codec) -> dict[str, object]:
    """Return the fields of `agree` that describe a codec: its name and its options."""
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
    """Raise PeerMismatch unless all ranks have the same names, shapes and bits. Collective.

    Ranks compare one record first. They exchange a digest per value only if the record shows
    different bits.

    Args:
        named: (name, tensor or other value) pairs to compare.
        timeout_s, called, phase, channel: see `agree`.
        settings: further values to compare, by name.
        shards: for each value the part that this rank has; None: all of it.

    Raises:
        PeerMismatch: a field of `settings`; "layout"; or the name of the first value that differs
            from rank 0's.
        PeerLost: a rank did not answer.
    """
    own_digests = digests(named)
    layout = "; ".join(f"{name} {_kind(value)}" for name, value in named)
    layout += f"; shards {list(shards)}" if any(shard is not None for shard in shards) else ""
    values = {**(settings or {}), "layout": layout, "bits": own_digests}
    try:
        agree(comm, values, timeout_s, called=called, phase=phase, channel=channel)
        return
    except PeerMismatch as error:
        if error.field != "bits":
            raise
    # names and shapes are equal, so digests have the same size on every rank
    with peers_answer(phase, called=called):
        all_digests = comm.all_gather_bytes(own_digests, timeout_s, channel)
    for number, (name, value) in enumerate(named):
        part = slice(DIGEST_NBYTES * number, DIGEST_NBYTES * (number + 1))
        others = [
            rank
            for rank, peer_digests in enumerate(all_digests)
            if peer_digests[part] != all_digests[0][part]
        ]
        if others:
            raise _mismatch(comm, name, others[0], _describe(value), timeout_s, channel)


def digests(named: Named) -> bytes:
    """Return a digest of DIGEST_NBYTES bytes per value, concatenated. A tensor is hashed by the
    bytes of its elements in order, any other value by its repr.
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
    """Return the `data` of every rank, by rank. Collective.

    Args:
        data: this rank's bytes; the same length on every rank that gathers for `phase`.
        phase: compared over the ranks: a rank in another phase, or in `agree`, is a mismatch.
        timeout_s: longest wait for a rank, in seconds.
        channel: see `agree`.
        called: the function that every rank has to call, for error messages.

    Raises:
        PeerMismatch: "call"; on every rank.
        PeerLost: in `phase`; a rank did not answer within `timeout_s`, or is gone.
    """
    head = hashlib.blake2b(phase.encode(), digest_size=_HEAD_NBYTES).digest()
    framed = _framed(head + data, called)
    with peers_answer(phase, called=called):
        messages = comm.all_gather_bytes(framed, timeout_s, channel)
    for rank, message in enumerate(messages):
        if message[:_HEAD_NBYTES] != head:
            raise PeerMismatch("call", rank, called, _call_of(message), first=comm.rank)
    return [message[_HEAD_NBYTES : _HEAD_NBYTES + len(data)] for message in messages]


# ---- texts of an error message -------------------------------------------------------------------


def _mismatch(
    comm: Communicator, field: str, rank: int, text: str, timeout_s: float, channel: Channel
) -> PeerMismatch:
    """Return the error for a field in which `rank` is the first that differs from rank 0.
    Collective: ranks exchange their values as text. If one does not answer, the error shows only
    `text`, which is this rank's value, and why the other is missing.
    """
    data = text.encode()[:WORDS_NBYTES].ljust(WORDS_NBYTES, b"\0")
    try:
        texts = comm.all_gather_bytes(data, min(timeout_s, WORDS_S), channel)
    except (TimeoutError, ConnectionError) as error:
        other = f"another value, which did not arrive as text ({first_line(error)})"
        if comm.rank == rank:
            return PeerMismatch(field, rank, other, text)
        return PeerMismatch(field, rank, text, other, first=comm.rank)
    one, other = (texts[n].rstrip(b"\0").decode(errors="ignore") for n in (0, rank))
    expected, got = shorten(one, other)
    if expected == got:
        got += " (the difference does not show in this text)"
    return PeerMismatch(field, rank, expected, got)


def _framed(data: bytes, called: str) -> bytes:
    """Return `data` in at least NBYTES bytes, and at their end the name of the call, cut to fit."""
    name = called.encode()[: max(0, NBYTES - 1 - len(data))]
    return data.ljust(NBYTES - len(name), b"\0") + name


def _call_of(message: bytes) -> str:
    """Return a text for the call in which another rank has sent a message."""
    version, called = _RECORD.unpack_from(message)[:2]
    if version in _VERSIONS and called == 0:
        return _text(_NOT_CALLED["call"])
    name = message.rpartition(b"\0")[2].decode(errors="ignore")
    is_name = b"\0" in message and name.isprintable() and name
    return name if is_name else "another call, which its message does not name"


def _number(value: object) -> int:
    value = value.value if isinstance(value, Shown) else value
    if type(value) is int and 0 <= value < 2**64:  # True is hashed: its text differs from 1's
        return value
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little")


def _text(value: object) -> str:
    if isinstance(value, Shown):
        return value.text() if callable(value.text) else value.text
    return value if isinstance(value, str) else repr(value)


def shorten(one: str, other: str) -> tuple[str, str]:
    """Return both texts; long ones are cut to the part around their first difference."""
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
    """Return a text that identifies a value: its repr, or a tensor's shape, dtype, sum and first
    three values.
    """
    if not isinstance(value, Tensor):
        return repr(value)
    flat = value.detach().cpu().double().reshape(-1)
    total = f"sum {float(flat.sum())!r}" if flat.numel() else "no elements"
    return f"{_kind(value)}, {total}, first values {flat[:3].tolist()}"


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return type(value).__name__
