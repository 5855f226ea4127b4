"""A communicator over MPI (buffer calls of mpi4py), with one duplicated MPI communicator for each
channel and non-blocking calls only.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
import zlib
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from gradcomp.comm import base
from gradcomp.comm.base import Channel, Communicator, Counts, Message, RankGone, RankSilent, Work
from gradcomp.comm.mpi_channels import (
    MAIN_THREAD_ONLY,
    TAGS,
    UNKNOWN,
    Channels,
    Pause,
    call,
    end_job,
    kept_with,
    read_all_news,
    thread_level,
)
from gradcomp.comm.peers import describe, silent, this_process
from gradcomp.errors import PeerMismatch

logger = logging.getLogger("gradcomp")

NEWS_EVERY_S = 0.005  # interval at which a wait checks whether a peer has given up
MEETING = TAGS  # tag of the message that announces the creation of a subset
RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
GRACE_S = 0.5  # messages that a peer sent before it gave up may still arrive
NAMED_S = 1.5  # time in which a peer that waits elsewhere may name the lost rank


def _mpi() -> Any:
    """Return the MPI module of mpi4py. The first import initialises MPI."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ImportError("MpiCommunicator needs mpi4py: pip install 'gradcomp[mpi]'") from error
    except RuntimeError as error:
        what = f"mpi4py found no MPI library ({error})"
        raise RuntimeError(f"{what}: pip install 'gradcomp[mpi]'") from error
    return MPI


def load() -> Any:
    """Return mpi4py's MPI module; ValueError if it is alone where a launcher started several."""
    mpi = _mpi()
    if mpi.COMM_WORLD.Get_size() > 1:
        return mpi
    for rank, size in RANK_VARIABLES:
        count = os.environ.get(size, "")
        if os.environ.get(rank) and count.isdecimal() and int(count) > 1:
            raise ValueError(
                f"MPI sees this process alone (rank 0 of 1), but {rank}={os.environ[rank]} and"
                f" {size}={count}: it was started by torchrun, or by the mpirun of another MPI than"
                f" mpi4py's. Start the program with 'python -m gradcomp.launch -n {count} SCRIPT',"
                " or take gradcomp.comm.TorchCommunicator; a process that is meant to be alone"
                f" passes MPI.COMM_SELF or unsets {size}"
            )
    return mpi


def describe_mpi() -> str:
    """Return the name of the MPI library and its thread level. Initialises MPI, as `_mpi`."""
    mpi = _mpi()
    names = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    levels = {getattr(mpi, f"THREAD_{name}"): name for name in names}
    library = " ".join(mpi.Get_library_version().split("\n")[0].split(",")[0].split())
    return f"{library}, THREAD_{levels[mpi.Query_thread()]}"


def _broke(error: BaseException) -> ConnectionError:
    return ConnectionError(
        "MPI lost another rank (which one it does not say): read the output of the other ranks"
        f" [{error}]"
    )


class _MpiWork(Work):
    """An MPI request. `peer` is the rank it depends on; None for a collective."""

    def __init__(
        self, owner: MpiCommunicator, start: Callable[[], Any], buffers: object, peer: int | None
    ) -> None:
        self._owner, self._channels, self._peer = owner, owner._open(), peer
        try:
            self._request = call(start)
        except owner._mpi.Exception as error:
            raise _broke(error) from error
        # keeps the buffers alive for MPI, even if this object is garbage collected
        self._channels.pending[id(self._request)] = (self._request, buffers)

    def is_done(self) -> bool:
        try:
            return self._test()
        except self._owner._mpi.Exception:  # the request has failed
            return True

    def _test(self) -> bool:
        done = bool(call(self._request.Test))
        if done:
            self._channels.pending.pop(id(self._request), None)
        return done

    def wait(self, timeout_s: float) -> None:
        owner = self._owner
        peers = range(owner.world_size) if self._peer is None else (self._peer,)
        try:
            owner._poll(self._test, timeout_s, peers)
        except (TimeoutError, ConnectionError) as error:
            if self._peer is None:
                owner._lose(error)
            raise


