"""The transport interface: three non-blocking collectives on separate channels, and point-to-point
messages for a parameter server.

A channel is an independent, ordered sequence of collectives (a gloo group, a duplicated MPI
communicator). Collectives on one channel start in the same order on every rank. Collectives on
different channels are not ordered. Each pipeline stage uses one channel, so overlapped exchanges
cannot deadlock (docs/explanation/overlap.md).

Threads and concurrent calls, for every communicator:

- `Channel.CONTROL` (`all_gather_bytes`, and all agreement between ranks outside of exchanges) is
  used only from the main thread, at any time, in the same order on every rank.
- The other channels have one user at a time, which claims them with a `Lease`: an engine for the
  duration of its step, `all_reduce` for the duration of its call. Any other user gets a
  GradcompError immediately and should use `duplicate()`.
- `start_send` and `receive` may be called at any time, each from one thread.
- `abort` may be called from any thread. `subset`, `duplicate` and `close` may be called from the
  main thread while no collective or message is in progress.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
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
SAME_LENGTH = 60  # of the descriptions of a lost rank that are compared; reasons are cut
Counts = Sequence[int]  # bytes to or from each rank
Message = tuple[int, Tensor]  # rank of the sender, and its message, ``(n,)`` uint8


class Channel(IntEnum):
    """A sequence of collectives that start in the same order on every rank.

    `SCALE`, `FIRST` and `SECOND` each carry one collective of an exchange. `CONTROL` carries
    agreement between ranks outside of exchanges, and is used from the main thread only.
    """

    SCALE = 0
    FIRST = 1
    SECOND = 2
    CONTROL = 3


class RankGone(ConnectionError):
    """A peer that no longer sends or receives.

    Args:
        rank: rank of the peer; also an attribute.
        detail: known reason, appended to the error message; "" if unknown.
        what: predicate of the error message, after "rank N".
    """

    def __init__(self, rank: int, detail: str = "", *, what: str = "is gone") -> None:
        super().__init__(f"rank {rank} {what}{f': {detail}' if detail else ''}")
        self.rank = rank


class RankSilent(TimeoutError):
    """A wait that timed out because of one rank: all others wait, too.

    Args:
        rank: that rank; also an attribute.
        what: predicate of the error message, after "rank N".
    """

    def __init__(self, rank: int, what: str) -> None:
        super().__init__(f"rank {rank} {what}")
        self.rank = rank


def lost_rank(rank: int | None, what: str) -> ConnectionError:
    """Return the error for a lost rank and its description; None: not known, `what` says it all."""
    return ConnectionError(what) if rank is None else RankGone(rank, what=what)


def described(error: Exception) -> tuple[int | None, str]:
    """Return the rank and description in an error of a lost rank; or None and its whole text."""
    rank = getattr(error, "rank", None)
    return rank, str(error).removeprefix(f"rank {rank} ")


def first_line(error: BaseException) -> str:
    """Return the first line of an error message; torch and MPI append long C++ stack traces."""
    return (str(error) or type(error).__name__).splitlines()[0]


def lost_in_setup(begun: float, why: str, rank: int | None = None) -> PeerLost:
    """Return the PeerLost for a setup that started at `begun` (`time.monotonic`) and failed."""
    return PeerLost("setup", -1, time.monotonic() - begun, why, rank)


def log_wait(rank: int, whom: Callable[[], str]) -> None:
    """Log this thread's wait once if it is long, and add to the table of waits whom it is for;
    `whom` returns that, or "".
    """
    wait = current()
    if wait is not None and wait.is_long() and not wait.logged:
        wait.logged = True
        seconds, known = f"{wait.seconds():.0f} s", whom() or "another rank, which is not known"
        wait.is_for(known)
        logger.warning("gradcomp: rank %d waits %s in %s for %s", rank, seconds, wait.what, known)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 1, 3"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def name_waiting(others: Sequence[int], waits: Mapping[int, str]) -> str:
    """Describe which of the `others` a wait is for, when those in `waits` wait, too."""
    away = [other for other in others if other not in waits]
    if away:
        return f"{name_ranks(away)}, not waiting for any rank"
    return "ranks that wait, too: " + ", ".join(f"{other} in {waits[other]}" for other in others)


def is_because_of(what: str, reason: str) -> bool:
    """Return whether `reason`, for which a rank gives up, may be the loss that `what` describes."""
    return not reason or what[:SAME_LENGTH] in reason


def given_up_on(rank: int, what: str) -> tuple[None, str]:
    """Return the note for `rank` itself when others gave up because of it: no rank is lost."""
    return None, f"other ranks gave up on this one: rank {rank} {what}"


def gave_up(reason: str) -> str:
    """Return the description of a rank that gave up, which need not be the rank that failed."""
    return f"gave up because of {reason}" if reason else "gave up"


def report_gone(gone: Collection[int], reported: set[int], source: int | None) -> None:
    """Raise RankGone for `source`, or (None) once for each rank in `gone`, kept in `reported`."""
    if source is not None:
        if source in gone:
            raise RankGone(source)
    elif news := set(gone) - reported:
        reported.add(min(news))
        raise RankGone(min(news))


def no_message(source: int | None) -> TimeoutError:
    """Return the error that `Communicator.receive` raises after its timeout."""
    return TimeoutError(f"no message from {'any rank' if source is None else f'rank {source}'}")


def too_long(sender: int, nbytes: int, max_nbytes: int) -> ValueError:
    """Return the error that `Communicator.receive` raises for a message above its limit."""
    return ValueError(f"rank {sender} sent {nbytes} bytes, at most {max_nbytes} expected")


class Work(ABC):
    """Handle of a collective or a message that has been started."""

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Wait until the collective or message is complete and its buffers may be used.

        Raises:
            TimeoutError: not complete after `timeout_s` seconds.
            ConnectionError: a peer is gone.
        """

    def is_done(self) -> bool:
        """Return whether `wait` would return or raise immediately. Does not block."""
        raise NotImplementedError(f"{type(self).__name__} cannot tell")


