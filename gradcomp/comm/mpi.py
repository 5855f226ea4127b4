"""MPI as a communicator (mpi4py buffer calls): one duplicated communicator a channel, never a blocking call.

Waits poll, so that a silent peer ends in an error and not in a hang: first spinning, since an answer over shared memory is
near, then sleeping, since peers may need the core. A rank that gives up says so on a channel of its own, which every wait
looks at. A closed communicator's channels are kept (as an attribute of the MPI communicator they were made from) for the
next one: freeing them is collective, and ranks may close in different orders.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradcomp.comm.base import Channel, Communicator, RankGone, Work
from gradcomp.errors import PeerLost

logger = logging.getLogger("gradcomp")
T = TypeVar("T")

SPIN_S = 0.0005  # poll without sleeping for so long
MAX_PAUSE_S = 0.0002  # longest sleep between two polls: large messages move on only while somebody polls
NEWS_EVERY_S = 0.005  # how often a wait looks whether a peer has given up
GRACE_S = 0.5  # what a peer sent before it gave up may still arrive
LEAVE_S = 30.0  # at the end of a program that lost a peer, longest wait for the others to end as well


def _mpi() -> Any:
    """Return mpi4py's MPI module; the first import initialises MPI."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ImportError("MpiCommunicator needs mpi4py: pip install 'gradcomp[mpi]'") from error
    except RuntimeError as error:
        raise RuntimeError(f"mpi4py found no MPI library ({error}): pip install 'gradcomp[mpi]'") from error
    return MPI


