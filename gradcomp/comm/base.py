"""What an exchange needs of a transport: three collectives, started without waiting, on separate
channels; for a parameter server also messages from one rank to another.

A channel is an ordered sequence of its own (a gloo group, a duplicated MPI communicator):
collectives of one channel start in the same order on every rank, collectives of different channels
may overtake each other. One pipeline stage uses one channel, which is why overlapped exchanges
cannot deadlock (docs/explanation/overlap.md).

Who may call what while what is under way, for every communicator:

- `Channel.CONTROL` (`all_gather_bytes`, whatever ranks agree on beside exchanges) belongs to the
  main thread, in the same order on every rank, at any time.
- The other channels belong to one user at a time, who claims them (`Lease`) for a step: an engine
  from the start of its step to the end, `all_reduce` for its call. Another user gets a
  GradcompError at once, and wants `duplicate()`.
- `start_send` and `receive` may be called at any time, each from one thread.
- `abort` may be called from any thread; `subset`, `duplicate` and `close` from the main thread,
  when nothing is under way.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradcomp.errors import GradcompError, PeerLost
from gradcomp.waits import current

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger("gradcomp")

CLOSED = "closed its communicator, or its program ended, while other ranks were waiting for it"
Counts = Sequence[int]  # bytes to or from each rank
Message = tuple[int, Tensor]  # its sender, and ``(n,)`` uint8


class Channel(IntEnum):
    """A sequence of collectives that start in the same order on every rank.

    `SCALE`, `FIRST` and `SECOND` are one for each collective of an exchange; `CONTROL` is for what
    ranks agree on beside exchanges, from the main thread.
    """

    SCALE = 0
    FIRST = 1
    SECOND = 2
    CONTROL = 3


class RankGone(ConnectionError):
    """A peer that will not send or receive any more.

    Args:
        rank: which one, also an attribute.
        detail: what is known of the reason, for the message.
        what: what the message says of the rank.
    """

    def __init__(self, rank: int, detail: str = "", *, what: str = "is gone") -> None:
        super().__init__(f"rank {rank} {what}{f': {detail}' if detail else ''}")
        self.rank = rank


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text: torch's and MPI's have a page of C++ below."""
    return (str(error) or type(error).__name__).splitlines()[0]


def lost_in_setup(begun: float, why: str, rank: int | None = None) -> PeerLost:
    """Return the error of a meeting that began at `begun`, on `time.monotonic`'s clock."""
    return PeerLost("setup", -1, time.monotonic() - begun, why, rank)


def log_wait(rank: int, whom: Callable[[], str]) -> None:
    """Log this thread's wait, once, when it takes much longer than usual.

    Args:
        rank: of this process.
        whom: returns which ranks it waits for; "" where that is not known.
    """
    wait = current()
    if wait is not None and wait.is_long() and not wait.told:
        wait.told = True
        seconds, known = f"{wait.seconds():.0f} s", whom() or "another rank, which is not known"
        logger.warning("gradcomp: rank %d waits %s in %s for %s", rank, seconds, wait.what, known)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 1, 3"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def gave_up(reason: str) -> str:
    """Return what to say of a rank that has given up: it need not be the one that failed first."""
    return f"gave up because of {reason}" if reason else "gave up"


def report_gone(gone: Collection[int], reported: set[int], source: int | None) -> None:
    """Raise RankGone for `source` if it is in `gone`; where `source` is None, for a rank in
    `gone` that is not in `reported` yet, once.
    """
    if source is not None:
        if source in gone:
            raise RankGone(source)
    elif news := set(gone) - reported:
        reported.add(min(news))
        raise RankGone(min(news))


def no_message(source: int | None) -> TimeoutError:
    """Return what `Communicator.receive` raises after its timeout."""
    return TimeoutError(f"no message from {'any rank' if source is None else f'rank {source}'}")


def too_long(sender: int, nbytes: int, max_nbytes: int) -> ValueError:
    """Return what `Communicator.receive` raises for a message that was dropped."""
    return ValueError(f"rank {sender} sent {nbytes} bytes, at most {max_nbytes} expected")


