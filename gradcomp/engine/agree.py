"""What ranks tell each other outside of a bucket's exchange: arguments that must be alike, why
one gives up.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Protocol

from gradcomp.comm.base import Channel, Communicator
from gradcomp.exchange.agree import agree
from gradcomp.exchange.pipeline import Pipeline
from gradcomp.payload import wire
from gradcomp.payload.fingerprint import Record


class HasPipeline(Protocol):
    """What works through a pipeline."""

    pipeline: Pipeline


def tell_why(owner: HasPipeline, abort: Callable[[str], None]) -> Callable[[], None]:
    """Return what calls `abort` with the error of the owner's pipeline, without keeping the
    owner alive.
    """
    me = weakref.ref(owner)

    def tell() -> None:
        found = me()
        error = found.pipeline.error if found is not None else None
        abort(f"{type(error).__name__}: {error}" if error is not None else "")

    return tell


def agree_on_words(
    comm: Communicator,
    values: Mapping[str, object],
    timeout_s: float,
    phase: str,
    *,
    called: str,
    channel: Channel = Channel.SCALE,
) -> None:
    """Compare arguments of a call over the ranks, by their text.

    Args:
        values: by the names of the arguments, the same names in the same order everywhere.
        phase: for the message when a rank does not answer.
        called: what every rank has to call.
        channel: SCALE, which is claimed meanwhile; CONTROL where an exchange may be under way.

    Raises:
        PeerMismatch: on every rank, naming the first argument and rank that differ, and what both
            have; "call".
        PeerLost: a rank did not answer.
    """
    texts = {name: repr(value) for name, value in values.items()}
    mine = Record({"wire_version": wire.VERSION, **texts}, texts, call=called)
    if channel is Channel.CONTROL:
        agree(comm, mine, timeout_s, phase=phase, channel=channel, called=called)
        return
    with comm.lease(called) as lease:
        agree(lease, mine, timeout_s, phase=phase, called=called)