class Communicator(ABC):
    """A fixed set of ranks that exchange bytes.

    Buffers are contiguous CPU tensors that do not overlap (MPICH rejects some that do). The caller
    must not read or write them until `Work.wait` returns.
    Every rank must start the same collectives in the same order on each channel.

    To add a transport, subclass this, set the attributes below, and define `_start_max`,
    `_start_all_to_all`, `_start_all_gather` and `close`. The public ``start_...`` methods check
    that the channel is not claimed by another user, then call these. Hierarchical exchanges, the
    parameter server, and errors that name a rank also need `subset`, `start_send`, `receive`,
    `abort` and `Work.is_done`. Add a row to the `over` fixture of tests/conftest.py to run
    tests/comm/test_transports.py over the transport.

    Attributes:
        rank: rank of this process in the set.
        world_size: number of ranks in the set.
        timeout_s: default timeout of a wait for a peer, in seconds.
    """

    rank: int
    world_size: int
    timeout_s: float = 300.0
    _held: weakref.ref[Lease] | None = None  # the lease that has claimed the exchange channels

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
        """Start an all_reduce of `values`, ``(n,)`` int32, in place, with the elementwise maximum.

        Raises:
            GradcompError: another user has claimed the channel.
        """
        self._check_claim(channel)
        return self._start_max(values, channel)

    def start_all_to_all(
        self, send: Tensor, send_nbytes: Counts, recv: Tensor, recv_nbytes: Counts, channel: Channel
    ) -> Work:
        """Start an all_to_all of consecutive slices of `send` into `recv`, both flat and uint8.

        Slice k of `send` has ``send_nbytes[k]`` bytes and is sent to rank k. Slice k of `recv` has
        ``recv_nbytes[k]`` bytes and is received from rank k. Raises GradcompError as `start_max`.
        """
        self._check_claim(channel)
        return self._start_all_to_all(send, send_nbytes, recv, recv_nbytes, channel)

    def start_all_gather(self, send: Tensor, recv: Tensor, channel: Channel) -> Work:
        """Start an all_gather of `send`, ``(n,)`` uint8, into `recv`, ``(world_size * n,)`` uint8.

        Raises GradcompError as `start_max`.
        """
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
        """Return the `data` of every rank, in rank order. Collective; lengths must be equal.

        Raises:
            TimeoutError, ConnectionError: as `Work.wait`.
        """
        send = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        recv = torch.empty(self.world_size * len(data), dtype=torch.uint8, device="cpu")
        self.start_all_gather(send, recv, channel).wait(timeout_s)
        whole = recv.numpy().tobytes()
        return [whole[i : i + len(data)] for i in range(0, len(whole), len(data))]

    def identity(self, timeout_s: float) -> bytes:
        """Return 16 bytes, equal on the ranks of this communicator only. Collective at first.

        Raises:
            TimeoutError, ConnectionError: as `Work.wait`.
        """
        if "identity" not in self.kept:
            drawn = self.all_gather_bytes(secrets.token_bytes(16), timeout_s)
            self.kept["identity"] = hashlib.blake2b(b"".join(drawn), digest_size=16).digest()
        return bytes(self.kept["identity"])

    # ---- users -----------------------------------------------------------------------------------

    def lease(self, user: str) -> Lease:
        """Return a `Lease`, with which `user` can claim the exchange channels."""
        return Lease(self, user)

    def _holder(self) -> Lease | None:
        return self._held() if self._held is not None else None

    def _check_claim(self, channel: Channel, user: Lease | None = None) -> None:
        """Raise GradcompError if a user other than `user` has claimed `channel`."""
        holder = self._holder()
        if holder not in (None, user) and channel is not Channel.CONTROL:
            raise holder.refuse("a collective")

    def check_overlap(self) -> None:
        """Raise RuntimeError if this rank cannot start collectives from several threads."""

    @property
    def kept(self) -> dict[Any, Any]:
        """Dictionary in which callers store their own state: buffers, step counters."""
        return self.__dict__.setdefault("_kept", {})  # type: ignore[no-any-return]

    # ---- other communicators ---------------------------------------------------------------------

    def subset(self, ranks: Sequence[int], timeout_s: float) -> Communicator:
        """Return a communicator of `ranks`, in that order. Collective over `ranks`.

        `timeout_s` is the timeout of the setup and of later waits, in seconds.
        """
        raise NotImplementedError(f"{type(self).__name__} makes no communicators of fewer ranks")

    def node_subset(self, ranks: Sequence[int], timeout_s: float) -> Communicator:
        """Return a communicator of `ranks`, which share a host; otherwise as `subset`."""
        return self.subset(ranks, timeout_s)

    def duplicate(self, timeout_s: float | None = None) -> Communicator:
        """Return another communicator of the same ranks with separate channels. Collective.

        Args:
            timeout_s: timeout of the setup and of later waits, in seconds; None: that of this
                communicator.
        """
        seconds = self.timeout_s if timeout_s is None else timeout_s
        return self.subset(range(self.world_size), seconds)

    # ---- messages --------------------------------------------------------------------------------

    def check_peer(self, to: int) -> None:
        """Raise ValueError unless `to` is another rank."""
        if not 0 <= to < self.world_size or to == self.rank:
            raise ValueError(f"rank {self.rank} of {self.world_size} cannot send to rank {to}")

    def start_send(self, message: Tensor, to: int) -> Work:
        """Start to send `message`, ``(n,)`` uint8, to rank `to`. Messages to a rank stay in order.

        Raises:
            ValueError: `to` is this rank or does not exist.
            RankGone: rank `to` is known to be gone.
        """
        raise NotImplementedError(f"{type(self).__name__} sends no messages from rank to rank")

    def receive(self, timeout_s: float, source: int | None = None, *, max_nbytes: int) -> Message:
        """Wait for a message from rank `source` (None: any rank), and return (rank of the sender,
        message, ``(n,)`` uint8).

        Raises:
            TimeoutError: no message after `timeout_s` seconds; a later call may still receive it.
            RankGone: `source` is gone. With ``source=None``, raised once for each rank that is
                gone; messages from other ranks can still be received.
            ValueError: the message has more than `max_nbytes` bytes and was dropped.
        """
        raise NotImplementedError(f"{type(self).__name__} sends no messages from rank to rank")

    def abort(self, reason: str = "") -> None:
        """Notify peers that this rank has given up because of `reason`, if the transport can."""

    def find_lost(self) -> ConnectionError | None:
        """After a failure of something else between these ranks, look for the rank that was lost;
        None if it is not known. Takes at most a few seconds.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Release the resources of the communicator. A second call has no effect."""


