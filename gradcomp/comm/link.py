"""A slow link between ranks that have a fast one, to try on one machine what a training would take
in another building.
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
from gradcomp.comm.rounds import all_gather_rounds, all_to_all_rounds, max_rounds, ring_bytes


class LinkCommunicator(Communicator):
    """The ranks of another communicator behind a slow link.

    Every rank has one full-duplex link. What it sends leaves in the order in which it was started.
    A collective begins on `comm` when its bytes have left and been under way for `latency_s` in
    each of its rounds (all_gather N - 1, all_to_all 1, maximum 2 (N - 1)): a rank that starts late
    delays its peers as it would over a wire, and no rank is delayed twice.

    Args:
        comm: moves the bytes in the end; closed with this one.
        bits_per_s: of each rank's link, in each direction; ``float("inf")`` for latency alone.
        latency_s: seconds that a message is under way, whatever its size.

    Raises:
        TypeError: `comm` is not a communicator, or an option is not a number.
        ValueError: a rate that is not positive, or a latency that is negative or not finite.
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
        """Return `comm` over this rank's link, of which there is one."""
        wire = self._wire
        link = LinkCommunicator(comm, bits_per_s=wire.bits_per_s, latency_s=wire.latency_s)
        link._wire = wire
        return link

    def check_overlap(self) -> None:
        self._comm.check_overlap()

    def _start_max(self, values: Tensor, channel: Channel) -> Work:
        nbytes, rounds = ring_bytes(values.numel(), self.world_size), max_rounds(self.world_size)
        return self._send(channel, nbytes, rounds, partial(self._comm.start_max, values, channel))

    def _start_all_to_all(
        self, send: Tensor, send_nbytes: Counts, recv: Tensor, recv_nbytes: Counts, channel: Channel
    ) -> Work:
        nbytes = sum(send_nbytes) - send_nbytes[self.rank]
        start = partial(self._comm.start_all_to_all, send, send_nbytes, recv, recv_nbytes, channel)
        return self._send(channel, nbytes, all_to_all_rounds(self.world_size), start)

    def _start_all_gather(self, send: Tensor, recv: Tensor, channel: Channel) -> Work:
        nbytes, rounds = (self.world_size - 1) * send.numel(), all_gather_rounds(self.world_size)
        start = partial(self._comm.start_all_gather, send, recv, channel)
        return self._send(channel, nbytes, rounds, start)

    def start_send(self, message: Tensor, to: int) -> Work:
        self.check_peer(to)
        start = partial(self._comm.start_send, message, to)
        return self._send("messages", message.numel(), 1, start)

    def receive(self, timeout_s: float, source: int | None = None, *, max_nbytes: int) -> Message:
        return self._comm.receive(timeout_s, source, max_nbytes=max_nbytes)

    def subset(self, ranks: Sequence[int], timeout_s: float) -> Communicator:
        """As `Communicator.subset`; both send over this rank's link."""
        return self._same_link(self._comm.subset(ranks, timeout_s))

    def node_subset(self, ranks: Sequence[int], timeout_s: float) -> Communicator:
        """As `Communicator.node_subset`: inside a node there is no link."""
        return self._comm.node_subset(ranks, timeout_s)

    def duplicate(self, timeout_s: float | None = None) -> Communicator:
        """As `Communicator.duplicate`; both send over this rank's link."""
        return self._same_link(self._comm.duplicate(timeout_s))

    def abort(self, reason: str = "") -> None:
        self._queues.close()
        self._comm.abort(reason)

    def close(self) -> None:
        """As `Communicator.close`; what is still under way is lost, and waits for it end in
        ConnectionError.
        """
        self._queues.close()
        self._comm.close()

    def _send(self, channel: object, nbytes: int, rounds: int, start: Callable[[], Work]) -> Work:
        """Have `start` called when `nbytes` have left and been under way for `rounds` latencies."""
        with self._queues.lock:
            work = _LinkWork(self, self._wire.send(nbytes, rounds), start)
            self._queues.put(channel, work)
        return work


class _Wire:
    """The one link of a rank, which all its communicators share."""

    def __init__(self, bits_per_s: float, latency_s: float) -> None:
        self.bits_per_s, self.latency_s = bits_per_s, latency_s
        self._free = 0.0  # when all that was started has been sent
        self._lock = threading.Lock()

    def send(self, nbytes: int, rounds: int) -> float:
        """Return when `nbytes` that are sent now arrive."""
        with self._lock:
            self._free = max(time.monotonic(), self._free) + 8 * nbytes / self.bits_per_s
            return self._free + rounds * self.latency_s


class _LinkWork(Work):
    """What is under way until `due`, and then begins on the communicator beneath."""

    def __init__(self, link: LinkCommunicator, due: float, start: Callable[[], Work]) -> None:
        # a link that nobody else uses lives on until this has arrived
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
    """What is under way, by channel, so that each keeps its order."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._closed = threading.Event()
        self._queues: dict[object, SimpleQueue[_LinkWork | None]] = {}

    def put(self, channel: object, work: _LinkWork) -> None:
        """Have `work` arrive in its turn. Holds `lock`."""
        if self._closed.is_set():
            raise ConnectionError("the link is closed")
        if channel not in self._queues:
            queue = self._queues[channel] = SimpleQueue()
            name, args = f"gradcomp-link-{channel!s}", (queue, self._closed)
            # a daemon: no process waits for a slow link
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
        del work  # it knows the communicator, which is to go when nobody uses it
