"""What ranks tell each other outside of a bucket's exchange: records that must be alike, digests of tensors."""

from __future__ import annotations

import time

from gradcomp.comm.base import Channel, Communicator
from gradcomp.errors import PeerLost
from gradcomp.payload import fingerprint


def gather(
    comm: Communicator, data: bytes, phase: str, bucket: int, timeout_s: float, channel: Channel = Channel.CONTROL
) -> list[bytes]:
    """Return every rank's `data`, of the same length everywhere.

    Args:
        channel: CONTROL for who calls from the main thread, in the same order on every rank; SCALE for the first stage
            of a pipeline.

    Raises:
        PeerLost: `phase` and `bucket`; a rank did not answer within `timeout_s` seconds, or is gone.
    """
    begun = time.perf_counter()
    try:
        return comm.all_gather_bytes(data, timeout_s, channel)
    except (TimeoutError, ConnectionError) as error:
        raise PeerLost(phase, bucket, time.perf_counter() - begun, str(error)) from error


def agree(
    comm: Communicator, mine: list[int], bucket: int, timeout_s: float, channel: Channel = Channel.CONTROL
) -> int:
    """Compare a fingerprint over the ranks; return the bytes that this rank sent for it. `channel` as of `gather`.

    Raises:
        PeerMismatch: on every rank, naming the first field and rank that differ.
        PeerLost: as `gather`.
    """
    fingerprint.compare(gather(comm, fingerprint.pack(mine), "fingerprint", bucket, timeout_s, channel))
    return (comm.world_size - 1) * fingerprint.NBYTES
