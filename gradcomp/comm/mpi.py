"""MPI as a communicator (mpi4py buffer calls): one duplicated communicator a channel, never a blocking call."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradcomp.comm.base import Channel, Communicator, RankGone, Work
from gradcomp.comm.lanes import (
    MAIN_THREAD_ONLY,
    Lanes,
    Pause,
    call_on_main_thread,
    caller,
    end_job,
    free_lock,
    kept_with,
    read_news,
    take_lanes,
    unanswered,
)

logger = logging.getLogger("gradcomp")

NEWS_EVERY_S = 0.005  # how often a wait looks whether a peer has given up
GRACE_S = 0.5  # what a peer sent before it gave up may still arrive


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
            unanswered.append((self._request, self._buffers))
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
        self._call = caller(mpi)
        self._abort_job = abort
        self._parent = parent
        self._told: set[int] = set()  # ranks whose end `receive` has reported
        self._lanes: Lanes | None = take_lanes(mpi, parent, timeout_s, self._call)

    def check_overlap(self) -> None:
        if self._call is call_on_main_thread:
            raise RuntimeError(MAIN_THREAD_ONLY)

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
        parent, made, members = self._parent, kept_with(self._mpi, self._parent).subsets, tuple(ranks)
        if members not in made:
            group = parent.Get_group().Incl(members)
            made[members] = self._call(lambda: parent.Create_group(group, members[0]))
        return MpiCommunicator(made[members], timeout_s=timeout_s, abort=self._abort_job)

    def start_send(self, message: Tensor, to: int) -> Work:
        lanes = self._open()
        read_news(self._mpi, lanes, self._call)
        if to in lanes.gone:
            raise RankGone(to)
        return self._work(lambda: lanes.point.Isend([message.numpy(), self._mpi.BYTE], to), message, peer=to)

    def receive(self, timeout_s: float, source: int | None = None, *, max_nbytes: int) -> tuple[int, Tensor]:
        mpi, lanes, status = self._mpi, self._open(), self._mpi.Status()
        wanted = mpi.ANY_SOURCE if source is None else source
        deadline, pause, news_at = time.monotonic() + timeout_s, Pause(), 0.0
        while True:
            found = self._call(lambda: lanes.point.Improbe(wanted, status=status))
            if found is not None:
                return status.Get_source(), self._take(found, status, max_nbytes, deadline)
            now = time.monotonic()
            if now >= news_at:
                news_at = now + NEWS_EVERY_S
                read_news(self._mpi, lanes, self._call)
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
        culprit = np.array([next(iter(lanes.gone.values()), self.rank)], np.int32)
        lanes.said = [culprit, *self._call(lambda: [lanes.news.Isend(culprit, rank) for rank in peers])]

    def close(self) -> None:
        """Give the channels back for the next communicator on the same MPI communicator."""
        lanes, self._lanes = self._lanes, None
        if lanes is not None and not lanes.broken and not lanes.gone:
            with free_lock:
                kept_with(self._mpi, self._parent).free.append(lanes)

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _open(self) -> Lanes:
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
        deadline, pause, lanes = time.monotonic() + timeout_s, Pause(), self._open()
        news_at, grace_until = time.monotonic() + NEWS_EVERY_S, None
        try:
            while not self._call(test):
                now = time.monotonic()
                if now >= deadline:
                    raise TimeoutError(f"no word from a peer for {timeout_s:g} s")
                if now >= news_at:
                    news_at = now + NEWS_EVERY_S
                    read_news(self._mpi, lanes, self._call)
                    gone = [culprit for rank, culprit in lanes.gone.items() if peer in (None, rank)]
                    if gone or lanes.broken:
                        grace_until = grace_until or now + GRACE_S
                        if now >= grace_until:
                            raise RankGone(gone[0]) if gone else ConnectionError("this rank has given up")
                pause()
        except self._mpi.Exception as error:
            raise ConnectionError(str(error)) from error

    def _tell_gone(self, lanes: Lanes, source: int | None) -> None:
        if source is not None and source in lanes.gone:
            raise RankGone(source)
        news = lanes.gone.keys() - self._told if source is None else set()
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
            end_job(self._mpi)
        self.abort()