class Work(ABC):
    """A collective, or a message, that has been started."""

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Block until the result stands in the receive buffer.

        Raises:
            TimeoutError: nothing after `timeout_s` seconds.
            ConnectionError: a peer is gone.
        """

    def is_done(self) -> bool:
        """Return whether `wait` would return at once; waits for nothing and ends nothing."""
        raise NotImplementedError(f"{type(self).__name__} cannot tell")


class Communicator(ABC):
    """A fixed set of ranks that exchange bytes.

    Buffers are contiguous CPU tensors that do not overlap (MPICH refuses some that do); the caller
    leaves them alone until `Work.wait` returns.
    Every rank must start the same collectives in the same order on each channel.

    A transport is a subclass that sets the attributes below and defines `_start_max`,
    `_start_all_to_all`, `_start_all_gather` and `close`; the public `start_...` methods check who
    has claimed the channels, and call them. `subset`, `start_send`, `receive`, `abort` and
    `Work.is_done` are needed for hierarchical exchanges, a parameter server, and errors that name a
    rank. A row in the `over` fixture of tests/conftest.py runs tests/comm/test_transports.py over
    it.

    Attributes:
        rank: number of this process in the set.
        world_size: number of processes in the set.
        timeout_s: seconds that its users wait for a peer by default.
    """

    rank: int
    world_size: int
    timeout_s: float = 300.0
    _held: weakref.ref[Lease] | None = None  # who has claimed the channels of exchanges

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in ("start_max", "start_all_to_all", "start_all_gather"):
            if name in vars(cls):
                raise TypeError(
                    f"{cls.__name__} must define _{name}() instead of {name}(), with the same"
                    f" arguments: {name}() checks who has claimed the channel and calls _{name}()"
                )

    # ---- collectives -----------------------------------------------------------------------------

    def start_max(self, values: Tensor, channel: Channel) -> Work:
        """Begin to replace `values`, ``(n,)`` int32, by the elementwise maximum over all ranks.

        Raises:
            GradcompError: another user has claimed the channels; so of the next two.
        """
        self._check_claim(channel)
        return self._start_max(values, channel)

    def start_all_to_all(
        self, send: Tensor, send_nbytes: Counts, recv: Tensor, recv_nbytes: Counts, channel: Channel
    ) -> Work:
        """Begin to send rank k the k-th run of `send` (uint8) and to receive its run for this
        rank into `recv`.
        """
        self._check_claim(channel)
        return self._start_all_to_all(send, send_nbytes, recv, recv_nbytes, channel)

    def start_all_gather(self, send: Tensor, recv: Tensor, channel: Channel) -> Work:
        """Begin to gather all ranks' `send`, ``(n,)`` uint8, into ``(world_size * n,)``."""
        self._check_claim(channel)
        return self._start_all_gather(send, recv, channel)

    @abstractmethod
    def _start_max(self, values: Tensor, channel: Channel) -> Work: ...

    @abstractmethod
    def _start_all_to_all(
        self, send: Tensor, send_nbytes: Counts, recv: Tensor, recv_nbytes: Counts, channel: Channel
    ) -> Work: ...

    @abstractmethod
    def _start_all_gather(self, send: Tensor, recv: Tensor, channel: Channel) -> Work: ...

    def all_gather_bytes(
        self, data: bytes, timeout_s: float, channel: Channel = Channel.CONTROL
    ) -> list[bytes]:
        """Return every rank's `data` (of the same length everywhere), waiting for it."""
        send = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        recv = torch.empty(self.world_size * len(data), dtype=torch.uint8, device="cpu")
        self.start_all_gather(send, recv, channel).wait(timeout_s)
        whole = recv.numpy().tobytes()
        return [whole[i : i + len(data)] for i in range(0, len(whole), len(data))]

    def identity(self, timeout_s: float) -> bytes:
        """Return 16 bytes that the ranks of this communicator, and no others, have in common.
        Collective at first.

        Raises:
            TimeoutError, ConnectionError: as `Work.wait`.
        """
        if "identity" not in self.kept:
            drawn = self.all_gather_bytes(secrets.token_bytes(16), timeout_s)
            self.kept["identity"] = hashlib.blake2b(b"".join(drawn), digest_size=16).digest()
        return bytes(self.kept["identity"])

    # ---- users -----------------------------------------------------------------------------------

    def lease(self, user: str) -> Lease:
        """Return this communicator for `user`, who may claim its channels (`Lease.claim`)."""
        return Lease(self, user)

    def _holder(self) -> Lease | None:
        return self._held() if self._held is not None else None

    def _check_claim(self, channel: Channel, user: Lease | None = None) -> None:
        """Raise GradcompError where another user than `user` has claimed a channel."""
        holder = self._holder()
        if holder not in (None, user) and channel is not Channel.CONTROL:
            raise holder.refuse("a collective")

    def check_overlap(self) -> None:
        """Raise RuntimeError where this rank cannot start collectives from several threads."""

    @property
    def kept(self) -> dict[Any, Any]:
        """What callers keep with this communicator: buffers, step counters."""
        return self.__dict__.setdefault("_kept", {})  # type: ignore[no-any-return]

    # ---- other communicators ---------------------------------------------------------------------

    def subset(self, ranks: Sequence[int], timeout_s: float) -> Communicator:
        """Return a communicator of `ranks`, in that order. Collective among them."""
        raise NotImplementedError(f"{type(self).__name__} makes no communicators of fewer ranks")

    def node_subset(self, ranks: Sequence[int], timeout_s: float) -> Communicator:
        """As `subset`, of ranks that share a host."""
        return self.subset(ranks, timeout_s)

    def duplicate(self, timeout_s: float | None = None) -> Communicator:
        """Return another communicator of the same ranks, with channels of its own. Collective.

        Args:
            timeout_s: seconds that its users wait for a peer; None: those of this one.
        """
        seconds = self.timeout_s if timeout_s is None else timeout_s
        return self.subset(range(self.world_size), seconds)

    # ---- messages --------------------------------------------------------------------------------

    def check_peer(self, to: int) -> None:
        """Raise ValueError unless `to` is another rank."""
        if not 0 <= to < self.world_size or to == self.rank:
            raise ValueError(f"rank {self.rank} of {self.world_size} cannot send to rank {to}")

    def start_send(self, message: Tensor, to: int) -> Work:
        """Begin to send `message`, ``(n,)`` uint8, to rank `to`; order is kept for each pair."""
        raise NotImplementedError(f"{type(self).__name__} sends no messages from rank to rank")

    def receive(self, timeout_s: float, source: int | None = None, *, max_nbytes: int) -> Message:
        """Wait for a message from rank `source`, or from any rank: return (its sender, the message,
        ``(n,)`` uint8).

        Raises:
            TimeoutError: nothing after `timeout_s` seconds; a later call may still receive.
            RankGone: a sender is gone (with any source: once for each); the others can still be
                heard.
            ValueError: a message of more than `max_nbytes`; it is dropped unread.
        """
        raise NotImplementedError(f"{type(self).__name__} sends no messages from rank to rank")

    def abort(self, reason: str = "") -> None:
        """Tell the peers, where the transport can, that this rank has given up, and why."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the communicator holds. Closing twice is harmless."""


