"""What ranks compare outside of a bucket's exchange: one record each, and in words what differs."""

from __future__ import annotations

import hashlib

from gradcomp.comm.base import Channel, Communicator
from gradcomp.errors import PeerMismatch, peers_answer
from gradcomp.payload import fingerprint
from gradcomp.payload.fingerprint import Record

WORDS_NBYTES = 4096  # of a value as text, from each rank, after a mismatch
WORDS_S = 10.0  # longest wait for the texts: the mismatch is certain without them
HIDDEN = " (the difference does not show in this text)"
_HEAD_NBYTES = 8  # of what `gather` sends: which phase it is


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
    `phase`.

    What fits goes round in as many bytes as a record, since gloo ends the process where lengths
    differ: a rank that is in another call of this, or in `agree`, is a mismatch.

    Args:
        channel: CONTROL for who calls from the main thread, in the same order on every rank; SCALE
            for who has claimed the channels of exchanges.
        called: what every rank has to call, for messages.

    Raises:
        PeerMismatch: "call"; on every rank.
        PeerLost: `phase`; a rank did not answer within `timeout_s` seconds, or is gone.
    """
    head = hashlib.blake2b(phase.encode(), digest_size=_HEAD_NBYTES).digest()
    framed = (head + data).ljust(fingerprint.NBYTES, b"\0")
    with peers_answer(phase, called=called):
        everyone = comm.all_gather_bytes(framed, timeout_s, channel)
    for rank, theirs in enumerate(everyone):
        if theirs[:_HEAD_NBYTES] != head:
            raise PeerMismatch("call", rank, called, "another call", first=comm.rank)
    return [theirs[_HEAD_NBYTES : _HEAD_NBYTES + len(data)] for theirs in everyone]


def agree(
    comm: Communicator,
    mine: Record,
    timeout_s: float,
    *,
    bucket: int = -1,
    phase: str = "fingerprint",
    channel: Channel = Channel.SCALE,
    called: str = "",
    ignored: str = "",
) -> list[bytes]:
    """Compare a record over the ranks; return the packed records of all.

    Whatever is compared has one size, so that ranks that call different things get a mismatch.
    Fingerprints of buckets, and what may meet them, go over the channel of the first stage, which
    the caller has claimed. Only after a difference, which every rank sees alike, the ranks exchange
    their values as text.

    Args:
        ignored: a field that may differ.
        bucket, phase, called: for the message when a rank does not answer.

    Raises:
        PeerMismatch: on every rank, naming the first field and rank that differ, and what both
            have.
        PeerLost: as `gather`.
    """
    with peers_answer(phase, bucket, called=called):
        everyone = comm.all_gather_bytes(mine.packed, timeout_s, channel)
    found = fingerprint.difference(everyone, mine.fields.index(ignored) if ignored else None)
    if found is None:
        return everyone
    slot, rank = found
    if slot is None:  # it may be in another collective, and would not answer
        raise PeerMismatch("call", rank, mine.word("call"), "another call", first=comm.rank)
    field = mine.fields[slot]
    if field == "wire_version":
        raise PeerMismatch(field, rank, *(fingerprint.version_of(everyone[r]) for r in (0, rank)))
    texts = _exchange_words(comm, mine.word(field), timeout_s, channel)
    if texts is None:
        first = comm.rank if comm.rank != rank else 0
        known = mine.word(field), "something else"
        raise PeerMismatch(
            field, rank, *(known if first == comm.rank else known[::-1]), first=first
        )
    expected, got = fingerprint.apart(texts[0], texts[rank])
    got += HIDDEN if expected == got else ""
    raise PeerMismatch(field, rank, expected, got)


def _exchange_words(
    comm: Communicator, word: str, timeout_s: float, channel: Channel
) -> list[str] | None:
    """Return every rank's text, cut to `WORDS_NBYTES`; None where a rank does not answer soon."""
    data = word.encode()[:WORDS_NBYTES].ljust(WORDS_NBYTES, b"\0")
    try:
        everyone = comm.all_gather_bytes(data, min(timeout_s, WORDS_S), channel)
    except (TimeoutError, ConnectionError):
        return None
    return [text.rstrip(b"\0").decode(errors="ignore") for text in everyone]
