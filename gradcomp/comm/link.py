"""Emulation of a slow link between ranks, to measure on one machine how long training would take on
a slower network.
"""

from __future__ import annotations

import concurrent.futures
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

from torch import Tensor

from gradcomp.comm.base import Channel, Communicator, Counts, Message, Work
from gradcomp.comm.rounds import ring_bytes, rounds_of


class LinkCommunicator(Communicator):
    """A communicator that delays another one as if its ranks were connected by slow links.

    Every rank has one full-duplex link, which sends messages in the order in which they were
    started. A collective starts on `comm` after the time to send its bytes plus `latency_s` for
    each of its rounds (all_gather N - 1, all_to_all 1, maximum 2 (N - 1)). A rank that starts late
    therefore delays its peers as on a real link, and no rank is delayed twice.

    Args:
        comm: communicator that moves the bytes after the delay; closed by `close`.
        bits_per_s: rate of each rank's link in each direction, in bits per second;
            ``float("inf")`` to emulate latency only.
        latency_s: latency of a message of any size, in seconds.

    Raises:
        TypeError: `comm` is not a communicator, or an option is not a number.
        ValueError: `bits_per_s` is not positive, or `latency_s` is negative or not finite.
    """

    def __init__(self, comm: Communicator, *, bits_per_s: float, latency_s: float = 0.0) -> None:
        if not isinstance(comm, Communicator):
            wanted = "comm must be a communicator, such as TorchCommunicator()"
            raise TypeError(f"{wanted}, got {type(comm).__name__}")
        for name, value in (("bits_per_s", bits_per_s), ("latency_s", latency_s)):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                hint = "gradcomp.plan.links.parse_link reads '10mbit'"
                raise TypeError(f"{name} must be a number, got {value!r} ({hint})")
        if not bits_per_s > 0:
            raise ValueError(f"bits_per_s must be positive, got {bits_per_s!r}")
        if not 0 <= latency_s < math.inf:
            raise ValueError(f"latency_s must be at least 0 and finite, got {latency_s!r}")
        self._comm, self._wire = comm, _Wire(bits_per_s, latency_s)
        self.rank, self.world_size, self.timeout_s = comm.rank, comm.world_size, comm.timeout_s
        self._queues = _Queues()
        weakref.finalize(self, self._queues.close).atexit = False

    def _same_link(self, comm: Communicator) -> LinkCommunicator:
        """Return `comm` behind the link that all communicators of this rank share."""
        wire = self._wire
        link = LinkCommunicator(comm, bits_per_s=wire.bits_per_s, latency_s=wire.latency_s)
        link._wire = wire
        return link

    def check_overlap(self) -> None:
        self._comm.check_overlap()

    def _start_max(self, values: Tensor, channel: Channel) -> Work:
        nbytes = ring_bytes(values.numel(), self.world_size)
        start = partial(self._comm.start_max, values, channel)
        return self._send(channel, nbytes, rounds_of("max", self.world_size), start)

    def _start_all_to_all(
        self, send: Tensor, send_nbytes: Counts, recv: Tensor, recv_nbytes: Counts, channel: Channel
    ) -> Work:
        nbytes = sum(send_nbytes) - send_nbytes[self.rank]
        start = partial(self._comm.start_all_to_all, send, send_nbytes, recv, recv_nbytes, channel)
        return self._send(channel, nbytes, rounds_of("all_to_all", self.world_size), start)

    def _start_all_gather(self, send: Tensor, recv: Tensor, channel: Channel) -> Work:
        nbytes = (self.world_size - 1) * send.numel()
        start = partial(self._comm.start_all_gather, send, recv, channel)
        return self._send(channel, nbytes, rounds_of("all_gather", self.world_size), start)

    def start_send(self, message: Tensor, to: int) -> Work:
        self.check_peer(to)
        start = partial(self._comm.start_send, message, to)
        return self._send("messages", message.numel(), 1, start)

    def receive(self, timeout_s: float, source: int | None = None, *, max_nbytes: int) -> Message:
        return self._comm.receive(timeout_s, source, max_nbytes=max_nbytes)

    def subset(self, ranks: Sequence[int], timeout_s: float) -> Communicator:
        """As `Communicator.subset`; both communicators share this rank's link."""
        return self._same_link(self._comm.subset(ranks, timeout_s))

    def node_subset(self, ranks: Sequence[int], timeout_s: float) -> Communicator:
        """As `Communicator.node_subset`, without a delay: ranks of one node share no slow link."""
        return self._comm.node_subset(ranks, timeout_s)

    def duplicate(self, timeout_s: float | None = None) -> Communicator:
        """As `Communicator.duplicate`; both communicators share this rank's link."""
        return self._same_link(self._comm.duplicate(timeout_s))

    def abort(self, reason: str = "") -> None:
        self._queues.close()
        self._comm.abort(reason)

    def close(self) -> None:
        """Close `comm`, too. Collectives and messages still delayed are dropped, and waits for them
        raise ConnectionError.
        """
        self._queues.close()
        self._comm.close()

    def _send(self, channel: object, nbytes: int, rounds: int, start: Callable[[], Work]) -> Work:
        """Schedule `start` for when the link has sent `nbytes`, plus `rounds` latencies."""
        with self._queues.lock:
            work = _LinkWork(self, self._wire.send(nbytes, rounds), start)
            self._queues.put(channel, work)
        return work


