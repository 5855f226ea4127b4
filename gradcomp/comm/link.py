"""A slow link between ranks that have a fast one: what a training would take in another building,
tried on one machine.

Every rank has one full-duplex link. What it sends leaves in the order in which it was started, at
`bits_per_s`, and is under way for `latency_s` in each round of its collective; only then does the
collective begin on the communicator beneath. So a rank that starts late delays its peers as it
would over a wire, and no rank is delayed twice.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from torch import Tensor

from gradcomp.comm.base import Channel, Communicator, Work
from gradcomp.comm.rounds import all_gather_rounds, all_to_all_rounds, max_rounds, ring_bytes


class LinkCommunicator(Communicator):
    """The ranks of another communicator behind a slow link.

    Every rank has one full-duplex link. A collective begins on `comm` when its bytes have left and
    been under way for `latency_s` in each of its rounds (all_gather N - 1, all_to_all 1, maximum
    2 (N - 1)).

    Args:
        comm: moves the bytes in the end; closed with this one.
        bits_per_s: of each rank's link, in each direction; ``float("inf")`` for latency alone.
        latency_s: seconds that a message is under way, whatever its size.

    Raises:
        TypeError: no communicator, or no number.
        ValueError: a rate that is not positive, or a latency that is negative or not finite.
    """

    def __init__(self, comm: Communicator, *, bits_per_s: float, latency_s: float = 0.0) -> None:
        if not isinstance(comm, Communicator):
            raise TypeError(
                "comm must be a communicator, such as TorchCommunicator(), got"
                f" {type(comm).__name__}"
            )
        for name, value in (("bits_per_s", bits_per_s), ("latency_s", latency_s)):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(
                    f"{name} must be a number, got {value!r} (gradcomp.plan.links.parse_link reads"
                    " '10mbit')"
                )
        if not bits_per_s > 0:
            raise ValueError(f"bits_per_s must be positive, got {bits_per_s!r}")
        if not 0 <= latency_s < float("inf"):
            raise ValueError(f"latency_s must be at least 0 and finite, got {latency_s!r}")
        self._wire = _Wire(bits_per_s, latency_s)
        self._over(comm)

    def _over(self, comm: Communicator) -> None:
        self._comm = comm
        self.rank, self.world_size = comm.rank, comm.world_size
        self.timeout_s = comm.timeout_s
        self._lock = threading.Lock()
        self._closed = threading.Event()
        # by channel, so that each keeps its order
        self._queues: dict[object, SimpleQueue[_LinkWork | None]] = {}
        weakref.finalize(self, _stop, self._lock, self._closed, self._queues).atexit = False

    def _like(self, comm: Communicator) -> LinkCommunicator:
        """Return `comm` over this rank's link, of which there is one."""
        link = object.__new__(LinkCommunicator)
        link._wire = self._wire
        link._over(comm)
        return link

    def check_overlap(self) -> None:
        self._comm.check_overlap()

    def start_max(self, values: Tensor, channel: Channel) -> Work:
        comm, nbytes = self._comm, ring_bytes(values.numel(), self.world_size)
        return self._send(
            channel, nbytes, max_rounds(self.world_size), lambda: comm.start_max(values, channel)
        )

    def start_all_to_all(
        self,
        send: Tensor,
        send_nbytes: Sequence[int],
        recv: Tensor,
        recv_nbytes: Sequence[int],
        channel: Channel,
    ) -> Work:
        comm, nbytes, rounds = (
            self._comm,
            sum(send_nbytes) - send_nbytes[self.rank],
            all_to_all_rounds(self.world_size),
        )
        return self._send(
            channel,
            nbytes,
            rounds,
            lambda: comm.start_all_to_all(send, send_nbytes, recv, recv_nbytes, channel),
        )

    def start_all_gather(self, send: Tensor, recv: Tensor, channel: Channel) -> Work:
        comm, nbytes = self._comm, (self.world_size - 1) * send.numel()
        rounds = all_gather_rounds(self.world_size)
        return self._send(
            channel, nbytes, rounds, lambda: comm.start_all_gather(send, recv, channel)
        )

    def start_send(self, message: Tensor, to: int) -> Work:
        self.check_peer(to)
        comm = self._comm
        return self._send("messages", message.numel(), 1, lambda: comm.start_send(message, to))

    def receive(
        self, timeout_s: float, source: int | None = None, *, max_nbytes: int
    ) -> tuple[int, Tensor]:
        return self._comm.receive(timeout_s, source, max_nbytes=max_nbytes)

    def subset(self, ranks: Sequence[int], timeout_s: float) -> Communicator:
        """As `Communicator.subset`; both send over this rank's link."""
        return self._like(self._comm.subset(ranks, timeout_s))

    def node_subset(self, ranks: Sequence[int], timeout_s: float) -> Communicator:
        """As `Communicator.node_subset`: inside a node there is no link."""
        return self._comm.node_subset(ranks, timeout_s)

    def duplicate(self, timeout_s: float | None = None) -> Communicator:
        """As `Communicator.duplicate`; both send over this rank's link."""
        return self._like(self._comm.duplicate(timeout_s))

    def abort(self, reason: str = "") -> None:
        _stop(self._lock, self._closed, self._queues)
        self._comm.abort(reason)

    def close(self) -> None:
        """As `Communicator.close`; what is still under way is lost, and whoever waits for it
        gets ConnectionError.
        """
        _stop(self._lock, self._closed, self._queues)
        self._comm.close()

    def _send(self, channel: object, nbytes: int, rounds: int, start: Callable[[], Work]) -> Work:
        """Have `start` called when `nbytes` have left the link and have been under way for
        `rounds` latencies.
        """
        with self._lock:
            if self._closed.is_set():
                raise ConnectionError("the link is closed")
            work = _LinkWork(self, self._wire.send(nbytes, rounds), start)
            if channel not in self._queues:
                waiting = self._queues[channel] = SimpleQueue()
                name = f"gradcomp-link-{channel!s}"
                threading.Thread(
                    target=_serve, args=(waiting, self._closed), name=name, daemon=True
                ).start()
            self._queues[channel].put(work)
        return work


