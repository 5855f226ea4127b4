"""Whether a step counts, for the same answer on every rank: a round of a few bytes after the
last bucket.
"""

from __future__ import annotations

import struct

from gradcomp.comm.base import Channel, Communicator
from gradcomp.errors import PeerMismatch, peers_answer

_DONE = struct.Struct("<Qd")  # step, loss scale


def agree_on_step(comm: Communicator, step: int, loss_scale: float, timeout_s: float) -> int:
    """Return, once every rank has averaged every bucket of this step, the bytes that this rank sent
    for it.

    A rank whose step failed does not get here, so no rank gets past here. It runs in the last stage
    of a pipeline, behind the buckets, when nothing else is under way on the channel of second
    phases.

    Raises:
        PeerMismatch: "step" or "loss_scale" differ.
        PeerLost: "outcome"; a rank did not finish the step.
    """
    with peers_answer("outcome"):  # nothing else is ever gathered on this channel
        found = comm.all_gather_bytes(_DONE.pack(step, loss_scale), timeout_s, Channel.SECOND)
    everyone = [_DONE.unpack(data) for data in found]
    for number, field in enumerate(("step", "loss_scale")):
        for rank, theirs in enumerate(everyone):
            if theirs[number] != everyone[0][number]:
                raise PeerMismatch(field, rank, everyone[0][number], theirs[number])
    return (comm.world_size - 1) * _DONE.size
