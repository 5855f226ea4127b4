"""What ranks tell each other outside of a bucket's exchange: records that must be alike, digests of tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

from gradcomp.comm.base import Channel, Communicator
from gradcomp.errors import peers_answer
from gradcomp.exchange.pipeline import Pipeline
from gradcomp.payload import fingerprint


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