_leases = threading.Lock()


def _same(method: str) -> Any:
    """Return a method of `Lease` that is the one of its communicator."""
    return lambda self, *args, **named: getattr(self._comm, method)(*args, **named)


class Lease(Communicator):
    """A communicator in the hands of one user, who claims the channels of exchanges before a step
    and releases them after.

    While they are claimed nobody else can claim them or start a collective on them, and everything
    the user starts goes through the lease. It can be claimed again and again; ``with
    comm.lease("what for") as lease:`` does once. A lease that is dropped holds nothing.

    Args:
        comm: the communicator; the lease closes and aborts it.
        user: who this is, for the error that another one gets.
    """

    def __init__(self, comm: Communicator, user: str) -> None:
        self._comm, self.user = comm, user
        self.rank, self.world_size, self.timeout_s = comm.rank, comm.world_size, comm.timeout_s

    def claim(self) -> None:
        """Take the channels of exchanges; nothing happens where this lease has them.

        Raises:
            GradcompError: another user has.
        """
        with _leases:
            holder = self._comm._holder()
            if holder is None:
                self._comm._held = weakref.ref(self)
            elif holder is not self:
                raise holder.refuse(self.user)

    def release(self) -> None:
        """Let others have the channels; nothing happens where this lease does not have them."""
        with _leases:
            if self._comm._holder() is self:
                self._comm._held = None

    def refuse(self, other: str) -> GradcompError:
        """Return what another user gets who wants the channels."""
        return GradcompError(
            f"{other} cannot start on this communicator while {self.user} has an exchange under way"
            " on it: finish that first (or close it), or give one of them a communicator of its"
            " own, comm.duplicate()"
        )

    def __enter__(self) -> Self:
        self.claim()
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    @property
    def kept(self) -> dict[Any, Any]:
        return self._comm.kept

    def _check_claim(self, channel: Channel, user: Lease | None = None) -> None:
        self._comm._check_claim(channel, self)

    def close(self) -> None:
        self.release()
        self._comm.close()

    _start_max = _same("_start_max")
    _start_all_to_all = _same("_start_all_to_all")
    _start_all_gather = _same("_start_all_gather")
    lease = _same("lease")
    check_overlap = _same("check_overlap")
    subset = _same("subset")
    node_subset = _same("node_subset")
    duplicate = _same("duplicate")
    start_send = _same("start_send")
    receive = _same("receive")
    abort = _same("abort")