class _Wire:
    """The link of a rank, shared by all of its communicators."""

    def __init__(self, bits_per_s: float, latency_s: float) -> None:
        self.bits_per_s, self.latency_s = bits_per_s, latency_s
        self._free = 0.0  # time at which everything started so far has been sent
        self._lock = threading.Lock()

    def send(self, nbytes: int, rounds: int) -> float:
        """Return the time (`time.monotonic`) at which `nbytes` sent now arrive."""
        with self._lock:
            self._free = max(time.monotonic(), self._free) + 8 * nbytes / self.bits_per_s
            return self._free + rounds * self.latency_s


class _LinkWork(Work):
    """A collective or message that starts on the wrapped communicator at time `due`."""

    def __init__(self, link: LinkCommunicator, due: float, start: Callable[[], Work]) -> None:
        # keeps the link alive until this has started
        self._link: LinkCommunicator | None = link
        self._due, self._start = due, start
        self._begun: concurrent.futures.Future[Work] = concurrent.futures.Future()

    def arrive(self, closed: threading.Event) -> None:
        while (left := self._due - time.monotonic()) > 0 and not closed.wait(min(left, 3600.0)):
            pass
        try:
            if closed.is_set():
                raise ConnectionError("the link was closed before this was sent")
            self._begun.set_result(self._start())
        except BaseException as error:  # noqa: BLE001 - raised in `wait`
            self._begun.set_exception(error)
        self._link = None

    def wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        if not concurrent.futures.wait([self._begun], timeout_s).done:
            raise TimeoutError(f"not sent after {timeout_s} s")
        self._begun.result().wait(max(0.001, deadline - time.monotonic()))

    def is_done(self) -> bool:
        begun = self._begun
        return begun.done() and (begun.exception() is not None or begun.result().is_done())


class _Queues:
    """Delayed work, one FIFO queue and one thread for each channel, which preserves its order."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._closed = threading.Event()
        self._queues: dict[object, SimpleQueue[_LinkWork | None]] = {}

    def put(self, channel: object, work: _LinkWork) -> None:
        """Append `work` to the queue of a channel. The caller holds `lock`."""
        if self._closed.is_set():
            raise ConnectionError("the link is closed")
        if channel not in self._queues:
            queue = self._queues[channel] = SimpleQueue()
            name, args = f"gradcomp-link-{channel!s}", (queue, self._closed)
            # a daemon, so that the process can exit before the link has sent everything
            threading.Thread(target=_serve, args=args, name=name, daemon=True).start()
        self._queues[channel].put(work)

    def close(self) -> None:
        with self.lock:
            self._closed.set()
            for queue in self._queues.values():
                queue.put(None)
            self._queues.clear()


def _serve(queue: SimpleQueue[_LinkWork | None], closed: threading.Event) -> None:
    while (work := queue.get()) is not None:
        work.arrive(closed)
        del work  # it refers to the communicator, which must be collectable while this waits
