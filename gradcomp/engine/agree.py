"""What ranks tell each other outside of a bucket's exchange: records that must be alike, digests of tensors."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping
from typing import Protocol

from gradcomp.comm.base import Channel, Communicator
from gradcomp.errors import PeerMismatch, peers_answer
from gradcomp.exchange.pipeline import Pipeline
from gradcomp.payload import fingerprint

_WORD_NBYTES = 64  # of an argument as text, in what ranks compare


class HasPipeline(Protocol):
    """What works through a pipeline."""

    pipeline: Pipeline


def tell_why(owner: HasPipeline, abort: Callable[[str], None]) -> Callable[[], None]:
    """Return what calls `abort` with the error of the owner's pipeline, without keeping the owner alive."""
    me = weakref.ref(owner)

    def tell() -> None:
        found = me()
        error = found.pipeline.error if found is not None else None
        abort(f"{type(error).__name__}: {error}" if error is not None else "")

    return tell


def gather(
    comm: Communicator,
    data: bytes,
    phase: str,
    bucket: int,
    timeout_s: float,
    channel: Channel = Channel.CONTROL,
    *,
    called: str = "",
) -> list[bytes]:
    """Return every rank's `data`, of the same length everywhere.

    Args:
        channel: CONTROL for who calls from the main thread, in the same order on every rank; SCALE for who has claimed
            the channels of exchanges.
        called: what every rank has to call, for the message.

    Raises:
        PeerLost: `phase` and `bucket`; a rank did not answer within `timeout_s` seconds, or is gone.
    """
    with peers_answer(phase, bucket, called=called):
        return comm.all_gather_bytes(data, timeout_s, channel)


def agree(comm: Communicator, mine: list[int], bucket: int, timeout_s: float, *, called: str = "") -> int:
    """Compare a fingerprint over the ranks; return the bytes that this rank sent for it.

    All fingerprints go over one channel, that of the first stage, which the caller has claimed: so a rank that compares
    something else meanwhile is a mismatch, and no silence.

    Raises:
        PeerMismatch: on every rank, naming the first field and rank that differ.
        PeerLost: as `gather`.
    """
    everyone = gather(comm, fingerprint.pack(mine), "fingerprint", bucket, timeout_s, Channel.SCALE, called=called)
    fingerprint.compare(everyone)
    return (comm.world_size - 1) * fingerprint.NBYTES


def agree_on_words(
    comm: Communicator, values: Mapping[str, object], timeout_s: float, phase: str, *, called: str
) -> None:
    """Compare the texts of arguments over the ranks.

    Args:
        values: by the names of the arguments, the same names in the same order everywhere.
        phase, called: for the message when a rank does not answer.

    Raises:
        PeerMismatch: on every rank, naming the first argument and rank that differ.
        PeerLost: a rank did not answer.
    """
    everyone = gather(comm, b"".join(_word(value) for value in values.values()), phase, -1, timeout_s, called=called)
    for number, name in enumerate(values):
        at = slice(number * _WORD_NBYTES, (number + 1) * _WORD_NBYTES)
        for rank, theirs in enumerate(everyone):
            if theirs[at] != everyone[0][at]:
                wanted, got = (e[at].decode(errors="replace").rstrip() for e in (everyone[0], theirs))
                raise PeerMismatch(name, rank, wanted, got)


def _word(value: object) -> bytes:
    """Return a text of `_WORD_NBYTES` bytes; one that is too long is cut and ends in a digest."""
    text = repr(value).encode()
    if len(text) > _WORD_NBYTES:
        digest = hashlib.blake2b(text, digest_size=8).hexdigest().encode()
        text = text[: _WORD_NBYTES - len(digest) - 3] + b"..." + digest
    return text.ljust(_WORD_NBYTES)
