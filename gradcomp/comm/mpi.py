"""MPI as a communicator (mpi4py buffer calls): one duplicated communicator a channel, never a
blocking call.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
import zlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradcomp.comm.base import (
    Channel,
    Communicator,
    RankGone,
    Work,
    gave_up,
    no_message,
    tell_gone,
    too_long,
)
from gradcomp.comm.channels import (
    MAIN_THREAD_ONLY,
    Arriving,
    Channels,
    Pause,
    call_on_main_thread,
    caller,
    end_job,
    free_lock,
    give_back,
    kept_with,
    make_subset,
    read_news,
    take_channels,
    tell,
)
from gradcomp.errors import PeerLost, PeerMismatch

logger = logging.getLogger("gradcomp")

NEWS_EVERY_S = 0.005  # how often a wait looks whether a peer has given up
TAGS = 32767  # for messages; every MPI has one more
MEETING = TAGS  # the tag of "I am about to make this subset"
RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
GRACE_S = 0.5  # what a peer sent before it gave up may still arrive


def _mpi() -> Any:
    """Return mpi4py's MPI module; the first import initialises MPI."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ImportError("MpiCommunicator needs mpi4py: pip install 'gradcomp[mpi]'") from error
    except RuntimeError as error:
        raise RuntimeError(
            f"mpi4py found no MPI library ({error}): pip install 'gradcomp[mpi]'"
        ) from error
    return MPI


def load() -> Any:
    """Return mpi4py's MPI module where MPI sees all ranks that were started with this one;
    initialises MPI.

    Raises:
        ImportError, RuntimeError: there is no MPI here.
        ValueError: MPI sees this process alone, but something else has started it as one of
            several.
    """
    mpi = _mpi()
    _check_not_alone(mpi)
    return mpi


def describe_mpi() -> str:
    """Return library and thread level of the MPI here; initialises MPI.

    Raises:
        ImportError: mpi4py is not installed.
        RuntimeError: it finds no MPI library.
    """
    mpi = _mpi()
    levels = {
        getattr(mpi, f"THREAD_{n}"): n for n in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    }
    library = " ".join(mpi.Get_library_version().split("\n")[0].split(",")[0].split())
    return f"{library}, THREAD_{levels[mpi.Query_thread()]}"


def _check_not_alone(mpi: Any) -> None:
    """Raise ValueError where the process is one of several, and MPI knows nothing of the others."""
    if mpi.COMM_WORLD.Get_size() > 1:
        return
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


def _broke(error: BaseException) -> str:
    return (
        "MPI lost another rank (which one it does not say): read the output of the other ranks"
        f" [{error}]"
    )


class _MpiWork(Work):
    """A request; `peer` is the one rank it depends on, None where it is a collective."""

    def __init__(
        self,
        owner: MpiCommunicator,
        channels: Channels,
        request: Any,
        buffers: object,
        peer: int | None,
    ) -> None:
        self._owner, self._channels, self._request = owner, channels, request
        self._collective = peer is None
        self._peers: Collection[int] = range(owner.world_size) if peer is None else (peer,)
        # whoever forgets this work: MPI uses the buffers
        channels.pending[id(self._request)] = (request, buffers)

    def is_done(self) -> bool:
        try:
            return self._test()
        except self._owner._mpi.Exception:  # MPI has given the request up
            return True

    def _test(self) -> bool:
        done = bool(self._owner._call(self._request.Test))
        if done:
            self._channels.pending.pop(id(self._request), None)
        return done

    def wait(self, timeout_s: float) -> None:
        try:
            self._owner._poll(self._test, timeout_s, self._peers)
        except (TimeoutError, ConnectionError) as error:
            if self._collective:
                self._owner._lose(error)
            raise