class _Wire:
    """The one link of a rank, which all its communicators share."""

    def __init__(self, bits_per_s: float, latency_s: float) -> None:
        self._bits_per_s, self._latency_s = bits_per_s, latency_s
        self._free = 0.0  # when all that was started has been sent
        self._lock = threading.Lock()

    def send(self, nbytes: int, rounds: int) -> float:
        """Return when `nbytes` that are sent now arrive."""
        with self._lock:
            self._free = max(time.monotonic(), self._free) + 8 * nbytes / self._bits_per_s
            return self._free + rounds * self._latency_s


def _stop(
    lock: threading.Lock,
    closed: threading.Event,
    queues: dict[object, SimpleQueue[_LinkWork | None]],
) -> None:
    with lock:
        closed.set()
        waiting = list(queues.values())
        queues.clear()
    for one in waiting:
        one.put(None)


def _serve(waiting: SimpleQueue[_LinkWork | None], closed: threading.Event) -> None:
    """Start what was sent on one channel, in order, each when it arrives. A daemon: no process
    waits for a slow link.
    """
    while (work := waiting.get()) is not None:
        work.arrive(closed)
        del work  # it knows the communicator, which is to go when nobody uses it


class _LinkWork(Work):
    """What is under way until `due`, and then begins on the communicator beneath."""

    def __init__(self, link: LinkCommunicator, due: float, start: Callable[[], Work]) -> None:
        self._link: LinkCommunicator | None = (
            link  # one that nobody else uses lives on until this has arrived
        )
        self._due, self._start = due, start
        self._arrived = threading.Event()
        self._beneath: Work | None = None
        self._error: BaseException | None = None

    def arrive(self, closed: threading.Event) -> None:
        while (left := self._due - time.monotonic()) > 0 and not closed.wait(min(left, 3600.0)):
            pass
        try:
            if closed.is_set():
                raise ConnectionError("the link was closed before this was sent")
            self._beneath = self._start()
        except BaseException as error:  # noqa: BLE001 - told to whoever waits
            self._error = error
        self._link = None
        self._arrived.set()

    def wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        if not self._arrived.wait(timeout_s):
            raise TimeoutError(f"not sent after {timeout_s} s")
        if self._beneath is None:
            raise self._error or RuntimeError("nothing was started")
        self._beneath.wait(max(0.001, deadline - time.monotonic()))

    def is_done(self) -> bool:
        return self._arrived.is_set() and (self._beneath is None or self._beneath.is_done())