def describe_mpi() -> str:
    """Return library and thread level of the MPI here; initialises MPI.

    Raises:
        ImportError: mpi4py is not installed.
        RuntimeError: it finds no MPI library.
    """
    mpi = _mpi()
    levels = {getattr(mpi, f"THREAD_{n}"): n for n in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")}
    library = " ".join(mpi.Get_library_version().split("\n")[0].split(",")[0].split())
    return f"{library}, THREAD_{levels[mpi.Query_thread()]}"


# ---- who may call MPI ----------------------------------------------------------------------------------------------

_one_thread: ThreadPoolExecutor | None = None
_one_thread_lock = threading.Lock()


def _call_directly(function: Callable[[], T]) -> T:
    return function()


def _call_on_one_thread(function: Callable[[], T]) -> T:
    global _one_thread
    with _one_thread_lock:
        if _one_thread is None:
            _one_thread = ThreadPoolExecutor(1, thread_name_prefix="gradcomp-mpi")
    return _one_thread.submit(function).result()


def _call_on_main_thread(function: Callable[[], T]) -> T:
    if not _mpi().Is_thread_main():
        raise RuntimeError(
            "MPI was initialised for calls from the main thread only, which overlapped exchanges cannot keep to: set "
            "mpi4py.rc.thread_level = 'serialized' (or 'multiple') before mpi4py.MPI is imported"
        )
    return function()


def _caller(mpi: Any) -> Callable[[Callable[[], T]], T]:
    """Return how MPI may be called: from any thread, from one of ours, or from the main one."""
    level = mpi.Query_thread()
    if level == mpi.THREAD_MULTIPLE:
        return _call_directly
    return _call_on_one_thread if level == mpi.THREAD_SERIALIZED else _call_on_main_thread


# ---- lanes -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Lanes:
    """The duplicated communicators of one `MpiCommunicator`, and what is known of its peers."""

    by_channel: dict[Channel, Any]
    point: Any  # messages from rank to rank
    news: Any  # "I give up"
    serial: int  # number of its making, the same on every rank
    gone: set[int] = field(default_factory=set)
    broken: bool = False
    said: list[Any] = field(default_factory=list)


@dataclass(eq=False)
class _Parent:
    """What is kept with an MPI communicator: lanes that are free, and how many were made."""

    free: list[_Lanes] = field(default_factory=list)
    made: int = 0
    subsets: dict[tuple[int, ...], Any] = field(default_factory=dict)
    spoiled: bool = False  # some rank did not take part in making lanes: what it does now would match the wrong call


_keyval: int | None = None
_lock = threading.Lock()


def _kept_with(mpi: Any, comm: Any) -> _Parent:
    global _keyval
    if _keyval is None:
        _keyval = mpi.Comm.Create_keyval()
    parent = comm.Get_attr(_keyval)
    if parent is None:
        parent = _Parent()
        comm.Set_attr(_keyval, parent)
    return parent  # type: ignore[no-any-return]


class _Pause:
    """Spins for a while, then sleeps ever longer."""

    def __init__(self) -> None:
        self._spin_until = time.monotonic() + SPIN_S
        self._sleep_s = 0.00002

    def __call__(self) -> None:
        if time.monotonic() < self._spin_until:
            os.sched_yield()
        else:
            time.sleep(self._sleep_s)
            self._sleep_s = min(2 * self._sleep_s, MAX_PAUSE_S)


def _make_lanes(mpi: Any, comm: Any, timeout_s: float, call: Callable[[Callable[[], Any]], Any]) -> _Lanes:
    """Duplicate `comm` (a collective call) for every channel."""
    begun, parent = time.monotonic(), _kept_with(mpi, comm)
    if parent.spoiled:
        raise PeerLost("setup", -1, 0.0, "an earlier MpiCommunicator here was not made on every rank")
    copies = call(lambda: [comm.Idup() for _ in range(len(Channel) + 2)])
    pause = _Pause()
    requests = [request for _, request in copies]
    while not call(lambda: mpi.Request.Testall(requests)):
        if time.monotonic() - begun > timeout_s:
            _unanswered.append(copies)
            parent.spoiled = True
            raise PeerLost("setup", -1, time.monotonic() - begun, "not every rank made its MpiCommunicator")
        pause()
    comms = [copy for copy, _ in copies]
    for copy in comms:
        copy.Set_errhandler(mpi.ERRORS_RETURN)
    parent.made += 1
    return _Lanes(dict(zip(Channel, comms, strict=False)), comms[-2], comms[-1], parent.made)


# ---- the end of a program that lost a peer ---------------------------------------------------------------------------

_unanswered: list[Any] = []  # what no peer will complete, with its buffers: MPI may use them until the process ends


@atexit.register
def _leave() -> None:
    """End the job instead of waiting in MPI_Finalize for a peer that will not come, once the others end too."""
    if not _unanswered:
        return
    mpi = _mpi()
    if mpi.Is_finalized():
        return
    deadline, pause, barrier = time.monotonic() + LEAVE_S, _Pause(), mpi.COMM_WORLD.Ibarrier()
    while not barrier.Test() and time.monotonic() < deadline:
        pause()
    mpi.COMM_WORLD.Abort(1)


# ---- the communicator ----------------------------------------------------------------------------------------------


class _MpiWork(Work):
    """A request; `peer` is the one rank it depends on, None where it depends on all."""

    def __init__(self, owner: MpiCommunicator, request: Any, buffers: tuple[Tensor, ...], peer: int | None) -> None:
        self._owner, self._request, self._peer = owner, request, peer
        self._buffers = buffers  # MPI reads and writes them until the request is complete

    def is_done(self) -> bool:
        return bool(self._owner._call(self._request.Test))

    def wait(self, timeout_s: float) -> None:
        try:
            self._owner._poll(self._request.Test, timeout_s, self._peer)
        except (TimeoutError, ConnectionError) as error:
            _unanswered.append((self._request, self._buffers))
            if self._peer is None:
                self._owner._lose(error)
            raise


class MpiCommunicator(Communicator):
    """The ranks of an MPI communicator, over duplicates of it.

    Making one is a collective call of all ranks of `comm`. MPI is called from any thread under THREAD_MULTIPLE, from one
    thread under THREAD_SERIALIZED (then call no MPI of your own during a backward pass), and otherwise from the main
    thread only: `gradcomp.all_reduce` works then, overlapped exchanges do not and say so.

    After a lost peer the process waits at its end up to 30 s for the other ranks to end, too, and then ends the job by
    MPI_Abort instead of waiting in MPI_Finalize for ever.

    Args:
        comm: an mpi4py intracommunicator; ``MPI.COMM_WORLD`` when None.
        timeout_s: seconds to wait for the other ranks to make theirs.
        abort: end the whole MPI job by MPI_Abort as soon as a peer is lost, after logging the error: for programs that
            cannot be left to run without this rank.

    Raises:
        ImportError: mpi4py is not installed.
        RuntimeError: mpi4py finds no MPI library.
        TypeError: `comm` is not an intracommunicator of mpi4py.
        PeerLost: another rank did not make its communicator within `timeout_s`.
    """

    def __init__(self, comm: Any = None, *, timeout_s: float = 300.0, abort: bool = False) -> None:
        self._mpi = mpi = _mpi()
        parent = mpi.COMM_WORLD if comm is None else comm
        if not isinstance(parent, mpi.Intracomm) or parent == mpi.COMM_NULL:
            raise TypeError(f"comm must be an mpi4py intracommunicator that this rank belongs to, got {comm!r}")
        self.rank, self.world_size = parent.Get_rank(), parent.Get_size()
        self._call = _caller(mpi)
        self._abort_job = abort
        self._parent = parent
        self._told: set[int] = set()  # ranks whose end `receive` has reported
        with _lock:
            free = _kept_with(mpi, parent).free
            lanes = min(free, key=lambda lanes: lanes.serial) if free else None
            if lanes is not None:
                free.remove(lanes)
        self._lanes: _Lanes | None = lanes or _make_lanes(mpi, parent, timeout_s, self._call)

    def start_max(self, values: Tensor, channel: Channel) -> Work:
        mpi, comm = self._mpi, self._open().by_channel[channel]
        room = [values.numpy(), mpi.INT32_T]
        return self._work(lambda: comm.Iallreduce(mpi.IN_PLACE, room, mpi.MAX), values)

    def start_all_to_all(
        self, send: Tensor, send_nbytes: Sequence[int], recv: Tensor, recv_nbytes: Sequence[int], channel: Channel
    ) -> Work:
        comm, byte = self._open().by_channel[channel], self._mpi.BYTE
        out, room = [send.numpy(), list(send_nbytes), byte], [recv.numpy(), list(recv_nbytes), byte]
        return self._work(lambda: comm.Ialltoallv(out, room), send, recv)

    def start_all_gather(self, send: Tensor, recv: Tensor, channel: Channel) -> Work:
        comm, byte = self._open().by_channel[channel], self._mpi.BYTE
        return self._work(lambda: comm.Iallgather([send.numpy(), byte], [recv.numpy(), byte]), send, recv)

    def subset(self, ranks: Sequence[int], timeout_s: float) -> MpiCommunicator:
        parent, made, members = self._parent, _kept_with(self._mpi, self._parent).subsets, tuple(ranks)
        if members not in made:
            group = parent.Get_group().Incl(members)
            made[members] = self._call(lambda: parent.Create_group(group, members[0]))
        return MpiCommunicator(made[members], timeout_s=timeout_s, abort=self._abort_job)

    def start_send(self, message: Tensor, to: int) -> Work:
        lanes = self._open()
        self._read_news(lanes)
        if to in lanes.gone:
            raise RankGone(to)
        return self._work(lambda: lanes.point.Isend([message.numpy(), self._mpi.BYTE], to), message, peer=to)

    def receive(self, timeout_s: float, source: int | None = None, *, max_nbytes: int) -> tuple[int, Tensor]:
        mpi, lanes, status = self._mpi, self._open(), self._mpi.Status()
        wanted = mpi.ANY_SOURCE if source is None else source
        deadline, pause, news_at = time.monotonic() + timeout_s, _Pause(), 0.0
        while True:
            found = self._call(lambda: lanes.point.Improbe(wanted, status=status))
            if found is not None:
                return status.Get_source(), self._take(found, status, max_nbytes, deadline)
            now = time.monotonic()
            if now >= news_at:
                news_at = now + NEWS_EVERY_S
                self._read_news(lanes)
                self._tell_gone(lanes, source)
            if now >= deadline:
                raise TimeoutError(f"no message from {'any rank' if source is None else f'rank {source}'}")
            pause()

    def abort(self) -> None:
        """Tell every peer that this rank takes part no more; their waits for it end within a second."""
        lanes = self._lanes
        if lanes is None or lanes.broken:
            return
        lanes.broken = True
        peers = [rank for rank in range(self.world_size) if rank != self.rank]
        lanes.said = self._call(lambda: [lanes.news.Isend([b"", self._mpi.BYTE], rank) for rank in peers])

    def close(self) -> None:
        """Give the channels back for the next communicator on the same MPI communicator."""
        lanes, self._lanes = self._lanes, None
        if lanes is not None and not lanes.broken and not lanes.gone:
            with _lock:
                _kept_with(self._mpi, self._parent).free.append(lanes)

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _open(self) -> _Lanes:
        if self._lanes is None:
            raise RuntimeError("this communicator is closed")
        return self._lanes

    def _work(self, start: Callable[[], Any], *buffers: Tensor, peer: int | None = None) -> Work:
        try:
            return _MpiWork(self, self._call(start), buffers, peer)
        except self._mpi.Exception as error:
            raise ConnectionError(str(error)) from error

    def _poll(self, test: Callable[[], Any], timeout_s: float, peer: int | None) -> None:
        """Return when `test` does not return False any more; end when `peer` (None: any rank) has given up."""
        deadline, pause, lanes = time.monotonic() + timeout_s, _Pause(), self._open()
        news_at, grace_until = time.monotonic() + NEWS_EVERY_S, None
        try:
            while not self._call(test):
                now = time.monotonic()
                if now >= deadline:
                    raise TimeoutError(f"no word from a peer for {timeout_s:g} s")
                if now >= news_at:
                    news_at = now + NEWS_EVERY_S
                    self._read_news(lanes)
                    gone = lanes.gone if peer is None else lanes.gone & {peer}
                    if gone or lanes.broken:
                        grace_until = grace_until or now + GRACE_S
                        if now >= grace_until:
                            raise RankGone(min(gone)) if gone else ConnectionError("this rank has given up")
                pause()
        except self._mpi.Exception as error:
            raise ConnectionError(str(error)) from error

    def _read_news(self, lanes: _Lanes) -> None:
        """Take note of the peers that have given up."""
        status = self._mpi.Status()
        while (found := self._call(lambda: lanes.news.Improbe(status=status))) is not None:
            self._call(lambda: found.Recv([bytearray(), self._mpi.BYTE]))
            lanes.gone.add(status.Get_source())

    def _tell_gone(self, lanes: _Lanes, source: int | None) -> None:
        if source is not None and source in lanes.gone:
            raise RankGone(source)
        news = lanes.gone - self._told if source is None else set()
        if news:
            self._told.add(min(news))
            raise RankGone(min(news))

    def _take(self, found: Any, status: Any, max_nbytes: int, deadline: float) -> Tensor:
        """Receive a message that has been matched."""
        nbytes, byte = status.Get_count(self._mpi.BYTE), self._mpi.BYTE
        message = torch.empty(nbytes, dtype=torch.uint8)  # also to drop it: truncating a matched one corrupts Open MPI
        request = self._call(lambda: found.Irecv([message.numpy(), byte]))
        _MpiWork(self, request, (message,), status.Get_source()).wait(max(GRACE_S, deadline - time.monotonic()))
        if nbytes > max_nbytes:
            raise ValueError(f"rank {status.Get_source()} sent {nbytes} bytes, at most {max_nbytes} expected")
        return message

    def _lose(self, error: Exception) -> None:
        """A wait has ended without its answer: nothing else on these channels can be relied on."""
        if self._abort_job:
            logger.critical("gradcomp: rank %d ends the MPI job: %s", self.rank, error)
            self._mpi.COMM_WORLD.Abort(1)
        self.abort()