class MpiCommunicator(Communicator):
    """The ranks of an MPI communicator, over duplicates of it.

    Making one is a collective call of all ranks of `comm`. MPI is called from any thread under
    THREAD_MULTIPLE, from one thread under THREAD_SERIALIZED (then call no MPI of your own during a
    backward pass), and otherwise from the main thread only: `gradcomp.all_reduce` works then,
    overlapped exchanges do not and say so.

    After a lost peer the process waits at its end up to 30 s for the other ranks to end, too, and
    then ends the job by MPI_Abort instead of waiting in MPI_Finalize for ever.

    Args:
        comm: an mpi4py intracommunicator; ``MPI.COMM_WORLD`` when None.
        timeout_s: seconds to wait for the other ranks to make theirs.
        abort: end the whole MPI job by MPI_Abort as soon as a peer is lost, after logging the
            error: for programs that cannot be left to run without this rank.

    Raises:
        ImportError: mpi4py is not installed.
        RuntimeError: mpi4py finds no MPI library.
        TypeError: `comm` is not an intracommunicator of mpi4py.
        ValueError: MPI sees this process alone, but something else has started it as one of several
            (torchrun, or the mpirun of another MPI): every rank would train by itself.
        PeerLost: another rank did not make its communicator within `timeout_s`.
    """

    def __init__(self, comm: Any = None, *, timeout_s: float = 300.0, abort: bool = False) -> None:
        self._mpi = mpi = _mpi()
        parent = mpi.COMM_WORLD if comm is None else comm
        if not isinstance(parent, mpi.Intracomm) or parent == mpi.COMM_NULL:
            raise TypeError(
                f"comm must be an mpi4py intracommunicator that this rank belongs to, got {comm!r}"
            )
        if parent == mpi.COMM_WORLD:
            _check_not_alone(mpi)
        self.rank, self.world_size = parent.Get_rank(), parent.Get_size()
        self._call = caller(mpi)
        self._abort_job = abort
        self._parent = parent
        self._told: set[int] = set()  # ranks whose end `receive` has reported
        self.timeout_s = timeout_s
        self._channels: Channels | None = take_channels(mpi, parent, timeout_s, self._call)
        # a finalizer runs at any time, so it calls no MPI and takes no lock
        dropped = kept_with(mpi, parent).dropped
        self._dropped = weakref.finalize(self, dropped.append, self._channels)
        self._dropped.atexit = False

    def check_overlap(self) -> None:
        if self._call is call_on_main_thread:
            raise RuntimeError(MAIN_THREAD_ONLY)

    def start_max(self, values: Tensor, channel: Channel) -> Work:
        mpi, comm = self._mpi, self._open().by_channel[channel]
        room = [values.numpy(), mpi.INT32_T]
        return self._work(lambda: comm.Iallreduce(mpi.IN_PLACE, room, mpi.MAX), values)

    def start_all_to_all(
        self,
        send: Tensor,
        send_nbytes: Sequence[int],
        recv: Tensor,
        recv_nbytes: Sequence[int],
        channel: Channel,
    ) -> Work:
        comm, byte = self._open().by_channel[channel], self._mpi.BYTE
        out, room = [send.numpy(), list(send_nbytes), byte], [recv.numpy(), list(recv_nbytes), byte]
        return self._work(lambda: comm.Ialltoallv(out, room), send, recv)

    def start_all_gather(self, send: Tensor, recv: Tensor, channel: Channel) -> Work:
        comm, byte = self._open().by_channel[channel], self._mpi.BYTE
        return self._work(
            lambda: comm.Iallgather([send.numpy(), byte], [recv.numpy(), byte]), send, recv
        )

    def subset(self, ranks: Sequence[int], timeout_s: float) -> MpiCommunicator:
        made, members = kept_with(self._mpi, self._parent).subsets, tuple(ranks)
        if members not in made:
            self._meet(members, timeout_s)
            made[members] = make_subset(self._mpi, self._parent, members, timeout_s, self._call)
        return MpiCommunicator(made[members], timeout_s=timeout_s, abort=self._abort_job)

    def start_send(self, message: Tensor, to: int) -> Work:
        self.check_peer(to)
        channels = self._open()
        read_news(self._mpi, channels, self._call)
        if to in channels.gone:
            raise RankGone(to)
        return self._work(
            lambda: channels.point.Isend(
                [message.numpy(), self._mpi.BYTE], to, channels.uses % TAGS
            ),
            message,
            peer=to,
        )

    def receive(
        self, timeout_s: float, source: int | None = None, *, max_nbytes: int
    ) -> tuple[int, Tensor]:
        channels = self._open()
        deadline, pause, news_at = time.monotonic() + timeout_s, Pause(), 0.0
        while True:
            now = time.monotonic()
            news = now >= news_at
            # before messages are looked at: what a rank has sent before it went is received first
            if news:
                news_at = now + NEWS_EVERY_S
                read_news(self._mpi, channels, self._call)
            self._match(channels)
            found = self._arrived(channels, source)
            if found is not None:
                if found.message.numel() > max_nbytes:
                    raise too_long(found.sender, found.message.numel(), max_nbytes)
                return found.sender, found.message
            if news:
                tell_gone(channels.gone, self._told, source)
            if now >= deadline:  # what is on its way goes on arriving, for a later call
                raise no_message(source)
            pause()

    def duplicate(self, timeout_s: float | None = None) -> MpiCommunicator:
        seconds = self.timeout_s if timeout_s is None else timeout_s
        return MpiCommunicator(self._parent, timeout_s=seconds, abort=self._abort_job)

    def abort(self, reason: str = "") -> None:
        """Tell every peer that this rank takes part no more, and why; their waits for it end
        within a second.
        """
        channels = self._channels
        if channels is None or channels.broken:
            return
        channels.broken = True
        if self._mpi.Is_finalized():
            return
        culprit, why = next(iter(channels.gone.values()), (self.rank, reason))
        self._call(lambda: tell(self._mpi, channels, culprit, why))

    def close(self) -> None:
        """Give the channels back for the next communicator on the same MPI communicator."""
        channels, self._channels = self._channels, None
        if channels is None:
            return
        self._dropped.detach()
        if not self._mpi.Is_finalized():
            with free_lock:
                give_back(kept_with(self._mpi, self._parent), channels, self._call)

    # ---- parts -----------------------------------------------------------------------------------

    def _open(self) -> Channels:
        if self._channels is None:
            raise RuntimeError("this communicator is closed")
        return self._channels

    def _work(self, start: Callable[[], Any], *buffers: Tensor, peer: int | None = None) -> Work:
        try:
            return _MpiWork(self, self._open(), self._call(start), buffers, peer)
        except self._mpi.Exception as error:
            raise ConnectionError(_broke(error)) from error

    def _poll(self, test: Callable[[], Any], timeout_s: float, peers: Collection[int]) -> None:
        """Return when `test` does not return False any more; end when one of `peers` has given
        up.
        """
        deadline, pause, channels = time.monotonic() + timeout_s, Pause(), self._open()
        news_at, grace_until = time.monotonic() + NEWS_EVERY_S, None
        try:
            while not test():
                now = time.monotonic()
                if now >= deadline:
                    raise TimeoutError(f"no word from a peer for {timeout_s:g} s")
                if now >= news_at:
                    news_at = now + NEWS_EVERY_S
                    read_news(self._mpi, channels, self._call)
                    gone = [news for rank, news in channels.gone.items() if rank in peers]
                    if gone or channels.broken:
                        grace_until = grace_until or now + GRACE_S
                        if now >= grace_until:
                            if not gone:
                                raise ConnectionError("this rank has given up")
                            raise RankGone(gone[0][0], what=gave_up(gone[0][1]))
                pause()
        except self._mpi.Exception as error:
            raise ConnectionError(_broke(error)) from error

    def _meet(self, members: Sequence[int], timeout_s: float) -> None:
        """Wait until every rank of `members` is about to make their communicator, which is a call
        that blocks.

        A rank whose patience ends says so to all (`abort`): one that comes later has its word from
        before, and this.
        """
        channels, begun = self._open(), time.monotonic()
        others = [rank for rank in members if rank != self.rank]
        mine = np.array([zlib.crc32(repr(tuple(members)).encode())], np.int64)
        theirs = np.zeros((len(others), 1), np.int64)
        point = channels.point
        sent = [self._call(lambda rank=rank: point.Isend(mine, rank, MEETING)) for rank in others]  # type: ignore[misc]
        channels.said += [mine, *sent]
        waiting = {
            rank: self._call(lambda rank=rank, room=room: point.Irecv(room, rank, MEETING))  # type: ignore[misc]
            for rank, room in zip(others, theirs, strict=True)
        }
        try:
            self._poll(
                lambda: self._call(lambda: self._mpi.Request.Testall([*waiting.values()])),
                timeout_s,
                others,
            )
            read_news(self._mpi, channels, self._call)
            if gone := set(others) & set(channels.gone):
                raise RankGone(min(gone))
        except (TimeoutError, ConnectionError) as error:
            missing = [rank for rank, request in waiting.items() if not self._call(request.Test)]
            for rank in missing:
                self._call(waiting[rank].Cancel)
                self._call(waiting[rank].Wait)
            self.abort(str(error))
            told = f"ranks {missing} of {list(members)} did not make their communicator ({error})"
            raise PeerLost("setup", -1, time.monotonic() - begun, told) from error
        for rank, word in zip(others, theirs, strict=True):
            if word != mine:
                self.abort()
                raise PeerMismatch("subset", rank, list(members), "a communicator of other ranks")

    def _match(self, channels: Channels) -> None:
        """Begin to receive what peers have sent. A message that is too long comes as well:
        truncating one that has been matched corrupts Open MPI's memory.
        """
        status, byte = self._mpi.Status(), self._mpi.BYTE
        any_source, tag = self._mpi.ANY_SOURCE, channels.uses % TAGS
        while (
            found := self._call(lambda: channels.point.Improbe(any_source, tag, status))
        ) is not None:
            message = torch.empty(status.Get_count(byte), dtype=torch.uint8)
            request = self._call(
                lambda found=found, message=message: found.Irecv(  # type: ignore[misc]
                    [message.numpy(), byte]
                )
            )
            channels.arriving.append(Arriving(status.Get_source(), message, request))

    def _arrived(self, channels: Channels, source: int | None) -> Arriving | None:
        """Return the first message that is here, in the order in which each rank sent its own."""
        waiting: set[int] = set()
        for found in channels.arriving:
            found.done = found.done or bool(self._call(found.request.Test))
            if found.done and found.sender not in waiting and source in (None, found.sender):
                channels.arriving.remove(found)
                return found
            waiting.add(found.sender)
        return None

    def _lose(self, error: Exception) -> None:
        """A wait has ended without its answer: nothing else on these channels can be relied on."""
        if self._abort_job:
            logger.critical("gradcomp: rank %d ends the MPI job: %s", self.rank, error)
            end_job(self._mpi)
        self.abort(str(error))