class MpiCommunicator(Communicator):
    """A communicator of the ranks of an MPI communicator, over duplicates of it.

    The constructor is collective over the ranks of `comm`. With THREAD_MULTIPLE, gradcomp calls MPI
    from any thread. With THREAD_SERIALIZED, it calls MPI from one thread, and the program must not
    call MPI during a backward pass. With any lower level, it calls MPI from the main thread only:
    `gradcomp.all_reduce` works, and overlapped exchanges raise RuntimeError.

    If a peer was lost, the process waits up to 30 s at exit for the other ranks to exit, and then
    ends the job by MPI_Abort, because MPI_Finalize would wait forever.

    Args:
        comm: an mpi4py intracommunicator; None: ``MPI.COMM_WORLD``.
        timeout_s: timeout of the setup, and default timeout of a wait for a peer, in seconds, equal
            on every rank.
        abort: log the error and end the whole MPI job by MPI_Abort as soon as a peer is lost, for
            programs whose other ranks must not continue.

    Raises:
        ImportError: mpi4py is not installed.
        RuntimeError: mpi4py finds no MPI library.
        TypeError: `comm` is not an intracommunicator of mpi4py.
        ValueError: MPI has one process, but the environment has the ranks of another launcher
            (torchrun, or the mpirun of another MPI), so every rank would train alone.
        PeerLost: another rank did not create its communicator within `timeout_s`.
        PeerMismatch: ranks have different `timeout_s`.
    """

    def __init__(self, comm: Any = None, *, timeout_s: float = 300.0, abort: bool = False) -> None:
        self._mpi = mpi = _mpi()
        parent = mpi.COMM_WORLD if comm is None else comm
        if not isinstance(parent, mpi.Intracomm) or parent == mpi.COMM_NULL:
            wanted = "an mpi4py intracommunicator that this rank belongs to"
            raise TypeError(f"comm must be {wanted}, got {comm!r}")
        if parent == mpi.COMM_WORLD:
            load()
        self.rank, self.world_size, self.timeout_s = parent.Get_rank(), parent.Get_size(), timeout_s
        self._parent, self._abort_job = parent, abort
        self._reported: set[int] = set()  # ranks for which `receive` has raised RankGone
        kept = kept_with(parent)
        self._channels: Channels | None = kept.take_channels(parent, timeout_s)
        # a finalizer may run at any time, so it must not call MPI or take a lock
        self._dropped = weakref.finalize(self, kept.drop, self._channels)
        self._dropped.atexit = False

    def check_overlap(self) -> None:
        if thread_level() == "main":
            raise RuntimeError(MAIN_THREAD_ONLY)

    def _start_max(self, values: Tensor, channel: Channel) -> Work:
        recv = [values.numpy(), self._mpi.INT32_T]
        return self._start(channel, "Iallreduce", self._mpi.IN_PLACE, recv, self._mpi.MAX)

    def _start_all_to_all(
        self, send: Tensor, send_nbytes: Counts, recv: Tensor, recv_nbytes: Counts, channel: Channel
    ) -> Work:
        runs = ((send, send_nbytes), (recv, recv_nbytes))
        buffers = ([data.numpy(), list(counts), self._mpi.BYTE] for data, counts in runs)
        return self._start(channel, "Ialltoallv", *buffers)

    def _start_all_gather(self, send: Tensor, recv: Tensor, channel: Channel) -> Work:
        buffers = ([data.numpy(), self._mpi.BYTE] for data in (send, recv))
        return self._start(channel, "Iallgather", *buffers)

    def _start(self, channel: Channel, name: str, *args: object) -> Work:
        """Start the MPI collective `name`. `args` includes its buffers."""
        begin = getattr(self._open().by_channel[channel], name)
        return _MpiWork(self, partial(begin, *args), args, None)

    def subset(self, ranks: Sequence[int], timeout_s: float) -> MpiCommunicator:
        kept, members = kept_with(self._parent), tuple(ranks)
        if members not in kept.subsets:
            self._meet(members, timeout_s)
            kept.subsets[members] = kept.make_subset(self._parent, members, timeout_s)
        return MpiCommunicator(kept.subsets[members], timeout_s=timeout_s, abort=self._abort_job)

    def duplicate(self, timeout_s: float | None = None) -> MpiCommunicator:
        seconds = self.timeout_s if timeout_s is None else timeout_s
        return MpiCommunicator(self._parent, timeout_s=seconds, abort=self._abort_job)

    def start_send(self, message: Tensor, to: int) -> Work:
        self.check_peer(to)
        channels = self._open()
        channels.read_news()
        if to in channels.gone:
            raise RankGone(to)
        content = [message.numpy(), self._mpi.BYTE]
        start = partial(channels.point.Isend, content, to, channels.tag)
        return _MpiWork(self, start, message, to)

    def receive(self, timeout_s: float, source: int | None = None, *, max_nbytes: int) -> Message:
        channels = self._open()
        deadline, pause, news_at = time.monotonic() + timeout_s, Pause(), 0.0
        while True:
            now = time.monotonic()
            news = now >= news_at
            # read before `match`, so that messages sent by a rank before it gave up come first
            if news:
                news_at = now + NEWS_EVERY_S
                channels.read_news()
            channels.match()
            found = channels.arrived(source)
            if found is not None:
                if found.message.numel() > max_nbytes:
                    raise base.too_long(found.sender, found.message.numel(), max_nbytes)
                return found.sender, found.message
            if news:
                base.report_gone(channels.gone, self._reported, source)
            if now >= deadline:  # matched messages continue to arrive, for a later call
                raise base.no_message(source)
            pause()

    def abort(self, reason: str = "") -> None:
        """Notify every peer that this rank has given up; their waits end within a second."""
        channels = self._channels
        if channels is None or channels.broken:
            return
        channels.broken = True
        if self._mpi.Is_finalized():
            return
        own = channels.lost or (channels.number, f"{this_process()} {base.gave_up(reason)}")
        elsewhere = None if channels.lost else channels.lost_elsewhere(reason)
        if elsewhere is not None:
            own = elsewhere if elsewhere[0] is not None else (None, f"rank {own[0]} {own[1]}")
        lost, what = next(iter(channels.gone.copy().values()), own)
        call(lambda: channels.send_news(UNKNOWN if lost is None else lost, what))

    def close(self) -> None:
        """Release the channels for reuse by later communicators on the same MPI communicator."""
        channels, self._channels = self._channels, None
        if channels is None:
            return
        self._dropped.detach()
        if not self._mpi.Is_finalized():
            kept_with(self._parent).give_back(channels)

    # ---- parts -----------------------------------------------------------------------------------

    def _open(self) -> Channels:
        if self._channels is None:
            raise RuntimeError("this communicator is closed")
        return self._channels

    def _poll(self, test: Callable[[], Any], timeout_s: float, peers: Collection[int]) -> None:
        """Poll until `test` returns a true value; raise if one of `peers` has given up."""
        deadline, pause, channels = time.monotonic() + timeout_s, Pause(), self._open()
        news_at, grace_until = time.monotonic() + NEWS_EVERY_S, None
        try:
            while not test():
                now = time.monotonic()
                if now >= deadline:
                    raise self._late(timeout_s, peers)
                if now >= news_at:
                    news_at = now + NEWS_EVERY_S
                    base.log_wait(channels.number, self._whom)
                    read_all_news()
                    gone = [news for rank, news in channels.gone.copy().items() if rank in peers]
                    if gone or channels.broken:
                        grace_until = grace_until or now + GRACE_S
                        if now >= grace_until:
                            if not gone:
                                raise ConnectionError("this rank has given up")
                            raise base.lost_rank(*gone[0])
                pause()
        except self._mpi.Exception as error:
            lost = channels.lost = channels.find_lost()
            raise (RankGone(lost[0], what=lost[1]) if lost else _broke(error)) from error

    def _late(self, timeout_s: float, peers: Collection[int]) -> Exception:
        """Return the error for a wait for `peers` that has timed out."""
        channels = self._open()
        # a peer may have found the lost rank already; a peer that itself timed out is not blamed
        channels.read_news()
        if lost := self._named_lost(peers):
            return base.lost_rank(*lost)
        lost, numbers = channels.find_lost(), channels.numbers
        if lost is not None and lost[0] in [numbers[rank] for rank in peers]:
            channels.lost = lost
            return RankGone(lost[0], what=lost[1])
        late = TimeoutError(f"no answer from a peer for {timeout_s:g} s")
        if len(peers) > 1:
            waits, until = channels.who_waits(), time.monotonic() + NAMED_S
            known = {self.rank, *waits, *channels.gone, *channels.left}
            away = [rank for rank in peers if rank not in known]
            # a peer that waits on another communicator may name the rank for which it does
            while not away and not self._named_lost(peers) and time.monotonic() < until:
                read_all_news()
                time.sleep(NEWS_EVERY_S)
            if lost := self._named_lost(peers):
                return base.lost_rank(*lost)
            if len(away) == 1:
                late = RankSilent(numbers[away[0]], silent(channels.cards[away[0]], timeout_s))
            channels.lost = base.described(late)
        return late

    def _named_lost(self, peers: Collection[int]) -> tuple[int | None, str] | None:
        """Return the lost rank that one of `peers` has named, other than itself."""
        gone, numbers = self._open().gone.copy(), self._open().numbers
        named = (news for rank, news in gone.items() if rank in peers and news[0] != numbers[rank])
        return next(named, None)

    def _whom(self) -> str:
        channels = self._open()
        lost, numbers = channels.find_lost(), channels.numbers
        if lost is not None:
            return describe(lost)
        others = [number for number in numbers if number != channels.number]
        waits = {numbers[rank]: what for rank, what in channels.who_waits().items()}
        return base.name_waiting(others, waits)

    def _meet(self, members: Sequence[int], timeout_s: float) -> None:
        """Wait until every rank of `members` is about to create the subset, a call that blocks.

        After a timeout this rank notifies all others (`abort`), so a rank that arrives later finds
        both the announcement and the abort.
        """
        channels, begun = self._open(), time.monotonic()
        others = [rank for rank in members if rank != self.rank]
        mine = np.array([zlib.crc32(repr(tuple(members)).encode())], np.int64)
        theirs = np.zeros((len(others), 1), np.int64)
        point = channels.point
        sent = [call(partial(point.Isend, mine, rank, MEETING)) for rank in others]
        channels.sent += [mine, *sent]
        waiting = {
            rank: call(partial(point.Irecv, number, rank, MEETING))
            for rank, number in zip(others, theirs, strict=True)
        }
        everyone_is_here = partial(self._mpi.Request.Testall, [*waiting.values()])
        try:
            self._poll(lambda: call(everyone_is_here), timeout_s, others)
            # checked before the news, because a rank that finds a mismatch gives up
            for rank, number in zip(others, theirs, strict=True):
                if number != mine:
                    self.abort()
                    what = "a communicator of other ranks"
                    raise PeerMismatch("subset", rank, list(members), what)
            channels.read_news()
            if gone := set(others) & set(channels.gone):
                raise RankGone(min(gone))
        except (TimeoutError, ConnectionError) as error:
            missing = [rank for rank, request in waiting.items() if not call(request.Test)]
            for rank in missing:
                call(waiting[rank].Cancel)
                call(waiting[rank].Wait)
            self.abort(str(error))
            missing = [channels.numbers[rank] for rank in missing]
            named = [channels.numbers[rank] for rank in members]
            why = f"ranks {missing} of {named} did not make their communicator ({error})"
            lost = missing[0] if len(missing) == 1 else None
            raise base.lost_in_setup(begun, why, lost) from error

    def _lose(self, error: Exception) -> None:
        """Give up after a failed wait, since the state of these channels is now undefined."""
        if self._abort_job:
            logger.critical("gradcomp: rank %d ends the MPI job: %s", self.rank, error)
            end_job()
        self.abort(str(error))
