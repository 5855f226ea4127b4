"""Minibatches timed both ways, with double buffering and without: the answer that no formula
gives.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from gradcomp.comm.base import Communicator
from gradcomp.errors import GradcompError, peers_answer
from gradcomp.onebit_sgd.rollback import Checkpoint

ROUNDS = (
    2  # of each way, in turns: the faster one counts, since other programs only ever slow one down
)
_PAIR = struct.Struct("<dd")


@dataclass(frozen=True)
class OverlapComparison:
    """Seconds of a minibatch on the slowest rank, the same on every rank.

    Attributes:
        plain_s: forward, backward, exchange and update one after the other, of the whole minibatch.
        overlapped_s: with double buffering, the last exchange included.
    """

    plain_s: float
    overlapped_s: float

    @property
    def pays(self) -> bool:
        """Whether a minibatch is faster with double buffering."""
        return self.overlapped_s < self.plain_s

    def __str__(self) -> str:
        """Return one sentence."""
        verdict = "pays" if self.pays else "does not pay"
        both = (
            f"{1e3 * self.overlapped_s:.1f} ms a minibatch with it, {1e3 * self.plain_s:.1f} ms"
            " without"
        )
        return f"double buffering {verdict} here: {both}"


def time_both(
    plain: Callable[[], None],
    overlapped: Callable[[], object],
    drain: Callable[[], object],
    checkpoint: Checkpoint,
    steps: int,
    comm: Communicator,
    timeout_s: float,
) -> OverlapComparison:
    """Time `steps` calls of each, in turns, put everything back, and agree on the seconds.
    Collective.

    Raises:
        PeerLost: a rank did not answer.
    """
    best = [float("inf"), float("inf")]
    try:
        plain()  # buffers are made
        overlapped()
        drain()
        for _ in range(ROUNDS):
            for way, step in enumerate((plain, overlapped)):
                begun = time.perf_counter()
                for _ in range(steps):
                    step()
                drain()
                best[way] = min(best[way], (time.perf_counter() - begun) / steps)
    except BaseException:
        with suppress(
            GradcompError
        ):  # what ended it may have ended an exchange: that is told already
            checkpoint.restore()
        raise
    checkpoint.restore()
    with peers_answer("compare", called="compare()"):
        everyone = [
            _PAIR.unpack(data) for data in comm.all_gather_bytes(_PAIR.pack(*best), timeout_s)
        ]
    return OverlapComparison(max(p for p, _ in everyone), max(o for _, o in everyone))