_leases = threading.Lock()


def _same(method: str) -> Any:
    """Return a method that calls the communicator's method of that name."""
    return lambda self, *args, **named: getattr(self._comm, method)(*args, **named)


class Lease(Communicator):
    """A communicator for one user, which claims the exchange channels before a step and releases
    them after it.

    While the channels are claimed, no other user can claim them or start a collective on them, and
    their user must start its collectives through the lease. A lease can be claimed and released
    repeatedly; ``with comm.lease("user") as lease:`` does so once. A lease that is garbage
    collected releases its claim.

    Args:
        comm: the wrapped communicator. `close` and `abort` of the lease close and abort it.
        user: name of the user, for the error that other users get.
    """

    def __init__(self, comm: Communicator, user: str) -> None:
        self._comm, self.user = comm, user
        self.rank, self.world_size, self.timeout_s = comm.rank, comm.world_size, comm.timeout_s

    def claim(self) -> None:
        """Claim the exchange channels; no effect if this lease has already claimed them.

        Raises:
            GradcompError: another user has claimed them.
        """
        with _leases:
            holder = self._comm._holder()
            if holder is None:
                self._comm._held = weakref.ref(self)
            elif holder is not self:
                raise holder.refuse(self.user)

    def release(self) -> None:
        """Release the exchange channels; no effect if this lease has not claimed them."""
        with _leases:
            if self._comm._holder() is self:
                self._comm._held = None

    def refuse(self, other: str) -> GradcompError:
        """Return the error for a user `other` that tries to use the claimed channels."""
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
    find_lost = _same("find_lost")
