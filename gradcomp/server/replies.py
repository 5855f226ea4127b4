"""What a server still has to send: replies leave in order, few at a time, and are written only
when they leave.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torch import Tensor

from gradcomp.comm.base import Communicator, Work

MAX_UNTAKEN = 8  # replies to one client that have been started and not been taken
MAX_WAITING = 1024  # replies to one client that wait for these; one that asks on is ended


class Untaken(Exception):
    """A client that asks and takes no replies."""


class Replies:
    """The replies of a server, by client.

    Args:
        comm: the ranks.

    Attributes:
        nbytes: sent so far, headers included.
    """

    def __init__(self, comm: Communicator) -> None:
        self.nbytes = 0
        self._comm = comm
        self._untaken: dict[int, list[Work]] = {}  # the transport needs them until they have left
        self._waiting: dict[int, deque[Callable[[], Tensor]]] = {}

    @property
    def started(self) -> object:
        """What the transport may still be sending."""
        return self._untaken

    def any_waits(self) -> bool:
        """Return whether `advance` may have something to do."""
        return any(self._waiting.values())

    def put(self, rank: int, write: Callable[[], Tensor]) -> None:
        """Send what `write` returns, ``(n,)`` uint8, after everything that was put before.

        Raises:
            Untaken: the client takes no replies.
            Exception: as `Communicator.start_send`, but for a client that is gone.
        """
        waiting = self._waiting.setdefault(rank, deque())
        if len(waiting) >= MAX_WAITING:
            raise Untaken(f"{len(waiting)} replies to rank {rank} wait")
        waiting.append(write)
        self.advance(rank)

    def advance(self, rank: int) -> None:
        """Start what can leave now. Raises as `put`."""
        waiting = self._waiting.get(rank)
        if not waiting:
            return
        untaken = self._untaken[rank] = [
            work for work in self._untaken.get(rank, []) if not work.is_done()
        ]
        while waiting and len(untaken) < MAX_UNTAKEN:
            message = waiting.popleft()()
            try:
                untaken.append(self._comm.start_send(message, rank))
            except ConnectionError:  # it is gone, which is none of the others' business
                return waiting.clear()
            self.nbytes += message.numel()

    def forget(self, rank: int) -> None:
        """Drop what waits for a client that has ended."""
        self._waiting.pop(rank, None)
